"""Snapshots: opening need not go through all records again, and loses nothing if one cannot be read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest

from tests.unit.ledger.ledger_support import Names, TakeName, a_ledger, killed, owners
from tidings.core.clock import datetime_of
from tidings.core.events import Event, EventMeta
from tidings.happenings.variants import CustodyReleased
from tidings.ledger import CommandOutcome, LedgerSettings, LedgerState, open_ledger
from tidings.ledger.errors import LedgerIncomplete, SnapshotDamaged, SnapshotUnsupported
from tidings.ledger.snapshot_files import FileSnapshots
from tidings.ledger.snapshots import FrozenPart, MemorySnapshots, SnapshotHeader, SnapshotStore, blocks_of, restore
from tidings.log.interface import Query
from tidings.log.memory import MemoryLog
from tidings.log.retention import Needs, plan_retention
from tidings.log.settings import LogSettings, TopicRetention
from tidings.testing import VirtualClock


@pytest.fixture(params=["memory", "files"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> SnapshotStore:
    """A place for snapshots."""
    return MemorySnapshots() if request.param == "memory" else FileSnapshots(tmp_path)


async def filled(store: SnapshotStore, log: MemoryLog, *counts: int) -> None:
    """A ledger that takes so many names before each of its snapshots, and one more after them; then it is killed."""
    async with a_ledger(log, snapshots=store) as ledger:
        number = 0
        for count in counts:
            for _ in range(count):
                await ledger.execute(TakeName(taken=f"n{number}", by="p"))
                number += 1
            await ledger.take_snapshot()
        await ledger.execute(TakeName(taken="last", by="p"))
        await killed(ledger)


async def test_opening_reads_only_what_the_newest_snapshot_does_not_cover(
    store: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a snapshot of 20 records one is left to be executed, and the state is whole."""
    log = MemoryLog()
    await filled(store, log, 10, 9)
    executed: list[str] = []
    execute = TakeName.execute

    def noted(self: TakeName, state: LedgerState, at_ms: int) -> CommandOutcome:
        executed.append(self.taken)
        return execute(self, state, at_ms)

    monkeypatch.setattr(TakeName, "execute", noted)

    async with a_ledger(log, snapshots=store) as ledger:
        assert executed == ["last"]
        assert list(await owners(ledger)) == [*(f"n{n}" for n in range(19)), "last"]


async def test_two_snapshots_are_kept(store: SnapshotStore) -> None:
    """A third one takes the place of the oldest; taking one of what is covered already changes nothing."""
    log = MemoryLog()
    await filled(store, log, 3, 3, 3, 0)

    assert store.offsets() == [9, 6]


def _cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def _altered(data: bytes) -> bytes:
    return data[:-20] + bytes([data[-20] ^ 1]) + data[-19:]


def _lengthened(data: bytes) -> bytes:
    return data + b"\0"


@pytest.mark.parametrize("damage", [_cut, _altered, _lengthened, lambda _: b""])
async def test_a_damaged_snapshot_costs_time_only(store: SnapshotStore, damage: Callable[[bytes], bytes]) -> None:
    """If the newest cannot be read the one before it is used, and if none can be, the log alone."""
    log = MemoryLog()
    await filled(store, log, 5, 5)
    for offset in store.offsets():
        store.save(offset, [damage(store.load(offset))])
        async with a_ledger(log, snapshots=store) as ledger:
            assert len(await owners(ledger)) == 11
            await killed(ledger)


async def test_without_a_snapshot_a_log_that_begins_late_is_not_opened(store: SnapshotStore) -> None:
    """Records that were dropped, and that nothing covers, are named; the state is not made up."""
    log = MemoryLog(LogSettings(segment_lines_max=2))
    await filled(store, log, 5, 5)
    for offset in store.offsets():
        store.remove(offset)
    plan = plan_retention(
        log.topics()["ledger"].segments,
        {"*": TopicRetention(consumed=True)},
        now=datetime_of(VirtualClock().now_ns()),
        needs=Needs(folds={"ledger": 7}),
    )
    await log.drop(plan)

    with pytest.raises(LedgerIncomplete) as caught:
        async with a_ledger(log, snapshots=store):
            pass
    assert caught.value.count == 8


class Rooms:
    """Another part."""

    name: ClassVar[str] = "test_rooms"
    frozen_type: ClassVar[Any] = list[str]

    def freeze(self) -> list[str]:
        return []

    def restore(self, frozen: list[str]) -> None:
        assert frozen == []


async def test_a_snapshot_with_parts_that_are_not_there_is_refused() -> None:
    """A ledger that is opened without one of its parts says which; one that is opened with a new part begins with that empty."""
    store, log = MemorySnapshots(), MemoryLog()
    await filled(store, log, 3)
    async with await open_ledger(log, parts=[Names, Rooms], snapshots=store) as ledger:
        assert len(await owners(ledger)) == 4
        await ledger.take_snapshot()

    with pytest.raises(SnapshotUnsupported, match="test_rooms"):
        await open_ledger(log, parts=[Names], snapshots=store)


async def test_a_snapshot_of_a_newer_format_is_refused() -> None:
    """It is not taken for a damaged one: the log may no longer have all that it covers."""
    store, log = MemorySnapshots(), MemoryLog()
    await filled(store, log, 3)
    (offset,) = store.offsets()
    header = SnapshotHeader(format=2, offset=offset, event_id="e", epoch="e", taken_at_ms=1, parts=())
    store.save(offset, blocks_of(header, []))

    with pytest.raises(SnapshotUnsupported, match="format 2"):
        async with a_ledger(log, snapshots=store):
            pass


