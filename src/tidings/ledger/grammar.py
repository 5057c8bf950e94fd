"""
Grammar survival: subjects whose type the catalogue no longer declares.

They are called orphans. They stay readable, and nothing is lost; but nothing new of their type may be announced. When a ledger is opened, and
when its catalogue is changed, it looks for them and tells of each type once. An administrator then accepts that they are there, which
silences the notice, or migrates them to a type that is declared.

A migration goes in batches. Each is one command: every subject of it has its new type and id, told before its relations are rewritten, and at the
end the progress. A crash leaves whole batches; giving the same migration again goes on with what is left, under the same id.
"""

from __future__ import annotations

import enum
import hashlib
import logging
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, TypeAlias

import msgspec

from tidings.core.validation import reread, same_json
from tidings.happenings.happening import Happening
from tidings.happenings.variants import GrammarMigrationProgress, GrammarOrphansAccepted, SubjectGrammarOrphan

from .admin_ledger import AdminEntry, AdminLedger
from .catalogue import CurrentCatalogue
from .claims import weight_of
from .commands import Command, CommandOutcome, check_emission, check_name, check_text
from .errors import InvalidCommand, MigrationInFlight, NotAnOrphan, UndeclaredTargetType, UnknownOrphans
from .merging import migrate_subject
from .predicates import Field, Predicate, predicate_test
from .state import LedgerState
from .subjects import SubjectRecord, Subjects, check_new_id

if TYPE_CHECKING:
    from .ledger import Ledger

logger = logging.getLogger(__name__)

BATCH_COUNT: Final = 100
BATCH_COUNT_MAX: Final = 1000
_SAMPLE_COUNT: Final = 3
_SCHEME, _CLAIMANT = "addressing.scheme", "addressing.claimant"


class OrphanStatus(enum.StrEnum):
    """How it stands with the orphans of a type."""

    PENDING = "pending"
    """Nobody has decided yet."""
    MIGRATING = "migrating"
    RESOLVED = "resolved"
    """All were migrated, or are gone."""
    ACCEPTED = "accepted"
    RECOVERED = "recovered"
    """The catalogue declares the type again."""


# Strategies


class _Strategy(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", omit_defaults=True, forbid_unknown_fields=True
):
    """
    To which type each subject goes.

    ``targets`` are all types that a subject may go to. ``chooser`` gives a function that says to which type a subject goes, none if it stays; it
    raises ``ValueError`` if the strategy makes no sense.
    """


class RenameStrategy(_Strategy, frozen=True, kw_only=True, tag="rename"):
    """All to one type."""

    to_type: str

    def targets(self) -> Collection[str]:
        return (self.to_type,)

    def chooser(self) -> Callable[[SubjectRecord], str | None]:
        return lambda record: self.to_type


