"""The ledger: commands are executed one after another, stored, and only then told."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest

from tests.unit.ledger.ledger_support import BreakHalfway, Names, TakeName, TrickyLog, a_ledger, killed, owners
from tidings.core.events import Event, EventMeta
from tidings.happenings.bus import Envelope
from tidings.happenings.happening import Happening
from tidings.happenings.happening import _variants as declared
from tidings.happenings.variants import CustodyReleased, PluginEvent
from tidings.ledger import Command, open_ledger
from tidings.ledger.catalogue import CurrentCatalogue, parse_catalogue
from tidings.ledger.errors import (
    CommandDeclaredTwice,
    CommandTooLarge,
    InvalidCommand,
    LedgerClosed,
    LedgerDiverged,
    LedgerUnavailable,
    MissingPart,
    NotClaimant,
    UnknownCommand,
)
from tidings.ledger.snapshots import MemorySnapshots
from tidings.log.interface import Query
from tidings.log.memory import MemoryLog
from tidings.log.settings import LogSettings


def note(text: str) -> CustodyReleased:
    """A happening that follows from no command."""
    return CustodyReleased(at_ms=1, plugin="org.example", handle_id=text)


def handle_of(envelope: Envelope) -> str:
    """What ``note`` or a command has told."""
    assert isinstance(envelope.happening, CustodyReleased)
    return envelope.happening.handle_id


# One after another


async def test_of_two_commands_at_once_only_one_wins() -> None:
    """A hundred callers take the same name at the same time: one has it, the others are refused, and nothing is told of them."""
    async with a_ledger() as ledger:
        answers = await asyncio.gather(
            *(ledger.execute(TakeName(taken="x", by=f"p{n}")) for n in range(100)), return_exceptions=True
        )

        assert [answer for answer in answers if not isinstance(answer, NotClaimant)] == [1]
        assert list(await owners(ledger)) == ["x"]
        assert ledger.happenings.last_seq == 1


async def test_one_commit_serves_the_commands_that_wait() -> None:
    """Commands that are given while the disk works are stored together in the next call."""
    log = TrickyLog()
    async with a_ledger(log) as ledger:
        log.calls.clear()
        await asyncio.gather(*(ledger.execute(TakeName(taken=f"n{n}", by="p")) for n in range(50)))

        assert sum(log.calls) == 51  # and the ledger's own first record
        assert len(log.calls) <= 2


async def test_a_refused_command_does_not_keep_others_from_being_done() -> None:
    """Of several commands given together each has its own answer, in their order."""
    async with a_ledger() as ledger:
        commands = [TakeName(taken=name, by="p") for name in ("a", "a", "b")]

        first, refused, last = await ledger.execute_many(commands)

        assert (first, last) == (1, 2)
        assert isinstance(refused, NotClaimant)
        assert await ledger.execute_many([]) == []


async def test_more_commands_than_a_commit_takes_are_all_done() -> None:
    """A long list goes in several commits, and those who find no room wait until there is some."""
    async with a_ledger(batch_count_max=3, waiting_count_max=5) as ledger:
        answers = await asyncio.gather(
            ledger.execute_many([TakeName(taken=f"a{n}", by="p") for n in range(10)]),
            *(ledger.execute(TakeName(taken=f"b{n}", by="p")) for n in range(10)),
        )

        assert answers[0] == list(range(1, 11))
        assert sorted(answers[1:]) == list(range(11, 21))


# Only what is durable is seen


@pytest.mark.req("H17")
async def test_nothing_is_told_or_answered_before_it_is_durable() -> None:
    """While the append is held up nobody hears of the change, reads it, or is answered; then all do, and the state comes first."""
    log = TrickyLog()
    async with a_ledger(log) as ledger:
        log.gate = asyncio.Event()
        receiver = ledger.happenings.subscribe()
        command = asyncio.create_task(ledger.execute(TakeName(taken="x", by="p")))
        told = asyncio.create_task(receiver.recv())
        await asyncio.sleep(0)
        look = asyncio.create_task(owners(ledger))
        for _ in range(20):
            await asyncio.sleep(0)

        assert not any(task.done() for task in (command, told, look))

        log.gate.set()
        await told
        assert await owners(ledger) == await look == {"x": "p"}
        assert await command == 1


@pytest.mark.req("H14")
async def test_a_snapshot_read_after_the_ack_has_all_up_to_its_seq() -> None:
    """However commands, subscribing and reading fall, state that is read after subscribing has every change up to ``current_seq``."""
    async with a_ledger() as ledger:

        async def change(n: int) -> None:
            await ledger.execute(TakeName(taken=f"n{n}", by="p"))

        async def look(n: int) -> None:
            for _ in range(n % 7):
                await asyncio.sleep(0)
            with ledger.happenings.subscribe() as subscription:
                names = await owners(ledger)
                missing = 100 - len(names)
                assert len(names) >= subscription.current_seq  # each change has told one happening
                later = [await subscription.recv() for _ in range(100 - subscription.current_seq)]
                assert [each.seq for each in later] == list(range(subscription.current_seq + 1, 101))
                assert missing <= len(later)

        await asyncio.gather(*(each for n in range(100) for each in (change(n), look(n))))


async def test_a_read_that_fails_is_the_readers_own_trouble() -> None:
    """What a look at the state raises goes to whoever looked, also when it had to wait."""
    log = TrickyLog()
    async with a_ledger(log) as ledger:
        with pytest.raises(ZeroDivisionError):
            await ledger.read(lambda _: 1 // 0)
        log.gate = asyncio.Event()
        command = asyncio.create_task(ledger.execute(TakeName(taken="x", by="p")))
        await asyncio.sleep(0)
        look = asyncio.create_task(ledger.read(lambda _: 1 // 0))
        await asyncio.sleep(0)
        log.gate.set()

        with pytest.raises(ZeroDivisionError):
            await look
        assert await command == 1


async def test_cancelling_a_caller_does_not_take_the_command_back() -> None:
    """A command whose caller gave up is done all the same, and so are those behind it."""
    log = TrickyLog()
    async with a_ledger(log) as ledger:
        log.gate = asyncio.Event()
        command = asyncio.create_task(ledger.execute(TakeName(taken="x", by="p")))
        await asyncio.sleep(0)
        command.cancel()
        other = asyncio.create_task(ledger.execute(TakeName(taken="y", by="p")))
        await asyncio.sleep(0)
        log.gate.set()

        assert await other == 2
        assert command.cancelled()


async def test_whoever_waits_for_room_is_told_when_the_ledger_is_closed() -> None:
    """Closing does what was accepted, and refuses those who were still waiting to give theirs."""
    log = TrickyLog()
    async with a_ledger(log, waiting_count_max=2, batch_count_max=2) as ledger:
        log.gate = asyncio.Event()
        waiting = [asyncio.create_task(ledger.execute(TakeName(taken=f"n{n}", by="p"))) for n in range(9)]
        for _ in range(5):
            await asyncio.sleep(0)
        closing = asyncio.create_task(ledger.close())
        await asyncio.sleep(0)
        log.gate.set()
        await closing
        answers = await asyncio.gather(*waiting, return_exceptions=True)

        done = [answer for answer in answers if isinstance(answer, int)]
        assert done == list(range(1, len(done) + 1))
        assert all(isinstance(answer, LedgerClosed) for answer in answers[len(done) :])
        assert 0 < len(done) < 9


# What cannot be stored is not done


@pytest.mark.parametrize(
    "command",
    [
        TakeName(taken="x", by="p", more=math.nan),
        TakeName(taken="x", by="p", more=object()),
        TakeName(taken="x", by="p", more="\ud800"),
        TakeName(taken="x", by="p", more=2**64),
        TakeName(taken=3, by="p"),  # type: ignore[arg-type]
    ],
    ids=["no number", "no JSON", "no text", "more than 64 bits", "another type"],
)
async def test_a_command_that_json_cannot_hold_is_refused(command: TakeName) -> None:
    """What would come back from the log as something else, or not at all, is not done."""
    async with a_ledger() as ledger:
        with pytest.raises(InvalidCommand):
            await ledger.execute(command)

        assert await owners(ledger) == {}


async def test_a_happening_that_json_cannot_hold_is_not_emitted() -> None:
    """It would be told as one thing and come back from history as another."""
    async with a_ledger() as ledger:
        with pytest.raises(InvalidCommand):
            await ledger.happenings.emit_durable(
                PluginEvent(at_ms=1, plugin="p", event_type="measured", payload={"value": math.nan})
            )
        fine = PluginEvent(at_ms=1, plugin="p", event_type="measured", payload={"value": None})
        assert await ledger.happenings.emit_durable(fine) == 1


@pytest.mark.parametrize(
    "happening",
    [
        None,
        {"door": "front"},
        note(5),  # type: ignore[arg-type]
        PluginEvent(at_ms=1, plugin="p", event_type="measured", payload=-(2**63) - 1),
    ],
    ids=["nothing", "no happening", "another type", "more than 64 bits"],
)
async def test_what_could_not_be_read_back_is_not_emitted(happening: Any) -> None:
    """It would be told to those who listen, and keep the ledger from being opened again, or come back as something else."""
    log, snapshots = MemoryLog(), MemorySnapshots()
    async with a_ledger(log, snapshots=snapshots) as ledger:
        with pytest.raises(InvalidCommand):
            await ledger.happenings.emit_durable(happening)

        assert await ledger.happenings.emit_durable(note("fine")) == 1
        await killed(ledger)
    async with a_ledger(log, snapshots=snapshots) as ledger:
        assert [handle_of(each) async for each in ledger.happenings.history()] == ["fine"]


async def test_a_variant_that_cannot_be_read_keeps_nobody_from_reading_the_others() -> None:
    """A class with a type that JSON cannot tell apart is refused when one is emitted; the history of all others is read."""
    unreadable = type("Ambiguous", (Happening,), {"__annotations__": {"value": bytes | str}}, frozen=True, kw_only=True)
    try:
        async with a_ledger() as ledger:
            with pytest.raises(InvalidCommand):
                await ledger.happenings.emit_durable(unreadable(at_ms=1, value="x"))
            await ledger.happenings.emit_durable(note("fine"))

            assert [handle_of(each) async for each in ledger.happenings.history()] == ["fine"]
    finally:
        del declared["ambiguous"]


async def test_closing_lets_go_of_the_workspace_whatever_a_part_raises(tmp_path: Path) -> None:
    """A part of somebody's own that cannot be stored in a snapshot is told, and the ledger can be opened again."""
    ledger = await open_ledger(tmp_path, parts=[Names])
    await ledger.execute(TakeName(taken="x", by="p"))
    await ledger.read(lambda state: state.part(Names).owners.update(x=2**64))  # type: ignore[call-overload]

    with pytest.raises(OverflowError):
        await ledger.close()

    async with await open_ledger(tmp_path, parts=[Names]) as ledger:
        assert await owners(ledger) == {"x": "p"}


