"""
Cursor files: where each group of a topic is, ``offsets/<topic>__<group>.json``. Everything that reads or writes one does it here.

    {"crc":"...","committed":1287,"segment":2,"ts":"...","epoch":"...","islands":[[1290,1301]],"attempts":{"1288":2},
     "seal_before":"...","seal":"..."}

``committed`` is the low-water mark; ``islands`` are acknowledged ranges beyond it; ``attempts`` counts the deliveries of events
that are not done. A group has two files:

- the file, the newest place; it may be lost in a power cut;
- its backup (``.json.bak``), the newest place that is known to be on the disk.

A place that must survive a power cut is synced, becomes the backup, and is then written to the file too; any other place is
written to the file only. Each is replaced by a rename, so a group that exists has its file at every moment.

One rule says what counts. The file, if it is whole; else the backup, if it is; and if neither is, the group exists and nothing is known
of what it has acknowledged. A group exists from its first file until its last one is removed. ``.new`` is work in progress and counts
for nothing.

The log reads them too, as evidence: nobody can have acknowledged what was never committed. There, file and backup count alike,
because a group may go on from either.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from tidings.core.names import check_topic_and_group

from ..segment import encode_line, is_whole
from .disk import Disk, read_file

_SUFFIX: Final = ".json"
_BACKUP: Final = ".bak"
_NEW: Final = ".new"


class StoredCursor(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The content of a cursor file."""

    committed: int
    segment: int = 0
    ts: str = ""
    epoch: str = ""
    """The life of the log that offsets are counted in; empty if it does not say."""
    ranges: list[tuple[int, int]] = msgspec.field(default_factory=list, name="islands")
    attempts: dict[str, int] = {}
    paused: bool = False
    set_at: str = ""
    """When the position was last set, by creating or moving the group."""
    seal_before: str = ""
    seal: str = ""

    @property
    def highest(self) -> int:
        """The highest offset the group is done with, beyond its low-water mark too."""
        return max([self.committed, *(last for _, last in self.ranges)])


class CursorFile(NamedTuple):
    """One of the two files of a group."""

    path: Path
    topic: str
    data: bytes
    stored: StoredCursor | None
    """``None`` if the file is damaged."""

    def is_ahead(self, end: int, epoch: str | None) -> bool:
        """Whether it proves, in the log's ``epoch``, that its topic went on beyond the offset ``end``."""
        stored = self.stored
        return stored is not None and stored.highest > end and stored.epoch in ("", epoch)


class GroupFiles(NamedTuple):
    """A group that exists: what its files hold. At least one of them is there."""

    topic: str
    group: str
    file: CursorFile | None
    backup: CursorFile | None

    @property
    def found(self) -> list[CursorFile]:
        """The files that are there, the file before its backup."""
        return [each for each in (self.file, self.backup) if each is not None]

    @property
    def current(self) -> CursorFile | None:
        """The one that counts; ``None`` if neither is whole."""
        return next((each for each in self.found if each.stored is not None), None)

    def surely_acknowledged(self, epoch: str) -> int | None:
        """
        The offset up to which the group has acknowledged everything, whatever a power cut does to the file; -1 for nothing.
        ``None`` if that is not known: no file is whole, or one counts in another life of the log.
        """
        whole = [each.stored for each in self.found if each.stored is not None]
        if not whole or any(stored.epoch not in ("", epoch) for stored in whole):
            return None
        return min(stored.committed for stored in whole)