class MappedValue(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The type for one value."""

    value: Any
    to_type: str


class MapStrategy(_Strategy, frozen=True, kw_only=True, tag="map"):
    """
    By the value of a field: a key of the state, or ``addressing.scheme`` or ``addressing.claimant``, of which any that a subject has will do.

    The first value of the mapping that is found decides; a subject with none of them goes to ``default_to_type``, or stays.
    """

    discriminator_field: Field
    mapping: tuple[MappedValue, ...]
    default_to_type: str | None = None

    def targets(self) -> Collection[str]:
        default = () if self.default_to_type is None else (self.default_to_type,)
        return (*(each.to_type for each in self.mapping), *default)

    def chooser(self) -> Callable[[SubjectRecord], str | None]:
        if not self.targets():
            raise ValueError("strategy.mapping: is empty, and there is no default_to_type")

        def choose(record: SubjectRecord) -> str | None:
            values = list(_values(record, self.discriminator_field))
            for each in self.mapping:
                if any(same_json(each.value, value) for value in values):
                    return each.to_type
            return self.default_to_type

        return choose


class FilterStrategy(_Strategy, frozen=True, kw_only=True, tag="filter"):
    """Those to one type of which a predicate is true, as for watches; its field may also be one of an addressing, as for ``map``."""

    predicate: Predicate
    to_type: str

    def targets(self) -> Collection[str]:
        return (self.to_type,)

    def chooser(self) -> Callable[[SubjectRecord], str | None]:
        is_true, field = predicate_test(self.predicate), self.predicate.field
        return lambda record: (
            self.to_type if any(is_true({field: value}, False) for value in _values(record, field)) else None
        )


def _values(record: SubjectRecord, field: str) -> Iterator[Any]:
    """What a subject has in a field."""
    if field == _SCHEME:
        yield from (held.addressing.scheme for held in record.addressings)
    elif field == _CLAIMANT:
        yield from (held.claimant for held in record.addressings)
    elif isinstance(record.state, dict) and field in record.state:
        yield record.state[field]


Strategy: TypeAlias = RenameStrategy | MapStrategy | FilterStrategy


def strategy_of(value: Strategy | Any) -> Strategy:
    """
    A strategy, from JSON or as it is.

    Raises:
        InvalidCommand: It is none; the text says what is wrong.
    """
    strategy: Strategy = reread(
        value, Strategy, lambda path, problem: InvalidCommand(f"strategy.{path}".rstrip("."), problem)
    )
    try:
        strategy.chooser()
    except ValueError as error:
        raise InvalidCommand("strategy", str(error)) from None
    return strategy


# What is kept


class OrphanRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is known of the orphans of one type."""

    subject_type: str
    first_observed_at_ms: int
    last_observed_at_ms: int
    count: int
    status: OrphanStatus = OrphanStatus.PENDING
    accepted_reason: str | None = None
    accepted_at_ms: int | None = None
    migration_id: str | None = None
    strategy: Strategy | None = None
    """Of the migration that was begun last."""
    completed: int = 0
    """How many subjects that migration has moved."""
    batch_count: int = 0
    told_count: int | None = None
    """The number that was told last."""
    told_after_seq: int = 0
    """It was told with a seq above this one."""

    def to_json(self) -> dict[str, Any]:
        """The row as clients see it."""
        form: dict[str, Any] = msgspec.to_builtins(self)
        for name in ("strategy", "completed", "batch_count", "told_count", "told_after_seq"):
            form.pop(name, None)
        return {"status": str(self.status), **form}


class GrammarOrphans:
    """Every type of which orphans were ever found."""

    name: ClassVar[str] = "grammar_orphans"
    frozen_type: ClassVar[Any] = tuple[OrphanRow, ...]

    def __init__(self) -> None:
        self._rows: dict[str, OrphanRow] = {}

    def freeze(self) -> tuple[OrphanRow, ...]:
        """The rows, by type."""
        return tuple(self.all())

    def restore(self, frozen: tuple[OrphanRow, ...]) -> None:
        """Take them over."""
        self._rows.update((row.subject_type, row) for row in frozen)

    def all(self) -> list[OrphanRow]:
        """The rows, by type."""
        return [self._rows[name] for name in sorted(self._rows)]

    def get(self, subject_type: str) -> OrphanRow | None:
        """The row of a type."""
        return self._rows.get(subject_type)

    def put(self, row: OrphanRow) -> None:
        """Store a row, new or changed."""
        self._rows[row.subject_type] = row


def orphan_counts(state: LedgerState) -> dict[str, int]:
    """How many subjects there are of each type that the catalogue does not declare. What factories make has a shelf for its type."""
    catalogue = state.part(CurrentCatalogue)
    counts = state.part(Subjects).type_counts()
    return {name: count for name, count in counts.items() if "." not in name and not catalogue.declares_type(name)}


# Commands


class ScanGrammar(Command, frozen=True, kw_only=True, omit_defaults=True):
    """
    Look for orphans, and tell of those that are new, or more or fewer than was told. The result is the rows that are no matter of course.

    What was told already and can still be read in history is not told again, nor is what was accepted.
    """

    last_seq: int
    """The newest happening."""
    oldest_seq: int
    """The oldest that history still has."""

    def execute(self, state: LedgerState, at_ms: int) -> CommandOutcome:
        orphans, counts = state.part(GrammarOrphans), orphan_counts(state)
        told: list[Happening] = []
        found: list[OrphanRow] = []
        is_changed = False
        for row in orphans.all():
            if row.subject_type not in counts and row.status not in (OrphanStatus.RECOVERED, OrphanStatus.RESOLVED):
                is_declared = state.part(CurrentCatalogue).declares_type(row.subject_type)
                status = OrphanStatus.RECOVERED if is_declared else OrphanStatus.RESOLVED
                orphans.put(msgspec.structs.replace(row, status=status, count=0, told_count=None))
                is_changed = True
        for subject_type, count in counts.items():
            row = orphans.get(subject_type) or OrphanRow(
                subject_type=subject_type, first_observed_at_ms=at_ms, last_observed_at_ms=at_ms, count=count
            )
            if row.status in (OrphanStatus.RECOVERED, OrphanStatus.RESOLVED):
                row = msgspec.structs.replace(
                    row, status=OrphanStatus.PENDING, accepted_reason=None, accepted_at_ms=None
                )
            row = msgspec.structs.replace(row, count=count, last_observed_at_ms=at_ms)
            is_in_history = row.told_count == count and 0 < self.oldest_seq <= row.told_after_seq + 1
            if row.status is not OrphanStatus.ACCEPTED:
                found.append(row)
                if not is_in_history:
                    row = msgspec.structs.replace(row, told_count=count, told_after_seq=self.last_seq)
                    told.append(
                        SubjectGrammarOrphan(
                            at_ms=at_ms,
                            subject_type=subject_type,
                            count=count,
                            first_observed_at_ms=row.first_observed_at_ms,
                        )
                    )
            orphans.put(row)
            is_changed = True
        return CommandOutcome(told, tuple(found), is_changed)


class AcceptGrammarOrphans(Command, frozen=True, kw_only=True, omit_defaults=True):
    """Accept that there are subjects of a type that is not declared. The result is whether they were not accepted before."""

    admin: str
    subject_type: str
    reason: str

    def execute(self, state: LedgerState, at_ms: int) -> CommandOutcome:
        """Raises ``UnknownOrphans``, ``NotAnOrphan``, ``MigrationInFlight`` and ``InvalidCommand``."""
        check_name("admin", self.admin)
        check_text("reason", self.reason)
        row = _orphans(state, self.subject_type, at_ms)
        if row.status is OrphanStatus.MIGRATING:
            raise MigrationInFlight(self.subject_type)
        if row.status is OrphanStatus.ACCEPTED:
            return CommandOutcome(result=False, is_changed=False)
        state.part(GrammarOrphans).put(
            msgspec.structs.replace(
                row, status=OrphanStatus.ACCEPTED, accepted_reason=self.reason, accepted_at_ms=at_ms
            )
        )
        _record(state, "grammar_orphans_accepted", self.admin, self.subject_type, at_ms, self.reason)
        told = GrammarOrphansAccepted(at_ms=at_ms, subject_type=self.subject_type, reason=self.reason)
        return CommandOutcome([told], result=True)


class BeginGrammarMigration(Command, frozen=True, kw_only=True, omit_defaults=True):
    """Begin to migrate the orphans of a type, or go on with the same migration after a crash. The result is its row."""

    admin: str
    from_type: str
    strategy: Strategy
    migration_id: str
    reason: str | None = None

    def execute(self, state: LedgerState, at_ms: int) -> CommandOutcome:
        """Raises ``UnknownOrphans``, ``NotAnOrphan``, ``UndeclaredTargetType`` and ``InvalidCommand``."""
        check_name("admin", self.admin)
        check_name("migration_id", self.migration_id)
        if self.reason is not None:
            check_text("reason", self.reason)
        row = _orphans(state, self.from_type, at_ms)
        check_targets(state, self.strategy)
        if row.status is OrphanStatus.MIGRATING and row.strategy == self.strategy:
            return CommandOutcome(result=row, is_changed=False)
        row = msgspec.structs.replace(
            row,
            status=OrphanStatus.MIGRATING,
            migration_id=self.migration_id,
            strategy=self.strategy,
            completed=0,
            batch_count=0,
        )
        state.part(GrammarOrphans).put(row)
        _record(state, "grammar_migration", self.admin, self.from_type, at_ms, self.reason)
        return CommandOutcome(result=row)


class MigrateGrammarBatch(Command, frozen=True, kw_only=True, omit_defaults=True):
    """Migrate some subjects. One that is gone meanwhile, or is to stay by now, is passed over. The result is how many were migrated."""

    is_weighed = True
    admin: str
    from_type: str
    migration_id: str
    moves: tuple[tuple[str, str], ...]
    """Old ids and new ones."""
    remaining: int
    """How many are to follow."""

    def weight(self, state: LedgerState) -> int:
        return weight_of(state, *(old_id for old_id, _ in self.moves)) + len(self.moves)

    def execute(self, state: LedgerState, at_ms: int) -> CommandOutcome:
        """Raises ``InvalidCommand``: the migration is over, or an id was used before. ``CommandTooLarge``: take smaller batches."""
        row = _migrating(state, self.from_type, self.migration_id)
        assert row.strategy is not None
        choose, subjects = row.strategy.chooser(), state.part(Subjects)
        if len({new_id for _, new_id in self.moves}) != len(self.moves):
            raise InvalidCommand("moves", "has an id twice")
        for _, new_id in self.moves:
            check_new_id(state, "moves", new_id)
        check_emission(state, type(self).__name__, 2 * self.weight(state))
        told: list[Happening] = []
        completed = row.completed
        for old_id, new_id in self.moves:
            record = subjects.get(old_id)
            to_type = choose(record) if record is not None and record.subject_type == self.from_type else None
            if to_type is None:
                continue
            told += migrate_subject(
                state,
                at_ms,
                admin=self.admin,
                old_id=old_id,
                new_id=new_id,
                to_type=to_type,
                migration_id=self.migration_id,
            )
            completed += 1
        told.append(
            GrammarMigrationProgress(
                at_ms=at_ms,
                migration_id=self.migration_id,
                from_type=self.from_type,
                completed=completed,
                remaining=self.remaining,
                batch_index=row.batch_count,
            )
        )
        state.part(GrammarOrphans).put(
            msgspec.structs.replace(
                row,
                completed=completed,
                batch_count=row.batch_count + 1,
                count=len(subjects.ids_of_type(self.from_type)),
            )
        )
        return CommandOutcome(told, completed - row.completed)


class FinishGrammarMigration(Command, frozen=True, kw_only=True, omit_defaults=True):
    """A migration is through. Orphans that are left stay as they were: accepted, or to be decided about."""

    from_type: str
    migration_id: str

    def execute(self, state: LedgerState, at_ms: int) -> CommandOutcome:
        """Raises ``InvalidCommand``: the migration is over already."""
        row = _migrating(state, self.from_type, self.migration_id)
        count = len(state.part(Subjects).ids_of_type(self.from_type))
        if not count:
            status = OrphanStatus.RESOLVED
        else:
            status = OrphanStatus.PENDING if row.accepted_at_ms is None else OrphanStatus.ACCEPTED
        state.part(GrammarOrphans).put(msgspec.structs.replace(row, status=status, count=count, strategy=None))
        return CommandOutcome()


def check_targets(state: LedgerState, strategy: Strategy) -> None:
    """
    See that all types that subjects may go to are declared.

    Raises:
        UndeclaredTargetType: One is not.
    """
    for name in strategy.targets():
        if not state.part(CurrentCatalogue).declares_type(name):
            raise UndeclaredTargetType(name)


def _orphans(state: LedgerState, subject_type: str, at_ms: int) -> OrphanRow:
    """The row of a type that has orphans now."""
    if state.part(CurrentCatalogue).declares_type(subject_type):
        raise NotAnOrphan(subject_type)
    count = orphan_counts(state).get(subject_type)
    if count is None:
        raise UnknownOrphans(subject_type)
    row = state.part(GrammarOrphans).get(subject_type)
    if row is None or row.status in (OrphanStatus.RECOVERED, OrphanStatus.RESOLVED):  # since the last look
        return OrphanRow(subject_type=subject_type, first_observed_at_ms=at_ms, last_observed_at_ms=at_ms, count=count)
    return row


def _migrating(state: LedgerState, subject_type: str, migration_id: str) -> OrphanRow:
    row = state.part(GrammarOrphans).get(subject_type)
    if row is None or row.status is not OrphanStatus.MIGRATING or row.migration_id != migration_id:
        raise InvalidCommand("migration_id", f"{migration_id!r} is not under way")
    return row


def _record(state: LedgerState, kind: str, admin: str, subject_type: str, at_ms: int, reason: str | None) -> None:
    state.part(AdminLedger).record(
        AdminEntry(kind=kind, admin_plugin=admin, at_ms=at_ms, target_subject=subject_type, reason=reason)
    )


# What users do


class Migration(msgspec.Struct, frozen=True, kw_only=True):
    """What a migration did, or, of a dry run, would do."""

    migration_id: str
    from_type: str
    migrated_count: int
    unmigrated_count: int
    """Subjects of the type that are left."""
    duration_ms: int
    dry_run: bool
    unmigrated_sample: tuple[str, ...] = ()
    target_type_breakdown: dict[str, int] = {}
    sample_first: tuple[str, ...] = ()
    """The first subjects that are migrated, by their old ids, and the last."""
    sample_last: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The migration as clients see it: without samples that are empty."""
        form: dict[str, Any] = msgspec.to_builtins(self)
        return {name: value for name, value in form.items() if value not in ((), {})}


class _Plan(NamedTuple):
    """Which subjects go where, by their ids, and which stay."""

    moves: dict[str, str]
    staying: list[str]


class Grammar:
    """``ledger.grammar``: orphans, and what is done about them."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._migrating: set[str] = set()

    async def scan(self) -> None:
        """Look for orphans; done when a ledger is opened, and to be done when its catalogue was changed."""
        happenings = self._ledger.happenings
        command = ScanGrammar(last_seq=happenings.last_seq, oldest_seq=happenings.oldest_seq)
        if not await self._ledger.read(lambda state: orphan_counts(state) or state.part(GrammarOrphans).all()):
            return
        for row in await self._ledger.execute(command):
            logger.warning(
                "the catalogue does not declare the type %s, of which there are %d subjects: migrate or accept them",
                row.subject_type,
                row.count,
            )

    async def orphans(self) -> list[OrphanRow]:
        """Every type of which orphans were ever found, by name."""
        return await self._ledger.read(lambda state: state.part(GrammarOrphans).all())

    async def accept(self, subject_type: str, *, admin: str, reason: str) -> bool:
        """
        Accept that there are subjects of this type; no notice is given of them any more.

        Returns:
            Whether they were not accepted before.

        Raises:
            UnknownOrphans: There are none.
            NotAnOrphan: The type is declared.
            MigrationInFlight: They are being migrated.
        """
        accepted: bool = await self._ledger.execute(
            AcceptGrammarOrphans(admin=admin, subject_type=subject_type, reason=reason)
        )
        return accepted

    async def migrate(
        self,
        from_type: str,
        strategy: Strategy | Any,
        *,
        admin: str,
        dry_run: bool = False,
        batch_size: int = BATCH_COUNT,
        max_subjects: int | None = None,
        reason: str | None = None,
    ) -> Migration:
        """
        Give the orphans of a type types that are declared.

        Given again with the same strategy after a crash, it goes on with what is left.

        Args:
            from_type: The type that is not declared.
            strategy: Where its subjects go: ``RenameStrategy``, ``MapStrategy`` or ``FilterStrategy``, or the JSON of one.
            admin: Who does it.
            dry_run: Only say what would be done.
            batch_size: How many subjects one command moves, at most 1,000.
            max_subjects: How many are moved at most; the oldest first.
            reason: For the admin ledger.

        Raises:
            UnknownOrphans: There are none of this type.
            NotAnOrphan: The type is declared.
            UndeclaredTargetType: A type that subjects shall go to is not.
            MigrationInFlight: They are being migrated.
            InvalidCommand: The strategy, or a number, cannot be used.
        """
        strategy = strategy_of(strategy)
        if not 1 <= batch_size <= BATCH_COUNT_MAX:
            raise InvalidCommand("batch_size", f"must be 1 to {BATCH_COUNT_MAX}, not {batch_size}")
        if max_subjects is not None and max_subjects < 1:
            raise InvalidCommand("max_subjects", f"must be at least 1, not {max_subjects}")
        if from_type in self._migrating:
            raise MigrationInFlight(from_type)
        started = self._ledger.clock.monotonic()
        self._migrating.add(from_type)
        try:
            plan = await self._ledger.read(lambda state: _plan(state, from_type, strategy, max_subjects))
            migration_id = f"mig_{hashlib.sha256(self._ledger.new_id().encode()).hexdigest()[:32]}"
            migrated_count = len(plan.moves)
            if not dry_run and plan.moves:
                begin = BeginGrammarMigration(
                    admin=admin, from_type=from_type, strategy=strategy, migration_id=migration_id, reason=reason
                )
                row: OrphanRow = await self._ledger.execute(begin)
                assert row.migration_id is not None
                migration_id = row.migration_id
                migrated_count = await self._move(from_type, migration_id, list(plan.moves), admin, batch_size)
        finally:
            self._migrating.discard(from_type)
        moved = list(plan.moves)
        breakdown: dict[str, int] = {}
        for to_type in plan.moves.values():
            breakdown[to_type] = breakdown.get(to_type, 0) + 1
        first, last = tuple(moved[:_SAMPLE_COUNT]), tuple(moved[-_SAMPLE_COUNT:])
        return Migration(
            migration_id=migration_id,
            from_type=from_type,
            migrated_count=migrated_count,
            unmigrated_count=len(plan.staying),
            duration_ms=round((self._ledger.clock.monotonic() - started) * 1000),
            dry_run=dry_run,
            unmigrated_sample=tuple(plan.staying[:_SAMPLE_COUNT]),
            target_type_breakdown=breakdown,
            sample_first=first,
            sample_last=() if first == last else last,
        )

    async def _move(self, from_type: str, migration_id: str, ids: list[str], admin: str, batch_size: int) -> int:
        migrated_count = 0
        for start in range(0, len(ids), batch_size):
            batch = ids[start : start + batch_size]
            command = MigrateGrammarBatch(
                admin=admin,
                from_type=from_type,
                migration_id=migration_id,
                moves=tuple((old_id, self._ledger.new_id()) for old_id in batch),
                remaining=len(ids) - start - len(batch),
            )
            migrated_count += await self._ledger.execute(command)
        await self._ledger.execute(FinishGrammarMigration(from_type=from_type, migration_id=migration_id))
        return migrated_count


def _plan(state: LedgerState, from_type: str, strategy: Strategy, max_subjects: int | None) -> _Plan:
    _orphans(state, from_type, 0)
    check_targets(state, strategy)
    subjects, choose = state.part(Subjects), strategy.chooser()
    plan = _Plan({}, [])
    for canonical_id in subjects.ids_of_type(from_type):
        record = subjects.require(canonical_id)
        to_type = choose(record) if max_subjects is None or len(plan.moves) < max_subjects else None
        if to_type is None:
            plan.staying.append(canonical_id)
        else:
            plan.moves[canonical_id] = to_type
    return plan
