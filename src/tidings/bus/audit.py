"""The topic ``audit``: before something is changed for others, a record of who had it done."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tidings.core.events import Event, EventMeta
from tidings.log.interface import Log

__all__ = ["AUDITED_COUNT_MAX", "AUDIT_TOPIC", "audit"]

AUDIT_TOPIC: Final = "audit"
AUDITED_COUNT_MAX: Final = 500
"""How many things a record names one by one; beyond that it counts them."""


async def audit(log: Log, verb: str, actor: str, details: Mapping[str, Any]) -> int:
    """
    Record what is about to be done, durably, before it is done.

    Args:
        log: Where to.
        verb: What, with the door it came through: ``cli.group.seek``.
        actor: Who has it done.
        details: What it comes to.

    Returns:
        The record's seq.
    """
    meta = EventMeta(topic=AUDIT_TOPIC, type=verb, space_id="system", actor=actor)
    return (await log.append(Event(meta, details))).seq
