"""The life of a bus: made, started, run until a signal, closed; on a log of its own or through a node."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import functools
import random
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from threading import get_ident
from typing import Self

from tidings.core.clock import SYSTEM_CLOCK, Clock
from tidings.core.errors import SettingsError
from tidings.core.settings import checked
from tidings.core.tasks import cancel_and_wait
from tidings.log.encryption import Encryptor
from tidings.log.interface import Health, Log
from tidings.log.retention import RecordHolders
from tidings.log.settings import LogSettings

from .admin import GroupAdmin
from .delayed_records import AuthoriseDelayed
from .errors import BusClosed, NotThroughNode, OtherEventLoop
from .joining import NodeClient, check_joinable, join_groups
from .middleware import FeatureFlags, MetricsMiddleware, Middleware, MiddlewareChain
from .running import RunningBus
from .settings import BusSettings, check_timeout
from .store import GroupStore
from .store.files import open_files
from .subscription import SubscriptionRegistry


class EventBusState(enum.StrEnum):
    """Whether the bus takes events."""

    STOPPED = "stopped"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"


class BusLife:
    """
    A bus from start to end: its log and store while it runs, and the node that it works through instead.

    The arguments are those of ``EventBus``.
    """

    def __init__(
        self,
        middlewares: Sequence[Middleware] | Path | str = (),
        *,
        workspace: Path | str = "./workspace",
        settings: BusSettings | None = None,
        log_settings: LogSettings | None = None,
        registry: SubscriptionRegistry | None = None,
        log: Log | None = None,
        store: GroupStore | None = None,
        open_log: Callable[[], Awaitable[tuple[Log, GroupStore]]] | None = None,
        clock: Clock = SYSTEM_CLOCK,
        rng: random.Random | None = None,
        encryptor: Encryptor | None = None,
        flags: FeatureFlags | None = None,
        offsets_key: bytes | None = None,
        authorise_delayed: AuthoriseDelayed | None = None,
    ) -> None:
        if not isinstance(middlewares, Path | Sequence):
            problem = f"must be a workspace's path or a list of middlewares, not {type(middlewares).__name__}"
            raise SettingsError("middlewares", problem)
        if isinstance(middlewares, Path | str):
            workspace = middlewares
            middlewares = ()
        if not isinstance(workspace, Path | str):
            raise SettingsError("workspace", f"must be a path, not {type(workspace).__name__}")
        for name, given, kind in (("settings", settings, BusSettings), ("log_settings", log_settings, LogSettings)):
            if not isinstance(given, kind | None):
                raise SettingsError(name, f"must be {kind.__name__}, not {type(given).__name__}")
        self._settings = checked(settings or BusSettings())
        self._registry = registry or SubscriptionRegistry()
        self._chain = MiddlewareChain(middlewares, flags)
        self._metrics = [member for member in middlewares if isinstance(member, MetricsMiddleware)]
        self._clock = clock
        self._rng = rng or random.Random()
        self._encryptor = encryptor
        self._authorise_delayed = authorise_delayed
        if store is not None and log is None:
            raise SettingsError("store", "is given without the log that it belongs to")
        self._given_log = log
        self._given_store = store
        self.workspace = Path(workspace).absolute()
        """Where the log is, unless ``log`` or ``open_log`` was given."""
        self._has_files = log is None and open_log is None
        self._open_files = functools.partial(
            open_files,
            self.workspace,
            log_settings,
            log=log,
            clock=clock,
            encryptor=encryptor,
            offsets_key=offsets_key,
        )
        self._open_log = open_log or self._open_files
        self._running: RunningBus | None = None
        self._client: NodeClient | None = None
        """The node that it works through instead."""
        self._loop: asyncio.AbstractEventLoop | None = None
        """The event loop that it runs in, while it runs."""
        self._thread_id = 0
        """The thread that the loop runs in."""
        self._starting: asyncio.Lock | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._is_closed = False
        """Closed by somebody, not only never started."""
        self._run_ended: asyncio.Event | None = None
        """Ends ``run``."""
        self._published_before = 0
        """In earlier runs."""
        self.state = EventBusState.STOPPED

    # Starting and closing

    async def start(self) -> None:
        """
        Open the log and start all subscriptions; on a bus that runs, those that were added since.

        Starting twice is fine, and so is starting again after closing.

        Raises:
            OtherEventLoop: It runs in another event loop, or was not closed in one that has ended.
        """
        self._check_loop()
        if self.state is EventBusState.RUNNING:
            await self._started_now.start_added()
            return
        if self.state is EventBusState.STOPPING:
            raise BusClosed
        if self._starting is None:
            self._starting = asyncio.Lock()
        async with self._starting:
            if self._running is not None:
                return
            self.state = EventBusState.STARTING
            try:
                log, store = self._given_log, self._given_store
                if log is None or store is None:
                    log, store = await self._open_log()
            except BaseException:
                self.state = EventBusState.STOPPED
                raise
            self._is_closed = False
            self._loop = asyncio.get_running_loop()
            self._thread_id = get_ident()
            self._running = RunningBus(
                log,
                store,
                settings=self._settings,
                chain=self._chain,
                metrics=self._metrics,
                registry=self._registry,
                clock=self._clock,
                rng=self._rng,
                encryptor=self._encryptor,
                authorise_delayed=self._authorise_delayed,
            )
            self.state = EventBusState.RUNNING
            try:
                await self._running.delayed.open()
                for subscription in self._registry.list():
                    await self._running.start_group(subscription)
            except BaseException:
                await self.close()  # all of them or none: a group left out would not be missed for a long time
                raise

    async def run(self, through: NodeClient | None = None) -> None:
        """
        Start, handle events until SIGINT or SIGTERM, and close: the whole life of a worker process.

        With ``through``, a ``Client``, the workspace is not opened: subscriptions become members of the node's groups, which any number
        of processes share, and ``publish``, ``publish_many`` and ``cancel_delayed`` go to the node. Filters, middlewares, ``key_of`` and
        batches are not offered there.

        Handlers that are at work may finish (``close_timeout_s``). A second signal ends the process at once, as usual. It also
        ends, and closes the bus, when its task is cancelled; and it returns when somebody else has closed the bus.

        Raises:
            SettingsError: A subscription asks for something that a node does not offer.
            RemoteStopped: The node does not want us, and will not.
        """
        if through is None:
            await self.start()
        else:
            await self._join(through)
        if self._run_ended is None or self._run_ended.is_set():
            self._run_ended = asyncio.Event()
        ended = self._run_ended  # one signal ends all calls of ``run``
        loop, caught = asyncio.get_running_loop(), []
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                loop.add_signal_handler(number, ended.set)
            except (NotImplementedError, RuntimeError, ValueError):  # Windows, or not the main thread
                continue
            caught.append(number)
        try:
            await self._until(ended)
        finally:
            for number in caught:
                loop.remove_signal_handler(number)
            await self.close()

    async def _join(self, client: NodeClient) -> None:
        self._check_loop()
        if self.state is not EventBusState.STOPPED:
            raise SettingsError("through", "the bus runs already, on its own log")
        check_joinable(self._registry.list(), has_middlewares=bool(self._chain.middlewares))
        self._is_closed = False
        self._client = client
        try:
            await client.start()
            await join_groups(client, self._registry.list())
        except BaseException:
            await self.close()
            raise

    async def _until(self, ended: asyncio.Event) -> None:
        if self._client is None:
            await ended.wait()
            return
        waits = [asyncio.ensure_future(each) for each in (ended.wait(), self._client.stopped())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if waits[1].done():
                await waits[1]
        finally:
            await cancel_and_wait(*waits)

    async def drain(self, timeout_s: float = 10.0) -> None:
        """
        Wait until every group that runs here has handled all events committed before the call: acknowledged them, or
        dead-lettered them after their retries; and has tried the dead letters that it was asked to try again. For tests, mostly.

        Raises:
            DrainTimeout: Some had not within the time; it says which, and how many events they lack.
            BusClosed: The bus was closed.
        """
        check_timeout(timeout_s, is_optional=False)
        running = await self._started()
        await running.start_added()
        await running.drain(timeout_s)

    async def close(self, timeout_s: float | None = None) -> None:
        """
        Stop: publish nothing more, let handlers that are at work finish within the time, store the cursors.

        What is not acknowledged is delivered again when the group is next subscribed. Closing twice is fine.
        """
        check_timeout(timeout_s)
        self._check_loop()
        if self._run_ended is not None:
            self._run_ended.set()
        if self.state is EventBusState.STARTING and self._starting is not None:
            async with self._starting:  # what is being opened is closed once it is open
                pass
        self._is_closed = True
        if self._client is not None:
            client, self._client = self._client, None
            await client.close(self._settings.close_timeout_s if timeout_s is None else timeout_s)
        if self._running is not None and self.state is EventBusState.RUNNING:
            self.state = EventBusState.STOPPING
            self._running.publishing.close()
            limit_s = self._settings.close_timeout_s if timeout_s is None else timeout_s
            self._stopping = asyncio.create_task(self._stop(self._running, limit_s), name="bus closing")
        if self._stopping is not None:
            # A caller that gives up waiting leaves it going: a bus closed by half could be neither used nor closed again.
            await asyncio.shield(self._stopping)

    async def _stop(self, running: RunningBus, timeout_s: float) -> None:
        try:
            await running.stop(timeout_s)
        finally:
            self._running = self._loop = None
            self._published_before += running.publishing.count
            try:
                if self._given_log is None:
                    await running.log.close()
            finally:
                self.state = EventBusState.STOPPED
                self._stopping = None

    @contextlib.contextmanager
    def moved(
        self, open_log: Callable[..., Awaitable[tuple[Log, GroupStore]]], clock: Clock, rng: random.Random
    ) -> Iterator[None]:
        """
        For tests of programs that have a bus of their own: as long as this lasts, it runs with another log, clock and chance.

        ``open_log`` is called with what ``store.files.open_files`` would be. At the end, what was subscribed meanwhile is forgotten,
        and a bus that still runs is let go as it is, and may be started again: its event loop has ended, or is about to.

        Raises:
            SettingsError: It runs, or was made with a log of its own.
        """
        if not self._has_files or self.state is not EventBusState.STOPPED:
            problem = "runs already" if self._has_files else "was made with a log of its own"
            raise SettingsError("bus", f"cannot be moved: it {problem}")
        before = self._open_log, self._clock, self._rng
        subscriptions_before = self._registry.list()
        arguments = self._open_files
        self._open_log = functools.partial(open_log, *arguments.args, **{**arguments.keywords, "clock": clock})
        self._clock, self._rng, self._is_closed = clock, rng, False
        try:
            yield
        finally:
            self._open_log, self._clock, self._rng = before
            for subscription in self._registry.list():
                if subscription.group_state is not None:
                    subscription.group_state.is_closing = True  # its workers are not missed when their loop ends
                    subscription.group_state = None
                if subscription not in subscriptions_before:
                    self._registry.remove(subscription.subscription_id)
            self._running = self._loop = self._starting = self._stopping = self._run_ended = None
            self._is_closed, self.state = False, EventBusState.STOPPED

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def _check_loop(self) -> None:
        # What ``get_running_loop`` would tell; that asks the system for the process's id each time.
        if self._loop is not None and (get_ident() != self._thread_id or not self._loop.is_running()):
            raise OtherEventLoop

    async def _started(self) -> RunningBus:
        self._check_loop()
        if self._running is None or self.state is not EventBusState.RUNNING:
            if self._client is not None:
                raise NotThroughNode(self._client.url)
            if self._is_closed:
                raise BusClosed  # only ``start`` opens it again: a late publisher must not
            await self.start()
        return self._started_now

    @property
    def _started_now(self) -> RunningBus:
        if self._running is None:
            raise BusClosed
        return self._running

    @property
    def log(self) -> Log:
        """The log that the bus runs on; the bus must have been started."""
        return self._started_now.log

    @property
    def store(self) -> GroupStore:
        """Where its groups are stored; the bus must have been started."""
        return self._started_now.store

    @property
    def admin(self) -> GroupAdmin:
        """Operations on its groups and dead letters; the bus must have been started."""
        return self._started_now.admin

    @property
    def holders(self) -> RecordHolders:
        """Who needs records of the log, for ``Log.drop``; the bus must have been started."""
        return self._started_now.cursors

    @property
    def published_count(self) -> int:
        """How many events were published through this bus."""
        return self._published_before + (0 if self._running is None else self._running.publishing.count)

    @property
    def delayed_count(self) -> int:
        """How many events wait for their time; the bus must have been started."""
        return len(self._started_now.delayed)

    def health(self) -> Health:
        """Whether events can be published, and whether they reach their groups: ``problem`` names one that has stopped."""
        return self._started_now.health()
