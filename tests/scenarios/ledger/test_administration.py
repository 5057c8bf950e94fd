"""Administrators: merges, splits and forced retracts in their orders, what is refused, and the admin ledger."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest

from tidings.happenings.variants import SplitStrategy
from tidings.ledger.admin_ledger import AdminEntry, AdminLedger
from tidings.ledger.claims import AnnounceSubject, ClaimRelation
from tidings.ledger.errors import (
    InvalidCommand,
    LedgerError,
    MergeCrossType,
    MergeSelfTarget,
    MergeSourceUnknown,
    SplitTargetIndexOutOfBounds,
    TargetPluginUnknown,
    UnknownSubject,
)
from tidings.ledger.merging import MergeSubjects, RelationAssignment
from tidings.ledger.relations import Relations
from tidings.ledger.subjects import Addressing

from .graph_support import Graph

X, Y, Z = ("x", "1"), ("y", "2"), ("z", "3")


def line(told: dict[str, Any]) -> str:
    """A happening of a merge or split in a few words."""
    match told["type"]:
        case "relation_rewritten":
            return (
                f"rewritten {told['old_subject_id']}>{told['new_subject_id']} {told['predicate']} {told['target_id']}"
            )
        case "relation_split_ambiguous":
            return f"ambiguous {told['predicate']} {told['other_endpoint_id']}"
        case "relation_cardinality_violated_post_rewrite":
            return f"violated {told['subject_id']} {told['predicate']} {told['side']} {told['observed_count']}"
        case "relation_claim_suppression_collapsed":
            edge = f"{told['subject_id']} {told['predicate']} {told['target_id']}"
            return f"collapsed {edge} {told['demoted_claimant']}"
        case "claim_reassigned":
            what = told.get("scheme") or f"{told['predicate']} {told['target_id']}"
            return f"reassigned {told['plugin']} {told['old_subject_id']}>{told['new_subject_id']} {what}"
        case other:
            return str(other)


async def two_tracks(graph: Graph) -> None:
    """Tracks A and B, and albums C, D and E."""
    await graph.subject("A", "x:1", by="p1")
    await graph.subject("B", "y:2", by="p2")
    for album in "CDE":
        await graph.subject(album, kind="album")


async def merge(graph: Graph) -> list[str]:
    return [line(told) for told in await graph.tells(lambda: graph.admin.merge_subjects(X, Y), "N")]


@pytest.mark.req("H37")
async def test_a_merge_of_all_kinds_of_relations(graph: Graph) -> None:
    """
    Relations to a shared target, between the two, of one with itself, to either side, suppressed ones: all are told in the fixed order.
    """
    await two_tracks(graph)
    await graph.relate("A", "album_of", "C", "p1", "p2")
    await graph.relate("B", "album_of", "C", "p2", "p3")
    await graph.relate("B", "album_of", "D", "p3")
    await graph.relate("A", "opens", "E", "p1")
    await graph.relate("B", "opens", "E", "p2")
    await graph.suppress("B", "opens", "E")
    await graph.relate("A", "like", "B", "p1")
    await graph.relate("B", "like", "A", "p2")
    await graph.relate("A", "like", "A", "p4")
    await graph.relate("C", "like", "B", "p1")

    assert await merge(graph) == [
        "subject_merged",
        "rewritten A>N album_of C",
        "rewritten A>N like N",
        "rewritten A>N like B",
        "rewritten A>N opens E",
        "rewritten A>N like B",
        "rewritten B>N album_of C",
        "rewritten B>N album_of D",
        "rewritten B>N like N",
        "rewritten B>N opens E",
        "rewritten B>N like C",
        "rewritten B>N like N",
        "violated N album_of source 2",
        "collapsed N opens E p1",
        "reassigned p1 A>N album_of C",
        "reassigned p2 A>N album_of C",
        "reassigned p4 A>N like N",
        "reassigned p1 A>N like B",
        "reassigned p1 A>N opens E",
        "reassigned p2 A>N like B",
        "reassigned p2 B>N album_of C",
        "reassigned p3 B>N album_of C",
        "reassigned p3 B>N album_of D",
        "reassigned p2 B>N like N",
        "reassigned p2 B>N opens E",
        "reassigned p1 B>N like C",
        "reassigned p1 B>N like N",
        "reassigned p1 A>N x",
        "reassigned p2 B>N y",
    ]
    assert await graph.edges() == {
        ("C", "like", "N"): ("p1",),
        ("N", "album_of", "C"): ("p1", "p2", "p3"),
        ("N", "album_of", "D"): ("p3",),
        ("N", "like", "N"): ("p4", "p2", "p1"),
        ("N", "opens", "E"): ("p1", "p2"),
    }


@pytest.mark.req("H34")
async def test_relations_between_the_two_that_are_merged_become_one_whichever_was_hidden(graph: Graph) -> None:
    """Both directions come to lie on one relation of the new subject to itself; hidden if one of them was, and found either way."""
    for hidden in ("a", "b"):
        one, other = f"{hidden}1", f"{hidden}2"
        await graph.subject(one)
        await graph.subject(other)
        await graph.relate(one, "like", other)
        await graph.relate(other, "like", one)
        await graph.suppress(*((one, "like", other) if hidden == "a" else (other, "like", one)))
        merged = f"{hidden}-merged"
        graph.will_make(merged)
        assert await graph.admin.merge_subjects(one, other) == merged
        record = await graph.relation(merged, "like", merged)
        assert record is not None
        assert record.is_suppressed
        assert await graph.read(lambda state, of=merged: state.part(Relations).neighbours(of, "like")) == []  # type: ignore[misc]
    assert (await graph.edges()).keys() == {("a-merged", "like", "a-merged"), ("b-merged", "like", "b-merged")}


async def test_a_merged_subject_has_the_names_of_both(graph: Graph) -> None:
    """Names of the first, then of the second, whose they were; no state; both old ids lead to it."""
    await two_tracks(graph)
    await graph.plugin("p1").update_state(X, {"on": True})

    await graph.tells(lambda: graph.admin.merge_subjects(Y, X, reason="alike"), "N")

    record = await graph.record("N")
    assert record is not None
    assert [(held.addressing, held.claimant) for held in record.addressings] == [(Y, "p2"), (X, "p1")]
    assert (record.subject_type, record.state) == ("track", None)
    for old_id in "AB":
        assert await graph.record(old_id) is None
        described = await graph.ledger.projections.describe_alias(old_id)
        assert described.record == record
        assert [(each.kind, each.new_ids, each.admin_plugin, each.reason) for each in described.chain] == [
            ("merged", ("N",), "adm", "alike")
        ]


async def test_violations_after_a_merge_are_told_by_subject_predicate_and_side(graph: Graph) -> None:
    """Subjects by their ids, predicates as the catalogue has them, the target side before the source side."""
    await two_tracks(graph)
    await graph.relate("A", "opens", "C")
    await graph.relate("B", "opens", "D")
    await graph.subject("Z", "z:1")
    await graph.relate("Z", "opens", "D")
    await graph.relate("A", "album_of", "D")
    await graph.relate("B", "album_of", "E")
    for source, target in (("A", "C"), ("B", "D"), ("E", "A"), ("Z", "B")):
        await graph.relate(source, "next", target)

    told = await merge(graph)

    assert [each for each in told if each.startswith("violated")] == [
        "violated D opens target 2",
        "violated N album_of source 2",
        "violated N opens source 2",
        "violated N next target 2",
        "violated N next source 2",
    ]


@pytest.mark.req("H39")
@pytest.mark.parametrize(
    ("suppressed", "demoted"),
    [("", []), ("A", ["p2", "p3"]), ("B", ["p1", "p2"]), ("AB", [])],
)
async def test_suppression_stays_whichever_side_had_it(graph: Graph, suppressed: str, demoted: list[str]) -> None:
    """If one of two relations that become one was hidden, all is hidden, and each claim that was visible is told."""
    await two_tracks(graph)
    await graph.relate("A", "like", "C", "p1", "p2")
    await graph.relate("B", "like", "C", "p2", "p3")
    for track in suppressed:
        await graph.suppress(track, "like", "C", f"by {track}")

    told = await graph.tells(lambda: graph.admin.merge_subjects(X, Y), "N")

    collapsed = [each for each in told if each["type"] == "relation_claim_suppression_collapsed"]
    assert [each["demoted_claimant"] for each in collapsed] == demoted
    record = await graph.relation("N", "like", "C")
    assert record is not None
    assert record.claimants == ("p1", "p2", "p3")
    neighbours = await graph.read(lambda state: state.part(Relations).neighbours("N", "like"))
    if not suppressed:
        assert (record.suppression, neighbours) == (None, ["C"])
        return
    assert neighbours == []
    assert record.suppression is not None
    assert record.suppression.reason == f"by {suppressed[0]}"
    for each in collapsed:
        assert each["surviving_suppression_record"]["reason"] == record.suppression.reason


@pytest.mark.parametrize(
    ("a", "b", "error"),
    [
        (X, X, MergeSelfTarget),
        (X, "A", MergeSelfTarget),
        (("q", "q"), Y, MergeSourceUnknown),
        (X, ("q", "q"), MergeSourceUnknown),
        ("nobody", "nothing", MergeSourceUnknown),
        (X, "C", MergeCrossType),
        ("", Y, InvalidCommand),
    ],
)
async def test_what_cannot_be_merged_is_refused(graph: Graph, a: Any, b: Any, error: type[LedgerError]) -> None:
    """A subject with itself, with nobody, or with one of another type: nothing changes, and nothing is entered."""
    await two_tracks(graph)
    before = await graph.frozen()

    with pytest.raises(error):
        await graph.admin.merge_subjects(a, b)

    assert await graph.frozen() == before


async def test_an_alias_is_merged_with_nothing_so_merges_make_no_cycle(graph: Graph) -> None:
    """An id that was merged away cannot be merged again, neither with what it became nor with another; the error says where it went."""
    await two_tracks(graph)
    await graph.subject("T3", "z:3")
    await merge(graph)
    before = await graph.frozen()

    for a, b in (("A", "N"), ("N", "A"), ("A", "B"), ("T3", "B")):
        with pytest.raises(MergeSourceUnknown) as refused:
            await graph.admin.merge_subjects(a, b)
        assert refused.value.hint is not None
        assert "'N'" in refused.value.hint
    for used in ("A", "N", "T3"):
        with pytest.raises(InvalidCommand):
            await graph.ledger.execute(MergeSubjects(admin="adm", a="N", b="T3", new_id=used))

    assert await graph.frozen() == before


async def test_of_two_merges_at_once_one_wins(graph: Graph) -> None:
    """Two administrators merge the same subject with different ones: one does, the other is told that it is gone."""
    await two_tracks(graph)
    await graph.subject("T3", "z:3")

    done = await asyncio.gather(
        graph.admin.merge_subjects("A", "B"),
        graph.ledger.admin("other").merge_subjects("A", "T3"),
        return_exceptions=True,
    )

    assert [type(each) for each in done] == [str, MergeSourceUnknown]
    assert len(await graph.entries()) == 1


async def a_track_to_split(graph: Graph) -> None:
    """A track with three names and relations either way, one of them hidden, one with itself."""
    await graph.subject("T", "x:1", "y:2", "z:3")
    for album in "CD":
        await graph.subject(album, kind="album")
    await graph.relate("T", "album_of", "C", "p1", "p2")
    await graph.relate("T", "opens", "D", "p1")
    await graph.relate("C", "like", "T", "p3")
    await graph.relate("T", "like", "T", "p1")
    await graph.suppress("T", "opens", "D", "dispute")


def assigned(source: str, predicate: str, target: str, index: int) -> RelationAssignment:
    return RelationAssignment(source=source, predicate=predicate, target=target, target_new_id_index=index)


BOTH = ["like C", "album_of C", "like ME", "opens D"]


@pytest.mark.req("H36")
@pytest.mark.parametrize(
    ("strategy", "assignments", "first", "second", "ambiguous"),
    [
        (SplitStrategy.TO_BOTH, (), BOTH, BOTH, []),
        (SplitStrategy.TO_FIRST, (), BOTH, [], []),
        (SplitStrategy.EXPLICIT, (), BOTH, BOTH, ["like C", "album_of C", "like T", "opens D"]),
        (
            SplitStrategy.EXPLICIT,
            (
                assigned("T", "album_of", "C", 1),
                assigned("C", "like", "T", 0),
                assigned("T", "opens", "D", 1),
                assigned("T", "like", "nobody", 1),
            ),
            ["like C", "like ME"],
            ["album_of C", "like ME", "opens D"],
            ["like T"],
        ),
        (
            SplitStrategy.EXPLICIT,
            (
                assigned("T", "album_of", "C", 1),
                assigned("C", "like", "T", 1),
                assigned("T", "opens", "D", 1),
                assigned("T", "like", "T", 1),
            ),
            [],
            BOTH,
            [],
        ),
    ],
)
async def test_the_strategies_of_a_split(
    graph: Graph,
    strategy: SplitStrategy,
    assignments: tuple[RelationAssignment, ...],
    first: list[str],
    second: list[str],
    ambiguous: list[str],
) -> None:
    """
    To all, to the first, or as the plan says; what it leaves out goes to all and is told. Relations by their old triples, groups in order.
    """
    await a_track_to_split(graph)

    told = await graph.tells(
        lambda: graph.admin.split_subject(
            X, [[X], [Y, Z]], strategy=strategy, assignments=assignments, reason="two recordings"
        ),
        "M",
        "N",
    )

    goes_to = {"M": [edge.replace("ME", "M") for edge in first], "N": [edge.replace("ME", "N") for edge in second]}
    order = ["like C", "album_of C", "like", "opens D"]
    moves = [
        f"T>{new_id} {edge}"
        for start in order
        for new_id, edges in goes_to.items()
        for edge in edges
        if edge == start or (start == "like" and edge == f"like {new_id}")
    ]
    claimants = {"like C": ["p3"], "album_of C": ["p1", "p2"], "opens D": ["p1"]}
    assert [line(each) for each in told] == [
        "subject_split",
        *(f"rewritten {move}" for move in moves),
        *(f"ambiguous {edge}" for edge in ambiguous),
        *(f"reassigned {plugin} {move}" for move in moves for plugin in claimants.get(move.split(" ", 1)[1], ["p1"])),
        "reassigned p1 T>M x",
        "reassigned p1 T>N y",
        "reassigned p1 T>N z",
    ]
    assert told[0]["strategy"] == strategy.value
    for new_id in goes_to:
        hidden = await graph.relation(new_id, "opens", "D")
        assert (hidden is not None) == ("opens D" in goes_to[new_id])
        assert hidden is None or hidden.is_suppressed


@pytest.mark.req("H38")
async def test_a_split_tells_violations_after_gaps_and_before_claims(graph: Graph) -> None:
    """A relation that goes to both new subjects makes too many sources of its target."""
    await graph.subject("T", "x:1", "y:2")
    await graph.subject("C", kind="album")
    await graph.relate("T", "opens", "C")

    told = await graph.tells(
        lambda: graph.admin.split_subject(X, [[X], [Y]], strategy=SplitStrategy.EXPLICIT), "M", "N"
    )

    assert [line(each) for each in told] == [
        "subject_split",
        "rewritten T>M opens C",
        "rewritten T>N opens C",
        "ambiguous opens C",
        "violated C opens target 2",
        "reassigned p1 T>M opens C",
        "reassigned p1 T>N opens C",
        "reassigned p1 T>M x",
        "reassigned p1 T>N y",
    ]


@pytest.mark.req("H35")
async def test_a_split_subject_leaves_one_alias(graph: Graph) -> None:
    """The old id stands for all new subjects, which have its type and the names of their groups; the chain ends there."""
    await a_track_to_split(graph)

    graph.will_make("M", "N")

    assert await graph.admin.split_subject("T", [[Z, X], [Y]], reason="two") == ("M", "N")

    described = await graph.ledger.projections.describe_alias("T")
    assert (described.kind, described.record) == ("aliased", None)
    assert [(each.kind, each.new_ids, each.reason) for each in described.chain] == [("split", ("M", "N"), "two")]
    first = await graph.record("M")
    assert first is not None
    assert (first.subject_type, [held.addressing for held in first.addressings]) == ("track", [Z, X])


@pytest.mark.parametrize(
    ("source", "partition", "options", "error"),
    [
        (("q", "q"), [[X], [Y, Z]], {}, UnknownSubject),
        ("T", [[X, Y, Z]], {}, InvalidCommand),
        ("T", [], {}, InvalidCommand),
        ("T", [[X, Y, Z], []], {}, InvalidCommand),
        ("T", [[X], [Y]], {}, InvalidCommand),
        ("T", [[X], [Y, Z, X]], {}, InvalidCommand),
        ("T", [[X], [Y, Z, ("q", "q")]], {}, InvalidCommand),
        ("T", [[X], [Y, Z, ("id", "C")]], {}, InvalidCommand),
        (
            "T",
            [[X], [Y, Z]],
            {"strategy": "explicit", "assignments": [assigned("T", "like", "T", 2)]},
            SplitTargetIndexOutOfBounds,
        ),
        (
            "T",
            [[X], [Y, Z]],
            {"strategy": "explicit", "assignments": [assigned("T", "like", "T", -1)]},
            SplitTargetIndexOutOfBounds,
        ),
        (
            "T",
            [[X], [Y, Z]],
            {"strategy": "explicit", "assignments": [assigned("T", "like", "T", 0), assigned("T", "like", "T", 1)]},
            InvalidCommand,
        ),
        ("T", [[X], [Y, Z]], {"assignments": [assigned("T", "like", "T", 0)]}, InvalidCommand),
    ],
)
async def test_what_cannot_be_split_is_refused(
    graph: Graph, source: Any, partition: Any, options: dict[str, Any], error: type[LedgerError]
) -> None:
    """Groups that do not cover the names exactly, or a plan with a group that there is not: nothing is made, nothing is entered."""
    await a_track_to_split(graph)
    before = await graph.frozen()

    with pytest.raises(error):
        await graph.admin.split_subject(source, partition, **options)

    assert await graph.frozen() == before


async def test_a_forced_retract_of_one_name_of_several(graph: Graph) -> None:
    """Only the retract itself is told while the subject has another name."""
    await graph.subject("T", "x:1", by="p1")
    await graph.plugin("p2").announce_subject("track", [X, Y])

    assert await graph.tells(lambda: graph.admin.force_retract_addressing("p2", Y, reason="wrong")) == [
        {
            "type": "subject_addressing_forced_retract",
            "admin_plugin": "adm",
            "target_plugin": "p2",
            "canonical_id": "T",
            "scheme": "y",
            "value": "2",
            "reason": "wrong",
        }
    ]
    record = await graph.record("T")
    assert record is not None
    assert [held.addressing for held in record.addressings] == [X]


@pytest.mark.req("H33")
async def test_a_forced_retract_of_a_claim_comes_before_the_relation_goes(graph: Graph) -> None:
    """While another plugin claims it only the retract is told; with the last claim the administrator is named as who retracted."""
    await two_tracks(graph)
    await graph.relate("A", "like", "C", "p1", "p2")
    forced = {
        "type": "relation_claim_forced_retract",
        "admin_plugin": "adm",
        "source_id": "A",
        "predicate": "like",
        "target_id": "C",
        "reason": None,
    }

    assert await graph.tells(lambda: graph.admin.force_retract_relation("p1", X, "like", "C")) == [
        {**forced, "target_plugin": "p1"}
    ]
    assert await graph.tells(lambda: graph.admin.force_retract_relation("p2", X, "like", "C")) == [
        {**forced, "target_plugin": "p2"},
        {
            "type": "relation_forgotten",
            "plugin": "adm",
            "source_id": "A",
            "predicate": "like",
            "target_id": "C",
            "reason": {"kind": "claims_retracted", "retracting_plugin": "adm"},
        },
    ]
    assert await graph.edges() == {}


@pytest.mark.parametrize(
    ("target_plugin", "addressing", "edge", "answer"),
    [
        ("p1", ("q", "q"), ("A", "like", "D"), "not_found"),
        ("p1", Y, ("nobody", "like", "C"), "not_found"),
        ("p1", Y, (Y, "like", "C"), "not_found"),
        ("p1", Y, ("A", "sings", "C"), "not_found"),
        ("idle", X, ("A", "like", "C"), "not_found"),
        ("typo", X, ("A", "like", "C"), TargetPluginUnknown),
        ("adm", X, ("A", "like", "C"), TargetPluginUnknown),
        ("", X, ("A", "like", "C"), InvalidCommand),
    ],
)
async def test_a_forced_retract_of_what_is_not_claimed(
    graph: Graph, target_plugin: str, addressing: tuple[str, str], edge: Any, answer: Any
) -> None:
    """What the plugin does not claim is passed over silently; a plugin that nobody knows is an error."""
    await two_tracks(graph)
    await graph.relate("A", "like", "C", "p1")
    graph.plugin("idle")
    before = await graph.frozen()

    for action in (
        partial(graph.admin.force_retract_addressing, target_plugin, addressing),
        partial(graph.admin.force_retract_relation, target_plugin, *edge),
    ):
        if isinstance(answer, str):
            assert await graph.tells(action) == []
            assert graph.result == answer
        else:
            with pytest.raises(answer):
                await action()

    assert await graph.frozen() == before


async def test_an_administrator_retracts_its_own_claims_as_a_plugin(graph: Graph) -> None:
    """A forced retract of one's own claim is refused; one of a plugin that is gone is done."""
    await graph.subject("T", "x:1", by="adm")
    await graph.subject("T2", "y:2", by="gone")
    await graph.plugin("gone").claim_relation("T2", "like", "T")

    with pytest.raises(InvalidCommand):
        await graph.admin.force_retract_addressing("adm", X)
    command = graph.admin.force_retract_relation("gone", "T2", "like", "T")
    assert await command == "relation_forgotten"


