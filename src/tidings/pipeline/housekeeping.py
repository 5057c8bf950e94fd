"""
Keeping the tables small, by delta-rs's own means and on a schedule that each table's log and one small file tell.

- Every ``checkpoint_commits`` commits the table's log gets a checkpoint, and entries older than ``keep_hours`` are deleted, so a
  commit costs the same however many came before it.
- Small files are put together when a table has ``compact_files_min`` of them, in a commit that changes no row.
- Every ``vacuum_hours`` files that are no part of the table any more, and were not for ``keep_hours``, are deleted, and so are
  old entries of its log; whoever reads an older version has that long to finish. What runs that died left behind goes the
  same way. This comes also if nothing is new.

The note of the last commit is repeated by each of these commits: it is read from the last one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import unquote

import pyarrow as pa  # type: ignore[import-untyped]
from deltalake import WriterProperties

from .errors import LakeConflict, LakeDamaged
from .lake import NO_HOOKS, Lake, log_file, properties, table_settings
from .settings import PipelineSettings
from .state_files import HOUR_NS, Vacuumed, load_vacuumed, save_vacuumed
from .storage_errors import translate_write_errors


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
    never again, goes too. A table that another run commits to meanwhile, or that is damaged, is left for the next time.
    """
    done = Upkeep()
    meta = lake.meta()
    if meta is None:
        return done
    state = load_vacuumed(lake.storage, meta.epoch)
    due = state.due(settings.vacuum_hours, now_ns)
    at_ns = dict(state.at_ns)
    for table in dict.fromkeys([*(lake.tables() if tables is None else tables), *sorted(due)]):
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

    Raises:
        LakeConflict: The table changed meanwhile; nothing was changed here.
    """
    small = [file for file in lake.files(table) if file.size < settings.compact_bytes_max // 2]
    by_day: dict[object, int] = {}
    for file in small:
        by_day[file.day] = by_day.get(file.day, 0) + 1
    if sum(count for count in by_day.values() if count > 1) < settings.compact_files_min:
        return 0
    note = lake.note(table)
    with lake.changing(table):
        target = lake.open(table)
        done = target.optimize.compact(
            target_size=settings.compact_bytes_max,
            writer_properties=WriterProperties(compression="ZSTD"),
            commit_properties=properties(table, note),
            post_commithook_properties=NO_HOOKS,
        )
        version = int(target.version())
        known = {file.name for file in small}
        lake.sync(table, *(file.name for file in lake.files(table) if file.name not in known), log_file(version))
    return int(done["numFilesRemoved"])


def vacuum(lake: Lake, table: str, *, keep_hours: int) -> int:
    """
    Delete files that are no part of the table any more, and were not for so long; how many.

    Raises:
        LakeConflict: The table changed meanwhile; nothing was deleted.
    """
    note = lake.note(table)
    with lake.changing(table):
        doomed = _doomed(lake, table, keep_hours)
        if doomed:
            lake.open(table).vacuum(
                keep_hours,
                dry_run=False,
                enforce_retention_duration=False,
                full=True,
                commit_properties=properties(table, note),
                post_commithook_properties=NO_HOOKS,
            )
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
        note = lake.note(table)
        with lake.changing(table):
            target.alter.set_table_properties(fresh, commit_properties=properties(table, note))
