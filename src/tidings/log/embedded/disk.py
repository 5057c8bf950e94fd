"""
All that the embedded engine asks of a disk, and how its blocking calls are made beside an event loop.

``OsDisk`` is the real one; ``tidings.testing.SimulatedDisk`` is its twin that loses what was not synced.
What the engine may rely on, and the simulation therefore keeps: written bytes survive a crash once the
file's ``sync`` has returned; a created, renamed or removed name survives once its folder's ``sync_folder``
has returned; everything else may survive in any part and any order. A failed ``sync`` may have forgotten
the pages it did not write, so nobody calls it twice and believes the second answer.

A ``SerialExecutor`` runs blocking jobs one at a time, in order. ``OsThreads`` gives it a thread. ``NoThreads`` uses the event
loop, so that a simulated disk sees its calls in the same order every time. ``tidings.testing`` has a third kind, in which a seed
decides which job goes on at each disk call.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import ClassVar, Final, NamedTuple, Protocol, TypeVar

_T = TypeVar("_T")
Job = Callable[[], None]
Done = Callable[[BaseException | None], None]


class SerialExecutor(Protocol):
    """Runs blocking jobs beside the event loop."""

    def run(self, job: Job, done: Done) -> None:
        """Run ``job``; then, in the loop, ``done`` with the exception it raised or ``None``. One at a time."""
        ...

    def close(self) -> None:
        """Stop. No job may be running."""
        ...


class Threads(Protocol):
    """How the blocking calls of a disk are made without holding up the event loop."""

    @property
    def is_inline(self) -> bool:
        """Whether they are made in the event loop after all."""
        ...

    def serial_executor(self, name: str) -> SerialExecutor:
        """One of its own. Called in the loop that is told when a job is done."""
        ...

    async def run(self, job: Callable[[], _T]) -> _T:
        """Run one job, beside whatever else is running. Who is cancelled waits for its end."""
        ...

    def lock(self) -> AbstractContextManager[object]:
        """A lock that one job may take several times, for state that several jobs share."""
        ...


class ThreadSerialExecutor:
    """A thread of its own, parked on a raw lock: the cheapest hand-over there is (two per commit)."""

    def __init__(self, loop: asyncio.AbstractEventLoop, name: str) -> None:
        self._loop = loop
        self._go = threading.Lock()
        self._go.acquire()
        self._next: tuple[Job, Done] | None = None
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def run(self, job: Job, done: Done) -> None:
        assert self._next is None, "one job at a time"
        self._next = (job, done)
        self._go.release()

    def _work(self) -> None:
        while True:
            self._go.acquire()
            if self._next is None:
                return
            job, done = self._next
            error: BaseException | None = None
            try:
                job()
            except BaseException as caught:  # noqa: BLE001 - whatever it is belongs to the one who waits
                error = caught
            self._next = None
            try:
                self._loop.call_soon_threadsafe(done, error)
            except RuntimeError:  # the loop was closed under us: nobody is left to be told
                return

    def close(self) -> None:
        self._go.release()
        self._thread.join()


class InlineSerialExecutor:
    """The event loop itself."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def run(self, job: Job, done: Done) -> None:
        self._loop.call_soon(self._work, job, done)

    def _work(self, job: Job, done: Done) -> None:
        error: BaseException | None = None
        try:
            job()
        except BaseException as caught:  # noqa: BLE001 - whatever it is belongs to the one who waits
            error = caught
        done(error)

    def close(self) -> None:
        pass


async def wait_even_if_cancelled(work: asyncio.Future[_T]) -> _T:
    """
    Wait for work in a thread. Who is cancelled waits all the same: a thread cannot be called back, and what it writes must not
    come later than what its caller does next.
    """
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait([work])
        raise


class OsThreads:
    """The machine's own threads."""

    __slots__ = ()
    is_inline = False

    def serial_executor(self, name: str) -> SerialExecutor:
        return ThreadSerialExecutor(asyncio.get_running_loop(), f"tidings-log-{name}")

    async def run(self, job: Callable[[], _T]) -> _T:
        return await wait_even_if_cancelled(asyncio.get_running_loop().run_in_executor(None, job))

    def lock(self) -> AbstractContextManager[object]:
        return threading.RLock()


