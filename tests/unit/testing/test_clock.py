"""A virtual clock moves only when told, wakes everyone in order, and never hangs a test."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from tidings.core.clock import Clock
from tidings.testing import NeverFinished, VirtualClock

HOUR = 3600.0
DAY = 24 * HOUR


class Diary:
    """Who woke when, in the order in which it happened."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.entries: list[tuple[str, float]] = []

    async def nap(self, name: str, *naps: float) -> None:
        for seconds in naps:
            await self.clock.sleep(seconds)
            self.entries.append((name, self.clock.monotonic()))


async def hand_over(links: int, end: Callable[[], None]) -> None:
    """Pass through a chain of tasks, each waiting for the next, and call ``end`` at its end."""
    if links:
        await asyncio.create_task(hand_over(links - 1, end))
    else:
        end()


def test_it_stands_still_where_it_was_started() -> None:
    """A new clock says its start as wall time and 0 as monotonic time, again and again."""
    clock: Clock = VirtualClock(start_ns=123)

    assert [clock.now_ns(), clock.now_ns()] == [123, 123]
    assert clock.monotonic() == 0.0


async def test_both_times_advance_together() -> None:
    """Advancing moves wall time and monotonic time by the same amount."""
    clock = VirtualClock(start_ns=0)

    await clock.advance(1.5)

    assert clock.now_ns() == 1_500_000_000
    assert clock.monotonic() == 1.5


async def test_small_steps_add_up_exactly() -> None:
    """A thousand steps of a tenth are a hundred seconds to the nanosecond."""
    clock = VirtualClock(start_ns=0)

    for _ in range(1000):
        await clock.advance(0.1)

    assert clock.now_ns() == 100_000_000_000


@pytest.mark.parametrize("seconds", [HOUR, -HOUR])
async def test_a_jump_moves_the_wall_clock_only(seconds: float) -> None:
    """After a jump either way monotonic time is as before, and nobody woke."""
    clock = VirtualClock(start_ns=10**18)
    diary = Diary(clock)
    sleeper = asyncio.create_task(diary.nap("a", 60))
    await clock.advance(1)

    clock.jump(seconds)
    await clock.advance(0)

    assert clock.now_ns() == 10**18 + round((1 + seconds) * 1e9)
    assert clock.monotonic() == 1.0
    assert not sleeper.done()
    await clock.advance(59)
    assert diary.entries == [("a", 60.0)]


async def test_sleepers_wake_in_the_order_of_their_deadlines() -> None:
    """Each sleeper wakes at its own time, whoever lay down first."""
    clock = VirtualClock()
    diary = Diary(clock)
    async with asyncio.TaskGroup() as tasks:
        for name, seconds in (("late", 3), ("early", 1), ("middle", 2)):
            tasks.create_task(diary.nap(name, seconds))
        await clock.advance(10)

    assert diary.entries == [("early", 1.0), ("middle", 2.0), ("late", 3.0)]
    assert clock.monotonic() == 10.0


async def test_equal_deadlines_wake_in_the_order_of_lying_down() -> None:
    """Sleepers that are due together wake as they came."""
    clock = VirtualClock()
    diary = Diary(clock)
    async with asyncio.TaskGroup() as tasks:
        for name in "abcdef":
            tasks.create_task(diary.nap(name, 1))
        await clock.advance(1)

    assert [name for name, _ in diary.entries] == list("abcdef")


async def test_naps_taken_on_the_way_end_on_the_way() -> None:
    """One advance also wakes those who lie down again while it is under way."""
    clock = VirtualClock()
    diary = Diary(clock)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(diary.nap("a", 1, 1, 1))
        tasks.create_task(diary.nap("b", 1.5, 1))
        await clock.advance(3)

    assert diary.entries == [("a", 1.0), ("b", 1.5), ("a", 2.0), ("b", 2.5), ("a", 3.0)]


async def test_nobody_wakes_too_early() -> None:
    """A nanosecond before the deadline the sleeper sleeps, at the deadline it wakes."""
    clock = VirtualClock()
    sleeper = asyncio.create_task(clock.sleep(1))

    await clock.advance(0.999_999_999)
    assert not sleeper.done()
    await clock.advance(0.000_000_001)
    assert sleeper.done()


async def test_what_a_sleeper_sets_off_is_done_before_the_next_wakes() -> None:
    """A chain of hand-overs through many tasks ends before time moves on."""
    clock = VirtualClock()
    reached: list[float] = []

    async def first() -> None:
        await clock.sleep(1)
        await hand_over(300, lambda: reached.append(clock.monotonic()))

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(first())
        tasks.create_task(clock.sleep(2))
        await clock.advance(5)

    assert reached == [1.0]


