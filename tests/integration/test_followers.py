"""Following a log beside its writer: what retention drops is no damage, and a repair is never passed over in silence."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conformance.support import append_all, drop_sealed, event, read_seqs
from tests.integration.compacting_child import SETTINGS
from tidings.core.clock import SYSTEM_CLOCK
from tidings.log import Query
from tidings.log.embedded import EmbeddedLog, open_follower, open_log
from tidings.log.embedded.disk import OsDisk
from tidings.log.embedded.follower import FollowerLog
from tidings.log.embedded.layout import Layout
from tidings.log.embedded.repair import carry_out
from tidings.log.embedded.repair_plan import plan_repair
from tidings.log.errors import CorruptLog, EpochMismatch


class ListedDisk(OsDisk):
    """The machine's disk, on which something happens between listing the segments and reading them."""

    def __init__(self) -> None:
        self.after_listing: Callable[[], None] | None = None

    def names(self, folder: Path) -> list[str]:
        names = super().names(folder)
        if folder.name == "wal" and self.after_listing is not None:
            act, self.after_listing = self.after_listing, None
            act()
        return names


async def drop_while_listing(log: EmbeddedLog, disk: ListedDisk) -> None:
    """Have all sealed segments dropped as soon as a follower has listed them."""
    loop = asyncio.get_running_loop()

    def drop() -> None:
        asyncio.run_coroutine_threadsafe(drop_sealed(log), loop).result(30)

    disk.after_listing = drop


@pytest.mark.parametrize("is_known", [False, True], ids=["new segments", "a segment that it was reading"])
async def test_a_segment_that_is_dropped_after_it_was_listed_is_no_damage(tmp_path: Path, is_known: bool) -> None:
    """The follower goes on with what is there, and shows all that was not dropped."""
    disk = ListedDisk()
    log = await open_log(tmp_path, SETTINGS)
    await append_all(log, [event("a") for _ in range(3)])
    await log._flush_all()
    follower = await open_follower(tmp_path, SETTINGS, disk=disk)
    if is_known:
        assert await read_seqs(follower, Query()) == [1, 2, 3]
    await append_all(log, [event("a") for _ in range(20)])
    await log._flush_all()
    await drop_while_listing(log, disk)

    await asyncio.to_thread(follower.refresh)

    assert disk.after_listing is None
    assert await read_seqs(follower, Query(since=follower.dropped_through_seq)) == [21, 22, 23]
    assert follower.dropped_through_seq == 20
    await follower.close()
    await log.close()


async def test_a_segment_that_is_gone_without_a_seal_is_damage(tmp_path: Path) -> None:
    """If the seals do not say that it was dropped, the follower names the file."""
    disk = ListedDisk()
    log = await open_log(tmp_path, SETTINGS)
    await append_all(log, [event("a") for _ in range(3)])
    await log._flush_all()
    follower = await open_follower(tmp_path, SETTINGS, disk=disk)
    await append_all(log, [event("a") for _ in range(20)])
    await log._flush_all()
    path = log.layout.wal / "a.00000003.jsonl"
    disk.after_listing = path.unlink

    with pytest.raises(CorruptLog) as caught:
        await asyncio.to_thread(follower.refresh)

    assert caught.value.path.startswith(str(log.layout.wal))
    await follower.close()
    await log.close()


async def make_repaired(tmp_path: Path) -> tuple[FollowerLog, Callable[[], None]]:
    """A follower that has read all of a log, and a repair that cuts the log's end off."""
    log = await open_log(tmp_path, SETTINGS)
    await append_all(log, [event("a", {"n": n}) for n in range(9)])
    await log.close()
    follower = await open_follower(tmp_path, SETTINGS)
    assert len(await read_seqs(follower, Query())) == 9

    def repair() -> None:
        path = Layout(tmp_path).wal / "a.00000002.jsonl"
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2])
        disk = OsDisk()
        result = carry_out(disk, Layout(tmp_path), plan_repair(disk, Layout(tmp_path), SETTINGS), SYSTEM_CLOCK)
        assert result.is_new_epoch

    return follower, repair


@pytest.mark.parametrize("is_written", [False, True], ids=["no writer", "a writer in this process"])
async def test_a_follower_is_refused_after_a_repair_that_lost_records(tmp_path: Path, is_written: bool) -> None:
    """Reading, waiting and refreshing raise EpochMismatch, each time, whatever was stored since."""
    follower, repair = await make_repaired(tmp_path)
    old = follower.position.epoch
    repair()
    log = None
    if is_written:
        log = await open_log(tmp_path, SETTINGS)
        await append_all(log, [event("a", {"n": n}, partitions=("p",)) for n in range(8)])
        await log._flush_all()

    for _ in range(2):
        with pytest.raises(EpochMismatch) as caught:
            await follower.read(Query(since=9))
        with pytest.raises(EpochMismatch):
            await follower.wait(9)
    assert (caught.value.given, caught.value.current != old) == (old, True)
    await follower.close()
    if log is not None:
        await log.close()
    again = await open_follower(tmp_path, SETTINGS)
    assert len(await read_seqs(again, Query())) == again.topics()["a"].next_offset
    await again.close()


async def test_a_repair_while_the_follower_reads_is_noticed(tmp_path: Path) -> None:
    """What it has listed before the repair and read after it is not shown."""
    follower, repair = await make_repaired(tmp_path)
    await follower.close()
    disk = ListedDisk()
    follower = await open_follower(tmp_path, SETTINGS, disk=disk)
    disk.after_listing = repair

    with pytest.raises(EpochMismatch):
        await follower.read(Query(since=5))

    await follower.close()


async def test_a_follower_in_the_process_of_the_writer_stands_a_new_index(tmp_path: Path) -> None:
    """Where the index is made anew while a follower has it open, the follower finds its partitions in the records."""
    log = await open_log(tmp_path, SETTINGS)
    await append_all(log, [event("a", partitions=("p",)) for _ in range(7)])
    await log.close()
    follower = await open_follower(tmp_path, SETTINGS)
    assert len(await read_seqs(follower, Query(partitions=("p",)))) == 7
    for path in Layout(tmp_path).index.iterdir():
        path.unlink()
    log = await open_log(tmp_path, SETTINGS)
    await append_all(log, [event("a", partitions=("p",)) for _ in range(7)])
    await log._flush_all()

    assert len(await read_seqs(follower, Query(partitions=("p",)))) == 14

    await follower.close()
    await log.close()


async def run_child(*args: object) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.integration.compacting_child", *map(str, args)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [60, pytest.param(1500, marks=[pytest.mark.heavy, pytest.mark.timeout(900)])])
async def test_two_processes_follow_a_third_that_drops_what_it_writes(tmp_path: Path, rounds: int) -> None:
    """However often segments go while they are read, both followers come to the last record, and neither speaks of damage."""
    log = await open_log(tmp_path, SETTINGS)
    await append_all(log, [event("a")])
    await log.close()
    followers = [await run_child("follow", tmp_path) for _ in range(2)]
    writer = await run_child("write", tmp_path, rounds)
    done = await asyncio.gather(*(child.communicate() for child in (writer, *followers)))

    for child, (shown, problem) in zip((writer, *followers), done, strict=True):
        assert child.returncode == 0, problem.decode()
        assert child is writer or int(shown) > 0
