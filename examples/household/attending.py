"""Attention: the gate lets in what deserves it, and the global workspace tells everybody what is salient."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Final

import msgspec

from tidings.bus import EventBus, ReceivedEvent
from tidings.cognition import AttentionGate, WorkingMemory
from tidings.cognition.attention import GateAction
from tidings.cognition.payloads import WorkspaceBroadcast, payload_of
from tidings.cognition.prospective import ProspectiveTrigger
from tidings.core.clock import Clock
from tidings.types import Event, EventType

from .part import Flow, Part, Work
from .wiring import SPACE

__all__ = ["Attention", "Workspace"]

_REMINDER_SALIENCE: Final = 1.0


class Attention(Part):
    """Stands before the bus. What the gate lets in goes to the topic that it names; what it puts off is heard again."""

    name = "attention"

    def __init__(self, bus: EventBus, flow: Flow, clock: Clock) -> None:
        super().__init__(bus, flow, clock)
        self.gate = AttentionGate(clock, publish=self.publish)

    async def notice(self, event: Event) -> float | None:
        """How salient an event is, if it was let in; it is on the bus then."""
        response = await self.gate.handle(event)
        if response.gate_decision.action.rank < GateAction.ADMIT.rank:
            return None
        event.meta.topic = response.routing.topic
        await self.publish(event)
        return response.gate_decision.priority

    async def hear_again(self) -> None:
        """Give what was put off, and whose time has come, another hearing."""
        for event in self.gate.take_due():
            await self.notice(event)


class Workspace(Part):
    """Holds a few things in mind, and broadcasts what enters, reminders among it."""

    name = "workspace"

    def __init__(self, bus: EventBus, flow: Flow, clock: Clock) -> None:
        super().__init__(bus, flow, clock)
        self.memory = WorkingMemory(SPACE, self.publish, clock, session_id=f"household-{clock.now_ns()}")

    def handlers(self) -> dict[str, Work]:
        return {"prospective": self._take_up}

    async def take_in(
        self, keys: Iterable[str], state_id: str, salience: float, at: datetime, cause: Event | None = None
    ) -> None:
        """Bring something to mind, and tell everybody what of it is held; once for each state."""
        await self.memory.forget_faded()
        held = [key for key in keys if await self.memory.update(key, {"state_id": state_id}, salience)]
        if held:
            said = WorkspaceBroadcast(state_id=state_id, salient_keys=tuple(held), space_id=SPACE, generated_at=at)
            key = f"ws:{state_id}"
            await self.send("workspace", EventType.WORKSPACE_BROADCAST, payload_of(said), cause=cause, key=key)

    async def _take_up(self, event: ReceivedEvent) -> None:
        if event.meta.type != EventType.PROSPECTIVE_TRIGGER:
            return  # how triggers are made and kept is nobody's reminder
        reminder = msgspec.convert(event.payload, ProspectiveTrigger)
        state_id = f"reminder-{event.meta.event_id}"
        await self.take_in([reminder.title], state_id, _REMINDER_SALIENCE, event.meta.ts, cause=event)
