"""
Dead letters: events that a group has given up on, ``dlq/<topic>.dlq.jsonl``.

The file is a small log of its own: a letter, and what became of it, each a checked line. Nothing is changed in place, so what
a letter's state is, and its whole history, can be read from the file with plain tools.

    {"crc":...,"letter":{"id":"...","group":...,"offset":...,"error":...,"event":{"meta":{...},"payload":{...}},...}}
    {"crc":...,"change":{"id":"...","state":"requested","at":"..."}}
    {"crc":...,"change":{"id":"...","state":"redriven","at":"..."}}

A letter is ``dead``; asked to be tried again it is ``requested``, whether or not the group is alive at that moment; then
``redriven``, or ``dead`` again with the new error. ``dropped`` is for good. Re-driving goes to the group that failed, never to
the topic: no other group sees the event twice, and no cursor moves.
"""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

from tidings.core.clock import Clock, format_utc
from tidings.core.names import check_topic
from tidings.log.embedded.disk import Disk, read_file
from tidings.log.record import Record
from tidings.log.segment import encode_line, is_whole

from .errors import UnknownDeadLetter

__all__ = ["Attempt", "DeadLetter", "DeadLetterStore", "LetterState", "describe_error"]

LetterState = Literal["dead", "requested", "redriven", "dropped"]


class Attempt(msgspec.Struct, frozen=True):
    """One failed delivery."""

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
    reason: Literal["retries", "expired", "denied", "quarantined"] = "retries"
    event: dict[str, Any] = {}
    state: LetterState = "dead"


class _Change(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    id: str
    state: LetterState
    at: str
    error: str | None = None


class _Line(msgspec.Struct):
    letter: DeadLetter | None = None
    change: _Change | None = None


def describe_error(error: BaseException) -> tuple[str, str, str]:
    """An error's text, its type, and a digest of the places its traceback names."""
    places = [f"{frame.filename}:{frame.name}" for frame in traceback.extract_tb(error.__traceback__)]
    digest = hashlib.sha256("\n".join([type(error).__qualname__, *places]).encode()).hexdigest()[:16]
    return str(error) or type(error).__name__, f"{type(error).__module__}.{type(error).__qualname__}", digest


class DeadLetterStore:
    """The dead letters of one workspace. Its methods block; call them where that is fine."""

    def __init__(self, disk: Disk, folder: Path, clock: Clock) -> None:
        self._disk = disk
        self._folder = folder
        self._clock = clock

    def path(self, topic: str) -> Path:
        """The file of one topic."""
        return self._folder / f"{check_topic(topic)}.dlq.jsonl"

    def topics(self) -> list[str]:
        """The topics that have dead letters, or had."""
        names = self._disk.names(self._folder)
        return [name.removesuffix(".dlq.jsonl") for name in names if name.endswith(".dlq.jsonl")]

    def bury(
        self,
        record: Record,
        group: str,
        error: BaseException,
        attempts: list[Attempt],
        reason: Literal["retries", "expired", "denied", "quarantined"],
    ) -> DeadLetter:
        """Store a dead letter; on disk when this returns. Burying the same event of a group again changes nothing."""
        letter_id = f"{group}-{record.offset}"
        known = self._state_of(record.topic).get(letter_id)
        if known is not None and known.state in ("dead", "dropped"):
            return known
        text, kind, digest = describe_error(error)
        letter = DeadLetter(
            id=letter_id,
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
            failed_at=self._now(),
            attempts=attempts,
            reason=reason,
            event={"meta": msgspec.to_builtins(record.meta), "payload": msgspec.json.decode(record.payload_json)},
        )
        self._append(record.topic, _Line(letter=letter))
        return letter

    def letters(
        self, topic: str, *, group: str | None = None, states: tuple[LetterState, ...] = ("dead", "requested")
    ) -> list[DeadLetter]:
        """The letters of a topic in the states asked for, oldest first."""
        found = self._state_of(topic).values()
        return [letter for letter in found if letter.state in states and group in (None, letter.group)]

    def get(self, topic: str, letter_id: str) -> DeadLetter:
        """One letter, in whatever state."""
        letter = self._state_of(topic).get(letter_id)
        if letter is None:
            raise UnknownDeadLetter(topic, letter_id)
        return letter

    def request(self, topic: str, letter_ids: list[str]) -> list[DeadLetter]:
        """
        Ask for letters to be tried again; returns those that now are asked for. Those that were redriven or dropped
        stay so, and asking twice is asking once.
        """
        state = self._state_of(topic)
        asked: list[DeadLetter] = []
        for letter_id in letter_ids:
            letter = state.get(letter_id)
            if letter is None:
                raise UnknownDeadLetter(topic, letter_id)
            if letter.state == "dead":
                self._change(topic, letter_id, "requested")
            if letter.state in ("dead", "requested"):
                asked.append(letter)
        return asked

    def finish(self, topic: str, letter_id: str, error: BaseException | None = None) -> None:
        """A letter that was tried again went through, or failed anew."""
        self._change(topic, letter_id, "redriven" if error is None else "dead", None if error is None else str(error))

    def drop(self, topic: str, letter_ids: list[str]) -> None:
        """Give letters up for good. The file keeps them, and that they were dropped."""
        for letter_id in letter_ids:
            if self.get(topic, letter_id).state != "dropped":
                self._change(topic, letter_id, "dropped")

    def _change(self, topic: str, letter_id: str, state: LetterState, error: str | None = None) -> None:
        self._append(topic, _Line(change=_Change(id=letter_id, state=state, at=self._now(), error=error)))

    def _now(self) -> str:
        return format_utc(self._clock.now_ns()).decode()

    def _append(self, topic: str, line: _Line) -> None:
        path = self.path(topic)
        self._disk.make_folder(self._folder)
        is_new = not self._disk.exists(path)
        content = {key: value for key, value in msgspec.to_builtins(line).items() if value is not None}
        file = self._disk.open(path, create=True)
        try:
            data = file.read(0, file.size())
            end = _whole_end(data)
            if end < len(data):
                file.truncate(end)  # part of a line that a crash cut off: it was never answered for
            file.write(end, encode_line(msgspec.json.encode(content)[1:]))
            file.sync()
        finally:
            file.close()
        if is_new:
            self._disk.sync_folder(self._folder)

    def _state_of(self, topic: str) -> dict[str, DeadLetter]:
        state: dict[str, DeadLetter] = {}
        for line in self._lines(topic):
            if line.letter is not None:
                state[line.letter.id] = line.letter
            elif line.change is not None and line.change.id in state:
                letter = state[line.change.id]
                state[line.change.id] = msgspec.structs.replace(
                    letter, state=line.change.state, error=line.change.error or letter.error
                )
        return state

    def _lines(self, topic: str) -> Iterator[_Line]:
        data = read_file(self._disk, self.path(topic)) or b""
        for line in data[: _whole_end(data)].splitlines():
            if is_whole(line):
                yield msgspec.json.decode(line, type=_Line)


def _whole_end(data: bytes) -> int:
    last = data.rfind(b"\n", 0, len(data) - 1) + 1
    return len(data) if data.endswith(b"\n") and is_whole(data[last:-1]) else last


Bury = Callable[[Record, str, BaseException, list[Attempt], str], DeadLetter]
