"""The bus: everybody has everything, in order, at their own pace."""

from __future__ import annotations

import asyncio
import gc
import time
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.callbacks import CALLBACK_S_MAX
from tidings.happenings import AnyHappening, Envelope, HappeningFilter, HappeningsBus, Receiver
from tidings.happenings.errors import HappeningsClosed, Lagged
from tidings.happenings.variants import RelationRewritten

from .support import released, taken


def seqs(receiver: Receiver) -> list[int]:
    """The seqs that a receiver holds."""
    return [each.seq for each in receiver.take(10_000)]


@pytest.mark.req("H1")
async def test_each_receiver_sees_everything_at_its_own_pace() -> None:
    """One that reads now and one that reads later see the same, and take nothing from each other."""
    bus = HappeningsBus()
    quick, slow = bus.subscribe(), bus.subscribe()
    read_at_once = []
    for number in range(5):
        bus.emit(released(number))
        read_at_once.append(await quick.recv())

    assert read_at_once == [Envelope(number + 1, released(number)) for number in range(5)]
    assert slow.take(100) == read_at_once


@pytest.mark.req("H2", "H6")
@pytest.mark.parametrize(("capacity", "count"), [(None, 1024), (None, 1025), (1, 5), (2, 32), (3, 3), (7, 8)])
async def test_who_falls_behind_is_told_how_many_it_missed(capacity: int | None, count: int) -> None:
    """A buffer holds exactly its capacity, 1024 by default; the number lost is told once, and the rest and all that comes is read."""
    bus = HappeningsBus() if capacity is None else HappeningsBus(capacity=capacity)
    receiver = bus.subscribe()
    held = min(count, capacity or 1024)
    for number in range(count):
        bus.emit(released(number))

    if count > held:
        with pytest.raises(Lagged) as lag:
            await receiver.recv()
        assert lag.value.args == (count - held, count - held + 1, count)
    assert seqs(receiver) == list(range(count - held + 1, count + 1))
    bus.emit(released("next"))
    assert (await receiver.recv()).seq == count + 1


@pytest.mark.req("H2")
def test_a_bus_needs_room() -> None:
    """A capacity below 1 is refused."""
    with pytest.raises(ValueError, match="at least one"):
        HappeningsBus(capacity=0)


@pytest.mark.req("H6")
@given(
    capacity=st.integers(1, 5),
    steps=st.lists(st.sampled_from(["wanted", "other", "read", "read all"]), max_size=60),
)
def test_what_is_read_and_what_is_missed_add_up(capacity: int, steps: list[str]) -> None:
    """However reading and emitting alternate, a filtered receiver has read or counted as missed exactly what its filter lets through."""
    bus = HappeningsBus(capacity=capacity)
    receiver = bus.subscribe(HappeningFilter(plugins=("wanted",)))
    emitted: list[int] = []
    read: list[int] = []
    missed_count = 0
    oldest: list[tuple[int, int]] = []
    for seq, step in enumerate([*steps, "read all", "read all"]):
        if step in ("wanted", "other"):
            bus.emit(released(seq, step))
            if step == "wanted":
                emitted.append(bus.last_seq)
            continue
        try:
            read += [each.seq for each in receiver.take(1 if step == "read" else 100)]
        except Lagged as lag:
            missed_count += lag.missed_count
            oldest.append((lag.oldest_available_seq, emitted[-capacity]))

    assert len(read) + missed_count == len(emitted)
    assert read == sorted(set(read) & set(emitted))
    assert all(told == kept for told, kept in oldest)


@pytest.mark.req("H3")
async def test_emit_waits_for_nobody() -> None:
    """With a hundred receivers that never read, far beyond their buffers, emit is a plain call that returns nothing."""
    bus = HappeningsBus(capacity=2)
    receivers = [bus.subscribe() for _ in range(100)]

    assert [bus.emit(released(number)) for number in range(50)] == [None] * 50  # type: ignore[func-returns-value]
    assert bus.last_seq == 50
    bus.close()
    bus.emit(released("after the end"))
    assert len(receivers) == 100


@pytest.mark.req("H4", "H5")
async def test_what_nobody_listened_to_is_gone() -> None:
    """What was emitted before a receiver subscribed does not reach it; what is emitted afterwards does, with a later seq."""
    bus = HappeningsBus()
    bus.emit(released("before"))
    receiver = bus.subscribe()

    assert receiver.try_recv() is None
    bus.emit(released("after"))
    assert receiver.try_recv() == Envelope(2, released("after"))
    assert receiver.try_recv() is None


