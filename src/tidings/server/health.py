"""
The node's health: what each component says of itself, folded into whether the node is ready and alive.

A component either is asked whenever somebody wants to know, or reports by itself at its own pace. One that reports and falls silent is not
believed any longer: after one timeout it counts as unknown, after two as degraded, after three as failed. As long as a critical component is
anything but healthy the node is not ready; the others give warnings. ``/readyz`` shows the fold, and each change of a component is told to
administrators and put on record.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

from tidings.access.announcements import Announcer
from tidings.access.audit import AuditLog, AuditRecord
from tidings.core.clock import Clock
from tidings.log.interface import Health

from .errors import InvalidSignal

logger = logging.getLogger(__name__)

HealthState = Literal["healthy", "degraded", "failed", "unknown"]

_LOOK_INTERVAL_S: Final = 1.0
_LATE_S: Final = 5.0
_METRICS_MAX: Final = 64
_SUMMARIES: Final = {
    "node.starting": "the node is starting",
    "node.stopping": "the node is stopping",
    "node.stopped": "the node has stopped",
    "node.dispatcher_stopped": "nothing is delivered any more",
    "node.listener_failed": "part of the node has failed",
    "node.dispatcher_lag": "committed records were not delivered yet",
    "node.config_failed": "new settings could not be applied",
    "node.silent_component": "part of the node does not report",
    "log.storage_full": "there is no room for events",
    "log.index_full": "the index of ids has reached its limit",
    "log.fenced": "the log takes no events",
    "log.not_durable": "acknowledged events can be lost in a crash",
    "bus.stalled": "a group or a topic has stopped",
    "access.closed": "everything is denied",
    "access.no_keys": "no token can be verified: the node has neither a secret nor a key set; its log says what to do",
    "access.audit_unavailable": "nothing can be put on record",
    "apps.unreadable": "a record about apps cannot be read",
}


class Reason(msgspec.Struct, frozen=True):
    """Something that keeps the node from being ready, or that somebody should look at."""

    code: str
    detail: str

    @property
    def summary(self) -> str:
        """The same without paths, names and numbers, for those who may not read the node."""
        if self.code.startswith("event."):
            return "realtime delivery is not available"
        return _SUMMARIES.get(self.code, "ask the operator of this node")


class Readiness(msgspec.Struct, frozen=True):
    """What ``/readyz`` answers."""

    is_ready: bool
    reasons: tuple[Reason, ...] = ()
    """Why it is not ready."""
    warnings: tuple[Reason, ...] = ()
    """What is wrong and keeps nobody from using the rest."""
    seq: int = 0
    """The last seq committed."""
    dispatched_seq: int = 0
    """The last seq given to the endpoints."""


class ComponentSignal(msgspec.Struct, frozen=True):
    """What a component says of itself."""

    state: HealthState = "healthy"
    reasons: tuple[Reason, ...] = ()
    metrics: Mapping[str, Any] = {}


HEALTHY: Final = ComponentSignal()


def signal(problem: Reason | None, state: HealthState = "degraded") -> ComponentSignal:
    """That of a component with this problem, if it has one."""
    return HEALTHY if problem is None else ComponentSignal(state, (problem,))


def phase_signal(phase: str) -> ComponentSignal:
    """The node itself: ``running``, or on its way there or from there."""
    return signal(None if phase == "running" else Reason(f"node.{phase}", f"the node is {phase}"))


def log_signal(log: Health) -> ComponentSignal:
    """Whether the log takes events."""
    if log.is_storage_full:
        return signal(Reason("log.storage_full", log.problem or "there is no room for events"))
    if log.is_index_full:
        return signal(Reason("log.index_full", log.problem or "the index of ids has reached its limit"))
    return signal(None if log.is_writable else Reason("log.fenced", log.problem or "the log takes no events"), "failed")


def durability_signal(log: Health) -> ComponentSignal:
    """Whether what is acknowledged is on disk."""
    detail = "acknowledged events can be lost in a crash: log.durability is not 'sync'"
    return signal(None if log.is_durable else Reason("log.not_durable", detail))


def dispatcher_signal(
    *, lag: int, lag_max: int, problems: Sequence[str] = (), has_stopped: bool = False
) -> ComponentSignal:
    """How far the endpoints are behind the log, and whether all of them follow it."""
    if has_stopped:
        detail = "; ".join(problems) or "nothing is delivered any more"
        return signal(Reason("node.dispatcher_stopped", detail), "failed")
    if problems:
        return signal(Reason("node.listener_failed", "; ".join(problems)), "failed")
    detail = f"{lag} committed records were not delivered yet, more than {lag_max}"
    return signal(Reason("node.dispatcher_lag", detail) if lag > lag_max else None)


class ComponentHealth(msgspec.Struct, frozen=True):
    """A component as the node sees it."""

    state: HealthState
    is_critical: bool
    reason_codes: tuple[str, ...]
    silent_for_s: float
    """Since its last signal; 0 for one that is asked."""
    metrics: Mapping[str, Any]


class HealthSnapshot(msgspec.Struct, frozen=True):
    """The node's health at one moment."""

    health_seq: int
    """Counts changes of components."""
    readiness: Literal["ready", "not_ready"]
    liveness: Literal["alive", "dead"]
    components: Mapping[str, ComponentHealth]
    last_transition: tuple[str, HealthState, HealthState] | None
    """Which component changed last, from what to what."""


