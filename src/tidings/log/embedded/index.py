"""
The index of the embedded log: which records have this id, and which name this partition.

An index is derived. It may be deleted at any time; it knows up to which seq it is built (``covers``),
and whoever owns the log enters everything after that again. It promises one thing: of the records up to
``covers``, none that was entered and not removed is missing from its answers. It does not promise that
an answer is right: ids are kept as fingerprints, so a ``RecordLocation`` is a candidate until the record there
was read and compared. It may also name records above ``covers``, if they were entered.

``LmdbIndex`` keeps it in a file, ``MemoryIndex``, the model that it is tested against, in dicts; one suite of tests runs on
both. What they must agree on, fingerprints and limits, is here.
"""

from __future__ import annotations

import functools
import struct
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from operator import attrgetter
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import msgspec

from tidings.core.ids import seq_in_event_id

from ..errors import LogClosed, LogError
from ..record import Record

if TYPE_CHECKING:
    from .inspect import LineInfo

SEQ_MAX: Final = (1 << 64) - 1
OFFSET_BITS: Final = 40
OFFSET_MAX: Final = (1 << OFFSET_BITS) - 1
"""Five bytes: a thousand events a second in one topic, for 34 years."""
TOPIC_COUNT_MAX: Final = 1 << 24
PLACE: Final = struct.Struct(">QQ")
"""A record's place in the index: its seq; its topic's number and its offset."""
PARTITION_BYTES_MAX: Final = 511
"""What a key of LMDB can hold; the log's own limit on partition names is far lower."""


class RecordLocation(NamedTuple):
    """Where a record may be that was asked for."""

    seq: int
    topic: str
    offset: int


class IndexEntry(msgspec.Struct, frozen=True, gc=False):
    """What the index has to know of one record."""

    seq: int
    topic: str
    offset: int
    event_id: str | None
    """``None`` if the log made the id: it carries its seq and is found without an index."""
    idem_key: str | None
    space_id: str
    partitions: tuple[str, ...]


def entry_of(record: Record | LineInfo, *, is_tombstone: bool = False) -> IndexEntry | None:
    """
    What the index must know of a record; ``None`` if nothing.

    An id that the log made leads to its record by itself, but not to its tombstone.
    """
    meta = record.meta
    is_own_id = seq_in_event_id(meta.event_id) == record.seq and not is_tombstone
    if is_own_id and meta.idem_key is None and not meta.partitions:
        return None
    return IndexEntry(
        seq=record.seq,
        topic=meta.topic,
        offset=record.offset,
        event_id=None if is_own_id else meta.event_id,
        idem_key=meta.idem_key,
        space_id=meta.space_id,
        partitions=() if is_tombstone else meta.partitions,
    )


def entries_of(records: Iterable[Record | LineInfo], *, are_tombstones: bool = False) -> list[IndexEntry]:
    """What the index must know of these records."""
    entries = (entry_of(record, is_tombstone=are_tombstones) for record in records)
    return [entry for entry in entries if entry is not None]


class IndexStats(NamedTuple):
    """How much the index holds."""

    entries: int
    """Ids, idempotency keys and partition memberships together."""
    size_bytes: int
    """On disk."""
    covers: int
    partitions: int
    """Partitions that at least one record names."""


class IndexFull(LogError):
    """The index has reached its size limit. What it held it still holds; ``covers`` did not move."""

    code = "log.index_full"
    retryable = True
    hint = "raise index_bytes_max, or let retention drop old records; events without id, key and partitions are still stored"
    text = "the index at {path} has reached its limit of {bytes_max} bytes"
    path: str
    bytes_max: int


class IndexDamaged(LogError):
    """The index cannot be read. It is derived: ``reset`` it, and enter the log's records again."""

    code = "log.index_damaged"
    hint = "nothing is lost: the index is rebuilt from the log"
    text = "the index at {path} is damaged: {problem}"
    path: str
    problem: str


class IndexLimit(LogError):
    """A value does not fit the index's format."""

    code = "log.index_limit"
    text = "{field}: {value} is outside what the index can hold, which ends at {value_max}"
    field: str
    value: int
    value_max: int


