"""
Ugly logs for the pipeline: events of every kind, groups and dead letters beside them, and damaged lines.

Lines are damaged in place, so that files keep the lengths that their seals name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from tests.unit.pipeline.support import Workspace
from tidings.bus.store import Attempt
from tidings.bus.store.dead_letter_files import DeadLetterFiles
from tidings.core.clock import SYSTEM_CLOCK, format_utc
from tidings.core.events import Event, EventMeta
from tidings.log.embedded.cursors import StoredCursor, encode_cursor
from tidings.log.embedded.disk import OsDisk
from tidings.log.segment import decode, encode_line, head_of

__all__ = ["DAMAGES", "Damage", "damage", "damage_line", "events_of", "give_up"]

Damage = Literal["payload", "head", "foreign", "not text", "not json", "blank", "cut in two"]
DAMAGES: Final[tuple[Damage, ...]] = ("payload", "head", "foreign", "not text", "not json", "blank", "cut in two")
_ROOM: Final = len(b'{"crc":"00000000",')


def damage_line(path: Path, at: int, how: Damage) -> None:
    """Damage the line that begins at a byte of a segment."""
    data = path.read_bytes()
    end = data.index(b"\n", at)
    line = data[at:end]
    path.write_bytes(data[:at] + _damaged(line, how) + data[end:])


def _damaged(line: bytes, how: Damage) -> bytes:
    middle = len(line) // 2
    if how == "payload":
        return line[:-3] + b"#" + line[-2:]
    if how == "head":
        return b"?" + line[1:]
    if how == "blank":
        return b" " * len(line)
    if how == "cut in two":
        return line[:middle] + b"\n" + line[middle + 1 :]
    room = len(line) - _ROOM
    body = {
        "foreign": b'"hello":"%b"}' % (b"x" * (room - len(b'"hello":""}'))),
        "not text": b'"hello":"%b"}' % (b"\xff" * (room - len(b'"hello":""}'))),
        "not json": b'"hello' + b"(" * (room - len(b'"hello')),
    }[how]
    return encode_line(body).removesuffix(b"\n")


def events_of(kinds: Sequence[dict[str, Any]], first: int, large_at: int | None) -> Iterator[Event]:
    """The events that the kinds stand for; one of them with five megabytes."""
    number = first
    for place, kind in enumerate(kinds):
        meta = {key: value for key, value in kind.items() if key not in ("payload", "copies", "event_id")}
        for _ in range(kind["copies"]):
            payload = {"text": "é" * 2_500_000} if large_at == place else kind["payload"]
            large_at = None if large_at == place else large_at
            if "idem_key" in kind:
                meta["idem_key"] = f"{kind['idem_key']}-{number}"
            yield Event(EventMeta(event_id=f"{kind['event_id']}-{number}", **meta), payload)
            number += 1


def give_up(workspace: Workspace, letters: Sequence[tuple[str, int, int]]) -> None:
    """Groups that stand somewhere, and letters that one of them gave up on."""
    for folder in (workspace.layout.offsets, workspace.layout.dlq):
        folder.mkdir(exist_ok=True)
    for topic, group, committed, at in (
        ("busy", "fast", 1 << 30, "2026-01-01T00:00:00.000000Z"),
        ("busy", "slow", -1, "2026-01-01T00:00:00.000000Z"),
        ("busy", "fresh", 0, format_utc(SYSTEM_CLOCK.now_ns()).decode()),
        ("nowhere", "idle", 3, "2026-01-01T00:00:00.000000Z"),
    ):
        cursor = StoredCursor(committed=committed, segment=1, ts=at, epoch=workspace.epoch)
        (workspace.layout.offsets / f"{topic}__{group}.json").write_bytes(encode_cursor(cursor))
    lines = [line for path in workspace.segments() for line in path.read_bytes().splitlines()]
    store = DeadLetterFiles(OsDisk(), workspace.layout.dlq, SYSTEM_CLOCK)
    for error, number, attempts in letters:
        record = decode(lines[number % len(lines)])
        tries = [Attempt("2026-11-15T10:00:00.000000Z", error)] * attempts
        store.add(record, "slow", ValueError(error), tries, "retries")  # type: ignore[arg-type]


def damage(workspace: Workspace, how: Damage, number: int, reached: int) -> None:
    """Damage one of the lines that no run has read yet."""
    fresh = []
    for path in workspace.segments():
        at = 0
        for line in path.read_bytes().splitlines(keepends=True):
            head = head_of(line[:200])
            if head is not None and head.seq > reached:
                fresh.append((path, at))
            at += len(line)
    with contextlib.suppress(IndexError):
        damage_line(*fresh[number % max(1, len(fresh))], how)
