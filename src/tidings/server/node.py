"""
The node: everything put together, in one process.

    async with Node("./workspace", settings) as node:
        print(node.url)
        await node.stopped()

It opens the log, folds the access records, starts the bus on the same log, follows the log with one dispatcher (the access book
first, then the endpoints) and serves HTTP and WebSocket on one port. Stopping goes the other way round, within a deadline: not ready at
once, no new connections, connections and requests ended, the bus drained, the ledger closed, the log closed. Whatever was acknowledged is on disk before all
that, so a node that is killed instead loses nothing but time.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import os
import ssl
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, Final

from prometheus_client import CollectorRegistry

from tidings.access.administration import ACCESS_TOPIC
from tidings.access.apps import APPS_TOPIC, load_apps
from tidings.access.audit import AuditLog
from tidings.access.authentication import Authenticator
from tidings.access.book import load_book
from tidings.access.endpoint import Endpoint
from tidings.access.errors import AuthFailed
from tidings.access.guard import DosGuard
from tidings.access.resources import Action
from tidings.access.resources import node as whole_node
from tidings.access.tokens import TokenVerifier
from tidings.bus.eventbus import EventBus
from tidings.bus.store.files import FileGroupStore
from tidings.core.clock import SYSTEM_CLOCK, Clock
from tidings.core.errors import TidingsError
from tidings.core.settings import checked
from tidings.gateway.app_events import declaration_of
from tidings.gateway.event_types import EVENT_MANAGER, GRAPH_MANAGER
from tidings.gateway.gateway import Gateway
from tidings.ledger.ledger import Ledger
from tidings.ledger.retention import LedgerHolders
from tidings.log.dispatcher import Dispatcher
from tidings.log.embedded import open_log
from tidings.log.embedded.disk import Disk
from tidings.log.encryption import Encryptor
from tidings.log.interface import Log
from tidings.log.retention import RetentionPlan
from tidings.steward.service import open_ledger_service
from tidings.sync.service import SyncService

from .address import NodeAddress, forget_address, publish_address
from .api import routes
from .app_source import AppSource
from .application import application
from .configuration import ConfigManager
from .connections import Connections
from .delayed_rights import DelayedRights
from .errors import NodeNotStarted
from .events_socket import events_endpoint, gateway_timeout_s, report_gateway
from .graph_source import GraphSource
from .groups_endpoint import groups_endpoint
from .health import (
    ComponentSignal,
    HealthManager,
    Readiness,
    Reason,
    dispatcher_signal,
    durability_signal,
    log_signal,
    phase_signal,
    signal,
)
from .http import HttpServer, load_certificate, tls_context
from .monitoring import NO_KEYS, NodeCollector, NodeMetrics, banner, set_level, warnings
from .retention import NodeRetention, with_lake
from .services import Services
from .settings import NodeSettings, Reload
from .steward_socket import StewardSocket, fitted_to, happenings_endpoint, steward_socket_of

logger = logging.getLogger(__name__)

_AUDIT_FLUSH_S: Final = 2.0
"""How long a node that stops waits for audit records to be written."""

EndpointMaker = Callable[[Services], Endpoint[Any]]


class Node:
    """
    One node on one workspace.

    Args:
        workspace: The folder; the log is in ``.bus`` below it, and is made if it is not there.
        settings: Everything else.
        endpoints: What makes further endpoints, by path.
        clock, disk: Replaceable for tests; the machine's own if left out.
        encryptor: Seals the payloads of the spaces it protects.
        is_dev: Whether the workspace holds a token for the tools of this user; ``node.json`` says so.
    """

    def __init__(
        self,
        workspace: Path | str,
        settings: NodeSettings | None = None,
        *,
        endpoints: Mapping[str, EndpointMaker] | None = None,
        clock: Clock = SYSTEM_CLOCK,
        disk: Disk | None = None,
        encryptor: Encryptor | None = None,
        is_dev: bool = False,
    ) -> None:
        self.workspace = Path(workspace).absolute()
        self._settings = checked(settings or NodeSettings())
        self._more_endpoints = dict(endpoints or {})
        self._clock = clock
        self._disk = disk
        self._encryptor = encryptor
        self._is_dev = is_dev
        self._phase = "starting"
        self._parts: _Parts | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._is_stopping_now = asyncio.Event()
        self._stopped = asyncio.Event()

    # Life

    async def start(self) -> None:
        """
        Open everything and listen.

        Raises:
            WorkspaceError, StorageFull: The log cannot be opened.
            LedgerError: The ledger cannot be opened.
            AddressInUse, AddressUnusable, CertificateUnusable: The node cannot listen as the settings say.
            SettingsError: A setting cannot be used.
        """
        assert self._parts is None
        tls = tls_context(self.settings.server)
        async with contextlib.AsyncExitStack() as undo:
            log: Log = await open_log(
                self.workspace, self.settings.log, clock=self._clock, disk=self._disk, encryptor=self._encryptor
            )
            undo.push_async_callback(log.close)
            log = with_lake(log, self.settings.server.lake_path, clock=self._clock, encryptor=self._encryptor)
            parts = await self._put_together(log, undo)
            parts.tls = tls
            await parts.http.start(tls)
            undo.push_async_callback(parts.http.stop, 0.0)
            if parts.steward_socket is not None:
                await parts.steward_socket.start()
                undo.push_async_callback(parts.steward_socket.stop, 0.0)
            await asyncio.to_thread(publish_address, self.workspace, self._address(parts.http.port))
            undo.pop_all()
        self._parts = parts
        self._phase = "running"
        parts.services.gateway.listener_bound(True)
        parts.services.health.start()
        for line in self.banner():
            logger.info("%s", line)
        for line in warnings(self.settings):
            logger.warning("%s", line)

    async def _put_together(self, log: Log, undo: contextlib.AsyncExitStack) -> _Parts:
        """Make the parts, each on those before it."""
        settings, clock = self.settings, self._clock
        server = settings.server
        # Taken before the book is read: what is committed meanwhile comes again, and the book passes over it.
        since = log.position.seq
        book = await load_book(log, settings.access)
        apps = await load_apps(log, server.default_app, declaration_of)
        metrics = NodeMetrics(server.metrics_series_max)
        store = FileGroupStore(self.workspace, log, clock=clock, disk=self._disk, encryptor=self._encryptor)
        bus = EventBus(
            [metrics.handling],
            settings=settings.bus,
            log=log,
            store=store,
            clock=clock,
            encryptor=self._encryptor,
            authorise_delayed=DelayedRights(book),
        )
        await bus.start()
        undo.push_async_callback(bus.close, 0.0)
        dispatcher = Dispatcher(
            log,
            since=since,
            batch_count_max=server.dispatch_count_max,
            batch_bytes_max=server.dispatch_bytes_max,
            interval_s=lambda: self.settings.server.dispatch_interval_s,
        )
        undo.push_async_callback(dispatcher.close)
        audit = AuditLog(log, clock)
        undo.push_async_callback(audit.close, 0.0)
        dispatcher.add("access", book, decides_by=ACCESS_TOPIC)
        dispatcher.add("apps", apps, decides_by=APPS_TOPIC)
        dispatcher.add("audit", audit)
        verifier = TokenVerifier(settings.access.tokens, clock)
        book.trust(verifier.trusts)
        guard = DosGuard(settings.guard, clock, audit)
        authenticator = Authenticator(verifier, book, clock, is_open=settings.access.is_open, guard=guard)
        ledger_service = await open_ledger_service(
            log,
            self.workspace,
            settings=fitted_to(settings.ledger, settings.log),
            schedule=settings.schedule,
            watches=settings.watches,
            publish=bus.publish,
            catalogue=None if settings.ledger.catalogue_file is None else Path(settings.ledger.catalogue_file),
            steward=settings.steward,
            clock=clock,
            disk=self._disk,
        )
        undo.push_async_callback(ledger_service.close)
        health, config = HealthManager(clock, audit), ConfigManager(settings, audit)
        connections = Connections(server, clock, guard)
        gateway = Gateway(
            settings.event,
            clock=clock,
            book=book,
            apps=apps,
            audit=audit,
            guard=guard,
            committed_seq=lambda: log.position.seq,
            report_health=lambda *told: None if self._phase == "starting" else report_gateway(health, *told),
        )
        for manager in (audit, authenticator, config, connections, guard, health):
            gateway.hear(manager.announcer)
        of_apps = AppSource(apps, gateway.hear(apps.announcer))
        graph = GraphSource(
            gateway.intake.register(GRAPH_MANAGER), lambda: server.default_app, lambda: gateway.registry.is_heard
        )
        gateway.start()
        undo.push_async_callback(gateway.stop, 0.0)
        guard.on_directive.append(connections.carry_out)  # after the gateway, which closes its own in its own words
        dispatcher.add("graph", graph, on_failure=lambda _: gateway.fail("graph_source_failed"))
        dispatcher.add("app events", of_apps, on_failure=lambda _: gateway.fail("app_source_failed"))
        dispatcher.add("gateway", gateway, finish=gateway.finish)
        holders = LedgerHolders(ledger_service.ledger, bus.holders)
        retention = NodeRetention(
            log, holders, self.workspace, settings.log.retention, lake=server.lake_path, clock=clock
        )
        undo.push_async_callback(retention.stop)
        services = Services(
            log=log,
            bus=bus,
            book=book,
            verifier=verifier,
            dispatcher=dispatcher,
            settings=settings,
            clock=clock,
            ledger_service=ledger_service,
            audit=audit,
            guard=guard,
            apps=apps,
            authenticator=authenticator,
            health=health,
            config=config,
            gateway=gateway,
            retention=retention,
        )
        self._register_components(services)
        app = application(
            routes(services, settings.api),
            health=self.health,
            metrics=metrics,
            settings=lambda: self.settings.server,
            clock=clock,
            may_read_node=functools.partial(_require_reader, authenticator.without_open_access()),
            is_open=settings.access.is_open,
        )
        http = HttpServer(app, server, connections, clock)
        for path, make in {**_ENDPOINTS, **self._more_endpoints}.items():
            endpoint = make(services)
            connections.add_endpoint(path, endpoint)
            dispatcher.add(path, endpoint, on_failure=functools.partial(connections.fail_endpoint, path))
        dispatcher.add("sockets", connections)
        undo.push_async_callback(connections.stop, 0.0)
        steward_socket = steward_socket_of(services)
        metrics.node = NodeCollector(
            services,
            connections,
            http,
            readiness=self.health,
            series_max=server.metrics_series_max,
            more_endpoints=() if steward_socket is None else (steward_socket.endpoint,),
        )
        metrics.registry.register(metrics.node)
        dispatcher.start()
        connections.start()
        await ledger_service.start()
        retention.start(server.retention_interval_s)
        parts = _Parts(services, connections, http, steward_socket, metrics)
        self._add_owners(parts)
        return parts

    async def stop(self, deadline_s: float | None = None) -> None:
        """
        Stop in order, within about the deadline (the setting's, if left out). Stopping twice waits for the first one.
        """
        if self._parts is None:
            return
        if self._stopping is None:
            self._phase = "stopping"
            limit = self.settings.server.stop_deadline_s if deadline_s is None else deadline_s
            self._stopping = asyncio.get_running_loop().create_task(self._stop(self._parts, limit))
        await asyncio.shield(self._stopping)

    async def run_retention(self) -> RetentionPlan:
        """Apply the log's retention rules now, instead of at the next turn."""
        assert self._parts is not None
        return await self._parts.services.retention.run()

    def stop_now(self) -> None:
        """Wait for nobody any more: cut what is open, and close the log."""
        self._is_stopping_now.set()

    async def _stop(self, parts: _Parts, deadline_s: float) -> None:
        started = self._clock.monotonic()
        await parts.services.health.stop()

        def left() -> float:
            return max(0.0, deadline_s - (self._clock.monotonic() - started))

        delay = min(self.settings.server.drain_delay_s, deadline_s)
        logger.info(
            "stopping, within %g s: %d sockets, %d requests",
            deadline_s,
            len(parts.connections),
            parts.http.request_count,
        )
        if delay:
            await self._unless_stopping_now(self._clock.sleep(delay))
        parts.services.gateway.drain()
        parts.http.stop_listening()
        if parts.steward_socket is not None:
            parts.steward_socket.stop_listening()
        await self._unless_stopping_now(asyncio.gather(*parts.endings(left()), return_exceptions=True))
        if self._is_stopping_now.is_set():
            await asyncio.gather(*parts.endings(0.0), return_exceptions=True)
        services = parts.services
        await services.retention.stop()
        await services.gateway.stop(left())
        await services.audit.close(min(left(), _AUDIT_FLUSH_S))
        for name, ending in (
            ("what is done later", services.ledger_service.stop()),
            ("the bus", services.bus.close(0.0 if self._is_stopping_now.is_set() else left())),
            ("the ledger", services.ledger_service.close()),
            ("the dispatcher", services.dispatcher.close()),
            ("the log", services.log.close()),
        ):
            try:
                await ending
            except (TidingsError, OSError) as error:
                logger.error("%s was not closed in order: %s", name, error)
        await asyncio.to_thread(forget_address, self.workspace)
        self._phase = "stopped"
        logger.info("stopped after %.1f s", self._clock.monotonic() - started)
        self._stopped.set()

    async def _unless_stopping_now(self, work: Coroutine[Any, Any, object] | asyncio.Future[Any]) -> None:
        task = asyncio.ensure_future(work)
        order = asyncio.ensure_future(self._is_stopping_now.wait())
        await asyncio.wait({task, order}, return_when=asyncio.FIRST_COMPLETED)
        for each in (task, order):
            if not each.done():
                each.cancel()
        await asyncio.gather(task, order, return_exceptions=True)

    async def stopped(self) -> None:
        """Wait until the node has stopped."""
        await self._stopped.wait()

    async def __aenter__(self) -> Node:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    # Looking at it

    @property
    def settings(self) -> NodeSettings:
        """The settings in force."""
        return self._settings if self._parts is None else self._parts.services.config.settings

    @property
    def _started_parts(self) -> _Parts:
        if self._parts is None:
            raise NodeNotStarted
        return self._parts

    @property
    def services(self) -> Services:
        """The parts of the node; it must have been started."""
        return self._started_parts.services

    @property
    def connections(self) -> Connections:
        """The node's sockets; it must have been started."""
        return self._started_parts.connections

    @property
    def bus(self) -> EventBus:
        """The node's bus, for handlers in the same process."""
        return self.services.bus

    @property
    def ledger(self) -> Ledger:
        """The node's ledger, for plugins in the same process."""
        return self.services.ledger_service.ledger

    @property
    def log(self) -> Log:
        """The node's log."""
        return self.services.log

    @property
    def registry(self) -> CollectorRegistry:
        """The metrics that ``/metrics`` shows; a program may register its own collectors, which are called in a thread."""
        return self._started_parts.metrics.registry

    @property
    def url(self) -> str:
        """Where the node can be reached from this machine."""
        assert self._parts is not None
        return self._url(self._parts.http.port)

    def _address(self, port: int) -> NodeAddress:
        server = self.settings.server
        certificate = None if server.tls_cert_file is None else str(Path(server.tls_cert_file).absolute())
        steward = self.settings.steward.socket_path
        socket_path = None if steward is None else str(Path(steward).absolute())
        return NodeAddress(self._url(port), os.getpid(), server.unix_path, certificate, socket_path, self._is_dev)

    def _url(self, port: int) -> str:
        server = self.settings.server
        host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(server.host, server.host)
        scheme = "http" if server.tls_cert_file is None else "https"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    def banner(self) -> list[str]:
        """What the node says when it is up."""
        position = self.log.position
        return banner(
            self.settings,
            url=self.url,
            endpoints=self.connections.endpoints,
            workspace=str(self.workspace),
            seq=position.seq,
            epoch=position.epoch,
        )

    def health(self) -> Readiness:
        """Whether the node is ready to serve."""
        parts = self._parts
        if parts is None:
            return Readiness(False, (Reason("node.starting", "the node is starting"),))
        services = parts.services
        return services.health.readiness(seq=services.log.position.seq, dispatched_seq=services.dispatcher.seq)

    def _register_components(self, services: Services) -> None:
        """Say how each part is asked; the order is that of the reasons in ``/readyz``."""
        log, dispatcher, register = services.log, services.dispatcher, services.health.register

        def bus_problem() -> str | None:
            try:
                return services.bus.health().problem
            except TidingsError as error:  # a bus that is closed
                return str(error)

        def minor(name: str, code: str, problem: Callable[[], str | None], *, needs_log: bool = False) -> None:
            def ask() -> ComponentSignal:
                found = None if needs_log and not log.health().is_writable else problem()
                return signal(Reason(code, found) if found else None)

            register(name, is_critical=False, ask=ask)

        register("node", is_critical=True, ask=lambda: phase_signal(self._phase))
        register("log", is_critical=True, ask=lambda: log_signal(log.health()))
        register(
            "dispatcher",
            is_critical=True,
            ask=lambda: dispatcher_signal(
                lag=dispatcher.lag,
                lag_max=self.settings.server.dispatch_lag_max,
                problems=dispatcher.problems,
                has_stopped=dispatcher.problem is not None,
            ),
        )
        register(
            "keys",
            is_critical=True,
            ask=lambda: signal(
                None if self.settings.access.can_authenticate else Reason("access.no_keys", NO_KEYS), "failed"
            ),
        )
        register(
            "config",
            is_critical=True,
            ask=lambda: signal(
                None if services.config.problem is None else Reason("node.config_failed", services.config.problem),
                "failed",
            ),
        )
        register("durability", is_critical=False, ask=lambda: durability_signal(log.health()))
        minor("bus", "bus.stalled", bus_problem, needs_log=True)
        minor("ledger", "ledger.unavailable", lambda: services.ledger_service.problem, needs_log=True)
        minor("access", "access.closed", lambda: "; ".join(services.book.closed_by()))
        minor("apps", "apps.unreadable", lambda: "; ".join(services.apps.problems))
        register(EVENT_MANAGER, is_critical=True, timeout_s=gateway_timeout_s(services.settings.event))
        minor("audit", "access.audit_unavailable", lambda: services.audit.problem, needs_log=True)

    # Reloading

    def reload(self, settings: NodeSettings) -> Reload:
        """
        Change the settings that can be changed while the node runs.

        Returns:
            What was applied, and what needs a restart.

        Raises:
            SettingsError, CertificateUnusable, InvalidSchema, SettingsVetoed: The new settings cannot be used; nothing was changed.
        """
        return self.services.config.reload(settings)

    def _add_owners(self, parts: _Parts) -> None:
        """Say whom a change of the settings concerns, in the order in which they are asked."""
        services, endpoints = parts.services, parts.connections.endpoints
        add = services.config.add_owner
        sync_endpoints = [each for each in endpoints.values() if isinstance(each, SyncService)]

        def commit_server(old: NodeSettings, new: NodeSettings) -> None:
            if parts.tls is not None:
                load_certificate(parts.tls, new.server)
                logger.info("the certificate was read again")
            parts.connections.settings = new.server
            set_level(new.server)
            for line in warnings(new):
                logger.warning("%s", line)

        def commit_access(old: NodeSettings, new: NodeSettings) -> None:
            if new.access.tokens != old.access.tokens:
                services.verifier.reload(new.access.tokens)
                services.book.trust(services.verifier.trusts)
                for endpoint in endpoints.values():
                    endpoint.rights_changed()

        def prepare_sync(old: NodeSettings, new: NodeSettings) -> None:
            for endpoint in sync_endpoints:
                endpoint.check_settings(new.sync)

        def commit_sync(old: NodeSettings, new: NodeSettings) -> None:
            for endpoint in sync_endpoints:
                if new.sync != old.sync:
                    endpoint.reload(new.sync)

        def commit_event(old: NodeSettings, new: NodeSettings) -> None:
            if new.event != old.event:
                services.gateway.commit(new.event)
                services.health.expect(EVENT_MANAGER, gateway_timeout_s(new.event))

        def commit_guard(old: NodeSettings, new: NodeSettings) -> None:
            services.guard.settings = new.guard

        add("server", lambda _, new: _try(tls_context(new.server)), commit_server)
        add("access", lambda _, new: _try(TokenVerifier(new.access.tokens, self._clock)), commit_access)
        add("sync", prepare_sync, commit_sync)
        add("event", lambda _, new: services.gateway.prepare(new.event), commit_event)
        add("guard", lambda *_: None, commit_guard)


def _require_reader(authenticator: Authenticator, header: str | None) -> None:
    """Go on only with a token that may read the node. A probe that shows none has not failed to authenticate: it did not try."""
    if header is None:
        raise AuthFailed
    authenticator.of_header(header, path="/readyz").require(Action.READ, whole_node())


def _try(made: object) -> None:
    """Making it has shown that it can be made."""


def _sync_endpoint(services: Services) -> SyncService:
    return SyncService(
        services.log,
        services.book,
        services.authenticator.without_open_access(),
        services.settings.sync,
        services.clock,
        reached=services.dispatcher.reached,
    )


_ENDPOINTS: Final[dict[str, EndpointMaker]] = {
    "/sync": _sync_endpoint,
    "/groups": groups_endpoint,
    "/happenings": happenings_endpoint,
    "/events": events_endpoint,
}


@dataclasses.dataclass
class _Parts:
    """What a started node holds."""

    services: Services
    connections: Connections
    http: HttpServer
    steward_socket: StewardSocket | None
    metrics: NodeMetrics
    tls: ssl.SSLContext | None = None

    def endings(self, deadline_s: float) -> list[Coroutine[Any, Any, None]]:
        """What ends connections and requests, within the deadline."""
        more = [] if self.steward_socket is None else [self.steward_socket.stop(deadline_s)]
        return [self.connections.stop(deadline_s), self.http.stop(deadline_s), *more]
