"""
The sixth engine: what the other five do, counted; what administrators and the node's managers have to know of it, told.

Every engine calls it as things happen. Counting costs a dictionary look-up, and nothing here grows with traffic. ``tick`` does the rest, at the pace of
``event.telemetry.heartbeat_interval_ms``: it reports readiness and liveness to the node's health, puts changes of readiness on record, tells when the
pipeline is degraded, and logs samples if they are asked for.

Each happening goes to two places that do not depend on each other: a record in the topic ``audit``, one for each but for floods, and an event of class
``security`` or ``system`` for administrators. The guard hears of whoever causes overflows or refusals again and again. No counter, record
or event holds an object's id or anything of a payload.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

import msgspec

from tidings.access.announcements import Announcer, Summary
from tidings.access.audit import AuditLog, AuditRecord, Severity
from tidings.access.guard import AbuseCounter, Directive
from tidings.core.clock import Clock

from .contexts import RequestContext
from .settings import TelemetrySettings

logger = logging.getLogger(__name__)

COMPONENT: Final = "event_manager"
LATENCY_BUCKETS_S: Final = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
SLOW_S: Final = 10.0
"""A delivery or an acknowledgement that takes longer is put on record."""
_PACED: Final[Mapping[str, tuple[Literal["security", "operational"], int]]] = {
    "subscription_rejected": ("security", 10),
    "descriptor_rejected": ("operational", 100),
    "shed": ("operational", 100),
}
"""
Of what others can have happen as often as they like, so many a second are put on record one by one, and the rest as a number: refusals of strangers
and of those who are denied, records that cannot be told, events shed. Otherwise one of them would fill the disk, and take the room of other records.
"""
_SAMPLES_MAX: Final = 256
_SATURATED: Final = frozenset({"intake_saturated", "queue_saturated"})
_EXPECTED: Final = frozenset({"starting", "draining"})
_FATAL: Final = frozenset({"listener_unavailable", "engine_failed"})


class LatencySummary(msgspec.Struct, frozen=True, kw_only=True):
    """How long something took."""

    count: int
    sum_s: float
    p50_s: float | None
    """A bound that half of them kept; ``None`` if it is above the last bucket."""
    p99_s: float | None


class LatencyHistogram:
    """Counts times in fixed buckets: its size does not depend on how many there are."""

    __slots__ = ("counts", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(LATENCY_BUCKETS_S) + 1)
        self.sum_s = 0.0

    def observe(self, seconds: float, count: int = 1) -> None:
        """It took so long, so often."""
        self.counts[bisect_left(LATENCY_BUCKETS_S, seconds)] += count
        self.sum_s += seconds * count

    def summary(self) -> LatencySummary:
        """What it shows."""
        return LatencySummary(
            count=self.count, sum_s=round(self.sum_s, 6), p50_s=self.quantile(0.5), p99_s=self.quantile(0.99)
        )

    @property
    def count(self) -> int:
        """How many there were."""
        return sum(self.counts)

    def quantile(self, share: float) -> float | None:
        """The upper bound of the bucket that holds this share; ``None`` if there is nothing yet or it is beyond the last bound."""
        wanted, seen = share * self.count, 0
        for bound, count in zip(LATENCY_BUCKETS_S, self.counts, strict=False):
            seen += count
            if count and seen >= wanted:
                return bound
        return None


class PipelineState(msgspec.Struct, frozen=True, kw_only=True):
    """What telemetry looks at when it reports."""

    reasons: tuple[str, ...]
    """Why the gateway is not ready: codes as ``acl_unavailable``."""
    queue_depths: Mapping[str, int]
    """Envelopes waiting, by class."""
    total_queued: int
    connections: int
    steps: int
    """How often the pump has run."""
    has_work: bool
    """Whether something waits for the pump."""


class GatewayStats(msgspec.Struct, frozen=True, kw_only=True):
    """What the gateway counts, since the node started."""

    is_ready: bool
    reasons: tuple[str, ...]
    is_alive: bool
    connections: int
    queue_depths: dict[str, int]
    total_queued: int
    """Of ``event.queue.total_ceiling``."""
    produced: dict[str, int]
    """Envelopes made, by class."""
    delivered: dict[str, int]
    """Envelopes handed to transports, by class; one for each subscriber."""
    dropped: dict[str, dict[str, int]]
    """By class and reason."""
    failures: dict[str, int]
    """Subscriptions refused, or ended by the node, by reason."""
    rejected_descriptors: dict[str, dict[str, int]]
    """By source and reason."""
    opened: int
    resumed: int
    heartbeat_failures: int
    send_failures: int
    ack_latency: LatencySummary
    delivery_latency: LatencySummary


class Telemetry:
    """
    Observes all stages.

    Args:
        settings: The pace and the threshold; ``apply`` replaces them.
        clock: For the pace.
        audit: Where records go.
        abuse: Where offences of subscribers go.
        report_health: Called with state, reasons and metrics for the node's health.
    """

    def __init__(
        self,
        settings: TelemetrySettings,
        *,
        clock: Clock,
        audit: AuditLog,
        abuse: AbuseCounter,
        report_health: Callable[[Literal["healthy", "degraded", "failed"], tuple[str, ...], Mapping[str, Any]], None],
    ) -> None:
        self.announcer = Announcer(COMPONENT)
        self.produced_by_class: Counter[str] = Counter()
        self.delivered_by_class: Counter[str] = Counter()
        self.dropped_by: Counter[tuple[str, str]] = Counter()
        """By class and reason."""
        self.failures: Counter[str] = Counter()
        """Subscriptions refused or ended by us, by reason."""
        self.rejected_descriptors: Counter[tuple[str, str]] = Counter()
        """By source and reason."""
        self.send_failures = 0
        self.heartbeat_failures = 0
        self.opened_count = 0
        self.resumed_count = 0
        self.ack_latency = LatencyHistogram()
        self.delivery_latency = LatencyHistogram()
        self.is_ready = False
        self.is_alive = True
        self._settings = settings
        self._clock = clock
        self._audit = audit
        self._abuse = abuse
        self._report_health = report_health
        self._samples: Counter[tuple[str, str]] = Counter()
        self._reasons: tuple[str, ...] = ("starting",)
        self._saturated_since_s: float | None = None
        self._is_degraded = False
        self._is_shedding = False
        self._reported_s: float | None = None
        self._reported_steps = -1
        self._had_work = False
        self._paced: Counter[str] = Counter()
        self._paced_since_s = clock.monotonic()

    def apply(self, settings: TelemetrySettings) -> None:
        """From the next tick on these settings hold."""
        self._settings = settings

    # What engines observe

    def produced(self, event_class: str, event_type: str, app_id: str) -> None:
        """An envelope was made."""
        self.produced_by_class[event_class] += 1
        if self._settings.emit_samples and ((event_type, app_id) in self._samples or len(self._samples) < _SAMPLES_MAX):
            self._samples[event_type, app_id] += 1

    def delivered(self, event_class: str, count: int = 1) -> None:
        """Envelopes were handed to transports."""
        self.delivered_by_class[event_class] += count

    def dropped(self, event_class: str, reason: str, count: int = 1) -> None:
        """Envelopes, or entries of them, will not be delivered."""
        self.dropped_by[event_class, reason] += count

    def waited(self, seconds: float, count: int = 1) -> None:
        """Envelopes went out so long after they were made."""
        self.delivery_latency.observe(seconds, count)
        if seconds > SLOW_S:
            self._put(
                "delivery_latency", "operational", "warn", None, {"stage": "delivery", "ms": round(seconds * 1e3)}
            )

    def acked(self, seconds: float) -> None:
        """A subscriber acknowledged so long after it was sent to."""
        self.ack_latency.observe(seconds)
        if seconds > SLOW_S:
            self._put("delivery_latency", "operational", "warn", None, {"stage": "ack", "ms": round(seconds * 1e3)})

    def send_failed(self) -> None:
        """A transport did not take what it was given."""
        self.send_failures += 1

    # What becomes of subscriptions

    def opened(self, context: RequestContext, connection_id: str, *, channels: tuple[str, ...]) -> None:
        """
        Somebody subscribes.

        Raises:
            AuditUnavailable: That cannot be put on record, so it must not happen.
        """
        data = {**_about(context, connection_id), "channels": list(channels)}
        record = AuditRecord(category="event.subscription_opened", subject=context.requester_identity_id, data=data)
        self._audit.submit(record, is_required=True)
        self.opened_count += 1
        self._tell("security.subscription_opened", {"connection_id": connection_id}, context)

    def rejected(
        self,
        context: RequestContext | None,
        reason: str,
        *,
        connection_id: str = "",
        cause: str = "",
        address: str | None = None,
        is_denied: bool = False,
        is_offence: bool = True,
    ) -> None:
        """
        A subscription was refused.

        Args:
            context: Whose; ``None`` if their token was not accepted.
            reason: Why: told, and put on record.
            connection_id, cause, address: Put on record only.
            is_denied: The guard or the rate of attempts refused it: it can repeat at will, so records of it are paced, and the guard is not told.
            is_offence: It is the subscriber's doing: not that the node is full or not ready.
        """
        self.failures[reason] += 1
        # Whoever is a stranger, or denied, and comes back all the time must not fill the disk.
        if (context is not None and not is_denied) or self._has_room("subscription_rejected"):
            data = {"reason": reason, "cause": cause, "address": address}
            self._put("subscription_rejected", "security", "warn", context, data, connection_id)
        self._tell("security.subscription_rejected", {"connection_id": connection_id, "reason": reason}, context)
        if is_offence and not is_denied:
            self._offence("rejection", context, address)

    def _has_room(self, name: str) -> bool:
        self._note_more()
        self._paced[name] += 1
        return self._paced[name] <= _PACED[name][1]

    def _note_more(self) -> None:
        now_s = self._clock.monotonic()
        if now_s - self._paced_since_s >= 1.0:
            for name, count in self._paced.items():
                kind, count_max = _PACED[name]
                if count > count_max:
                    self._put(name, kind, "warn", None, {"reason": "several", "count": count - count_max})
            self._paced.clear()
            self._paced_since_s = now_s

    def ended(
        self, context: RequestContext, connection_id: str, reason: str, *, is_forced: bool, cause: str = ""
    ) -> None:
        """A subscription is over: closed by its subscriber or by shutdown, or dropped for a reason of ours."""
        name = "subscription_dropped" if is_forced else "subscription_closed"
        severity: Severity = "warn" if is_forced else "info"
        if is_forced:
            self.failures[reason] += 1
        if reason == "heartbeat_timeout":
            self.heartbeat_failures += 1
        self._put(name, "security", severity, context, {"reason": reason, "cause": cause}, connection_id)
        self._tell(f"security.{name}", {"connection_id": connection_id, "reason": reason}, context)
        if reason == "buffer_overflow":
            self._offence("overflow", context, None)

    def resume_accepted(self, context: RequestContext, connection_id: str, replayed: int) -> None:
        """Somebody came back, and gets what was missed."""
        self.resumed_count += 1
        self._put("resume_accepted", "security", "info", context, {"replayed": replayed}, connection_id)
        self._tell("security.resume_accepted", {"connection_id": connection_id}, context)

    def resume_refused(self, context: RequestContext, connection_id: str, cause: str) -> None:
        """A resume was turned down; why is put on record and told to nobody."""
        self._put("resume_refused", "security", "warn", context, {"cause": cause}, connection_id)
        self._tell("security.resume_refused", {"connection_id": connection_id}, context)

    # What goes wrong on the way

    def descriptor_rejected(
        self,
        source_manager: str,
        reason: str,
        *,
        detail: str,
        event_type: str = "",
        app_id: str = "",
        trace_id: str = "",
        is_cross_app: bool = False,
    ) -> None:
        """A manager handed in what was refused."""
        self.rejected_descriptors[source_manager, reason] += 1
        data = {
            "source_manager": source_manager,
            "reason": reason,
            "detail": detail,
            "event_type": event_type,
            "app_id": app_id,
            "trace_id": trace_id,
        }
        if self._has_room("descriptor_rejected"):
            self._put("descriptor_rejected", "operational", "warn", None, data)
        if is_cross_app:
            self._put("cross_app_violation", "security", "error", None, data)
        if source_manager != COMPONENT:  # else each refusal would make the next
            self._tell("system.event_descriptor_rejected", {"source": source_manager, "error": reason})
            if is_cross_app:
                self._tell("security.cross_app_violation", {"source": source_manager})

    def shed(self, event_class: str, count: int) -> None:
        """Queued envelopes were given up for want of room."""
        self.dropped(event_class, "shed", count)
        if self._has_room("shed"):
            self._put("shed", "operational", "error", None, {"event_class": event_class, "count": count})
        if not self._is_shedding:  # once an episode; ``tick`` ends it
            self._is_shedding = True
            self._tell("system.event_queue_overflow", {"classes": (event_class,)})

    def binding_failed(self, event_class: str, app_id: str, cause: str) -> None:
        """Nobody may be shown an envelope, as the access layer refused to say who may."""
        self.dropped(event_class, "binding_failed")
        self._put(
            "audience_binding_failed",
            "security",
            "error",
            None,
            {"event_class": event_class, "app_id": app_id, "cause": cause},
        )
        self._tell("security.audience_binding_failed", {"reason": cause})

    def suppressed(self, event_class: str, reason: str, count: int = 1) -> None:
        """Envelopes were kept from subscribers who may not see them any more: counted, and on record."""
        self.dropped(event_class, reason, count)
        self._put(
            "suppressed", "security", "info", None, {"event_class": event_class, "reason": reason, "count": count}
        )

    def config_changed(self, *, is_applied: bool, keys: tuple[str, ...], problem: str = "") -> None:
        """New settings hold, or were refused."""
        name = "config_applied" if is_applied else "config_rejected"
        severity: Severity = "info" if is_applied else "warn"
        self._put(name, "operational", severity, None, {"keys": list(keys), "problem": problem})
        self._tell(f"system.event_{name}", {"keys": keys[:64], **({} if is_applied else {"reason": problem[:256]})})

    def directive_applied(self, directive: Directive, closed: int) -> None:
        """The guard said what to do, and it was done; the guard tells of it."""
        data = {"directive_id": directive.directive_id, "decision": directive.decision, "target": directive.target}
        self._put("dos_directive", "security", "warn", None, {**data, "closed": closed})

    # What is reported

    def tick(self, state: PipelineState) -> None:
        """Look at the pipeline as a whole; call it at least as often as the settings' interval."""
        now_s = self._clock.monotonic()
        self._note_more()
        if not _SATURATED.intersection(state.reasons):
            self._is_shedding = False
        has_changed = state.reasons != self._reasons
        if has_changed:
            self._note_readiness(state.reasons)
        self._note_degradation(state.reasons, now_s)
        interval_s = self._settings.heartbeat_interval_ms / 1_000
        if has_changed or self._reported_s is None or now_s - self._reported_s >= interval_s:
            self._report(state)
            self._reported_s = now_s

    def _note_readiness(self, reasons: tuple[str, ...]) -> None:
        was_ready, self.is_ready = self.is_ready, not reasons
        # Starting and stopping in order are no news.
        is_news = not {"starting", "draining"} & {*self._reasons, *reasons}
        self._reasons = reasons
        if was_ready != self.is_ready and is_news:
            severity: Severity = "info" if self.is_ready else "warn"
            data = {"is_ready": self.is_ready, "reasons": list(reasons)}
            self._put("readiness_changed", "operational", severity, None, data)
            logger.info("the gateway is %s", "ready" if self.is_ready else f"not ready: {', '.join(reasons)}")

    def _note_degradation(self, reasons: tuple[str, ...], now_s: float) -> None:
        troubles = set(reasons) - _EXPECTED
        if not troubles & _SATURATED:
            self._saturated_since_s = None
        elif self._saturated_since_s is None:
            self._saturated_since_s = now_s
        since_s = self._saturated_since_s
        outlasts = since_s is not None and (now_s - since_s) * 1_000 >= self._settings.degraded_threshold_ms
        is_degraded = bool(troubles - _SATURATED) or outlasts or (self._is_degraded and bool(troubles))
        if is_degraded != self._is_degraded:
            self._is_degraded = is_degraded
            name = "degraded" if is_degraded else "recovered"
            self._tell(f"system.event_pipeline_{name}", {"reasons": tuple(sorted(troubles))})

    def _report(self, state: PipelineState) -> None:
        # What came in just now has had no chance yet.
        self.is_alive = state.steps != self._reported_steps or not (state.has_work and self._had_work)
        self._reported_steps, self._had_work = state.steps, state.has_work
        reasons = state.reasons if self.is_alive else (*state.reasons, "engine_failed")
        health: Literal["healthy", "degraded", "failed"] = (
            "failed" if _FATAL.intersection(reasons) else "degraded" if reasons else "healthy"
        )
        self._report_health(
            health,
            reasons,
            {
                "ready": not reasons,
                "alive": self.is_alive,
                "queue_depth": dict(state.queue_depths),
                "total_queued": state.total_queued,
                "connections": state.connections,
                "produced": dict(self.produced_by_class),
                "delivered": dict(self.delivered_by_class),
                "dropped": self.dropped_per_class(),
            },
        )
        if self._samples:
            samples = [{"event_type": name, "app_id": app, "count": n} for (name, app), n in self._samples.items()]
            self._samples.clear()
            self._put("sample", "operational", "debug", None, {"samples": samples})

    def stats(self, state: PipelineState) -> GatewayStats:
        """Everything that is counted, with the pipeline as it is."""
        return GatewayStats(
            is_ready=not state.reasons,
            reasons=state.reasons,
            is_alive=self.is_alive,
            connections=state.connections,
            queue_depths=dict(state.queue_depths),
            total_queued=state.total_queued,
            produced=dict(self.produced_by_class),
            delivered=dict(self.delivered_by_class),
            dropped=_nested(self.dropped_by),
            failures=dict(self.failures),
            rejected_descriptors=_nested(self.rejected_descriptors),
            opened=self.opened_count,
            resumed=self.resumed_count,
            heartbeat_failures=self.heartbeat_failures,
            send_failures=self.send_failures,
            ack_latency=self.ack_latency.summary(),
            delivery_latency=self.delivery_latency.summary(),
        )

    def dropped_per_class(self) -> dict[str, int]:
        """What was dropped for whatever reason."""
        found: Counter[str] = Counter()
        for (event_class, _), count in self.dropped_by.items():
            found[event_class] += count
        return dict(found)

    # Within

    def _put(
        self,
        name: str,
        kind: Literal["security", "operational"],
        severity: Severity,
        context: RequestContext | None,
        data: Mapping[str, Any],
        connection_id: str = "",
    ) -> None:
        about = {} if context is None else _about(context, connection_id)
        subject = None if context is None else context.requester_identity_id
        self._audit.note(
            AuditRecord(category=f"event.{name}", kind=kind, severity=severity, subject=subject, data={**about, **data})
        )

    def _tell(
        self,
        event_type: str,
        payload: Summary,
        context: RequestContext | None = None,
    ) -> None:
        subject = None if context is None else context.requester_identity_id
        self.announcer.tell(event_type, payload, requester_identity_id=subject)

    def _offence(
        self, kind: Literal["overflow", "rejection"], context: RequestContext | None, address: str | None
    ) -> None:
        identity = None if context is None else context.requester_identity_id
        app = None if context is None else context.app_id
        self._abuse.note(kind, identity=identity, app=app, address=address)


def _nested(counts: Mapping[tuple[str, str], int]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for (outer, inner), count in counts.items():
        found.setdefault(str(outer), {})[inner] = count
    return found


def _about(context: RequestContext, connection_id: str) -> dict[str, Any]:
    return {"connection_id": connection_id, "context": msgspec.to_builtins(context)}
