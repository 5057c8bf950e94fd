"""Happenings of a real ledger: followed from a cursor while others write, declared by users, emitted plainly."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import pytest

from tidings.happenings import Happening, HappeningFilter, HappeningSubscription, UnknownHappening
from tidings.happenings.errors import InvalidHappening
from tidings.happenings.happening import Plugin, Subject, to_json
from tidings.happenings.variants import FlightModeChanged
from tidings.ledger import Ledger, LedgerSettings, open_ledger
from tidings.log.memory import MemoryLog

JOINING: Final = [(0, 0), (3, 0), (9, 0), (20, 1), (40, 2), (70, 0)]
"""When subscribers join, in turns of the loop, and since which seq."""


async def follow(stream: HappeningSubscription, last_seq: int) -> list[int]:
    """The seqs that come, up to this one."""
    found: list[int] = []
    while not found or found[-1] < last_seq:
        found += [each.seq for each in await stream.recv_many()]
    return found


@pytest.mark.req("H13", "H10", "H1")
async def test_whoever_joins_while_others_write_has_every_seq_once() -> None:
    """
    Subscribers that join at different moments, with cursors from the beginning, while three plugins write and their buffers hold four,
    have each seq after their cursor once and in order: from history what they did not get live.
    """
    settings = LedgerSettings(buffer_count_max=4, history_count_max=None)
    async with await open_ledger(MemoryLog(), settings=settings) as ledger:

        async def write(plugin: str) -> None:
            for number in range(30):
                await ledger.plugin(plugin).take_custody("audio.playback", "track", handle_id=f"{plugin}-{number}")

        async def join(delay: int, since: int) -> list[int]:
            for _ in range(delay):
                await asyncio.sleep(0)
            with ledger.happenings.subscribe(since=since) as stream:
                found: list[int] = []
                while not found or found[-1] < min(stream.current_seq, 90):  # until it has caught up
                    found += [each.seq for each in await stream.recv_many(3)]
                    await asyncio.sleep(0)
                return found

        await write("early")
        joining = asyncio.gather(*(join(delay, since) for delay, since in JOINING))
        results, *_ = await asyncio.gather(joining, write("a"), write("b"))

    for (_, since), found in zip(JOINING, results, strict=True):
        assert found == list(range(since + 1, found[-1] + 1))
        assert found[-1] >= 30


@pytest.mark.req("H77", "H15")
async def test_a_users_own_variant_is_stored_replayed_and_filtered() -> None:
    """After a restart it comes back as what it was declared as; and where nobody has declared it, as it was written."""

    class KettleBoiled(Happening, frozen=True, kw_only=True):
        """Water boils."""

        plugin: Plugin
        kettle: Subject
        litres: int

    log = MemoryLog()
    boiled = KettleBoiled(at_ms=5, plugin="org.example.kettle", kettle="k-1", litres=2)
    async with await open_ledger(log) as ledger:
        seq = await ledger.happenings.emit_durable(boiled, boiled)
    wanted = HappeningFilter(variants=("kettle_boiled",), subjects=("k-1",))
    async with await open_ledger(log) as ledger:
        stream = ledger.happenings.subscribe(since=seq, filter=wanted)
        assert (await stream.recv()) == (seq + 1, boiled, None)
        assert [each.happening async for each in ledger.happenings.history(seq - 1, filter=wanted)] == [boiled, boiled]
    _forget(KettleBoiled)
    async with await open_ledger(log) as ledger:
        found = [each.happening async for each in ledger.happenings.history(seq - 1)]
    assert found == [UnknownHappening("kettle_boiled", {"at_ms": 5, "plugin": "org.example.kettle", "kettle": "k-1", "litres": 2})] * 2  # fmt: skip
    assert to_json(found[0]) == to_json(boiled)


@pytest.mark.parametrize("given", [None, {"type": "x"}, FlightModeChanged(at_ms=1, rack_class=["x"], on=True)])  # type: ignore[arg-type]
async def test_what_is_no_happening_is_not_emitted(ledger: Ledger, given: Any) -> None:
    """It would reach everybody who listens, and end those who look into it."""
    plugin = ledger.plugin("org.example.player")
    await ledger.finish_waiting()
    with ledger.happenings.subscribe() as stream:
        with pytest.raises(InvalidHappening):
            ledger.happenings.emit(given)
        await plugin.report_event("fine")

        assert (await stream.recv()).happening.variant == "plugin_event"


async def test_a_burst_of_plain_emits_is_delivered() -> None:
    """More than are covered by one record, within one turn of the loop, and without another emit to push them: all come, in order."""
    log = MemoryLog()
    settings = LedgerSettings(buffer_count_max=5000)
    async with await open_ledger(log, settings=settings) as ledger:
        before = ledger.happenings.last_seq
        with ledger.happenings.subscribe() as stream:
            for _ in range(3000):
                ledger.happenings.emit(UnknownHappening("tick", {}))
            assert await follow(stream, before + 3000) == list(range(before + 1, before + 3001))
    async with await open_ledger(log) as ledger:
        assert await ledger.happenings.emit_durable(UnknownHappening("tock", {})) > before + 3000


async def test_a_filter_on_a_subject_follows_it(ledger: Ledger) -> None:
    """What touches the subject comes, also the merge that ends it; what touches only others does not."""
    player, admin = ledger.plugin("org.example.player"), ledger.admin("org.example.admin")
    announced = [await player.announce_subject("track", [("file", number)]) for number in "123"]
    ids = [each.canonical_id or "" for each in announced]
    stream = ledger.happenings.subscribe(filter=HappeningFilter(subjects=(ids[0],)))
    await player.claim_relation(ids[0], "like", ids[1])
    await player.claim_relation(ids[1], "like", ids[2])
    await player.retract_relation(ids[1], "like", ids[2])
    await player.retract_relation(ids[0], "like", ids[1])
    await admin.merge_subjects(ids[0], ids[2])

    assert [(await stream.recv()).happening.variant for _ in range(4)] == [
        "relation_asserted",
        "relation_forgotten",
        "subject_merged",
        "claim_reassigned",
    ]


def _forget(variant: type[Happening]) -> None:
    """As a process would be that never declared it."""
    from tidings.happenings import happening as module

    del module._variants["kettle_boiled"]
    module._facts.pop(variant, None)
