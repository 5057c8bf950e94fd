"""
The memory store: one transaction a write, with the memory, its receipt and the outbox rows in it.

Blocking: the handler calls it from a thread. A write that was committed before is recognised by its key and answered with
what was committed then; nothing is stored or published a second time.
"""

from __future__ import annotations

import sqlite3
from datetime import UTC
from pathlib import Path
from typing import Any, Final

import msgspec

from tidings.core.clock import datetime_of, ns_of
from tidings.core.events import SecurityBand
from tidings.core.ids import derived_id

from ..ports import zone_of
from .announcements import (
    Encoding,
    Gathered,
    bucket_of,
    commit_events,
    consolidation_event,
    due_reasons,
    episode_id,
    lane_of,
    projection,
)
from .dedupe import (
    SIMHASH_BITS,
    Dedupe,
    DedupeOutcome,
    Fingerprint,
    Fresh,
    Known,
    fingerprint,
    hamming,
    judge,
    novelty,
    shingles,
    text_of,
)
from .outbox import MemoryDatabase, insert_event
from .policy import Redacted
from .receipts import Provenance, Receipt, Signer, content_hash, sign_receipt
from .requests import WriteRequest, WriteSettings

_NEAR: Final = SIMHASH_BITS // 10


class MemoryDraft(msgspec.Struct, frozen=True, kw_only=True):
    """A write that is ready to be committed."""

    request: WriteRequest
    space_id: str
    redacted: Redacted
    flags: tuple[str, ...] = ()


class CommittedWrite(msgspec.Struct, frozen=True, kw_only=True):
    """What a write came to."""

    receipt: Receipt
    encoding: Encoding
    is_repeat: bool = False
    """It had been committed before; this is what was said then."""


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """A stored memory."""

    memory_id: str
    space_id: str
    episode_id: str
    bucket: str
    content: dict[str, Any]
    content_hash: str
    security_band: SecurityBand | None
    """The band of all that went into it; ``None`` where it is not known, of a memory of an older file."""
    revision: int
    said_count: int


class Episode(msgspec.Struct, frozen=True, kw_only=True):
    """Memories of one stretch of one part of the day."""

    episode_id: str
    bucket: str
    number: int
    memories: int


