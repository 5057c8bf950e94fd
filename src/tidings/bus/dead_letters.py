"""
Dead letters: events that a group has given up on, ``dlq/<topic>.dlq.jsonl``.

The file is a small log of its own: a letter, and what became of it, each a checked line. Nothing is changed in place, so what
a letter's state is, and its whole history, can be read from the file with plain tools.

    {"crc":...,"letter":{"id":"...","group":...,"offset":...,"error":...,"event":{"meta":{...},"payload":{...}},...}}
    {"crc":...,"change":{"id":"...","state":"requested","at":"..."}}
    {"crc":...,"change":{"id":"...","state":"trying","at":"..."}}
    {"crc":...,"change":{"id":"...","state":"redriven","at":"..."}}

A letter is ``dead``; asked to be tried again it is ``requested``, whether or not the group is alive at that moment; ``trying``
while its handler has it, noted beforehand so that a handler that ends the process is counted; then ``redriven``, or ``dead``
again with the new error. ``dropped`` is for good. Re-driving goes to the group that failed, never to the topic: no other
group sees the event twice, and no cursor moves.

A line that is cut or damaged is passed over with a warning, and stays where it is. Of a space whose payloads are encrypted at
rest the payload is left out: it is in the log, sealed, and must stay there for as long as the letter can be tried again (``needed``).
What went wrong is sealed too (``letter_seals``):

    {"crc":...,"letter":{...,"error":"",...},"sealed":{"by":{"alg":...,"key":...,"nonce":...},"texts":{"sealed":"..."}}}
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from tidings.core.clock import Clock, format_utc
from tidings.core.names import check_topic
from tidings.log.embedded.disk import Disk, is_full, read_file, size_of
from tidings.log.encryption import Encryptor
from tidings.log.record import Record
from tidings.log.retention import NeededRecord
from tidings.log.segment import encode_line, is_whole

from .errors import UnknownDeadLetter
from .letter_seals import LetterSeals, SealedTexts
from .letters import (
    OPEN,
    Attempt,
    DeadLetter,
    LetterFilter,
    LetterState,
    Reason,
    describe_error,
    holds_event,
    named,
)

__all__ = ["OPEN", "Attempt", "DeadLetter", "DeadLetterStore", "LetterState", "Reason", "describe_error"]

logger = logging.getLogger(__name__)

_NOT_KEPT: Final = "not kept: the space is encrypted, and there is no key to seal it with"


class _Change(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    id: str
    state: LetterState
    at: str
    error: str | None = None
    error_type: str | None = None
    traceback_digest: str | None = None


class _Line(msgspec.Struct, omit_defaults=True):
    letter: DeadLetter | None = None
    change: _Change | None = None
    sealed: SealedTexts | None = None
    """The texts that were taken out of the letter or the change."""


class _Known:
    """What was read of one file: how far, the state of each letter, and the records of those that do not hold their event."""

    __slots__ = ("size", "states", "without_event")

    def __init__(self) -> None:
        self.size = 0
        self.states: dict[str, LetterState] = {}
        self.without_event: dict[str, NeededRecord] = {}

    def note(self, line: _Line) -> None:
        """Take a line in."""
        letter, change = line.letter, line.change
        if letter is not None:
            self.states[letter.id] = letter.state
            self.without_event.pop(letter.id, None)
            if not holds_event(letter):
                self.without_event[letter.id] = NeededRecord(letter.offset, letter.space_id, letter.id)
        elif change is not None and change.id in self.states:
            self.states[change.id] = change.state


class DeadLetterStore:
    """
    The dead letters of one workspace. Its methods block, and may be called from several threads.

    Args:
        disk, folder, clock: Where the files are, and what time it is.
        encryptor: Seals what letters of encrypted spaces say, and opens it.
        letter_disk: The same disk, for the letters themselves: what becomes of them is small, and may have more of the reserve.
    """

    def __init__(
        self,
        disk: Disk,
        folder: Path,
        clock: Clock,
        encryptor: Encryptor | None = None,
        *,
        letter_disk: Disk | None = None,
    ) -> None:
        self._disk = disk
        self._letter_disk = letter_disk or disk
        self._folder = folder
        self._clock = clock
        self._seals = LetterSeals(encryptor)
        self._lock = disk.threads.lock()
        self._known: dict[str, _Known] = {}
        self._settled: set[str] = set()
        """Topics whose file this store has synced, its name too."""
        self._doubtful: set[str] = set()
        """Topics whose file failed a write or a sync: it may read better than it is, for as long as the process lives. So
        nothing in it is relied on any more; a letter is written again, on a line of its own."""

    def path(self, topic: str) -> Path:
        """The file of one topic."""
        return self._folder / f"{check_topic(topic)}.dlq.jsonl"

    def topics(self) -> list[str]:
        """The topics that have dead letters, or had."""
        names = self._disk.names(self._folder)
        return [name.removesuffix(".dlq.jsonl") for name in names if name.endswith(".dlq.jsonl")]

    def bury(
        self, record: Record, group: str, error: BaseException, attempts: list[Attempt], reason: Reason
    ) -> DeadLetter:
        """
        Store a dead letter; on disk when this returns. Burying the same event of a group again changes nothing, unless it was
        done with: then the group was set back since, and has failed anew.
        """
        letter_id = f"{group}-{record.offset}"
        with self._lock:
            is_known = self._states(record.topic).get(letter_id) in OPEN
            if is_known and record.topic not in self._doubtful:
                # A process that was killed may have written it without a sync. The cursor passes the event now.
                self._settle(record.topic)
                return self.get(record.topic, letter_id)
            letter = self._letter(letter_id, record, group, error, attempts, reason)
            line = _Line(letter=letter) if holds_event(letter) else self._sealed_letter(letter)
            self._append(self._letter_disk, record.topic, [line])
            return letter

    def _letter(
        self,
        letter_id: str,
        record: Record,
        group: str,
        error: BaseException,
        attempts: list[Attempt],
        reason: Reason,
    ) -> DeadLetter:
        text, kind, digest = describe_error(error)
        event = {"meta": msgspec.to_builtins(record.meta)}
        if not self._seals.is_secret(record):
            event["payload"] = msgspec.json.decode(record.payload_json)
        return DeadLetter(
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
            event=event,
        )

    def needed(self, topic: str) -> list[NeededRecord]:
        """The records that a topic's letters need to be tried again, because they do not hold their event."""
        with self._lock:
            known = self._look(topic)
            return [record for letter_id, record in known.without_event.items() if known.states[letter_id] in OPEN]

    def letters(self, topic: str, *, states: tuple[LetterState, ...] = OPEN) -> list[DeadLetter]:
        """The letters of a topic that are in one of these states, in the order of their events."""
        return self.choose(topic, None, LetterFilter(states=states))

    def choose(self, topic: str, letter_ids: Sequence[str] | None, wanted: LetterFilter) -> list[DeadLetter]:
        """
        The letters of a topic that fit: among those named, in the order they are named in; or among all, in the order of
        their events. The file is read once.

        Raises:
            UnknownDeadLetter: A letter is named that does not exist. One that does not fit is passed over.
        """
        with self._lock:
            if letter_ids is None and not any(state in wanted.states for state in self._states(topic).values()):
                return []
            letters = self._read(topic)
        found = (
            sorted(letters.values(), key=lambda letter: letter.offset)
            if letter_ids is None
            else named(topic, letters, letter_ids)
        )
        return [letter for letter in found if wanted.lets_through(letter)]

    def state(self, topic: str, letter_id: str) -> LetterState | None:
        """What became of a letter so far, without reading its file again if only this store has written to it."""
        with self._lock:
            return self._states(topic).get(letter_id)

    def get(self, topic: str, letter_id: str) -> DeadLetter:
        """One letter, in whatever state."""
        with self._lock:
            (letter,) = named(topic, self._read(topic), [letter_id])
        return letter

    def request(self, topic: str, letter_ids: Sequence[str]) -> list[DeadLetter]:
        """
        Ask for letters to be tried again; returns those that now are asked for. Those that were redriven or dropped
        stay so, and asking twice is asking once.

        Raises:
            UnknownDeadLetter: One of them is not there. None was asked for.
        """
        with self._lock:
            chosen = named(topic, self._read(topic), letter_ids)
            self._change(topic, [letter.id for letter in chosen if letter.state == "dead"], "requested")
            letters = self._read(topic)
            return [letters[letter.id] for letter in chosen if letter.state in OPEN]

    def begin(self, topic: str, letter_id: str) -> None:
        """A letter that was asked for is about to be handed to its group."""
        with self._lock:
            self._change(topic, [letter_id], "trying")

    def finish(self, topic: str, letter_id: str, error: BaseException | None = None) -> None:
        """A letter that was tried again went through, or failed anew."""
        with self._lock:
            self._change(topic, [letter_id], "redriven" if error is None else "dead", error)

    def drop(self, topic: str, letter_ids: Sequence[str]) -> None:
        """Give letters up for good. The file keeps them, and that they were dropped."""
        with self._lock:
            states = self._states(topic)
            for letter_id in letter_ids:
                if letter_id not in states:
                    raise UnknownDeadLetter(topic, letter_id)
            self._change(topic, [each for each in dict.fromkeys(letter_ids) if states[each] != "dropped"], "dropped")

    def _change(
        self, topic: str, letter_ids: Sequence[str], state: LetterState, error: BaseException | None = None
    ) -> None:
        now = self._now()
        text, kind, digest = (None, None, None) if error is None else describe_error(error)
        secret = self._look(topic).without_event
        lines: list[_Line] = []
        for letter_id in letter_ids:
            change = _Change(id=letter_id, state=state, at=now, error=text, error_type=kind, traceback_digest=digest)
            is_sealed = text is not None and letter_id in secret
            lines.append(
                self._sealed_change(topic, secret[letter_id].space_id, change) if is_sealed else _Line(change=change)
            )
        if lines:
            self._append(self._disk, topic, lines)

    def _sealed_letter(self, letter: DeadLetter) -> _Line:
        texts = [letter.error, *(attempt.error for attempt in letter.attempts)]
        sealed = self._seals.seal(letter.space_id, _letter_bound(letter), texts)
        return _Line(letter=_with_texts(letter, "" if sealed is not None else _NOT_KEPT), sealed=sealed)

    def _sealed_change(self, topic: str, space_id: str, change: _Change) -> _Line:
        sealed = self._seals.seal(space_id, _change_bound(topic, change), [change.error or ""])
        plain = "" if sealed is not None else _NOT_KEPT
        return _Line(change=msgspec.structs.replace(change, error=plain), sealed=sealed)

    def _opened_letter(self, letter: DeadLetter, sealed: SealedTexts | None) -> DeadLetter:
        return (
            letter
            if sealed is None
            else _with_texts(letter, self._seals.open(letter.space_id, _letter_bound(letter), sealed))
        )

    def _opened_change(self, topic: str, space_id: str, change: _Change, sealed: SealedTexts | None) -> _Change:
        if sealed is None:
            return change
        opened = self._seals.open(space_id, _change_bound(topic, change), sealed)
        return msgspec.structs.replace(change, error=opened if isinstance(opened, str) else opened[0])

    def _now(self) -> str:
        return format_utc(self._clock.now_ns()).decode()

    def _append(self, disk: Disk, topic: str, lines: Sequence[_Line]) -> None:
        path = self.path(topic)
        known = self._look(topic)
        disk.make_folder(self._folder)
        data = b"".join(_encode(line) for line in lines)
        file = disk.open(path, create=True)
        try:
            end = file.size()
            if end and (topic in self._doubtful or file.read(end - 1, 1) != b"\n"):
                data = b"\n" + data  # the last line may have been cut off: what is left of it is kept, by itself
            try:
                file.write(end, data)
            except OSError as error:
                if is_full(error):
                    file.truncate(end)  # it is tried again and again: pieces of it would take up what room there is
                raise
            file.sync()
        except BaseException:
            self._known.pop(topic, None)
            self._doubtful.add(topic)
            raise
        finally:
            file.close()
        self._sync_names(topic)
        known.size = end + len(data)
        for line in lines:
            known.note(line)

    def _settle(self, topic: str) -> None:
        """Have everything that can be read of a topic's letters on the disk."""
        if topic not in self._settled:
            file = self._disk.open(self.path(topic), write=True)
            try:
                file.sync()
            except BaseException:
                self._doubtful.add(topic)
                raise
            finally:
                file.close()
            self._sync_names(topic)

    def _sync_names(self, topic: str) -> None:
        if topic not in self._settled:
            self._disk.sync_folder(self._folder)
            self._disk.sync_folder(self._folder.parent)
            self._settled.add(topic)

    def _states(self, topic: str) -> dict[str, LetterState]:
        return self._look(topic).states

    def _look(self, topic: str) -> _Known:
        """What is known of a topic's letters; read anew if the file is not what it was left as."""
        known = self._known.get(topic)
        size = size_of(self._disk, self.path(topic))
        if size is None:
            return self._known.setdefault(topic, _Known())
        if known is None or known.size != size:
            known = self._known[topic] = _Known()
            known.size = size
            for line in self._lines(topic):
                known.note(line)
        return known

    def _read(self, topic: str) -> dict[str, DeadLetter]:
        letters: dict[str, DeadLetter] = {}
        for line in self._lines(topic):
            if line.letter is not None:
                letters[line.letter.id] = self._opened_letter(line.letter, line.sealed)
            elif line.change is not None and (letter := letters.get(line.change.id)) is not None:
                change = self._opened_change(topic, letter.space_id, line.change, line.sealed)
                letters[letter.id] = _changed(letter, change)
        return letters

    def _lines(self, topic: str) -> Iterator[_Line]:
        data = read_file(self._disk, self.path(topic)) or b""
        at = 0
        for line in data.split(b"\n"):
            if is_whole(line):
                yield msgspec.json.decode(line, type=_Line)
            elif line:
                logger.warning("%s: the line at byte %d is not whole, and is passed over", self.path(topic), at)
            at += len(line) + 1


