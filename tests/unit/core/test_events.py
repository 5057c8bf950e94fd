"""An event is easy to make in every documented way, and asks for nothing but what must be known."""

from __future__ import annotations

import copy
import enum
import pickle
import re
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from tidings.core.events import Actor, Capability, Device, Event, EventMeta, EventType, QoS, SecurityBand


def meta(**changes: Any) -> EventMeta:
    """A whole envelope, changed as asked."""
    given: dict[str, Any] = {"topic": "actions", "type": EventType.ACTION_EXECUTED, "space_id": "shared:household"}
    return EventMeta(**given | changes)


@pytest.mark.req("F1")
def test_the_event_types_are_strings() -> None:
    """The eight members are there, each equal to its own name."""
    assert [member.name for member in EventType] == [
        "WORKSPACE_BROADCAST",
        "HIPPO_ENCODE",
        "AFFECT_ANNOTATED",
        "METACOG_REPORT",
        "CORTEX_PREDICTION",
        "ACTION_DECISION",
        "ACTION_EXECUTED",
        "PROSPECTIVE_TRIGGER",
    ]
    assert all(isinstance(member, str) and member == member.name == member.value for member in EventType)


@pytest.mark.req("F1")
def test_the_event_types_are_an_open_list() -> None:
    """A plain string or a member of one's own enum serves as a type."""

    class Mine(str, enum.Enum):  # noqa: UP042 - as the documents write it
        DOOR_OPENED = "door.opened"

    assert meta(type="door.opened").type == meta(type=Mine.DOOR_OPENED).type == "door.opened"


@pytest.mark.req("F2", "F7")
@pytest.mark.parametrize("missing", ["topic", "type", "space_id"])
def test_topic_type_and_space_are_required(missing: str) -> None:
    """Leaving one of the three out is an error at once."""
    given = {"topic": "actions", "type": "T", "space_id": "s"}
    del given[missing]

    with pytest.raises(TypeError, match=missing):
        EventMeta(**given)  # type: ignore[arg-type]


@pytest.mark.req("F2")
def test_the_documented_forms_both_work() -> None:
    """Positional in the documented order, and the older one in which an event type is the topic."""
    at = datetime(2026, 1, 1, tzinfo=UTC)

    full = EventMeta("actions", EventType.ACTION_EXECUTED, "s", "e1", at, "device:phone1", "t", "k", 60)
    older = EventMeta(
        topic=EventType.WORKSPACE_BROADCAST, space_id="s", actor={"user_id": "alice"}, device={"device_id": "d"}
    )

    assert (full.event_id, full.ts, full.actor, full.trace_id, full.idem_key, full.ttl_sec) == (
        "e1",
        at,
        "device:phone1",
        "t",
        "k",
        60,
    )
    assert older.type is EventType.WORKSPACE_BROADCAST
    assert isinstance(older.topic, EventType)
    assert older.topic.value == "WORKSPACE_BROADCAST"


@pytest.mark.req("F5")
def test_the_rest_is_optional() -> None:
    """Actor, trace, key and time to live are None unless given."""
    plain = meta()

    assert (plain.actor, plain.trace_id, plain.idem_key, plain.ttl_sec) == (None, None, None, None)


@pytest.mark.req("F3")
def test_an_id_is_made_when_it_is_first_read() -> None:
    """It has the usual shape, stays the same, and is another one for another event."""
    one, other = meta(), meta()

    assert re.fullmatch(r"ev-[0-9a-f]{32}", one.event_id)
    assert one.event_id == one.event_id != other.event_id


@pytest.mark.req("F4")
def test_the_time_is_now_and_has_a_zone() -> None:
    """An event without a time happened when it was made, in UTC."""
    before = datetime.now(UTC) - timedelta(milliseconds=1)
    made = meta()
    after = datetime.now(UTC)

    assert before <= made.ts <= after
    assert made.ts.utcoffset() == timedelta(0)
    assert made.ts is made.ts