class MemoryStore:
    """
    Memories in a SQLite file.

    Args:
        path: The file.
        settings: How memories are written.
        signer: Signs receipts; without it they are unsigned.
    """

    def __init__(self, path: Path | str, settings: WriteSettings | None = None, signer: Signer | None = None) -> None:
        self.settings = settings if settings is not None else WriteSettings()
        self.database = MemoryDatabase(path)
        self._signer = signer

    def close(self) -> None:
        """Close the file."""
        self.database.close()

    def commit(self, draft: MemoryDraft, now_ns: int) -> CommittedWrite:
        """
        Commit a write: all of it or nothing.

        Raises:
            MemoryStoreError: Nothing was committed.
        """
        fresh = fingerprint(shingles(text_of(draft.redacted.content)))  # before the transaction: it is the slow part
        with self.database.transaction("commit") as connection:
            repeat = self._committed_before(connection, draft.request.source_key)
            if repeat is not None:
                return repeat
            return self._commit(connection, draft, fresh, now_ns)

    def call_for_consolidation(self, now_ns: int) -> int:
        """
        Put a call to consolidate into the outbox for every space that has waited long enough; returns how many.

        Writes do this for their own space; a space that falls silent needs somebody who looks after it.

        Raises:
            MemoryStoreError: Nothing was called for.
        """
        since_ns = now_ns - round(self.settings.consolidation.age_s * 1e9)
        with self.database.transaction("consolidation") as connection:
            query = "SELECT space_id FROM gathered WHERE writes > 0 AND since_ns <= ?"
            spaces = connection.execute(query, (since_ns,)).fetchall()
            return sum(self._gather(connection, space_id, now_ns=now_ns) for (space_id,) in spaces)

    def memory(self, memory_id: str) -> Memory | None:
        """A memory by its id."""
        with self.database.transaction("read") as connection:
            names = Memory.__struct_fields__
            query = f"SELECT {', '.join(names)} FROM memories WHERE memory_id = ?"
            row = connection.execute(query, (memory_id,)).fetchone()
        if row is None:
            return None
        fields = dict(zip(names, row, strict=True))
        return msgspec.convert({**fields, "content": msgspec.json.decode(fields["content"])}, Memory)

    def links(self, memory_id: str) -> dict[str, float]:
        """What a memory is linked to, and how alike they are."""
        with self.database.transaction("read") as connection:
            rows = connection.execute("SELECT other_id, similarity FROM links WHERE memory_id = ?", (memory_id,))
            return dict(rows.fetchall())

    def episodes(self, space_id: str, count_max: int = 100) -> list[Episode]:
        """A space's last episodes, latest first."""
        with self.database.transaction("read") as connection:
            rows = connection.execute(
                "SELECT episode_id, bucket, number, memories FROM episodes WHERE space_id = ?"
                " ORDER BY last_ns DESC, number DESC LIMIT ?",
                (space_id, count_max),
            ).fetchall()
        return [Episode(episode_id=row[0], bucket=row[1], number=row[2], memories=row[3]) for row in rows]

    def _committed_before(self, connection: sqlite3.Connection, source_key: str) -> CommittedWrite | None:
        row = connection.execute("SELECT body, summary FROM receipts WHERE source_key = ?", (source_key,)).fetchone()
        if row is None:
            return None
        return CommittedWrite(
            receipt=msgspec.json.decode(row[0], type=Receipt),
            encoding=msgspec.json.decode(row[1], type=Encoding),
            is_repeat=True,
        )

    def _commit(
        self, connection: sqlite3.Connection, draft: MemoryDraft, fresh: Fingerprint, now_ns: int
    ) -> CommittedWrite:
        request, space_id, content = draft.request, draft.space_id, draft.redacted.content
        now = datetime_of(now_ns)
        flags = list(draft.flags)
        since_ns = now_ns - round(self.settings.dedupe_window_s * 1e9)
        new_score = self._novelty(connection, space_id, fresh, since_ns)
        try:
            found = self._dedupe(connection, draft, fresh, since_ns)
        except (msgspec.DecodeError, ValueError):
            # A damaged row must not keep new memories out: it is stored unmerged, and said so.
            found = Dedupe(outcome=DedupeOutcome.CREATE)
            flags.append("dedupe_failed")
        at_ns = ns_of(request.occurred_at)
        bucket = bucket_of(request.occurred_at, zone_of(request.tz))
        if found.known is not None and found.merged is not None:
            memory_id, episode, content = found.known.memory_id, found.known.episode_id, found.merged
            self._stretch(connection, episode, bucket, at_ns)
            fresh = fingerprint(shingles(text_of(content)))
            self._rewrite(connection, memory_id, content, fresh, now_ns)
        else:
            memory_id = derived_id("mem", request.source_key)
            episode = self._join(connection, space_id, bucket, at_ns)
            self._insert(connection, memory_id, draft, episode, bucket, fresh, now_ns)
        if found.outcome is DedupeOutcome.LINK and found.known is not None:
            pair = (memory_id, found.known.memory_id)
            for one, other in (pair, pair[::-1]):
                connection.execute("INSERT OR REPLACE INTO links VALUES (?, ?, ?)", (one, other, found.similarity))
        self._index(connection, space_id, memory_id, fresh)
        (revision,) = connection.execute("SELECT revision FROM memories WHERE memory_id = ?", (memory_id,)).fetchone()
        receipt = sign_receipt(
            Receipt(
                receipt_id=derived_id("rcpt", request.source_key),
                memory_id=memory_id,
                actor=request.actor_id,
                space_id=space_id,
                operation=found.outcome.value,
                content_hash=content_hash(content),
                policy_version=self.settings.policy_version,
                redactions=draft.redacted.counts,
                provenance=Provenance(
                    source=request.source,
                    confidence=request.confidence,
                    stages=("initiated", "space_resolved", "redacted", "deduplicated", "committed"),
                ),
                timestamp=now,
                mls_epoch=request.mls_epoch,
            ),
            self._signer,
        )
        encoding = Encoding(
            memory_id=memory_id,
            operation=found.outcome.value,
            episode_id=episode,
            bucket=bucket,
            lane=lane_of(request.latency_budget_ms),
            novelty=new_score,
            similarity=found.similarity,
            linked_to=found.known.memory_id
            if found.outcome is DedupeOutcome.LINK and found.known is not None
            else None,
            simhash=fresh.simhash_bytes().hex(),
            revision=revision,
            triples=projection(memory_id, bucket, request.tags, request.mentions),
            flags=tuple(flags),
        )
        connection.execute(
            "INSERT INTO receipts VALUES (?, ?, ?, ?, ?)",
            (request.source_key, receipt.receipt_id, memory_id, _json(receipt), _json(encoding)),
        )
        for event in commit_events(request, receipt, encoding, content, now):
            insert_event(connection, event, aggregate_id=memory_id, now_ns=now_ns)
        is_duplicate = found.outcome is not DedupeOutcome.CREATE
        self._gather(connection, space_id, writes=1, duplicates=int(is_duplicate), now_ns=now_ns)
        return CommittedWrite(receipt=receipt, encoding=encoding)

    def _dedupe(self, connection: sqlite3.Connection, draft: MemoryDraft, fresh: Fingerprint, since_ns: int) -> Dedupe:
        if draft.redacted.is_conservative:
            # Nothing is left to compare: two such memories are alike in what is missing.
            return Dedupe(outcome=DedupeOutcome.CREATE)
        request = draft.request
        said_at = request.occurred_at.isoformat()
        written = Fresh(content=draft.redacted.content, security_band=request.band, said_at=said_at)
        return judge(written, self._candidates(connection, draft.space_id, fresh, since_ns), self.settings)

    def _candidates(
        self, connection: sqlite3.Connection, space_id: str, fresh: Fingerprint, since_ns: int
    ) -> list[Known]:
        shared: dict[str, int] = {}
        for band, key in enumerate(fresh.bands()):
            rows = connection.execute(
                "SELECT bands.memory_id FROM bands JOIN memories USING (memory_id)"
                " WHERE bands.space_id = ? AND band = ? AND key = ? AND updated_ns >= ?"
                " ORDER BY updated_ns DESC, bands.memory_id LIMIT ?",
                (space_id, band, key, since_ns, self.settings.candidates_count_max),
            )
            for (memory_id,) in rows:
                shared[memory_id] = shared.get(memory_id, 0) + 1
        likeliest = sorted(shared, key=lambda memory_id: (-shared[memory_id], memory_id))
        known: list[Known] = []
        for memory_id in likeliest[: self.settings.candidates_count_max]:
            query = "SELECT memory_id, episode_id, content, security_band FROM memories WHERE memory_id = ?"
            row = connection.execute(query, (memory_id,)).fetchone()
            fields = dict(zip(Known.__struct_fields__, row, strict=True))
            known.append(msgspec.convert({**fields, "content": msgspec.json.decode(fields["content"])}, Known))
        return known

    def _novelty(self, connection: sqlite3.Connection, space_id: str, fresh: Fingerprint, since_ns: int) -> float:
        rows = connection.execute(
            "SELECT simhash FROM memories WHERE space_id = ? AND updated_ns >= ? ORDER BY updated_ns DESC LIMIT ?",
            (space_id, since_ns, self.settings.recent_count_max),
        ).fetchall()
        distances = [hamming(fresh.simhash, int.from_bytes(simhash)) for (simhash,) in rows]
        if not distances:
            return novelty(SIMHASH_BITS, 0.0)
        return novelty(min(distances), sum(distance <= _NEAR for distance in distances) / len(distances))

    def _join(self, connection: sqlite3.Connection, space_id: str, bucket: str, at_ns: int) -> str:
        """Put a new memory into its episode, which it may be the first of."""
        row = connection.execute(
            "SELECT episode_id, number FROM episodes WHERE space_id = ? AND bucket = ? ORDER BY number DESC LIMIT 1",
            (space_id, bucket),
        ).fetchone()
        # A late arrival joins the last episode of its bucket: only a silence after it begins another.
        if row is not None and self._stretch(connection, row[0], bucket, at_ns):
            connection.execute("UPDATE episodes SET memories = memories + 1 WHERE episode_id = ?", (row[0],))
            return str(row[0])
        number = 1 if row is None else row[1] + 1
        new_id = episode_id(space_id, bucket, number)
        values = (new_id, space_id, bucket, number, at_ns, at_ns)
        connection.execute("INSERT INTO episodes VALUES (?, ?, ?, ?, ?, ?, 1)", values)
        return new_id

    def _stretch(self, connection: sqlite3.Connection, episode: str, bucket: str, at_ns: int) -> bool:
        """Have an episode reach to a moment, if that is in its part of the day and no silence lies between."""
        gap_ns = round(self.settings.episode_gap_s * 1e9)
        stretched = connection.execute(
            "UPDATE episodes SET first_ns = min(first_ns, :at), last_ns = max(last_ns, :at)"
            " WHERE episode_id = :episode AND bucket = :bucket AND :at - last_ns <= :gap",
            {"at": at_ns, "episode": episode, "bucket": bucket, "gap": gap_ns},
        )
        return stretched.rowcount > 0

    def _insert(
        self,
        connection: sqlite3.Connection,
        memory_id: str,
        draft: MemoryDraft,
        episode: str,
        bucket: str,
        fresh: Fingerprint,
        now_ns: int,
    ) -> None:
        content = draft.redacted.content
        signatures = (fresh.simhash_bytes(), fresh.minhash_bytes())
        connection.execute(
            "INSERT INTO memories VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, 1, 1, ?, ?, ?)",
            (
                *(memory_id, draft.space_id, episode, bucket, *_content_columns(content), *signatures, now_ns, now_ns),
                draft.request.band.value,
            ),
        )

    def _rewrite(
        self, connection: sqlite3.Connection, memory_id: str, content: dict[str, Any], fresh: Fingerprint, now_ns: int
    ) -> None:
        connection.execute(
            "UPDATE memories SET text = ?, content = ?, content_hash = ?, simhash = ?, minhash = ?,"
            " revision = revision + 1, said_count = said_count + 1, updated_ns = ? WHERE memory_id = ?",
            (*_content_columns(content), fresh.simhash_bytes(), fresh.minhash_bytes(), now_ns, memory_id),
        )
        connection.execute("DELETE FROM bands WHERE memory_id = ?", (memory_id,))

    def _index(self, connection: sqlite3.Connection, space_id: str, memory_id: str, fresh: Fingerprint) -> None:
        connection.executemany(
            "INSERT OR IGNORE INTO bands VALUES (?, ?, ?, ?)",
            [(space_id, band, key, memory_id) for band, key in enumerate(fresh.bands())],
        )

    def _gather(
        self, connection: sqlite3.Connection, space_id: str, *, writes: int = 0, duplicates: int = 0, now_ns: int
    ) -> bool:
        """Count what a space has gathered; when it is enough, call for its consolidation and begin anew."""
        query = "SELECT writes, duplicates, since_ns, ticks FROM gathered WHERE space_id = ?"
        row = connection.execute(query, (space_id,)).fetchone() or (0, 0, now_ns, 0)
        since_ns = row[2] if row[0] else now_ns
        gathered = Gathered(writes=row[0] + writes, duplicates=row[1] + duplicates, since_ns=since_ns)
        settings, ticks = self.settings.consolidation, row[3]
        reasons = due_reasons(gathered, settings, now_ns)
        if reasons:
            ticks += 1
            since = datetime_of(since_ns).astimezone(UTC)
            tick = consolidation_event(space_id, ticks, since, datetime_of(now_ns), settings.budget_ms, reasons)
            insert_event(connection, tick, aggregate_id=space_id, aggregate_type="space", now_ns=now_ns)
            gathered = Gathered(writes=0, duplicates=0, since_ns=now_ns)
        connection.execute(
            "INSERT OR REPLACE INTO gathered VALUES (?, ?, ?, ?, ?)",
            (space_id, gathered.writes, gathered.duplicates, gathered.since_ns, ticks),
        )
        return bool(reasons)


def _content_columns(content: dict[str, Any]) -> tuple[str, str, str]:
    return text_of(content), _json(content), content_hash(content)


def _json(value: object) -> str:
    return msgspec.json.encode(value, order="sorted").decode()
