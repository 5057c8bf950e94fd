"""
Where the lake stands in the log: one seq that counts, and hints where to look for what comes after it.

Every commit to bronze takes the records after one seq up to and including another, over all topics; so the last seq says
all that must be right, and it is stored in the commit itself. The hints say in which segment and at which byte each
stream goes on. They are stored beside the tables, may be old or missing, and only ever save reading: whoever begins at a
hint still leaves out what is not after the seq.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

import msgspec

from tidings.log.segment import encode_line, is_whole

__all__ = ["Hints", "Mark", "load_hints", "replace_atomically", "save_hints"]

_NAME: Final = "positions.json"


class Mark(msgspec.Struct, frozen=True, array_like=True):
    """A place in a stream: all that stands before it was taken."""

    segment: int
    byte_offset: int = 0
    seal_byte_offset: int = 0
    """Where in the stream's seals the line of ``segment`` stands, or will."""


class Hints(msgspec.Struct, frozen=True):
    """A mark for each stream, good for reading on after ``seq`` or after any later one."""

    epoch: str
    seq: int
    streams: dict[str, Mark] = {}


def load_hints(lake: Path, *, epoch: str, seq: int) -> Hints:
    """The stored hints, if they can be used for reading on after ``seq``; otherwise none."""
    none = Hints(epoch, 0)
    try:
        data = (lake / _NAME).read_bytes().removesuffix(b"\n")
    except OSError:
        return none
    if not is_whole(data):
        return none
    try:
        hints = msgspec.json.decode(data, type=Hints)
    except msgspec.DecodeError:
        return none
    return hints if hints.epoch == epoch and hints.seq <= seq else none


def save_hints(lake: Path, hints: Hints) -> None:
    """Store the hints. A crash leaves the old ones or these."""
    replace_atomically(lake / _NAME, encode_line(msgspec.json.encode(hints)[1:]))


def replace_atomically(path: Path, data: bytes) -> None:
    """Give a file new content, on disk when this returns; a crash leaves the old content or the new."""
    fresh = path.with_name(f"{path.name}.new")
    try:
        with fresh.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Return when the names in the folder are on the disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
