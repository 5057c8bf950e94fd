"""
The outbox: events that were committed together with a memory, on their way to the bus.

Emptying it is idempotent (an event's id is its row's) and resumable: what a crash left half-way is pending again when the
drain starts. Events of one memory go out in order; while one of them waits for its next try, the later ones wait with it,
and those of other memories do not. What the bus refuses for good, or five times, is set aside with the reason and stays.

The store's file is SQLite: one connection, used by one thread at a time, and transactions that leave everything or nothing.
Commits are synced (``synchronous=FULL``): what was committed is there after a power cut.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
from collections.abc import Awaitable, Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import msgspec

from tidings.core.clock import Clock
from tidings.core.errors import InvalidEvent, TidingsError
from tidings.core.events import Event, EventMeta

from ..errors import MemoryStoreError
from ..ports import Publish
from .requests import OutboxSettings

_VERSION: Final = 2
_TABLES: Final = """
CREATE TABLE memories (
    memory_id     TEXT PRIMARY KEY,
    space_id      TEXT NOT NULL,
    episode_id    TEXT NOT NULL,
    bucket        TEXT NOT NULL,
    text          TEXT NOT NULL,
    content       TEXT NOT NULL,
    content_hash  TEXT NOT NULL,
    simhash       BLOB NOT NULL,
    minhash       BLOB NOT NULL,
    revision      INTEGER NOT NULL,
    said_count    INTEGER NOT NULL,
    created_ns    INTEGER NOT NULL,
    updated_ns    INTEGER NOT NULL,
    security_band TEXT
) STRICT;
CREATE INDEX memories_by_time ON memories (space_id, updated_ns);

CREATE TABLE bands (
    space_id   TEXT NOT NULL,
    band       INTEGER NOT NULL,
    key        BLOB NOT NULL,
    memory_id  TEXT NOT NULL REFERENCES memories,
    PRIMARY KEY (space_id, band, key, memory_id)
) STRICT, WITHOUT ROWID;
CREATE INDEX bands_by_memory ON bands (memory_id);

CREATE TABLE links (
    memory_id   TEXT NOT NULL REFERENCES memories,
    other_id    TEXT NOT NULL REFERENCES memories,
    similarity  REAL NOT NULL,
    PRIMARY KEY (memory_id, other_id)
) STRICT, WITHOUT ROWID;

CREATE TABLE receipts (
    source_key  TEXT PRIMARY KEY,
    receipt_id  TEXT NOT NULL UNIQUE,
    memory_id   TEXT NOT NULL REFERENCES memories,
    body        TEXT NOT NULL,
    summary     TEXT NOT NULL
) STRICT;

CREATE TABLE episodes (
    episode_id  TEXT PRIMARY KEY,
    space_id    TEXT NOT NULL,
    bucket      TEXT NOT NULL,
    number      INTEGER NOT NULL,
    first_ns    INTEGER NOT NULL,
    last_ns     INTEGER NOT NULL,
    memories    INTEGER NOT NULL,
    UNIQUE (space_id, bucket, number)
) STRICT;

CREATE TABLE gathered (
    space_id    TEXT PRIMARY KEY,
    writes      INTEGER NOT NULL,
    duplicates  INTEGER NOT NULL,
    since_ns    INTEGER NOT NULL,
    ticks       INTEGER NOT NULL
) STRICT;