async def test_a_command_that_nests_too_deep_is_refused() -> None:
    """A payload that the log would refuse is refused before anything changes."""
    deep: object = 1
    for _ in range(200):
        deep = [deep]
    async with a_ledger() as ledger:
        with pytest.raises(InvalidCommand):
            await ledger.execute(TakeName(taken="x", by="p", more=deep))

        assert await owners(ledger) == {}


async def test_a_command_that_is_too_long_is_refused() -> None:
    """Longer than ``record_bytes_max``, neither a command nor a happening is stored."""
    async with a_ledger(record_bytes_max=1024) as ledger:
        with pytest.raises(CommandTooLarge) as caught:
            await ledger.execute(TakeName(taken="x" * 2000, by="p"))
        with pytest.raises(CommandTooLarge):
            await ledger.happenings.emit_durable(note("x" * 2000))

        assert caught.value.size_max == 1024
        assert await owners(ledger) == {}


async def test_a_command_that_breaks_half_way_leaves_no_trace() -> None:
    """A command that fails as none may gets its error; the state is made again without it, and the others are done."""
    async with a_ledger() as ledger:
        await ledger.execute(TakeName(taken="a", by="p"))
        answers = await asyncio.gather(
            ledger.execute(TakeName(taken="b", by="p")),
            ledger.execute(BreakHalfway()),
            ledger.execute_many([TakeName(taken="c", by="p"), BreakHalfway(), TakeName(taken="d", by="p")]),
            ledger.execute(TakeName(taken="e", by="p")),
            return_exceptions=True,
        )

        assert isinstance(answers[1], ZeroDivisionError)
        many = answers[2]
        assert isinstance(many, list)
        assert (answers[0], many[0], many[2], answers[3]) == (2, 3, 4, 5)
        assert isinstance(many[1], ZeroDivisionError)
        assert list(await owners(ledger)) == ["a", "b", "c", "d", "e"]


