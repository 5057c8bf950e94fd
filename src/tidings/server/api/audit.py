"""Before something is changed for others through the API: a record of who had it done, and by which request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tidings.bus.audit import audit as record

from .operations import Call

__all__ = ["audit"]


async def audit(call: Call, verb: str, details: Mapping[str, Any]) -> int:
    """Record what is about to be done, durably, before it is done; returns the record's seq."""
    request_id = call.request.scope.get("state", {}).get("request_id")
    return await record(call.api.services.log, f"api.{verb}", call.subject, {**details, "request_id": request_id})
