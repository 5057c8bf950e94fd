"""Intake takes what a manager of the node may tell, whole and once, and refuses everything else to its face."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

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
from tidings.access.visibility import Audience, ReadScope
from tidings.gateway.contexts import SYSTEM_APP, ReducedVisibility
from tidings.gateway.descriptors import EventDescriptor, ResumeHint
from tidings.gateway.errors import (
    CrossAppViolation,
    DescriptorRefused,
    InvalidDescriptor,
    QueueFull,
    ScopeViolation,
    SourceRefused,
)
from tidings.gateway.event_types import SOURCE_MANAGERS, EventDeclarations, app_declaration
from tidings.gateway.intake import SourceIntake


def shop_declared(engines: Engines, **changes: Any) -> None:
    """The app ``shop`` has one event type."""
    given: dict[str, Any] = {"slug": "shop", "fields": ("order_id",)}
    engines.declarations.declare(app_declaration("app.shop.order_paid", **given | changes))


def refusal_of(engines: Engines, descriptor: EventDescriptor, proof: int | None = None) -> DescriptorRefused:
    """The error that a manager gets for a descriptor of which nothing is taken."""
    with pytest.raises(DescriptorRefused) as caught:
        engines.tell(descriptor, proof)
    assert len(engines.taken) == 0
    return caught.value


@pytest.mark.req("R150", "R60")
def test_every_manager_has_a_channel_of_its_own_within_the_process() -> None:
    """A channel is an object that one manager was given; a second one for it, or one for nobody's name, is not made."""
    engines = Engines()

    assert {name: channel.source_manager for name, channel in engines.channels.items()} == {
        n: n for n in SOURCE_MANAGERS
    }
    assert engines.intake.sources == SOURCE_MANAGERS
    for name in ("graph_manager", "storage_manager", "app.shop", "", "order_service"):
        with pytest.raises(SourceRefused):
            engines.intake.register(name)


@pytest.mark.req("R20", "R32", "R236")
def test_a_service_has_no_way_in() -> None:
    """Once the node is put together no channel is made, so a service has none; and through a manager's it cannot speak for itself."""
    engines = Engines()
    late = SourceIntake(
        EventDeclarations(),
        engines.ceiling,
        engines.taken,
        committed_seq=lambda: 1,
        is_app_known=lambda app: True,
        make_room=lambda: False,
        on_rejected=engines.rejections.append,
        wake=lambda: None,
    )
    late.close_registration()

    with pytest.raises(SourceRefused):
        late.register("config_manager")
    with pytest.raises(SourceRefused):
        engines.intake.register("order_service")
    for name in ("order_service", "app.shop", "config_manager"):
        with pytest.raises(ScopeViolation):
            engines.channels["graph_manager"].submit(graph_event(1, source_manager=name), 1)
    assert not any(hasattr(engines.intake, name) for name in ("submit", "put", "publish", "emit"))
    assert len(engines.taken) == 0


@pytest.mark.req("R18")
def test_a_descriptor_cannot_be_changed_and_nothing_else_is_taken() -> None:
    """Neither its fields nor its summary and hint, nor what these were made of; and what is no descriptor is refused."""
    engines = Engines()
    summary = {"object_ids": ("note:1",)}
    descriptor: Any = graph_event(1, payload_summary=summary, scope_hint={"app_id": "notes"})

    shown: Any = graph_event(1, payload_summary=MappingProxyType(summary))
    summary["object_ids"] = ("note:2",)
    assert descriptor.payload_summary == shown.payload_summary == {"object_ids": ("note:1",)}
    with pytest.raises(AttributeError):
        descriptor.app_id = "shop"
    for mapping in (descriptor.payload_summary, descriptor.scope_hint):
        with pytest.raises(TypeError):
            mapping["app_id"] = "shop"

    channel: Any = engines.channels["graph_manager"]
    for other in (None, {"source_manager": "graph_manager"}, "graph.object_mutated", object()):
        with pytest.raises(InvalidDescriptor):
            channel.submit(other, 1)
    assert len(engines.taken) == 0


