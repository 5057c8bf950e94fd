"""The steward's wire: frames however they are cut, requests that say nothing unknown, answers with their exact keys."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidings.wire.steward import answers, frames, requests


def refusal(request: dict[str, Any] | bytes) -> str:
    message = request if isinstance(request, bytes) else json.dumps(request).encode()
    with pytest.raises(requests.RequestInvalid) as refused:
        requests.decode_request(message)
    return refused.value.problem


# Frames


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=5), st.data())
def test_frames_are_the_same_however_the_bytes_are_cut(messages: list[bytes], data: st.DataObject) -> None:
    """Whatever the pieces that arrive, the frames are those that were sent."""
    sent = b"".join(map(frames.framed, messages))
    reader, got = frames.FrameReader(), []
    while sent:
        count = data.draw(st.integers(1, len(sent)))
        got += list(reader.feed(sent[:count]))
        sent = sent[count:]
    reader.finish()
    assert got == messages
    assert reader.held_bytes == 0


@pytest.mark.parametrize("length", [0, frames.FRAME_BYTES_MAX + 1, 0xFFFFFFFF])
def test_a_length_of_nothing_or_too_much_is_a_fault_after_the_frames_before_it(length: int) -> None:
    """Length 0 and lengths over 64 MiB are refused by the header alone; what came before was given."""
    messages = frames.FrameReader().feed(frames.framed(b"{}") + length.to_bytes(4, "big"))
    assert next(messages) == b"{}"
    with pytest.raises(frames.FramingFault):
        next(messages)


def test_a_frame_of_exactly_64_mib_is_taken() -> None:
    """The bound is inclusive."""
    message = bytes(frames.FRAME_BYTES_MAX)
    assert list(frames.FrameReader().feed(frames.framed(message))) == [message]


@pytest.mark.parametrize("cut", [1, 2, 3, 4, 5])
def test_a_frame_that_is_cut_off_is_a_fault_and_an_end_between_frames_is_none(cut: int) -> None:
    """An end within a header or a body is a fault."""
    reader = frames.FrameReader()
    assert list(reader.feed(frames.framed(b"{}") + frames.framed(b"{}")[:cut])) == [b"{}"]
    with pytest.raises(frames.FramingFault):
        reader.finish()


# Requests


def test_every_operation_refuses_a_field_that_it_does_not_have_and_names_it() -> None:
    """A field too many is named, whatever the operation."""
    for op in requests.REQUESTS:
        assert "typo" in refusal({"op": op, "typo": 1}), op


@pytest.mark.parametrize(
    "request_",
    [
        {"op": "no_such"},
        {},
        [],
        b"not json",
        b"",
        b"\xff",
        b'{"op":"negotiate","op":"list_plugins"}',
        {"op": "subscribe_happenings", "since": -1},
        {"op": "subscribe_happenings", "since": "1"},
        {"op": "project_subject"},
        {"op": "list_subjects", "page_size": -1},
        b'{"op":"negotiate","capabilities":' + b"[" * 100_000,
    ],
)
def test_what_is_no_request_is_refused(request_: Any) -> None:
    """Bad JSON, no or an unknown operation, a key twice and bad shapes are all one kind of refusal."""
    assert refusal(request_ if isinstance(request_, bytes) else json.dumps(request_).encode())


def test_a_request_is_read_with_its_defaults() -> None:
    """What is left out has the value that the operation says."""
    found = requests.decode_request(b'{"op":"project_subject","canonical_id":"a"}')
    assert found == requests.ProjectSubjectRequest(canonical_id="a", follow_aliases=True)
    assert requests.decode_request(
        b'{"op":"subscribe_subject","canonical_id":"a"}'
    ) == requests.SubscribeSubjectRequest(canonical_id="a", follow_aliases=False)
    handle = requests.decode_request(b'{"op":"release_custody","shelf":"a.b","handle":{"id":"h","started_at":5}}')
    assert handle == requests.ReleaseCustodyRequest(shelf="a.b", handle=requests.CustodyHandleArgument("h", 5))


@pytest.mark.parametrize("op", list(requests.REQUESTS))
def test_a_request_that_is_sent_is_the_one_that_is_read(op: str) -> None:
    """Both ends use the same forms."""
    kind = requests.REQUESTS[op]
    if any(field.required for field in msgspec.structs.fields(kind)):
        return
    assert requests.decode_request(frames.encode(kind())) == kind()


# Answers


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (answers.Granted(granted=["a"]), '{"ok":true,"granted":["a"]}'),
        (answers.SubscribedAnswer(current_seq=42), '{"subscribed":true,"current_seq":42}'),
        (answers.HappeningFrame(seq=43, happening={"type": "x"}), '{"seq":43,"happening":{"type":"x"}}'),
        (
            answers.HappeningFrame(seq=43, happening={"type": "x"}, resume_seq=40),
            '{"seq":43,"happening":{"type":"x"},"resume_seq":40}',
        ),
        (
            answers.LaggedFrame(answers.LagNotice(missed_count=17, oldest_available_seq=3, current_seq=901)),
            '{"lagged":{"missed_count":17,"oldest_available_seq":3,"current_seq":901}}',
        ),
        (
            answers.SubscribedSubject(canonical_id="a", current_seq=1),
            '{"subscribed_subject":true,"canonical_id":"a","current_seq":1}',
        ),
        (
            answers.ProjectionFrame(seq=0, canonical_id="a", projection=None),
            '{"seq":0,"canonical_id":"a","projection":null}',
        ),
        (
            answers.ProjectionFrame(seq=7, canonical_id="a", projection=None, new_ids=["b", "c"]),
            '{"seq":7,"canonical_id":"a","projection":null,"new_ids":["b","c"]}',
        ),
        (answers.error_frame("internal", "m"), '{"error":{"class":"internal","message":"m"}}'),
        (
            answers.error_frame("not_found", "m", "unknown_rack", rack="r"),
            '{"error":{"class":"not_found","message":"m","details":{"subclass":"unknown_rack","rack":"r"}}}',
        ),
    ],
)
@pytest.mark.req("H69")
@pytest.mark.req("H70")
def test_answers_have_their_exact_keys_in_their_order(answer: msgspec.Struct, text: str) -> None:
    """A happening is one frame of seq and happening; an error is an object that names its class, without details if it has none."""
    assert frames.encode(answer).decode() == text
