"""Normalization makes one envelope of each descriptor, in order, and nothing of it is seen before the resume index has it."""

from __future__ import annotations

import hashlib
import hmac
import json
from base64 import urlsafe_b64decode
from typing import Any

import msgspec
import pytest

from tests.unit.gateway.engines import (
    Engines,
    app_event,
    graph_event,
    network_event,
    own_event,
    request,
    security_event,
    system_event,
)
from tidings.access.book import AccessBook
from tidings.access.visibility import Audience, CapsuleIssuer, ReadCapsule, ReadScope
from tidings.gateway.descriptors import EventDescriptor, ResumeHint
from tidings.gateway.envelopes import EventEnvelope, encode
from tidings.gateway.errors import DescriptorRefused, QueueFull
from tidings.gateway.event_types import app_declaration
from tidings.gateway.names import EventClass
from tidings.gateway.normalization import Normalized
from tidings.gateway.queues import ClassQueues
from tidings.wire.gateway import event_prefix, event_suffix

NINE = [
    "audience_contract",
    "emitted_at",
    "event_id",
    "event_type",
    "payload_summary",
    "resume_token",
    "scope",
    "sequence_anchor",
    "source_manager",
]


def bound(engines: Engines, descriptor: EventDescriptor) -> EventEnvelope:
    """The envelope of a descriptor as it is delivered, with its contract."""
    made = engines.envelope_of(descriptor)
    return engines.builder.with_contract(made.retained.envelope, made.request, made.labels)


def sent(envelope: EventEnvelope) -> bytes:
    """An envelope's frame up to the trace id."""
    return event_prefix(envelope.event_type, encode(envelope))


def as_sent(envelope: EventEnvelope) -> dict[str, Any]:
    """What a client reads."""
    frame = json.loads(sent(envelope) + event_suffix("trace-9"))
    assert list(frame) == ["event", "payload", "trace_id"]
    payload: dict[str, Any] = frame["payload"]
    return payload


@pytest.mark.req("R43", "R45", "R62")
def test_an_envelope_has_nine_fields() -> None:
    """Name and author of the event are the descriptor's; id, place, scope, token, contract and time are added; nothing else is there."""
    envelope = bound(Engines(), graph_event(118))
    sent = as_sent(envelope)

    assert list(sent) == NINE == list(EventEnvelope.__struct_fields__)
    assert (sent["event_type"], sent["source_manager"]) == ("graph.object_mutated", "graph_manager")
    assert sent["sequence_anchor"] == {"global_seq": 118}
    assert sent["scope"] == {"app_id": "notes", "domain_id": "drafts"}
    assert sent["payload_summary"] == {"object_ids": ["note:1"], "op_count": 1}
    assert len(sent["event_id"]) == 32
    assert len(sent["resume_token"]) == 88
    assert len(sent["audience_contract"]) == 64


@pytest.mark.req("R42")
def test_an_envelope_cannot_be_changed() -> None:
    """Neither a field of it nor its summary, its scope or its place; a contract makes a new one, in which nothing else differs."""
    engines = Engines()
    made = engines.envelope_of(graph_event(1))
    before = made.retained.envelope
    after = engines.builder.with_contract(before, made.request, made.labels)
    changed: Any = after

    with pytest.raises(AttributeError):
        changed.event_type = "graph.other"
    with pytest.raises(TypeError):
        changed.payload_summary["op_count"] = 2
    for part in (changed.scope, changed.sequence_anchor):
        with pytest.raises(AttributeError):
            setattr(part, part.__struct_fields__[0], "x")
    assert before.audience_contract == ""
    assert msgspec.structs.replace(after, audience_contract="") == before


@pytest.mark.req("R44", "R160")
def test_an_envelope_has_an_id_of_128_random_bits() -> None:
    """All bits come from the source of randomness, which gives each envelope its own."""
    engines = Engines()
    for seq in range(50):
        engines.tell(graph_event(seq))

    assert [each.retained.envelope.event_id for each in engines.normalize()] == [f"{n:032x}" for n in range(1, 51)]


@pytest.mark.req("R51", "R160")
async def test_the_time_of_an_envelope_never_falls_and_decides_on_nothing() -> None:
    """The wall clock may be set back without effect; order and audience are the same whatever the time."""
    engines = Engines()
    made = []
    for seq in range(4):
        engines.tell(graph_event(2 * seq))
        engines.tell(graph_event(2 * seq + 1))
        made += engines.normalize()
        await engines.clock.advance(0.25)
        engines.clock.jump(-3_600)

    times = [each.retained.envelope.emitted_at for each in made]
    assert times == [0, 0, 250_000, 250_000, 500_000, 500_000, 750_000, 750_000]
    assert [each.retained.anchor for each in made] == list(range(8))
    assert len({engines.builder.contract_for(each.request, each.labels) for each in made}) == 1
    assert all(each.request == made[0].request for each in made)


