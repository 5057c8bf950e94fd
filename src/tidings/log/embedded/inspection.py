"""
The small files of a log, read as far as they can be: meta, checkpoint, seals, husks.

Opening a log stops at the first thing that is wrong. Verify and repair must go on: here damage is an answer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from ..errors import WorkspaceError
from ..segment import Flaw, decode, is_whole
from .checkpoint import CHAIN_START, Checkpoint, Seal, chained
from .disk import Disk, read_file, size_of
from .layout import Layout, StreamKey, WorkspaceMeta

__all__ = [
    "SealBook",
    "SealFlaw",
    "digest_of",
    "husk_flaws",
    "read_checkpoint",
    "read_meta",
    "read_seals",
    "segment_sizes",
]

_BLOCK_BYTES: Final = 1 << 20


class SealFlaw(NamedTuple):
    """A line of the seals that does not hold."""

    byte_offset: int
    code: str
    message: str


class SealBook:
    """A stream's seals, as far as they can be read."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.seals: dict[int, Seal] = {}
        self.dropped: set[int] = set()
        self.flaws: list[SealFlaw] = []
        self.torn_at: int | None = None
        """Where the last line was torn by a crash: harmless, the segment is sealed again."""
        self.head = CHAIN_START
        at = 0
        while at < len(data):
            line_end = data.find(b"\n", at)
            line = data[at : len(data) if line_end < 0 else line_end]
            is_last = line_end in (-1, len(data) - 1)
            if line_end < 0 or not is_whole(line):
                if is_last:
                    self.torn_at = at
                else:
                    self.flaws.append(SealFlaw(at, "seal.checksum", "a seal's checksum does not match"))
            else:
                self._take(at, line)
            at = len(data) if line_end < 0 else line_end + 1

    def _take(self, at: int, line: bytes) -> None:
        try:
            content = msgspec.json.decode(line, type=dict[str, Any])
            if "dropped" in content:
                self.dropped.add(int(content["dropped"]))
                return
            seal = msgspec.convert(content, Seal)
        except (ValueError, TypeError) as error:
            self.flaws.append(SealFlaw(at, "seal.format", f"a line passes its checksum but is no seal: {error}"))
            return
        if seal.segment in self.seals or seal.segment < max(self.seals, default=0):
            self.flaws.append(SealFlaw(at, "seal.order", f"segment {seal.segment} is sealed again, or too late"))
            return
        if seal.chain != chained(self.head, seal.sha256):
            message = f"the chain of digests breaks at segment {seal.segment}"
            self.flaws.append(SealFlaw(at, "seal.chain", message))
        self.head = seal.chain  # as recorded, so that one break is told once
        self.seals[seal.segment] = seal

    @property
    def last(self) -> int:
        """The number of the last sealed segment."""
        return max(self.seals, default=0)


def read_seals(disk: Disk, layout: Layout, key: StreamKey) -> SealBook:
    """A stream's seals, as far as they can be read."""
    return SealBook(read_file(disk, layout.seal_file(key)) or b"")


def read_checkpoint(disk: Disk, layout: Layout) -> tuple[bytes | None, Checkpoint | None]:
    """The checkpoint's bytes, and what they say if they are whole."""
    data = read_file(disk, layout.checkpoint)
    if data is None or not data.endswith(b"\n") or not is_whole(data[:-1]):
        return data, None
    try:
        return data, msgspec.json.decode(data, type=Checkpoint)
    except ValueError:
        return data, None


def read_meta(disk: Disk, layout: Layout) -> WorkspaceMeta | str:
    """
    The workspace's description, or what is wrong with it.

    Raises:
        WorkspaceMissing, WorkspaceUnusable, UnsupportedFormat
    """
    try:
        return layout.read_meta(disk)
    except WorkspaceError as error:
        if type(error) is not WorkspaceError:
            raise
        return error.problem


def segment_sizes(disk: Disk, layout: Layout) -> dict[StreamKey, dict[int, int]]:
    """How long each segment is, by stream and number."""
    sizes: dict[StreamKey, dict[int, int]] = {}
    for key, numbers in layout.segments(disk).items():
        for number in numbers:
            size = size_of(disk, layout.segment(key, number))
            if size is not None:
                sizes.setdefault(key, {})[number] = size
    return sizes


def husk_flaws(data: bytes, key: StreamKey) -> Iterator[tuple[int, bytes, str | None]]:
    """Each line of a husk file: where it is, its bytes, and what is wrong with it."""
    at, seq = 0, 0
    for line in data.splitlines(keepends=True):
        husk = decode(line.rstrip(b"\n"))
        if not line.endswith(b"\n"):
            yield at, line, Flaw.UNFINISHED
        elif isinstance(husk, Flaw):
            yield at, line, husk
        elif husk.topic != key.topic or husk.seq <= seq:
            yield at, line, Flaw.ORDER
        else:
            seq = husk.seq
            yield at, line, None
        at += len(line)


def digest_of(disk: Disk, path: Path, byte_offset: int, size: int) -> str:
    """The SHA-256 of a part of a file."""
    digest = hashlib.sha256()
    file = disk.open(path)
    try:
        for at in range(byte_offset, byte_offset + size, _BLOCK_BYTES):
            digest.update(file.read(at, min(_BLOCK_BYTES, byte_offset + size - at)))
    finally:
        file.close()
    return digest.hexdigest()
