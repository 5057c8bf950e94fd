"""
How far the wall clock is to be trusted.

A device may start with a clock that shows 1970, and a clock may be set while something waits for it. So the clock is looked at every few
seconds: whether a time service keeps it right, and whether it has moved otherwise than time has passed. What changes is told
(``clock_trust_changed``, ``clock_adjusted``), and those who wait by the clock are called.
"""

from __future__ import annotations

import asyncio
import ctypes
import enum
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from tidings.core.clock import Clock
from tidings.core.errors import SettingsError, TidingsError
from tidings.core.tasks import cancel_and_wait
from tidings.happenings.happening import Happening
from tidings.happenings.variants import ClockAdjusted, ClockTrustChanged

from .settings import ScheduleSettings

logger = logging.getLogger(__name__)

_NS: Final = 1_000_000_000
_TIMEX_BYTES: Final = 512  # struct timex has 208; a buffer of zeros asks for nothing to be changed
_TIME_ERROR: Final = 5

SyncSource = Callable[[], bool]
"""Whether a time service keeps the clock right, now."""


class TimeTrust(enum.StrEnum):
    """How far the clock is to be trusted."""

    UNTRUSTED = "untrusted"
    """Nothing has ever said that it is right."""
    TRUSTED = "trusted"
    """It is kept right, or was until lately."""
    STALE = "stale"
    """It was kept right, too long ago."""
    ADJUSTING = "adjusting"
    """It was set just now."""

    @property
    def is_strict(self) -> bool:
        """Whether durations can be measured by it."""
        return self is TimeTrust.TRUSTED

    @property
    def is_lenient(self) -> bool:
        """Whether it may be acted on where being late is tolerated."""
        return self in (TimeTrust.TRUSTED, TimeTrust.STALE)


def trust_of(*, is_stepped: bool, is_synced: bool, sync_age_s: float | None, tolerance_s: float) -> TimeTrust:
    """
    How far a clock is to be trusted.

    Args:
        is_stepped: It was set since it was last looked at.
        is_synced: A time service keeps it right.
        sync_age_s: How long ago one did; ``None`` for never.
        tolerance_s: For how long it is trusted after that.
    """
    if is_stepped:
        return TimeTrust.ADJUSTING if is_synced or sync_age_s is not None else TimeTrust.UNTRUSTED
    if is_synced:
        return TimeTrust.TRUSTED
    if sync_age_s is None:
        return TimeTrust.UNTRUSTED
    return TimeTrust.TRUSTED if sync_age_s <= tolerance_s else TimeTrust.STALE


def sync_source_of(settings: ScheduleSettings) -> SyncSource:
    """
    The source that the settings name.

    Raises:
        SettingsError: This system's kernel cannot be asked.
    """
    if settings.clock_source == "assumed":
        return lambda: True
    try:
        adjtimex = ctypes.CDLL(None).adjtimex
    except (AttributeError, OSError, TypeError):
        raise SettingsError("schedule.clock_source", "this system does not say whether its clock is right") from None
    # TIME_ERROR is how the kernel says that its clock is not synchronised.
    return lambda: 0 <= adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES)) < _TIME_ERROR


class TimeTrustTracker:
    """
    Looks at the clock, and tells what changes.

    Args:
        clock: The clock in question.
        is_synced: Whether it is kept right.
        tell: Stores a happening and lets everybody know.
        settings: How often, and how much is too much.

    ``state`` is what the source said when the tracker was made, and then what was found at the last look.
    """

    def __init__(
        self,
        clock: Clock,
        is_synced: SyncSource,
        tell: Callable[[Happening], Awaitable[object]],
        settings: ScheduleSettings | None = None,
    ) -> None:
        self._clock = clock
        self._is_synced = is_synced
        self._tell = tell
        self._settings = settings if settings is not None else ScheduleSettings()
        self._callbacks: list[Callable[[float], Awaitable[None]]] = []
        self._task: asyncio.Task[None] | None = None
        self._looking = asyncio.Lock()
        self._synced_at = clock.monotonic() if is_synced() else None
        self._wall_ns, self._monotonic = clock.now_ns(), clock.monotonic()
        self.state = TimeTrust.UNTRUSTED if self._synced_at is None else TimeTrust.TRUSTED

    def on_change(self, callback: Callable[[float], Awaitable[None]]) -> None:
        """Call this when the trust has changed or the clock was set: with the seconds that it was set by, 0 if it was not."""
        self._callbacks.append(callback)

    def start(self) -> None:
        """Begin to look regularly."""
        assert self._task is None
        self._task = asyncio.get_running_loop().create_task(self._run(), name="time trust")

    async def close(self) -> None:
        """Stop. Closing twice is fine."""
        task, self._task = self._task, None
        await cancel_and_wait(task)

    async def current(self) -> TimeTrust:
        """The trust now: a clock that was set since the last look is looked at first."""
        if self._is_stepped(self._step_s()):
            await self.look()
        return self.state

    async def look(self) -> None:
        """Look at the clock, tell what has changed, and call who wants to know."""
        async with self._looking:
            now_s, step_s = self._clock.monotonic(), self._step_s()
            self._wall_ns, self._monotonic = self._clock.now_ns(), now_s
            is_stepped, is_synced = self._is_stepped(step_s), self._is_synced()
            before, self.state = (
                self.state,
                trust_of(
                    is_stepped=is_stepped,
                    is_synced=is_synced,
                    sync_age_s=None if self._synced_at is None else now_s - self._synced_at,
                    tolerance_s=self._settings.clock_tolerance_s,
                ),
            )
            if is_synced:
                self._synced_at = now_s
            at_ms = self._wall_ns // 1_000_000
            told: list[Happening] = []
            if is_stepped:
                told.append(ClockAdjusted(at_ms=at_ms, delta_seconds=round(step_s, 3)))
            if self.state is not before:
                told.append(ClockTrustChanged(at_ms=at_ms, from_=str(before), to=str(self.state)))
            for happening in told:
                try:
                    await self._tell(happening)
                except (TidingsError, OSError) as error:
                    logger.error("cannot tell about the clock: %s", error)
            if told:
                for callback in self._callbacks:
                    await callback(step_s if is_stepped else 0.0)

    def _step_s(self) -> float:
        """By how much the wall clock has moved otherwise than time has passed."""
        passed_s = self._clock.monotonic() - self._monotonic
        return (self._clock.now_ns() - self._wall_ns) / _NS - passed_s

    def _is_stepped(self, step_s: float) -> bool:
        return abs(step_s) > self._settings.clock_step_s_min

    async def _run(self) -> None:
        while True:
            await self._clock.sleep(self._settings.clock_poll_interval_s)
            try:
                await self.look()
            except Exception:
                logger.exception("looking at the clock failed; it goes on")
