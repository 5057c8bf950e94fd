"""
Subjects: things with one canonical id, one type, and at least one name outside.

A name outside is an *addressing*: a scheme and a value, which belongs to one subject at most and to the plugin that claims it. A
canonical id is never used twice: what becomes of a subject that is merged, split, forgotten or given another type stays on
record under its old id as an alias.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable
from typing import Any, ClassVar, Final, Literal, NamedTuple

import msgspec

from .commands import check_name
from .errors import InvalidCommand, UnknownSubject
from .paging import KeyOrder
from .state import LedgerState

ALIAS_HOPS_MAX: Final = 16
TOMBSTONES_COUNT_MAX: Final = 10_000
"""How many forgotten subjects are known by their ids; an older id is unknown, like one that never was."""
RESERVED_SCHEMES: Final = frozenset({"evo-factory-instance", "evo-appointment", "evo-watch"})
"""Schemes of addressings that the ledger makes itself."""


class Addressing(NamedTuple):
    """A name of a subject outside of the ledger."""

    scheme: str
    value: str

    def __str__(self) -> str:
        return f"{self.scheme}:{self.value}"

    @classmethod
    def of(cls, field: str, given: object) -> Addressing:
        """
        The addressing that somebody gave as a pair.

        Raises:
            InvalidCommand: It is something else; ``field`` names it.
        """
        if not isinstance(given, tuple | list) or len(given) != 2:
            raise InvalidCommand(field, f"must be a scheme and a value, not {given!r:.80}")
        return cls(*given)

    @classmethod
    def parse(cls, text: str) -> Addressing:
        """
        The addressing that is written ``scheme:value``.

        Raises:
            InvalidCommand: There is no colon, or nothing before or after it.
        """
        scheme, _, value = text.partition(":")
        return cls(scheme, value).checked()

    def checked(self, field: str = "addressing") -> Addressing:
        """
        Itself, if it can be used.

        Raises:
            InvalidCommand: A part is empty, too long or holds a control character, or the scheme holds a colon.
        """
        check_name(f"{field}.scheme", self.scheme)
        check_name(f"{field}.value", self.value)
        if ":" in self.scheme:
            raise InvalidCommand(f"{field}.scheme", f"{self.scheme!r:.80} holds a colon")
        return self


SubjectName = Addressing | str
"""How a command names a subject: by an addressing, or by its canonical id."""


class ClaimedAddressing(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An addressing of a subject, and whose it is."""

    addressing: Addressing
    claimant: str
    added_at_ms: int


class SubjectRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """All there is about a subject."""

    canonical_id: str
    subject_type: str
    addressings: tuple[ClaimedAddressing, ...]
    created_at_ms: int
    modified_at_ms: int
    state: Any = None
    """What plugins keep with it: any JSON."""

    def copied_state(self) -> Any:
        """The state, for somebody who may do with it what they like: what is in the ledger changes by commands only."""
        return msgspec.to_builtins(self.state)

    def detached(self) -> SubjectRecord:
        """The record with a state of its own, for whoever may change that."""
        return msgspec.structs.replace(self, state=self.copied_state()) if self.state is not None else self

    def is_claimed_by(self, plugin: str) -> bool:
        """Whether one of its addressings is this plugin's."""
        return any(held.claimant == plugin for held in self.addressings)


class AliasKind(enum.StrEnum):
    """What became of a subject whose id is retired."""

    MERGED = "merged"
    SPLIT = "split"
    TOMBSTONE = "tombstone"
    TYPE_MIGRATED = "type_migrated"


class AliasRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What became of a subject whose id is retired, and by whom."""

    old_id: str
    new_ids: tuple[str, ...]
    kind: AliasKind
    recorded_at_ms: int
    admin_plugin: str
    reason: str | None = None


class Described(NamedTuple):
    """What an id stands for."""

    kind: Literal["found", "aliased", "not_found"]
    record: SubjectRecord | None = None
    """The live subject: the id's own, or where the chain of aliases leads; none if it forks or ends."""
    chain: tuple[AliasRecord, ...] = ()
    """The aliases from the id on, oldest first."""


