"""
Bronze: every record as the log committed it, exactly once.

A run takes what is new up to one seq (``source``), has tasks write it to files (``bronze_task``), and adds the files to the
table in one commit that also stores the seq the table now reaches. A run that dies leaves files that no table refers to, and
the next run starts at the same seq again. Lines that are no records go to the quarantine table, with file, byte and reason,
and so do ranges that retention dropped before they were archived. The commit to bronze names the quarantine's files, so a
run that dies between the two commits is finished by the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import duckdb
import pyarrow as pa  # type: ignore[import-untyped]
from deltalake.transaction import AddAction

from .bronze_task import RESULT_DDL, BronzeTask, WrittenFile
from .errors import LakeUnwritable, SegmentMissing
from .lake import Lake
from .schemas import BRONZE_EVENTS, QUARANTINE, arrow_schema
from .session import Progress, ProgressStep, translate_spark_errors, watched
from .settings import PipelineSettings
from .source import Gap, LogSource, SourceChunk, bundles
from .state_files import load_hints, save_hints
from .storage import Storage
from .table_files import dataset, entry_of, write_file

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def gap_rows(gaps: Sequence[Gap], epoch: str, found_at_us: int) -> list[dict[str, Any]]:
    """Ranges that retention dropped before the lake had them; neighbours are one row."""
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


def write_rows(folder: Storage, name: str, rows: Sequence[dict[str, Any]]) -> None:
    """Write rows to a file of the quarantine."""
    schema = arrow_schema(QUARANTINE.schema)
    write_file(folder, name, schema, [pa.Table.from_pylist(list(rows), schema=schema)])


def without_repeats(folder: Storage, names: Sequence[str], known: Any) -> list[dict[str, Any]]:
    """
    The entries of fresh files without rows that are known already, those that become empty left out.

    A run that found no hints reads more than it needs, and meets lines again that were set apart before.
    """
    schema = arrow_schema(QUARANTINE.schema)
    kept = []
    for name in names:
        fresh = dataset(folder, [(name, None)], schema)
        with duckdb.connect() as duck:
            duck.register("fresh", fresh)
            duck.register("known", known)
            found: pa.Table = duck.sql(
                "select fresh.* from fresh anti join known"
                " on fresh.file = known.file and fresh.byte_offset = known.byte_offset and fresh.reason = known.reason"
                " and fresh.epoch = known.epoch"
            ).to_arrow_table()
        if found.num_rows == fresh.count_rows():
            kept.append(entry_of(folder, name))
        elif (entry := write_file(folder, f"rest-of-{name}", schema, [found])) is not None:
            kept.append(entry)
    return kept


BRONZE_APP: Final = "bronze"


@dataclass(frozen=True, slots=True)
class BronzeState:
    """What the table says about itself."""

    seq: int = 0
    """Every record up to here is in the table, or in the quarantine."""
    batch: int = 0
    epoch: str | None = None


@dataclass(frozen=True, slots=True)
class BronzeFill:
    """What a run added."""

    since: int
    until: int
    rows: int
    quarantined: int
    bytes: int
    commits: int


class Bronze:
    """
    The table of events, and how it is filled.

    Args:
        lake: Where it is.
        source: The log.
        segments: The folder of the log's segments, as the executors see it.
        settings: How much at a time.
        run: A name that no other run has.
        now_us: The time of the run, in microseconds.
    """

    def __init__(
        self, lake: Lake, source: LogSource, segments: Path, settings: PipelineSettings, *, run: str, now_us: int
    ) -> None:
        self._lake = lake
        self._source = source
        self._segments = segments
        self._settings = settings
        self._run = run
        self._now_us = now_us

    def state(self) -> BronzeState:
        """Where the table stands."""
        return bronze_state(self._lake)

    def fill(self, spark: SparkSession, epoch: str, progress: Progress, until: int | None = None) -> BronzeFill:
        """
        Take all that the log has now into the table; ``until`` cuts it earlier.

        Raises:
            PositionLost, LakeConflict, LakeUnwritable, SparkFailed
        """
        state = self.state()
        self._finish_quarantine()
        hints = load_hints(self._lake.storage, epoch=epoch, seq=state.seq)
        view = self._source.pin(state.seq, hints)
        rows = quarantined = size = commits = 0
        for chunk in view.chunks(self._settings.commit_bytes_max, self._settings.commit_files_max):
            if until is not None and state.seq >= until:
                break
            written = self._run_tasks(spark, chunk, epoch, progress, rows)
            state = self._commit(chunk, state.batch + 1, epoch, written)
            rows += sum(file.rows for file in written if file.kind == "events")
            quarantined += sum(file.rows for file in written if file.kind == "quarantine") + len(chunk.gaps)
            size += sum(file.bytes for file in written)
            commits += 1
        progress(ProgressStep("bronze", 1, 1, rows))
        return BronzeFill(view.since, state.seq, rows, quarantined, size, commits)

    def _run_tasks(
        self, spark: SparkSession, chunk: SourceChunk, epoch: str, progress: Progress, rows: int
    ) -> list[WrittenFile]:
        parallel = _parallelism(spark)
        work = bundles(chunk.ranges, self._settings.split_bytes_max, parallel)
        if not work:
            return []
        task = BronzeTask(
            segments=str(self._segments.resolve()),
            events=self._lake.folder(BRONZE_EVENTS.name),
            quarantine=self._lake.folder(QUARANTINE.name),
            bundles=work,
            since=chunk.since,
            until=chunk.until,
            stem=f"{BRONZE_APP}-{chunk.until:012d}-{self._run}",
            epoch=epoch,
            found_at_us=self._now_us,
            memory_mb=self._settings.task_memory_mb,
            line_bytes_max=self._settings.quarantine_line_bytes_max,
        )
        frame = spark.range(0, len(work), 1, len(work)).mapInArrow(task, RESULT_DDL)
        with translate_spark_errors("bronze"), watched(spark, progress, "bronze", len(work), rows):
            written = [WrittenFile(**row.asDict()) for row in frame.collect()]
        for file in written:
            if file.kind == "missing":
                raise SegmentMissing(file.name)
            if file.kind == "failed":
                raise LakeUnwritable(file.name, file.stats)
        return written

    def _commit(self, chunk: SourceChunk, batch: int, epoch: str, written: Sequence[WrittenFile]) -> BronzeState:
        folder = self._lake.folder(QUARANTINE.name)
        bad = [file.name for file in written if file.kind == "quarantine"]
        if chunk.gaps:
            name = f"{BRONZE_APP}-{chunk.until:012d}-{self._run}-gaps.parquet"
            write_rows(folder, name, gap_rows(chunk.gaps, epoch, self._now_us))
            bad.append(name)
        note = {"epoch": epoch, "seq": chunk.until, "since": chunk.since, "batch": batch, "quarantine": sorted(bad)}
        adds = [
            AddAction(file.name, file.size, {}, file.modified_ms, True, file.stats)
            for file in sorted(written, key=lambda each: each.name)
            if file.kind == "events"
        ]
        self._lake.commit(
            BRONZE_EVENTS.name, arrow_schema(BRONZE_EVENTS.schema), adds, app=BRONZE_APP, version=batch, note=note
        )
        self._finish_quarantine()
        # Last: hints that are older than the table only cost reading.
        save_hints(self._lake.storage, chunk.hints)
        return BronzeState(chunk.until, batch, epoch)

    def _finish_quarantine(self) -> None:
        """Commit the quarantine's files that the last commit to bronze names, unless that was done."""
        note = self._lake.note(BRONZE_EVENTS.name)
        batch, names = int(note.get("batch", 0)), note.get("quarantine", [])
        done = self._lake.done(QUARANTINE.name, BRONZE_APP)
        if not names or (done is not None and done >= batch):
            return
        folder = self._lake.folder(QUARANTINE.name)
        known = self._lake.dataset(QUARANTINE.name, schema=arrow_schema(QUARANTINE.schema))
        adds = self._lake.adds(without_repeats(folder, names, known))
        self._lake.commit(
            QUARANTINE.name,
            arrow_schema(QUARANTINE.schema),
            adds,
            app=BRONZE_APP,
            version=batch,
            note={"epoch": note["epoch"], "seq": note["seq"]},
        )


def bronze_state(lake: Lake) -> BronzeState:
    """Where the table of events stands."""
    note = lake.note(BRONZE_EVENTS.name)
    return BronzeState(int(note["seq"]), int(note["batch"]), str(note["epoch"])) if note else BronzeState()


def _parallelism(spark: SparkSession) -> int:
    if type(spark).__module__.startswith("pyspark.sql.connect"):
        return 4
    return max(1, int(spark.sparkContext.defaultParallelism))
