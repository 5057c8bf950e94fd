"""Checks that can be called on their own say what the log would say."""

from __future__ import annotations

from typing import Any

import pytest

from tidings.core.errors import InvalidEvent, InvalidPayload
from tidings.log import LogSettings
from tidings.types import Event, EventMeta, check_envelope, check_event, check_payload


def meta(**changes: Any) -> EventMeta:
    return EventMeta(**{"topic": "demo", "type": "NOTED", "space_id": "s"} | changes)


@pytest.mark.req("F13")
def test_what_would_be_taken_passes_and_stays_as_it_is() -> None:
    """Checking gives no id and changes nothing."""
    event = Event(meta(), {"n": 1})
    check_event(event)
    check_envelope(event.meta)
    check_payload(event.payload)
    assert event.meta._event_id is None


@pytest.mark.req("F13")
@pytest.mark.parametrize(
    ("changes", "field"),
    [({"topic": "a/b"}, "meta.topic"), ({"ttl_sec": -1}, "meta.ttl_sec"), ({"space_id": ""}, "meta.space_id")],
)
def test_an_envelope_is_refused_by_the_field_at_fault(changes: dict[str, Any], field: str) -> None:
    """By itself, and with its event."""
    with pytest.raises(InvalidEvent) as alone:
        check_envelope(meta(**changes))
    with pytest.raises(InvalidEvent) as whole:
        check_event(Event(meta(**changes), {}))
    assert alone.value.field == whole.value.field == field


@pytest.mark.req("F13")
@pytest.mark.parametrize("payload", [{"n": float("nan")}, ["no object"], {"when": object()}])
def test_a_payload_is_refused_whatever_its_envelope(payload: Any) -> None:
    """By itself, and with its event."""
    with pytest.raises(InvalidPayload):
        check_payload(payload)
    with pytest.raises(InvalidPayload):
        check_event(Event(meta(), payload))


@pytest.mark.req("F13")
def test_limits_are_those_of_the_settings_given() -> None:
    """A log with narrower limits refuses more."""
    check_payload({"text": "x" * 100})
    with pytest.raises(InvalidPayload, match="at most 50"):
        check_payload({"text": "x" * 100}, LogSettings(payload_bytes_max=50))
