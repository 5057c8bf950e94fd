"""
Keeping the tables small, on a schedule that each table's log and one small file tell.

- Every ``checkpoint_commits`` commits the table's log gets a checkpoint, and entries older than ``keep_hours`` are deleted, so a
  commit costs the same however many came before it.
- Small files are put together when a table has ``compact_files_min`` of them, in a commit that changes no row. It is made here and
  not by delta-rs, which lets two compactions of one version pass each other, so that every row is there twice.
- Every ``vacuum_hours`` files that are no part of the table any more, and were not for ``keep_hours``, are deleted, and so are
  old entries of its log; whoever reads an older version has that long to finish. What runs that died left behind goes the
  same way. This comes also if nothing is new.

The note of the version that is committed to is repeated. In a process one thread at a time keeps house of a lake; what another
one would have done meanwhile is done by the next. Processes beside each other do some work twice, and commit it once.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote

import pyarrow as pa  # type: ignore[import-untyped]

from .errors import LakeConflict, LakeDamaged
from .lake import Lake
from .line_conversion import BRONZE_ENCODING
from .schemas import BRONZE_EVENTS, SILVER_EVENTS
from .settings import PipelineSettings
from .state_files import HOUR_NS, Vacuumed, load_vacuumed, save_vacuumed
from .storage import delete_left_over
from .storage_errors import translate_read_errors, translate_write_errors
from .table_files import DAY_COLUMN, DataFile, FileOutput, add_action, remove_action
from .table_log import UPKEEP_APP, log_file, table_settings

_BATCH_ROWS: Final = 20_000
_keeping = threading.Lock()
"""Held by the thread that keeps house."""
_postponed: dict[str, set[str]] = {}
"""By lake, the tables that were due while another thread kept house."""


@dataclass(slots=True)
class Upkeep:
    """What was done."""

    compacted_files: int = 0
    """Small files that were put together."""
    deleted_files: int = 0
    checkpoints: int = 0

    def __bool__(self) -> bool:
        return bool(self.compacted_files or self.deleted_files or self.checkpoints)


def keep_house(lake: Lake, settings: PipelineSettings, *, now_ns: int, tables: Iterable[str] | None = None) -> Upkeep:
    """
    Do what is due for these tables, or for all there are. Needs no Spark.

    Old files are deleted from every table for which it is time, also from those that are not named: what was replaced once, and
    never again, goes too. A table whose files another run replaces meanwhile, or that is damaged, is left for the next time, and so is
    all while another thread of this process keeps house.
    """
    wanted = lake.tables() if tables is None else list(tables)
    if not _keeping.acquire(blocking=False):
        _postponed.setdefault(lake.storage.url, set()).update(wanted)
        return Upkeep()
    try:
        return _keep_house(lake, settings, now_ns, [*wanted, *sorted(_postponed.pop(lake.storage.url, ()))])
    finally:
        _keeping.release()


def _keep_house(lake: Lake, settings: PipelineSettings, now_ns: int, tables: Sequence[str]) -> Upkeep:
    done = Upkeep()
    meta = lake.meta()
    if meta is None:
        return done
    state = load_vacuumed(lake.storage, meta.epoch)
    due = state.due(settings.vacuum_hours, now_ns)
    at_ns = dict(state.at_ns)
    for table in dict.fromkeys([*tables, *sorted(due)]):
        is_due = table in due or not settings.vacuum_hours
        try:
            if not lake.exists(table):
                continue
            _apply_settings(lake, table, settings)
            done.compacted_files += compact(lake, table, settings)
            if is_due:
                done.deleted_files += vacuum(lake, table, keep_hours=settings.keep_hours)
            done.checkpoints += checkpoint(lake, table, settings.checkpoint_commits, is_due=is_due)
        except (LakeConflict, LakeDamaged):
            continue
        at_ns[table] = now_ns if is_due else at_ns.get(table, now_ns)
    aside_ns: dict[str, int] = {}
    for place in left_behind(lake):
        seen_ns = state.aside_ns.get(place, now_ns)
        if now_ns - seen_ns < settings.keep_hours * HOUR_NS:
            aside_ns[place] = seen_ns
        else:
            with translate_write_errors(lake.tables_folder):
                done.deleted_files += lake.tables_folder.delete_folder(place)
    if due or not settings.vacuum_hours:
        done.deleted_files += delete_left_over(lake.storage, before_ns=now_ns - HOUR_NS)
    if (at_ns, aside_ns) != (state.at_ns, state.aside_ns):
        save_vacuumed(lake.storage, Vacuumed(meta.epoch, at_ns, aside_ns))
    return done


def left_behind(lake: Lake) -> list[str]:
    """The folders of tables that a repair has made anew in another one, below the tables' folder."""
    found = []
    for table, present in lake.moved.items():
        layer, _, name = table.partition(".")
        number = int(present.removeprefix(f"{name}-"))
        older = [f"{name}-{each}" for its, each in lake.numbered(layer) if its == name and each < number]
        found += [f"{layer}/{each}" for each in (name, *older) if each in lake.tables_folder.folders(layer)]
    return found


