"""The types of the bus's document, under the names it imports them by."""

from tidings.bus.events import Ack, Nack, ReceivedEvent
from tidings.core.events import Actor, Capability, Device, Event, EventMeta, EventType, QoS, SecurityBand
from tidings.core.ids import new_event_id
from tidings.log.encoding import check_envelope, check_event, check_payload
from tidings.wire.events import event_from_json
from tidings.wire.events import event_to_wire as event_to_json

__all__ = [
    "Ack",
    "Actor",
    "Capability",
    "Device",
    "Event",
    "EventMeta",
    "EventType",
    "Nack",
    "QoS",
    "ReceivedEvent",
    "SecurityBand",
    "check_envelope",
    "check_event",
    "check_payload",
    "event_from_json",
    "event_to_json",
    "new_event_id",
]
