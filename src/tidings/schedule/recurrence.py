"""
When something that recurs comes next.

Every rule by the calendar is a cron expression: the times at which the clocks of its zone show something. ``next_moment`` goes through
these and finds the moments they stand for. A time that the clocks skip stands for the first moment after the gap; one that they show
twice stands for the first time. So each occurrence, known by what the clock on the wall shows, has one moment.

Cron has five fields: minute, hour, day of the month, month, weekday. Sunday is 0 or 7, and months and weekdays have English names of three
letters. If both days are restricted either will do, as in every cron.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from datetime import UTC, date, datetime, timedelta, tzinfo
from pathlib import Path
from typing import Annotated, Final, Literal, TypeAlias
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import msgspec
from cronsim import CronSim, CronSimError

from .errors import BadRecurrence

_TIME: Final = re.compile(r"([01]\d|2[0-3]):([0-5]\d)(?::([0-5]\d))?", re.ASCII)
_UNTIL_SUNDAY: Final = re.compile(r"-sun(?=\S*\s*$)", re.IGNORECASE)
"""In the last field, a range that ends with Sunday: there it is the seventh day, and not the one before Monday."""
_ONE_VALUE: Final = re.compile(r"(?<![^\s,])(\w+)-\1/\d+(?![^\s,])", re.IGNORECASE)
"""A range of one value with a step, which is that value. The cron library reads ``3-3/2`` as ``3/2``, up to the end of the field."""
_MS: Final = timedelta(milliseconds=1)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_LOCAL_ZONE_FILE: Final = Path("/etc/localtime")
MOMENT_MS_MAX: Final = 253_402_300_799_999
"""The last millisecond of the year 9999."""
SPAN_MS_MAX: Final = 366 * 86_400_000
MomentMs: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MOMENT_MS_MAX)]
"""Milliseconds since 1970."""
SpanMs: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=SPAN_MS_MAX)]
"""Up to a year."""

Weekday: TypeAlias = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]


class Tagged(msgspec.Struct, frozen=True, gc=False, tag_field="kind", forbid_unknown_fields=True):
    """One of several, known by its ``kind``. What it has no field for is refused."""


class OneShot(Tagged, frozen=True, kw_only=True, gc=False, tag="one_shot"):
    """Once."""

    fire_at_ms: MomentMs


class Periodic(Tagged, frozen=True, kw_only=True, gc=False, tag="periodic"):
    """Every so often."""

    interval_ms: Annotated[int, msgspec.Meta(ge=1, le=100 * SPAN_MS_MAX)]


class Daily(Tagged, frozen=True, kw_only=True, gc=False, tag="daily"):
    """Every day."""


class Weekdays(Tagged, frozen=True, kw_only=True, gc=False, tag="weekdays"):
    """Monday to Friday."""


class Weekends(Tagged, frozen=True, kw_only=True, gc=False, tag="weekends"):
    """Saturday and Sunday."""


class Weekly(Tagged, frozen=True, kw_only=True, gc=False, tag="weekly"):
    """On some days of the week."""

    days: Annotated[tuple[Weekday, ...], msgspec.Meta(min_length=1)]


class Monthly(Tagged, frozen=True, kw_only=True, gc=False, tag="monthly"):
    """On a day of the month; months without it are passed over."""

    day_of_month: Annotated[int, msgspec.Meta(ge=1, le=31)]


class Yearly(Tagged, frozen=True, kw_only=True, gc=False, tag="yearly"):
    """On a date; a 29th of February comes in leap years only."""

    month: Annotated[int, msgspec.Meta(ge=1, le=12)]
    day: Annotated[int, msgspec.Meta(ge=1, le=31)]


class Cron(Tagged, frozen=True, kw_only=True, gc=False, tag="cron"):
    """By a cron expression of five fields."""

    expr: Annotated[str, msgspec.Meta(max_length=256)]


Calendar: TypeAlias = Daily | Weekdays | Weekends | Weekly | Monthly | Yearly | Cron
Recurrence: TypeAlias = OneShot | Periodic | Calendar


class Utc(Tagged, frozen=True, gc=False, tag="utc"):
    """Coordinated universal time."""


class Local(Tagged, frozen=True, gc=False, tag="local"):
    """The zone of the machine, or the one that the settings name."""


class Anchored(Tagged, frozen=True, gc=False, tag="anchored"):
    """A zone of the IANA database."""

    zone: str


Zone: TypeAlias = Utc | Local | Anchored


def zone_named(name: str) -> ZoneInfo:
    """
    A zone of the IANA database.

    Raises:
        BadRecurrence: There is none of that name.
    """
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise BadRecurrence("zone", f"{name[:80]!r} is no zone of the IANA database") from None


def zone_of(zone: Zone, local: tzinfo) -> tzinfo:
    """
    The zone that is meant; ``local`` is the machine's.

    Raises:
        BadRecurrence: There is none of that name.
    """
    match zone:
        case Utc():
            return UTC
        case Local():
            return local
        case Anchored():
            return zone_named(zone.zone)


def machine_zone(file: Path = _LOCAL_ZONE_FILE) -> tzinfo:
    """The zone that the machine is set to; UTC where it does not say."""
    try:
        with file.open("rb") as opened:
            return ZoneInfo.from_file(opened)
    except (OSError, ValueError):
        return UTC


def cron_of(rule: Calendar, time: str | None) -> str:
    """
    The rule as a cron expression, in six fields where it has a time of day (seconds come first).

    Raises:
        BadRecurrence: ``time`` is missing or is no time of day, or cron does not have five fields.
    """
    if isinstance(rule, Cron):
        if len(rule.expr.split()) != 5:
            raise BadRecurrence("recurrence.expr", f"{rule.expr!r} does not have five fields")
        return _UNTIL_SUNDAY.sub("-7", _ONE_VALUE.sub(r"\1", rule.expr))
    found = None if time is None else _TIME.fullmatch(time)
    if found is None:
        raise BadRecurrence("time", f"must be a time of day as HH:MM or HH:MM:SS, not {time!r}")
    clock = f"{int(found[3] or 0)} {int(found[2])} {int(found[1])}"
    match rule:
        case Daily():
            return f"{clock} * * *"
        case Weekdays():
            return f"{clock} * * 1-5"
        case Weekends():
            return f"{clock} * * 6,0"
        case Weekly():
            return f"{clock} * * {','.join(rule.days)}"
        case Monthly():
            return f"{clock} {rule.day_of_month} * *"
        case Yearly():
            return f"{clock} {rule.day} {rule.month} *"


def next_moment(expression: str, after: datetime, zone: tzinfo, skipped: Collection[date] = ()) -> datetime | None:
    """
    The first moment strictly after ``after`` at which the zone's clocks show a time that the expression names, in UTC.

    Args:
        expression: From ``cron_of``.
        after: A moment.
        zone: Whose clocks.
        skipped: Dates in the zone on which nothing happens.

    Returns:
        ``None`` if there is none within fifty years.

    Raises:
        BadRecurrence: The expression cannot be read.
    """
    try:
        walls = CronSim(expression, after.astimezone(zone).replace(tzinfo=None))
        for wall in walls:
            # The one that the clocks show a second time has passed already, and what fell into a gap may be this very moment.
            if wall.date() not in skipped and (moment := wall_moment(wall, zone)) > after:
                return moment
    except CronSimError as error:
        raise BadRecurrence("recurrence", f"{expression!r} names no times: {error}") from None
    except OverflowError:  # the end of the calendar
        pass
    return None


def wall_moment(wall: datetime, zone: tzinfo) -> datetime:
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


def next_in_series(start: int, interval: int, after: int) -> int:
    """The first of ``start``, ``start + interval``, ... that is after ``after``: a series never drifts."""
    return start if after < start else start + ((after - start) // interval + 1) * interval


def datetime_of_ms(moment_ms: int) -> datetime:
    """Milliseconds since 1970 as a datetime in UTC."""
    return _EPOCH + moment_ms * _MS


def ms_of(moment: datetime) -> int:
    """A datetime as milliseconds since 1970."""
    return (moment - _EPOCH) // _MS
