"""
Tracing: a span for every publish and one for every attempt, joined by the event's ``trace_id``.

``EventMeta.trace_id`` is what crosses the log. A publish inside a span writes the span's trace id there, unless the event has
one; an attempt opens its span in that trace and makes it the current one, so that what the handler publishes belongs to it
too. A ``trace_id`` of 32 hex digits (or a UUID) is the trace's id as it is; any other text is hashed to one, always to the
same. Without an OpenTelemetry SDK the spans cost little and go nowhere, and the ids flow all the same.
"""

from __future__ import annotations

import hashlib
import re
from typing import Final

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import (
    NonRecordingSpan,
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

from tidings.log.interface import Refused, Verdict

from .contract import Decision, HandleContext, Middleware, Outcome, PublishContext

__all__ = ["TracingMiddleware"]

_HEX_32: Final = re.compile(r"[0-9a-fA-F]{32}")
_LOW_64: Final = (1 << 64) - 1


class TracingMiddleware(Middleware):
    """
    Spans ``events.publish`` (topic, space_id, size_bytes) and ``events.handle`` (topic, group, offset, retries, lat_ms).

    Args:
        provider: Where spans go; the process's own provider if left out.
    """

    name = "tracing"
    priority = 10

    def __init__(self, provider: TracerProvider | None = None) -> None:
        self._tracer = trace.get_tracer("tidings.bus", tracer_provider=provider)

    def before_publish(self, ctx: PublishContext) -> None:
        """Open the publish's span, and give the event its trace id."""
        meta = ctx.event.meta
        span = self._tracer.start_span("events.publish", _parent_of(meta.trace_id), SpanKind.PRODUCER)
        ctx.state[self] = span
        place = span.get_span_context()
        if meta.trace_id is None and place.is_valid:
            meta.trace_id = format_trace_id(place.trace_id)

    def after_publish(self, ctx: PublishContext, verdict: Verdict | Exception) -> None:
        """Close the publish's span."""
        span: Span | None = ctx.state.pop(self, None)
        if span is None:
            return
        if span.is_recording():
            span.set_attribute("topic", str.__str__(ctx.topic))
            span.set_attribute("space_id", ctx.event.meta.space_id)
            if ctx.size_bytes is not None:
                span.set_attribute("size_bytes", ctx.size_bytes)
            error = verdict.error if isinstance(verdict, Refused) else verdict
            if isinstance(error, Exception):
                _note_error(span, error)
            else:
                span.set_attribute("offset", error.offset)
        span.end()

    def before_handle(self, ctx: HandleContext) -> Decision | None:
        """Open the attempt's span and make it the current one."""
        span = self._tracer.start_span("events.handle", _parent_of(ctx.event.meta.trace_id), SpanKind.CONSUMER)
        place = span.get_span_context()
        if not place.is_valid:
            return None  # no SDK and no trace to pass on
        ctx.trace["trace_id"] = format_trace_id(place.trace_id)
        ctx.trace["span_id"] = format_span_id(place.span_id)
        ctx.state[self] = (span, otel_context.attach(trace.set_span_in_context(span)))
        return None

    def after_handle(self, ctx: HandleContext, outcome: Outcome) -> None:
        """Note on the span what came of the attempt."""
        opened: tuple[Span, object] | None = ctx.state.get(self)
        if opened is None or not opened[0].is_recording():
            return
        span = opened[0]
        span.set_attribute("topic", ctx.topic)
        span.set_attribute("group", ctx.group)
        span.set_attribute("offset", ctx.offset)
        span.set_attribute("retries", ctx.attempt - 1)
        span.set_attribute("lat_ms", ctx.elapsed_s * 1000.0)
        span.set_attribute("outcome", outcome.kind.value)
        if outcome.error is not None:
            _note_error(span, outcome.error)
        elif outcome.is_failure:
            span.set_status(Status(StatusCode.ERROR, outcome.reason))

    def cleanup(self, ctx: HandleContext) -> None:
        """Close the span, and go back to the one before."""
        opened = ctx.state.pop(self, None)
        if opened is not None:
            span, token = opened
            otel_context.detach(token)
            span.end()


def _note_error(span: Span, error: BaseException) -> None:
    span.record_exception(error)
    span.set_status(Status(StatusCode.ERROR, f"{type(error).__name__}: {str(error)[:200]}"))


def _parent_of(trace_id: str | None) -> Context | None:
    """The context to open a span in: the current one, unless the event belongs to another trace."""
    if not trace_id or not isinstance(trace_id, str):  # what is no text is refused by the log
        return None
    number = _trace_number(trace_id)
    if trace.get_current_span().get_span_context().trace_id == number:
        return None
    # The log carries the trace's id, not the span's, and OpenTelemetry has no parent without one: the span id is made of the
    # trace id, so it is the same on every hop. Sampled, because a trace that was given an id is wanted.
    parent = SpanContext(number, (number & _LOW_64) or 1, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))
    return trace.set_span_in_context(NonRecordingSpan(parent), otel_context.get_current())


def _trace_number(trace_id: str) -> int:
    digits = trace_id.replace("-", "")
    if _HEX_32.fullmatch(digits):
        return int(digits, 16) or 1
    return int.from_bytes(hashlib.blake2b(trace_id.encode(errors="replace"), digest_size=16).digest(), "big") or 1