# When the log fails


@pytest.mark.parametrize("stored", range(4))
async def test_a_commit_that_is_cut_off_is_done_as_far_as_it_was_stored(stored: int) -> None:
    """Of three commands in a commit that fails, those that were stored are answered and told, the others are refused, and nothing of
    them is left."""
    log = TrickyLog()
    async with a_ledger(log) as ledger:
        receiver = ledger.happenings.subscribe()
        await ledger.execute(TakeName(taken="a", by="p"))
        log.stored_max = stored
        commands = [TakeName(taken=name, by="p", times=2) for name in "bcd"]
        answers = await asyncio.gather(*(ledger.execute(each) for each in commands), return_exceptions=True)

        assert answers[:stored] == list(range(2, 2 + stored))
        assert all(isinstance(answer, LedgerUnavailable) for answer in answers[stored:])
        assert list(await owners(ledger)) == ["a", *"bcd"[:stored]]
        assert ledger.happenings.last_seq == 1 + 2 * stored

        await ledger.execute(TakeName(taken="z", by="p"))
        told = [await receiver.recv() for _ in range(2 + 2 * stored)]
        stored_handles = [f"{name}/{n}" for name in "bcd"[:stored] for n in range(2)]
        assert [handle_of(each) for each in told] == ["a/0", *stored_handles, "z/0"]
        seqs = [each.seq for each in told]
        assert seqs == sorted(set(seqs))
        assert [each.seq for each in await ledger._history.read(0, 100)] == seqs


