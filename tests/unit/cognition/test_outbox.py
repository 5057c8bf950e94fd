"""The outbox is emptied once, in order, and goes on where a crash stopped it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.cognition.support import Bus, BusDown, make_event
from tidings.cognition.write import MemoryStore, OutboxSettings, WriteHandler
from tidings.cognition.write.outbox import Outbox
from tidings.core.errors import InvalidPayload
from tidings.core.events import Event
from tidings.testing import VirtualClock

COMMIT_EVENTS = 6


class Killed(BaseException):
    """The process dies here."""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[MemoryStore]:
    made = MemoryStore(tmp_path / "memory.db")
    yield made
    made.close()


async def write(store: MemoryStore, bus: Bus, clock: VirtualClock, event_id: str = "ev-1") -> WriteHandler:
    handler = WriteHandler(store, bus.publish, clock)
    await handler(make_event({"text": f"{event_id} something happened"}, event_id=event_id))
    return handler


@pytest.mark.parametrize("crash_at", range(COMMIT_EVENTS))
@pytest.mark.parametrize("is_published", [False, True])
async def test_a_crash_at_any_event_loses_and_doubles_nothing(
    tmp_path: Path, crash_at: int, is_published: bool
) -> None:
    """Killed before or after the n-th publish, the next process delivers the rest in order, each event once."""
    bus, clock = Bus(), VirtualClock()
    path = tmp_path / "memory.db"
    count = 0

    async def dying(event: Event) -> None:
        nonlocal count
        is_last = event.meta.topic != "cognitive.memory" or event.meta.type.endswith("committed")
        count += is_last
        if is_last and count == crash_at + 1:
            if is_published:
                await bus.publish(event)
            raise Killed
        await bus.publish(event)

    first = MemoryStore(path)
    with pytest.raises(Killed):
        await WriteHandler(first, dying, clock)(make_event({"text": "something happened"}))
    first.close()

    second = MemoryStore(path)
    handler = WriteHandler(second, bus.publish, clock)
    await handler.outbox.drain()
    rows = await handler.outbox.rows()
    second.close()

    assert bus.types()[3:] == [
        *("cognitive.memory.write.committed", "WRITE_ACCEPTED", "HIPPO_ENCODE", "HIPPO_ENCODED", "HIPPO_ENCODE"),
        "MEMORY_RECEIPT_CREATED",
    ]
    assert {row.status for row in rows} == {"delivered"}


async def test_a_refused_event_waits_with_those_behind_it_and_others_pass(store: MemoryStore) -> None:
    """Order holds within a memory; another memory's events do not wait."""
    bus, clock = Bus(), VirtualClock()
    bus.refused_types = {"WRITE_ACCEPTED": BusDown()}
    handler = await write(store, bus, clock)

    assert bus.types()[3:] == ["cognitive.memory.write.committed"]
    bus.refused_types = {}
    await write(store, bus, clock, "ev-2")
    assert len(bus.types()) == 4 + 3 + COMMIT_EVENTS
    await clock.advance(0.999)
    assert await handler.outbox.drain() == 0
    await clock.advance(0.001)
    assert await handler.outbox.drain() == COMMIT_EVENTS - 1


async def test_delays_double_and_five_attempts_are_enough(store: MemoryStore) -> None:
    """1, 2, 4, 8 seconds, then it is set aside with the reason; the ones behind it go on; it can be revived."""
    bus, clock = Bus(), VirtualClock()
    bus.refused_types = {"HIPPO_ENCODED": BusDown("no")}
    handler = await write(store, bus, clock)
    for delay_s in (1, 2, 4, 8):
        (waiting,) = [row for row in await handler.outbox.rows("pending") if row.event_type == "HIPPO_ENCODED"]
        assert waiting.next_retry_ns - clock.now_ns() == delay_s * 1_000_000_000
        await clock.advance(delay_s)
        await handler.outbox.drain()

    (dead,) = await handler.outbox.rows("dlq")
    assert dead.attempts == 5
    assert (dead.problem or "").startswith("max_retries_exceeded: BusDown")
    await handler.outbox.drain()
    assert bus.types()[-1] == "MEMORY_RECEIPT_CREATED"
    bus.refused_types = {}
    assert await handler.outbox.retry_dead() == 1
    assert await handler.outbox.drain() == 1


async def test_what_the_bus_refuses_for_good_is_not_tried_again(store: MemoryStore) -> None:
    """An event that cannot be stored is set aside at once."""
    bus = Bus()
    bus.refused_types = {"HIPPO_ENCODED": InvalidPayload("payload", "too deep")}
    handler = await write(store, bus, VirtualClock())

    (dead,) = await handler.outbox.rows("dlq")
    assert (dead.attempts, (dead.problem or "").split(":")[0]) == (1, "schema_validation_failed")


async def test_delivered_rows_are_kept_for_a_day(store: MemoryStore) -> None:
    """Then they go: the outbox does not grow for ever."""
    bus, clock = Bus(), VirtualClock()
    handler = await write(store, bus, clock)

    assert len(await handler.outbox.rows()) == COMMIT_EVENTS
    await clock.advance(86_401)
    await handler.outbox.drain()
    assert await handler.outbox.rows() == []


async def test_a_drain_cut_short_is_taken_up_by_the_next(store: MemoryStore) -> None:
    """An error nobody foresaw comes out of the drain; what it had claimed is not stranded until a restart."""
    bus, clock = Bus(), VirtualClock()
    handler = await write(store, bus, clock)
    bus.refused_types = {"HIPPO_ENCODE": ZeroDivisionError()}
    with pytest.raises(ZeroDivisionError):
        await handler(make_event({"text": "and something else"}, event_id="ev-2"))
    bus.refused_types = {}

    assert await handler.outbox.drain() == COMMIT_EVENTS - 2
    assert {row.status for row in await handler.outbox.rows()} == {"delivered"}


async def test_two_drains_at_once_deliver_each_event_once(store: MemoryStore) -> None:
    """They take turns."""
    bus, clock = Bus(), VirtualClock()
    bus.refused_types = {"cognitive.memory.write.committed": BusDown()}
    handler = await write(store, bus, clock)
    bus.refused_types = {}
    await clock.advance(1)
    calls = bus.calls

    assert sorted(await asyncio.gather(handler.outbox.drain(), handler.outbox.drain())) == [0, COMMIT_EVENTS]
    assert bus.calls - calls == COMMIT_EVENTS


async def test_batches_smaller_than_the_outbox_keep_the_order(store: MemoryStore) -> None:
    """One row at a time gives the same as all at once."""
    bus, clock = Bus(), VirtualClock()
    handler = WriteHandler(store, bus.publish, clock, outbox=OutboxSettings(batch_count_max=1))
    await handler(make_event({"text": "something happened"}))

    assert bus.types()[-1] == "MEMORY_RECEIPT_CREATED"
    assert len(bus.events) == 3 + COMMIT_EVENTS


async def test_running_it_delivers_what_waits(store: MemoryStore) -> None:
    """The loop sleeps until the next try is due."""
    bus, clock = Bus(), VirtualClock()
    bus.refused_types = {"cognitive.memory.write.committed": BusDown()}
    await write(store, bus, clock)
    bus.refused_types = {}
    done = asyncio.Event()

    async def publish(event: Event) -> None:
        await bus.publish(event)
        if event.meta.type == "MEMORY_RECEIPT_CREATED":
            done.set()

    running = asyncio.create_task(Outbox(store.database, publish, clock).run())
    await clock.run_until(done.wait())
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert len(bus.events) == 3 + COMMIT_EVENTS
    assert clock.monotonic() >= 1
