"""Server frames for sessions, and a small server of dialect A that does what a test tells it to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, Raw, UnsetType

from tidings.access.endpoint import Peer as RemotePeer
from tidings.access.endpoint import Transport
from tidings.client import ClientSettings, ClientStore, EndpointConnector, LocalEvent, ViewOf
from tidings.client.errors import ConnectFailed
from tidings.core.names import check_partitions
from tidings.sync.client_effects import Effect, SendMessage
from tidings.wire.sync_frames import (
    Capabilities,
    ClientPayload,
    CommittedEvent,
    Connect,
    Connected,
    Disconnect,
    ErrorFrame,
    EventBroadcast,
    Heartbeat,
    HeartbeatAck,
    ItemError,
    ItemResult,
    Limits,
    ServerPayload,
    SubmitEvents,
    SubmitItem,
    SubmitResult,
    Sync,
    SyncResponse,
    decode_from_client,
    encode,
)

SETTINGS = ClientSettings(page_events=50, retry_s_min=0.1, retry_s_max=5.0)


def frame(payload: ServerPayload) -> bytes:
    """A server's message."""
    return encode(payload, msg_id="s", timestamp=0)


def body(kind: str, payload: Mapping[str, Any]) -> Raw:
    """An event's JSON."""
    return Raw(msgspec.json.encode({"type": kind, "payload": payload}))


def committed(committed_id: int, *, id: str | None = None, partitions: Sequence[str] = ("P1",)) -> CommittedEvent:
    """The event at that place of the server's history."""
    return CommittedEvent(
        id=id or f"e{committed_id}",
        client_id="other",
        partitions=list(partitions),
        committed_id=committed_id,
        event=body("noted", {"n": committed_id}),
        status_updated_at=1000 + committed_id,
    )


def broadcast(committed_id: int, **details: Any) -> bytes:
    """The same, as it is told live."""
    return frame(EventBroadcast(**msgspec.structs.asdict(committed(committed_id, **details))))


def connected(
    last: int = 0, *, limits: Limits | None = None, model_version: int | None = None, client_id: str = "me"
) -> bytes:
    """The answer to connect."""
    return frame(
        Connected(
            client_id=client_id,
            server_time=0,
            server_last_committed_id=last,
            capabilities=Capabilities(profile="canonical", accepted_event_types=["event"]),
            model_version=UNSET if model_version is None else model_version,
            limits=UNSET if limits is None else limits,
        )
    )


def page(
    *ids: int,
    sync_to: int,
    next_since: int | None = None,
    more: bool = False,
    partitions: Sequence[str] = ("P1",),
    subscriptions: Sequence[str] = ("P1",),
    model_version: int | None = None,
    pruned: int | None = None,
) -> bytes:
    """A page with these events."""
    return frame(
        SyncResponse(
            partitions=list(partitions),
            effective_subscriptions=list(subscriptions),
            events=[committed(each) for each in ids],
            next_since_committed_id=next_since if next_since is not None else (ids[-1] if ids else 0),
            sync_to_committed_id=sync_to,
            has_more=more,
            model_version=UNSET if model_version is None else model_version,
            pruned_through_committed_id=UNSET if pruned is None else pruned,
        )
    )


def error(code: str, **details: Any) -> bytes:
    """An error message."""
    return frame(ErrorFrame(code=code, message=f"{code}!", details=details or UNSET))


def item(id: str, size: int = 0) -> SubmitItem:
    """A draft as it is sent."""
    return SubmitItem(id=id, partitions=["P1"], event=body("noted", {"pad": "x" * size}))


def sent(effects: Iterable[Effect]) -> list[ClientPayload]:
    """What the effects send."""
    return [effect.payload for effect in effects if isinstance(effect, SendMessage)]