@pytest.mark.req("H7")
async def test_receivers_are_counted() -> None:
    """The count follows subscribing, closing, leaving a context, and receivers that nobody refers to any more."""
    bus = HappeningsBus()
    receivers = [bus.subscribe(), bus.subscribe(HappeningFilter(plugins=("a",))), bus.subscribe()]
    counts = [bus.receiver_count]
    receivers.pop().close()
    counts.append(bus.receiver_count)
    with bus.subscribe():
        counts.append(bus.receiver_count)
    receivers.clear()
    gc.collect()

    assert [*counts, bus.receiver_count] == [3, 2, 3, 0]


@pytest.mark.req("H8")
@given(st.data())
def test_seqs_rise_whatever_waits_for_a_write(data: st.DataObject) -> None:
    """
    With reservations published, given up and overtaken in any order, every receiver gets rising seqs, and all but what was given up;
    and the newest seq is one of those.
    """
    bus = HappeningsBus(capacity=1000)
    receiver = bus.subscribe()
    open_: dict[int, int] = {}
    given_up: set[int] = set()
    for _ in range(data.draw(st.integers(1, 25))):
        match data.draw(st.sampled_from(["emit", "reserve", "publish", "abandon"])):
            case "emit":
                bus.emit(released("plain"))
            case "reserve":
                count = data.draw(st.integers(1, 3))
                open_[bus.reserve(count)] = count
            case action if open_:
                first = data.draw(st.sampled_from(sorted(open_)))
                count = open_.pop(first)
                if action == "publish":
                    bus.publish(first, [released("stored")] * count)
                else:
                    bus.abandon(first)
                    given_up |= set(range(first, first + count))
        first_open = min(open_, default=bus.minted_seq + 1)
        assert bus.last_seq == max({0, *range(1, first_open)} - given_up)
    for first, count in open_.items():
        bus.publish(first, [released("stored")] * count)

    assert seqs(receiver) == [seq for seq in range(1, bus.minted_seq + 1) if seq not in given_up]


async def test_a_plain_emit_stays_behind_what_is_being_written() -> None:
    """It waits, and its caller does not."""
    bus = HappeningsBus()
    receiver = bus.subscribe()
    first_seq = bus.reserve(2)
    bus.emit(released("plain"))

    assert receiver.try_recv() is None
    assert bus.last_seq == 0
    bus.publish(first_seq, [released("a"), released("b")])
    assert receiver.take(9) == [Envelope(1, released("a")), Envelope(2, released("b")), Envelope(3, released("plain"))]


async def test_a_plain_emit_is_delivered_when_its_seq_cannot_come_again() -> None:
    """Where seqs outlive the process, one that nothing on disk speaks of waits until something does; further ones need not ask again."""
    asked: list[int] = []
    bus = HappeningsBus(last_seq=40, covers=asked.append)
    receiver = bus.subscribe()

    bus.emit(released(1))
    assert (seqs(receiver), asked) == ([], [41])
    bus.cover(43)
    bus.emit(released(2))
    assert (seqs(receiver), asked) == ([41, 42], [41])
    first_seq = bus.reserve(3)
    bus.publish(first_seq, [released("stored")] * 3)
    bus.emit(released(3))
    assert (seqs(receiver), asked) == ([43, 44, 45], [41, 46])
    assert (bus.last_seq, bus.minted_seq, bus.covered_seq) == (45, 46, 45)
    bus.emit(released(4))
    asked.clear()
    bus.cover(46)
    assert (seqs(receiver), asked) == ([46], [47])


@pytest.mark.req("H3", "H6")
async def test_what_waits_for_a_write_is_bounded() -> None:
    """While a write takes its time, plain emits wait, at most as many as a receiver holds; each that is given up is counted as missed."""
    bus = HappeningsBus(capacity=2)
    everything, filtered = bus.subscribe(), bus.subscribe(HappeningFilter(plugins=("a",)))
    waiting = asyncio.ensure_future(everything.recv())
    await asyncio.sleep(0)
    first_seq = bus.reserve(1)
    for number in range(9):
        bus.emit(released(number, "ab"[number % 2]))

    with pytest.raises(Lagged) as lag:
        await waiting
    assert lag.value.args == (7, 0, 0)
    bus.publish(first_seq, [released("stored", "a")])
    with pytest.raises(Lagged, match="1 happenings were missed"):
        everything.take(9)
    assert seqs(everything) == [9, 10]
    with pytest.raises(Lagged, match="4 happenings were missed"):
        filtered.take(9)
    assert seqs(filtered) == [1, 10]


