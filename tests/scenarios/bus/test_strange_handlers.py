"""Handlers that fail in ways a group might take for its own end: cancelled, stuck in a thread, with errors that have no text."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.scenarios.bus.support import GROUP, TOPIC, Recorder, World, soon
from tidings.bus import EventBus, ReceivedEvent
from tidings.core.events import Event, EventMeta
from tidings.filters import Filter
from tidings.middleware import Decision, HandleContext, Middleware
from tidings.types import Ack, Nack

FAST: dict[str, Any] = {"backoff_base": 0.0, "max_retries": 2}


async def cancelled(_: object) -> Ack:
    """A handler that awaits something which somebody else has cancelled."""
    awaited = asyncio.get_running_loop().create_future()
    awaited.cancel()
    await awaited
    return Ack()


class CancelledHook(Middleware):
    """A middleware that does the same for the first event."""

    name = "cancelled"

    async def before_handle(self, ctx: HandleContext) -> Decision | None:
        if ctx.event.offset == 0:
            await cancelled(ctx)
        return None


@pytest.mark.req("F56")
@pytest.mark.parametrize(
    "options",
    [{}, {"ack_deadline_ms": 60_000}, {"batch_count_max": 2}, {"order": "strict"}],
    ids=["plain", "with a deadline", "in batches", "in order"],
)
async def test_a_handler_whose_own_work_is_cancelled_has_failed(world: World, options: dict[str, Any]) -> None:
    """It is tried again, becomes a dead letter, and the group goes on with what follows."""
    bus = await world.open()
    await world.run(bus.subscribe(TOPIC, GROUP, cancelled, **FAST, **options))
    await world.publish(3)
    await world.until(world.drained())

    letters = await world.run(bus.dead_letters(TOPIC))
    assert [(letter.offset, letter.error_type, len(letter.attempts)) for letter in letters] == [
        (offset, "asyncio.exceptions.CancelledError", 3) for offset in range(3)
    ]
    assert bus.health().problem is None


@pytest.mark.parametrize("batch_count_max", [1, 3])
async def test_a_middleware_whose_own_work_is_cancelled_fails_that_event_alone(
    world: World, batch_count_max: int
) -> None:
    """Its event becomes a dead letter; the others are handled."""
    got: list[int] = []

    async def handler(events: Any) -> Ack:
        got.extend(event.offset for event in (events if isinstance(events, list) else [events]))
        return Ack()

    bus = await world.open(CancelledHook())
    await world.run(bus.subscribe(TOPIC, GROUP, handler, batch_count_max=batch_count_max, **FAST))
    await world.publish(3)
    await world.until(world.drained())

    assert got == [1, 2]
    assert [letter.offset for letter in await world.run(bus.dead_letters(TOPIC))] == [0]


class Own(BaseException):
    """A library's own way out, which is no ``Exception``."""


def unclosed(error: BaseException) -> Callable[[object], Any]:
    """A handler that raises this for its first event, each time."""

    async def handler(events: Any) -> Ack:
        event = events[0] if isinstance(events, list) else events
        if event.offset == 0:
            raise error
        return Ack()

    return handler


WAYS = [{}, {"ack_deadline_ms": 60_000}, {"batch_count_max": 2}, {"order": "strict"}, {"order": "key", "workers": 2}]
WAYS_IDS = ["plain", "with a deadline", "in lists", "in order", "by key"]


@pytest.mark.req("F56")
@pytest.mark.parametrize("options", WAYS, ids=WAYS_IDS)
@pytest.mark.parametrize(
    "error",
    [Own("out"), GeneratorExit("out"), BaseExceptionGroup("out", [Own("one")]), asyncio.CancelledError("out")],
    ids=["own", "generator exit", "group", "cancelled"],
)
async def test_no_error_of_a_handler_ends_its_worker(
    world: World, options: dict[str, Any], error: BaseException
) -> None:
    """Whatever it derives from, it is a failed attempt: retried, then a dead letter, which fails the same way when re-driven."""
    bus = await world.open()
    await world.run(bus.subscribe(TOPIC, GROUP, unclosed(error), max_inflight=4, **FAST, **options))
    await world.publish(20)
    await world.until(world.drained())

    (letter,) = await world.run(bus.dead_letters(TOPIC))
    assert (letter.offset, letter.error_type.rpartition(".")[2], len(letter.attempts)) == (0, type(error).__name__, 3)
    assert bus.health().problem is None

    await world.run(bus.redrive(TOPIC))
    await redriven(world, bus, [1])
    await world.publish(1)
    await world.until(world.drained())


