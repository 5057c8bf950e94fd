"""Subscriptions: what happened since a cursor, then what happens, without a gap and without a repeat, whoever emits meanwhile."""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidings.happenings import (
    AnyHappening,
    Coalescing,
    Envelope,
    HappeningFilter,
    Happenings,
    HappeningsBus,
    HappeningSubscription,
    UnknownHappening,
)
from tidings.happenings.errors import CursorTooOld, HappeningsClosed, InvalidCoalescing, InvalidCursor, Lagged
from tidings.log.errors import EpochMismatch
from tidings.log.interface import Position
from tidings.testing import VirtualClock

from .support import ListedHistory, released, taken

MINE = HappeningFilter(plugins=("mine",))


class World:
    """A bus and a history, as a ledger has them: what is durable is in the history before it is on the bus."""

    def __init__(self, *, capacity: int = 1024) -> None:
        self.bus = HappeningsBus(capacity=capacity)
        self.history = ListedHistory()
        self.clock = VirtualClock()
        self.happenings = Happenings(self.bus, self.history, self.clock, self._store)
        self.subscribe: Callable[..., HappeningSubscription] = self.happenings.subscribe

    async def _store(self, happenings: Sequence[AnyHappening]) -> int:
        return self.durable(*happenings)

    def durable(self, *happenings: AnyHappening) -> int:
        """Write down, publish."""
        first_seq = self.bus.reserve(len(happenings))
        for seq, happening in enumerate(happenings, first_seq):
            self.history.store(seq, happening)
        self.bus.publish(first_seq, happenings)
        return first_seq

    def filled(self, count: int) -> World:
        """With so many durable happenings."""
        for number in range(1, count + 1):
            self.durable(released(number))
        return self


async def read(stream: HappeningSubscription, count: int) -> list[int]:
    """The seqs of the next ones."""
    return [(await stream.recv()).seq for _ in range(count)]


async def is_quiet(stream: HappeningSubscription) -> bool:
    """Whether nothing is to be read now."""
    reading = asyncio.ensure_future(stream.recv())
    for _ in range(10):
        await asyncio.sleep(0)
    is_waiting = not reading.done()
    reading.cancel()
    await asyncio.wait({reading})
    return is_waiting


@pytest.fixture
def pages_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """History is read two at a time, so that there is much room between the reads."""
    monkeypatch.setattr("tidings.happenings.subscription._PAGE_COUNT_MAX", 2)


# The order: register, sample, acknowledge, replay, live


@pytest.mark.req("H12")
@pytest.mark.usefixtures("pages_of_two")
async def test_it_registers_samples_replays_and_goes_live() -> None:
    """Subscribing registers and notes the newest seq at once, before history is asked anything; then comes the past, ascending, then the present."""
    world = World().filled(5)

    stream = world.subscribe(since=1)
    assert (stream.current_seq, world.bus.receiver_count, world.history.reads) == (5, 1, [])
    world.durable(released("right after"))
    assert await read(stream, 4) == [2, 3, 4, 5]
    assert await read(stream, 1) == [6]
    world.happenings.emit(released("live"))
    assert await read(stream, 1) == [7]
    assert await is_quiet(stream)


@pytest.mark.req("H10", "H5")
async def test_without_a_cursor_only_the_present_comes() -> None:
    """A late subscriber without ``since`` gets what happens from then on; with it, also what the window holds after it."""
    world = World().filled(3)

    live, replaying = world.subscribe(), world.subscribe(since=2)
    assert await is_quiet(live)
    assert await world.happenings.emit_durable(released("new")) == 4
    assert await read(live, 1) == [4]
    assert await read(replaying, 2) == [3, 4]
    assert live.current_seq == replaying.current_seq == 3


@pytest.mark.req("H10")
async def test_plain_emits_of_the_past_are_not_replayed() -> None:
    """They were never written down: who resumes across them sees a gap in the seqs."""
    world = World().filled(1)
    world.bus.emit(released("plain"))
    world.durable(released("durable"))

    assert await read(world.subscribe(since=0), 2) == [1, 3]


