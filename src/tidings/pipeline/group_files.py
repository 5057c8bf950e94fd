"""
What the workspace's own files say of consumer groups: where each stands, and which events it gave up on.

Read as a whole where that is little. Dead letters may be many, and their files only grow: of these what is new is read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, NamedTuple

import msgspec
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]

from tidings.bus.store.dead_letter_files import DeadLetterFiles
from tidings.bus.store.dead_letters import EVERY, DeadLetter, DeadLetterFilter
from tidings.core.clock import Clock
from tidings.log.embedded.cursors import CursorFiles
from tidings.log.embedded.disk import Disk
from tidings.log.embedded.layout import Layout

from .schemas import SILVER_DEAD_LETTERS, SILVER_GROUP_CURSORS, SILVER_GROUP_POSITIONS, arrow_schema

_LETTERS: Final = ".dlq.jsonl"


def group_cursors(layout: Layout, disk: Disk) -> pa.Table:
    """Every group, with the last offset it has acknowledged. One whose files are damaged counts as one that has acknowledged nothing."""
    rows: list[dict[str, Any]] = []
    for files in CursorFiles(disk, layout.offsets).read_all():
        row: dict[str, Any] = {"topic": files.topic, "group": files.group, "committed": -1, "epoch": ""}
        if files.current is not None and (stored := files.current.stored) is not None:
            row |= {
                "committed": stored.committed,
                "segment": stored.segment,
                "at": _time_of(stored.ts),
                "epoch": stored.epoch,
            }
        rows.append(row)
    return pa.Table.from_pylist(rows, schema=arrow_schema(SILVER_GROUP_CURSORS.schema))


def group_positions(cursors: pa.Table, segments: pa.Table, seen_at: datetime) -> pa.Table:
    """Every group at one moment: what it has acknowledged of its topic, and how much not. From two tables that were just read."""
    last = segments.group_by("topic").aggregate([("last_offset", "max")]).to_pylist()
    # A segment of damaged lines alone has no offset.
    heads = {row["topic"]: row["last_offset_max"] for row in last if row["last_offset_max"] is not None}
    rows = [
        {
            "topic": cursor["topic"],
            "group": cursor["group"],
            "seen_at": seen_at,
            "committed": cursor["committed"],
            "head_offset": (head := heads.get(cursor["topic"], -1)),
            "lag": max(0, head - cursor["committed"]),
            "epoch": cursor["epoch"],
        }
        for cursor in cursors.to_pylist()
    ]
    return pa.Table.from_pylist(rows, schema=arrow_schema(SILVER_GROUP_POSITIONS.schema))


class LetterFile(NamedTuple):
    """A file of dead letters as it was when it was read."""

    topic: str
    size: int
    changed_ns: int
    end: int = 0
    """Up to here its lines were taken in."""


def letter_files(layout: Layout) -> list[LetterFile]:
    """The files of dead letters as they are now, by topic."""
    found: list[LetterFile] = []
    try:
        with os.scandir(layout.dlq) as entries:
            for entry in entries:
                if entry.name.endswith(_LETTERS):
                    stat = entry.stat()
                    found.append(LetterFile(entry.name.removesuffix(_LETTERS), stat.st_size, stat.st_mtime_ns))
    except FileNotFoundError:
        pass
    return sorted(found)


@dataclass(frozen=True, slots=True)
class DeadLetters:
    """
    Every dead letter there ever was, with the state it is in now.

    The files only grow, so of one that was read before the lines behind that place are read; where these say what became of a
    letter, all of its file.

    Args:
        layout, disk, clock: Where the files are.
    """

    layout: Layout
    disk: Disk
    clock: Clock

    def read(
        self, files: Sequence[LetterFile], known: Sequence[LetterFile], rows: pa.Table
    ) -> tuple[pa.Table, list[LetterFile]]:
        """
        The letters of these files, and up to where each was read.

        Args:
            files: As they are now.
            known: As they were when ``rows`` were read.
            rows: What is known of them.
        """
        store = DeadLetterFiles(self.disk, self.layout.dlq, self.clock)
        before = {file.topic: file for file in known}
        parts, read, kept = [], [], []
        for file in files:
            added = self._added(store, file, before.get(file.topic), rows)
            if added is None:
                letters = store.find(file.topic, None, DeadLetterFilter(states=EVERY))
                read.append(file._replace(end=file.size))
            else:
                letters, end = added
                kept.append(file.topic)
                read.append(file._replace(end=end))
            parts.append(_letter_rows(letters))
        same = rows.filter(pc.is_in(rows["topic"], value_set=pa.array(kept, pa.string())))
        return pa.concat_tables([same, *parts]), read

    @staticmethod
    def _added(
        store: DeadLetterFiles, file: LetterFile, before: LetterFile | None, rows: pa.Table
    ) -> tuple[list[DeadLetter], int] | None:
        """The letters that a file gained; ``None`` if more than that happened to it."""
        if before is None or before.size > file.size:
            return None
        if file.size == before.size:
            return ([], before.end) if file.changed_ns == before.changed_ns else None
        added = store.added(file.topic, before.end, file.size)
        if added is None:
            return None
        ids = [letter.id for letter in added[0]]
        of_topic = rows.filter(pc.equal(rows["topic"], file.topic))
        # A letter may be added again; and a file that was read while it grew was read further than its size said.
        is_known = pc.any(pc.is_in(of_topic["id"], value_set=pa.array(ids, pa.string()))).as_py()
        return None if is_known or len({*ids}) < len(ids) else added


def _letter_rows(letters: Iterable[DeadLetter]) -> pa.Table:
    rows = [
        {
            "topic": letter.topic,
            "group": letter.group,
            "offset": letter.offset,
            "seq": letter.seq,
            "event_id": letter.event_id,
            "error": letter.error,
            "category": letter.reason,
            "attempts": len(letter.attempts) or letter.retries,
            "failed_at": _time_of(letter.failed_at),
            "history": json.dumps([msgspec.to_builtins(attempt) for attempt in letter.attempts]),
            "id": letter.id,
            "state": letter.state,
            "space_id": letter.space_id,
            "error_type": letter.error_type,
        }
        for letter in letters
    ]
    return pa.Table.from_pylist(rows, schema=arrow_schema(SILVER_DEAD_LETTERS.schema))


def _time_of(text: str) -> datetime | None:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return moment if moment.tzinfo is not None else None
