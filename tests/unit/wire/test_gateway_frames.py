"""Frames of the gateway: what is understood, what is refused, and what both ends agree on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidings.wire.gateway import (
    FRAME_BYTES_MAX,
    AckEvent,
    CloseReason,
    ErrorDetail,
    EventFrameInvalid,
    Reconnect,
    ResumeEvents,
    SubscribedEvents,
    SubscribeEvents,
    decode_from_client,
    decode_from_node,
    encode,
    error_frame,
    error_of,
    event_prefix,
    event_suffix,
    subscribed_frame,
)

REFERENCE = Path(__file__).parents[3] / "docs/reference/gateway.md"
TRACE_IDS = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=128)


@pytest.mark.parametrize(
    "frame",
    [
        SubscribeEvents(app_id="shop", subscription_type="graph", event_type="graph.object_mutated"),
        SubscribeEvents(app_id="shop", channels=("graph.*", "app.shop.*"), domain_id="orders", object_ids=("order:1",)),
        SubscribeEvents(app_id="shop", subscription_type="network", peer_identity_id="peer"),
        AckEvent("token"),
        ResumeEvents(""),
    ],
)
def test_a_frame_is_read_as_it_was_written(frame: SubscribeEvents | AckEvent | ResumeEvents) -> None:
    """Each frame of a client comes back the same."""
    assert decode_from_client(encode(frame)) == frame


@pytest.mark.req("R232")
@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"ack"',
        b"{}",
        b'{"type":"publish","event":{}}',
        b'{"type":"ack"}',
        b'{"type":"ack","resume_token":7}',
        b'{"type":"ack","resume_token":"a","seq":1}',
        b'{"type":"ack","resume_token":"a","resume_token":"b"}',
        b'{"type":"subscribe","subscription_type":"graph"}',
        b'{"type":"subscribe","app_id":["a","b"],"subscription_type":"graph"}',
        b'{"type":"subscribe","app_id":"a","channels":"graph.*"}',
        b'{"type":"subscribe","app_id":"a","subscription_type":"graph","is_admin":true}',
        b'{"type":"ack","resume_token":"\xff"}',
        b'{"type":"ack","resume_token":"' + b"a" * FRAME_BYTES_MAX + b'"}',
        b'{"type":"ack","resume_token":' + b"[" * 10_000,
    ],
)
def test_what_is_no_frame_is_refused(message: bytes) -> None:
    """A message that is malformed, unknown, too long, or has a field too many, too few or twice, is no frame."""
    with pytest.raises(EventFrameInvalid):
        decode_from_client(message)


@pytest.mark.req("R103", "R104")
@given(TRACE_IDS)
def test_a_frame_is_sorted_compact_json(trace_id: str) -> None:
    """The shared prefix and a connection's suffix make one object with sorted keys and no white space, whatever the trace id."""
    envelope = {"event_id": "ab", "event_type": "graph.object_mutated", "scope": {"app_id": "é"}}
    plain = json.dumps(envelope, separators=(",", ":"), sort_keys=True, ensure_ascii=False).encode()

    frame = event_prefix("graph.object_mutated", plain) + event_suffix(trace_id)

    whole = {"event": "graph.object_mutated", "payload": envelope, "trace_id": trace_id}
    assert frame == json.dumps(whole, separators=(",", ":"), sort_keys=True, ensure_ascii=False).encode()
    assert decode_from_node(frame).trace_id == trace_id


def test_an_answer_says_where_the_connection_stands() -> None:
    """``subscribed`` has its payload's fields in their order."""
    answer = SubscribedEvents(
        connection_id="c", heartbeat_interval_ms=15_000, per_connection=256, replayed=0, resumed=False, since=7
    )

    frame = decode_from_node(subscribed_frame(answer, "t"))

    assert (frame.event, frame.trace_id) == ("subscribed", "t")
    assert list(json.loads(bytes(frame.payload))) == sorted(SubscribedEvents.__struct_fields__)


@pytest.mark.req("R89")
@pytest.mark.parametrize("reason", CloseReason)
def test_an_error_has_all_four_fields(reason: CloseReason) -> None:
    """Whatever a connection is closed for, the frame before it has code, category, message and data."""
    frame = decode_from_node(error_frame(reason, "why", "t", data={"since": 4}))

    detail = error_of(frame)
    categories = {
        "network_rejected": "network",
        "auth_invalid": "auth",
        "acl_denied": "acl",
        "internal_error": "internal",
    }
    assert detail == ErrorDetail(
        code=reason.error, category=categories[reason.error], message="why", data={"reason": reason.reason, "since": 4}
    )
    assert CloseReason.of_code(reason.code) is reason


def test_a_cut_has_no_reason() -> None:
    """A code that is none of the gateway's is none of its reasons."""
    assert [CloseReason.of_code(code) for code in (1000, 1006, 4999)] == [None, None, None]


def test_the_page_has_every_close_reason() -> None:
    """Name, code, error and what to do stand in the reference, in the code's order."""
    table = REFERENCE.read_text(encoding="utf-8").split("## Closing\n")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("| `")]

    found = [(row[0], int(row[1]), row[2].split(",")[0], row[3]) for row in rows]
    assert found == [(f"`{each.reason}`", each.code, f"`{each.error}`", each.reconnect.value) for each in CloseReason]
    assert {f"*{each.value}*" for each in Reconnect} <= set(table.replace(":", " ").split())
