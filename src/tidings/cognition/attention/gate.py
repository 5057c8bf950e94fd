"""
The attention gate: which events reach the workspace now, first, later or not at all.

A cascade: policy, capacity, intents, salience, action, routing, trace. Deterministic: the same requests at the same times get
the same answers; time comes from the clock that was handed in. Fails closed: what cannot be judged is dropped, with the reason.

The gate keeps one decision for each event: ``admit``, ``defer``, ``boost`` and ``drop`` ask about it, ``handle`` acts on it
and publishes it. A deferral holds until its retry time; asking after that makes a new decision. Decisions made by asking wait
in a bounded list until ``flush`` publishes them.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, NamedTuple, TypeVar

import msgspec

from tidings.core.clock import SYSTEM_CLOCK, Clock, datetime_of
from tidings.core.events import Event, SecurityBand

from ..ports import MetricSink, Publish, no_metrics
from ..resilience import BreakerState, CircuitBreaker, TokenBuckets
from .actions import (
    CAPACITY_DEFER_MS,
    CAPACITY_PRIORITY,
    RATE_DEFER_MS_MAX,
    LoadMonitor,
    adapt,
    capacity,
    choose,
    defer_ms,
)
from .decisions import (
    BOOST_STEP,
    HEARINGS_EXHAUSTED,
    LOW_SALIENCE,
    QUEUE_FULL,
    THRESHOLD_RAISED,
    audit_event,
    defer_reason,
    error_event,
    relay_event,
)
from .requests import (
    CONFIGURED,
    GateAction,
    GateDecision,
    GateProfile,
    GateRequest,
    GateResponse,
    GateTrace,
    IntentGuess,
    Thresholds,
    request_of,
)
from .salience import Salience, Screening, derive_intents, load_shift, priority_of, route, salience_of, screen
from .unpublished import PublishMany, UnpublishedDecisions


class DeferredQueue:
    """A priority queue of events by retry time; at the same time, in the order they came."""

    __slots__ = ("_added", "_count_max", "_heap", "_ids", "_pressing_until_s")

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        self._heap: list[tuple[float, int, Event]] = []
        self._ids: set[str] = set()
        self._pressing_until_s: list[float] = []
        self._added = 0

    def __len__(self) -> int:
        return len(self._heap)

    def __contains__(self, event_id: object) -> bool:
        return event_id in self._ids

    def add(self, event: Event, retry_at_s: float, *, is_pressing: bool) -> int | None:
        """
        Keep an event until ``retry_at_s``.

        Returns:
            Its place in the queue from 1, or ``None`` when the queue is full. An event that waits already stays where
            it is.
        """
        event_id = event.meta.event_id
        if event_id in self._ids:
            return self._place(event_id)
        if len(self._heap) >= self._count_max:
            return None
        self._added += 1
        heapq.heappush(self._heap, (retry_at_s, self._added, event))
        self._ids.add(event_id)
        if is_pressing:
            heapq.heappush(self._pressing_until_s, retry_at_s)
        return self._place(event_id)

    def remove(self, event_id: str) -> None:
        """Let go of an event, if it waits."""
        if event_id in self._ids:
            self._ids.discard(event_id)
            self._heap = [entry for entry in self._heap if entry[2].meta.event_id != event_id]
            heapq.heapify(self._heap)

    def take_due(self, now_s: float) -> list[Event]:
        """Take out the events whose time has come, earliest first."""
        due: list[Event] = []
        while self._heap and self._heap[0][0] <= now_s:
            event = heapq.heappop(self._heap)[2]
            self._ids.discard(event.meta.event_id)
            due.append(event)
        return due

    def pressing_count(self, now_s: float) -> int:
        """How many wait because the gate was busy, and are not due yet."""
        while self._pressing_until_s and self._pressing_until_s[0] <= now_s:
            heapq.heappop(self._pressing_until_s)
        return len(self._pressing_until_s)

    def next_at_s(self) -> float | None:
        """When the next event is due."""
        return self._heap[0][0] if self._heap else None

    def _place(self, event_id: str) -> int:
        mine = next(entry for entry in self._heap if entry[2].meta.event_id == event_id)
        return 1 + sum(entry[:2] < mine[:2] for entry in self._heap)


TTL_MS: Final = 30_000
"""How long a decision holds that is not to be waited for."""


class Judgement:
    """What is known about a request so far."""

    def __init__(self, request: GateRequest, screening: Screening) -> None:
        self._request = request
        self._screening = screening
        self._path: list[str] = []
        self.load = 0.0
        self.load_shift = 0.0
        self.intents: tuple[IntentGuess, ...] | None = None
        self.salience: Salience | None = None
        self.thresholds: Thresholds | None = None
        self.previous: GateAction | None = None
        self.stability_count = 0
        self.is_held = False
        self.action = GateAction.DROP
        self.reasons: tuple[str, ...] = ()
        self.ttl_ms = 0
        self._priority = 0.0

    def step(self, stage: str) -> None:
        """Note that a stage was entered; the last one entered is where the decision fell."""
        self._path.append(stage)

    def settle(self, action: GateAction, priority: float, reasons: tuple[str, ...], ttl_ms: int = TTL_MS) -> Judgement:
        """Write the verdict down."""
        self.action, self._priority, self.ttl_ms = action, priority, ttl_ms
        self.reasons = (*reasons, *self._screening.notes)
        return self

    def refuse(self, reason: str) -> None:
        """Turn the verdict into a refusal, because what was decided cannot be done."""
        self.action, self.ttl_ms = GateAction.DROP, TTL_MS
        self.reasons = (*self.reasons, reason)

    def response(self, execution_time_ms: float) -> GateResponse:
        """The answer in full."""
        salience, thresholds = self.salience, self.thresholds
        # A request refused for its form is not read any further, not even for its intent.
        intents = self.intents if self.intents is not None else derive_intents(_without_text(self._request))
        confidence = 1.0 if salience is None else salience.confidence
        return GateResponse(
            request_id=self._request.request_id,
            gate_decision=GateDecision(
                action=self.action,
                priority=self._priority,
                reasons=self.reasons,
                obligations=self._screening.obligations,
                ttl_ms=self.ttl_ms,
                confidence=confidence,
                uncertainty=1.0 - confidence,
            ),
            derived_intents=intents,
            routing=route(intents[0].intent, self.action, self._request.deadline, self._screening.processing_ms_max),
            trace=GateTrace(
                features={} if salience is None else salience.features,
                weights={} if salience is None else salience.weights,
                raw_score=0.0 if salience is None else salience.raw_score,
                load_shift=self.load_shift,
                calibrated_priority=self._priority,
                thresholds={} if thresholds is None else msgspec.structs.asdict(thresholds),
                load=self.load,
                decision_path=tuple(self._path),
                previous_decision=None if self.previous is None else self.previous.value,
                stability_count=self.stability_count,
                oscillation_prevention=self.is_held,
                execution_time_ms=execution_time_ms,
            ),
        )


def _without_text(request: GateRequest) -> GateRequest:
    return msgspec.structs.replace(request, text="")


_K = TypeVar("_K")
_V = TypeVar("_V")

_TIMERS_EARLY_S: Final = 0.01


class _Answer(NamedTuple):
    response: GateResponse
    until_s: float
    """From then on it holds no longer, and asking is a new hearing."""


class _Heard(NamedTuple):
    """How often an event was heard, and how often of those it was deferred for low salience."""

    hearings: int = 0
    low_salience: int = 0


class AttentionGate:
    """
    Decides on events before they reach the workspace.

    Args:
        clock: Where the time comes from.
        profile: Weights, thresholds and limits.
        publish: Where decisions are published, one by one; without it and ``publish_many``, ``flush`` forgets them.
        publish_many: Publishes the decisions that wait as one list; used instead of ``publish``. It costs far less when
            events are handled concurrently.
        metrics: Gets ``gate_decisions_total`` and its kin.
        band_default: For events without a band; ``None`` refuses them.
        queue_depth: How much work waits behind the gate; without it, what the gate itself has deferred for being busy.
        keeps_deferred: Whether deferred events wait in the gate's queue for ``take_due``. ``False`` where their source
            keeps them and asks again, as a durable group does with ``Nack(delay_s=...)``.
    """

    def __init__(
        self,
        clock: Clock = SYSTEM_CLOCK,
        profile: GateProfile = CONFIGURED,
        *,
        publish: Publish | None = None,
        publish_many: PublishMany | None = None,
        metrics: MetricSink = no_metrics,
        band_default: SecurityBand | None = SecurityBand.AMBER,
        queue_depth: Callable[[], int] | None = None,
        keeps_deferred: bool = True,
    ) -> None:
        self.profile = profile
        self._clock = clock
        self._metrics = metrics
        self._band_default = band_default
        self._deferred = DeferredQueue(profile.deferred_count_max)
        self._queue_depth = queue_depth
        self._keeps_deferred = keeps_deferred
        self._buckets = TokenBuckets(profile.rate, profile.remembered_count_max)
        self._breaker = CircuitBreaker(profile.breaker)
        self._monitor = LoadMonitor(profile.limits)
        self._previous: OrderedDict[tuple[str, ...], tuple[GateAction, int]] = OrderedDict()
        self._answers: OrderedDict[str, _Answer] = OrderedDict()
        self._heard: OrderedDict[str, _Heard] = OrderedDict()
        self._unpublished = UnpublishedDecisions(publish, publish_many, metrics)

    @property
    def unpublished_lost_count(self) -> int:
        """Number of decision events that were never published: no flush in time, or the log cannot store them."""
        return self._unpublished.lost_count

    # What the bus's document calls the gate by.

    def admit(self, event: Event) -> bool:
        """Whether the event may enter the workspace now, boosted or not."""
        return self._answer(event).gate_decision.action.rank >= GateAction.ADMIT.rank

    def defer(self, event: Event) -> bool:
        """Whether the event has to wait; if so ``take_due`` will give it back, or asking again when it is due hears it."""
        return self._answer(event).gate_decision.action is GateAction.DEFER

    def boost(self, event: Event) -> bool:
        """Whether the event goes first; if so its priority has been raised."""
        return self._answer(event).gate_decision.action is GateAction.BOOST

    def drop(self, event: Event) -> bool:
        """Whether the event is refused."""
        return self._answer(event).gate_decision.action is GateAction.DROP

    # Deciding, and living with it.

    def decide(self, request: GateRequest) -> GateResponse:
        """Judge a request. Counts it, spends its actor's rate, and remembers the decision for the next one's inertia."""
        started_s = self._clock.monotonic()
        return self._respond(self._judge(request, started_s), started_s)

    async def handle(self, event: Event) -> GateResponse:
        """
        Judge an event, act on the answer and return when the decision is published.

        Calls may run concurrently: one of them publishes the decisions of all that wait.

        Raises:
            InvalidEvent: The decision can never be stored. It is counted as lost.
            Exception: Whatever else ``publish`` raises; the decision stays in the waiting list for the next ``flush``.
        """
        before = self._unpublished.added_count
        response = self._answer(event)
        await self._unpublished.flush(before)
        return response

    async def flush(self) -> int:
        """
        Publish the decisions that wait, in order. Return the number that this call published.

        Raises:
            InvalidEvent: One of them can never be stored. It is counted as lost; the next flush continues behind it.
            Exception: Whatever else ``publish`` raises; the decisions stay.
        """
        return await self._unpublished.flush()

    def take_due(self) -> list[Event]:
        """Take the deferred events whose time has come; each will be judged anew."""
        due = self._deferred.take_due(self._clock.monotonic())
        for event in due:
            self._answers.pop(event.meta.event_id, None)
        return due

    @property
    def deferred_count(self) -> int:
        """How many events wait."""
        return len(self._deferred)

    def next_due_s(self) -> float | None:
        """When, on the clock's monotonic scale, the next deferred event is due."""
        return self._deferred.next_at_s()

    def record_outcome(self, *, is_ok: bool, latency_ms: float) -> None:
        """Tell how the handling of an admitted event went: it moves thresholds and the circuit breaker."""
        now_s = self._clock.monotonic()
        self._monitor.finished(is_ok, latency_ms, now_s)
        self._breaker.record(is_ok, now_s)
        self._metrics("breaker_state", float(self._breaker.state(now_s).level), {})

    def _answer(self, event: Event) -> GateResponse:
        event_id, started_s = event.meta.event_id, self._clock.monotonic()
        known = self._answers.get(event_id)
        if known is not None and started_s < known.until_s:
            self._answers.move_to_end(event_id)
            return known.response
        # Heard again now: it must not come out of the queue as well.
        self._deferred.remove(event_id)
        request = request_of(event, band_default=self._band_default)
        before = self._heard.get(event_id, _Heard())
        judged = self._judge(request, started_s, is_heard_again=before.hearings > 0)
        is_dull = judged.action is GateAction.DEFER and defer_reason(judged.reasons) == LOW_SALIENCE
        hearing = before.hearings + 1
        self._remember(self._heard, event_id, _Heard(hearing, before.low_salience + is_dull))
        retry_at_s = started_s + judged.ttl_ms / 1000
        place: int | None = None
        if is_dull and before.low_salience + 1 >= self.profile.low_salience_hearings_max:
            judged.refuse(HEARINGS_EXHAUSTED)
        elif judged.action is GateAction.DEFER and self._keeps_deferred:
            is_pressing = not is_dull and "rate_limited" not in judged.reasons
            place = self._deferred.add(event, retry_at_s, is_pressing=is_pressing)
            if place is None:
                judged.refuse(QUEUE_FULL)
        elif judged.action is GateAction.BOOST:
            event.meta.priority = min(10, request.event_priority + BOOST_STEP)
        response = self._respond(judged, started_s)
        self._metrics("gate_queue_depth", float(len(self._deferred)), {})
        # A timer may fire a moment early, and whoever waited by it has waited.
        until_s = retry_at_s - _TIMERS_EARLY_S if judged.action is GateAction.DEFER else math.inf
        self._remember(self._answers, event_id, _Answer(response, until_s))
        now = datetime_of(self._clock.now_ns())
        self._unpublished.add(relay_event(request, response, now, hearing=hearing, queue_position=place))
        self._unpublished.add(audit_event(request, response, now, hearing=hearing))
        malformed = [
            reason for reason in response.gate_decision.reasons if reason.startswith(("missing:", "band_unknown"))
        ]
        if malformed:
            self._unpublished.add(error_event(request, ", ".join(malformed), now))
        return response

    def _respond(self, judged: Judgement, started_s: float) -> GateResponse:
        response = judged.response((self._clock.monotonic() - started_s) * 1000)
        self._count(response)
        return response

    def _depth(self, now_s: float, *, is_heard_again: bool) -> int:
        if self._queue_depth is not None:
            return self._queue_depth()
        # What comes out of the queue makes it shorter: were the others' waiting held against it, a long queue would put
        # off all that comes out of it, and never empty.
        return 0 if is_heard_again else self._deferred.pressing_count(now_s)

    def _judge(self, request: GateRequest, now_s: float, *, is_heard_again: bool = False) -> Judgement:
        self._monitor.arrived(now_s)
        profile = self.profile
        screening = screen(request, profile.text_chars_max)
        judged = Judgement(request, screening)
        judged.step("policy")
        if screening.refusals:
            return judged.settle(GateAction.DROP, 0.0, screening.refusals)
        if request.qos.routing == "fast-path":
            judged.step("fast_path")
            return judged.settle(GateAction.ADMIT, 1.0, ("fast_path",))

        judged.step("capacity")
        depth = self._depth(now_s, is_heard_again=is_heard_again)
        view = self._monitor.view(now_s, depth)
        judged.load = view.load
        action, limits = capacity(self._monitor.pressure(now_s, depth), profile.limits)
        ttl_ms = CAPACITY_DEFER_MS
        source_rate = (request.actor.person_id, request.space_id)
        if action is None and not self._buckets.take(source_rate, now_s):
            action, limits = GateAction.DEFER, ("rate_limited",)
            # Deferred alike, a burst would come back at one moment, and all but a few would be deferred again.
            earliest_s, latest_s = (now_s + ms / 1000 for ms in (CAPACITY_DEFER_MS, RATE_DEFER_MS_MAX))
            ttl_ms = math.ceil((self._buckets.turn(source_rate, earliest_s, latest_s) - now_s) * 1000 - 1e-6)
        if action is None and not self._breaker.allow(now_s):
            action, limits = GateAction.DEFER, ("breaker_open",)
        if action is not None:
            return judged.settle(action, CAPACITY_PRIORITY, limits, ttl_ms=ttl_ms)

        judged.step("intents")
        judged.intents = derive_intents(request)
        judged.step("salience")
        salience = judged.salience = salience_of(request, profile)
        judged.load_shift = load_shift(request, salience.features, view.load)
        priority = priority_of(salience.raw_score + judged.load_shift, profile)

        judged.step("action")
        source = (request.actor.person_id, request.space_id, screening.band.value, judged.intents[0].intent.value)
        previous, stable = self._previous.get(source, (None, 0))
        thresholds = judged.thresholds = adapt(profile.thresholds, view)
        choice = choose(
            priority,
            screening.band,
            thresholds,
            load=view.load,
            previous=previous,
            margin=profile.hysteresis_margin,
        )
        judged.previous, judged.is_held = previous, choice.is_held
        judged.stability_count = stable + 1 if choice.action is previous else 1
        self._remember(self._previous, source, (choice.action, judged.stability_count))
        is_deferred = choice.action is GateAction.DEFER
        reasons = choice.reasons
        if is_deferred and profile.thresholds.admit <= choice.priority < thresholds.admit:
            reasons = (*reasons, THRESHOLD_RAISED)
        judged.step("routing")
        ttl_ms = defer_ms(choice.priority) if is_deferred else TTL_MS
        return judged.settle(choice.action, choice.priority, reasons, ttl_ms=ttl_ms)

    def _remember(self, where: OrderedDict[_K, _V], key: _K, value: _V) -> None:
        where[key] = value
        where.move_to_end(key)
        if len(where) > self.profile.remembered_count_max:
            where.popitem(last=False)

    def _count(self, response: GateResponse) -> None:
        intent = response.derived_intents[0].intent.value
        decision = response.gate_decision
        self._metrics("gate_decisions_total", 1.0, {"action": decision.action.value, "intent": intent})
        self._metrics("gate_latency_seconds", response.trace.execution_time_ms / 1000, {})
        self._metrics("gate_priority_score", decision.priority, {})
        for guess in response.derived_intents:
            self._metrics("intents_derived_total", 1.0, {"intent": guess.intent.value})

    def breaker_state(self) -> BreakerState:
        """Whether the circuit breaker lets requests pass."""
        return self._breaker.state(self._clock.monotonic())
