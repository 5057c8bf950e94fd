"""What comes in: moments, how they felt by the classifier, and by the predictor what might help."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple

from tidings.cognition.attention import Intent
from tidings.cognition.payloads import AffectAnnotated, payload_of
from tidings.types import Event, EventMeta, EventType, SecurityBand

from .part import Part
from .wiring import PERSON, SPACE, WRITE_TOPIC, ZONE

__all__ = ["MOMENTS", "Classifier", "Moment", "Predictor", "moment_event"]

_AFFECT_CONFIDENCE: Final = 0.67


class Moment(NamedTuple):
    """Something that happens at home; redacted already, as everything on the bus must be."""

    text: str
    tags: tuple[str, ...]
    valence: float
    arousal: float
    hours_ago: int
    action: str
    risk: str


MOMENTS: Final = (
    Moment("soccer practice was moved to six", ("urgent", "sports"), 0.12, 0.73, 3, "move_appointment", "LOW"),
    Moment("the school bus was late again", ("urgent", "travel"), -0.62, 0.81, 10, "order_taxi", "HIGH"),
    Moment("tea with the neighbours", ("family",), 0.70, 0.30, 6, "note_birthday", "LOW"),
    Moment("the washing machine leaks", ("repair",), -0.35, 0.66, 2, "call_plumber", "MEDIUM"),
)


def moment_event(moment: Moment, now: datetime) -> Event:
    """The wish that a moment be remembered, with all that the gate looks at."""
    meta = EventMeta(WRITE_TOPIC, "WRITE_REQUEST", SPACE, ts=now, actor=PERSON, band=SecurityBand.GREEN)
    payload = {
        "text": moment.text,
        "tags": list(moment.tags),
        "occurred_at": (now - timedelta(hours=moment.hours_ago)).isoformat(),
        "tz": ZONE,
        "intent": Intent.WRITE.value,
        "intent_confidence": 0.95,
        "affect": {"valence": moment.valence, "arousal": moment.arousal, "confidence": _AFFECT_CONFIDENCE},
    }
    return Event(meta, payload)


class Classifier(Part):
    """Says how a moment felt."""

    name = "classifier"

    async def annotate(self, moment: Moment, event_id: str) -> None:
        """Publish valence and arousal of the moment ``event_id``."""
        felt = AffectAnnotated(
            event_id=event_id,
            valence=moment.valence,
            arousal=moment.arousal,
            tags=moment.tags,
            confidence=_AFFECT_CONFIDENCE,
        )
        await self.send("affect", EventType.AFFECT_ANNOTATED, payload_of(felt))


class Predictor(Part):
    """Foresees a need, and an action that would meet it."""

    name = "predictor"

    async def predict(self, moment: Moment, event_id: str) -> None:
        """Publish the candidate that the moment ``event_id`` suggests."""
        candidate: dict[str, Any] = {
            "event_id": event_id,
            "need": moment.tags[0],
            "action": {"name": moment.action, "args": {"about": moment.text}},
            "risk_level": moment.risk,
            "confidence": 0.8,
        }
        await self.send("cortex", EventType.CORTEX_PREDICTION, candidate)
