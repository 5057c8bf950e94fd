"""
What operators see of a node: metrics, log lines, and the lines that it prints at start-up.

For ``/metrics`` most values are read from the parts at the time of the scrape, so counting
costs the hot path nothing; labels come from settings, routes and code, or are bounded by ``server.metrics_series_max``: what is beyond the
bound is counted under ``_other``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, Final

import orjson
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from tidings import __version__
from tidings.bus.errors import BusError
from tidings.bus.middleware import MetricsMiddleware, Middleware
from tidings.bus.middleware.telemetry import OTHER
from tidings.core.clock import format_utc
from tidings.gateway.telemetry import LATENCY_BUCKETS_S, LatencyHistogram

from .edge import REQUEST_ID, legible
from .health import Readiness
from .settings import NodeSettings, ServerSettings

if TYPE_CHECKING:
    from tidings.access.endpoint import Endpoint

    from .connections import Connections
    from .http import HttpServer
    from .services import Services

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SAMPLES_AT_ONCE: Final = 100
"""After a family with more samples than this, other work on the loop has a turn."""
_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class HandlingMetrics(MetricsMiddleware):
    """
    The bus's own metrics without its publish hook.

    The hook would have every publish go through the middleware chain, one by one; what it counts, the log knows by topic.
    """

    # The chain calls only what a middleware has overridden.
    after_publish = Middleware.after_publish  # type: ignore[assignment]  # narrower there: it waits for nothing

    def families(self, topics: Iterable[Any], groups: Iterable[Any]) -> Iterator[Metric]:
        for family in super().families(topics, groups):
            if not family.name.startswith("events_publish_"):
                yield family


class NodeMetrics:
    """The registry of one node, and what is counted as it happens."""

    def __init__(self, series_max: int) -> None:
        self.registry = CollectorRegistry()
        self.handling = HandlingMetrics(registry=self.registry, series_count_max=series_max)
        self._requests = Counter(
            "tidings_http_requests",
            "HTTP requests answered; route is the pattern, not the path.",
            ["method", "route", "status"],
            registry=self.registry,
        )
        self._seconds = Histogram(
            "tidings_http_request_seconds",
            "Time to answer an HTTP request.",
            ["route"],
            registry=self.registry,
            buckets=_BUCKETS_S,
        )
        self._series: dict[tuple[str, str, int], tuple[Counter, Histogram]] = {}
        """Both of a kind of request: finding them by their labels takes longer than counting."""
        self.node: NodeCollector | None = None
        """The collector that must be read on the loop."""
        self._rendering: asyncio.Task[bytes] | None = None
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)

    def observed(self, method: str, route: str, status: int, seconds: float) -> None:
        """A request was answered. There are no more methods, routes and statuses than the node itself has."""
        series = self._series.get((method, route, status))
        if series is None:
            series = self._requests.labels(method, route, str(status)), self._seconds.labels(route)
            self._series[method, route, status] = series
        series[0].inc()
        series[1].observe(seconds)

    async def text(self) -> bytes:
        """
        Return everything in Prometheus' text format. Scrapes at the same time share one text.

        The node's own values are read on the loop, with other work between the families. All others are read in a thread, where the text is made.
        """
        if self._rendering is None:
            self._rendering = asyncio.get_running_loop().create_task(self._render(), name="tidings-metrics")
            self._rendering.add_done_callback(self._rendered)
        return await asyncio.shield(self._rendering)

    async def _render(self) -> bytes:
        if self.node is not None:
            await self.node.prepare()
        try:
            return await asyncio.to_thread(generate_latest, self.registry)
        finally:
            if self.node is not None:
                self.node.forget()

    def _rendered(self, task: asyncio.Task[bytes]) -> None:
        self._rendering = None


class NodeCollector(Collector):
    """Asks the parts of a node when it is scraped."""

    def __init__(
        self,
        services: Services,
        connections: Connections,
        http: HttpServer,
        *,
        readiness: Callable[[], Readiness],
        series_max: int,
        more_endpoints: Sequence[Endpoint[Any]] = (),
    ) -> None:
        self._log = services.log
        self._bus = services.bus
        self._dispatcher = services.dispatcher
        self._book = services.book
        self._connections = connections
        self._http = http
        self._readiness = readiness
        self._series_max = series_max
        self._ledger_service = services.ledger_service
        self._services = services
        self._more_endpoints = more_endpoints
        self._prepared: list[Metric] | None = None

    async def prepare(self) -> None:
        """Read the values, for ``collect`` in a thread."""
        families: list[Metric] = []
        for family in self._read():
            families.append(family)
            if len(family.samples) > _SAMPLES_AT_ONCE:
                await asyncio.sleep(0)
        self._prepared = families

    def forget(self) -> None:
        """Forget the values of ``prepare``."""
        self._prepared = None

    def collect(self) -> Iterable[Metric]:
        """Return the values of ``prepare``, or those of now: then it must be called on the loop."""
        return self._read() if self._prepared is None else self._prepared

    def _read(self) -> Iterator[Metric]:
        yield from self._about_node()
        yield from self._about_log()
        yield from self._about_groups()
        yield from self._about_connections()
        yield from self._about_gateway()
        yield from self._about_managers()
        yield _gauge("tidings_access_seq", "The seq of the last access record applied.", self._book.seq)
        yield _gauge("tidings_access_problems", "Access records that could not be applied.", len(self._book.problems))
        happenings = self._ledger_service.ledger.happenings
        yield _gauge("tidings_ledger_seq", "The seq of the newest happening.", happenings.last_seq)
        yield _gauge(
            "tidings_ledger_subscribers", "Subscribers to happenings, here and elsewhere.", happenings.receiver_count
        )
        yield _counter(
            "tidings_ledger_missed", "Happenings that subscribers were too slow for.", happenings.missed_count
        )
        yield _gauge(
            "tidings_ledger_plugins", "Plugins that are loaded.", len(self._ledger_service.ledger.plugins.loaded)
        )
        yield _gauge(
            "tidings_appointments_firing",
            "Appointments whose action is under way.",
            self._ledger_service.appointments.firing_count,
        )
        for endpoint in (*self._connections.endpoints.values(), *self._more_endpoints):
            for name, text, value in endpoint.metrics():
                if name.endswith("_total"):
                    yield _counter(name.removesuffix("_total"), text, value)
                else:
                    yield _gauge(name, text, value)

    def _about_node(self) -> Iterator[Metric]:
        info = GaugeMetricFamily("tidings_node_info", "Always 1; the label is the version.", labels=["version"])
        info.add_metric([__version__], 1)
        yield info
        yield _gauge("tidings_node_ready", "1 while the node is ready.", float(self._readiness().is_ready))

    def _about_log(self) -> Iterator[Metric]:
        health, seq = self._log.health(), self._log.position.seq
        yield _gauge("tidings_log_seq", "The seq of the last record committed.", seq)
        yield _gauge("tidings_log_writable", "1 while the log takes events.", float(health.is_writable))
        yield _gauge(
            "tidings_log_durable", "1 if events are on disk before they are acknowledged.", float(health.is_durable)
        )
        yield _gauge("tidings_log_storage_full", "1 while there is no room for events.", float(health.is_storage_full))
        yield _gauge(
            "tidings_dispatcher_seq", "The seq of the last record given to the endpoints.", self._dispatcher.seq
        )
        yield _gauge(
            "tidings_dispatcher_lag", "Committed records not delivered to the endpoints yet.", self._dispatcher.lag
        )
        yield _gauge("tidings_dispatcher_problems", "Listeners that failed.", len(self._dispatcher.problems))
        records = CounterMetricFamily("tidings_log_records", "Records ever committed.", labels=["topic"])
        sizes = GaugeMetricFamily("tidings_log_bytes", "Size of what is kept.", labels=["topic"])
        rest_count = rest_bytes = 0
        topics = self._log.topics()
        for number, (name, info) in enumerate(topics.items()):
            if number < self._series_max:
                records.add_metric([name], info.next_offset)
                sizes.add_metric([name], info.size_bytes)
            else:
                rest_count += info.next_offset
                rest_bytes += info.size_bytes
        if len(topics) > self._series_max:
            records.add_metric([OTHER], rest_count)
            sizes.add_metric([OTHER], rest_bytes)
        yield records
        yield sizes

    def _about_groups(self) -> Iterator[Metric]:
        subscriptions = self._bus.get_subscriptions()
        yield _gauge("tidings_bus_subscriptions", "Groups with a live subscription.", len(subscriptions))
        yield _counter("tidings_bus_published", "Events published through the bus.", self._bus.published_count)
        yield _gauge("tidings_bus_delayed_events", "Events that wait for their time.", self._bus.delayed_count)
        lags = GaugeMetricFamily("tidings_bus_group_lag", "Events not acknowledged yet.", labels=["topic", "group"])
        stalled = GaugeMetricFamily(
            "tidings_bus_group_stalled",
            "1 while publishers do not wait for a group because no event left its full window.",
            labels=["topic", "group"],
        )
        for subscription in subscriptions[: self._series_max]:
            try:
                lag = self._bus.lag(subscription.topic, subscription.group)
            except BusError:
                continue  # it ended just now
            lags.add_metric([subscription.topic, subscription.group], lag)
            group = subscription.group_state
            stalled.add_metric([subscription.topic, subscription.group], float(group is not None and group.is_stalled))
        yield lags
        yield stalled

    def _about_connections(self) -> Iterator[Metric]:
        connections = self._connections
        per_endpoint = GaugeMetricFamily("tidings_connections", "Open sockets.", labels=["endpoint"])
        for path, count in connections.counts().items():
            per_endpoint.add_metric([path], count)
        yield per_endpoint
        yield _counter("tidings_connections_opened", "Sockets ever opened.", connections.opened_count)
        refused = CounterMetricFamily(
            "tidings_connections_refused", "Sockets refused, by the error's code.", labels=["code"]
        )
        for code, count in connections.refused.items():
            refused.add_metric([code], count)
        yield refused
        closed = CounterMetricFamily(
            "tidings_connections_closed",
            "Sockets that ended: normal, abnormal, error, or private for codes from 4000 on.",
            labels=["kind"],
        )
        for kind, count in connections.closed.items():
            closed.add_metric([kind], count)
        yield closed
        messages = CounterMetricFamily("tidings_socket_messages", "Messages over sockets.", labels=["direction"])
        messages.add_metric(["in"], connections.messages_in)
        messages.add_metric(["out"], connections.messages_out)
        yield messages
        sizes = CounterMetricFamily("tidings_socket_bytes", "Bytes over sockets.", labels=["direction"])
        sizes.add_metric(["in"], connections.bytes_in)
        sizes.add_metric(["out"], connections.bytes_out)
        yield sizes
        memory = GaugeMetricFamily(
            "tidings_memory_held_bytes",
            "Memory that clients make the node hold: clients with an identity, and those without one.",
            labels=["clients"],
        )
        for clients, is_authenticated in (("identified", True), ("unauthenticated", False)):
            memory.add_metric([clients], connections.memory.held_bytes(is_authenticated=is_authenticated))
        yield memory
        refused_memory = CounterMetricFamily(
            "tidings_memory_refused", "Memory that clients were refused, by the limit.", labels=["scope"]
        )
        for scope, count in connections.memory.refused.items():
            refused_memory.add_metric([scope], count)
        yield refused_memory
        yield _gauge("tidings_http_connections", "HTTP connections open.", self._http.connection_count)
        yield _gauge("tidings_http_requests_in_progress", "HTTP requests being answered.", self._http.request_count)
        refused_requests = CounterMetricFamily(
            "tidings_http_refused", "HTTP requests refused before any route was asked.", labels=["code"]
        )
        for code, count in self._http.refused.items():
            refused_requests.add_metric([code], count)
        yield refused_requests

    def _about_gateway(self) -> Iterator[Metric]:
        gateway = self._services.gateway
        telemetry, state = gateway.telemetry, gateway.pipeline_state()
        yield _gauge("tidings_gateway_ready", "1 while the gateway is ready.", float(not state.reasons))
        yield _gauge("tidings_gateway_connections", "Subscribers to events.", state.connections)
        yield _gauge("tidings_gateway_queued", "Events between intake and acknowledgement.", state.total_queued)
        depths = GaugeMetricFamily("tidings_gateway_queue_depth", "Envelopes that wait.", labels=["class"])
        for event_class, depth in state.queue_depths.items():
            depths.add_metric([event_class], depth)
        yield depths
        for name, text, counts in (
            ("produced", "Envelopes made; of commits none while nobody can get them.", telemetry.produced_by_class),
            ("delivered", "Envelopes handed to transports, one for each subscriber.", telemetry.delivered_by_class),
        ):
            family = CounterMetricFamily(f"tidings_gateway_{name}", text, labels=["class"])
            for event_class, count in counts.items():
                family.add_metric([event_class], count)
            yield family
        dropped = CounterMetricFamily("tidings_gateway_dropped", "Envelopes not delivered.", labels=["class", "reason"])
        for (event_class, reason), count in telemetry.dropped_by.items():
            dropped.add_metric([event_class, reason], count)
        yield dropped
        failures = CounterMetricFamily(
            "tidings_gateway_failures", "Subscriptions refused, or ended by the node.", labels=["reason"]
        )
        for reason, count in telemetry.failures.items():
            failures.add_metric([reason], count)
        yield failures
        rejected = CounterMetricFamily(
            "tidings_gateway_rejected_descriptors",
            "What managers handed in and was refused.",
            labels=["source", "reason"],
        )
        for (source, reason), count in telemetry.rejected_descriptors.items():
            rejected.add_metric([source, reason], count)
        yield rejected
        yield _counter("tidings_gateway_opened", "Subscriptions opened.", telemetry.opened_count)
        yield _counter(
            "tidings_gateway_resumed", "Subscriptions that went on where others had ended.", telemetry.resumed_count
        )
        yield _counter(
            "tidings_gateway_heartbeat_failures", "Subscribers that answered no ping.", telemetry.heartbeat_failures
        )
        yield _counter("tidings_gateway_send_failures", "Sends that a transport did not take.", telemetry.send_failures)
        yield _histogram("tidings_gateway_ack_seconds", "From sending to acknowledgement.", telemetry.ack_latency)
        yield _histogram("tidings_gateway_delivery_seconds", "From commit to sending.", telemetry.delivery_latency)

    def _about_managers(self) -> Iterator[Metric]:
        services = self._services
        yield _counter(
            "tidings_audit_written", "Audit records of the node's parts written.", services.audit.written_count
        )
        yield _counter("tidings_audit_refused", "Audit records that were not taken.", services.audit.refused_count)
        yield _gauge("tidings_guard_directives", "Directives in force.", len(services.guard.directives()))
        yield _counter("tidings_guard_denied", "Newcomers that the guard turned away.", services.guard.denied_count)
        yield _gauge("tidings_config_seq", "Changes of the settings since the start, and 1.", services.config.cfg_seq)
        yield _gauge("tidings_apps", "Registered apps.", len(services.apps.apps()))
        failed = CounterMetricFamily("tidings_auth_failed", "Tokens that were not accepted.", labels=["code"])
        for code, count in services.authenticator.failed.items():
            failed.add_metric([code], count)
        yield failed
        healthy = GaugeMetricFamily(
            "tidings_component_healthy", "1 while the component is healthy.", labels=["component"]
        )
        for name, component in services.health.snapshot().components.items():
            healthy.add_metric([name], float(component.state == "healthy"))
        yield healthy


def _histogram(name: str, text: str, times: LatencyHistogram) -> HistogramMetricFamily:
    buckets: list[tuple[str, float]] = []
    seen = 0
    for bound, count in zip((*map(str, LATENCY_BUCKETS_S), "+Inf"), times.counts, strict=True):
        seen += count
        buckets.append((bound, seen))
    return HistogramMetricFamily(name, text, buckets=buckets, sum_value=times.sum_s)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=value)


def _counter(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(name, text, value=value)


_OWN: Final = "tidings"
_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, what the line carries as extra, and the error's text."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": format_utc(int(record.created * 1e9)).decode(),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": legible(record.getMessage()),
        }
        line.update((name, value) for name, value in vars(record).items() if name not in _STANDARD)
        request_id = REQUEST_ID.get()
        if request_id is not None:
            line.setdefault("request_id", request_id)
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=str).decode()


class TextFormatter(logging.Formatter):
    """A line for people. What came from outside cannot begin a line of its own."""

    def format(self, record: logging.LogRecord) -> str:
        when = format_utc(int(record.created * 1e9)).decode()
        message = legible(record.getMessage())
        request_id = getattr(record, "request_id", None) or REQUEST_ID.get()
        line = f"{when} {record.levelname.lower():<7} {record.name.removeprefix('tidings.')}: {message}"
        if request_id is not None:
            line += f" [{request_id}]"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def set_level(settings: ServerSettings) -> None:
    """Say as much as the settings ask for."""
    level = settings.log_level.upper()
    logging.getLogger(_OWN).setLevel(level)


@contextlib.contextmanager
def node_logging(settings: ServerSettings) -> Iterator[None]:
    """Write what Tidings logs to stderr while it lasts."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if settings.log_format == "json" else TextFormatter())
    loggers = [logging.getLogger(_OWN)]
    before = [(each, each.level, each.propagate, list(each.handlers)) for each in loggers]
    for each in loggers:
        each.handlers = [handler]
        each.propagate = False
    set_level(settings)
    try:
        yield
    finally:
        for each, level, propagates, handlers in before:
            each.setLevel(level)
            each.propagate = propagates
            each.handlers = handlers


