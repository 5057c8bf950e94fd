"""
Metrics and traces of publishing and handling.

**Metrics** are counted in plain numbers and turned into Prometheus families when somebody reads them. Every ``MetricsMiddleware``
has a registry of its own unless it is given one, so that two buses in one process do not collide. The number of series is
bounded: topics and groups beyond the bound are counted together under ``_other``.

**Traces** follow W3C Trace Context. A publish writes its span's trace id into ``meta.trace_id``, unless the event has one, and its
``traceparent`` into ``meta.extra``; each attempt to handle the event opens its span as a child of the publish's and makes it the
current one, so that what the handler publishes belongs to the same trace. A ``trace_id`` of 32 hex digits (or a UUID) is the
trace's id as it is; any other text is hashed to one, always to the same. Without an OpenTelemetry provider no spans are made, and
trace ids travel all the same.
"""

from __future__ import annotations

import bisect
import hashlib
import importlib
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import (
    INVALID_SPAN,
    NonRecordingSpan,
    ProxyTracerProvider,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TracerProvider,
    format_span_id,
    format_trace_id,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    UnknownMetricFamily,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from tidings.core.errors import TidingsError
from tidings.log.interface import Appended, Duplicate, Refused, Verdict

from ..events import stored_meta
from .base import Decision, HandleContext, InvalidMiddleware, Middleware, Outcome, OutcomeKind, PublishContext

logger = logging.getLogger(__name__)

MetricsSink = Callable[[str, Mapping[str, str], float], None]
OTHER: Final = "_other"
_BUCKETS_S: Final = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
_BUCKET_NAMES: Final = (*map(floatToGoString, _BUCKETS_S), "+Inf")


class _Durations:
    """A histogram of seconds."""

    __slots__ = ("counts", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * len(_BUCKET_NAMES)
        self.sum_s = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect.bisect_left(_BUCKETS_S, seconds)] += 1
        self.sum_s += seconds

    def cumulative(self) -> list[tuple[str, float]]:
        """Each bucket's upper bound, and how many were at most that long."""
        count, found = 0, []
        for name, more in zip(_BUCKET_NAMES, self.counts, strict=True):
            count += more
            found.append((name, float(count)))
        return found


class _TopicSeries:
    """What is counted for one topic."""

    __slots__ = ("dead", "labels", "published", "seconds")

    def __init__(self, topic: str) -> None:
        self.published = self.dead = 0
        self.seconds = _Durations()
        self.labels = {"topic": topic}


class _GroupSeries:
    """What is counted for one group of a topic."""

    __slots__ = ("err", "expired", "labels", "ok", "seconds")

    def __init__(self, topic: str, group: str) -> None:
        self.ok = self.err = self.expired = 0
        self.seconds = _Durations()
        self.labels = {"topic": topic, "group": group}


class MetricsMiddleware(Middleware, Collector):
    """
    Count what is published, handled and dead-lettered, and measure how long it takes.

    ``events_publish_count{topic}``, ``events_handle_ok_total`` and ``events_handle_err_total{topic,group}`` (attempts that were
    acknowledged, and that failed), ``events_handle_seconds{topic,group}`` and ``events_publish_seconds{topic}`` (histograms),
    ``events_expired_total{topic,group}`` (older than their ``ttl_sec`` when they were due), ``events_dlq_total{topic}``,
    ``events_storage_full`` (0 or 1), ``events_metrics_sink_errors_total``.

    Args:
        sink: Called with a name, labels and a value (a counter's increment, a measured time, a gauge's value) for each of
            them. One that raises is counted and otherwise ignored.
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
        self._sink_errors = 0
        self._is_storage_full = False
        self._series_count_max = series_count_max
        self._topics: dict[str, _TopicSeries] = {}
        self._groups: dict[tuple[str, str], _GroupSeries] = {}
        try:
            self.registry.register(self)
        except ValueError as error:
            raise InvalidMiddleware(self.name, "registry", str(error)) from error

    def after_publish(self, ctx: PublishContext, verdict: Verdict | Exception) -> None:
        """Count and time a publish that the log took."""
        is_new = isinstance(verdict, Appended)
        if not is_new and not isinstance(verdict, Duplicate):
            return
        series = self._topics.get(ctx.topic) or self._topic(str.__str__(ctx.topic))
        elapsed_s = ctx.elapsed_s
        series.seconds.observe(elapsed_s)
        series.published += is_new
        if self._sink is not None:
            if is_new:
                self._tell("events_publish_count", series.labels, 1)
            self._tell("events_publish_seconds", series.labels, elapsed_s)

    def after_handle(self, ctx: HandleContext, outcome: Outcome) -> None:
        """Count and time an attempt whose handler was due; skipped, denied and filtered events count as neither good nor bad."""
        kind = outcome.kind
        is_ok, is_expired = kind is OutcomeKind.ACKED, kind is OutcomeKind.EXPIRED
        if not (is_ok or is_expired or outcome.is_failure):
            return
        series = self._groups.get((ctx.topic, ctx.group)) or self._group(ctx.topic, ctx.group)
        if is_expired:
            series.expired += 1
            self._tell("events_expired_total", series.labels, 1)
            return
        elapsed_s = ctx.elapsed_s
        series.seconds.observe(elapsed_s)
        if is_ok:
            series.ok += 1
        else:
            series.err += 1
        if self._sink is not None:
            self._tell("events_handle_ok_total" if is_ok else "events_handle_err_total", series.labels, 1)
            self._tell("events_handle_seconds", series.labels, elapsed_s)

    def observe_dead_letter(self, topic: str) -> None:
        """An event of this topic became a dead letter."""
        series = self._topic(topic)
        series.dead += 1
        self._tell("events_dlq_total", series.labels, 1)

    def set_storage_full(self, is_full: bool) -> None:
        """The disk has no room, or has some again."""
        self._is_storage_full = is_full
        self._tell("events_storage_full", {}, float(is_full))

    def quantile(self, topic: str, group: str | None, q: float) -> float | None:
        """
        A latency in seconds, such as the p95 for ``q=0.95``, read from the histogram.

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
        series = self._topics.get(topic) if group is None else self._groups.get((topic, group))
        return None if series is None else _interpolated(series.seconds.cumulative(), q)

    def describe(self) -> Iterable[Metric]:
        """The families without their series: what a registry compares names by."""
        return self.families((), ())

    def collect(self) -> Iterable[Metric]:
        """The families as they are now; any thread may ask."""
        return self.families(list(self._topics.values()), list(self._groups.values()))

    def families(self, topics: Iterable[_TopicSeries], groups: Iterable[_GroupSeries]) -> Iterator[Metric]:
        """Return the families with these series."""
        topic, both = ["topic"], ["topic", "group"]
        # Not a counter: the client library would append ``_total`` to its name.
        published = UnknownMetricFamily(
            "events_publish_count", "Events stored; duplicates are not counted again.", labels=topic
        )
        publish_seconds = HistogramMetricFamily(
            "events_publish_seconds", "From the call of publish until the event was on disk.", labels=topic
        )
        dead = CounterMetricFamily("events_dlq", "Events given up as dead letters.", labels=topic)
        for series in topics:
            labels = list(series.labels.values())
            if sum(series.seconds.counts):
                published.add_metric(labels, series.published)
                publish_seconds.add_metric(labels, series.seconds.cumulative(), series.seconds.sum_s)
            if series.dead:
                dead.add_metric(labels, series.dead)
        yield from (published, publish_seconds, dead)
        ok = CounterMetricFamily("events_handle_ok", "Attempts that were acknowledged.", labels=both)
        err = CounterMetricFamily("events_handle_err", "Attempts that failed.", labels=both)
        expired = CounterMetricFamily("events_expired", "Events that were too old when their turn came.", labels=both)
        handle_seconds = HistogramMetricFamily(
            "events_handle_seconds", "How long an attempt took, middleware included.", labels=both
        )
        for each in groups:
            labels = list(each.labels.values())
            ok.add_metric(labels, each.ok)
            err.add_metric(labels, each.err)
            expired.add_metric(labels, each.expired)
            handle_seconds.add_metric(labels, each.seconds.cumulative(), each.seconds.sum_s)
        yield from (ok, err, expired, handle_seconds)
        yield GaugeMetricFamily(
            "events_storage_full", "1 while there is no room for events.", float(self._is_storage_full)
        )
        yield CounterMetricFamily(
            "events_metrics_sink_errors", "Calls of the metrics sink that raised.", float(self._sink_errors)
        )

    def _topic(self, topic: str) -> _TopicSeries:
        if topic not in self._topics and len(self._topics) >= self._series_count_max:
            topic = OTHER
        return self._topics.setdefault(topic, _TopicSeries(topic))

    def _group(self, topic: str, group: str) -> _GroupSeries:
        if (topic, group) not in self._groups and len(self._groups) >= self._series_count_max:
            topic = group = OTHER
        return self._groups.setdefault((topic, group), _GroupSeries(topic, group))

    def _tell(self, name: str, labels: Mapping[str, str], value: float) -> None:
        if self._sink is None:
            return
        try:
            self._sink(name, labels, value)
        except Exception:
            if not self._sink_errors:
                logger.exception("the metrics sink raised; further errors are only counted")
            self._sink_errors += 1


def _interpolated(cumulative: list[tuple[str, float]], q: float) -> float | None:
    total = cumulative[-1][1]
    if not total:
        return None
    rank = q * total
    lower, below = 0.0, 0.0
    for upper, count in zip((*_BUCKETS_S, None), (count for _, count in cumulative), strict=True):
        if upper is None:
            break
        if count >= rank and count > below:
            return lower + (upper - lower) * max(rank - below, 0.0) / (count - below)
        lower, below = upper, count
    return lower


# Traces

_HEX_32: Final = re.compile(r"[0-9a-fA-F]{32}")
_LOW_64: Final = (1 << 64) - 1
_TRACEPARENT: Final = "traceparent"
_ERROR_TYPE: Final = "error.type"
_UNCHECKED_COUNT_MAX: Final = 64
"""Publishes and attempts between two looks for a provider, while there is none."""
_W3C: Final = TraceContextTextMapPropagator()


class TracingMiddleware(Middleware):
    """
    Spans ``events.publish`` (topic, space_id, size_bytes) and ``events.handle`` (topic, group, offset, retries, lat_ms).

    Beside these attributes they have those of OpenTelemetry's semantic conventions for messaging (``messaging.*``, ``error.type``).

    Args:
        provider: Where spans go; the process's own provider if left out. Spans are made once there is one (noticed within 64 events).
    """

    name = "tracing"
    priority = 10

    def __init__(self, provider: TracerProvider | None = None) -> None:
        # By name: importing the package here would be a cycle.
        version: str = importlib.import_module("tidings").__version__
        self._tracer = trace.get_tracer("tidings.bus", version, tracer_provider=provider)
        self._has_provider = provider is not None
        self._unchecked_count = 0

    def _makes_spans(self) -> bool:
        """Whether there is a provider. A process sets its own once, perhaps after the first events."""
        if self._has_provider:
            return True
        if self._unchecked_count:  # asking takes longer than the rest of a publish without spans
            self._unchecked_count -= 1
            return False
        self._unchecked_count = _UNCHECKED_COUNT_MAX
        self._has_provider = not isinstance(trace.get_tracer_provider(), ProxyTracerProvider)
        return self._has_provider

    def before_publish(self, ctx: PublishContext) -> None:
        """Open the publish's span, and write its trace context into the event."""
        meta = ctx.event.meta
        if not self._makes_spans():
            current = trace.get_current_span()
            if current is not INVALID_SPAN and meta.trace_id is None:
                place = current.get_span_context()
                if place.is_valid:
                    meta.trace_id = format_trace_id(place.trace_id)
            return
        span = self._tracer.start_span("events.publish", _parent_of(meta), SpanKind.PRODUCER)
        ctx.state[self] = span
        place = span.get_span_context()
        if not place.is_valid:
            return
        if meta.trace_id is None:
            meta.trace_id = format_trace_id(place.trace_id)
        if meta.extra is None or isinstance(meta.extra, Mapping):  # what is neither is refused by the log
            carrier: dict[str, Any] = dict(meta.extra or {})
            _W3C.inject(carrier, trace.set_span_in_context(span, Context()))
            meta.extra = carrier

    def after_publish(self, ctx: PublishContext, verdict: Verdict | Exception) -> None:
        """Close the publish's span."""
        if not self._has_provider:
            return
        span: Span | None = ctx.state.pop(self, None)
        if span is None:
            return
        if span.is_recording():
            topic = str.__str__(ctx.topic)
            span.set_attribute("topic", topic)
            span.set_attribute("space_id", ctx.event.meta.space_id)
            if ctx.size_bytes is not None:
                span.set_attribute("size_bytes", ctx.size_bytes)
            error = verdict.error if isinstance(verdict, Refused) else verdict
            event_id = ctx.event.meta._event_id if isinstance(error, Exception) else error.event_id
            _describe_message(span, "publish", "send", topic, event_id)
            if isinstance(error, Exception):
                _note_error(span, error)
            else:
                span.set_attribute("offset", error.offset)
        span.end()

    def before_handle(self, ctx: HandleContext) -> Decision | None:
        """Open the attempt's span and make it the current one."""
        makes_spans = self._makes_spans()
        if not makes_spans and ctx.event.is_plain:
            return None  # it has no trace to pass on, which is known without decoding the envelope
        meta = stored_meta(ctx.event)
        if makes_spans:
            span = self._tracer.start_span("events.handle", _parent_of(meta), SpanKind.CONSUMER)
        elif meta.trace_id is None:
            return None  # no trace to pass on
        else:
            span = trace.get_current_span(_parent_of(meta))
        place = span.get_span_context()
        if not place.is_valid:
            return None
        ctx.trace["trace_id"] = format_trace_id(place.trace_id)
        ctx.trace["span_id"] = format_span_id(place.span_id)
        ctx.state[self] = (span, otel_context.attach(trace.set_span_in_context(span)))
        return None

    def after_handle(self, ctx: HandleContext, outcome: Outcome) -> None:
        """Note on the span what came of the attempt."""
        if not self._has_provider:
            return
        opened: tuple[Span, object] | None = ctx.state.get(self)
        if opened is None or not opened[0].is_recording():
            return
        span = opened[0]
        span.set_attribute("topic", ctx.topic)
        span.set_attribute("group", ctx.group)
        _describe_message(span, "handle", "process", ctx.topic, stored_meta(ctx.event).event_id)
        span.set_attribute("messaging.consumer.group.name", ctx.group)
        span.set_attribute("offset", ctx.offset)
        span.set_attribute("retries", ctx.attempt - 1)
        span.set_attribute("lat_ms", ctx.elapsed_s * 1000.0)
        span.set_attribute("outcome", outcome.kind.value)
        if outcome.error is not None:
            _note_error(span, outcome.error)
        elif outcome.is_failure:
            span.set_attribute(_ERROR_TYPE, outcome.kind.value)
            span.set_status(Status(StatusCode.ERROR, outcome.reason))

    def cleanup(self, ctx: HandleContext) -> None:
        """Close the span, and go back to the one before."""
        opened = None if ctx.is_stateless else ctx.state.pop(self, None)
        if opened is not None:
            span, token = opened
            otel_context.detach(token)
            if self._has_provider:
                span.end()


def _describe_message(span: Span, name: str, kind: str, topic: str, event_id: object) -> None:
    """Set the attributes of the semantic conventions for messaging."""
    span.set_attribute("messaging.system", "tidings")
    span.set_attribute("messaging.operation.name", name)
    span.set_attribute("messaging.operation.type", kind)
    span.set_attribute("messaging.destination.name", topic)
    if isinstance(event_id, str):
        span.set_attribute("messaging.message.id", event_id)


def _note_error(span: Span, error: BaseException) -> None:
    span.set_attribute(_ERROR_TYPE, error.code if isinstance(error, TidingsError) else type(error).__qualname__)
    span.record_exception(error)
    span.set_status(Status(StatusCode.ERROR, f"{type(error).__name__}: {str(error)[:200]}"))


def _parent_of(meta: Any) -> Context | None:
    """The context to open a span in: that of the span the event names, else the current one unless the event has another trace."""
    extra = meta.extra
    if extra and isinstance(extra, Mapping) and isinstance(parent := extra.get(_TRACEPARENT), str):
        context = _W3C.extract({_TRACEPARENT: parent}, otel_context.get_current())
        if trace.get_current_span(context).get_span_context().is_remote:
            return context
    trace_id = meta.trace_id
    if not trace_id or not isinstance(trace_id, str):  # what is no text is refused by the log
        return None
    number = _trace_number(trace_id)
    if trace.get_current_span().get_span_context().trace_id == number:
        return None
    # Only the trace's id is known, and OpenTelemetry has no parent without a span id: it is made of the trace id, so it is the
    # same on every hop. Sampled, because a trace that was given an id is wanted.
    made_up = SpanContext(number, (number & _LOW_64) or 1, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))
    return trace.set_span_in_context(NonRecordingSpan(made_up), otel_context.get_current())


def _trace_number(trace_id: str) -> int:
    digits = trace_id.replace("-", "")
    if _HEX_32.fullmatch(digits):
        return int(digits, 16) or 1
    return int.from_bytes(hashlib.blake2b(trace_id.encode(errors="replace"), digest_size=16).digest(), "big") or 1
