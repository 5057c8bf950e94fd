"""
How far the seqs of happenings have been given out, and how far their history was trimmed: the ledger's own part and commands.

No seq is ever given twice. Those of happenings in records are known from there. Those of plain emits are in no record, so the ledger writes
down a block of seqs as used before the first of them is delivered; one that ends in order writes down how many it really used.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final

import msgspec

from .commands import Command, CommandOutcome
from .state import LedgerState

SEQ_GAP: Final = 1_000_000
"""Seqs that are skipped when the log has lost records: more than anybody can have seen of what was lost."""


class FrozenMarks(msgspec.Struct, frozen=True):
    """The marks as a snapshot has them."""

    seq: int = 0
    told_seq: int = 0
    trimmed_through: int = 0
    epoch: str = ""


class Marks:
    """The ledger's marks; a part."""

    name: ClassVar[str] = "marks"
    frozen_type: ClassVar[type] = FrozenMarks

    def __init__(self) -> None:
        self.seq = 0
        """Seqs up to this one are used: no happening will have one of them again."""
        self.told_seq = 0
        """The highest seq of a happening in any record."""
        self.trimmed_through = 0
        """History up to this seq is no longer given out."""
        self.epoch = ""
        """The epoch of the log that the last records were written in."""

    def freeze(self) -> FrozenMarks:
        """The marks as they are."""
        return FrozenMarks(self.seq, self.told_seq, self.trimmed_through, self.epoch)

    def restore(self, frozen: FrozenMarks) -> None:
        """Become these."""
        self.seq, self.told_seq, self.trimmed_through, self.epoch = msgspec.structs.astuple(frozen)

    def note_told(self, seq: int) -> None:
        """A record has happenings up to this seq."""
        self.told_seq = max(self.told_seq, seq)
        self.seq = max(self.seq, seq)


class EmitHappenings(Command, frozen=True, kw_only=True, gc=False):
    """Tell happenings that follow from no command. Its record has no ``do``: they are all there is."""

    happenings: Any
    """A sequence of them. (``Any``, since a record never has this command, and readers of commands need not know of happenings.)"""

    def execute(self, state: LedgerState, at_ms: int) -> CommandOutcome:
        """Nothing changes."""
        return CommandOutcome(self.happenings, is_changed=bool(self.happenings))


class ReserveSeqs(Command, frozen=True, kw_only=True):
    """Write down that seqs up to ``through`` are used."""

    through: int

    def execute(self, state: LedgerState, at_ms: int) -> CommandOutcome:
        """Set the mark; back, too, when a ledger that is closed gives back what it did not use."""
        state.part(Marks).seq = self.through
        return CommandOutcome()


class TrimHistory(Command, frozen=True, kw_only=True):
    """No longer give out the history up to ``through``."""

    through: int

    def execute(self, state: LedgerState, at_ms: int) -> CommandOutcome:
        """Raise the mark; it never goes back."""
        marks = state.part(Marks)
        is_changed = self.through > marks.trimmed_through
        marks.trimmed_through = max(marks.trimmed_through, self.through)
        return CommandOutcome(is_changed=is_changed)


class BeginEpoch(Command, frozen=True, kw_only=True):
    """
    The log has begun a new epoch: at first, or because records were lost.

    Of lost happenings nobody knows the seqs any more. So a good many are skipped, and cursors from before are told that they are too old.
    """

    epoch: str
    seq: int

    def execute(self, state: LedgerState, at_ms: int) -> CommandOutcome:
        """Note it."""
        marks = state.part(Marks)
        marks.epoch, marks.seq, marks.trimmed_through = self.epoch, self.seq, max(self.seq, marks.trimmed_through)
        return CommandOutcome()
