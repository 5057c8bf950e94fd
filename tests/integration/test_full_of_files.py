"""A file system that has room and can hold no more files (inodes): said as such, and no reason to give the reserve away."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.integration.full_disk import small_file_system
from tests.scenarios.bus.support import soon
from tidings.bus import EventBus
from tidings.bus.store.files import open_files
from tidings.log import LogSettings
from tidings.log.embedded.disk import DiskSpace, File, OsDisk
from tidings.log.errors import StorageFull
from tidings.types import Ack, Event, EventMeta

SETTINGS = LogSettings(journal_bytes=1 << 20)


class FewFilesDisk(OsDisk):
    """The machine's disk, with room for ``left_files`` more files; ``None`` for no limit."""

    def __init__(self) -> None:
        self.left_files: int | None = None

    def open(self, path: Path, *, create: bool = False, write: bool = False) -> File:
        if create and self.left_files is not None and not path.exists():
            if self.left_files == 0:
                raise OSError(errno.ENOSPC, "No space left on device", str(path))
            self.left_files -= 1
        return super().open(path, create=create, write=write)

    def remove(self, path: Path) -> None:
        if self.left_files is not None and path.exists():
            self.left_files += 1
        super().remove(path)

    def rename(self, source: Path, target: Path) -> None:
        if self.left_files is not None and target.exists():
            self.left_files += 1
        super().rename(source, target)

    def space(self, path: Path) -> DiskSpace:
        return super().space(path)._replace(free_files=self.left_files)


def event(n: int, topic: str = "demo") -> Event:
    return Event(EventMeta(topic=topic, type="NOTED", space_id="s:1"), {"n": n})


async def handler(_: object) -> Ack:
    return Ack()


async def test_a_disk_that_can_hold_no_more_files_keeps_its_reserve(tmp_path: Path) -> None:
    """Progress that cannot be stored is no reason to give the reserve up; errors are typed and name files, and health is not green."""
    disk = FewFilesDisk()
    async with EventBus(open_log=partial(open_files, tmp_path, SETTINGS, disk=disk)) as bus:
        await bus.publish_many([event(n) for n in range(50)])
        await bus.subscribe("demo", "first", handler)
        await soon(lambda: bus.lag("demo", "first") == 0)
        reserve = (tmp_path / ".bus" / "reserve").stat().st_size
        disk.left_files = 0

        with pytest.raises(StorageFull, match="inodes"):
            await bus.subscribe("demo", "second", handler)
        with pytest.raises(StorageFull, match="inodes"):
            await bus.publish(event(0, topic="new"), timeout_s=0.01)
        await soon(lambda: bus.health().is_storage_full)
        assert "inodes" in (bus.health().problem or "")
        assert (tmp_path / ".bus" / "reserve").stat().st_size == reserve

        disk.left_files = None
        await bus.publish(event(0, topic="new"), timeout_s=20.0)
        await bus.subscribe("demo", "second", handler)
        assert not bus.health().is_storage_full


@pytest.fixture
def file_system(tmp_path: Path) -> Iterator[Path]:
    """A file system of 60 MB for 60 files."""
    try:
        with small_file_system(tmp_path / "small", "60m,nr_inodes=60") as folder:
            yield folder
    except PermissionError as error:
        pytest.skip(f"no file system can be mounted here: {error}")


@pytest.mark.heavy
async def test_a_file_system_without_inodes_keeps_its_reserve(file_system: Path) -> None:
    """The same on a real one."""
    workspace = file_system / "w"
    async with EventBus(workspace=workspace, log_settings=SETTINGS) as bus:
        await bus.publish_many([event(n) for n in range(50)])
        count = 0
        try:
            while True:
                (file_system / f"filler{count}").touch()
                count += 1
        except OSError:
            pass
        with pytest.raises(StorageFull, match="inodes"):
            await bus.subscribe("demo", "second", handler)
        await soon(lambda: bus.health().is_storage_full)
        assert (workspace / ".bus" / "reserve").stat().st_size == 2 << 20
        for n in range(count):
            (file_system / f"filler{n}").unlink()
        await bus.publish(event(0, topic="new"), timeout_s=20.0)