def compact(lake: Lake, table: str, settings: PipelineSettings) -> int:
    """
    Put small files together if there are many; how many there were.

    Commits that only add files may come in between. Each part is a commit of its own, of about ``compact_bytes_max``.

    Raises:
        LakeConflict: Another run replaced one of the files meanwhile; they stay as they are.
    """
    groups = list(_groups(lake.files(table), settings.compact_bytes_max))
    if sum(map(len, groups)) < settings.compact_files_min:
        return 0
    schema, now_ms = lake.schema(table), lake.clock.now_ns() // 1_000_000
    count = (lake.done(table, UPKEEP_APP) or 0) + 1
    for number, files in enumerate(groups):
        entry = _put_together(
            lake, table, files, schema, f"{UPKEEP_APP}-{count:012d}-{os.urandom(4).hex()}-{number:05d}"
        )
        lake.commit_upkeep(
            table,
            [add_action(entry, now_ms=now_ms, changes_rows=False)],
            [remove_action(file, now_ms=now_ms, changes_rows=False) for file in files],
        )
    return sum(map(len, groups))


def _groups(files: Iterable[DataFile], bytes_max: int) -> Iterator[list[DataFile]]:
    """Choose which small files become one: those of a day, in the order of their seqs, up to a size."""
    by_day: dict[object, list[DataFile]] = {}
    for file in sorted(files, key=lambda file: (file.minimum.get("seq") or 0, file.name)):
        if file.size < bytes_max // 2:
            by_day.setdefault(file.day, []).append(file)
    for small in by_day.values():
        group: list[DataFile] = []
        for file in small:
            if group and sum(each.size for each in group) + file.size > bytes_max:
                if len(group) > 1:
                    yield group
                group = []
            group.append(file)
        if len(group) > 1:
            yield group


def _put_together(lake: Lake, table: str, files: Sequence[DataFile], schema: pa.Schema, stem: str) -> dict[str, object]:
    """Write the rows of files to one; its entry. A row group of what is read, and one of what is written, are in memory."""
    folder, day = lake.folder(table), files[0].day
    name = f"{stem}.parquet" if day is None else f"{DAY_COLUMN}={day.isoformat()}/{stem}.parquet"
    if day is not None:
        schema = pa.schema([column for column in schema if column.name != DAY_COLUMN])
    encoding = BRONZE_ENCODING if table in (BRONZE_EVENTS.name, SILVER_EVENTS.name) else {}
    with (
        translate_read_errors(folder),
        translate_write_errors(folder),
        FileOutput(folder, name, schema, **encoding) as output,
    ):
        rows = lake.dataset(table, files, schema)
        for batch in rows.to_batches(
            batch_size=_BATCH_ROWS, batch_readahead=1, fragment_readahead=1, use_threads=False
        ):
            output.add(pa.Table.from_batches([batch]))
    return output.entry(None if day is None else day.isoformat())


def vacuum(lake: Lake, table: str, *, keep_hours: int) -> int:
    """
    Delete files that are no part of the table any more, and were not for so long; how many. No commit says so.

    Raises:
        LakeUnwritable: This user may not delete them.
    """
    with lake.changing(table):
        doomed = _doomed(lake, table, keep_hours)
        # Another run may have committed since; what it added is not deleted, however short ``keep_hours`` is.
        doomed -= {file.name for file in lake.files(table)} if doomed else set()
        lake.folder(table).delete(sorted(doomed))
    return len(doomed)


def left_to_vacuum(lake: Lake, table: str) -> int:
    """How many files are there that the table does not need, and readers of an older version may."""
    with lake.changing(table):
        return len(_doomed(lake, table, 0))


def _doomed(lake: Lake, table: str, keep_hours: int) -> set[str]:
    """What a vacuum would delete: its own list also has what is gone already."""
    listed = lake.open(table).vacuum(keep_hours, enforce_retention_duration=False, full=True)
    return {unquote(name) for name in listed} & lake.folder(table).sizes().keys() if listed else set()


def checkpoint(lake: Lake, table: str, commits_min: int, *, is_due: bool = False) -> bool:
    """
    Sum a table's log up if that was not done for so many commits; whether it was. What of the log is old and summed up is then
    deleted, and also if that ``is_due``.
    """
    before = _checkpointed(lake.folder(table).read("_delta_log/_last_checkpoint"))
    with lake.changing(table):
        target = lake.open(table)
        is_time = target.version() - before >= commits_min
        if is_time:
            target.create_checkpoint()
            # Nothing may be deleted before what stands for it lasts.
            lake.sync(table, log_file(int(target.version()), "checkpoint.parquet"), "_delta_log/_last_checkpoint")
        if is_time or (is_due and before >= 0):
            target.cleanup_metadata()
    return bool(is_time)


def _checkpointed(last: bytes | None) -> int:
    """The version that ``_last_checkpoint`` names; -1 if there is none, or one that cannot be read, as readers do without it."""
    try:
        return -1 if last is None else int(json.loads(last)["version"])
    except (ValueError, TypeError, KeyError):
        return -1


def _apply_settings(lake: Lake, table: str, settings: PipelineSettings) -> None:
    """Tables of an earlier version, or made under other settings, are kept like all others from now on."""
    target = lake.open(table)
    wanted = table_settings(pa.schema(target.schema().to_arrow()), settings.keep_hours)
    have = target.metadata().configuration
    fresh = {name: value for name, value in wanted.items() if have.get(name) != value}
    if fresh:
        lake.commit_upkeep(table, settings=fresh)
