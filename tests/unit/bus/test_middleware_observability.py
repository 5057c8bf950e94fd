"""Spans and metrics: what happened can be seen, under the names the bus's document gives."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode, format_trace_id
from prometheus_client import CollectorRegistry, generate_latest

from tidings import Bus, __version__
from tidings.bus.events import ReceivedEvent
from tidings.core.clock import SystemClock
from tidings.core.errors import InvalidPayload
from tidings.core.events import Event, EventMeta
from tidings.log.interface import Appended, Duplicate, Refused, Verdict
from tidings.log.record import Record, RecordMeta
from tidings.middleware import (
    HandleContext,
    InvalidMiddleware,
    MetricsMiddleware,
    Middleware,
    Outcome,
    OutcomeKind,
    PublishContext,
    TracingMiddleware,
)

from .chains import MiddlewareChain

AT = "2026-01-01T00:00:00.000000Z"
TRACE = "0af7651916cd43dd8448eb211c80319c"
ACKED = Outcome(OutcomeKind.ACKED)
STORED = Appended(1, 0, "e1")


class Stopwatch(SystemClock):
    """A clock that a test sets."""

    __slots__ = ("seconds",)

    def __init__(self) -> None:
        self.seconds = 100.0

    def monotonic(self) -> float:
        return self.seconds


def received(topic: str = "orders", group: str = "workers", attempt: int = 1, **meta: Any) -> ReceivedEvent:
    stored = RecordMeta(written_at=AT, topic=topic, type="ORDER", space_id="shared:home", event_id="e1", ts=AT, **meta)
    return ReceivedEvent(Record.of(5, 9, stored, msgspec.Raw(b"{}")), group, attempt)


async def handle(
    middleware: Middleware, event: ReceivedEvent, outcome: Outcome = ACKED, elapsed_s: float = 0.0
) -> HandleContext:
    clock = Stopwatch()
    ctx = HandleContext(event, clock=clock)
    chain = MiddlewareChain([middleware])
    await chain.run_before_handle(ctx)
    clock.seconds += elapsed_s
    await chain.run_after(ctx, outcome)
    return ctx


async def publish(
    middleware: Middleware,
    verdict: Verdict | Exception = STORED,
    *,
    topic: str = "orders",
    trace_id: str | None = None,
    elapsed_s: float = 0.0,
) -> Event:
    clock = Stopwatch()
    event = Event(EventMeta(topic, "ORDER", "shared:home", trace_id=trace_id), {"n": 1})
    ctx = PublishContext(event, topic, clock=clock)
    chain = MiddlewareChain([middleware])
    await chain.run_before_publish(ctx)
    ctx.size_bytes = 7
    clock.seconds += elapsed_s
    await chain.run_after_publish(ctx, verdict)
    return ctx.event


class Spans:
    """A tracing middleware and what it exported."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = provider.get_tracer("test")
        self.middleware = TracingMiddleware(provider)

    def finished(self) -> list[ReadableSpan]:
        return list(self._exporter.get_finished_spans())

    def only(self) -> ReadableSpan:
        (span,) = self.finished()
        return span


def own(span: ReadableSpan) -> dict[str, Any]:
    """The attributes that are not those of the semantic conventions."""
    return {name: value for name, value in (span.attributes or {}).items() if "." not in name}


def conventional(span: ReadableSpan) -> dict[str, Any]:
    return {name: value for name, value in (span.attributes or {}).items() if "." in name}


def trace_of(span: ReadableSpan) -> str:
    context = span.get_span_context()
    assert context is not None
    return format_trace_id(context.trace_id)


@pytest.mark.req("F79", "F91")
async def test_a_publish_has_a_span() -> None:
    """
    ``events.publish`` says topic, space and size, and gives an event without a trace the trace's id.
    """
    spans = Spans()

    event = await publish(spans.middleware)

    span = spans.only()
    assert span.name == "events.publish"
    assert own(span) == {"topic": "orders", "space_id": "shared:home", "size_bytes": 7, "offset": 0}
    assert event.meta.trace_id == trace_of(span)
    assert span.status.status_code is StatusCode.UNSET