NO_KEYS: Final = (
    "there is no secret and no key set, so every token is refused and the node is not ready; set TIDINGS_JWT_SECRET"
    " (at least 32 bytes, as `openssl rand -hex 32` makes them) or server.key_set_file, or start it with --dev to try things"
    " on this machine"
)


def banner(
    settings: NodeSettings, *, url: str, endpoints: Iterable[str], workspace: str, seq: int, epoch: str
) -> list[str]:
    """The start-up lines, the most important one first."""
    server = settings.server
    transport = "TLS" if server.tls_cert_file is not None else "no TLS"
    reach = "this machine only" if is_loopback(server.host) else "reachable from other machines"
    lines = [
        f"tidings {__version__} serves {url} ({transport}, {reach}); {_authentication(settings)}; {_durability(settings)}",
        f"endpoints: {', '.join([*endpoints, '/v1', '/healthz', '/readyz', '/metrics'])}",
        f"workspace {workspace}, epoch {epoch}, seq {seq}",
    ]
    if server.unix_path is not None:
        lines.append(f"also on the Unix socket {server.unix_path}, for this user")
    if settings.steward.socket_path is not None:
        lines.append(f"the steward socket is {settings.steward.socket_path}")
    return lines


def warnings(settings: NodeSettings) -> list[str]:
    """What an operator should consider before this node serves others."""
    found: list[str] = []
    server = settings.server
    is_public = not is_loopback(server.host)
    if settings.access.is_open:
        found.append("access.is_open is set: EVERYBODY who reaches this node may do everything that is not forbidden")
    elif not settings.access.can_authenticate:
        found.append(f"NOBODY CAN USE THIS NODE: {NO_KEYS}")
    if is_public and server.tls_cert_file is None:
        found.append(f"{server.host} is reachable from other machines without TLS: tokens travel in the clear")
    if settings.log.durability != "sync":
        found.append(f"log.durability is {settings.log.durability!r}: acknowledged events can be lost in a crash")
    if "*" in server.origins:
        found.append("server.origins allows every web page to open sockets and to send requests")
    return found


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a host address."""
    if host == "localhost":
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _authentication(settings: NodeSettings) -> str:
    tokens = settings.access.tokens
    if settings.access.is_open:
        return "ACCESS IS OPEN TO EVERYBODY"
    ways = [name for name, value in (("a shared secret", tokens.secret), ("a key set", tokens.key_set)) if value]
    return f"tokens by {' and '.join(ways)}" if ways else "no token is accepted"


def _durability(settings: NodeSettings) -> str:
    if settings.log.durability == "sync":
        return "every event is on disk before it is acknowledged"
    return f"NOT DURABLE ({settings.log.durability})"
