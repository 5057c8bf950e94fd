"""The sense of time: an index of when things were, summaries of it, and reminders that follow from them."""

from __future__ import annotations

from collections import Counter, deque
from typing import Any, Final

import msgspec

from tidings.bus import ReceivedEvent
from tidings.cognition.payloads import TemporalIngest
from tidings.types import EventType

from .part import Part, Work
from .wiring import SPACE

__all__ = ["Prospective", "Temporal", "recency"]

_HALF_LIFE_H: Final = 72.0
_KEPT_MAX: Final = 256
_SUMMARY_EVERY: Final = 2


def recency(age_h: float) -> float:
    """1 for now, half of it for each 72 hours gone by."""
    return float(2.0 ** (-age_h / _HALF_LIFE_H))


class Temporal(Part):
    """Indexes each moment by its own local time; says now and then what recurs, and what is near in time."""

    name = "temporal"

    def handlers(self) -> dict[str, Work]:
        return {"temporal": self._index}

    async def start(self) -> None:
        self.kept: deque[TemporalIngest] = deque(maxlen=_KEPT_MAX)
        self.hours: Counter[int] = Counter()
        await super().start()

    async def _index(self, event: ReceivedEvent) -> None:
        if event.meta.type != EventType.HIPPO_ENCODE:
            return  # its own summaries come by here too
        moment = msgspec.convert(event.payload, TemporalIngest)
        self.kept.append(moment)
        self.hours[moment.ts.hour] += 1  # the hour on the clock at home: the time carries its own offset
        if self.hours.total() % _SUMMARY_EVERY == 0:
            await self.send(
                "temporal", "TEMPORAL_PATTERNS", self._patterns(), cause=event, key=f"p:{event.meta.event_id}"
            )
            await self.send(
                "temporal", "TEMPORAL_CANDIDATES", self._candidates(), cause=event, key=f"c:{event.meta.event_id}"
            )

    def _patterns(self) -> dict[str, Any]:
        peak = min(self.hours, key=lambda hour: (-self.hours[hour], hour))
        histogram = [self.hours[hour] for hour in range(24)]
        return {"space_id": SPACE, "total": self.hours.total(), "hour_hist": histogram, "hour_peak": peak}

    def _candidates(self) -> dict[str, Any]:
        now = self.now()
        found: list[dict[str, Any]] = [
            {
                "event_id": each.event_id,
                "ts": each.ts.isoformat(),
                "tz": each.tz,
                "recency": recency((now - each.ts).total_seconds() / 3600),
                "reason": ["recent", *each.tags],
            }
            for each in self.kept
        ]
        return {"space_id": SPACE, "candidates": sorted(found, key=_by_recency, reverse=True)[:5]}


def _by_recency(candidate: dict[str, Any]) -> float:
    return float(candidate["recency"])


class Prospective(Part):
    """Turns a pattern in time into a reminder."""

    name = "prospective"

    def handlers(self) -> dict[str, Work]:
        return {"temporal": self._plan}

    async def _plan(self, event: ReceivedEvent) -> None:
        if event.meta.type != "TEMPORAL_PATTERNS":
            return
        hour = event.payload["hour_peak"]
        trigger = {
            "id": f"trigger-{event.meta.event_id}",
            "space_id": SPACE,
            "title": f"it is usually busy at {hour}:00",
            "schedule": {"daily_time": f"{hour:02d}:00"},
            "status": "ACTIVE",
        }
        await self.send("prospective", EventType.PROSPECTIVE_TRIGGER, trigger, cause=event, key=f"t:{trigger['id']}")