Act = Callable[[Graph], Awaitable[Any]]


@pytest.mark.req("H40")
@pytest.mark.parametrize(
    ("act", "fields"),
    [
        (
            lambda graph: graph.admin.force_retract_addressing("p1", X, reason="r"),
            {
                "kind": "subject_addressing_forced_retract",
                "target_plugin": "p1",
                "target_subject": "A",
                "target_addressing": Addressing(*X),
                "reason": "r",
            },
        ),
        (
            lambda graph: graph.admin.force_retract_relation("p1", X, "like", "C", reason="r"),
            {
                "kind": "relation_claim_forced_retract",
                "target_plugin": "p1",
                "target_relation": ("A", "like", "C"),
                "reason": "r",
            },
        ),
        (
            lambda graph: graph.admin.merge_subjects(X, Y, reason="r"),
            {
                "kind": "subject_merge",
                "target_subject": "M",
                "additional_subjects": ("A", "B"),
                "reason": "r",
            },
        ),
        (
            lambda graph: graph.admin.split_subject("S", [[("s", "1")], [("s", "2")]], reason="r"),
            {
                "kind": "subject_split",
                "target_subject": "S",
                "additional_subjects": ("M", "N"),
                "reason": "r",
            },
        ),
        (
            lambda graph: graph.admin.suppress_relation(X, "like", "C", reason="r"),
            {"kind": "relation_suppress", "target_relation": ("A", "like", "C"), "reason": "r"},
        ),
        (
            lambda graph: graph.admin.suppress_relation("B", "like", "C", reason="r"),
            {
                "kind": "relation_suppression_reason_updated",
                "target_relation": ("B", "like", "C"),
                "reason": "r",
                "prior_reason": "before",
            },
        ),
        (
            lambda graph: graph.admin.unsuppress_relation("B", "like", "C"),
            {"kind": "relation_unsuppress", "target_relation": ("B", "like", "C")},
        ),
    ],
)
async def test_the_entry_is_there_before_the_happening_is_seen(graph: Graph, act: Act, fields: dict[str, Any]) -> None:
    """Whoever reads the admin ledger upon the first happening of an operation finds who did what to what, and why."""
    await two_tracks(graph)
    await graph.subject("S", "s:1", "s:2")
    await graph.relate("A", "like", "C", "p1")
    await graph.relate("B", "like", "C", "p1")
    await graph.ledger.admin("other").suppress_relation("B", "like", "C", reason="before")
    at_ms = graph.clock.now_ns() // 1_000_000
    graph.will_make("M", "N")

    with graph.ledger.happenings.subscribe() as subscription:
        acting = asyncio.ensure_future(act(graph))
        await subscription.recv()
        seen = await graph.read(lambda state: state.part(AdminLedger).entries("adm"))
        await acting

    assert seen == (AdminEntry(admin_plugin="adm", at_ms=at_ms, **fields),)
    assert len(await graph.entries()) == 2


