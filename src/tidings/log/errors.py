"""
What the commit log answers when it cannot do what it was asked.

    LogError
    ├── LogClosed               the log was closed
    ├── LogFenced               a write or sync failed; nothing more is accepted until the log is reopened
    ├── StorageFull             no room; nothing was written, and writing goes on when there is room
    ├── ReadOnlyLog             this log was opened for reading
    ├── IdConflict              an event id or idempotency key stands for another event already
    ├── UnknownTopic            no such topic
    ├── EpochMismatch           a position of another life of the log
    ├── PositionAhead           a position that the log has not reached
    ├── PositionTrimmed         the records asked for were dropped; says where the log begins now
    ├── DispatcherStopped       the dispatcher ended before it reached the awaited seq
    ├── SealedPayload           the payload is encrypted and no key for it is at hand
    └── WorkspaceError          the files
        ├── WorkspaceMissing        there is no log here
        ├── WorkspaceUnusable       it cannot be written (permissions, not a folder)
        ├── WorkspaceBusy           another process is its writer
        ├── UnsupportedFormat       a newer version wrote it
        └── CorruptLog              acknowledged data is lost or altered; says exactly where
"""

from __future__ import annotations

import os
from pathlib import Path

from tidings.core.errors import TidingsError


class LogError(TidingsError):
    """The root of what the log raises."""

    code = "log.error"


class LogClosed(LogError):
    """The log was closed."""

    code = "log.closed"
    text = "the log is closed"


class DispatcherStopped(LogError):
    """The dispatcher ended before it reached a seq."""

    code = "log.dispatcher_stopped"
    retryable = True
    hint = "look at /readyz for the reason; after a restart the node follows the log again"
    seq: int
    problem: str | None

    def describe(self) -> str:
        return f"seq {self.seq} will not be delivered: {self.problem or 'the dispatcher was closed'}"


class LogFenced(LogError):
    """
    A write or a sync failed, so the log no longer knows what the disk holds.

    Events that were waiting may or may not have been stored: publish them again with the same event id.
    """

    code = "log.fenced"
    retryable = True
    hint = "check the disk, then open the log again; recovery decides what was stored"
    text = "the log stopped accepting writes after a storage error: {cause}"
    cause: str

    @property
    def public_text(self) -> str:
        """The same without the cause, which can name files."""
        return "the log stopped accepting writes after a storage error"


class StorageFull(LogError):
    """There is no room for the events. None of them was stored."""

    code = "log.storage_full"
    retryable = True
    path: str
    problem: str | None = None
    """What the log needs, and what the file system has."""
    hint: str | None = "free some space or drop old segments; publishing works again as soon as there is room"

    def describe(self) -> str:
        about = "" if self.problem is None else f": {self.problem}"
        return f"no space left on the device of {self.path}{about}"

    @property
    def public_text(self) -> str:
        """The same without the path."""
        return "there is no room for events"


class ReadOnlyLog(LogError):
    """The log was opened for reading only."""

    code = "log.read_only"
    text = "the log was opened for reading only"


class IdConflict(LogError):
    """An event id or idempotency key was used before, for other content."""

    code = "log.id_conflict"
    hint = "the same content may be sent again at will; other content needs an id of its own"
    # Not which event: whoever meets it may have no right to know of it.
    text = "{field}: {value!r} already stands for an event with other content"
    field: str
    value: str
    seq: int


class UnknownTopic(LogError):
    """The topic does not exist."""

    code = "log.unknown_topic"
    text = "there is no topic {topic!r}"
    topic: str


class EpochMismatch(LogError):
    """A position belongs to another life of the log; its seq means nothing here."""

    code = "log.epoch_mismatch"
    text = "the position is of epoch {given!r}, this log is of epoch {current!r}"
    given: str
    current: str


class PositionAhead(LogError):
    """A position that the log has not reached yet: it is of another log, or of one that has lost its end."""

    code = "log.position_ahead"
    hint = "the log was replaced, or restored from an older copy: begin anew"
    text = "there is no seq {asked}: the log ends with {last}"
    asked: int
    last: int


class PositionTrimmed(LogError):
    """Records at the position asked for were dropped by retention."""

    code = "log.position_trimmed"
    topic: str | None
    asked: int
    first: int

    def describe(self) -> str:
        if self.topic is None:
            return f"records after seq {self.asked} were dropped; what is complete begins after seq {self.first}"
        return f"topic {self.topic!r}: offset {self.asked} was dropped; the first one kept is {self.first}"


class SealedPayload(LogError):
    """The payload is encrypted, and this reader has no key for it."""

    code = "log.sealed_payload"
    text = "the payload of space {space_id!r} is sealed with key {key_id!r}, which is not at hand"
    space_id: str
    key_id: str


class WorkspaceError(LogError):
    """Something is the matter with the workspace's files; ``path`` names them."""

    code = "workspace.error"
    text = "{path}: {problem}"

    def __init__(self, path: Path | str, problem: str) -> None:
        super().__init__(str(path), problem)
        self.path = str(path)
        self.problem = problem

    @property
    def public_text(self) -> str:
        """The same without the path."""
        return "the log cannot be used as it is"


class WorkspaceMissing(WorkspaceError):
    """There is no log at that place."""

    code = "workspace.missing"
    hint = "check the path; `tidings serve --dev`, `tidings log append` and the first event of a program make one there"


class WorkspaceUnusable(WorkspaceError):
    """The workspace cannot be written."""

    code = "workspace.unusable"
    hint = "check owner and permissions, or open it for reading only"


class WorkspaceBusy(WorkspaceError):
    """Another process is the writer of this workspace."""

    code = "workspace.busy"
    retryable = True
    hint = "one process writes a workspace; others can open it for reading, or talk to the node that owns it"

    def __init__(self, path: Path | str, owner: str, node_url: str | None = None) -> None:
        super().__init__(path, f"is being written by {owner}")
        self.owner = owner
        self.node_url = node_url
        if node_url is not None:
            self.hint = (
                f"a node at {node_url} owns it: publish and subscribe through that with `tidings.Client({node_url!r}, token)`, "
                "or open the workspace for reading"
            )
        elif owner in ("this process", f"process {os.getpid()}"):
            self.hint = "this process has it open already: close that bus or log first ('async with' does), or use it"


class UnsupportedFormat(WorkspaceError):
    """A newer version of Tidings wrote this workspace."""

    code = "workspace.unsupported_format"
    hint = "install a newer Tidings; this one leaves the workspace untouched"


class CorruptLog(WorkspaceError):
    """Acknowledged data is lost or altered. Nothing was changed or deleted."""

    code = "workspace.corrupt"
    hint = "look with 'tidings log verify', then see what 'tidings log repair --dry-run' would set aside"

    def __init__(self, path: Path | str, byte_offset: int, problem: str, seq: int | None = None) -> None:
        place = f"byte {byte_offset}" if seq is None else f"byte {byte_offset}, seq {seq}"
        super().__init__(path, f"at {place}: {problem}")
        self.byte_offset = byte_offset
        self.seq = seq
