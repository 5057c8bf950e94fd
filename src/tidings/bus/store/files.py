"""
The store beside an embedded log: offsets, dead letters and claims as files of its workspace.

Blocking work is done in threads, as the disk says. Progress can be stored when the disk is full, with room from the workspace's reserve.
"""

from __future__ import annotations

import functools
import mmap
import os
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, TypeVar

from tidings.core.clock import SYSTEM_CLOCK, Clock
from tidings.log.embedded import open_log
from tidings.log.embedded.disk import Disk, OsDisk, is_full
from tidings.log.embedded.index import Index
from tidings.log.embedded.layout import Layout
from tidings.log.embedded.reserve import KEPT_FROM_LETTERS, Reserve, ReserveDisk, out_of_files
from tidings.log.encryption import Encryptor
from tidings.log.errors import StorageFull
from tidings.log.interface import Log
from tidings.log.record import Record
from tidings.log.retention import Needs
from tidings.log.settings import LogSettings

from .dead_letter_files import DeadLetterFiles
from .dead_letters import Attempt, DeadLetter, DeadLetterFilter, DeadLetterState, Reason
from .interface import Claims, GroupPosition, GroupStore
from .offset_files import OffsetFiles

_T = TypeVar("_T")
_SLOT: Final = struct.Struct("<qI")
"""Offset (-1 when the worker is idle) and attempt."""
_SLOT_BYTES: Final = 16
_IDLE: Final = _SLOT.pack(-1, 0)


async def open_files(
    workspace: Path | str,
    settings: LogSettings | None = None,
    *,
    log: Log | None = None,
    clock: Clock = SYSTEM_CLOCK,
    disk: Disk | None = None,
    encryptor: Encryptor | None = None,
    offsets_key: bytes | None = None,
    index: Index | None = None,
    claims: Callable[[str, str], Claims] | None = None,
) -> tuple[Log, GroupStore]:
    """Open the embedded log of a workspace (or use ``log``), and the store in its files. Raises as ``open_log`` does."""
    if log is None:
        log = await open_log(workspace, settings, clock=clock, disk=disk, encryptor=encryptor, index=index)
    return log, FileGroupStore(
        workspace, log, clock=clock, disk=disk, encryptor=encryptor, offsets_key=offsets_key, claims=claims
    )


class StoreFull(StorageFull, OSError):
    """There is no room to store a position or a dead letter. It is an ``OSError`` too: what can wait is stored later."""

    code = "bus.store_full"

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (
            self.path,
            self.problem,
            self.hint,
        )  # ``OSError`` keeps its arguments only if it is called with them