class _Frozen(msgspec.Struct, frozen=True):
    records: tuple[SubjectRecord, ...]
    aliases: tuple[AliasRecord, ...]


class Subjects:
    """Every live subject, and what became of those that were."""

    name: ClassVar[str] = "subjects"
    frozen_type: ClassVar[Any] = _Frozen

    def __init__(self) -> None:
        self._records: dict[str, SubjectRecord] = {}
        self._aliases: dict[str, AliasRecord] = {}
        self._tombstones: dict[str, None] = {}
        """The ids among the aliases that lead nowhere, oldest first."""
        self._shortcuts: dict[str, str] = {}
        """Of retired ids in long chains, a retired id further along."""
        self._owner_of: dict[Addressing, str] = {}
        self._ids_by_type: dict[str, dict[str, None]] = {}
        self._addressings_by_claimant: dict[str, set[Addressing]] = {}
        self.ids: Final = KeyOrder(self._records)
        self.addressings: Final = KeyOrder(self._owner_of)

    def freeze(self) -> _Frozen:
        """Records and aliases, each in the order in which they came."""
        return _Frozen(tuple(self._records.values()), tuple(self._aliases.values()))

    def restore(self, frozen: _Frozen) -> None:
        """Take them over."""
        for record in frozen.records:
            self.put(record)
        for alias in frozen.aliases:
            self._keep(alias)

    def __len__(self) -> int:
        return len(self._records)

    def get(self, canonical_id: str) -> SubjectRecord | None:
        """The live subject with this id; aliases are not followed."""
        return self._records.get(canonical_id)

    def is_live(self, canonical_id: str) -> bool:
        """Whether a subject has this id."""
        return canonical_id in self._records

    def find(self, addressing: Addressing) -> str | None:
        """The id of the subject that this addressing belongs to."""
        return self._owner_of.get(addressing)

    def resolve(self, name: SubjectName) -> SubjectRecord | None:
        """The live subject of this addressing or id."""
        canonical_id = name if isinstance(name, str) else self._owner_of.get(name)
        return None if canonical_id is None else self._records.get(canonical_id)

    def require(self, name: SubjectName) -> SubjectRecord:
        """
        The live subject of this addressing or id.

        Raises:
            UnknownSubject: There is none.
        """
        record = self.resolve(name)
        if record is None:
            raise UnknownSubject(str(name), hint=self.hint_about(name))
        return record

    def hint_about(self, name: SubjectName) -> str | None:
        """Where to look for a subject that has not this name any more: what a retired id leads to."""
        became = self.describe(name) if isinstance(name, str) else None
        if became is None or became.kind != "aliased":
            return None
        last = became.chain[-1]
        found = (became.record.canonical_id,) if became.record is not None else last.new_ids
        leads_to = f"; look for {', '.join(map(repr, found))}" if found else ""
        return f"this id is retired ({last.kind}){leads_to}"

    def alias(self, canonical_id: str) -> AliasRecord | None:
        """What became of the subject that had this id."""
        return self._aliases.get(canonical_id)

    def is_id_used(self, canonical_id: str) -> bool:
        """Whether a subject has this id, or ever had it."""
        return canonical_id in self._records or canonical_id in self._aliases

    def describe(self, canonical_id: str, *, include_chain: bool = True) -> Described:
        """
        What an id stands for, following aliases while they lead to one id. The chain has the first 16 steps.

        Args:
            canonical_id: The id.
            include_chain: Without, only the id's own alias is given and not followed.
        """
        record = self._records.get(canonical_id)
        if record is not None:
            return Described("found", record)
        chain: list[AliasRecord] = []
        alias = self._aliases.get(canonical_id)
        while alias is not None:
            chain.append(alias)
            if not include_chain or len(alias.new_ids) != 1:
                break
            record = self._records.get(alias.new_ids[0])
            if record is not None:
                break
            if len(chain) == ALIAS_HOPS_MAX:
                record = self._end_of(alias.new_ids[0])
                break
            alias = self._aliases.get(alias.new_ids[0])
        return Described("aliased", record, tuple(chain)) if chain else Described("not_found")

    def _end_of(self, retired_id: str) -> SubjectRecord | None:
        """The live subject where a chain of aliases leads. Ids on the way are kept as short cuts, so that a chain is followed once."""
        passed: list[str] = []
        here = retired_id
        while (alias := self._aliases.get(here)) is not None and len(alias.new_ids) == 1:
            passed.append(here)
            here = self._shortcuts.get(here) or alias.new_ids[0]
        if len(passed) > 1:
            self._shortcuts.update(dict.fromkeys(passed[:-1], passed[-1]))
        return self._records.get(here)

    def ids_of_type(self, subject_type: str) -> Collection[str]:
        """The ids of all subjects of a type, oldest first. A view: copy it before changing anything."""
        return self._ids_by_type.get(subject_type, {}).keys()

    def type_counts(self) -> dict[str, int]:
        """How many subjects there are of each type, by its name."""
        return {name: len(ids) for name, ids in sorted(self._ids_by_type.items())}

    @property
    def claimants(self) -> tuple[str, ...]:
        """Every plugin that claims an addressing."""
        return tuple(self._addressings_by_claimant)

    def is_claimant(self, plugin: str) -> bool:
        """Whether a plugin claims any addressing."""
        return plugin in self._addressings_by_claimant

    def claimed_by(self, plugin: str) -> tuple[Addressing, ...]:
        """The addressings that a plugin claims, in no order."""
        return tuple(self._addressings_by_claimant.get(plugin, ()))

    def put(self, record: SubjectRecord) -> None:
        """Store a subject, new or changed. Its addressings must be nobody else's."""
        canonical_id = record.canonical_id
        before = self._records.get(canonical_id)
        self._records[canonical_id] = record
        if before is None:
            self._ids_by_type.setdefault(record.subject_type, {})[canonical_id] = None
            self.ids.changed(canonical_id)
            self._claim(record.addressings, canonical_id)
        elif before.addressings is not record.addressings:
            self._unclaim(set(before.addressings) - set(record.addressings))
            kept = set(before.addressings)
            self._claim((held for held in record.addressings if held not in kept), canonical_id)

    def retire(self, alias: AliasRecord) -> SubjectRecord:
        """Take a live subject away and leave an alias. Its addressings are free."""
        record = self._records.pop(alias.old_id)
        self._keep(alias)
        self.ids.changed(alias.old_id)
        ids = self._ids_by_type[record.subject_type]
        del ids[alias.old_id]
        if not ids:
            del self._ids_by_type[record.subject_type]
        self._unclaim(record.addressings)
        return record

    def _keep(self, alias: AliasRecord) -> None:
        """Keep an alias; of tombstones only the last ones."""
        self._aliases[alias.old_id] = alias
        if alias.kind is AliasKind.TOMBSTONE:
            self._tombstones[alias.old_id] = None
            if len(self._tombstones) > TOMBSTONES_COUNT_MAX:
                oldest = next(iter(self._tombstones))
                del self._tombstones[oldest], self._aliases[oldest]

    def _claim(self, addressings: Iterable[ClaimedAddressing], canonical_id: str) -> None:
        for held in addressings:
            self._owner_of[held.addressing] = canonical_id
            self._addressings_by_claimant.setdefault(held.claimant, set()).add(held.addressing)
            self.addressings.changed(held.addressing)

    def _unclaim(self, addressings: Iterable[ClaimedAddressing]) -> None:
        for held in addressings:
            del self._owner_of[held.addressing]
            claimed = self._addressings_by_claimant[held.claimant]
            claimed.remove(held.addressing)
            if not claimed:
                del self._addressings_by_claimant[held.claimant]
            self.addressings.changed(held.addressing)


def check_subject_name(field: str, name: SubjectName) -> None:
    """
    See that this may name a subject.

    Raises:
        InvalidCommand: It cannot.
    """
    if isinstance(name, Addressing):
        name.checked(field)
    else:
        check_name(field, name)


def check_new_id(state: LedgerState, field: str, canonical_id: str) -> None:
    """
    See that an id was never used.

    Raises:
        InvalidCommand: It was, or is no id.
    """
    check_name(field, canonical_id)
    if state.part(Subjects).is_id_used(canonical_id):
        raise InvalidCommand(field, f"the id {canonical_id!r} was used before")
