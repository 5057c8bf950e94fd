"""What every store of offsets, dead letters and claims promises a bus, on files and in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from tests.scenarios.bus.support import soon
from tidings.bus import EventBus, ReceivedEvent
from tidings.bus.errors import UnknownDeadLetter
from tidings.bus.store import Cursor, DeadLetterFilter, GroupPosition, GroupStore
from tidings.bus.store.dead_letters import record_of
from tidings.bus.store.files import FileGroupStore
from tidings.bus.store.memory import MemoryGroupStore
from tidings.core.errors import SettingsError
from tidings.core.events import Event, EventMeta
from tidings.log.memory import MemoryLog
from tidings.log.record import Record, RecordMeta
from tidings.log.settings import LogSettings
from tidings.testing import VirtualClock

WRITTEN = "2026-01-01T00:00:00.000000Z"


@pytest.fixture
async def log() -> AsyncIterator[MemoryLog]:
    made = MemoryLog(LogSettings(segment_lines_max=2), clock=VirtualClock())
    yield made
    await made.close()


@pytest.fixture(params=["files", "memory"])
def store(request: pytest.FixtureRequest, log: MemoryLog, tmp_path: Path) -> GroupStore:
    clock = VirtualClock()
    return FileGroupStore(tmp_path, log, clock=clock) if request.param == "files" else MemoryGroupStore(clock)


def record(offset: int) -> Record:
    meta = RecordMeta(
        written_at=WRITTEN, topic="actions", type="DONE", space_id="shared:home", event_id=f"ev-{offset}", ts=WRITTEN
    )
    return Record.of(offset, offset + 1, meta, msgspec.Raw(b'{"n":%d}' % offset))


async def add(store: GroupStore, *offsets: int, group: str = "g") -> None:
    for offset in offsets:
        await store.add_dead_letter(record(offset), group, RuntimeError(f"no {offset}"), [], "retries")


async def states(store: GroupStore) -> dict[str, str]:
    every = DeadLetterFilter(states=("dead", "requested", "trying", "redriven", "dropped"))
    return {letter.id: letter.state for letter in await store.dead_letters("actions", None, every)}


async def test_a_position_comes_back_as_it_was_stored(store: GroupStore) -> None:
    """Committed offset, ranges, attempts and the pause; a group that was never stored has none, nor has a removed one."""
    assert await store.load("actions", "g") is None
    cursor = Cursor(3, [(5, 6)])
    await store.save("actions", "g", GroupPosition(cursor, {4: 2}, True))
    await store.save("actions", "other", GroupPosition(Cursor(1), {}), sync=False)
    await store.save("more", "g", GroupPosition(Cursor(), {}))
    cursor.ack(4)

    found = await store.load("actions", "g")

    assert found is not None
    assert (found.cursor.committed, found.cursor.ranges, found.attempts, found.paused) == (3, [(5, 6)], {4: 2}, True)
    assert (await store.is_paused("actions", "g"), await store.is_paused("actions", "other")) == (True, False)
    assert await store.groups() == [("actions", "g"), ("actions", "other"), ("more", "g")]
    assert await store.groups("more") == [("more", "g")]
    await store.remove("actions", "g")
    assert (await store.load("actions", "g"), await store.groups("actions")) == (None, [("actions", "other")])


async def test_claims_name_what_was_being_handled(store: GroupStore) -> None:
    """A slot that nobody cleared is left over, for whoever opens the group next; a removed group leaves nothing."""
    claims = store.claims("actions", "g")
    claims.begin(3)
    claims.take(0, 7, 1)
    claims.taker(1)(8, 2)
    claims.take(2, 9, 1)
    claims.clear(2)
    claims.close()

    assert await store.left_over(store.claims("actions", "g")) == {7: 1, 8: 2}
    await store.remove("actions", "g")
    assert await store.left_over(store.claims("actions", "g")) == {}


async def test_dead_letters_go_through_their_states(store: GroupStore) -> None:
    """Dead, requested, trying, redriven or dead again with the new error, dropped for good; open ones are not added twice."""
    await add(store, 2, 0, 1, 3)
    await add(store, 1)
    assert [letter.offset for letter in await store.dead_letters("actions")] == [0, 1, 2, 3]
    await store.drop_dead_letters("actions", ["g-3"])

    requested = await store.request_redrive("actions", ["g-1", "g-0", "g-3"])
    for letter_id, error in (("g-0", None), ("g-1", ValueError("worse"))):
        await store.begin_redrive("actions", letter_id)
        assert await store.dead_letter_state("actions", letter_id) == "trying"
        await store.finish_redrive("actions", letter_id, error)

    assert [(letter.id, letter.state) for letter in requested] == [("g-1", "requested"), ("g-0", "requested")]
    assert await states(store) == {"g-0": "redriven", "g-1": "dead", "g-2": "dead", "g-3": "dropped"}
    failed = await store.dead_letter("actions", "g-1")
    assert (failed.error, failed.redrives, failed.tries) == ("worse", 1, 1)
    assert await store.dead_letter_topics() == ["actions"]
    await add(store, 0)
    assert (await states(store))["g-0"] == "dead", "one that was redriven may fail again"


async def test_dead_letters_are_found_by_name_and_by_what_they_are(store: GroupStore) -> None:
    """Named ones come in the order they are named in; one that does not exist is refused before anything changes."""
    await add(store, 0, 1)
    await add(store, 0, group="h")

    assert [each.id for each in await store.dead_letters("actions", ["g-1", "h-0"])] == ["g-1", "h-0"]
    of_group = await store.dead_letters("actions", None, DeadLetterFilter(group="h"))
    assert [each.id for each in of_group] == ["h-0"]
    again = record_of(of_group[0])
    assert again is not None
    assert (again.meta, again.payload) == (record(0).meta, {"n": 0})
    assert await store.dead_letters("none") == []
    assert await store.dead_letter_state("actions", "nobody-1") is None
    for change in (store.request_redrive, store.drop_dead_letters, store.dead_letters):
        with pytest.raises(UnknownDeadLetter):
            await change("actions", ["g-0", "nobody-1"])
    assert set((await states(store)).values()) == {"dead"}


async def test_needs_say_how_far_each_group_is(store: GroupStore) -> None:
    """For retention: by topic and group, also one topic alone; while that is held, no group can be created."""
    await store.save("actions", "g", GroupPosition(Cursor(3, [(5, 6)]), {}))
    await store.save("more", "h", GroupPosition(Cursor(), {}))

    assert (await store.needs()).groups == {"actions": {"g": 3}, "more": {"h": -1}}
    async with store.needs_of("actions") as needs:
        assert needs.groups == {"actions": {"g": 3}}
        assert store.changing.locked()
    assert not store.changing.locked()


def test_a_store_comes_with_its_log(store: GroupStore) -> None:
    """Offsets mean something in one log only: a store without it is refused when the bus is made."""
    with pytest.raises(SettingsError) as caught:
        EventBus(store=store)

    assert caught.value.path == "store"


async def test_a_bus_runs_on_the_store(store: GroupStore, log: MemoryLog) -> None:
    """A group goes on where it stopped, has its dead letter redriven, and is paused while nobody runs it."""
    seen: list[tuple[int, int]] = []
    fails = True

    async def handle(event: ReceivedEvent) -> None:
        seen.append((event.offset, event.attempt))
        if fails and event.offset == 1:
            raise RuntimeError("not yet")

    async with EventBus(log=log, store=store) as bus:
        await bus.subscribe("actions", "g", handle, max_retries=0)
        for n in range(3):
            await bus.publish(Event(EventMeta(topic="actions", type="DONE", space_id="shared:home"), {"n": n}))
        await soon(lambda: bus.lag("actions", "g") == 0)
    async with EventBus(log=log, store=store) as bus:
        await bus.pause("actions", "g")
        await bus.publish(Event(EventMeta(topic="actions", type="DONE", space_id="shared:home"), {"n": 3}))
        await bus.subscribe("actions", "g", handle, max_retries=0)
        fails = False
        assert len(await bus.redrive("actions")) == 1
        assert (bus.lag("actions", "g"), seen) == (1, [(0, 1), (1, 1), (2, 1)])
        await bus.resume("actions", "g")
        await soon(lambda: bus.lag("actions", "g") == 0)
        while (await bus.dead_letter("actions", "g-1")).state != "redriven":  # noqa: ASYNC110 - no event to wait on
            await asyncio.sleep(0)

    assert sorted(seen[3:]) == [(1, 2), (3, 1)]
