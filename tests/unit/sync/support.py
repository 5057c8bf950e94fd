"""A sync endpoint without sockets: virtual time, a log in memory, real tokens, the real dispatcher, and peers that note what they get."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Final

import orjson

from tidings.access.administration import ACCESS_TOPIC
from tidings.access.authentication import Authenticator
from tidings.access.book import load_book
from tidings.access.context import TokenClaims
from tidings.access.endpoint import UNLIMITED_MEMORY, ConnectionLimits
from tidings.access.endpoint import Peer as RemotePeer
from tidings.access.settings import AccessSettings, TokenSettings
from tidings.access.tokens import TokenIssuer, TokenVerifier
from tidings.core.events import Event, EventMeta
from tidings.log.dispatcher import Dispatcher
from tidings.log.interface import Authorise, Log, Verdict
from tidings.log.memory import MemoryLog
from tidings.sync.paging import Archive
from tidings.sync.service import SyncService
from tidings.sync.settings import SyncSettings
from tidings.testing import VirtualClock

SECRET: Final = "a secret of at least thirty-two bytes, for tests"
TOKENS: Final = TokenSettings(secret=SECRET, leeway_s=0)
OPEN_SCHEMAS: Final[dict[str, dict[str, Any]]] = {"*": {}}
EVERYTHING: Final = TokenClaims(partitions=frozenset({"main"}), partition_prefixes=("P",), projects=frozenset({"proj"}))
PROJECT: Final = TokenClaims(projects=frozenset({"proj"}))


class TroubledLog(MemoryLog):
    """A log whose commits can be held up, or fail."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(clock=clock)
        self.may_commit = asyncio.Event()
        self.may_commit.set()
        self.trouble: Exception | None = None
        self.held_up = 0
        """How many batches wait to be committed."""
        self.batch_sizes: list[int] = []

    async def append_many(self, events: Sequence[Event], *, authorise: Authorise | None = None) -> list[Verdict]:
        self.held_up += 1
        self.batch_sizes.append(len(events))
        await self.may_commit.wait()
        self.held_up -= 1
        if self.trouble is not None:
            raise self.trouble
        return await super().append_many(events, authorise=authorise)


class FakeTransport:
    """A connection that keeps what it is given."""

    memory = UNLIMITED_MEMORY

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.sends = 0
        self.code: int | None = None
        self.is_paused = False
        self.buffered_bytes = 0

    def send(self, messages: Sequence[bytes]) -> None:
        if self.code is None:
            self.sends += 1
            self.sent += messages

    def send_shared(self, prefixes: tuple[bytes, ...], suffix: bytes) -> None:
        self.send([prefix + suffix for prefix in prefixes])

    def ping(self, payload: bytes) -> None:
        pass

    def close(self, code: int, reason: str = "") -> None:
        if self.code is None:
            self.code = code

    def authenticated(self) -> None:
        pass

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False


class Peer:
    """The other end of a connection. ``say`` and ``take`` speak dialect A, ``say_camel`` dialects B and C."""

    def __init__(self, world: World, client_id: str) -> None:
        self.world = world
        self.client_id = client_id
        self.transport = FakeTransport()
        self.conversation = world.service.open(self.transport, RemotePeer("/sync", {}))
        self._ids = itertools.count(1)

    def say(self, type: str, payload: Any = None, **envelope: Any) -> None:
        message = {
            "type": type,
            "msg_id": f"c{next(self._ids)}",
            "timestamp": 0,
            "protocol_version": "1.0",
            "payload": {} if payload is None else payload,
        } | envelope
        self.throw(json.dumps(message).encode())

    def say_camel(self, type: str, payload: Any = None, **envelope: Any) -> None:
        message = {
            "type": type,
            "msgId": f"c{next(self._ids)}",
            "timestamp": 0,
            "protocolVersion": "1.0",
            "payload": {} if payload is None else payload,
        } | envelope
        self.throw(json.dumps(message).encode())

    def throw(self, message: bytes) -> None:
        """Hand over raw bytes, as a transport would."""
        if self.transport.code is None:
            self.conversation.received(message)

    def take(self) -> list[dict[str, Any]]:
        """The messages that came since the last call."""
        sent, self.transport.sent = self.transport.sent, []
        return [orjson.loads(message) for message in sent]

    async def ask(self, type: str, payload: Any = None, **envelope: Any) -> dict[str, Any]:
        """Say something, and take the one message that comes."""
        self.say(type, payload, **envelope)
        await self.world.settle()
        (answer,) = self.take()
        return answer

    async def ask_camel(self, type: str, payload: Any = None, **envelope: Any) -> dict[str, Any]:
        """The same in camel case."""
        self.say_camel(type, payload, **envelope)
        await self.world.settle()
        (answer,) = self.take()
        return answer

    async def sync(self, *partitions: str, since: int = 0, **more: Any) -> dict[str, Any]:
        """Sync and subscribe to the same partitions; the payload of the page."""
        names = list(partitions)
        answer = await self.ask(
            "sync", {"partitions": names, "subscription_partitions": names, "since_committed_id": since} | more
        )
        assert answer["type"] == "sync_response", answer
        payload: dict[str, Any] = answer["payload"]
        return payload

    async def submit(self, *items: dict[str, Any]) -> list[dict[str, Any]]:
        """Submit, and take the results; broadcasts that came along stay out of it."""
        answer = await self.ask("submit_events", {"events": list(items)})
        assert answer["type"] == "submit_events_result", answer
        results: list[dict[str, Any]] = answer["payload"]["results"]
        return results

    def leave(self) -> None:
        """The line is cut."""
        if self.transport.code is None:
            self.transport.code = 1006
            self.conversation.closed(1006)


