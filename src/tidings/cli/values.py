"""Values as people type them: times, spans, sizes, and rules by topic."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from typing import Final, TypeVar

from tidings.core.clock import Clock, datetime_of
from tidings.core.names import check_topic

from .errors import UsageProblem

__all__ = ["by_topic", "parse_days", "parse_size", "parse_time"]

T = TypeVar("T")

_SPAN: Final = re.compile(r"([0-9]{1,9})([smhdw])")
_SPAN_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_SIZE: Final = re.compile(r"([0-9]{1,18})\s*(B|KB|MB|GB|TB|KiB|MiB|GiB|TiB)?", re.IGNORECASE)
_SIZE_FACTORS: Final[dict[str, int]] = {
    "b": 1,
    **{f"{letter}b": int(1000**power) for power, letter in enumerate("kmgt", 1)},
    **{f"{letter}ib": int(1024**power) for power, letter in enumerate("kmgt", 1)},
}


def parse_time(option: str, text: str, clock: Clock) -> datetime:
    """
    A moment: RFC 3339 with a zone, a date (its first moment in UTC), or a span such as ``15m`` (so long ago).

    Raises:
        UsageProblem: It is none of these. A time without a zone is refused, not guessed.
    """
    span = _SPAN.fullmatch(text)
    if span is not None:
        try:
            return datetime_of(clock.now_ns()) - timedelta(seconds=int(span[1]) * _SPAN_SECONDS[span[2]])
        except OverflowError:
            raise UsageProblem(f"{option}: {text} ago is before all time") from None
    hint = "give a time with its zone (2026-03-01T12:00:00Z), a date (2026-03-01) or a span (90s, 15m, 2h, 7d, 4w)"
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise UsageProblem(f"{option}: {text!r} is not a time", hint) from None
    if moment.utcoffset() is None:
        if "T" in text or " " in text:
            raise UsageProblem(f"{option}: {text!r} has no time zone", hint)
        moment = moment.replace(tzinfo=UTC)
    return moment


def parse_size(text: str) -> int:
    """
    A number of bytes: ``1048576``, ``500MB``, ``2GiB``.

    Raises:
        ValueError: It is not one.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ValueError("is not a size such as 1048576, 500MB or 2GiB")
    factor = _SIZE_FACTORS[(found[2] or "B").lower()]
    return int(found[1]) * factor


def parse_days(text: str) -> float:
    """
    A number of days above zero.

    Raises:
        ValueError: It is not one.
    """
    try:
        days = float(text)
    except ValueError:
        days = 0.0
    if not 0 < days < 1_000_000:  # also refuses NaN
        raise ValueError("is not a number of days above 0")
    return days


def by_topic(option: str, given: Iterable[str], parse: Callable[[str], T]) -> dict[str, T]:
    """
    Values such as ``30`` (for every topic, under ``*``) and ``demo=7`` (for one).

    Raises:
        UsageProblem: A value or a topic is not valid, or a topic is named twice.
        InvalidName: That is no topic's name.
    """
    found: dict[str, T] = {}
    for text in given:
        topic, equals, value = text.rpartition("=")
        topic = check_topic(topic) if equals else "*"
        if topic in found:
            raise UsageProblem(f"{option}: {'all topics' if topic == '*' else topic} was given twice")
        try:
            found[topic] = parse(value)
        except ValueError as error:
            raise UsageProblem(f"{option}: {value!r} {error}") from None
    return found
