"""
What an export must leave out: the subjects that tombstones and erasures name, on plain records.

The same rules as for the jobs. A tombstone of an object takes out every record of its space that names the object, whenever it
was committed; one of a person, and a person's own request, takes out what was committed about them before it. What cannot be
looked into is not taken for harmless: a sealed record of a space with erasures is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from typing import Any, Final

import msgspec

from tidings.log.interface import Log, Query
from tidings.log.reading import records
from tidings.log.record import Record

from .errors import PipelineError
from .serving_rows import is_erased

__all__ = ["Erasures", "TooManyErasures", "is_erasure", "load_erasures"]

ERASURES_MAX: Final = 1_000_000
_PREFIXES: Final = ("TOMBSTONE_", "DSAR_")
_WORDS: Final = frozenset({"erase", "erasure", "delete", "deletion", "forget"})
_SUBJECTS: Final = ("subject_id", "person_id", "user_id")


class TooManyErasures(PipelineError):
    """More subjects are to be left out than an export can keep in mind."""

    code = "export.too_many_erasures"
    hint = "let retention and the scrub remove what was erased, then export again"

    def __init__(self, count_max: int) -> None:
        super().__init__(count_max)
        self.count_max = count_max

    def describe(self) -> str:
        return f"there are more than {count_text(self.count_max)} erasures to honour"


def count_text(count: int) -> str:
    """A count with its thousands apart."""
    return f"{count:,}"


class Erasures:
    """The subjects to leave out, by space."""

    def __init__(self) -> None:
        self._objects: dict[str, set[str]] = {}
        self._people: dict[str, dict[str, int]] = {}
        self.count = 0

    def add(self, record: Record) -> bool:
        """Take a record into account; whether it erases something."""
        if not is_erasure(record):
            return False
        payload = record.payload
        kind = record.meta.type
        is_person = kind.startswith("DSAR_") or str(payload.get("object_type", "memory")).lower() == "profile"
        if kind.startswith("DSAR_") and kind != "DSAR_ERASE":
            wish = payload.get("request") or payload.get("kind") or payload.get("action") or ""
            if str(wish).lower() not in _WORDS:
                return False
        subject = next((payload[name] for name in _SUBJECTS if isinstance(payload.get(name), str)), None)
        named = subject if kind.startswith("DSAR_") else payload.get("object_id", subject)
        if not isinstance(named, str) or not named:
            return False
        given = payload.get("space_id")
        space_id = given if isinstance(given, str) and given else record.meta.space_id
        if is_person:
            people = self._people.setdefault(space_id, {})
            people[named] = max(people.get(named, 0), record.seq)
        else:
            self._objects.setdefault(space_id, set()).add(named)
        self.count += 1
        return True

    def concern(self, space_id: str) -> bool:
        """Whether anything of this space was erased."""
        return space_id in self._objects or space_id in self._people

    def name(self, record: Record) -> bool:
        """Whether an erasure names this record, or may and nobody can tell; or has taken out what it said already."""
        if is_erased(record):
            return True
        space_id = record.meta.space_id
        if not self.concern(space_id) or is_erasure(record):
            return False
        if record.meta.sealed is not None:
            return True
        return self.names_any(space_id, record.seq, _texts_of(record))

    def names_any(self, space_id: str, seq: int, texts: Iterator[str]) -> bool:
        """Whether any of these texts is the name of something erased, for a row of that space and seq."""
        objects: Set[str] = self._objects.get(space_id, set())
        people = self._people.get(space_id, {})
        return any(text in objects or seq < people.get(text, 0) for text in texts)


def is_erasure(record: Record) -> bool:
    """Whether a record is of a kind that erases. Such records stay: they are the reason for what is missing."""
    return record.meta.type.startswith(_PREFIXES) and record.meta.sealed is None


async def load_erasures(log: Log, *, until: int, erasures_max: int = ERASURES_MAX) -> Erasures:
    """
    All that was erased up to and including a seq. Reads everything from the first record on.

    Raises:
        PositionTrimmed: Records were dropped, and no lake holds them: an erasure may have been among them.
        TooManyErasures: More than can be kept in mind.
    """
    found = Erasures()
    async for record in records(log, Query(since=0, until=until)):
        # A look at the bytes first: few records erase, and decoding all the other envelopes would take most of the time.
        envelope = bytes(record.meta_json)
        if b"TOMBSTONE_" in envelope or b"DSAR_" in envelope:
            found.add(record)
        if found.count > erasures_max:
            raise TooManyErasures(erasures_max)
    return found


def _texts_of(record: Record) -> Iterator[str]:
    meta = record.meta
    yield meta.event_id
    yield from (text for text in (meta.trace_id, meta.idem_key) if text is not None)
    for part in (meta.actor, meta.device, meta.extra, msgspec.json.decode(record.payload_json)):
        yield from texts_in(part)


def texts_in(value: Any) -> Iterator[str]:
    """Every text in a JSON value, however deep; keys too."""
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, str):
            yield each
        elif isinstance(each, dict):
            waiting += each.keys()
            waiting += each.values()
        elif isinstance(each, list | tuple):
            waiting += each
