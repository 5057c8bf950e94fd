"""
A disk in memory that lies as real ones do: the twin of ``OsDisk`` for tests of crashes and faults.

What is read is what was last written, until the power goes. Then the disk holds what was synced and, of
the rest, whatever the chosen ``CrashMode`` and the seed make of it:

- A file's writes are pending until its ``sync``. Of a pending write any 512-byte sectors may survive,
  whole, torn or not at all, later ones without earlier ones; a file may also have grown without its data
  having arrived, and then reads as zeros there. Bytes that were synced and not written again stay.
- A name (created, renamed, removed, a folder's) is pending until its folder's ``sync_folder``, whatever
  became of the file's data: a synced file without a synced name is gone. Pending changes survive in any
  selection, but those that share a name in their order, and a rename wholly or not at all.
- A failed ``sync`` forgets the pending writes. They can still be read, and never reach the disk.

Everything follows from the seed and the order of the calls. The disk may be shared by threads; then
that order is the threads' affair. Here are the calls, faults and crashes; what a crash leaves is decided in
``survival``.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import os
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal, NamedTuple, TypeVar, get_args

from tidings.log.embedded.disk import DiskSpace, File, FileRoom, FolderLock, NoThreads, Threads

from .survival import (
    CRASH_MODES,
    CrashMode,
    Folder,
    Inode,
    Node,
    Renaming,
    Truncate,
    Write,
    apply,
    entries_now,
    put,
    resize,
    survivors,
    walk,
    with_earlier,
)

Operation = Literal[
    "open", "read", "write", "truncate", "sync", "rename", "remove", "make_folder", "sync_folder", "lock"
]
_OPERATIONS: Final[tuple[Operation, ...]] = get_args(Operation)

_TRACE_COUNT_MAX: Final = 10_000
_TOTAL_BYTES: Final = 1 << 50

_Kind = TypeVar("_Kind", Inode, Folder)


class DiskCall(NamedTuple):
    """One call that changed or synced something: its number from 1, what it was, and on what."""

    number: int
    op: Operation
    path: Path


class SimulatedCrash(BaseException):
    """
    The machine has stopped. No ``Exception``, so that no handler takes it for a fault it can live with.

    ``last`` is the last call that the machine carried out or was in the middle of, if there was one.
    """

    def __init__(self, last: DiskCall | None) -> None:
        super().__init__(last)
        self.last = last

    def __str__(self) -> str:
        if self.last is None:
            return "the simulated machine stopped before its first disk call"
        return f"the simulated machine stopped at disk call {self.last.number}: {self.last.op} {self.last.path}"


@dataclass(slots=True, eq=False)
class _Fault:
    op: Operation
    number: int
    message: str
    path_contains: str
    times: int


class _Handle:
    __slots__ = ("_disk", "_inode", "_is_open", "_is_writable", "_path")

    def __init__(self, disk: SimulatedDisk, inode: Inode, path: Path, is_writable: bool) -> None:
        self._disk = disk
        self._inode = inode
        self._path = path
        self._is_writable = is_writable
        self._is_open = True

    def read(self, byte_offset: int, size: int) -> bytes:
        self._check(byte_offset, size)
        with self._disk._running():
            self._disk._raise_fault("read", self._path)
            return bytes(memoryview(self._inode.content)[byte_offset : byte_offset + size])

    def write(self, byte_offset: int, data: bytes) -> None:
        self._check(byte_offset, is_writing=True)
        disk, inode = self._disk, self._inode
        data = bytes(data)  # the caller may go on to change what it handed in; no copy if it cannot

        def whole() -> None:
            if not disk._store(inode, byte_offset, data):
                raise _error(errno.ENOSPC, self._path)

        def partly() -> None:
            if len(data) > 1:
                disk._store(inode, byte_offset, data[: disk._random.randrange(1, len(data))])

        disk._change("write", self._path, whole, within=partly, failed=partly)

    def allocate(self, size: int) -> None:
        self.truncate(size)

    def size(self) -> int:
        self._check()
        with self._disk._running():
            return len(self._inode.content)

    def truncate(self, size: int) -> None:
        self._check(size, is_writing=True)
        disk, inode = self._disk, self._inode

        def whole() -> None:
            if not disk._has_room(size - len(inode.content)):
                raise _error(errno.ENOSPC, self._path)
            resize(inode.own().content, size)
            inode.pending.append(Truncate(disk.calls, size))

        disk._change("truncate", self._path, whole)

    def sync(self) -> None:
        self._check()
        inode = self._inode

        def whole() -> None:
            for change in inode.pending:
                apply(inode.own().durable, change)
            inode.pending.clear()

        self._disk._change("sync", self._path, whole, failed=inode.pending.clear)

    def close(self) -> None:
        self._is_open = False

    def _check(self, *numbers: int, is_writing: bool = False) -> None:
        if not self._is_open or (is_writing and not self._is_writable):
            raise _error(errno.EBADF, self._path)
        if any(number < 0 for number in numbers):
            raise _error(errno.EINVAL, self._path)


class _Lock:
    __slots__ = ("_held", "_path")

    def __init__(self, held: dict[Path, _Lock], path: Path) -> None:
        self._held = held
        self._path = path

    def release(self) -> None:
        if self._held.get(self._path) is self:
            del self._held[self._path]


def _error(number: int, path: Path) -> OSError:
    return OSError(number, os.strerror(number), str(path))


class SimulatedDisk:
    """
    A ``Disk`` in memory that can crash, fail and fill up.

    Args:
        seed: Decides everything that is left to chance.
        capacity_bytes: How much all files together may hold; ``None`` for no limit.
        crash_after: Stop the machine after this many calls: that call is carried out, and it and all
            later ones raise ``SimulatedCrash``. Only calls that change or sync something are counted.
        crash_within: Stop in the middle of that call instead: a write gets some of its bytes out, making
            folders some of the folders, and of anything else nothing happens.

    All but the seed are attributes that may be set at any time. ``calls`` is the number of calls so far.
    Closing files and releasing locks is no disk call and works after a crash too. The room of a removed
    file is free at once, even if somebody has it open.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        capacity_bytes: int | None = None,
        crash_after: int | None = None,
        crash_within: bool = False,
    ) -> None:
        self.seed: Final = seed
        self.threads: Threads = NoThreads()
        self.capacity_bytes = capacity_bytes
        self.crash_after = crash_after
        self.crash_within = crash_within
        self.calls = 0
        self._trace: deque[DiskCall] = deque(maxlen=_TRACE_COUNT_MAX)
        self._random = random.Random(seed)
        self._mutex = threading.RLock()
        self._locks: dict[Path, _Lock] = {}
        self._faults: list[_Fault] = []
        self._renamings: list[Renaming] = []
        root = Folder()
        self._top = Folder({os.sep: root}, {os.sep: root})

    # --- Disk ---

    def open(self, path: Path, *, create: bool = False, write: bool = False) -> File:
        """Open a file; ``create`` makes it if it is not there (and implies ``write``)."""
        with self._running():
            folder, inode = self._place(path)
            if inode is not None:
                self._raise_fault("open", path)
            elif create:
                inode = Inode()
                given = (folder, path.name, inode)
                self._change("open", path, lambda: self._rename(None, given))
            else:
                raise _error(errno.ENOENT, path)
            return _Handle(self, inode, path, write or create)

    def names(self, folder: Path) -> list[str]:
        """The names in a folder, sorted; a missing folder has none."""
        with self._running():
            node = self._node(folder)
            if isinstance(node, Inode):
                raise _error(errno.ENOTDIR, folder)
            return [] if node is None else sorted(name for name in node.entries if name != os.sep)

    def exists(self, path: Path) -> bool:
        """Whether there is a file or folder."""
        with self._running():
            try:
                return self._node(path) is not None
            except NotADirectoryError:
                return False

    def make_folder(self, path: Path) -> None:
        """Make a folder and those above it; an existing one is fine."""
        with self._running():
            node: Node = self._top
            missing: list[Renaming] = []
            for name in path.parts:
                if isinstance(node, Inode):
                    raise _error(errno.ENOTDIR, path)
                below = node.entries.get(name)
                if below is None:
                    below = Folder()
                    missing.append(Renaming(None, (node, name, below)))
                node = below
            if isinstance(node, Inode):
                raise _error(errno.EEXIST, path)

            def make(count: int) -> None:
                for each in missing[:count]:
                    self._rename(each.cleared, each.given)

            if missing:
                self._change("make_folder", path, lambda: make(len(missing)), within=lambda: make(len(missing) // 2))

    def rename(self, source: Path, target: Path) -> None:
        """Give a file another name, replacing what had it."""
        with self._running():
            inode = self._file(source)
            cleared = (self._folder(source.parent), source.name)
            given = (self._place(target)[0], target.name, inode)
            self._change("rename", source, lambda: self._rename(cleared, given), also=target)

    def remove(self, path: Path) -> None:
        """Remove a file; a missing one is fine."""
        with self._running():
            node = self._node(path)
            if isinstance(node, Folder):
                raise _error(errno.EISDIR, path)
            if node is not None:
                cleared = (self._folder(path.parent), path.name)
                self._change("remove", path, lambda: self._rename(cleared, None))

    def sync_files(self, files: Sequence[File]) -> None:
        """One after another: the order is the same each time."""
        for file in files:
            file.sync()

    def sync_folder(self, folder: Path) -> None:
        """Return when the names in the folder are on the disk."""
        with self._running():
            node = self._folder(folder)
            self._change("sync_folder", folder, lambda: self._settle_names(lambda place: place[0] is node))

    def lock(self, path: Path, *, shared: bool = False) -> FolderLock | str:
        """Take the lock file at ``path``, or say who has it; here ``shared`` is no different, as calls come one by one."""
        with self._running():
            if path in self._locks:
                return "another user of the simulated disk"
            folder, inode = self._place(path)
            given = (folder, path.name, Inode())
            self._change("lock", path, lambda: self._rename(None, given) if inode is None else None)
            self._locks[path] = _Lock(self._locks, path)
            return self._locks[path]

    def exclusive(self, path: Path) -> contextlib.AbstractContextManager[None]:
        """Nothing: a simulated disk has one process."""
        return contextlib.nullcontext()

    def room_of(self, path: Path) -> FileRoom | None:
        """The length of a file, all of which has room; ``None`` if it does not exist. Not counted."""
        with self._running():
            try:
                node = self._node(path)
            except NotADirectoryError:
                return None
            return FileRoom(len(node.content), len(node.content)) if isinstance(node, Inode) else None

    def space(self, path: Path) -> DiskSpace:
        """What is left of the capacity, in blocks of one byte; its total says nothing. Not counted."""
        free = _TOTAL_BYTES if self.capacity_bytes is None else max(0, self.capacity_bytes - self.used_bytes)
        return DiskSpace(total_bytes=_TOTAL_BYTES, free_bytes=free, block_bytes=1, free_files=None)

    # --- Faults and crashes ---

    def fail_next(
        self, op: Operation, error: OSError | int, *, path_contains: str | None = None, times: int = 1
    ) -> None:
        """
        Let the next calls of one kind fail.

        A failed write may have written some of its bytes, a failed sync forgets what was pending; any other
        call that fails has done nothing.

        Args:
            op: Which kind of call.
            error: What it raises: an ``OSError`` with its number and text, or the number alone.
            path_contains: Only calls on paths with this in them (a rename: in either of its paths).
            times: How many calls.
        """
        number = error if isinstance(error, int) else error.errno
        if op not in _OPERATIONS or number is None or times < 1:
            raise ValueError(f"cannot let {op!r} fail {times} times with {error!r}")
        message = os.strerror(number) if isinstance(error, int) else error.strerror
        with self._mutex:
            self._faults.append(_Fault(op, number, message or "", path_contains or "", times))

    @property
    def trace(self) -> list[DiskCall]:
        """The last calls (at most 10,000) that changed or synced something, oldest first."""
        with self._mutex:
            return list(self._trace)

    @property
    def is_crashed(self) -> bool:
        """Whether the machine has stopped."""
        return self.crash_after is not None and self.calls >= self.crash_after

    def after_crash(self, mode: CrashMode = "random", *, seed: int | None = None) -> SimulatedDisk:
        """
        A new disk with what this one might hold if the power went now. This one stays as it is.

        Args:
            mode: What becomes of what was not synced. ``lose_all`` and ``keep_all`` say it; ``zero`` keeps
                names and lengths and loses the data; ``reorder`` loses what came first and keeps what came
                later; ``random`` decides for each name and each sector.
            seed: Decides among what the mode allows; the disk's own, if not given.

        Returns:
            A running disk without locks, faults and a planned crash, its calls counted from 0. It has the
            same capacity and a seed of its own, so that a second crash does not repeat the first.
        """
        if mode not in CRASH_MODES:
            raise ValueError(f"no such crash mode: {mode!r}")
        with self._mutex:
            rng = random.Random(f"{self.seed if seed is None else seed} {mode}")
            fresh = SimulatedDisk(rng.getrandbits(32), capacity_bytes=self.capacity_bytes)
            fresh._top = survivors(self._top, self._renamings, mode, rng)
            return fresh

    # --- For the tests' own use: not counted, never failing, also after a crash ---

    @property
    def used_bytes(self) -> int:
        """How much all files together hold."""
        with self._mutex:
            return sum(len(inode.content) for _, inode in walk(self._top, entries_now))

    def read_all(self, path: Path) -> bytes:
        """A file's content as reads see it."""
        with self._mutex:
            return bytes(self._file(path).content)

    def write_all(self, path: Path, data: bytes) -> None:
        """Put a file there, with its folders, as if it had always been: data and names are durable."""
        with self._mutex:
            folder = self._top
            for name in path.parts[:-1]:
                folder = self._plant(folder, name, path, Folder)
            inode = self._plant(folder, path.name, path, Inode)
            inode.content, inode.durable, inode.is_shared = bytearray(data), bytearray(data), False
            inode.pending.clear()

    def flip(self, path: Path, byte_offset: int, mask: int) -> None:
        """Invert the bits of ``mask`` in one byte of a file, for readers and on the disk."""
        with self._mutex:
            inode = self._file(path)
            if not (0 <= byte_offset < len(inode.content) and 0 < mask < 256):
                raise ValueError(f"cannot flip {mask:#x} at byte {byte_offset} of {len(inode.content)}")
            inode.own().content[byte_offset] ^= mask
            if byte_offset < len(inode.durable):
                inode.durable[byte_offset] ^= mask
            for n, change in enumerate(inode.pending):
                if isinstance(change, Write) and 0 <= (at := byte_offset - change.byte_offset) < len(change.data):
                    data = bytearray(change.data)
                    data[at] ^= mask
                    inode.pending[n] = replace(change, data=bytes(data))

    def tree(self) -> dict[Path, bytes]:
        """Every file and its content as reads see it, by path in sorted order."""
        with self._mutex:
            found = {path: bytes(inode.content) for path, inode in walk(self._top, entries_now)}
            return dict(sorted(found.items()))

    def clone(self) -> SimulatedDisk:
        """A copy that goes on as this one would, with its counts, faults and plans, but without its locks."""
        with self._mutex:
            twin = SimulatedDisk(
                self.seed,
                capacity_bytes=self.capacity_bytes,
                crash_after=self.crash_after,
                crash_within=self.crash_within,
            )
            twin.calls = self.calls
            twin._trace.extend(self._trace)
            twin._random.setstate(self._random.getstate())
            twin._top, twin._renamings, twin._faults = copy.deepcopy((self._top, self._renamings, self._faults))
            return twin

    # --- Inside ---

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        with self._mutex:
            self._check_running()
            yield

    def _check_running(self) -> None:
        if self.is_crashed:
            raise SimulatedCrash(self._trace[-1] if self._trace else None)

    def _raise_fault(self, op: Operation, path: Path, also: Path | None = None) -> None:
        for at, fault in enumerate(self._faults):
            on_path = fault.path_contains in str(path) or (also is not None and fault.path_contains in str(also))
            if fault.op == op and on_path:
                fault.times -= 1
                if fault.times == 0:
                    del self._faults[at]
                raise OSError(fault.number, fault.message, str(path))

    def _change(
        self,
        op: Operation,
        path: Path,
        whole: Callable[[], None],
        *,
        within: Callable[[], None] | None = None,
        failed: Callable[[], None] | None = None,
        also: Path | None = None,
    ) -> None:
        """Count a call and carry it out: ``whole``, or what a crash ``within`` it or a fault leaves of it."""
        with self._running():
            self.calls += 1
            self._trace.append(DiskCall(self.calls, op, path))
            if self.is_crashed and self.crash_within:
                if within is not None:
                    within()
                self._check_running()
            try:
                try:
                    self._raise_fault(op, path, also)
                except OSError:
                    if failed is not None:
                        failed()
                    raise
                whole()
            except OSError:
                # If the machine stops at this call, nobody hears that the call failed.
                self._check_running()
                raise
            self._check_running()

    def _has_room(self, growth_bytes: int) -> bool:
        return growth_bytes <= 0 or self.capacity_bytes is None or self.used_bytes + growth_bytes <= self.capacity_bytes

    def _store(self, inode: Inode, byte_offset: int, data: bytes) -> bool:
        """Write what there is room for; whether that was all."""
        size = len(inode.content)
        fitting = data
        if self.capacity_bytes is not None and not self._has_room(byte_offset + len(data) - size):
            size_max = size + max(0, self.capacity_bytes - self.used_bytes)
            fitting = data[: max(0, size_max - byte_offset)]
        if fitting:
            put(inode.own().content, byte_offset, fitting)
            inode.pending.append(Write(self.calls, byte_offset, fitting))
        return len(fitting) == len(data)

    def _rename(self, cleared: tuple[Folder, str] | None, given: tuple[Folder, str, Node] | None) -> None:
        renaming = Renaming(cleared, given)
        renaming.apply(entries_now)
        self._renamings.append(renaming)

    def _settle_names(self, is_meant: Callable[[tuple[Folder, str]], bool]) -> None:
        meant = [any(map(is_meant, renaming.places())) for renaming in self._renamings]
        rest: list[Renaming] = []
        for renaming, is_chosen in zip(self._renamings, with_earlier(self._renamings, meant), strict=True):
            if is_chosen:
                renaming.apply(lambda folder: folder.durable)
            else:
                rest.append(renaming)
        self._renamings = rest

    def _plant(self, folder: Folder, name: str, path: Path, kind: type[_Kind]) -> _Kind:
        self._settle_names(lambda place: place[0] is folder and place[1] == name)
        node = folder.entries.get(name)
        if node is None:
            node = kind()
        elif not isinstance(node, kind):
            raise _error(errno.EEXIST, path)
        folder.entries[name] = folder.durable[name] = node
        return node

    def _node(self, path: Path) -> Node | None:
        node: Node | None = self._top
        for name in path.parts:
            if isinstance(node, Inode):
                raise _error(errno.ENOTDIR, path)
            if node is None:
                return None
            node = node.entries.get(name)
        return node

    def _folder(self, path: Path) -> Folder:
        node = self._node(path)
        if not isinstance(node, Folder):
            raise _error(errno.ENOENT if node is None else errno.ENOTDIR, path)
        return node

    def _place(self, path: Path) -> tuple[Folder, Inode | None]:
        """The folder that a file is in or would be in, and the file if it is there."""
        node = self._node(path)
        if isinstance(node, Folder):
            raise _error(errno.EISDIR, path)
        return self._folder(path.parent), node

    def _file(self, path: Path) -> Inode:
        node = self._node(path)
        if not isinstance(node, Inode):
            raise _error(errno.ENOENT if node is None else errno.EISDIR, path)
        return node
