"""
The lake: Delta tables in a folder or an object store, written without Delta's own library for the JVM.

    lake/
      lake.json             the epoch of the log that the tables were made from, and the folder they are in
      positions.json, archived.json, jobs.json     see ``state_files`` and ``status``
      tables/<layer>/<name>/            the data files, and _delta_log
      tables-<epoch>/...                the same, of an epoch that the log was given later
      tables/<layer>/<name>-<number>/   a table that a repair made anew, because what is in the folder of its name cannot be read

Data files are written first and are seen by nobody; one commit to the table's log then adds them, together with the
application's own count (``app``, ``version``) and a note. So a step that is repeated after a crash is found to be done, or
is done as a whole; and of two runs that do the same step at once, the second is told and changes nothing. ``note`` carries
what must be true together with the data, such as the seq it reaches.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

import msgspec
import pyarrow as pa  # type: ignore[import-untyped]
from deltalake import DeltaTable
from deltalake.transaction import AddAction, RemoveAction

from tidings.core.clock import Clock

from .committer import Committer, Replaces
from .errors import LakeConflict, LakeDamaged, LakeUnreachable, UnknownTable
from .schemas import arrow_schema, struct_of
from .storage import Storage
from .storage_errors import blocked, in_the_way, translate_read_errors, translate_write_errors, words_of
from .table_files import (
    DAY_COLUMN,
    ENTRIES,
    Choice,
    DataFile,
    FileReader,
    FileWriter,
    add_action,
    dataset,
    entry_of,
    write_file,
)
from .table_log import (
    COMMITS_KEPT_MAX,
    Commit,
    Commits,
    Note,
    last_note,
    translate_table_errors,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_META: Final = "lake.json"
_TABLES: Final = "tables"
_LAYERS: Final = ("bronze", "silver", "gold")


class LakeMeta(msgspec.Struct, frozen=True):
    """The content of ``lake.json``."""

    format: int
    epoch: str
    tables: str = _TABLES
    """The folder of the tables of this epoch; those of ended ones stay in theirs."""
    moved: dict[str, str] = {}
    """For each table that is not in the folder of its name, in which one beside it."""


class Lake:
    """
    The tables of one workspace. May be used by several threads.

    Args:
        place: Where they are; made by the first commit.
        clock: For the times that a table's log wants.
        commits_kept_max: How many commits of each table are kept in memory; older ones are read from its log each time.
    """

    def __init__(self, place: Storage | Path | str, clock: Clock, *, commits_kept_max: int = COMMITS_KEPT_MAX) -> None:
        self.storage = Storage.of(place)
        self.clock = clock
        self._commits_kept_max = commits_kept_max
        self._opening = threading.Lock()
        self._opened: dict[str, DeltaTable] = {}
        self._committer = Committer(self)
        self._known_files: dict[str, tuple[int, Sequence[DataFile]]] = {}
        """By table, its version and the files that it has then."""
        self._known_commits: dict[str, Commits] = {}
        self._meta: LakeMeta | None = None
        self._is_apart = False

    # What there is

    def folder(self, table: str) -> Storage:
        """Where a table is."""
        meta = self._meta or self.meta()
        return self._folder(table, meta)

    def _folder(self, table: str, meta: LakeMeta | None) -> Storage:
        layer, _, name = table.partition(".")
        tables, moved = (_TABLES, None) if meta is None else (meta.tables, meta.moved.get(table))
        return self.storage.child(tables, layer, moved or name)

    @property
    def tables_folder(self) -> Storage:
        """Where the tables of the present epoch are."""
        meta = self._meta or self.meta()
        return self.storage.child(_TABLES if meta is None else meta.tables)

    def tables(self) -> list[str]:
        """The names of the tables there are."""
        return [name for name in self.folders() if self.exists(name)]

    def folders(self) -> list[str]:
        """The names of the tables that have a folder, also of those that cannot be opened."""
        folder = self.tables_folder
        with translate_read_errors(folder):
            for layer in _LAYERS if folder.is_local else ():
                if (error := in_the_way(folder.path / layer)) is not None:
                    raise error
            found = {f"{layer}.{name}" for layer in folder.folders() for name in folder.folders(layer)}
        return sorted({name for name in found if "-" not in name} | self.moved.keys())

    @property
    def moved(self) -> Mapping[str, str]:
        """The tables that are not in the folder of their name, and in which they are."""
        meta = self._meta or self.meta()
        return {} if meta is None else meta.moved

    def exists(self, table: str) -> bool:
        """Whether the table was made."""
        folder = self.folder(table)
        if folder.url in self._opened:
            return True
        with translate_table_errors(folder, table):
            is_there = bool(DeltaTable.is_deltatable(folder.table_url, dict(folder.options)))
            if not is_there and folder.is_local and (error := in_the_way(folder.path)) is not None:
                raise error
        return is_there

    def open(self, table: str, version: int | None = None) -> DeltaTable:
        """
        The table as it is now, or was at a version.

        Raises:
            UnknownTable: It was never made.
            LakeDamaged: Its log cannot be read.
        """
        folder = self.folder(table)
        with translate_table_errors(folder, table):
            if version is not None:
                return DeltaTable(folder.table_url, version=version, storage_options=dict(folder.options))
            with self._opening:
                found = self._opened.get(folder.url)
                if found is None:
                    found = DeltaTable(folder.table_url, storage_options=dict(folder.options))
                    self._opened[folder.url] = found
                else:
                    found.update_incremental()
            return found

    def meta(self) -> LakeMeta | None:
        """
        Which log the tables were made from, and where they are; ``None`` before the first run.

        Raises:
            LakeDamaged: The file cannot be read.
        """
        if not self._is_apart:
            self._meta = self._read_meta()
        return self._meta

    def known_meta(self) -> LakeMeta | None:
        """
        The same; ``None`` only where there are no tables either.

        Raises:
            LakeDamaged: There are tables, and nothing says from which log they were made; or the file cannot be read.
        """
        if (meta := self.meta()) is None and self.folders():
            raise LakeDamaged(
                str(self.storage), "there are tables, and no lake.json says from which log they were made"
            )
        return meta

    @property
    def epoch(self) -> str:
        """The epoch of the log that the tables were made from; empty before the first run."""
        meta = self._meta or self.meta()
        return "" if meta is None else meta.epoch

    def _read_meta(self) -> LakeMeta | None:
        try:
            data = self.storage.read(_META)
        except OSError as error:
            if (known := blocked(self.storage, error)) is not None:
                raise known from error
            kind = LakeDamaged if self.storage.is_local else LakeUnreachable
            raise kind(self.storage.uri(_META), error.strerror or words_of(error)) from error
        try:
            return None if data is None else msgspec.json.decode(data, type=LakeMeta)
        except msgspec.DecodeError as error:
            raise LakeDamaged(self.storage.uri(_META), f"cannot be understood: {error}") from error

    def begin(self, epoch: str) -> None:
        """Note which log the tables are made from. Tables of an epoch before it stay where they are, and are no part of the lake."""
        self.storage.check_name()
        before = self.meta()
        if before is not None and before.epoch == epoch:
            return  # another run began it a moment ago
        tables = _TABLES if before is None else f"{_TABLES}-{epoch}"
        self.seen_as(LakeMeta(1, epoch, tables)).save_meta()
        self.meta()

    def seen_as(self, meta: LakeMeta) -> Lake:
        """The lake as it were if ``lake.json`` said this; nobody else sees it so before ``save_meta``."""
        other = Lake(self.storage, self.clock)
        other._meta, other._is_apart = meta, True
        return other

    def moving(self, table: str) -> Lake:
        """The lake with a new and empty folder for a table; what is in its present one stays there."""
        meta = self._meta or self.meta() or LakeMeta(1, "")
        layer, _, name = table.partition(".")
        numbers = [number for each, number in self.numbered(layer) if each == name]
        return self.seen_as(
            msgspec.structs.replace(meta, moved={**meta.moved, table: f"{name}-{max(numbers, default=1) + 1}"})
        )

    def numbered(self, layer: str) -> list[tuple[str, int]]:
        """The folders of a layer that tables were moved to: the tables' names and the folders' numbers."""
        with translate_read_errors(self.tables_folder):
            found = [name.rpartition("-") for name in self.tables_folder.folders(layer)]
        return [(name, int(number)) for name, _, number in found if name and number.isdecimal()]

    def save_meta(self) -> None:
        """Have ``lake.json`` say how the lake is seen here."""
        with translate_write_errors(self.storage):
            self.storage.replace(_META, msgspec.json.encode(self._meta) + b"\n")

    # Reading

    def files(self, table: str, where: Choice | None = None, version: int | None = None) -> list[DataFile]:
        """The table's files, or those among them that ``where`` does not rule out by their bounds."""
        files = self._files(table, version)
        return [file for file in files if where is None or where(file)]

    def _files(self, table: str, version: int | None) -> Sequence[DataFile]:
        """All of them, in the order of their names; read from the table's log once for each of its versions."""
        folder = self.folder(table)
        known = self._known_files.get(folder.url)
        if known is not None and known[0] == version:
            return known[1]
        opened = self.open(table, version)
        if known is not None and known[0] == opened.version():
            return known[1]
        # Of one moment: another thread may have the table go on to its next version meanwhile.
        at, found = opened.version(), pa.table(opened.get_add_actions(flatten=True))
        names = found.column_names
        files = []
        for row in found.to_pylist():
            least = {name[4:]: row[name] for name in names if name.startswith("min.")}
            most = {name[4:]: row[name] for name in names if name.startswith("max.")}
            if (day := row.get(f"partition.{DAY_COLUMN}")) is not None:
                least[DAY_COLUMN] = most[DAY_COLUMN] = day
            name = unquote(row["path"])
            files.append(DataFile(folder, name, row["size_bytes"], row["num_records"] or 0, least, most, day))
        files.sort(key=lambda each: each.name)
        if version is None and opened.version() == at:
            self._known_files[folder.url] = (at, files)
        return files

    def schema(self, table: str) -> pa.Schema:
        """The table's columns."""
        return pa.schema(self.open(table).schema().to_arrow())

    def dataset(self, table: str, files: Sequence[DataFile] | None = None, schema: pa.Schema | None = None) -> Any:
        """
        The table, or some of its files, as an Arrow dataset: what is read without Spark, on any storage.

        DuckDB takes it for a table by the name of the variable that holds it, or by ``register``. A table that was never made
        is empty if ``schema`` says what its columns would be.
        """
        if schema is None:
            schema = self.schema(table)
        if files is None:
            files = self.files(table) if self.exists(table) else []
        return dataset(self.folder(table), [(file.name, file.day) for file in files], schema)

    def read(self, spark: SparkSession, table: str, where: Choice | None = None, ddl: str | None = None) -> DataFrame:
        """
        The table as a DataFrame; a table that was never made is empty if ``ddl`` says what its columns would be.

        Args:
            spark: Where it is read.
            table: Its name.
            where: Rules out files by their bounds; rows are the reader's own affair.
            ddl: The columns to read; those that a file lacks are null.
        """
        from pyspark.sql.pandas.types import from_arrow_schema

        if not self.exists(table):
            if ddl is None:
                raise UnknownTable(table, "there is no such table")
            return spark.createDataFrame([], struct_of(ddl))
        columns = arrow_schema(ddl) if ddl is not None else self.schema(table)
        schema = struct_of(ddl) if ddl is not None else from_arrow_schema(columns)
        files = self.files(table, where)
        if not files:
            return spark.createDataFrame([], schema)
        folder = self.folder(table)
        if can_open(spark, folder):
            # The base path keeps Spark from taking the folders above for partitions.
            reader = spark.read.schema(schema).option("basePath", folder.url)
            found = reader.parquet(*(file.pattern for file in files))
            return found if files[0].day is None else found.select(*columns.names)  # Spark puts the day last
        names = spark.createDataFrame([(file.name, file.day) for file in files], "name string, day date")
        return names.repartition(len(files), "name").mapInArrow(FileReader(folder, columns), schema)

    def note(self, table: str) -> Note:
        """
        What the last commit that has a note says; nothing if nothing was ever committed to the table.

        Raises:
            LakeDamaged: Somebody put another table there; or nothing was noted lately.
        """
        return self.standing(table)[1]

    def standing(self, table: str) -> tuple[int, Note]:
        """
        Return the table's version and the note that holds for it; -1 and nothing if it was never made.

        Raises:
            LakeDamaged: Somebody put another table there; or nothing was noted lately.
        """
        seen, commits = -1, self.commits(table)
        for newest in commits:
            seen = int(newest["version"])
            note = last_note(itertools.chain([newest], commits), self.folder(table), table)
            if note is not None:
                return seen, note
            break
        if not self.exists(table):
            return -1, {}
        if (opened := self.open(table)).version() > seen:
            return self.standing(table)  # another run made its first commit a moment ago
        if not opened.file_uris():
            return int(opened.version()), {}  # a run died between making the table and its first commit
        raise LakeDamaged(str(self.folder(table)), "none of its last commits is the pipeline's")

    def commits(self, table: str) -> Iterator[Commit]:
        """
        Yield a table's commits, the newest first, as far back as its log goes; none of a table that was never made.

        The last ones are kept in memory, and none is read before somebody asks for it: an object store is asked for every one.
        """
        if not self.exists(table):
            return iter(())
        folder = self.folder(table)
        known = self._known_commits.get(folder.url)
        if known is None:
            known = self._known_commits.setdefault(folder.url, Commits(folder, self._commits_kept_max))
        return known.read(int(self.open(table).version()))

    def done(self, table: str, app: str) -> int | None:
        """The last version that an application committed to the table."""
        return self.open(table).transaction_version(app) if self.exists(table) else None

    # Writing

    def commit(
        self,
        table: str,
        schema: pa.Schema,
        adds: Sequence[AddAction],
        removes: Sequence[RemoveAction] = (),
        *,
        app: str,
        version: int,
        note: Note,
        replaces: Replaces = "nothing",
        is_by_day: bool = False,
        read_version: int | None = None,
    ) -> int:
        """
        Make files a part of the table, and others no longer, in one step that lasts when this returns; the table's new version.

        Args:
            table, schema: Which table; its columns may be more than it has had so far.
            adds, removes: The files.
            app, version: Whose step it is, and which: one more than ``done`` said when the step began.
            note: What is true from now on.
            replaces: Which rows go: none, all, or those of these days.
            is_by_day: Whether the table is partitioned by day.
            read_version: The table's version that the step was planned by, if nothing may have come in between.

        Raises:
            LakeConflict: Somebody else did this step, or came in between. Nothing was changed.
            LakeUnwritable: There is no room, or no permission.
        """
        return self._committer.commit(
            table,
            schema,
            adds,
            removes,
            app=app,
            version=version,
            note=note,
            replaces=replaces,
            is_by_day=is_by_day,
            read_version=read_version,
        )

    def commit_upkeep(
        self,
        table: str,
        adds: Sequence[AddAction] = (),
        removes: Sequence[RemoveAction] = (),
        *,
        settings: Mapping[str, str] | None = None,
    ) -> int:
        """
        Commit what leaves the table's rows as they are: the same rows in other files, or settings. The last note is repeated.

        Raises:
            LakeConflict: A file that is replaced is no longer part of the table. Nothing was changed.
            LakeUnwritable: There is no room, or no permission.
        """
        return self._committer.commit_upkeep(table, adds, removes, settings=settings)

    def check_place(self, table: str) -> None:
        """
        Make sure that a table is where ``lake.json`` says now.

        Raises:
            LakeConflict: A repair moved it.
        """
        folder = self.folder(table)
        if not self._is_apart and self._folder(table, self._read_meta()) != folder:
            raise LakeConflict(str(folder), "a repair moved it meanwhile")

    def sync(self, table: str, *names: str) -> None:
        """Have files of a table last, that the table library wrote: retention drops segments on the word of a commit."""
        within = self._within(self.folder(table))
        self.storage.sync(*(f"{within}/{each}" for each in names))

    def _within(self, folder: Storage) -> str:
        return folder.url.removeprefix(self.storage.url + "/")

    def write_files(
        self, frame: DataFrame, table: str, ddl: str, stem: str, *, is_by_day: bool = False, is_small: bool = False
    ) -> list[AddAction]:
        """
        Have Spark's tasks write a frame's rows to files of the table that nobody sees yet; few rows are written here.

        Args:
            frame: The rows, with the columns of ``ddl`` in that order.
            table: Whose files.
            ddl: The columns as they are stored.
            stem: How the names of the files begin: no two runs have the same.
            is_by_day: Whether there is a file a day and task; the column ``date`` then says which day.
            is_small: Whether there are so few that they may all be held here.
        """
        folder = self.folder(table)
        writer = FileWriter(folder, arrow_schema(ddl), stem, is_by_day)
        with translate_write_errors(folder):
            if is_small:
                return self.adds(writer.write(frame.toArrow().to_batches(), f"{stem}.parquet").to_pylist())
            return self.adds([row.asDict() for row in frame.mapInArrow(writer, ENTRIES).collect()])

    def copy_file(self, file: DataFile, table: str, name: str) -> dict[str, Any]:
        """Have a file of another table be one of this table too, under a name that nobody sees yet; its entry."""
        folder = self.folder(table)
        with translate_write_errors(folder):
            source, target = (self._within(each) for each in (file.folder, folder))
            self.storage.copy(f"{source}/{file.name}", f"{target}/{name}")
            return entry_of(folder, name)

    def adds(self, entries: Sequence[Mapping[str, Any]]) -> list[AddAction]:
        """What makes written files a part of their table, in the order of their names."""
        now_ms = self.clock.now_ns() // 1_000_000
        return [add_action(entry, now_ms=now_ms) for entry in sorted(entries, key=lambda entry: str(entry["name"]))]

    def write(
        self,
        frame: DataFrame,
        table: str,
        ddl: str,
        *,
        app: str,
        version: int,
        note: Note,
        run: str,
        replaces: Replaces = "nothing",
    ) -> int:
        """Add a DataFrame's rows to a table, or put them in the place of all of it; how many."""
        adds = self.write_files(frame, table, ddl, stem(app, version, run))
        self.commit(table, arrow_schema(ddl), adds, app=app, version=version, note=note, replaces=replaces)
        return rows_of(adds)

    def write_rows(
        self,
        rows: pa.Table,
        table: str,
        ddl: str,
        *,
        app: str,
        version: int,
        note: Note,
        run: str,
        replaces: Replaces = "all",
    ) -> int:
        """Add rows that are at hand to a table, or put them in the place of all of it; for tables that are small."""
        schema = arrow_schema(ddl)
        folder = self.folder(table)
        with translate_write_errors(folder):
            entry = write_file(folder, f"{stem(app, version, run)}.parquet", schema, [rows])
        adds = [] if entry is None else self.adds([entry])
        self.commit(table, schema, adds, app=app, version=version, note=note, replaces=replaces)
        return int(rows.num_rows)

    @contextlib.contextmanager
    def changing(self, table: str) -> Iterator[None]:
        """
        While the table library changes a table: what it raises, in our words.

        Raises:
            LakeConflict: Somebody else committed meanwhile. Nothing was changed.
            LakeUnwritable, LakeUnreachable, LakeDamaged
        """
        folder = self.folder(table)
        with translate_table_errors(folder, table), translate_write_errors(folder):
            yield


def can_open(spark: SparkSession, folder: Storage) -> bool:
    """Whether Spark itself can open files there: it can for a scheme that it has a library for."""
    if folder.is_local:
        return True
    if type(spark).__module__.startswith("pyspark.sql.connect"):
        return False
    from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]

    java: Any = spark.sparkContext
    try:
        java._jvm.org.apache.hadoop.fs.FileSystem.getFileSystemClass(folder.scheme, java._jsc.hadoopConfiguration())
    except Py4JJavaError:  # no such library, or not all of it
        return False
    return True


def stem(app: str, version: int, run: str) -> str:
    """How the names of the files of a step begin."""
    return f"{app}-{version:012d}-{run}"


def rows_of(adds: Sequence[AddAction]) -> int:
    """How many rows files have."""
    return sum(int(json.loads(add.stats)["numRecords"]) for add in adds)