class _Component:
    """What is kept of a component."""

    __slots__ = ("ask", "is_critical", "is_told", "last", "last_s", "shown", "timeout_s")

    def __init__(
        self, ask: Callable[[], ComponentSignal] | None, timeout_s: float, now_s: float, *, is_critical: bool
    ) -> None:
        self.ask = ask
        self.timeout_s = timeout_s
        self.is_critical = is_critical
        self.last = ComponentSignal("unknown")
        self.last_s = now_s
        self.shown: HealthState = "unknown" if ask is None else "healthy"
        """The state that was last told."""
        self.is_told = False
        """Whether anything was told of it."""


class HealthManager:
    """
    Folds what components say.

    Args:
        clock: For their silence.
        audit: Where changes are put on record.
    """

    def __init__(self, clock: Clock, audit: AuditLog | None = None) -> None:
        self.announcer = Announcer("health_manager")
        self.rejected_count = 0
        """Signals that were not taken."""
        self._clock = clock
        self._audit = audit
        self._components: dict[str, _Component] = {}
        self._seq = 0
        self._last_transition: tuple[str, HealthState, HealthState] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._is_over = False

    def register(
        self,
        component: str,
        *,
        is_critical: bool,
        ask: Callable[[], ComponentSignal] | None = None,
        timeout_s: float = 15.0,
    ) -> None:
        """
        Take a component into account, from now on.

        Args:
            component: Its name.
            is_critical: Whether the node is not ready while the component is not healthy.
            ask: Says how it is. Left out, the component reports by itself,
            timeout_s: at least this often.
        """
        assert component not in self._components
        self._components[component] = _Component(ask, timeout_s, self._clock.monotonic(), is_critical=is_critical)

    def expect(self, component: str, timeout_s: float) -> None:
        """From now on a component that reports by itself does so at least this often."""
        self._components[component].timeout_s = timeout_s

    def report(
        self,
        component: str,
        state: HealthState,
        reasons: tuple[Reason, ...] = (),
        metrics: Mapping[str, Any] | None = None,
    ) -> None:
        """
        A component says how it is.

        Raises:
            InvalidSignal: It is not registered, is one that is asked, gives a reason although it is healthy or none although it is not, or
                sends more than a signal may hold.
        """
        known = self._components.get(component)
        problem = None
        if known is None or known.ask is not None:
            problem = "does not report by itself"
        elif state not in ("healthy", "degraded", "failed") or (state == "healthy") == bool(reasons):
            problem = f"the state {state!r} does not fit the {len(reasons)} reasons that are given for it"
        elif metrics is not None and len(metrics) > _METRICS_MAX:
            problem = f"sends more than {_METRICS_MAX} metrics"
        if known is None or problem is not None:
            self.rejected_count += 1
            raise InvalidSignal(component, problem or "")
        known.last = ComponentSignal(state, reasons, metrics or {})
        known.last_s = self._clock.monotonic()
        if not self._is_over:
            self.look()

    # What is asked

    def signal_of(self, component: str) -> ComponentSignal:
        """How a component is now, its silence taken into account."""
        known = self._components[component]
        if known.ask is not None:
            return known.ask()
        silent_s = self._clock.monotonic() - known.last_s
        missed = int(silent_s / known.timeout_s)
        if missed == 0 and known.last.state != "unknown":
            return known.last
        state: HealthState = "failed" if missed >= 3 else "degraded" if missed == 2 else "unknown"
        why = Reason("node.silent_component", f"{component} has not reported for {silent_s:.0f} s")
        return ComponentSignal(state, (why, *known.last.reasons), known.last.metrics)

    def readiness(self, *, seq: int = 0, dispatched_seq: int = 0) -> Readiness:
        """The fold: whether the node is ready, and what speaks against it."""
        reasons: list[Reason] = []
        warnings: list[Reason] = []
        for name, known in self._components.items():
            signal = self.signal_of(name)
            if signal.state != "healthy":
                (reasons if known.is_critical else warnings).extend(signal.reasons)
        return Readiness(not reasons, tuple(reasons), tuple(warnings), seq, dispatched_seq)

    def snapshot(self) -> HealthSnapshot:
        """Everything that is known now."""
        now_s = self._clock.monotonic()
        components: dict[str, ComponentHealth] = {}
        for name, known in self._components.items():
            signal = self.signal_of(name)
            silent_s = 0.0 if known.ask is not None else now_s - known.last_s
            codes = tuple(reason.code for reason in signal.reasons)
            components[name] = ComponentHealth(signal.state, known.is_critical, codes, silent_s, signal.metrics)
        bad = [each for each in components.values() if each.is_critical and each.state != "healthy"]
        is_dead = any(each.state == "failed" and each.metrics.get("alive") is False for each in bad)
        return HealthSnapshot(
            self._seq,
            "not_ready" if bad else "ready",
            "dead" if is_dead else "alive",
            components,
            self._last_transition,
        )

    # What is told

    def look(self) -> None:
        """Tell of every component that is in another state than was told last."""
        for name, known in self._components.items():
            signal = self.signal_of(name)
            if signal.state == known.shown:
                continue
            before, known.shown = known.shown, signal.state
            if (before, signal.state) == ("unknown", "healthy") and not known.is_told:
                continue  # the first word of a component that starts as it should
            known.is_told = True
            self._seq += 1
            self._last_transition = (name, before, signal.state)
            self._tell(name, before, signal, is_critical=known.is_critical)

    def _tell(self, name: str, before: HealthState, signal: ComponentSignal, *, is_critical: bool) -> None:
        codes = tuple(reason.code for reason in signal.reasons)
        is_good = signal.state == "healthy"
        logger.log(
            logging.INFO if is_good else logging.WARNING,
            "%s is %s%s",
            name,
            signal.state,
            "".join(f"; {each}" for each in codes),
        )
        if self._audit is not None:
            self._audit.note(
                AuditRecord(
                    category="health.state_changed",
                    kind="operational",
                    severity="info" if is_good else "warn",
                    data={"component": name, "state": signal.state, "previous_state": before, "reasons": list(codes)},
                )
            )
        about: dict[str, str | tuple[str, ...]] = {"component": name, "state": signal.state, "reasons": codes}
        self.announcer.tell("system.health_state_changed", {**about, "previous_state": before, "health_seq": self._seq})
        if is_critical and signal.state in ("degraded", "failed"):
            self.announcer.tell("security.health_degraded", about)

    def start(self) -> None:
        """Begin to look by itself: silence is noticed, and told, although nobody asks."""
        self._watch = asyncio.get_running_loop().create_task(
            self._look_for_ever(self._clock.monotonic()), name="tidings-health"
        )

    async def stop(self) -> None:
        """Look no longer, and tell no more. Stopping twice is fine."""
        self._is_over = True
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watch

    async def _look_for_ever(self, looked_s: float) -> None:
        while True:
            now_s = self._clock.monotonic()
            if now_s - looked_s > _LATE_S:
                # The whole process was suspended, or its clock was set on: nobody could have reported.
                for known in self._components.values():
                    known.last_s = now_s
            looked_s = now_s
            self.look()
            await self._clock.sleep(_LOOK_INTERVAL_S)
