"""A full disk always has a way back: what the journal accepts has room in the segments, and a log whose journal cannot be moved opens."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest

from tests.integration.full_disk import CrowdedDisk, small_file_system, use_up
from tidings.log import LogSettings, TopicRetention
from tidings.log.embedded import EmbeddedLog, open_log
from tidings.log.embedded.disk import Disk
from tidings.log.errors import StorageFull
from tidings.log.interface import Appended, Query
from tidings.log.retention import plan_retention
from tidings.types import Event, EventMeta

MIB = 1 << 20
BLOCK = 4096
SETTINGS = LogSettings(journal_bytes=MIB, segment_lines_max=100)


def event(n: int, *, topic: str = "demo", space: str = "s:1", size: int = 100) -> Event:
    return Event(EventMeta(topic=topic, type="NOTED", space_id=space), {"n": n, "pad": "x" * size})


async def seqs_of(log: EmbeddedLog) -> list[int]:
    """All seqs that can be read."""
    seqs, after = list[int](), 0
    while records := (await log.read(Query(since=after))).records:
        seqs += [record.seq for record in records]
        after = seqs[-1]
    return seqs


async def store(log: EmbeddedLog, events: list[Event]) -> int:
    """Store events in one list; how many were stored."""
    try:
        return sum(isinstance(verdict, Appended) for verdict in await log.append_many(events))
    except StorageFull:
        return 0


def spread(count: int, layout: str) -> list[Event]:
    """Events of as many streams: topics, or spaces of one topic."""
    if layout == "flat":
        return [event(n, topic=f"topic{n}") for n in range(count)]
    return [event(n, space=f"s:{n}") for n in range(count)]


@pytest.mark.parametrize("layout", ["flat", "space"])
@pytest.mark.parametrize("count", [30, 1000, pytest.param(10_000, marks=pytest.mark.heavy)])
async def test_a_commit_to_many_streams_is_accepted_only_if_all_of_them_have_room(
    tmp_path: Path, count: int, layout: str
) -> None:
    """Each new file takes blocks of its own: what is acknowledged on a full disk can be moved, and the log closes and opens."""
    disk, settings = CrowdedDisk(BLOCK), msgspec.structs.replace(SETTINGS, layout=layout)
    log = await open_log(tmp_path, settings, disk=disk)
    before = await store(log, [event(n) for n in range(20)])
    disk.left_bytes = 0
    stored = await store(log, spread(count, layout))
    assert stored == (count if count == 30 else 0)
    await log.close()

    log = await open_log(tmp_path, settings, disk=disk)
    assert len(await seqs_of(log)) == before + stored
    assert disk.left_bytes is not None
    disk.left_bytes = None
    await until_writable(log)
    assert await store(log, spread(count, layout)) == count
    await log.close()


async def until_writable(log: EmbeddedLog) -> None:
    """Wait until the log has noticed that there is room."""
    async with asyncio.timeout(20):
        while not log.health().is_writable:  # noqa: ASYNC110 - it looks again by itself, in real time
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("left_bytes", [7_000_000, 11_000_000])
async def test_an_event_that_fits_the_disk_once_and_not_twice_is_refused(tmp_path: Path, left_bytes: int) -> None:
    """There must be room for it in the journal and in the segment; else it is refused at once, and the log opens again."""
    disk = CrowdedDisk(BLOCK)
    log = await open_log(tmp_path, SETTINGS, disk=disk)
    before = await store(log, [event(n) for n in range(20)])
    disk.left_bytes = left_bytes
    with pytest.raises(StorageFull):
        await log.append(event(0, size=6_000_000))
    await log.close()

    log = await open_log(tmp_path, SETTINGS, disk=disk)
    assert len(await seqs_of(log)) == before
    disk.left_bytes = 13_000_000
    await until_writable(log)
    assert isinstance(await log.append(event(0, size=6_000_000)), Appended)
    disk.left_bytes = 0
    await log.close()
    log = await open_log(tmp_path, SETTINGS, disk=disk)
    assert len(await seqs_of(log)) == before + 1
    await log.close()


async def _fill_journal_without_room(folder: Path, disk: CrowdedDisk, settings: LogSettings) -> tuple[EmbeddedLog, int]:
    """A log without a reserve: what it acknowledged stays in the journal, as there is no room in the segments."""
    log = await open_log(folder, settings, disk=disk)
    count = await store(log, [event(n, size=1000) for n in range(4000)])
    await log._flush_all()
    disk.left_bytes = 0
    count += await store(log, [event(n, topic=f"topic{n // 150}.{n % 150}", size=10) for n in range(450)])
    return log, count


def take_what_the_journal_gives_back(disk: CrowdedDisk, folder: Path) -> None:
    """Have others take the room that recovery frees when it cuts the journal's files to what they hold."""
    disk.left_bytes = -sum(path.stat().st_size for path in (folder / ".bus" / "journal").iterdir())