async def test_a_cursor_at_the_newest_replays_nothing() -> None:
    """``since`` the current seq is accepted, and what comes next is delivered."""
    world = World().filled(2)
    stream = world.subscribe(since=2)

    assert await is_quiet(stream)
    world.durable(released("next"))
    assert await read(stream, 1) == [3]


async def test_a_cursor_from_the_future_suppresses_up_to_it(caplog: pytest.LogCaptureFixture) -> None:
    """It is accepted with a warning; happenings up to it are left out when they come, and those after it are delivered."""
    world = World().filled(2)
    with caplog.at_level(logging.WARNING):
        stream = world.subscribe(since=3)
    world.durable(released("three"))
    world.durable(released("four"))

    assert await read(stream, 1) == [4]
    assert "after seq 3, but the newest is 2" in caplog.text


# Old cursors, foreign cursors


@pytest.mark.req("H11")
@pytest.mark.parametrize(
    ("stored", "trimmed", "since", "is_refused"),
    [
        (0, 0, 0, False),
        (5, 0, 0, False),
        (5, 3, 2, True),
        (5, 3, 3, False),
        (5, 5, 4, True),
        (5, 5, 5, False),
        (5, 5, 0, True),
    ],
)
async def test_a_cursor_before_the_window_is_told_what_there_is(
    stored: int, trimmed: int, since: int, is_refused: bool
) -> None:
    """It is refused exactly if something after it was dropped, also when nothing at all is left; the oldest and the newest seq are named."""
    world = World().filled(stored)
    world.history.trim_through(trimmed)

    if not is_refused:
        assert await read(world.subscribe(since=since), stored - max(since, trimmed)) == [*range(since + 1, stored + 1)]
        return
    with pytest.raises(CursorTooOld) as refusal:
        world.subscribe(since=since)
    assert refusal.value.args == (since, trimmed + 1 if stored > trimmed else 0, stored)
    assert world.bus.receiver_count == 0


@pytest.mark.req("H11")
@pytest.mark.usefixtures("pages_of_two")
async def test_what_is_dropped_during_a_replay_is_not_passed_over() -> None:
    """If the window moves beyond a replay that is under way, the reader is told, and nobody keeps receiving for it."""
    world = World().filled(9)
    stream = world.subscribe(since=0)
    assert await read(stream, 2) == [1, 2]
    world.history.trim_through(6)

    with pytest.raises(CursorTooOld) as refusal:
        await stream.recv()
    assert refusal.value.oldest_available_seq == 7
    assert world.bus.receiver_count == 0


async def test_a_position_of_another_epoch_is_refused() -> None:
    """A seq that was counted in another life of the log means nothing; one of this life is as good as its seq."""
    world = World().filled(2)

    with pytest.raises(EpochMismatch):
        world.subscribe(since=Position("e0", 1))
    stream = world.subscribe(since=Position("e1", 1))
    assert await read(stream, 1) == [2]
    assert stream.epoch == "e1"


@pytest.mark.parametrize("since", [-1, 1 << 64, 1.5, True])
async def test_what_can_be_no_seq_is_no_cursor(since: Any) -> None:
    """Below 0, beyond 64 bits, or no whole number: refused, and nothing is registered."""
    world = World()
    with pytest.raises(InvalidCursor, match="is no seq"):
        world.subscribe(since=since)
    assert world.bus.receiver_count == 0


# Nothing lost, nothing twice, whatever happens meanwhile


