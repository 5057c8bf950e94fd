"""A gateway in virtual time, with real managers at its sides and readers in place of sockets."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from tests.unit.access.support import bearer, raw_record, record_of
from tidings.access.administration import Change, Dismissed, Grant, Revoke
from tidings.access.apps import AppChange, AppRegistry
from tidings.access.apps import event_of as app_event_of
from tidings.access.audit import AUDIT_TOPIC, AuditLog
from tidings.access.book import AccessBook, Capsule
from tidings.access.context import ADMIN_ROLE
from tidings.access.guard import DosGuard, GuardSettings
from tidings.access.resources import Action, node, pattern_from_text
from tidings.access.visibility import ReadScope
from tidings.gateway.contexts import ReducedVisibility, RequestContext
from tidings.gateway.descriptors import EventDescriptor, ResumeHint, SummaryValue
from tidings.gateway.event_types import GRAPH_MANAGER, SOURCE_MANAGERS
from tidings.gateway.gateway import Gateway
from tidings.gateway.intake import IntakeChannel
from tidings.gateway.registry import Admission, Subscriber
from tidings.gateway.settings import EventSettings
from tidings.log.interface import Query
from tidings.log.memory import MemoryLog
from tidings.log.reading import records
from tidings.testing import VirtualClock
from tidings.wire.gateway import CloseReason, SubscribeEvents

TOPIC = "orders"


class Reader:
    """What a subscriber sees: the end of a connection where a socket would be."""

    def __init__(self, world: GatewayWorld, admission: Admission, rights: Capsule) -> None:
        self.admission = admission
        self.rights = rights
        self.subscriber: Subscriber | None = None
        self.frames: list[bytes] = []
        self.batches: list[int] = []
        """How many frames came at once."""
        self.pings: list[bytes] = []
        self.closed: tuple[CloseReason, Mapping[str, object]] | None = None
        self.has_room = True
        self.fails = False
        self.answers_pings = True
        self._world = world

    # The sink

    def send(self, prefixes: tuple[bytes, ...]) -> bool:
        assert self.closed is None, "nothing is sent after a close"
        if self.fails:
            raise OSError("broken")
        self.frames += prefixes
        self.batches.append(len(prefixes))
        return self.has_room

    def ping(self, payload: bytes) -> None:
        self.pings.append(payload)
        if self.answers_pings:
            self.open.ponged(payload)

    def close(self, reason: CloseReason, data: Mapping[str, object]) -> None:
        assert self.closed is None, "a connection is closed once"
        self.closed = reason, data
        self.admission.release()

    # What a client does

    @property
    def open(self) -> Subscriber:
        assert self.subscriber is not None
        return self.subscriber

    @property
    def envelopes(self) -> list[dict[str, Any]]:
        return [msgspec.json.decode(frame + b'"t"}')["payload"] for frame in self.frames]

    @property
    def seqs(self) -> list[int]:
        return [each["sequence_anchor"]["global_seq"] for each in self.envelopes]

    @property
    def tokens(self) -> list[str]:
        return [each["resume_token"] for each in self.envelopes]

    @property
    def types(self) -> list[str]:
        return [each["event_type"] for each in self.envelopes]

    @property
    def reason(self) -> CloseReason | None:
        return None if self.closed is None else self.closed[0]

    def ack(self, place: int = -1) -> None:
        self.open.ack(self.tokens[place])

    def leave(self) -> None:
        """The client goes away."""
        self._world.gateway.registry.close(self.open, None)
        self.admission.release()


class GatewayWorld:
    """
    A gateway, its managers and the records that are committed.

    Every record here has its seq: access changes too.
    """

    def __init__(
        self,
        settings: EventSettings | None = None,
        *,
        seed: int = 0,
        guard: GuardSettings | None = None,
        without: str | None = None,
    ) -> None:
        self.clock = VirtualClock()
        self.log = MemoryLog(clock=self.clock, epoch="e")
        self.book = AccessBook()
        self.apps = AppRegistry()
        self.audit = AuditLog(self.log, self.clock)
        self.guard = DosGuard(guard or GuardSettings(), self.clock, self.audit)
        self.committed_seq = 0
        self.health: list[tuple[str, tuple[str, ...]]] = []
        self.random = random.Random(seed)
        self.gateway = Gateway(
            settings or EventSettings(),
            clock=self.clock,
            book=self.book,
            apps=self.apps,
            audit=self.audit,
            guard=self.guard,
            committed_seq=lambda: self.committed_seq,
            report_health=lambda state, reasons, metrics: self.health.append((state, reasons)),
            random_bytes=self.random.randbytes,
        )
        self.channels: dict[str, IntakeChannel] = {}
        for manager in (self.audit, self.guard, self.apps):
            announcer = manager.announcer
            if announcer.source_manager != without:
                channel = self.gateway.hear(announcer)
                if manager is self.apps:
                    self.channels["app_manager"] = channel
        for name in sorted(SOURCE_MANAGERS - self.gateway.intake.sources - {without}):
            self.channels[name] = self.gateway.intake.register(name)
        self._anchors: dict[str, int] = {}

    @classmethod
    @asynccontextmanager
    async def running(cls, settings: EventSettings | None = None, **options: Any) -> AsyncIterator[GatewayWorld]:
        """A world whose gateway runs and takes subscribers."""
        world = cls(settings, **options)
        world.start()
        try:
            yield world
            # What the gateway and its managers tell must never be refused for its form: nobody would notice.
            refused = world.gateway.telemetry.rejected_descriptors
            own = {
                each: count
                for each, count in refused.items()
                if each[0] not in world.channels and each[1] != "queue_full"
            }
            assert own == {}
        finally:
            await world.stop()

    def start(self) -> None:
        self.gateway.start()
        self.gateway.listener_bound(True)

    async def stop(self) -> None:
        await self.clock.run_until(self.gateway.stop(1.0))
        await self.clock.run_until(self.audit.close(1.0))

    async def settle(self, seconds: float = 0.0) -> None:
        """Let everything that can happen now happen, and then some time pass."""
        await self.clock.advance(seconds)

    # What happens in the node

    def change(self, *changes: Change) -> None:
        """Access records are committed, and the book knows them."""
        for each in changes:
            self.committed_seq += 1
            record = record_of(self.committed_seq, each)
            self.book.committed([msgspec.structs.replace(record, offset=self.book.version)])

    def doubtful_access_record(self) -> int:
        """An access record that nobody can read, and that may have taken something away: the book closes. Returns its seq."""
        self.committed_seq += 1
        self.book.committed([raw_record(self.committed_seq, "access.policy_removed", {}, offset=self.book.version)])
        assert self.book.closed_by()
        return self.committed_seq

    def dismiss(self, seq: int) -> None:
        """The record that closed the book is dismissed."""
        self.change(Dismissed(seq=seq))

    def grant(self, subject: str, resource: str, action: Action = Action.READ) -> None:
        self.change(Grant(subject=subject, action=action, resource=pattern_from_text(resource)))

    def revoke(self, subject: str, resource: str, action: Action = Action.READ) -> None:
        self.change(Revoke(subject=subject, action=action, resource=pattern_from_text(resource)))

    def change_app(self, *changes: AppChange) -> None:
        """App records are committed, and the registry knows them."""
        for each in changes:
            self.committed_seq += 1
            event = app_event_of(each, actor="test")
            record = record_of(
                self.committed_seq, Grant(subject="x", action=Action.READ, resource=pattern_from_text("node"))
            )
            meta = msgspec.structs.replace(record.meta, topic=event.meta.topic, type=str(event.meta.type))
            self.apps.committed(
                [type(record).of(0, record.seq, meta, msgspec.Raw(msgspec.json.encode(dict(event.payload))))]
            )

    def commit(self, *objects: str, parts: int = 1, **record: Any) -> int:
        """A record that names objects is committed, and told of in so many descriptors; returns its seq."""
        named = objects or ("order:1",)
        every = [tuple(f"{each}.{part}" for each in named) for part in range(parts)] if parts > 1 else [named]
        return self.commit_parts(every, **record)

    def commit_parts(
        self,
        every: Sequence[tuple[str, ...]],
        *,
        topic: str = TOPIC,
        space: str = "main",
        partitions: tuple[str, ...] = (),
        **more: Any,
    ) -> int:
        """A record is committed, and told of in one descriptor for each of these lists of objects; returns its seq."""
        self.committed_seq += 1
        seq = self.committed_seq
        scope = ReadScope(topic, space, partitions)
        for part, objects in enumerate(every):
            values = {"topic": topic, "resume_hint": ResumeHint(seq, part), "read_scope": scope, **more}
            self.channels[GRAPH_MANAGER].submit(self.graph_descriptor(seq, *objects, **values), seq)
        return seq

    def graph_descriptor(
        self, seq: int, *objects: str, topic: str = TOPIC, app: str = "default", by: str = "author", **more: Any
    ) -> EventDescriptor:
        values: dict[str, Any] = {
            "source_manager": GRAPH_MANAGER,
            "event_class": "graph",
            "event_type": "graph.object_mutated",
            "sequence_anchor_hint": seq,
            "operation_context": RequestContext(app_id=app, requester_identity_id=by, trace_id=f"t{seq}"),
            "app_id": app,
            "domain_id": topic,
            "payload_summary": {"object_ids": objects},
            "read_scope": ReadScope(topic, "main"),
        }
        return EventDescriptor(**{**values, **more})

    def tell(self, source: str, event_type: str, summary: Mapping[str, SummaryValue], **more: Any) -> None:
        """A manager tells of something."""
        channel = "app_manager" if source.startswith("app.") else source
        self._anchors[source] = anchor = self._anchors.get(source, 0) + 1
        app = source.removeprefix("app.") if source.startswith("app.") else "system"
        if app == "system":
            summary = {**summary, "count": 1, **({"node_id": "local"} if event_type.startswith("system.") else {})}
        descriptor = EventDescriptor(
            **{
                "source_manager": source,
                "event_class": source if source.startswith("app.") else event_type.partition(".")[0],
                "event_type": event_type,
                "sequence_anchor_hint": anchor,
                "operation_context": ReducedVisibility(source_manager=source, app_id=app, trace_id="t"),
                "app_id": app,
                "domain_id": None,
                "payload_summary": summary,
                **more,
            }
        )
        self.channels[channel].submit(descriptor, anchor)

    # Who subscribes

    def rights(self, subject: str, **claims: Any) -> Capsule:
        """The rights of somebody whose token says this."""
        return self.book.capsule(bearer(subject, **claims))

    def admit(
        self, identity: str = "reader", *, app: str = "default", rights: Capsule | None = None, **claims: Any
    ) -> Reader:
        """A connection that has not subscribed yet."""
        rights = rights or self.rights(identity, **(claims or {"topics": frozenset({TOPIC})}))
        is_admin = rights.allows(Action.ADMINISTER, node())
        context = RequestContext(app_id=app, requester_identity_id=identity, trace_id="c", is_admin=is_admin)
        return Reader(self, self.gateway.admit(context), rights)

    async def subscribe(
        self,
        identity: str = "reader",
        *,
        resume: str | None = None,
        app: str = "default",
        rights: Capsule | None = None,
        claims: Mapping[str, Any] | None = None,
        begins: bool = True,
        **frame: Any,
    ) -> Reader:
        """Somebody subscribes: to graph events of the topic ``orders``, unless said otherwise."""
        reader = self.admit(identity, app=app, rights=rights, **(claims or {}))
        await self.open(reader, resume=resume, **{"app_id": app, **frame})
        if begins:
            reader.open.resume_sending()
        return reader

    async def open(self, reader: Reader, *, resume: str | None = None, **frame: Any) -> None:
        """A connection subscribes."""
        if "channels" not in frame:
            frame.setdefault("subscription_type", "graph")
        frame.setdefault("app_id", reader.admission.context.app_id)
        try:
            reader.subscriber = await self.gateway.registry.open(
                reader.admission, reader.rights, SubscribeEvents(**frame), reader, resume_token=resume
            )
        except BaseException:
            reader.admission.release()
            raise

    async def administrator(self, identity: str = "root", **frame: Any) -> Reader:
        """An administrator who subscribes to security events, unless said otherwise."""
        if "channels" not in frame:
            frame.setdefault("subscription_type", "security")
        return await self.subscribe(identity, claims={"roles": frozenset({ADMIN_ROLE})}, **frame)

    async def audited(self, category: str | None = None) -> list[dict[str, Any]]:
        """What is on record, or what is of one kind: ``subscription_opened``."""
        await self.settle(0.1)
        found = []
        async for record in records(self.log, Query(topic=AUDIT_TOPIC)):
            name = record.meta.type.rpartition("event.")[2]
            if category in (None, name):
                found.append({"type": record.meta.type, **msgspec.json.decode(record.payload_json)})
        return found


def settings_of(**changes: Any) -> EventSettings:
    """Settings with some values changed: ``queue__per_connection=4``."""
    values: dict[str, Any] = msgspec.to_builtins(EventSettings())
    for path, value in changes.items():
        section, name = path.split("__")
        values[section][name] = value
    return msgspec.convert(values, EventSettings)
