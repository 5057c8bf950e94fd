"""
Silver: one row an event; sync events by partition; consumer groups, dead letters and segments as they are now.

Each table takes what bronze has gained since the seq that the table itself stores, in one commit that stores the new one;
so a table that was not reached before a crash catches up, and one that was reached is left alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import tempfile
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import duckdb
import msgspec
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
from deltalake.transaction import AddAction

from tidings.bus.store.dead_letter_files import DeadLetterFiles
from tidings.bus.store.dead_letters import EVERY, DeadLetterFilter
from tidings.core.clock import Clock, datetime_of
from tidings.log.embedded.cursors import CursorFiles
from tidings.log.embedded.disk import Disk
from tidings.log.embedded.layout import Layout

from .committer import Replaces
from .lake import Lake, rows_of, stem
from .schemas import (
    BRONZE_EVENTS,
    SILVER_DEAD_LETTERS,
    SILVER_EVENTS,
    SILVER_GROUP_CURSORS,
    SILVER_GROUP_POSITIONS,
    SILVER_SEGMENTS,
    SILVER_SYNC_EVENTS,
    TableSpec,
    arrow_schema,
)
from .session import Progress, ProgressStep, translate_spark_errors
from .settings import PipelineSettings
from .source import log_segments
from .storage_errors import translate_read_errors, translate_write_errors
from .table_files import DataFile, write_file
from .table_log import Note

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def group_cursors(layout: Layout, disk: Disk) -> pa.Table:
    """Every group, with the last offset it has acknowledged. One whose files are damaged counts as one that has acknowledged nothing."""
    rows: list[dict[str, Any]] = []
    for files in CursorFiles(disk, layout.offsets).read_all():
        row: dict[str, Any] = {"topic": files.topic, "group": files.group, "committed": -1, "epoch": ""}
        if files.current is not None and (stored := files.current.stored) is not None:
            row |= {
                "committed": stored.committed,
                "segment": stored.segment,
                "at": _time_of(stored.ts),
                "epoch": stored.epoch,
            }
        rows.append(row)
    return pa.Table.from_pylist(rows, schema=arrow_schema(SILVER_GROUP_CURSORS.schema))


def group_positions(cursors: pa.Table, segments: pa.Table, seen_at: datetime) -> pa.Table:
    """Every group at one moment: what it has acknowledged of its topic, and how much not. From two tables that were just read."""
    last = segments.group_by("topic").aggregate([("last_offset", "max")]).to_pylist()
    # A segment of damaged lines alone has no offset.
    heads = {row["topic"]: row["last_offset_max"] for row in last if row["last_offset_max"] is not None}
    rows = [
        {
            "topic": cursor["topic"],
            "group": cursor["group"],
            "seen_at": seen_at,
            "committed": cursor["committed"],
            "head_offset": (head := heads.get(cursor["topic"], -1)),
            "lag": max(0, head - cursor["committed"]),
            "epoch": cursor["epoch"],
        }
        for cursor in cursors.to_pylist()
    ]
    return pa.Table.from_pylist(rows, schema=arrow_schema(SILVER_GROUP_POSITIONS.schema))


def dead_letters(layout: Layout, disk: Disk, clock: Clock) -> pa.Table:
    """Every dead letter there ever was, with the state it is in now."""
    store = DeadLetterFiles(disk, layout.dlq, clock)
    rows: list[dict[str, Any]] = []
    for topic in store.topics():
        rows += [
            {
                "topic": letter.topic,
                "group": letter.group,
                "offset": letter.offset,
                "seq": letter.seq,
                "event_id": letter.event_id,
                "error": letter.error,
                "category": letter.reason,
                "attempts": len(letter.attempts) or letter.retries,
                "failed_at": _time_of(letter.failed_at),
                "history": json.dumps([msgspec.to_builtins(attempt) for attempt in letter.attempts]),
                "id": letter.id,
                "state": letter.state,
                "space_id": letter.space_id,
                "error_type": letter.error_type,
            }
            for letter in store.find(topic, None, DeadLetterFilter(states=EVERY))
        ]
    return pa.Table.from_pylist(rows, schema=arrow_schema(SILVER_DEAD_LETTERS.schema))


def _time_of(text: str) -> datetime | None:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return moment if moment.tzinfo is not None else None


SILVER_APP: Final = "silver"
FROM_THE_BEGINNING: Final = frozenset(
    table.name
    for table in (SILVER_EVENTS, SILVER_SYNC_EVENTS, SILVER_GROUP_CURSORS, SILVER_DEAD_LETTERS, SILVER_SEGMENTS)
)
"""The tables that can be made again, from bronze or from the workspace's own files."""
_REPEATED: Final = ("event_id", "space_id", "topic", "type", "partitions", "payload")
"""
A row repeats another if all of these are the same. The id alone would not do: the log forgets ids with the records that it
drops, and then anybody may use them, also in another space. A sealed payload is null here, and null equals nothing.
"""
SYNC_DIALECTS: Final = {"sync": "A", "sync.projects": "B", "sync.legacy": "C"}
_SYNC_ROWS: Final = """
    select *, case dialect when 'B' then partition end as project_id from (
        select seq, topic, map($topics, $dialects)[topic] as dialect, unnest(partitions) as partition, actor as client_id, event_id, type, ts,
            written_at
        from events where seq > $since and seq <= $until and topic in $topics
    )
"""
_SYNC_BATCH: Final = 100_000
_SENT_MAX: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Silver:
    """
    The silver tables, and how they are filled.

    Args:
        lake, layout, disk, clock: Where everything is.
        settings: How far back repeated ids are looked for.
        run: A name that no other run has.
        anew: The tables that are made from the beginning, in the place of what they hold; until one is whole, readers see the
            old one.
    """

    lake: Lake
    layout: Layout
    disk: Disk
    clock: Clock
    settings: PipelineSettings
    run: str
    anew: Container[str] = ()

    def fill(self, spark: Callable[[], SparkSession], epoch: str, until: int, progress: Progress) -> dict[str, int]:
        """Bring every silver table to ``until``; the rows that each gained."""
        gained: dict[str, int] = {}
        cursors, segments = group_cursors(self.layout, self.disk), log_segments(self.layout, self.disk)
        positions = group_positions(cursors, segments, datetime_of(self.clock.now_ns()))
        steps: tuple[tuple[TableSpec, Callable[[], int]], ...] = (
            (SILVER_EVENTS, lambda: self._fill_events(spark, epoch, until)),
            (SILVER_SYNC_EVENTS, lambda: self._fill_sync(epoch, until)),
            (SILVER_GROUP_CURSORS, lambda: self._fill_snapshot(SILVER_GROUP_CURSORS, cursors, epoch, until)),
            (
                SILVER_GROUP_POSITIONS,
                lambda: self._fill_snapshot(SILVER_GROUP_POSITIONS, positions, epoch, until, replaces="nothing"),
            ),
            (
                SILVER_DEAD_LETTERS,
                lambda: self._fill_snapshot(
                    SILVER_DEAD_LETTERS, dead_letters(self.layout, self.disk, self.clock), epoch, until
                ),
            ),
            (
                SILVER_SEGMENTS,
                lambda: self._fill_snapshot(
                    SILVER_SEGMENTS, segments, epoch, until, of=_known_segments(segments, until)
                ),
            ),
        )
        for number, (table, step) in enumerate(steps):
            progress(ProgressStep("silver", number, len(steps), sum(gained.values())))
            with translate_spark_errors(table.name):
                gained[table.name] = step()
        progress(ProgressStep("silver", len(steps), len(steps), sum(gained.values())))
        return gained

    def _fill_events(self, spark: Callable[[], SparkSession], epoch: str, until: int) -> int:
        since, batch = self._place(SILVER_EVENTS)
        if since >= until or not self.lake.exists(BRONZE_EVENTS.name):
            return 0
        files = self.lake.files(BRONZE_EVENTS.name, lambda file: file.may_hold("seq", since + 1, until))
        if not files:
            return 0
        note = self._note(SILVER_EVENTS, epoch, since, until, batch + 1)
        if self._is_the_same(files, since, until):
            entries = [
                self.lake.copy_file(
                    file, SILVER_EVENTS.name, f"{stem(SILVER_APP, batch + 1, self.run)}-{number:06d}.parquet"
                )
                for number, file in enumerate(files)
            ]
            adds = self.lake.adds(entries)
            self._commit(SILVER_EVENTS, adds, batch + 1, note)
            return rows_of(adds)
        # An erased record has its place in bronze, and nothing to say.
        session = spark()
        frame = self._rows(session, BRONZE_EVENTS, files, since, until).where(
            "payload is not null or sealed is not null"
        )
        frame = self._without_known(session, _without_repeats(frame), since, files)
        # Files come out about as large as they went in; many small ones are put together here.
        count = max(1, sum(file.size for file in files) // self.settings.compact_bytes_max)
        if count < len(files):
            frame = frame.coalesce(count)
        return self._put(frame, SILVER_EVENTS, batch + 1, note)

    def _put(self, frame: DataFrame, table: TableSpec, version: int, note: Note) -> int:
        replaces: Replaces = "all" if table.name in self.anew else "nothing"
        return self.lake.write(
            frame, table.name, table.schema, app=SILVER_APP, version=version, note=note, run=self.run, replaces=replaces
        )

    def _is_the_same(self, files: list[DataFile], since: int, until: int) -> bool:
        """Whether these files of bronze are what silver is to gain, as they are: nothing repeated, erased, or of another batch."""
        return (
            all(file.lies_within("seq", since + 1, until) for file in files)
            and not self._may_be_known(since)
            and not any(map(_has_erased, files))
            and not self._repeats_ids(files)
        )

    def _fill_sync(self, epoch: str, until: int) -> int:
        """One row an event and partition; put together here, as it is one pass over few columns."""
        since, batch = self._place(SILVER_SYNC_EVENTS)
        if since >= until or not self.lake.exists(SILVER_EVENTS.name):
            return 0
        files = self.lake.files(
            SILVER_EVENTS.name,
            lambda file: (
                file.may_hold("seq", since + 1, until)
                and any(file.may_hold("topic", topic, topic) for topic in SYNC_DIALECTS)
            ),
        )
        if not files and not (SILVER_SYNC_EVENTS.name in self.anew and self.lake.exists(SILVER_SYNC_EVENTS.name)):
            return 0
        schema, folder = arrow_schema(SILVER_SYNC_EVENTS.schema), self.lake.folder(SILVER_SYNC_EVENTS.name)
        with self._duckdb() as duck, translate_read_errors(self.lake.folder(SILVER_EVENTS.name)):
            duck.register("events", self.lake.dataset(SILVER_EVENTS.name, files))
            known = {"topics": list(SYNC_DIALECTS), "dialects": list(SYNC_DIALECTS.values())}
            rows = duck.sql(_SYNC_ROWS, params={**known, "since": since, "until": until})
            batches = (pa.Table.from_batches([each]) for each in rows.to_arrow_reader(_SYNC_BATCH))
            with translate_write_errors(folder):
                name = f"{stem(SILVER_APP, batch + 1, self.run)}.parquet"
                entry = write_file(folder, name, schema, batches)
        adds = self.lake.adds([] if entry is None else [entry])
        self._commit(
            SILVER_SYNC_EVENTS, adds, batch + 1, self._note(SILVER_SYNC_EVENTS, epoch, since, until, batch + 1)
        )
        return rows_of(adds)

    def _commit(self, table: TableSpec, adds: Sequence[AddAction], version: int, note: Note) -> None:
        replaces: Replaces = "all" if table.name in self.anew else "nothing"
        schema = arrow_schema(table.schema)
        self.lake.commit(table.name, schema, adds, app=SILVER_APP, version=version, note=note, replaces=replaces)

    @contextlib.contextmanager
    def _duckdb(self) -> Iterator[duckdb.DuckDBPyConnection]:
        """DuckDB with bounded memory."""
        memory = {"memory_limit": f"{self.settings.task_memory_mb}MB"}
        with (
            tempfile.TemporaryDirectory(prefix="tidings-silver-") as spill,
            duckdb.connect(config={**memory, "temp_directory": spill}) as duck,
        ):
            duck.execute("set timezone = 'UTC'")
            yield duck

    def _fill_snapshot(
        self,
        table: TableSpec,
        rows: pa.Table,
        epoch: str,
        until: int,
        *,
        of: pa.Table | None = None,
        replaces: Replaces = "all",
    ) -> int:
        """Replace a small table as a whole, or add to it, if anything is new of ``of``: all but the time of looking."""
        digest = _digest(rows.select([name for name in rows.column_names if name != "seen_at"]) if of is None else of)
        note = self.lake.note(table.name)
        if note.get("digest") == digest and table.name not in self.anew:
            return 0
        batch = int(note.get("batch", 0)) + 1
        return self.lake.write_rows(
            rows,
            table.name,
            table.schema,
            app=SILVER_APP,
            version=batch,
            note={"epoch": epoch, "seq": until, "batch": batch, "digest": digest},
            run=self.run,
            replaces=replaces,
        )

    def _place(self, table: TableSpec) -> tuple[int, int]:
        """The seq that a table reaches to, and how many commits it took."""
        note = self.lake.note(table.name)
        return 0 if table.name in self.anew else int(note.get("seq", 0)), int(note.get("batch", 0))

    def _note(self, table: TableSpec, epoch: str, since: int, until: int, batch: int) -> Note:
        note: Note = {"epoch": epoch, "seq": until, "since": since, "batch": batch}
        return {**note, "days": None} if table.name in self.anew else note

    def _rows(self, spark: SparkSession, table: TableSpec, files: list[DataFile], since: int, until: int) -> DataFrame:
        chosen = {file.name for file in files}
        frame = self.lake.read(spark, table.name, lambda file: file.name in chosen, table.schema)
        return frame.where(f"seq > {since} and seq <= {until}")

    def _without_known(self, spark: SparkSession, frame: DataFrame, since: int, files: list[DataFile]) -> DataFrame:
        """The rows that do not repeat one that the table has."""
        if not self._may_be_known(since):
            return frame
        oldest = min((moment for file in files if (moment := file.minimum.get("written_at")) is not None), default=None)
        earliest = None if oldest is None else oldest - timedelta(days=self.settings.dedupe_days)
        known = self.lake.read(
            spark, SILVER_EVENTS.name, lambda file: file.may_hold("written_at", earliest, None), SILVER_EVENTS.schema
        )
        # Ids are few bytes, payloads many: those are read only if an id did come again.
        again = frame.join(known.select("event_id"), "event_id", "left_semi").select("event_id").distinct()
        if not again.take(1):
            return frame
        rows = known.join(again, "event_id", "left_semi").select(*_REPEATED)
        return frame.join(rows, list(_REPEATED), "left_anti").select(*frame.columns)

    def _repeats_ids(self, files: list[DataFile]) -> bool:
        """Whether an id may come twice in these files; looked for here, which is quicker than asking Spark."""
        ids = self.lake.dataset(BRONZE_EVENTS.name, files)
        with translate_read_errors(files[0].folder), self._duckdb() as duck:
            duck.register("ids", ids)
            question = "select 1 from ids group by hash(event_id) having count(*) > 1 limit 1"
            return duck.execute(question).fetchone() is not None

    def _may_be_known(self, since: int) -> bool:
        """
        Whether the table may have an event's id already.

        The log itself refuses an id twice for as long as it holds the record. So an id can only come again if retention
        dropped the first one; and where nothing was dropped, nothing needs to be looked for.
        """
        return bool(since and self.settings.dedupe_days and self._has_dropped())

    def _has_dropped(self) -> bool:
        return any(numbers[0] > 1 for numbers in self.layout.segments(self.disk).values())


def _has_erased(file: DataFile) -> bool:
    """Whether records of the file may have been erased: such a one has neither a payload nor a sealed one."""
    with translate_read_errors(file.folder), file.open() as opened:
        footer = pq.read_metadata(opened)
    places = {footer.schema.column(at).path: at for at in range(footer.num_columns)}
    empty = 0
    for group in range(footer.num_row_groups):
        for name in ("payload", "sealed"):
            found = footer.row_group(group).column(places[name]).statistics
            if found is None or not found.has_null_count:
                return True
            empty += found.null_count
    return bool(empty > footer.num_rows)


def _known_segments(segments: pa.Table, until: int) -> pa.Table:
    """Which segments hold records up to a seq: what was only written after it (by the pipeline itself) is nothing new."""
    known = segments.filter(pc.field("first_seq") <= until).select(["topic", "space_id", "segment", "first_seq"])
    return known.append_column("until", pa.array([until] * known.num_rows, pa.int64()))


def _digest(rows: pa.Table) -> str:
    """Of the rows as bytes: a log may have very many segments, too many to spell out."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as stream:
        stream.write_table(rows)
    return hashlib.sha256(memoryview(sink.getvalue())).hexdigest()


def _without_repeats(frame: DataFrame) -> DataFrame:
    """Without the rows that repeat an earlier one. Only ids that come twice are looked at twice, and a log hardly has any."""
    from pyspark.sql import functions as F
    from pyspark.sql.window import Window

    hashed = F.xxhash64("event_id")
    twice = frame.groupBy(hashed.alias("id_hash")).count().where("count > 1").select("id_hash")
    found: list[Any] = twice.take(1)
    if not found:
        return frame
    order = Window.partitionBy(*_REPEATED).orderBy("seq")
    suspects = frame.where("payload is not null").select("seq", *_REPEATED, hashed.alias("id_hash"))
    placed = suspects.join(twice, "id_hash", "left_semi").withColumn("place", F.row_number().over(order))
    repeats = placed.where("place > 1").select("seq").localCheckpoint(eager=False)
    # So few that they fit into any heap are sent to where the rows are; of more Spark decides.
    sent = F.broadcast(repeats) if repeats.count() <= _SENT_MAX else repeats
    return frame.join(sent, "seq", "left_anti").select(*frame.columns)