class NoThreads:
    """None: everything happens in the loop, in one order, and holds it up. For simulations."""

    __slots__ = ()
    is_inline = True

    def serial_executor(self, name: str) -> SerialExecutor:
        return InlineSerialExecutor(asyncio.get_running_loop())

    async def run(self, job: Callable[[], _T]) -> _T:
        return job()

    def lock(self) -> AbstractContextManager[object]:
        return threading.RLock()


_ZEROS: Final = bytes(1 << 20)
_BLOCK_BYTES: Final = 1 << 20
_SYNC_THREADS: Final = 16
_OWNER_BYTES: Final = 64
_STAT_BLOCK_BYTES: Final = 512
_READERS_WAIT_S: Final = 0.01
_READERS_WAITS_MAX: Final = 6000
"""How often a writer looks again whether the readers that are opening the log are done: for a minute."""


class File(Protocol):
    """An open file. Positions are explicit; there is no cursor to lose."""

    def read(self, byte_offset: int, size: int) -> bytes:
        """Up to ``size`` bytes from ``byte_offset``; fewer only at the end of the file."""
        ...

    def write(self, byte_offset: int, data: bytes) -> None:
        """Write all of ``data``, or raise; a failed write may have written any part of it."""
        ...

    def allocate(self, size: int) -> None:
        """Make the file ``size`` bytes long, with room on the disk for all of them, holes included, or raise and keep its length."""
        ...

    def size(self) -> int:
        """The file's length in bytes."""
        ...

    def truncate(self, size: int) -> None:
        """Cut the file to ``size`` bytes."""
        ...

    def sync(self) -> None:
        """Return when all that was written is on the disk."""
        ...

    def close(self) -> None:
        """Close the file. Closing twice is fine."""
        ...


class FileRoom(NamedTuple):
    """A file's length, and the bytes that the disk holds for it: fewer where the file has holes."""

    length: int
    allocated_bytes: int


class DiskSpace(NamedTuple):
    """The size of a file system, and what is free of it for this process."""

    total_bytes: int
    free_bytes: int
    block_bytes: int
    """Files take room in whole blocks."""
    free_files: int | None
    """How many more files it can hold; ``None`` if it does not count them."""


class FolderLock(Protocol):
    """A lock held on a folder until it is released or the process ends."""

    def release(self) -> None:
        """Let go of it."""
        ...


class Disk(Protocol):
    """Files and folders by path."""

    @property
    def threads(self) -> Threads:
        """How its calls, which may block, are made beside an event loop."""
        ...

    def open(self, path: Path, *, create: bool = False, write: bool = False) -> File:
        """Open a file; ``create`` makes it if it is not there (and implies ``write``)."""
        ...

    def names(self, folder: Path) -> list[str]:
        """The names in a folder, sorted; a missing folder has none."""
        ...

    def exists(self, path: Path) -> bool:
        """Whether there is a file or folder."""
        ...

    def make_folder(self, path: Path) -> None:
        """Make a folder and those above it; an existing one is fine."""
        ...

    def rename(self, source: Path, target: Path) -> None:
        """Give a file another name, replacing what had it."""
        ...

    def remove(self, path: Path) -> None:
        """Remove a file; a missing one is fine."""
        ...

    def sync_files(self, files: Sequence[File]) -> None:
        """``sync`` of each, in any order or all at once; raises if one of them failed, whatever became of the others."""
        ...

    def sync_folder(self, folder: Path) -> None:
        """Return when the names in the folder are on the disk."""
        ...

    def lock(self, path: Path, *, shared: bool = False) -> FolderLock | str:
        """
        Take the lock file at ``path``, or say which writer has it.

        Readers share it while they look at files that no writer may change. They are soon done, so whoever wants to write waits
        for them.
        """
        ...

    def exclusive(self, path: Path) -> AbstractContextManager[object]:
        """Keep other processes that ask for the same from the file at ``path``, which must exist, until the block ends."""
        ...

    def room_of(self, path: Path) -> FileRoom | None:
        """The length of a file and the room it has; ``None`` if it does not exist."""
        ...

    def space(self, path: Path) -> DiskSpace:
        """The space of the file system that an existing file or folder is on."""
        ...