CREATE TABLE outbox (
    sequence_number  INTEGER PRIMARY KEY AUTOINCREMENT,
    outbox_id        TEXT NOT NULL UNIQUE,
    aggregate_id     TEXT NOT NULL,
    aggregate_type   TEXT NOT NULL,
    event_type       TEXT NOT NULL,
    topic            TEXT NOT NULL,
    partition_key    TEXT NOT NULL,
    payload          TEXT NOT NULL,
    metadata         TEXT NOT NULL,
    status           TEXT NOT NULL CHECK (status IN ('pending', 'processing', 'delivered', 'failed', 'dlq')),
    attempts         INTEGER NOT NULL DEFAULT 0,
    next_retry_ns    INTEGER NOT NULL,
    delivered_ns     INTEGER,
    problem          TEXT
) STRICT;
CREATE INDEX outbox_by_status ON outbox (status, sequence_number);
CREATE INDEX outbox_by_aggregate ON outbox (aggregate_id, status, sequence_number);
"""
_UPGRADES: Final = {
    # The bands of what is there were not kept, and none is guessed.
    1: "ALTER TABLE memories ADD COLUMN security_band TEXT",
}
"""By format, what makes the next one of it."""


class MemoryDatabase:
    """
    The open file.

    Args:
        path: Where it is; made if it is not there, and brought up to date if an older version made it. ``:memory:`` keeps
            nothing, for trials.

    Raises:
        MemoryStoreError: It cannot be opened, or was made by a version this one does not know.
    """

    def __init__(self, path: Path | str) -> None:
        self._lock = threading.Lock()
        try:
            # Transactions are begun and ended here, not by the module's own guesses.
            self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=5.0)
        except sqlite3.Error as error:
            raise MemoryStoreError("open", str(error)) from error
        try:
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute("PRAGMA synchronous = FULL")
            self._connection.execute("PRAGMA foreign_keys = ON")
            with self.transaction("open") as connection:
                self._prepare(connection)
        except (sqlite3.Error, MemoryStoreError) as error:
            self._connection.close()
            if isinstance(error, MemoryStoreError):
                raise
            raise MemoryStoreError("open", str(error)) from error

    @contextlib.contextmanager
    def transaction(self, operation: str) -> Iterator[sqlite3.Connection]:
        """
        Everything inside is committed together, or not at all.

        It takes the write lock at once: what is read inside is what is still true when it is written.

        Raises:
            MemoryStoreError: SQLite refused.
        """
        with self._lock:
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                try:
                    yield self._connection
                except BaseException:
                    # A full disk makes SQLite roll back by itself; a second roll-back would hide the reason.
                    if self._connection.in_transaction:
                        self._connection.execute("ROLLBACK")
                    raise
                self._commit()
            except sqlite3.Error as error:
                raise MemoryStoreError(operation, str(error)) from error

    def close(self) -> None:
        """Close the file; closing twice is closing once."""
        with self._lock:
            self._connection.close()

    def _commit(self) -> None:
        try:
            self._connection.execute("COMMIT")
        except sqlite3.Error:
            # A commit that failed (a full disk) leaves the transaction open, and with it the lock.
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise

    def _prepare(self, connection: sqlite3.Connection) -> None:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version == 0:
            # Not executescript: that would commit first, and half the tables could remain after a crash.
            for statement in _TABLES.split(";"):
                if statement.strip():
                    connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {_VERSION}")
            return
        while version in _UPGRADES:
            connection.execute(_UPGRADES[version])
            version += 1
            connection.execute(f"PRAGMA user_version = {version}")
        if version != _VERSION:
            raise MemoryStoreError("open", f"the file has format {version}, and this version knows {_VERSION}")


_NS: Final = 1_000_000_000
_PUBLISH_FAILURES: Final = (TidingsError, OSError, TimeoutError, RuntimeError)


class DeadReason:
    """Why an event was set aside."""

    MAX_RETRIES: Final = "max_retries_exceeded"
    INVALID: Final = "schema_validation_failed"
    PERMANENT: Final = "permanent_failure"


class OutboxRow(msgspec.Struct, frozen=True, kw_only=True):
    """One event in the outbox."""

    sequence_number: int
    outbox_id: str
    aggregate_id: str
    event_type: str
    topic: str
    status: str
    attempts: int
    next_retry_ns: int
    problem: str | None


class _Meta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The part of an envelope that has no column of its own."""

    space_id: str
    ts: datetime
    actor: str | None = None
    trace_id: str | None = None
    band: str | None = None
    priority: int | None = None
    extra: dict[str, Any] | None = None


def insert_event(
    connection: sqlite3.Connection, event: Event, *, aggregate_id: str, aggregate_type: str = "memory", now_ns: int
) -> None:
    """Put an event into the outbox, within the caller's transaction."""
    meta = event.meta
    kept = _Meta(
        space_id=meta.space_id,
        ts=meta.ts,
        actor=meta.actor if isinstance(meta.actor, str) else None,
        trace_id=meta.trace_id,
        band=None if meta.band is None else str.__str__(meta.band),
        priority=meta.priority if isinstance(meta.priority, int) else None,
        extra=dict(meta.extra) if meta.extra is not None else None,
    )
    connection.execute(
        "INSERT INTO outbox (outbox_id, aggregate_id, aggregate_type, event_type, topic, partition_key, payload, metadata,"
        " status, next_retry_ns) VALUES (?, ?, ?, ?, ?, ?, ?, ?, 'pending', ?)",
        (
            *(meta.event_id, aggregate_id, aggregate_type, str.__str__(meta.type), meta.topic, meta.space_id),
            *(msgspec.json.encode(event.payload).decode(), msgspec.json.encode(kept).decode(), now_ns),
        ),
    )


