"""Whatever a manager hands in, intake takes it whole or refuses it by name, and what it takes can be delivered."""

from __future__ import annotations

import string
from collections.abc import Mapping
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.gateway.engines import (
    Engines,
    app_event,
    graph_event,
    network_event,
    request,
    security_event,
    system_event,
)
from tidings.access.visibility import ReadScope
from tidings.gateway.contexts import ReducedVisibility
from tidings.gateway.descriptors import EventDescriptor, ResumeHint
from tidings.gateway.envelopes import encode
from tidings.gateway.errors import DescriptorRefused
from tidings.gateway.event_types import app_declaration

TEXT = st.text(st.characters(), max_size=12)
NAMES = st.sampled_from(
    ["notes", "shop", "system", "drafts", "orders", "graph", "app.shop", "config_manager", "graph_manager", "alice", ""]
)
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 2**54),
    st.floats(),
    TEXT,
    NAMES,
    st.binary(max_size=4),
    st.lists(TEXT, max_size=2),
)
WORDS = st.text(string.ascii_lowercase + "_.", min_size=1, max_size=12)
VALUES = st.one_of(ODD, st.lists(TEXT, max_size=3).map(tuple), st.dictionaries(TEXT, TEXT, max_size=2))
SUMMARIES = st.dictionaries(
    st.one_of(st.sampled_from(["object_ids", "op_count", "order_id", "count", "node_id", "keys", "cfg_seq"]), WORDS),
    VALUES,
)
CONTEXTS = st.one_of(
    ODD,
    st.builds(request, ODD, requester=ODD, trace_id=ODD),
    st.builds(ReducedVisibility, source_manager=ODD, app_id=ODD, trace_id=ODD, domain_id=ODD),
)
CHANGES = {
    "source_manager": ODD,
    "event_class": st.one_of(ODD, WORDS),
    "event_type": st.one_of(ODD, WORDS),
    "sequence_anchor_hint": ODD,
    "operation_context": CONTEXTS,
    "app_id": ODD,
    "domain_id": ODD,
    "payload_summary": st.one_of(ODD, SUMMARIES),
    "scope_hint": st.one_of(
        ODD,
        st.dictionaries(
            st.sampled_from(["app_id", "domain_id", "requester_identity_id", "peer_identity_id", "x"]), ODD
        ),
    ),
    "audience_hint": ODD,
    "resume_hint": st.one_of(ODD, st.builds(ResumeHint, ODD, ODD)),
    "read_scope": st.one_of(ODD, st.builds(ReadScope, NAMES, TEXT)),
}
ENTRIES = st.sampled_from([graph_event, system_event, network_event, security_event, app_event])


def changed(descriptor: EventDescriptor, changes: Mapping[str, Any]) -> EventDescriptor:
    """A descriptor with some fields replaced by anything."""
    return EventDescriptor(**{name: getattr(descriptor, name) for name in descriptor.__struct_fields__} | dict(changes))


@given(
    st.lists(
        st.tuples(ENTRIES, st.fixed_dictionaries({}, optional=CHANGES), st.one_of(st.just("fits"), ODD)),
        min_size=1,
        max_size=6,
    )
)
def test_a_descriptor_is_taken_whole_or_refused_by_name(told: list[tuple[Any, dict[str, Any], Any]]) -> None:
    """No other error comes out; every refusal is on record once; what was taken is counted, normalized and can be encoded, in order."""
    engines = Engines()
    engines.declarations.declare(app_declaration("app.shop.order_paid", slug="shop", fields=("order_id",)))
    taken = refused = 0
    for number, (make, changes, proof) in enumerate(told, 1):
        whole = make(number)
        name = "app_manager" if make is app_event else whole.source_manager
        try:
            engines.channels[name].submit(changed(whole, changes), number if proof == "fits" else proof)
            taken += 1
        except DescriptorRefused:
            refused += 1
        assert len(engines.rejections) == refused
    names = {each.error.name for each in engines.rejections if str(each.error)}
    assert names <= {"invalid_descriptor", "scope_violation", "queue_full"}
    assert engines.ceiling.used == taken

    made = engines.normalize()
    assert len(made) == taken
    for each in made:
        envelope = engines.builder.with_contract(each.retained.envelope, each.request, each.labels)
        assert msgspec.json.decode(encode(envelope))["event_id"] == envelope.event_id