@pytest.mark.req("H13")
@pytest.mark.usefixtures("pages_of_two")
@pytest.mark.parametrize("burst", [1, 2, 3, 7])
async def test_history_closes_the_gap_when_more_comes_than_the_receiver_holds(burst: int) -> None:
    """With room for two, and a burst of durable happenings in the midst of each of twenty reads, every seq comes once, in order, with no lag."""
    world = World(capacity=2).filled(10)
    left = 20

    async def meanwhile() -> None:
        nonlocal left
        await asyncio.sleep(0)
        if left:
            left -= 1
            world.durable(*[released("meanwhile")] * burst)

    world.history.meanwhile = meanwhile
    stream = world.subscribe(since=0)

    assert await read(stream, 10 + 20 * burst) == list(range(1, 11 + 20 * burst))
    assert await is_quiet(stream)


@pytest.mark.req("H13")
@pytest.mark.usefixtures("pages_of_two")
async def test_plain_emits_during_a_replay_come_in_their_place() -> None:
    """What is emitted plainly between durable ones, while these are being read from history, is neither lost nor out of order."""
    world = World().filled(3)

    async def meanwhile() -> None:
        world.bus.emit(released("plain"))
        world.durable(released("durable"))

    world.history.meanwhile = meanwhile
    stream = world.subscribe(since=0)

    assert await read(stream, 7) == list(range(1, 8))  # two were emitted in the midst of each of two reads
    assert await is_quiet(stream)


@pytest.mark.req("H13")
@pytest.mark.usefixtures("pages_of_two")
async def test_what_a_replay_could_not_save_is_counted() -> None:
    """Plain emits that the receiver lost during a replay are told, exactly, and durable ones among them are delivered all the same."""
    world = World(capacity=2).filled(3)
    bursts = iter([1])

    async def meanwhile() -> None:
        for _ in bursts:
            for number in range(8):  # seqs 4 to 11, the odd ones durable
                if number % 2:
                    world.durable(released("durable"))
                else:
                    world.bus.emit(released("plain"))

    world.history.meanwhile = meanwhile
    stream = world.subscribe(since=0)

    assert await read(stream, 6) == [1, 2, 3, 5, 7, 9]
    with pytest.raises(Lagged) as lag:
        await stream.recv()
    assert lag.value.args == (3, 1, 11)
    assert await read(stream, 2) == [10, 11]


@pytest.mark.req("H13")
@pytest.mark.usefixtures("pages_of_two")
async def test_a_gap_that_was_trimmed_counts_as_missed() -> None:
    """If the window moves beyond the gap too, the rest of it is told as missed, and the stream goes on."""
    world = World(capacity=2).filled(1)
    bursts = iter([1])

    async def meanwhile() -> None:
        for _ in bursts:
            for _ in range(7):  # seqs 2 to 8, of which the receiver holds 7 and 8
                world.durable(released("burst"))
            world.history.trim_through(4)

    world.history.meanwhile = meanwhile
    stream = world.subscribe(since=0)

    assert await read(stream, 1) == [1]
    with pytest.raises(Lagged) as lag:
        await stream.recv()
    assert lag.value.missed_count == 5
    assert await read(stream, 2) == [7, 8]


@pytest.mark.req("H13")
async def test_what_is_written_but_not_told_yet_comes_once() -> None:
    """A row that history has before the bus has told it is left for the bus."""
    world = World().filled(2)
    first_seq = world.bus.reserve(1)
    world.history.store(first_seq, released("on its way"))
    stream = world.subscribe(since=0)

    assert stream.current_seq == 2
    assert await read(stream, 2) == [1, 2]
    assert await is_quiet(stream)
    world.bus.publish(first_seq, [released("on its way")])
    assert await read(stream, 1) == [3]
    assert await is_quiet(stream)


STEPS = st.lists(
    st.sampled_from(["durable", "plain", "durable other", "plain other", "burst", "open", "settle", "pause"]),
    max_size=50,
)