class ModelServer:
    """
    A sync server in memory: one list of events, and switches for everything that can go wrong.

    It follows the protocol and nothing more; a test sets a switch before it lets a client near it.
    """

    def __init__(self, *, limits: Limits | None = None, model_version: int = 1) -> None:
        self.events: list[CommittedEvent] = []
        self.by_id: dict[str, CommittedEvent] = {}
        self.limits = limits or Limits(sync_limit_min=1, sync_limit_max=1000)
        self.model_version = model_version
        self.conversations: list[ModelConversation] = []
        self.requests: list[ClientPayload] = []
        self.connects: list[Connect] = []
        self.forbidden: set[str] = set()
        self.tokens: set[str] | None = None
        self.reject: Callable[[SubmitItem], tuple[str, list[ItemError]] | None] = lambda item: None
        self.refuse_batch: Callable[[SubmitItem], bool] = lambda item: False
        self.lose_results = 0
        """So many results are never sent: the items are committed, and the line is cut."""
        self.lose_requests = 0
        """So many submissions are lost with their line before anything happens."""
        self.rate_limits = 0
        self.is_silent = False
        self.before_page: Callable[[Sync], None] = lambda request: None
        self.held: list[tuple[ModelConversation, EventBroadcast]] | None = None
        self.last_id = 0

    def admit(self, peer: RemotePeer) -> RemotePeer:
        return peer

    def open(self, transport: Transport, peer: RemotePeer) -> ModelConversation:
        conversation = ModelConversation(self, transport)
        self.conversations.append(conversation)
        return conversation

    async def stop(self, deadline_s: float) -> None:
        self.cut()

    def cut(self, code: int = 1006) -> None:
        """Cut every line."""
        for conversation in list(self.conversations):
            conversation.transport.close(code)
        self.conversations.clear()

    def commit(
        self,
        item: SubmitItem | None = None,
        *,
        partitions: Sequence[str] = ("P1",),
        kind: str = "noted",
        payload: Mapping[str, Any] | None = None,
        origin: ModelConversation | None = None,
    ) -> CommittedEvent:
        """Commit an event and tell the subscribers."""
        self.last_id += 1
        if item is None:
            item = SubmitItem(
                id=f"server-{self.last_id}",
                partitions=list(partitions),
                event=body(kind, payload or {"n": self.last_id}),
            )
        event = CommittedEvent(
            id=item.id,
            client_id="server" if origin is None else origin.client_id,
            partitions=list(check_partitions(item.partitions)),
            committed_id=self.last_id,
            event=item.event,
            status_updated_at=self.last_id,
        )
        self.events.append(event)
        self.by_id[event.id] = event
        told = EventBroadcast(**msgspec.structs.asdict(event))
        for conversation in self.conversations:
            if conversation is not origin and not conversation.subscriptions.isdisjoint(event.partitions):
                if self.held is not None:
                    self.held.append((conversation, told))
                else:
                    conversation.send(told)
        return event

    def tell_held(self, order: Callable[[list[Any]], list[Any]] = list) -> None:
        """Send the broadcasts that were held back, in another order perhaps."""
        held, self.held = self.held or [], None
        for conversation, told in order(held):
            conversation.send(told)

    def replace_history(self) -> None:
        """Lose everything, as a server restored from nothing would."""
        self.events.clear()
        self.by_id.clear()
        self.last_id = 0

    def sent_drafts(self) -> list[list[str]]:
        """The ids of each submission that reached the server."""
        return [[item.id for item in each.events] for each in self.requests if isinstance(each, SubmitEvents)]


