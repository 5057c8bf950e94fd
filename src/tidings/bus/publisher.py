"""
A publisher: what a program holds that wants answers instead of exceptions.

It tries again what can be tried again (a full window, a full disk, a fenced log that was reopened), within a time, and tells
for each event what became of it. The event keeps its id from one try to the next, so none is stored twice.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import datetime
from typing import Annotated

import msgspec

from tidings.core.clock import SYSTEM_CLOCK, Clock, datetime_of
from tidings.core.errors import TidingsError
from tidings.core.events import Event
from tidings.log.interface import Appended, Duplicate, Query, Refused, Verdict
from tidings.log.reading import records

from .errors import BusClosed, InvalidBatch
from .eventbus import EventBus

logger = logging.getLogger(__name__)


class PublisherSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a publisher tries."""

    batch_count_max: Annotated[int, msgspec.Meta(ge=1)] = 100
    retries_max: Annotated[int, msgspec.Meta(ge=0)] = 3
    retry_delay_s: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    retry_mult: Annotated[float, msgspec.Meta(ge=1)] = 2.0
    timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 5.0
    """The whole time of one publish: full windows, a full disk, every try and the pauses between them."""


class PublishResult(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one event."""

    success: bool
    event_id: str
    published_at: datetime | None = None
    """When it was known to be durable."""
    is_duplicate: bool = False
    seq: int | None = None
    error: TidingsError | None = None
    retry_count: int = 0


class Publisher:
    """Publishes to a bus, and never raises for an event's own fault."""

    def __init__(
        self, bus: EventBus, settings: PublisherSettings | None = None, *, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._bus = bus
        self._settings = settings or PublisherSettings()
        self._clock = clock
        self._is_closed = False

    async def publish(self, event: Event) -> PublishResult:
        """Publish one event, trying again where that can help."""
        (result,) = await self._publish([event])
        return result

    async def publish_batch(self, events: Sequence[Event]) -> list[PublishResult]:
        """
        Publish events together, in their order; one result each.

        They are stored as a list, in as few writes as the groups' windows allow. What can be tried again is, without the events
        that are stored or refused for good.

        Raises:
            InvalidBatch: It is empty, or larger than the settings allow. Nothing was published.
        """
        count_max = self._settings.batch_count_max
        if not 1 <= len(events) <= count_max:
            raise InvalidBatch(len(events), count_max)
        return await self._publish(events)

    async def _publish(self, events: Sequence[Event]) -> list[PublishResult]:
        settings = self._settings
        delay_s = settings.retry_delay_s
        retry_count = 0
        started = self._clock.monotonic()
        found: dict[int, PublishResult] = {}

        def left_s() -> float:
            return max(0.0, settings.timeout_s - (self._clock.monotonic() - started))

        while True:
            pending = [at for at in range(len(events)) if at not in found]
            verdicts = await self._tried([events[at] for at in pending], left_s())
            may_retry = retry_count < settings.retries_max and left_s() > 0
            for at, verdict in zip(pending, verdicts, strict=True):
                if isinstance(verdict, Refused) and verdict.error.retryable and may_retry:
                    continue
                found[at] = self._result(events[at], verdict, retry_count)
            if len(found) == len(events):
                return [found[at] for at in range(len(events))]
            retry_count += 1
            await self._clock.sleep(min(delay_s, left_s()))
            delay_s *= settings.retry_mult

    async def _tried(self, events: list[Event], timeout_s: float) -> Sequence[Verdict]:
        if self._is_closed:
            return [Refused(BusClosed())] * len(events)
        try:
            return await self._bus.publish_many(events, timeout_s=timeout_s)
        except TidingsError as error:
            stored = await self._stored(events)
            return [stored.get(event.meta.event_id, Refused(error)) for event in events]

    async def _stored(self, events: list[Event]) -> dict[str, Verdict]:
        """Which of the events of a list that was not finished are stored, by id: the list goes in order, so the first ones may be."""
        wanted = {event.meta.event_id: event.meta for event in events}
        found: dict[str, Verdict] = {}
        try:
            async for record in records(self._bus.log, Query(event_ids=tuple(wanted))):
                meta, own = record.meta, wanted[record.meta.event_id]
                if (meta.topic, meta.space_id, meta.type) == (own.topic, own.space_id, own.type):
                    found[meta.event_id] = Appended(record.seq, record.offset, meta.event_id)
        except TidingsError as error:
            logger.warning("which events of a list were stored is not known: %s", error)
        return found

    def _result(self, event: Event, verdict: Verdict, retry_count: int) -> PublishResult:
        if isinstance(verdict, Refused):
            return PublishResult(
                success=False, event_id=event.meta.event_id, error=verdict.error, retry_count=retry_count
            )
        return PublishResult(
            success=True,
            event_id=verdict.event_id,
            published_at=datetime_of(self._clock.now_ns()),
            is_duplicate=isinstance(verdict, Duplicate),
            seq=verdict.seq,
            retry_count=retry_count,
        )

    def health_check(self) -> bool:
        """Whether an event published now would be taken."""
        return not self._is_closed and self._bus.health().is_writable

    async def close(self) -> None:
        """Take no more events; the bus stays open."""
        self._is_closed = True
