"""
The quarantine: what stands in the log's files and is no record, with its file and byte; and what was dropped unread.

Nothing is lost by it: the line is kept (in base64, for it may hold anything), and so is the place it was found at.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from .schemas import QUARANTINE, arrow_schema
from .source import Gap

__all__ = ["gap_rows", "without_repeats", "write_rows"]


def gap_rows(gaps: Sequence[Gap], epoch: str, found_at_us: int) -> list[dict[str, Any]]:
    """Ranges that retention dropped before the lake had them; neighbours are told as one."""
    rows: list[dict[str, Any]] = []
    for gap in sorted(gaps, key=lambda each: (each.topic, each.first_offset)):
        last = rows[-1] if rows else None
        if last is not None and last["topic"] == gap.topic and last["_last_offset"] + 1 == gap.first_offset:
            last["last_seq"], last["_last_offset"] = gap.last_seq, gap.last_offset
            continue
        rows.append(
            {
                "file": gap.path,
                "byte_offset": 0,
                "topic": gap.topic,
                "reason": "dropped by retention before it was archived",
                "line": None,
                "line_bytes": None,
                "first_seq": gap.first_seq,
                "last_seq": gap.last_seq,
                "found_at": found_at_us,
                "epoch": epoch,
                "_last_offset": gap.last_offset,
            }
        )
    return rows


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write rows to a file of the quarantine, on disk when this returns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(rows), schema=arrow_schema(QUARANTINE.schema)), path, compression="zstd")
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def without_repeats(fresh: Sequence[Path], known: Sequence[Path]) -> list[Path]:
    """
    The fresh files without rows that are known already, those that become empty left out.

    A run that found no hints reads more than it needs, and meets lines again that were set apart before.
    """
    kept: list[Path] = []
    for path in fresh:
        if known:
            _leave_out(path, known)
        if pq.read_metadata(path).num_rows:
            kept.append(path)
    return kept


def _leave_out(path: Path, known: Sequence[Path]) -> None:
    with duckdb.connect() as duck:
        found: pa.Table = duck.sql(
            "select fresh.* from read_parquet(?) fresh anti join read_parquet(?) known"
            " on fresh.file = known.file and fresh.byte_offset = known.byte_offset and fresh.reason = known.reason"
            " and fresh.epoch = known.epoch",
            params=[[str(path)], [str(each) for each in known]],
        ).to_arrow_table()
    if found.num_rows != pq.read_metadata(path).num_rows:
        replacement = path.with_suffix(".new")
        pq.write_table(found.cast(arrow_schema(QUARANTINE.schema)), replacement, compression="zstd")
        replacement.replace(path)
