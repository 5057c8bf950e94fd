"""
Putting a job's rows into its tables: in the place of a whole table, or of the rows of some stretches.

Only files that may hold rows of the stretches are touched. What they hold beside those rows is written again as it is, cut
where a stretch begins and ends: so a file that was touched once for what came last is not touched again for what comes
next. New files, kept rows and the files that go are one commit, which also carries how far the job got.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from .jobs.job import Output
from .lake import Lake, Note, sync_file
from .lake_log import DataFile, add_action, remove_action, told_of_files
from .positions import sync_folder
from .schemas import arrow_schema, columns_of
from .stretches import Stretch, gaps, holds_any, may_hold_any

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["GoldStore"]

_BATCH_ROWS: Final = 65_536


class GoldStore:
    """
    The jobs' tables, to be written.

    Args:
        lake: Where they are.
        now_ns: For the times that a table's log wants.
        file_bytes: About as large a file is made, where there is much.
        until: The seq that the run reaches to.
        run: A name that no other run has.
    """

    def __init__(self, lake: Lake, *, now_ns: int, file_bytes: int, until: int, run: str) -> None:
        self._lake = lake
        self._now_ms = now_ns // 1_000_000
        self._file_bytes = file_bytes
        self._until = until
        self._run = run

    def replace_all(self, frame: DataFrame, output: Output, app: str, note: Note, *, bytes_read: int) -> int:
        """Put the rows in the place of all there were; how many."""
        if output.replaced_by:
            frame = self._in_files(frame, output.replaced_by[0], bytes_read)
        return self._lake.replace(
            frame, output.table, output.schema, app=app, version=self._until, note=note, run=self._run
        )

    def keep_all(self, output: Output, app: str, note: Note) -> None:
        """Leave the rows as they are, and note how far they reach."""
        self._lake.commit(output.table, arrow_schema(output.schema), (), app=app, version=self._until, note=note)

    def replace_stretches(
        self,
        frame: DataFrame,
        output: Output,
        stretches: tuple[Stretch, ...],
        app: str,
        note: Note,
        *,
        bytes_read: int,
    ) -> int:
        """Put those rows that lie in the stretches in the place of those that lay there; how many came."""
        (column,) = output.replaced_by
        kind = dict(columns_of(output.schema))[column]
        fresh = self._in_files(frame.where(holds_any(column, kind, stretches)), column, bytes_read)
        written = self._lake.write_files(fresh, output.table, app, self._until, self._run)
        old = self._lake.files(output.table, lambda file: may_hold_any(file, column, stretches))
        touched, kept = self._cut(old, output.table, column, kind, stretches, f"{app}-{self._until:012d}-{self._run}")
        folder = self._lake.path(output.table)
        adds = [add_action(folder, file) for file in written]
        rows = sum(int(pq.read_metadata(file).num_rows) for file in written)
        self._lake.commit(
            output.table,
            arrow_schema(output.schema),
            [*adds, *(add_action(folder, file) for file in kept)],
            [remove_action(file, now_ms=self._now_ms) for file in touched],
            app=app,
            version=self._until,
            note=note,
        )
        return rows

    def _in_files(self, frame: DataFrame, column: str, bytes_read: int) -> DataFrame:
        """The rows spread over files by their place, so that files are of a size and their bounds tell them apart."""
        count = max(1, bytes_read // self._file_bytes)
        spread = frame.repartition(1) if count == 1 else frame.repartitionByRange(count, column)
        return spread.sortWithinPartitions(column)

    def _cut(
        self,
        files: list[DataFile],
        table: str,
        column: str,
        kind: str,
        stretches: tuple[Stretch, ...],
        name: str,
    ) -> tuple[list[DataFile], list[Path]]:
        """The files that do hold rows of the stretches, and new files with the rest of their rows."""
        touched: list[DataFile] = []
        kept: list[Path] = []
        folder = self._lake.path(table) / f"{name}-kept"
        for number, file in enumerate(files):
            with told_of_files(file.path.parent):
                found = _cut_file(file.path, column, kind, stretches, folder / f"{number:05d}")
            if found is not None:
                touched.append(file)
                kept += found
        if kept:
            for path in kept:
                sync_file(path)
            sync_folder(folder)
            sync_folder(folder.parent)
        return touched, kept


def _cut_file(path: Path, column: str, kind: str, stretches: tuple[Stretch, ...], target: Path) -> list[Path] | None:
    """Write the rows that lie in no stretch, a file a gap; None, and nothing written, if no row lies in a stretch."""
    with pq.ParquetFile(path) as source:
        if not any((_gaps(batch, column, kind, stretches) < 0).any() for batch in _batches(source, [column])):
            return None
        target.parent.mkdir(parents=True, exist_ok=True)
        writers: dict[int, tuple[Path, Any]] = {}
        with contextlib.ExitStack() as stack:
            for batch in _batches(source, None):
                places = _gaps(batch, column, kind, stretches)
                for gap in np.unique(places[places >= 0]).tolist():
                    if gap not in writers:
                        file = target.with_name(f"{target.name}-{gap}.parquet")
                        writer = pq.ParquetWriter(file, source.schema_arrow, compression="zstd")
                        writers[gap] = (file, stack.enter_context(writer))
                    writers[gap][1].write_batch(batch.filter(pa.array(places == gap)))
        return [file for file, _ in writers.values()]


def _batches(source: Any, columns: list[str] | None) -> Iterator[Any]:
    yield from source.iter_batches(batch_size=_BATCH_ROWS, columns=columns)


def _gaps(batch: Any, column: str, kind: str, stretches: tuple[Stretch, ...]) -> np.ndarray[Any, Any]:
    return gaps(batch.column(column), kind, stretches)