@pytest.mark.req("R6", "R24", "R46", "R161", "R9")
def test_a_graph_event_has_the_seq_that_it_was_committed_with_whatever_else_is_told() -> None:
    """Its anchor is ``global_seq``, gaps and all; other events between change nothing of it, nor it of their counts."""
    engines = Engines()
    for seq, count in ((7, 10), (8, 20), (90, 30)):
        engines.tell(graph_event(seq))
        engines.tell(system_event(count))
    anchors = [encode(each.retained.envelope.sequence_anchor) for each in engines.normalize()]

    assert anchors == [
        b'{"global_seq":7}',
        b'{"global_seq":8}',
        b'{"global_seq":90}',
        b'{"event_seq":1}',
        b'{"event_seq":2}',
        b'{"event_seq":3}',
    ]


@pytest.mark.req("R8")
def test_each_source_has_a_count_of_its_own_that_rises_by_one() -> None:
    """Sources do not share a count, whatever hints they give; one source's classes do."""
    engines = Engines()
    peer: dict[str, Any] = {"scope_hint": {"peer_identity_id": "bob"}, "summary": {"reason": "flood", "ttl_ms": 1}}
    for descriptor in (
        system_event(100),
        security_event(5),
        network_event(7),
        system_event(200),
        own_event("network.peer_denied", 900, source="dos_guard_manager", **peer),
        security_event(901),
    ):
        engines.tell(descriptor)
    made = sorted((each.retained for each in engines.normalize()), key=lambda each: each.envelope.event_id)

    assert [(each.envelope.source_manager, encode(each.envelope.sequence_anchor)) for each in made] == [
        ("config_manager", b'{"event_seq":1}'),
        ("dos_guard_manager", b'{"event_seq":1}'),
        ("network_manager", b'{"event_seq":1}'),
        ("config_manager", b'{"event_seq":2}'),
        ("dos_guard_manager", b'{"event_seq":2}'),
        ("dos_guard_manager", b'{"event_seq":3}'),
    ]


@pytest.mark.req("R22")
def test_the_class_decides_on_queue_and_anchor() -> None:
    """Each class has its queue; only that of the graph is anchored to the log."""
    engines = Engines()
    engines.declarations.declare(app_declaration("app.shop.order_paid", slug="shop", fields=("order_id",)))
    for descriptor in (graph_event(3), system_event(1), network_event(1), security_event(1), app_event(1)):
        engines.tell(descriptor)
        engines.normalizer.run(1)
    assert engines.normalized.depths() == dict.fromkeys(EventClass, 1)
    for event_class in EventClass:
        found = engines.normalized.shed_oldest(event_class, lambda each: True)
        assert found is not None
        assert found.retained.event_class is event_class
        key = b"global_seq" if event_class is EventClass.GRAPH else b"event_seq"
        assert key in encode(found.retained.envelope.sequence_anchor)


@pytest.mark.req("R47")
def test_a_scope_has_only_what_its_class_is_anchored_to() -> None:
    """Of the four keys; those without a value are left out."""
    engines = Engines()
    engines.declarations.declare(app_declaration("app.shop.order_paid", slug="shop", fields=("order_id",)))
    scopes = [
        as_sent(bound(engines, each))["scope"]
        for each in (
            graph_event(1, scope_hint={"requester_identity_id": "alice"}),
            system_event(1),
            system_event(2, app_id="shop", operation_context=request("shop"), scope_hint={"app_id": "shop"}),
            network_event(1),
            security_event(1),
            app_event(1),
        )
    ]

    assert scopes == [
        {"app_id": "notes", "domain_id": "drafts", "requester_identity_id": "alice"},
        {},
        {"app_id": "shop"},
        {"peer_identity_id": "bob"},
        {"requester_identity_id": "mallory"},
        {"app_id": "shop", "domain_id": "orders"},
    ]