def is_full(error: OSError) -> bool:
    """Whether the error says that there is no room (disk or quota)."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


class _OsFile:
    __slots__ = ("_fd",)

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def read(self, byte_offset: int, size: int) -> bytes:
        data = os.pread(self._fd, size, byte_offset)
        if len(data) == size or not data:
            return data
        parts = [data]
        got = len(data)
        while got < size and (data := os.pread(self._fd, size - got, byte_offset + got)):
            parts.append(data)
            got += len(data)
        return b"".join(parts)

    def write(self, byte_offset: int, data: bytes) -> None:
        done = os.pwrite(self._fd, data, byte_offset)
        while done < len(data):  # a short write is legal, and what comes next says why it was short
            done += os.pwrite(self._fd, memoryview(data)[done:], byte_offset + done)

    def allocate(self, size: int) -> None:
        held = self.size()
        try:
            os.posix_fallocate(self._fd, 0, size)  # from the start: there may be holes
        except OSError:
            os.ftruncate(self._fd, held)
            raise

    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def truncate(self, size: int) -> None:
        os.ftruncate(self._fd, size)

    def sync(self) -> None:
        os.fdatasync(self._fd)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                self.close()


class _OsLock:
    """A lock of the kernel's. It belongs to the open file, which a forked child shares."""

    __slots__ = ("__weakref__", "_fd")

    def __init__(self, fd: int) -> None:
        self._fd = fd
        _LOCKS.add(self)

    def release(self) -> None:
        if self._fd >= 0:
            fcntl.flock(self._fd, fcntl.LOCK_UN)  # closing would leave it to the children that have the file open
            self.forget()

    def forget(self) -> None:
        """Close the file without unlocking it for the processes that share it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


_LOCKS: Final[weakref.WeakSet[_OsLock]] = weakref.WeakSet()


def _forget_locks() -> None:
    """In a forked child: the locks stay the parent's, and end with it."""
    for lock in list(_LOCKS):
        lock.forget()


os.register_at_fork(after_in_child=_forget_locks)


class OsDisk:
    """The machine's own file system."""

    __slots__ = ()
    threads: ClassVar[Threads] = OsThreads()

    def open(self, path: Path, *, create: bool = False, write: bool = False) -> File:
        if not write and not create:
            return _OsFile(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        return _OsFile(_open_own(path, os.O_CREAT if create else 0))

    def names(self, folder: Path) -> list[str]:
        try:
            return sorted(os.listdir(folder))
        except FileNotFoundError:
            return []

    def exists(self, path: Path) -> bool:
        return os.path.lexists(path)

    def make_folder(self, path: Path) -> None:
        path.mkdir(mode=0o750, parents=True, exist_ok=True)  # as the files: what people publish is not for everybody

    def rename(self, source: Path, target: Path) -> None:
        os.replace(source, target)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def sync_files(self, files: Sequence[File]) -> None:
        # A file system writes down its own changes for many waiting syncs at once, so each costs a tenth.
        with ThreadPoolExecutor(min(_SYNC_THREADS, len(files)) or 1, "tidings-log-sync") as pool:
            for each in [pool.submit(file.sync) for file in files]:
                each.result()

    def sync_folder(self, folder: Path) -> None:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def lock(self, path: Path, *, shared: bool = False) -> FolderLock | str:
        fd = _open_own(path, os.O_CREAT)
        for _ in range(_READERS_WAITS_MAX):
            if _try_lock(fd, fcntl.LOCK_SH if shared else fcntl.LOCK_EX):
                break
            if not _try_lock(fd, fcntl.LOCK_SH):  # not even a reader's: a writer has it
                owner = os.pread(fd, _OWNER_BYTES, 0).decode(errors="replace").strip() or "another process"
                os.close(fd)
                return owner
            fcntl.flock(fd, fcntl.LOCK_UN)
            threading.Event().wait(_READERS_WAIT_S)
        else:
            os.close(fd)
            return "a reader that is opening the log"
        if shared:
            return _OsLock(fd)
        with contextlib.suppress(OSError):  # the lock is what counts; on a full disk its text may be missing
            os.pwrite(fd, f"process {os.getpid()}".encode().ljust(_OWNER_BYTES), 0)
        return _OsLock(fd)

    @contextlib.contextmanager
    def exclusive(self, path: Path) -> Iterator[None]:
        fd = _open_own(path)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            fcntl.flock(fd, fcntl.LOCK_UN)  # a child that was forked meanwhile must not keep it
            os.close(fd)

    def room_of(self, path: Path) -> FileRoom | None:
        try:
            found = os.stat(path)
        except FileNotFoundError:
            return None
        return FileRoom(found.st_size, found.st_blocks * _STAT_BLOCK_BYTES)

    def space(self, path: Path) -> DiskSpace:
        found = os.statvfs(path)
        return DiskSpace(
            total_bytes=found.f_blocks * found.f_frsize,
            free_bytes=found.f_bavail * found.f_frsize,
            block_bytes=found.f_bsize,
            free_files=found.f_favail if found.f_files else None,
        )


def _open_own(path: Path, flags: int = 0) -> int:
    """Open a file for writing; a symbolic link is refused, as it could lead to any other file of the user."""
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o640)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a symbolic link, which is never written through", str(path)) from error
        raise


