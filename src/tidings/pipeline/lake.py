"""
The lake: Delta tables below ``<workspace>/lake``, written without Delta's own library for the JVM.

    lake/
      lake.json             the epoch of the log that the tables were made from
      positions.json, archived.json, published.json     see ``state_files``
      lock                  held by the one run that writes
      tables/<layer>/<name>/            the data files, and _delta_log
      epochs/<epoch>/tables/...         the tables of an earlier epoch of the log

Data files are written first and are seen by nobody; one commit to the table's log then adds them, together with the
application's own count (``app``, ``version``) and a note. So a step that is repeated after a crash is found to be done, or
is done as a whole. ``note`` carries what must be true together with the data, such as the seq it reaches.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

import msgspec
import pyarrow as pa  # type: ignore[import-untyped]
from deltalake import CommitProperties, DeltaTable, PostCommitHookProperties, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction

from tidings.core.clock import Clock

from .errors import LakeBusy, LakeConflict, LakeDamaged, LakeUnwritable, UnknownTable
from .schemas import TableSpec, arrow_schema
from .settings import PipelineSettings
from .state_files import replace_atomically, sync_file, sync_folder
from .table_files import DataFile, add_action, parquet_files, remove_action

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

COMPACTION_APP: Final = "compaction"
_SWEEP_AGE_HOURS: Final = 24.0
_NOTE: Final = "tidings"
_HISTORY_MAX: Final = 100
_CHECKPOINT_EVERY: Final = 20
_LOG_DAYS: Final = 30

Note = dict[str, Any]
Choice = Callable[[DataFile], bool]


class LakeMeta(msgspec.Struct, frozen=True):
    """The content of ``lake.json``."""

    format: int
    epoch: str


class Lake:
    """
    The tables of one workspace.

    Args:
        root: The lake's folder; made by the first commit.
        clock: For the times that a table's log wants.
    """

    def __init__(self, root: Path, clock: Clock) -> None:
        self.root = root.absolute()
        self._clock = clock

    # What there is

    @property
    def tables_folder(self) -> Path:
        """Where the tables of the present epoch are."""
        return self.root / "tables"

    def path(self, table: str) -> Path:
        """The folder of a table."""
        layer, _, name = table.partition(".")
        return self.tables_folder / layer / name

    def tables(self) -> list[str]:
        """The names of the tables there are."""
        found = []
        for layer in _folders(self.tables_folder):
            found += [f"{layer.name}.{each.name}" for each in _folders(layer) if (each / "_delta_log").is_dir()]
        return sorted(found)

    def exists(self, table: str) -> bool:
        """Whether the table was made."""
        return bool(DeltaTable.is_deltatable(str(self.path(table))))

    def open(self, table: str, version: int | None = None) -> DeltaTable:
        """
        The table as it is now, or was at a version.

        Raises:
            UnknownTable: It was never made.
            LakeDamaged: Its log cannot be read.
        """
        with self._translate_errors(table):
            return DeltaTable(str(self.path(table)), version=version)

    def meta(self) -> LakeMeta | None:
        """Which log the tables were made from; ``None`` before the first run."""
        try:
            data = (self.root / "lake.json").read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise LakeDamaged(str(self.root / "lake.json"), error.strerror or str(error)) from error
        try:
            return msgspec.json.decode(data, type=LakeMeta)
        except msgspec.DecodeError as error:
            raise LakeDamaged(str(self.root / "lake.json"), f"cannot be understood: {error}") from error

    def begin(self, epoch: str) -> None:
        """Note which log the tables are made from."""
        with self.writing(self.root):
            self.root.mkdir(parents=True, exist_ok=True)
            replace_atomically(self.root / "lake.json", msgspec.json.encode(LakeMeta(1, epoch)) + b"\n")

    def set_aside(self, epoch: str) -> Path:
        """Move the tables out of the way as a whole, to where the tables of ended epochs are kept."""
        target = self.root / "epochs" / epoch
        with self.writing(target):
            target.mkdir(parents=True, exist_ok=True)
            for name in ("positions.json", "archived.json"):
                with contextlib.suppress(FileNotFoundError):
                    (self.root / name).replace(target / name)
            with contextlib.suppress(FileNotFoundError):
                self.tables_folder.replace(target / "tables")
            sync_folder(self.root)
        return target

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """
        Be the one that writes.

        Raises:
            LakeBusy: Another run is.
        """
        with self.writing(self.root):
            self.root.mkdir(parents=True, exist_ok=True)
            held = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                owner = os.pread(held, 64, 0).decode(errors="replace").strip() or "another process"
                raise LakeBusy(str(self.root), f"{owner} is writing it") from error
            os.ftruncate(held, 0)
            os.pwrite(held, f"process {os.getpid()}".encode(), 0)
            yield
        finally:
            os.close(held)

    # Reading

    def files(self, table: str, where: Choice | None = None, version: int | None = None) -> list[DataFile]:
        """The table's files, or those among them that ``where`` does not rule out by their bounds."""
        folder = self.path(table)
        found = pa.table(self.open(table, version).get_add_actions(flatten=True))
        names = found.column_names
        files = []
        for row in found.to_pylist():
            least = {name[4:]: row[name] for name in names if name.startswith("min.")}
            most = {name[4:]: row[name] for name in names if name.startswith("max.")}
            name = unquote(row["path"])
            file = DataFile(folder / name, name, row["size_bytes"], row["num_records"] or 0, least, most)
            if where is None or where(file):
                files.append(file)
        files.sort(key=lambda each: each.name)
        return files

    def paths(self, table: str) -> list[str]:
        """Where the table's files are; none if it was never made."""
        return [str(file.path) for file in self.files(table)] if self.exists(table) else []

    def schema(self, table: str) -> pa.Schema:
        """The table's columns."""
        return pa.schema(self.open(table).schema().to_arrow())

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
            return spark.createDataFrame([], from_arrow_schema(arrow_schema(ddl)))
        schema = from_arrow_schema(arrow_schema(ddl) if ddl is not None else self.schema(table))
        files = self.files(table, where)
        if not files:
            return spark.createDataFrame([], schema)
        return spark.read.schema(schema).parquet(*(str(file.path) for file in files))

    def note(self, table: str) -> Note:
        """What the last commit that has a note says; nothing if nothing was ever committed to the table."""
        if not self.exists(table):
            return {}
        with self._translate_errors(table):
            opened = self.open(table)
            for entry in opened.history(_HISTORY_MAX):
                if (text := entry.get(_NOTE)) is not None:
                    found: Note = json.loads(text)
                    return found
            if not opened.file_uris():
                return {}  # a run died between making the table and its first commit
        raise LakeDamaged(str(self.path(table)), f"none of its last {_HISTORY_MAX} commits is the pipeline's")

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
        replaces_all: bool = False,
    ) -> int:
        """
        Make files a part of the table, and others no longer, in one step that is on disk when this returns.

        Raises:
            LakeConflict: Somebody else committed meanwhile.
            LakeUnwritable: There is no room, or no permission.
        """
        folder = self.path(table)
        properties = CommitProperties(
            custom_metadata={_NOTE: json.dumps(note)},
            max_commit_retries=0,
            app_transactions=[Transaction(app, version)],
        )
        with self._translate_errors(table), self.writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            target = DeltaTable.create(
                str(folder),
                schema,
                mode="ignore",
                configuration={"delta.logRetentionDuration": f"interval {_LOG_DAYS} days"},
            )
            if replaces_all:
                listed = pa.table(target.get_add_actions(flatten=True))["path"].to_pylist()
                gone = [folder / unquote(name) for name in listed]
            else:
                gone = [folder / unquote(remove.path) for remove in removes]
                _add_columns(target, schema)
            target.create_write_transaction(
                [*adds, *removes],
                "overwrite" if replaces_all else "append",
                schema if replaces_all else target.schema(),
                commit_properties=properties,
                post_commithook_properties=PostCommitHookProperties(
                    create_checkpoint=False, cleanup_expired_logs=False
                ),
            )
            target.update_incremental()
            committed = int(target.version())
            self._sync_log(folder, committed)
            self._retire(gone)
            if committed % _CHECKPOINT_EVERY == 0:
                target.create_checkpoint()
        return committed

    def append(
        self, frame: DataFrame, table: str, ddl: str, *, app: str, version: int, note: Note, run: str
    ) -> int | None:
        """Add a DataFrame's rows as one version of an application; ``None`` if that version was committed before."""
        done = self.done(table, app)
        if done is not None and version <= done:
            return None
        files = self.write_files(frame, table, app, version, run)
        adds = [add_action(self.path(table), file) for file in files]
        self.commit(table, arrow_schema(ddl), adds, app=app, version=version, note=note)
        return _rows(adds)

    def replace(self, frame: DataFrame, table: str, ddl: str, *, app: str, version: int, note: Note, run: str) -> int:
        """Put a DataFrame in the place of the whole table."""
        files = self.write_files(frame, table, app, version, run)
        adds = [add_action(self.path(table), file) for file in files]
        self.commit(table, arrow_schema(ddl), adds, app=app, version=version, note=note, replaces_all=True)
        return _rows(adds)

    def replace_rows(
        self, rows: pa.Table, table: str, ddl: str, *, app: str, version: int, note: Note, run: str
    ) -> int:
        """Put rows that are at hand in the place of the whole table; for tables that are small."""
        import pyarrow.parquet as pq  # type: ignore[import-untyped]

        schema = arrow_schema(ddl)
        file = self.path(table) / f"{_stem(app, version, run)}.parquet"
        adds = []
        with self.writing(file):
            if rows.num_rows:
                file.parent.mkdir(parents=True, exist_ok=True)
                pq.write_table(rows.cast(schema), file, compression="zstd")
                sync_file(file)
                adds = [add_action(self.path(table), file)]
        self.commit(table, schema, adds, app=app, version=version, note=note, replaces_all=True)
        return int(rows.num_rows)

    def reset(self, table: str, *, app: str, note: Note) -> None:
        """Take all rows out of a table, so that it is filled anew; earlier versions stay readable for a while."""
        if self.exists(table):
            version = (self.done(table, app) or 0) + 1
            self.commit(table, self.schema(table), (), app=app, version=version, note=note, replaces_all=True)

    def _retire(self, files: Sequence[Path]) -> None:
        """Have the age of files that left their table count from now on: a reader may just have begun with them."""
        now_ns = self._clock.now_ns()
        for path in files:
            with contextlib.suppress(OSError):  # the commit is made; a file deleted early costs a reader a second read
                os.utime(path, ns=(now_ns, now_ns))

    def sweep(self, table: str, *, age_hours_min: float) -> int:
        """
        Delete files that are no part of the table any more, and were not for so long; how many.

        Readers of an older version of the table, and writers that are still at work, need theirs for a while.
        """
        wanted = {file.name for file in self.files(table)}
        folder, swept = self.path(table), 0
        before_ns = self._clock.now_ns() - int(age_hours_min * 3600e9)
        with self.writing(folder):
            for place, _, names in os.walk(folder):
                if "_delta_log" in Path(place).parts:
                    continue
                for name in names:
                    path = Path(place, name)
                    if path.relative_to(folder).as_posix() in wanted or path.stat().st_mtime_ns > before_ns:
                        continue
                    path.unlink(missing_ok=True)
                    swept += name.endswith(".parquet")
                if place != str(folder):
                    with contextlib.suppress(OSError):
                        Path(place).rmdir()
        return swept

    def write_files(self, frame: DataFrame, table: str, app: str, version: int, run: str) -> list[Path]:
        """Have Spark write a frame's rows to files of the table that nobody sees yet."""
        folder = self.path(table) / _stem(app, version, run)
        with self.writing(folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
            # What an attempt that failed within this run left is replaced; other runs have folders of their own.
            shutil.rmtree(folder, ignore_errors=True)
            frame.write.mode("overwrite").option("compression", "zstd").parquet(str(folder))
            files = list(parquet_files(folder))
            for file in files:
                sync_file(file)
            sync_folder(folder)
            sync_folder(folder.parent)
        return files

    def _sync_log(self, folder: Path, version: int) -> None:
        # Retention drops segments on the word of this commit, so it must outlive a power cut.
        sync_file(folder / "_delta_log" / f"{version:020d}.json")
        for each in (folder / "_delta_log", folder, folder.parent, self.tables_folder, self.root):
            sync_folder(each)

    @contextlib.contextmanager
    def _translate_errors(self, table: str) -> Iterator[None]:
        """What the table library raises, in our words."""
        path = str(self.path(table))
        try:
            yield
        except TableNotFoundError as error:
            raise UnknownTable(table, "there is no such table") from error
        except CommitFailedError as error:
            raise LakeConflict(path, "another commit came first") from error
        except DeltaError as error:
            text = " ".join(str(error).split())
            kind = LakeUnwritable if _is_about_the_disk(text) else LakeDamaged
            raise kind(path, text[:300]) from error

    @contextlib.contextmanager
    def writing(self, path: Path) -> Iterator[None]:
        """
        While files of the lake are written: what the disk raises, in our words.

        Raises:
            LakeUnwritable: There is no room, or no permission.
        """
        try:
            yield
        except OSError as error:
            raise LakeUnwritable(
                str(error.filename or path), error.strerror or " ".join(str(error).split())[:300]
            ) from error
        except Exception as error:
            if type(error).__module__.split(".")[0] in ("py4j", "pyspark") and _is_about_the_disk(str(error)):
                raise LakeUnwritable(str(path), _disk_problem(str(error))) from error
            raise


_DISK_PROBLEMS: Final = ("No space left", "Disk quota", "Read-only file system", "Permission denied", "Not a directory")


def _is_about_the_disk(text: str) -> bool:
    return any(problem in text for problem in _DISK_PROBLEMS)


def _disk_problem(text: str) -> str:
    return next(problem for problem in _DISK_PROBLEMS if problem in text)


def _add_columns(target: DeltaTable, schema: pa.Schema) -> None:
    """Columns that a newer version of the pipeline has; rows from before have nothing there."""
    from deltalake import Schema as DeltaSchema

    have = set(pa.schema(target.schema().to_arrow()).names)
    fresh = pa.schema([column for column in schema if column.name not in have])
    if len(fresh):
        target.alter.add_columns(DeltaSchema.from_arrow(fresh).fields)
        target.update_incremental()


def _stem(app: str, version: int, run: str) -> str:
    return f"{app}-{version:012d}-{run}"


def _rows(adds: Sequence[AddAction]) -> int:
    return sum(int(json.loads(add.stats)["numRecords"]) for add in adds)


def _folders(folder: Path) -> list[Path]:
    try:
        return sorted(each for each in folder.iterdir() if each.is_dir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def compact_if_due(
    spark: SparkSession, lake: Lake, table: TableSpec, settings: PipelineSettings, *, run: str, now_ns: int
) -> int:
    """
    Rewrite the table's small files as few large ones if there are many; how many there were.

    Every run leaves a few, and a reader pays for each. Their rows are sorted, so that the files' bounds differ, and replace
    the old ones in one commit that changes no data. The old files are deleted a day later, so that whoever reads an older
    version can finish.

    Raises:
        LakeConflict: The table changed meanwhile; nothing was changed here.
    """
    if not lake.exists(table.name):
        return 0
    files = lake.files(table.name, lambda file: file.size < settings.compact_bytes_max // 2)
    if len(files) < settings.compact_files_min:
        return 0
    chosen = {file.name for file in files}
    count = max(1, math.ceil(sum(file.size for file in files) / settings.compact_bytes_max))
    frame = lake.read(spark, table.name, lambda file: file.name in chosen)
    order = table.order or tuple(frame.columns[:1])
    frame = frame.coalesce(1) if count == 1 else frame.repartitionByRange(count, *order)
    version = (lake.done(table.name, COMPACTION_APP) or 0) + 1
    written = lake.write_files(frame.sortWithinPartitions(*order), table.name, COMPACTION_APP, version, run)
    lake.commit(
        table.name,
        arrow_schema(table.schema),
        [add_action(lake.path(table.name), file, is_new_data=False) for file in written],
        [remove_action(file, now_ms=now_ns // 1_000_000, is_new_data=False) for file in files],
        app=COMPACTION_APP,
        version=version,
        note=lake.note(table.name),  # what was true of the data is true of it still
    )
    lake.sweep(table.name, age_hours_min=_SWEEP_AGE_HOURS)
    return len(files)
