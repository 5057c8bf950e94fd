"""
Small files beside the tables. Each is replaced as a whole; an old or damaged one only costs repeated work.

``positions.json`` says in which segment and at which byte each stream goes on. The seq that counts is stored in the commits to
bronze; whoever starts at a hint still leaves out what is not after that seq.
``archived.json`` says up to which offset of each topic the lake holds the log: what retention asks before it drops a segment.
It is written after the commit to bronze that it speaks of is on disk.
``housekeeping.json`` says when each table was last looked through for old files.

No library of the lake is imported here: the tools ask what is archived on machines that have none.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from tidings.log.segment import encode_line, is_whole

from .schemas import BRONZE_EVENTS
from .storage import Storage
from .storage_errors import translate_read_errors, translate_write_errors

if TYPE_CHECKING:
    from .lake import Lake
    from .table_files import DataFile

_POSITIONS: Final = "positions.json"
_ARCHIVED: Final = "archived.json"
_VACUUMED: Final = "housekeeping.json"
HOUR_NS: Final = 3_600_000_000_000


class StateFile(msgspec.Struct, frozen=True):
    """What every state file says."""

    epoch: str
    """Of the log that the file is about."""


_S = TypeVar("_S", bound=StateFile)


class Mark(msgspec.Struct, frozen=True, array_like=True):
    """A position in a stream: all before it was read."""

    segment: int
    byte_offset: int = 0
    seal_byte_offset: int = 0
    """Where in the stream's seals the line of ``segment`` is, or will be."""


class Hints(StateFile, frozen=True):
    """A mark for each stream, good for reading on after ``seq`` or after any later one."""

    seq: int
    streams: dict[str, Mark] = {}


class Archived(StateFile, frozen=True):
    """What the lake holds of a log."""

    seq: int
    topics: dict[str, int]
    """The highest offset of each topic up to which every record is in bronze, or in the quarantine."""


class Vacuumed(StateFile, frozen=True):
    """When each table was last looked through for files that are no part of it any more."""

    at_ns: dict[str, int] = {}
    aside_ns: dict[str, int] = {}
    """When folders were first seen that a repair left behind, by their place below the tables' folder."""

    def due(self, vacuum_hours: int, now_ns: int) -> set[str]:
        """The tables for which it is time again."""
        return {table for table, at_ns in self.at_ns.items() if now_ns - at_ns >= vacuum_hours * HOUR_NS}


def load_vacuumed(lake: Storage, epoch: str) -> Vacuumed:
    """What is known; nothing if there is no such file."""
    return load_state(lake, _VACUUMED, Vacuumed, epoch, has_checksum=False) or Vacuumed(epoch)


def save_vacuumed(lake: Storage, state: Vacuumed) -> None:
    """Store when each table was looked through."""
    save_state(lake, _VACUUMED, state)


def load_state(lake: Storage, name: str, kind: type[_S], epoch: str, *, has_checksum: bool = True) -> _S | None:
    """The content of a state file; ``None`` if there is none, it is damaged, or it is about another epoch."""
    try:
        data = (lake.read(name) or b"").removesuffix(b"\n")
        found = msgspec.json.decode(data, type=kind) if not has_checksum or is_whole(data) else None
    except (OSError, msgspec.DecodeError):
        return None
    return found if found is not None and found.epoch == epoch else None


def save_state(lake: Storage, name: str, state: msgspec.Struct, *, has_checksum: bool = False) -> None:
    """
    Give a state file new content. A crash leaves the old one or this.

    Raises:
        LakeUnwritable, LakeBlocked, LakeUnreachable
    """
    data = msgspec.json.encode(state)
    with translate_write_errors(lake):
        lake.replace(name, encode_line(data[1:]) if has_checksum else data + b"\n")


def load_hints(lake: Storage, *, epoch: str, seq: int) -> Hints:
    """The stored hints, if they can be used for reading on after ``seq``; otherwise none."""
    hints = load_state(lake, _POSITIONS, Hints, epoch)
    return hints if hints is not None and hints.seq <= seq else Hints(epoch, 0)


def save_hints(lake: Storage, hints: Hints) -> None:
    """Store the hints."""
    save_state(lake, _POSITIONS, hints, has_checksum=True)


def load_archived(lake: Storage, epoch: str) -> dict[str, int]:
    """For each topic the offset up to which the lake holds it, as ``plan_retention`` wants it."""
    found = load_state(lake, _ARCHIVED, Archived, epoch)
    return {} if found is None else found.topics


def archived_seq(lake: Storage, epoch: str) -> int:
    """The seq up to which everything was once known to be in the lake; 0 if nobody knows."""
    found = load_state(lake, _ARCHIVED, Archived, epoch)
    return 0 if found is None else found.seq


def save_archived(lake: Lake, epoch: str, seq: int) -> None:
    """Store what bronze holds, once its commit is on disk."""
    before = load_state(lake.storage, _ARCHIVED, Archived, epoch) or Archived(epoch, 0, {})
    archived = Archived(epoch, seq, _offsets(lake, before))
    save_state(lake.storage, _ARCHIVED, archived, has_checksum=True)


def _offsets(lake: Lake, before: Archived) -> dict[str, int]:
    """
    The highest offset of each topic, from the bounds of bronze's files that were added since.

    Bronze ends at one seq over all topics and offsets rise with seqs, so everything below the highest is there too.
    """
    found = dict(before.topics)
    mixed = []
    for file in lake.files(BRONZE_EVENTS.name, lambda file: file.may_hold("seq", before.seq + 1, None)):
        topic = file.minimum.get("topic")
        if topic is None or topic != file.maximum.get("topic"):
            mixed.append(file)
            continue
        found[topic] = max(found.get(topic, -1), int(file.maximum["offset"]))
    for topic, offset in _by_reading(lake, mixed):
        found[topic] = max(found.get(topic, -1), offset)
    return found


def _by_reading(lake: Lake, files: list[DataFile]) -> Iterable[tuple[str, int]]:
    """Of files that hold several topics, the highest offset of each: two narrow columns, nothing else is read."""
    if not files:
        return []
    with translate_read_errors(lake.folder(BRONZE_EVENTS.name)):
        rows = lake.dataset(BRONZE_EVENTS.name, files).to_table(columns=["topic", "offset"])
        found = rows.group_by("topic").aggregate([("offset", "max")])
    return zip(found["topic"].to_pylist(), found["offset_max"].to_pylist(), strict=True)