def _encode(line: _Line) -> bytes:
    return encode_line(msgspec.json.encode(line)[1:])


def _letter_bound(letter: DeadLetter) -> tuple[str, ...]:
    return ("letter", letter.topic, letter.id, letter.failed_at)


def _change_bound(topic: str, change: _Change) -> tuple[str, ...]:
    return ("change", topic, change.id, change.at)


def _with_texts(letter: DeadLetter, texts: list[str] | str) -> DeadLetter:
    """The letter with these texts, the error's first; or with the same one everywhere."""
    each = [texts] * (1 + len(letter.attempts)) if isinstance(texts, str) else texts
    attempts = [Attempt(attempt.at, text) for attempt, text in zip(letter.attempts, each[1:], strict=True)]
    return msgspec.structs.replace(letter, error=each[0], attempts=attempts)


def _changed(letter: DeadLetter, change: _Change) -> DeadLetter:
    is_try = change.state == "trying"
    return msgspec.structs.replace(
        letter,
        state=change.state,
        error=change.error or letter.error,
        error_type=change.error_type or letter.error_type,
        traceback_digest=change.traceback_digest or letter.traceback_digest,
        attempts=[*letter.attempts, Attempt(change.at, change.error)] if change.error else letter.attempts,
        redrives=letter.redrives + is_try,
        tries=0 if change.state == "requested" else letter.tries + is_try,
    )