async def test_a_snapshot_that_knows_more_than_the_log_is_not_used() -> None:
    """Of a log that lost its end (it need not sync before it answers) the records count; but no seq is given again."""
    store, log = MemorySnapshots(), MemoryLog(epoch="e")
    await filled(store, log, 5, 5)
    shorter = MemoryLog(epoch="e")
    for record in (await log.read(Query(topic="ledger"), limit=4)).records:
        await shorter.append(Event(EventMeta("ledger", record.meta.type, "system"), record.payload))

    async with a_ledger(shorter, snapshots=store) as ledger:
        assert list(await owners(ledger)) == ["n0", "n1", "n2"]
        assert ledger.happenings.last_seq == 10
        await ledger.execute(TakeName(taken="x", by="p"))
        await ledger.take_snapshot()
    assert store.offsets() == [5], "those of another life are removed with the next one"


async def test_snapshots_are_taken_by_themselves() -> None:
    """After so many records one is taken while commands go on, and closing takes one if that is worth it."""
    store, log = MemorySnapshots(), MemoryLog()
    async with a_ledger(log, snapshots=store, snapshot_records_max=50) as ledger:
        for n in range(120):
            await ledger.execute(TakeName(taken=f"n{n}", by="p"))
        assert len(store.offsets()) == 2
        await ledger.execute_many([TakeName(taken=f"m{n}", by="p") for n in range(2000)])
        await asyncio.sleep(0)
    assert store.offsets()[0] > 2000
    async with a_ledger(log, snapshots=store) as ledger:
        assert len(await owners(ledger)) == 2120


class FullStore(MemorySnapshots):
    """A disk without room for snapshots."""

    def save(self, offset: int, blocks: Iterable[bytes]) -> None:
        raise OSError(28, "no space left")


async def test_a_snapshot_that_finds_no_room_holds_nothing_up() -> None:
    """Commands go on, also closing does; asked for by hand, it is said."""
    log = MemoryLog()
    async with a_ledger(log, snapshots=FullStore(), snapshot_records_max=5) as ledger:
        for n in range(20):
            await ledger.execute(TakeName(taken=f"n{n}", by="p"))
        with pytest.raises(OSError, match="no space"):
            await ledger.take_snapshot()
        assert ledger.is_available


class _Big(msgspec.Struct, frozen=True):
    rows: dict[tuple[str, int], list[int]]
    names: tuple[str, ...]
    flag: bool


class Big:
    """A part with containers of several pieces."""

    name: ClassVar[str] = "big"
    frozen_type: ClassVar[Any] = _Big

    def __init__(self) -> None:
        self.value = _Big({}, (), False)

    def freeze(self) -> _Big:
        return self.value

    def restore(self, frozen: _Big) -> None:
        self.value = frozen


def test_large_parts_go_in_pieces_and_come_back_whole() -> None:
    """No piece is large enough to hold others up for long, and what is put together equals what was taken apart, in its order."""
    part = Big()
    part.value = _Big({(f"k{n}", n): [n] for n in range(10_001)}, tuple(f"n{n}" for n in range(4000)), True)
    header = SnapshotHeader(offset=1, event_id="e", epoch="e", taken_at_ms=1, parts=("big",))
    blocks = list(blocks_of(header, [FrozenPart("big", _Big, part.freeze())]))
    again = Big()

    restore(1, b"".join(blocks), [again])

    assert max(len(block) for block in blocks) < 50_000
    assert again.value == part.value
    assert list(again.value.rows) == list(part.value.rows)
    for end in range(0, len(b"".join(blocks)), 997):
        with pytest.raises(SnapshotDamaged):
            restore(1, b"".join(blocks)[:end], [Big()])


async def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    """What is not named as a snapshot is, or was left half written, is passed over."""
    store = FileSnapshots(tmp_path)
    folder = tmp_path / ".bus" / "ledger"
    folder.mkdir(parents=True)
    (folder / "notes.snapshot").write_text("hello")
    (folder / f"{7:020}.snapshot.new").write_bytes(b"half")
    async with await open_ledger(tmp_path, parts=[Names], settings=LedgerSettings(snapshot_records_max=10)) as ledger:
        await ledger.execute_many([TakeName(taken=f"n{n}", by="p") for n in range(20)])
        await ledger.take_snapshot()

    assert store.offsets()
    assert (folder / "notes.snapshot").read_text() == "hello"


@pytest.mark.parametrize("records_max", [1, 2, 3, 4, 5, 6])
async def test_a_closed_ledger_leaves_no_snapshot_under_way(records_max: int) -> None:
    """The last record of all, written while closing, may make a snapshot due; closing waits for that one too."""

    class SlowSnapshots(MemorySnapshots):
        running = 0

        async def run(self, job: Callable[[], Any]) -> Any:
            self.running += 1
            for _ in range(20):
                await asyncio.sleep(0)
            self.running -= 1
            return job()

    store = SlowSnapshots()
    async with a_ledger(snapshots=store, snapshot_records_max=records_max) as ledger:
        await ledger.execute(TakeName(taken="one", by="p"))
        await ledger.take_snapshot()
        ledger.happenings.emit(CustodyReleased(at_ms=1, plugin="p", handle_id="h"))
        await ledger.execute(TakeName(taken="two", by="p"))
    assert store.running == 0
