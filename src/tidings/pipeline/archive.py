"""
Up to which offset of each topic the lake holds the log: what retention asks before it drops a segment.

``archived.json`` is written after the commit to bronze that it speaks of is on disk, and replaced as a whole. An old file
only keeps segments longer than needed.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from tidings.log.segment import encode_line, is_whole

from .positions import replace_atomically
from .schemas import BRONZE_EVENTS

if TYPE_CHECKING:
    from .lake import Lake

__all__ = ["Archived", "load_archived", "save_archived"]

_NAME: Final = "archived.json"


class Archived(msgspec.Struct, frozen=True):
    """What the lake holds of a log."""

    epoch: str
    seq: int
    topics: dict[str, int]
    """The highest offset of each topic up to which every record is in bronze, or set apart with a reason."""


def load_archived(lake: Path, epoch: str) -> dict[str, int]:
    """
    For each topic the offset up to which the lake holds it, as ``plan_retention`` wants it.

    A file of another epoch, a damaged one and none at all say the same: that the lake holds nothing.
    """
    return _load(lake, epoch).topics


def _load(lake: Path, epoch: str) -> Archived:
    nothing = Archived(epoch, 0, {})
    try:
        data = (lake / _NAME).read_bytes().removesuffix(b"\n")
    except OSError:
        return nothing
    if not is_whole(data):
        return nothing
    try:
        found = msgspec.json.decode(data, type=Archived)
    except msgspec.DecodeError:
        return nothing
    return found if found.epoch == epoch else nothing


def save_archived(lake: Lake, epoch: str, seq: int) -> Archived:
    """Note what bronze holds, once its commit is on disk."""
    archived = Archived(epoch, seq, _offsets(lake, _load(lake.root, epoch)))
    replace_atomically(lake.root / _NAME, encode_line(msgspec.json.encode(archived)[1:]))
    return archived


def _offsets(lake: Lake, before: Archived) -> dict[str, int]:
    """
    The highest offset of each topic, from the bounds of bronze's files that were added since.

    Bronze is cut at one seq over all topics and offsets rise with seqs, so everything below the highest is there too.
    """
    found = dict(before.topics)
    mixed = []
    for file in lake.files(BRONZE_EVENTS.name, lambda file: file.may_hold("seq", before.seq + 1, None)):
        topic = file.minimum.get("topic")
        if topic is None or topic != file.maximum.get("topic"):
            mixed.append(file.path)
            continue
        found[topic] = max(found.get(topic, -1), int(file.maximum["offset"]))
    for topic, offset in _by_reading(mixed):
        found[topic] = max(found.get(topic, -1), offset)
    return found


def _by_reading(files: list[Path]) -> Iterable[tuple[str, int]]:
    """Of files that hold several topics, the highest offset of each: two narrow columns, nothing else is read."""
    # Here and not above: the tools ask what is archived on machines that have no lake, and none of its libraries.
    import duckdb

    from .lake_log import told_of_files

    if not files:
        return []
    with told_of_files(files[0].parent), duckdb.connect(config={"threads": 2}) as duck:
        found: list[tuple[str, int]] = duck.execute(
            'select topic, max("offset") from read_parquet(?) group by topic', [[str(path) for path in files]]
        ).fetchall()
    return found