async def test_a_refusal_that_rests_on_what_was_not_stored_is_none() -> None:
    """Who was refused because of a command before it, which then could not be stored, is told of the failure, not refused."""
    log = TrickyLog()
    async with a_ledger(log) as ledger:
        log.stored_max = 0
        answers = await asyncio.gather(
            *(ledger.execute(TakeName(taken="x", by=by)) for by in ("p", "q")), return_exceptions=True
        )

        assert [type(answer) for answer in answers] == [LedgerUnavailable, LedgerUnavailable]
        assert await ledger.execute(TakeName(taken="x", by="q")) == 1


async def test_a_record_that_the_log_refuses_keeps_those_after_it_out() -> None:
    """Commands stand on those before them: if the log does not take one, none behind it in the commit is stored."""
    log = TrickyLog(settings=LogSettings(payload_bytes_max=400))
    async with a_ledger(log) as ledger:
        commands = [TakeName(taken="a", by="p"), TakeName(taken="b" * 300, by="p"), TakeName(taken="c", by="p")]
        first, second, third = await ledger.execute_many(commands)

        assert first == 1
        assert isinstance(second, LedgerUnavailable)
        assert isinstance(third, LedgerUnavailable)
        assert list(await owners(ledger)) == ["a"]
        assert await ledger.execute(TakeName(taken="c", by="p")) == 2


