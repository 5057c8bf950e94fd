"""
The sync endpoint: connections submit events, catch up in pages and receive broadcasts of commits in order.

A connection carries out what its session decides. What it may do is checked when it asks, again when an event is stored, and again
before a record is shown: rights are those after the last access record that was dispatched.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, Sequence
from typing import Final

import orjson

from tidings.access.authentication import Authenticator
from tidings.access.book import AccessBook
from tidings.access.endpoint import Connection, Endpoint, EndReason, Peer, Transport
from tidings.access.errors import AuthFailed
from tidings.core.clock import Clock
from tidings.core.settings import checked
from tidings.log.errors import StorageFull
from tidings.log.interface import Log
from tidings.log.record import Record
from tidings.wire.sync_frames import CloseCode

from .dialects.camel import project_key
from .errors import HistoryPruned
from .hub import Hub
from .paging import Archive, Pages
from .profiles import Profiles
from .requests import Admit, Close, Effect, PagePlan, ReadPage, Scope, SendFrame, SessionState, Submit, SubmitRequest
from .rights import ClientRights
from .session import ClientLoad, SyncSession
from .settings import SyncSettings
from .submitting import Submitter
from .trees import TreeStates

_MISSING: Final = object()


class SyncConnection(Connection[Admit | Submit | ReadPage]):
    """One connection of a sync client, and a ``Subscriber`` of the hub."""

    __slots__ = ("_held_bytes", "_held_frames", "_service", "session")

    def __init__(self, service: SyncService, transport: Transport) -> None:
        super().__init__(service, transport)
        self._service = service
        self.session = SyncSession(service.settings)
        self._held_frames: list[bytes] | None = None
        self._held_bytes = 0

    # What the endpoint base calls

    def handle(self, message: bytes) -> None:
        """A message came in: the session decides."""
        self.carry_out(self.session.receive(message, self._service.now_ms(), self.queued))

    async def work(self, request: Admit | Submit | ReadPage) -> None:
        """Do what the session asked for."""
        match request:
            case Admit():
                await self._admit(request)
            case Submit():
                await self._submit(request)
            case ReadPage():
                await self._read_page(request)

    def abandoned(self, request: Admit | Submit | ReadPage) -> None:
        """A request that will not be worked on."""
        if isinstance(request, Submit):
            self.session.release(request.request)

    def farewell(self, why: EndReason, detail: str) -> tuple[Sequence[bytes], int, str]:
        """The session's last words."""
        frames: list[bytes] = []
        for effect in self.session.end(why, detail, self._service.now_ms()):
            if isinstance(effect, SendFrame):
                frames.append(effect.frame)
            elif isinstance(effect, Close):
                return frames, int(effect.code), effect.reason
        return super().farewell(why, detail)

    def ended(self, code: int | None) -> None:
        """The connection is over."""
        self.session.gone()
        self._service.left(self)

    def recheck_rights(self) -> Iterator[None]:
        """What it may no longer hear of ends; what it may hear again resumes."""
        return self._carry_out_recheck(self.session.recheck_rights(self._service.now_ms))

    def _carry_out_recheck(self, steps: Generator[None, None, list[Effect]]) -> Iterator[None]:
        effects = yield from steps
        session, heard = self.session, self._service.hub.names_of(self)
        if session.subscriptions != heard and session.dialect is not None:
            self._service.hub.subscribe(self, session.dialect.topic, session.subscriptions)
        self.carry_out(effects)

    def has_backlog(self) -> bool:
        """Clients that hang when they are refused are not read from instead."""
        session, settings = self.session, self._service.settings
        if session.dialect is None or not session.dialect.hangs_on_errors:
            return False
        return session.load.drafts >= settings.in_flight_drafts_max or self.queued >= settings.requests_queued_max

    @property
    def silence_s_max(self) -> float | None:
        """Clients of some dialects send heartbeats."""
        dialect = self.session.dialect
        needs_heartbeats = dialect is not None and dialect.needs_heartbeats
        return self._service.settings.heartbeat_window_ms / 1000 if needs_heartbeats else None

    # What the hub calls

    def may_see(self, scope: Scope) -> bool:
        """Whether it may be shown a record that it has asked for by name."""
        return self.session.state is SessionState.ACTIVE and self.session.may_see(scope)

    def deliver(self, frames: tuple[bytes, ...], last_seq: int) -> None:
        """Broadcasts. A peer that does not read them is closed, and finds them by sync."""
        if self.session.state is not SessionState.ACTIVE:
            return
        if self.is_full:
            self._service.slow_count += 1
            self.end(EndReason.TOO_SLOW)
        elif self.session.is_holding:
            self._hold(frames)
        else:
            self.transport.send_shared(frames, b"")

    def carry_out(self, effects: Sequence[Effect]) -> None:
        """Do what the session has decided."""
        frames: list[bytes] = []
        for effect in effects:
            if isinstance(effect, SendFrame):
                frames.append(effect.frame)
            elif isinstance(effect, Close):
                self.close(int(effect.code), effect.reason, frames)
                return
            else:
                self.enqueue(effect)
        self.send(frames)
        if self._held_bytes and not self.session.is_holding:
            held, self._held_frames, self._held_bytes = self._held_frames, None, 0
            self.send(held or ())

    # Work

    async def _admit(self, work: Admit) -> None:
        service, session, request = self._service, self.session, work.request
        try:
            capsule = service.authenticator.of_token(request.token, path=service.name, entrance="connection")
            rights = ClientRights(capsule)
        except AuthFailed:
            rights = None
        watermark = service.log.position.seq
        if request.project_id is not None and rights is not None and session.dialect is not None:
            project = project_key(request.project_id)
            if project is not None and rights.may_sync(Scope(project)):
                watermark = await service.pages.last_seq(session.dialect.topic, project, watermark)
        effects = session.admitted(request, rights, watermark, service.now_ms())
        if session.state is SessionState.ACTIVE and rights is not None:
            self.authenticated(rights)
            service.joined(self)
        self.carry_out(effects)

    async def _submit(self, work: Submit) -> None:
        service, session = self._service, self.session
        requests = self._with_what_waits(work.request)
        try:
            for each in requests:
                await session.decide_ahead(each)
            answers = iter(
                await service.submitter.submit(session, [item for each in requests for item in each.items], self)
            )
        except StorageFull as error:
            for each in requests:
                self.carry_out(session.refuse_batch(each, error.public_text, service.now_ms()))
            return
        finally:
            for each in requests:
                session.release(each)
            service.relieved(self)
        now_ms, effects = service.now_ms(), list[Effect]()
        for each in requests:
            effects += session.submitted(each, list(itertools.islice(answers, len(each.items))), now_ms)
        self.carry_out(effects)

    def _with_what_waits(self, first: SubmitRequest) -> list[SubmitRequest]:
        """Also the submits that wait behind this one, where items are judged each by itself: together they take one sync of the disk."""
        requests, session = [first], self.session
        if not session.judges_each_item:
            return requests
        ids, count_max = {item.id for item in first.items}, session.settings.batch_items_max

        def fits(work: Admit | Submit | ReadPage) -> bool:
            if not isinstance(work, Submit):
                return False
            items = work.request.items
            return len(ids) + len(items) <= count_max and ids.isdisjoint(item.id for item in items)

        while isinstance(work := self.take_too(fits), Submit):
            requests.append(work.request)
            ids.update(item.id for item in work.request.items)
        return requests

    async def _read_page(self, work: ReadPage) -> None:
        service, session, request = self._service, self.session, work.request
        # Everything committed before the request is delivered, and its revocations are in force, before rights are checked.
        delivered = service.log.position.seq
        await service.reached(delivered)
        await session.decide_ahead(request)
        plan = session.plan_page(request, max(delivered, service.hub.seq), service.now_ms())
        if not isinstance(plan, PagePlan):
            self.carry_out(plan)
            return
        assert session.dialect is not None
        topic = session.dialect.topic
        if plan.subscriptions is not None:
            service.hub.subscribe(self, topic, plan.subscriptions)
        since, snapshot = plan.since, None
        if request.wants_snapshot and request.since == 0 and session.profile == "compatibility":
            snapshot = await self._snapshot(plan)
            since = plan.since if snapshot is None else snapshot[0]
        part = await service.pages.read(
            topic, plan.partitions, since, plan.until, plan.limit, service.settings.page_bytes_max
        )
        if part.pruned_through is not None and session.dialect.hangs_on_errors:
            self.carry_out(session.history_pruned(request, part.pruned_through, service.now_ms()))
            return
        sync_to = plan.until
        if session.dialect.is_by_project and plan.begins:
            sync_to = await service.pages.last_seq(topic, plan.partitions[0], plan.until)
        goes_on_until = service.hub.seq if self._holds_too_much else None
        if goes_on_until is not None and not part.has_more:
            self._held_frames, self._held_bytes = None, 0
        effects = session.page_read(
            plan,
            part.records,
            has_more=part.has_more,
            sync_to=sync_to,
            now_ms=service.now_ms(),
            pruned_through=part.pruned_through,
            snapshot=snapshot,
            goes_on_until=goes_on_until,
        )
        self.carry_out(effects)

    async def _snapshot(self, plan: PagePlan) -> tuple[int, dict[str, bytes]] | None:
        """The states to begin with; ``None`` if they cannot be had or are too large for a page: then the history has to do."""
        try:
            states = await self._service.trees.snapshot(plan.partitions, plan.until)
        except (HistoryPruned, orjson.JSONEncodeError):  # the latter: it nests deeper than JSON can be written here
            return None
        is_small = sum(map(len, states.values())) <= self._service.settings.page_bytes_max
        return (plan.until, states) if is_small else None

    # Broadcasts during paging

    def _hold(self, frames: Sequence[bytes]) -> None:
        self._held_bytes += sum(map(len, frames))
        if self._holds_too_much:
            self._held_frames = None
        else:
            self._held_frames = [*(self._held_frames or ()), *frames]

    @property
    def _holds_too_much(self) -> bool:
        return self._held_bytes > self._service.settings.held_bytes_max


