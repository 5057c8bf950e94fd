"""
Group cursors as evidence: what the files in ``offsets/`` say was acknowledged.

The bus writes them, a checked line each, and keeps the one before as ``.bak``. The log only reads them: nobody can
have acknowledged what was never committed. File and backup count alike, because a group may go on from either. One
that is damaged, or that counts in another life of the log, proves nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from ..segment import encode_line, is_whole
from .disk import Disk, read_file
from .layout import Layout

__all__ = ["CursorFile", "read_cursors", "set_back"]

_BACKUP: Final = ".bak"


class _Stored(msgspec.Struct, frozen=True):
    committed: int
    epoch: str = ""
    islands: tuple[tuple[int, int], ...] = ()


class CursorFile(NamedTuple):
    """One file of a group, the cursor itself or its backup."""

    path: Path
    topic: str
    data: bytes
    acknowledged: int | None
    """The highest offset the group is done with, islands beyond its low-water mark too; ``None`` if damaged."""
    epoch: str
    """The life of the log that it counts in; empty if it does not say."""

    @property
    def twin(self) -> Path:
        """The other file of the pair."""
        name = self.path.name
        other = name.removesuffix(_BACKUP) if name.endswith(_BACKUP) else name + _BACKUP
        return self.path.with_name(other)

    def is_ahead(self, end: int, epoch: str | None) -> bool:
        """Whether it proves, in the log's ``epoch``, that its topic went on beyond the offset ``end``."""
        return self.acknowledged is not None and self.acknowledged > end and self.epoch in ("", epoch)


def read_cursors(disk: Disk, layout: Layout) -> list[CursorFile]:
    """The groups' files, by name."""
    found: list[CursorFile] = []
    for name in disk.names(layout.offsets):
        stem = name.removesuffix(_BACKUP)
        if stem.endswith(".json") and "__" in stem:
            data = read_file(disk, layout.offsets / name)
            if data is not None:  # else its group replaced it a moment ago
                found.append(_read(layout.offsets / name, _topic_in(stem), data))
    return found


def _read(path: Path, topic: str, data: bytes) -> CursorFile:
    try:
        stored = msgspec.json.decode(data, type=_Stored) if data.endswith(b"\n") and is_whole(data[:-1]) else None
    except ValueError:
        stored = None
    if stored is None:
        return CursorFile(path, topic, data, None, "")
    acknowledged = max([stored.committed, *(last for _, last in stored.islands)])
    return CursorFile(path, topic, data, acknowledged, stored.epoch)


def _topic_in(name: str) -> str:
    """The topic in ``<topic>__<group>.json``: names have no ``__`` within, but a topic may begin with underscores."""
    start = len(name) - len(name.lstrip("_"))
    return name[:start] + name[start:].partition("__")[0]


def set_back(cursor: CursorFile, end: int, segment: int) -> bytes:
    """
    What the cursor's file says when its topic ends at the offset ``end``, in segment ``segment``.

    Whatever it noted about later offsets goes: those are given to other records now. All else stays, the epoch too.
    """
    content: dict[str, Any] = msgspec.json.decode(cursor.data)
    del content["crc"]
    if content["committed"] > end:
        content["committed"] = end
        if "segment" in content:
            content["segment"] = segment
    if "islands" in content:
        content["islands"] = [[first, min(last, end)] for first, last in content["islands"] if first <= end]
    if "attempts" in content:
        content["attempts"] = {offset: count for offset, count in content["attempts"].items() if int(offset) <= end}
    return encode_line(msgspec.json.encode(content)[1:])