async def test_what_comes_through_a_pipe_is_done_before_the_next_wakes() -> None:
    """Bytes sent within the process arrive at the time they were sent at."""
    clock = VirtualClock()
    read_end, write_end = os.pipe()
    arrived: list[float] = []

    def receive() -> None:
        os.read(read_end, 1)
        arrived.append(clock.monotonic())

    async def send() -> None:
        await clock.sleep(1)
        os.write(write_end, b"x")
        await clock.sleep(3)

    loop = asyncio.get_running_loop()
    loop.add_reader(read_end, receive)
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(send())
            tasks.create_task(clock.sleep(2))
            await clock.advance(5)
    finally:
        loop.remove_reader(read_end)
        os.close(read_end)
        os.close(write_end)

    assert arrived == [1.0]


async def test_a_cancelled_sleeper_is_forgotten() -> None:
    """A timeout that was cancelled neither wakes anybody nor draws time towards it."""
    clock = VirtualClock()
    timeouts = [asyncio.create_task(clock.sleep(seconds)) for seconds in (1.5, HOUR)]
    await clock.advance(1)

    for timeout in timeouts:
        timeout.cancel()
    await clock.run_until(clock.sleep(1))

    assert all(timeout.cancelled() for timeout in timeouts)
    assert clock.monotonic() == 2.0


async def test_many_cancelled_timeouts_leave_the_others_in_order() -> None:
    """Thousands of timeouts that never strike do not disturb those who go on sleeping."""
    clock = VirtualClock()
    diary = Diary(clock)
    sleepers = [asyncio.create_task(diary.nap(str(n), n)) for n in (3, 1, 2)]

    async def with_timeouts() -> None:
        for _ in range(2000):
            timeout = asyncio.create_task(clock.sleep(HOUR))
            await asyncio.sleep(0)
            timeout.cancel()

    await clock.run_until(with_timeouts())
    await clock.run_until(asyncio.gather(*sleepers))

    assert diary.entries == [("1", 1.0), ("2", 2.0), ("3", 3.0)]


@pytest.mark.parametrize("seconds", [0, -1])
async def test_no_time_is_only_a_turn_for_others(seconds: float) -> None:
    """Sleeping for nothing lets others run and needs nobody to move the clock."""
    clock = VirtualClock()
    others = asyncio.create_task(asyncio.sleep(0, "ran"))
    await clock.sleep(seconds)
    await clock.sleep(seconds)

    assert others.done()
    assert clock.monotonic() == 0.0


async def test_a_deadline_is_reached_however_small_the_rest() -> None:
    """Sleeping for what is left until a deadline gets there, though the rest is below a nanosecond."""
    clock = VirtualClock()
    await clock.advance(0.1)

    await clock.run_until(clock.sleep(1e-12))

    assert clock.monotonic() == pytest.approx(0.1 + 1e-9, abs=1e-12)


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
async def test_time_passes_forward_and_ends(seconds: float) -> None:
    """Advancing back, by no number or for ever is refused."""
    with pytest.raises(ValueError, match="forward"):
        await VirtualClock().advance(seconds)


async def test_sleeping_for_no_number_is_refused() -> None:
    """NaN seconds are an error, not a sleep of some length."""
    with pytest.raises(ValueError, match="NaN"):
        await VirtualClock().sleep(float("nan"))


