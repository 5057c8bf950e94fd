"""
Putting small files together: every run leaves a few, and a reader pays for each.

The rows of the small files are written again, in the order that makes bounds tell, and take the place of the old ones in
one commit that changes no data. The old files are swept a day later, so that whoever reads an older version can finish.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from deltalake.transaction import AddAction

from .lake import Lake
from .lake_log import DataFile, add_action, remove_action
from .schemas import TableSpec, arrow_schema
from .settings import PipelineSettings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["compact", "compact_if_due", "small_files"]

COMPACTION_APP: Final = "compaction"
_SWEEP_AGE_HOURS: Final = 24.0


def small_files(lake: Lake, table: TableSpec, settings: PipelineSettings) -> list[DataFile]:
    """The table's files that are worth putting together."""
    if not lake.exists(table.name):
        return []
    return lake.files(table.name, lambda file: file.size < settings.compact_bytes_max // 2)


def compact_if_due(
    spark: SparkSession, lake: Lake, table: TableSpec, settings: PipelineSettings, *, run: str, now_ns: int
) -> int:
    """Put small files together if there are many; how many there were."""
    files = small_files(lake, table, settings)
    if len(files) < settings.compact_files_min:
        return 0
    return compact(spark, lake, table, files, settings, run=run, now_ns=now_ns)


def compact(
    spark: SparkSession,
    lake: Lake,
    table: TableSpec,
    files: list[DataFile],
    settings: PipelineSettings,
    *,
    run: str,
    now_ns: int,
) -> int:
    """
    Put these files together.

    Raises:
        LakeConflict: The table changed meanwhile; nothing was changed here.
    """
    chosen = {file.name for file in files}
    count = max(1, math.ceil(sum(file.size for file in files) / settings.compact_bytes_max))
    frame = lake.read(spark, table.name, lambda file: file.name in chosen)
    order = table.order or tuple(frame.columns[:1])
    frame = frame.coalesce(1) if count == 1 else frame.repartitionByRange(count, *order)
    version = (lake.done(table.name, COMPACTION_APP) or 0) + 1
    written = lake.write_files(frame.sortWithinPartitions(*order), table.name, COMPACTION_APP, version, run)
    adds: list[AddAction] = [add_action(lake.path(table.name), file, is_new_data=False) for file in written]
    removes = [remove_action(file, now_ms=now_ns // 1_000_000, is_new_data=False) for file in files]
    lake.commit(
        table.name,
        arrow_schema(table.schema),
        adds,
        removes,
        app=COMPACTION_APP,
        version=version,
        note=lake.note(table.name),  # what was true of the data is true of it still
    )
    lake.sweep(table.name, age_hours_min=_SWEEP_AGE_HOURS)
    return len(files)
