"""
The six engines, joined.

    managers → intake → normalization → binding → delivery → subscribers
                          ↑  the registry stands at both ends, telemetry looks at all  ↑

The queues between them are bounded, and one count, the ceiling, holds for all of them and every buffer together. ``step`` runs the engines in their
order; it is called by the loop whenever something waits, and moves a bounded number of envelopes each time. Nothing here reads a log, a disk or a
socket: descriptors come in by channels that the node hands out, envelopes go out through sinks.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal

from tidings.access.announcements import Announcer
from tidings.access.apps import AppChange, AppRegistry, AppRemoved
from tidings.access.audit import AuditLog
from tidings.access.book import AccessBook
from tidings.access.errors import AccessUnavailable
from tidings.access.guard import AbuseCounter, DosGuard
from tidings.access.visibility import CapsuleIssuer
from tidings.core.clock import Clock
from tidings.core.settings import checked
from tidings.wire.gateway import CloseReason

from .app_events import declaration_of
from .binding import AudienceBinder
from .ceiling import Ceiling
from .constants import FLUSH_TIMEOUT_S, STEP_ENVELOPES_MAX
from .contexts import RequestContext
from .delivery import Deliverer
from .errors import CrossAppViolation, DeclarationRefused, GatewayError, QueueFull
from .event_types import GRAPH_MANAGER, SOURCE_MANAGERS, EventDeclarations
from .filters import AdminGate, FilterRules
from .intake import IntakeChannel, Rejection, SourceIntake, TaggedDescriptor
from .matching import Matching
from .names import EventClass
from .normalization import EnvelopeBuilder, Normalized, Normalizer
from .own_events import ManagerEvents
from .queues import BoundedQueue, ClassQueues
from .refusals import AppNotFound, GatewayDraining, GatewayNotReady, SubscriptionRefused
from .registry import Admission, SubscriberRegistry
from .resume_index import ResumeIndex, Retained
from .resume_tokens import ResumeTokens
from .settings import NOT_RELOADABLE, EventSettings
from .shedding import Shedder
from .telemetry import PipelineState, Telemetry

logger = logging.getLogger(__name__)

_TICK_S: Final = 0.05
"""How often paces, heartbeats and telemetry are looked at."""
_CLOSED_AT_ONCE: Final = 1_000
_KEY_BYTES: Final = 32

HealthReport = Callable[[Literal["healthy", "degraded", "failed"], tuple[str, ...], Mapping[str, Any]], None]


class ReloadVetoed(GatewayError):
    """New settings cannot hold while the gateway runs; the old ones stay in force."""

    code = "gateway.reload_vetoed"
    text = "event.{path}: {problem}"
    path: str
    problem: str
    hint: str | None = None


class Gateway:
    """
    Authorised realtime delivery.

    Args:
        settings: Limits, windows and paces.
        clock: For all times.
        book: Who may read what; its listener comes before whatever hands descriptors in.
        apps: The apps there are, their event types and the channels between them.
        audit: Where everything that becomes of subscriptions is put on record.
        guard: May keep newcomers out, and have connections closed.
        committed_seq: The last seq that is committed.
        report_health: Called with state, reasons and metrics for the node's health.
        node_id: Says in events which node it is.
        random_bytes: As ``secrets.token_bytes``: for ids, and for the keys that live and die with this gateway.

    Raises:
        SettingsError: A setting is out of its range, or does not fit another.
    """

    def __init__(
        self,
        settings: EventSettings,
        *,
        clock: Clock,
        book: AccessBook,
        apps: AppRegistry,
        audit: AuditLog,
        guard: DosGuard,
        committed_seq: Callable[[], int],
        report_health: HealthReport = lambda state, reasons, metrics: None,
        node_id: str = "local",
        random_bytes: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        self.settings = checked(settings, "event")
        self.declarations: Final = EventDeclarations()
        self.issuer: Final = CapsuleIssuer(book)
        self.ceiling: Final = Ceiling(settings.queue.total_ceiling)
        self.index: Final = ResumeIndex(settings.delivery.resume_window)
        self.life: Final = random_bytes(16).hex()
        """Names this gateway while it lives, as its resume tokens do."""
        tokens = ResumeTokens(random_bytes(_KEY_BYTES))
        self.builder: Final = EnvelopeBuilder(tokens, random_bytes(_KEY_BYTES), clock, random_bytes)
        self.rules: Final = FilterRules(self.declarations, apps, AdminGate(settings.security.admin_channels))
        self.telemetry: Final = Telemetry(
            settings.telemetry,
            clock=clock,
            audit=audit,
            abuse=AbuseCounter(guard, clock),
            report_health=report_health,
        )
        self._clock = clock
        self._node_id = node_id
        self._apps = apps
        self._audit = audit
        self._guard = guard
        self._random_bytes = random_bytes
        self._state: Literal["starting", "running", "draining"] = "starting"
        self._is_listening = self._has_listened = False
        self._has_config = True
        self._failure: str | None = None
        self._steps = 0
        self._scheduled: asyncio.Handle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.Task[None] | None = None
        self._managers: list[ManagerEvents] = []

        total = settings.queue.total_ceiling
        self._taken: BoundedQueue[TaggedDescriptor] = BoundedQueue(total)
        self._normalized: ClassQueues[Normalized] = ClassQueues(total)
        self._bound: ClassQueues[Retained] = ClassQueues(total)
        self._shedder = Shedder(
            self._taken,
            self._normalized,
            self._bound,
            self.index,
            self.ceiling,
            lambda kind, *_: self.telemetry.shed(kind.value, 1),
        )
        self.intake: Final = SourceIntake(
            self.declarations,
            self.ceiling,
            self._taken,
            committed_seq=committed_seq,
            is_app_known=apps.is_enabled,
            make_room=self._make_room_for_graph,
            on_rejected=self._note_rejection,
            wake=self._wake,
        )
        self._normalizer = Normalizer(
            self._taken,
            self._normalized,
            self.index,
            self.builder,
            self.declarations,
            self.ceiling,
            on_produced=self.telemetry.produced,
            on_rejected=self._note_rejection,
        )
        self._binder = AudienceBinder(
            self._normalized,
            self._bound,
            issuer=self.issuer,
            builder=self.builder,
            index=self.index,
            ceiling=self.ceiling,
            telemetry=self.telemetry,
        )
        matching = Matching(self.rules, lambda: (self.issuer.version, apps.version))
        self.registry: Final = SubscriberRegistry(
            settings,
            clock=clock,
            rules=self.rules,
            issuer=self.issuer,
            matching=matching,
            index=self.index,
            tokens=tokens,
            ceiling=self.ceiling,
            guard=guard,
            telemetry=self.telemetry,
            graph_seq=lambda: self.intake.graph_seq,
            new_connection_id=lambda: random_bytes(16).hex(),
            wake=self._wake,
        )
        self._deliverer = Deliverer(
            self._bound,
            index=self.index,
            matching=matching,
            registry=self.registry,
            ceiling=self.ceiling,
            make_room=self._give_up_one,
            telemetry=self.telemetry,
        )
        self.hear(self.telemetry.announcer)
        self._declare_apps()

    # Its life

    def hear(self, announcer: Announcer) -> IntakeChannel:
        """
        From now on what a manager announces goes in through a channel of its own, which is returned.

        Raises:
            SourceRefused: There is no such manager, it has its channel, or the gateway has started.
        """
        channel = self.intake.register(announcer.source_manager)
        events = ManagerEvents(
            channel, self._clock, node_id=self._node_id, new_trace_id=lambda: self._random_bytes(16).hex()
        )
        announcer.listener = events.tell
        self._managers.append(events)
        return channel

    def start(self) -> None:
        """Run, on this loop: every channel there will be is registered."""
        self.intake.close_registration()
        self.intake.is_open = True
        self._apps.on_change.append(self._app_changed)
        self._guard.on_directive.append(self.registry.apply_directive)
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.create_task(self._keep_time(), name="tidings-gateway")
        self._state = "running"
        self._wake()

    def listener_bound(self, is_listening: bool) -> None:
        """Whether there is a surface to which subscribers can come. Health hears of it at once."""
        self._is_listening = is_listening
        self._has_listened = self._has_listened or is_listening
        self.telemetry.tick(self.pipeline_state())

    def drain(self) -> None:
        """Admit nobody any more."""
        self._state = "draining"
        self.registry.is_open = False

    async def stop(self, deadline_s: float) -> None:
        """Admit nobody, close every connection with its reason, give the records of that a limited time, and drop everything. Stopping twice is fine."""
        self.drain()
        ends_s = self._clock.monotonic() + min(deadline_s, FLUSH_TIMEOUT_S)
        while len(self.registry):
            # Not all at once: the audit log takes so many records at a time, and each closure is to be on record.
            self.registry.close_all(CloseReason.SHUTDOWN, count_max=_CLOSED_AT_ONCE)
            await self._audit.flush(max(0.0, ends_s - self._clock.monotonic()))
        self.intake.is_open = False
        if self._timer is not None:
            self._timer.cancel()
            await asyncio.gather(self._timer, return_exceptions=True)
            self._timer = None
            self._apps.on_change.remove(self._app_changed)
            self._guard.on_directive.remove(self.registry.apply_directive)
        self._taken.clear()
        self._normalized.clear()
        self._bound.clear()
        self._binder.clear()
        self.index.clear()

    def fail(self, reason: str) -> None:
        """Something broke for good: nobody is admitted any more, and those who would wait in vain are let go."""
        self._failure = reason
        self.intake.is_open = False
        self.registry.close_all(CloseReason.INTERNAL_ERROR)

    def readiness(self) -> tuple[str, ...]:
        """Why nobody is admitted now; empty if the gateway is ready."""
        found: list[str] = []
        if self._state != "running":
            found.append(self._state)
        elif not self._has_listened or not self.intake.sources >= SOURCE_MANAGERS:
            found.append("starting")
        if self._failure is not None:
            found.append(self._failure)
        if not self._has_config:
            found.append("config_invalid")
        if not self._is_listening:
            found.append("listener_unavailable")
        if self.issuer.unavailable_for is not None:
            found.append("acl_unavailable")
        if self._audit.problem is not None:
            found.append("log_unavailable")
        if not self.ceiling.has_room_for_envelope(GRAPH_MANAGER):
            found.append("intake_saturated")
        elif self.ceiling.is_paused:
            found.append("queue_saturated")
        return tuple(found)

    def admit(self, context: RequestContext, *, address: str | None = None) -> Admission:
        """
        A place for a new connection, before it is upgraded; see ``SubscriberRegistry.admit``.

        Raises:
            GatewayDraining, GatewayNotReady: Nothing is delivered now.
            AppNotFound: There is no such app.
            AdmissionDenied: The guard keeps newcomers out, or a limit is reached.
        """
        reasons = self.readiness()
        problem: SubscriptionRefused | None = None
        if self._state == "draining":
            problem = GatewayDraining()
        elif reasons:
            problem = GatewayNotReady(", ".join(reasons))
        elif not self._apps.is_enabled(context.app_id):
            problem = AppNotFound(context.app_id)
        if problem is not None:
            is_offence = isinstance(problem, AppNotFound)
            self.telemetry.rejected(
                context, problem.reason, cause=problem.describe(), address=address, is_offence=is_offence
            )
            raise problem
        return self.registry.admit(context, address=address)

    # Settings

    def prepare(self, new: EventSettings) -> None:
        """
        Make sure that new settings could hold from now on. Changes nothing.

        Raises:
            ReloadVetoed: They cannot: one takes effect at a start only, or is below what is in use.
        """
        for path in NOT_RELOADABLE:
            section, name = path.split(".")
            if getattr(getattr(new, section), name) != getattr(getattr(self.settings, section), name):
                raise self._vetoed(path, "takes effect at the next start", "set it, and start the node again")
        connections, of_identity, buffered = self.registry.in_use()
        limits, old = new.websocket, self.settings.websocket
        for path, value, before, used in (
            ("websocket.max_connections", limits.max_connections, old.max_connections, connections),
            (
                "websocket.max_connections_per_identity",
                limits.max_connections_per_identity,
                old.max_connections_per_identity,
                of_identity,
            ),
            (
                "websocket.max_connections_per_app",
                limits.max_connections_per_app,
                old.max_connections_per_app,
                self.registry.most_of_app(),
            ),
            ("queue.per_connection", new.queue.per_connection, self.settings.queue.per_connection, buffered),
        ):
            if value is not None and value != before and value < used:
                raise self._vetoed(path, f"{value} is below the {used} in use", "try again when there are fewer")

    def commit(self, new: EventSettings) -> None:
        """From now on these settings hold. They were prepared; if they cannot be applied all the same, the gateway is not ready."""
        self._has_config = False
        try:
            self.registry.apply(new)
            self.telemetry.apply(new.telemetry)
            self.index.resize(new.delivery.resume_window)
        except Exception as error:
            self.telemetry.config_changed(is_applied=False, keys=("event",), problem=f"failed: {type(error).__name__}")
            raise
        self._has_config = True
        self.settings = new
        self.telemetry.config_changed(is_applied=True, keys=("event",))

    def _vetoed(self, path: str, problem: str, hint: str) -> ReloadVetoed:
        self.telemetry.config_changed(is_applied=False, keys=(f"event.{path}",), problem=problem)
        return ReloadVetoed(path, problem, hint)

    # The pump

    def committed(self, records: Sequence[object]) -> None:
        """
        All that these records have to tell was handed in: deliver it now.

        The listener of the dispatcher behind whoever hands descriptors in. Without it they would wait for the loop's next turn, in which everything
        else that has come meanwhile has its turn before.
        """
        if self._scheduled is not None:
            self.step()

    def finish(self) -> None:
        """Deliver all that waits between the engines, however much it is: who may see it is about to change, and not for what is before that."""
        while self._has_queued() and self.step():
            pass

    def step(self) -> int:
        """
        Run the engines once, in their order; returns how many envelopes were delivered.

        While access cannot be decided, nothing is bound and nothing is delivered.
        """
        if self._scheduled is not None:
            self._scheduled.cancel()
            self._scheduled = None
        self._steps += 1
        try:
            return self._run_engines()
        except Exception:
            # Whatever it was, it must not become an envelope that somebody misses without knowing.
            logger.exception("an engine of the gateway failed")
            self.fail("engine_failed")
            return 0

    def _run_engines(self) -> int:
        self._normalizer.run(STEP_ENVELOPES_MAX)
        try:
            self._binder.run(STEP_ENVELOPES_MAX)
        except AccessUnavailable:
            return 0
        if self.issuer.unavailable_for is not None:
            return 0
        now_s = self._clock.monotonic()  # not before: the envelopes' own times are of the lines above
        delivered = self._deliverer.run(STEP_ENVELOPES_MAX, now_s)
        self._deliverer.flush(now_s)
        if self._has_queued():
            self._wake()
        return delivered

    def _has_queued(self) -> bool:
        return bool(len(self._taken) or len(self._normalized) or len(self._binder) or len(self._bound))

    def _wake(self) -> None:
        if self._scheduled is None and self._loop is not None and self._failure is None:
            self._scheduled = self._loop.call_soon(self.step)

    async def _keep_time(self) -> None:
        while True:
            await self._clock.sleep(_TICK_S)
            try:
                self.registry.tick(self._clock.monotonic())
                for each in self._managers:
                    each.flush()
                self.telemetry.tick(self.pipeline_state())
            except Exception:
                logger.exception("telemetry or the registry of the gateway failed")
                self.fail("engine_failed")
            if self.registry.waiting or self._has_queued():
                self._wake()

    def pipeline_state(self) -> PipelineState:
        """The pipeline as it is now, for telemetry and administrators."""
        normalized, bound = self._normalized.depths(), self._bound.depths()
        return PipelineState(
            reasons=self.readiness(),
            queue_depths={each.value: normalized[each] + bound[each] for each in EventClass},
            total_queued=round(self.ceiling.used),
            connections=len(self.registry),
            steps=self._steps,
            has_work=self._has_queued() and self.issuer.unavailable_for is None,
        )

    # Want of room

    def _give_up_one(self) -> bool:
        """Shed what may be: queued events of lower classes, then the connection with the fullest buffer."""
        return self._shedder.shed_one() or self.registry.shed_one()

    def _make_room_for_graph(self) -> bool:
        while not self.ceiling.has_room_for_envelope(GRAPH_MANAGER):
            if not self._give_up_one():
                return False
        return True

    def _note_rejection(self, rejection: Rejection) -> None:
        error = rejection.error
        self.telemetry.descriptor_rejected(
            rejection.source_manager,
            error.name,
            detail=error.describe(),
            event_type=rejection.event_type,
            app_id=rejection.app_id,
            trace_id=rejection.trace_id,
            is_cross_app=isinstance(error, CrossAppViolation),
        )
        if isinstance(error, QueueFull) and rejection.source_manager == GRAPH_MANAGER and self.intake.is_open:
            self.registry.graph_event_lost()

    # Apps

    def _app_changed(self, change: AppChange) -> None:
        if isinstance(change, AppRemoved):
            self.declarations.withdraw(f"app.{change.slug}")
        self._declare_apps()
        self.registry.app_changed(self._apps.is_enabled)

    def _declare_apps(self) -> None:
        """The event types of enabled apps are those that may be told of."""
        for app in self._apps.apps():
            source = f"app.{app.slug}"
            self.declarations.withdraw(source)
            if not self._apps.is_enabled(app.slug):
                continue
            for each in app.event_types.values():
                try:
                    self.declarations.declare(declaration_of(each))
                except DeclarationRefused as error:
                    logger.error("an event type of app %s cannot be told of: %s", app.slug, error)