class World:
    """An endpoint and what it stands on."""

    def __init__(
        self,
        log: Log,
        clock: VirtualClock,
        service: SyncService,
        dispatcher: Dispatcher,
        issuer: TokenIssuer,
        settings: SyncSettings,
    ) -> None:
        self.log = log
        self.clock = clock
        self.service = service
        self.dispatcher = dispatcher
        self.issuer = issuer
        self.settings = settings
        self._fillers = itertools.count(1)

    @property
    def stats(self) -> SimpleNamespace:
        """What ``/metrics`` shows of sync, by the short names."""
        found = {name: int(value) for name, _, value in self.service.metrics()}
        return SimpleNamespace(
            **{name.removeprefix("tidings_sync_").removesuffix("_total"): value for name, value in found.items()}
        )

    async def settle(self) -> None:
        """Let everything that can happen without time passing happen."""
        await self.clock.advance(0)

    def token(self, client_id: str, claims: TokenClaims = EVERYTHING, **more: Any) -> str:
        return self.issuer.issue(f"user-of-{client_id}", client_id=client_id, claims=claims, **more)

    def peer(self, client_id: str = "C1") -> Peer:
        """A connection that has said nothing yet."""
        return Peer(self, client_id)

    async def client(self, client_id: str = "C1", claims: TokenClaims = EVERYTHING, **connect: Any) -> Peer:
        """A connected client of dialect A."""
        peer = self.peer(client_id)
        payload = {"token": self.token(client_id, claims), "client_id": client_id, "supported_profiles": ["canonical"]}
        answer = await peer.ask("connect", payload | connect)
        assert answer["type"] == "connected", answer
        return peer

    async def project_client(self, client_id: str = "B1", project: str = "proj", claims: TokenClaims = PROJECT) -> Peer:
        """A connected client of dialect B."""
        peer = self.peer(client_id)
        answer = await peer.ask_camel(
            "connect", {"token": self.token(client_id, claims), "clientId": client_id, "projectId": project}
        )
        assert answer["type"] == "connected", answer
        return peer

    async def fill(self, count: int) -> None:
        """Let the log's count move on, by events that no sync client asks for."""
        events = [
            Event(EventMeta("filler", "FILL", "tests", event_id=f"filler-{next(self._fillers)}"), {})
            for _ in range(count)
        ]
        await self.log.append_many(events)
        await self.settle()


@contextlib.asynccontextmanager
async def open_world(
    settings: SyncSettings | None = None,
    *,
    log: Log | None = None,
    clock: VirtualClock | None = None,
    archive: Archive | None = None,
    access: AccessSettings | None = None,
) -> AsyncIterator[World]:
    """A world, closed at the end. Without settings any schema is registered."""
    clock = clock or VirtualClock()
    owned = log is None
    log = MemoryLog(clock=clock) if log is None else log
    settings = settings or SyncSettings(schemas=OPEN_SCHEMAS)
    book = await load_book(log, access)
    dispatcher = Dispatcher(log, since=log.position.seq)
    verifier = TokenVerifier(TOKENS, clock)
    service = SyncService(
        log, book, Authenticator(verifier, book, clock), settings, clock, reached=dispatcher.reached, archive=archive
    )
    service.limits = ConnectionLimits(unauthenticated_messages_max=10_000)  # tests say much before they connect
    dispatcher.add("access", book, decides_by=ACCESS_TOPIC)
    dispatcher.add("sync", service, on_failure=service.failed)
    dispatcher.start()
    try:
        yield World(log, clock, service, dispatcher, TokenIssuer(TOKENS, clock), settings)
    finally:
        await clock.run_until(service.stop(1.0))
        await dispatcher.close()
        if owned:
            await log.close()


def event(id: str, *partitions: str, data: Any = None, **more: Any) -> dict[str, Any]:
    """An item of the canonical profile."""
    payload = {"schema": "note", "data": {"n": id} if data is None else data}
    return {"id": id, "partitions": list(partitions) or ["P1"], "event": {"type": "event", "payload": payload}} | more


def tree_item(id: str, type: str, payload: Mapping[str, Any], *partitions: str) -> dict[str, Any]:
    """An item of the tree profile."""
    return {"id": id, "partitions": list(partitions) or ["P1"], "event": {"type": type, "payload": dict(payload)}}


def project_item(id: str, **more: Any) -> dict[str, Any]:
    """An item of dialect B."""
    return {
        "id": id,
        "partition": "main",
        "projectId": "proj",
        "type": "note.add",
        "schemaVersion": 1,
        "payload": {"n": id},
        "meta": {"clientTs": 17},
    } | more


def types(messages: list[dict[str, Any]]) -> list[str]:
    """What kinds of message came."""
    return [message["type"] for message in messages]
