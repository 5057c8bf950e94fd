"""
Working memory: a few slots whose contents fade, unless they are used.

A weight halves every 90 seconds. An update moves it towards the new salience, a rehearsal lifts it, and when all slots are
taken the weakest goes: the newcomer itself, if that is the weakest. Every change is published before it counts.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec

from tidings.core.clock import Clock, datetime_of
from tidings.core.events import Event
from tidings.core.ids import content_id

from .errors import InvalidRequest
from .ports import Publish, clip01
from .taxonomy import CognitiveEventType, CognitiveTrace, Stage, cognitive_event

CANDIDATES_MAX: Final = 64


class WorkingMemorySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much is held, and for how long."""

    slots: Annotated[int, msgspec.Meta(ge=1, le=64)] = 8
    half_life_s: Annotated[float, msgspec.Meta(gt=0)] = 90.0
    update_share: Annotated[float, msgspec.Meta(ge=0.15, le=0.3)] = 0.2
    rehearsal_gain: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.1
    weight_min: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.01
    """What has faded below this is evicted."""


class Slot(msgspec.Struct, frozen=True, kw_only=True):
    """One thing held in mind."""

    key: str
    content: Mapping[str, Any]
    weight: float
    at_s: float
    """When the weight was that; it has faded since."""


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """Something that might be brought to mind, by its features in 0..1."""

    key: str
    recency: float = 0.0
    query_match: float = 0.0
    goal: float = 0.0
    novelty: float = 0.0
    timefit: float = 0.0
    affect: float = 0.0
    cost: float = 0.0


def core_salience(candidate: Candidate) -> float:
    """The weighted sum of a candidate's features."""
    each = candidate
    return (
        0.9 * each.recency
        + 1.2 * each.query_match
        + 0.8 * each.goal
        + 0.6 * each.novelty
        + 0.5 * each.timefit
        + 0.2 * each.affect
        - 0.3 * each.cost
    )


def rank(candidates: Sequence[Candidate], temperature: float = 0.6) -> dict[str, float]:
    """
    The candidates' shares of attention, which sum to 1, best first: min-max over the batch, then softmax.

    Raises:
        InvalidRequest: More than 64 candidates, or two of one key.
    """
    if len(candidates) > CANDIDATES_MAX:
        raise InvalidRequest("candidates", f"there are {len(candidates)}; at most {CANDIDATES_MAX} are ranked at once")
    scores = {each.key: core_salience(each) for each in candidates}
    if len(scores) != len(candidates):
        raise InvalidRequest("candidates", "two of them have one key")
    if not scores:
        return {}
    low, high = min(scores.values()), max(scores.values())
    spread = high - low
    grown = {key: math.exp((value - low) / spread / temperature if spread else 0.0) for key, value in scores.items()}
    total = sum(grown.values())
    ordered = sorted(grown, key=lambda key: (-grown[key], key))
    return {key: grown[key] / total for key in ordered}


def decayed(weight: float, elapsed_s: float, half_life_s: float = 90.0) -> float:
    """What is left of a weight."""
    return weight * math.exp2(-max(0.0, elapsed_s) / half_life_s)


