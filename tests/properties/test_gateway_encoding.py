"""Envelopes have one encoding, that of RFC 8785, whatever they hold."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.gateway.engines import Engines, graph_event, request
from tidings.access.visibility import ReadScope
from tidings.gateway.constants import ENVELOPE_BYTES_MAX, SUMMARY_BYTES_MAX
from tidings.gateway.envelopes import encode
from tidings.gateway.errors import InvalidDescriptor
from tidings.wire.gateway import event_prefix, event_suffix

TEXT = st.text(max_size=256)
SUMMARIES = st.fixed_dictionaries(
    {"object_ids": st.lists(TEXT.map(lambda text: f"note:x{text[:200]}"), min_size=1, max_size=64).map(tuple)},
    optional={
        "op_kinds": st.lists(TEXT, max_size=64).map(tuple),
        "op_count": st.one_of(st.none(), st.booleans(), st.integers(-(2**53) + 1, 2**53 - 1)),
        "owner_identity_id": st.one_of(st.none(), TEXT),
    },
)


def canonical(value: object) -> str:
    """RFC 8785, written down independently: for text, integers, null, true and false, lists and objects."""
    match value:
        case None | True | False:
            return {None: "null", True: "true", False: "false"}[value]
        case int():
            return str(value)
        case str():
            return '"' + "".join(_escaped(char) for char in value) + '"'
        case list() | tuple():
            return "[" + ",".join(canonical(each) for each in value) + "]"
        case dict():
            pairs = sorted(value.items(), key=lambda pair: pair[0].encode("utf-16-be"))
            return "{" + ",".join(f"{canonical(key)}:{canonical(each)}" for key, each in pairs) + "}"
    raise TypeError(value)


def _escaped(char: str) -> str:
    short = {"\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r", '"': '\\"', "\\": "\\\\"}
    return short.get(char) or (f"\\u{ord(char):04x}" if ord(char) < 0x20 else char)


@pytest.mark.req("R103", "R104")
@given(
    summary=SUMMARIES,
    requester=TEXT.filter(bool),
    trace_id=st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=128),
)
def test_a_frame_is_canonical_json_and_stays_within_its_bound(
    summary: dict[str, Any], requester: str, trace_id: str
) -> None:
    """The same envelope is the same bytes each time, with the keys in their settled order; whatever intake takes fits into a frame."""
    engines = Engines()
    descriptor = graph_event(
        1,
        operation_context=request(requester=requester),
        scope_hint={"requester_identity_id": requester},
        domain_id="d" * 128,
        read_scope=ReadScope("d" * 128, "main"),
        payload_summary=summary,
    )
    if len(encode(summary)) > SUMMARY_BYTES_MAX:
        with pytest.raises(InvalidDescriptor, match="bytes, more than"):
            engines.tell(descriptor)
        return
    made = engines.envelope_of(descriptor)
    envelope = engines.builder.with_contract(made.retained.envelope, made.request, made.labels)
    frame = event_prefix(envelope.event_type, encode(envelope)) + event_suffix(trace_id)

    assert frame.decode() == canonical(json.loads(frame))
    assert frame == event_prefix(envelope.event_type, encode(envelope)) + event_suffix(trace_id)
    assert json.loads(frame) == {
        "event": "graph.object_mutated",
        "payload": json.loads(encode(envelope)),
        "trace_id": trace_id,
    }
    assert list(json.loads(frame)["payload"]) == sorted(envelope.__struct_fields__)
    assert len(encode(envelope)) <= ENVELOPE_BYTES_MAX