@pytest.mark.parametrize("count", [500, pytest.param(100_000, marks=[pytest.mark.heavy, pytest.mark.timeout(600)])])
async def test_a_hub_with_very_many_relations(graph: Graph, count: int) -> None:
    """Merged, split, forgotten: every relation goes along and is told, in order."""
    await graph.subject("A", "x:1")
    await graph.subject("B", "y:2")
    names = [f"t{number:06}" for number in range(count)]
    for start in range(0, count, 1000):
        await graph.ledger.execute_many(
            [
                command
                for name in names[start : start + 1000]
                for command in (
                    AnnounceSubject(
                        plugin="p1", subject_type="track", addressings=(Addressing("n", name),), new_id=name
                    ),
                    ClaimRelation(plugin="p1", source="A", predicate="like", target=name),
                )
            ]
        )

    seq = graph.ledger.happenings.last_seq
    await graph.ledger.execute(MergeSubjects(admin="adm", a="A", b="B", new_id="N"))
    told = [each.happening.variant async for each in graph.ledger.happenings.history(seq)]
    assert told == [
        "subject_merged",
        *["relation_rewritten"] * count,
        *["claim_reassigned"] * (count + 2),
    ]
    assert await graph.read(lambda state: state.part(Relations).neighbours("N", "like")) == names

    await graph.admin.split_subject("N", [[X], [Y]], strategy=SplitStrategy.TO_FIRST)
    seq = graph.ledger.happenings.last_seq
    await graph.plugin("p1").retract_addressing(X)
    told = [each.happening.variant async for each in graph.ledger.happenings.history(seq)]
    assert told == ["subject_forgotten", *["relation_forgotten"] * count]
    assert await graph.read(lambda state: len(state.part(Relations))) == 0