@pytest.mark.req("R154", "R156")
def test_what_is_taken_is_tagged_with_source_and_order_and_otherwise_left_alone() -> None:
    """Each source's events are counted from 1 in the order in which they were told, and the descriptor is the very same."""
    engines = Engines()
    told = [graph_event(5), system_event(1), graph_event(7), system_event(4), graph_event(8)]
    for each in told:
        engines.tell(each)
    taken = list(iter(engines.taken.take, None))

    assert [(each.source_manager, each.local_order) for each in taken] == [
        ("graph_manager", 1),
        ("config_manager", 1),
        ("graph_manager", 2),
        ("config_manager", 2),
        ("graph_manager", 3),
    ]
    assert all(each.descriptor is descriptor for each, descriptor in zip(taken, told, strict=True))
    assert engines.wakes == 5


MISSING = [
    "source_manager",
    "event_class",
    "event_type",
    "sequence_anchor_hint",
    "operation_context",
    "app_id",
    "domain_id",
    "read_scope",
]


@pytest.mark.req("R151", "R64")
@pytest.mark.parametrize("field", MISSING)
def test_a_descriptor_without_something_that_it_needs_is_invalid(field: str) -> None:
    """Source, class, type, anchor, context, app, domain and what reading takes: nothing is guessed in its place."""
    engines = Engines()
    with pytest.raises(InvalidDescriptor) as caught:
        engines.channels["graph_manager"].submit(graph_event(1, **{field: None}), 1)

    assert (caught.value.field, caught.value.protocol_code) == (field, "ERR_STRUCT_MISSING_FIELD")
    assert caught.value.interface_code == "envelope_invalid"
    if field != "read_scope":
        with pytest.raises(DescriptorRefused):
            engines.channels["graph_manager"].submit(graph_event(1, **{field: ""}), 1)


@pytest.mark.req("R25")
def test_a_context_comes_along_or_a_reduced_one_in_its_place() -> None:
    """Requester, device, app and trace are taken as they are; the node's own context names no identity; anything else is invalid."""
    engines = Engines()
    full = request(device_id="phone-1", correlation_id="c-1")
    engines.tell(graph_event(1, operation_context=full))
    engines.tell(system_event(1))

    first, second = engines.taken.take(), engines.taken.take()
    assert first is not None
    assert second is not None
    assert first.descriptor.operation_context is full
    assert isinstance(second.descriptor.operation_context, ReducedVisibility)
    assert not hasattr(second.descriptor.operation_context, "requester_identity_id")
    foreign = ReducedVisibility(source_manager="health_manager", app_id="notes", trace_id="t")
    for context in (
        {"app_id": "notes"},
        "alice",
        request(trace_id=""),
        request(trace_id="a b"),
        request(requester=""),
        foreign,
    ):
        assert isinstance(refusal_of(engines, graph_event(2, operation_context=context)), DescriptorRefused)


@pytest.mark.req("R19")
def test_a_source_that_nobody_knows_is_refused() -> None:
    """Neither a made-up manager nor an app that has declared nothing tells of anything."""
    engines = Engines()
    for source in ("gossip_manager", "app.shop", "app.notes"):
        with pytest.raises(ScopeViolation) as caught:
            engines.channels["app_manager"].submit(graph_event(1, source_manager=source), 1)
        assert (caught.value.field, caught.value.interface_code) == ("source_manager", "acl_denied")


@pytest.mark.req("R21")
@pytest.mark.parametrize("event_class", ["graphs", "Graph", "app", "app.", "app.no-slug", "app.a.b", "metrics"])
def test_a_class_that_there_is_not_is_refused(event_class: str) -> None:
    """There are four classes and the channels of apps."""
    error = refusal_of(Engines(), graph_event(1, event_class=event_class, event_type=f"{event_class}.object_mutated"))

    assert (error.name, error.protocol_code) == ("invalid_descriptor", "ERR_STRUCT_INVALID_TYPE")


