"""What a merge, a split and a forgotten subject tell, word for word and in order."""

from __future__ import annotations

from typing import Any

import pytest

from tidings.happenings.variants import SplitStrategy
from tidings.ledger.merging import RelationAssignment
from tidings.ledger.subjects import Addressing, Subjects

from .graph_support import Graph


def merged(new_id: str, *source_ids: str) -> dict[str, Any]:
    return {
        "type": "subject_merged",
        "admin_plugin": "adm",
        "source_ids": list(source_ids),
        "new_id": new_id,
        "reason": None,
    }


def rewritten(old: str, new: str, target: str) -> dict[str, Any]:
    return {
        "type": "relation_rewritten",
        "admin_plugin": "adm",
        "predicate": "album_of",
        "old_subject_id": old,
        "new_subject_id": new,
        "target_id": target,
    }


def relation_moved(plugin: str, old: str, new: str, target: str) -> dict[str, Any]:
    return {
        "type": "claim_reassigned",
        "admin_plugin": "adm",
        "plugin": plugin,
        "kind": "relation",
        "old_subject_id": old,
        "new_subject_id": new,
        "predicate": "album_of",
        "target_id": target,
    }


def addressing_moved(plugin: str, old: str, new: str, scheme: str, value: str) -> dict[str, Any]:
    return {
        "type": "claim_reassigned",
        "admin_plugin": "adm",
        "plugin": plugin,
        "kind": "addressing",
        "old_subject_id": old,
        "new_subject_id": new,
        "scheme": scheme,
        "value": value,
    }


async def two_tracks(graph: Graph, *, second_album: str) -> None:
    await graph.subject("T1", "x:1", by="p1")
    await graph.subject("T2", "y:2", by="p2")
    await graph.subject("B1", kind="album")
    await graph.subject("B2", kind="album")
    await graph.relate("T1", "album_of", "B1", "p1")
    await graph.relate("T2", "album_of", second_album, "p2")


async def merge(graph: Graph) -> list[dict[str, Any]]:
    return await graph.tells(lambda: graph.admin.merge_subjects(("x", "1"), ("y", "2")), "T3")


@pytest.mark.req("H34")
async def test_a_merge_that_makes_too_many_targets(graph: Graph) -> None:
    """The merge, both relations, the violation, both claims, both addressings."""
    await two_tracks(graph, second_album="B2")

    assert await merge(graph) == [
        merged("T3", "T1", "T2"),
        rewritten("T1", "T3", "B1"),
        rewritten("T2", "T3", "B2"),
        {
            "type": "relation_cardinality_violated_post_rewrite",
            "admin_plugin": "adm",
            "subject_id": "T3",
            "predicate": "album_of",
            "side": "source",
            "declared": "at_most_one",
            "observed_count": 2,
        },
        relation_moved("p1", "T1", "T3", "B1"),
        relation_moved("p2", "T2", "T3", "B2"),
        addressing_moved("p1", "T1", "T3", "x", "1"),
        addressing_moved("p2", "T2", "T3", "y", "2"),
    ]
    aliases = await graph.read(lambda state: [state.part(Subjects).alias(old_id) for old_id in ("T1", "T2")])
    assert [(alias.kind, alias.new_ids) for alias in aliases if alias] == [("merged", ("T3",)), ("merged", ("T3",))]


@pytest.mark.req("H39")
async def test_a_merge_onto_a_suppressed_relation(graph: Graph) -> None:
    """The merge, both relations, no violation, the claim that was visible, both claims, both addressings."""
    await two_tracks(graph, second_album="B1")
    suppressed_at_ms = graph.clock.now_ns() // 1_000_000
    await graph.suppress("T1", "album_of", "B1", "dispute")
    graph.clock.jump(7)

    assert await merge(graph) == [
        merged("T3", "T1", "T2"),
        rewritten("T1", "T3", "B1"),
        rewritten("T2", "T3", "B1"),
        {
            "type": "relation_claim_suppression_collapsed",
            "admin_plugin": "adm",
            "subject_id": "T3",
            "predicate": "album_of",
            "target_id": "B1",
            "demoted_claimant": "p2",
            "surviving_suppression_record": {
                "admin_plugin": "adm",
                "suppressed_at_ms": suppressed_at_ms,
                "reason": "dispute",
            },
        },
        relation_moved("p1", "T1", "T3", "B1"),
        relation_moved("p2", "T2", "T3", "B1"),
        addressing_moved("p1", "T1", "T3", "x", "1"),
        addressing_moved("p2", "T2", "T3", "y", "2"),
    ]