class CursorFiles:
    """
    The cursor files of one workspace. Its methods block; two that write the same group must not run at once.

    Args:
        disk, folder: Where they are.
    """

    def __init__(self, disk: Disk, folder: Path) -> None:
        self._disk = disk
        self._folder = folder
        self._is_folder_synced = False
        self._backed_up: set[Path] = set()
        """Groups whose backup is known to be on the disk, its name too."""

    def path(self, topic: str, group: str) -> Path:
        """The file of one group. Both names are checked: a group cannot reach out of the folder."""
        return self._folder / f"{'__'.join(check_topic_and_group(topic, group))}{_SUFFIX}"

    def groups(self) -> list[tuple[str, str]]:
        """Topic and name of every group that exists."""
        names = {name.removesuffix(_BACKUP) for name in self._disk.names(self._folder)}
        return [pair for name in sorted(names) if (pair := _split(name)) is not None]

    def read(self, topic: str, group: str) -> GroupFiles | None:
        """What is stored of a group; ``None`` if it does not exist."""
        return self._read(self.path(topic, group), topic, group)

    def read_all(self, topic: str | None = None) -> list[GroupFiles]:
        """What is stored of every group, or of those of one topic, by name."""
        found = (
            self._read(self._folder / f"{each}__{group}{_SUFFIX}", each, group)
            for each, group in self.groups()
            if topic in (None, each)
        )
        return [files for files in found if files is not None]

    def _read(self, path: Path, topic: str, group: str) -> GroupFiles | None:
        # The file first. A group that is being created or removed has, for a moment, only one of the two: the backup comes
        # first and goes first, so a reader that misses the file finds the backup, or the group is gone.
        file = self._read_one(path, topic)
        backup = self._read_one(_backup(path), topic)
        return None if file is None and backup is None else GroupFiles(topic, group, file, backup)

    def _read_one(self, path: Path, topic: str) -> CursorFile | None:
        data = read_file(self._disk, path)
        return None if data is None else CursorFile(path, topic, data, _decode(data))

    def replace(self, topic: str, group: str, data: bytes, *, sync: bool) -> None:
        """
        Store a group's place, as ``encode_cursor`` made it.

        With ``sync`` it is on the disk when this returns. Without, it survives the process, but perhaps not a power cut;
        then the group goes on from the last place that was synced.
        """
        path = self.path(topic, group)
        self._disk.make_folder(self._folder)
        if path not in self._backed_up:
            # A power cut keeps names in any order. A file that is not synced may only appear beside a backup that is.
            sync = True
            self._put(_backup(path), data, sync=True)
            self.sync_names()
            self._backed_up.add(path)
        elif sync:
            self._put(_backup(path), data, sync=True)
        self._put(path, data, sync=False)
        if sync:
            self.sync_names()

    def _put(self, path: Path, data: bytes, *, sync: bool) -> None:
        fresh = path.with_name(path.name + _NEW)
        self._disk.remove(fresh)
        file = self._disk.open(fresh, create=True)
        try:
            file.write(0, data)
            if sync:
                file.sync()
        finally:
            file.close()
        self._disk.rename(fresh, path)

    def sync_names(self) -> None:
        """Have the files' names on the disk, and so every backup."""
        if not self._disk.exists(self._folder):
            return
        self._disk.sync_folder(self._folder)
        if not self._is_folder_synced:
            self._disk.sync_folder(self._folder.parent)
            self._is_folder_synced = True

    def remove(self, topic: str, group: str) -> None:
        """
        Remove a group. It exists until this returns, also if a power cut comes in between: the file goes last, and only
        when its backup is gone for good, which could otherwise bring the group back.
        """
        path = self.path(topic, group)
        self._backed_up.discard(path)
        for each in (_backup(path), path):
            self._disk.remove(each.with_name(each.name + _NEW))
            self._disk.remove(each)
            self.sync_names()


def encode_cursor(stored: StoredCursor) -> bytes:
    """The content of a cursor file: like any line of the log it carries its checksum."""
    return encode_line(msgspec.json.encode(stored)[1:])


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


def _backup(path: Path) -> Path:
    return path.with_name(path.name + _BACKUP)


def _split(name: str) -> tuple[str, str] | None:
    """Topic and group in a file's name: neither has ``__`` within, nor an underscore at its beginning or end."""
    topic, joint, group = name.removesuffix(_SUFFIX).partition("__")
    return (topic, group) if joint and topic and group and name.endswith(_SUFFIX) else None


def _decode(data: bytes) -> StoredCursor | None:
    if not data.endswith(b"\n") or not is_whole(data[:-1]):
        return None
    try:
        return msgspec.json.decode(data, type=StoredCursor)
    except ValueError:
        return None
