"""What is due comes in order, whatever is added or removed meanwhile and however the clock is set."""

from __future__ import annotations

import asyncio
from bisect import insort

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.beyond import Beyond, crossed
from tidings.core import timers
from tidings.core.timers import TimerQueue, Timers, WallClockAlarm
from tidings.testing import VirtualClock

_NS = 1_000_000_000
_DAY_S = 86_400


_steps = st.lists(
    st.tuples(st.sampled_from(["add", "add", "add", "discard", "take"]), st.integers(0, 20), st.integers(0, 5)),
    max_size=200,
)


@given(_steps, st.sets(st.tuples(st.integers(0, 20), st.integers(0, 5))).map(sorted))
def test_the_queue_is_a_sorted_list(steps: list[tuple[str, int, int]], first: list[tuple[int, int]]) -> None:
    """
    Whatever is added, removed and taken, in blocks of any number: the queue holds what a sorted list of the pairs would.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timers, "_BLOCK_COUNT_MAX", 4)
        queue, model = TimerQueue(first), list(first)
        for step, due_ns, key in steps:
            pair = (due_ns, key)
            if step == "take":
                due = [entry for entry in model if entry[0] <= due_ns][:key]
                assert queue.until(due_ns, key) == due
                assert queue.take(due_ns, key) == due
                del model[: len(due)]
                continue
            is_there = pair in model
            assert (pair in queue) is is_there
            if step == "add":
                assert queue.add(due_ns, key) is not is_there
                if not is_there:
                    insort(model, pair)
            else:
                assert queue.discard(due_ns, key) is is_there
                if is_there:
                    model.remove(pair)
            assert len(queue) == len(model)
            assert queue.first_ns == (model[0][0] if model else None)
        assert queue.take(100, 1000) == model


@pytest.mark.bound("core.timers._MOMENT_NS_MAX")
@crossed
def test_moments_out_of_range_are_kept(beyond: Beyond) -> None:
    """
    What is due after the year 2262, or long ago, is in the queue like anything else.
    """
    queue = TimerQueue[str]()
    far = beyond(2**63 - 1)
    queue.add(far, "far")
    queue.add(-far, "long ago")

    assert queue.take(0, 10) == [(1 - 2**63, "long ago")]
    assert queue.discard(far, "far")


class Fired:
    """Timers over a virtual clock, and what they fired at which second of it."""

    def __init__(self, look_interval_s: float = 5.0) -> None:
        self.clock = VirtualClock(start_ns=10 * _DAY_S * _NS)
        self.log: list[tuple[float, str]] = []
        self.failures = 0
        self.timers = Timers[str](self.clock, self._fire, name="test timers", look_interval_s=look_interval_s)

    async def _fire(self, due: list[tuple[int, str]]) -> None:
        if self.failures:
            self.failures -= 1
            raise OSError("not now")
        self.log += [(self.clock.monotonic(), key) for _, key in due]

    def after(self, seconds: float, key: str) -> None:
        self.timers.add(self.clock.now_ns() + round(seconds * _NS), key)


async def test_each_fires_at_its_moment() -> None:
    """
    Entries fire at their moments; one that is added while the loop sleeps for a later one does not wait for that.
    """
    fired = Fired()
    fired.timers.start()
    fired.after(30, "late")
    await fired.clock.advance(1)
    fired.after(2.5, "early")
    fired.after(2.5, "also early")
    assert fired.timers.discard(fired.clock.now_ns() + 29 * _NS, "late")
    assert not fired.timers.discard(fired.clock.now_ns() + 29 * _NS, "late")

    await fired.clock.advance(60)

    assert fired.log == [(3.5, "also early"), (3.5, "early")]
    await fired.timers.close()


async def test_a_clock_set_forward_is_noticed_soon() -> None:
    """
    What a jump of a day makes due fires within the interval at which the clock is looked at, and at once after a ring.
    """
    fired = Fired()
    fired.timers.start()
    fired.after(_DAY_S, "tomorrow")
    fired.after(2 * _DAY_S, "the day after")
    await fired.clock.advance(1)

    fired.clock.jump(_DAY_S)
    await fired.clock.advance(5)
    assert [key for _, key in fired.log] == ["tomorrow"]

    fired.clock.jump(_DAY_S)
    fired.timers.ring()
    await fired.clock.advance(0)
    assert [key for _, key in fired.log] == ["tomorrow", "the day after"]
    await fired.timers.close()


async def test_a_clock_set_back_makes_nothing_due() -> None:
    """
    After a jump back, what was nearly due waits until the clock shows its moment again, and fires once.
    """
    fired = Fired(look_interval_s=3600)
    fired.timers.start()
    fired.after(3, "once")
    await fired.clock.advance(2)

    fired.clock.jump(-_DAY_S)
    await fired.clock.advance(_DAY_S)
    assert fired.log == []
    await fired.clock.advance(1)
    assert [key for _, key in fired.log] == ["once"]
    fired.clock.jump(-_DAY_S)
    await fired.clock.advance(2 * _DAY_S)
    assert len(fired.log) == 1
    await fired.timers.close()


async def test_what_fails_is_due_again() -> None:
    """
    Entries whose call raised come again a second later, all of them.
    """
    fired = Fired()
    fired.failures = 2
    fired.timers.start()
    fired.after(1, "a")
    fired.after(1, "b")

    await fired.clock.advance(10)

    assert fired.log == [(3.0, "a"), (3.0, "b")]
    await fired.timers.close()


async def test_an_alarm_that_is_rung_early_is_not_missed() -> None:
    """
    Ringing before somebody waits ends that wait at once.
    """
    clock = VirtualClock()
    alarm = WallClockAlarm(clock)
    alarm.ring()

    waiting = asyncio.ensure_future(alarm.wait(None))
    await clock.advance(0)

    assert waiting.done()