class Index(Protocol):
    """
    What the engine asks of an index.

    One thread changes it at a time; any thread may ask at any time, also while it is being changed, and
    then sees it as it was before or after the change.

    Every method raises ``LogClosed`` after ``close``, ``IndexDamaged`` if the index turns out unreadable,
    and ``OSError`` for what the file system says.
    """

    @property
    def was_reset(self) -> str | None:
        """Why what was found when opening was not used; ``None`` if it was, or if nothing was there."""
        ...

    @property
    def covers(self) -> int:
        """Every record up to this seq is entered; 0 in a new index."""
        ...

    def add(self, entries: Sequence[IndexEntry], covers: int) -> None:
        """
        Enter records, durably, and move ``covers`` up last: a crash in between never claims more than is there.

        Entering a record again changes nothing, and ``covers`` never goes back.

        Raises:
            IndexFull: There is no room under the size limit.
            IndexLimit: A value does not fit.
            ReadOnlyLog: The index was opened for reading.
        """
        ...

    def remove(self, entries: Sequence[IndexEntry]) -> None:
        """
        Forget records that the log dropped: all of them, durably, or none. Unknown ones are passed over.

        Raises:
            IndexFull: Deleting takes room for a moment, and there is none under the size limit.
            ReadOnlyLog: The index was opened for reading.
        """
        ...

    def reset(self) -> None:
        """Forget everything; ``covers`` is 0 again. Works on a damaged index too."""
        ...

    def has_ids(self, event_ids: Sequence[str]) -> set[str]:
        """Those of the ids for which ``find_id`` would find something; all of them looked up at once."""
        ...

    def find_id(self, event_id: str) -> list[RecordLocation]:
        """Candidates for the record with this event id, by seq."""
        ...

    def find_idem(self, topic: str, space_id: str, idem_key: str) -> list[RecordLocation]:
        """Candidates for the record with this idempotency key in this topic and space, by seq."""
        ...

    def partition(
        self, name: str, *, since: int, until: int | None, limit: int, backwards: bool = False
    ) -> list[RecordLocation]:
        """
        The first ``limit`` records after ``since`` and up to ``until`` that name a partition, by seq.

        ``backwards`` gives the last ones, the highest seq first.

        Raises:
            IndexLimit: No partition can have that name.
        """
        ...

    def stats(self) -> IndexStats:
        """How much it holds."""
        ...

    def close(self) -> None:
        """Let go of everything. Closing twice is fine."""
        ...


def fingerprint_py(scope: bytes, text: str) -> bytes:
    """
    Eight bytes that stand for ``text``, within ``scope``, in the index.

    Any two of a hundred million ids share one with a chance of 1 in 3,700. That would cost reading one record
    in vain, as candidates are compared anyway.
    """
    return blake2b(scope + text.encode("utf-8", "surrogatepass"), digest_size=8).digest()


@functools.lru_cache(maxsize=4096)
def idem_scope(topic: str, space_id: str) -> bytes:
    """Where an idempotency key counts: within its topic and space."""
    topic_bytes = topic.encode("utf-8", "surrogatepass")
    space_bytes = space_id.encode("utf-8", "surrogatepass")
    # The lengths keep ("ab", "c") and ("a", "bc") apart.
    return b"%d,%d:" % (len(topic_bytes), len(space_bytes)) + topic_bytes + space_bytes


def partition_key(name: str) -> bytes:
    """
    The key under which a partition is entered.

    Raises:
        IndexLimit: The name is empty or too long.
    """
    key = name.encode("utf-8", "surrogatepass")
    if not 0 < len(key) <= PARTITION_BYTES_MAX:
        raise IndexLimit("bytes of a partition's name", len(key), PARTITION_BYTES_MAX)
    return key


def check_place(seq: int, offset: int) -> None:
    """
    Say so if a record's place does not fit the index.

    Raises:
        IndexLimit: It does not.
    """
    if not 0 < seq <= SEQ_MAX:
        raise IndexLimit("seq", seq, SEQ_MAX)
    if not 0 <= offset <= OFFSET_MAX:
        raise IndexLimit("offset", offset, OFFSET_MAX)


def collect_keys_py(
    entries: Sequence[IndexEntry],
    numbers: dict[str, int],
    ids: list[list[bytes]],
    idem: list[list[bytes]],
    partitions: dict[str, list[bytes]],
) -> None:
    """
    Add the keys of entries, each with its place, to what the other arguments hold.

    Args:
        entries: The records.
        numbers: The numbers of topics; entries of other topics are left out.
        ids, idem: Fingerprints, each followed by its place, in 256 lists by the first byte. (Not pairs: tens of thousands of
            those would be work for the garbage collector.)
        partitions: The places by partition.

    Raises:
        IndexLimit: A record's place does not fit the index.
    """
    for entry in entries:
        check_place(entry.seq, entry.offset)
        number = numbers.get(entry.topic)
        if number is None:
            continue
        place = PLACE.pack(entry.seq, number << OFFSET_BITS | entry.offset)
        if entry.event_id is not None:
            key = fingerprint(b"", entry.event_id)
            ids[key[0]].append(key + place)
        if entry.idem_key is not None:
            key = fingerprint(idem_scope(entry.topic, entry.space_id), entry.idem_key)
            idem[key[0]].append(key + place)
        for name in entry.partitions:
            partitions.setdefault(name, []).append(place)


# Below what the compiled module imports from here.
try:
    from ._index_keys import collect_keys as collect_keys
    from ._index_keys import fingerprint as fingerprint
except ImportError:
    collect_keys, fingerprint = collect_keys_py, fingerprint_py


def fingerprint_of_id(event_id: str) -> bytes:
    """The key under which an event id is entered."""
    return fingerprint(b"", event_id)


