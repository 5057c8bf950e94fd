"""
Offset files: where each group stands, ``offsets/<topic>__<group>.json``.

    {"crc":"...","committed":1287,"segment":2,"ts":"...","epoch":"...","islands":[[1290,1301]],"attempts":{"1288":2}}

``committed`` is the low-water mark; ``islands`` are acknowledged ranges beyond it; ``attempts`` counts the deliveries of events
that are not done. A file is replaced as a whole, and the one before it is kept as ``.bak``: whatever a crash does, one of the
two is intact. A file that fails its checksum is passed over for its backup; what was acknowledged since is delivered again.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec

from tidings.core.clock import Clock, format_utc
from tidings.core.names import check_group, check_topic
from tidings.log.embedded.disk import Disk, read_file
from tidings.log.errors import EpochMismatch
from tidings.log.segment import encode_line, is_whole

from .cursor import Cursor
from .errors import CursorDamaged

__all__ = ["GroupPlace", "OffsetStore"]


class _Stored(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    committed: int
    segment: int
    ts: str
    epoch: str = ""
    islands: list[tuple[int, int]] = []
    attempts: dict[str, int] = {}
    paused: bool = False


class GroupPlace(NamedTuple):
    """What is stored of a group."""

    cursor: Cursor
    attempts: dict[int, int]
    paused: bool


class OffsetStore:
    """The offset files of one workspace."""

    def __init__(self, disk: Disk, folder: Path, clock: Clock, epoch: str) -> None:
        self._disk = disk
        self._folder = folder
        self._clock = clock
        self._epoch = epoch

    def path(self, topic: str, group: str) -> Path:
        """The file of one group. Both names are checked: a group cannot reach out of the folder."""
        return self._folder / f"{check_topic(topic)}__{check_group(group)}.json"

    def groups(self) -> list[tuple[str, str]]:
        """Topic and name of every group that has a file (or the backup of one)."""
        names = {name.removesuffix(".bak").removesuffix(".json") for name in self._disk.names(self._folder)}
        split = (name.partition("__") for name in sorted(names) if "__" in name)
        return [(topic, group) for topic, _, group in split]

    def load(self, topic: str, group: str) -> GroupPlace | None:
        """
        Where the group stands; ``None`` if it is new.

        Raises:
            CursorDamaged: There are files, and none of them can be read.
            EpochMismatch: The group counts in another life of the log.
        """
        path = self.path(topic, group)
        found = [data for file in (path, _backup(path)) if (data := read_file(self._disk, file)) is not None]
        if not found:
            return None
        stored = next((place for data in found if (place := _decode(data)) is not None), None)
        if stored is None:
            raise CursorDamaged(str(path), "neither the offset file nor its backup is whole")
        if stored.epoch and stored.epoch != self._epoch:
            raise EpochMismatch(stored.epoch, self._epoch)
        attempts = {int(offset): count for offset, count in stored.attempts.items()}
        return GroupPlace(Cursor(stored.committed, stored.islands), attempts, stored.paused)

    def save(
        self,
        topic: str,
        group: str,
        cursor: Cursor,
        attempts: dict[int, int],
        *,
        segment: int = 1,
        paused: bool = False,
        sync: bool = True,
    ) -> None:
        """Replace the group's file. Without ``sync`` it survives the process, but perhaps not a power cut."""
        path = self.path(topic, group)
        stored = _Stored(
            committed=cursor.committed,
            segment=segment,
            ts=format_utc(self._clock.now_ns()).decode(),
            epoch=self._epoch,
            islands=cursor.ranges,
            attempts={str(offset): count for offset, count in sorted(attempts.items())},
            paused=paused,
        )
        self._disk.make_folder(self._folder)
        fresh = path.with_name(path.name + ".new")
        self._disk.remove(fresh)
        file = self._disk.open(fresh, create=True)
        try:
            file.write(0, encode_line(msgspec.json.encode(stored)[1:]))
            if sync:
                file.sync()
        finally:
            file.close()
        if self._disk.exists(path):
            self._disk.rename(path, _backup(path))
        self._disk.rename(fresh, path)
        if sync:
            self._disk.sync_folder(self._folder)

    def remove(self, topic: str, group: str) -> None:
        """Forget a group."""
        path = self.path(topic, group)
        self._disk.remove(path)
        self._disk.remove(_backup(path))


def _backup(path: Path) -> Path:
    return path.with_name(path.name + ".bak")


def _decode(data: bytes) -> _Stored | None:
    if not data.endswith(b"\n") or not is_whole(data[:-1]):
        return None
    try:
        return msgspec.json.decode(data, type=_Stored)
    except msgspec.DecodeError:
        return None