async def test_a_full_disk_refuses_commands_and_serves_reads() -> None:
    """While the log takes nothing, commands are refused without being executed, reads go on; afterwards commands do too."""
    log = TrickyLog()
    async with a_ledger(log) as ledger:
        await ledger.execute(TakeName(taken="a", by="p"))
        log.is_full = True
        with pytest.raises(LedgerUnavailable) as caught:
            await ledger.execute(TakeName(taken="b", by="p"))

        assert caught.value.retryable
        assert not ledger.is_available
        assert list(await owners(ledger)) == ["a"]

        log.is_full = False
        assert await ledger.execute(TakeName(taken="b", by="p")) == 2


async def test_a_ledger_on_a_full_disk_can_be_opened_and_read() -> None:
    """Opening needs no room: the state is there, with the catalogue it had."""
    log = TrickyLog()
    async with a_ledger(log) as ledger:
        await ledger.execute(TakeName(taken="a", by="p"))
    log.is_full = True
    catalogue = parse_catalogue('schema_version = 1\n[[subjects]]\nname = "track"\n')
    async with await open_ledger(log, catalogue=catalogue, parts=[Names]) as ledger:
        assert await owners(ledger) == {"a": "p"}
        assert not await ledger.read(lambda state: state.part(CurrentCatalogue).declares_type("track"))
    log.is_full = False
    async with await open_ledger(log, catalogue=catalogue, parts=[Names]) as ledger:
        assert await ledger.read(lambda state: state.part(CurrentCatalogue).declares_type("track"))


async def test_a_ledger_that_cannot_make_its_state_again_tries_until_it_can() -> None:
    """If the log cannot be read after a failure there is no state, and nobody is told anything; later what was stored is told."""
    log = TrickyLog()
    clock = log._clock
    async with a_ledger(log, clock=clock) as ledger:  # type: ignore[arg-type]
        receiver = ledger.happenings.subscribe()
        log.stored_max, log.is_unreadable = 2, True  # the ledger's own first record, and the first command's
        first, second = await ledger.execute_many([TakeName(taken=name, by="p") for name in "ab"])
        assert "not known" in str(first)
        assert isinstance(second, LedgerUnavailable)
        ledger.happenings.emit(note("plain"))
        with pytest.raises(LedgerUnavailable):
            await owners(ledger)

        log.is_unreadable = False
        await clock.advance(2.0)  # type: ignore[attr-defined]
        assert list(await owners(ledger)) == ["a"]
        told = [handle_of(await receiver.recv()) for _ in range(2)]
        assert told == ["a/0", "plain"]


# Opening again


async def test_a_ledger_comes_back_from_its_log(tmp_path: Path) -> None:
    """Closed and opened, a workspace has the state it had, and goes on counting."""
    async with await open_ledger(tmp_path, parts=[Names]) as ledger:
        await ledger.execute(TakeName(taken="a", by="p", times=3))
    async with await open_ledger(tmp_path, parts=[Names]) as ledger:
        assert await owners(ledger) == {"a": "p"}
        await ledger.execute(TakeName(taken="b", by="p"))

        subscription = ledger.happenings.subscribe(since=2)
        assert [(await subscription.recv()).seq for _ in range(2)] == [3, 4]


async def test_happenings_that_take_several_records_are_whole_in_history() -> None:
    """A command that tells more than a record holds is stored in several, and read back as one row, from any seq."""
    async with a_ledger(record_bytes_max=1024) as ledger:
        await ledger.execute(TakeName(taken="a", by="p", times=100))
        await ledger.execute(TakeName(taken="b", by="p"))

        assert ledger.log.topics()["ledger"].next_offset > 10
        for since in (0, 1, 7, 50, 99, 100, 101):
            found = await ledger._history.read(since, 1000)
            assert [each.seq for each in found] == list(range(since + 1, 102))


