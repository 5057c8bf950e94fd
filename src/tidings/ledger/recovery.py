"""
Recovery: the state from the newest snapshot that can be used, and the records after it.

Every command after the snapshot is executed again, by the version of the rules that decided it, and must tell what it told: a command that comes out differently stops recovery, since
nobody could say what is true then. The one exception is a log that was repaired. Records are missing from it, so what was done on top of them may no longer
be possible; such commands are passed over and reported, up to the record with which the ledger took note of the repair.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence

import msgspec

from tidings.core.errors import TidingsError
from tidings.happenings.happening import Happening
from tidings.log.interface import Log, Query
from tidings.log.reading import pages
from tidings.log.record import Record

from .errors import LedgerDiverged, LedgerError, LedgerIncomplete, MissingPart, SnapshotDamaged
from .marks import BeginEpoch, Marks
from .records import (
    LEDGER_TOPIC,
    CommandReader,
    StoredCommand,
    count_of,
    encode_happenings,
    execute_again,
    is_ours,
    name_of,
    read_record,
)
from .snapshots import KEPT, SnapshotHeader, SnapshotStore, header_of, restore
from .state import LedgerState, Part, collector_paused

logger = logging.getLogger(__name__)

PartMaker = Callable[[], Part]


class Recovered(msgspec.Struct):
    """The ledger's state as of its last record."""

    state: LedgerState
    next_offset: int = 0
    """The offset that the next record will have."""
    snapshot_offsets: tuple[int, ...] = ()
    """What the usable snapshots cover, newest first."""
    last_event_id: str = ""
    seq: int = 0
    """The highest seq that is used, as far as records and snapshots tell, even of a snapshot that is of no use otherwise."""
    untold: Sequence[Happening] = ()
    """Happenings of the last command that its records lack: a crash cut them off."""
    untold_seq: int = 0
    untold_of: int = 0
    """The seq of that command's first happening."""
    untold_at_ms: int = 0
    has_lost: bool = False
    """Records are gone that nothing covers."""
    event_ids: set[str] = msgspec.field(default_factory=set)
    """The ids of the records from ``ids_from`` on."""
    problems: list[str] = msgspec.field(default_factory=list)
    """Commands that a repaired log no longer allows."""


async def recover(
    log: Log,
    snapshots: SnapshotStore,
    makers: Sequence[PartMaker],
    commands: CommandReader,
    *,
    ids_from: int | None = None,
    accepts_loss: bool = False,
) -> Recovered:
    """
    Make the state again.

    Args:
        log: Where the records are.
        snapshots: Where snapshots are.
        makers: Each makes one part, empty.
        commands: Reads commands.
        ids_from: The ids of records from this offset on are wanted, if any are.
        accepts_loss: Whether to go on with what is left if records were dropped that no snapshot covers.

    Raises:
        LedgerIncomplete: Records were dropped that no snapshot covers.
        LedgerDiverged: A command comes out differently.
        UnknownCommand, MissingPart, InvalidRecord, SnapshotUnsupported: A newer version wrote it, one with other parts, or somebody else.
        LogError: The log cannot be read.
        OSError: The snapshots cannot.
    """
    found = await _from_snapshot(log, snapshots, makers, accepts_loss=accepts_loss)
    fold = _Fold(found, commands, log.position.epoch, ids_from)
    async for page in pages(log, Query(topic=LEDGER_TOPIC, from_offset=found.next_offset, until=log.position.seq)):
        for record in page.records:
            fold.apply(record)
    fold.finish()
    return found


async def _from_snapshot(
    log: Log, snapshots: SnapshotStore, makers: Sequence[PartMaker], *, accepts_loss: bool
) -> Recovered:
    """The newest snapshot that can be used; if there is none, the ledger as it was before its first record."""
    info = log.topic(LEDGER_TOPIC)
    first_offset, next_offset = (0, 0) if info is None else (info.first_offset, info.next_offset)
    found: Recovered | None = None
    usable: list[int] = []
    seq = 0
    for offset in await snapshots.run(snapshots.offsets):
        state = LedgerState(*(make() for make in makers))
        try:
            data = await snapshots.run(functools.partial(snapshots.load, offset))
            if found is None:
                header = await snapshots.run(functools.partial(_restore, offset, data, state.parts))
            else:
                header = header_of(offset, data)
            problem = await _why_foreign(log, header, first_offset, next_offset)
        except SnapshotDamaged as error:
            problem = error.problem
        except FileNotFoundError:
            # A snapshot that was still being saved when its ledger had to stop has taken its place: look again.
            return await _from_snapshot(log, snapshots, makers, accepts_loss=accepts_loss)
        if problem is not None:
            logger.warning("the ledger's snapshot at offset %d is not used: %s", offset, problem)
            seq = max(seq, state.part(Marks).seq)
            continue
        usable.append(offset)
        found = found or Recovered(state, offset + 1, last_event_id=header.event_id)
        if len(usable) == KEPT:
            break
    if found is None:
        if first_offset and not accepts_loss:
            raise LedgerIncomplete(first_offset)
        found = Recovered(LedgerState(*(make() for make in makers)), first_offset, has_lost=first_offset > 0)
    found.snapshot_offsets = tuple(usable)
    found.seq = seq
    return found


