"""
The events of prospective memory.

``PROS_TRIGGER_*`` each hold the whole trigger as it then is. So the topic is the triggers' history: the last event of each
trigger says what it is, and ``fold`` reads them back. ``PROSPECTIVE_TRIGGER`` is what others act on: it says that a trigger
fired and what for, and nothing of how the trigger is kept.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from datetime import datetime
from typing import Any, Final

import msgspec

from tidings.core.events import Event, EventMeta, EventType
from tidings.core.ids import content_id, derived_id

from ..errors import InvalidRequest
from ..payloads import payload_of
from .triggers import Trigger, TriggerAction, TriggerKey, check_trigger

__all__ = ["PROSPECTIVE_TOPIC", "UPSERT", "ProspectiveTrigger", "fired_event", "fold", "own_trigger", "trigger_event"]

logger = logging.getLogger(__name__)

PROSPECTIVE_TOPIC: Final = "prospective"
UPSERT: Final = "PROS_TRIGGER_UPSERT"
_TOLD: Final = frozenset(
    f"PROS_TRIGGER_{word}" for word in ("UPSERTED", "FIRED", "SKIPPED", "SNOOZED", "CANCELLED", "ERROR")
)


class ProspectiveTrigger(msgspec.Struct, frozen=True, kw_only=True):
    """The payload of ``PROSPECTIVE_TRIGGER``: a trigger fired, for the arbiter and the workspace."""

    id: str
    person_id: str
    space_id: str
    title: str
    action: TriggerAction
    slot: datetime
    """The moment it was due at; with the space and the id it names this firing."""
    args: dict[str, Any] = {}


def fired_event(trigger: Trigger, slot: datetime, now: datetime) -> Event:
    """
    ``PROSPECTIVE_TRIGGER``, under the slot's own id.

    It follows from the trigger and the slot alone: told again after a crash, it is the same event.
    """
    told = ProspectiveTrigger(
        id=trigger.id,
        person_id=trigger.person_id,
        space_id=trigger.space_id,
        title=trigger.title,
        action=trigger.action,
        slot=slot,
        args=trigger.args,
    )
    return Event(
        _meta(trigger, EventType.PROSPECTIVE_TRIGGER.value, _slot_id(trigger, slot.isoformat()), now), payload_of(told)
    )


def trigger_event(word: str, trigger: Trigger, cause: str, now: datetime, **more: Any) -> Event:
    """
    ``PROS_TRIGGER_<word>`` about a trigger.

    Args:
        word: What happened.
        trigger: As it is afterwards.
        cause: What makes this event one of its own: a slot, a command. A slot that does not fire bears the id that
            its firing would have had, so that it cannot be both; a command that has another effect when it comes again
            is told again.
        now: When.
        more: Further keys of the payload.
    """
    kind = f"PROS_TRIGGER_{word}"
    assert kind in _TOLD
    payload = {"trigger": msgspec.to_builtins(trigger), **more}
    if "slot" not in more:
        event_id = content_id("pros", payload, trigger.space_id, trigger.id, word, cause)
    elif word == "FIRED":
        event_id = derived_id("pros", trigger.space_id, trigger.id, cause, word)
    else:
        event_id = _slot_id(trigger, cause)
    return Event(_meta(trigger, kind, event_id, now), payload)


def own_trigger(event: Event) -> Trigger:
    """
    The trigger that an event holds.

    Raises:
        InvalidRequest: It holds none, or one of another space. Whoever may publish in one space has no say in another.
    """
    trigger = check_trigger(event.payload.get("trigger"))
    if trigger.space_id != event.meta.space_id:
        problem = f"is {trigger.space_id!r}, and the event comes from {event.meta.space_id!r}"
        raise InvalidRequest("trigger.space_id", problem)
    return trigger


def fold(events: Iterable[Event]) -> dict[TriggerKey, Trigger]:
    """
    The triggers as a history of events leaves them, by space and id; events of other types are passed over.

    So is an event that no runner would tell, such as one about a trigger of another space: one publisher's forgery must
    not keep everybody's triggers from being read. It is logged.
    """
    triggers: dict[TriggerKey, Trigger] = {}
    for event in events:
        if event.meta.type in _TOLD:
            try:
                trigger = own_trigger(event)
            except InvalidRequest as error:
                logger.warning("passed over %s %s: %s", event.meta.type, event.meta.event_id, error)
                continue
            triggers[trigger.key] = trigger
    return triggers


def _slot_id(trigger: Trigger, slot: str) -> str:
    return derived_id("pros", trigger.space_id, trigger.id, slot)


def _meta(trigger: Trigger, kind: str, event_id: str, now: datetime) -> EventMeta:
    return EventMeta(
        topic=PROSPECTIVE_TOPIC,
        type=kind,
        space_id=trigger.space_id,
        event_id=event_id,
        ts=now,
        actor=trigger.person_id,
    )