@pytest.mark.parametrize("kept", range(1, 12))
async def test_what_a_crash_cut_off_from_a_command_is_told_by_the_next_opening(kept: int) -> None:
    """If only the first of a command's records were stored, opening makes the others: history is whole, and stays so."""
    whole = MemoryLog(epoch="e")
    async with a_ledger(whole, record_bytes_max=1024) as ledger:
        await ledger.execute(TakeName(taken="a", by="p", times=100))
        expected = await ledger._history.read(0, 1000)
    records = (await whole.read(Query(topic="ledger"))).records
    cut = MemoryLog(epoch="e")
    for record in records[: 1 + kept]:
        await cut.append(Event(EventMeta("ledger", record.meta.type, "system"), record.payload))
    for _ in range(2):
        async with a_ledger(cut, record_bytes_max=1024) as ledger:
            assert list(await owners(ledger)) == ["a"]
            assert await ledger._history.read(0, 1000) == expected
            assert ledger.log.topics()["ledger"].next_offset == len(records)


async def test_a_ledger_of_a_newer_version_is_not_opened() -> None:
    """A command that this version does not know, or with a field that it does not know, stops the opening and is named."""
    for do in ({"command": "take_over"}, {"command": "take_name", "taken": "a", "by": "p", "since": 3}):
        log = MemoryLog()
        payload = {"at_ms": 1, "seq": 1, "do": do}
        await log.append(Event(EventMeta("ledger", f"ledger.{do['command']}", "system"), payload))
        with pytest.raises(UnknownCommand) as caught:
            async with a_ledger(log):
                pass

        assert (caught.value.command, caught.value.offset) == (do["command"], 0)


def test_two_commands_of_one_name_are_refused() -> None:
    """The second class is not declared: records of the first would be read as it."""
    with pytest.raises(CommandDeclaredTwice) as caught:
        type("TakeName", (Command,), {"__module__": "elsewhere"})

    assert caught.value.by.endswith("ledger_support.TakeName")


async def test_a_ledger_without_one_of_its_parts_is_not_opened() -> None:
    """Its records speak of a part that is not there: which one is said."""
    log = MemoryLog()
    async with a_ledger(log) as ledger:
        await ledger.execute(TakeName(taken="a", by="p"))

    with pytest.raises(MissingPart) as caught:
        await open_ledger(log)
    assert caught.value.part == "test_names"


async def test_a_command_that_comes_out_differently_stops_the_opening() -> None:
    """State that would not be what it was is not served."""
    log = MemoryLog()
    async with a_ledger(log) as ledger:
        await ledger.execute(TakeName(taken="a", by="p"))
    record = (await log.read(Query(topic="ledger", backwards=True), limit=1)).records[0]
    await log.append(Event(EventMeta("ledger", record.meta.type, "system"), record.payload))

    with pytest.raises(LedgerDiverged):
        async with a_ledger(log):
            pass


async def test_a_strangers_record_is_passed_over() -> None:
    """An event that somebody published to the topic does not keep the ledger from opening, and is in nobody's history."""
    log = MemoryLog()
    async with a_ledger(log) as ledger:
        await ledger.execute(TakeName(taken="a", by="p"))
        await log.append(Event(EventMeta("ledger", "NOTE", "system"), {"text": "hello"}))
        await ledger.execute(TakeName(taken="b", by="p"))
    async with a_ledger(log) as ledger:
        assert list(await owners(ledger)) == ["a", "b"]
        assert [each.seq for each in await ledger._history.read(0, 10)] == [1, 2]


async def test_a_closed_ledger_says_so() -> None:
    """After closing, commands and reads are refused, and subscribers come to an end."""
    async with a_ledger() as ledger:
        await ledger.execute(TakeName(taken="a", by="p"))
        subscription = ledger.happenings.subscribe(since=0)
        await ledger.close()
        await ledger.close()

        assert [each.seq async for each in subscription] == [1]
        with pytest.raises(LedgerClosed):
            await ledger.execute(TakeName(taken="b", by="p"))
        with pytest.raises(LedgerClosed):
            await owners(ledger)


# Seqs


