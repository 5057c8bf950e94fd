"""
Learning: decisions and what came of them, as labelled examples.

Two kinds of outcome are signals here: what the actuators report on the topic, and what the bus itself records about every
attempt (``MetricsMiddleware`` calls ``Outcomes.note``). The first labels an example; the second says how far the hand that
carried it out can be relied on, and trouble makes the learner attentive.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec

from tidings.bus import ReceivedEvent
from tidings.cognition.neuromodulation import adjusted_eta
from tidings.cognition.payloads import AffectAnnotated
from tidings.types import EventType

from .part import Part, Work

__all__ = ["Learning", "Outcomes", "Signal"]

_ETA: Final = 0.01
_OPEN_MAX: Final = 1000


class Outcomes:
    """What the bus recorded about attempts, by topic and group."""

    def __init__(self) -> None:
        self.ok: Counter[tuple[str, str]] = Counter()
        self.err: Counter[tuple[str, str]] = Counter()

    def note(self, name: str, labels: Mapping[str, str], value: float) -> None:
        """The sink of the bus's metrics."""
        counts = {"events_handle_ok_total": self.ok, "events_handle_err_total": self.err}.get(name)
        if counts is not None:
            counts[labels["topic"], labels["group"]] += int(value)

    def failure_share(self, topic: str, group: str) -> float:
        """How many of the attempts failed, from 0 to 1; 0 if there were none."""
        ok, err = self.ok[topic, group], self.err[topic, group]
        return err / (ok + err) if ok + err else 0.0


class Signal(NamedTuple):
    """One example: what was decided, how it turned out, and how much to learn from it."""

    plan_id: str
    action: str
    label: float
    eta: float
    failure_share: float


class Learning(Part):
    """Joins decisions to outcomes."""

    name = "learning"

    def watch(self, outcomes: Outcomes) -> None:
        """Take the bus's own record of attempts as a signal too."""
        self._outcomes = outcomes

    def handlers(self) -> dict[str, Work]:
        return {"workspace": self._attend, "affect": self._feel, "actions": self._learn}

    async def start(self) -> None:
        self.signals: list[Signal] = []
        self.attended = 0
        self._mood: AffectAnnotated | None = None
        self._open: dict[str, Mapping[str, Any]] = {}
        await super().start()

    async def _attend(self, event: ReceivedEvent) -> None:
        self.attended += len(event.payload["salient_keys"])

    async def _feel(self, event: ReceivedEvent) -> None:
        self._mood = msgspec.convert(event.payload, AffectAnnotated)

    async def _learn(self, event: ReceivedEvent) -> None:
        plan_id = event.payload["plan_id"]
        if event.meta.type == EventType.ACTION_DECISION:
            self._open[plan_id] = event.payload
            if len(self._open) > _OPEN_MAX:  # the oldest decision never had an outcome
                self._open.pop(next(iter(self._open)))
            return
        decision = self._open.pop(plan_id, None)
        if decision is None:
            return
        mood, trouble = self._mood, self._outcomes.failure_share("actions", "actuators")
        eta = adjusted_eta(
            _ETA,
            arousal=mood.arousal if mood is not None else 0.5,
            valence=mood.valence if mood is not None else 0.0,
            surprise=trouble,
        )
        label = {"OK": 1.0, "PARTIAL": 0.5}.get(event.payload["status"], 0.0)
        self.signals.append(Signal(plan_id, decision["selected_action"]["name"], label, eta, trouble))
