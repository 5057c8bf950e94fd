"""Relations: claimed by several, bounded by the catalogue, hidden and shown again."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tidings.ledger.catalogue import Catalogue
from tidings.ledger.errors import LedgerError, UnknownPredicate, UnknownSubject
from tidings.ledger.relations import Relations, WalkDirection
from tidings.log.memory import MemoryLog
from tidings.testing import VirtualClock

from .graph_support import Graph, open_graph

EDGE = ("T", "album_of", "B")


@pytest.fixture
async def music(graph: Graph) -> Graph:
    """Three tracks and three albums."""
    for name in ("T", "T2", "T3"):
        await graph.subject(name)
    for name in ("B", "B2", "B3"):
        await graph.subject(name, kind="album")
    return graph


async def claim(graph: Graph, *edge: str, by: str = "p1") -> list[dict[str, Any]]:
    return await graph.tells(lambda: graph.plugin(by).claim_relation(*edge))


def violation(edge: tuple[str, str, str], side: str, declared: str, count: int, *, by: str = "p1") -> dict[str, Any]:
    source, predicate, target = edge
    return {
        "type": "relation_cardinality_violation",
        "plugin": by,
        "predicate": predicate,
        "source_id": source,
        "target_id": target,
        "side": side,
        "declared": declared,
        "observed_count": count,
    }


def claimed(what: str, source: str, predicate: str, target: str, by: str = "p1") -> dict[str, Any]:
    """The happening of a claim that was made or retracted."""
    ends = {"source_id": source, "predicate": predicate, "target_id": target}
    return {"type": f"relation_{what}", "plugin": by, **ends}


@pytest.mark.req("H24")
async def test_too_many_ends_are_stored_and_told_for_each_side(music: Graph) -> None:
    """A relation beyond what its predicate declares is kept; source side first, then target side; saying it again tells nothing."""
    assert await claim(music, "T", "opens", "B") == [claimed("asserted", "T", "opens", "B")]
    assert await claim(music, "T2", "opens", "B2") == [claimed("asserted", "T2", "opens", "B2")]
    assert await claim(music, "T", "opens", "B2") == [
        claimed("asserted", "T", "opens", "B2"),
        violation(("T", "opens", "B2"), "source", "exactly_one", 2),
        violation(("T", "opens", "B2"), "target", "at_most_one", 2),
    ]
    assert await claim(music, "T", "opens", "B2") == []
    assert await claim(music, "T", "opens", "B2", by="p2") == [claimed("claim_added", "T", "opens", "B2", by="p2")]
    neighbours = await music.read(lambda state: state.part(Relations).neighbours("T", "opens"))
    assert neighbours == ["B", "B2"]
    for target in ("B", "B2", "B3", "T2"):
        assert await claim(music, "T", "like", target) == [claimed("asserted", "T", "like", target)]


async def test_hidden_relations_do_not_count(music: Graph) -> None:
    """A suppressed relation makes no violation with a new one; showing it again leaves two visible, and emits one."""
    await music.relate(*EDGE)
    await music.suppress(*EDGE)

    assert await claim(music, "T", "album_of", "B2") == [claimed("asserted", "T", "album_of", "B2")]
    shown = await music.tells(lambda: music.admin.unsuppress_relation(*EDGE))
    assert shown[0]["type"] == "relation_unsuppressed"
    assert shown[1:] == [violation(EDGE, "source", "at_most_one", 2, by="adm")]


@pytest.mark.req("H25")
async def test_a_relation_is_forgotten_with_its_last_claim(music: Graph) -> None:
    """While another plugin claims it, a relation stays and the claim alone is gone; the last to retract is named."""
    await music.relate(*EDGE, "p1", "p2")

    assert await music.tells(lambda: music.plugin("p1").retract_relation(*EDGE)) == [claimed("claim_retracted", *EDGE)]
    record = await music.relation(*EDGE)
    assert record is not None
    assert record.claimants == ("p2",)
    assert await music.tells(lambda: music.plugin("p2").retract_relation(*EDGE)) == [
        {
            "type": "relation_forgotten",
            "plugin": "p2",
            "source_id": "T",
            "predicate": "album_of",
            "target_id": "B",
            "reason": {"kind": "claims_retracted", "retracting_plugin": "p2"},
        }
    ]
    assert await music.relation(*EDGE) is None


@pytest.mark.parametrize(
    ("verb", "edge", "error_class", "subclass"),
    [
        ("claim", ("T", "sings", "B"), "contract_violation", "unknown_predicate"),
        ("claim", ("T", "album_of", "nobody"), "not_found", "unknown_subject"),
        ("claim", (("no", "body"), "album_of", "B"), "not_found", "unknown_subject"),
        ("claim", ("B", "album_of", "T"), "contract_violation", "invalid"),
        ("claim", ("T", "album_of", "T2"), "contract_violation", "invalid"),
        ("claim", ("", "album_of", "B"), "contract_violation", "invalid"),
        ("claim", ("T", "", "B"), "contract_violation", "invalid"),
        ("claim", ("T", "album_of", ("", "")), "contract_violation", "invalid"),
        ("retract", ("T", "sings", "B"), "contract_violation", "unknown_predicate"),
        ("retract", ("T", "album_of", "nobody"), "not_found", "unknown_subject"),
        ("retract", ("T", "album_of", "B2"), "not_found", "unknown_relation"),
        ("retract", EDGE, "contract_violation", "not_claimant"),
    ],
)
async def test_what_cannot_be_claimed_or_taken_back_is_refused(
    music: Graph, verb: str, edge: tuple[Any, str, Any], error_class: str, subclass: str
) -> None:
    """An unknown predicate or subject, a type that the predicate does not take, another plugin's claim: nothing changes."""
    await music.relate(*EDGE, "p2")
    before = await music.frozen()
    plugin = music.plugin("p1")

    with pytest.raises(LedgerError) as refused:
        await (plugin.claim_relation(*edge) if verb == "claim" else plugin.retract_relation(*edge))

    assert (refused.value.error_class, refused.value.subclass) == (error_class, subclass)
    assert await music.frozen() == before


