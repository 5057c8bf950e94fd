"""Subjects: announced, named, given a state, forgotten; and what becomes of their ids."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import pytest

from tests.beyond import Beyond, crossed
from tidings.ledger.catalogue import Catalogue
from tidings.ledger.conflicts import ClaimConfidence, ConflictEnd, Conflicts, Distinct, Equivalent
from tidings.ledger.errors import InvalidCommand, LedgerError, NotClaimant, UnknownSubject, UnknownSubjectType
from tidings.ledger.subjects import Addressing, Subjects
from tidings.log.memory import MemoryLog
from tidings.testing import VirtualClock

from .graph_support import Graph, addressing, open_graph

X, Y, Z = ("x", "1"), ("y", "2"), ("z", "3")
ANNOUNCED: Final = {
    "type": "subject_announced",
    "subject_type": "track",
    "addressings": [{"scheme": "z", "value": "3"}],
}
REMOVED: Final = {"type": "subject_addressing_removed", "canonical_id": "T"}


@pytest.mark.parametrize(
    ("names", "kind", "canonical_id", "emitted"),
    [
        ([X], "no_change", "T", []),
        ([X, Y], "no_change", "T", []),
        ([Y, Z], "updated", "T", [{"type": "subject_addressing_added", "scheme": "z", "value": "3"}]),
        ([Z], "created", "N", [ANNOUNCED]),
        ([Z, Z], "created", "N", [ANNOUNCED]),
    ],
)
async def test_an_announcement_finds_its_subject_by_any_name(
    graph: Graph, names: list[tuple[str, str]], kind: str, canonical_id: str, emitted: list[dict[str, Any]]
) -> None:
    """Names that one subject has lead to it, new ones are added to it, and only new ones make a subject; each is emitted."""
    await graph.subject("T", "x:1", "y:2", by="p1")

    plugin = graph.plugin("p2")

    by = {"plugin": "p2", "canonical_id": canonical_id}
    assert await graph.tells(lambda: plugin.announce_subject("track", names), "N") == [by | each for each in emitted]
    assert (graph.result.kind, graph.result.canonical_id) == (kind, canonical_id)
    record = await graph.record(canonical_id)
    assert record is not None
    assert {held.addressing for held in record.addressings} >= set(names)
    claimants = {held.addressing: held.claimant for held in record.addressings}
    assert claimants.get(Addressing(*X), "p1") == "p1"
    assert claimants.get(Addressing(*Z), "p2") == "p2"


@pytest.mark.parametrize(
    ("kind", "names", "code"),
    [
        ("book", [Z], "ledger.unknown_subject_type"),
        ("", [Z], "ledger.invalid"),
        ("track", [], "ledger.invalid"),
        ("track", [("", "1")], "ledger.invalid"),
        ("track", [("z", "")], "ledger.invalid"),
        ("track", [("a:b", "1")], "ledger.invalid"),
        ("track", [("z", "1\n2")], "ledger.invalid"),
        ("track", [("z", "\ud800")], "ledger.invalid"),
        ("track", [("z", "1" * 4097)], "ledger.invalid"),
        ("track", [("evo-factory-instance", "p1/1")], "ledger.invalid"),
        ("album", [X], "ledger.subject_type_mismatch"),
    ],
)
async def test_what_cannot_be_a_subject_is_refused(
    graph: Graph, kind: str, names: list[tuple[str, str]], code: str
) -> None:
    """An unknown type, another type than the subject's, no name or one that cannot be a name: nothing changes."""
    await graph.subject("T", "x:1")
    plugin = graph.plugin("p2")
    before = await graph.frozen()

    with pytest.raises(LedgerError) as refused:
        await plugin.announce_subject(kind, names)

    assert refused.value.code == code
    assert await graph.frozen() == before


@pytest.mark.parametrize("state", [float("nan"), {"a": float("inf")}, object(), "\ud800", "x" * 70_000])
async def test_a_state_is_json(graph: Graph, state: Any) -> None:
    """What JSON cannot say, or says at too great length, is refused, and nothing changes."""
    await graph.subject("T", "x:1")
    before = await graph.frozen()

    with pytest.raises(InvalidCommand):
        await graph.plugin("p1").update_state(X, state)

    assert await graph.frozen() == before


