"""
The commit point: a commit is one frame in one recycled file, and one sync.

    {"crc":"0d3f...","frame":{"first":41,"last":44,"bytes":1630,"durable":40}}
    {"crc":...,"offset":...,"seq":41,...}
    ... the lines of seq 42, 43, 44

A frame counts if its head and every line match their checksums and the lines are exactly those of
``first`` to ``last``. ``durable`` is the highest seq that was known to be on disk when the frame was
written: since a frame is written only after the one before it was synced, a frame proves that its
predecessors were acknowledged. That is how recovery tells a torn tail from a lost record.

Files are filled with zeros ahead, and used again once the segments hold (and have synced) all that is in
them: such a file is synced a third faster than a growing one. What an earlier use left behind is told
from the present by its seqs, which never come twice within one life of the files; and the files do not
outlive a recovery.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ..errors import StorageFull
from ..segment import encode_line
from .disk import Disk, File, fill_with_zeros, is_full
from .reserve import KEPT_FROM_RECORDS, Reserve, ReserveDisk, SegmentRoom, out_of_files, out_of_room
from .sizing import Sizing

_LARGER_HINT: Final = (
    "free some space or drop old segments; the log keeps this room back for a full disk (reserve_bytes, journal_bytes)"
)


class JournalBusy(Exception):
    """Every journal file still holds records that the segments do not have; try again after a checkpoint."""


def encode_frame(lines: Sequence[bytes], *, first: int, last: int, durable: int) -> bytes:
    """The bytes of one commit."""
    body = b"".join(lines)
    head = encode_line(b'"frame":{"first":%d,"last":%d,"bytes":%d,"durable":%d}}' % (first, last, len(body), durable))
    return head + body


class _Slot:
    """One journal file in use."""

    __slots__ = ("file", "last_seq", "path", "position", "size")

    def __init__(self, path: Path, file: File, size: int) -> None:
        self.path = path
        self.file = file
        self.size = size
        self.position = 0
        self.last_seq = 0


class Journal:
    """
    Writes commits. Used by one thread at a time, but for ``checkpointed_seq``, ``prepare_spare``, ``ensure_space`` and ``remove_reusable``. It makes its
    first file when it is told to prepare one, or with the first commit: a log on a full disk is opened without.

    Args:
        folder: Where the files go.
        file_bytes: The size of a file; the first one's, with ``sizing``.
        count_max: At most this many files.
        is_synced: Whether a commit syncs; ``sync`` can be called apart from it if not.
        reserve: Gives space to commits that may use it.
        sizing: How files and reserve grow; left out, they keep their sizes, and there is no reserve.
        room: What was promised to commits, some of which may be spared.
        log_bytes: What the segments hold: files do not get larger than the log.
        inherited: Files of an earlier life, oldest first, with the last seq in each. The segments lack some of their lines.
    """

    def __init__(
        self,
        disk: Disk,
        folder: Path,
        *,
        file_bytes: int,
        count_max: int,
        is_synced: bool,
        reserve: Reserve | None = None,
        sizing: Sizing | None = None,
        room: SegmentRoom | None = None,
        log_bytes: int = 0,
        inherited: Sequence[tuple[Path, int]] = (),
    ) -> None:
        self._disk = disk
        self._reserve = reserve
        self._sizing = sizing
        self._room = room
        self._record_reserve = None if reserve is None else Reserve(disk, reserve.path, keeps=KEPT_FROM_RECORDS)
        self._reserve_disk = disk if self._record_reserve is None else ReserveDisk(disk, self._record_reserve)
        self._folder = folder
        self.file_bytes = file_bytes
        """The size of the next file."""
        self.reserve_bytes = 0 if sizing is None else sizing.reserve_for(file_bytes)
        """The size of a whole reserve."""
        self._count_max = count_max
        self._is_synced = is_synced
        self._inherited = list(inherited)
        used = [int(path.stem) for path, _ in inherited if path.stem.isdigit()]
        self._numbers = itertools.count(max(used, default=-1) + 1)  # next() on it is atomic: two threads make files
        self._spare: _Slot | None = None
        self._full: list[_Slot] = []
        self._choosing = disk.threads.lock()
        self._active: _Slot | None = None
        self._kept_size_in: _Slot | None = None
        """The file in whose time there was no room to grow."""
        self.checkpointed_seq = 0
        """Up to here the segments are on disk, so a file without later seqs may be used again."""
        self.synced_seq = 0
        """Up to here the journal is on disk."""
        self._written_seq = 0
        self._held_bytes = log_bytes

    @property
    def is_tight(self) -> bool:
        """Whether a checkpoint would be welcome soon: the spare files are going out."""
        return len(self._full) >= max(1, self._count_max - 2) or bool(self._inherited)

    @property
    def wants_spare(self) -> bool:
        """Whether there is no active file, or it is half full, and nothing of the right size is ready to follow it."""
        active = self._active
        return (
            self._spare is None
            and (active is None or active.position * 2 > active.size)
            and len(self._full) + 1 < self._count_max
            and (self._is_growing or not self._has_reusable())
        )

    @property
    def _is_growing(self) -> bool:
        """Whether the active file is half full, and the next one is to be larger."""
        active, sizing = self._active, self._sizing
        return (
            sizing is not None
            and active is not None
            and active.size >= self.file_bytes
            and active.position * 2 > active.size
            and self._held_bytes >= sizing.grown(self.file_bytes)
            and active is not self._kept_size_in
            and self.file_bytes < sizing.file_bytes_max
        )

    def _has_reusable(self) -> bool:
        return any(slot.last_seq <= self.checkpointed_seq for slot in self._full)

    def prepare_spare(self) -> None:
        """
        Make the next file ahead of need.

        Raises:
            StorageFull: There is no room for it.
        """
        if self._spare is None:
            self._spare = self._make(self.file_bytes)

    def ensure_space(self, *, needs_spare: bool) -> StorageFull | None:
        """
        Make what must be there before events are accepted: the whole reserve and, with ``needs_spare``, a file ready for what comes
        next. Files and reserve grow here.

        Returns:
            What there is no space for; ``None`` if all is there.
        """
        self._remove_inherited()
        reserve = self._reserve
        if reserve is not None:
            self._grow()
            while not reserve.make_whole(self.reserve_bytes):
                if not (self._give_back() or self.remove_reusable()):
                    missing = self.reserve_bytes - reserve.left_bytes
                    return out_of_room(self._disk, reserve.path, "the reserve", missing, _LARGER_HINT)
            free_files = self._disk.space(self._folder).free_files
            if free_files is not None and free_files < 1:
                return out_of_files(self._folder, free_files)
        if needs_spare and not (self._full and self._has_reusable()):
            try:
                self.prepare_spare()
            except StorageFull as error:
                return error
        return None

    def _give_back(self) -> bool:
        return self._room is not None and self._room.give_back(is_tight=True)

    def _grow(self) -> None:
        """Have the reserve follow the size of the files, and the files grow, if there is plenty of room for both."""
        sizing, reserve, size = self._sizing, self._reserve, self.file_bytes
        if sizing is None or reserve is None:
            return
        if self._is_growing:
            size = sizing.grown(size)
        reserve_bytes = sizing.reserve_for(size)
        if size == self.file_bytes and reserve_bytes <= self.reserve_bytes:
            return
        if not sizing.may_grow(size, self._disk.space(self._folder)) or not reserve.make_whole(reserve_bytes):
            self._kept_size_in = self._active
            self.file_bytes = sizing.file_beside(self.reserve_bytes, self.file_bytes)
            return
        self.file_bytes, self.reserve_bytes = size, reserve_bytes
        with self._choosing:
            for slot in [each for each in self._full if each.last_seq <= self.checkpointed_seq and each.size < size]:
                self._full.remove(slot)
                self._discard(slot)

    def remove_reusable(self) -> bool:
        """Remove the files that wait to be used again, for the room that they take; whether there were any."""
        with self._choosing:
            reusable = [slot for slot in self._full if slot.last_seq <= self.checkpointed_seq]
            for slot in reusable:
                self._full.remove(slot)
                self._discard(slot)
        return bool(reusable)

    def _remove_inherited(self) -> None:
        """Remove the files of an earlier life that the segments cover now."""
        done = [path for path, last_seq in self._inherited if last_seq <= self.checkpointed_seq]
        for path in done:
            self._disk.remove(path)
        if done:
            self._inherited = self._inherited[len(done) :]
            self._disk.sync_folder(self._folder)

    def commit(self, lines: Sequence[bytes], first: int, last: int, *, from_reserve: bool = False) -> None:
        """
        Write the lines of ``first`` to ``last`` as one frame, and sync it. With ``from_reserve`` a file for it may be made with
        room from the reserve, for as long as enough is left to move it to the segments.

        Raises:
            StorageFull: Nothing was written.
            JournalBusy: Nothing was written; a checkpoint must come first.
            OSError: Whatever was written is unknown; nobody may write to this journal again.
        """
        if from_reserve and self._record_reserve is not None and self._record_reserve.is_used_up():
            raise StorageFull(str(self._record_reserve.path))
        frame = encode_frame(lines, first=first, last=last, durable=self.synced_seq)
        slot = self._active
        if slot is None or slot.position + len(frame) > slot.size:
            slot = self._switch_to(len(frame), from_reserve=from_reserve)
        try:
            slot.file.write(slot.position, frame)
        except OSError as error:
            if not is_full(error):
                raise
            # Part of the frame may be there, even all of it. Its seqs will be given out anew, so its head
            # must be gone for certain before anybody is told that nothing was stored.
            slot.file.write(slot.position, bytes(min(len(frame), slot.size - slot.position, 256)))
            slot.file.sync()
            raise StorageFull(str(slot.path)) from error
        slot.position += len(frame)
        self._held_bytes += len(frame)
        slot.last_seq = self._written_seq = last
        if self._is_synced:
            self.sync()

    def sync(self) -> None:
        """Sync what was committed; the active file holds all that is unsynced."""
        if self._active is not None:
            self._active.file.sync()
        self.synced_seq = self._written_seq

    def _switch_to(self, size: int, *, from_reserve: bool) -> _Slot:
        """Make a file with room for ``size`` bytes the active one."""
        if self.synced_seq < self._written_seq:
            self.sync()
        with self._choosing:
            fresh = self._choose(size, from_reserve=from_reserve)
            if self._active is not None:
                self._full.append(self._active)
            self._active = fresh
        return fresh

    def _choose(self, size: int, *, from_reserve: bool) -> _Slot:
        usable = [slot for slot in self._full if slot.last_seq <= self.checkpointed_seq]
        if self._spare is not None and self._spare.size >= size:
            fresh, self._spare = self._spare, None
        elif fitting := [slot for slot in usable if slot.size >= size]:
            fresh = fitting[0]
            self._full.remove(fresh)
            fresh.position = 0
        elif from_reserve:
            fresh = self._make(size, self._reserve_disk)
        elif len(self._full) + 1 < self._count_max or usable:
            for slot in usable[:1]:  # too small for this frame: make room in the count
                self._full.remove(slot)
                self._discard(slot)
            fresh = self._make(self._size_for(size))
        else:
            raise JournalBusy
        return fresh

    def _size_for(self, size: int) -> int:
        """The size of a file for a frame of ``size`` bytes: the next files are larger too if frames are so large."""
        sizing = self._sizing
        while sizing is not None and self.file_bytes < min(2 * size, sizing.file_bytes_max):
            grown = sizing.grown(self.file_bytes)
            if not sizing.may_grow(grown, self._disk.space(self._folder)):
                break
            self.file_bytes = grown
        return max(size, self.file_bytes)

    def _make(self, size: int, disk: Disk | None = None) -> _Slot:
        path = self._folder / f"{next(self._numbers):08d}.jsonl"
        try:
            file = (disk or self._disk).open(path, create=True)
            try:
                fill_with_zeros(file, size)
            except OSError:
                file.close()
                self._disk.remove(path)
                raise
            self._disk.sync_folder(self._folder)
        except OSError as error:
            if is_full(error):
                raise out_of_room(self._disk, path, "the journal's next file", size, _LARGER_HINT) from error
            raise
        return _Slot(path, file, size)

    def _discard(self, slot: _Slot) -> None:
        slot.file.close()
        self._disk.remove(slot.path)

    def close(self) -> None:
        """Close the files and leave them for recovery."""
        for slot in self._slots():
            slot.file.close()

    def remove(self, log_bytes: int = 0) -> None:
        """Close and remove the files, and leave the reserve of a closed log of that size: the segments hold everything."""
        self._remove_inherited()
        for slot in self._slots():
            self._discard(slot)
        self._disk.sync_folder(self._folder)
        if self._room is not None:
            self._room.remove()
        if self._sizing is not None and self._reserve is not None:
            space = self._disk.space(self._folder)
            self._reserve.make_whole(self._sizing.closed_reserve(self.reserve_bytes, log_bytes, space))

    def _slots(self) -> list[_Slot]:
        return [*self._full, *(slot for slot in (self._active, self._spare) if slot is not None)]
