"""
The sync door: connections come in, are told of commits in order, and leave; the log is the only truth.

``SyncService`` is a ``Door`` and a listener of the dispatcher. The dispatcher hands the records of a commit to the access book first,
so when ``committed`` is called the rights are those after these records: what a revocation took away ends before anything above
it is delivered.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Final

import msgspec

from tidings.access.book import AccessBook
from tidings.access.tokens import TokenVerifier
from tidings.core.clock import Clock
from tidings.core.settings import checked
from tidings.log.interface import Log
from tidings.log.record import Record
from tidings.wire.sync_frames import CloseCode
from tidings.wire.transport import Conversation, Transport, Upgrade

from .connection import Connection
from .hub import Hub
from .paging import Archive, Pages
from .requests import SessionState
from .rights import AccessGate
from .session import ClientLoad
from .settings import SyncSettings
from .submitting import Submitter
from .trees import TreeStates

__all__ = ["SyncService", "SyncStats"]

logger = logging.getLogger(__name__)

_NOT_THERE: Final = object()


class SyncStats(msgspec.Struct, frozen=True, kw_only=True):
    """What the door has done since it was opened."""

    connections: int
    subscriptions: int
    committed: int
    rejected: int
    deliveries: int
    frames_built: int
    slow_closed: int


class SyncService:
    """
    Answers sync clients of all dialects.

    Args:
        log: Where events are stored and read.
        access_book: Who may do what.
        verifier: Who is who.
        settings: Bounds, profiles and schemas.
        clock: What dates events and ends tokens and silences.
        reached: Waits until all records up to a seq were handed to ``committed``: the dispatcher's.
        archive: Where records went that the log has dropped.

    Raises:
        InvalidSchema: A schema of the settings cannot be compiled.
    """

    def __init__(
        self,
        log: Log,
        access_book: AccessBook,
        verifier: TokenVerifier,
        settings: SyncSettings,
        clock: Clock,
        *,
        reached: Callable[[int], Awaitable[None]],
        archive: Archive | None = None,
    ) -> None:
        self.log = log
        self.settings = checked(settings)
        self.clock = clock
        self.reached = reached
        self.gate = AccessGate(access_book, verifier)
        self.pages = Pages(log, archive)
        self.hub = Hub()
        self.trees = TreeStates(self.pages, self.settings.tree_partitions_max)
        self.submitter = Submitter(log, self.pages, self.trees, self.hub, self.settings, clock)
        self.slow_count = 0
        self.is_open = True
        self._connections: dict[Connection, None] = {}
        self._clients: dict[tuple[str, str], Connection] = {}
        # Held by the sessions: what is under way counts until it is done, also for a client that is gone and comes back.
        self._loads: weakref.WeakValueDictionary[tuple[str, str], ClientLoad] = weakref.WeakValueDictionary()
        self._sharing: dict[tuple[str, str], dict[Connection, None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._sweeper: asyncio.Task[None] | None = None
        self._gate_seq = self.gate.seq

    # Door

    def open(self, transport: Transport, upgrade: Upgrade) -> Conversation:
        """Begin a conversation; when the door is shut or full, one that ends at once."""
        connection = Connection(self, transport, self.clock.monotonic())
        if not self.is_open:
            connection.carry_out(connection.session.close(CloseCode.RESTART, "stopping"))
        elif len(self._connections) >= self.settings.connections_max:
            connection.carry_out(connection.session.close(CloseCode.TRY_AGAIN_LATER, "too many connections"))
        else:
            self._connections[connection] = None
            if self._sweeper is None:
                self._sweeper = asyncio.get_running_loop().create_task(self._sweep(), name="tidings-sync-sweeper")
        return connection

    async def shut(self, deadline_s: float) -> None:
        """Take no more conversations; let what is under way finish within the deadline, then end the others."""
        self.is_open = False
        for connection in self._connections:
            connection.stop_reading()
        if self._tasks:
            deadline = asyncio.ensure_future(self.clock.sleep(deadline_s))
            tasks: set[asyncio.Future[None]] = set(self._tasks)
            finished = asyncio.ensure_future(asyncio.wait(tasks))
            await asyncio.wait({deadline, finished}, return_when=asyncio.FIRST_COMPLETED)
            deadline.cancel()
            finished.cancel()
            await asyncio.gather(deadline, finished, return_exceptions=True)
        self._end_all(lambda connection: connection.session.stopping(self.now_ms()))
        left = [*self._tasks, *([] if self._sweeper is None else [self._sweeper])]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    # Listener

    def committed(self, records: Sequence[Record]) -> None:
        """These records are durable; the access book knows them already."""
        if self.gate.seq != self._gate_seq:
            self._gate_seq = self.gate.seq
            self._check_rights()
        self.trees.committed(records)
        self.hub.committed(records, self.now_ms())

    def failed(self, problem: str) -> None:
        """The dispatcher tells us nothing any more: whoever stays would wait for broadcasts in vain."""
        logger.error("the sync door ends its conversations: %s", problem)
        self._end_all(lambda connection: connection.session.server_error("commits cannot be followed", self.now_ms()))

    def rights_changed(self) -> None:
        """Keys came or went: who stands on one that is gone is sent away."""
        self._check_rights()

    def _check_rights(self) -> None:
        now_ms = self.now_ms()
        for connection in list(self._connections):
            session = connection.session
            heard = session.subscriptions
            effects = session.rights_changed(now_ms)
            if session.state is SessionState.ACTIVE and session.dialect is not None and session.subscriptions != heard:
                self.hub.subscribe(connection, session.dialect.topic, session.subscriptions)
            connection.carry_out(effects)

    # Reload

    def reload(self, settings: SyncSettings) -> None:
        """
        Go on with other settings; connections stay. A new model version is told to those whom it concerns.

        Raises:
            SettingsError, InvalidSchema: They cannot be used; the earlier ones stay.
        """
        new = checked(settings)
        self.submitter.reload(new)
        old, self.settings = self.settings.model_version, new
        for connection in list(self._connections):
            connection.session.settings = new
            if old != new.model_version:
                connection.carry_out(connection.session.model_changed(old, new.model_version, self.now_ms()))

    @property
    def stats(self) -> SyncStats:
        """What the door has done."""
        return SyncStats(
            connections=len(self._connections),
            subscriptions=self.hub.subscription_count,
            committed=self.submitter.committed_count,
            rejected=self.submitter.rejected_count,
            deliveries=self.hub.deliveries,
            frames_built=self.hub.frames_built,
            slow_closed=self.slow_count,
        )

    # What connections call

    def now_ms(self) -> int:
        """Milliseconds since 1970."""
        return self.clock.now_ns() // 1_000_000

    def joined(self, connection: Connection) -> None:
        """A connection became active."""
        session = connection.session
        assert session.dialect is not None
        if session.dialect.is_one_per_client:
            older = self._clients.get(session.client_key)
            self._clients[session.client_key] = connection
            if older is not None and older is not connection:
                older.carry_out(older.session.close(CloseCode.REPLACED, "connected again"))
        key = session.client_key
        session.load = self._loads.setdefault(key, session.load)
        self._sharing.setdefault(key, {})[connection] = None
        if session.subscriptions:
            self.hub.subscribe(connection, session.dialect.topic, session.subscriptions)

    def ended(self, connection: Connection) -> None:
        """A connection is over; called as often as anybody notices."""
        self._connections.pop(connection, None)
        self.hub.remove(connection)
        connection.forget_requests()
        key = connection.session.client_key
        sharing = self._sharing.get(key, {})
        if sharing.pop(connection, _NOT_THERE) is None and not sharing:
            del self._sharing[key]
        if self._clients.get(key) is connection:
            del self._clients[key]

    def relieved(self, connection: Connection) -> None:
        """Something of a client is done: its other connections may have waited for that."""
        for other in list(self._sharing.get(connection.session.client_key, ())):
            if other is not connection:
                other.look_again()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Do a connection's work; what fails is the connection's to handle."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _sweep(self) -> None:
        """Look for silence and expiry: one task for all connections, and none while there are none."""
        while self._connections:
            await self.clock.sleep(self.settings.sweep_interval_ms / 1000)
            now_ms, now_s = self.now_ms(), self.clock.monotonic()
            for connection in list(self._connections):
                silent_ms = 0.0 if connection.is_waiting_for_us else (now_s - connection.heard_s) * 1000
                effects = connection.session.tick(now_ms, silent_ms)
                if effects:
                    connection.carry_out(effects)
        self._sweeper = None

    def _end_all(self, end: Callable[[Connection], Sequence[Any]]) -> None:
        for connection in list(self._connections):
            connection.carry_out(end(connection))
