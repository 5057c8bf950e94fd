"""Snapshots as files of a workspace, ``.bus/ledger/<offset>.snapshot``: the one place of the ledger that knows a disk."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final, TypeVar

from tidings.core.clock import SYSTEM_CLOCK, Clock
from tidings.log.embedded import open_log
from tidings.log.embedded.disk import Disk, OsDisk, replace_file
from tidings.log.embedded.layout import Layout
from tidings.log.interface import Log
from tidings.log.settings import LogSettings

_T = TypeVar("_T")
_SUFFIX: Final = ".snapshot"
_WRITE_BYTES: Final = 1 << 20


async def open_files(
    workspace: Path | str, settings: LogSettings | None = None, *, clock: Clock = SYSTEM_CLOCK, disk: Disk | None = None
) -> tuple[Log, FileSnapshots]:
    """Open the embedded log of a workspace, and the snapshots in its files. Raises as ``open_log`` does."""
    log = await open_log(workspace, settings, clock=clock, disk=disk)
    return log, FileSnapshots(workspace, disk=disk)


class FileSnapshots:
    """
    The snapshots of one workspace.

    Args:
        workspace: The folder of the log.
        disk: Replaceable for tests.
    """

    def __init__(self, workspace: Path | str, *, disk: Disk | None = None) -> None:
        self._folder = Layout(workspace).ledger
        self._disk = disk or OsDisk()

    async def run(self, job: Callable[[], _T]) -> _T:
        """Do it beside the event loop, as the disk says."""
        return await self._disk.threads.run(job)

    def offsets(self) -> list[int]:
        """Those there are, newest first."""
        names = (name.removesuffix(_SUFFIX) for name in self._disk.names(self._folder) if name.endswith(_SUFFIX))
        return sorted((int(name) for name in names if name.isdecimal()), reverse=True)

    def save(self, offset: int, blocks: Iterable[bytes]) -> None:
        """Write one under another name, sync it and give it its own."""
        disk, path = self._disk, self._path(offset)
        if not disk.exists(self._folder):
            disk.make_folder(self._folder)
            disk.sync_folder(self._folder.parent)
        replace_file(disk, path, _gathered(blocks))

    def load(self, offset: int) -> bytes:
        """All of one."""
        file = self._disk.open(self._path(offset))
        try:
            return file.read(0, file.size())
        finally:
            file.close()

    def remove(self, offset: int) -> None:
        """Remove one."""
        self._disk.remove(self._path(offset))

    def _path(self, offset: int) -> Path:
        return self._folder / f"{offset:020}{_SUFFIX}"


def _gathered(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes in pieces that are worth a write each."""
    held: list[bytes] = []
    size = 0
    for block in blocks:
        held.append(block)
        size += len(block)
        if size >= _WRITE_BYTES:
            yield b"".join(held)
            held, size = [], 0
    yield b"".join(held)
