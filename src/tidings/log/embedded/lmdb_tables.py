"""
What stands in the index's LMDB environment, and everything that is done to it within a transaction.

    ids         fingerprint of the event id          -> place, ...
    idem        fingerprint of topic, space and key  -> place, ...
    partitions  name                                 -> place, ...
    topics      number (3 bytes)                     -> name
    meta        format, epoch, covers, partitions    (how many there are)

A place is 16 bytes, big-endian: seq (8), topic number (3), offset (5); so the order of bytes, which LMDB
keeps several places of one key in, is the order of seqs.

A large batch is entered in several steps, one transaction each. Fingerprints are spread evenly, so a batch
changes nearly as many pages as it has entries, and a transaction holds each of them in memory and writes it
to another place in the file. A step takes one range of fingerprints and so a part of the pages; the steps
after it write to the places that it gave up. Wherever a crash comes between: a topic's number is there
before any place that uses it, and ``covers`` moves with the last step only, so it claims no entry that is
not there. Entering the batch again changes nothing that is there and adds the rest.

Nothing here opens or closes transactions, files or maps; ``lmdb_index`` does.
"""

from __future__ import annotations

import bisect
import struct
from collections.abc import Iterator, Sequence
from itertools import islice, takewhile
from typing import Final, NamedTuple

import lmdb

from .index import (
    OFFSET_BITS,
    OFFSET_MAX,
    PLACE,
    SEQ_MAX,
    TOPIC_COUNT_MAX,
    IndexDamaged,
    IndexEntry,
    IndexLimit,
    IndexStats,
    RecordLocation,
    collect_keys,
    partition_key,
)

DATABASES: Final = {"ids": True, "idem": True, "partitions": True, "topics": False, "meta": False}
"""Their names, and whether one key has several values."""

_FORMAT: Final = b"1"
_COUNT: Final = struct.Struct(">Q")
_LOT_COUNT: Final = 256
_STEP_COUNT_MAX: Final = 8
# Each step is synced. Below this many keys, the syncs would cost more than the fewer pages save.
_STEP_KEYS_MIN: Final = 1024

_KEY_BYTES: Final = 8
_Rows = list[bytes]
"""Fingerprints, each followed by its place."""


class LmdbStore:
    """An open environment and what was read from it; replaced as a whole when the files are."""

    __slots__ = ("covers", "dbs", "env", "inode", "names", "numbers", "snapshot")

    def __init__(self, env: lmdb.Environment) -> None:
        self.env = env
        self.inode = 0  # a reader's, to tell when the files were replaced
        self.dbs: dict[str, lmdb._Database] = {}
        self.numbers: dict[str, int] = {}
        self.names: dict[int, str] = {}
        self.covers = 0
        self.snapshot: lmdb.Transaction[bytes] | None = None
        """The writer's own view of the last commit, kept for lookups of keys that mostly are not there."""

    def end_snapshot(self) -> None:
        """Begin a new one with the next lookup: an old one would keep its pages from being used again."""
        if self.snapshot is not None:
            self.snapshot.abort()
            self.snapshot = None

    def learn(self, topics: dict[str, int]) -> None:
        """Take over topics and their numbers, which are committed."""
        for name, number in topics.items():
            self.numbers[name] = number
            self.names[number] = name

    def places(self, txn: lmdb.Transaction[bytes], values: list[bytes]) -> list[RecordLocation]:
        """
        The places that values stand for.

        Raises:
            IndexDamaged: A topic has no name, or a value is none.
        """
        if any(len(value) != PLACE.size for value in values):
            raise IndexDamaged(self.env.path(), "a place has the wrong length")
        names, last, make = self.names, OFFSET_MAX, tuple.__new__
        places: list[RecordLocation] = []
        for seq, rest in PLACE.iter_unpack(b"".join(values)):
            name = names.get(rest >> OFFSET_BITS) or self._name(txn, rest >> OFFSET_BITS)
            places.append(
                make(RecordLocation, (seq, name, rest & last))
            )  # as ``RecordLocation(...)``, in half the time
        return places

    def _name(self, txn: lmdb.Transaction[bytes], number: int) -> str:
        """The name of a topic: committed by another process, or so recently that ``names`` has not been told."""
        stored = txn.get(_number_key(number), None, self.dbs["topics"])
        if stored is None:
            raise IndexDamaged(self.env.path(), f"topic number {number} has no name")
        name = self.names[number] = stored.decode()
        return name


class IndexStep(NamedTuple):
    """What one transaction enters."""

    topics: dict[str, int]
    ids: list[_Rows]
    idem: list[_Rows]
    partitions: dict[bytes, list[bytes]]
    covers: int | None
    """Where ``covers`` moves; ``None`` if more steps follow."""


