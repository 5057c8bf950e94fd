"""
What plugins said beyond their claims: the claim log, and conflicts between subjects.

An announcement whose addressings belong to several subjects attaches nothing. The conflict stays open, and the subjects in it are known
as doubtful, until an administrator has merged or split them, or they are forgotten.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Literal

import msgspec

from .subjects import Addressing


class ClaimConfidence(enum.StrEnum):
    """How sure a plugin is."""

    ASSERTED = "asserted"
    INFERRED = "inferred"
    TENTATIVE = "tentative"


class Equivalent(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
    tag_field="kind",
    tag="equivalent",
):
    """A plugin says that two addressings are of one thing."""

    a: Addressing
    b: Addressing
    confidence: ClaimConfidence = ClaimConfidence.ASSERTED
    reason: str | None = None


class Distinct(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
    tag_field="kind",
    tag="distinct",
):
    """A plugin says that two addressings are not of one thing."""

    a: Addressing
    b: Addressing
    reason: str | None = None


class SubjectsConflict(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="multi_subject_conflict"
):
    """An announcement named addressings of several subjects."""

    addressings: tuple[Addressing, ...]
    canonical_ids: tuple[str, ...]


class Replaced(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="replaced"):
    """Subjects were merged or split, or one was given another type."""

    how: Literal["merged", "split", "type_migrated"]
    old_ids: tuple[str, ...]
    new_ids: tuple[str, ...]
    reason: str | None = None


SubjectClaim = Equivalent | Distinct


class ClaimEntry(msgspec.Struct, frozen=True):
    """One line of the claim log."""

    claimant: str
    asserted_at_ms: int
    claim: Equivalent | Distinct | SubjectsConflict | Replaced


class ClaimLog:
    """What was said about which names are of one thing, oldest first. Only grows."""

    name: ClassVar[str] = "claim_log"
    frozen_type: ClassVar[Any] = tuple[ClaimEntry, ...]

    def __init__(self) -> None:
        self._entries: list[ClaimEntry] = []
        self._said: set[tuple[str, SubjectClaim]] = set()

    def freeze(self) -> tuple[ClaimEntry, ...]:
        """The entries."""
        return tuple(self._entries)

    def restore(self, frozen: tuple[ClaimEntry, ...]) -> None:
        """Take them over."""
        for entry in frozen:
            self.append(entry)

    def append(self, entry: ClaimEntry) -> bool:
        """Add an entry; not one in which a plugin only says again what it said before. Whether it was added."""
        if isinstance(entry.claim, Equivalent | Distinct):
            said = (entry.claimant, entry.claim)
            if said in self._said:
                return False
            self._said.add(said)
        self._entries.append(entry)
        return True

    def entries(self, claimant: str | None = None) -> tuple[ClaimEntry, ...]:
        """All entries, or those of one plugin."""
        return tuple(entry for entry in self._entries if claimant is None or entry.claimant == claimant)


class ConflictEnd(enum.StrEnum):
    """What ended a conflict."""

    MERGED = "merged"
    SPLIT = "split"
    FORGOTTEN = "forgotten"


class Conflict(msgspec.Struct, frozen=True):
    """Several subjects that a plugin takes for one."""

    conflict_id: int
    plugin: str
    detected_at_ms: int
    addressings: tuple[Addressing, ...]
    canonical_ids: tuple[str, ...]
    ended: ConflictEnd | None = None
    ended_at_ms: int | None = None


class Conflicts:
    """Every conflict, open or not, by a number of its own from 1 on."""

    name: ClassVar[str] = "conflicts"
    frozen_type: ClassVar[Any] = tuple[Conflict, ...]

    def __init__(self) -> None:
        self._all: list[Conflict] = []
        self._open_of: dict[str, dict[int, None]] = {}

    def freeze(self) -> tuple[Conflict, ...]:
        """All of them, oldest first."""
        return tuple(self._all)

    def restore(self, frozen: tuple[Conflict, ...]) -> None:
        """Take them over."""
        self._all.extend(frozen)
        for conflict in frozen:
            self._index(conflict)

    def all(self) -> tuple[Conflict, ...]:
        """All of them, oldest first."""
        return tuple(self._all)

    def pending(self) -> tuple[Conflict, ...]:
        """Those that are open, oldest first."""
        numbers = sorted({number for numbers in self._open_of.values() for number in numbers})
        return tuple(self._all[number - 1] for number in numbers)

    def open_of(self, canonical_id: str) -> tuple[Conflict, ...]:
        """The open conflicts that a subject is in, oldest first."""
        return tuple(self._all[number - 1] for number in sorted(self._open_of.get(canonical_id, ())))

    def open(
        self, plugin: str, addressings: tuple[Addressing, ...], canonical_ids: tuple[str, ...], at_ms: int
    ) -> tuple[Conflict, bool]:
        """The open conflict of these, and whether it is new."""
        for conflict in self.open_of(canonical_ids[0]):
            if (conflict.plugin, conflict.addressings, conflict.canonical_ids) == (plugin, addressings, canonical_ids):
                return conflict, False
        conflict = Conflict(len(self._all) + 1, plugin, at_ms, addressings, canonical_ids)
        self._all.append(conflict)
        self._index(conflict)
        return conflict, True

    def settle(self, gone: Iterable[str], is_live: Callable[[str], bool], how: ConflictEnd, at_ms: int) -> None:
        """End every open conflict of ids that are gone and in which one live subject is left at most."""
        for canonical_id in gone:
            for conflict in self.open_of(canonical_id):
                if sum(map(is_live, conflict.canonical_ids)) <= 1:
                    self._unindex(conflict)
                    self._all[conflict.conflict_id - 1] = msgspec.structs.replace(
                        conflict, ended=how, ended_at_ms=at_ms
                    )

    def rename(self, old_id: str, new_id: str) -> None:
        """A subject has another id and is otherwise as it was."""
        for conflict in self.open_of(old_id):
            ids = tuple(sorted(new_id if each == old_id else each for each in conflict.canonical_ids))
            self._unindex(conflict)
            renamed = msgspec.structs.replace(conflict, canonical_ids=ids)
            self._all[conflict.conflict_id - 1] = renamed
            self._index(renamed)

    def _index(self, conflict: Conflict) -> None:
        if conflict.ended is None:
            for canonical_id in conflict.canonical_ids:
                self._open_of.setdefault(canonical_id, {})[conflict.conflict_id] = None

    def _unindex(self, conflict: Conflict) -> None:
        for canonical_id in conflict.canonical_ids:
            numbers = self._open_of[canonical_id]
            del numbers[conflict.conflict_id]
            if not numbers:
                del self._open_of[canonical_id]