@pytest.mark.req("R21", "R39", "R40", "R55")
def test_an_app_tells_of_what_it_declared_in_its_own_channel_and_for_itself() -> None:
    """Before the app manager has declared the type, and after it was withdrawn, there is none; in another app's name there never is."""
    engines = Engines()
    assert refusal_of(engines, app_event(1)).protocol_code == "ERR_AUTH_SCOPE_EXCEEDED"

    shop_declared(engines)
    engines.tell(app_event(2))
    assert engines.taken.take() is not None
    assert isinstance(
        refusal_of(engines, app_event(3, app_id="notes", operation_context=request("notes"))), CrossAppViolation
    )
    for changes in ({"slug": "notes"}, {"event_type": "app.shop.order_lost"}, {"event_class": "app.notes"}):
        assert isinstance(refusal_of(engines, app_event(4, **changes)), DescriptorRefused)
    notes = app_declaration("app.notes.note_read", slug="notes", fields=("order_id",))
    engines.declarations.declare(notes)
    foreign = app_event(5, event_class="app.notes", event_type="app.notes.note_read")
    assert refusal_of(engines, foreign).field == "event_type"

    engines.declarations.withdraw("app.shop")
    assert isinstance(refusal_of(engines, app_event(6)), ScopeViolation)


@pytest.mark.req("R41", "R219")
def test_an_anchor_that_an_app_did_not_declare_is_refused() -> None:
    """Only what the type names beforehand may narrow its scope."""
    engines = Engines()
    shop_declared(engines)
    narrowed: dict[str, Any] = {"scope_hint": {"requester_identity_id": "alice"}}
    error = refusal_of(engines, app_event(1, **narrowed))
    assert (error.name, error.protocol_code) == ("scope_violation", "ERR_AUTH_SCOPE_EXCEEDED")

    other = Engines()
    shop_declared(other, scope_anchors=("app_id", "domain_id", "requester_identity_id"))
    assert other.envelope_of(app_event(1, **narrowed)).retained.envelope.scope.requester_identity_id == "alice"


@pytest.mark.req("R23", "R56")
@pytest.mark.parametrize(
    "event_type",
    [
        "graph.ObjectMutated",
        "graph.object-mutated",
        "graph",
        "graph..x",
        "graph.v2.object",
        "graph.object_mutated.v1",
        "graph._x",
        "graph.x_",
    ],
)
def test_a_name_that_is_not_snake_case_in_every_segment_is_refused(event_type: str) -> None:
    """A name that breaks the grammar is none, whoever tells it."""
    error = refusal_of(Engines(), graph_event(1, event_type=event_type))

    assert (error.name, error.protocol_code) == ("invalid_descriptor", "ERR_STRUCT_INVALID_ENCODING")


@pytest.mark.req("R23", "R68")
@pytest.mark.parametrize(
    ("descriptor", "field"),
    [
        (network_event(1, source_manager="config_manager"), "event_class"),
        (graph_event(1, source_manager="health_manager"), "event_class"),
        (security_event(1, source_manager="network_manager"), "event_class"),
        (system_event(1, source_manager="dos_guard_manager"), "event_class"),
        (system_event(1, source_manager="health_manager"), "event_type"),
        (system_event(1, event_type="system.never_declared"), "event_type"),
    ],
)
def test_a_class_or_type_that_is_not_the_sources_is_refused(descriptor: EventDescriptor, field: str) -> None:
    """A manager tells of its own classes, and within these of its own types."""
    error = refusal_of(Engines(), descriptor)

    assert (error.name, error.field, error.interface_code) == ("scope_violation", field, "acl_denied")


