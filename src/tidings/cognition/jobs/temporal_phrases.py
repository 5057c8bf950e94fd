"""
What people mean by "yesterday morning": phrases to ranges of time.

Ranges are worked out on the calendar and clock of the place and then turned into UTC, so a day over a change of clocks has
23 or 25 hours. A range is after and including its start, and before its end. Weeks begin on Monday.
"""

from __future__ import annotations

import calendar
import re
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta, tzinfo
from typing import Final, NamedTuple

__all__ = ["TimeRange", "ranges_of"]

_WEEKDAYS: Final = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
_DAYPARTS: Final = {"morning": (5, 12), "afternoon": (12, 17), "evening": (17, 22), "night": (22, 29)}
_COUNT_MAX: Final = 10_000
_WEEKENDS_MAX: Final = 520
_AGO: Final = re.compile(r"(\d{1,6}|an?|one|two|three) (day|week|month)s? ago")
_WEEKENDS: Final = re.compile(r"last (\d{1,6}|two|three) weekends")
_DAY_PART: Final = re.compile(rf"(today|yesterday|this|last|{'|'.join(_WEEKDAYS)}) ({'|'.join(_DAYPARTS)})")
_WEEKDAY: Final = re.compile(rf"(last|next) ({'|'.join(_WEEKDAYS)})")
_WORDS: Final = {"a": 1, "an": 1, "one": 1, "two": 2, "three": 3}


class TimeRange(NamedTuple):
    """From a time, included, to a time, excluded; both in UTC."""

    start: datetime
    end: datetime


def ranges_of(phrase: str, now: datetime, zone: tzinfo) -> tuple[TimeRange, ...]:
    """
    The ranges that a phrase means, earliest first; none if nothing is meant by it.

    Args:
        phrase: Such as ``today``, ``last night``, ``monday evening``, ``3 weeks ago``, ``next friday``, ``last 2 weekends``.
        now: The moment that it is said, with a zone.
        zone: Where it is said.
    """
    try:
        return _ranges_of(" ".join(phrase.lower().split()), now.astimezone(zone), zone)
    except (OverflowError, ValueError):  # before the year 1 or after 9999: nobody means that
        return ()


def _ranges_of(said: str, now: datetime, zone: tzinfo) -> tuple[TimeRange, ...]:
    today = now.date()

    def days(first: date, count: int) -> tuple[TimeRange, ...]:
        return (_between(first, 0, first + timedelta(days=count), 0, zone),)

    monday = today - timedelta(days=today.weekday())
    month = today.replace(day=1)
    plain: dict[str, Callable[[], tuple[TimeRange, ...]]] = {
        "today": lambda: days(today, 1),
        "yesterday": lambda: days(today - timedelta(days=1), 1),
        "tomorrow": lambda: days(today + timedelta(days=1), 1),
        "this week": lambda: days(monday, 7),
        "last week": lambda: days(monday - timedelta(days=7), 7),
        "this month": lambda: (_between(month, 0, _months_on(month, 1), 0, zone),),
        "last month": lambda: (_between(_months_on(month, -1), 0, month, 0, zone),),
        "last weekend": lambda: _weekends(today, 1, zone),
    }
    if said in plain:
        return plain[said]()
    if found := _DAY_PART.fullmatch(said):
        return _day_and_part(found[1], found[2], today, zone)
    if found := _AGO.fullmatch(said):
        return _sliding(_count(found[1]), found[2], now, zone)
    if found := _WEEKDAY.fullmatch(said):
        ahead = (_WEEKDAYS.index(found[2]) - today.weekday()) % 7
        return days(today + timedelta(days=ahead or 7) if found[1] == "next" else _last_weekday(today, found[2]), 1)
    if found := _WEEKENDS.fullmatch(said):
        return _weekends(today, min(_count(found[1]), _WEEKENDS_MAX), zone)
    return ()


def _count(word: str) -> int:
    return min(_WORDS.get(word) or int(word), _COUNT_MAX)


def _day_and_part(day: str, part: str, today: date, zone: tzinfo) -> tuple[TimeRange, ...]:
    if day == "last" and part != "night":
        return ()  # "last morning" is nobody's phrase
    if day in ("today", "this"):
        on = today
    elif day in ("yesterday", "last"):
        on = today - timedelta(days=1)
    else:
        on = _last_weekday(today, day)
    first, last = _DAYPARTS[part]
    return (_between(on, first, on + timedelta(days=last // 24), last % 24, zone),)


def _last_weekday(today: date, name: str) -> date:
    """The latest day of that name before today."""
    return today - timedelta(days=(today.weekday() - _WEEKDAYS.index(name)) % 7 or 7)


def _sliding(count: int, unit: str, now: datetime, zone: tzinfo) -> tuple[TimeRange, ...]:
    """A window that ends now."""
    if unit == "month":
        on = _months_on(now.date(), -count)
    else:
        on = now.date() - timedelta(days=count * (7 if unit == "week" else 1))
    start = _utc(datetime.combine(on, now.time().replace(fold=0)), zone)
    return (TimeRange(start, now.astimezone(UTC)),)


def _weekends(today: date, count: int, zone: tzinfo) -> tuple[TimeRange, ...]:
    """The last weekends that are over: on a Sunday the one before."""
    saturday = today - timedelta(days=today.weekday() + 2)
    found = [saturday - timedelta(days=7 * back) for back in reversed(range(count))]
    return tuple(_between(each, 0, each + timedelta(days=2), 0, zone) for each in found)


def _months_on(day: date, months: int) -> date:
    """The same day so many months on, or the month's last day if it has no such day."""
    year, month = divmod(day.year * 12 + day.month - 1 + months, 12)
    return date(year, month + 1, min(day.day, calendar.monthrange(year, month + 1)[1]))


def _between(first: date, first_hour: int, last: date, last_hour: int, zone: tzinfo) -> TimeRange:
    start, end = datetime.combine(first, time(first_hour)), datetime.combine(last, time(last_hour))
    return TimeRange(_utc(start, zone), _utc(end, zone))


def _utc(shown: datetime, zone: tzinfo) -> datetime:
    """
    The instant at which clocks show that time. Where they show it twice, the first one; where a change of clocks skips it,
    the moment of the change.
    """
    found = shown.replace(tzinfo=zone).astimezone(UTC)
    back = found.astimezone(zone).replace(tzinfo=None)
    if back == shown:
        return found
    # In a gap Python reads the time by the offset before (fold 0) or after (fold 1) the change, which lies between them.
    later = shown.replace(tzinfo=zone, fold=1).astimezone(UTC)
    low, high = sorted((found, later))
    while high - low > timedelta(seconds=1):
        middle = low + (high - low) / 2
        if middle.astimezone(zone).replace(tzinfo=None) < shown:
            low = middle
        else:
            high = middle
    return high.replace(microsecond=0)
