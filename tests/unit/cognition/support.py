"""What the cognition tests share: a bus that remembers, and events to hand in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from tidings.core.errors import TidingsError
from tidings.core.events import Event, EventMeta, SecurityBand
from tidings.log.interface import Appended, Verdict
from tidings.log.memory import MemoryLog

START = datetime(2026, 1, 1, tzinfo=UTC)
"""Where a VirtualClock begins."""


class BusDown(TidingsError):
    """The bus cannot take events just now."""

    code = "test.bus_down"
    retryable = True


class Bus:
    """
    A log in memory, which refuses what cannot be stored and knows an id again; ``events`` is what it holds.

    ``failures`` are raised first, one a call; ``failures_after`` likewise, but once the event is stored.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.calls = 0
        self.failures: list[Exception] = []
        self.failures_after: list[Exception] = []
        self.refused_types: dict[str, Exception] = {}
        self._log = MemoryLog()

    async def publish(self, event: Event) -> None:
        self.calls += 1
        if self.failures:
            raise self.failures.pop(0)
        refusal = self.refused_types.get(str.__str__(event.meta.type))
        if refusal is not None:
            raise refusal
        if isinstance(await self._log.append(event), Appended):
            self.events.append(event)
        if self.failures_after:
            raise self.failures_after.pop(0)

    async def publish_many(self, events: Sequence[Event]) -> list[Verdict]:
        self.calls += 1
        if self.failures:
            raise self.failures.pop(0)
        verdicts = await self._log.append_many(events)
        self.events += [event for event, verdict in zip(events, verdicts, strict=True) if isinstance(verdict, Appended)]
        return list(verdicts)

    def types(self) -> list[str]:
        return [str.__str__(event.meta.type) for event in self.events]

    def of_type(self, kind: str) -> list[Event]:
        return [event for event in self.events if event.meta.type == kind]

    def on(self, topic: str) -> list[Event]:
        return [event for event in self.events if event.meta.topic == topic]


def make_event(
    payload: Mapping[str, Any],
    *,
    event_id: str = "ev-1",
    actor: str | None = "alice",
    space_id: str = "personal:alice",
    band: SecurityBand | str | None = SecurityBand.GREEN,
    topic: str = "bus.write.ingest",
    ts: datetime = START,
    **more: Any,
) -> Event:
    meta = EventMeta(
        topic=topic, type="WRITE_REQUEST", space_id=space_id, event_id=event_id, ts=ts, actor=actor, band=band, **more
    )
    return Event(meta, payload)
