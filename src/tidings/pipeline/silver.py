"""
Silver: one row an event; sync events by partition; consumer groups, dead letters and segments as they are now.

Each table takes what bronze has gained since the seq that the table itself stores, in one commit that stores the new one;
so a table that was not reached before a crash catches up, and one that was reached is left alone.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import tempfile
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import duckdb
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
from deltalake.transaction import AddAction

from tidings.core.clock import Clock, datetime_of
from tidings.log.embedded.disk import Disk
from tidings.log.embedded.layout import Layout

from .committer import Replaces
from .group_files import DeadLetters, LetterFile, group_cursors, group_positions, letter_files
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
from .source import first_offsets, log_segments
from .storage_errors import translate_read_errors, translate_write_errors
from .table_files import DataFile, write_file
from .table_log import Note

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


_LETTER_FILES_MAX: Final = 1_000
"""With more files of dead letters than this their places are not noted, and all are read again when one has changed."""
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
_IDS_MAX: Final = 100_000
"""So many new ids are looked up in the table by this process,"""
_IDS_FEW: Final = 10_000
"""Up to so many ids are compared without DuckDB, which takes longer to start."""
_IDS_THROUGH_MAX: Final = 5_000_000
"""among so many rows; for more there is Spark."""
_SNAPSHOT_S: Final = 60
"""While the log is followed, the ends of its groups and segments are looked at so often at most."""


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
        is_paced: Whether runs follow each other within seconds: groups' positions and segments are then stored once a minute.
    """

    lake: Lake
    layout: Layout
    disk: Disk
    clock: Clock
    settings: PipelineSettings
    run: str
    anew: Container[str] = ()
    is_paced: bool = False

    def fill(self, spark: Callable[[], SparkSession], epoch: str, until: int, progress: Progress) -> dict[str, int]:
        """Bring every silver table to ``until``; the rows that each gained."""
        gained: dict[str, int] = {}
        cursors = group_cursors(self.layout, self.disk)
        # Reading these costs all segments there are.
        segments = functools.cache(lambda: log_segments(self.layout, self.disk))
        steps: tuple[tuple[TableSpec, Callable[[], int]], ...] = (
            (SILVER_EVENTS, lambda: self._fill_events(spark, epoch, until)),
            (SILVER_SYNC_EVENTS, lambda: self._fill_sync(epoch, until)),
            (SILVER_GROUP_CURSORS, lambda: self._fill_snapshot(SILVER_GROUP_CURSORS, cursors, epoch, until)),
            (
                SILVER_GROUP_POSITIONS,
                lambda: self._fill_positions(cursors, segments, epoch, until),
            ),
            (
                SILVER_DEAD_LETTERS,
                lambda: self._fill_letters(epoch, until),
            ),
            (
                SILVER_SEGMENTS,
                lambda: self._fill_segments(segments, epoch, until),
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
        frame = self._without_known(session, _without_repeats(frame), since, until, files)
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
            and not self._may_be_known(files, since, until)
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

    def _fill_positions(self, cursors: pa.Table, segments: Callable[[], pa.Table], epoch: str, until: int) -> int:
        """Where every group stands now."""
        if self._was_just_seen(SILVER_GROUP_POSITIONS):
            return 0
        rows = group_positions(cursors, segments(), datetime_of(self.clock.now_ns()))
        return self._fill_snapshot(
            SILVER_GROUP_POSITIONS, rows, epoch, until, of=rows.drop_columns(["seen_at"]), replaces="nothing"
        )

    def _fill_segments(self, segments: Callable[[], pa.Table], epoch: str, until: int) -> int:
        """The segments that the log has now."""
        if self._was_just_seen(SILVER_SEGMENTS):
            return 0
        return self._fill_snapshot(SILVER_SEGMENTS, segments(), epoch, until, of=_known_segments(segments(), until))

    def _was_just_seen(self, table: TableSpec) -> bool:
        """Whether runs follow each other so closely that what the table holds of the log will do."""
        seen_ns = self.lake.note(table.name).get("seen_ns")
        if not self.is_paced or seen_ns is None or table.name in self.anew:
            return False
        return 0 <= self.clock.now_ns() - int(seen_ns) < _SNAPSHOT_S * 1_000_000_000

    def _fill_letters(self, epoch: str, until: int) -> int:
        """The dead letters, if one of their files is another than when they were read."""
        files = letter_files(self.layout)
        note = self.lake.note(SILVER_DEAD_LETTERS.name)
        digest = hashlib.sha256(repr([file[:3] for file in files]).encode()).hexdigest()
        is_anew = SILVER_DEAD_LETTERS.name in self.anew
        if note.get("files") == digest and not is_anew:
            return 0
        known = [] if is_anew else [LetterFile(*file) for file in note.get("places", ())]
        rows = arrow_schema(SILVER_DEAD_LETTERS.schema).empty_table()
        if known:
            rows = self.lake.dataset(SILVER_DEAD_LETTERS.name).to_table().cast(rows.schema)
        rows, read = DeadLetters(self.layout, self.disk, self.clock).read(files, known, rows)
        places = [list(file) for file in read] if len(read) <= _LETTER_FILES_MAX else []
        return self._fill_snapshot(SILVER_DEAD_LETTERS, rows, epoch, until, more={"files": digest, "places": places})

    def _fill_snapshot(
        self,
        table: TableSpec,
        rows: pa.Table,
        epoch: str,
        until: int,
        *,
        of: pa.Table | None = None,
        replaces: Replaces = "all",
        more: Note | None = None,
    ) -> int:
        """Replace a small table as a whole, or add to it, if anything is new of ``of`` (all of it if not given), or of ``more``."""
        digest = _digest(rows if of is None else of)
        note = self.lake.note(table.name)
        is_same = note.get("digest") == digest and all(note.get(name) == value for name, value in (more or {}).items())
        if is_same and table.name not in self.anew:
            return 0
        batch = int(note.get("batch", 0)) + 1
        seen_ns = self.clock.now_ns()
        return self.lake.write_rows(
            rows,
            table.name,
            table.schema,
            app=SILVER_APP,
            version=batch,
            note={"epoch": epoch, "seq": until, "batch": batch, "digest": digest, "seen_ns": seen_ns, **(more or {})},
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

    def _without_known(
        self, spark: SparkSession, frame: DataFrame, since: int, until: int, files: list[DataFile]
    ) -> DataFrame:
        """The rows that do not repeat one that the table has."""
        if not self._may_be_known(files, since, until):
            return frame
        chosen = {file.name for file in self._forgotten(files, self._dropped(files, since))}
        known = self.lake.read(spark, SILVER_EVENTS.name, lambda file: file.name in chosen, SILVER_EVENTS.schema)
        # Ids are few bytes, payloads many: those are read only if an id did come again.
        again = frame.join(known.select("event_id"), "event_id", "left_semi").select("event_id").distinct()
        if not again.take(1):
            return frame
        rows = known.join(again, "event_id", "left_semi").select(*_REPEATED)
        return frame.join(rows, list(_REPEATED), "left_anti").select(*frame.columns)

    def _repeats_ids(self, files: list[DataFile]) -> bool:
        """Whether an id may come twice in these files; looked for here, which is quicker than asking Spark."""
        count = sum(file.rows for file in files)
        if count == 1:
            return False
        ids = self.lake.dataset(BRONZE_EVENTS.name, files)
        if count <= _IDS_FEW:
            with translate_read_errors(files[0].folder):
                known = ids.to_table(columns=["event_id"])["event_id"]
            return len(pc.unique(known)) < len(known)
        with translate_read_errors(files[0].folder), self._duckdb() as duck:
            duck.register("ids", ids)
            question = "select 1 from ids group by hash(event_id) having count(*) > 1 limit 1"
            return duck.execute(question).fetchone() is not None

    def _may_be_known(self, files: list[DataFile], since: int, until: int) -> bool:
        """
        Whether the table may have the id of an event in these files of bronze already.

        The log itself refuses an id twice for as long as it holds the record. So an id can only come again if retention
        dropped the first one, from the same topic: only rows before the topic's first offset are looked through.
        """
        dropped = self._dropped(files, since)
        forgotten = self._forgotten(files, dropped)
        if not forgotten:
            return False
        new = (pc.field("seq") > since) & (pc.field("seq") <= until) & pc.field("topic").isin(list(dropped))
        with translate_read_errors(files[0].folder):
            ids = self.lake.dataset(BRONZE_EVENTS.name, files).to_table(columns=["event_id"], filter=new)["event_id"]
        if len(ids) > _IDS_MAX or sum(file.rows for file in forgotten) > _IDS_THROUGH_MAX:
            return True
        rows = self.lake.dataset(SILVER_EVENTS.name, forgotten)
        with translate_read_errors(forgotten[0].folder):
            is_again = pc.field("event_id").isin(pc.unique(ids)) & pc.field("topic").isin(list(dropped))
            return any(
                (first := dropped[topic]) is None or offset < first
                for batch in rows.to_batches(columns=["topic", "offset"], filter=is_again)
                for topic, offset in zip(*(batch[name].to_pylist() for name in ("topic", "offset")), strict=True)
            )

    def _dropped(self, files: Sequence[DataFile], since: int) -> dict[str, int | None]:
        """Of the topics that these files may hold and the log dropped something of: the first offset that it still has."""
        if not since or not self.settings.dedupe_days:
            return {}
        topics = {key.topic for key, numbers in self.layout.segments(self.disk).items() if numbers[0] > 1}
        return first_offsets(
            self.layout,
            self.disk,
            {topic for topic in topics if any(file.may_hold("topic", topic, topic) for file in files)},
        )

    def _forgotten(self, files: Sequence[DataFile], dropped: Mapping[str, int | None]) -> list[DataFile]:
        """The files of the table with rows of the last days that the log may have forgotten."""
        if not dropped:
            return []
        oldest = min((moment for file in files if (moment := file.minimum.get("written_at")) is not None), default=None)
        earliest = None if oldest is None else oldest - timedelta(days=self.settings.dedupe_days)
        return self.lake.files(
            SILVER_EVENTS.name,
            lambda file: (
                file.may_hold("written_at", earliest, None)
                and any(
                    file.may_hold("topic", topic, topic) and (first is None or file.may_hold("offset", None, first - 1))
                    for topic, first in dropped.items()
                )
            ),
        )


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
