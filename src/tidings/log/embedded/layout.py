"""
Where everything of one workspace lies, and the file that names its format and epoch.

    <workspace>/.bus/
      meta.json            format version and epoch
      lock                 held by the one writer
      node.json            where to reach the node that is the writer, if one is
      dev/                 secret and tokens of a node that is tried, for its own user
      checkpoint.json      up to where the segments are known to be on disk
      reserve              room kept back for when the disk is full
      room                 more of it, for what the journal holds; often empty or missing
      journal/<n>.jsonl    the commit point: recycled files
      wal/<topic>.<segment>.jsonl            (or wal/<space>/<topic>.<segment>.jsonl)
      seals/<topic>.jsonl  a digest for each sealed segment, chained
      ids/<topic>.<segment>.jsonl            ids of dropped records that must not be forgotten
      index/               derived; may be deleted at any time
      offsets/, dlq/, claims/                the bus's: groups' places, dead letters, what is being handled
      ledger/              the ledger's: snapshots of its state
      aside/               what ``repair`` set aside
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import unquote

import msgspec

from tidings.core.clock import Clock, format_utc

from ..errors import UnsupportedFormat, WorkspaceError, WorkspaceMissing, WorkspaceUnusable
from ..segment import encode_line, is_whole, segment_name, space_folder, split_segment_name
from .disk import Disk, read_file, replace_file

FORMAT: Final = 1


class StreamKey(NamedTuple):
    """One sequence of segment files: a topic's, or in the ``space`` layout one space's part of it."""

    topic: str
    space_id: str | None = None

    @property
    def path(self) -> str:
        """The key as a relative path, the way checkpoint and tools write it."""
        return self.topic if self.space_id is None else f"{space_folder(self.space_id)}/{self.topic}"


class WorkspaceMeta(msgspec.Struct, frozen=True):
    """The content of ``meta.json``."""

    format: int
    epoch: str
    created_at: str
    layout: str = "flat"


def encode_meta(meta: WorkspaceMeta) -> bytes:
    """The content of ``meta.json``: like any line of the log it carries its checksum."""
    return encode_line(msgspec.json.encode(meta)[1:])


class Layout:
    """The paths of one workspace. A relative one is meant from where the process is now, wherever it goes later."""

    def __init__(self, workspace: Path | str) -> None:
        self.workspace = Path(workspace).absolute()
        self.root = self.workspace / ".bus"
        self.meta = self.root / "meta.json"
        self.lock = self.root / "lock"
        self.node = self.root / "node.json"
        self.dev = self.root / "dev"
        self.dev_token = self.dev / "token"
        self.checkpoint = self.root / "checkpoint.json"
        self.reserve = self.root / "reserve"
        self.room = self.root / "room"
        self.journal = self.root / "journal"
        self.wal = self.root / "wal"
        self.seals = self.root / "seals"
        self.ids = self.root / "ids"
        self.index = self.root / "index"
        self.offsets = self.root / "offsets"
        self.dlq = self.root / "dlq"
        self.claims = self.root / "claims"
        self.ledger = self.root / "ledger"
        self.aside = self.root / "aside"

    def segment(self, key: StreamKey, number: int) -> Path:
        """The path of one segment."""
        return self._below(self.wal, key) / segment_name(key.topic, number)

    def seal_file(self, key: StreamKey) -> Path:
        """The path of a stream's chain of seals."""
        return self._below(self.seals, key) / f"{key.topic}.jsonl"

    def id_file(self, key: StreamKey, number: int) -> Path:
        """The path of the ids kept of a dropped segment."""
        return self._below(self.ids, key) / segment_name(key.topic, number)

    @staticmethod
    def _below(folder: Path, key: StreamKey) -> Path:
        return folder if key.space_id is None else folder / space_folder(key.space_id)

    def segments(self, disk: Disk) -> dict[StreamKey, list[int]]:
        """The segments there are, by stream, in order."""
        return self._numbered(disk, self.wal)

    def id_files(self, disk: Disk) -> dict[StreamKey, list[int]]:
        """The kept id files there are, by stream, in order."""
        return self._numbered(disk, self.ids)

    def _numbered(self, disk: Disk, top: Path) -> dict[StreamKey, list[int]]:
        found: dict[StreamKey, list[int]] = {}
        for space_id, name in _files_below(disk, top):
            if (parts := split_segment_name(name)) is not None:
                found.setdefault(StreamKey(parts[0], space_id), []).append(parts[1])
        for numbers in found.values():
            numbers.sort()
        return found

    def sealed_streams(self, disk: Disk) -> list[StreamKey]:
        """The streams that have a chain of seals."""
        return [
            StreamKey(name.removesuffix(".jsonl"), space_id)
            for space_id, name in _files_below(disk, self.seals)
            if name.endswith(".jsonl")
        ]

    def read_meta(self, disk: Disk) -> WorkspaceMeta:
        """
        The workspace's format and epoch.

        Raises:
            WorkspaceMissing: There is no log.
            WorkspaceUnusable: The file cannot be read.
            WorkspaceError: It is damaged.
            UnsupportedFormat: It is whole, and a newer version wrote it.
        """
        try:
            data = read_file(disk, self.meta)
        except NotADirectoryError as error:
            raise WorkspaceMissing(self.workspace, "is not a folder") from error
        except OSError as error:
            raise WorkspaceUnusable(self.meta, f"cannot be read: {error.strerror}") from error
        if data is None:
            raise WorkspaceMissing(self.workspace, "holds no log")
        # Before a word of it is believed: a damaged digit must not pass for the format of a newer version.
        if not is_whole(data.removesuffix(b"\n")):
            raise _damaged(self.meta, "its checksum does not match")
        try:
            version = msgspec.json.decode(data, type=dict[str, object]).get("format")
            if isinstance(version, int) and version <= FORMAT:
                return msgspec.json.decode(data, type=WorkspaceMeta)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise _damaged(self.meta, str(error)) from error
        raise UnsupportedFormat(
            self.meta, f"the workspace has format {version}; this version knows formats up to {FORMAT}"
        )

    def missing_folders(self, disk: Disk) -> list[Path]:
        """The folders that an open log needs and that do not exist: copies and backups often leave out empty ones."""
        return [folder for folder in (self.journal, self.wal, self.seals, self.ids) if not disk.exists(folder)]

    def make_folders(self, disk: Disk) -> None:
        """Make the folders that are missing."""
        missing = self.missing_folders(disk)
        for folder in missing:
            disk.make_folder(folder)
        if missing:
            disk.sync_folder(self.root)

    def create(self, disk: Disk, clock: Clock, layout: str) -> WorkspaceMeta:
        """Make an empty workspace. ``meta.json`` comes last: a half-made one is made again."""
        disk.make_folder(self.root)
        self.make_folders(disk)
        # All of them, down to the last: a log whose folder has no durable name is lost as a whole.
        for folder in (self.root, self.workspace, *self.workspace.parents):
            try:
                disk.sync_folder(folder)
            except PermissionError:
                break  # what we may not even read was there before us
        meta = self.new_meta(clock, layout)
        replace_file(disk, self.meta, encode_meta(meta))
        return meta

    @staticmethod
    def new_meta(clock: Clock, layout: str) -> WorkspaceMeta:
        """The description of a new life of the log."""
        created_at = format_utc(clock.now_ns()).decode()
        return WorkspaceMeta(format=FORMAT, epoch=os.urandom(8).hex(), created_at=created_at, layout=layout)


def _damaged(path: Path, problem: str) -> WorkspaceError:
    error = WorkspaceError(path, f"is damaged: {problem}")
    error.hint = (
        "put it back from a copy of the workspace; or run 'tidings log repair', which gives the log a new epoch: followers start over, "
        "and 'tidings group seek' sets each group to its position"
    )
    return error


def _files_below(disk: Disk, top: Path) -> list[tuple[str | None, str]]:
    """File names directly below ``top`` (space ``None``) and in its folders (by the space they stand for)."""
    found: list[tuple[str | None, str]] = []
    for name in disk.names(top):
        if name.endswith(".jsonl"):
            found.append((None, name))
        elif not name.startswith("."):
            try:
                found += [(unquote(name), inner) for inner in disk.names(top / name)]
            except NotADirectoryError:
                continue  # a file that a crash left half made, or a stranger's
    return found