@pytest.mark.req("H13", "H58", "H6")
@given(
    steps=STEPS,
    stored=st.integers(0, 6),
    since=st.one_of(st.none(), st.integers(0, 6)),
    capacity=st.integers(1, 4),
    filter=st.sampled_from([None, MINE]),
    pauses=st.lists(st.integers(0, 3), min_size=1, max_size=8),
    limit=st.integers(1, 3),
)
def test_everything_is_delivered_once_or_counted(
    steps: list[str],
    stored: int,
    since: int | None,
    capacity: int,
    filter: HappeningFilter | None,
    pauses: list[int],
    limit: int,
) -> None:
    """
    However emitting, writing, reading history and reading the stream interleave: seqs rise, nothing comes that should not, and
    what should have come and did not is exactly the number that was told as missed.
    """

    async def main() -> None:
        world = World(capacity=capacity)
        for number in range(stored):
            world.durable(released(number, "mine" if number % 2 else "other"))
        waits = itertools.cycle(pauses)

        async def pause() -> None:
            for _ in range(next(waits)):
                await asyncio.sleep(0)

        world.history.meanwhile = pause
        begin = None if since is None else min(since, stored)
        stream = world.subscribe(since=begin, filter=filter)
        assert stream.current_seq == stored
        durable = {each.seq for each in world.history.kept}
        wanted = {
            each.seq
            for each in world.history.kept
            if begin is not None and each.seq > begin and (filter or HappeningFilter()).matches(each.happening)
        }

        async def emit_all() -> None:
            reserved: list[tuple[int, AnyHappening]] = []
            for step in steps:
                happening = released(step, "other" if step.endswith("other") else "mine")
                count = 0
                match step.split()[0]:
                    case "durable" | "burst":
                        count = 5 if step == "burst" else 1
                        durable.update(range(world.bus.minted_seq + 1, world.bus.minted_seq + 1 + count))
                        world.durable(*[happening] * count)
                    case "plain":
                        count = 1
                        world.bus.emit(happening)
                    case "open":
                        count = 1
                        reserved.append((world.bus.reserve(1), happening))
                        durable.add(reserved[-1][0])
                        world.history.store(*reserved[-1])
                        world.history.kept.sort()
                    case "settle" if reserved:
                        first_seq, waiting = reserved.pop(0)
                        world.bus.publish(first_seq, [waiting])
                    case _:
                        await pause()
                last = world.bus.minted_seq
                if filter is None or filter.matches(happening):
                    wanted.update(range(last - count + 1, last + 1))
            for first_seq, waiting in reserved:
                world.bus.publish(first_seq, [waiting])

        async def follow() -> tuple[list[int], int]:
            delivered: list[int] = []
            missed_count = 0
            while True:
                try:
                    delivered += [each.seq for each in await stream.recv_many(limit)]
                    await pause()
                except Lagged as lag:
                    missed_count += lag.missed_count
                except HappeningsClosed:
                    return delivered, missed_count

        following = asyncio.ensure_future(follow())
        await emit_all()
        for _ in range(60):  # reading may come to rest before the end
            await asyncio.sleep(0)
        world.bus.close()
        delivered, missed_count = await following

        assert delivered == sorted(set(delivered))
        assert set(delivered) <= wanted
        assert len(wanted) - len(delivered) == missed_count

    asyncio.run(main())


async def test_a_read_that_is_given_up_loses_nothing() -> None:
    """Cancelled in the midst of reading history, or while it waits for the present, the next read goes on where it was."""
    world = World().filled(3)
    gate = asyncio.Event()
    world.history.meanwhile = gate.wait  # type: ignore[assignment]
    stream = world.subscribe(since=0)
    assert await is_quiet(stream)
    gate.set()

    assert await read(stream, 3) == [1, 2, 3]
    assert await is_quiet(stream)
    world.durable(released("next"))
    assert await read(stream, 1) == [4]


# Lag