async def test_a_receiver_waits_until_something_comes() -> None:
    """``recv`` returns when there is something; a call that is cancelled while it waits loses nothing."""
    bus = HappeningsBus()
    receiver = bus.subscribe(HappeningFilter(variants=("custody_taken",)))
    waiting = asyncio.ensure_future(receiver.recv())
    await asyncio.sleep(0)
    bus.emit(released("not wanted"))
    await asyncio.sleep(0)
    assert not waiting.done()
    waiting.cancel()
    await asyncio.wait({waiting})
    bus.emit(taken("wanted"))

    assert await receiver.recv() == Envelope(2, taken("wanted"))


async def test_receivers_end_with_the_bus() -> None:
    """What a receiver holds is read to the end, then iteration stops; one that waits, or comes later, ends at once."""
    bus = HappeningsBus()
    holding, waiting = bus.subscribe(), bus.subscribe(HappeningFilter(plugins=("nobody",)))
    ended = asyncio.ensure_future(waiting.recv())
    bus.emit(released(1))
    await asyncio.sleep(0)
    bus.close()

    assert [each.seq async for each in holding] == [1]
    with pytest.raises(HappeningsClosed):
        await ended
    with pytest.raises(HappeningsClosed):
        bus.subscribe().try_recv()
    assert bus.receiver_count == 0


@pytest.mark.req("H1", "H8")
async def test_many_emit_and_many_listen() -> None:
    """Four receivers and two emitters at once: each receiver has all fifty, in the same order."""
    bus = HappeningsBus()
    receivers = [bus.subscribe() for _ in range(4)]

    async def emit(name: str) -> None:
        for number in range(25):
            bus.emit(released(f"{name}{number}"))
            await asyncio.sleep(0)

    async def listen(receiver: Receiver) -> list[Envelope]:
        return [await receiver.recv() for _ in range(50)]

    *views, _, _ = await asyncio.gather(*map(listen, receivers), emit("a"), emit("b"))

    assert views[0] is not None
    assert [each.seq for each in views[0]] == list(range(1, 51))
    assert all(view == views[0] for view in views)
    assert {each.happening.labels()["handle_id"][0] for each in views[0]} == {"a", "b"}


@pytest.mark.parametrize("kind", ["equal", "distinct", "subjects"])
async def test_many_filtered_receivers_cost_little_more_than_unfiltered_ones(kind: str) -> None:
    """4,000 happenings of one commit for 300 receivers with filters: less than 50 ms, as without filters."""
    bus = HappeningsBus()
    filters = {
        "equal": lambda number: HappeningFilter(variants=("custody_released",)),
        "distinct": lambda number: HappeningFilter(variants=("custody_released",), plugins=("p", f"p{number}")),
        "subjects": lambda number: HappeningFilter(subjects=("hub", f"s{number}")),
    }
    receivers = [bus.subscribe(filters[kind](number)) for number in range(300)]
    happenings: list[AnyHappening] = [
        RelationRewritten(
            at_ms=1, admin_plugin="a", predicate="p", old_subject_id="hub", new_subject_id="n", target_id=str(number)
        )
        if kind == "subjects"
        else released(number, "p")
        for number in range(4_000)
    ]
    gc.collect()
    started_s = time.thread_time()
    bus.publish(bus.reserve(len(happenings)), happenings)
    took_s = time.thread_time() - started_s

    assert took_s < CALLBACK_S_MAX
    for receiver in receivers:
        with pytest.raises(Lagged) as lag:
            receiver.take(10_000)
        assert lag.value.missed_count == 4_000 - 1_024
        assert seqs(receiver) == list(range(4_000 - 1_023, 4_001))


def test_the_memory_of_filters_grows_with_their_number() -> None:
    """With eight times as many receivers, each with 50 subjects of its own, one costs as much as before."""
    costs = []
    for count in (500, 4_000):
        filters = [HappeningFilter(subjects=tuple(f"s{n}-{m}" for m in range(50))) for n in range(count)]
        bus = HappeningsBus()
        tracemalloc.start()
        receivers = [bus.subscribe(filter) for filter in filters]
        costs.append(tracemalloc.get_traced_memory()[0] / count)
        tracemalloc.stop()
        assert bus.receiver_count == len(receivers)

    assert costs[1] < 1.5 * costs[0]


@pytest.mark.parametrize("ends", [[1, 1, 3], [1, 2, 3], [3], [0, 3, 3], None])
def test_commands_that_emit_nothing_are_no_commands_for_a_receiver(ends: list[int] | None) -> None:
    """However a commit's three happenings belong to its commands, a receiver has all of them, and counts only commands that emit."""
    bus = HappeningsBus(capacity=3)
    receiver = bus.subscribe(reads_history=True)
    bus.publish(bus.reserve(3), [released(number) for number in range(3)], ends)

    assert len(receiver._mailbox.units) == len({end for end in ends or [3] if end})
    assert seqs(receiver) == [1, 2, 3]
