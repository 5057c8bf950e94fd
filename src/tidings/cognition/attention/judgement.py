"""One judgement in the making: the stages fill it in, and at the end it is the gate's answer with its trace."""

from __future__ import annotations

from typing import Final

import msgspec

from .intents import derive_intents, route
from .profiles import Thresholds
from .requests import Action, GateDecision, GateRequest, GateResponse, GateTrace, IntentGuess
from .salience import Salience
from .screening import Screening

__all__ = ["TTL_MS", "Judgement"]

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
        self.previous: Action | None = None
        self.stability_count = 0
        self.is_held = False
        self.action = Action.DROP
        self.reasons: tuple[str, ...] = ()
        self.ttl_ms = 0
        self._priority = 0.0

    def step(self, stage: str) -> None:
        """Note that a stage was entered; the last one entered is where the decision fell."""
        self._path.append(stage)

    def settle(self, action: Action, priority: float, reasons: tuple[str, ...], ttl_ms: int = TTL_MS) -> Judgement:
        """Write the verdict down."""
        self.action, self._priority, self.ttl_ms = action, priority, ttl_ms
        self.reasons = (*reasons, *self._screening.notes)
        return self

    def refuse(self, reason: str) -> None:
        """Turn the verdict into a refusal, because what was decided cannot be done."""
        self.action, self.ttl_ms = Action.DROP, TTL_MS
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
