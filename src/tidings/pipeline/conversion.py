"""
From lines of segments to Parquet, within one task.

Lines of the log's own form are cut into columns (``cutting``), what else an envelope holds is decoded (``envelope``); lines of
another form are parsed one at a time, slowly, and those that are no records are set apart with the reason. The payload is kept
byte for byte either way.

Runs on executors: no Spark, no loop, no engine.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from tidings.log.segment import Flaw, is_whole

from .cutting import CutLines, cut_lines, lines_of
from .envelope import EVENTS, HOW_SEALED, optional_columns, row_of

__all__ = ["BadLine", "flawed_lines", "write_events"]

_COPIES: Final = 8
"""How often a block's bytes are in memory at most, in one form or another."""
_BLOCK_BYTES_MAX: Final = 1 << 30
_ROW_GROUP: Final = 128 * 1024
_REPEATED: Final = ("topic", "type", "space_id", "actor", "device", "band", "priority", "partitions.list.element")
_COUNTED: Final = ("offset", "seq", "ts", "written_at", "date", "ttl_sec")


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that is no record: where it begins in the data it was found in, its bytes, and why."""

    at: int
    data: bytes
    reason: str

    @property
    def text(self) -> str:
        """Its bytes, in letters that any tool can show."""
        return base64.b64encode(self.data).decode()


def flawed_lines(data: bytes) -> list[BadLine]:
    """The lines that do not match their checksums. ``data`` ends with a newline, or is empty."""
    found: list[BadLine] = []
    at = 0
    for line in data.split(b"\n")[:-1]:
        if not is_whole(line):
            found.append(BadLine(at, line, Flaw.CHECKSUM.value))
        at += len(line) + 1
    return found


def write_events(data: bytes, target: Path, *, memory_mb: int) -> list[BadLine]:
    """
    Write the records among whole, checked lines to ``target``; the lines that are no records come back.

    No file is written if there is no record.

    Args:
        data: The lines, each with its newline.
        target: The file to be made.
        memory_mb: What the conversion may take beside ``data``: it takes that much at a time.
    """
    bad: list[BadLine] = []
    writer: pq.ParquetWriter | None = None
    try:
        for at, block in _blocks(data, min(memory_mb * (1 << 20) // _COPIES, _BLOCK_BYTES_MAX)):
            table, flawed = _converted(block)
            bad += [BadLine(at + line.at, line.data, line.reason) for line in flawed]
            if table.num_rows:
                writer = writer or _writer(target)
                writer.write_table(table, row_group_size=_ROW_GROUP)
    finally:
        if writer is not None:
            writer.close()
    return bad


def _writer(target: Path) -> pq.ParquetWriter:
    return pq.ParquetWriter(
        target,
        EVENTS,
        compression="zstd",
        compression_level=1,
        data_page_version="2.0",
        use_dictionary=list(_REPEATED),
        column_encoding=dict.fromkeys(_COUNTED, "DELTA_BINARY_PACKED"),
    )


def _blocks(data: bytes, bytes_max: int) -> Iterator[tuple[int, bytes]]:
    """Whole lines, about so many bytes of them at a time, with where they begin; a longer line comes alone."""
    start = 0
    while start < len(data):
        end = len(data)
        if end - start > bytes_max:
            end = (data.rfind(b"\n", start, start + bytes_max) + 1) or (data.find(b"\n", start + bytes_max) + 1)
        yield start, data if end - start == len(data) else data[start:end]
        start = end


def _converted(data: bytes) -> tuple[pa.Table, list[BadLine]]:
    lines = lines_of(data)
    cut = cut_lines(lines)
    optional, is_good = optional_columns(cut.columns["rest"])
    cut = CutLines(cut.rows, cut.columns | optional).where(is_good)
    quick = pa.Table.from_pydict(_columns(cut.columns), EVENTS)
    if len(cut.rows) == len(lines):
        return quick, []
    slow, slow_rows, bad = _parsed(data, lines, np.setdiff1d(np.arange(len(lines)), cut.rows))
    order = np.argsort(np.concatenate([cut.rows, slow_rows]))
    return pa.concat_tables([quick, slow]).take(pa.array(order)), bad


def _columns(cut: dict[str, pa.Array]) -> dict[str, pa.Array]:
    """All columns of bronze, from those that were cut and decoded."""
    how, payload = cut[HOW_SEALED], cut["payload"]
    is_sealed = pc.is_valid(how)
    sealed = pc.binary_join_element_wise('{"how":', how, ',"payload":', payload, "}", "")
    return cut | {
        "date": cut["ts"].cast(pa.date32()),
        "is_sealed": is_sealed,
        "payload": pc.if_else(is_sealed, pa.scalar(None, pa.string()), payload),
        "sealed": sealed,
    }


def _parsed(data: bytes, lines: pa.Array, rows: Any) -> tuple[pa.Table, list[int], list[BadLine]]:
    """Lines that could not be cut, one at a time."""
    starts = lines.buffers()[1]
    offsets = np.frombuffer(starts, np.int32)
    found: list[dict[str, Any]] = []
    places: list[int] = []
    bad: list[BadLine] = []
    for number in rows.tolist():
        start, end = int(offsets[number]), int(offsets[number + 1]) - 1
        row = row_of(data[start:end])
        if isinstance(row, str):
            bad.append(BadLine(start, data[start:end], row))
        else:
            found.append(row)
            places.append(number)
    return pa.Table.from_pylist(found, schema=EVENTS), places, bad
