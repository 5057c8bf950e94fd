"""
Triggers: what shall happen later, when, and under which conditions; and when a schedule fires next.

A trigger is ACTIVE until it is cancelled or has nothing left to fire at (EXPIRED). SNOOZED is ACTIVE with a pause: it fires
at the end of it. DRAFT waits to be activated.

``next_fire`` is always strictly after the moment asked about: a slot that has passed is not made up for. Times of day are those of
``schedule.recurrence``, also where the clocks change.
"""

from __future__ import annotations

import enum
from datetime import UTC, datetime
from typing import Annotated, Any, Final, Literal, TypeAlias, assert_never
from zoneinfo import ZoneInfo

import msgspec

from tidings.core.clock import datetime_of, ns_of
from tidings.schedule.recurrence import Weekday, Weekly, cron_of, next_in_series, next_moment

from ..errors import InvalidRequest
from ..ports import clip01


class TriggerStatus(enum.StrEnum):
    """Where a trigger is in its life."""

    DRAFT = "DRAFT"
    ACTIVE = "ACTIVE"
    SNOOZED = "SNOOZED"
    CANCELLED = "CANCELLED"
    EXPIRED = "EXPIRED"

    @property
    def can_fire(self) -> bool:
        """Whether its time still counts."""
        return self in (TriggerStatus.ACTIVE, TriggerStatus.SNOOZED)


class Once(msgspec.Struct, frozen=True, kw_only=True, tag="once", tag_field="kind"):
    """At one moment."""

    fire_at: datetime


class Interval(msgspec.Struct, frozen=True, kw_only=True, tag="interval", tag_field="kind"):
    """Every so often, counted from ``start_at``."""

    every_seconds: Annotated[int, msgspec.Meta(ge=30)]
    start_at: datetime
    end_at: datetime | None = None
    max_fires: Annotated[int, msgspec.Meta(ge=1, le=10_000)] | None = None


class DailyTime(msgspec.Struct, frozen=True, kw_only=True, tag="daily_time", tag_field="kind"):
    """At a time of day by the wall clock, on some days of the week (Monday is 0)."""

    time: Annotated[str, msgspec.Meta(pattern=r"^([01]\d|2[0-3]):[0-5]\d$")]
    days_of_week: frozenset[Annotated[int, msgspec.Meta(ge=0, le=6)]] = frozenset(range(7))


Schedule: TypeAlias = Once | Interval | DailyTime
TriggerAction: TypeAlias = Literal["notify", "project", "run_procedure"]
TriggerKey: TypeAlias = tuple[str, str]
"""A trigger's space and id: an id is unique in its space only."""


class Conditions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """When a due trigger is skipped all the same."""

    require_arousal_max: float | None = None
    disallow_safety_pressure_min: float | None = None
    cooldown_seconds: Annotated[int, msgspec.Meta(ge=0)] | None = None
    tag_present: str | None = None


class Signals(msgspec.Struct, frozen=True, kw_only=True):
    """How things are when a trigger is due."""

    arousal: float = 0.0
    safety_pressure: float = 0.0
    tags: frozenset[str] = frozenset()


class Trigger(msgspec.Struct, frozen=True, kw_only=True):
    """Something to happen later."""

    id: str
    person_id: str
    space_id: str
    title: str
    schedule: Schedule
    action: TriggerAction = "notify"
    conditions: Conditions = Conditions()
    tz: str = "UTC"
    status: TriggerStatus = TriggerStatus.ACTIVE
    next_fire_at: datetime | None = None
    fires_count: Annotated[int, msgspec.Meta(ge=0)] = 0
    fired_at: datetime | None = None
    args: dict[str, Any] = {}

    @property
    def key(self) -> TriggerKey:
        """What it is held under."""
        return self.space_id, self.id


def check_trigger(value: object) -> Trigger:
    """
    Read a trigger from a payload, and check what its types cannot say.

    Raises:
        InvalidRequest: It is not a trigger that can ever be kept.
    """
    try:
        trigger = value if isinstance(value, Trigger) else msgspec.convert(value, Trigger)
        # Once more through plain values: a Trigger made in Python has not been checked for ranges and patterns.
        trigger = msgspec.convert(msgspec.to_builtins(trigger), Trigger)
    except msgspec.ValidationError as error:
        raise InvalidRequest("trigger", str(error)) from error
    for name in ("id", "person_id", "space_id"):
        if not getattr(trigger, name):
            raise InvalidRequest(f"trigger.{name}", "must not be empty")
    schedule = trigger.schedule
    moments: dict[str, datetime | None] = {"next_fire_at": trigger.next_fire_at, "fired_at": trigger.fired_at}
    if isinstance(schedule, Once):
        moments["fire_at"] = schedule.fire_at
    elif isinstance(schedule, Interval):
        moments |= {"start_at": schedule.start_at, "end_at": schedule.end_at}
    elif not schedule.days_of_week:
        raise InvalidRequest("trigger.schedule.days_of_week", "must name at least one day")
    for name, moment in moments.items():
        if moment is not None and moment.tzinfo is None:
            raise InvalidRequest(f"trigger.{name}", "has no zone")
    return trigger


def eligibility(arousal: float, safety_pressure: float) -> float:
    """How fit the moment is for an interruption: ``(1 - 0.5 a) * (1 - 0.7 p)``, in 0..1."""
    return clip01((1 - 0.5 * arousal) * (1 - 0.7 * safety_pressure))


def skip_reasons(trigger: Trigger, signals: Signals, now: datetime) -> tuple[str, ...]:
    """The conditions that forbid firing now; empty when none does."""
    wanted = trigger.conditions
    fired_at, cooldown_s = trigger.fired_at, wanted.cooldown_seconds
    is_hot = fired_at is not None and cooldown_s is not None and (now - fired_at).total_seconds() < cooldown_s
    arousal_max, pressure_min = wanted.require_arousal_max, wanted.disallow_safety_pressure_min
    checks = (
        ("arousal_too_high", arousal_max is not None and signals.arousal > arousal_max),
        ("safety_pressure", pressure_min is not None and signals.safety_pressure >= pressure_min),
        ("cooldown", is_hot),
        ("tag_missing", wanted.tag_present is not None and wanted.tag_present not in signals.tags),
    )
    return tuple(reason for reason, holds in checks if holds)


_WEEKDAYS: Final[tuple[Weekday, ...]] = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")


def next_fire(schedule: Schedule, after: datetime, zone: ZoneInfo, fires_count: int = 0) -> datetime | None:
    """The first moment after ``after``, in UTC; ``None`` when there is none any more."""
    match schedule:
        case Once():
            fire_at = schedule.fire_at.astimezone(UTC)
            return fire_at if fire_at > after and fires_count == 0 else None
        case Interval():
            return _next_interval(schedule, after, fires_count)
        case DailyTime():
            rule = Weekly(days=tuple(_WEEKDAYS[each] for each in sorted(schedule.days_of_week)))
            return next_moment(cron_of(rule, schedule.time), after, zone)
        case _:
            assert_never(schedule)


def _next_interval(schedule: Interval, after: datetime, fires_count: int) -> datetime | None:
    if schedule.max_fires is not None and fires_count >= schedule.max_fires:
        return None
    every_ns = schedule.every_seconds * 1_000_000_000
    fire_at = datetime_of(next_in_series(ns_of(schedule.start_at), every_ns, ns_of(after)))
    if schedule.end_at is not None and fire_at > schedule.end_at:
        return None
    return fire_at