@pytest.mark.req("H9")
async def test_what_was_emitted_durably_is_there_after_a_restart() -> None:
    """``emit_durable`` answers with the seq, and a process that was killed right then has it again."""
    log, snapshots = MemoryLog(), MemorySnapshots()
    async with a_ledger(log, snapshots=snapshots) as ledger:
        seqs = [await ledger.happenings.emit_durable(note(f"n{n}")) for n in range(3)]
        await killed(ledger)
        async with a_ledger(log, snapshots=snapshots) as again:
            found = [each async for each in again.happenings.history()]

    assert seqs == [1, 2, 3]
    assert [(each.seq, each.happening) for each in found] == [(n + 1, note(f"n{n}")) for n in range(3)]


@pytest.mark.req("H9")
@pytest.mark.req("H74")
@pytest.mark.parametrize("is_killed", [False, True])
async def test_a_seq_is_never_given_twice(is_killed: bool) -> None:
    """Durable or not, and with all history trimmed: a seq that anybody has seen is not given again after a restart."""
    log, snapshots = MemoryLog(), MemorySnapshots()
    seen = 0
    for _ in range(4):
        async with a_ledger(log, snapshots=snapshots, history_count_max=0) as ledger:
            receiver = ledger.happenings.subscribe()
            await ledger.happenings.emit_durable(note("durable"))
            for _ in range(3):
                ledger.happenings.emit(note("plain"))
            seqs = [(await receiver.recv()).seq for _ in range(4)]
            assert min(seqs) > seen
            assert seqs == sorted(set(seqs))
            assert is_killed or seqs[0] == seen + 1, "a ledger that is closed leaves no gap"
            seen = ledger.happenings.last_seq
            await ledger.trim_history()
            await ledger.take_snapshot()
            if is_killed:
                await killed(ledger)


async def test_a_plain_emit_is_seen_only_once_its_seq_is_written_down() -> None:
    """A happening that is in no record waits until the log says that its seq is used; a full disk holds it up and loses nothing."""
    log = TrickyLog()
    async with a_ledger(log) as ledger:
        receiver = ledger.happenings.subscribe()
        log.gate = asyncio.Event()
        ledger.happenings.emit(note("plain"))
        told = asyncio.create_task(receiver.recv())
        for _ in range(20):
            await asyncio.sleep(0)
        assert not told.done()

        log.gate.set()
        assert (await told).seq == 1
        ledger.happenings.emit(note("another"))
        found = receiver.recv()
        assert (await found).seq == 2


async def test_seqs_that_a_repaired_log_may_have_lost_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """
    A log that was repaired has lost records: seqs from before are not given again, and cursors from before are refused. What was done on top of
    what was lost is passed over and reported, also by every later opening.
    """
    whole = MemoryLog(epoch="before")
    async with a_ledger(whole) as ledger:
        for name in ("a", "b", "c"):
            await ledger.execute(TakeName(taken=name, by="p"))
        position = ledger.happenings.subscribe().epoch
    records = (await whole.read(Query(topic="ledger"))).records
    repaired = MemoryLog(epoch="after")
    for record in (*records[:2], records[1], records[3]):  # the second one is gone, and another is in its place
        await repaired.append(Event(EventMeta("ledger", record.meta.type, "system"), record.payload))
    snapshots = MemorySnapshots()
    for _ in range(2):
        async with a_ledger(repaired, snapshots=snapshots) as ledger:
            assert list(await owners(ledger)) == ["a", "c"]
            assert len(ledger.problems) == 1
            assert ledger.happenings.last_seq > 1_000_000
            assert ledger._history.trimmed_through >= 1_000_000
            assert ledger._history.epoch != position
            assert await ledger.execute(TakeName(taken="d", by="p")) == 3
            await ledger._history.read(ledger.happenings.last_seq - 1, 10)
        repaired = await _copy(repaired, 5)


async def _copy(log: MemoryLog, count: int) -> MemoryLog:
    copy = MemoryLog(epoch=log.position.epoch)
    for record in (await log.read(Query(topic="ledger"), limit=count)).records:
        await copy.append(Event(EventMeta("ledger", record.meta.type, "system"), record.payload))
    return copy