@pytest.mark.req("F79", "F92")
async def test_an_attempt_has_a_span() -> None:
    """
    ``events.handle`` says topic, group, offset, retries and latency.
    """
    spans = Spans()

    await handle(spans.middleware, received(attempt=3), elapsed_s=0.25)

    span = spans.only()
    assert span.name == "events.handle"
    assert own(span) == {
        "topic": "orders",
        "group": "workers",
        "offset": 5,
        "retries": 2,
        "lat_ms": pytest.approx(250.0),
        "outcome": "acked",
    }


@pytest.mark.req("F79", "F93")
async def test_the_trace_flows_through_every_hop() -> None:
    """
    Publish, attempt, and what the handler publishes in turn are one trace; the current span is put back afterwards.
    """
    spans = Spans()
    chain = MiddlewareChain([spans.middleware])
    first = await publish(spans.middleware)

    ctx = HandleContext(received(trace_id=first.meta.trace_id))
    await chain.run_before_handle(ctx)
    second = await publish(spans.middleware)
    await chain.run_after(ctx, ACKED)

    assert first.meta.trace_id == second.meta.trace_id == ctx.trace["trace_id"]
    outer, inner, attempt = spans.finished()
    assert len({trace_of(span) for span in (outer, inner, attempt)}) == 1
    assert inner.parent is not None
    attempt_context = attempt.get_span_context()
    assert attempt_context is not None
    assert inner.parent.span_id == attempt_context.span_id
    assert not trace.get_current_span().get_span_context().is_valid


@pytest.mark.req("F93")
async def test_an_events_own_trace_id_is_kept() -> None:
    """
    Hex digits and UUIDs are the trace's id as they are; any other text leads to one trace, the same each time.
    """
    spans = Spans()

    for trace_id in (TRACE, str(uuid.UUID(TRACE)), "order 17", "order 17"):
        event = await publish(spans.middleware, trace_id=trace_id)
        assert event.meta.trace_id == trace_id
    await handle(spans.middleware, received(trace_id="order 17"))

    by_hex, by_uuid, *by_text = (trace_of(span) for span in spans.finished())
    assert by_hex == by_uuid == TRACE
    assert len(by_text) == 3
    assert len(set(by_text)) == 1


@pytest.mark.req("F79")
async def test_failures_show_on_the_span() -> None:
    """
    A refused or failed publish, an error and a Nack each end their span with an error status.
    """
    spans = Spans()

    await publish(spans.middleware, Refused(InvalidPayload("payload", "odd")))
    await publish(spans.middleware, OSError("disk"))
    await handle(spans.middleware, received(), Outcome(OutcomeKind.RETRY, error=ValueError("no")))
    await handle(spans.middleware, received(), Outcome(OutcomeKind.RETRY, "not yet"))

    assert [span.status.status_code for span in spans.finished()] == [StatusCode.ERROR] * 4
    assert [span.status.description for span in spans.finished()][2:] == ["ValueError: no", "not yet"]


@pytest.mark.req("F79", "F93")
async def test_tracing_without_an_sdk_passes_ids_on() -> None:
    """
    Constructed bare, it invents no trace, and what a handler publishes still inherits the id of the event it handles.
    """
    bare = TracingMiddleware()
    chain = MiddlewareChain([bare])

    assert (await publish(bare)).meta.trace_id is None
    ctx = HandleContext(received(trace_id=TRACE))
    await chain.run_before_handle(ctx)
    inner = await publish(bare)
    await chain.run_after(ctx, ACKED)

    assert inner.meta.trace_id == TRACE
    assert (await publish(bare)).meta.trace_id is None


