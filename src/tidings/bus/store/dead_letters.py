"""
Dead letters: events that a group has given up on. Values only; stores read and write them.

A dead letter is ``dead``; asked to be tried again it is ``requested``, whether or not the group is alive at that moment;
``trying`` while its handler has it, noted beforehand so that a handler that ends the process is counted; then ``redriven``, or
``dead`` again with the new error. ``dropped`` is for good. Redriving goes to the group that failed, never to the topic: no other
group sees the event twice, and no cursor moves.
"""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, Literal

import msgspec

from tidings.log.record import Record, RecordMeta

from ..errors import UnknownDeadLetter
from ..texts import RaisedElsewhere, kind_of, text_of, traceback_of

DeadLetterState = Literal["dead", "requested", "trying", "redriven", "dropped"]
Reason = Literal["retries", "expired", "denied", "quarantined", "invalid"]
"""``invalid``: the payload is not of the type that the handler asks for."""
OPEN: Final[tuple[DeadLetterState, ...]] = ("dead", "requested", "trying")
"""What can still be tried again."""
EVERY: Final[tuple[DeadLetterState, ...]] = (*OPEN, "redriven", "dropped")


class Attempt(msgspec.Struct, frozen=True):
    """One failed delivery; ``at`` is empty where the process that made it ended before it could be noted."""

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
    """``meta`` and ``payload``; without the payload if that is encrypted at rest."""
    state: DeadLetterState = "dead"
    redrives: int = 0
    """How often it was redriven."""
    tries: int = 0
    """How often since it was last asked for. More than one means that the process ended meanwhile."""
    traceback: str = ""
    """Of the last error, as Python prints it: its end, if it is long. Empty if nothing was raised."""


class DeadLetterFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which dead letters are meant; conditions are joined by and."""

    states: tuple[DeadLetterState, ...] = OPEN
    group: str | None = None
    reason: Reason | None = None
    error_type: str | None = None
    """With its module (``builtins.ValueError``) or without (``ValueError``)."""
    error_contains: str | None = None
    """Part of the error's text, or of its type."""
    since: datetime | None = None
    """Given up at this time or later."""

    @property
    def has_conditions(self) -> bool:
        """Whether it says more than which states."""
        return self != DeadLetterFilter(states=self.states)

    def matches(self, letter: DeadLetter) -> bool:
        """Whether a dead letter fits."""
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


def named(topic: str, letters: Mapping[str, DeadLetter], ids: Iterable[str]) -> list[DeadLetter]:
    """
    The dead letters of a topic that have these ids, each once, in the order in which they are named.

    Raises:
        UnknownDeadLetter: One of them does not exist.
    """
    chosen: list[DeadLetter] = []
    for letter_id in dict.fromkeys(ids):
        if letter_id not in letters:
            raise UnknownDeadLetter(topic, letter_id)
        chosen.append(letters[letter_id])
    return chosen


def chosen(
    topic: str, letters: Mapping[str, DeadLetter], ids: Sequence[str] | None, wanted: DeadLetterFilter
) -> list[DeadLetter]:
    """Those that match: among those named, in that order, or among all, in the order of their events. Raises as ``named`` does."""
    found = sorted(letters.values(), key=lambda letter: letter.offset) if ids is None else named(topic, letters, ids)
    return [letter for letter in found if wanted.matches(letter)]


def make_dead_letter(
    record: Record,
    group: str,
    error: BaseException,
    attempts: list[Attempt],
    reason: Reason,
    *,
    now: str,
    with_payload: bool = True,
) -> DeadLetter:
    """The dead letter of an event that a group has given up on."""
    text, kind, digest, trace = _describe(error)
    event = {"meta": msgspec.to_builtins(record.meta)}
    if with_payload:
        event["payload"] = msgspec.json.decode(record.payload_json)
    return DeadLetter(
        id=f"{group}-{record.offset}",
        topic=record.topic,
        group=group,
        offset=record.offset,
        seq=record.seq,
        event_id=record.meta.event_id,
        space_id=record.meta.space_id,
        error=text,
        error_type=kind,
        traceback_digest=digest,
        retries=max(0, len(attempts) - 1),
        failed_at=now,
        attempts=attempts,
        reason=reason,
        event=event,
        traceback=trace,
    )


class StateChange(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What became of a dead letter."""

    id: str
    state: DeadLetterState
    at: str
    error: str | None = None
    error_type: str | None = None
    traceback_digest: str | None = None
    traceback: str | None = None

    @classmethod
    def of(cls, letter_id: str, state: DeadLetterState, at: str, error: BaseException | None = None) -> StateChange:
        """A change to a state, with the error that led to it."""
        text, kind, digest, trace = (None, None, None, None) if error is None else _describe(error)
        return cls(
            id=letter_id, state=state, at=at, error=text, error_type=kind, traceback_digest=digest, traceback=trace
        )

    def applied_to(self, letter: DeadLetter) -> DeadLetter:
        """The dead letter after this change."""
        is_try = self.state == "trying"
        return msgspec.structs.replace(
            letter,
            state=self.state,
            error=self.error or letter.error,
            error_type=self.error_type or letter.error_type,
            traceback_digest=self.traceback_digest or letter.traceback_digest,
            traceback=letter.traceback if self.traceback is None else self.traceback,
            attempts=[*letter.attempts, Attempt(self.at, self.error)] if self.error else letter.attempts,
            redrives=letter.redrives + is_try,
            tries=0 if self.state == "requested" else letter.tries + is_try,
        )


def _describe(error: BaseException) -> tuple[str, str, str, str]:
    """An error's text, its type, a digest of the places its traceback names, and that traceback."""
    places = [f"{frame.filename}:{frame.name}" for frame in traceback.extract_tb(error.__traceback__)]
    kind = kind_of(error)
    name = kind if isinstance(error, RaisedElsewhere) else type(error).__qualname__
    said = "\n".join([name, *places]).encode(errors="backslashreplace")
    return text_of(error), kind, hashlib.sha256(said).hexdigest()[:16], traceback_of(error)


def holds_event(letter: DeadLetter) -> bool:
    """Whether the event is in the dead letter, and not in the log only."""
    return "payload" in letter.event


def record_of(letter: DeadLetter) -> Record | None:
    """The record that a dead letter holds; ``None`` if its payload was left out."""
    if not holds_event(letter):
        return None
    payload = msgspec.Raw(msgspec.json.encode(letter.event["payload"]))
    return Record.of(letter.offset, letter.seq, msgspec.convert(letter.event["meta"], RecordMeta), payload)
