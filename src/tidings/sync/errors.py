"""
What the sync server raises when it cannot be set up or go on.

    SyncError
    ├── InvalidSchema           a JSON Schema in the settings cannot be compiled
    └── HistoryPruned           the events that an answer needs were dropped, and no archive is at hand

What is wrong with a client's message is not raised but answered; frames that cannot be read are ``wire.sync_frames``.
"""

from __future__ import annotations

from tidings.core.errors import TidingsError


class SyncError(TidingsError):
    """The root of what the sync server raises."""

    code = "sync.error"


class InvalidSchema(SyncError):
    """A schema of the settings is not a JSON Schema, or refers to something outside itself."""

    code = "sync.invalid_schema"
    hint = "schemas are compiled once, without fetching anything: put what is referred to into the schema itself"
    text = "schema {name!r}: {problem}"
    name: str
    problem: str


class HistoryPruned(SyncError):
    """Events up to ``through_seq`` may be gone, so what depends on all of them cannot be answered."""

    code = "sync.history_pruned"
    hint = "keep an archive of what retention drops, or let retention spare the sync topics"
    text = "events up to seq {through_seq} were dropped and are in no archive"
    through_seq: int