async def split(graph: Graph, *assignments: RelationAssignment) -> list[dict[str, Any]]:
    """Split a track with two names and a relation, as ``assignments`` say."""
    await graph.subject("T", "x:1", "y:2")
    await graph.subject("B1", kind="album")
    await graph.relate("T", "album_of", "B1")
    return await graph.tells(
        lambda: graph.admin.split_subject(
            ("x", "1"), [[("x", "1")], [("y", "2")]], strategy=SplitStrategy.EXPLICIT, assignments=assignments
        ),
        "N1",
        "N2",
    )


SPLIT = {
    "type": "subject_split",
    "admin_plugin": "adm",
    "source_id": "T",
    "new_ids": ["N1", "N2"],
    "strategy": "explicit",
    "reason": None,
}


@pytest.mark.req("H35", "H36")
async def test_a_split_whose_plan_leaves_a_relation_out(graph: Graph) -> None:
    """The split, the relation twice, the gap, both claims, both addressings."""
    assert await split(graph) == [
        SPLIT,
        rewritten("T", "N1", "B1"),
        rewritten("T", "N2", "B1"),
        {
            "type": "relation_split_ambiguous",
            "admin_plugin": "adm",
            "source_subject": "T",
            "predicate": "album_of",
            "other_endpoint_id": "B1",
            "candidate_new_ids": ["N1", "N2"],
        },
        relation_moved("p1", "T", "N1", "B1"),
        relation_moved("p1", "T", "N2", "B1"),
        addressing_moved("p1", "T", "N1", "x", "1"),
        addressing_moved("p1", "T", "N2", "y", "2"),
    ]
    alias = await graph.read(lambda state: state.part(Subjects).alias("T"))
    assert alias is not None
    assert (alias.kind, alias.new_ids) == ("split", ("N1", "N2"))


async def test_a_split_with_a_whole_plan(graph: Graph) -> None:
    """A relation that the plan assigns goes to that group only, and no gap is told."""
    plan = RelationAssignment(source=Addressing("x", "1"), predicate="album_of", target="B1", target_new_id_index=1)

    assert await split(graph, plan) == [
        SPLIT,
        rewritten("T", "N2", "B1"),
        relation_moved("p1", "T", "N2", "B1"),
        addressing_moved("p1", "T", "N1", "x", "1"),
        addressing_moved("p1", "T", "N2", "y", "2"),
    ]
    assert await graph.edges() == {("N2", "album_of", "B1"): ("p1",)}


async def a_hub(graph: Graph) -> None:
    await graph.subject("H", "h:1", by="p1")
    await graph.subject("A")
    await graph.subject("C")
    await graph.relate("H", "like", "A", "p1", "p2")
    await graph.relate("C", "like", "H", "p2")


def forgotten_by(plugin: str) -> list[dict[str, Any]]:
    reason = {"kind": "subject_cascade", "forgotten_subject": "H"}
    relation = {"type": "relation_forgotten", "plugin": plugin, "predicate": "like", "reason": reason}
    return [
        {"type": "subject_forgotten", "plugin": plugin, "canonical_id": "H", "subject_type": "track"},
        {**relation, "source_id": "C", "target_id": "H"},
        {**relation, "source_id": "H", "target_id": "A"},
    ]


@pytest.mark.req("H26", "H30")
async def test_a_plugin_forgets_a_hub(graph: Graph) -> None:
    """The subject, then its relations either way, whoever claims them."""
    await a_hub(graph)

    assert await graph.tells(lambda: graph.plugin("p1").retract_addressing(("h", "1"))) == forgotten_by("p1")
    assert await graph.edges() == {}


@pytest.mark.req("H32")
async def test_an_administrator_forgets_a_hub(graph: Graph) -> None:
    """The forced retract, the subject, then its relations, all by the administrator."""
    await a_hub(graph)

    assert await graph.tells(lambda: graph.admin.force_retract_addressing("p1", ("h", "1"))) == [
        {
            "type": "subject_addressing_forced_retract",
            "admin_plugin": "adm",
            "target_plugin": "p1",
            "canonical_id": "H",
            "scheme": "h",
            "value": "1",
            "reason": None,
        },
        *forgotten_by("adm"),
    ]
