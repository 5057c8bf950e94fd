"""
The index of the embedded log: which records have this id, and which name this partition.

An index is derived. It may be deleted at any time; it knows up to which seq it is built (``covers``),
and whoever owns the log enters everything after that again. It promises one thing: of the records up to
``covers``, none that was entered and not removed is missing from its answers. It does not promise that
an answer is right: ids are kept as fingerprints, so a ``Place`` is a candidate until the record there
was read and compared. It may also name records above ``covers``, if they were entered.

``LmdbIndex`` keeps it in a file, ``MemoryIndex`` in dicts; one suite of tests runs on both. What they must
agree on, fingerprints and limits, is here.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Final, NamedTuple, Protocol

from ..errors import LogError

__all__ = [
    "OFFSET_MAX",
    "PARTITION_BYTES_MAX",
    "SEQ_MAX",
    "TOPIC_COUNT_MAX",
    "Index",
    "IndexDamaged",
    "IndexEntry",
    "IndexFull",
    "IndexLimit",
    "IndexStats",
    "Place",
    "check_place",
    "fingerprint",
    "fingerprint_of_id",
    "fingerprint_of_idem",
    "partition_key",
]

SEQ_MAX: Final = (1 << 64) - 1
OFFSET_MAX: Final = (1 << 40) - 1
"""Five bytes: a thousand events a second in one topic, for 34 years."""
TOPIC_COUNT_MAX: Final = 1 << 24
PARTITION_BYTES_MAX: Final = 511
"""What a key of LMDB can hold; the log's own limit on partition names is far lower."""


class Place(NamedTuple):
    """Where a record may be that was asked for."""

    seq: int
    topic: str
    offset: int


class IndexEntry(NamedTuple):
    """What the index has to know of one record."""

    seq: int
    topic: str
    offset: int
    event_id: str | None
    """``None`` if the log made the id: it carries its seq and is found without an index."""
    idem_key: str | None
    space_id: str
    partitions: tuple[str, ...]


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
    hint = "raise index_bytes_max, or let retention drop old records; the log itself goes on"

    def __init__(self, path: str, bytes_max: int) -> None:
        super().__init__(path, bytes_max)
        self.path = path
        self.bytes_max = bytes_max

    def describe(self) -> str:
        return f"the index at {self.path} has reached its limit of {self.bytes_max} bytes"


class IndexDamaged(LogError):
    """The index cannot be read. It is derived: ``reset`` it, and enter the log's records again."""

    code = "log.index_damaged"
    hint = "nothing is lost: the index is rebuilt from the log"

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(path, problem)
        self.path = path
        self.problem = problem

    def describe(self) -> str:
        return f"the index at {self.path} is damaged: {self.problem}"


class IndexLimit(LogError):
    """A value does not fit the index's format."""

    code = "log.index_limit"

    def __init__(self, field: str, value: int, value_max: int) -> None:
        super().__init__(field, value, value_max)
        self.field = field
        self.value = value
        self.value_max = value_max

    def describe(self) -> str:
        return f"{self.field}: {self.value} is outside what the index can hold, which ends at {self.value_max}"


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

    def find_id(self, event_id: str) -> list[Place]:
        """Candidates for the record with this event id, by seq."""
        ...

    def find_idem(self, topic: str, space_id: str, idem_key: str) -> list[Place]:
        """Candidates for the record with this idempotency key in this topic and space, by seq."""
        ...

    def partition(
        self, name: str, *, since: int, until: int | None, limit: int, backwards: bool = False
    ) -> list[Place]:
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


def fingerprint(data: bytes) -> bytes:
    """
    Eight bytes that stand for ``data`` in the index.

    Any two of a hundred million ids share one with a chance of 1 in 3,700. That would cost reading one record
    in vain, as candidates are compared anyway.
    """
    return blake2b(data, digest_size=8).digest()


def fingerprint_of_id(event_id: str) -> bytes:
    """The key under which an event id is entered."""
    return fingerprint(event_id.encode("utf-8", "surrogatepass"))


def fingerprint_of_idem(topic: str, space_id: str, idem_key: str) -> bytes:
    """The key under which an idempotency key is entered; it counts within its topic and space."""
    topic_bytes = topic.encode("utf-8", "surrogatepass")
    space_bytes = space_id.encode("utf-8", "surrogatepass")
    # The lengths keep ("ab", "c") and ("a", "bc") apart.
    head = b"%d,%d:" % (len(topic_bytes), len(space_bytes))
    return fingerprint(head + topic_bytes + space_bytes + idem_key.encode("utf-8", "surrogatepass"))


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