class FileGroupStore(GroupStore):
    """
    The group store of one workspace.

    Args:
        workspace: Where the files are.
        log: The log that offsets are counted in. Without one, only dead letters can be used.
        clock, disk: Replaceable for tests.
        encryptor: Seals the errors of dead letters of encrypted spaces.
        offsets_key: Seals the offset files, so that an edit by other hands is noticed.
        claims: Makes the claims of a group, by topic and name, instead of those in files.
    """

    def __init__(
        self,
        workspace: Path | str,
        log: Log | None = None,
        *,
        clock: Clock = SYSTEM_CLOCK,
        disk: Disk | None = None,
        encryptor: Encryptor | None = None,
        offsets_key: bytes | None = None,
        claims: Callable[[str, str], Claims] | None = None,
    ) -> None:
        super().__init__()
        self._layout = layout = Layout(workspace)
        self._disk = disk = disk or OsDisk()
        self._log = log
        self._make_claims = claims
        self._reserve = Reserve(disk, layout.reserve)
        progress_disk = ReserveDisk(disk, self._reserve)
        letter_disk = ReserveDisk(disk, Reserve(disk, layout.reserve, keeps=KEPT_FROM_LETTERS))
        epoch = "" if log is None else log.position.epoch
        self._offsets = OffsetFiles(progress_disk, layout.offsets, clock, epoch, offsets_key)
        self._dead_letters = DeadLetterFiles(progress_disk, layout.dlq, clock, encryptor, letter_disk=letter_disk)

    async def _run(self, job: Callable[..., _T], *args: object) -> _T:
        try:
            return await self._disk.threads.run(functools.partial(job, *args))
        except OSError as error:
            if not is_full(error):
                raise
            raise self._full(error) from error

    def _full(self, error: OSError) -> StoreFull:
        space, path = self._disk.space(self._layout.root), error.filename or str(self._layout.root)
        if space.free_files == 0:
            cause = out_of_files(self._layout.root, 0)
            full = StoreFull(str(path), cause.problem, cause.hint)
        else:
            full = StoreFull(str(path), f"{space.free_bytes:,} bytes are free, and the reserve is used up")
        full.errno = error.errno
        return full

    async def groups(self, topic: str | None = None) -> list[tuple[str, str]]:
        return [key for key in await self._run(self._offsets.groups) if topic in (None, key[0])]

    async def load(self, topic: str, group: str) -> GroupPosition | None:
        return await self._run(self._offsets.load, topic, group)

    async def is_paused(self, topic: str, group: str) -> bool:
        return await self._run(self._offsets.is_paused, topic, group)

    async def save(self, topic: str, group: str, position: GroupPosition, *, sync: bool = True) -> None:
        segment = self._segment_at(topic, position.cursor.committed + 1)
        await self._run(functools.partial(self._offsets.save, topic, group, position, segment=segment, sync=sync))

    def _segment_at(self, topic: str, offset: int) -> int:
        """The number of the segment that an offset is in, or will be."""
        assert self._log is not None, "offsets are counted in a log"
        info = self._log.topic(topic)
        segments = info.segments if info is not None else ()
        return next((segment.number for segment in reversed(segments) if segment.first_offset <= offset), 1)

    async def remove(self, topic: str, group: str) -> None:
        def job() -> None:
            # Claims first: what a crash left in them must not be counted against a new group of the same name.
            self._disk.remove(claims_file(self._layout.claims, topic, group))
            self._offsets.remove(topic, group)

        await self._run(job)

    def claims(self, topic: str, group: str) -> Claims:
        if self._make_claims is not None:
            return self._make_claims(topic, group)
        return FileClaims(claims_file(self._layout.claims, topic, group), self._reserve)

    async def left_over(self, claims: Claims) -> dict[int, int]:
        return await self._run(claims.left_over)

    async def add_dead_letter(
        self, record: Record, group: str, error: BaseException, attempts: list[Attempt], reason: Reason
    ) -> DeadLetter:
        return await self._run(self._dead_letters.add, record, group, error, attempts, reason)

    async def dead_letters(
        self, topic: str, ids: Sequence[str] | None = None, wanted: DeadLetterFilter | None = None
    ) -> list[DeadLetter]:
        return await self._run(self._dead_letters.find, topic, ids, wanted)

    async def dead_letter_topics(self) -> list[str]:
        return await self._run(self._dead_letters.topics)

    async def dead_letter_state(self, topic: str, letter_id: str) -> DeadLetterState | None:
        return await self._run(self._dead_letters.state, topic, letter_id)

    async def request_redrive(self, topic: str, ids: Sequence[str]) -> list[DeadLetter]:
        return await self._run(self._dead_letters.request, topic, ids)

    async def begin_redrive(self, topic: str, letter_id: str) -> None:
        await self._run(self._dead_letters.begin, topic, letter_id)

    async def finish_redrive(self, topic: str, letter_id: str, error: BaseException | None = None) -> None:
        await self._run(self._dead_letters.finish, topic, letter_id, error)

    async def drop_dead_letters(self, topic: str, ids: Sequence[str]) -> None:
        await self._run(self._dead_letters.drop, topic, ids)

    async def needs(self, topic: str | None = None) -> Needs:
        def job() -> Needs:
            # Groups before dead letters. A dead letter is on the disk before its group moves past the event; the other way
            # round, one that is written between the two reads would be missed, and its group already be past the event.
            groups = self._offsets.acknowledged(topic)
            topics = self._dead_letters.topics() if topic is None else [topic]
            needs = Needs(groups, {each: self._dead_letters.needed(each) for each in topics})
            if topic is not None:
                self._offsets.sync_names()  # a power cut must not move groups back behind what is dropped because of this
            return needs

        return await self._run(job)


def claims_file(folder: Path, topic: str, group: str) -> Path:
    """The claims file of a group."""
    return folder / f"{topic}__{group}.slots"


class FileClaims:
    """
    Claims in a small file that is mapped into memory.

    Writing a slot is a store to memory, no system call; the page belongs to the kernel, so it outlives the process. A power cut may
    lose it: then nothing was counted for the events in it, and they are tried again.

    Args:
        path: Where.
        reserve: Gives room for it where the disk is full.
    """

    def __init__(self, path: Path, reserve: Reserve | None = None) -> None:
        self._path = path
        self._reserve = reserve
        self._map: mmap.mmap | None = None
        self._pack = _SLOT.pack_into

    def begin(self, slots: int) -> None:
        if self._reserve is None:
            self._make(slots)
        else:
            self._reserve.run(lambda: self._make(slots), slots * _SLOT_BYTES)

    def _make(self, slots: int) -> None:
        self._path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
        try:
            # Written out, not truncated to size: a hole in a full file system would kill us at the first store.
            data = _IDLE.ljust(_SLOT_BYTES, b"\0") * slots
            done = 0
            while done < len(data):
                done += os.pwrite(fd, data[done:], done)
            os.ftruncate(fd, slots * _SLOT_BYTES)
            self._map = mmap.mmap(fd, slots * _SLOT_BYTES)
        finally:
            os.close(fd)

    def take(self, slot: int, offset: int, attempt: int) -> None:
        assert self._map is not None
        self._pack(self._map, slot * _SLOT_BYTES, offset, attempt)

    def taker(self, slot: int) -> Callable[[int, int], object]:
        assert self._map is not None
        return functools.partial(self._pack, self._map, slot * _SLOT_BYTES)

    def clear(self, slot: int) -> None:
        assert self._map is not None
        self._pack(self._map, slot * _SLOT_BYTES, -1, 0)

    def left_over(self) -> dict[int, int]:
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return {}
        slots = (_SLOT.unpack_from(data, at) for at in range(0, len(data) - _SLOT.size + 1, _SLOT_BYTES))
        return {offset: attempt for offset, attempt in slots if offset >= 0 and attempt > 0}

    def close(self) -> None:
        if self._map is not None:
            self._map.close()
            self._map = None
