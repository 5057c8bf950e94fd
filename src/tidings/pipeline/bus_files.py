"""What the bus keeps beside the log, as rows: where the groups stand, and the events they gave up on."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import msgspec
import pyarrow as pa  # type: ignore[import-untyped]

from tidings.bus.store.dead_letter_files import DeadLetterFiles
from tidings.bus.store.dead_letters import EVERY, DeadLetterFilter
from tidings.core.clock import Clock
from tidings.log.embedded.cursors import CursorFiles
from tidings.log.embedded.disk import Disk
from tidings.log.embedded.layout import Layout

from .schemas import SILVER_DEAD_LETTERS, SILVER_GROUP_CURSORS, arrow_schema

__all__ = ["dead_letters", "group_cursors"]


def group_cursors(layout: Layout, disk: Disk) -> pa.Table:
    """Every group, with the last offset it has acknowledged. One whose files are damaged counts as one that has acknowledged nothing."""
    rows: list[dict[str, Any]] = []
    for files in CursorFiles(disk, layout.offsets).read_all():
        row: dict[str, Any] = {"topic": files.topic, "group": files.group, "committed": -1, "epoch": ""}
        if files.current is not None and (stored := files.current.stored) is not None:
            row |= {
                "committed": stored.committed,
                "segment": stored.segment,
                "at": _time(stored.ts),
                "epoch": stored.epoch,
            }
        rows.append(row)
    return pa.Table.from_pylist(rows, schema=arrow_schema(SILVER_GROUP_CURSORS.schema))


def dead_letters(layout: Layout, disk: Disk, clock: Clock) -> pa.Table:
    """Every dead letter there ever was, with the state it is in now."""
    store = DeadLetterFiles(disk, layout.dlq, clock)
    rows: list[dict[str, Any]] = []
    for topic in store.topics():
        rows += [
            {
                "topic": letter.topic,
                "group": letter.group,
                "offset": letter.offset,
                "seq": letter.seq,
                "event_id": letter.event_id,
                "error": letter.error,
                "category": letter.reason,
                "attempts": len(letter.attempts) or letter.retries,
                "failed_at": _time(letter.failed_at),
                "history": json.dumps([msgspec.to_builtins(attempt) for attempt in letter.attempts]),
                "id": letter.id,
                "state": letter.state,
                "space_id": letter.space_id,
                "error_type": letter.error_type,
            }
            for letter in store.find(topic, None, DeadLetterFilter(states=EVERY))
        ]
    return pa.Table.from_pylist(rows, schema=arrow_schema(SILVER_DEAD_LETTERS.schema))


def _time(text: str) -> datetime | None:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return moment if moment.tzinfo is not None else None
