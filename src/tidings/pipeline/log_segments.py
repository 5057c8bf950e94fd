"""
The segments of the log as rows: what each holds, without a lock and beside whoever writes.

A sealed segment is told from its seal. One that is not sealed yet (or whose seal is damaged) is told from its first line and
its last whole one. Segments that were dropped, also this moment, are not listed: what is listed was there.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any, Final

import msgspec
import pyarrow as pa  # type: ignore[import-untyped]

from tidings.log.embedded.disk import Disk, File, end_of_lines
from tidings.log.embedded.layout import Layout, StreamKey
from tidings.log.segment import HEAD_BYTES_MAX, Head, head_of, is_whole

from .schemas import SILVER_SEGMENTS, arrow_schema

__all__ = ["log_segments"]

_BLOCK_BYTES: Final = 1 << 20


class _Bounds(msgspec.Struct, frozen=True):
    """What a seal says of its segment; a line that says one was dropped has none of it."""

    segment: int = 0
    first_offset: int | None = None
    last_offset: int | None = None
    first_seq: int | None = None
    last_seq: int | None = None
    last_written_at: str = ""
    bytes: int = 0


_SEAL: Final = msgspec.json.Decoder(_Bounds)


def log_segments(layout: Layout, disk: Disk) -> pa.Table:
    """One row a segment, by stream and number, in the shape of ``silver.segments``."""
    schema = arrow_schema(SILVER_SEGMENTS.schema)
    columns: dict[str, list[Any]] = {name: [] for name in schema.names}
    streams = layout.segments(disk)
    for key in sorted(streams, key=lambda each: each.path):
        sealed = {bounds.segment: bounds for bounds in _seals(layout, disk, key)}
        for number in streams[key]:
            found = sealed.get(number)
            bounds = _open_bounds(layout, disk, key, number) if found is None else found
            if bounds is None:
                continue
            row = (
                *(key.topic, key.space_id, number, found is not None, bounds.first_offset, bounds.last_offset),
                *(bounds.first_seq, bounds.last_seq, bounds.bytes, _time(bounds.last_written_at)),
            )
            for column, value in zip(columns.values(), row, strict=True):
                column.append(value)
    return pa.table(columns, schema=schema)


def _seals(layout: Layout, disk: Disk, key: StreamKey) -> Iterator[_Bounds]:
    path = layout.seal_file(key)
    if not disk.exists(path):
        return
    file = disk.open(path)
    try:
        at, rest = 0, b""
        while block := file.read(at, _BLOCK_BYTES):
            at += len(block)
            *lines, rest = (rest + block).split(b"\n")
            for line in lines:
                if is_whole(line) and (bounds := _SEAL.decode(line)).segment:
                    yield bounds
    finally:
        file.close()


def _open_bounds(layout: Layout, disk: Disk, key: StreamKey, number: int) -> _Bounds | None:
    """What a segment holds that has no seal; ``None`` if it was dropped since it was listed."""
    try:
        file = disk.open(layout.segment(key, number))
    except FileNotFoundError:
        return None
    try:
        first, (last, end) = head_of(file.read(0, HEAD_BYTES_MAX)), _last_head(file)
    finally:
        file.close()
    if first is None or last is None:
        return _Bounds(number, bytes=end)
    return _Bounds(number, first.offset, last.offset, first.seq, last.seq, last.written_at, end)


def _last_head(file: File) -> tuple[Head | None, int]:
    """The head of the last line that has its end, and the byte after it. A line may be longer than a block."""
    end = end_of_lines(file, file.size())
    begin = end_of_lines(file, end - 1) if end else 0
    return (head_of(file.read(begin, HEAD_BYTES_MAX)) if end else None), end


def _time(text: str) -> datetime | None:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return None
