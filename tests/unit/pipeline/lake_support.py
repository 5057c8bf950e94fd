"""A lake filled from a log without Spark: the same converter, the same commits, a few rows."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from tests.unit.pipeline.support import Workspace
from tidings.core.clock import Clock
from tidings.log.embedded import open_log
from tidings.log.interface import Log, Query
from tidings.log.reading import records
from tidings.log.record import Record
from tidings.log.segment import encode_line
from tidings.pipeline.lake import Lake
from tidings.pipeline.line_conversion import BRONZE_ENCODING, BadLine, event_tables
from tidings.pipeline.schemas import BRONZE_EVENTS, arrow_schema
from tidings.pipeline.storage import Storage
from tidings.pipeline.table_files import entry_of, write_file


async def all_records(log: Log) -> list[Record]:
    """Everything that the log holds, as it stands."""
    return [record async for record in records(log, Query())]


def records_of(workspace: Workspace) -> list[Record]:
    """All that the log holds."""

    async def read() -> list[Record]:
        log = await open_log(workspace.folder, workspace.log_settings)
        try:
            return await all_records(log)
        finally:
            await log.close()

    return asyncio.run(read())


def write_events(data: bytes, target: Path, *, memory_mb: int = 128) -> list[BadLine]:
    """Write the records among whole lines to a file of bronze; the lines that are no records."""
    found = list(event_tables(data, memory_mb=memory_mb))
    tables = [table for table, _ in found]
    write_file(Storage.of(target.parent), target.name, arrow_schema(BRONZE_EVENTS.schema), tables, **BRONZE_ENCODING)
    return [line for _, bad in found for line in bad]


def archive(
    lake: Lake, found: Sequence[Record], *, epoch: str, batch: int, files: int = 2, without: tuple[str, ...] = ()
) -> None:
    """
    Commit records to bronze the way a run does: several files, each sorted by topic, seqs interleaved among them; ``without`` the columns
    that a version before had not.
    """
    schema = pa.schema([column for column in arrow_schema(BRONZE_EVENTS.schema) if column.name not in without])
    folder = lake.folder(BRONZE_EVENTS.name)
    folder.path.mkdir(parents=True, exist_ok=True)
    entries = []
    for number in range(files):
        part = sorted(found[number::files], key=lambda record: (record.topic, record.offset))
        name = f"bronze-{batch:06d}-{number}.parquet"
        target = folder.path / name
        data = b"".join(encode_line(record.to_json()[1:]) for record in part)
        assert write_events(data, target) == []
        if without:
            pq.write_table(pq.read_table(target, columns=schema.names), target)
        if part:
            entries.append(entry_of(folder, name))
    note = {"epoch": epoch, "seq": found[-1].seq, "batch": batch}
    lake.commit(BRONZE_EVENTS.name, schema, lake.adds(entries), app="bronze", version=batch, note=note)


def empty_lake(folder: Path, clock: Clock) -> Lake:
    """A lake without tables."""
    return Lake(folder / "lake", clock)


def write_table(
    lake: Lake, name: str, ddl: str, rows: Sequence[dict[str, Any]], note: dict[str, Any] | None = None
) -> None:
    """Commit rows as a table of their own."""
    schema = arrow_schema(ddl)
    entry = write_file(lake.folder(name), "rows.parquet", schema, [pa.Table.from_pylist(list(rows), schema=schema)])
    adds = [] if entry is None else lake.adds([entry])
    lake.commit(name, schema, adds, app="test", version=1, note=note or {})