class WorkingMemory:
    """
    The slots of one space.

    Args:
        space_id: Whose mind it is.
        publish: Where changes are published.
        clock: Where the time comes from.
        settings: Slots, half-life and shares.
        session_id: Names this life of the memory: ids of its events follow from it, so that two lives never share one.
    """

    def __init__(
        self,
        space_id: str,
        publish: Publish,
        clock: Clock,
        settings: WorkingMemorySettings | None = None,
        *,
        session_id: str,
    ) -> None:
        self._space_id = space_id
        self._publish = publish
        self._clock = clock
        self._settings = settings if settings is not None else WorkingMemorySettings()
        self._session_id = session_id
        self._slots: dict[str, Slot] = {}
        self._changes = 0
        # Telling takes a moment; a second change meanwhile would be decided on slots that are about to change.
        self._lock = asyncio.Lock()

    def slots(self) -> list[Slot]:
        """What is held now, strongest first, with the weights of this moment."""
        now_s = self._clock.monotonic()
        current = [
            msgspec.structs.replace(slot, weight=self._weight(slot, now_s), at_s=now_s) for slot in self._slots.values()
        ]
        return sorted(current, key=lambda slot: (-slot.weight, slot.key))

    @property
    def pressure(self) -> float:
        """How full it is, in 0..1."""
        return len(self._slots) / self._settings.slots

    async def update(self, key: str, content: Mapping[str, Any], salience: float) -> bool:
        """Bring something to mind, or on; whether it is held afterwards."""
        if not math.isfinite(salience):
            raise InvalidRequest("salience", "must be a finite number")
        async with self._lock:
            now_s = self._clock.monotonic()
            held = self._slots.get(key)
            wanted = clip01(salience)
            share = self._settings.update_share
            weight = wanted if held is None else (1 - share) * self._weight(held, now_s) + share * wanted
            slot = Slot(key=key, content=content, weight=weight, at_s=now_s)
            victim = None if held is not None else self._victim(slot, now_s)
            if victim is not None:
                if victim.key == key:
                    return False
                await self._evict(victim, "displaced", now_s)
            await self._tell(CognitiveEventType.WORKING_MEMORY_UPDATED, slot, weight, "updated" if held else "entered")
            self._slots[key] = slot
            return True

    async def rehearse(self, key: str) -> bool:
        """Go over something again, so that it stays; ``False`` if it is not held."""
        async with self._lock:
            held = self._slots.get(key)
            if held is None:
                return False
            now_s = self._clock.monotonic()
            weight = clip01(self._weight(held, now_s) + self._settings.rehearsal_gain)
            await self._tell(CognitiveEventType.WORKING_MEMORY_UPDATED, held, weight, "rehearsed")
            self._slots[key] = msgspec.structs.replace(held, weight=weight, at_s=now_s)
            return True

    async def forget_faded(self) -> list[str]:
        """Evict what has faded away; returns the keys."""
        async with self._lock:
            now_s = self._clock.monotonic()
            faded = [slot for slot in self._slots.values() if self._weight(slot, now_s) < self._settings.weight_min]
            for slot in faded:
                await self._evict(slot, "faded", now_s)
            return [slot.key for slot in faded]

    def _weight(self, slot: Slot, now_s: float) -> float:
        return decayed(slot.weight, now_s - slot.at_s, self._settings.half_life_s)

    def _victim(self, newcomer: Slot, now_s: float) -> Slot | None:
        if len(self._slots) < self._settings.slots:
            return None
        # At equal weight the one held longest goes, and what is held goes before the newcomer: news matters.
        weakest = min(self._slots.values(), key=lambda slot: (self._weight(slot, now_s), slot.at_s, slot.key))
        return newcomer if newcomer.weight < self._weight(weakest, now_s) else weakest

    async def _evict(self, slot: Slot, reason: str, now_s: float) -> None:
        await self._tell(CognitiveEventType.WORKING_MEMORY_EVICTED, slot, self._weight(slot, now_s), reason)
        del self._slots[slot.key]

    async def _tell(self, kind: CognitiveEventType, slot: Slot, weight: float, reason: str) -> None:
        await self._publish(self._event(kind, slot, weight, reason))
        # Counted once it is published: a publish that failed and is tried again bears the same id.
        self._changes += 1

    def _event(self, kind: CognitiveEventType, slot: Slot, weight: float, reason: str) -> Event:
        now = datetime_of(self._clock.now_ns())
        trace = CognitiveTrace(
            trace_id=self._session_id,
            session_id=self._session_id,
            space_id=self._space_id,
            started_at=now,
            stage_started_at=now,
            stage=Stage.COMPLETION,
            working_memory_pressure=self.pressure,
        )
        payload: dict[str, Any] = {
            "key": slot.key,
            "weight": weight,
            "reason": reason,
            "slots_max": self._settings.slots,
        }
        if kind is CognitiveEventType.WORKING_MEMORY_UPDATED:
            payload["content"] = dict(slot.content)
        # The content is part of the id: were the first try of a change stored after all and the second one, a moment
        # later, has another weight, they are two events and not a conflict.
        event_id = content_id("wm", payload, self._session_id, str(self._changes), kind.value)
        return cognitive_event(kind, trace, payload, event_id=event_id, ts=now)
