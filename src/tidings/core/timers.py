"""
What is due when, by the wall clock.

``TimerQueue`` is the order of things to come, without a clock or a loop: a million entries, 16 bytes each beside their keys. ``WallClockAlarm``
waits for a moment of the wall clock, which may be set forward or back meanwhile. ``Timers`` puts the two together: it calls a function
with what is due. Appointments, watches, delayed publishes and the triggers of ``cognition`` all wait here.

Moments are nanoseconds since 1970. They stay what they are when the clock is set: what is due at noon is due when the clock shows noon.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Awaitable, Callable, Iterator, Sequence
from itertools import chain
from typing import Any, Final, Generic, Protocol, TypeVar

from .clock import Clock, within
from .tasks import cancel_and_wait

logger = logging.getLogger(__name__)

_BLOCK_COUNT_MAX: Final = 1024
_RETRY_S: Final = 1.0
_NS: Final = 1_000_000_000
_MOMENT_NS_MAX: Final = 2**63 - 1
"""In the year 2262. What is later waits until then, and what is before 1678 counts as of then."""


class Key(Protocol):
    """What an entry is known by: anything that can be sorted."""

    def __lt__(self, other: Any, /) -> bool: ...


K = TypeVar("K", bound=Key)


class TimerQueue(Generic[K]):
    """
    Moments and keys, in order: by moment, at the same moment by key. An entry is a pair; a key may have several moments.

    Entries are kept in short sorted blocks, so adding and removing move a few kilobytes however many there are.

    Args:
        entries: To begin with, in their order and each once.
    """

    def __init__(self, entries: Sequence[tuple[int, K]] = ()) -> None:
        size = _BLOCK_COUNT_MAX // 2
        blocks = [entries[first : first + size] for first in range(0, len(entries), size)]
        self._moments = [array("q", (_within_range(moment) for moment, _ in block)) for block in blocks]
        self._keys = [[key for _, key in block] for block in blocks]
        self._last = array("q", (moments[-1] for moments in self._moments))
        """The last moment of each block."""
        self._count = len(entries)

    def __len__(self) -> int:
        return self._count

    def __contains__(self, entry: tuple[int, K]) -> bool:
        due_ns, key = entry
        return self._find(_within_range(due_ns), key)[2]

    @property
    def first(self) -> tuple[int, K] | None:
        """The first entry; ``None`` if there is none."""
        return (self._moments[0][0], self._keys[0][0]) if self._moments else None

    @property
    def first_ns(self) -> int | None:
        """When the first entry is due; ``None`` if there is none."""
        return self._moments[0][0] if self._moments else None

    def keys(self) -> Iterator[K]:
        """The keys of all entries, in order."""
        return chain.from_iterable(self._keys)

    def add(self, due_ns: int, key: K) -> bool:
        """Add an entry; whether it was not there."""
        due_ns = _within_range(due_ns)
        if not self._last:
            self._moments.append(array("q", (due_ns,)))
            self._keys.append([key])
            self._last.append(due_ns)
            self._count = 1
            return True
        block, at, is_there = self._find(due_ns, key)
        if is_there:
            return False
        if block == len(self._last):
            block -= 1
            at = len(self._keys[block])
            self._last[block] = due_ns
        moments, keys = self._moments[block], self._keys[block]
        moments.insert(at, due_ns)
        keys.insert(at, key)
        self._count += 1
        if len(keys) > _BLOCK_COUNT_MAX:
            self._split(block)
        return True

    def discard(self, due_ns: int, key: K) -> bool:
        """Remove an entry; whether it was there."""
        block, at, is_there = self._find(_within_range(due_ns), key)
        if not is_there:
            return False
        moments, keys = self._moments[block], self._keys[block]
        del moments[at], keys[at]
        self._count -= 1
        if not keys:
            del self._moments[block], self._keys[block], self._last[block]
        elif at == len(keys):
            self._last[block] = moments[-1]
        return True

    def until(self, until_ns: int, count_max: int) -> list[tuple[int, K]]:
        """The first entries that are due at ``until_ns`` or before, at most so many. They stay."""
        found: list[tuple[int, K]] = []
        for moments, keys in zip(self._moments, self._keys, strict=True):
            end = min(bisect_right(moments, until_ns), count_max - len(found))
            found += zip(moments[:end], keys[:end], strict=True)
            if end < len(keys):
                break
        return found

    def take(self, until_ns: int, count_max: int) -> list[tuple[int, K]]:
        """Remove and return what ``until`` finds."""
        taken = self.until(until_ns, count_max)
        left = len(taken)
        while left:
            moments, keys = self._moments[0], self._keys[0]
            if left < len(keys):
                del moments[:left], keys[:left]
                break
            left -= len(keys)
            del self._moments[0], self._keys[0], self._last[0]
        self._count -= len(taken)
        return taken

    def _find(self, due_ns: int, key: K) -> tuple[int, int, bool]:
        """The block and the place in it where an entry belongs, and whether it is there."""
        last, block = self._last, bisect_left(self._last, due_ns)
        if (
            block < len(last) and last[block] == due_ns
        ):  # of the blocks that end with this moment, by the keys they end with
            alike = range(block, bisect_right(last, due_ns, block))
            block += bisect_left(alike, key, key=lambda each: self._keys[each][-1])
        if block == len(last):
            return block, 0, False
        moments, keys = self._moments[block], self._keys[block]
        at = bisect_left(moments, due_ns)
        if moments[at] != due_ns:
            return block, at, False
        high = bisect_right(moments, due_ns, at)
        at = bisect_left(keys, key, at, high)
        return block, at, at < high and keys[at] == key

    def _split(self, block: int) -> None:
        half = _BLOCK_COUNT_MAX // 2
        moments, keys = self._moments[block], self._keys[block]
        # Slices, not deletions in place: what is cut off would stay allocated.
        self._moments[block : block + 1] = [moments[:half], moments[half:]]
        self._keys[block : block + 1] = [keys[:half], keys[half:]]
        self._last.insert(block, moments[half - 1])


def _within_range(moment_ns: int) -> int:
    return max(-_MOMENT_NS_MAX, min(moment_ns, _MOMENT_NS_MAX))


class WallClockAlarm:
    """
    Waits for a moment of the wall clock.

    Args:
        clock: Where the time comes from.
        look_interval_s: How often to look at the clock meanwhile: so late at the most is it noticed that the clock was set forward.
    """

    def __init__(self, clock: Clock, look_interval_s: float = 5.0) -> None:
        self._clock = clock
        self._look_interval_s = look_interval_s
        self._rung = asyncio.Event()

    def ring(self) -> None:
        """End the wait that is going on, or the next one: there is something new."""
        self._rung.set()

    async def wait(self, due_ns: int | None) -> None:
        """Return when the clock shows the moment, when somebody rings, and every so often: look again. Without a moment, only by a ring."""
        if due_ns is None:
            await self._rung.wait()
        elif not self._rung.is_set():
            wait_s = min(self._look_interval_s, (due_ns - self._clock.now_ns()) / _NS)
            if wait_s > 0:
                rung = asyncio.ensure_future(self._rung.wait())
                try:
                    await within(self._clock, wait_s, rung)
                finally:
                    rung.cancel()
            else:
                await asyncio.sleep(0)
        self._rung.clear()


class Timers(Generic[K]):
    """
    Calls a function with what is due.

    Args:
        clock: Where the time comes from.
        fire: Called with entries that are due, in order. If it raises, all of them are due again a second later.
        name: For logs.
        look_interval_s: As ``WallClockAlarm`` has it.
        batch_count_max: How many entries ``fire`` gets at once at the most.
    """

    def __init__(
        self,
        clock: Clock,
        fire: Callable[[list[tuple[int, K]]], Awaitable[None]],
        *,
        name: str,
        look_interval_s: float = 5.0,
        batch_count_max: int = 512,
    ) -> None:
        self.queue: TimerQueue[K] = TimerQueue()
        self._clock = clock
        self._fire = fire
        self._name = name
        self._batch_count_max = batch_count_max
        self._alarm = WallClockAlarm(clock, look_interval_s)
        self._task: asyncio.Task[None] | None = None

    def add(self, due_ns: int, key: K) -> None:
        """Add an entry; if it is the first to be due, the wait is shortened."""
        first_ns = self.queue.first_ns
        if self.queue.add(due_ns, key) and (first_ns is None or due_ns < first_ns):
            self._alarm.ring()

    def discard(self, due_ns: int, key: K) -> bool:
        """Remove an entry; whether it was there."""
        return self.queue.discard(due_ns, key)

    def ring(self) -> None:
        """Look at the clock now: it was set."""
        self._alarm.ring()

    def start(self) -> None:
        """Begin to call."""
        assert self._task is None
        self._task = asyncio.get_running_loop().create_task(self._run(), name=self._name)

    async def close(self) -> None:
        """Stop. A call that is under way is cancelled, and its entries are back in the queue. Closing twice is fine."""
        task, self._task = self._task, None
        await cancel_and_wait(task)

    async def _run(self) -> None:
        while True:
            due = self.queue.take(self._clock.now_ns(), self._batch_count_max)
            if not due:
                await self._alarm.wait(self.queue.first_ns)
                continue
            try:
                await self._fire(due)
            except BaseException as error:
                for due_ns, key in due:
                    self.queue.add(due_ns, key)
                if not isinstance(error, Exception):
                    raise
                logger.exception("%s: %d entries that are due failed; they are tried again", self._name, len(due))
                await self._clock.sleep(_RETRY_S)
            else:
                await asyncio.sleep(0)
