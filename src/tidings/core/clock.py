"""
Time comes in as an argument: a ``Clock`` is handed to whatever needs one.

``SystemClock`` is the real one; ``tidings.testing.VirtualClock`` is the one that tests drive. This is
the only module that reads the machine's clock.
"""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from typing import Any, Final, Protocol

_NS: Final = 1_000_000_000
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class Clock(Protocol):
    """What a part of Tidings may know about time."""

    def now_ns(self) -> int:
        """Nanoseconds since 1970 in UTC. May jump, also backwards."""
        ...

    def monotonic(self) -> float:
        """Seconds that never go back, for measuring and for deadlines."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait, in this clock's time."""
        ...


class SystemClock:
    """The machine's own clock."""

    __slots__ = ()

    now_ns = staticmethod(time.time_ns)
    monotonic = staticmethod(time.monotonic)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


SYSTEM_CLOCK: Final = SystemClock()


class SteadyClock:
    """
    Another clock as it would go had nobody set it since: for spans of time whose beginning is stored.

    Args:
        clock: The other one; the two agree at first.
    """

    __slots__ = ("_clock", "_offset_ns")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._offset_ns = clock.now_ns() - round(clock.monotonic() * _NS)

    def now_ns(self) -> int:
        return self._offset_ns + round(self._clock.monotonic() * _NS)

    def monotonic(self) -> float:
        return self._clock.monotonic()

    async def sleep(self, seconds: float) -> None:
        await self._clock.sleep(seconds)


async def within(clock: Clock, seconds: float, awaited: asyncio.Future[Any]) -> bool:
    """Wait for ``awaited``, at most this long; says whether it is done. It is left as it is either way."""
    timer = asyncio.ensure_future(clock.sleep(seconds))
    try:
        await asyncio.wait({awaited, timer}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        timer.cancel()
    return awaited.done()


def datetime_of(ns: int) -> datetime:
    """The UTC datetime of ``ns``, cut to microseconds."""
    seconds, rest = divmod(ns, _NS)
    return datetime.fromtimestamp(seconds, UTC).replace(microsecond=rest // 1000)


def ns_of(moment: datetime) -> int:
    """Nanoseconds since 1970 of a datetime that has a zone. Exact: no float on the way."""
    since = moment - _EPOCH
    return (since.days * 86_400 + since.seconds) * _NS + since.microseconds * 1000


_form = b""
_form_from_ns = _form_to_ns = 0


def format_utc(ns: int) -> bytes:
    """
    RFC 3339 in UTC with exactly six decimals, so that text order is time order.

    The second's text is kept from call to call: a log writes many records within one.
    """
    global _form, _form_from_ns, _form_to_ns
    if not _form_from_ns <= ns < _form_to_ns:
        second = ns // _NS
        # Not strftime: it does not pad the years before 1000 everywhere.
        text = datetime.fromtimestamp(second, UTC).replace(tzinfo=None).isoformat(timespec="seconds")
        _form = text.encode() + b".%06dZ"
        _form_from_ns, _form_to_ns = second * _NS, (second + 1) * _NS
    return _form % ((ns - _form_from_ns) // 1000)
