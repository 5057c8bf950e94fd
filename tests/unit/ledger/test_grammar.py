"""Subjects whose type the catalogue lost are found and told of, accepted or migrated, and nothing is lost on the way."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Any

import pytest

from tests.unit.ledger.support import thawed
from tidings.happenings.happening import to_json
from tidings.happenings.variants import CustodyReleased
from tidings.ledger import Ledger, LedgerSettings, open_ledger
from tidings.ledger.admin_ledger import AdminLedger
from tidings.ledger.catalogue import parse_catalogue
from tidings.ledger.claims import AnnounceSubject, ClaimRelation, RetractAddressing
from tidings.ledger.commands import Command
from tidings.ledger.errors import (
    InvalidCommand,
    LedgerError,
    MigrationInFlight,
    NotAnOrphan,
    UndeclaredTargetType,
    UnknownOrphans,
)
from tidings.ledger.grammar import GrammarOrphans, MigrateGrammarBatch, OrphanRow, RenameStrategy
from tidings.ledger.relations import Relations, WalkDirection
from tidings.ledger.snapshots import MemorySnapshots
from tidings.ledger.subjects import Addressing, Subjects
from tidings.log.memory import MemoryLog
from tidings.testing import VirtualClock

RENAME = {"kind": "rename", "to_type": "song"}


def catalogue(*types: str) -> Any:
    """A catalogue that declares these types, and one relation between any."""
    subjects = "".join(f'[[subjects]]\nname = "{name}"\n' for name in types)
    relation = '[[relation]]\npredicate = "like"\nsource_type = "*"\ntarget_type = "*"\n'
    return parse_catalogue(f"schema_version = 1\n{subjects}{relation}")


class Registry:
    """A ledger that is opened again and again, with one catalogue or another."""

    def __init__(self) -> None:
        self.log, self.snapshots, self.clock = MemoryLog(), MemorySnapshots(), VirtualClock()
        self.ledger: Ledger

    async def open(self, *types: str, **settings: Any) -> None:
        """Open it with a catalogue that declares these types."""
        self.ledger = await open_ledger(
            self.log,
            catalogue=catalogue(*types),
            snapshots=self.snapshots,
            clock=self.clock,
            settings=LedgerSettings(**settings),
        )

    async def reopen(self, *types: str, **settings: Any) -> None:
        """Close it, and open it with another catalogue."""
        await self.ledger.close()
        await self.clock.advance(1)
        await self.open(*types, **settings)

    async def announce(self, ids: Iterable[str], kind: str = "track", **more: Any) -> None:
        """Subjects of a type; each has its id for a name."""
        for canonical_id in ids:
            addressing = Addressing(more.get("scheme", "id"), canonical_id)
            await self.ledger.execute(
                AnnounceSubject(
                    plugin=more.get("plugin", "p"),
                    subject_type=kind,
                    addressings=(addressing,),
                    new_id=canonical_id,
                    state=more.get("state"),
                )
            )

    async def told(self, *variants: str) -> list[dict[str, Any]]:
        """What was told of these variants, without times."""
        happenings = self.ledger.happenings
        found = [to_json(each.happening) async for each in happenings.history(max(0, happenings.oldest_seq - 1))]
        return [
            {key: value for key, value in form.items() if not key.endswith("at_ms")}
            for form in found
            if form["type"] in variants
        ]

    async def orphans_told(self) -> list[tuple[str, int]]:
        """The types and numbers of orphans that were told."""
        return [(each["subject_type"], each["count"]) for each in await self.told("subject_grammar_orphan")]

    async def row(self, subject_type: str = "track") -> OrphanRow:
        """What is known of the orphans of a type."""
        return next(row for row in await self.ledger.grammar.orphans() if row.subject_type == subject_type)

    async def types(self) -> dict[str, int]:
        """How many subjects there are of each type."""
        return await self.ledger.read(lambda state: state.part(Subjects).type_counts())


@pytest.fixture
async def registry() -> AsyncIterator[Registry]:
    """Five tracks and an album, in a ledger whose catalogue has songs and albums now."""
    registry = Registry()
    await registry.open("track", "album")
    await registry.announce("abcde")
    await registry.announce(["album"], "album")
    await registry.ledger.execute(ClaimRelation(plugin="p", source="a", predicate="like", target="b"))
    await registry.ledger.execute(ClaimRelation(plugin="p", source="album", predicate="like", target="a"))
    await registry.reopen("song", "album")
    yield registry
    await registry.ledger.close()


# Finding


@pytest.mark.req("H53")
async def test_orphans_are_told_once_while_their_number_is_the_same(registry: Registry) -> None:
    """Opening tells of each type that lost its declaration; opening again does not, unless there are more or fewer of it."""
    assert await registry.orphans_told() == [("track", 5)]
    first = (await registry.row()).first_observed_at_ms

    await registry.reopen("song", "album")
    await registry.ledger.grammar.scan()
    assert await registry.orphans_told() == [("track", 5)]
    await registry.ledger.execute(RetractAddressing(plugin="p", addressing=Addressing("id", "e")))
    await registry.reopen("song", "album")
    assert await registry.orphans_told() == [("track", 5), ("track", 4)]

    row = await registry.row()
    assert row.to_json() == {
        "subject_type": "track",
        "first_observed_at_ms": first,
        "last_observed_at_ms": registry.clock.now_ns() // 1_000_000,
        "count": 4,
        "status": "pending",
    }


async def test_what_history_has_lost_is_told_again(registry: Registry) -> None:
    """A notice that is no longer in history is given again at the next opening: who comes late would not know."""
    await registry.reopen("song", "album", history_count_max=1)
    for number in range(5):
        await registry.ledger.happenings.emit_durable(CustodyReleased(at_ms=0, plugin="p", handle_id=str(number)))
    await registry.clock.advance(120)

    await registry.reopen("song", "album")

    assert await registry.orphans_told() == [("track", 5)]


async def test_orphans_are_readable_and_no_more_may_come(registry: Registry) -> None:
    """An orphan is as it was, with its relations; a new subject of its type is refused."""
    record, count = await registry.ledger.read(
        lambda state: (state.part(Subjects).get("a"), len(state.part(Relations).touching("a")))
    )
    assert record is not None
    assert (record.subject_type, count) == ("track", 2)
    with pytest.raises(LedgerError) as refused:
        await registry.announce("f")

    assert refused.value.subclass == "unknown_subject_type"


async def test_a_type_that_is_declared_again_has_recovered(registry: Registry) -> None:
    """Declared again, a type has no orphans; lost once more, it is told of again, with the time it was first seen."""
    await registry.ledger.grammar.accept("track", admin="a", reason="old")
    first = (await registry.row()).first_observed_at_ms
    await registry.reopen("song", "album", "track")
    assert ((await registry.row()).status, (await registry.row()).count) == ("recovered", 0)

    await registry.reopen("song", "album")

    row = await registry.row()
    assert (row.status, row.first_observed_at_ms, row.accepted_reason) == ("pending", first, None)
    assert await registry.orphans_told() == [("track", 5), ("track", 5)]


async def test_what_factories_make_is_no_orphan() -> None:
    """A ledger whose catalogue declares every type has no rows and leaves no record of looking; instances have shelves for types."""
    registry = Registry()
    await registry.open("track")
    await registry.announce("a")
    before = registry.log.position
    await registry.reopen("track")

    assert await registry.ledger.grammar.orphans() == []
    assert registry.log.position == before
    await registry.ledger.close()


# Accepting


@pytest.mark.req("H56")
async def test_accepted_orphans_are_quiet(registry: Registry) -> None:
    """Accepting is told, with an entry in the admin ledger; then no opening tells of the type, not even if its number changes."""
    assert await registry.ledger.grammar.accept("track", admin="curator", reason="they stay")
    assert not await registry.ledger.grammar.accept("track", admin="curator", reason="again")
    await registry.ledger.execute(RetractAddressing(plugin="p", addressing=Addressing("id", "e")))
    await registry.reopen("song", "album")

    assert await registry.orphans_told() == [("track", 5)]
    assert await registry.told("grammar_orphans_accepted") == [
        {"type": "grammar_orphans_accepted", "subject_type": "track", "reason": "they stay"}
    ]
    row = await registry.row()
    assert (row.status, row.accepted_reason, row.count) == ("accepted", "they stay", 4)
    entries = await registry.ledger.read(lambda state: state.part(AdminLedger).entries("curator"))
    assert [(entry.kind, entry.target_subject, entry.reason) for entry in entries] == [
        ("grammar_orphans_accepted", "track", "they stay")
    ]


async def test_what_cannot_be_accepted(registry: Registry) -> None:
    """A type nobody knows, one that is declared and one that is being migrated are not accepted; a reason is needed."""
    grammar = registry.ledger.grammar
    with pytest.raises(UnknownOrphans):
        await grammar.accept("nothing", admin="a", reason="r")
    with pytest.raises(NotAnOrphan):
        await grammar.accept("album", admin="a", reason="r")
    with pytest.raises(InvalidCommand, match="reason"):
        await grammar.accept("track", admin="a", reason="")
    await interrupted(registry, after=1)
    with pytest.raises(MigrationInFlight):
        await grammar.accept("track", admin="a", reason="r")


# Migrating


@pytest.mark.req("H54", "H55")
async def test_each_subject_is_told_before_its_relations(registry: Registry) -> None:
    """A migration tells of each subject, then of its relations and claims; each batch ends with its progress."""
    done = await registry.ledger.grammar.migrate("track", RENAME, admin="curator", batch_size=3, reason="renamed")

    told = await registry.told(
        "subject_migrated", "relation_rewritten", "claim_reassigned", "grammar_migration_progress"
    )
    new = {each["old_id"]: each["new_id"] for each in told if each["type"] == "subject_migrated"}
    assert list(new) == list("abcde")
    assert [each["type"] for each in told] == [
        "subject_migrated",  # a: two relations, a claim on each, an addressing
        *["relation_rewritten"] * 2,
        *["claim_reassigned"] * 3,
        "subject_migrated",  # b: one relation
        "relation_rewritten",
        *["claim_reassigned"] * 2,
        "subject_migrated",
        "claim_reassigned",
        "grammar_migration_progress",
        *["subject_migrated", "claim_reassigned"] * 2,
        "grammar_migration_progress",
    ]
    assert told[0] == {
        "type": "subject_migrated",
        "old_id": "a",
        "new_id": new["a"],
        "from_type": "track",
        "to_type": "song",
        "migration_id": done.migration_id,
    }
    progress = [each for each in told if each["type"] == "grammar_migration_progress"]
    assert [(each["completed"], each["remaining"], each["batch_index"]) for each in progress] == [(3, 2, 0), (5, 0, 1)]
    assert done.migration_id.startswith("mig_")
    assert len(done.migration_id) == 36
    assert done.to_json() == {
        "migration_id": done.migration_id,
        "from_type": "track",
        "migrated_count": 5,
        "unmigrated_count": 0,
        "duration_ms": 0,
        "dry_run": False,
        "target_type_breakdown": {"song": 5},
        "sample_first": ("a", "b", "c"),
        "sample_last": ("c", "d", "e"),
    }


async def test_what_a_migration_leaves(registry: Registry) -> None:
    """Relations follow the new ids, old ids lead there as aliases, the row is resolved, and the admin ledger has one entry, from the start."""
    with registry.ledger.happenings.subscribe() as subscription:
        await registry.ledger.grammar.migrate("track", RENAME, admin="curator", reason="renamed")
        migrated = (await subscription.recv()).happening
    new_id = to_json(migrated)["new_id"]

    await registry.reopen("song", "album")

    assert await registry.types() == {"album": 1, "song": 5}
    found = await registry.ledger.read(
        lambda state: (
            state.part(Subjects).describe("a"),
            state.part(Relations).neighbours("album", "like", WalkDirection.FORWARD),
            state.part(AdminLedger).entries("curator"),
        )
    )
    assert found[0].kind == "aliased"
    assert found[0].record is not None
    assert (found[0].record.canonical_id, found[0].record.subject_type) == (new_id, "song")
    assert [alias.kind for alias in found[0].chain] == ["type_migrated"]
    assert list(found[1]) == [new_id]
    assert [(entry.kind, entry.target_subject, entry.reason) for entry in found[2]] == [
        ("grammar_migration", "track", "renamed")
    ]
    row = await registry.row()
    assert (row.status, row.count, row.migration_id) == ("resolved", 0, to_json(migrated)["migration_id"])
    with pytest.raises(UnknownOrphans):
        await registry.ledger.grammar.migrate("track", RENAME, admin="curator")


async def test_a_dry_run_changes_nothing(registry: Registry) -> None:
    """A dry run says what would be done, with samples, and leaves no trace."""
    before = registry.log.position

    plan = await registry.ledger.grammar.migrate("track", RENAME, admin="a", dry_run=True, max_subjects=4)

    assert registry.log.position == before
    assert (plan.dry_run, plan.migrated_count, plan.unmigrated_count) == (True, 4, 1)
    assert (plan.unmigrated_sample, plan.target_type_breakdown) == (("e",), {"song": 4})
    assert (await registry.row()).status == "pending"


async def test_some_may_be_left(registry: Registry) -> None:
    """With a limit the oldest are migrated; the row stays open while there are orphans, and accepted if it was."""
    done = await registry.ledger.grammar.migrate("track", RENAME, admin="a", max_subjects=2)
    assert (done.migrated_count, done.unmigrated_count, done.sample_last) == (2, 3, ())
    assert ((await registry.row()).status, (await registry.row()).count) == ("pending", 3)

    await registry.ledger.grammar.accept("track", admin="a", reason="the rest stays")
    await registry.ledger.grammar.migrate("track", RENAME, admin="a", max_subjects=2)
    assert ((await registry.row()).status, (await registry.row()).count) == ("accepted", 1)
    await registry.ledger.grammar.migrate("track", RENAME, admin="a")
    assert (await registry.row()).status == "resolved"


async def typed(strategy: dict[str, Any]) -> tuple[Registry, Any]:
    """Migrate subjects of several kinds by a strategy."""
    registry = Registry()
    await registry.open("track")
    await registry.announce(["x"], state={"genre": "jazz", "year": 1960})
    await registry.announce(["y"], state={"genre": "talk", "year": 2001}, plugin="radio")
    await registry.announce(["z"], scheme="spotify")
    await registry.reopen("song", "speech")
    done = await registry.ledger.grammar.migrate("track", strategy, admin="a")
    return registry, done


@pytest.mark.parametrize(
    ("strategy", "types"),
    [
        ({"discriminator_field": "genre", "mapping": [("talk", "speech"), ("jazz", "song")]}, "song speech track"),
        (
            {"discriminator_field": "genre", "mapping": [("talk", "speech")], "default_to_type": "song"},
            "song speech song",
        ),
        ({"discriminator_field": "addressing.scheme", "mapping": [("spotify", "song")]}, "track track song"),
        ({"discriminator_field": "addressing.claimant", "mapping": [("radio", "speech")]}, "track speech track"),
    ],
)
async def test_map_goes_by_a_value(strategy: dict[str, Any], types: str) -> None:
    """Subjects go to the type of the value in their state, or of their addressing's scheme or claimant; without one they stay."""
    mapping = [{"value": value, "to_type": to_type} for value, to_type in strategy["mapping"]]
    registry, done = await typed(strategy | {"kind": "map", "mapping": mapping})

    found = await registry.ledger.read(
        lambda state: [state.part(Subjects).describe(name).record for name in ("x", "y", "z")]
    )

    assert " ".join(record.subject_type for record in found if record is not None) == types
    assert done.unmigrated_count == types.count("track")
    assert found[0] is not None
    assert found[0].state == {"genre": "jazz", "year": 1960}
    await registry.ledger.close()


