"""What the ledger shows: subjects with their surroundings, aliases, racks."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.beyond import Beyond, crossed
from tests.callbacks import CALLBACK_S_MAX, measured_callbacks
from tidings.happenings.variants import SubjectStateChanged
from tidings.ledger import (
    ErrorClass,
    Ledger,
    LedgerError,
    Manifest,
    Plugin,
    PluginRequest,
    ProjectionScope,
    composing,
)
from tidings.ledger.claims import AnnounceSubject, ClaimRelation, RetractRelation
from tidings.ledger.composing import ProjectionBounds, SubjectProjection
from tidings.ledger.composing import project as project_state
from tidings.ledger.conflicts import Conflicts
from tidings.ledger.errors import ProjectionTooLarge
from tidings.ledger.relations import Relations, Triple, WalkDirection
from tidings.ledger.state import LedgerState
from tidings.ledger.subjects import Addressing, ClaimedAddressing, SubjectRecord, Subjects
from tidings.testing import VirtualClock

from .support import CATALOGUE, OUTPUTS, PLAYBACK

Edges = list[tuple[str, str]]
LIKE = ("like",)


async def graph(ledger: Ledger, edges: Edges, plugin: str = "org.example.one") -> dict[str, str]:
    """Tracks by name, and who likes whom."""
    one = ledger.plugin(plugin)
    ids: dict[str, str] = {}
    for name in sorted({name for edge in edges for name in edge}):
        announced = await one.announce_subject("track", [("n", name)])
        assert announced.canonical_id is not None
        ids[name] = announced.canonical_id
    for source, target in edges:
        await one.claim_relation(("n", source), "like", ("n", target))
    return ids


async def project(ledger: Ledger, canonical_id: str, **scope: Any) -> SubjectProjection:
    scope.setdefault("relation_predicates", LIKE)
    projected = await ledger.projections.project_subject(canonical_id, ProjectionScope(**scope))
    assert projected.aliased_from is None
    assert projected.subject is not None
    return projected.subject


def tree(projection: SubjectProjection, ids: dict[str, str]) -> Any:
    """Names of what is shown: a dictionary for what is nested, a name for what is only referred to."""
    names = {canonical_id: name for name, canonical_id in ids.items()}
    return sorted(
        (
            (names[each.target_id], tree(each.nested, ids)) if each.nested is not None else (names[each.target_id],)
            for each in projection.related
        ),
    )


async def test_a_subject_is_shown_with_its_names_state_and_claimants(ledger: Ledger, clock: VirtualClock) -> None:
    """
    A projection has type, names with their claimants, state, and every claimant once, those of relations included.
    """
    one, two = ledger.plugin("org.example.one"), ledger.plugin("org.example.two")
    await one.announce_subject("track", [("x", "1")], state={"rating": 5})
    subject = (await two.announce_subject("track", [("x", "1"), ("y", "2")])).canonical_id
    assert subject is not None
    for plugin in ("org.example.one", "org.example.three"):
        await ledger.plugin(plugin).claim_relation(subject, "like", subject)

    plain = (await ledger.projections.project_subject(subject)).subject
    shown = await project(ledger, subject)

    assert plain is not None
    assert (plain.subject_type, plain.state, plain.related) == ("track", {"rating": 5}, ())
    assert [(each.scheme, each.value, each.claimant) for each in plain.addressings] == [
        ("x", "1", "org.example.one"),
        ("y", "2", "org.example.two"),
    ]
    assert (plain.composed_at_ms, plain.shape_version) == (clock.now_ns() // 1_000_000, 1)
    assert plain.claimants == ("org.example.one", "org.example.two")
    assert shown.claimants == ("org.example.one", "org.example.three", "org.example.two")
    assert [(each.target_type, each.relation_claimants) for each in shown.related] == [
        ("track", ("org.example.one", "org.example.three"))
    ]
    assert (shown.degraded, shown.walk_truncated) == (False, False)


async def test_a_reader_cannot_change_the_state_that_it_was_shown(ledger: Ledger) -> None:
    """What reads and happenings give of a subject's state is a copy: only commands change the ledger."""
    plugin = ledger.plugin("org.example.files")
    track_id = (await plugin.announce_subject("track", [("file", "1")], state={"marks": [1]})).canonical_id
    assert track_id is not None
    with ledger.happenings.subscribe() as changes:
        await plugin.update_state(("file", "1"), {"marks": [2]})
        changed = (await changes.recv()).happening
    assert isinstance(changed, SubjectStateChanged)
    described = (await ledger.projections.describe_alias(track_id)).record
    shown = (await ledger.projections.project_subject(track_id)).subject
    assert described is not None
    assert shown is not None
    listed = (await ledger.projections.list_subjects()).items[0]

    for state in (changed.new_state, described.state, shown.state, listed.state):
        state["marks"].append("changed")

    kept = await ledger.read(lambda state: state.part(Subjects).require(track_id).state)
    assert kept == {"marks": [2]}


