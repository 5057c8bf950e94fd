"""
The index on disk: an LMDB environment, read by any thread and process while one thread writes it.

    ids         fingerprint of the event id          -> place, ...
    idem        fingerprint of topic, space and key  -> place, ...
    partitions  name                                 -> place, ...
    topics      number (3 bytes)                     -> name
    meta        format, epoch, covers, partitions    (how many there are)

A place is 16 bytes, big-endian: seq (8), topic number (3), offset (5); so the order of bytes, which LMDB
keeps several places of one key in, is the order of seqs. Entries and ``covers`` commit in one synced
transaction: whatever a crash leaves, ``covers`` claims no entry that is not there.

Files that cannot be used (of another epoch or format, cut off, not LMDB's) are set aside and a new index
is begun, as it is derived. LMDB has no checksums: a page altered within may go unnoticed.

Every question opens a transaction of its own. That costs about a third of a microsecond more than
keeping one for each thread, and no thread that has stopped asking can keep old pages from being used again.
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
from itertools import islice, takewhile
from pathlib import Path
from threading import get_ident
from typing import Final, TypeVar, TypeVarTuple

import lmdb

from ..errors import LogClosed, ReadOnlyLog, WorkspaceBusy
from .index import (
    OFFSET_MAX,
    SEQ_MAX,
    TOPIC_COUNT_MAX,
    IndexDamaged,
    IndexEntry,
    IndexFull,
    IndexLimit,
    IndexStats,
    Place,
    check_place,
    fingerprint_of_id,
    fingerprint_of_idem,
    partition_key,
)

__all__ = ["LmdbIndex"]

Args = TypeVarTuple("Args")
T = TypeVar("T")

_FORMAT: Final = b"1"
_MAP_BYTES_START: Final = 64 << 20
_READERS_MAX: Final = 512
_LOCK_BYTES: Final = 64 << 10  # enough for that many readers
_GATE_COUNT: Final = 31
_PROBE_BYTES: Final = 1 << 20
_OFFSET_BITS: Final = 40
_PLACE: Final = struct.Struct(">QQ")  # seq; topic number and offset
_COUNT: Final = struct.Struct(">Q")
_DATABASES: Final = {"ids": True, "idem": True, "partitions": True, "topics": False, "meta": False}

# What is said of files that are no use to us, as against "not now" (full, busy). Memory runs out when a damaged
# file claims to be enormous.
_UNREADABLE: Final = frozenset(
    {errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.EIO, errno.EINVAL, errno.ENOMEM}
)
_NOT_NOW: Final = (lmdb.ReadersFullError, lmdb.TxnFullError)

_Pairs = list[tuple[bytes, bytes]]


class _Store:
    """An open environment and what was read from it; replaced as a whole when the files are."""

    __slots__ = ("covers", "dbs", "env", "inode", "names", "numbers")

    def __init__(self, env: lmdb.Environment) -> None:
        self.env = env
        self.inode = 0  # a reader's, to tell when the files were replaced
        self.dbs: dict[str, lmdb._Database] = {}
        self.numbers: dict[str, int] = {}
        self.names: dict[int, str] = {}
        self.covers = 0

    def place(self, txn: lmdb.Transaction[bytes], value: bytes) -> Place:
        seq, rest = _PLACE.unpack(value)
        number = rest >> _OFFSET_BITS
        name = self.names.get(number)
        if name is None:  # committed by another process, or so recently that ``names`` has not been told
            stored = txn.get(_number_key(number), None, self.dbs["topics"])
            if stored is None:
                raise IndexDamaged(self.env.path(), f"topic number {number} has no name")
            name = self.names[number] = stored.decode()
        return Place(seq, name, rest & OFFSET_MAX)


class _Batch:
    """The keys and values of some entries, in the order in which LMDB likes to get them."""

    __slots__ = ("idem", "ids", "new_topics", "partitions")

    def __init__(self, entries: Sequence[IndexEntry], numbers: dict[str, int], *, names_topics: bool) -> None:
        # Sorted keys touch each page once. They are sorted in 256 small lots, as sorting all at once would keep
        # every other thread, an event loop perhaps, waiting for tens of milliseconds.
        self.ids: list[_Pairs] = [[] for _ in range(256)]
        self.idem: list[_Pairs] = [[] for _ in range(256)]
        self.partitions: dict[bytes, list[bytes]] = {}
        self.new_topics: dict[str, int] = {}
        for seq, topic, offset, event_id, idem_key, space_id, partitions in entries:
            if not (0 < seq <= SEQ_MAX and 0 <= offset <= OFFSET_MAX):
                check_place(seq, offset)
            number = numbers.get(topic)
            if number is None:
                number = self.new_topics.get(topic)
            if number is None:
                if not names_topics:
                    continue
                number = len(numbers) + len(self.new_topics)
                if number >= TOPIC_COUNT_MAX:
                    raise IndexLimit("topics", number + 1, TOPIC_COUNT_MAX)
                self.new_topics[topic] = number
            place = _PLACE.pack(seq, number << _OFFSET_BITS | offset)
            if event_id is not None:
                key = fingerprint_of_id(event_id)
                self.ids[key[0]].append((key, place))
            if idem_key is not None:
                key = fingerprint_of_idem(topic, space_id, idem_key)
                self.idem[key[0]].append((key, place))
            for name in partitions:
                self.partitions.setdefault(partition_key(name), []).append(place)
        for lots in (self.ids, self.idem):
            for lot in lots:
                lot.sort()
        for places in self.partitions.values():
            places.sort()


class LmdbIndex:
    """
    An ``Index`` in a folder of its own. Made by ``open``.

    One index object per folder and process; further processes may open it with ``read_only``.
    """

    def __init__(self, path: Path, *, epoch: str, map_bytes_max: int, read_only: bool) -> None:
        self.was_reset: str | None = None
        self._path = path
        self._epoch = epoch
        self._map_bytes_max = map_bytes_max - map_bytes_max % mmap.PAGESIZE
        self._read_only = read_only
        self._is_closed = False
        self._store: _Store | None = None
        self._refused: tuple[int, int] | None = None
        self._writing = threading.Lock()
        # Moving or closing the map under a reader would crash the process. A reader holds one gate, chosen by
        # its thread so that readers hardly ever meet; who moves the map holds all of them.
        self._gates = [threading.Lock() for _ in range(_GATE_COUNT)]

    @classmethod
    def open(cls, path: Path, *, epoch: str, map_bytes_max: int, read_only: bool = False) -> LmdbIndex:
        """
        Open the index in the folder ``path``, or begin a new one.

        A reader makes nothing: where there is no index it can use, its answers are empty. Files that appear or are
        replaced later it takes up when it is asked for ``covers``.

        Args:
            path: A folder of its own; it may be missing.
            epoch: The log's. An index of another epoch is not used.
            map_bytes_max: The most that the file may grow to.
            read_only: Whether another process is the writer.

        Raises:
            WorkspaceBusy: This process has it open already.
            OSError: The file system does not let it be opened or made.
        """
        index = cls(path, epoch=epoch, map_bytes_max=map_bytes_max, read_only=read_only)
        if read_only:
            index._follow()
            return index
        _delete(_aside(path))  # a crash may have left it
        found = index._open_store()
        if isinstance(found, str):
            index.was_reset = found
            found = index._begin_anew()
        index._store = found
        return index

    @property
    def covers(self) -> int:
        """Every record up to this seq is entered. A reader looks at what the writer last committed."""
        self._check_open()
        if self._read_only:
            self._follow()
            return self._read(_count, b"covers") or 0
        store = self._store
        return 0 if store is None else store.covers

    def add(self, entries: Sequence[IndexEntry], covers: int) -> None:
        """Enter records and move ``covers`` up, in one synced transaction."""
        with self._writing:
            store = self._writable()
            batch = _Batch(entries, store.numbers, names_topics=True)
            covers = max(covers, store.covers)
            self._write(store, lambda txn: _enter(store, txn, batch, covers))
            store.covers = covers
            for name, number in batch.new_topics.items():
                store.numbers[name] = number
                store.names[number] = name

    def remove(self, entries: Sequence[IndexEntry]) -> None:
        """Forget records that the log dropped, in one synced transaction."""
        with self._writing:
            store = self._writable()
            batch = _Batch(entries, store.numbers, names_topics=False)
            self._write(store, lambda txn: _withdraw(store, txn, batch))

    def reset(self) -> None:
        """Begin a new file, whatever is the matter with this one."""
        with self._writing:
            self._check_open()
            if self._read_only:
                raise ReadOnlyLog
            with self._alone():
                self._drop_store()
                self._store = self._begin_anew()

    def find_id(self, event_id: str) -> list[Place]:
        """Candidates for the record with this event id, by seq."""
        return self._read(_find, "ids", fingerprint_of_id(event_id)) or []

    def find_idem(self, topic: str, space_id: str, idem_key: str) -> list[Place]:
        """Candidates for the record with this idempotency key, by seq."""
        return self._read(_find, "idem", fingerprint_of_idem(topic, space_id, idem_key)) or []

    def partition(
        self, name: str, *, since: int, until: int | None, limit: int, backwards: bool = False
    ) -> list[Place]:
        """The first (or, ``backwards``, the last) ``limit`` records of a partition in a range of seqs."""
        last = SEQ_MAX if until is None else min(until, SEQ_MAX)
        scan = _scan_back if backwards else _scan
        return self._read(scan, partition_key(name), max(since, 0), last, limit) or []

    def stats(self) -> IndexStats:
        """How much it holds."""
        return self._read(_stats) or IndexStats(0, 0, 0, 0)

    def close(self) -> None:
        """Close the file when whoever uses it just now is done. Closing twice is fine."""
        with self._writing, self._alone():
            self._is_closed = True
            self._drop_store()

    # Reading

    def _read(self, job: Callable[[_Store, lmdb.Transaction[bytes], *Args], T], *args: *Args) -> T | None:
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

    def _follow(self) -> None:
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
            if isinstance(opened, str):
                self.was_reset, self._refused = opened, mark
            else:
                opened.inode = found.st_ino
                self._store = opened

    # Writing

    def _writable(self) -> _Store:
        self._check_open()
        if self._read_only:
            raise ReadOnlyLog
        if self._store is None:  # a reset got stuck half-way, for want of room perhaps
            self._store = self._begin_anew()
        return self._store

    def _write(self, store: _Store, work: Callable[[lmdb.Transaction[bytes]], None]) -> None:
        """Do ``work`` in one transaction; when the map is full, in a larger one from the start."""
        try:
            store.env.reader_check()  # a reader that was killed would keep its pages from being used again
            while True:
                try:
                    with store.env.begin(write=True) as txn:
                        work(txn)
                    return
                except lmdb.MapFullError as error:
                    size = store.env.info()["map_size"]
                    if size >= self._map_bytes_max:
                        raise IndexFull(str(self._path), self._map_bytes_max) from error
                    with self._alone():
                        store.env.set_mapsize(min(2 * size, self._map_bytes_max))
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

    def _open_store(self) -> _Store | str:
        """The store in the folder, or why it is of no use."""
        env: lmdb.Environment | None = None
        problem: str | None = None
        try:
            env = self._open_env()
            store = _Store(env)
            # Reading a page beyond the end would kill the process. (A whole file can be short too: LMDB need not write
            # a page that one transaction took and gave back. Deleting in key order, as done here, was never seen to
            # leave one at the end; if it does, the index is rebuilt for nothing.)
            if (self._path / "data.mdb").stat().st_size < _length(env):
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
            max_dbs=len(_DATABASES),
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

    def _take_in(self, store: _Store) -> str | None:
        """Open the databases, or make them, and read what is kept in memory; says what is wrong with them."""
        env = store.env
        epoch = self._epoch.encode()
        if not self._read_only:
            with env.begin(write=True) as txn:
                if txn.stat()["entries"] == 0:  # with nothing at all in it, a new file; otherwise it is checked
                    for name, has_dups in _DATABASES.items():
                        env.open_db(name.encode(), txn, dupsort=has_dups, dupfixed=has_dups)
                    txn.put(b"format", _FORMAT, db=env.open_db(b"meta", txn))
                    txn.put(b"epoch", epoch, db=env.open_db(b"meta", txn))
        # Each in a transaction of its own: a reader's that is kept for later would not know the new handles.
        for name, has_dups in _DATABASES.items():
            store.dbs[name] = env.open_db(name.encode(), dupsort=has_dups, dupfixed=has_dups, create=False)
        with env.begin() as txn:
            found_format = txn.get(b"format", b"", store.dbs["meta"])
            found_epoch = txn.get(b"epoch", b"", store.dbs["meta"])
            if found_format != _FORMAT:
                return f"it is of format {found_format.decode()!r}, not {_FORMAT.decode()!r}"
            if found_epoch != epoch:
                return f"it is of epoch {found_epoch.decode()!r}, not {self._epoch!r}"
            store.covers = _count(store, txn, b"covers")
            with txn.cursor(store.dbs["topics"]) as cursor:
                for key, value in cursor:
                    number, topic = int.from_bytes(key, "big"), value.decode()
                    store.names[number] = topic
                    store.numbers[topic] = number
        # Numbers are given out densely; with a hole, the next one would be given out twice.
        return (
            None if len(store.numbers) == len(store.names) == max(store.names, default=-1) + 1 else "topics are missing"
        )

    def _begin_anew(self) -> _Store:
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


# What is done within a transaction


def _enter(store: _Store, txn: lmdb.Transaction[bytes], batch: _Batch, covers: int) -> None:
    for topic, number in batch.new_topics.items():
        # A number given twice would move records to another topic; better no index than that one.
        if not txn.put(_number_key(number), topic.encode(), overwrite=False, db=store.dbs["topics"]):
            raise IndexDamaged(store.env.path(), f"topic number {number} is taken")
    for name, lots in (("ids", batch.ids), ("idem", batch.idem)):
        with txn.cursor(store.dbs[name]) as cursor:
            for lot in lots:
                if lot:
                    cursor.putmulti(lot)
    new_partitions = 0
    with txn.cursor(store.dbs["partitions"]) as cursor:
        for key in sorted(batch.partitions):
            new_partitions += not cursor.set_key(key)
            cursor.putmulti([(key, place) for place in batch.partitions[key]])
    _count(store, txn, b"partitions", new_partitions)
    txn.put(b"covers", _COUNT.pack(covers), db=store.dbs["meta"])


def _withdraw(store: _Store, txn: lmdb.Transaction[bytes], batch: _Batch) -> None:
    for name, lots in (("ids", batch.ids), ("idem", batch.idem)):
        for lot in lots:
            for key, place in lot:
                txn.delete(key, place, store.dbs[name])
    partitions = store.dbs["partitions"]
    emptied = 0
    for key in sorted(batch.partitions):
        # A list, as every one has to go: ``any`` alone would stop at the first.
        if any([txn.delete(key, place, partitions) for place in batch.partitions[key]]):  # noqa: C419
            emptied += txn.get(key, None, partitions) is None
    _count(store, txn, b"partitions", -emptied)


def _count(store: _Store, txn: lmdb.Transaction[bytes], key: bytes, change: int = 0) -> int:
    """A number in ``meta``, after changing it."""
    count: int = _COUNT.unpack(txn.get(key, bytes(8), store.dbs["meta"]))[0] + change
    if change:
        txn.put(key, _COUNT.pack(count), db=store.dbs["meta"])
    return count


def _find(store: _Store, txn: lmdb.Transaction[bytes], name: str, key: bytes) -> list[Place]:
    database = store.dbs[name]
    if txn.get(key, None, database) is None:  # most ids are new, and a cursor costs more
        return []
    with txn.cursor(database) as cursor:
        cursor.set_key(key)
        return [store.place(txn, value) for value in cursor.iternext_dup()]


def _scan(store: _Store, txn: lmdb.Transaction[bytes], key: bytes, since: int, until: int, limit: int) -> list[Place]:
    if since >= until:
        return []
    with txn.cursor(store.dbs["partitions"]) as cursor:
        if not cursor.set_range_dup(key, _PLACE.pack(since + 1, 0)):
            return []
        places = (store.place(txn, value) for value in islice(cursor.iternext_dup(), limit))
        return list(takewhile(lambda place: place.seq <= until, places))


def _scan_back(
    store: _Store, txn: lmdb.Transaction[bytes], key: bytes, since: int, until: int, limit: int
) -> list[Place]:
    if since >= until:
        return []
    with txn.cursor(store.dbs["partitions"]) as cursor:
        if until < SEQ_MAX and cursor.set_range_dup(key, _PLACE.pack(until + 1, 0)):
            is_there = cursor.prev_dup()
        else:
            is_there = cursor.set_key(key) and cursor.last_dup()
        if not is_there:
            return []
        places = (store.place(txn, value) for value in islice(cursor.iterprev_dup(), limit))
        return list(takewhile(lambda place: place.seq > since, places))


def _stats(store: _Store, txn: lmdb.Transaction[bytes]) -> IndexStats:
    entries = sum(txn.stat(store.dbs[name])["entries"] for name in ("ids", "idem", "partitions"))
    return IndexStats(entries, _length(store.env), _count(store, txn, b"covers"), _count(store, txn, b"partitions"))


def _number_key(number: int) -> bytes:
    return number.to_bytes(3, "big")


def _length(env: lmdb.Environment) -> int:
    """How long the file has to be to hold every page in use."""
    pages: int = env.info()["last_pgno"] + 1
    return pages * env.stat()["psize"]


def _aside(path: Path) -> Path:
    return path.with_name(path.name + ".discarded")


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
