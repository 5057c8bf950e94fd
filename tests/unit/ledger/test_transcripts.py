"""What a merge, a split and a forgotten subject tell, word for word and in order."""

from __future__ import annotations

from typing import Any

from tests.unit.ledger.graph_support import Graph, named
from tidings.happenings.variants import SplitStrategy
from tidings.ledger.administration import (
    ForceRetractAddressing,
    MergeSubjects,
    RelationAssignment,
    SplitSubject,
    SuppressRelation,
)
from tidings.ledger.claims import RetractAddressing


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


def two_tracks(graph: Graph, *, second_album: str) -> None:
    graph.subject("T1", "x:1", plugin="p1")
    graph.subject("T2", "y:2", plugin="p2")
    graph.subject("B1", kind="album")
    graph.subject("B2", kind="album")
    graph.relate("T1", "album_of", "B1", "p1")
    graph.relate("T2", "album_of", second_album, "p2")


MERGE = MergeSubjects(admin="adm", a=named("x:1"), b=named("y:2"), new_id="T3")


def test_a_merge_that_makes_too_many_targets() -> None:
    """The merge, both relations, the violation, both claims, both addressings."""
    graph = Graph()
    two_tracks(graph, second_album="B2")

    assert graph.do(MERGE) == [
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


def test_a_merge_onto_a_suppressed_relation() -> None:
    """The merge, both relations, no violation, the claim that was visible, both claims, both addressings."""
    graph = Graph()
    two_tracks(graph, second_album="B1")
    graph.do(SuppressRelation(admin="adm", source="T1", predicate="album_of", target="B1", reason="dispute"))
    graph.now_ms = 7

    assert graph.do(MERGE) == [
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
            "surviving_suppression_record": {"admin_plugin": "adm", "suppressed_at_ms": 0, "reason": "dispute"},
        },
        relation_moved("p1", "T1", "T3", "B1"),
        relation_moved("p2", "T2", "T3", "B1"),
        addressing_moved("p1", "T1", "T3", "x", "1"),
        addressing_moved("p2", "T2", "T3", "y", "2"),
    ]


def a_track_with_two_names(graph: Graph) -> None:
    graph.subject("T", "x:1", "y:2")
    graph.subject("B1", kind="album")
    graph.relate("T", "album_of", "B1")


def split(*assignments: RelationAssignment) -> SplitSubject:
    return SplitSubject(
        admin="adm",
        source=named("x:1"),
        partition=((named("x:1"),), (named("y:2"),)),
        new_ids=("N1", "N2"),
        strategy=SplitStrategy.EXPLICIT,
        assignments=assignments,
    )


SPLIT = {
    "type": "subject_split",
    "admin_plugin": "adm",
    "source_id": "T",
    "new_ids": ["N1", "N2"],
    "strategy": "explicit",
    "reason": None,
}


def test_a_split_whose_plan_leaves_a_relation_out() -> None:
    """The split, the relation twice, the gap, both claims, both addressings."""
    graph = Graph()
    a_track_with_two_names(graph)

    assert graph.do(split()) == [
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


def test_a_split_with_a_whole_plan() -> None:
    """A relation that the plan assigns goes to that group only, and no gap is told."""
    graph = Graph()
    a_track_with_two_names(graph)
    plan = RelationAssignment(source=named("x:1"), predicate="album_of", target="B1", target_new_id_index=1)

    assert graph.do(split(plan)) == [
        SPLIT,
        rewritten("T", "N2", "B1"),
        relation_moved("p1", "T", "N2", "B1"),
        addressing_moved("p1", "T", "N1", "x", "1"),
        addressing_moved("p1", "T", "N2", "y", "2"),
    ]


def a_hub(graph: Graph) -> None:
    graph.subject("H", "h:1", plugin="p1")
    graph.subject("A")
    graph.subject("C")
    graph.relate("H", "like", "A", "p1", "p2")
    graph.relate("C", "like", "H", "p2")


def forgotten_with(plugin: str) -> list[dict[str, Any]]:
    reason = {"kind": "subject_cascade", "forgotten_subject": "H"}
    relation = {"type": "relation_forgotten", "plugin": plugin, "predicate": "like", "reason": reason}
    return [
        {"type": "subject_forgotten", "plugin": plugin, "canonical_id": "H", "subject_type": "track"},
        {**relation, "source_id": "C", "target_id": "H"},
        {**relation, "source_id": "H", "target_id": "A"},
    ]


def test_a_plugin_forgets_a_hub() -> None:
    """The subject, then its relations either way, whoever claims them."""
    graph = Graph()
    a_hub(graph)

    assert graph.do(RetractAddressing(plugin="p1", addressing=named("h:1"))) == forgotten_with("p1")


def test_an_administrator_forgets_a_hub() -> None:
    """The forced retract, the subject, then its relations, all by the administrator."""
    graph = Graph()
    a_hub(graph)

    assert graph.do(ForceRetractAddressing(admin="adm", target_plugin="p1", addressing=named("h:1"))) == [
        {
            "type": "subject_addressing_forced_retract",
            "admin_plugin": "adm",
            "target_plugin": "p1",
            "canonical_id": "H",
            "scheme": "h",
            "value": "1",
            "reason": None,
        },
        *forgotten_with("adm"),
    ]