@pytest.mark.parametrize(
    ("scope", "shown"),
    [
        ({"max_depth": 0}, []),
        ({}, [("b",), ("c",)]),
        ({"max_depth": 2}, [("b", [("d",)]), ("c", [("d",)])]),
        ({"max_depth": 3}, [("b", [("d", [("a",)])]), ("c", [("d",)])]),
        ({"max_depth": 1000}, [("b", [("d", [("a",)])]), ("c", [("d",)])]),
        ({"direction": WalkDirection.INVERSE}, [("d",)]),
        ({"direction": WalkDirection.BOTH}, [("b",), ("c",), ("d",)]),
        ({"relation_predicates": ()}, []),
        ({"relation_predicates": ("album_of",)}, []),
        ({"relation_predicates": ("album_of", "like", "like")}, [("b",), ("c",)]),
    ],
)
async def test_the_scope_says_how_far_to_look(ledger: Ledger, scope: dict[str, Any], shown: Any) -> None:
    """
    Depth 0 shows no relations, 1 the other ends, more nests them; a subject is nested once, where it is nearest; cycles end.
    """
    ids = await graph(ledger, [("a", "b"), ("a", "c"), ("b", "d"), ("c", "d"), ("d", "a")])

    projection = await project(ledger, ids["a"], **scope)

    assert tree(projection, ids) == shown
    assert not projection.walk_truncated


async def test_the_visits_of_a_walk_are_limited(ledger: Ledger) -> None:
    """
    When as many subjects as allowed are nested, the rest are referred to, and the projection says that something is missing.
    """
    ids = await graph(ledger, [("a", name) for name in "bcdef"])

    projection = await project(ledger, ids["a"], max_depth=2, max_visits=3)

    assert sum(each.nested is not None for each in projection.related) == 2
    assert len(projection.related) == 5
    assert projection.walk_truncated


@pytest.mark.bound("ledger.composing.RELATED_MAX")
@crossed
async def test_the_relations_of_a_projection_are_limited(ledger: Ledger, beyond: Beyond) -> None:
    """With as many relations as there are all are shown; beyond a bound of three the rest is omitted, and the projection is truncated."""
    ids = await graph(ledger, [("a", f"b{number:02}") for number in range(beyond(3))])
    targets = sorted({*ids.values()} - {ids["a"]})
    for limit in (beyond(3), 3):
        projected = await ledger.projections.project_subject(
            ids["a"], ProjectionScope(relation_predicates=LIKE), bounds=ProjectionBounds(relations_max=limit)
        )
        assert projected.subject is not None
        assert [each.target_id for each in projected.subject.related] == targets[:limit]
        assert projected.subject.walk_truncated is (limit == 3)


@pytest.mark.bound("ledger.composing.DEPTH_MAX", "ledger.composing.VISITS_MAX")
@crossed
async def test_a_scope_beyond_the_limits_is_lowered_to_them(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, beyond: Beyond
) -> None:
    """More depth or visits than allowed show what the limits show, and no more."""
    monkeypatch.setattr(composing, "DEPTH_MAX", 3)
    chain = [(f"c{number:02}", f"c{number + 1:02}") for number in range(40)]
    ids = await graph(ledger, chain)
    deepest = await project(ledger, ids["c00"], max_depth=3)
    assert await project(ledger, ids["c00"], max_depth=beyond(3)) == deepest
    assert await project(ledger, ids["c00"], max_depth=2) != deepest
    monkeypatch.setattr(composing, "VISITS_MAX", 2)
    widest = await project(ledger, ids["c00"], max_depth=3, max_visits=2)
    assert widest.walk_truncated
    assert await project(ledger, ids["c00"], max_depth=3, max_visits=beyond(2)) == widest


