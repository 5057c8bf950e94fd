"""The dispatcher hands every record to every listener once, in order, the book first; who fails is closed, not skipped."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest

from tests.integration.api_support import until
from tidings.core.events import Event, EventMeta
from tidings.log.dispatcher import Dispatcher
from tidings.log.errors import DispatcherStopped
from tidings.log.interface import Page, Query
from tidings.log.memory import MemoryLog
from tidings.log.record import Record


def event(topic: str = "demo") -> Event:
    return Event(EventMeta(topic, "NOTED", "shared:home"), {})


class Hearer:
    """Notes what it is told, in a journal that it may share with others."""

    def __init__(
        self, name: str = "", journal: list[tuple[str, int]] | None = None, fails_at: int | None = None
    ) -> None:
        self.name = name
        self.journal = journal if journal is not None else []
        self.fails_at = fails_at
        self.calls: list[int] = []
        self.failures: list[str] = []

    def committed(self, records: Sequence[Record]) -> None:
        self.calls.append(len(records))
        for record in records:
            if record.seq == self.fails_at:
                raise RuntimeError("as the test wanted")
            self.journal.append((self.name, record.seq))

    @property
    def seqs(self) -> list[int]:
        return [seq for name, seq in self.journal if name == self.name]


class FollowedLog(MemoryLog):
    """A log that notes up to where its follower has read."""

    read_seq = -1

    async def wait(self, after: int, topic: str | None = None) -> int:
        self.read_seq = after
        return await super().wait(after, topic)

    async def append_and_have_read(self, *events: Event) -> None:
        await self.append_many(list(events))
        await until(lambda: self.read_seq >= self.position.seq)


async def test_every_record_comes_once_and_in_order() -> None:
    """Records of several topics, committed while it follows, arrive in seq order without gap or repetition."""
    log, hearer = MemoryLog(), Hearer()
    dispatcher = Dispatcher(log, batch_count_max=7)
    dispatcher.add("hearer", hearer)
    dispatcher.start()
    rng = random.Random(1)
    for _ in range(50):
        await log.append_many([event(rng.choice(["a", "b", "c"])) for _ in range(rng.randint(1, 20))])
        await asyncio.sleep(0)
    await dispatcher.reached(log.position.seq)
    await dispatcher.close()

    assert hearer.seqs == list(range(1, log.position.seq + 1))
    assert max(hearer.calls) <= 7
    assert (dispatcher.seq, dispatcher.lag) == (log.position.seq, 0)


async def test_it_begins_after_since() -> None:
    """What was handed out before is not handed out again."""
    log, hearer = MemoryLog(), Hearer()
    await log.append_many([event() for _ in range(5)])
    dispatcher = Dispatcher(log, since=3)
    dispatcher.add("hearer", hearer)
    dispatcher.start()
    await dispatcher.reached(5)
    await dispatcher.close()

    assert hearer.seqs == [4, 5]


async def test_the_first_listener_hears_a_batch_before_the_others() -> None:
    """Nobody behind the first one is told of a record that the first one was not told of: revocations depend on it."""
    log = MemoryLog()
    journal: list[tuple[str, int]] = []
    dispatcher = Dispatcher(log, batch_count_max=3)
    for name in ("book", "sync", "groups"):
        dispatcher.add(name, Hearer(name, journal))
    await log.append_many([event() for _ in range(20)])
    dispatcher.start()
    await dispatcher.reached(20)
    await dispatcher.close()

    known = 0
    for name, seq in journal:
        if name == "book":
            known = seq
        assert seq <= known


async def test_a_listener_that_fails_is_told_and_left_out() -> None:
    """The others hear everything; the failed one hears nothing more, is told why, and stands among the problems."""
    log, good, bad = MemoryLog(), Hearer("good"), Hearer("bad", fails_at=3)
    dispatcher = Dispatcher(log, batch_count_max=1)
    dispatcher.add("bad", bad, on_failure=bad.failures.append)
    dispatcher.add("good", good, on_failure=good.failures.append)
    dispatcher.start()
    await log.append_many([event() for _ in range(5)])
    await dispatcher.reached(5)

    assert good.seqs == [1, 2, 3, 4, 5]
    assert bad.seqs == [1, 2]
    assert len(bad.failures) == 1
    assert "seq 3" in bad.failures[0]
    assert not good.failures
    assert dispatcher.problem is None
    assert [problem.partition(":")[0] for problem in dispatcher.problems] == ["bad"]
    await dispatcher.close()


async def test_without_a_listener_that_decides_nothing_is_delivered() -> None:
    """If the book fails, nobody hears the batch it failed on or anything after, and everybody is told."""
    log, book, endpoint = MemoryLog(), Hearer("book", fails_at=3), Hearer("endpoint")
    dispatcher = Dispatcher(log, batch_count_max=1)
    dispatcher.add("book", book, decides_by="access")
    dispatcher.add("endpoint", endpoint, on_failure=endpoint.failures.append)
    dispatcher.start()
    await log.append_many([event() for _ in range(5)])

    with pytest.raises(DispatcherStopped):
        await dispatcher.reached(5)
    assert endpoint.seqs == [1, 2]
    assert dispatcher.seq == 2
    assert len(endpoint.failures) == 1
    assert dispatcher.problem is not None
    with pytest.raises(DispatcherStopped):
        await dispatcher.reached(3)
    await dispatcher.close()


async def test_commits_that_follow_closely_are_told_together() -> None:
    """After the first, the others are told when somebody waits for one, or when as many as a batch has are there; never more than that."""
    log, endpoint = FollowedLog(), Hearer("endpoint")
    dispatcher = Dispatcher(log, batch_count_max=4, interval_s=lambda: 3600.0)
    dispatcher.add("endpoint", endpoint)
    dispatcher.start()
    for _ in range(3):
        await log.append_and_have_read(event())
    assert (endpoint.seqs, dispatcher.seq, dispatcher.lag) == ([1], 1, 2)
    await dispatcher.reached(2)
    assert endpoint.calls == [1, 2]

    for count in (1, 2, 6):
        await log.append_and_have_read(*(event() for _ in range(count)))
    assert endpoint.seqs == list(range(1, 12))
    assert endpoint.calls == [1, 2, 4, 4]
    assert (dispatcher.seq, dispatcher.lag) == (11, 1)
    await dispatcher.close()

    assert endpoint.seqs[-1] == 11


async def test_many_bytes_do_not_wait_for_the_interval() -> None:
    """What is held is bounded in bytes too."""
    log, endpoint = FollowedLog(), Hearer("endpoint")
    dispatcher = Dispatcher(log, batch_bytes_max=1000, interval_s=lambda: 3600.0)
    dispatcher.add("endpoint", endpoint)
    dispatcher.start()
    for _ in range(5):
        await log.append_and_have_read(Event(EventMeta("demo", "NOTED", "shared:home"), {"text": "x" * 400}))
    await dispatcher.close()

    assert endpoint.calls == [1, 3]


async def test_a_shorter_interval_holds_from_the_next_commit_on() -> None:
    """What waits by the old interval is told with it."""
    log, endpoint = FollowedLog(), Hearer("endpoint")
    interval_s = 3600.0
    dispatcher = Dispatcher(log, interval_s=lambda: interval_s)
    dispatcher.add("endpoint", endpoint)
    dispatcher.start()
    for _ in range(2):
        await log.append_and_have_read(event())
    interval_s = 0.0
    await log.append_and_have_read(event())
    await dispatcher.close()

    assert endpoint.calls == [1, 2]


@pytest.mark.parametrize("interval_s", [0.0, 3600.0])
async def test_what_decides_is_told_at_once_and_changes_nothing_before_it(interval_s: float) -> None:
    """Whoever is told of a record is told while the book knows every decision before it, and none after it; and no decision waits."""
    log, book = MemoryLog(), Hearer("book")
    known: list[tuple[int, int]] = []

    class Endpoint:
        def committed(self, records: Sequence[Record]) -> None:
            known.extend((record.seq, book.seqs[-1]) for record in records)

    class Book:
        def committed(self, records: Sequence[Record]) -> None:
            book.committed([record for record in records if record.topic == "access"])

    dispatcher = Dispatcher(log, interval_s=lambda: interval_s)
    dispatcher.add("book", Book(), decides_by="access")
    dispatcher.add("endpoint", Endpoint())
    dispatcher.start()
    await log.append(event("access"))
    await until(lambda: known == [(1, 1)])
    await log.append_many([event()])
    await log.append_many([event(), event("access"), event(), event("access"), event("access"), event()])
    await until(lambda: len(known) == 8)
    await dispatcher.close()

    assert known == [(1, 1), (2, 1), (3, 1), (4, 4), (5, 4), (6, 6), (7, 7), (8, 7)]


async def test_what_is_held_is_told_when_it_is_time() -> None:
    """Nobody has to ask: the interval ends by itself."""
    log, endpoint = MemoryLog(), Hearer("endpoint")
    dispatcher = Dispatcher(log, interval_s=lambda: 0.02)
    dispatcher.add("endpoint", endpoint)
    dispatcher.start()
    for _ in range(3):
        await log.append(event())
        await asyncio.sleep(0)
    await until(lambda: endpoint.seqs == [1, 2, 3])
    await dispatcher.close()

    assert len(endpoint.calls) == 2


async def test_what_is_held_is_never_told_once_the_book_failed() -> None:
    """What waited for its time is not delivered by rights that nobody knows."""
    log, book, endpoint = MemoryLog(), Hearer("book", fails_at=3), Hearer("endpoint")
    dispatcher = Dispatcher(log, interval_s=lambda: 3600.0)
    dispatcher.add("book", book, decides_by="access")
    dispatcher.add("endpoint", endpoint, on_failure=endpoint.failures.append)
    dispatcher.start()
    await log.append(event())
    await until(lambda: book.seqs == [1])
    await log.append_many([event(), event()])
    with pytest.raises(DispatcherStopped):
        await dispatcher.reached(3)
    await until(lambda: endpoint.failures)
    with pytest.raises(DispatcherStopped):
        await dispatcher.reached(2)
    await dispatcher.close()

    assert endpoint.seqs == [1]


async def test_who_has_not_finished_is_asked_to_before_a_decision() -> None:
    """A listener that leaves something for later is done with it before the book is told; one that fails at it gets no more."""
    log = MemoryLog()
    journal: list[tuple[str, int]] = []
    bad = Hearer("bad", journal)

    def fail() -> None:
        raise RuntimeError("as the test wanted")

    dispatcher = Dispatcher(log)
    dispatcher.add("book", Hearer("book", journal), decides_by="access")
    dispatcher.add("bad", bad, finish=fail, on_failure=bad.failures.append)
    dispatcher.add("slow", Hearer("slow", journal), finish=lambda: journal.append(("finished", 0)))
    dispatcher.start()
    await log.append_many([event(), event("access"), event()])
    await dispatcher.reached(3)
    await dispatcher.close()

    assert journal == [
        *[("book", 1), ("bad", 1), ("slow", 1), ("finished", 0)],
        *[("book", 2), ("book", 3), ("slow", 2), ("slow", 3)],
    ]
    assert len(bad.failures) == 1


async def test_a_failure_handler_that_fails_does_not_stop_the_rest() -> None:
    """Even a listener that cannot be told of its failure leaves the others alone."""

    def explode(reason: str) -> None:
        raise RuntimeError("as the test wanted")

    log, good = MemoryLog(), Hearer("good")
    dispatcher = Dispatcher(log)
    dispatcher.add("bad", Hearer(fails_at=1), on_failure=explode)
    dispatcher.add("good", good)
    dispatcher.start()
    await log.append(event())
    await dispatcher.reached(1)
    await dispatcher.close()

    assert good.seqs == [1]


async def test_closing_tells_who_waits() -> None:
    """A waiter for a seq that will not come is told instead of waiting for ever; closing twice is fine."""
    log = MemoryLog()
    dispatcher = Dispatcher(log)
    dispatcher.start()
    waiter = asyncio.ensure_future(dispatcher.reached(1))
    await asyncio.sleep(0)
    await dispatcher.close()
    await dispatcher.close()

    with pytest.raises(DispatcherStopped):
        await waiter
    with pytest.raises(DispatcherStopped):
        await dispatcher.reached(1)


async def test_waiters_that_give_up_are_forgotten() -> None:
    """A cancelled waiter disturbs nobody."""
    log = MemoryLog()
    dispatcher = Dispatcher(log)
    dispatcher.start()
    gone = asyncio.ensure_future(dispatcher.reached(1))
    stays = asyncio.ensure_future(dispatcher.reached(1))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    await log.append(event())
    await stays
    await dispatcher.close()

    assert dispatcher.seq == 1


async def test_a_log_that_cannot_be_read_stops_it_with_a_reason() -> None:
    """An error while reading is a problem with a reason, and the endpoints are told: they must not wait in silence."""

    class Broken(MemoryLog):
        async def read(self, query: Query, *, limit: int = 1000, bytes_max: int = 4 << 20) -> Page:
            raise OSError("as the test wanted")

    endpoint = Hearer()
    dispatcher = Dispatcher(Broken())
    dispatcher.add("endpoint", endpoint, on_failure=endpoint.failures.append)
    dispatcher.start()

    with pytest.raises(DispatcherStopped):
        await dispatcher.reached(1)
    assert dispatcher.problem == "reading the log failed: as the test wanted"
    assert endpoint.failures == [dispatcher.problem]
    await dispatcher.close()
