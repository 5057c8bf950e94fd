"""Before something is changed for others: a record of who had it done, in the topic ``audit``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tidings.core.events import Event, EventMeta

from .authority import AUDIT_TOPIC
from .operations import Call

__all__ = ["audit"]


async def audit(call: Call, verb: str, details: Mapping[str, Any]) -> int:
    """Record what is about to be done, durably, before it is done; returns the record's seq."""
    meta = EventMeta(topic=AUDIT_TOPIC, type=f"api.{verb}", space_id="system", actor=call.subject)
    request_id = call.request.scope.get("state", {}).get("request_id")
    return (await call.api.services.log.append(Event(meta, {**details, "request_id": request_id}))).seq