def test_id_and_time_can_be_set() -> None:
    """What a producer sets afterwards counts."""
    changed = meta()
    changed.event_id = "e2"
    changed.ts = datetime(2020, 1, 1, tzinfo=UTC)

    assert (changed.event_id, changed.ts.year) == ("e2", 2020)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("actor", "device:phone1"),
        ("trace_id", "t"),
        ("idem_key", "k"),
        ("ttl_sec", 5),
        ("device", "d"),
        ("partitions", ("p",)),
        ("band", SecurityBand.RED),
        ("priority", 3),
        ("qos", {"priority": 3}),
        ("extra", {"x": 1}),
    ],
)
def test_optional_parts_can_be_given_or_set(name: str, value: object) -> None:
    """Each optional part reads as it was given, as it was set later, and touches no other part or event."""
    at = datetime(2026, 1, 1, tzinfo=UTC)
    given, later, without = (
        meta(event_id="e", ts=at, **{name: value}),
        meta(event_id="e", ts=at),
        meta(event_id="e", ts=at),
    )

    setattr(later, name, value)

    assert getattr(given, name) == getattr(later, name) == value
    assert given == later != without
    assert repr(given) == repr(later)
    assert getattr(without, name) in (None, ())


def test_partitions_from_an_iterator_last() -> None:
    """An iterator of partitions is read once, so that looking twice shows the same."""
    made = meta(partitions=iter(["p", "q"]))

    assert list(made.partitions) == list(made.partitions) == ["p", "q"]


@pytest.mark.req("F6")
def test_an_event_pairs_envelope_and_payload() -> None:
    """Both are kept as they were given, and compare by value."""
    payload = {"n": 1}
    at = datetime(2026, 1, 1, tzinfo=UTC)
    one = Event(meta(event_id="e", ts=at), payload)

    assert one.payload is payload
    assert one == Event(meta(event_id="e", ts=at), {"n": 1})
    assert one != Event(meta(event_id="e", ts=at), {"n": 2})
    assert one != Event(meta(event_id="f", ts=at), {"n": 1})
    other: object = "e"
    assert one != other


def test_an_event_shows_what_is_in_it() -> None:
    """Its representation names what was given and leaves out what was not."""
    shown = repr(Event(meta(event_id="e1"), {"n": 1}))

    assert "topic='actions'" in shown
    assert "event_id='e1'" in shown
    assert "trace_id" not in shown
    assert "payload={'n': 1}" in shown


def test_an_event_can_be_copied_and_sent_to_another_process() -> None:
    """Copies and pickles are equal to the original, id and time included."""
    one = Event(meta(partitions=("p",), extra={"x": [1]}), {"n": [1]})
    one.meta.event_id  # noqa: B018 - reading it fixes it

    assert copy.deepcopy(one) == one
    assert pickle.loads(pickle.dumps(one)) == one


@pytest.mark.req("F11")
def test_bands_are_ordered_and_the_stricter_wins() -> None:
    """GREEN, AMBER, RED, BLACK, from lax to strict."""
    assert list(SecurityBand) == ["GREEN", "AMBER", "RED", "BLACK"]
    assert [band.rank for band in SecurityBand] == [0, 1, 2, 3]
    for one in SecurityBand:
        for other in SecurityBand:
            assert one.stricter(other) is other.stricter(one)
            assert one.stricter(other).rank == max(one.rank, other.rank)


@pytest.mark.req("F12")
def test_capabilities_have_names() -> None:
    """The four capabilities are strings."""
    assert list(Capability) == ["WRITE", "RECALL", "PROJECT", "SCHEDULE"]


@pytest.mark.req("F10")
def test_structured_parts_go_through_json() -> None:
    """Actor, device and QoS come back from JSON as they went in, and leave out what is not set."""
    for value in (
        Actor(user_id="alice", caps=(Capability.WRITE,)),
        Device(device_id="phone1", platform="ios", locale="de-DE"),
        QoS(priority=10, deadline_ms=5),
    ):
        encoded = msgspec.json.encode(value)
        assert msgspec.json.decode(encoded, type=type(value)) == value
        assert b"null" not in encoded


@pytest.mark.req("F10")
@pytest.mark.parametrize(
    ("kind", "json"),
    [
        (QoS, b'{"priority":0}'),
        (QoS, b'{"priority":11}'),
        (QoS, b'{"latency_budget_ms":1001}'),
        (QoS, b'{"routing":"scenic"}'),
        (QoS, b'{"retries":4}'),
        (Device, b'{"device_id":"d","platform":"toaster"}'),
        (Device, b"{}"),
        (Actor, b'{"user_id":"a","caps":["FLY"]}'),
    ],
)
def test_structured_parts_have_ranges(kind: type, json: bytes) -> None:
    """Values out of their range are refused when they come from outside."""
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(json, type=kind)
