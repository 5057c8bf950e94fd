"""What every part has in common: a name, a voice on the bus, and handlers by topic."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from datetime import datetime
from typing import Any

from tidings.bus import Ack, EventBus, ReceivedEvent
from tidings.cognition.resilience import PoisonWatch
from tidings.core.clock import Clock, datetime_of
from tidings.log import Appended
from tidings.log.errors import IdConflict
from tidings.types import Event, EventMeta

from .wiring import SPACE

__all__ = ["Flow", "Part", "Work"]

Work = Callable[[ReceivedEvent], Awaitable[None]]


class Flow:
    """What went over the bus: counted, and shown line by line if somebody wants to see it."""

    def __init__(self, show: Callable[[str], None] | None = None) -> None:
        self.sent: Counter[tuple[str, str, str]] = Counter()
        """By topic, producer and type."""
        self.got: Counter[tuple[str, str, str]] = Counter()
        """By topic, consumer and type."""
        self.poison: set[tuple[str, str, str]] = set()
        """Failures that keep coming back, by type, error and consumer."""
        self._watch = PoisonWatch()
        self._show = show

    def note_sent(self, producer: str, event: Event) -> None:
        """A part published an event, and the bus has it on disk."""
        self.sent[event.meta.topic, producer, event.meta.type] += 1
        self._line(f"{producer:>13} -> {event.meta.topic:<12} {event.meta.type:<20} {_brief(event.payload)}")

    def note_got(self, consumer: str, event: ReceivedEvent) -> None:
        """A part is done with an event."""
        self.got[event.topic, consumer, event.meta.type] += 1
        again = f" (attempt {event.attempt})" if event.attempt > 1 else ""
        self._line(f"{'':>13}    {event.topic:<12} {event.record.meta.type:<20} -> {consumer}{again}")

    def note_failed(self, consumer: str, event: ReceivedEvent, error: Exception, now_s: float) -> None:
        """A part could not handle an event; the bus will try again."""
        kind = (event.meta.type, type(error).__name__, consumer)
        if self._watch.is_poison(*kind, now_s):
            self.poison.add(kind)
        self._line(f"{'':>13}    {event.topic:<12} {event.record.meta.type:<20} -> {consumer} failed: {error}")

    def _line(self, text: str) -> None:
        if self._show is not None:
            self._show(text)


def _brief(payload: Mapping[str, Any]) -> str:
    text = ", ".join(f"{key}={value}" for key, value in payload.items())
    return text if len(text) <= 90 else text[:89] + "…"


class Part:
    """One part of the household. Its handlers acknowledge by returning; what they raise is tried again."""

    name = ""

    def __init__(self, bus: EventBus, flow: Flow, clock: Clock) -> None:
        self._bus = bus
        self._flow = flow
        self._clock = clock
        self._tasks: list[asyncio.Task[None]] = []

    def handlers(self) -> dict[str, Work]:
        """What it does with the events of each topic it listens to."""
        return {}

    async def start(self) -> None:
        """Subscribe to its topics, under its own name."""
        for topic, work in self.handlers().items():
            await self._bus.subscribe(topic, self.name, self._acknowledging(work), backoff_base=0.01, backoff_max=0.05)

    async def stop(self) -> None:
        """End what it does of its own accord; one that failed says so here."""
        for task in self._tasks:
            task.cancel()
        for outcome in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome

    def keep_running(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something of its own accord, until it is stopped."""
        self._tasks.append(asyncio.create_task(work))

    def _acknowledging(self, work: Work) -> Callable[[ReceivedEvent], Awaitable[Ack]]:
        async def handler(event: ReceivedEvent) -> Ack:
            try:
                await work(event)
            except Exception as error:
                self._flow.note_failed(self.name, event, error, self._clock.monotonic())
                raise
            self._flow.note_got(self.name, event)
            return Ack()

        return handler

    async def send(
        self, topic: str, type_: str, payload: Mapping[str, Any], *, cause: Event | None = None, key: str | None = None
    ) -> None:
        """
        Publish; returns once it is on disk.

        Args:
            topic: Where to.
            type_: What kind of event it is.
            payload: What it says; of the time, only what the cause says, so that it says the same the next time.
            cause: The event that it answers; it stays in that one's trace.
            key: Makes it one event however often the cause is handled.
        """
        meta = EventMeta(topic, str.__str__(type_), SPACE, actor=f"part:{self.name}", idem_key=key)
        meta.trace_id = (cause.meta.trace_id or cause.meta.event_id) if cause is not None else meta.event_id
        # A conflict means that the cause was handled before, when other things were known: a mood that a crash has wiped
        # out, say. Others may have acted on the answer it got then, so that one stands.
        with contextlib.suppress(IdConflict):
            await self.publish(Event(meta, payload))

    async def publish(self, event: Event) -> None:
        """Publish an event in this part's name: the voice that it lends to the cognitive layer."""
        if isinstance(await self._bus.publish(event), Appended):
            self._flow.note_sent(self.name, event)

    def now(self) -> datetime:
        """The time, in UTC."""
        return datetime_of(self._clock.now_ns())
