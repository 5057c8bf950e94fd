"""
Neuromodulation: mood sets how fast the system learns.

    eta' = eta * (1 + 0.6 * (arousal - 0.5)) * (1 - 0.3 * max(0, -valence)) * (1 + gain * surprise)

Excitement speeds learning up, calm and displeasure slow it down. That surprise speeds it up is given, by how much is
not: ``gain`` is ours, and without surprise it does nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Final

from tidings.core.events import Event, EventMeta
from tidings.core.ids import content_id

from .errors import InvalidRequest
from .payloads import LearningTick, NeuromodAdjustment, payload_of
from .ports import clip01

LEARNING_TOPIC: Final = "cognitive.learning"
SURPRISE_GAIN: Final = 0.5


def adjusted_eta(
    eta: float,
    *,
    arousal: float,
    valence: float,
    surprise: float = 0.0,
    surprise_gain: float = SURPRISE_GAIN,
    eta_max: float | None = None,
) -> float:
    """
    The learning rate under a mood.

    Args:
        eta: The rate at arousal 0.5 and no displeasure.
        arousal: 0 to 1; values outside count as the nearer end.
        valence: -1 to 1; likewise.
        surprise: 0 to 1; likewise.
        surprise_gain: What full surprise adds.
        eta_max: Where drift has been noticed: the rate goes no higher.
    """
    if eta < 0:
        raise InvalidRequest("eta", f"a learning rate is not negative, and this is {eta}")
    displeasure = clip01(-valence)
    rate = eta * (1 + 0.6 * (clip01(arousal) - 0.5)) * (1 - 0.3 * displeasure) * (1 + surprise_gain * clip01(surprise))
    return rate if eta_max is None else min(rate, eta_max)


def neuromod_adjustment(
    *, space_id: str, cause_id: str, eta: float, arousal: float, valence: float, surprise: float, now: datetime
) -> Event:
    """
    The signal that tells learners their rate.

    Args:
        space_id: Whose learning it is.
        cause_id: The id of the event that set it off; the signal's own id follows from it and from what it says.
        eta: The rate before.
        arousal: As felt.
        valence: As felt.
        surprise: As reported.
        now: When it was worked out.
    """
    adjusted = adjusted_eta(eta, arousal=arousal, valence=valence, surprise=surprise)
    payload = NeuromodAdjustment(
        space_id=space_id,
        eta=eta,
        eta_adjusted=adjusted,
        arousal=clip01(arousal),
        valence=min(1.0, max(-1.0, valence)),
        surprise=clip01(surprise),
        computed_at=now,
    )
    content = payload_of(payload)
    meta = EventMeta(
        topic=LEARNING_TOPIC,
        type="NEUROMOD_ADJUSTMENT",
        space_id=space_id,
        event_id=content_id("neuromod", content, space_id, cause_id),
        ts=now,
    )
    return Event(meta, content)


def learning_tick(
    *,
    batch_id: str,
    space_id: str,
    count: int,
    started_at: datetime,
    completed_at: datetime | None = None,
    metrics: Mapping[str, float] | None = None,
) -> Event:
    """
    The signal that a batch of learning is under way or done; both states of one batch are events of their own.

    Raises:
        InvalidRequest: The batch is empty, or ended before it began.
    """
    if count < 1:
        raise InvalidRequest("count", f"a batch holds at least one item, and this has {count}")
    if completed_at is not None and completed_at < started_at:
        raise InvalidRequest("completed_at", "a batch does not end before it began")
    payload = LearningTick(
        batch_id=batch_id,
        space_id=space_id,
        count=count,
        started_at=started_at,
        completed_at=completed_at,
        metrics=dict(metrics or {}),
    )
    content = payload_of(payload)
    meta = EventMeta(
        topic=LEARNING_TOPIC,
        type="LEARNING_TICK",
        space_id=space_id,
        event_id=content_id("tick", content, space_id, batch_id),
        ts=completed_at or started_at,
    )
    return Event(meta, content)
