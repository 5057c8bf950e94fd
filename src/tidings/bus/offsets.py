"""
Offset files: where each group stands, ``offsets/<topic>__<group>.json``.

    {"crc":"...","committed":1287,"segment":2,"ts":"...","epoch":"...","islands":[[1290,1301]],"attempts":{"1288":2},
     "seal_before":"...","seal":"..."}

``committed`` is the low-water mark; ``islands`` are acknowledged ranges beyond it; ``attempts`` counts the deliveries of events
that are not done. A file is replaced as a whole. The last one that was synced is kept as ``.bak`` until another one is: whatever
a crash does, one of the two is intact. A file that fails its checksum is passed over for its backup; what was acknowledged
since is delivered again.

``seal`` is a digest of the file's content and of the seal before it (``seal_before``), so each save vouches for the one it
replaced. With a key it is an HMAC: whoever edits the file, checksum and all, cannot make the seal fit, and the file is refused.
An older file with its own good seal, put back by hand, is not noticed: that moves the group back, and it sees events again.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from tidings.core.clock import Clock, format_utc
from tidings.core.names import check_topic_and_group
from tidings.log.embedded.disk import Disk, read_file
from tidings.log.errors import EpochMismatch
from tidings.log.segment import encode_line, is_whole

from .cursor import Cursor
from .errors import CursorDamaged

__all__ = ["GroupPlace", "OffsetStore", "group_floors"]

logger = logging.getLogger(__name__)

_SEAL_CHARS: Final = 32


class _Stored(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    committed: int
    segment: int
    ts: str
    epoch: str = ""
    islands: list[tuple[int, int]] = []
    attempts: dict[str, int] = {}
    paused: bool = False
    seal_before: str = ""
    seal: str = ""


class GroupPlace(NamedTuple):
    """What is stored of a group."""

    cursor: Cursor
    attempts: dict[int, int]
    paused: bool


class OffsetStore:
    """
    The offset files of one workspace. Its methods block, and may be called from several threads.

    Args:
        disk, folder, clock: Where the files are, and what time it is.
        epoch: The life of the log that offsets are counted in.
        key: Seals the files against edits; files without a good seal are then refused.
    """

    def __init__(self, disk: Disk, folder: Path, clock: Clock, epoch: str, key: bytes | None = None) -> None:
        self._disk = disk
        self._folder = folder
        self._clock = clock
        self._epoch = epoch
        self._key = key
        self._lock = disk.threads.lock()
        self._is_folder_synced = False
        self._seals: dict[Path, str] = {}
        self._synced: set[Path] = set()
        """Files whose present content is known to be whole and on the disk: fit to become the backup."""

    def path(self, topic: str, group: str) -> Path:
        """The file of one group. Both names are checked: a group cannot reach out of the folder."""
        return self._folder / f"{'__'.join(check_topic_and_group(topic, group))}.json"

    def groups(self) -> list[tuple[str, str]]:
        """Topic and name of every group that has a file (or the backup of one)."""
        names = {name.removesuffix(".bak") for name in self._disk.names(self._folder)}
        stems = sorted(name.removesuffix(".json") for name in names if name.endswith(".json"))
        return [pair for stem in stems if (pair := _split(stem)) is not None]

    def load(self, topic: str, group: str) -> GroupPlace | None:
        """
        Where the group stands; ``None`` if it is new.

        Raises:
            CursorDamaged: There are files, and none of them can be read; or one was edited, and there is a key to tell.
            EpochMismatch: The group counts in another life of the log.
        """
        path = self.path(topic, group)
        with self._lock:
            stored = self._read(path)
            if stored is None:
                return None
            if stored.epoch and stored.epoch != self._epoch:
                raise EpochMismatch(stored.epoch, self._epoch)
            self._seals[path] = stored.seal
        attempts = {int(offset): count for offset, count in stored.attempts.items()}
        return GroupPlace(Cursor(stored.committed, stored.islands), attempts, stored.paused)

    def is_paused(self, topic: str, group: str) -> bool:
        """Whether the group was told to stand still, as far as that can be read: its place itself may be of no use."""
        try:
            with self._lock:
                stored = self._read(self.path(topic, group))
        except CursorDamaged:
            return False
        return stored is not None and stored.paused

    def _read(self, path: Path) -> _Stored | None:
        found = [(file, data) for file in (path, _backup(path)) if (data := read_file(self._disk, file)) is not None]
        for file, data in found:
            stored = _decode(data)
            if stored is None:
                logger.warning("%s is not whole, and is passed over", file)
                continue
            self._check_seal(file, stored)
            return stored
        if found:
            raise CursorDamaged(str(path), "neither the offset file nor its backup is whole")
        return None

    def _check_seal(self, file: Path, stored: _Stored) -> None:
        if hmac.compare_digest(stored.seal, self._seal_of(stored)):
            return
        if self._key is not None:
            problem = "was changed by other hands: its seal does not fit" if stored.seal else "has no seal"
            raise CursorDamaged(str(file), problem)
        # Without a key the seal proves nothing that the checksum does not, and ``log repair`` may set cursors back.
        if stored.seal:
            logger.warning("%s was changed by other hands; its checksum is good, so it is taken as it is", file)

    def _seal_of(self, stored: _Stored) -> str:
        content = msgspec.json.encode(msgspec.structs.replace(stored, seal=""))
        digest = hashlib.sha256(content) if self._key is None else hmac.new(self._key, content, hashlib.sha256)
        return digest.hexdigest()[:_SEAL_CHARS]

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
        with self._lock:
            stored = msgspec.structs.replace(stored, seal_before=self._seals.get(path, ""))
            stored = msgspec.structs.replace(stored, seal=self._seal_of(stored))
            self._replace(path, encode_line(msgspec.json.encode(stored)[1:]), sync=sync)
            self._seals[path] = stored.seal

    def move(self, topic: str, group: str, offset: int, *, segment: int, paused: bool) -> None:
        """Set the place of a group that is not running: ``offset`` is the next it will get."""
        for _ in range(2):  # the backup too: it must not lead back to the place that was left
            self.save(topic, group, Cursor(offset - 1), {}, segment=segment, paused=paused)

    def _replace(self, path: Path, data: bytes, *, sync: bool) -> None:
        self._disk.make_folder(self._folder)
        fresh = path.with_name(path.name + ".new")
        self._disk.remove(fresh)
        file = self._disk.open(fresh, create=True)
        try:
            file.write(0, data)
            if sync:
                file.sync()
        finally:
            file.close()
        # Only a file that was synced may take the backup's name: two unsynced ones in a row would leave nothing that a
        # power cut is sure to spare. And a damaged one must not push out the backup that it was passed over for.
        if path in self._synced:
            self._synced.discard(path)
            self._disk.rename(path, _backup(path))
        self._disk.rename(fresh, path)
        if sync:
            self._disk.sync_folder(self._folder)
            if not self._is_folder_synced:
                self._disk.sync_folder(self._folder.parent)
                self._is_folder_synced = True
            self._synced.add(path)

    def remove(self, topic: str, group: str) -> None:
        """Forget a group."""
        path = self.path(topic, group)
        with self._lock:
            self._synced.discard(path)
            self._seals.pop(path, None)
            self._disk.remove(path)
            self._disk.remove(_backup(path))


class _Committed(msgspec.Struct):
    """What an offset file has to say, at the least."""

    committed: int


def group_floors(disk: Disk, folder: Path) -> dict[str, dict[str, int]]:
    """
    The last acknowledged offset of every group, by topic: what retention must not go beyond.

    A cursor that cannot be read counts as one that has acknowledged nothing, and holds everything.
    """
    floors: dict[str, dict[str, int]] = {}
    for name in disk.names(folder):
        pair = _split(name.removesuffix(".json")) if name.endswith(".json") else None
        if pair is not None:
            try:
                committed = msgspec.json.decode(read_file(disk, folder / name) or b"", type=_Committed).committed
            except msgspec.DecodeError:
                committed = -1
            floors.setdefault(pair[0], {})[pair[1]] = committed
    return floors


def _backup(path: Path) -> Path:
    return path.with_name(path.name + ".bak")


def _split(stem: str) -> tuple[str, str] | None:
    """Topic and group: no name has ``__`` within, or an underscore at its end or beginning."""
    topic, joint, group = stem.partition("__")
    return (topic, group) if joint else None


def _decode(data: bytes) -> _Stored | None:
    if not data.endswith(b"\n") or not is_whole(data[:-1]):
        return None
    try:
        return msgspec.json.decode(data, type=_Stored)
    except msgspec.DecodeError:
        return None