async def test_a_day_of_traffic_runs_by_itself() -> None:
    """Under run_until a day of several tasks' sleeping passes without anybody advancing the clock."""
    clock = VirtualClock(start_ns=0)
    diary = Diary(clock)

    async def day() -> str:
        async with asyncio.TaskGroup() as tasks:
            for minutes in (1, 7, 30):
                tasks.create_task(diary.nap(str(minutes), *[minutes * 60.0] * (1440 // minutes)))
        return "over"

    assert await clock.run_until(day()) == "over"
    assert clock.now_ns() == int(DAY * 1e9)
    assert len(diary.entries) == 1440 + 205 + 48
    assert [when for _, when in diary.entries] == sorted(when for _, when in diary.entries)


async def test_time_does_not_move_past_the_end() -> None:
    """When the awaited is done, time stays there, and those who sleep longer sleep on."""
    clock = VirtualClock()
    other = asyncio.create_task(clock.sleep(HOUR))

    await clock.run_until(clock.sleep(1))

    assert clock.monotonic() == 1.0
    assert not other.done()
    await clock.advance(HOUR)
    assert other.done()


async def test_the_awaited_error_comes_out() -> None:
    """An exception of what run_until waits for reaches the caller as it is."""
    clock = VirtualClock()

    async def fail() -> None:
        await clock.sleep(1)
        raise LookupError("nothing there")

    with pytest.raises(LookupError, match="nothing there"):
        await clock.run_until(fail())


async def test_threads_get_real_time_when_nobody_sleeps() -> None:
    """Work in a thread is waited for, and virtual sleep after it goes on by itself."""
    clock = VirtualClock()

    async def work() -> int:
        found = await asyncio.to_thread(sum, range(2_000_000))
        await clock.sleep(HOUR)
        return found

    assert await clock.run_until(work()) == 1_999_999_000_000
    assert clock.monotonic() == HOUR


async def test_a_deadlock_is_reported() -> None:
    """With every task blocked and nobody asleep, run_until gives up and cancels what it waited for."""
    clock = VirtualClock()
    unwound: list[str] = []

    async def wait_for_nothing() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            unwound.append("cleaned up")

    with pytest.raises(NeverFinished, match="every task is blocked") as failure:
        await clock.run_until(wait_for_nothing(), outside_seconds_max=0)

    assert unwound == ["cleaned up"]
    assert failure.value.code == "testing.never_finished"


async def test_sleeping_for_ever_is_a_deadlock() -> None:
    """An endless sleep has no end to move to."""
    clock = VirtualClock()

    with pytest.raises(NeverFinished, match="every task is blocked"):
        await clock.run_until(clock.sleep(float("inf")), outside_seconds_max=0)


async def polling(clock: VirtualClock, seconds: float) -> None:
    while True:
        await clock.sleep(seconds)


@pytest.mark.parametrize(
    ("seconds", "problem"), [(0.001, "10 sleepers woke"), (HOUR, "virtual time allowed is over"), (0, "still busy")]
)
async def test_a_wait_without_end_is_cut_off(seconds: float, problem: str) -> None:
    """Polling for ever ends with an error, whether by small naps, long ones or none at all."""
    clock = VirtualClock(wakes_max=10)

    with pytest.raises(NeverFinished, match=problem):
        await clock.run_until(polling(clock, seconds), seconds_max=2 * HOUR)


async def test_an_advance_without_end_is_cut_off() -> None:
    """A task that naps more often than allowed stops an advance with an error."""
    clock = VirtualClock(wakes_max=10)
    poller = asyncio.create_task(polling(clock, 0.001))

    with pytest.raises(NeverFinished, match="10 sleepers woke"):
        await clock.advance(1)
    poller.cancel()


async def test_one_driver_at_a_time() -> None:
    """A task under run_until may not advance or run the clock itself; it is told to sleep instead."""
    clock = VirtualClock()

    async def driving(other: Coroutine[None, None, None]) -> None:
        await other

    for drive in (clock.advance(1), clock.run_until(clock.sleep(1))):
        with pytest.raises(RuntimeError, match="already being driven"):
            await clock.run_until(driving(drive))
    await clock.advance(1)


@given(st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=5), min_size=1, max_size=6))
def test_every_course_is_the_courses_sum(naps: list[list[int]]) -> None:
    """Whatever the naps, each ends exactly when its own course says, and the whole is in time order."""

    async def course() -> list[tuple[str, float]]:
        clock = VirtualClock()
        diary = Diary(clock)
        await clock.run_until(asyncio.gather(*(diary.nap(str(n), *each) for n, each in enumerate(naps))))
        return diary.entries

    entries = asyncio.run(course())

    assert [when for _, when in entries] == sorted(when for _, when in entries)
    for n, each in enumerate(naps):
        assert [when for name, when in entries if name == str(n)] == [sum(each[: k + 1]) for k in range(len(each))]


def test_it_works_on_uvloop() -> None:
    """On a loop that does not show its queue, sleepers wake in order and hand-overs are done in time."""

    async def course() -> list[tuple[str, float]]:
        clock = VirtualClock()
        diary = Diary(clock)

        async def first() -> None:
            await clock.sleep(1)
            await hand_over(20, lambda: diary.entries.append(("end of the chain", clock.monotonic())))

        await clock.run_until(asyncio.gather(diary.nap("a", 2, 2), diary.nap("b", 1.5), first()))
        await clock.advance(1)
        return [*diary.entries, ("now", clock.monotonic())]

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        entries = runner.run(course())

    assert entries == [("end of the chain", 1.0), ("b", 1.5), ("a", 2.0), ("a", 4.0), ("now", 5.0)]
