"""The frames of both ends: what one encodes the other decodes, and what is no frame is told by type."""

from __future__ import annotations

import contextlib

import msgspec
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidings.core.validation import parse_strict
from tidings.sync.canonical import is_same_json, to_canonical
from tidings.sync.dialects import choose_dialect
from tidings.wire import sync_frames as frames
from tidings.wire.sync_frames import MalformedFrame, SyncFrameError, UnknownMessageType, UnsupportedVersion

EVENT = msgspec.Raw(b'{"type":"event","payload":{"schema":"note","data":1.50}}')
ITEM = frames.SubmitItem(id="a", partitions=["P1"], event=EVENT)
COMMITTED = {
    "id": "a",
    "client_id": "C1",
    "partitions": ["P1"],
    "committed_id": 1,
    "event": EVENT,
    "status_updated_at": 2,
}
FROM_CLIENT: list[frames.ClientPayload] = [
    frames.Connect(token="t", client_id="C1", supported_profiles=["canonical"], required_profile="canonical"),
    frames.SubmitEvents(events=[ITEM]),
    frames.Sync(partitions=["P1"], since_committed_id=3, subscription_partitions=[], limit=5),
    frames.Heartbeat(),
    frames.Disconnect(reason="done"),
]
FROM_SERVER: list[frames.ServerPayload] = [
    frames.Connected(
        client_id="C1",
        server_time=1,
        server_last_committed_id=2,
        capabilities=frames.Capabilities(profile="compatibility", accepted_event_types=["set"], tree_policy="strict"),
        limits=frames.Limits(max_batch_size=5),
    ),
    frames.SubmitResult(
        results=[
            frames.ItemResult(id="a", status="committed", committed_id=1, status_updated_at=2),
            frames.ItemResult(
                id="b",
                status="rejected",
                reason="validation_failed",
                errors=[frames.ItemError(field="event", message="no")],
                status_updated_at=2,
            ),
        ]
    ),
    msgspec.convert(COMMITTED, frames.EventBroadcast),
    frames.SyncResponse(
        partitions=["P1"],
        effective_subscriptions=[],
        events=[msgspec.convert(COMMITTED, frames.CommittedEvent)],
        next_since_committed_id=1,
        sync_to_committed_id=1,
        has_more=False,
        model_version=1,
    ),
    frames.HeartbeatAck(),
    frames.ErrorFrame(code="forbidden", message="no", details={"partitions": ["P1"]}),
    frames.VersionChanged(old_model_version=1, new_model_version=2),
]


def as_json(payload: msgspec.Struct) -> object:
    return msgspec.json.decode(msgspec.json.encode(payload))


@pytest.mark.parametrize("payload", FROM_CLIENT, ids=lambda payload: payload.TYPE)
def test_the_server_reads_what_the_client_writes(payload: frames.ClientPayload) -> None:
    """Every message of the client comes out as it went in."""
    envelope, decoded = frames.decode_from_client(frames.encode(payload, msg_id="m", timestamp=7))

    assert (envelope.type, envelope.msg_id, envelope.timestamp) == (payload.TYPE, "m", 7)
    assert type(decoded) is type(payload)
    assert as_json(decoded) == as_json(payload)


@pytest.mark.parametrize("payload", FROM_SERVER, ids=lambda payload: payload.TYPE)
def test_the_client_reads_what_the_server_writes(payload: frames.ServerPayload) -> None:
    """Every message of the server comes out as it went in."""
    _, decoded = frames.decode_from_server(frames.encode(payload, msg_id="m", timestamp=7))

    assert type(decoded) is type(payload)
    assert as_json(decoded) == as_json(payload)


def test_an_events_json_stays_as_it_is() -> None:
    """Also the spelling of its numbers."""
    message = frames.encode(frames.SubmitEvents(events=[ITEM]), msg_id="m", timestamp=1)

    _, decoded = frames.decode_from_client(message)

    assert isinstance(decoded, frames.SubmitEvents)
    assert bytes(decoded.events[0].event) == bytes(EVENT)


