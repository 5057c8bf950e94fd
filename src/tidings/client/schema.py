"""
The tables of the local store, and what each promises.

- ``drafts``: events without a verdict, in the order in which they were submitted (``local_id``).
- ``events``: committed events. ``generation`` counts resets of the history: rows of an older one are orphans, until the
  server shows the same event again.
- ``quarantine``: rejected drafts with the reason.
- ``cursors``: up to which committed id a partition's events are all in ``events``.
- ``snapshots``: states of the view, derived, and safe to delete as long as nothing was pruned.
- ``meta``: single values.
"""

from __future__ import annotations

import os
import sqlite3
from typing import Final

from .errors import StoreBusy, StoreUnusable

__all__ = ["open_connection"]

_APPLICATION_ID: Final = 0x54494453
_VERSION: Final = 1
_OWNER_ONLY: Final = 0o600
_TABLES: Final = (
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID",
    """CREATE TABLE drafts (
        local_id INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, partitions BLOB NOT NULL,
        event BLOB NOT NULL)""",
    """CREATE TABLE events (
        id TEXT PRIMARY KEY, committed_id INTEGER NOT NULL, generation INTEGER NOT NULL, client_id TEXT NOT NULL,
        partitions BLOB NOT NULL, event BLOB NOT NULL, committed_at_ms REAL NOT NULL, was_duplicate INTEGER)
        WITHOUT ROWID""",
    "CREATE UNIQUE INDEX events_in_order ON events (generation, committed_id)",
    """CREATE TABLE quarantine (
        local_id INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, partitions BLOB NOT NULL, event BLOB NOT NULL,
        code TEXT NOT NULL, errors BLOB NOT NULL, rejected_at_ms INTEGER NOT NULL)""",
    "CREATE TABLE cursors (partition TEXT PRIMARY KEY, since INTEGER NOT NULL) WITHOUT ROWID",
    """CREATE TABLE snapshots (
        name TEXT PRIMARY KEY, version TEXT NOT NULL, partitions BLOB NOT NULL, through INTEGER NOT NULL,
        checksum INTEGER NOT NULL, state BLOB NOT NULL, covered INTEGER NOT NULL) WITHOUT ROWID""",
)


def open_connection(path: str) -> sqlite3.Connection:
    """
    Open the store at ``path`` for this process alone, making its tables if there are none.

    Raises:
        StoreBusy: Somebody else has it open.
        StoreUnusable: It is something else, of a newer version, damaged, or cannot be opened.
    """
    try:
        _make_private(path)
        connection = sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)
    except (sqlite3.Error, OSError) as error:
        raise StoreUnusable(path, str(error)) from error
    try:
        _prepare(connection, path)
    except sqlite3.Error as error:
        connection.close()
        if "locked" in str(error):
            raise StoreBusy(path, "another client has it open") from error
        raise StoreUnusable(path, str(error)) from error
    except StoreUnusable:
        connection.close()
        raise
    return connection


def _make_private(path: str) -> None:
    """See that nobody but the owner can read the file. SQLite gives its journals the same mode as the file they belong to."""
    if path == ":memory:":
        return
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _OWNER_ONLY)
    try:
        if os.fstat(file).st_mode & 0o077:
            os.fchmod(file, _OWNER_ONLY)
    finally:
        os.close(file)


def _prepare(connection: sqlite3.Connection, path: str) -> None:
    # Before the first access, so that the lock is taken with it and no shared memory file is needed.
    connection.execute("PRAGMA locking_mode = EXCLUSIVE")
    connection.execute("PRAGMA journal_mode = WAL")
    # Every commit reaches the disk before it returns: a draft that submit() has taken survives a loss of power.
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("BEGIN IMMEDIATE")
    found = connection.execute("PRAGMA user_version").fetchone()[0]
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    is_empty = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0
    if not is_empty and application != _APPLICATION_ID:
        raise StoreUnusable(path, "is a database of another program")
    if found > _VERSION:
        raise StoreUnusable(path, f"has format {found}, and this version reads up to {_VERSION}")
    if is_empty:
        for statement in _TABLES:
            connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {_VERSION}")
    connection.execute("COMMIT")
