"""An event as JSON text and back."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidings.core.errors import InvalidEvent
from tidings.types import (
    Actor,
    Capability,
    Device,
    Event,
    EventMeta,
    EventType,
    QoS,
    SecurityBand,
    event_from_json,
    event_to_json,
)

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS
)
JSON = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3))
MAPPINGS = st.dictionaries(TEXTS, JSON, max_size=3)
CAPS = st.lists(st.sampled_from(Capability), max_size=3).map(tuple)
ACTORS = st.builds(Actor, user_id=TEXTS, caps=CAPS, agent_id=st.none() | TEXTS)
DEVICES = st.builds(Device, device_id=TEXTS, platform=st.sampled_from([None, "ios", "edge"]))
WISHES = st.builds(QoS, priority=st.integers(1, 10), deadline_ms=st.none() | st.integers(1, 10**6))
ZONES = st.integers(-14, 14).map(lambda hours: timezone(timedelta(hours=hours)))


@pytest.mark.req("F14")
@given(
    parts=st.fixed_dictionaries(
        {
            "topic": TEXTS,
            "type": st.sampled_from(EventType) | TEXTS,
            "space_id": TEXTS,
            "ts": st.datetimes(datetime(1971, 1, 1), datetime(2200, 1, 1), timezones=ZONES),  # noqa: DTZ001 - zones come
        },
        optional={
            "event_id": TEXTS,
            "actor": ACTORS | TEXTS | MAPPINGS | st.fixed_dictionaries({"user_id": TEXTS}),
            "trace_id": TEXTS,
            "idem_key": TEXTS,
            "ttl_sec": st.integers(0, 2**63 - 1),
            "device": DEVICES | TEXTS | MAPPINGS,
            "partitions": st.lists(TEXTS, max_size=4),
            "band": st.sampled_from(SecurityBand),
            "priority": st.integers(-10, 10) | TEXTS,
            "qos": WISHES | MAPPINGS,
            "extra": MAPPINGS,
        },
    ),
    payload=MAPPINGS,
)
def test_any_event_comes_back_the_same(parts: dict[str, Any], payload: dict[str, Any]) -> None:
    """Whatever was given for its parts, the event read back equals it, has the same types, and writes the same text."""
    event = Event(EventMeta(**parts), payload)

    back = event_from_json(event_to_json(event))

    assert back == event
    assert event_to_json(back) == event_to_json(event)
    for name in ("type", "actor", "device", "qos"):
        before, after = getattr(event.meta, name), getattr(back.meta, name)
        if not (isinstance(before, dict) or type(before) is str):
            assert type(after) is type(before), name


def test_a_part_is_read_by_name_or_by_key_however_it_was_given() -> None:
    """An actor given as a mapping has attributes, one given as a type has keys; what fits no type stays a mapping."""
    told: dict[str, Any] = {"user_id": "ann", "caps": ["WRITE"]}
    metas = [
        event_from_json(event_to_json(Event(EventMeta("a", "X", "s", actor=actor), {}))).meta
        for actor in (told, Actor(user_id="ann", caps=(Capability.WRITE,)), {**told, "team": "blue"})
    ]

    for meta in metas[:2]:
        assert isinstance(meta.actor, Actor)
        assert (meta.actor.user_id, meta.actor["user_id"], meta.actor.get("agent_id")) == ("ann", "ann", None)
        assert meta.actor == told
        assert dict(meta.actor) == told
    assert metas[2].actor == {**told, "team": "blue"}
    assert type(metas[2].actor) is dict


def test_types_have_a_name_and_are_text() -> None:
    """A type of the list comes back as its member, another one as text with the same attributes."""
    known, own = (
        event_from_json(
            event_to_json(Event(EventMeta("a", kind, "s", ts=datetime(2026, 1, 1, tzinfo=UTC)), {}))
        ).meta.type
        for kind in ("ACTION_EXECUTED", "parcel.arrived")
    )

    assert known is EventType.ACTION_EXECUTED
    assert (own, own.name, own.value) == ("parcel.arrived",) * 3


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b'{"meta":{"type":"X"},"payload":{}}', b"\xff"])
def test_what_is_no_event_is_refused(text: bytes) -> None:
    """Text that stands for no event is refused as one."""
    with pytest.raises(InvalidEvent):
        event_from_json(text)
