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
that order is the threads' affair.
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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Literal, NamedTuple, TypeVar, get_args

from tidings.log.embedded.disk import File, FolderLock

__all__ = ["CRASH_MODES", "Call", "CrashMode", "SimulatedCrash", "SimulatedDisk"]

CrashMode = Literal["lose_all", "keep_all", "random", "zero", "reorder"]
CRASH_MODES: Final[tuple[CrashMode, ...]] = get_args(CrashMode)

Operation = Literal[
    "open", "read", "write", "truncate", "sync", "rename", "remove", "make_folder", "sync_folder", "lock"
]
_OPERATIONS: Final[tuple[Operation, ...]] = get_args(Operation)

_SECTOR_BYTES: Final = 512
_TRACE_COUNT_MAX: Final = 10_000


class Call(NamedTuple):
    """One call that changed or synced something: its number from 1, what it was, and on what."""

    number: int
    op: Operation
    path: Path


class SimulatedCrash(BaseException):
    """
    The machine has stopped. No ``Exception``, so that no handler takes it for a fault it can live with.

    ``last`` is the last call that the machine carried out or was in the middle of, if there was one.
    """

    def __init__(self, last: Call | None) -> None:
        super().__init__(last)
        self.last = last

    def __str__(self) -> str:
        if self.last is None:
            return "the simulated machine stopped before its first disk call"
        return f"the simulated machine stopped at disk call {self.last.number}: {self.last.op} {self.last.path}"


@dataclass(slots=True, eq=False, frozen=True)
class _Write:
    number: int
    byte_offset: int
    data: bytes

    @property
    def sectors(self) -> int:
        end = self.byte_offset + len(self.data)
        return (end - 1) // _SECTOR_BYTES - self.byte_offset // _SECTOR_BYTES + 1

    def part(self, first: int, until: int) -> tuple[int, bytes]:
        """The bytes of the write's own sectors from ``first`` to before ``until``, and where they go."""
        origin = self.byte_offset // _SECTOR_BYTES * _SECTOR_BYTES
        start = max(self.byte_offset, origin + first * _SECTOR_BYTES)
        return start, self.data[start - self.byte_offset : origin + until * _SECTOR_BYTES - self.byte_offset]


@dataclass(slots=True, eq=False, frozen=True)
class _Truncate:
    number: int
    size: int

    sectors = 1


_Change = _Write | _Truncate


@dataclass(slots=True, eq=False)
class _Inode:
    """
    A file: what reads see, what the disk has, and the changes that lie between.

    Crash tests copy disks by the thousand and write to few of their files. So copies share their buffers
    (one may then also be content and durable at once) until ``own`` is called, before any change.
    """

    content: bytearray = field(default_factory=bytearray)
    durable: bytearray = field(default_factory=bytearray)
    pending: list[_Change] = field(default_factory=list)
    is_shared: bool = False

    def own(self) -> _Inode:
        if self.is_shared:
            self.content, self.durable, self.is_shared = bytearray(self.content), bytearray(self.durable), False
        return self

    def __deepcopy__(self, memo: object) -> _Inode:
        self.is_shared = True
        return _Inode(self.content, self.durable, list(self.pending), is_shared=True)


@dataclass(slots=True, eq=False)
class _Folder:
    entries: dict[str, _Node] = field(default_factory=dict)
    durable: dict[str, _Node] = field(default_factory=dict)


_Node = _Inode | _Folder
_Kind = TypeVar("_Kind", _Inode, _Folder)


@dataclass(slots=True, eq=False)
class _Renaming:
    """A pending change of names: one is cleared, one is given to a node, or both at once."""

    cleared: tuple[_Folder, str] | None
    given: tuple[_Folder, str, _Node] | None

    def places(self) -> list[tuple[_Folder, str]]:
        places = [] if self.cleared is None else [self.cleared]
        return places if self.given is None else [*places, self.given[:2]]

    def apply(self, entries_of: Callable[[_Folder], dict[str, _Node]]) -> None:
        if self.cleared is not None:
            entries_of(self.cleared[0]).pop(self.cleared[1], None)
        if self.given is not None:
            folder, name, node = self.given
            entries_of(folder)[name] = node


@dataclass(slots=True, eq=False)
class _Fault:
    op: Operation
    number: int
    message: str
    path_contains: str
    times: int


def _entries(folder: _Folder) -> dict[str, _Node]:
    return folder.entries


def _walk(
    folder: _Folder, entries_of: Callable[[_Folder], dict[str, _Node]], path: Path = Path()
) -> Iterator[tuple[Path, _Inode]]:
    for name, node in entries_of(folder).items():
        if isinstance(node, _Folder):
            yield from _walk(node, entries_of, path / name)
        else:
            yield path / name, node


