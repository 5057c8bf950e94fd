"""
``/metrics``: what the node counts itself, and what it asks its parts when somebody scrapes.

Most values are read off the parts at the time of the scrape, so counting costs the hot path nothing. Labels come from settings,
routes and code, or are bounded by ``server.metrics_series_max``; what is beyond the bound is counted under ``_other``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tidings import __version__
from tidings.bus.errors import BusError
from tidings.bus.eventbus import EventBus
from tidings.bus.middleware import MetricsMiddleware, Middleware
from tidings.bus.middleware.telemetry import OTHER
from tidings.log.dispatcher import Dispatcher
from tidings.log.interface import Log

from .connections import Connections
from .health import Readiness

__all__ = ["CONTENT_TYPE", "HandlingMetrics", "NodeCollector", "NodeMetrics"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class HandlingMetrics(MetricsMiddleware):
    """
    The bus's own metrics without its publish hook.

    The hook would have every publish go through the middleware chain, one by one; what it counts, the log knows by topic.
    """

    # The chain calls only what a middleware has overridden.
    after_publish = Middleware.after_publish  # type: ignore[assignment]  # narrower there: it waits for nothing


class NodeMetrics:
    """The registry of one node, and what is counted as it happens."""

    def __init__(self, series_max: int) -> None:
        self.registry = CollectorRegistry()
        self.handling = HandlingMetrics(registry=self.registry, series_count_max=series_max)
        self._requests = Counter(
            "tidings_http_requests", "HTTP requests answered.", ["method", "route", "status"], registry=self.registry
        )
        self._seconds = Histogram(
            "tidings_http_request_seconds",
            "Time to answer an HTTP request.",
            ["route"],
            registry=self.registry,
            buckets=_BUCKETS_S,
        )
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)

    def observed(self, method: str, route: str, status: int, seconds: float) -> None:
        """A request was answered."""
        self._requests.labels(method, route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def text(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self.registry)


class NodeCollector(Collector):
    """Asks the parts of a node when it is scraped."""

    def __init__(
        self,
        *,
        log: Log,
        bus: EventBus,
        dispatcher: Dispatcher,
        connections: Connections,
        readiness: Callable[[], Readiness],
        http: Callable[[], tuple[int, int]],
        http_refused: Mapping[str, int],
        series_max: int,
        others: Callable[[], Iterable[tuple[str, str, float]]] = tuple,
    ) -> None:
        self._log = log
        self._bus = bus
        self._dispatcher = dispatcher
        self._connections = connections
        self._readiness = readiness
        self._http = http
        self._http_refused = http_refused
        self._series_max = series_max
        self._others = others

    def collect(self) -> Iterable[Metric]:
        yield from self._about_node()
        yield from self._about_log()
        yield from self._about_groups()
        yield from self._about_connections()
        for name, text, value in self._others():
            yield (
                _counter(name.removesuffix("_total"), text, value)
                if name.endswith("_total")
                else _gauge(name, text, value)
            )

    def _about_node(self) -> Iterator[Metric]:
        info = GaugeMetricFamily("tidings_node_info", "The node's version.", labels=["version"])
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
        yield _gauge("tidings_dispatcher_seq", "The seq of the last record handed to the doors.", self._dispatcher.seq)
        yield _gauge("tidings_dispatcher_lag", "Committed records not handed out yet.", self._dispatcher.lag)
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
        lags = GaugeMetricFamily("tidings_bus_group_lag", "Events not acknowledged yet.", labels=["topic", "group"])
        stalled = GaugeMetricFamily(
            "tidings_bus_group_stalled", "1 while publishers do not wait for a stuck group.", labels=["topic", "group"]
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
        per_door = GaugeMetricFamily("tidings_connections", "Open sockets.", labels=["door"])
        for path, count in connections.counts().items():
            per_door.add_metric([path], count)
        yield per_door
        yield _counter("tidings_connections_opened", "Sockets ever opened.", connections.opened_count)
        refused = CounterMetricFamily("tidings_connections_refused", "Sockets refused.", labels=["code"])
        for code, count in connections.refused.items():
            refused.add_metric([code], count)
        yield refused
        closed = CounterMetricFamily("tidings_connections_closed", "Sockets that ended.", labels=["kind"])
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
        open_count, answering_count = self._http()
        yield _gauge("tidings_http_connections", "HTTP connections open.", open_count)
        yield _gauge("tidings_http_requests_in_progress", "HTTP requests being answered.", answering_count)
        turned_away = CounterMetricFamily(
            "tidings_http_refused", "HTTP requests refused before any route was asked.", labels=["code"]
        )
        for code, count in self._http_refused.items():
            turned_away.add_metric([code], count)
        yield turned_away


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=value)


def _counter(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(name, text, value=value)