@pytest.mark.parametrize(
    ("predicate", "left"),
    [
        ({"kind": "less_than", "field": "year", "value": 2000}, ("y", "z")),
        ({"kind": "regex", "field": "addressing.scheme", "pattern": "^spot"}, ("x", "y")),
        ({"kind": "equals", "field": "nothing", "value": 1}, ("x", "y", "z")),
    ],
)
async def test_filter_goes_by_a_predicate(predicate: dict[str, Any], left: tuple[str, ...]) -> None:
    """Subjects of which the predicate is true are migrated, the others stay."""
    registry, done = await typed({"kind": "filter", "predicate": predicate, "to_type": "song"})

    assert done.unmigrated_sample == left
    assert done.migrated_count == 3 - len(left)
    await registry.ledger.close()


@pytest.mark.parametrize(
    ("from_type", "strategy", "more", "error"),
    [
        ("album", RENAME, {}, NotAnOrphan),
        ("nothing", RENAME, {}, UnknownOrphans),
        ("track", {"kind": "rename", "to_type": "tune"}, {}, UndeclaredTargetType),
        (
            "track",
            {"kind": "map", "discriminator_field": "f", "mapping": [], "default_to_type": "tune"},
            {},
            UndeclaredTargetType,
        ),
        ("track", {"kind": "map", "discriminator_field": "f", "mapping": []}, {}, InvalidCommand),
        ("track", {"kind": "guess"}, {}, InvalidCommand),
        ("track", {"kind": "filter", "to_type": "song", "predicate": {"kind": "regex", "field": "f", "pattern": "("}}, {}, InvalidCommand),
        ("track", RENAME, {"batch_size": 0}, InvalidCommand),
        ("track", RENAME, {"batch_size": 1001}, InvalidCommand),
        ("track", RENAME, {"max_subjects": 0}, InvalidCommand),
        ("track", RENAME, {"reason": ""}, InvalidCommand),
    ],
)  # fmt: skip
async def test_what_cannot_be_migrated(
    registry: Registry, from_type: str, strategy: Any, more: dict[str, Any], error: type[LedgerError]
) -> None:
    """A type that is declared or unknown, a target that is not declared, a strategy or a number that is none: refused, and nothing done."""
    with pytest.raises(error):
        await registry.ledger.grammar.migrate(from_type, strategy, admin="a", **more)

    assert (await registry.types(), (await registry.row()).status) == ({"album": 1, "track": 5}, "pending")


