"""
The memory store's SQLite file: its tables, and transactions that leave everything or nothing.

One connection, used by one thread at a time. Commits are synced (``synchronous=FULL``): what the store has said it
committed is there after a power cut.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from ..errors import MemoryStoreError

__all__ = ["MemoryDatabase"]

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
