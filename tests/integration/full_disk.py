"""A disk on which one may use so many bytes, and a small file system that is really full."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tidings.log.embedded.disk import DiskSpace, File, OsDisk, size_of


class CrowdedDisk(OsDisk):
    """The machine's own disk, with room for ``left_bytes`` more, in whole blocks; ``None`` for no limit."""

    def __init__(self, block_bytes: int = 1) -> None:
        self.left_bytes: int | None = None
        self.block_bytes = block_bytes
        self._lock = threading.Lock()

    def open(self, path: Path, *, create: bool = False, write: bool = False) -> File:
        return _CrowdedFile(self, super().open(path, create=create, write=write), path)

    def remove(self, path: Path) -> None:
        size = size_of(self, path) or 0
        super().remove(path)
        self.give(self.blocks(size))

    def rename(self, source: Path, target: Path) -> None:
        size = size_of(self, target) or 0
        super().rename(source, target)
        self.give(self.blocks(size))

    def space(self, path: Path) -> DiskSpace:
        space = super().space(path)
        free_bytes = space.free_bytes if self.left_bytes is None else self.left_bytes
        return space._replace(free_bytes=free_bytes, block_bytes=self.block_bytes)

    def blocks(self, size: int) -> int:
        """The room that so many bytes take."""
        return -(-size // self.block_bytes) * self.block_bytes

    def take(self, size: int, path: Path) -> None:
        """Use so many bytes, or raise."""
        with self._lock:
            if self.left_bytes is not None and size > 0:
                if size > self.left_bytes:
                    raise OSError(errno.ENOSPC, "No space left on device", str(path))
                self.left_bytes -= size

    def give(self, size: int) -> None:
        """So many bytes are free again."""
        with self._lock:
            if self.left_bytes is not None:
                self.left_bytes += size


class _CrowdedFile:
    def __init__(self, disk: CrowdedDisk, file: File, path: Path) -> None:
        self._disk = disk
        self._file = file
        self._path = path
        self.read, self.size, self.sync, self.close = file.read, file.size, file.sync, file.close

    def write(self, byte_offset: int, data: bytes) -> None:
        self._disk.take(self._disk.blocks(byte_offset + len(data)) - self._disk.blocks(self.size()), self._path)
        self._file.write(byte_offset, data)

    def allocate(self, size: int) -> None:
        self._disk.take(self._disk.blocks(size) - self._disk.blocks(self.size()), self._path)
        self._file.allocate(size)

    def truncate(self, size: int) -> None:
        self._disk.give(self._disk.blocks(self.size()) - self._disk.blocks(size))
        self._file.truncate(size)


@contextmanager
def small_file_system(folder: Path, size: str) -> Iterator[Path]:
    """A file system of its own; raises ``PermissionError`` where one must not mount any."""
    folder.mkdir(parents=True, exist_ok=True)
    mount = shutil.which("mount")
    if mount is None or os.geteuid() != 0:
        raise PermissionError("only root mounts")
    done = subprocess.run(
        [mount, "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if done.returncode:
        raise PermissionError(done.stderr.decode(errors="replace"))
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def use_up(folder: Path) -> None:
    """Fill the file system to the last byte."""
    with (folder / "filler").open("ab", buffering=0) as file:
        for size in (1 << 20, 4096, 1):
            with suppress(OSError):
                while True:
                    file.write(bytes(size))