def test_each_end_takes_only_the_others_messages() -> None:
    """A server's message sent to a server is unknown, and the other way round."""
    with pytest.raises(UnknownMessageType):
        frames.decode_from_client(frames.encode(frames.HeartbeatAck(), msg_id="m", timestamp=1))
    with pytest.raises(UnknownMessageType):
        frames.decode_from_server(frames.encode(frames.Heartbeat(), msg_id="m", timestamp=1))


def test_a_foreign_version_is_told_before_anything_else() -> None:
    """Its type and payload may be anything."""
    message = {"type": "dance", "msg_id": "m", "timestamp": 1, "payload": 5, "protocol_version": "2.0"}

    with pytest.raises(UnsupportedVersion) as caught:
        frames.decode_from_client(orjson.dumps(message))

    assert caught.value.requested == "2.0"


def test_a_malformed_field_is_named() -> None:
    """The path leads from the payload to it."""
    message = {"type": "sync", "msg_id": "m", "timestamp": 1, "protocol_version": "1.0"}
    payload = {"partitions": ["P1", 5], "since_committed_id": 0}

    with pytest.raises(MalformedFrame) as caught:
        frames.decode_from_client(orjson.dumps(message | {"payload": payload}))

    assert caught.value.field == "payload.partitions[1]"
    assert caught.value.type == "sync"


@given(st.binary(max_size=200))
def test_any_bytes_are_a_frame_or_a_typed_error(message: bytes) -> None:
    """Nothing else comes out of the decoders."""
    for decode in (frames.decode_from_client, frames.decode_from_server):
        with contextlib.suppress(SyncFrameError):
            decode(message)
    assert choose_dialect(message).name in "abc"


@pytest.mark.parametrize(
    ("message", "name"),
    [
        ({"protocol_version": "1.0"}, "a"),
        ({"protocolVersion": "1.0", "type": "connect", "payload": {"projectId": "p"}}, "b"),
        ({"protocolVersion": "1.0", "type": "connect", "payload": {}}, "c"),
        ({"protocolVersion": "1.0", "type": "sync", "payload": {}}, "b"),
        ({"protocolVersion": "1.0", "protocol_version": "1.0"}, "a"),
        ({}, "a"),
        ([], "a"),
        ({"protocolVersion": "1.0", "type": "connect", "payload": 5}, "a"),
    ],
)
def test_the_dialect_is_told_by_the_spelling(message: object, name: str) -> None:
    """Not by the version, which is the same in all."""
    assert choose_dialect(orjson.dumps(message)).name == name


numbers = st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=4)
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)


@given(values, values)
def test_the_quick_comparison_is_the_canonical_one(one: object, other: object) -> None:
    """Equality by canonical JSON, whichever way it was found."""
    for left, right in ((one, other), (one, parse_strict(orjson.dumps(one))), (one, parse_strict(to_canonical(one)))):
        assert is_same_json(left, right) == (to_canonical(left) == to_canonical(right))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (b"[1e0,1.0,-0,-0.0,1e21,1e-7,333333333.33333329]", b"[1,1,0,0,1e+21,1e-7,333333333.3333333]"),
        (b"[9007199254740993]", b"[9007199254740992]"),
        ('{"\u20ac":1,"\\r":2,"\ufb33":3,"1":4,"\U0001f600":5,"\\u0080":6,"\u00f6":7}'.encode(), None),
    ],
)
def test_canonical_json_is_that_of_the_standard(value: bytes, text: bytes | None) -> None:
    """Numbers as ECMAScript prints them; keys by UTF-16 code units, which is the order of the standard's own example."""
    canonical = to_canonical(parse_strict(value))

    if text is None:
        assert list(orjson.loads(canonical).values()) == [2, 4, 6, 7, 1, 5, 3]
    else:
        assert canonical == text