@pytest.mark.req("R66", "R24")
@pytest.mark.parametrize("anchor", [-1, 2**53, 1.0, "1", True])
def test_an_anchor_that_is_no_count_is_refused(anchor: object) -> None:
    """Below zero, beyond what JSON keeps exact, or no integer at all."""
    engines = Engines()
    channel: Any = engines.channels["graph_manager"]
    with pytest.raises(InvalidDescriptor, match="sequence_anchor_hint"):
        channel.submit(graph_event(1, sequence_anchor_hint=anchor), 1)
    engines.tell(graph_event(0))


@pytest.mark.req("R7", "R31", "R153")
def test_without_proof_of_the_commit_a_descriptor_is_refused() -> None:
    """A graph event needs the log to have committed its seq; another source's proof has to grow. None is invalid."""
    engines = Engines()
    engines.committed_seq = 41
    graph: Any = engines.channels["graph_manager"]
    assert refusal_of(engines, graph_event(42)).field == "proof"
    for proof in (None, 41, -1, "42", True):
        with pytest.raises(InvalidDescriptor, match="proof"):
            graph.submit(graph_event(42), proof)
    engines.committed_seq = 42
    engines.tell(graph_event(42))
    engines.tell(system_event(1), proof=7)
    assert len(engines.taken) == 2
    for proof in (7, 6):
        with pytest.raises(InvalidDescriptor, match="proof"):
            engines.tell(system_event(2), proof=proof)


@pytest.mark.req("R3")
def test_what_was_told_before_is_not_taken_again() -> None:
    """The same seq, a lower one, the same place within a seq, and the same contents at another place; a source's count that does not grow."""
    engines = Engines()
    engines.tell(graph_event(5, resume_hint=ResumeHint(5, 0)))
    engines.tell(graph_event(5, resume_hint=ResumeHint(5, 1), payload_summary={"object_ids": ("note:2",)}))
    engines.tell(system_event(3))
    again = [
        graph_event(5),
        graph_event(4),
        graph_event(5, resume_hint=ResumeHint(5, 1), payload_summary={"object_ids": ("note:3",)}),
        graph_event(5, resume_hint=ResumeHint(5, 2)),
        graph_event(6, resume_hint=ResumeHint(5, 3)),
        system_event(3),
        system_event(2),
    ]
    for each in again:
        with pytest.raises(InvalidDescriptor) as caught:
            engines.tell(each, proof=each.sequence_anchor_hint if each.event_class == "graph" else 99)
        assert caught.value.protocol_code == "ERR_STRUCT_INVALID_ENCODING"

    assert len(engines.normalize()) == 3


def _two_domains() -> EventDescriptor:
    return graph_event(1, read_scope=ReadScope("inbox", "main"))


@pytest.mark.req("R26", "R69", "R152")
@pytest.mark.parametrize(
    "make",
    [
        lambda: graph_event(1, operation_context=request("shop")),
        lambda: graph_event(1, scope_hint={"app_id": "shop"}),
        lambda: graph_event(1, scope_hint={"domain_id": "inbox"}),
        _two_domains,
        lambda: graph_event(1, app_id="unheard_of", operation_context=request("unheard_of")),
        lambda: system_event(
            1, operation_context=ReducedVisibility(source_manager="config_manager", app_id="shop", trace_id="t")
        ),
        lambda: system_event(
            1,
            domain_id="drafts",
            operation_context=ReducedVisibility(
                source_manager="config_manager", app_id=SYSTEM_APP, trace_id="t", domain_id="inbox"
            ),
        ),
    ],
)
def test_a_descriptor_of_two_apps_or_two_domains_is_refused(make: Callable[[], EventDescriptor]) -> None:
    """App and domain are named once, and everything else in the descriptor agrees with them."""
    error = refusal_of(Engines(), make())

    assert (error.name, error.interface_code) == ("scope_violation", "identifier_invalid")


