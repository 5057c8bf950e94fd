"""Journal and reserve are as large as the log needs and the disk allows."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.full_disk import small_file_system
from tidings.bus import EventBus
from tidings.core.errors import SettingsError
from tidings.log import LogSettings
from tidings.log.embedded import open_log
from tidings.log.embedded.disk import DiskSpace, OsDisk
from tidings.log.embedded.sizing import Sizing, refuse_impossible
from tidings.types import Event, EventMeta

MB = 1_000_000
MIB = 1 << 20
LARGE = DiskSpace(total_bytes=1 << 40, free_bytes=1 << 39, block_bytes=4096, free_files=None)


class DiskOf(OsDisk):
    """The machine's disk, which says that it is of another size."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes

    def space(self, path: Path) -> DiskSpace:
        return super().space(path)._replace(total_bytes=self.total_bytes, free_bytes=self.total_bytes)


def event(n: int = 0, size: int = 100) -> Event:
    return Event(EventMeta(topic="demo", type="NOTED", space_id="s:1"), {"n": n, "pad": "x" * size})


def bytes_on_disk(folder: Path) -> int:
    """What the files of a folder take."""
    return sum(os.stat(path).st_blocks * 512 for path in folder.rglob("*") if path.is_file())


async def test_a_workspace_with_one_event_is_small(tmp_path: Path) -> None:
    """With the default settings it takes at most 4 MB while it is open and 1 MB when it is closed; also after a second life."""
    for _ in range(2):
        async with EventBus(workspace=tmp_path) as bus:
            await bus.publish(event())
            await bus.log._flush_all()  # type: ignore[attr-defined]
            assert bytes_on_disk(tmp_path) <= 4 * MB
        assert bytes_on_disk(tmp_path) <= 1 * MB


async def test_a_log_that_is_used_gets_larger_files_and_a_larger_reserve(tmp_path: Path) -> None:
    """Files double as they fill up, to the size in the settings; the reserve follows. A closed log keeps a part of it."""
    settings = LogSettings(journal_bytes=4 * MIB)
    log = await open_log(tmp_path, settings)
    sizes = set()
    for _ in range(16):
        await log.append_many([event(n, size=900) for n in range(1000)])
        await log._flush_all()
        sizes |= {path.stat().st_size for path in (tmp_path / ".bus" / "journal").iterdir()}
    assert sizes <= {MIB, 2 * MIB, 4 * MIB}
    assert (tmp_path / ".bus" / "reserve").stat().st_size == 8 * MIB
    await log.close()
    assert 1 * MIB < (tmp_path / ".bus" / "reserve").stat().st_size < 4 * MIB

    log = await open_log(tmp_path, settings)
    assert {path.stat().st_size for path in (tmp_path / ".bus" / "journal").iterdir()} == {4 * MIB}
    await log.close()


async def test_a_small_disk_keeps_files_small(tmp_path: Path) -> None:
    """However much is stored, on a small disk a journal file has 1 MiB and the reserve 2 MiB."""
    log = await open_log(tmp_path, disk=DiskOf(90 * MB))
    for _ in range(20):
        await log.append_many([event(n, size=900) for n in range(200)])
        await log._flush_all()
    assert {path.stat().st_size for path in (tmp_path / ".bus" / "journal").iterdir()} == {MIB}
    assert (tmp_path / ".bus" / "reserve").stat().st_size == 2 * MIB
    await log.close()


@pytest.mark.parametrize(
    ("settings", "needed", "name"),
    [
        (LogSettings(), 3 * MIB, "journal_bytes"),
        (LogSettings(journal_bytes=64 << 10), 192 << 10, "journal_bytes"),
        (LogSettings(reserve_bytes=64 * MIB), 65 * MIB, "reserve_bytes"),
    ],
)
async def test_a_disk_that_can_never_hold_the_log_is_refused_with_the_numbers(
    tmp_path: Path, settings: LogSettings, needed: int, name: str
) -> None:
    """One byte too few in all, or a tenth of it, and the log is not opened; what is wrong is said with both sizes."""
    for total in (needed - 1, needed // 10):
        with pytest.raises(SettingsError) as caught:
            await open_log(tmp_path, settings, disk=DiskOf(total))
        assert caught.value.path == name
        assert f"{needed:,}" in str(caught.value)
        assert f"{total:,}" in str(caught.value)
    refuse_impossible(settings, LARGE._replace(total_bytes=needed))
    assert not (tmp_path / ".bus" / "meta.json").exists()


@pytest.mark.parametrize(("log_bytes", "first"), [(0, 1), (3 * MIB, 2), (30 * MIB, 16), (10_000 * MIB, 32)])
def test_a_large_log_begins_with_large_files(log_bytes: int, first: int) -> None:
    """So it needs no time to grow."""
    assert Sizing(LogSettings(), LARGE, log_bytes).first_file_bytes == first * MIB


def test_files_grow_only_while_there_is_plenty_of_room() -> None:
    """Eight times the new file's size is free, or they stay as they are."""
    sizing = Sizing(LogSettings(), LARGE, 0)
    assert sizing.may_grow(2 * MIB, LARGE._replace(free_bytes=16 * MIB))
    assert not sizing.may_grow(2 * MIB, LARGE._replace(free_bytes=16 * MIB - 1))
    assert Sizing(LogSettings(), LARGE._replace(free_bytes=100 * MIB), 1 << 30).first_file_bytes == 8 * MIB


def test_a_closed_log_on_a_disk_that_is_short_of_room_keeps_its_reserve() -> None:
    """What is given away there does not come back."""
    sizing = Sizing(LogSettings(), LARGE, 0)
    assert sizing.closed_reserve(2 * MIB, 0, LARGE) == 512 << 10
    assert sizing.closed_reserve(2 * MIB, 0, LARGE._replace(free_bytes=MIB)) == 2 * MIB
    assert sizing.closed_reserve(64 * MIB, 80 * MIB, LARGE) == 10 * MIB
    assert Sizing(LogSettings(reserve_bytes=MIB), LARGE, 0).closed_reserve(MIB, 0, LARGE) == MIB


@pytest.fixture
def file_system(tmp_path: Path) -> Iterator[Path]:
    """A file system of 20 MB."""
    try:
        with small_file_system(tmp_path / "small", "20m") as folder:
            yield folder
    except PermissionError as error:
        pytest.skip(f"no file system can be mounted here: {error}")


@pytest.mark.heavy
async def test_a_file_system_of_20_mb_works_with_the_default_settings(file_system: Path) -> None:
    """Ten thousand events are stored there."""
    async with EventBus(workspace=file_system / "w") as bus:
        for _ in range(10):
            await bus.publish_many([event(n, size=300) for n in range(1000)], timeout_s=5.0)
        assert not bus.health().is_storage_full