async def interrupted(registry: Registry, *, after: int, strategy: Any = RENAME) -> None:
    """A migration in batches of two that a crash ends after so many of them."""
    execute, left = registry.ledger.execute, after

    async def failing(command: Command) -> Any:
        nonlocal left
        if isinstance(command, MigrateGrammarBatch):
            if not left:
                raise ConnectionAbortedError
            left -= 1
        return await execute(command)

    registry.ledger.execute = failing  # type: ignore[method-assign]
    with pytest.raises(ConnectionAbortedError):
        await registry.ledger.grammar.migrate("track", strategy, admin="curator", batch_size=2)
    registry.ledger.execute = execute  # type: ignore[method-assign]


async def test_a_migration_goes_on_after_a_crash(registry: Registry) -> None:
    """What was migrated stays so, the rest follows under the same id with progress counted on, and the admin ledger has one entry."""
    await interrupted(registry, after=1)
    await registry.reopen("song", "album")
    row = await registry.row()
    assert (row.status, row.count) == ("migrating", 3)

    done = await registry.ledger.grammar.migrate("track", RENAME, admin="curator", batch_size=2)

    assert (done.migration_id, done.migrated_count) == (row.migration_id, 3)
    assert (await registry.row()).status == "resolved"
    assert await registry.types() == {"album": 1, "song": 5}
    progress = await registry.told("grammar_migration_progress")
    assert [(each["completed"], each["remaining"], each["batch_index"]) for each in progress] == [
        (2, 3, 0),
        (4, 1, 1),
        (5, 0, 2),
    ]
    assert len(await registry.told("subject_migrated")) == 5
    entries = await registry.ledger.read(lambda state: state.part(AdminLedger).entries())
    assert len(entries) == 1