@pytest.mark.req("R65", "R162")
def test_a_descriptor_across_apps_is_on_record_as_a_violation_of_security() -> None:
    """At intake, and again at normalization if it should ever come so far: refused, on record, and not an envelope."""
    engines = Engines()
    refusal_of(engines, graph_event(1, scope_hint={"app_id": "shop"}))
    assert isinstance(engines.rejections[0].error, CrossAppViolation)

    engines.tell(graph_event(1))
    tagged = engines.taken.take()
    assert tagged is not None
    spanning = graph_event(1, operation_context=request("shop"))
    engines.taken.put(type(tagged)(tagged.source_manager, tagged.local_order, spanning))
    assert engines.normalize() == []
    assert isinstance(engines.rejections[1].error, CrossAppViolation)
    assert (len(engines.index), engines.ceiling.used) == (0, 0)


@pytest.mark.req("R27", "R67")
def test_a_scope_hint_has_four_keys_and_only_narrows() -> None:
    """Another key, a value that is no text, or one that is not the descriptor's own is refused; a requester narrows the scope to one identity."""
    engines = Engines()
    for hint in ({"tenant": "x"}, {"app_id": 1}, {"app_id": None}, {"requester_identity_id": ""}, "notes", ["app_id"]):
        assert refusal_of(engines, graph_event(1, scope_hint=hint)).name == "invalid_descriptor"
    for hint in (
        {"requester_identity_id": "mallory"},
        {"app_id": "shop"},
        {"domain_id": "*"},
        {"peer_identity_id": "bob"},
    ):
        assert refusal_of(engines, graph_event(1, scope_hint=hint)).name == "scope_violation"

    hinted = engines.envelope_of(graph_event(1, scope_hint={"app_id": "notes", "requester_identity_id": "alice"}))
    assert hinted.retained.envelope.scope.requester_identity_id == "alice"
    assert hinted.retained.envelope.scope.app_id == "notes"
    plain = engines.envelope_of(graph_event(2))
    assert plain.retained.envelope.scope.requester_identity_id is None


BODIES = [
    {"value": "the note's text"},
    {"body": "x"},
    {"payload": "x"},
    {"private_key": "x"},
    {"token": "x"},
    {"address": "10.0.0.1:4222"},
    {"envelope": "x"},
]


