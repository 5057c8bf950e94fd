"""What comes in: the writer puts moments down, the classifier says how they felt, the predictor what might help."""

from __future__ import annotations

from datetime import timedelta, timezone
from typing import Any, Final, NamedTuple

from tidings.cognition.payloads import AffectAnnotated, HippoEncode, TemporalIngest, payload_of
from tidings.types import EventType

from .part import Part
from .wiring import SPACE

__all__ = ["MOMENTS", "Classifier", "Moment", "Predictor", "Writer"]


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
_ZONE: Final = timezone(timedelta(hours=2))
_ZONE_NAME: Final = "Europe/Berlin"


class Writer(Part):
    """Writes a moment down twice: what it was, for memory; when it was, for the sense of time."""

    name = "writer"

    async def write(self, moment: Moment) -> str:
        """The id of the episode."""
        at = (self.now() - timedelta(hours=moment.hours_ago)).astimezone(_ZONE)
        episode = HippoEncode(content={"text": moment.text}, space_id=SPACE, occurred_at=at, tags=moment.tags)
        event_id = await self.send("hippo", EventType.HIPPO_ENCODE, payload_of(episode))
        when = TemporalIngest(event_id=event_id, space_id=SPACE, ts=at, tz=_ZONE_NAME, tags=moment.tags)
        await self.send("temporal", EventType.HIPPO_ENCODE, payload_of(when))
        return event_id


class Classifier(Part):
    """Says how a moment felt."""

    name = "classifier"

    async def annotate(self, moment: Moment, event_id: str) -> None:
        """Publish valence and arousal of the episode ``event_id``."""
        felt = AffectAnnotated(
            event_id=event_id, valence=moment.valence, arousal=moment.arousal, tags=moment.tags, confidence=0.67
        )
        await self.send("affect", EventType.AFFECT_ANNOTATED, payload_of(felt))


class Predictor(Part):
    """Foresees a need, and an action that would meet it."""

    name = "predictor"

    async def predict(self, moment: Moment, event_id: str) -> None:
        """Publish the candidate that the episode ``event_id`` suggests."""
        candidate: dict[str, Any] = {
            "event_id": event_id,
            "need": moment.tags[0],
            "action": {"name": moment.action, "args": {"about": moment.text}},
            "risk_level": moment.risk,
            "confidence": 0.8,
        }
        await self.send("cortex", EventType.CORTEX_PREDICTION, candidate)
