"""
A large log in little time: segments, seals, checkpoint and index, written straight with the engine's own parts.

What comes out is what a writer leaves that published ``count`` events with ids of its own and closed the log.
"""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Final

from tidings.core.clock import SYSTEM_CLOCK, format_utc
from tidings.log import LogSettings
from tidings.log.embedded.disk import OsDisk
from tidings.log.embedded.index import IndexEntry, fingerprint_of_id
from tidings.log.embedded.layout import Layout, StreamKey
from tidings.log.embedded.lmdb_index import LmdbIndex
from tidings.log.embedded.segment_writer import SegmentWriter
from tidings.log.embedded.state import Stream
from tidings.log.segment import Head, encode_line

__all__ = [
    "BATCH",
    "PARTITION_COUNT",
    "SPACE",
    "TOPIC",
    "TYPE",
    "fill",
    "id_of",
    "line_of",
    "partition_of",
    "time_ns_of",
]

TOPIC: Final = "orders"
TYPE: Final = "ORDER_PLACED"
SPACE: Final = "shared:shop"
PARTITION_COUNT: Final = 100
BATCH: Final = 1000
"""Records that share a time of writing, as those of one commit do."""

_START_NS: Final = 1_767_225_600_000_000_000
_LOTS: Final = 32
_HEAD: Final = f'"topic":"{TOPIC}","type":"{TYPE}","space_id":"{SPACE}","event_id":"'.encode()


def id_of(seq: int) -> str:
    """The producer's id of the record at ``seq``."""
    return f"order-{seq:012d}"


def partition_of(seq: int) -> str:
    """The partition that the record at ``seq`` names, in a log with partitions."""
    return f"customer-{seq % PARTITION_COUNT:03d}"


def time_ns_of(seq: int) -> int:
    """When the record at ``seq`` was written."""
    return _START_NS + seq // BATCH * 4_000_000


def line_of(seq: int, written_at: bytes, *, has_partitions: bool) -> bytes:
    """The line of the record at ``seq``, the only topic's ``seq - 1``-th."""
    rest = b',"partitions":["%b"]' % partition_of(seq).encode() if has_partitions else b""
    return encode_line(
        b'"offset":%d,"seq":%d,"meta":{"written_at":"%b",%border-%012d","ts":"%b"%b},"payload":{"n":%d}}'
        % (seq - 1, seq, written_at, _HEAD, seq, written_at, rest, seq)
    )


def fill(workspace: Path, count: int, *, has_partitions: bool) -> None:
    """Make a log of ``count`` records in one topic."""
    layout, disk, settings = Layout(workspace), OsDisk(), LogSettings()
    disk.make_folder(layout.root)
    meta = layout.create(disk, SYSTEM_CLOCK, settings.layout)
    index = LmdbIndex.open(layout.index, epoch=meta.epoch, map_bytes_max=settings.index_bytes_max)
    segment_writer = SegmentWriter(disk, layout, index)
    stream = Stream(StreamKey(TOPIC), lines_max=settings.segment_lines_max, bytes_max=settings.segment_bytes_max)
    try:
        for first in range(1, count + 1, BATCH):
            seqs = range(first, min(first + BATCH, count + 1))
            written_at = format_utc(time_ns_of(first))
            lines = [line_of(seq, written_at, has_partitions=has_partitions) for seq in seqs]
            heads = [Head(seq - 1, seq, written_at.decode()) for seq in (seqs[0], seqs[-1])]
            named = [(seq, (partition_of(seq),)) for seq in seqs] if has_partitions else []
            segment_writer.write(stream.place(lines, sum(map(len, lines)), heads[0], heads[1], named))
        segment_writer.checkpoint(count)
        _enter(index, count, has_partitions=has_partitions)
    finally:
        segment_writer.close()
        index.close()


def _enter(index: LmdbIndex, count: int, *, has_partitions: bool) -> None:
    """
    Enter all ids, those with neighbouring keys together.

    In the order of seqs each of ten million keys would land on another page; a lot of neighbours touches each page
    once, and the index is filled several times as fast.
    """
    lots = [array("Q") for _ in range(_LOTS)]
    for seq in range(1, count + 1):
        lots[fingerprint_of_id(id_of(seq))[0] * _LOTS >> 8].append(seq)
    for lot in lots:
        index.add([_entry(seq, has_partitions) for seq in lot], 0)
    index.add([], count)


def _entry(seq: int, has_partitions: bool) -> IndexEntry:
    partitions = (partition_of(seq),) if has_partitions else ()
    return IndexEntry(seq, TOPIC, seq - 1, id_of(seq), None, SPACE, partitions)