class OwnHook(Middleware):
    """A middleware that raises what is no ``Exception`` for the first event, before or after its handler."""

    name = "own"

    def __init__(self, hook: str) -> None:
        setattr(self, hook, self.fail)

    def fail(self, ctx: HandleContext, *_: object) -> None:
        if ctx.event.offset == 0:
            raise Own


class OwnFilter(Filter):
    """A filter that does the same."""

    def __init__(self) -> None:
        super().__init__("own")

    def decide(self, event: Event) -> bool:
        if event.payload["n"] == 0:
            raise Own
        return True


@pytest.mark.parametrize("batch_count_max", [1, 3])
@pytest.mark.parametrize("place", ["before_handle", "after_handle", "filter"])
async def test_no_error_of_a_hook_or_filter_ends_a_worker(world: World, place: str, batch_count_max: int) -> None:
    """It fails that event alone, as any other error does."""
    bus = await world.open(*([] if place == "filter" else [OwnHook(place)]))
    filters = [OwnFilter()] if place == "filter" else []
    await world.run(
        bus.subscribe(TOPIC, GROUP, swallow, advanced_filters=filters, batch_count_max=batch_count_max, **FAST)
    )
    await world.publish(3)
    await world.until(world.drained())

    assert [letter.offset for letter in await world.run(bus.dead_letters(TOPIC))] == [0]
    assert bus.health().problem is None


async def swallow(_: object) -> None:
    """Handle anything, and say nothing."""


class Unrepresentable:
    """A key that cannot be shown."""

    def __repr__(self) -> str:
        raise Own


@pytest.mark.parametrize("key", [lambda _: Unrepresentable(), lambda _: 1 / 0, lambda _: os.fsdecode(b"\xe9")])
async def test_no_error_of_a_key_ends_the_feed(world: World, key: Callable[[Event], object]) -> None:
    """The event has the order of its space, and the group goes on."""
    bus = await world.open()
    got = Recorder()
    await world.run(bus.subscribe(TOPIC, GROUP, got, order="key", workers=2, key_of=key))
    await world.publish(3)
    await world.until(world.drained())

    assert got.offsets == [0, 1, 2]


async def test_a_handler_that_swallows_its_deadline_leaves_nothing_behind(world: World) -> None:
    """Its attempt has failed, whatever it answers; and a later event whose own work is cancelled ends no worker."""
    bus = await world.open()
    seen: list[tuple[int, int]] = []

    async def handler(event: ReceivedEvent) -> Ack:
        seen.append((event.offset, event.attempt))
        if event.offset == 0 and event.attempt == 1:
            try:
                await world.clock.sleep(60)
            except asyncio.CancelledError:
                return Ack()
        if event.offset == 1 and event.attempt == 1:
            await cancelled(event)
        return Ack()

    await world.run(bus.subscribe(TOPIC, GROUP, handler, ack_deadline_ms=1000, max_inflight=2, **FAST))
    await world.publish(10)
    await world.until(world.drained())

    assert [attempt for offset, attempt in seen if offset == 0] == [1, 2]
    assert [attempt for offset, attempt in seen if offset == 1] == [1, 2]
    assert world.group().stats.timed_out == 1
    assert bus.health().problem is None


@pytest.mark.parametrize("options", WAYS, ids=WAYS_IDS)
@pytest.mark.parametrize("way", ["raises", "swallows", "later"])
async def test_a_handler_that_cancels_its_own_task_has_failed_and_no_more(
    world: World, options: dict[str, Any], way: str
) -> None:
    """The group handles what follows, nothing is lost, and publishers go on."""
    bus = await world.open()
    handled: set[int] = set()

    async def handler(events: Any) -> None:
        each = events if isinstance(events, list) else [events]
        if each[0].offset == 0 and each[0].attempt == 1:
            task = asyncio.current_task()
            assert task is not None
            if way == "later":
                asyncio.get_running_loop().call_soon(task.cancel)
            else:
                task.cancel()
            if way == "raises":
                await asyncio.sleep(0)
            elif way == "swallows":
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(0)
        handled.update(event.offset for event in each)

    await world.run(bus.subscribe(TOPIC, GROUP, handler, max_inflight=3, **FAST, **options))
    await world.publish(20)
    await world.until(world.drained())

    assert handled == set(range(20))
    assert await world.run(bus.dead_letters(TOPIC)) == []
    assert bus.health().problem is None