@pytest.mark.req("R48")
def test_every_envelope_has_a_contract_that_differs_with_whatever_decides_on_its_audience() -> None:
    """Class, app, domain, origin, objects and labels make it, in whatever order the objects are told; nobody without the key can make it."""
    engines = Engines()
    engines.declarations.declare(app_declaration("app.shop.order_paid", slug="shop", fields=("order_id",)))
    two = {"object_ids": ("note:1", "note:2")}
    contracts = [
        bound(engines, each).audience_contract
        for each in (
            graph_event(1),
            graph_event(2, operation_context=request(requester="bob")),
            graph_event(3, operation_context=request(requester=None)),
            graph_event(4, domain_id="inbox", read_scope=ReadScope("inbox", "main")),
            graph_event(5, payload_summary=two),
            graph_event(6, app_id="shop", operation_context=request("shop")),
            system_event(1),
            network_event(1),
            security_event(1),
            app_event(1),
        )
    ]
    assert len(set(contracts)) == len(contracts) == 10
    assert all(len(each) == 64 for each in contracts)

    swapped = {"object_ids": ("note:2", "note:1")}
    assert bound(engines, graph_event(7, payload_summary=swapped)).audience_contract == contracts[4]
    inputs = json.dumps(["graph", "notes", "drafts", "alice", ["note:1"], ["readers"]], separators=(",", ":"))
    assert contracts[0] == hmac.digest(bytes(range(32, 64)), inputs.encode(), "sha256").hex()
    made = engines.envelope_of(graph_event(8))
    assert engines.builder.contract_for(made.request, ("other",)) != contracts[0]