@pytest.mark.req("R4", "R5", "R28")
@pytest.mark.parametrize(
    "more",
    [
        *BODIES,
        {"note_title": "x"},
        {"op_count": 1.5},
        {"op_count": 2**53},
        {"op_count": {"nested": 1}},
        {"op_count": b"bytes"},
        {"op_kinds": ["edited"]},
        {"op_kinds": (1,)},
        {"op_kinds": ("edited", {"ops": []})},
        {"object_ids": ()},
        {"object_ids": ("no_type",)},
        {"object_ids": "note:1"},
        {"owner_identity_id": "-----BEGIN EC PRIVATE KEY-----\nMHcCAQEE"},
        {"owner_identity_id": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJhbGljZSJ9.c2ln"},
        {"owner_identity_id": "\ud800"},
        {1: "x"},
    ],
)
def test_a_summary_with_anything_but_its_declared_fields_is_refused(more: dict[Any, Any]) -> None:
    """Contents, secrets, live objects, nested ones, undeclared fields: what is not an id, a count or a fixed word does not go out."""
    error = refusal_of(Engines(), graph_event(1, payload_summary={"object_ids": ("note:1",)} | more))

    assert error.name == "invalid_descriptor"
    assert "PRIVATE KEY" not in str(error)
    assert "eyJ" not in str(error)


@pytest.mark.req("R49")
@pytest.mark.parametrize(
    "summary",
    [
        {"object_ids": tuple(f"note:{n}" for n in range(65))},
        {"object_ids": ("note:" + "x" * 252,)},
        {"object_ids": tuple(f"note:{n:04}" + "x" * 60 for n in range(64))},
        {"object_ids": ("note:1",), "owner_identity_id": "x" * 257},
        {"object_ids": ("note:1",), "owner_identity_id": "x" * 1_000_000},
        {f"field_{n}": n for n in range(17)},
    ],
)
def test_a_summary_beyond_its_bounds_is_refused(summary: dict[str, Any]) -> None:
    """64 texts, 256 characters each, 16 fields, 4,096 bytes in all; what is exactly within them is taken."""
    engines = Engines()
    assert refusal_of(engines, graph_event(1, payload_summary=summary)).name == "invalid_descriptor"

    engines.tell(graph_event(1, payload_summary={"object_ids": tuple(f"note:{n:02}" + "x" * 50 for n in range(64))}))
    engines.tell(graph_event(2, payload_summary={"object_ids": ("note:" + "x" * 251,)}))
    assert len(engines.taken) == 2


@pytest.mark.req("R63", "R157")
@pytest.mark.parametrize(
    ("descriptor", "kind", "name", "codes"),
    [
        (
            graph_event(1, event_type=None),
            InvalidDescriptor,
            "invalid_descriptor",
            ("ERR_STRUCT_MISSING_FIELD", "envelope_invalid"),
        ),
        (
            graph_event(1, event_class=7),
            InvalidDescriptor,
            "invalid_descriptor",
            ("ERR_STRUCT_INVALID_TYPE", "envelope_invalid"),
        ),
        (graph_event(-1), InvalidDescriptor, "invalid_descriptor", ("ERR_STRUCT_INVALID_ENCODING", "envelope_invalid")),
        (_two_domains(), ScopeViolation, "scope_violation", ("ERR_STRUCT_INVALID_IDENTIFIER", "identifier_invalid")),
        (
            graph_event(1, event_type="graph.other"),
            ScopeViolation,
            "scope_violation",
            ("ERR_AUTH_SCOPE_EXCEEDED", "acl_denied"),
        ),
        (graph_event(1), QueueFull, "queue_full", ("ERR_RESOURCE_RATE_LIMIT", "network_rejected")),
    ],
)
def test_a_refusal_is_raised_at_once_with_its_codes_and_is_on_record(
    descriptor: EventDescriptor, kind: type[DescriptorRefused], name: str, codes: tuple[str, str]
) -> None:
    """The manager gets the error, and whoever keeps the record gets it too, once, with source, type, app and trace; nothing is kept of it."""
    engines = Engines()
    engines.intake.is_open = kind is not QueueFull
    error = refusal_of(engines, descriptor)

    assert type(error) is kind
    assert (error.name, (error.protocol_code, error.interface_code)) == (name, codes)
    (rejection,) = engines.rejections
    assert (rejection.error, rejection.source_manager) == (error, "graph_manager")
    assert (rejection.app_id, rejection.trace_id) == ("notes", "trace-1")
    assert rejection.event_type == (descriptor.event_type or "")
    assert (engines.wakes, engines.ceiling.used) == (0, 0)


def test_a_refused_descriptor_moves_no_count() -> None:
    """Corrected and told again with the same seq it is taken, as the first of its source."""
    engines = Engines()
    refusal_of(engines, graph_event(9, payload_summary={}))
    engines.tell(graph_event(9))
    taken = engines.taken.take()

    assert taken is not None
    assert taken.local_order == 1


def test_form_comes_before_right_and_right_before_room() -> None:
    """The first rule that is broken gives the error, in this order."""
    engines = Engines()
    engines.intake.is_open = False

    assert (
        refusal_of(engines, graph_event(1, source_manager="health_manager", payload_summary={})).name
        == "invalid_descriptor"
    )
    assert refusal_of(engines, graph_event(1, source_manager="health_manager")).name == "scope_violation"
    assert refusal_of(engines, graph_event(1)).name == "queue_full"


@pytest.mark.req("R155", "R131")
def test_room_is_shared_out_by_source_and_class_from_the_one_ceiling() -> None:
    """A source gets a quarter of the ceiling; at 80 percent all but graph events wait until it is 60; a part is kept for entries, and the last places are the gateway's own."""
    engines = Engines(total=100)
    for count in range(25):
        engines.tell(network_event(count))
    with pytest.raises(QueueFull, match="share of 25"):
        engines.tell(network_event(25))
    for seq in range(54):
        engines.tell(graph_event(seq))
    engines.tell(system_event(0))  # 80 in all
    for lower in (system_event(1), security_event(1), network_event(26)):
        with pytest.raises(QueueFull, match="paused"):
            engines.tell(lower)
    engines.tell(graph_event(54))
    assert engines.ceiling.used == 81
    while engines.shedder.shed_one():
        pass
    for seq in range(55, 81):
        engines.tell(graph_event(seq))
    with pytest.raises(QueueFull, match="100 events"):
        engines.tell(graph_event(81))
    own = {"source": "graph_manager", "error": "queue_full", "node_id": "n1"}
    for count in range(19):
        engines.tell(own_event("system.event_descriptor_rejected", count, source="event_manager", summary=own))
    assert engines.ceiling.used == 100
    with pytest.raises(QueueFull):
        engines.tell(own_event("system.event_descriptor_rejected", 19, source="event_manager", summary=own))

    graph = [each for each in iter(engines.taken.take, None) if each.source_manager == "graph_manager"]
    for each in graph[:39]:
        engines.ceiling.release_envelope(each.source_manager)
    with pytest.raises(QueueFull, match="paused"):
        engines.tell(system_event(2))
    engines.ceiling.release_envelope("graph_manager")
    engines.tell(system_event(2))


def test_a_graph_event_at_the_ceiling_takes_the_place_of_a_lower_one() -> None:
    """The oldest of the lowest class gives way, and the graph event is taken."""
    engines = Engines(total=64)
    engines.tell(system_event(1))
    engines.tell(security_event(1))
    for seq in range(44):
        engines.tell(graph_event(seq))
    engines.tell(graph_event(44))
    engines.tell(graph_event(45))

    assert engines.shed == [("system", "system.config_changed"), ("security", "security.dos_abuse_detected")]
    with pytest.raises(QueueFull):
        engines.tell(graph_event(46))
    assert engines.ceiling.used == 46


def test_before_the_start_and_after_the_end_everything_is_refused_as_full() -> None:
    """Nothing is held back in the dark: the manager is told, and it is on record."""
    engines = Engines()
    engines.intake.is_open = False

    assert refusal_of(engines, graph_event(1)).retryable
    assert [each.error.name for each in engines.rejections] == ["queue_full"]


def test_what_was_refused_is_behind_those_who_subscribe_after_it() -> None:
    """``graph_seq`` is the seq up to which nothing more is told, taken or refused; a seq that is not committed moves it nowhere."""
    engines = Engines()
    before = engines.intake.graph_seq
    assert before == engines.committed_seq
    engines.committed_seq += 10
    engines.tell(graph_event(before + 1))
    assert engines.intake.graph_seq == before + 1
    engines.intake.is_open = False
    with pytest.raises(QueueFull):
        engines.tell(graph_event(before + 2))
    assert engines.intake.graph_seq == before + 2
    with pytest.raises(InvalidDescriptor):
        engines.tell(graph_event(before + 99))
    assert engines.intake.graph_seq <= engines.committed_seq


def test_an_event_for_the_whole_app_says_nothing_of_reading() -> None:
    """A type with the audience ``app`` has no read scope; with one it is invalid, as what it promises would not be asked."""
    engines = Engines()
    shop_declared(engines, audience=Audience.APP)

    assert refusal_of(engines, app_event(1)).field == "read_scope"
    engines.tell(app_event(1, read_scope=None))
