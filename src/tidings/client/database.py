"""
The local store's tables and transactions: each public method of ``Database`` is one transaction, and is on disk when it returns.

Synchronous and used by one thread at a time; ``store`` puts it on a thread of its own. Whatever moment a process is
killed at, the next one finds either all of a transaction or nothing of it. So a page's events are never there without
its cursor moving, nor the other way round, and a draft is in exactly one of three places: waiting, committed, quarantine.

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
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import msgspec

from tidings.sync.client_effects import ItemCommitted, ItemVerdict
from tidings.wire.sync_frames import CommittedEvent, ItemError, SubmitItem

from .drafts import Committed, LocalEvent, Pending, QuarantinedDraft, Rejected, Verdict, local_event, same_content
from .errors import DraftQueueFull, InvalidDraft, StoreBusy, StoreMismatch, StoreUnusable

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


_encode: Final = msgspec.json.encode
_NAMES: Final = msgspec.json.Decoder(list[str])
_ERRORS: Final = msgspec.json.Decoder(tuple[ItemError, ...])
_IDS_MAX: Final = 5000
_EVENT: Final = "id, committed_id, client_id, partitions, event, committed_at_ms"


class StoredDraft(msgspec.Struct, frozen=True):
    """A draft as it waits."""

    local_id: int
    item: SubmitItem


class Counts(msgspec.Struct, frozen=True):
    """How much the store holds of what is reported."""

    quarantined: int
    orphans: int


class Opened(msgspec.Struct, frozen=True):
    """What a client begins with."""

    cursors: dict[str, int]
    model_version: int | None
    pruned_through: int


class Applied(msgspec.Struct, frozen=True):
    """What a transaction changed."""

    events: list[LocalEvent] = []
    """Events that were not there before, lowest committed id first."""
    verdicts: dict[str, Verdict] = {}
    """Drafts that got their verdict by it, by id."""
    rejected: list[QuarantinedDraft] = []
    is_conflicting: bool = False
    """Nothing was stored: another event is known at the committed id of one of these."""


class ViewSnapshot(msgspec.Struct, frozen=True):
    """A saved state of the view: all events up to ``through`` in these partitions, folded."""

    version: str
    partitions: list[str]
    through: int
    checksum: int
    state: bytes
    covered: int = 0
    """Up to here the state came from the server, and the events were never here."""


class Database:
    """
    One client's store.

    Args:
        path: The file, or ``:memory:``.
        client_id: Whose it is; a new store is marked with it.

    Raises:
        StoreBusy, StoreMismatch, StoreUnusable: It cannot be opened.
    """

    def __init__(self, path: str, client_id: str) -> None:
        self._path = path
        self._client_id = client_id
        self._connection = open_connection(path)
        try:
            with self._transaction():
                owner = self._meta("client_id")
                if owner is None:
                    self._set_meta("client_id", client_id)
                elif owner != client_id:
                    raise StoreMismatch(path, f"belongs to the client {owner!r}, not to {client_id!r}")
                self._generation = int(self._meta("generation") or 0)
                # Kept here as well, so that adding a draft does not cost a look at all of them.
                self._drafts_count, self._drafts_bytes = self._one(
                    "SELECT count(*), CAST(total(length(event)) AS INTEGER) FROM drafts"
                )
        except BaseException:
            self._connection.close()
            raise

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def opened(self, partitions: Sequence[str]) -> Opened:
        """What is known of these partitions; those never heard of begin at 0."""
        with self._transaction():
            known = dict(self._all("SELECT partition, since FROM cursors"))
            model_version = self._meta("model_version")
            return Opened(
                {name: known.get(name, 0) for name in partitions}, model_version, int(self._meta("pruned_through") or 0)
            )

    def counts(self) -> Counts:
        """How many rejected drafts and orphans there are."""
        (quarantined,) = self._one("SELECT count(*) FROM quarantine")
        (orphans,) = self._one("SELECT count(*) FROM events WHERE generation < ?", self._generation)
        return Counts(quarantined, orphans)

    # Drafts

    def add_drafts(self, items: Sequence[SubmitItem], *, count_max: int, bytes_max: int) -> list[StoredDraft | Verdict]:
        """
        Keep drafts, all of them or none; for one that was kept before, its verdict so far.

        Raises:
            DraftQueueFull: There is no room for all of them.
            InvalidDraft: An id belongs to other content here.
        """
        answers: list[StoredDraft | Verdict] = []
        with self._transaction():
            for item in items:
                known = self._known(item)
                answers.append(self._insert_draft(item) if known is None else known)
            new = [answer for answer in answers if isinstance(answer, StoredDraft)]
            self._check_room(new, count_max, bytes_max)
        self._note_drafts(new, 1)
        return answers

    def _insert_draft(self, item: SubmitItem) -> StoredDraft:
        self._connection.execute("DELETE FROM events WHERE id = ? AND generation < ?", (item.id, self._generation))
        done = self._connection.execute(
            "INSERT INTO drafts (id, partitions, event) VALUES (?, ?, ?)",
            (item.id, _encode(item.partitions), bytes(item.event)),
        )
        assert done.lastrowid is not None
        return StoredDraft(done.lastrowid, item)

    def _check_room(self, new: Sequence[StoredDraft], count_max: int, bytes_max: int) -> None:
        (quarantined,) = self._one("SELECT count(*) FROM quarantine")
        if self._drafts_count + len(new) + quarantined > count_max:
            raise DraftQueueFull(self._drafts_count, quarantined, f"at most {count_max} drafts")
        if self._drafts_bytes + sum(map(_size, new)) > bytes_max:
            raise DraftQueueFull(self._drafts_count, quarantined, f"at most {bytes_max} bytes")

    def _note_drafts(self, drafts: Collection[StoredDraft], sign: int) -> None:
        self._drafts_count += sign * len(drafts)
        self._drafts_bytes += sign * sum(map(_size, drafts))

    def drafts(self, after_local_id: int = 0, limit: int = -1) -> list[StoredDraft]:
        """Drafts that wait, oldest first."""
        rows = self._all(
            "SELECT local_id, id, partitions, event FROM drafts WHERE local_id > ? ORDER BY local_id LIMIT ?",
            after_local_id,
            limit,
        )
        return [StoredDraft(row[0], _item(row[1:])) for row in rows]

    def verdict(self, id: str) -> Verdict | None:
        """The verdict on the draft with this id; ``None`` if there is none here."""
        if self._maybe("SELECT 1 FROM drafts WHERE id = ?", id):
            return Pending()
        if row := self._maybe("SELECT code, errors FROM quarantine WHERE id = ?", id):
            return Rejected(row[0], _ERRORS.decode(row[1]))
        if row := self._maybe("SELECT committed_id, was_duplicate FROM events WHERE id = ?", id):
            return Committed(row[0], bool(row[1]))
        return None

    def find(self, id: str) -> tuple[LocalEvent, Verdict] | None:
        """The event with this id and its verdict; ``None`` if there is none here."""
        verdict = self.verdict(id)
        if verdict is None:
            return None
        for table in ("drafts", "quarantine"):
            if row := self._maybe(f"SELECT id, partitions, event FROM {table} WHERE id = ?", id):
                return local_event(_item(row), self._client_id), verdict
        return _local(self._one(f"SELECT {_EVENT} FROM events WHERE id = ?", id)), verdict

    def settle(self, verdicts: Sequence[ItemVerdict], now_ms: int) -> Applied:
        """Move drafts to where their verdicts send them. A draft that is settled already stays as it is."""
        applied = Applied([], {}, [])
        committed = [verdict for verdict in verdicts if isinstance(verdict, ItemCommitted)]
        with self._transaction():
            if self._is_taken({verdict.committed_id: verdict.id for verdict in committed}, len(committed)):
                return Applied(is_conflicting=True)
            drafts = self._drafts_by_id([verdict.id for verdict in verdicts])
            settled = {verdict.id: verdict for verdict in verdicts if verdict.id in drafts}
            events: list[CommittedEvent] = []
            for verdict in settled.values():
                draft = drafts[verdict.id]
                if isinstance(verdict, ItemCommitted):
                    events.append(self._as_committed(draft.item, verdict))
                    applied.verdicts[verdict.id] = Committed(verdict.committed_id, verdict.was_duplicate)
                else:
                    rejected = Rejected(verdict.code, tuple(verdict.errors))
                    self._quarantine(draft, rejected, now_ms)
                    applied.verdicts[verdict.id] = rejected
                    event = local_event(draft.item, self._client_id)
                    applied.rejected.append(QuarantinedDraft(event, rejected, now_ms))
            self._drop_drafts(drafts.values())
            self._insert_events((event, applied.verdicts[event.id]) for event in events)
        self._note_drafts(drafts.values(), -1)
        applied.events.extend(local_event(event, self._client_id) for event in sorted(events, key=_place))
        return applied

    def _as_committed(self, item: SubmitItem, verdict: ItemCommitted) -> CommittedEvent:
        return CommittedEvent(
            id=item.id,
            client_id=self._client_id,
            partitions=item.partitions,
            committed_id=verdict.committed_id,
            event=item.event,
            status_updated_at=verdict.status_updated_at,
        )

    def _quarantine(self, draft: StoredDraft, rejected: Rejected, now_ms: int) -> None:
        item, errors = draft.item, _encode(rejected.errors)
        self._connection.execute(
            "INSERT INTO quarantine VALUES (?, ?, ?, ?, ?, ?, ?)",
            (draft.local_id, item.id, _encode(item.partitions), bytes(item.event), rejected.code, errors, now_ms),
        )

    def quarantine(self) -> list[QuarantinedDraft]:
        """Rejected drafts, oldest first."""
        rows = self._all("SELECT id, partitions, event, code, errors, rejected_at_ms FROM quarantine ORDER BY local_id")
        return [
            QuarantinedDraft(
                local_event(_item(row[:3]), self._client_id), Rejected(row[3], _ERRORS.decode(row[4])), row[5]
            )
            for row in rows
        ]

    def release(self, id: str) -> StoredDraft | None:
        """Let a rejected draft wait again, at its old place; ``None`` if there is none."""
        with self._transaction():
            row = self._maybe("SELECT local_id, id, partitions, event FROM quarantine WHERE id = ?", id)
            if row is None:
                return None
            self._connection.execute("INSERT INTO drafts (local_id, id, partitions, event) VALUES (?, ?, ?, ?)", row)
            self._connection.execute("DELETE FROM quarantine WHERE id = ?", (id,))
        released = StoredDraft(row[0], _item(row[1:]))
        self._note_drafts([released], 1)
        return released

    def discard(self, id: str) -> bool:
        """Forget a rejected draft."""
        with self._transaction():
            return self._connection.execute("DELETE FROM quarantine WHERE id = ?", (id,)).rowcount == 1

    # Committed events

    def store_events(self, events: Sequence[CommittedEvent], cursors: Mapping[str, int] | None = None) -> Applied:
        """
        Keep committed events, and with them the cursors that they complete.

        An event that is there already changes nothing. One that is a draft of this client settles it: its answer was lost.
        """
        if not events and not cursors:
            return Applied()
        ids = [event.id for event in events]
        applied = Applied([], {}, [])
        with self._transaction():
            sql = "SELECT id FROM events WHERE generation = ? AND id IN"
            known = {row[0] for row in self._among(sql, ids, self._generation)}
            new = [event for event in {event.id: event for event in events}.values() if event.id not in known]
            if self._is_taken({event.committed_id: event.id for event in new}, len(new)):
                return Applied(is_conflicting=True)
            drafts = self._drafts_by_id(ids)
            own = [each for each in new if each.id in drafts and same_content(drafts[each.id].item, each)]
            applied.verdicts.update({each.id: Committed(each.committed_id, True) for each in own})
            settled = [drafts[each.id] for each in own]
            self._drop_drafts(settled)
            self._insert_events((event, applied.verdicts.get(event.id)) for event in new)
            self._connection.executemany(
                "INSERT INTO cursors VALUES (?, ?) ON CONFLICT (partition) DO UPDATE SET since = excluded.since",
                list((cursors or {}).items()),
            )
        self._note_drafts(settled, -1)
        applied.events.extend(local_event(event, event.client_id) for event in sorted(new, key=_place))
        return applied

    def events(
        self, *, since: int = 0, until: int | None = None, partitions: Sequence[str] | None = None, limit: int = 1000
    ) -> list[LocalEvent]:
        """Committed events after ``since``, lowest id first; with ``partitions``, those that name one of them."""
        where = "generation = ? AND committed_id > ? AND committed_id <= ?"
        values: list[Any] = [self._generation, since, (1 << 63) - 1 if until is None else until]
        if partitions is not None:
            places = ",".join("?" * len(partitions))
            where += f" AND EXISTS (SELECT 1 FROM json_each(CAST(partitions AS TEXT)) WHERE value IN ({places}))"
            values += partitions
        rows = self._all(f"SELECT {_EVENT} FROM events WHERE {where} ORDER BY committed_id LIMIT ?", *values, limit)
        return [_local(row) for row in rows]

    def orphans(self, limit: int = 1000) -> list[LocalEvent]:
        """Events that were committed before the last reset and that the server has not shown since."""
        rows = self._all(
            f"SELECT {_EVENT} FROM events WHERE generation < ? ORDER BY committed_id LIMIT ?", self._generation, limit
        )
        return [_local(row) for row in rows]

    def reset_history(self) -> None:
        """Begin a new generation: no event counts as seen, every cursor is 0, no snapshot is left."""
        with self._transaction():
            self._set_meta("generation", self._generation + 1)
            self._forget_progress()
        self._generation += 1

    def refetch(self) -> None:
        """Have everything sent again; what is here stays."""
        with self._transaction():
            self._forget_progress()

    def _forget_progress(self) -> None:
        self._connection.execute("UPDATE cursors SET since = 0")
        self._connection.execute("DELETE FROM snapshots")
        self._set_meta("pruned_through", 0)

    def note_model(self, model_version: int) -> None:
        """Remember the server's model version."""
        with self._transaction():
            self._set_meta("model_version", model_version)

    # Snapshots

    def save_snapshot(self, name: str, snapshot: ViewSnapshot) -> None:
        """Keep a state of the view, in place of the one before."""
        with self._transaction():
            # What was never here is like what was pruned: without the snapshot, only the server has it.
            self._set_meta("pruned_through", max(snapshot.covered, int(self._meta("pruned_through") or 0)))
            self._connection.execute(
                "INSERT OR REPLACE INTO snapshots VALUES (?, ?, ?, ?, ?, ?, ?)",
                (
                    name,
                    snapshot.version,
                    _encode(snapshot.partitions),
                    snapshot.through,
                    snapshot.checksum,
                    snapshot.state,
                    snapshot.covered,
                ),
            )

    def snapshot(self, name: str) -> ViewSnapshot | None:
        """The state that was kept last."""
        sql = "SELECT version, partitions, through, checksum, state, covered FROM snapshots WHERE name = ?"
        row = self._maybe(sql, name)
        return None if row is None else ViewSnapshot(row[0], _NAMES.decode(row[1]), *row[2:])

    def prune(self, through: int, keep_count: int = 0) -> int:
        """
        Drop committed events up to ``through``, but not the last ``keep_count``; returns how many went.

        Only what a snapshot covers should go.
        """
        with self._transaction():
            if keep_count:
                row = self._maybe(
                    "SELECT committed_id FROM events WHERE generation = ? ORDER BY committed_id DESC LIMIT 1 OFFSET ?",
                    self._generation,
                    keep_count,
                )
                through = 0 if row is None else min(through, row[0])
            done = self._connection.execute(
                "DELETE FROM events WHERE generation = ? AND committed_id <= ?", (self._generation, through)
            )
            self._set_meta("pruned_through", max(through, int(self._meta("pruned_through") or 0)))
            return done.rowcount

    # Within a transaction

    def _known(self, item: SubmitItem) -> Verdict | None:
        for table, condition in (
            ("drafts", ""),
            ("quarantine", ""),
            ("events", f" AND generation = {self._generation}"),
        ):
            row = self._maybe(f"SELECT id, partitions, event FROM {table} WHERE id = ?{condition}", item.id)
            if row is None:
                continue
            if not same_content(item, _item(row)):
                raise InvalidDraft([ItemError(field="id", message=f"{item.id} belongs to another event already")])
            return self.verdict(item.id)
        return None

    def _is_taken(self, ids: Mapping[int, str], count: int) -> bool:
        """Whether one of these committed ids belongs to another event, here or among the ``count`` given themselves."""
        sql = "SELECT committed_id, id FROM events WHERE generation = ? AND committed_id IN"
        return len(ids) < count or any(ids[row[0]] != row[1] for row in self._among(sql, list(ids), self._generation))

    def _drafts_by_id(self, ids: Sequence[str]) -> dict[str, StoredDraft]:
        rows = self._among("SELECT local_id, id, partitions, event FROM drafts WHERE id IN", ids)
        return {row[1]: StoredDraft(row[0], _item(row[1:])) for row in rows}

    def _among(self, sql: str, ids: Sequence[Any], *before: Any) -> Iterator[Any]:
        """The rows of a query that ends in ``IN``, in pieces that SQLite takes."""
        for start in range(0, len(ids), _IDS_MAX):
            piece = ids[start : start + _IDS_MAX]
            yield from self._all(f"{sql} ({','.join('?' * len(piece))})", *before, *piece)

    def _drop_drafts(self, drafts: Iterable[StoredDraft]) -> None:
        ids = [(draft.local_id,) for draft in drafts]
        self._connection.executemany("DELETE FROM drafts WHERE local_id = ?", ids)

    def _insert_events(self, events: Iterable[tuple[CommittedEvent, Verdict | None]]) -> None:
        self._connection.executemany(
            "INSERT INTO events VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET"
            " committed_id = excluded.committed_id, generation = excluded.generation, event = excluded.event,"
            " partitions = excluded.partitions, committed_at_ms = excluded.committed_at_ms",
            [
                (
                    event.id,
                    event.committed_id,
                    self._generation,
                    event.client_id,
                    _encode(event.partitions),
                    bytes(event.event),
                    event.status_updated_at,
                    verdict.was_duplicate if isinstance(verdict, Committed) else None,
                )
                for event, verdict in events
            ],
        )

    def _meta(self, key: str) -> Any:
        row = self._maybe("SELECT value FROM meta WHERE key = ?", key)
        return None if row is None else row[0]

    def _set_meta(self, key: str, value: str | int) -> None:
        self._connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))

    def _all(self, sql: str, *values: Any) -> list[Any]:
        return self._connection.execute(sql, values).fetchall()

    def _maybe(self, sql: str, *values: Any) -> Any:
        return self._connection.execute(sql, values).fetchone()

    def _one(self, sql: str, *values: Any) -> Any:
        row = self._maybe(sql, *values)
        assert row is not None
        return row

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._connection.execute("ROLLBACK")
                raise
            self._connection.execute("COMMIT")
        except sqlite3.Error as error:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise StoreUnusable(self._path, str(error)) from error


def _size(draft: StoredDraft) -> int:
    return len(bytes(draft.item.event))


def _place(event: CommittedEvent) -> int:
    return event.committed_id


def _item(row: Sequence[Any]) -> SubmitItem:
    return SubmitItem(id=row[0], partitions=_NAMES.decode(row[1]), event=msgspec.Raw(row[2]))


def _local(row: Sequence[Any]) -> LocalEvent:
    id, committed_id, client_id, partitions, event, at_ms = row
    committed = CommittedEvent(
        id=id,
        client_id=client_id,
        partitions=_NAMES.decode(partitions),
        committed_id=committed_id,
        event=msgspec.Raw(event),
        status_updated_at=at_ms,
    )
    return local_event(committed, client_id)