async def test_a_claim_can_be_taken_back_when_its_predicate_is_gone() -> None:
    """The catalogue may drop a predicate: what was claimed under it stays, can be taken back, and cannot be claimed anew."""
    log = MemoryLog(clock=VirtualClock())
    async with open_graph(log=log) as graph:
        await graph.subject("T")
        await graph.relate("T", "like", "T", "p1")
    async with open_graph(Catalogue(schema_version=1), log=log) as graph:
        with pytest.raises(UnknownPredicate):
            await graph.relate("T", "like", "T", "p2")
        await graph.plugin("p1").retract_relation("T", "like", "T")
        assert await graph.edges() == {}


@pytest.mark.req("H27")
async def test_a_suppressed_relation_is_hidden_and_kept(music: Graph) -> None:
    """Neighbours, counts and walks pass it over either way, its record and claims stay, and a new claim does not show it."""
    await music.relate(*EDGE, "p1")
    await music.relate("T", "album_of", "B2", "p1")

    told = await music.tells(lambda: music.suppress(*EDGE, reason="dispute"))
    await music.relate(*EDGE, "p2")

    assert told == [
        {
            "type": "relation_suppressed",
            "admin_plugin": "adm",
            "source_id": "T",
            "predicate": "album_of",
            "target_id": "B",
            "reason": "dispute",
        }
    ]
    record = await music.relation(*EDGE)
    assert record is not None
    assert record.claimants == ("p1", "p2")
    assert record.suppression is not None
    assert (record.suppression.admin_plugin, record.suppression.reason) == ("adm", "dispute")

    def look(state: Any) -> list[Any]:
        relations = state.part(Relations)
        walk = relations.walk("T", ["album_of"], direction=WalkDirection.BOTH, max_depth=3)
        return [
            relations.neighbours("T", "album_of"),
            relations.neighbours("B", "album_of", WalkDirection.INVERSE),
            relations.neighbours("B", "album_of", WalkDirection.BOTH),
            relations.forward_count("T", "album_of"),
            relations.inverse_count("B", "album_of"),
            [visit.subject_id for visit in walk.visits],
        ]

    assert await music.read(look) == [["B2"], [], [], 1, 0, ["T", "B2"]]