@pytest.mark.parametrize("target_count", [100, 1000])
async def test_the_bytes_of_a_projection_are_limited(ledger: Ledger, target_count: int) -> None:
    """States of 1,000 bytes each beyond the bound refuse the projection, and name the bound."""
    ids = await graph(ledger, [("a", f"b{number}") for number in range(target_count)])
    one = ledger.plugin("org.example.one")
    for canonical_id in ids.values():
        await one.update_state(canonical_id, "x" * 1000)
    scope = ProjectionScope(relation_predicates=LIKE, max_depth=2)
    bounds = ProjectionBounds(bytes_max=100_000)

    with pytest.raises(ProjectionTooLarge, match="100000 bytes"):
        await ledger.projections.project_subject(ids["a"], scope, bounds=bounds)
    by_name = await ledger.projections.project_subject(ids["b1"], scope, bounds=bounds)
    assert by_name.subject is not None


async def large_graph(ledger: Ledger, subject_count: int) -> tuple[str, ...]:
    """A chain of hubs: each hundredth subject likes the 99 after it, and all hubs like each other's neighbour."""
    one = "org.example.one"
    ids = tuple(f"s{number:06}" for number in range(subject_count))
    await ledger.execute_many(
        [
            AnnounceSubject(plugin=one, subject_type="track", addressings=(Addressing("n", name),), new_id=name)
            for name in ids
        ]
    )
    pairs = [(ids[number - number % 100], ids[number]) for number in range(subject_count) if number % 100]
    pairs += [(ids[number], ids[number + 100]) for number in range(0, subject_count - 100, 100)]
    pairs += [(ids[number], ids[(number * 7 + 13) % subject_count]) for number in range(subject_count)]
    await ledger.execute_many(
        [ClaimRelation(plugin=one, source=a, predicate="like", target=b) for a, b in pairs if a != b]
    )
    return ids