def _restore(offset: int, data: bytes, parts: Sequence[Part]) -> SnapshotHeader:
    with collector_paused():
        return restore(offset, data, parts)


async def _why_foreign(log: Log, header: SnapshotHeader, first_offset: int, next_offset: int) -> str | None:
    """Why a snapshot does not belong to what the log has; ``None`` if it does."""
    if header.offset >= next_offset:
        return f"the log has {next_offset} records of the ledger, and it covers {header.offset + 1}"
    if header.offset + 1 < first_offset:
        return f"the log begins at offset {first_offset}, and it ends at {header.offset}"
    if header.offset < first_offset:
        return None  # the record it ends with was dropped since
    page = await log.read(Query(topic=LEDGER_TOPIC, from_offset=header.offset), limit=1)
    if not page.records or page.records[0].offset != header.offset:
        return None  # a repair has set it aside; what the snapshot knows is all that is left of it
    if page.records[0].meta.event_id != header.event_id:
        return "the log has another record where it ends"
    return None


class _Fold:
    """Executes records in order, one call each."""

    def __init__(self, found: Recovered, commands: CommandReader, epoch: str, ids_from: int | None) -> None:
        self._found = found
        self._ids_from = ids_from
        self._epoch = epoch
        self._state = found.state
        self._marks = found.state.part(Marks)
        self._commands = commands
        self._problems: list[LedgerError] = []
        self._left = 0
        """How many happenings of the last command are to come in further records."""
        self._last: tuple[int, int, Sequence[Happening]] = (0, 0, ())

    def apply(self, record: Record) -> None:
        """Do what a record says."""
        found = self._found
        found.next_offset, found.last_event_id = record.offset + 1, record.meta.event_id
        if not is_ours(record):
            logger.warning("the record at offset %d of the ledger's topic is not the ledger's", record.offset)
            return
        if self._ids_from is not None and record.offset >= self._ids_from:
            found.event_ids.add(record.meta.event_id)
        stored = read_record(record)
        if stored.do:
            self._left = 0
            self._execute(record, stored)
        elif self._left:
            self._left -= count_of(stored.happenings)
        if stored.happenings:
            self._marks.note_told(stored.seq + max(count_of(stored.happenings), stored.count) - 1)

    def _execute(self, record: Record, stored: StoredCommand) -> None:
        command = self._commands.read_stored(record, stored)
        name = name_of(record)
        try:
            outcome = execute_again(command, self._state, stored)
        except MissingPart:
            raise
        except TidingsError as error:
            self._problems.append(LedgerDiverged(name, record.offset, f"it is refused: {error}"))
            return
        if isinstance(command, BeginEpoch):
            self._found.problems += [str(problem) for problem in self._problems]
            self._problems.clear()
        if stored.count:
            is_same = stored.count == len(outcome.happenings)
            self._left = stored.count - count_of(stored.happenings)
            self._last = (stored.seq, stored.at_ms, outcome.happenings)
        else:
            told = bytes(stored.happenings) if stored.happenings else b"[]"
            is_same = encode_happenings(outcome.happenings) == told
        if not is_same:
            self._problems.append(LedgerDiverged(name, record.offset, "it tells other happenings"))

    def finish(self) -> None:
        """Everything was applied."""
        found = self._found
        found.seq = max(found.seq, self._marks.seq)
        if self._problems and self._marks.epoch == self._epoch and not found.has_lost:
            raise self._problems[0]
        found.problems += [str(problem) for problem in self._problems]
        for problem in found.problems:
            logger.warning("after a repair of the log: %s", problem)
        if self._left:
            seq, at_ms, happenings = self._last
            told = len(happenings) - self._left
            found.untold, found.untold_seq, found.untold_of = happenings[told:], seq + told, seq
            found.untold_at_ms = at_ms