def _put(image: bytearray, byte_offset: int, data: bytes) -> None:
    if byte_offset > len(image):
        image.extend(bytes(byte_offset - len(image)))
    image[byte_offset : byte_offset + len(data)] = data


def _resize(image: bytearray, size: int) -> None:
    if size < len(image):
        del image[size:]
    else:
        image.extend(bytes(size - len(image)))


def _apply(image: bytearray, change: _Change) -> None:
    if isinstance(change, _Write):
        _put(image, change.byte_offset, change.data)
    else:
        _resize(image, change.size)


def _with_earlier(changes: Sequence[_Renaming], chosen: list[bool]) -> list[bool]:
    """
    ``chosen``, and every earlier change that shares a name with a chosen one.

    Without those, what a rename moved out of the way could be lost under both its names.
    """
    places: set[tuple[int, str]] = set()
    closed = list(chosen)
    for at in range(len(changes) - 1, -1, -1):
        own = {(id(folder), name) for folder, name in changes[at].places()}
        closed[at] = closed[at] or not own.isdisjoint(places)
        if closed[at]:
            places |= own
    return closed


class _Survival:
    """What a crash leaves of pending changes. Decides only; the disk it is asked for stays as it is."""

    def __init__(self, mode: CrashMode, rng: random.Random) -> None:
        self._mode = mode
        self._random = rng

    def names(self, count: int) -> list[bool]:
        """Which of ``count`` pending changes of names survive."""
        match self._mode:
            case "lose_all":
                return [False] * count
            case "keep_all" | "zero":
                return [True] * count
            case "reorder":
                lost = self._random.randint(0, count)
                return [at >= lost for at in range(count)]
            case "random":
                # Kept more often than not: a file whose name is lost shows nothing of what became of its data.
                chance = self._random.choice((0.5, 0.75, 1.0))
                return [self._random.random() < chance for _ in range(count)]

    def contents(self, inodes: Sequence[_Inode]) -> list[bytearray]:
        """What each file holds afterwards, in a buffer of its own if it is not just what was durable."""
        if self._mode == "lose_all":
            return [inode.durable for inode in inodes]
        images = [bytearray(inode.durable) if inode.pending else inode.durable for inode in inodes]
        pending = [(change, image) for inode, image in zip(inodes, images, strict=True) for change in inode.pending]
        pending.sort(key=lambda each: each[0].number)
        match self._mode:
            case "keep_all":
                for change, image in pending:
                    _apply(image, change)
            case "zero":
                for change, image in pending:
                    self._grow(image, change)
            case "reorder":
                self._keep_the_later(pending)
            case "random":
                for change, image in pending:
                    self._scatter(image, change)
        return images

    def _grow(self, image: bytearray, change: _Change) -> None:
        if isinstance(change, _Truncate):
            _resize(image, change.size)
        else:
            self._reach(image, change.byte_offset + len(change.data))

    def _reach(self, image: bytearray, size: int) -> None:
        _resize(image, max(size, len(image)))

    def _keep_the_later(self, pending: Sequence[tuple[_Change, bytearray]]) -> None:
        """Lose everything up to some sector of some write, over all files, and keep what was written after it."""
        if not pending:
            return
        last = len(pending) - 1
        cut = self._random.randint(0, last if pending[last][0].sectors > 1 else max(0, last - 1))
        for at, (change, image) in enumerate(pending):
            if at > cut:
                _apply(image, change)
            elif at == cut and isinstance(change, _Write):
                lost = self._random.randint(1, max(1, change.sectors - (at == last)))
                start, data = change.part(lost, change.sectors)
                if data:
                    _put(image, start, data)

    def _scatter(self, image: bytearray, change: _Change) -> None:
        fate = self._random.choice(("kept", "lost", "zeroed", "torn", "scattered"))
        if isinstance(change, _Truncate):
            if self._random.random() < 0.5:
                _resize(image, change.size)
        elif fate == "scattered":
            # By runs, so that a write of megabytes costs no more than one of kilobytes.
            run_max = max(1, change.sectors // 8)
            first = 0
            while first < change.sectors:
                until = min(change.sectors, first + self._random.randint(1, run_max))
                self._leave(image, *change.part(first, until), self._random.choice(("kept", "lost", "zeroed", "torn")))
                first = until
        else:
            self._leave(image, change.byte_offset, change.data, fate)

    def _leave(self, image: bytearray, byte_offset: int, data: bytes, fate: str) -> None:
        if fate == "kept":
            _put(image, byte_offset, data)
        elif fate == "zeroed":
            self._reach(image, byte_offset + len(data))
        elif fate == "torn":
            tear = self._random.randint(0, len(data))
            if self._random.random() < 0.5:
                _put(image, byte_offset, data[:tear])
            elif tear < len(data):
                _put(image, byte_offset + tear, data[tear:])


class _Handle:
    __slots__ = ("_disk", "_inode", "_is_open", "_is_writable", "_path")

    def __init__(self, disk: SimulatedDisk, inode: _Inode, path: Path, is_writable: bool) -> None:
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
            _resize(inode.own().content, size)
            inode.pending.append(_Truncate(disk.calls, size))

        disk._change("truncate", self._path, whole)

    def sync(self) -> None:
        self._check()
        inode = self._inode

        def whole() -> None:
            for change in inode.pending:
                _apply(inode.own().durable, change)
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
        self.capacity_bytes = capacity_bytes
        self.crash_after = crash_after
        self.crash_within = crash_within
        self.calls = 0
        self._trace: deque[Call] = deque(maxlen=_TRACE_COUNT_MAX)
        self._random = random.Random(seed)
        self._mutex = threading.RLock()
        self._locks: dict[Path, _Lock] = {}
        self._faults: list[_Fault] = []
        self._renamings: list[_Renaming] = []
        root = _Folder()
        self._top = _Folder({os.sep: root}, {os.sep: root})

    # --- Disk ---

    def open(self, path: Path, *, create: bool = False, write: bool = False) -> File:
        """Open a file; ``create`` makes it if it is not there (and implies ``write``)."""
        with self._running():
            folder, inode = self._place(path)
            if inode is not None:
                self._raise_fault("open", path)
            elif create:
                inode = _Inode()
                given = (folder, path.name, inode)
                self._change("open", path, lambda: self._rename(None, given))
            else:
                raise _error(errno.ENOENT, path)
            return _Handle(self, inode, path, write or create)

    def names(self, folder: Path) -> list[str]:
        """The names in a folder, sorted; a missing folder has none."""
        with self._running():
            node = self._node(folder)
            if isinstance(node, _Inode):
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
            node: _Node = self._top
            missing: list[_Renaming] = []
            for name in path.parts:
                if isinstance(node, _Inode):
                    raise _error(errno.ENOTDIR, path)
                below = node.entries.get(name)
                if below is None:
                    below = _Folder()
                    missing.append(_Renaming(None, (node, name, below)))
                node = below
            if isinstance(node, _Inode):
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
            if isinstance(node, _Folder):
                raise _error(errno.EISDIR, path)
            if node is not None:
                cleared = (self._folder(path.parent), path.name)
                self._change("remove", path, lambda: self._rename(cleared, None))

    def sync_folder(self, folder: Path) -> None:
        """Return when the names in the folder are on the disk."""
        with self._running():
            node = self._folder(folder)
            self._change("sync_folder", folder, lambda: self._settle_names(lambda place: place[0] is node))

    def lock(self, path: Path) -> FolderLock | str:
        """Take the lock file at ``path``, or say who has it."""
        with self._running():
            if path in self._locks:
                return "another user of the simulated disk"
            folder, inode = self._place(path)
            given = (folder, path.name, _Inode())
            self._change("lock", path, lambda: self._rename(None, given) if inode is None else None)
            self._locks[path] = _Lock(self._locks, path)
            return self._locks[path]

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
    def trace(self) -> list[Call]:
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
            survival = _Survival(mode, rng)
            entries: dict[int, dict[str, _Node]] = {}

            def entries_of(folder: _Folder) -> dict[str, _Node]:
                return entries.setdefault(id(folder), dict(folder.durable))

            kept = _with_earlier(self._renamings, survival.names(len(self._renamings)))
            for renaming, is_kept in zip(self._renamings, kept, strict=True):
                if is_kept:
                    renaming.apply(entries_of)
            files = [node for _, node in _walk(self._top, entries_of)]
            images = dict(zip(map(id, files), survival.contents(files), strict=True))

            def rebuilt(node: _Node) -> _Node:
                if isinstance(node, _Folder):
                    nodes = {name: rebuilt(below) for name, below in entries_of(node).items()}
                    return _Folder(nodes, dict(nodes))
                node.is_shared = True
                return _Inode(images[id(node)], images[id(node)], is_shared=True)

            top = {name: rebuilt(node) for name, node in entries_of(self._top).items()}
            fresh._top = _Folder(top, dict(top))
            return fresh

    # --- For the tests' own use: not counted, never failing, also after a crash ---

    @property
    def used_bytes(self) -> int:
        """How much all files together hold."""
        with self._mutex:
            return sum(len(inode.content) for _, inode in _walk(self._top, _entries))

    def read_all(self, path: Path) -> bytes:
        """A file's content as reads see it."""
        with self._mutex:
            return bytes(self._file(path).content)

    def write_all(self, path: Path, data: bytes) -> None:
        """Put a file there, with its folders, as if it had always been: data and names are durable."""
        with self._mutex:
            folder = self._top
            for name in path.parts[:-1]:
                folder = self._plant(folder, name, path, _Folder)
            inode = self._plant(folder, path.name, path, _Inode)
            inode.content, inode.durable, inode.is_shared = bytearray(data), bytearray(data), False
            inode.pending.clear()

    def flip(self, path: Path, byte_offset: int, mask: int) -> None:
        """Turn round the bits of ``mask`` in one byte of a file, for readers and on the disk."""
        with self._mutex:
            inode = self._file(path)
            if not (0 <= byte_offset < len(inode.content) and 0 < mask < 256):
                raise ValueError(f"cannot flip {mask:#x} at byte {byte_offset} of {len(inode.content)}")
            inode.own().content[byte_offset] ^= mask
            if byte_offset < len(inode.durable):
                inode.durable[byte_offset] ^= mask
            for n, change in enumerate(inode.pending):
                if isinstance(change, _Write) and 0 <= (at := byte_offset - change.byte_offset) < len(change.data):
                    data = bytearray(change.data)
                    data[at] ^= mask
                    inode.pending[n] = replace(change, data=bytes(data))

    def tree(self) -> dict[Path, bytes]:
        """Every file and its content as reads see it, by path in sorted order."""
        with self._mutex:
            found = {path: bytes(inode.content) for path, inode in _walk(self._top, _entries)}
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
            self._trace.append(Call(self.calls, op, path))
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

    def _store(self, inode: _Inode, byte_offset: int, data: bytes) -> bool:
        """Write what there is room for; whether that was all."""
        size = len(inode.content)
        fitting = data
        if self.capacity_bytes is not None and not self._has_room(byte_offset + len(data) - size):
            size_max = size + max(0, self.capacity_bytes - self.used_bytes)
            fitting = data[: max(0, size_max - byte_offset)]
        if fitting:
            _put(inode.own().content, byte_offset, fitting)
            inode.pending.append(_Write(self.calls, byte_offset, fitting))
        return len(fitting) == len(data)

    def _rename(self, cleared: tuple[_Folder, str] | None, given: tuple[_Folder, str, _Node] | None) -> None:
        renaming = _Renaming(cleared, given)
        renaming.apply(_entries)
        self._renamings.append(renaming)

    def _settle_names(self, is_meant: Callable[[tuple[_Folder, str]], bool]) -> None:
        meant = [any(map(is_meant, renaming.places())) for renaming in self._renamings]
        rest: list[_Renaming] = []
        for renaming, is_chosen in zip(self._renamings, _with_earlier(self._renamings, meant), strict=True):
            if is_chosen:
                renaming.apply(lambda folder: folder.durable)
            else:
                rest.append(renaming)
        self._renamings = rest

    def _plant(self, folder: _Folder, name: str, path: Path, kind: type[_Kind]) -> _Kind:
        self._settle_names(lambda place: place[0] is folder and place[1] == name)
        node = folder.entries.get(name)
        if node is None:
            node = kind()
        elif not isinstance(node, kind):
            raise _error(errno.EEXIST, path)
        folder.entries[name] = folder.durable[name] = node
        return node

    def _node(self, path: Path) -> _Node | None:
        node: _Node | None = self._top
        for name in path.parts:
            if isinstance(node, _Inode):
                raise _error(errno.ENOTDIR, path)
            if node is None:
                return None
            node = node.entries.get(name)
        return node

    def _folder(self, path: Path) -> _Folder:
        node = self._node(path)
        if not isinstance(node, _Folder):
            raise _error(errno.ENOENT if node is None else errno.ENOTDIR, path)
        return node

    def _place(self, path: Path) -> tuple[_Folder, _Inode | None]:
        """The folder that a file is in or would be in, and the file if it is there."""
        node = self._node(path)
        if isinstance(node, _Folder):
            raise _error(errno.EISDIR, path)
        return self._folder(path.parent), node

    def _file(self, path: Path) -> _Inode:
        node = self._node(path)
        if not isinstance(node, _Inode):
            raise _error(errno.ENOENT if node is None else errno.EISDIR, path)
        return node
