"""
The events of prospective memory, each with the whole trigger as it then is.

So the topic is the triggers' history: the last event of each trigger says what it is, and ``fold`` reads them back.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any, Final

import msgspec

from tidings.core.events import Event, EventMeta

from ..ports import content_id, derived_id
from .triggers import Trigger, check_trigger

__all__ = ["PROSPECTIVE_TOPIC", "UPSERT", "fold", "trigger_event"]

PROSPECTIVE_TOPIC: Final = "prospective"
UPSERT: Final = "PROS_TRIGGER_UPSERT"
_TOLD: Final = frozenset(
    f"PROS_TRIGGER_{word}" for word in ("UPSERTED", "FIRED", "SKIPPED", "SNOOZED", "CANCELLED", "ERROR")
)


def trigger_event(word: str, trigger: Trigger, cause: str, now: datetime, **more: Any) -> Event:
    """
    ``PROS_TRIGGER_<word>`` about a trigger.

    Args:
        word: What happened.
        trigger: As it is afterwards.
        cause: What makes this event one of its own: a slot, a command. A slot is fired or skipped under one id, whatever
            is said about it; a command that has another effect when it comes again is told again.
        now: When.
        more: Further keys of the payload.
    """
    kind = f"PROS_TRIGGER_{word}"
    assert kind in _TOLD
    payload = {"trigger": msgspec.to_builtins(trigger), **more}
    if "slot" in more:
        event_id = derived_id("pros", trigger.id, cause)
    else:
        event_id = content_id("pros", payload, trigger.id, word, cause)
    meta = EventMeta(
        topic=PROSPECTIVE_TOPIC,
        type=kind,
        space_id=trigger.space_id,
        event_id=event_id,
        ts=now,
        actor=trigger.person_id,
    )
    return Event(meta, payload)


def fold(events: Iterable[Event]) -> dict[str, Trigger]:
    """The triggers as a history of events leaves them; events of other types are passed over."""
    triggers: dict[str, Trigger] = {}
    for event in events:
        if event.meta.type in _TOLD:
            trigger = check_trigger(event.payload["trigger"])
            triggers[trigger.id] = trigger
    return triggers
