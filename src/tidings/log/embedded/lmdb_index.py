"""
The index on disk: an LMDB environment, read by any thread and process while one thread writes it.

What stands in it is ``lmdb_tables``' affair; here are the files, the map and who may use them when. A batch of
records is entered in one or a few synced transactions, and ``covers`` moves with the last of them: whatever a
crash leaves, it claims no entry that is not there.

Files that cannot be used (of another epoch or format, cut off, not LMDB's) are set aside and a new index
is begun, as it is derived. LMDB has no checksums: a page altered within may go unnoticed.

Every question opens a transaction of its own, so that no thread that has stopped asking can keep old pages from being used
again. The writer's lookups of single keys, one for each event, share one that ends with every commit.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import get_ident
from typing import Final, TypeVar, TypeVarTuple

import lmdb

from ..errors import LogClosed, ReadOnlyLog, WorkspaceBusy
from .index import (
    SEQ_MAX,
    IndexDamaged,
    IndexEntry,
    IndexFull,
    IndexStats,
    RecordLocation,
    fingerprint_of_id,
    fingerprint_of_idem,
    partition_key,
)
from .lmdb_tables import (
    DATABASES,
    IndexBatch,
    LmdbStore,
    among,
    count,
    enter,
    find,
    length,
    load,
    make,
    scan,
    scan_back,
    stats,
    withdraw,
)
from .reserve import Reserve

Args = TypeVarTuple("Args")
T = TypeVar("T")

_MAP_BYTES_START: Final = 64 << 20
_MAP_BYTES_OVER_MIN: Final = 1 << 20
_READERS_MAX: Final = 512
_LOCK_BYTES: Final = 64 << 10  # enough for that many readers
_GATE_COUNT: Final = 31
_PROBE_BYTES: Final = 1 << 20

# What is said of files that are no use to us, as against "not now" (full, busy). Memory runs out when a damaged
# file claims to be enormous.
_UNREADABLE: Final = frozenset(
    {errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.EIO, errno.EINVAL, errno.ENOMEM}
)
_NOT_NOW: Final = (lmdb.ReadersFullError, lmdb.TxnFullError)


class LmdbIndex:
    """
    An ``Index`` in a folder of its own. Made by ``open``.

    One index object per folder and process; further processes may open it with ``read_only``.
    """

    def __init__(
        self, path: Path, *, epoch: str, map_bytes_max: int, read_only: bool, reserve: Reserve | None = None
    ) -> None:
        self.was_reset: str | None = None
        self._path = path
        self._epoch = epoch
        self._map_bytes_max = map_bytes_max - map_bytes_max % mmap.PAGESIZE
        self._map_bytes_over = 0
        self._read_only = read_only
        self._reserve = reserve
        self._is_closed = False
        self._store: LmdbStore | None = None
        self._refused: tuple[int, int] | None = None
        self._writing = threading.Lock()
        # Moving or closing the map under a reader would crash the process. A reader holds one gate, chosen by
        # its thread so that readers hardly ever meet; who moves the map holds all of them.
        self._gates = [threading.Lock() for _ in range(_GATE_COUNT)]

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        epoch: str,
        map_bytes_max: int,
        read_only: bool = False,
        reserve: Reserve | None = None,
    ) -> LmdbIndex:
        """
        Open the index in the folder ``path``, or begin a new one.

        A reader makes nothing: where there is no index it can use, its answers are empty. Files that appear or are
        replaced later it takes up when it is asked for ``covers``.

        Args:
            path: A folder of its own; it may be missing.
            epoch: The log's. An index of another epoch is not used.
            map_bytes_max: The most that the file may grow to.
            read_only: Whether another process is the writer.
            reserve: Gives room where the disk is full.

        Raises:
            WorkspaceBusy: This process has it open already.
            OSError: The file system does not let it be opened or made.
        """
        index = cls(path, epoch=epoch, map_bytes_max=map_bytes_max, read_only=read_only, reserve=reserve)
        if read_only:
            index._follow(is_opening=True)
            return index
        _delete(_aside(path))  # a crash may have left it
        found = index._with_room(index._open_store)
        if isinstance(found, str):
            index.was_reset = found
            found = index._with_room(index._begin_anew)
        index._store = found
        return index

    @property
    def covers(self) -> int:
        """Every record up to this seq is entered. A reader looks at what the writer last committed."""
        self._check_open()
        if self._read_only:
            self._follow()
            return self._read(count, b"covers") or 0
        store = self._store
        return 0 if store is None else store.covers

    def add(self, entries: Sequence[IndexEntry], covers: int) -> None:
        """
        Enter records, durably, and move ``covers`` up when all of them are there.

        A large batch takes several transactions. If one of them fails, ids and idempotency keys of the earlier ones
        stay, above ``covers``, and entering the batch again completes it. Partitions come all together, at the end.
        """
        with self._writing:
            store = self._writable()
            covers = max(covers, store.covers)
            for step in IndexBatch(entries, store.numbers, names_topics=True).steps(covers):
                self._write(store, enter, step)
                # At once, as they are in the file now, whatever becomes of the next step.
                store.learn(step.topics)
            store.covers = covers

    def remove(self, entries: Sequence[IndexEntry]) -> None:
        """
        Forget records that the log dropped, in one synced transaction.

        In one, because the log keeps the records if this fails, and none of them may be missing from here then.
        """
        with self._writing:
            store = self._writable()
            # Deleting takes pages for a moment, and what it frees is used again: so it may go beyond the limit.
            self._map_bytes_over = max(_MAP_BYTES_OVER_MIN, self._map_bytes_max // 4)
            try:
                self._write(store, withdraw, IndexBatch(entries, store.numbers, names_topics=False))
            finally:
                self._map_bytes_over = 0

    def reset(self) -> None:
        """Begin a new file, whatever is the matter with this one."""
        with self._writing:
            self._check_open()
            if self._read_only:
                raise ReadOnlyLog
            with self._alone():
                self._drop_store()
                self._store = self._begin_anew()

    def has_ids(self, event_ids: Sequence[str]) -> set[str]:
        """Those of the ids that have candidates; all of them looked up in one snapshot."""
        found = self._read(among, "ids", [fingerprint_of_id(event_id) for event_id in event_ids])
        return {event_ids[at] for at in found} if found else set()

    def find_id(self, event_id: str) -> list[RecordLocation]:
        """Candidates for the record with this event id, by seq."""
        return self._find("ids", fingerprint_of_id(event_id))

    def find_idem(self, topic: str, space_id: str, idem_key: str) -> list[RecordLocation]:
        """Candidates for the record with this idempotency key, by seq."""
        return self._find("idem", fingerprint_of_idem(topic, space_id, idem_key))

    def partition(
        self, name: str, *, since: int, until: int | None, limit: int, backwards: bool = False
    ) -> list[RecordLocation]:
        """The first (or, ``backwards``, the last) ``limit`` records of a partition in a range of seqs."""
        last = SEQ_MAX if until is None else min(until, SEQ_MAX)
        job = scan_back if backwards else scan
        return self._read(job, partition_key(name), max(since, 0), last, limit) or []

    def stats(self) -> IndexStats:
        """How much it holds."""
        return self._read(stats) or IndexStats(0, 0, 0, 0)

    def close(self) -> None:
        """Close the file when whoever uses it just now is done. Closing twice is fine."""
        with self._writing, self._alone():
            self._is_closed = True
            self._drop_store()

    # Reading

    def _find(self, name: str, key: bytes) -> list[RecordLocation]:
        """The places of a key. Most keys are new: the writer finds that out without a transaction of its own."""
        if not self._read_only:
            with self._gates[0]:
                store = self._store
                if store is not None:
                    try:
                        snapshot = store.snapshot
                        if snapshot is None:
                            snapshot = store.snapshot = store.env.begin()
                        if snapshot.get(key, None, store.dbs[name]) is None:
                            return []
                    except lmdb.Error as error:
                        raise self._told(error) from error
        return self._read(find, name, key) or []

    def _read(self, job: Callable[[LmdbStore, lmdb.Transaction[bytes], *Args], T], *args: *Args) -> T | None:
        """What ``job`` finds in a snapshot of the store; ``None`` if there is no store."""
        while True:
            with self._gates[get_ident() % _GATE_COUNT]:
                store = self._store
                if store is None:
                    self._check_open()
                    return None
                try:
                    with store.env.begin() as txn:
                        return job(store, txn, *args)
                except lmdb.MapResizedError:
                    pass
                except lmdb.Error as error:
                    raise self._told(error) from error
                except (struct.error, UnicodeError) as error:
                    raise IndexDamaged(str(self._path), str(error)) from error
            with self._alone():  # the writer's map has grown beyond ours
                if self._store is store:
                    store.env.set_mapsize(0)

    def _follow(self, *, is_opening: bool = False) -> None:
        """A reader's: take up the files that are there now, if they are not those it has open."""
        try:
            found = os.stat(self._path / "data.mdb")
        except OSError:
            return
        mark = (found.st_ino, found.st_mtime_ns)
        store = self._store
        if mark == self._refused or (store is not None and store.inode == found.st_ino):
            return
        with self._alone():
            self._check_open()
            self._drop_store()
            self.was_reset = self._refused = None
            try:
                opened = self._open_store()
            except FileNotFoundError:
                return  # replaced at this very moment; the next call sees the new ones
            except WorkspaceBusy:
                if is_opening:
                    raise
                opened = "this process writes it"  # which has begun it anew: LMDB allows one handle only
            if isinstance(opened, str):
                self.was_reset, self._refused = opened, mark
            else:
                opened.inode = found.st_ino
                self._store = opened

    # Writing

    def _writable(self) -> LmdbStore:
        self._check_open()
        if self._read_only:
            raise ReadOnlyLog
        if self._store is None:  # a reset got stuck half-way, for want of room perhaps
            self._store = self._begin_anew()
        return self._store

    def _with_room(self, job: Callable[[], T]) -> T:
        """Do ``job``, with room from the reserve where the disk is full."""
        return job() if self._reserve is None else self._reserve.run(job, _PROBE_BYTES)

    def _write(
        self, store: LmdbStore, job: Callable[[LmdbStore, lmdb.Transaction[bytes], *Args], None], *args: *Args
    ) -> None:
        """Do ``job`` in one transaction."""
        self._with_room(lambda: self._write_once(store, job, *args))

    def _write_once(
        self, store: LmdbStore, job: Callable[[LmdbStore, lmdb.Transaction[bytes], *Args], None], *args: *Args
    ) -> None:
        """Do ``job`` in one transaction; when the map is full, in a larger one from the start."""
        try:
            store.env.reader_check()  # a reader that was killed would keep its pages from being used again
            while True:
                try:
                    with store.env.begin(write=True) as txn:
                        job(store, txn, *args)
                    with self._gates[0]:
                        store.end_snapshot()
                    return
                except lmdb.MapFullError as error:
                    size = store.env.info()["map_size"]
                    bytes_max = self._map_bytes_max + self._map_bytes_over - self._map_bytes_over % mmap.PAGESIZE
                    if size >= bytes_max:
                        raise IndexFull(str(self._path), self._map_bytes_max) from error
                    with self._alone():
                        store.env.set_mapsize(min(2 * size, bytes_max))
        except lmdb.Error as error:
            if error.code == errno.EIO:  # also what LMDB makes of a write that was cut short
                self._probe()
            raise self._told(error) from error
        except struct.error as error:
            raise IndexDamaged(str(self._path), str(error)) from error

    def _probe(self) -> None:
        """Write a file beside the index, so that a disk that is full says so itself."""
        probe = self._path / "probe"
        try:
            with probe.open("wb") as file:
                file.write(bytes(_PROBE_BYTES))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error
        finally:
            probe.unlink(missing_ok=True)

    # Opening and closing

    def _open_store(self) -> LmdbStore | str:
        """The store in the folder, or why it is of no use."""
        env: lmdb.Environment | None = None
        problem: str | None = None
        try:
            env = self._open_env()
            store = LmdbStore(env)
            # Reading a page beyond the end would kill the process. (A whole file can be short too: LMDB need not write
            # a page that one transaction took and gave back. Deleting in key order, as done here, was never seen to
            # leave one at the end; if it does, the index is rebuilt for nothing.)
            if (self._path / "data.mdb").stat().st_size < length(env):
                problem = "the file is cut off"
            else:
                problem = self._take_in(store)
            if problem is None:
                env = None  # the store's now
                return store
        except FileExistsError:
            problem = "it is not a folder"
        except (struct.error, UnicodeError) as error:
            problem = str(error)
        except lmdb.Error as error:
            if "already open in this process" in str(error):  # it has no class nor code of its own
                raise WorkspaceBusy(self._path, "this process") from error
            if error.code > 0 and error.code not in _UNREADABLE:
                raise self._told(error) from error
            if error.code == errno.EIO and not self._read_only:
                self._probe()
            problem = str(error)
        finally:
            if env is not None:
                env.close()
        return problem

    def _open_env(self) -> lmdb.Environment:
        data = self._path / "data.mdb"
        if not self._read_only:
            self._path.mkdir(mode=0o750, parents=True, exist_ok=True)
            self._make_lock_file()
        map_bytes = _MAP_BYTES_START
        while data.exists() and map_bytes < 2 * data.stat().st_size:
            map_bytes *= 2
        return lmdb.open(
            str(self._path),
            map_size=min(map_bytes, self._map_bytes_max),
            readonly=self._read_only,
            create=not self._read_only,
            mode=0o750,
            readahead=False,  # one fingerprint says nothing of the next
            max_readers=_READERS_MAX,
            max_dbs=len(DATABASES),
            max_spare_txns=1,
        )

    def _make_lock_file(self) -> None:
        # LMDB would make it with holes and map it; a page of it that finds no room then kills the process. A file
        # that is there already is left alone: opening and closing it would drop the locks this process has on it.
        lock = self._path / "lock.mdb"
        try:
            made = os.open(lock, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o640)
        except OSError:
            return  # it is there, or LMDB will say what is wrong
        try:
            with os.fdopen(made, "wb") as file:
                file.write(bytes(_LOCK_BYTES))
        except OSError as error:
            lock.unlink()
            raise OSError(error.errno, error.strerror, str(self._path)) from error

    def _take_in(self, store: LmdbStore) -> str | None:
        """Open the databases, or make them, and read what is kept in memory; says why if they are of no use."""
        env = store.env
        if not self._read_only:
            with env.begin(write=True) as txn:
                make(env, txn, self._epoch)
        # Each in a transaction of its own: a reader's that is kept for later would not know the new handles.
        for name, has_dups in DATABASES.items():
            store.dbs[name] = env.open_db(name.encode(), dupsort=has_dups, dupfixed=has_dups, create=False)
        with env.begin() as txn:
            return load(store, txn, self._epoch)

    def _begin_anew(self) -> LmdbStore:
        """Set aside what is there and make a new store."""
        # In one step, lock file and all: a process that still reads the old files keeps a pair that belongs together.
        aside = _aside(self._path)
        _delete(aside)
        if os.path.lexists(self._path):
            os.rename(self._path, aside)
            _delete(aside)
        made = self._open_store()
        if isinstance(made, str):
            raise IndexDamaged(str(self._path), made)
        return made

    def _drop_store(self) -> None:
        if self._store is not None:
            self._store.env.close()
            self._store = None

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Wait until nobody reads, and let nobody begin."""
        with ExitStack() as stack:
            for gate in self._gates:
                stack.enter_context(gate)
            if self._store is not None:
                self._store.end_snapshot()
            yield

    def _check_open(self) -> None:
        if self._is_closed:
            raise LogClosed

    def _told(self, error: lmdb.Error) -> Exception:
        """What the caller is told when LMDB says ``error``."""
        if error.code > 0:
            return OSError(error.code, os.strerror(error.code), str(self._path))
        if isinstance(error, _NOT_NOW):
            return OSError(errno.EAGAIN, str(error), str(self._path))
        return IndexDamaged(str(self._path), str(error))


def _aside(path: Path) -> Path:
    return path.with_name(path.name + ".discarded")


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
