"""
Metrics: counts and latencies under the names of the bus's document, for Prometheus and for a callback of your own.

Every instance has a registry of its own unless it is given one, so that two buses in one process do not collide. The number
of series is bounded: topics and groups beyond the bound are counted together under ``_other``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import Metric, UnknownMetricFamily
from prometheus_client.registry import Collector

from tidings.log.interface import Appended, Duplicate, Verdict

from .contract import HandleContext, InvalidMiddleware, Middleware, Outcome, OutcomeKind, PublishContext

__all__ = ["OTHER", "MetricsMiddleware", "MetricsSink"]

logger = logging.getLogger(__name__)

MetricsSink = Callable[[str, Mapping[str, str], float], None]
OTHER: Final = "_other"
_BUCKETS_S: Final = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)


class _PublishCounts(Collector):
    """``events_publish_count``: the client library would append ``_total`` to the name of a counter of its own."""

    def __init__(self) -> None:
        self.by_topic: dict[str, int] = {}

    def collect(self) -> Iterable[Metric]:
        family = UnknownMetricFamily("events_publish_count", "Events published.", labels=["topic"])
        for topic, count in list(self.by_topic.items()):
            family.add_metric([topic], count)
        yield family


class _TopicGroup:
    """The series of one topic and group, looked up once."""

    __slots__ = ("err", "expired", "labels", "ok", "seconds")

    def __init__(self, ok: Counter, err: Counter, expired: Counter, seconds: Histogram, labels: dict[str, str]) -> None:
        self.ok = ok.labels(**labels)
        self.err = err.labels(**labels)
        self.expired = expired.labels(**labels)
        self.seconds = seconds.labels(**labels)
        self.labels = labels


class MetricsMiddleware(Middleware):
    """
    Count what is published, handled and given up, and measure how long it takes.

    ``events_publish_count{topic}``, ``events_handle_ok_total`` and ``events_handle_err_total{topic,group}`` (attempts that were
    acknowledged, and that failed), ``events_handle_seconds{topic,group}`` and ``events_publish_seconds{topic}`` (histograms),
    ``events_expired_total{topic,group}`` (too old when their turn came), ``events_dlq_total{topic}``, ``events_storage_full`` (0
    or 1), ``events_metrics_sink_errors_total``.

    Args:
        sink: Called with a name, labels and a value (a counter's increment, a measured time, a gauge's value) for each of
            them. One that raises is counted and otherwise passed over: what is measured must not fail for it.
        registry: Where the metrics are registered.
        series_count_max: Topics, and pairs of topic and group, that get series of their own.

    Raises:
        InvalidMiddleware: The registry has metrics of these names already, or the bound is not positive.
    """

    name = "metrics"
    priority = 20

    def __init__(
        self,
        sink: MetricsSink | None = None,
        *,
        registry: CollectorRegistry | None = None,
        series_count_max: int = 10_000,
    ) -> None:
        if series_count_max < 1:
            raise InvalidMiddleware(self.name, "series_count_max", "must be at least 1")
        self.registry = CollectorRegistry() if registry is None else registry
        self._sink = sink
        self._has_sink_failed = False
        self._series_count_max = series_count_max
        self._published = _PublishCounts()
        self._groups: dict[tuple[str, str], _TopicGroup] = {}
        self._topics: set[str] = set()
        self._seconds_of: dict[str, Histogram] = {}
        both = ["topic", "group"]
        try:
            self._ok = Counter("events_handle_ok", "Attempts acknowledged.", both, registry=self.registry)
            self._err = Counter("events_handle_err", "Attempts that failed.", both, registry=self.registry)
            self._handle_seconds = Histogram(
                "events_handle_seconds", "Time of an attempt.", both, registry=self.registry, buckets=_BUCKETS_S
            )
            self._publish_seconds = Histogram(
                "events_publish_seconds", "Time of a publish.", ["topic"], registry=self.registry, buckets=_BUCKETS_S
            )
            self._expired = Counter("events_expired", "Events too old to be handled.", both, registry=self.registry)
            self._dead = Counter("events_dlq", "Events given up as dead letters.", ["topic"], registry=self.registry)
            self._full = Gauge("events_storage_full", "1 while there is no room for events.", registry=self.registry)
            self._sink_errors = Counter(
                "events_metrics_sink_errors", "Calls of the metrics sink that raised.", registry=self.registry
            )
            self.registry.register(self._published)
        except ValueError as error:
            raise InvalidMiddleware(self.name, "registry", str(error)) from error

    def after_publish(self, ctx: PublishContext, verdict: Verdict | Exception) -> None:
        """Count and time a publish that the log took."""
        if not isinstance(verdict, Appended | Duplicate):
            return
        topic = self._topic(str.__str__(ctx.topic))
        elapsed_s = ctx.elapsed_s
        seconds = self._seconds_of.get(topic)
        if seconds is None:
            seconds = self._seconds_of[topic] = self._publish_seconds.labels(topic)
        seconds.observe(elapsed_s)
        if isinstance(verdict, Appended):
            self._published.by_topic[topic] = self._published.by_topic.get(topic, 0) + 1
        if self._sink is not None:
            labels = {"topic": topic}
            if isinstance(verdict, Appended):
                self._tell("events_publish_count", labels, 1)
            self._tell("events_publish_seconds", labels, elapsed_s)

    def after_handle(self, ctx: HandleContext, outcome: Outcome) -> None:
        """Count and time an attempt whose handler was due; what was skipped, denied or filtered out is neither good nor bad."""
        is_ok = outcome.is_ok
        if not is_ok and not outcome.is_failure and outcome.kind is not OutcomeKind.EXPIRED:
            return
        series = self._groups.get((ctx.topic, ctx.group)) or self._group(ctx.topic, ctx.group)
        if outcome.kind is OutcomeKind.EXPIRED:
            series.expired.inc()
            self._tell("events_expired_total", series.labels, 1)
            return
        elapsed_s = ctx.elapsed_s
        series.seconds.observe(elapsed_s)
        (series.ok if is_ok else series.err).inc()
        if self._sink is not None:
            self._tell("events_handle_ok_total" if is_ok else "events_handle_err_total", series.labels, 1)
            self._tell("events_handle_seconds", series.labels, elapsed_s)

    def observe_dead_letter(self, topic: str) -> None:
        """An event of this topic became a dead letter."""
        topic = self._topic(topic)
        self._dead.labels(topic).inc()
        self._tell("events_dlq_total", {"topic": topic}, 1)

    def set_storage_full(self, is_full: bool) -> None:
        """The disk has no room, or has some again."""
        self._full.set(float(is_full))
        self._tell("events_storage_full", {}, float(is_full))

    def quantile(self, topic: str, group: str | None, q: float) -> float | None:
        """
        A latency in seconds, such as the p95 for ``q=0.95``, read off the histogram.

        Args:
            topic: Whose.
            group: Of which group's attempts; None for publishes.
            q: From 0 to 1.

        Returns:
            The value, interpolated within its bucket as Prometheus does it (at most the highest bound); None if nothing was
            measured.
        """
        if not 0.0 <= q <= 1.0:
            raise ValueError(f"q must be from 0 to 1, not {q}")
        labels = {"topic": topic} if group is None else {"topic": topic, "group": group}
        histogram = self._publish_seconds if group is None else self._handle_seconds
        cumulative = [
            (float(sample.labels["le"]), sample.value)
            for family in histogram.collect()
            for sample in family.samples
            if sample.name.endswith("_bucket") and all(sample.labels[key] == value for key, value in labels.items())
        ]
        return _interpolated(sorted(cumulative), q)

    def _topic(self, topic: str) -> str:
        if topic in self._topics:
            return topic
        if len(self._topics) >= self._series_count_max:
            return OTHER
        self._topics.add(topic)
        return topic

    def _group(self, topic: str, group: str) -> _TopicGroup:
        if len(self._groups) >= self._series_count_max:
            topic = group = OTHER
        key = (topic, group)
        if key not in self._groups:
            labels = {"topic": topic, "group": group}
            self._groups[key] = _TopicGroup(self._ok, self._err, self._expired, self._handle_seconds, labels)
        return self._groups[key]

    def _tell(self, name: str, labels: Mapping[str, str], value: float) -> None:
        if self._sink is None:
            return
        try:
            self._sink(name, labels, value)
        except Exception:
            if not self._has_sink_failed:
                self._has_sink_failed = True
                logger.exception("the metrics sink raised; further errors are only counted")
            self._sink_errors.inc()


def _interpolated(cumulative: list[tuple[float, float]], q: float) -> float | None:
    total = cumulative[-1][1] if cumulative else 0.0
    if not total:
        return None
    rank = q * total
    lower, below = 0.0, 0.0
    for upper, count in cumulative:
        if count >= rank and count > below:
            if upper == float("inf"):
                return lower
            return lower + (upper - lower) * max(rank - below, 0.0) / (count - below)
        lower, below = upper, count
    return lower
