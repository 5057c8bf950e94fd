"""
Dead letters: events that a group has given up on, ``dlq/<topic>.dlq.jsonl``.

The file is a small log of its own: a letter, and what became of it, each a checked line. Nothing is changed in place, so what
a letter's state is, and its whole history, can be read from the file with plain tools.

    {"crc":...,"letter":{"id":"...","group":...,"offset":...,"error":...,"event":{"meta":{...},"payload":{...}},...}}
    {"crc":...,"change":{"id":"...","state":"requested","at":"..."}}
    {"crc":...,"change":{"id":"...","state":"trying","at":"..."}}
    {"crc":...,"change":{"id":"...","state":"redriven","at":"..."}}

A line that is cut or damaged is skipped with a warning, and stays where it is. Of a space whose payloads are encrypted at
rest the payload is left out: it is in the log, sealed, and must stay there for as long as the letter can be tried again (``needed``).
What went wrong is sealed with the space's key too, because the text of an error often quotes the payload. The texts of a line (its
error and those of the attempts) are sealed together and stand beside it, and empty texts take their place. The kind of an error
and where in the code it was raised stay plain, as the envelope of an event does:

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
from tidings.log.encryption import Encryptor, SealBroken, open_payload, seal_payload
from tidings.log.errors import SealedPayload
from tidings.log.keys import NoSealingKey
from tidings.log.record import Record, Sealed
from tidings.log.retention import NeededRecord
from tidings.log.segment import encode_line, is_whole

from ..errors import UnknownDeadLetter
from .dead_letters import (
    OPEN,
    Attempt,
    DeadLetter,
    DeadLetterFilter,
    DeadLetterState,
    Reason,
    StateChange,
    chosen,
    holds_event,
    make_dead_letter,
    named,
)

logger = logging.getLogger(__name__)

_NOT_KEPT: Final = "not kept: the space is encrypted, and there is no key to seal it with"


class _SealedTexts(msgspec.Struct, frozen=True):
    """Texts that were sealed, and how."""

    by: Sealed
    texts: msgspec.Raw


class _Line(msgspec.Struct, omit_defaults=True):
    letter: DeadLetter | None = None
    change: StateChange | None = None
    sealed: _SealedTexts | None = None
    """The texts that were taken out of the letter or the change."""


class _Known:
    """What was read of one file: how far, the state and the lines of each letter, and the records of those that do not hold their event."""

    __slots__ = ("places", "size", "states", "without_event")

    def __init__(self) -> None:
        self.size = 0
        self.places: dict[str, list[tuple[int, int]]] = {}
        """Where the lines of each letter begin and end, from the last one that holds the letter on."""
        self.states: dict[str, DeadLetterState] = {}
        self.without_event: dict[str, NeededRecord] = {}

    def add(self, line: _Line, start: int, end: int) -> None:
        """Count a line that begins and ends at these bytes."""
        letter, change = line.letter, line.change
        if letter is not None:
            self.states[letter.id] = letter.state
            self.places[letter.id] = [(start, end)]
            self.without_event.pop(letter.id, None)
            if not holds_event(letter):
                self.without_event[letter.id] = NeededRecord(letter.offset, letter.space_id, letter.id)
        elif change is not None and change.id in self.states:
            self.states[change.id] = change.state
            self.places[change.id].append((start, end))


class DeadLetterFiles:
    """
    The dead letters of one workspace. Its methods block, and may be called from several threads.

    Args:
        disk, folder, clock: Where the files are, and what time it is.
        encryptor: Seals the errors of dead letters of encrypted spaces, and opens them.
        letter_disk: The same disk, for new dead letters: later changes are small, and may use more of the reserve.
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
        self._encryptor = encryptor
        self._lock = disk.threads.lock()
        self._known: dict[str, _Known] = {}
        self._synced: set[str] = set()
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

    def add(
        self, record: Record, group: str, error: BaseException, attempts: list[Attempt], reason: Reason
    ) -> DeadLetter:
        """
        Store a dead letter; on disk when this returns. Adding the same event of a group again changes nothing, unless it was
        redriven or dropped: then the group was moved back since, and has failed again.
        """
        letter_id = f"{group}-{record.offset}"
        with self._lock:
            is_known = self._states(record.topic).get(letter_id) in OPEN
            if is_known and record.topic not in self._doubtful:
                # A process that was killed may have written it without a sync. The cursor moves past the event now.
                self._sync(record.topic)
                return self.get(record.topic, letter_id)
            is_secret = record.meta.sealed is not None or (
                self._encryptor is not None and self._encryptor.protects(record.meta.space_id)
            )
            now = self._now()
            letter = make_dead_letter(record, group, error, attempts, reason, now=now, with_payload=not is_secret)
            line = self._sealed_letter(letter) if is_secret else _Line(letter=letter)
            self._append(self._letter_disk, record.topic, [line])
            return letter

    def needed(self, topic: str) -> list[NeededRecord]:
        """The records that a topic's letters need to be tried again, because they do not hold their event."""
        with self._lock:
            known = self._known_of(topic)
            return [record for letter_id, record in known.without_event.items() if known.states[letter_id] in OPEN]

    def find(
        self, topic: str, ids: Sequence[str] | None = None, wanted: DeadLetterFilter | None = None
    ) -> list[DeadLetter]:
        """
        The dead letters of a topic that match, as ``GroupStore.dead_letters`` says. Only the lines of letters that are named, or are in one
        of the states, are read.
        """
        wanted = wanted or DeadLetterFilter()
        with self._lock:
            states = self._states(topic)
            names = [each for each, state in states.items() if state in wanted.states] if ids is None else ids
            letters = self._read(topic, names)
        return chosen(topic, letters, ids, wanted)

    def added(self, topic: str, since: int, until: int) -> tuple[list[DeadLetter], int] | None:
        """
        Read the letters between two places in a topic's file, and the place up to which its lines are whole.

        Args:
            topic: Whose file.
            since: The place behind a line.
            until: At most the file's size.

        Returns:
            ``None`` if a line there says what became of a letter: then the whole file says how they stand.
        """
        with self._lock:
            file = self._disk.open(self.path(topic))
            try:
                data = file.read(since, until - since)
            finally:
                file.close()
            data = data[: data.rfind(b"\n") + 1]
            letters: list[DeadLetter] = []
            for _, _, line in self._whole_lines(topic, data, since):
                if line.letter is None:
                    return None
                letters.append(self._opened_letter(line.letter, line.sealed))
            return letters, since + len(data)

    def state(self, topic: str, letter_id: str) -> DeadLetterState | None:
        """The state of a dead letter, without reading its file again if only this object has written to it."""
        with self._lock:
            return self._states(topic).get(letter_id)

    def get(self, topic: str, letter_id: str) -> DeadLetter:
        """One letter, in whatever state."""
        with self._lock:
            (letter,) = named(topic, self._read(topic, [letter_id]), [letter_id])
        return letter

    def request(self, topic: str, ids: Sequence[str]) -> list[DeadLetter]:
        """Ask for dead letters to be redriven, as ``GroupStore.request_redrive`` says."""
        with self._lock:
            states = self._states(topic)
            for letter_id in ids:
                if letter_id not in states:
                    raise UnknownDeadLetter(topic, letter_id)
            names = list(dict.fromkeys(ids))
            self._change(topic, [each for each in names if states[each] == "dead"], "requested")
            names = [each for each in names if self._states(topic)[each] in OPEN]
            return named(topic, self._read(topic, names), names)

    def begin(self, topic: str, letter_id: str) -> None:
        """A dead letter that was asked for is about to be handed to its group."""
        with self._lock:
            self._change(topic, [letter_id], "trying")

    def finish(self, topic: str, letter_id: str, error: BaseException | None = None) -> None:
        """A dead letter was redriven, or failed again."""
        with self._lock:
            self._change(topic, [letter_id], "redriven" if error is None else "dead", error)

    def drop(self, topic: str, ids: Sequence[str]) -> None:
        """Give dead letters up for good. The file keeps them, and that they were dropped."""
        with self._lock:
            states = self._states(topic)
            for letter_id in ids:
                if letter_id not in states:
                    raise UnknownDeadLetter(topic, letter_id)
            self._change(topic, [each for each in dict.fromkeys(ids) if states[each] != "dropped"], "dropped")

    def _change(
        self, topic: str, ids: Sequence[str], state: DeadLetterState, error: BaseException | None = None
    ) -> None:
        now = self._now()
        secret = self._known_of(topic).without_event
        lines: list[_Line] = []
        for letter_id in ids:
            change = StateChange.of(letter_id, state, now, error)
            is_sealed = error is not None and letter_id in secret
            lines.append(
                self._sealed_change(topic, secret[letter_id].space_id, change) if is_sealed else _Line(change=change)
            )
        if lines:
            self._append(self._disk, topic, lines)

    def _seal(self, space_id: str, bound_to: Sequence[str], texts: list[str]) -> _SealedTexts | None:
        """Seal texts for the line that ``bound_to`` names; ``None`` if there is no key to do it with."""
        if self._encryptor is None:
            return None
        try:
            by, sealed = seal_payload(self._encryptor, space_id, msgspec.json.encode(texts), _bound(space_id, bound_to))
        except NoSealingKey:
            return None
        return _SealedTexts(by, msgspec.Raw(sealed))

    def _open(self, space_id: str, bound_to: Sequence[str], sealed: _SealedTexts) -> list[str] | str:
        """The texts of a line; or, if they cannot be opened, why."""
        no_key = f"sealed with key {sealed.by.key!r} of space {space_id!r}, which is not at hand"
        if self._encryptor is None:
            return no_key
        bound = _bound(space_id, bound_to)
        try:
            opened = open_payload(self._encryptor, space_id, sealed.by, bytes(sealed.texts), bound)
        except SealedPayload:
            return no_key
        except SealBroken as error:
            return str(error)
        return msgspec.json.decode(opened, type=list[str])

    def _sealed_letter(self, letter: DeadLetter) -> _Line:
        texts = [letter.error, *(attempt.error for attempt in letter.attempts), letter.traceback]
        sealed = self._seal(letter.space_id, _letter_bound(letter), texts)
        return _Line(letter=_with_texts(letter, "" if sealed is not None else _NOT_KEPT), sealed=sealed)

    def _sealed_change(self, topic: str, space_id: str, change: StateChange) -> _Line:
        sealed = self._seal(space_id, _change_bound(topic, change), [change.error or "", change.traceback or ""])
        plain = "" if sealed is not None else _NOT_KEPT
        return _Line(change=msgspec.structs.replace(change, error=plain, traceback=""), sealed=sealed)

    def _opened_letter(self, letter: DeadLetter, sealed: _SealedTexts | None) -> DeadLetter:
        return (
            letter
            if sealed is None
            else _with_texts(letter, self._open(letter.space_id, _letter_bound(letter), sealed))
        )

    def _opened_change(
        self, topic: str, space_id: str, change: StateChange, sealed: _SealedTexts | None
    ) -> StateChange:
        if sealed is None:
            return change
        opened = self._open(space_id, _change_bound(topic, change), sealed)
        if isinstance(opened, str):
            return msgspec.structs.replace(change, error=opened)
        return msgspec.structs.replace(change, error=opened[0], traceback="".join(opened[1:2]))

    def _now(self) -> str:
        return format_utc(self._clock.now_ns()).decode()

    def _append(self, disk: Disk, topic: str, lines: Sequence[_Line]) -> None:
        path = self.path(topic)
        known = self._known_of(topic)
        disk.make_folder(self._folder)
        encoded = [_encode(line) for line in lines]
        data = b"".join(encoded)
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
        start = known.size - sum(map(len, encoded))
        for line, text in zip(lines, encoded, strict=True):
            known.add(line, start, start + len(text) - 1)
            start += len(text)

    def _sync(self, topic: str) -> None:
        """Have everything that can be read of a topic's dead letters on the disk."""
        if topic not in self._synced:
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
        if topic not in self._synced:
            self._disk.sync_folder(self._folder)
            self._disk.sync_folder(self._folder.parent)
            self._synced.add(topic)

    def _states(self, topic: str) -> dict[str, DeadLetterState]:
        return self._known_of(topic).states

    def _known_of(self, topic: str) -> _Known:
        """What is known of a topic's dead letters; read again if the file has changed."""
        known = self._known.get(topic)
        size = size_of(self._disk, self.path(topic))
        if size is None:
            return self._known.setdefault(topic, _Known())
        if known is None or known.size != size:
            known = self._known[topic] = _Known()
            known.size = size
            for start, end, line in self._lines(topic):
                known.add(line, start, end)
        return known

    def _read(self, topic: str, ids: Sequence[str]) -> dict[str, DeadLetter]:
        """Read letters by their ids; unknown ones are left out."""
        letters: dict[str, DeadLetter] = {}
        for line in self._lines_of(topic, ids):
            if line.letter is not None:
                letters[line.letter.id] = self._opened_letter(line.letter, line.sealed)
            elif line.change is not None and (letter := letters.get(line.change.id)) is not None:
                change = self._opened_change(topic, letter.space_id, line.change, line.sealed)
                letters[letter.id] = change.applied_to(letter)
        return letters

    def _lines_of(self, topic: str, ids: Sequence[str]) -> Iterator[_Line]:
        """The lines of letters, each letter's in order."""
        known = self._known_of(topic)
        places = [place for each in dict.fromkeys(ids) for place in known.places.get(each, ())]
        if not places:
            return
        file = self._disk.open(self.path(topic))
        try:
            for start, end in places:
                line = file.read(start, end - start)
                if is_whole(line):
                    yield msgspec.json.decode(line, type=_Line)
                else:
                    logger.warning("%s: the line at byte %d is not whole, and is skipped", self.path(topic), start)
        finally:
            file.close()

    def _lines(self, topic: str) -> Iterator[tuple[int, int, _Line]]:
        yield from self._whole_lines(topic, read_file(self._disk, self.path(topic)) or b"", 0)

    def _whole_lines(self, topic: str, data: bytes, at: int) -> Iterator[tuple[int, int, _Line]]:
        for line in data.split(b"\n"):
            if is_whole(line):
                yield at, at + len(line), msgspec.json.decode(line, type=_Line)
            elif line:
                logger.warning("%s: the line at byte %d is not whole, and is skipped", self.path(topic), at)
            at += len(line) + 1


def _encode(line: _Line) -> bytes:
    return encode_line(msgspec.json.encode(line)[1:])


def _bound(space_id: str, bound_to: Sequence[str]) -> bytes:
    return msgspec.json.encode(["dead letter", space_id, *bound_to])


def _letter_bound(letter: DeadLetter) -> tuple[str, ...]:
    return ("letter", letter.topic, letter.id, letter.failed_at)


def _change_bound(topic: str, change: StateChange) -> tuple[str, ...]:
    return ("change", topic, change.id, change.at)


def _with_texts(letter: DeadLetter, texts: list[str] | str) -> DeadLetter:
    """The letter with these texts: the error's, the attempts', and the traceback (not in older files); or with the same one."""
    count = 1 + len(letter.attempts)
    each = [texts] * count if isinstance(texts, str) else texts
    attempts = [Attempt(attempt.at, text) for attempt, text in zip(letter.attempts, each[1:count], strict=True)]
    return msgspec.structs.replace(letter, error=each[0], attempts=attempts, traceback="".join(each[count:]))