class Outbox:
    """
    Empties the outbox to a bus.

    Args:
        database: The store's file.
        publish: Where events go.
        clock: For when to try again.
        settings: How often, and how long delivered rows are kept.
    """

    def __init__(
        self, database: MemoryDatabase, publish: Publish, clock: Clock, settings: OutboxSettings | None = None
    ) -> None:
        self._database = database
        self._publish = publish
        self._clock = clock
        self._settings = settings if settings is not None else OutboxSettings()
        self._lock = asyncio.Lock()
        self._is_resumed = False

    async def drain(self) -> int:
        """
        Publish what is due, in order; returns how many events were delivered.

        A publish that fails is noted with its row and does not come out of here. Two drains at once take turns.
        """
        delivered = 0
        async with self._lock:
            if not self._is_resumed:
                await asyncio.to_thread(self._resume)
            # Should this be cut short (cancelled, or by an error nobody foresaw), the next drain takes up what it left.
            self._is_resumed = False
            blocked: set[str] = set()
            while batch := await asyncio.to_thread(self._claim, self._clock.now_ns(), blocked):
                delivered += await self._deliver(batch, blocked)
            await asyncio.to_thread(self._prune, self._clock.now_ns())
            self._is_resumed = True
        return delivered

    async def run(self, before: Callable[[], Awaitable[object]] | None = None) -> None:
        """
        Drain whenever something is due, until cancelled; call it in a task of your own.

        Args:
            before: Awaited ahead of each drain, at least once a minute; it may put more into the outbox.
        """
        while True:
            if before is not None:
                await before()
            await self.drain()
            due_ns = await asyncio.to_thread(self._next_due_ns)
            wait_s = 60.0 if due_ns is None else (due_ns - self._clock.now_ns()) / _NS
            # At least a moment, so that a row that is due and cannot go does not turn this into a busy loop.
            await self._clock.sleep(min(60.0, max(0.1, wait_s)))

    async def rows(self, status: str | None = None, count_max: int = 1000) -> list[OutboxRow]:
        """The outbox's rows in order, of one status or of all."""
        return await asyncio.to_thread(self._rows, status, count_max)

    async def retry_dead(self) -> int:
        """Give every event that was set aside another set of attempts; returns how many."""
        return await asyncio.to_thread(self._revive, self._clock.now_ns())

    async def _deliver(self, batch: list[tuple[OutboxRow, Event]], blocked: set[str]) -> int:
        delivered = 0
        for row, event in batch:
            if row.aggregate_id in blocked:
                await asyncio.to_thread(self._release, row)
                continue
            try:
                await self._publish(event)
            except _PUBLISH_FAILURES as error:
                blocked.add(row.aggregate_id)
                await asyncio.to_thread(self._failed, row, error, self._clock.now_ns())
                continue
            # A crash here publishes the event again later, under the id it has: the log's dedupe makes that one event.
            await asyncio.to_thread(self._delivered, row, self._clock.now_ns())
            delivered += 1
        return delivered

    def _resume(self) -> None:
        with self._database.transaction("resume") as connection:
            connection.execute("UPDATE outbox SET status = 'pending' WHERE status = 'processing'")

    def _claim(self, now_ns: int, blocked: set[str]) -> list[tuple[OutboxRow, Event]]:
        with self._database.transaction("claim") as connection:
            rows = connection.execute(
                f"SELECT {_COLUMNS}, payload, metadata FROM outbox AS mine WHERE status = 'pending' AND next_retry_ns <= ?"
                " AND aggregate_id NOT IN (SELECT value FROM json_each(?))"
                " AND NOT EXISTS (SELECT 1 FROM outbox AS earlier WHERE earlier.aggregate_id = mine.aggregate_id"
                " AND earlier.status = 'pending' AND earlier.next_retry_ns > ?"
                " AND earlier.sequence_number < mine.sequence_number)"
                " ORDER BY sequence_number LIMIT ?",
                (now_ns, msgspec.json.encode(sorted(blocked)).decode(), now_ns, self._settings.batch_count_max),
            ).fetchall()
            connection.executemany(
                "UPDATE outbox SET status = 'processing' WHERE sequence_number = ?", [(row[0],) for row in rows]
            )
        return [(_row(row), _event(row)) for row in rows]

    def _release(self, row: OutboxRow) -> None:
        self._set(row, "UPDATE outbox SET status = 'pending' WHERE sequence_number = ?")

    def _delivered(self, row: OutboxRow, now_ns: int) -> None:
        self._set(
            row,
            "UPDATE outbox SET status = 'delivered', attempts = attempts + 1, delivered_ns = ?, problem = NULL"
            " WHERE sequence_number = ?",
            now_ns,
        )

    def _failed(self, row: OutboxRow, error: Exception, now_ns: int) -> None:
        attempts = row.attempts + 1
        problem = f"{type(error).__name__}: {error}"[:500]
        dead: str | None = None
        if isinstance(error, InvalidEvent):
            dead = DeadReason.INVALID
        elif isinstance(error, TidingsError) and not error.retryable:
            dead = DeadReason.PERMANENT
        elif attempts >= self._settings.attempts_max:
            dead = DeadReason.MAX_RETRIES
        settings = self._settings
        delay_s = min(settings.delay_s_max, settings.delay_s * settings.multiplier ** min(attempts - 1, 64))
        self._set(
            row,
            "UPDATE outbox SET status = ?, attempts = ?, next_retry_ns = ?, problem = ? WHERE sequence_number = ?",
            "pending" if dead is None else "dlq",
            attempts,
            now_ns + round(delay_s * _NS),
            problem if dead is None else f"{dead}: {problem}",
        )

    def _set(self, row: OutboxRow, statement: str, *values: object) -> None:
        with self._database.transaction("outbox") as connection:
            connection.execute(statement, (*values, row.sequence_number))

    def _revive(self, now_ns: int) -> int:
        with self._database.transaction("revive") as connection:
            statement = "UPDATE outbox SET status = 'pending', attempts = 0, next_retry_ns = ? WHERE status = 'dlq'"
            return connection.execute(statement, (now_ns,)).rowcount

    def _prune(self, now_ns: int) -> None:
        before_ns = now_ns - round(self._settings.keep_delivered_s * _NS)
        with self._database.transaction("prune") as connection:
            connection.execute("DELETE FROM outbox WHERE status = 'delivered' AND delivered_ns < ?", (before_ns,))

    def _next_due_ns(self) -> int | None:
        with self._database.transaction("read") as connection:
            row = connection.execute("SELECT min(next_retry_ns) FROM outbox WHERE status = 'pending'").fetchone()
        due_ns: int | None = row[0]
        return due_ns

    def _rows(self, status: str | None, count_max: int) -> list[OutboxRow]:
        with self._database.transaction("read") as connection:
            rows = connection.execute(
                f"SELECT {_COLUMNS} FROM outbox WHERE :status IS NULL OR status = :status"
                " ORDER BY sequence_number LIMIT :count",
                {"status": status, "count": count_max},
            ).fetchall()
        return [_row(row) for row in rows]


_COLUMNS: Final = ", ".join(OutboxRow.__struct_fields__)


def _row(row: tuple[Any, ...]) -> OutboxRow:
    names = OutboxRow.__struct_fields__
    return OutboxRow(**dict(zip(names, row[: len(names)], strict=True)))


def _event(row: tuple[Any, ...]) -> Event:
    known = _row(row)
    payload, metadata = row[-2:]
    kept = msgspec.json.decode(metadata, type=_Meta)
    meta = EventMeta(
        topic=known.topic,
        type=known.event_type,
        space_id=kept.space_id,
        event_id=known.outbox_id,
        ts=kept.ts,
        actor=kept.actor,
        trace_id=kept.trace_id,
        band=kept.band,
        priority=kept.priority,
        extra=kept.extra,
    )
    return Event(meta, msgspec.json.decode(payload))