def fingerprint_of_idem(topic: str, space_id: str, idem_key: str) -> bytes:
    """The key under which an idempotency key is entered."""
    return fingerprint(idem_scope(topic, space_id), idem_key)


_Places = dict[bytes, list[RecordLocation]]

_seq_of = attrgetter("seq")


class MemoryIndex:
    """An ``Index`` that lives and dies with the process."""

    def __init__(self) -> None:
        self.was_reset: str | None = None
        self._lock = threading.Lock()
        self._is_closed = False
        self._covers = 0
        self._ids: _Places = {}
        self._idem: _Places = {}
        self._partitions: _Places = {}

    @property
    def covers(self) -> int:
        """Every record up to this seq is entered."""
        self._check_open()
        return self._covers

    def add(self, entries: Sequence[IndexEntry], covers: int) -> None:
        """Enter records and move ``covers`` up."""
        self._check_open()
        changes = [change for entry in entries for change in self._changes(entry)]
        with self._lock:
            for places, key, place in changes:
                known = places.setdefault(key, [])
                at = bisect_left(known, place)
                if place not in known[at : at + 1]:
                    known.insert(at, place)
            self._covers = max(self._covers, covers)

    def remove(self, entries: Sequence[IndexEntry]) -> None:
        """Forget records that the log dropped."""
        self._check_open()
        changes = [change for entry in entries for change in self._changes(entry)]
        with self._lock:
            for places, key, place in changes:
                known = places.get(key, [])
                at = bisect_left(known, place)
                if place in known[at : at + 1]:
                    del known[at]
                    if not known:
                        del places[key]

    def _changes(self, entry: IndexEntry) -> Iterator[tuple[_Places, bytes, RecordLocation]]:
        check_place(entry.seq, entry.offset)
        place = RecordLocation(entry.seq, entry.topic, entry.offset)
        if entry.event_id is not None:
            yield self._ids, fingerprint_of_id(entry.event_id), place
        if entry.idem_key is not None:
            yield self._idem, fingerprint_of_idem(entry.topic, entry.space_id, entry.idem_key), place
        for name in entry.partitions:
            yield self._partitions, partition_key(name), place

    def reset(self) -> None:
        """Forget everything."""
        self._check_open()
        with self._lock:
            self._covers = 0
            for places in (self._ids, self._idem, self._partitions):
                places.clear()

    def has_ids(self, event_ids: Sequence[str]) -> set[str]:
        """Those of the ids that have candidates."""
        return {event_id for event_id in event_ids if self.find_id(event_id)}

    def find_id(self, event_id: str) -> list[RecordLocation]:
        """Candidates for the record with this event id, by seq."""
        self._check_open()
        with self._lock:
            return list(self._ids.get(fingerprint_of_id(event_id), ()))

    def find_idem(self, topic: str, space_id: str, idem_key: str) -> list[RecordLocation]:
        """Candidates for the record with this idempotency key, by seq."""
        self._check_open()
        with self._lock:
            return list(self._idem.get(fingerprint_of_idem(topic, space_id, idem_key), ()))

    def partition(
        self, name: str, *, since: int, until: int | None, limit: int, backwards: bool = False
    ) -> list[RecordLocation]:
        """The first (or, ``backwards``, the last) ``limit`` records of a partition in a range of seqs."""
        self._check_open()
        key = partition_key(name)
        with self._lock:
            known = self._partitions.get(key, [])
            begin = bisect_right(known, since, key=_seq_of)
            end = len(known) if until is None else bisect_right(known, until, key=_seq_of)
            if backwards:
                return known[max(begin, end - limit) : end][::-1]
            return known[begin : min(end, begin + limit)]

    def stats(self) -> IndexStats:
        """How much it holds; nothing of it is on disk."""
        self._check_open()
        with self._lock:
            entries = sum(
                len(known) for places in (self._ids, self._idem, self._partitions) for known in places.values()
            )
            return IndexStats(entries, 0, self._covers, len(self._partitions))

    def snapshot(self) -> MemoryIndex:
        """A copy that later changes do not reach."""
        return self._copy(self._covers, lambda _place: True)

    def stale_copy(self, covers: int) -> MemoryIndex:
        """
        A copy that never heard of records above ``covers``.

        It is what a crash leaves when the index lagged. Records removed since then do not come back.
        """
        return self._copy(min(covers, self._covers), lambda place: place.seq <= covers)

    def _copy(self, covers: int, keeps: Callable[[RecordLocation], bool]) -> MemoryIndex:
        copy = MemoryIndex()
        copy._covers = covers
        with self._lock:
            for mine, its in (
                (self._ids, copy._ids),
                (self._idem, copy._idem),
                (self._partitions, copy._partitions),
            ):
                for key, known in mine.items():
                    if kept := [place for place in known if keeps(place)]:
                        its[key] = kept
        return copy

    def close(self) -> None:
        """Refuse everything from now on; ``snapshot`` and ``stale_copy`` go on, as a crash would leave them."""
        self._is_closed = True

    def _check_open(self) -> None:
        if self._is_closed:
            raise LogClosed
