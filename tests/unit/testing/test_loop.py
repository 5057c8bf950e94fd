"""The simulated loop: its time, its threads, its crashes, and that a seed decides all of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tidings.testing import InterleavedDisk, SimulatedClock, SimulatedCrash, SimulatedDisk, SimulatedLoop, Stuck

FOLDER = Path("/f")


def write_in_steps(disk: InterleavedDisk, names: list[str], told: list[str]) -> Callable[[], None]:
    """A job with a disk call for each name."""

    def job() -> None:
        for name in names:
            disk.make_folder(FOLDER / name)
            told.append(name)

    return job


def run(job: Callable[[SimulatedLoop], Any], **options: Any) -> Any:
    """Run a coroutine on a loop of its own."""
    loop = SimulatedLoop(**options)
    try:
        return loop.run_until_complete(job(loop))
    finally:
        loop.abandon()


def orders(seed: int) -> tuple[list[str], str]:
    """In what order two jobs get on, and the digest of the course."""

    async def scenario(loop: SimulatedLoop) -> tuple[list[str], str]:
        disk, told = InterleavedDisk(SimulatedDisk(), loop), list[str]()
        jobs = [write_in_steps(disk, [f"{who}{n}" for n in range(4)], told) for who in "ab"]
        await asyncio.gather(*(asyncio.to_thread(job) for job in jobs))
        return told, loop.digest

    told, digest = run(scenario, seed=seed)
    return told, digest


def test_time_passes_when_there_is_nothing_to_do() -> None:
    """A day's sleep takes no time, and the clock shows it."""

    async def scenario(loop: SimulatedLoop) -> float:
        clock = SimulatedClock(loop)
        before = clock.now_ns()
        await asyncio.sleep(3600)
        await clock.sleep(82_800)
        assert clock.now_ns() - before == 86_400 * 10**9
        return clock.monotonic()

    assert run(scenario) == 86_400


def test_jobs_lose_their_turn_at_disk_calls_as_the_seed_decides() -> None:
    """Two jobs are mixed in many ways, each keeps its own order, and a seed mixes them in one way only."""
    seen = {seed: orders(seed) for seed in range(40)}
    assert len({tuple(told) for told, _ in seen.values()}) > 10
    for told, _ in seen.values():
        assert [name for name in told if name[0] == "a"] == ["a0", "a1", "a2", "a3"]
    assert {seed: orders(seed) for seed in range(40)} == seen


def test_a_lock_is_held_by_one_job_at_a_time() -> None:
    """Who waits for it gets on when it is free; its holder may take it again."""

    async def scenario(loop: SimulatedLoop) -> list[str]:
        disk, told = InterleavedDisk(SimulatedDisk(), loop), list[str]()
        lock = disk.threads.lock()

        def locked(who: str) -> Callable[[], None]:
            def job() -> None:
                with lock, lock:
                    write_in_steps(disk, [f"{who}{n}" for n in range(3)], told)()

            return job

        waiting = asyncio.gather(*(disk.threads.run(locked(who)) for who in "abc"))
        await asyncio.sleep(0)
        with lock:  # the loop's own thread waits too
            told.append("loop")
        await waiting
        return told

    for seed in range(20):
        told = [name for name in run(scenario, seed=seed) if name != "loop"]
        assert all(told[at][0] == told[at + 1][0] == told[at + 2][0] for at in (0, 3, 6))


def test_errors_of_jobs_reach_who_waits() -> None:
    """A job's exception is raised where the job is awaited."""

    async def scenario(_: SimulatedLoop) -> None:
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 / 0)

    run(scenario)


@pytest.mark.parametrize("crash_at", range(1, 25, 3))
def test_the_machine_stops_at_a_step(crash_at: int) -> None:
    """Nothing more reaches the disk after it, whatever jobs and tasks had begun."""
    disk = SimulatedDisk()

    async def scenario(loop: SimulatedLoop) -> None:
        interleaved = InterleavedDisk(disk, loop)
        await asyncio.gather(
            *(interleaved.threads.run(write_in_steps(interleaved, [f"{who}{n}" for n in range(9)], [])) for who in "ab")
        )

    loop = SimulatedLoop(crash_at=crash_at)
    with pytest.raises(SimulatedCrash):
        loop.run_until_complete(scenario(loop))
    assert loop.steps == crash_at
    calls = disk.crash_after = disk.calls
    loop.abandon()
    assert disk.calls == calls
    assert loop.is_closed()


def test_waiting_for_nothing_is_noticed() -> None:
    """Where everybody waits and nobody sleeps, the run ends and says so."""

    async def scenario(_: SimulatedLoop) -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(Stuck, match="every task is blocked"):
        run(scenario)


def test_going_round_in_circles_is_noticed() -> None:
    """There is a limit to the steps of a run."""

    async def scenario(_: SimulatedLoop) -> None:
        while True:  # noqa: ASYNC110 - that is the point
            await asyncio.sleep(0)

    with pytest.raises(Stuck, match="after 1000 steps"):
        run(scenario, steps_max=1000)


def test_callbacks_keep_their_order_unless_told_otherwise() -> None:
    """Loops promise that what is scheduled first runs first; ``disorder`` breaks that on purpose."""

    async def scenario(_: SimulatedLoop) -> list[int]:
        came: list[int] = []
        for n in range(20):
            asyncio.get_running_loop().call_soon(came.append, n)
        await asyncio.sleep(1)
        return came

    assert run(scenario) == list(range(20))
    assert run(scenario, disorder=0.5) != list(range(20))


def test_the_order_of_sets_of_tasks_does_not_differ_from_run_to_run() -> None:
    """Tasks and futures have hashes of their own, so that what iterates over a set of them takes the same course."""

    async def scenario(loop: SimulatedLoop) -> list[int]:
        tasks = {asyncio.create_task(asyncio.sleep(n), name=str(n)) for n in range(50)}
        order = [int(task.get_name()) for task in tasks]
        await asyncio.wait(tasks)
        return order

    assert run(scenario) == run(scenario)


def test_the_trace_says_what_happened() -> None:
    """Each step with its number, its time and what went on; the last ones only."""

    async def scenario(loop: SimulatedLoop) -> list[str]:
        await asyncio.to_thread(write_in_steps(InterleavedDisk(SimulatedDisk(), loop), ["a", "b"], []))
        loop.note("done")
        return loop.trace

    trace = run(scenario, trace_count_max=5)
    assert len(trace) == 5
    assert any("make_folder b" in entry for entry in trace)
    assert trace[-1].endswith("0.0000 done")