@pytest.mark.req("H6")
async def test_a_slow_subscriber_is_told_numbers_to_resume_with() -> None:
    """With room for two, thirty-two at once: one notice with what was missed, the oldest in history and the newest; resuming gives what was missed."""
    world = World(capacity=2)
    stream = world.subscribe()
    for number in range(32):
        world.durable(released(number))

    with pytest.raises(Lagged) as lag:
        await stream.recv()
    assert (lag.value.missed_count, lag.value.oldest_available_seq, lag.value.current_seq) == (30, 1, 32)
    assert await read(stream, 2) == [31, 32]
    assert world.happenings.missed_count == 30
    assert await read(world.subscribe(since=0), 32) == list(range(1, 33))


@pytest.mark.req("H1", "H6")
@pytest.mark.parametrize("filter", [None, MINE])
@pytest.mark.parametrize("beyond", [3, 30, 33, 320])
async def test_an_idle_subscriber_has_any_single_command_whole(beyond: int, filter: HappeningFilter | None) -> None:
    """One beyond the buffer, ten times, beyond what is held in memory, and tenfold that: all come, in order, and nothing is missed."""
    world = World(capacity=2)
    stream = world.subscribe(filter=filter)
    world.durable(*(released(number, "mine") for number in range(beyond)))
    world.durable(released("after", "mine"))

    assert await read(stream, beyond + 1) == list(range(1, beyond + 2))
    assert world.happenings.missed_count == 0


@pytest.mark.req("H6")
async def test_a_burst_of_commands_is_missed_by_whole_commands() -> None:
    """With room for two commands, four at once: the two last ones come whole, the notice counts the happenings of the first two."""
    world = World(capacity=2)
    stream = world.subscribe()
    for size in (3, 40, 40, 3):
        world.durable(*(released(number) for number in range(size)))

    with pytest.raises(Lagged) as lag:
        await stream.recv()
    assert lag.value.missed_count == 43
    assert await read(stream, 43) == list(range(44, 87))


async def test_a_large_command_that_history_lost_is_counted() -> None:
    """A command that the receiver does not hold and that history has in part: what is there comes, the rest is one notice."""
    world = World(capacity=2)
    stream = world.subscribe()
    world.durable(*(released(number) for number in range(40)))
    del world.history.kept[30:]
    world.durable(released("after"))

    assert await read(stream, 30) == list(range(1, 31))
    with pytest.raises(Lagged) as lag:
        await stream.recv()
    assert lag.value.missed_count == 10
    assert await read(stream, 1) == [41]


def test_what_a_receiver_holds_is_bounded() -> None:
    """Large commands that nobody reads are kept as places in history: in memory is one command at most beyond the buffer."""
    bus = HappeningsBus(capacity=4)
    receiver = bus.subscribe(reads_history=True)
    for _ in range(40):
        bus.publish(bus.reserve(50), [released("burst")] * 50)

    held = receiver._mailbox
    assert len(held.units) == 4
    assert held.happening_count <= 50 + 4


# Filters


@pytest.mark.req("H58", "H57")
async def test_replay_and_live_pass_the_same_filter() -> None:
    """Of the past and of the present the same are let through, also those that were emitted plainly, and unknown variants by their name."""
    world = World()
    some: list[AnyHappening] = [
        released(1),
        taken(1),
        UnknownHappening("mystery", {"n": 1}),
        UnknownHappening("riddle", {"n": 1}),
    ]
    world.durable(*some)
    stream = world.subscribe(since=0, filter=HappeningFilter(variants=("custody_taken", "mystery")))
    world.durable(*some)
    world.bus.emit(taken(2))
    world.bus.emit(released(2))

    assert await read(stream, 5) == [2, 3, 6, 7, 9]
    assert await is_quiet(stream)


@pytest.mark.req("H15")
async def test_unknown_variants_are_replayed_and_delivered() -> None:
    """A variant that nobody here declared goes through history, bus, coalescing and JSON like any other."""
    world = World()
    mystery = UnknownHappening("mystery", {"at_ms": 5, "n": [1]})
    world.durable(mystery)
    stream = world.subscribe(since=0, coalesce=Coalescing(("plugin",)))
    world.bus.emit(mystery)

    assert await stream.recv() == Envelope(1, mystery)
    assert (await stream.recv()).to_json() == {
        "seq": 2,
        "happening": {"type": "mystery", "at_ms": 5, "n": [1]},
        "resume_seq": 2,
    }


