"""
What a dead letter is, and which of them are meant: values, and decisions on them.

The file they are kept in is ``dead_letters``; here is nothing that reads or writes.
"""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, Final, Literal

import msgspec

from tidings.log.record import Record, RecordMeta

from .errors import UnknownDeadLetter
from .texts import cut, text_of

__all__ = [
    "EVERY",
    "OPEN",
    "Attempt",
    "DeadLetter",
    "LetterFilter",
    "LetterState",
    "Reason",
    "describe_error",
    "holds_event",
    "named",
    "record_of",
]

LetterState = Literal["dead", "requested", "trying", "redriven", "dropped"]
Reason = Literal["retries", "expired", "denied", "quarantined"]
OPEN: Final[tuple[LetterState, ...]] = ("dead", "requested", "trying")
"""What can still be tried again."""
EVERY: Final[tuple[LetterState, ...]] = (*OPEN, "redriven", "dropped")


class Attempt(msgspec.Struct, frozen=True):
    """One failed delivery; ``at`` is empty where the process that made it did not live to tell."""

    at: str
    error: str


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True):
    """An event that a group has given up on."""

    id: str
    topic: str
    group: str
    offset: int
    seq: int
    event_id: str
    space_id: str
    error: str
    error_type: str
    traceback_digest: str
    """Equal for failures at the same place in the code."""
    retries: int
    failed_at: str
    attempts: list[Attempt] = []
    reason: Reason = "retries"
    event: dict[str, Any] = {}
    """``meta`` and ``payload``; without the payload if it must not lie in the open."""
    state: LetterState = "dead"
    redrives: int = 0
    """How often it was handed to its group again."""
    tries: int = 0
    """How often since it was last asked for. More than one says that the process ended meanwhile."""


class LetterFilter(msgspec.Struct, frozen=True, kw_only=True):
    """What narrows letters down; conditions are joined by and."""

    states: tuple[LetterState, ...] = OPEN
    group: str | None = None
    reason: Reason | None = None
    error_type: str | None = None
    """With its module (``builtins.ValueError``) or without (``ValueError``)."""
    error_contains: str | None = None
    """Part of the error's text, or of its type."""
    since: datetime | None = None
    """Given up at this time or later."""

    @property
    def is_narrow(self) -> bool:
        """Whether anything but the state narrows the letters down."""
        return self != LetterFilter(states=self.states)

    def lets_through(self, letter: DeadLetter) -> bool:
        """Whether a letter fits."""
        return (
            letter.state in self.states
            and self.group in (None, letter.group)
            and self.reason in (None, letter.reason)
            and self.error_type in (None, letter.error_type, letter.error_type.rpartition(".")[2])
            and (
                self.error_contains is None
                or self.error_contains in letter.error
                or self.error_contains in letter.error_type
            )
            and (self.since is None or datetime.fromisoformat(letter.failed_at) >= self.since)
        )


def named(topic: str, letters: Mapping[str, DeadLetter], letter_ids: Iterable[str]) -> list[DeadLetter]:
    """
    The letters of a topic that have these ids, each once, in the order in which they are named.

    Raises:
        UnknownDeadLetter: One of them is not there.
    """
    chosen: list[DeadLetter] = []
    for letter_id in dict.fromkeys(letter_ids):
        if letter_id not in letters:
            raise UnknownDeadLetter(topic, letter_id)
        chosen.append(letters[letter_id])
    return chosen


def describe_error(error: BaseException) -> tuple[str, str, str]:
    """An error's text, its type, and a digest of the places its traceback names."""
    places = [f"{frame.filename}:{frame.name}" for frame in traceback.extract_tb(error.__traceback__)]
    said = "\n".join([type(error).__qualname__, *places]).encode(errors="backslashreplace")
    kind = cut(f"{type(error).__module__}.{type(error).__qualname__}")
    return text_of(error), kind, hashlib.sha256(said).hexdigest()[:16]


def holds_event(letter: DeadLetter) -> bool:
    """Whether the event is in the letter, and not in the log only."""
    return "payload" in letter.event


def record_of(letter: DeadLetter) -> Record | None:
    """The record that a letter holds; ``None`` if its payload was left out."""
    if not holds_event(letter):
        return None
    payload = msgspec.Raw(msgspec.json.encode(letter.event["payload"]))
    return Record.of(letter.offset, letter.seq, msgspec.convert(letter.event["meta"], RecordMeta), payload)
