"""The motor loop: the arbiter decides behind a risk gate, the actuators carry out and report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from tidings.bus import ReceivedEvent
from tidings.cognition.payloads import AffectAnnotated
from tidings.cognition.policy import Circumstances, effective_band
from tidings.cognition.prospective import ProspectiveTrigger
from tidings.cognition.routing import Consumer, Router
from tidings.cognition.taxonomy import RoutingStrategy
from tidings.types import EventType, SecurityBand

from .part import Part, Work
from .wiring import SPACE

__all__ = ["Actuators", "Arbiter", "choose"]

_PRIORITY: Final = 5


def choose(candidate: Mapping[str, Any], mood: AffectAnnotated | None) -> tuple[str, str]:
    """
    The action to take, and why: the candidate's own; or to ask first, if it is risky while everybody is upset.

    Plain values in, plain values out: the gate is tested without a bus.
    """
    name = candidate["action"]["name"]
    felt = Circumstances() if mood is None else Circumstances(arousal=mood.arousal, valence=mood.valence)
    _, reasons = effective_band(SecurityBand.GREEN, felt)
    if "distress" in reasons and candidate["risk_level"] != "LOW":
        return "ask_first", f"{name} is {candidate['risk_level']} risk and the mood is bad"
    return name, "nothing speaks against it"


class Arbiter(Part):
    """Weighs what is salient, felt, foreseen and planned, and decides."""

    name = "arbiter"
    mood: AffectAnnotated | None = None
    salient: tuple[str, ...] = ()

    def handlers(self) -> dict[str, Work]:
        return {"workspace": self._attend, "affect": self._feel, "cortex": self._decide, "prospective": self._remind}

    async def _attend(self, event: ReceivedEvent) -> None:
        self.salient = tuple(event.payload["salient_keys"])

    async def _feel(self, event: ReceivedEvent) -> None:
        # A payload that is not what was agreed on raises, is tried again, and ends as a dead letter: never as a guess.
        self.mood = msgspec.convert(event.payload, AffectAnnotated)

    async def _decide(self, event: ReceivedEvent) -> None:
        name, why = choose(event.payload, self.mood)
        await self._announce(event, name, event.payload["action"]["args"], event.payload["risk_level"], why)

    async def _remind(self, event: ReceivedEvent) -> None:
        if event.meta.type != EventType.PROSPECTIVE_TRIGGER:
            return  # how triggers are made and kept decides nothing
        reminder = msgspec.convert(event.payload, ProspectiveTrigger)
        args = {"title": reminder.title, **reminder.args}
        await self._announce(event, reminder.action, args, "LOW", "a trigger fired")

    async def _announce(self, cause: ReceivedEvent, name: str, args: Mapping[str, Any], risk: str, why: str) -> None:
        plan_id = f"plan-{cause.meta.event_id}"
        decision = {
            "plan_id": plan_id,
            "selected_action": {"name": name, "args": dict(args)},
            "confidence": cause.payload.get("confidence", 1.0),
            "space_id": SPACE,
            "decided_at": cause.meta.ts,
            "risk_level": risk,
            "why": why,
        }
        payload = msgspec.to_builtins(decision)
        await self.send("actions", EventType.ACTION_DECISION, payload, cause=cause, key=f"decide:{plan_id}")


class Actuators(Part):
    """
    Carry decisions out, each by the hand that suits it best and is well.

    A telephone line that is busy shows what a retry is for: by then the router passes it over.
    """

    name = "actuators"

    def handlers(self) -> dict[str, Work]:
        return {"actions": self._act}

    async def start(self) -> None:
        self._router = Router(RoutingStrategy.PRIORITY)
        telephone = Consumer(consumer_id="telephone", specialised_in=frozenset({"call_plumber"}))
        self._hands = {each.consumer_id: each for each in (Consumer(consumer_id="hub"), telephone)}
        await super().start()

    async def _act(self, event: ReceivedEvent) -> None:
        if event.meta.type != EventType.ACTION_DECISION:
            return
        action = event.payload["selected_action"]["name"]
        plan_id = event.payload["plan_id"]
        outcome = {
            "plan_id": plan_id,
            "action_name": action,
            "status": "PARTIAL" if action == "ask_first" else "OK",
            "executed_at": event.meta.ts,
            "by": self._carry_out(action),
        }
        payload = msgspec.to_builtins(outcome)
        await self.send("actions", EventType.ACTION_EXECUTED, payload, cause=event, key=f"done:{plan_id}")

    def _carry_out(self, action: str) -> str:
        """The hand that did it."""
        now_s = self._clock.monotonic()
        hands = [msgspec.structs.replace(each, heartbeat_s=now_s) for each in self._hands.values()]
        (hand,) = self._router.route(hands, event_type=action, priority=_PRIORITY, session_id=None, now_s=now_s)
        if hand == "telephone":
            self._hands[hand] = msgspec.structs.replace(self._hands[hand], success_rate=0.0, consecutive_failures=1)
            raise ConnectionError("the line is busy")
        return hand