async def test_another_strategy_is_another_migration(registry: Registry) -> None:
    """After a crash the rest may be migrated otherwise: under an id of its own."""
    await interrupted(registry, after=1)
    before = (await registry.row()).migration_id

    done = await registry.ledger.grammar.migrate("track", RenameStrategy(to_type="album"), admin="curator")

    assert done.migration_id != before
    assert await registry.types() == {"album": 4, "song": 2}


async def test_one_at_a_time(registry: Registry) -> None:
    """While the orphans of a type are being migrated, a second migration of them is refused."""
    execute = registry.ledger.execute

    async def nosy(command: Command) -> Any:
        if isinstance(command, MigrateGrammarBatch):
            with pytest.raises(MigrationInFlight):
                await registry.ledger.grammar.migrate("track", RENAME, admin="b")
        return await execute(command)

    registry.ledger.execute = nosy  # type: ignore[method-assign]

    assert (await registry.ledger.grammar.migrate("track", RENAME, admin="a")).migrated_count == 5


async def test_subjects_that_go_meanwhile_are_passed_over(registry: Registry) -> None:
    """A subject that is forgotten between plan and batch is not migrated, and does not stop the others."""
    execute = registry.ledger.execute

    async def racing(command: Command) -> Any:
        if isinstance(command, MigrateGrammarBatch):
            await execute(RetractAddressing(plugin="p", addressing=Addressing("id", "c")))
        return await execute(command)

    registry.ledger.execute = racing  # type: ignore[method-assign]

    done = await registry.ledger.grammar.migrate("track", RENAME, admin="a")

    assert done.migrated_count == 4
    assert (await registry.row()).status == "resolved"


async def test_a_snapshot_of_the_rows_is_all_of_them(registry: Registry) -> None:
    """Rows, also of a migration under way, are the same after a snapshot."""
    await interrupted(registry, after=1)

    part = await registry.ledger.read(lambda state: state.part(GrammarOrphans))

    assert thawed(part).freeze() == part.freeze()