class IndexBatch:
    """
    The keys and values of some entries, in the order in which LMDB likes to get them.

    Args:
        entries: The records.
        numbers: The numbers of the topics that have one.
        names_topics: Whether a topic without a number gets the next one; otherwise its entries are left out.

    Raises:
        IndexLimit: A value does not fit the format.
    """

    __slots__ = ("idem", "ids", "new_topics", "partitions")

    def __init__(self, entries: Sequence[IndexEntry], numbers: dict[str, int], *, names_topics: bool) -> None:
        # Sorted keys touch each page once. They are sorted in small lots, as sorting all at once would keep
        # every other thread, an event loop perhaps, waiting for tens of milliseconds.
        self.ids: list[_Rows] = [[] for _ in range(_LOT_COUNT)]
        self.idem: list[_Rows] = [[] for _ in range(_LOT_COUNT)]
        self.new_topics: dict[str, int] = {}
        if names_topics:
            for topic in dict.fromkeys(entry.topic for entry in entries):
                if topic not in numbers:
                    number = len(numbers) + len(self.new_topics)
                    if number >= TOPIC_COUNT_MAX:
                        raise IndexLimit("topics", number + 1, TOPIC_COUNT_MAX)
                    self.new_topics[topic] = number
        by_name: dict[str, list[bytes]] = {}
        collect_keys(entries, numbers | self.new_topics if self.new_topics else numbers, self.ids, self.idem, by_name)
        self.partitions = {partition_key(name): places for name, places in by_name.items()}
        for lots in (self.ids, self.idem):
            for lot in lots:
                lot.sort()
        for places in self.partitions.values():
            places.sort()

    def steps(self, covers: int) -> Iterator[IndexStep]:
        """What to enter in one transaction after another, by ranges of keys; a small batch in a single one."""
        keys = sum(map(len, self.ids)) + sum(map(len, self.idem))
        last = min(_STEP_COUNT_MAX, max(1, keys // _STEP_KEYS_MIN)) - 1
        for at in range(last + 1):
            lots = slice(_LOT_COUNT * at // (last + 1), _LOT_COUNT * (at + 1) // (last + 1))
            yield IndexStep(
                topics=self.new_topics if at == 0 else {},
                ids=self.ids[lots],
                idem=self.idem[lots],
                partitions=self.partitions if at == last else {},
                covers=covers if at == last else None,
            )


def make(env: lmdb.Environment, txn: lmdb.Transaction[bytes], epoch: str) -> None:
    """Make the databases in an environment with nothing at all in it; any other is left as it is."""
    if txn.stat()["entries"] == 0:
        for name, has_dups in DATABASES.items():
            env.open_db(name.encode(), txn, dupsort=has_dups, dupfixed=has_dups)
        txn.put(b"format", _FORMAT, db=env.open_db(b"meta", txn))
        txn.put(b"epoch", epoch.encode(), db=env.open_db(b"meta", txn))


def load(store: LmdbStore, txn: lmdb.Transaction[bytes], epoch: str) -> str | None:
    """Read what is kept in memory; says why if the databases are of no use."""
    found_format = txn.get(b"format", b"", store.dbs["meta"])
    found_epoch = txn.get(b"epoch", b"", store.dbs["meta"])
    if found_format != _FORMAT:
        return f"it is of format {found_format.decode()!r}, not {_FORMAT.decode()!r}"
    if found_epoch != epoch.encode():
        return f"it is of epoch {found_epoch.decode()!r}, not {epoch!r}"
    store.covers = count(store, txn, b"covers")
    with txn.cursor(store.dbs["topics"]) as cursor:
        for key, value in cursor:
            store.learn({value.decode(): int.from_bytes(key, "big")})
    # Numbers are given out densely; with a hole, the next one would be given out twice.
    is_dense = len(store.numbers) == len(store.names) == max(store.names, default=-1) + 1
    return None if is_dense else "topics are missing"


def enter(store: LmdbStore, txn: lmdb.Transaction[bytes], step: IndexStep) -> None:
    """
    Enter one step of a batch.

    Raises:
        IndexDamaged: A topic's number is taken.
    """
    for topic, number in step.topics.items():
        # A number given twice would move records to another topic; better no index than that one.
        if not txn.put(_number_key(number), topic.encode(), overwrite=False, db=store.dbs["topics"]):
            raise IndexDamaged(store.env.path(), f"topic number {number} is taken")
    for name, lots in (("ids", step.ids), ("idem", step.idem)):
        with txn.cursor(store.dbs[name]) as cursor:
            for lot in lots:
                if lot:
                    cursor.putmulti((row[:_KEY_BYTES], row[_KEY_BYTES:]) for row in lot)
    new_partitions = 0
    with txn.cursor(store.dbs["partitions"]) as cursor:
        for key in sorted(step.partitions):
            new_partitions += not cursor.set_key(key)
            cursor.putmulti([(key, place) for place in step.partitions[key]])
    count(store, txn, b"partitions", new_partitions)
    if step.covers is not None:
        txn.put(b"covers", _COUNT.pack(step.covers), db=store.dbs["meta"])


def withdraw(store: LmdbStore, txn: lmdb.Transaction[bytes], batch: IndexBatch) -> None:
    """Take the entries of a batch out; those that are not there are passed over."""
    for name, lots in (("ids", batch.ids), ("idem", batch.idem)):
        for lot in lots:
            for row in lot:
                txn.delete(row[:_KEY_BYTES], row[_KEY_BYTES:], store.dbs[name])
    partitions = store.dbs["partitions"]
    emptied = 0
    for key in sorted(batch.partitions):
        # A list, as every one has to go: ``any`` alone would stop at the first.
        if any([txn.delete(key, place, partitions) for place in batch.partitions[key]]):  # noqa: C419
            emptied += txn.get(key, None, partitions) is None
    count(store, txn, b"partitions", -emptied)


def count(store: LmdbStore, txn: lmdb.Transaction[bytes], key: bytes, change: int = 0) -> int:
    """A number in ``meta``, after changing it."""
    number: int = _COUNT.unpack(txn.get(key, bytes(8), store.dbs["meta"]))[0] + change
    if change:
        txn.put(key, _COUNT.pack(number), db=store.dbs["meta"])
    return number


def among(store: LmdbStore, txn: lmdb.Transaction[bytes], name: str, keys: Sequence[bytes]) -> list[int]:
    """Which of the keys there are in ``ids`` or ``idem``, by their places in the list."""
    database, get = store.dbs[name], txn.get
    return [at for at, key in enumerate(keys) if get(key, None, database) is not None]


def find(store: LmdbStore, txn: lmdb.Transaction[bytes], name: str, key: bytes) -> list[RecordLocation]:
    """The places of a key in ``ids`` or ``idem``, by seq."""
    database = store.dbs[name]
    if txn.get(key, None, database) is None:  # most ids are new, and a cursor costs more
        return []
    with txn.cursor(database) as cursor:
        cursor.set_key(key)
        return store.places(txn, list(cursor.iternext_dup()))


def scan(
    store: LmdbStore, txn: lmdb.Transaction[bytes], key: bytes, since: int, until: int, limit: int
) -> list[RecordLocation]:
    """The first places of a partition after ``since`` and up to ``until``."""
    if since >= until:
        return []
    with txn.cursor(store.dbs["partitions"]) as cursor:
        if not cursor.set_range_dup(key, PLACE.pack(since + 1, 0)):
            return []
        places = store.places(txn, list(islice(cursor.iternext_dup(), limit)))
    if places and places[-1].seq > until:
        del places[bisect.bisect_right(places, until, key=_seq_of) :]
    return places


def scan_back(
    store: LmdbStore, txn: lmdb.Transaction[bytes], key: bytes, since: int, until: int, limit: int
) -> list[RecordLocation]:
    """The last places of a partition after ``since`` and up to ``until``, the last one first."""
    if since >= until:
        return []
    with txn.cursor(store.dbs["partitions"]) as cursor:
        if until < SEQ_MAX and cursor.set_range_dup(key, PLACE.pack(until + 1, 0)):
            is_there = cursor.prev_dup()
        else:
            is_there = cursor.set_key(key) and cursor.last_dup()
        if not is_there:
            return []
        places = store.places(txn, list(islice(cursor.iterprev_dup(), limit)))
    return list(takewhile(lambda place: place.seq > since, places))


def _seq_of(place: RecordLocation) -> int:
    return place.seq


def stats(store: LmdbStore, txn: lmdb.Transaction[bytes]) -> IndexStats:
    """How much there is."""
    entries = sum(txn.stat(store.dbs[name])["entries"] for name in ("ids", "idem", "partitions"))
    return IndexStats(entries, length(store.env), count(store, txn, b"covers"), count(store, txn, b"partitions"))


def length(env: lmdb.Environment) -> int:
    """How long the file has to be to hold every page in use."""
    pages: int = env.info()["last_pgno"] + 1
    return pages * env.stat()["psize"]


def _number_key(number: int) -> bytes:
    return number.to_bytes(3, "big")
