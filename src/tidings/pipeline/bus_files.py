"""What the bus keeps beside the log, as rows: where the groups stand, and the events they gave up on."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any, Final

import msgspec
import pyarrow as pa  # type: ignore[import-untyped]

from tidings.bus.dead_letters import DeadLetterStore, LetterState
from tidings.core.clock import Clock
from tidings.log.embedded.disk import Disk, read_file
from tidings.log.embedded.layout import Layout
from tidings.log.segment import is_whole

from .schemas import SILVER_DEAD_LETTERS, SILVER_GROUP_CURSORS, arrow_schema

__all__ = ["dead_letters", "group_cursors"]

_STATES: Final[tuple[LetterState, ...]] = ("dead", "requested", "trying", "redriven", "dropped")


class _Cursor(msgspec.Struct, frozen=True):
    committed: int
    segment: int = 0
    ts: str = ""
    epoch: str = ""


def group_cursors(layout: Layout, disk: Disk) -> pa.Table:
    """Every group, with the last offset it has acknowledged. A file that is not whole is passed over for its backup."""
    names = {name.removesuffix(".bak") for name in disk.names(layout.offsets)}
    rows: list[dict[str, Any]] = []
    for name in sorted(names):
        topic, joint, group = name.removesuffix(".json").partition("__")
        if not joint or not name.endswith(".json"):
            continue
        for candidate in (name, f"{name}.bak"):
            cursor = _cursor(read_file(disk, layout.offsets / candidate))
            if cursor is not None:
                rows.append(
                    {
                        "topic": topic,
                        "group": group,
                        "committed": cursor.committed,
                        "segment": cursor.segment,
                        "at": _time(cursor.ts),
                        "epoch": cursor.epoch,
                    }
                )
                break
    return pa.Table.from_pylist(rows, schema=arrow_schema(SILVER_GROUP_CURSORS.schema))


def _cursor(data: bytes | None) -> _Cursor | None:
    if data is None:
        return None
    # A file without a checksum is an older one's, or made by hand; one that has a checksum must match it.
    if data.startswith(b'{"crc":') and not is_whole(data.removesuffix(b"\n")):
        return None
    try:
        return msgspec.json.decode(data, type=_Cursor)
    except msgspec.DecodeError:
        return None


def dead_letters(layout: Layout, disk: Disk, clock: Clock) -> pa.Table:
    """Every dead letter there ever was, with the state it is in now."""
    store = DeadLetterStore(disk, layout.dlq, clock)
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
            for letter in store.letters(topic, states=_STATES)
        ]
    return pa.Table.from_pylist(rows, schema=arrow_schema(SILVER_DEAD_LETTERS.schema))


def _time(text: str) -> datetime | None:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return moment if moment.tzinfo is not None else None
