"""
The position of each group, in its cursor files (``log/embedded/cursors.py`` says what they are and which of them counts).

What is added here is the seal: a digest of the file's content and of the seal before it (``seal_before``), so the files of a group
form a chain. With a key it is an HMAC: whoever edits the file, checksum and all, cannot make the seal match, and the file is
refused. The seal covers topic and group too, so the file of another group is refused. Files of earlier versions, whose seal covers the
content only, are accepted until the group is first stored: afterwards only as the backup that the new file names as the one before it. An older file with its own good seal, put back by hand, is not noticed: that moves the group back, and its events are
delivered again.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
from pathlib import Path
from typing import Final

import msgspec

from tidings.core.clock import Clock, format_utc
from tidings.log.embedded.cursors import CursorFile, CursorFiles, GroupFiles, StoredCursor, encode_cursor
from tidings.log.embedded.disk import Disk
from tidings.log.errors import EpochMismatch

from ..errors import CursorDamaged
from .interface import Cursor, GroupPosition

logger = logging.getLogger(__name__)

_SEAL_CHARS: Final = 32


class OffsetFiles:
    """
    The positions of one workspace's groups. Its methods block, and may be called from several threads.

    Args:
        disk, folder, clock: Where the files are, and what time it is.
        epoch: The life of the log that offsets are counted in.
        key: Seals the files against edits; files without a good seal are then refused.
    """

    def __init__(self, disk: Disk, folder: Path, clock: Clock, epoch: str, key: bytes | None = None) -> None:
        self._files = CursorFiles(disk, folder)
        self._clock = clock
        self._epoch = epoch
        self._key = key
        self._lock = disk.threads.lock()
        self._seals: dict[tuple[str, str], str] = {}

    def groups(self) -> list[tuple[str, str]]:
        """Topic and name of every group that exists."""
        return self._files.groups()

    def load(self, topic: str, group: str) -> GroupPosition | None:
        """
        The position of a group; ``None`` if it is new.

        Raises:
            CursorDamaged: There are files, and none of them can be read; or one was edited, and there is a key to tell.
            EpochMismatch: The group counts in another life of the log.
        """
        with self._lock:
            stored = self._read(topic, group)
            if stored is None:
                return None
            if stored.epoch and stored.epoch != self._epoch:
                raise EpochMismatch(stored.epoch, self._epoch)
            self._seals[topic, group] = stored.seal
        attempts = {int(offset): count for offset, count in stored.attempts.items()}
        return GroupPosition(Cursor(stored.committed, stored.ranges), attempts, stored.paused, stored.set_at)

    def is_paused(self, topic: str, group: str) -> bool:
        """Whether the group was stored as paused, as far as that can be read: its position itself may be of no use."""
        try:
            with self._lock:
                stored = self._read(topic, group)
        except CursorDamaged:
            return False
        return stored is not None and stored.paused

    def acknowledged(self, topic: str | None = None) -> dict[str, dict[str, int | None]]:
        """
        Up to which offset each group has acknowledged everything, by topic and group (or of one topic): what stays true
        whatever a power cut does. -1 for nothing, ``None`` where that cannot be known.
        """
        found: dict[str, dict[str, int | None]] = {}
        for files in self._files.read_all(topic):
            committed = files.surely_acknowledged(self._epoch)
            if self._key is not None and any(each.stored and not self._is_sealed(files, each) for each in files.found):
                committed = None  # changed by other hands
            found.setdefault(files.topic, {})[files.group] = committed
        return found

    def sync_names(self) -> None:
        """Have what ``acknowledged`` goes by on the disk for good."""
        self._files.sync_names()

    def _read(self, topic: str, group: str) -> StoredCursor | None:
        files = self._files.read(topic, group)
        if files is None:
            return None
        for each in files.found:
            if each.stored is None:
                logger.warning("%s is not whole, and is skipped", each.path)
        current = files.current
        if current is None or current.stored is None:
            path = self._files.path(topic, group)
            raise CursorDamaged(str(path), "neither the offset file nor its backup is whole")
        self._check_seal(files, current, current.stored)
        return current.stored

    def _check_seal(self, files: GroupFiles, file: CursorFile, stored: StoredCursor) -> None:
        if self._is_sealed(files, file):
            return
        if self._key is not None:
            problem = "was changed by other hands: its seal does not match" if stored.seal else "has no seal"
            raise CursorDamaged(str(file.path), problem)
        # Without a key the seal proves nothing that the checksum does not, and ``log repair`` may set cursors back.
        if stored.seal:
            logger.warning("%s was changed by other hands; its checksum is good, so it is taken as it is", file.path)

    def _is_sealed(self, files: GroupFiles, file: CursorFile) -> bool:
        """Return whether a file has a good seal of its group; or one of an earlier version, where no newer file speaks against it."""
        stored = file.stored
        if stored is None:
            return False
        if self._is_bound(files, stored):
            return True
        bound = [each.stored for each in files.found if each.stored is not None and self._is_bound(files, each.stored)]
        is_accepted = not bound or any(each.seal_before == stored.seal for each in bound)
        return is_accepted and hmac.compare_digest(stored.seal, self._seal_of(stored))

    def _is_bound(self, files: GroupFiles, stored: StoredCursor) -> bool:
        return hmac.compare_digest(stored.seal, self._seal_of(stored, files.topic, files.group))

    def _seal_of(self, stored: StoredCursor, *group: str) -> str:
        """Return the seal of a file's content, bound to topic and group; without them that of earlier versions."""
        content = msgspec.json.encode(msgspec.structs.replace(stored, seal=""))
        if group:
            content += msgspec.json.encode(group)
        digest = hashlib.sha256(content) if self._key is None else hmac.new(self._key, content, hashlib.sha256)
        return digest.hexdigest()[:_SEAL_CHARS]

    def save(self, topic: str, group: str, position: GroupPosition, *, segment: int = 1, sync: bool = True) -> None:
        """Store the position of a group. Without ``sync`` it survives the process, but perhaps not a power cut."""
        stored = StoredCursor(
            committed=position.cursor.committed,
            segment=segment,
            ts=format_utc(self._clock.now_ns()).decode(),
            epoch=self._epoch,
            ranges=position.cursor.ranges,
            attempts={str(offset): count for offset, count in sorted(position.attempts.items())},
            paused=position.paused,
            set_at=position.set_at,
        )
        with self._lock:
            stored = msgspec.structs.replace(stored, seal_before=self._seals.get((topic, group), ""))
            stored = msgspec.structs.replace(stored, seal=self._seal_of(stored, topic, group))
            self._files.replace(topic, group, encode_cursor(stored), sync=sync)
            self._seals[topic, group] = stored.seal

    def remove(self, topic: str, group: str) -> None:
        """Forget a group."""
        with self._lock:
            self._files.remove(topic, group)
            self._seals.pop((topic, group), None)
