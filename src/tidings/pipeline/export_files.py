"""
Files whose bytes depend on their rows alone: JSON Lines, and Parquet with everything that could differ pinned down.

A file appears whole or not at all: it is written beside its place, synced, and renamed.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final, Protocol

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

__all__ = ["ExportFormat", "RowSink", "fresh_file", "parquet_rows"]

_GROUP_ROWS_MAX: Final = 20_000
_GROUP_BYTES_MAX: Final = 32 << 20


class ExportFormat(enum.StrEnum):
    """What an export is written as."""

    JSONL = "jsonl"
    PARQUET = "parquet"


class RowSink(Protocol):
    """Takes rows, with about how many bytes each is."""

    def __call__(self, row: dict[str, Any], size: int, /) -> None: ...


class HashedFile:
    """A file that knows the digest of what was written to it. What arrow asks of a file is there; closing is not arrow's to do."""

    closed = False

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self.size = 0

    def write(self, data: bytes) -> int:
        """Write bytes."""
        self._digest.update(data)
        self.size += len(data)
        return self._file.write(data)

    def tell(self) -> int:
        """How much was written."""
        return self.size

    def flush(self) -> None:
        """Nothing: whoever opened the file flushes it."""

    def close(self) -> None:
        """Nothing: whoever opened the file closes it."""

    @property
    def sha256(self) -> str:
        """The digest so far."""
        return self._digest.hexdigest()


@contextlib.contextmanager
def fresh_file(path: Path) -> Iterator[HashedFile]:
    """A new file in place of ``path``, which keeps its old content until this ends well."""
    fresh = path.with_name(path.name + ".part")
    try:
        with fresh.open("wb") as file:
            yield HashedFile(file)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


@contextlib.contextmanager
def parquet_rows(file: HashedFile, schema: Any) -> Iterator[RowSink]:
    """
    Rows as Parquet.

    Row groups are cut by rows and bytes of the rows themselves, never by how they arrived, so the bytes are the same each time.
    """
    # The sink cannot seek, and need not: Parquet puts its directory at the end.
    with (
        pa.PythonFile(file, mode="w") as sink,
        pq.ParquetWriter(sink, schema, compression="zstd", version="2.6") as writer,
    ):
        rows: list[dict[str, Any]] = []
        size = 0

        def flush() -> None:
            nonlocal size
            writer.write_table(pa.Table.from_pylist(rows, schema=schema), row_group_size=_GROUP_ROWS_MAX)
            rows.clear()
            size = 0

        def add(row: dict[str, Any], row_bytes: int, /) -> None:
            nonlocal size
            rows.append(row)
            size += row_bytes
            if len(rows) >= _GROUP_ROWS_MAX or size >= _GROUP_BYTES_MAX:
                flush()

        yield add
        if rows:
            flush()