@pytest.mark.req("R50")
def test_a_resume_token_stands_for_id_anchor_and_time_of_issue() -> None:
    """Who holds the key reads it back; the text has a version, a class and those three, and is the same for every subscriber."""
    engines = Engines()
    made = engines.envelope_of(graph_event(118)).retained
    token = made.envelope.resume_token
    body = urlsafe_b64decode(token)

    point = engines.tokens.read(token)
    assert point == (EventClass.GRAPH, made.envelope.event_id, 118, engines.clock.now_ns() // 1_000_000)
    assert body[34:] == hmac.new(bytes(range(32)), body[:34], hashlib.sha256).digest()
    assert (body[0], body[2:18].hex(), int.from_bytes(body[18:26])) == (1, made.envelope.event_id, 118)


@pytest.mark.req("R29")
def test_an_audience_hint_is_without_effect() -> None:
    """An event that claims an audience is asked for, contracted and scoped as one that claims none."""
    plain, claiming = Engines(), Engines()
    one = plain.envelope_of(graph_event(1))
    other = claiming.envelope_of(graph_event(1, audience_hint={"allow": ["*"], "audience": "app"}))

    assert one.request == other.request
    assert one.labels == other.labels
    assert one.retained.envelope == other.retained.envelope
    assert one.request.audience is Audience.READERS


@pytest.mark.req("R30")
def test_a_resume_hint_is_seen_nowhere() -> None:
    """The frame is, but for id and token, the one without it."""
    plain, hinting = Engines(), Engines()

    assert sent(bound(plain, graph_event(5))) == sent(bound(hinting, graph_event(5, resume_hint=ResumeHint(5, 7_777))))


@pytest.mark.req("R70", "R164")
def test_the_resume_index_has_an_envelope_before_anybody_behind_sees_it() -> None:
    """When it is put into its class's queue it is there by its id; the entry leads to its place in the order of delivery and its anchor."""
    engines = Engines()
    seen: list[bool] = []

    class Watched(ClassQueues[Normalized]):
        def put(self, event_class: EventClass, item: Normalized) -> None:
            seen.append(engines.index._by_id.get(item.retained.envelope.event_id) is item.retained)
            super().put(event_class, item)

    engines.normalizer._out = engines.normalized = Watched(100)
    for seq in (5, 6):
        engines.tell(graph_event(seq))
    engines.tell(system_event(1))
    made = engines.normalize()
    assert seen == [True, True, True]

    assert (
        engines.index.find(made[1].retained.envelope.event_id, 6) is None
    )  # it waits, so there is nothing behind it yet
    for each in made:
        engines.index.number(each.retained)
    found = engines.index.find(made[1].retained.envelope.event_id, 6)
    assert found is made[1].retained
    assert (found.ordinal, found.anchor) == (2, 6)
    assert engines.index.find(made[1].retained.envelope.event_id, 7) is None


@pytest.mark.req("R168", "R163")
def test_order_within_a_class_is_that_of_intake() -> None:
    """However many are normalized at a time: graph events by seq and place within it, others as their sources told them."""
    engines = Engines()
    for seq in range(40):
        engines.tell(
            graph_event(
                seq // 2, resume_hint=ResumeHint(seq // 2, seq % 2), payload_summary={"object_ids": (f"note:{seq}",)}
            )
        )
        engines.tell(network_event(seq) if seq % 3 else system_event(seq))
    while engines.normalizer.run(7):
        pass
    by_class: dict[EventClass, list[Normalized]] = {each: [] for each in EventClass}
    for each in iter(engines.normalized.take, None):
        by_class[each.retained.event_class].append(each)

    assert [each.retained.envelope.payload_summary["object_ids"] for each in by_class[EventClass.GRAPH]] == [
        (f"note:{n}",) for n in range(40)
    ]
    for event_class in (EventClass.NETWORK, EventClass.SYSTEM):
        places = [(each.retained.anchor, each.local_order) for each in by_class[event_class]]
        assert places == sorted(places)
        assert len(places) > 10


@pytest.mark.req("R163")
@pytest.mark.parametrize("total", [64, 300])
def test_the_ceiling_bounds_every_class_queue(total: int) -> None:
    """Nothing behind intake ever holds more than the ceiling lets in."""
    engines = Engines(total=total)
    refused = 0
    for seq in range(2 * total):
        try:
            engines.tell(graph_event(seq))
        except QueueFull:
            refused += 1
        engines.normalizer.run(1)

    assert len(engines.normalized) == (total - 16) * 31 // 32
    assert refused == 2 * total - len(engines.normalized)


@pytest.mark.req("R169", "R28")
def test_a_summary_comes_out_as_it_went_in() -> None:
    """To the byte, whatever text it holds, and the same every time."""
    summary = {
        "object_ids": ('note:ü"\\', "note:\u2028é\U0001f600"),
        "op_kinds": ("a\tb", ""),
        "owner_identity_id": None,
        "op_count": -(2**53 - 1),
    }
    first = bound(Engines(), graph_event(1, payload_summary=summary))
    second = bound(Engines(), graph_event(1, payload_summary=dict(reversed(summary.items()))))

    expected = json.dumps(summary, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    assert encode(first.payload_summary) == expected
    assert expected in sent(first)
    assert sent(first) == sent(second)


def test_a_request_says_whose_event_it_is_and_what_reading_takes() -> None:
    """The access layer is asked with origin, app, domain, class, objects and the record's own scope; for the node's events with nobody."""
    engines = Engines()
    graph, system = engines.envelope_of(graph_event(1)).request, engines.envelope_of(system_event(1)).request

    assert (graph.origin_identity_id, graph.app_id, graph.domain_id, graph.subscription_type) == (
        "alice",
        "notes",
        "drafts",
        "graph",
    )
    assert (graph.object_ids, graph.scope, graph.audience) == (
        ("note:1",),
        ReadScope("drafts", "main"),
        Audience.READERS,
    )
    assert (system.origin_identity_id, system.scope, system.audience) == (None, None, Audience.ADMINISTRATORS)
    (capsule,) = CapsuleIssuer(AccessBook()).issue([graph])
    assert isinstance(capsule, ReadCapsule)
    assert capsule.fits(graph)


def test_a_type_that_is_withdrawn_while_its_event_waits_is_refused_on_record() -> None:
    """It is no envelope any more, and its place is free."""
    engines = Engines()
    engines.declarations.declare(app_declaration("app.shop.order_paid", slug="shop", fields=("order_id",)))
    engines.tell(app_event(1))
    engines.declarations.withdraw("app.shop")

    assert engines.normalize() == []
    assert [(each.source_manager, each.error.field) for each in engines.rejections] == [("app.shop", "event_type")]
    assert engines.ceiling.used == 0


def test_a_record_read_again_becomes_the_same_envelope_but_for_id_token_and_time() -> None:
    """Catch-up builds what the socket delivered: type, summary, scope, place, source and contract are equal."""
    engines = Engines()
    descriptor = graph_event(12)
    live = bound(engines, descriptor)
    declaration = engines.declarations.get("graph.object_mutated")
    assert declaration is not None
    again = engines.builder.rebuild(descriptor, declaration)

    own = {"event_id": "", "resume_token": "", "emitted_at": 0}
    assert msgspec.structs.replace(again, **own) == msgspec.structs.replace(live, **own)
    assert again.event_id != live.event_id


def test_a_record_that_intake_refuses_is_not_rebuilt_either() -> None:
    """What may not be told may not be read again in its place."""
    engines = Engines()
    declaration = engines.declarations.get("graph.object_mutated")
    assert declaration is not None
    secret = graph_event(3, payload_summary={"object_ids": ("key:-----BEGIN PRIVATE KEY-----",)})
    for descriptor in (secret, graph_event(3, scope_hint={"app_id": "shop"})):
        with pytest.raises(DescriptorRefused):
            engines.tell(descriptor)
        with pytest.raises(DescriptorRefused):
            engines.builder.rebuild(descriptor, declaration)
