"""
The memory store: one transaction a write, with the memory, its receipt and the outbox rows in it.

Blocking: the handler calls it from a thread. A write that was committed before is recognised by its key and answered with
what was committed then; nothing is stored or told a second time.
"""

from __future__ import annotations

import sqlite3
from datetime import UTC
from pathlib import Path
from typing import Any, Final

import msgspec

from tidings.core.clock import datetime_of, ns_of
from tidings.core.events import Event

from ..ports import derived_id
from ..zones import zone_of
from .announcements import Encoding, commit_events, consolidation_event
from .consolidation import Gathered, due_reasons
from .database import MemoryDatabase
from .dedupe import Dedupe, Known, Outcome, judge, merged_content
from .episodes import bucket_of, episode_id, lane_of, projection
from .fingerprints import SIMHASH_BITS, Fingerprint, fingerprint, hamming, novelty, shingles
from .outbox import insert_event
from .receipts import Provenance, Receipt, Signer, content_hash, sign_receipt
from .redaction import Redacted
from .requests import WriteRequest
from .settings import WriteSettings

__all__ = ["Committed", "Draft", "Episode", "Memory", "MemoryStore"]

_NEAR: Final = SIMHASH_BITS // 10


class Draft(msgspec.Struct, frozen=True, kw_only=True):
    """A write that is ready to be committed."""

    request: WriteRequest
    space_id: str
    redacted: Redacted
    flags: tuple[str, ...] = ()


