"""The sense of time: an index of when things were, summaries of it, and reminders that follow from them."""

from __future__ import annotations

from collections import Counter, OrderedDict
from datetime import datetime, timedelta
from typing import Any, Final

import msgspec

from tidings.bus import EventBus, ReceivedEvent
from tidings.cognition import TriggerRunner
from tidings.cognition.payloads import TemporalIngest
from tidings.cognition.ports import zone_of
from tidings.cognition.prospective import DailyTime, Once, Trigger, fold
from tidings.core.clock import Clock
from tidings.types import EventType

from .part import Flow, Part, Work
from .wiring import PERSON, SPACE, ZONE

__all__ = ["Prospective", "Temporal", "recency"]

_HALF_LIFE_H: Final = 72.0
_KEPT_MAX: Final = 256
_SUMMARY_EVERY: Final = 2
_REMIND_AFTER: Final = timedelta(seconds=1)


def recency(age_h: float) -> float:
    """1 for now, half of it for each 72 hours gone by."""
    return float(2.0 ** (-age_h / _HALF_LIFE_H))


class Temporal(Part):
    """Indexes each moment by its own local time; says now and then what recurs, and what is near in time."""

    name = "temporal"

    def handlers(self) -> dict[str, Work]:
        return {"temporal": self._index}

    async def start(self) -> None:
        # By the moment's own id: one that is delivered again is still one.
        self._kept: OrderedDict[str, TemporalIngest] = OrderedDict()
        self._seen = 0
        await super().start()

    @property
    def kept(self) -> list[TemporalIngest]:
        """The moments in the index, in the order they came."""
        return list(self._kept.values())

    @property
    def hours(self) -> Counter[int]:
        """How many moments there were at each hour on the clock at home."""
        return Counter(each.ts.astimezone(zone_of(each.tz)).hour for each in self._kept.values())

    async def _index(self, event: ReceivedEvent) -> None:
        if event.meta.type != EventType.HIPPO_ENCODE:
            return  # its own summaries come by here too
        moment = msgspec.convert(event.payload, TemporalIngest)
        self._seen += moment.event_id not in self._kept
        self._kept[moment.event_id] = moment
        if len(self._kept) > _KEPT_MAX:
            self._kept.popitem(last=False)
        if self._seen % _SUMMARY_EVERY == 0:
            patterns, candidates = self._patterns(), self._candidates(event.meta.ts)
            cause_id = event.meta.event_id
            await self.send("temporal", "TEMPORAL_PATTERNS", patterns, cause=event, key=f"p:{cause_id}")
            await self.send("temporal", "TEMPORAL_CANDIDATES", candidates, cause=event, key=f"c:{cause_id}")

    def _patterns(self) -> dict[str, Any]:
        hours = self.hours
        peak = min(hours, key=lambda hour: (-hours[hour], hour))
        histogram = [hours[hour] for hour in range(24)]
        return {"space_id": SPACE, "total": hours.total(), "hour_hist": histogram, "hour_peak": peak}

    def _candidates(self, at: datetime) -> dict[str, Any]:
        found: list[dict[str, Any]] = [
            {
                "event_id": each.event_id,
                "ts": each.ts.isoformat(),
                "tz": each.tz,
                "recency": recency((at - each.ts).total_seconds() / 3600),
                "reason": ["recent", *each.tags],
            }
            for each in self._kept.values()
        ]
        return {"space_id": SPACE, "candidates": sorted(found, key=_by_recency, reverse=True)[:5]}


def _by_recency(candidate: dict[str, Any]) -> float:
    return float(candidate["recency"])


class Prospective(Part):
    """Turns a pattern in time into triggers: one for the hour it names, every day, and one to say so in a moment."""

    name = "prospective"

    def __init__(self, bus: EventBus, flow: Flow, clock: Clock) -> None:
        super().__init__(bus, flow, clock)
        self.runner = TriggerRunner(self.publish, clock)

    @property
    def is_waiting(self) -> bool:
        """Whether a reminder is about to come."""
        return any(isinstance(each.schedule, Once) for each in self.runner.triggers())

    def handlers(self) -> dict[str, Work]:
        return {"temporal": self._plan}

    async def start(self) -> None:
        self.runner.restore(fold([event async for event in self._bus.replay("prospective")]))
        await super().start()
        self.keep_running(self.runner.run())

    async def _plan(self, event: ReceivedEvent) -> None:
        if event.meta.type != "TEMPORAL_PATTERNS":
            return
        hour, cause = event.payload["hour_peak"], event.meta.event_id
        daily = Trigger(
            id=f"busy-at-{hour}",
            person_id=PERSON,
            space_id=SPACE,
            title=f"it is usually busy at {hour}:00",
            schedule=DailyTime(time=f"{hour:02d}:00"),
            tz=ZONE,
        )
        # The moment follows from the cause: a pattern that is delivered again after a crash is no second reminder.
        soon = Once(fire_at=event.meta.ts + _REMIND_AFTER)
        await self.runner.upsert(daily, cause=cause)
        await self.runner.upsert(msgspec.structs.replace(daily, id=f"soon-{cause}", schedule=soon), cause=cause)