class ModelConversation:
    """One connection of the model server."""

    def __init__(self, server: ModelServer, transport: Transport) -> None:
        self.server = server
        self.transport = transport
        self.client_id = ""
        self.subscriptions: set[str] = set()
        self._sync_to: int | None = None

    def ponged(self, payload: bytes) -> None:
        pass

    def send(self, payload: ServerPayload) -> None:
        self.transport.send([frame(payload)])

    def drained(self) -> None:
        """Nothing is held back here."""

    def closed(self, code: int) -> None:
        if self in self.server.conversations:
            self.server.conversations.remove(self)

    def received(self, message: bytes) -> None:
        server = self.server
        if server.is_silent or self not in server.conversations:
            return
        _, payload = decode_from_client(message)
        server.requests.append(payload)
        match payload:
            case Connect():
                self._connect(payload)
            case Sync():
                self._sync(payload)
            case SubmitEvents():
                self._submit(payload)
            case Heartbeat():
                self.send(HeartbeatAck())
            case Disconnect():
                self.transport.close(1000)

    def fail(self, code: str, close: bool = False, **details: Any) -> None:
        self.send(ErrorFrame(code=code, message=f"{code}!", details=details or UNSET))
        if close:
            self.transport.close(1008)

    def _connect(self, request: Connect) -> None:
        server = self.server
        server.connects.append(request)
        if server.tokens is not None and request.token not in server.tokens:
            self.fail("auth_failed", close=True)
            return
        self.client_id = request.client_id
        self.send(
            Connected(
                client_id=request.client_id,
                server_time=0,
                server_last_committed_id=server.last_id,
                capabilities=Capabilities(profile="canonical", accepted_event_types=["event"]),
                model_version=server.model_version,
                limits=server.limits,
            )
        )

    def _sync(self, request: Sync) -> None:
        server = self.server
        wanted = (
            set() if isinstance(request.subscription_partitions, UnsetType) else set(request.subscription_partitions)
        )
        if server.forbidden & (wanted | set(request.partitions)):
            self.fail("forbidden")
            return
        if not isinstance(request.subscription_partitions, UnsetType):
            self.subscriptions = wanted
        if self._sync_to is None:
            self._sync_to = server.last_id
        sync_to, limit = self._sync_to, request.limit if isinstance(request.limit, int) else 500
        found = [
            event
            for event in server.events
            if request.since_committed_id < event.committed_id <= sync_to
            and not set(request.partitions).isdisjoint(event.partitions)
        ]
        events, has_more = found[:limit], len(found) > limit
        next_since = events[-1].committed_id if events else min(request.since_committed_id, sync_to)
        if not has_more:
            self._sync_to = None
        answer = SyncResponse(
            partitions=request.partitions,
            effective_subscriptions=sorted(self.subscriptions),
            events=events,
            next_since_committed_id=next_since,
            sync_to_committed_id=sync_to,
            has_more=has_more,
            model_version=server.model_version,
        )
        server.before_page(request)
        self.send(answer)

    def _submit(self, request: SubmitEvents) -> None:
        server = self.server
        if server.lose_requests:
            server.lose_requests -= 1
            self.transport.close(1006)
            return
        if server.rate_limits:
            server.rate_limits -= 1
            self.fail("rate_limited", retry_after_ms=2000)
            return
        if any(map(server.refuse_batch, request.events)):
            self.fail("bad_request")
            return
        results = [self._decide(item) for item in request.events]
        if server.lose_results:
            server.lose_results -= 1
            self.transport.close(1006)
            return
        self.send(SubmitResult(results=results))

    def _decide(self, item: SubmitItem) -> ItemResult:
        known = self.server.by_id.get(item.id)
        if known is None:
            refused = self.server.reject(item)
            if refused is not None:
                reason, errors = refused
                return ItemResult(id=item.id, status="rejected", status_updated_at=0, reason=reason, errors=errors)
            known = self.server.commit(item, origin=self)
        elif bytes(known.event) != bytes(item.event):
            errors = [ItemError(field="event", message="id already committed with different payload")]
            return ItemResult(
                id=item.id, status="rejected", status_updated_at=0, reason="validation_failed", errors=errors
            )
        return ItemResult(
            id=item.id, status="committed", committed_id=known.committed_id, status_updated_at=known.status_updated_at
        )


class Network(EndpointConnector):
    """A line to a server that can be down."""

    def __init__(self, server: ModelServer) -> None:
        super().__init__(server)
        self.server = server
        self.is_up = True
        self.attempts = 0

    async def connect(self, url: str) -> Any:
        self.attempts += 1
        if not self.is_up:
            raise ConnectFailed(url, "the network is down")
        return await super().connect(url)

    def go_down(self) -> None:
        """Cut what is there, and let nothing through."""
        self.is_up = False
        self.server.cut()


def numbers() -> ViewOf[list[int]]:
    """The ``n`` of every event, in the order of the view."""

    def add(state: list[int], event: LocalEvent) -> list[int]:
        return [*state, event.payload["n"]]

    return ViewOf[list[int]](add, [])


def memory_store() -> ClientStore:
    """A store without a disk or a thread."""
    return ClientStore(":memory:", is_inline=True)
