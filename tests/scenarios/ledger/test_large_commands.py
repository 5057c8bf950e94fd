"""Commands that emit more happenings than a subscriber buffers: each reaches its subscribers whole."""

from __future__ import annotations

import pytest

from tidings.happenings.bus import Envelope
from tidings.happenings.filters import HappeningFilter
from tidings.happenings.subscription import HappeningSubscription
from tidings.ledger import Command, Ledger, LedgerSettings, open_ledger
from tidings.ledger.catalogue import parse_catalogue
from tidings.ledger.claims import AnnounceSubject, ClaimRelation, RetractAddressing
from tidings.ledger.merging import MergeSubjects
from tidings.ledger.subjects import Addressing
from tidings.log.memory import MemoryLog
from tidings.testing import VirtualClock

CATALOGUE = parse_catalogue(
    """
schema_version = 1
[[subjects]]
name = "thing"
[[relation]]
predicate = "in"
source_type = "thing"
target_type = "thing"
"""
)


def subject(name: str) -> AnnounceSubject:
    """A subject with one name, which is its id too."""
    return AnnounceSubject(plugin="p", subject_type="thing", addressings=(Addressing("n", name),), new_id=name)


async def hubs(ledger: Ledger, count: int, *names: str) -> None:
    """Subjects with so many relations each."""
    commands: list[Command] = [subject(name) for name in names]
    for name in names:
        for number in range(count):
            commands.append(subject(f"{name}{number}"))
            commands.append(ClaimRelation(plugin="p", source=f"{name}{number}", predicate="in", target=name))
    for done in await ledger.execute_many(commands):
        assert not isinstance(done, Exception)


async def read(stream: HappeningSubscription, until: int) -> list[Envelope]:
    """All that comes up to this seq."""
    found: list[Envelope] = []
    while not found or found[-1].seq < until:
        found += await stream.recv_many()
    return found


@pytest.mark.req("H1", "H37")
@pytest.mark.parametrize("relations", [300, 600, pytest.param(20_000, marks=pytest.mark.heavy)])
async def test_a_merge_reaches_its_subscribers_whole(relations: int) -> None:
    """Subscribers with and without a filter that wait, and one that comes back after history was trimmed, have every happening of it, the merge first."""
    clock = VirtualClock()
    settings = LedgerSettings(history_count_max=1024)
    async with await open_ledger(MemoryLog(), catalogue=CATALOGUE, clock=clock, settings=settings) as ledger:
        await hubs(ledger, relations, "a", "b")
        happenings = ledger.happenings
        everything = happenings.subscribe()
        moved = happenings.subscribe(filter=HappeningFilter(variants=("claim_reassigned",)))
        before = everything.current_seq
        await ledger.execute(MergeSubjects(admin="adm", a="a", b="b", new_id="c"))
        count = happenings.last_seq - before
        await ledger.trim_history()

        assert count == 4 * relations + 3
        seqs = list(range(before + 1, happenings.last_seq + 1))
        live = await read(everything, seqs[-1])
        assert [each.seq for each in live] == seqs
        assert live[0].happening.variant == "subject_merged"
        assert len(await read(moved, seqs[-1])) == 2 * relations + 2
        again = await read(happenings.subscribe(since=before), seqs[-1])
        assert again == live
        assert happenings.missed_count == 0


@pytest.mark.req("H30")
async def test_a_forgotten_hub_is_reported_before_its_relations() -> None:
    """A subject with more relations than a subscriber buffers is forgotten: who waits hears that first, then of each relation."""
    async with await open_ledger(MemoryLog(), catalogue=CATALOGUE) as ledger:
        await hubs(ledger, 1_200, "a")
        stream = ledger.happenings.subscribe()
        await ledger.execute(RetractAddressing(plugin="p", addressing=Addressing("n", "a")))
        found = await read(stream, ledger.happenings.last_seq)

    assert [each.happening.variant for each in found] == ["subject_forgotten"] + ["relation_forgotten"] * 1_200


@pytest.mark.req("H60")
async def test_a_follower_goes_along_with_a_large_merge() -> None:
    """The projection of a hub with 600 relations is followed through its merge: one update, of the new subject."""
    async with await open_ledger(MemoryLog(), catalogue=CATALOGUE) as ledger:
        await hubs(ledger, 600, "a", "b")
        with await ledger.projections.follow_subject("a") as stream:
            await stream.recv()
            await ledger.execute(MergeSubjects(admin="adm", a="a", b="b", new_id="c"))
            update = await stream.recv()

    assert (update.canonical_id, update.projection is not None) == ("c", True)


@pytest.mark.req("H73")
async def test_an_import_does_not_expire_cursors() -> None:
    """A subscriber whose cursor is older than an import of thousands of relations can come back within half an hour."""
    clock = VirtualClock()
    async with await open_ledger(MemoryLog(clock=clock), catalogue=CATALOGUE, clock=clock) as ledger:
        await ledger.execute(subject("first"))
        since = ledger.happenings.last_seq
        await hubs(ledger, 5_000, "a")
        await clock.advance(60)
        await ledger.trim_history()

        found = await read(ledger.happenings.subscribe(since=since), ledger.happenings.last_seq)
        assert [each.seq for each in found] == list(range(since + 1, ledger.happenings.last_seq + 1))