def _try_lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def fill_with_zeros(file: File, size: int) -> None:
    """Write ``size`` zero bytes and sync them, so that later writes within allocate nothing."""
    for at in range(0, size, len(_ZEROS)):
        file.write(at, _ZEROS[: size - at])
    file.sync()


def sync_for_good(disk: Disk, files: Sequence[File], path: Path) -> None:
    """
    Sync files that will not be made anew if this fails.

    Args:
        path: One of them, or the folder they are in.

    Raises:
        OSError: It failed; never one that says the disk is full, because that invites another try, and the
            second answer would be about the pages that are left.
    """
    try:
        if len(files) == 1:
            files[0].sync()
        elif files:
            disk.sync_files(files)
    except OSError as error:
        if is_full(error):
            raise OSError(errno.EIO, f"a sync found no room: {error.strerror}", str(path)) from error
        raise


def replace_file(disk: Disk, path: Path, data: bytes | Iterator[bytes]) -> None:
    """Put ``data``, whole or in pieces, at ``path`` so that a crash leaves either the old content or the new, whole."""
    fresh = path.with_name(path.name + ".new")
    disk.remove(fresh)
    file = disk.open(fresh, create=True)
    try:
        at = 0
        for piece in (data,) if isinstance(data, bytes) else data:
            file.write(at, piece)
            at += len(piece)
        file.sync()
    except OSError:
        disk.remove(fresh)  # what was written of it may be the last room that there is
        raise
    finally:
        file.close()
    disk.rename(fresh, path)
    disk.sync_folder(path.parent)


def read_file(disk: Disk, path: Path) -> bytes | None:
    """The whole content of a small file; ``None`` if there is none."""
    try:
        file = disk.open(path)
    except FileNotFoundError:
        return None
    try:
        return file.read(0, file.size())
    finally:
        file.close()


def end_of_lines(file: File, size: int) -> int:
    """The byte after the last newline among the first ``size`` bytes, from the end: a line may be longer than a block."""
    at = size
    while at > 0:
        begin = max(0, at - _BLOCK_BYTES)
        found = file.read(begin, at - begin).rfind(b"\n")
        if found >= 0:
            return begin + found + 1
        at = begin
    return 0


def size_of(disk: Disk, path: Path) -> int | None:
    """A file's length; ``None`` if there is none."""
    try:
        file = disk.open(path)
    except FileNotFoundError:
        return None
    try:
        return file.size()
    finally:
        file.close()