class SyncService(Endpoint[SyncConnection]):
    """
    Answers sync clients of all dialects.

    Args:
        log: Where events are stored and read.
        access_book: Who may do what.
        authenticator: Who is who.
        settings: Bounds, profiles and schemas.
        clock: What dates events and ends tokens and silences.
        reached: Waits until all records up to a seq were given to ``committed``: the dispatcher's.
        archive: Where records are that the log has dropped.

    Raises:
        InvalidSchema: A schema of the settings cannot be compiled.
    """

    takes_token_in_message = True

    def __init__(
        self,
        log: Log,
        access_book: AccessBook,
        authenticator: Authenticator,
        settings: SyncSettings,
        clock: Clock,
        *,
        reached: Callable[[int], Awaitable[None]],
        archive: Archive | None = None,
    ) -> None:
        super().__init__("/sync", clock, access_book)
        self._use(checked(settings))
        self.log = log
        self.reached = reached
        self.authenticator = authenticator
        self.pages = Pages(log, archive)
        self.hub = Hub()
        self.trees = TreeStates(self.pages, self.settings.tree_partitions_max)
        self.submitter = Submitter(log, self.pages, self.trees, self.hub, self.settings, clock)
        self._clients: dict[tuple[str, str], SyncConnection] = {}
        # Held by the sessions: what is under way counts until it is done, also for a client that is gone and comes back.
        self._loads: weakref.WeakValueDictionary[tuple[str, str], ClientLoad] = weakref.WeakValueDictionary()
        self._sharing: dict[tuple[str, str], dict[SyncConnection, None]] = {}

    def _use(self, settings: SyncSettings) -> None:
        self.settings = settings
        self.authentication_timeout_s = settings.connect_window_ms / 1000
        self.sweep_interval_s = settings.sweep_interval_ms / 1000
        self.unsent_bytes_max = settings.write_buffer_bytes_max
        self.connections_max = settings.connections_max

    # What the endpoint base calls

    def connect(self, transport: Transport, peer: Peer) -> SyncConnection:
        """A new connection."""
        return SyncConnection(self, transport)

    def deliver(self, records: Sequence[Record]) -> None:
        """Broadcast records, in order."""
        self.trees.committed(records)
        self.hub.committed(records, self.now_ms())

    def metrics(self) -> Iterable[tuple[str, str, float]]:
        """What ``/metrics`` shows of sync."""
        submitter, hub = self.submitter, self.hub
        yield "tidings_sync_connections", "Open connections of sync clients.", len(self.connections)
        yield "tidings_sync_subscriptions", "Partitions and projects that they subscribe to.", hub.subscription_count
        yield "tidings_sync_committed_total", "Submitted events that were committed.", submitter.committed_count
        yield "tidings_sync_rejected_total", "Submitted events that were rejected.", submitter.rejected_count
        yield "tidings_sync_deliveries_total", "Broadcasts delivered.", hub.deliveries
        yield "tidings_sync_frames_built_total", "Broadcast frames built, each for all who get it.", hub.frames_built
        yield "tidings_sync_slow_closed_total", "Clients closed because they did not read.", self.slow_count

    # What the node calls

    def check_settings(self, settings: SyncSettings) -> None:
        """
        Make sure that ``reload`` will take these settings.

        Raises:
            InvalidSchema: A schema of theirs cannot be compiled.
        """
        Profiles(settings)

    def reload(self, settings: SyncSettings) -> None:
        """
        Continue with other settings; connections stay. A new model version is told to those whom it concerns.

        Raises:
            SettingsError, InvalidSchema: They cannot be used; the earlier ones stay.
        """
        valid = checked(settings)
        self.submitter.reload(valid)
        old = self.settings.model_version
        self._use(valid)
        for connection in self.connections:
            connection.session.settings = valid
            if old != valid.model_version:
                connection.carry_out(connection.session.model_changed(old, valid.model_version, self.now_ms()))

    # What connections call

    def joined(self, connection: SyncConnection) -> None:
        """A connection became active."""
        session = connection.session
        assert session.dialect is not None
        key = session.client_key
        if session.dialect.is_one_per_client:
            older = self._clients.get(key)
            self._clients[key] = connection
            if older is not None and older is not connection:
                older.carry_out(older.session.close(CloseCode.REPLACED, "connected again"))
        session.load = self._loads.setdefault(key, session.load)
        self._sharing.setdefault(key, {})[connection] = None
        if session.subscriptions:
            self.hub.subscribe(connection, session.dialect.topic, session.subscriptions)

    def left(self, connection: SyncConnection) -> None:
        """A connection is over."""
        self.hub.remove(connection)
        key = connection.session.client_key
        sharing = self._sharing.get(key, {})
        if sharing.pop(connection, _MISSING) is None and not sharing:
            del self._sharing[key]
        if self._clients.get(key) is connection:
            del self._clients[key]

    def relieved(self, connection: SyncConnection) -> None:
        """A batch of a client is done: its other connections may have waited for that."""
        for other in list(self._sharing.get(connection.session.client_key, ())):
            if other is not connection:
                other.throttle()
