"""
Checking without storing: whether an event, its envelope or its payload would be taken.

These are the log's own checks, so a yes here is a yes there, but for what only the log knows (whether the event is a repetition).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tidings.core.events import Event, EventMeta

from .encoding import EventEncoder
from .settings import LogSettings

__all__ = ["check_envelope", "check_event", "check_payload"]


def check_event(event: Event, settings: LogSettings | None = None) -> None:
    """
    Check all of an event.

    Args:
        event: What would be published. It stays as it is.
        settings: The limits; those that a log has by default if left out.

    Raises:
        InvalidEvent: It would be refused; ``field`` names what is at fault, and ``problem`` says why.
    """
    EventEncoder(settings or LogSettings()).check(event)


def check_envelope(meta: EventMeta, settings: LogSettings | None = None) -> None:
    """
    Check an envelope, whatever its payload is.

    Raises:
        InvalidEvent: As ``check_event``.
    """
    check_event(Event(meta, {}), settings)


def check_payload(payload: Mapping[str, Any], settings: LogSettings | None = None) -> None:
    """
    Check a payload, whatever its envelope is.

    Raises:
        InvalidPayload: As ``check_event``.
    """
    check_event(Event(EventMeta("any", "ANY", "any"), payload), settings)
