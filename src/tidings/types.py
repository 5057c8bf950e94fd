"""The types of the bus's document, under the names it imports them by."""

from tidings.bus.events import Ack, Nack, ReceivedEvent
from tidings.core.actors import Actor, Capability, Device, QoS, SecurityBand
from tidings.core.events import Event, EventMeta, EventType
from tidings.log.checking import check_envelope, check_event, check_payload

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
]