@pytest.mark.parametrize("layout", ["flat", "space"])
async def test_a_log_whose_journal_cannot_be_moved_opens_and_retention_frees_room(tmp_path: Path, layout: str) -> None:
    """It opens full, serves everything, takes nothing, and goes on as soon as old segments were dropped; also after a second restart."""
    disk, settings = CrowdedDisk(BLOCK), msgspec.structs.replace(SETTINGS, reserve_bytes=0, layout=layout)
    log, count = await _fill_journal_without_room(tmp_path, disk, settings)
    assert count == 4450
    await log.close()

    for _ in range(2):
        take_what_the_journal_gives_back(disk, tmp_path)
        log = await open_log(tmp_path, settings, disk=disk)
        assert log.health().is_storage_full
        assert await seqs_of(log) == list(range(1, count + 1))
        assert [record.offset for record in (await log.read(Query(topic="topic1.7"))).records] == [0]
        with pytest.raises(StorageFull):
            await log.append(event(0))
        await log.close()

    take_what_the_journal_gives_back(disk, tmp_path)
    log = await open_log(tmp_path, settings, disk=disk)
    segments = [segment for info in log.topics().values() for segment in info.segments]
    plan = plan_retention(segments, {"demo": TopicRetention(size_bytes_max=0)}, now=datetime.now(UTC))
    done = await log.drop(plan)
    assert done.freed_bytes > 500_000
    await until_writable(log)
    assert isinstance(await log.append(event(1)), Appended)
    assert (await seqs_of_topics(log)) == 451
    await log.close()
    assert not list((tmp_path / ".bus" / "journal").iterdir())
    log = await open_log(tmp_path, settings, disk=disk)
    assert (await seqs_of_topics(log)) == 451
    await log.close()


async def seqs_of_topics(log: EmbeddedLog) -> int:
    """How many records of the small topics there are, and of what came after."""
    count = 0
    for name in log.topics():
        first = log.topics()[name].first_offset
        records = (await log.read(Query(topic=name, from_offset=first))).records
        count += sum(record.seq > 4000 for record in records)
    return count


async def test_a_killed_log_whose_journal_cannot_be_moved_goes_on_when_there_is_room(tmp_path: Path) -> None:
    """What came from the journal, and what is stored after it, is in the segments once there is room, each once and in order."""
    disk, settings = CrowdedDisk(BLOCK), msgspec.structs.replace(SETTINGS, reserve_bytes=0)
    log, count = await _fill_journal_without_room(tmp_path, disk, settings)
    await log.close()

    take_what_the_journal_gives_back(disk, tmp_path)
    log = await open_log(tmp_path, settings, disk=disk)
    assert log.health().is_storage_full
    disk.left_bytes = None
    await until_writable(log)
    count += await store(log, [event(n, topic=f"topic0.{n}") for n in range(50)])
    await log.close()
    log = await open_log(tmp_path, settings, disk=disk)
    assert await seqs_of(log) == list(range(1, count + 1))
    assert [record.offset for record in (await log.read(Query(topic="topic0.3"))).records] == [0, 1]
    await log.close()


@pytest.fixture
def file_system(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MB."""
    try:
        with small_file_system(tmp_path / "small", "24m") as folder:
            yield folder
    except PermissionError as error:
        pytest.skip(f"no file system can be mounted here: {error}")


@pytest.mark.heavy
@pytest.mark.parametrize("layout", ["flat", "space"])
async def test_many_streams_on_a_file_system_that_is_really_full(file_system: Path, layout: str) -> None:
    """The same on a real file system without a free block."""
    disk: Disk | None = None
    settings = msgspec.structs.replace(SETTINGS, layout=layout)
    workspace = file_system / "w"
    log = await open_log(workspace, settings, disk=disk)
    before = await store(log, [event(n) for n in range(20)])
    use_up(file_system)
    stored = await store(log, spread(1000, layout))
    await log.close()
    log = await open_log(workspace, settings, disk=disk)
    assert len(await seqs_of(log)) == before + stored
    (file_system / "filler").unlink()
    await until_writable(log)
    assert await store(log, spread(500, layout)) == 500
    await log.close()