# Coalescing


@pytest.mark.req("H61", "H67")
async def test_the_present_is_coalesced_and_the_past_is_not() -> None:
    """Replayed ones come one by one; live ones as the latest of each window of time, with the seq to resume from."""
    world = World()
    for _ in range(3):
        world.durable(taken("h"))
    stream = world.subscribe(since=0, coalesce=Coalescing(("variant", "handle_id"), 100))
    assert [await stream.recv() for _ in range(3)] == [Envelope(seq, taken("h")) for seq in (1, 2, 3)]

    received: list[tuple[float, Envelope]] = []

    async def follow() -> None:
        received.extend([(round(world.clock.monotonic(), 3), each) async for each in stream])

    following = asyncio.ensure_future(follow())
    for number in range(10):  # one each 40 ms: at 0, 40, 80, then from 120
        world.durable(taken("h", shelf=f"s{number}"))
        await world.clock.advance(0.04)
    await world.clock.advance(1)
    world.bus.close()
    await following

    assert [(at, each.seq, each.resume_seq) for at, each in received] == [
        (0.1, 6, 6),
        (0.22, 9, 9),
        (0.34, 12, 12),
        (0.46, 13, 13),
    ]
    assert received[0][1].happening == taken("h", shelf="s2")


async def test_what_is_held_back_comes_when_the_bus_closes() -> None:
    """An orderly end delivers the windows that are open, in order, before it ends."""
    world = World()
    stream = world.subscribe(coalesce=Coalescing(("handle_id",), 5000))
    reading = asyncio.ensure_future(stream.recv_many())
    for handle_id in "aba":
        world.bus.emit(taken(handle_id))
    await asyncio.sleep(0)
    world.bus.close()

    assert [(each.seq, each.resume_seq) for each in await reading] == [(2, 2), (3, 3)]
    with pytest.raises(HappeningsClosed):
        await stream.recv()


async def test_coalescing_without_a_label_is_refused_before_anything_is_registered() -> None:
    """No receiver is left behind."""
    world = World()

    with pytest.raises(InvalidCoalescing):
        world.subscribe(coalesce=Coalescing(()))
    assert world.bus.receiver_count == 0


# Ends


async def test_a_subscription_that_ends_frees_its_receiver() -> None:
    """By closing, by leaving its context, or because nobody refers to it any more, as after a loop that was left."""
    world = World().filled(1)
    world.subscribe().close()
    with world.subscribe(since=0) as stream:
        async for each in stream:
            assert each.seq == 1
            break
        assert world.happenings.receiver_count == 1
    abandoned: Any = world.subscribe()
    del abandoned
    gc.collect()

    assert world.bus.receiver_count == 0


# The facade


@pytest.mark.usefixtures("pages_of_two")
async def test_history_is_read_between_two_seqs(monkeypatch: pytest.MonkeyPatch) -> None:
    """After ``since``, up to and including ``until`` or the newest; through a filter if there is one; an old cursor is refused."""
    monkeypatch.setattr("tidings.happenings.facade._PAGE_COUNT_MAX", 2)
    world = World()
    for number in range(1, 8):
        world.durable(released(number, "mine" if number % 3 == 0 else "other"))
    history = world.happenings.history

    assert [each.seq async for each in history()] == [1, 2, 3, 4, 5, 6, 7]
    assert [each.seq async for each in history(2, 5)] == [3, 4, 5]
    assert [each.seq async for each in history(filter=MINE)] == [3, 6]
    assert [each.seq async for each in history(7)] == []
    assert (world.happenings.last_seq, world.happenings.oldest_seq) == (7, 1)
    world.history.trim_through(4)
    with pytest.raises(CursorTooOld):
        await anext(history(3))
