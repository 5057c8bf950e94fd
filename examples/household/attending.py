"""The global workspace: what is salient, told to everybody."""

from __future__ import annotations

from collections.abc import Iterable

from tidings.bus import ReceivedEvent
from tidings.cognition.payloads import WorkspaceBroadcast, payload_of
from tidings.types import Event, EventType

from .part import Part, Work
from .wiring import SPACE

__all__ = ["Workspace"]


class Workspace(Part):
    """Broadcasts what is salient, reminders among it."""

    name = "workspace"

    def handlers(self) -> dict[str, Work]:
        return {"prospective": self._take_up}

    async def broadcast(self, keys: Iterable[str], state_id: str, cause: Event | None = None) -> None:
        """Tell everybody; once for each state."""
        said = WorkspaceBroadcast(state_id=state_id, salient_keys=tuple(keys), space_id=SPACE, generated_at=self.now())
        await self.send("workspace", EventType.WORKSPACE_BROADCAST, payload_of(said), cause=cause, key=f"ws:{state_id}")

    async def _take_up(self, event: ReceivedEvent) -> None:
        await self.broadcast([event.payload["title"]], event.payload["id"], cause=event)
