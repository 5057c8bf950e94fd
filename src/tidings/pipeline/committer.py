"""The one way in which commits are made to the tables of a lake: see ``Committer``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date
from typing import TYPE_CHECKING, Final, Literal
from urllib.parse import unquote

import pyarrow as pa  # type: ignore[import-untyped]
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError, DeltaError
from deltalake.transaction import AddAction, RemoveAction

from .errors import LakeConflict, TableRefused
from .schemas import is_core_table, is_table_name
from .storage import Storage
from .table_files import DAY_COLUMN
from .table_log import NO_HOOKS, UPKEEP_APP, Note, last_note, log_file, properties, table_settings

if TYPE_CHECKING:
    from deltalake import CommitProperties

    from .lake import Lake

JOB_APPS: Final = "job."
"""How the names of the applications of jobs begin."""
_MAKING_APP: Final = "made"
_TRIES_MAX: Final = 20
"""So often a commit that does not depend on the table's version is tried again behind commits of others."""

Replaces = Literal["nothing", "all"] | Sequence[date]


def check_owner(table: str, app: str) -> None:
    """
    Make sure that an application may write a table.

    Raises:
        TableRefused: A job may not: the table is the pipeline's own, or has a name that nobody would find it by.
    """
    if not is_table_name(table):
        raise TableRefused(table, "its name is not like gold.topic_minutes: a layer and a name, in a-z, 0-9 and _")
    if app.startswith(JOB_APPS) and is_core_table(table):
        raise TableRefused(table, "it is the pipeline's own, and jobs only read it")