async def test_a_state_is_told_with_the_one_before(graph: Graph) -> None:
    """Each update is told, an equal one too; null is none; who has no name on the subject may not."""
    await graph.subject("T", "x:1", by="p1")
    states = [{"on": True}, {"on": True}, None]
    happenings = []
    for state in states:
        happenings += await graph.tells(partial(graph.plugin("p1").update_state, X, state))

    assert [(each["type"], each["prev_state"], each["new_state"]) for each in happenings] == [
        ("subject_state_changed", before, after)
        for before, after in [(None, {"on": True}), ({"on": True}, {"on": True}), ({"on": True}, None)]
    ]
    with pytest.raises(NotClaimant):
        await graph.plugin("p2").update_state(X, 1)
    with pytest.raises(UnknownSubject):
        await graph.plugin("p1").update_state(Y, 1)


async def test_only_its_claimant_takes_a_name_back(graph: Graph) -> None:
    """Another plugin is refused, an unknown name too; a name that is not the last is emitted alone."""
    await graph.subject("T", "x:1", "y:2", by="p1")

    with pytest.raises(NotClaimant) as refused:
        await graph.plugin("p2").retract_addressing(X)
    assert (refused.value.error_class, refused.value.subclass) == ("contract_violation", "not_claimant")
    with pytest.raises(UnknownSubject) as unknown:
        await graph.plugin("p1").retract_addressing(Z)
    assert (unknown.value.error_class, unknown.value.subclass) == ("not_found", "unknown_subject")
    assert await graph.tells(lambda: graph.plugin("p1").retract_addressing(X, reason="gone")) == [
        {**REMOVED, "plugin": "p1", "scheme": "x", "value": "1"}
    ]
    record = await graph.record("T")
    assert record is not None
    assert [held.addressing for held in record.addressings] == [Y]


async def test_a_forgotten_subject_leaves_a_tombstone_and_its_id_is_not_used_again(graph: Graph) -> None:
    """With its last name a subject is gone; its id stands for nothing, and the same name makes a subject of another id."""
    await graph.subject("T", "x:1", "y:2", by="p1")
    await graph.plugin("p2").announce_subject("track", [X, Z])

    for plugin, (scheme, value) in (("p1", X), ("p2", Z)):
        assert await graph.tells(partial(graph.plugin(plugin).retract_addressing, (scheme, value))) == [
            {**REMOVED, "plugin": plugin, "scheme": scheme, "value": value}
        ]
    assert await graph.tells(lambda: graph.plugin("p1").retract_addressing(Y)) == [
        {"type": "subject_forgotten", "plugin": "p1", "canonical_id": "T", "subject_type": "track"}
    ]
    described = await graph.ledger.projections.describe_alias("T")
    assert (described.kind, described.record) == ("aliased", None)
    assert [(alias.kind, alias.new_ids, alias.admin_plugin) for alias in described.chain] == [("tombstone", (), "p1")]
    with pytest.raises(InvalidCommand):
        await graph.subject("T", "x:1")
    await graph.subject("T-again", "x:1")


@pytest.mark.bound("ledger.subjects.ALIAS_HOPS_MAX")
@crossed
async def test_a_chain_of_merges_leads_to_the_live_subject(graph: Graph, beyond: Beyond) -> None:
    """However many merges there were: the first sixteen steps are shown, the oldest first, and the live subject is found."""
    await graph.subject("T0", "n:0")
    for number in range(1, 18):
        await graph.subject(f"S{number}", f"n:{number}")
        await graph.tells(partial(graph.admin.merge_subjects, ("n", "0"), ("n", str(number))), f"T{number}")

    described = await graph.ledger.projections.describe_alias("T1")
    assert described.record is not None
    assert described.record.canonical_id == "T17"
    assert [alias.old_id for alias in described.chain] == [f"T{number}" for number in range(1, 17)]
    last = beyond(16)
    for number in range(18, last + 1):
        await graph.subject(f"S{number}", f"n:{number}")
        await graph.tells(partial(graph.admin.merge_subjects, ("n", "0"), ("n", str(number))), f"T{number}")
    for _ in range(2):
        longer = await graph.ledger.projections.describe_alias("T0")
        assert (longer.kind, longer.record and longer.record.canonical_id) == ("aliased", f"T{last}")
        assert [alias.old_id for alias in longer.chain] == [f"T{number}" for number in range(16)]
    shown = await graph.ledger.projections.project_subject("T0")
    assert shown.subject is not None
    assert shown.subject.canonical_id == f"T{last}"
    own = await graph.ledger.projections.describe_alias("T1", include_chain=False)
    assert (own.record, [alias.new_ids for alias in own.chain]) == (None, [("T2",)])
    assert (await graph.ledger.projections.describe_alias("nobody")).kind == "not_found"
    assert (await graph.ledger.projections.describe_alias(f"T{last}")).kind == "found"


