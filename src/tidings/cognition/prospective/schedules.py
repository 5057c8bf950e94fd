"""
When a schedule fires next: plain arithmetic on moments and zones.

Always strictly after the moment asked about, so a slot that has passed is passed: nothing is ever made up for. A time of
day that the clocks skip fires at the first moment after the gap; one that they show twice fires the first time.
"""

from __future__ import annotations

from datetime import UTC, datetime, time, timedelta
from typing import Final, assert_never
from zoneinfo import ZoneInfo

from .triggers import DailyTime, Interval, Once, Schedule

__all__ = ["next_fire", "wall_moment"]

# A week holds every weekday; the day more is for a slot that has passed already today.
_DAYS_AHEAD: Final = 8


def next_fire(schedule: Schedule, after: datetime, zone: ZoneInfo, fires_count: int = 0) -> datetime | None:
    """The first moment after ``after``, in UTC; ``None`` when there is none any more."""
    match schedule:
        case Once():
            fire_at = schedule.fire_at.astimezone(UTC)
            return fire_at if fire_at > after and fires_count == 0 else None
        case Interval():
            return _next_interval(schedule, after, fires_count)
        case DailyTime():
            return _next_daily(schedule, after, zone)
        case _:
            assert_never(schedule)


def _next_interval(schedule: Interval, after: datetime, fires_count: int) -> datetime | None:
    if schedule.max_fires is not None and fires_count >= schedule.max_fires:
        return None
    start = schedule.start_at.astimezone(UTC)
    every = timedelta(seconds=schedule.every_seconds)
    fire_at = start if after < start else start + ((after - start) // every + 1) * every
    if schedule.end_at is not None and fire_at > schedule.end_at:
        return None
    return fire_at


def _next_daily(schedule: DailyTime, after: datetime, zone: ZoneInfo) -> datetime | None:
    today = after.astimezone(zone).date()
    at = time.fromisoformat(schedule.time)
    # From yesterday on: a gap at midnight moves a slot to the next date.
    for days in range(-1, _DAYS_AHEAD + 1):
        date = today + timedelta(days=days)
        if date.weekday() not in schedule.days_of_week:
            continue
        fire_at = wall_moment(datetime.combine(date, at), zone)
        if fire_at > after:
            return fire_at
    return None


def wall_moment(wall: datetime, zone: ZoneInfo) -> datetime:
    """The moment, in UTC, at which the zone's clocks show ``wall``, or first show a later time."""
    moment = wall.replace(tzinfo=zone, fold=0).astimezone(UTC)
    if moment.astimezone(zone).replace(tzinfo=None) == wall:
        return moment
    # Skipped. Read with the offset from after the gap, the time lies before the jump; with the one from before, after it.
    before = wall.replace(tzinfo=zone, fold=1).astimezone(UTC)
    low, high = 0, round((moment - before).total_seconds())
    while high - low > 1:
        middle = (low + high) // 2
        if (before + timedelta(seconds=middle)).astimezone(zone).replace(tzinfo=None) < wall:
            low = middle
        else:
            high = middle
    return before + timedelta(seconds=high)