class Committed(msgspec.Struct, frozen=True, kw_only=True):
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

    def commit(self, draft: Draft, now_ns: int) -> Committed:
        """
        Commit a write: all of it or nothing.

        Raises:
            MemoryStoreError: Nothing was committed.
        """
        pieces = shingles(_text_of(draft.redacted.content))
        fresh = fingerprint(pieces)  # before the transaction: it is the slow part
        with self.database.transaction("commit") as connection:
            repeat = self._committed_before(connection, draft.request.source_key)
            if repeat is not None:
                return repeat
            return self._commit(connection, draft, fresh, now_ns)

    def memory(self, memory_id: str) -> Memory | None:
        """A memory by its id."""
        with self.database.transaction("read") as connection:
            row = connection.execute(
                "SELECT memory_id, space_id, episode_id, bucket, content, content_hash, revision, said_count"
                " FROM memories WHERE memory_id = ?",
                (memory_id,),
            ).fetchone()
        if row is None:
            return None
        fields = dict(zip(Memory.__struct_fields__, row, strict=True))
        return Memory(**{**fields, "content": msgspec.json.decode(row[4])})

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

    def _committed_before(self, connection: sqlite3.Connection, source_key: str) -> Committed | None:
        row = connection.execute("SELECT body, summary FROM receipts WHERE source_key = ?", (source_key,)).fetchone()
        if row is None:
            return None
        return Committed(
            receipt=msgspec.json.decode(row[0], type=Receipt),
            encoding=msgspec.json.decode(row[1], type=Encoding),
            is_repeat=True,
        )

    def _commit(self, connection: sqlite3.Connection, draft: Draft, fresh: Fingerprint, now_ns: int) -> Committed:
        request, space_id, content = draft.request, draft.space_id, draft.redacted.content
        now = datetime_of(now_ns)
        text = _text_of(content)
        flags = list(draft.flags)
        since_ns = now_ns - round(self.settings.dedupe_window_s * 1e9)
        new_score = self._novelty(connection, space_id, fresh, since_ns)
        try:
            found = judge(text, self._candidates(connection, space_id, fresh, since_ns), self.settings)
        except (msgspec.DecodeError, ValueError):
            # A damaged row must not keep new memories out: it is stored unmerged, and said so.
            found = Dedupe(outcome=Outcome.CREATE)
            flags.append("dedupe_failed")
        bucket = bucket_of(request.occurred_at, zone_of(request.tz))
        episode = self._episode(connection, space_id, bucket, ns_of(request.occurred_at))
        if found.outcome is Outcome.MERGE and found.known is not None:
            memory_id = found.known.memory_id
            content = merged_content(found.known, text, request.occurred_at.isoformat(), self.settings)
            fresh = fingerprint(shingles(_text_of(content)))
            self._rewrite(connection, memory_id, content, fresh, now_ns)
        else:
            memory_id = derived_id("mem", request.source_key)
            self._insert(connection, memory_id, draft, episode, bucket, fresh, now_ns)
        if found.outcome is Outcome.LINK and found.known is not None:
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
            linked_to=found.known.memory_id if found.outcome is Outcome.LINK and found.known is not None else None,
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
        tick = self._gather(connection, space_id, is_duplicate=found.outcome is not Outcome.CREATE, now_ns=now_ns)
        if tick is not None:
            insert_event(connection, tick, aggregate_id=space_id, aggregate_type="space", now_ns=now_ns)
        return Committed(receipt=receipt, encoding=encoding)

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
            query = "SELECT text, content FROM memories WHERE memory_id = ?"
            text, content = connection.execute(query, (memory_id,)).fetchone()
            known.append(
                Known(memory_id=memory_id, text=text, content=msgspec.json.decode(content, type=dict[str, Any]))
            )
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

    def _episode(self, connection: sqlite3.Connection, space_id: str, bucket: str, at_ns: int) -> str:
        row = connection.execute(
            "SELECT episode_id, number, first_ns, last_ns FROM episodes WHERE space_id = ? AND bucket = ?"
            " ORDER BY number DESC LIMIT 1",
            (space_id, bucket),
        ).fetchone()
        gap_ns = round(self.settings.episode_gap_s * 1e9)
        # A late arrival joins the last episode of its bucket: only a silence after it begins another.
        if row is not None and at_ns - row[3] <= gap_ns:
            connection.execute(
                "UPDATE episodes SET first_ns = min(first_ns, ?), last_ns = max(last_ns, ?), memories = memories + 1"
                " WHERE episode_id = ?",
                (at_ns, at_ns, row[0]),
            )
            return str(row[0])
        number = 1 if row is None else row[1] + 1
        new_id = episode_id(space_id, bucket, number)
        values = (new_id, space_id, bucket, number, at_ns, at_ns)
        connection.execute("INSERT INTO episodes VALUES (?, ?, ?, ?, ?, ?, 1)", values)
        return new_id

    def _insert(
        self,
        connection: sqlite3.Connection,
        memory_id: str,
        draft: Draft,
        episode: str,
        bucket: str,
        fresh: Fingerprint,
        now_ns: int,
    ) -> None:
        content = draft.redacted.content
        signatures = (fresh.simhash_bytes(), fresh.minhash_bytes())
        connection.execute(
            "INSERT INTO memories VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, 1, 1, ?, ?)",
            (memory_id, draft.space_id, episode, bucket, *_content_columns(content), *signatures, now_ns, now_ns),
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
        self, connection: sqlite3.Connection, space_id: str, *, is_duplicate: bool, now_ns: int
    ) -> Event | None:
        query = "SELECT writes, duplicates, since_ns, ticks FROM gathered WHERE space_id = ?"
        row = connection.execute(query, (space_id,)).fetchone() or (0, 0, now_ns, 0)
        since_ns = row[2] if row[0] else now_ns
        gathered = Gathered(writes=row[0] + 1, duplicates=row[1] + is_duplicate, since_ns=since_ns)
        settings, ticks = self.settings.consolidation, row[3]
        reasons = due_reasons(gathered, settings, now_ns)
        tick = None
        if reasons:
            ticks += 1
            since = datetime_of(since_ns).astimezone(UTC)
            tick = consolidation_event(space_id, ticks, since, datetime_of(now_ns), settings.budget_ms, reasons)
            gathered = Gathered(writes=0, duplicates=0, since_ns=now_ns)
        connection.execute(
            "INSERT OR REPLACE INTO gathered VALUES (?, ?, ?, ?, ?)",
            (space_id, gathered.writes, gathered.duplicates, gathered.since_ns, ticks),
        )
        return tick


def _text_of(content: dict[str, Any]) -> str:
    """What is compared: the text, or the whole content where there is none."""
    text = content.get("text")
    return text if isinstance(text, str) else _json(content)


def _content_columns(content: dict[str, Any]) -> tuple[str, str, str]:
    return _text_of(content), _json(content), content_hash(content)


def _json(value: object) -> str:
    return msgspec.json.encode(value, order="sorted").decode()