@pytest.mark.parametrize(
    ("options", "how"),
    [
        *(
            pytest.param(options, "SystemExit(3)", id=f"SystemExit-{way}")
            for options, way in zip(WAYS, WAYS_IDS, strict=True)
        ),
        pytest.param(WAYS[0], "KeyboardInterrupt()", id=f"KeyboardInterrupt-{WAYS_IDS[0]}"),
        *(
            pytest.param(options, "KeyboardInterrupt()", id=f"KeyboardInterrupt-{way}", marks=pytest.mark.heavy)
            for options, way in zip(WAYS[1:], WAYS_IDS[1:], strict=True)
        ),
    ],
)
def test_what_ends_the_process_ends_it_and_is_counted(tmp_path: Path, options: dict[str, Any], how: str) -> None:
    """A handler's ``SystemExit`` or ``KeyboardInterrupt`` is no failed attempt but the process's end; the next counts it."""
    program = f"""
import asyncio, sys
from tidings.bus import EventBus
from tidings.core.events import Event, EventMeta
from tidings.filters import Filter

async def leave(event):
    raise {how}

async def main():
    bus = EventBus(workspace=sys.argv[1])
    await bus.subscribe("a", "g", leave, **{options!r})
    await bus.publish(Event(EventMeta("a", "NOTED", "shared:home"), {{}}))
    await asyncio.sleep(60)

asyncio.run(main())
"""
    ended = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode not in (0, 1), ended.stderr

    async def attempts() -> list[int]:
        got = Recorder()
        async with EventBus(workspace=tmp_path) as bus:
            await bus.subscribe("a", "g", got)
            await soon(lambda: bus.lag("a", "g") == 0)
        return got.attempts_of(0)

    assert asyncio.run(attempts()) == [2]


async def test_closing_still_cancels_a_handler_that_hangs(world: World) -> None:
    """A worker's own cancellation is no failed attempt: the event comes again, for the first time."""
    bus = await world.open()
    began = asyncio.Event()

    async def hang(_: ReceivedEvent) -> Ack:
        began.set()
        await asyncio.get_running_loop().create_future()
        return Ack()

    await world.run(bus.subscribe(TOPIC, GROUP, hang, **FAST))
    await world.publish(1)
    await world.run(began.wait())
    await world.close()

    bus = await world.open()
    got = Recorder()
    await world.run(bus.subscribe(TOPIC, GROUP, got))
    await world.until(world.drained())
    assert got.attempts_of(0) == [1]


