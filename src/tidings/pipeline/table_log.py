"""
The log of one table: what a commit says beside its files, the commits of the past, and what delta-rs raises in our words.

Every commit carries a note, the table's name and the application that made it. ``Commits`` reads them back, the newest first, however
many there are; the last ones are kept in memory. They are read from the log's files: delta-rs's own history is empty below a folder
with ``#`` or ``?`` in its name.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec
import pyarrow as pa  # type: ignore[import-untyped]
from deltalake import CommitProperties, PostCommitHookProperties, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError

from .errors import LakeBlocked, LakeConflict, LakeDamaged, LakeUnreachable, UnknownTable
from .storage import Storage
from .storage_errors import blocked, translate_read_errors, words_of
from .table_files import bounded_columns

NOTE: Final = "tidings"
TABLE: Final = "tidings.table"
APP: Final = "tidings.app"
UPKEEP_APP: Final = "upkeep"
"""The application of commits that leave a table's rows as they are: compaction, settings, new columns."""
COMMITS_KEPT_MAX: Final = 100
"""How many commits of a table are kept in memory."""
_NOTED_WITHIN: Final = 100
"""A table of the pipeline has a note in one of its last commits; after so many without one it is somebody else's."""
NO_HOOKS: Final = PostCommitHookProperties(create_checkpoint=False, cleanup_expired_logs=False)
"""Checkpoints and clean-up are ``housekeeping``'s, which sees to it that a checkpoint lasts before anything is deleted."""

Note = dict[str, Any]
Commit = Mapping[str, Any]


class _NoteTypes(msgspec.Struct):
    """The types of what a note may say. A note of another program is damage, not a ``KeyError`` somewhere else."""

    epoch: str = ""
    seq: int = 0
    since: int = 0
    batch: int = 0
    payload_bytes: int | None = None
    digest: str = ""
    days: list[str] | None = None
    grows_by: str = ""
    recipe: str = ""
    inputs: dict[str, list[Any]] = {}
    job: str = ""
    as_of: str = ""
    seen_ns: int = 0
    files: str = ""
    places: list[tuple[str, int, int, int]] = []


def properties(table: str, note: Note | None, app: str, version: int) -> CommitProperties:
    """A commit of an application with a note, which fails if another one comes in between."""
    return CommitProperties(
        custom_metadata={TABLE: table, APP: app} | ({} if note is None else {NOTE: json.dumps(note)}),
        max_commit_retries=0,
        app_transactions=[Transaction(app, version)],
    )


def log_file(version: int, kind: str = "json") -> str:
    """The file of a table's log that is about a version."""
    return f"_delta_log/{version:020d}.{kind}"


def table_settings(schema: pa.Schema, keep_hours: int = 24) -> dict[str, str]:
    """What a table's log says about how it is to be kept: for how long, and which columns' bounds are stored."""
    return {
        "delta.logRetentionDuration": f"interval {keep_hours} hours",
        "delta.deletedFileRetentionDuration": f"interval {keep_hours} hours",
        "delta.enableExpiredLogCleanup": "true",
        "delta.dataSkippingStatsColumns": ",".join(f"`{name}`" for name in bounded_columns(schema)),
    }


@contextlib.contextmanager
def translate_table_errors(folder: Storage, table: str) -> Iterator[None]:
    """
    Raise what the table library raises in our words.

    Raises:
        UnknownTable: There is no such table.
        LakeConflict: Another commit came first. Nothing was changed.
        LakeUnwritable, LakeBlocked, LakeUnreachable, LakeDamaged
    """
    try:
        yield
    except TableNotFoundError as error:
        raise UnknownTable(table, "there is no such table") from error
    except CommitFailedError as error:
        for each in (folder.path / "_delta_log").glob("*.json") if folder.is_local else ():
            if not each.is_file():
                raise LakeBlocked(str(each), "no file, and a commit has to be there") from error
        raise LakeConflict(str(folder), "another commit came first") from error
    except DeltaError as error:
        if (known := blocked(folder, error)) is not None:
            raise known from error
        text = words_of(error)
        if not folder.is_local and "Generic " in text:
            raise LakeUnreachable(str(folder), text) from error
        raise LakeDamaged(str(folder), text) from error
    except OSError as error:
        if (known := blocked(folder, error)) is not None:
            raise known from error
        if folder.is_local:
            raise
        raise LakeUnreachable(str(folder), words_of(error)) from error


def note_in(entry: Commit, folder: Storage, table: str) -> Note | None:
    """
    Return the note of a commit, or ``None`` if it has none.

    Raises:
        LakeDamaged: It is another table's commit, or its note is not one of the pipeline's.
    """
    if (text := entry.get(NOTE)) is None:
        return None
    if (owner := entry.get(TABLE, table)) != table:
        raise LakeDamaged(str(folder), f"what is there is {owner}")
    try:
        msgspec.json.decode(str(text), type=_NoteTypes)
    except msgspec.DecodeError as error:
        raise LakeDamaged(str(folder), f"the note of a commit is not the pipeline's: {error}") from error
    note: Note = json.loads(str(text))
    return note


def last_note(commits: Iterator[Commit], folder: Storage, table: str) -> Note | None:
    """
    Return the newest note among the last commits, or ``None`` if none of them has one.

    Raises:
        LakeDamaged: It is not one of the pipeline's.
    """
    for _, entry in zip(range(_NOTED_WITHIN), commits, strict=False):
        if (note := note_in(entry, folder, table)) is not None:
            return note
    return None


class Commits:
    """
    The commits of one table's log, read from its files. May be used by several threads.

    Args:
        folder: Where the table is.
        kept_max: How many of the last commits are kept in memory; older ones are read again each time.
    """

    def __init__(self, folder: Storage, kept_max: int) -> None:
        self._folder = folder
        self._kept_max = kept_max
        self._kept: dict[int, Commit] = {}
        self._lock = threading.Lock()

    def read(self, newest: int) -> Iterator[Commit]:
        """
        Yield the commits up to a version, the newest first, as far back as the log goes.

        Each of the last ones is read once for all callers, and none before a caller asks for it: an object store has to be asked
        for every one.

        Args:
            newest: The table's version now.

        Raises:
            LakeDamaged: A commit cannot be read.
        """
        with self._lock:
            if self._kept and newest < max(self._kept):
                self._kept.clear()  # the table lost commits meanwhile, and others may get their numbers
        for version in range(newest, -1, -1):
            if (entry := self._kept.get(version)) is None:
                if (entry := self._read(version)) is None:
                    return
                with self._lock:
                    if version > max(self._kept, default=newest) - self._kept_max:
                        self._kept[version] = entry
                    while len(self._kept) > self._kept_max:
                        del self._kept[min(self._kept)]
            yield entry

    def _read(self, version: int) -> Commit | None:
        """What one commit says; ``None`` if the log no longer has it."""
        with translate_read_errors(self._folder):
            data = self._folder.read(log_file(version))
        if data is None:
            return None
        found: dict[str, Any] = {}
        for line in data.splitlines():
            if line.startswith(b'{"commitInfo"'):
                try:
                    found = json.loads(line)["commitInfo"]
                except (ValueError, KeyError) as error:
                    raise LakeDamaged(self._folder.uri(log_file(version)), words_of(error)) from error
        return {**found, "version": version}
