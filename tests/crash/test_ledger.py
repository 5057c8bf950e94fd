"""
The machine stops at every disk call in turn while the ledger works: what was answered is there afterwards, whole, and nothing is made up.

The default run takes every n-th call, another n for each way to stop; ``make heavy`` takes them all.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import pytest

from tests.crash.support import ENDINGS, ROOMY, WORKSPACE, Ending, disk_after, let_go, open_simulated
from tests.unit.ledger.ledger_support import Names, TakeName, killed, owners
from tidings.happenings.errors import CursorTooOld, HappeningsClosed
from tidings.happenings.variants import CustodyReleased
from tidings.ledger import Ledger, LedgerSettings, open_ledger
from tidings.ledger.errors import LedgerError, LedgerIncomplete, LedgerUnavailable
from tidings.ledger.snapshot_files import FileSnapshots
from tidings.log.embedded import EmbeddedLog, open_log
from tidings.log.embedded.index import MemoryIndex
from tidings.log.embedded.layout import Layout, StreamKey
from tidings.log.embedded.repair import carry_out
from tidings.log.embedded.repair_plan import plan_repair
from tidings.log.errors import LogError
from tidings.testing import (
    InterleavedDisk,
    SimulatedClock,
    SimulatedCrash,
    SimulatedDisk,
    SimulatedLoop,
    VirtualClock,
)

_STRIDE: Final = 31
_SETTINGS: Final = LedgerSettings(
    snapshot_records_max=4, record_bytes_max=1024, history_count_max=None, history_age_s_max=None
)


class Life:
    """A ledger on a machine that may stop, and what was promised."""

    def __init__(self, disk: SimulatedDisk) -> None:
        self.disk = disk
        self.log: EmbeddedLog | None = None
        self.ledger: Ledger | None = None
        self.offered: list[TakeName] = []
        self.answered: dict[str, int] = {}
        self.seen: dict[int, str] = {}
        """What subscribers got, by seq."""
        self.plain: set[str] = set()

    async def run(self) -> bool:
        """Live to the end, or to the crash; whether the end was reached."""
        try:
            for number in range(2):
                await self._work(number)
        except (SimulatedCrash, LogError, LedgerError, OSError):
            assert self.disk.is_crashed
            return False
        finally:
            if self.ledger is not None:
                await killed(self.ledger)
            await let_go(self.log)
        return True

    async def _work(self, number: int) -> None:
        self.log = await open_simulated(self.disk, MemoryIndex(), ROOMY)
        self.ledger = ledger = await open_on(self.log, self.disk)
        receiver = ledger._bus.subscribe()

        def hear() -> None:
            with contextlib.suppress(HappeningsClosed):
                while (envelope := receiver.try_recv()) is not None:
                    assert isinstance(envelope.happening, CustodyReleased)
                    handle_id = envelope.happening.handle_id
                    assert self.seen.setdefault(envelope.seq, handle_id) == handle_id

        async def give(times: Sequence[int]) -> None:
            commands = [
                TakeName(taken=f"{number}.{len(self.offered) + n}", by="p", times=t) for n, t in enumerate(times)
            ]
            self.offered += commands
            try:
                for command, result in zip(commands, await ledger.execute_many(commands), strict=True):
                    if isinstance(result, BaseException):
                        raise result
                    self.answered[command.taken] = result
            finally:
                hear()

        await give([1, 0, 2])
        ledger.happenings.emit(plain := CustodyReleased(at_ms=1, plugin="p", handle_id=f"plain {number}"))
        self.plain.add(plain.handle_id)
        await give([60])  # in several records
        await asyncio.gather(*(give([n]) for n in range(3)))
        await ledger.take_snapshot()
        await give([1, 1])
        await ledger.close()
        hear()
        await self.log.close()


async def open_on(log: EmbeddedLog, disk: SimulatedDisk, *, accept_loss: bool = False, **settings: Any) -> Ledger:
    """The ledger of a log on a simulated disk."""
    return await open_ledger(
        log,
        parts=[Names],
        settings=msgspec.structs.replace(_SETTINGS, **settings),
        clock=VirtualClock(),
        snapshots=FileSnapshots(WORKSPACE, disk=disk),
        accept_loss=accept_loss,
    )


async def check(disk: SimulatedDisk, life: Life) -> None:
    """The next life has all that was promised, in the order of the commands, and goes on with seqs of its own."""
    log = await open_simulated(disk, MemoryIndex(), ROOMY)
    ledger: Ledger | None = None
    try:
        ledger = await open_on(log, disk)
        found = list(await owners(ledger))
        offered = [command.taken for command in life.offered]
        assert found == offered[: len(found)], "a prefix of what was offered, in its order"
        assert len(found) >= len(life.answered), "all that was answered"
        history = {each.seq: each.happening async for each in ledger.happenings.history()}
        told = [each.handle_id for each in history.values() if isinstance(each, CustodyReleased)]
        assert told == [f"{each.taken}/{n}" for each in life.offered[: len(found)] for n in range(each.times)]
        for seq, handle_id in life.seen.items():
            if handle_id not in life.plain:
                stored = history[seq]
                assert isinstance(stored, CustodyReleased)
                assert stored.handle_id == handle_id, "what was seen is what is stored, under the same seq"
        seq = await ledger.happenings.emit_durable(CustodyReleased(at_ms=1, plugin="p", handle_id="next"))
        assert seq > max((*life.seen, *history), default=0), "no seq is given twice"
        await ledger.close()
    finally:
        if ledger is not None and ledger._closing is None:
            await killed(ledger)
        await let_go(log)


async def _calls() -> int:
    life = Life(SimulatedDisk())
    assert await life.run()
    assert len(life.answered) == len(life.offered)
    return life.disk.calls


async def _stop_everywhere(ending: Ending, *, within: bool, stride: int) -> None:
    first = 1 + ENDINGS.index(ending) * 2 % stride
    for calls in range(first, await _calls() + 1, stride):
        life = Life(SimulatedDisk(calls, crash_after=calls, crash_within=within))
        await life.run()
        disk = disk_after(life.disk, ending)
        try:
            await check(disk, life)
        except Exception as error:
            error.add_note(f"stopped at call {calls}: {life.disk.trace[-1]}")
            raise


@pytest.mark.parametrize("ending", ENDINGS)
async def test_what_was_answered_survives_a_stop_at_any_disk_call(ending: Ending) -> None:
    """The state is a prefix of the commands with all that were answered, history is its happenings, and no seq comes twice."""
    await _stop_everywhere(ending, within=False, stride=_STRIDE)


@pytest.mark.heavy
@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("ending", ENDINGS)
async def test_what_was_answered_survives_a_stop_at_every_disk_call(ending: Ending, within: bool) -> None:
    """The same at each call, and in the middle of each."""
    await _stop_everywhere(ending, within=within, stride=1)


async def _filled(*, has_snapshot: bool) -> SimulatedDisk:
    """A disk with a ledger of ten names, in segments of four records."""
    disk = SimulatedDisk()
    log = await open_simulated(disk, MemoryIndex(), ROOMY)
    ledger = await open_on(log, disk, snapshot_records_max=1000)
    for n in range(10):
        await ledger.execute(TakeName(taken=f"n{n}", by="p"))
        if n == 7 and has_snapshot:
            await ledger.take_snapshot()
    await killed(ledger)
    await log.close()
    return disk


def _repaired(disk: SimulatedDisk, segment: int) -> None:
    """Damage a segment, and have the log repaired: it loses records, and begins a new epoch."""
    layout = Layout(WORKSPACE)
    disk.flip(layout.segment(StreamKey("ledger"), segment), 60, 0x04)
    result = carry_out(disk, layout, plan_repair(disk, layout, ROOMY), VirtualClock())
    assert result.is_new_epoch


@pytest.mark.parametrize(
    ("segment", "has_snapshot", "names"),
    [(1, True, range(10)), (2, True, range(3)), (2, False, range(3)), (3, True, range(7)), (3, False, range(7))],
)
async def test_a_repaired_log_opens_with_what_is_left(segment: int, has_snapshot: bool, names: range) -> None:
    """
    What the log still has counts, and a snapshot stands for records before it; one that knows more than the log is not used. Old cursors are
    refused.
    """
    disk = await _filled(has_snapshot=has_snapshot)
    _repaired(disk, segment)
    for _ in range(2):
        log = await open_simulated(disk, MemoryIndex(), ROOMY)
        ledger = await open_on(log, disk, snapshot_records_max=1000)
        assert list(await owners(ledger)) == [f"n{n}" for n in names]
        assert ledger.happenings.last_seq >= 1_000_000
        with pytest.raises(CursorTooOld):
            ledger.happenings.subscribe(since=9)
        await ledger.close()
        await log.close()


async def test_a_ledger_without_its_beginning_opens_only_when_the_loss_is_accepted() -> None:
    """Without a snapshot nobody knows what the first records said: opening says so, and goes on with the others when told to."""
    disk = await _filled(has_snapshot=False)
    _repaired(disk, 1)
    log = await open_simulated(disk, MemoryIndex(), ROOMY)
    with pytest.raises(LedgerIncomplete) as caught:
        await open_on(log, disk)
    assert caught.value.count == 4
    for accept_loss in (True, False):
        ledger = await open_on(log, disk, accept_loss=accept_loss)
        assert list(await owners(ledger)) == [f"n{n}" for n in range(3, 10)]
        assert ledger.happenings.last_seq >= 1_000_000
        await killed(ledger)
    await log.close()


def test_a_full_disk_is_told_and_gone_through() -> None:
    """
    While there is no room commands are refused and reads go on, also plain emits wait; when there is room again everything goes on, and what was
    refused was not done.
    """
    loop = SimulatedLoop(seed=5)
    disk = SimulatedDisk(5)

    async def main() -> None:
        log = await open_log(
            WORKSPACE, ROOMY, disk=InterleavedDisk(disk, loop), index=MemoryIndex(), clock=SimulatedClock(loop)
        )
        ledger = await open_ledger(
            log,
            parts=[Names],
            settings=_SETTINGS,
            clock=SimulatedClock(loop),
            snapshots=FileSnapshots(WORKSPACE, disk=InterleavedDisk(disk, loop)),
        )
        receiver = ledger._bus.subscribe()
        await ledger.execute(TakeName(taken="first", by="p"))
        disk.capacity_bytes = disk.used_bytes
        done, refused = ["first"], 0
        for n in range(200):
            try:
                await ledger.execute(TakeName(taken=f"n{n}", by="p", times=20))
                done.append(f"n{n}")
            except LedgerUnavailable:
                refused += 1
        assert refused > 100
        assert list(await owners(ledger)) == done
        ledger.happenings.emit(CustodyReleased(at_ms=1, plugin="p", handle_id="plain"))
        disk.capacity_bytes = None
        await asyncio.sleep(1.0)  # of the simulation's time
        assert ledger.is_available
        await ledger.execute(TakeName(taken="last", by="p"))
        assert list(await owners(ledger)) == [*done, "last"]
        told: set[str] = set()
        while "plain" not in told:
            for envelope in await receiver.recv_many():
                assert isinstance(envelope.happening, CustodyReleased)
                told.add(envelope.happening.handle_id)
        await ledger.close()
        await log.close()

    try:
        loop.run_until_complete(main())
    finally:
        loop.abandon()
