"""
What a table's log stores about a data file: its size, its rows, and the bounds of its columns, all from the file's footer.

The bounds let a reader pass over whole files: records of one topic lie together, in the order of their seqs.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, Final

import duckdb
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
from deltalake.transaction import AddAction, RemoveAction

from .errors import LakeDamaged

_TEXT_CHARS_MAX: Final = 64
# Columns whose bounds help nobody and are long, or quote what somebody wrote: a table's log outlives the rows it speaks of.
_UNBOUNDED: Final = frozenset(
    {
        *("payload", "sealed", "extra", "qos", "actor", "device", "history", "line", "error"),
        *("summary", "phrase", "person_id", "client_id", "object_id", "row_key"),
    }
)


@dataclass(frozen=True, slots=True)
class DataFile:
    """One file of a table."""

    path: Path
    name: str
    """As the table's log has it, relative to the table."""
    size: int
    rows: int
    minimum: Mapping[str, Any]
    maximum: Mapping[str, Any]

    def may_hold(self, column: str, low: Any = None, high: Any = None) -> bool:
        """Whether a value of the column may lie between the two (both included); bounds that are unknown hold anything."""
        least, most = self.minimum.get(column), self.maximum.get(column)
        if low is not None and most is not None and most < low:
            return False
        return not (high is not None and least is not None and least > high)


@contextlib.contextmanager
def translate_read_errors(folder: Path) -> Iterator[None]:
    """
    While a table's files are read: what the readers raise, in our words.

    Raises:
        LakeDamaged: A file is missing, or is not what it was when it was committed.
    """
    try:
        yield
    except (duckdb.Error, pa.ArrowException, OSError) as error:
        raise LakeDamaged(str(folder), " ".join(str(error).split())[:300]) from error


def statistics(path: Path) -> tuple[str, int]:
    """A Parquet file's bounds, the way Delta writes them, and its rows; read from its footer only."""
    footer = pq.read_metadata(path)
    least: dict[str, Any] = {}
    most: dict[str, Any] = {}
    nulls: dict[str, int] = {}
    for group in range(footer.num_row_groups):
        row_group = footer.row_group(group)
        for at in range(row_group.num_columns):
            column = row_group.column(at)
            name, found = column.path_in_schema, column.statistics
            if found is None or "." in name or name in _UNBOUNDED or column.physical_type == "BOOLEAN":
                continue
            if found.has_null_count:
                nulls[name] = nulls.get(name, 0) + found.null_count
            if found.has_min_max and (low := _plain(found.min)) is not None and (high := _plain(found.max)) is not None:
                # Bounds of text may be cut short: the lower one stays a lower one, the upper one must not fall below.
                if isinstance(low, str):
                    low = low[:_TEXT_CHARS_MAX]
                if isinstance(high, str) and len(high) > _TEXT_CHARS_MAX:
                    high = high[:_TEXT_CHARS_MAX] + "\U0010ffff"
                least[name] = min(least.get(name, low), low)
                most[name] = max(most.get(name, high), high)
    content = {"numRecords": footer.num_rows, "minValues": least, "maxValues": most, "nullCount": nulls}
    return json.dumps(content, ensure_ascii=False), footer.num_rows


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        moment = value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)
        return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else None
    return value if isinstance(value, int | str) else None


def add_action(table: Path, file: Path, *, is_new_data: bool = True) -> AddAction:
    """The entry that makes a file a part of its table."""
    found = file.stat()
    text, _ = statistics(file)
    name = file.relative_to(table).as_posix()
    return AddAction(name, found.st_size, {}, found.st_mtime_ns // 1_000_000, is_new_data, text)


def remove_action(file: DataFile, *, now_ms: int, is_new_data: bool = True) -> RemoveAction:
    """The entry that takes a file out of its table; the file itself stays until it is swept."""
    return RemoveAction(
        path=file.name, data_change=is_new_data, deletion_timestamp=now_ms, size=file.size, partition_values={}
    )


def parquet_files(folder: Path) -> Iterator[Path]:
    """The finished files with rows that Spark left in a folder."""
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries)
    for name in names:
        is_finished = name.endswith(".parquet") and not name.startswith(("_", "."))
        # Spark writes a file for a task without rows too.
        if is_finished and pq.read_metadata(folder / name).num_rows:
            yield folder / name