def value(metrics: MetricsMiddleware, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


@pytest.mark.req("F80", "F94")
async def test_publishes_are_counted_by_topic() -> None:
    """
    What was stored counts once under the document's name; duplicates and refusals do not.
    """
    metrics = MetricsMiddleware()

    await publish(metrics)
    await publish(metrics)
    await publish(metrics, topic="other")
    await publish(metrics, Duplicate(1, 0, "e1"))
    await publish(metrics, Refused(InvalidPayload("payload", "odd")))
    await publish(metrics, OSError("disk"))

    assert value(metrics, "events_publish_count", topic="orders") == 2
    assert value(metrics, "events_publish_count", topic="other") == 1
    assert value(metrics, "events_publish_seconds_count", topic="orders") == 3
    assert b'\nevents_publish_count{topic="orders"} 2.0\n' in generate_latest(metrics.registry)


@pytest.mark.req("F80", "F95")
async def test_attempts_are_counted_by_topic_group_and_outcome() -> None:
    """
    Acknowledged attempts are good, failed ones bad, and those whose handler did not run are neither.
    """
    metrics = MetricsMiddleware()

    for kind in OutcomeKind:
        await handle(metrics, received(), Outcome(kind))
    await handle(metrics, received(group="others"))

    assert value(metrics, "events_handle_ok_total", topic="orders", group="workers") == 1
    assert value(metrics, "events_handle_err_total", topic="orders", group="workers") == 2
    assert value(metrics, "events_handle_seconds_count", topic="orders", group="workers") == 3
    assert value(metrics, "events_handle_ok_total", topic="orders", group="others") == 1


@pytest.mark.req("F96")
async def test_latencies_have_quantiles() -> None:
    """
    p50, p95 and p99 come out of the histograms, by topic and group and for publishes.
    """
    metrics = MetricsMiddleware()
    for elapsed_s in [0.0015] * 90 + [0.04] * 8 + [2.0] * 2:
        await handle(metrics, received(), elapsed_s=elapsed_s)
    await handle(metrics, received(group="slow"), elapsed_s=100.0)
    await publish(metrics, elapsed_s=0.002)

    p50, p95, p99 = (metrics.quantile("orders", "workers", q) for q in (0.5, 0.95, 0.99))
    assert p50 is not None
    assert p95 is not None
    assert p99 is not None
    assert 0.001 < p50 <= 0.002
    assert 0.025 < p95 <= 0.05
    assert 1.0 < p99 <= 2.5
    assert metrics.quantile("orders", "slow", 0.5) == 60.0
    assert metrics.quantile("orders", None, 1.0) == pytest.approx(0.002)
    assert metrics.quantile("orders", "nobody", 0.5) is None
    with pytest.raises(ValueError, match="q must be"):
        metrics.quantile("orders", "workers", 95)


@pytest.mark.req("F97")
def test_dead_letters_and_a_full_disk_show() -> None:
    """
    Dead letters are counted by topic; a full disk is a gauge that goes back.
    """
    metrics = MetricsMiddleware()

    metrics.observe_dead_letter("orders")
    metrics.observe_dead_letter("orders")
    metrics.set_storage_full(True)

    assert value(metrics, "events_dlq_total", topic="orders") == 2
    assert value(metrics, "events_storage_full") == 1
    metrics.set_storage_full(False)
    assert value(metrics, "events_storage_full") == 0


@pytest.mark.req("F80")
async def test_a_sink_is_told_everything() -> None:
    """
    The callback gets each metric's name, labels and value as it happens.
    """
    told: list[tuple[str, Mapping[str, str], float]] = []
    metrics = MetricsMiddleware(lambda name, labels, value: told.append((name, labels, value)))

    await publish(metrics, elapsed_s=0.5)
    await handle(metrics, received(), elapsed_s=0.25)
    await handle(metrics, received(), Outcome(OutcomeKind.DEAD))
    metrics.observe_dead_letter("orders")
    metrics.set_storage_full(True)

    both = {"topic": "orders", "group": "workers"}
    assert told == [
        ("events_publish_count", {"topic": "orders"}, 1),
        ("events_publish_seconds", {"topic": "orders"}, 0.5),
        ("events_handle_ok_total", both, 1),
        ("events_handle_seconds", both, 0.25),
        ("events_handle_err_total", both, 1),
        ("events_handle_seconds", both, 0.0),
        ("events_dlq_total", {"topic": "orders"}, 1),
        ("events_storage_full", {}, 1.0),
    ]


@pytest.mark.req("F80")
async def test_a_sink_that_raises_fails_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """
    Its errors are counted and logged once, and attempts go on.
    """

    def broken(name: str, labels: Mapping[str, str], value: float) -> None:
        raise ConnectionError("sink is gone")

    metrics = MetricsMiddleware(broken)

    with caplog.at_level(logging.ERROR):
        await handle(metrics, received())
        await handle(metrics, received())

    assert value(metrics, "events_metrics_sink_errors_total") == 4
    assert value(metrics, "events_handle_ok_total", topic="orders", group="workers") == 2
    assert len(caplog.records) == 1


async def test_series_are_bounded() -> None:
    """
    Topics and groups beyond the bound are counted together, so that names cannot fill the memory.
    """
    metrics = MetricsMiddleware(series_count_max=2)

    for n in range(5):
        await publish(metrics, topic=f"t{n}")
        await handle(metrics, received(topic=f"t{n}"))

    assert value(metrics, "events_publish_count", topic="t1") == 1
    assert value(metrics, "events_publish_count", topic="_other") == 3
    assert value(metrics, "events_handle_ok_total", topic="_other", group="_other") == 3
    assert value(metrics, "events_handle_ok_total", topic="t4", group="workers") is None
    with pytest.raises(InvalidMiddleware):
        MetricsMiddleware(series_count_max=0)


def test_a_registry_can_be_shared_with_others_but_not_twice() -> None:
    """
    Two instances have registries of their own; one registry takes the names once, and says so.
    """
    registry = CollectorRegistry()

    assert MetricsMiddleware().registry is not MetricsMiddleware().registry
    assert MetricsMiddleware(registry=registry).registry is registry
    with pytest.raises(InvalidMiddleware, match="registry"):
        MetricsMiddleware(registry=registry)


@pytest.mark.req("F93")
async def test_a_publish_and_its_handlings_are_one_trace(tmp_path: Path) -> None:
    """Each attempt's span is a child of the publish's span, also of an event that came with a trace id of its own."""
    spans = Spans()
    async with Bus([spans.middleware], workspace=tmp_path) as bus:

        @bus.subscriber("orders", group="billing", backoff_base=0.0)
        async def bill(event: Event, attempt: int) -> None:
            if attempt == 1:
                raise ValueError("again")
            await bus.publish("bills", {}, type="BILLED", space="shared:home")

        with spans.tracer.start_as_current_span("request"):
            await bus.publish("orders", {}, type="ORDER", space="shared:home")
        await bus.publish("orders", {}, type="ORDER", space="shared:home", trace_id="visit-7")
        await bus.drain()

    found = spans.finished()
    by_id = {place.span_id: each for each in found if (place := each.get_span_context()) is not None}
    request = next(each for each in found if each.name == "request")
    handled = [each for each in found if each.name == "events.handle"]
    assert len(handled) == 4
    for each in handled:
        assert each.parent is not None
        assert by_id[each.parent.span_id].name == "events.publish"
        assert trace_of(by_id[each.parent.span_id]) == trace_of(each)
    assert sum(trace_of(each) == trace_of(request) for each in found) == 5  # it, the publish, two attempts, the bill
    assert len({trace_of(each) for each in found}) == 2


async def test_spans_have_the_attributes_of_the_conventions_for_messaging() -> None:
    """System, operation, destination, message and consumer group; the type of an error; the scope has the version of Tidings."""
    spans = Spans()
    await publish(spans.middleware)
    await handle(spans.middleware, received())
    failed = Outcome(OutcomeKind.RETRY, error=InvalidPayload("payload", "is bad"))
    await handle(spans.middleware, received(), failed)
    raised = Outcome(OutcomeKind.RETRY, error=KeyError("k"))
    await handle(spans.middleware, received(), raised)

    published, handled, refused, broken = spans.finished()
    common = {"messaging.system": "tidings", "messaging.destination.name": "orders"}
    assert conventional(published) == {
        **common,
        "messaging.operation.name": "publish",
        "messaging.operation.type": "send",
        "messaging.message.id": STORED.event_id,
    }
    process = {
        **common,
        "messaging.operation.name": "handle",
        "messaging.operation.type": "process",
        "messaging.message.id": "e1",
        "messaging.consumer.group.name": "workers",
    }
    assert conventional(handled) == process
    assert {name: value for name, value in conventional(refused).items() if not name.startswith("exception")} == {
        **process,
        "error.type": InvalidPayload.code,
    }
    assert conventional(broken)["error.type"] == "KeyError"
    assert published.instrumentation_scope is not None
    assert (published.instrumentation_scope.name, published.instrumentation_scope.version) == (
        "tidings.bus",
        __version__,
    )
