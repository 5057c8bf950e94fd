"""
What the log is compared with: the bare disk, SQLite, and the least that a group commit in Python can be.

None of them checks, gives ids, tells duplicates, wakes readers or fills segments: they are floors, not rivals.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import orjson

from tidings.core.clock import format_utc
from tidings.core.events import Event
from tidings.core.ids import LogIdMaker
from tidings.log import Appended
from tidings.log.segment import encode_line

__all__ = ["RECYCLED_BYTES", "BareGroupCommit", "RawFile", "SqliteTable"]

RECYCLED_BYTES: Final = 32 << 20
_WRITTEN_AT: Final = b"2026-01-01T00:00:00.000000Z"


class RawFile:
    """A file that is written and synced in place, without threads: what the disk gives at best."""

    def __init__(self, path: Path, *, is_recycled: bool) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        self._is_recycled = is_recycled
        self._at = 0
        if is_recycled:
            for _ in range(RECYCLED_BYTES >> 20):
                os.write(self._fd, bytes(1 << 20))
            os.fsync(self._fd)

    def commit(self, data: bytes) -> None:
        """Write and sync."""
        if self._is_recycled and self._at + len(data) > RECYCLED_BYTES:
            self._at = 0
        self._at += os.pwrite(self._fd, data, self._at)
        os.fdatasync(self._fd)

    def latency_ns(self, data: bytes) -> int:
        """How long one commit of ``data`` took."""
        begin = time.perf_counter_ns()
        self.commit(data)
        return time.perf_counter_ns() - begin

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._fd)


class SqliteTable:
    """Lines in a table of SQLite, in WAL mode with ``synchronous=FULL``: each transaction is synced."""

    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(path, isolation_level=None)
        self._connection.execute("PRAGMA journal_mode=WAL")
        self._connection.execute("PRAGMA synchronous=FULL")
        self._connection.execute("CREATE TABLE log (seq INTEGER PRIMARY KEY, line BLOB NOT NULL)")

    def commit(self, lines: Sequence[bytes]) -> None:
        """Insert the lines in one transaction."""
        self._connection.execute("BEGIN")
        self._connection.executemany("INSERT INTO log (line) VALUES (?)", [(line,) for line in lines])
        self._connection.execute("COMMIT")

    def close(self) -> None:
        """Let go of the file."""
        self._connection.close()


class _Batch:
    """What waits for one sync. The future is replaced if a waiter's cancellation took it along."""

    __slots__ = ("future",)

    def __init__(self, future: asyncio.Future[None]) -> None:
        self.future = future


class BareGroupCommit:
    """
    Lines of one tick share a write, a sync and a future; a thread does the disk's part.

    The next commit starts before the waiters of the last one are woken.
    """

    def __init__(self, path: Path) -> None:
        self._loop = asyncio.get_running_loop()
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._seq = 0
        self._ids = LogIdMaker()
        self._lines: list[bytes] = []
        self._batch = _Batch(self._loop.create_future())
        self._committing: tuple[list[bytes], _Batch] = ([], self._batch)
        self._is_busy = self._is_due = self._is_stopping = False
        self._go = threading.Lock()
        self._go.acquire()
        self._thread = threading.Thread(target=self._sync_each, daemon=True)
        self._thread.start()

    async def append(self, meta: Mapping[str, Any], payload: Mapping[str, Any]) -> int:
        """Write one line; its seq, once it is on disk."""
        self._seq = seq = self._seq + 1
        line = {"offset": seq, "seq": seq, "meta": meta, "payload": payload}
        await self._commit(orjson.dumps(line, None, orjson.OPT_APPEND_NEWLINE))
        return seq

    async def append_event(self, event: Event) -> Appended:
        """
        The same for an event of ours and a line of ours: an id, a checksum, a verdict, but not one check.

        What the log costs beyond this is its own; what this costs beyond ``append`` comes with the format.
        """
        self._seq = seq = self._seq + 1
        meta = event.meta
        event_id = meta._event_id = self._ids.make(seq)
        body = (
            b'"offset":%d,"seq":%d,"meta":{"written_at":"%b","topic":%b,"type":%b,"space_id":%b,"event_id":"%b",'
            b'"ts":"%b"},"payload":%b}'
        ) % (
            seq,
            seq,
            _WRITTEN_AT,
            orjson.dumps(meta.topic),
            orjson.dumps(meta.type),
            orjson.dumps(meta.space_id),
            event_id.encode(),
            format_utc(meta._ts_ns),
            orjson.dumps(event.payload),
        )
        await self._commit(encode_line(body))
        return Appended(seq, seq, event_id)

    async def _commit(self, line: bytes) -> None:
        self._lines.append(line)
        if not self._is_busy and not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._flush)
        batch = self._batch
        try:
            await batch.future
        except asyncio.CancelledError:
            await self._wait_on(batch)

    async def _wait_on(self, batch: _Batch) -> None:
        """Another waiter's cancellation must not end this one's wait."""
        while True:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise asyncio.CancelledError
            if batch.future.cancelled():
                batch.future = self._loop.create_future()
            try:
                await batch.future
            except asyncio.CancelledError:
                continue
            return

    def _flush(self) -> None:
        self._is_due = False
        if self._is_busy or not self._lines:
            return
        self._committing = self._lines, self._batch
        self._lines = []
        self._batch = _Batch(self._loop.create_future())
        self._is_busy = True
        self._go.release()

    def _sync_each(self) -> None:
        while True:
            self._go.acquire()
            if self._is_stopping:
                return
            os.write(self._fd, b"".join(self._committing[0]))
            os.fdatasync(self._fd)
            self._loop.call_soon_threadsafe(self._synced)

    def _synced(self) -> None:
        batch = self._committing[1]
        self._is_busy = False
        self._flush()
        if batch.future.done():
            batch.future = self._loop.create_future()
        batch.future.set_result(None)

    def close(self) -> None:
        """Stop the thread; nothing may be waiting."""
        self._is_stopping = True
        self._go.release()
        self._thread.join()
        os.close(self._fd)