async def test_a_worker_that_somebody_else_cancels_shows_in_the_health(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """It says so until something was handled since; another worker has taken its place."""
    bus = await world.open()
    await world.run(bus.subscribe(TOPIC, GROUP, Recorder()))
    (worker,) = [task for task in asyncio.all_tasks() if task.get_name() == f"{TOPIC}/{GROUP}#0"]
    with caplog.at_level(logging.ERROR):
        worker.cancel()
        await asyncio.wait({worker})
        await world.until(lambda: bus.health().problem is not None)

    assert "cancelled by somebody else" in str(bus.health().problem)
    assert GROUP in caplog.text
    await world.publish(3)
    await world.until(world.drained())
    assert bus.health().problem is None


class Wordless(Exception):
    """An error that cannot be shown."""

    def __str__(self) -> str:
        raise ValueError("no text")


class Nameless:
    """An answer that cannot be shown."""

    def __repr__(self) -> str:
        raise ValueError("no text")


def raises(error: BaseException) -> Callable[[object], Any]:
    async def handler(_: object) -> Ack:
        raise error

    return handler


def answers(answer: Callable[[], object]) -> Callable[[object], Any]:
    async def handler(_: object) -> object:
        return answer()

    return handler


@pytest.mark.req("F56")
@pytest.mark.parametrize(
    ("handler", "text"),
    [
        (raises(ValueError(os.fsdecode(b"caf\xe9"))), "caf\\udce9"),
        (raises(Wordless()), "Wordless"),
        (raises(ValueError("x" * 5_000_000)), "5,000,000 characters"),
        (answers(Nameless), "Nameless"),
        (answers(lambda: Nack(os.fsdecode(b"caf\xe9"))), "caf\\udce9"),
        (answers(lambda: Nack(7)), "7"),  # type: ignore[arg-type]
        (answers(lambda: Nack("later", delay_s="5")), "delay_s"),  # type: ignore[arg-type]
        (answers(lambda: Nack("later", delay_s=float("inf"))), "delay_s"),
    ],
    ids=["no unicode", "no text", "a document", "no name", "a nack", "no reason", "no delay", "an endless delay"],
)
async def test_whatever_is_raised_or_answered_ends_as_a_dead_letter(
    world: World, handler: Callable[[object], Any], text: str, caplog: pytest.LogCaptureFixture
) -> None:
    """
    The letter says what can be said, within bounds, and so does the program's log; the group goes on; and a re-drive that fails so
    is told the same way.
    """
    bus = await world.open()
    await world.run(bus.subscribe(TOPIC, GROUP, handler, **FAST))
    await world.publish(2)
    await world.until(world.drained())

    letters = await world.run(bus.dead_letters(TOPIC))
    assert [letter.offset for letter in letters] == [0, 1]
    assert all(text in letter.error and len(letter.error) < 5_000 for letter in letters)
    assert bus.health().problem is None

    await world.run(bus.redrive(TOPIC))
    await world.until(lambda: world.group().stats.delivered >= 6)
    await redriven(world, bus, [1, 1])
    assert all(text in letter.error for letter in await world.run(bus.dead_letters(TOPIC)))
    assert text in caplog.text
    assert len(caplog.text.encode()) < 200_000


async def redriven(world: World, bus: EventBus, counts: list[int]) -> None:
    """Wait until the letters were tried again so often, and are dead again."""

    async def poll() -> None:
        while True:
            letters = await bus.dead_letters(TOPIC)
            if [(letter.state, letter.redrives) for letter in letters] == [("dead", count) for count in counts]:
                return
            await world.clock.sleep(0.01)

    await world.run(poll())


def an_event(topic: str) -> Event:
    return Event(EventMeta(topic, "NOTED", "shared:home"), {})


async def test_a_plain_function_that_blocks_holds_up_its_group_and_nobody_else(tmp_path: Path) -> None:
    """Other groups handle and bury, new ones subscribe, and the bus closes, while all its threads are stuck."""
    release, stuck = threading.Event(), threading.Semaphore(0)

    def block(_: object) -> Ack:
        stuck.release()
        release.wait()
        return Ack()

    def fail(_: object) -> Ack:
        raise RuntimeError("no")

    bus = EventBus(workspace=tmp_path)
    try:
        await bus.subscribe("a", "stuck", block, workers=40)
        for _ in range(40):
            await bus.publish(an_event("a"))
        for _ in range(40):
            assert await asyncio.to_thread(stuck.acquire, timeout=60)

        await bus.subscribe("b", "fails", fail, max_retries=0)
        await bus.publish(an_event("b"))
        await soon(lambda: bus.lag("b", "fails") == 0)
        assert len(await bus.dead_letters("b")) == 1
        async with asyncio.timeout(30):
            await bus.close(0)
    finally:
        release.set()


async def test_a_plain_function_that_misses_its_deadline_takes_one_thread_and_no_more(tmp_path: Path) -> None:
    """Its thread cannot be called back; its events become dead letters in their time, and the rest of the bus goes on."""
    release = threading.Event()
    started: list[int] = []

    def block(event: ReceivedEvent) -> Ack:
        started.append(event.offset)
        release.wait()
        return Ack()

    async with EventBus(workspace=tmp_path) as bus:
        try:
            await bus.subscribe("a", "stuck", block, ack_deadline_ms=50, max_retries=1, backoff_base=0.0)
            for _ in range(3):
                await bus.publish(an_event("a"))
            await soon(lambda: bus.lag("a", "stuck") == 0)
            assert len(await bus.dead_letters("a")) == 3
            assert started == [0]
        finally:
            release.set()


async def test_a_plain_function_that_raises_stop_iteration_has_failed(tmp_path: Path) -> None:
    """What cannot pass through a coroutine is a failure all the same."""

    def empty(_: object) -> Ack:
        next(iter(()))
        return Ack()

    async with EventBus(workspace=tmp_path) as bus:
        await bus.subscribe("a", "g", empty, max_retries=1, backoff_base=0.0)
        await bus.publish(an_event("a"))
        await soon(lambda: bus.lag("a", "g") == 0)
        (letter,) = await bus.dead_letters("a")
        assert "StopIteration" in letter.error


def test_a_process_ends_although_a_plain_handler_never_does(tmp_path: Path) -> None:
    """The last words of a program are not held up by a function that hangs."""
    program = """
import asyncio, sys, threading
from tidings.bus import EventBus
from tidings.core.events import Event, EventMeta
from tidings.filters import Filter

began = threading.Event()

def hang(event):
    began.set()
    threading.Event().wait()

async def main():
    async with EventBus(workspace=sys.argv[1]) as bus:
        await bus.subscribe("a", "g", hang)
        await bus.publish(Event(EventMeta("a", "NOTED", "shared:home"), {}))
        await asyncio.to_thread(began.wait)
        await bus.close(0)
    print("closed")

asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "closed\n"), done.stderr
