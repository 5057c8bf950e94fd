"""A caller that gives up takes nothing back, and a closed log says so."""

from __future__ import annotations

import asyncio

import pytest

from tests.conformance.support import SECONDS_MAX, append_all, event, numbered, read_all, read_seqs
from tidings.log import Duplicate, Log, Query
from tidings.log.errors import LogClosed
from tidings.log.reading import tail
from tidings.log.retention import RetentionPlan


async def test_a_cancelled_append_still_stores(log: Log) -> None:
    """Once begun, an append whose caller was cancelled is carried out all the same."""
    task = asyncio.create_task(log.append(event("a", {"n": 1})))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

    async with asyncio.timeout(SECONDS_MAX):
        await log.wait(0)
    assert [record.payload for record in await read_all(log, Query())] == [{"n": 1}]


async def test_a_cancelled_batch_still_stores_all_of_it(log: Log) -> None:
    """A batch is not cut in the middle by a cancellation."""
    task = asyncio.create_task(log.append_many(numbered("a", 50)))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

    async with asyncio.timeout(SECONDS_MAX):
        await log.wait(49)
    assert len(await read_all(log, Query())) == 50


@pytest.mark.req("F70")
async def test_sending_a_cancelled_event_again_settles_it(log: Log) -> None:
    """After a cancellation the same event sent again is stored exactly once, whatever became of the first try."""
    events = [event("a", {"n": n}) for n in range(30)]
    for rounds, unsure in enumerate(events):
        task = asyncio.create_task(log.append(unsure))
        for _ in range(rounds % 4):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    again = [await log.append(unsure) for unsure in events]

    records = await read_all(log, Query())
    assert sorted(record.payload["n"] for record in records) == list(range(30))
    assert {record.meta.event_id: record.seq for record in records} == {v.event_id: v.seq for v in again}


async def test_others_go_on_after_a_cancellation(log: Log) -> None:
    """Cancelling some of many concurrent appends leaves the others acknowledged and the places dense."""
    tasks = [asyncio.create_task(log.append(event("a", {"n": n}))) for n in range(60)]
    await asyncio.sleep(0)
    for task in tasks[::3]:
        task.cancel()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)

    last = await log.append(event("a", {"n": 60}))

    assert await read_seqs(log, Query()) == list(range(1, last.seq + 1))
    by_seq = {record.seq: record.payload["n"] for record in await read_all(log, Query())}
    for n, outcome in enumerate(outcomes):
        if not isinstance(outcome, BaseException):
            assert by_seq[outcome.seq] == n


async def test_a_cancelled_waiter_leaves_the_others_waiting(log: Log) -> None:
    """Giving up on one wait does not wake or lose another."""
    gone, patient = (asyncio.create_task(log.wait(0)) for _ in range(2))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)

    assert not patient.done()
    await log.append(event())
    async with asyncio.timeout(SECONDS_MAX):
        assert await patient == 1


async def test_a_closed_log_refuses(log: Log) -> None:
    """Appending, reading, waiting and dropping on a closed log say that it is closed."""
    await log.append(event())
    await log.close()

    with pytest.raises(LogClosed):
        await log.append(event())
    with pytest.raises(LogClosed):
        await log.append_many([event()])
    with pytest.raises(LogClosed):
        await log.read(Query())
    with pytest.raises(LogClosed):
        await log.wait(0)
    with pytest.raises(LogClosed):
        await log.drop(RetentionPlan(()))
    assert not log.health().is_writable


async def test_closing_twice_is_fine(log: Log) -> None:
    """A second close does nothing."""
    await log.close()
    await log.close()


async def test_closing_tells_those_who_wait(log: Log) -> None:
    """Waiters, of any topic and of all, are told at once that nothing more will come."""
    waiters = [asyncio.create_task(log.wait(0, topic)) for topic in (None, "a", "b")]
    await asyncio.sleep(0)

    await log.close()

    async with asyncio.timeout(SECONDS_MAX):
        outcomes = await asyncio.gather(*waiters, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [LogClosed] * 3


async def test_closing_ends_a_tail(log: Log) -> None:
    """A tail ends without an error when its log is closed, after all that was committed."""
    await append_all(log, numbered("a", 5))
    seen: list[int] = []

    async def follow() -> None:
        async for record in tail(log, Query()):
            seen.append(record.seq)
            if record.seq == 6:
                closing.set()

    closing = asyncio.Event()
    follower = asyncio.create_task(follow())
    await log.append(event("a"))
    async with asyncio.timeout(SECONDS_MAX):
        await closing.wait()
        await log.close()
        await follower

    assert seen == [1, 2, 3, 4, 5, 6]


async def test_closing_finishes_what_was_begun(log: Log) -> None:
    """An append under way when the log is closed is either acknowledged or told that the log is closed."""
    tasks = [asyncio.create_task(log.append(event("a", event_id=f"e{n}"))) for n in range(20)]
    await asyncio.sleep(0)

    await log.close()

    async with asyncio.timeout(SECONDS_MAX):
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    for outcome in outcomes:
        assert isinstance(outcome, LogClosed) or not isinstance(outcome, BaseException | Duplicate)