@pytest.mark.parametrize("subject_count", [3_000, pytest.param(50_000, marks=pytest.mark.heavy)])
async def test_a_large_projection_does_not_block_the_loop(
    ledger: Ledger, subject_count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No callback of gathering and composing takes 50 ms."""
    ids = await large_graph(ledger, subject_count)
    scope = ProjectionScope(relation_predicates=LIKE, max_depth=32, max_visits=100_000, direction=WalkDirection.BOTH)
    with measured_callbacks(monkeypatch) as measured:
        projecting = asyncio.create_task(ledger.projections.project_subject(ids[0], scope))  # a callback of its own
        projected = await projecting

    assert projected.subject is not None
    count, level = 0, [projected.subject]
    while level:
        count += sum(len(subject.related) for subject in level)
        level = [other.nested for subject in level for other in subject.related if other.nested is not None]
    assert count == min(2 * await ledger.read(lambda state: len(state.part(Relations))), 100_000)
    assert measured.longest_s < CALLBACK_S_MAX, measured


async def test_a_projection_is_of_one_moment_while_commands_change_the_graph(ledger: Ledger) -> None:
    """
    Two relations are moved by one commit each, again and again: no projection shows both or neither.

    Commands are executed between projections, so neither waits for more than one of the other.
    """
    ids = await large_graph(ledger, 1_000)
    one = ledger.plugin("org.example.one")
    scope = ProjectionScope(relation_predicates=LIKE, max_depth=32, max_visits=100_000)
    first, last = ids[0], ids[-1]
    extra = await one.announce_subject("track", [("n", "extra")])
    assert extra.canonical_id is not None
    stops, has_moved = asyncio.Event(), asyncio.Event()
    moves = 0

    async def move() -> None:
        nonlocal moves
        at, other = first, last
        await one.claim_relation(at, "like", extra.canonical_id or "")
        while not stops.is_set():
            at, other = other, at
            await ledger.execute_many(
                [
                    RetractRelation(plugin=one.name, source=other, predicate="like", target=extra.canonical_id or ""),
                    ClaimRelation(plugin=one.name, source=at, predicate="like", target=extra.canonical_id or ""),
                ]
            )
            moves += 1
            has_moved.set()

    moving = asyncio.create_task(move())
    await has_moved.wait()
    for number in range(10):
        before = moves
        projected = await ledger.projections.project_subject(first, scope)
        assert projected.subject is not None
        level, sources = [projected.subject], []
        while level:
            sources += [s.canonical_id for s in level for other in s.related if other.target_id == extra.canonical_id]
            level = [other.nested for s in level for other in s.related if other.nested is not None]
        assert len(sources) == 1
        assert moves > before or number == 0
    stops.set()
    await moving


async def test_a_cancelled_projection_lets_commands_go_on(ledger: Ledger) -> None:
    """The caller gives up in the middle of gathering: the next command and the next projection are done."""
    ids = await large_graph(ledger, 3_000)
    scope = ProjectionScope(relation_predicates=LIKE, max_depth=32, max_visits=100_000)
    projecting = asyncio.create_task(ledger.projections.project_subject(ids[0], scope))
    for _ in range(4):
        await asyncio.sleep(0)
    projecting.cancel()
    announced = await ledger.plugin("org.example.one").announce_subject("track", [("n", "new")])

    assert announced.canonical_id is not None
    assert projecting.cancelled()
    assert (await ledger.projections.project_subject(announced.canonical_id)).subject is not None


def test_a_relation_that_leads_nowhere_degrades_a_projection() -> None:
    """
    Were a relation to lead to a subject that is not there, it is shown without a type, and the projection is degraded.
    """
    state = LedgerState(Subjects(), Relations(), Conflicts())
    held = (ClaimedAddressing(Addressing("n", "a"), "org.example.one", 0),)
    state.part(Subjects).put(SubjectRecord("a", "track", held, 0, 0))
    state.part(Relations).claim(Triple("a", "like", "gone"), "org.example.one", 0)

    shown = project_state(state, "a", ProjectionScope(relation_predicates=LIKE, max_depth=2), 0)

    assert [(each.target_id, each.target_type, each.nested) for each in shown.related] == [("gone", None, None)]
    assert [(each.kind, each.detail) for each in shown.degraded_reasons] == [
        ("dangling_relation", "predicate=like target_id=gone")
    ]


async def test_a_suppressed_relation_is_not_shown(ledger: Ledger) -> None:
    """
    What an administrator hides is in no projection, from either end.
    """
    ids = await graph(ledger, [("a", "b"), ("a", "c")])
    await ledger.admin("org.example.admin").suppress_relation(ids["a"], "like", ids["b"])

    assert tree(await project(ledger, ids["a"]), ids) == [("c",)]
    assert tree(await project(ledger, ids["b"], direction=WalkDirection.INVERSE), ids) == []


async def test_a_subject_in_conflict_is_degraded(ledger: Ledger) -> None:
    """
    A subject that a plugin takes for the same as another is shown as degraded until the conflict is settled.
    """
    ids = await graph(ledger, [("a", "b")])
    one = ledger.plugin("org.example.one")
    await one.announce_subject("track", [("n", "a"), ("n", "b")])

    doubtful = await project(ledger, ids["a"])
    merged = await ledger.admin("org.example.admin").merge_subjects(ids["a"], ids["b"])

    assert [(each.kind, each.detail) for each in doubtful.degraded_reasons] == [
        ("subject_in_conflict", "conflict_id=1")
    ]
    assert doubtful.degraded
    assert not (await project(ledger, merged)).degraded


# Ids that are retired


async def test_a_merged_id_leads_to_its_subject(ledger: Ledger) -> None:
    """
    Under a merged id the new subject is shown, with the way there; without following, only the way.
    """
    ids = await graph(ledger, [("a", "b")])
    new_id = await ledger.admin("org.example.admin").merge_subjects(ids["a"], ids["b"])

    shown = await ledger.projections.project_subject(ids["a"])
    unfollowed = await ledger.projections.project_subject(ids["a"], follow_aliases=False)

    assert shown.subject is not None
    assert shown.subject.canonical_id == new_id
    assert shown.aliased_from is not None
    assert [(each.old_id, each.kind, each.new_ids) for each in shown.aliased_from.chain] == [
        (ids["a"], "merged", (new_id,))
    ]
    assert (shown.aliased_from.queried_id, shown.aliased_from.terminal_id) == (ids["a"], new_id)
    assert (unfollowed.subject, unfollowed.aliased_from) == (None, shown.aliased_from)


async def test_a_split_id_leads_nowhere_alone(ledger: Ledger) -> None:
    """
    Under an id that was split, or forgotten, no subject is shown, only what became of it; an id that never was is unknown.
    """
    one = ledger.plugin("org.example.one")
    subject = (await one.announce_subject("track", [("x", "1"), ("y", "2")])).canonical_id
    assert subject is not None
    new_ids = await ledger.admin("org.example.admin").split_subject(subject, [[("x", "1")], [("y", "2")]])
    await one.retract_addressing(("x", "1"))

    split = await ledger.projections.project_subject(subject)
    forgotten = await ledger.projections.project_subject(new_ids[0])
    with pytest.raises(LedgerError) as caught:
        await ledger.projections.project_subject("nobody")

    for projected, kind in ((split, "split"), (forgotten, "tombstone")):
        assert projected.subject is None
        assert projected.aliased_from is not None
        assert projected.aliased_from.terminal_id is None
        assert [each.kind for each in projected.aliased_from.chain] == [kind]
    assert (caught.value.error_class, caught.value.subclass) == (ErrorClass.NOT_FOUND, "unknown_subject")


async def test_aliases_are_described_with_their_chain(ledger: Ledger) -> None:
    """
    An id is found, aliased with every step to the live subject, or not found; without the chain, only its own step is given.
    """
    ids = await graph(ledger, [("a", "b"), ("a", "c")])
    admin = ledger.admin("org.example.admin")
    second = await admin.merge_subjects(ids["a"], ids["b"])
    third = await admin.merge_subjects(second, ids["c"])
    describe = ledger.projections.describe_alias

    chained, single = await describe(ids["a"]), await describe(ids["a"], include_chain=False)

    assert [each.new_ids for each in chained.chain] == [(second,), (third,)]
    assert chained.record is not None
    assert (chained.kind, chained.record.canonical_id) == ("aliased", third)
    assert ([each.new_ids for each in single.chain], single.record) == ([(second,)], None)
    assert ((await describe(third)).kind, (await describe("nobody")).kind) == ("found", "not_found")


# Racks


async def test_a_rack_is_shown_with_the_plugins_on_it(ledger: Ledger) -> None:
    """
    A rack has its charter and shelves as the catalogue declares them, and who stands there now.
    """

    class Answers:
        async def handle_request(self, request: PluginRequest) -> bytes:
            return b""

    plugin: Plugin = ledger.plugin("org.example.outputs", Answers(), Manifest(shelves=(OUTPUTS,)))
    await ledger.finish_waiting()
    rack = await ledger.projections.project_rack("audio")
    seq = ledger.happenings.last_seq
    await plugin.unload()
    without = await ledger.projections.project_rack("audio")
    with pytest.raises(LedgerError) as caught:
        await ledger.projections.project_rack("video")

    assert (rack.charter, rack.current_seq) == (CATALOGUE.racks[0].charter, seq)
    assert [(each.fully_qualified, each.shape, each.shape_supports, each.description) for each in rack.shelves] == [
        (PLAYBACK, 1, (), "plays tracks"),
        (OUTPUTS, 2, (1,), ""),
    ]
    occupants = [each.occupant and (each.occupant.plugin, each.occupant.interaction_kind) for each in rack.shelves]
    assert occupants == [None, ("org.example.outputs", "respondent")]
    assert [each.occupant for each in without.shelves] == [None, None]
    assert (caught.value.error_class, caught.value.subclass) == (ErrorClass.NOT_FOUND, "unknown_rack")