class Committer:
    """
    Commits to the tables of a lake, data, columns, settings and compaction alike. May be used by several threads.

    A commit is made to one version of its table, with the next count of its application and a note that holds for that version.

    Args:
        lake: Whose tables.
    """

    def __init__(self, lake: Lake) -> None:
        self._lake = lake
        self._handles: dict[str, DeltaTable] = {}
        """By table, a handle that commits, while no thread has it: whoever reads must not move it on to another version."""

    def commit(
        self,
        table: str,
        schema: pa.Schema,
        adds: Sequence[AddAction],
        removes: Sequence[RemoveAction],
        *,
        app: str,
        version: int,
        note: Note,
        replaces: Replaces,
        is_by_day: bool,
        read_version: int | None,
    ) -> int:
        """Do what ``Lake.commit`` says."""
        folder = self._lake.folder(table)
        made = self._make(table, schema, app=app, is_by_day=is_by_day, is_replaced=replaces == "all")
        if replaces != "all" and self._add_columns(table, schema, made, read_version) and read_version is not None:
            read_version += 1
        days = sorted(day.isoformat() for day in replaces) if not isinstance(replaces, str) else None

        def write(target: DeltaTable, commit: CommitProperties) -> None:
            self._check_files(folder, target, adds, removes)
            target.create_write_transaction(
                [*adds, *removes],
                "append" if replaces == "nothing" else "overwrite",
                schema if replaces == "all" else target.schema(),
                partition_by=[DAY_COLUMN] if is_by_day else None,
                partition_filters=None if days is None else [(DAY_COLUMN, "in", days)],
                commit_properties=commit,
                post_commithook_properties=NO_HOOKS,
            )

        return self._commit(table, write, app=app, version=version, note=note, read_version=read_version)

    def commit_upkeep(
        self,
        table: str,
        adds: Sequence[AddAction],
        removes: Sequence[RemoveAction],
        *,
        settings: Mapping[str, str] | None,
    ) -> int:
        """Do what ``Lake.commit_upkeep`` says."""
        folder = self._lake.folder(table)

        def write(target: DeltaTable, commit: CommitProperties) -> None:
            if settings is not None:
                target.alter.set_table_properties(dict(settings), commit_properties=commit)
                return
            self._check_files(folder, target, adds, removes)
            target.create_write_transaction(
                [*adds, *removes],
                "append",
                target.schema(),
                partition_by=target.metadata().partition_columns or None,
                commit_properties=commit,
                post_commithook_properties=NO_HOOKS,
            )

        return self._commit(table, write, app=UPKEEP_APP)

    def _commit(
        self,
        table: str,
        write: Callable[[DeltaTable, CommitProperties], object],
        *,
        app: str,
        version: int | None = None,
        note: Note | None = None,
        read_version: int | None = None,
    ) -> int:
        """
        Commit to a table; its new version. Every commit to a table that is there goes this way.

        The commit is made to one version of the table, and fails if another one comes first. Without ``read_version`` it is then
        tried again behind that one, with the checks done anew.

        Args:
            table: Which table.
            write: Makes the commit with the handle and the properties that it is given, or answers ``False`` if there is nothing
                to commit; called again for each try.
            app, version: Whose step it is, and which; the next one if left out.
            note: What is true from now on; the note of the version that is committed to if left out.
            read_version: The only version that may be committed to.

        Raises:
            LakeConflict: Somebody else did this step, or came in between. Nothing was changed.
            LakeUnwritable, LakeUnreachable, LakeDamaged
        """
        folder = self._lake.folder(table)
        self._lake.check_place(table)
        for _ in range(_TRIES_MAX):
            with self._lake.changing(table), self._held(table) as target:
                at, done = int(target.version()), target.transaction_version(app)
                step = (done or 0) + 1 if version is None else version
                if (done is not None and done >= step) or read_version not in (None, at):
                    raise LakeConflict(str(folder), "another run did the same")
                said = self._note_at(target, table) if note is None else note
                try:
                    if write(target, properties(table, said, app, step)) is False:
                        return at
                except CommitFailedError:
                    if read_version is not None or not self._has_moved(target, at):
                        raise
                    continue
                self._lake.sync(table, log_file(at + 1))
                return at + 1
        raise LakeConflict(str(folder), "others commit to it all the time")

    @contextlib.contextmanager
    def _held(self, table: str) -> Iterator[DeltaTable]:
        """A handle of the table as it is now, which nobody else moves on until this ends."""
        folder = self._lake.folder(table)
        target = self._handles.pop(folder.url, None)
        if target is None:
            target = DeltaTable(folder.table_url, storage_options=dict(folder.options))
        else:
            target.update_incremental()
        yield target
        self._handles[folder.url] = target

    def _has_moved(self, target: DeltaTable, at: int) -> bool:
        """Whether there is a version after this one."""
        target.update_incremental()
        return int(target.version()) > at

    def _note_at(self, target: DeltaTable, table: str) -> Note | None:
        """The note that holds for the version that a handle is at."""
        at = int(target.version())
        commits = (entry for entry in self._lake.commits(table) if entry["version"] <= at)
        return last_note(commits, self._lake.folder(table), table)

    @staticmethod
    def _check_files(
        folder: Storage, target: DeltaTable, adds: Sequence[AddAction], removes: Sequence[RemoveAction]
    ) -> None:
        """
        Make sure that files that go are part of the table, and that those that come are still there.

        Raises:
            LakeConflict: They are not. What the commit is about was done, or swept away, by somebody else.
        """
        if removes:
            there = {unquote(path) for path in pa.table(target.get_add_actions(flatten=True))["path"].to_pylist()}
            if any(each.path not in there for each in removes):
                raise LakeConflict(str(folder), "a file that was to be replaced is no part of it any more")
        if folder.is_local and any(not (folder.path / each.path).exists() for each in adds):
            raise LakeConflict(str(folder), "a file that was to be added has been deleted")

    def _make(self, table: str, schema: pa.Schema, *, app: str, is_by_day: bool, is_replaced: bool) -> DeltaTable:
        """Make a table if it is not there, or anew if it is partitioned otherwise and all of it is replaced; the table."""
        check_owner(table, app)
        self._lake.check_place(table)
        folder, by = self._lake.folder(table), [DAY_COLUMN] if is_by_day else []

        def make(mode: Literal["error", "overwrite"], commit: CommitProperties) -> None:
            DeltaTable.create(
                folder.table_url,
                schema,
                mode=mode,
                partition_by=by or None,
                configuration=table_settings(schema),
                storage_options=dict(folder.options),
                commit_properties=commit,
                post_commithook_properties=NO_HOOKS,
            )

        with self._lake.changing(table):
            if not self._lake.exists(table):
                if folder.is_local:
                    folder.path.mkdir(parents=True, exist_ok=True)
                try:
                    make("error", properties(table, None, _MAKING_APP, 1))
                except DeltaError:
                    if not DeltaTable.is_deltatable(folder.table_url, dict(folder.options)):
                        raise  # otherwise another run has made it this moment
            if (made := self._lake.open(table)).metadata().partition_columns == by:
                return made
        if not is_replaced:
            raise LakeConflict(str(folder), "it is partitioned otherwise, and has to be made anew")
        self._commit(table, lambda _, commit: make("overwrite", commit), app=_MAKING_APP)
        return self._lake.open(table)

    def _add_columns(self, table: str, schema: pa.Schema, made: DeltaTable, read_version: int | None) -> bool:
        """Add the columns that a newer version of the pipeline has, null for rows from before; whether there were any."""
        from deltalake import Schema as DeltaSchema

        def fresh(target: DeltaTable) -> pa.Schema:
            have = set(pa.schema(target.schema().to_arrow()).names)
            return pa.schema([column for column in schema if column.name not in have])

        if not len(fresh(made)):
            return False

        def add(target: DeltaTable, commit: CommitProperties) -> bool:
            columns = fresh(target)
            if len(columns):
                target.alter.add_columns(DeltaSchema.from_arrow(columns).fields, commit_properties=commit)
            return bool(len(columns))

        self._commit(table, add, app=UPKEEP_APP, read_version=read_version)
        return True
