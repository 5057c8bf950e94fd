"""What the tests of the gateway's first engines share: intake and normalization, joined as in the gateway, and descriptors for them."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tidings.access.visibility import ReadScope
from tidings.gateway.ceiling import Ceiling
from tidings.gateway.contexts import SYSTEM_APP, ReducedVisibility, RequestContext
from tidings.gateway.descriptors import EventDescriptor
from tidings.gateway.event_types import SOURCE_MANAGERS, EventDeclarations
from tidings.gateway.intake import IntakeChannel, Rejection, SourceIntake, TaggedDescriptor
from tidings.gateway.names import EventClass
from tidings.gateway.normalization import EnvelopeBuilder, Normalized, Normalizer
from tidings.gateway.queues import BoundedQueue, ClassQueues
from tidings.gateway.resume_index import ResumeIndex, Retained
from tidings.gateway.resume_tokens import ResumeTokens
from tidings.gateway.shedding import Shedder
from tidings.testing import VirtualClock

APPS = {"notes", "shop"}


class Engines:
    """Intake and normalization, with what they tell others."""

    def __init__(self, total: int = 1_024, window: int = 64) -> None:
        self.clock = VirtualClock()
        self.committed_seq = 1_000_000
        self.rejections: list[Rejection] = []
        self.produced: Counter[EventClass] = Counter()
        self.shed: list[tuple[EventClass, str]] = []
        self.wakes = 0
        self.randoms = 0
        self.declarations = EventDeclarations()
        self.ceiling = Ceiling(total)
        self.index = ResumeIndex(window)
        self.taken: BoundedQueue[TaggedDescriptor] = BoundedQueue(total)
        self.normalized: ClassQueues[Normalized] = ClassQueues(total)
        self.bound: ClassQueues[Retained] = ClassQueues(total)
        self.tokens = ResumeTokens(bytes(range(32)))
        self.builder = EnvelopeBuilder(self.tokens, bytes(range(32, 64)), self.clock, self._random_bytes)
        self.shedder = Shedder(self.taken, self.normalized, self.bound, self.index, self.ceiling, self._shed)
        self.intake = SourceIntake(
            self.declarations,
            self.ceiling,
            self.taken,
            committed_seq=lambda: self.committed_seq,
            is_app_known=APPS.__contains__,
            make_room=self.shedder.shed_one,
            on_rejected=self.rejections.append,
            wake=self._wake,
        )
        self.normalizer = Normalizer(
            self.taken,
            self.normalized,
            self.index,
            self.builder,
            self.declarations,
            self.ceiling,
            on_produced=self._produced,
            on_rejected=self.rejections.append,
        )
        self.channels: dict[str, IntakeChannel] = {name: self.intake.register(name) for name in sorted(SOURCE_MANAGERS)}
        self.intake.close_registration()
        self.intake.is_open = True

    def tell(self, descriptor: EventDescriptor, proof: int | None = None) -> None:
        """Hand a descriptor in through its manager's channel, with a proof that fits."""
        name = descriptor.source_manager
        channel = self.channels["app_manager" if name.startswith("app.") else name]
        channel.submit(descriptor, descriptor.sequence_anchor_hint if proof is None else proof)

    def normalize(self) -> list[Normalized]:
        """Everything that was taken, normalized, in the order in which it is delivered."""
        self.normalizer.run(10_000)
        return list(iter(self.normalized.take, None))

    def envelope_of(self, descriptor: EventDescriptor) -> Normalized:
        """What becomes of one descriptor."""
        self.tell(descriptor)
        (found,) = self.normalize()
        return found

    def _random_bytes(self, count: int) -> bytes:
        self.randoms += 1
        return self.randoms.to_bytes(count, "big")

    def _produced(self, event_class: EventClass, event_type: str, app_id: str) -> None:
        self.produced[event_class] += 1

    def _shed(self, event_class: EventClass, event_type: str, source: str) -> None:
        self.shed.append((event_class, event_type))

    def _wake(self) -> None:
        self.wakes += 1


def request(
    app_id: str = "notes", *, requester: str | None = "alice", trace_id: str = "trace-1", **more: Any
) -> RequestContext:
    """A context of somebody's request."""
    return RequestContext(app_id=app_id, requester_identity_id=requester, trace_id=trace_id, **more)


def graph_event(seq: int, **changes: Any) -> EventDescriptor:
    """A committed record that names an object."""
    given: dict[str, Any] = {
        "source_manager": "graph_manager",
        "event_class": "graph",
        "event_type": "graph.object_mutated",
        "sequence_anchor_hint": seq,
        "operation_context": request(),
        "app_id": "notes",
        "domain_id": "drafts",
        "payload_summary": {"object_ids": ("note:1",), "op_count": 1},
        "read_scope": ReadScope("drafts", "main"),
    }
    return EventDescriptor(**given | changes)


def own_event(
    name: str, count: int, *, source: str, summary: dict[str, Any] | None = None, **changes: Any
) -> EventDescriptor:
    """What a manager of the node tells."""
    given: dict[str, Any] = {
        "source_manager": source,
        "event_class": name.partition(".")[0],
        "event_type": name,
        "sequence_anchor_hint": count,
        "operation_context": ReducedVisibility(source_manager=source, app_id=SYSTEM_APP, trace_id="trace-2"),
        "app_id": SYSTEM_APP,
        "domain_id": None,
        "payload_summary": {"count": 1} | (summary or {}),
    }
    return EventDescriptor(**given | changes)


def system_event(count: int, **changes: Any) -> EventDescriptor:
    """The settings have changed."""
    summary = {"node_id": "n1", "cfg_seq": count, "keys": ()}
    return own_event("system.config_changed", count, source="config_manager", summary=summary, **changes)


def network_event(count: int, **changes: Any) -> EventDescriptor:
    """Somebody has connected."""
    given = {"scope_hint": {"peer_identity_id": "bob"}} | changes
    summary = {"connection_id": "7", "path": "/sync"}
    return own_event("network.peer_admitted", count, source="network_manager", summary=summary, **given)


def security_event(count: int, **changes: Any) -> EventDescriptor:
    """The guard has noticed something."""
    summary = {"kind": "overflow", "offences": 3, "window_ms": 60_000}
    given = {"scope_hint": {"requester_identity_id": "mallory"}} | changes
    return own_event("security.dos_abuse_detected", count, source="dos_guard_manager", summary=summary, **given)


def app_event(count: int, slug: str = "shop", **changes: Any) -> EventDescriptor:
    """What an app's event type tells of a record."""
    given: dict[str, Any] = {
        "source_manager": f"app.{slug}",
        "event_class": f"app.{slug}",
        "event_type": f"app.{slug}.order_paid",
        "sequence_anchor_hint": count,
        "operation_context": request(slug),
        "app_id": slug,
        "domain_id": "orders",
        "payload_summary": {"order_id": "42"},
        "read_scope": ReadScope("orders", "main"),
    }
    return EventDescriptor(**given | changes)
