"""
What every engine of the log promises.

A ``Log`` has eight methods. Everything else (iterating, tailing, the last n, exporting) is built on
them in ``reading`` and holds for any engine; one conformance suite runs on all of them.

Words: ``seq`` counts over the whole log, from 1; ``offset`` counts within a topic, from 0. ``since``
is excluded, ``until`` included; ``from_offset`` is included, ``to_offset`` excluded; ``from_time`` is
included, ``to_time`` excluded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Annotated, Protocol

import msgspec

from tidings.core.errors import TidingsError
from tidings.core.events import Event

from .record import Record
from .retention import Holders, RetentionPlan, SegmentInfo


class Appended(msgspec.Struct, frozen=True, gc=False):
    """The event is durable at this place."""

    seq: int
    offset: int
    event_id: str


class Duplicate(msgspec.Struct, frozen=True, gc=False):
    """The event was committed before, at this place. Nothing was written."""

    seq: int
    offset: int
    event_id: str


class Refused(msgspec.Struct, frozen=True):
    """The event cannot be stored; nothing of it was written."""

    error: TidingsError


Verdict = Appended | Duplicate | Refused

Authorise = Callable[[Event], None]
"""Raises a ``TidingsError`` if the event must not be stored. Must not block, nor change the event."""


class Position(msgspec.Struct, frozen=True):
    """Where a reader stands: a seq means nothing without the epoch it was counted in."""

    epoch: str
    seq: int


class Query(msgspec.Struct, frozen=True, kw_only=True):
    """
    What to read. Conditions are joined by and.

    Without ``topic`` records of all topics come in seq order. Without a lower bound reading begins at
    the oldest record kept; with one, a reader is told (``PositionTrimmed``) if records it asked for are
    gone. ``backwards`` turns the order round and reads from the upper bound down.
    """

    topic: str | None = None
    partitions: tuple[str, ...] = ()
    """Only records that name at least one of these."""
    event_ids: tuple[str, ...] = ()
    """Only the records with these ids; found without looking at any others."""
    since: Annotated[int, msgspec.Meta(ge=0)] | None = None
    until: Annotated[int, msgspec.Meta(ge=0)] | None = None
    from_offset: Annotated[int, msgspec.Meta(ge=0)] | None = None
    to_offset: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Offsets need a ``topic``."""
    from_time: datetime | None = None
    to_time: datetime | None = None
    """Bounds on the time of writing, which never goes back within a log."""
    backwards: bool = False
    epoch: str | None = None
    """The epoch the seqs and offsets above were counted in; another one is refused."""
    known_drops: Annotated[int, msgspec.Meta(ge=0)] = 0
    """The reader knows that records up to this seq were dropped, and is not told again. Set by ``Page.next``: a reader that
    began at the oldest record kept meets seqs below those of other topics' dropped ones."""


class Page(msgspec.Struct, frozen=True):
    """
    Some records, and how to go on.

    ``next`` continues right after this page; ``at_end`` says that nothing more was there to read when the
    page was made. A page can be empty and not be the end: a filter may have passed over all it looked at.
    """

    records: list[Record]
    next: Query
    at_end: bool


class TopicInfo(msgspec.Struct, frozen=True):
    """One topic's bounds. An empty topic has ``first_offset == next_offset``."""

    topic: str
    first_offset: int
    next_offset: int
    first_seq: int
    last_seq: int
    size_bytes: int
    segments: tuple[SegmentInfo, ...]


class Health(msgspec.Struct, frozen=True):
    """Whether the log can take events, and why not."""

    is_writable: bool
    is_durable: bool
    """Whether events are on disk before they are acknowledged."""
    is_storage_full: bool = False
    is_index_full: bool = False
    """The index has reached its limit: events with ids of their own, keys or partitions are refused, others are stored."""
    problem: str | None = None


class ReadableLog(Protocol):
    """A log that is read: in files, or at a node (``tidings.cli.node_log``)."""

    @property
    def position(self) -> Position:
        """Epoch and the seq of the last committed record (0 in an empty log)."""
        ...

    async def read(self, query: Query, *, limit: int = 1000, bytes_max: int = 4 << 20) -> Page:
        """
        Read one page: at most ``limit`` records and about ``bytes_max`` bytes, but at least one record
        if there is one.

        Raises:
            PositionTrimmed: Records that the query's lower bound asks for were dropped.
            EpochMismatch: The query's epoch is not the log's.
            CorruptLog: A record on the way is lost or altered.
        """
        ...

    async def wait(self, after: int, topic: str | None = None) -> int:
        """
        Wait until a record with a seq above ``after`` is committed (in ``topic``, if given), and return
        the highest seq committed. Returns at once if there is one already.

        Raises:
            LogClosed: The log was closed meanwhile.
        """
        ...

    def topics(self) -> dict[str, TopicInfo]:
        """The topics that hold or held records."""
        ...

    def topic(self, name: str) -> TopicInfo | None:
        """One of them, without looking at the others; ``None`` if it holds none."""
        ...


class Log(ReadableLog, Protocol):
    """The commit log."""

    @property
    def dropped_through_seq(self) -> int:
        """Retention has dropped records up to this seq, of some topic (0 if it has dropped none): who stands before it has missed some."""
        ...

    async def append(
        self, event: Event, authorise: Authorise | None = None, *, from_reserve: bool = False
    ) -> Appended | Duplicate:
        """
        Store one event; returns when it is durable.

        Args:
            event: What to store.
            authorise: Called in the same step of the event loop in which the log accepts the event, and again if it had to wait
                in between: a right that was revoked meanwhile no longer counts. What it raises is the answer, and nothing
                is stored; a repeated event is no exception.
            from_reserve: The event may be stored with space that is kept back for when the disk is full: for records without
                which nothing could be freed.

        Cancelling the call does not take the event back: its outcome is then unknown, and sending it
        again with the same event id finds out.

        Raises:
            InvalidEvent: It cannot be stored as it is.
            IdConflict: Its id or idempotency key stands for another event.
            StorageFull: There was no room; nothing was stored.
            LogFenced: A write failed; whether the event was stored is unknown.
            LogClosed, ReadOnlyLog: This log takes no events.
        """
        ...

    async def append_many(self, events: Sequence[Event], *, authorise: Authorise | None = None) -> list[Verdict]:
        """
        Store events in order; one verdict each, when all are durable.

        A refused event does not keep the others from being stored. ``authorise`` is called for each event as in ``append``;
        what it raises becomes that event's ``Refused``.

        Raises:
            StorageFull, LogFenced, LogClosed, ReadOnlyLog: as for ``append``, for all of them.
        """
        ...

    async def drop(self, plan: RetentionPlan, holders: Holders | None = None) -> RetentionPlan:
        """
        Carry out a retention plan. Segments it names that are gone already are passed over.

        Args:
            plan: What may go.
            holders: Those who may need records: asked about each segment right before it goes, since the plan may be out
                of date. A log knows of no readers itself; ``EventBus.holders`` are those of a bus.

        Returns:
            The plan as it was carried out: what was needed after all is not among its drops.
        """
        ...

    def health(self) -> Health:
        """Whether the log can take events."""
        ...

    async def close(self) -> None:
        """Finish what is under way and let go of everything. Closing twice is fine."""
        ...