async def conflicts(graph: Graph) -> list[tuple[tuple[str, ...], ConflictEnd | None]]:
    found = await graph.read(lambda state: state.part(Conflicts).all())
    assert await graph.admin.conflicts() == tuple(conflict for conflict in found if conflict.ended is None)
    return [(conflict.canonical_ids, conflict.ended) for conflict in found]


async def test_names_of_several_subjects_are_a_conflict(graph: Graph) -> None:
    """Nothing is attached; the conflict is told once, and the subjects in it are known as doubtful."""
    await graph.subject("T2", "y:2")
    await graph.subject("T1", "x:1")

    plugin = graph.plugin("p3")
    for expected in (
        [
            {
                "type": "subject_conflict_detected",
                "plugin": "p3",
                "addressings": [{"scheme": s, "value": v} for s, v in (Z, Y, X)],
                "canonical_ids": ["T1", "T2"],
            }
        ],
        [],
    ):
        assert await graph.tells(lambda: plugin.announce_subject("track", [Z, Y, X]), "N") == expected
        assert (graph.result.kind, graph.result.canonical_id) == ("conflict", None)
        assert graph.result.conflicting_ids == ("T1", "T2")
    assert await graph.read(lambda state: state.part(Subjects).find(Addressing(*Z))) is None
    assert await conflicts(graph) == [(("T1", "T2"), None)]
    projection = (await graph.ledger.projections.project_subject("T1")).subject
    assert projection is not None
    assert [(reason.kind, reason.detail) for reason in projection.degraded_reasons] == [
        ("subject_in_conflict", "conflict_id=1")
    ]


@pytest.mark.parametrize("end", list(ConflictEnd))
async def test_a_conflict_ends_when_one_live_subject_is_left(graph: Graph, end: ConflictEnd) -> None:
    """Merged, split or forgotten: with at most one of its subjects live, a conflict is over, also one of three."""
    for number, name in enumerate("xyz", 1):
        await graph.subject(f"T{number}", f"{name}:1", f"{name}:2")
    await graph.plugin("p3").announce_subject("track", [addressing(f"{name}:1") for name in "xyz"])
    await graph.plugin("p3").announce_subject("track", [("x", "1"), ("y", "1")])

    if end is ConflictEnd.MERGED:
        await graph.admin.merge_subjects("T1", "T2")
    elif end is ConflictEnd.SPLIT:
        await graph.admin.split_subject("T1", [[("x", "1")], [("x", "2")]])
    else:
        for value in "12":
            await graph.plugin("p1").retract_addressing(("x", value))

    is_pair_only = end is not ConflictEnd.MERGED
    assert await conflicts(graph) == [
        (("T1", "T2", "T3"), None if is_pair_only else end),
        (("T1", "T2"), end),
    ]


async def test_conflicts_aliases_and_what_was_said_survive_a_restart() -> None:
    """A ledger that is opened again on its log has them all, and equals the one before."""
    log = MemoryLog(clock=VirtualClock())
    said = Equivalent(a=Addressing(*X), b=Addressing(*Y), confidence=ClaimConfidence.INFERRED, reason="same length")
    unlike = Distinct(a=Addressing(*X), b=Addressing(*Z))
    async with open_graph(log=log) as graph:
        await graph.subject("T1", "x:1")
        await graph.subject("T2", "y:2")
        await graph.subject("T3", "z:3")
        for _ in range(2):
            await graph.plugin("p2").announce_subject("track", [X], claims=[said, unlike])
        await graph.plugin("p2").announce_subject("track", [X, Y, Z])
        await graph.admin.merge_subjects("T2", "T3", reason="alike")
        before = await graph.frozen()
    async with open_graph(log=log) as graph:
        assert await graph.frozen() == before
        entries = await graph.admin.claim_log()
        assert [entry.claim.__struct_config__.tag for entry in entries] == [
            "equivalent",
            "distinct",
            "multi_subject_conflict",
            "replaced",
        ]
        assert await conflicts(graph) == [(("T1", "T2", "T3"), ConflictEnd.MERGED)]


async def test_a_type_that_the_catalogue_dropped_takes_no_more_subjects() -> None:
    """Subjects of the type stay, new ones are refused, and the log is read again all the same."""
    log = MemoryLog(clock=VirtualClock())
    async with open_graph(log=log) as graph:
        await graph.subject("T1", "x:1")
    async with open_graph(Catalogue(schema_version=1), log=log) as graph:
        assert await graph.record("T1") is not None
        with pytest.raises(UnknownSubjectType) as refused:
            await graph.subject("T2", "y:2")
        assert refused.value.subject_type == "track"