@pytest.mark.req("H28")
@pytest.mark.parametrize(("first", "second"), [("a", "b"), ("a", None), (None, "a"), ("a", "a"), (None, None)])
async def test_suppressing_again(music: Graph, first: str | None, second: str | None) -> None:
    """With the same reason nothing happens; another one is told, and who suppressed first, and when, stay."""
    await music.relate(*EDGE)
    await music.suppress(*EDGE, reason=first)
    before = await music.relation(*EDGE)
    music.clock.jump(60)
    other = music.ledger.admin("other")

    told = await music.tells(lambda: other.suppress_relation(*EDGE, reason=second))

    after = await music.relation(*EDGE)
    assert before is not None
    assert after is not None
    if first == second:
        assert (told, music.result, after) == ([], "already_suppressed", before)
        assert len(await music.entries()) == 1
        return
    assert told == [
        {
            "type": "relation_suppression_reason_updated",
            "admin_plugin": "other",
            "source_id": "T",
            "predicate": "album_of",
            "target_id": "B",
            "old_reason": first,
            "new_reason": second,
        }
    ]
    assert before.suppression is not None
    assert after.suppression is not None
    assert after.suppression.reason == second
    assert after.suppression.admin_plugin == "adm"
    assert after.suppression.suppressed_at_ms == before.suppression.suppressed_at_ms
    assert after.modified_at_ms > before.modified_at_ms


@pytest.mark.req("H29")
async def test_unsuppressing_shows_a_relation_once(music: Graph) -> None:
    """A hidden relation is visible again; one that is visible or unknown is left alone, silently."""
    await music.relate(*EDGE, "p1", "p2")
    await music.suppress(*EDGE)

    assert await music.tells(lambda: music.admin.unsuppress_relation(*EDGE)) == [
        {
            "type": "relation_unsuppressed",
            "admin_plugin": "adm",
            "source_id": "T",
            "predicate": "album_of",
            "target_id": "B",
        }
    ]
    assert await music.read(lambda state: state.part(Relations).neighbours("T", "album_of")) == ["B"]
    entries = len(await music.entries())
    for edge, answer in (
        (EDGE, "not_suppressed"),
        (("T", "album_of", "B3"), "not_found"),
        (("T", "sings", "B"), "not_found"),
        (("nobody", "album_of", "B"), "not_found"),
    ):
        assert await music.tells(partial(music.admin.unsuppress_relation, *edge)) == []
        assert music.result == answer
        if answer == "not_found":
            assert await music.tells(partial(music.suppress, *edge)) == []
            assert music.result == "not_found"
    assert len(await music.entries()) == entries


async def test_a_walk_is_breadth_first_and_bounded(music: Graph) -> None:
    """Each subject is visited once, nearest first; depth, predicates and the number of visits bound it; cycles end."""
    for edge in (
        ("T", "like", "T2"),
        ("T", "like", "B"),
        ("T2", "like", "T3"),
        ("T3", "like", "T"),
        ("T2", "album_of", "B2"),
    ):
        await music.relate(*edge)

    async def walk(*predicates: str, **bounds: Any) -> tuple[list[tuple[str, int, str | None]], bool]:
        walked = await music.read(lambda state: state.part(Relations).walk("T", predicates, **bounds))
        return [tuple(visit) for visit in walked.visits], walked.is_truncated  # type: ignore[misc]

    start = ("T", 0, None)
    near = [start, ("B", 1, "like"), ("T2", 1, "like")]
    assert await walk("like", max_depth=0) == ([start], False)
    assert await walk(max_depth=9) == ([start], False)
    assert await walk("like") == (near, False)
    assert await walk("like", max_depth=9) == ([*near, ("T3", 2, "like")], False)
    assert await walk("like", "album_of", max_depth=2) == (
        [*near, ("T3", 2, "like"), ("B2", 2, "album_of")],
        False,
    )
    assert await walk("like", max_depth=9, max_visits=3) == (near, True)
    assert await walk("like", max_depth=1, direction=WalkDirection.INVERSE) == ([start, ("T3", 1, "like")], False)
    assert await walk("like", max_depth=1, direction=WalkDirection.BOTH) == ([*near, ("T3", 1, "like")], False)


async def test_a_retired_id_says_what_became_of_it(music: Graph) -> None:
    """Who still uses the id of a subject that was merged, split or forgotten is told where to look."""
    await music.subject("S", "s:1", "s:2")
    music.will_make("N", "S1", "S2")
    await music.admin.merge_subjects("T2", "T3")
    await music.admin.split_subject("S", [[("s", "1")], [("s", "2")]])
    await music.plugin("p1").retract_addressing(("id", "B3"))

    for name, hint in (
        ("T2", "this id is retired (merged); look for 'N'"),
        ("S", "this id is retired (split); look for 'S1', 'S2'"),
        ("B3", "this id is retired (tombstone)"),
        ("nobody", None),
        (("id", "B3"), None),
    ):
        with pytest.raises(UnknownSubject) as refused:
            await music.plugin("p1").claim_relation("T", "like", name)
        assert refused.value.hint == hint
