"""
A log full of sync events in little time, as ``filling`` makes one of orders: what a node leaves that committed them.

Every so often an event is of the partition ``RARE``; all others are of ``COMMON``.
"""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Final

import msgspec

from tidings.core.clock import SYSTEM_CLOCK, format_utc
from tidings.log import LogSettings
from tidings.log.embedded.disk import OsDisk
from tidings.log.embedded.index import IndexEntry, fingerprint_of_id
from tidings.log.embedded.layout import Layout, StreamKey
from tidings.log.embedded.lmdb_index import LmdbIndex
from tidings.log.embedded.segment_writer import SegmentWriter
from tidings.log.embedded.state import Stream
from tidings.log.segment import Head, encode_line

from .measuring import Taken, Window

__all__ = ["COMMON", "RARE", "BronzeFill", "SyncLog", "fill_sync"]

COMMON: Final = "P-common"
RARE: Final = "P-rare"
_TOPIC: Final = "sync"
_SPACE: Final = "sync"
_BATCH: Final = 1000
_START_NS: Final = 1_767_225_600_000_000_000
_LOTS: Final = 32


class SyncLog(msgspec.Struct, frozen=True, kw_only=True):
    """A log to be made."""

    workspace: str
    records: int
    rare: int
    """Events of the rare partition, spread over the whole log."""

    def partition_of(self, seq: int) -> str:
        """The partition of the event at ``seq``."""
        return RARE if seq % (self.records // self.rare) == 0 else COMMON


class BronzeFill(msgspec.Struct, frozen=True):
    """What making it took."""

    taken: Taken


def fill_sync(case: SyncLog) -> BronzeFill:
    """Make the log."""
    window = Window()
    layout, disk, settings = Layout(Path(case.workspace)), OsDisk(), LogSettings()
    disk.make_folder(layout.root)
    meta = layout.create(disk, SYSTEM_CLOCK, settings.layout)
    index = LmdbIndex.open(layout.index, epoch=meta.epoch, map_bytes_max=settings.index_bytes_max)
    segment_writer = SegmentWriter(disk, layout, index)
    stream = Stream(StreamKey(_TOPIC), lines_max=settings.segment_lines_max, bytes_max=settings.segment_bytes_max)
    try:
        for first in range(1, case.records + 1, _BATCH):
            seqs = range(first, min(first + _BATCH, case.records + 1))
            written_at = format_utc(_START_NS + first // _BATCH * 4_000_000)
            lines = [_line(seq, written_at, case.partition_of(seq)) for seq in seqs]
            heads = [Head(seq - 1, seq, written_at.decode()) for seq in (seqs[0], seqs[-1])]
            named = [(seq, (case.partition_of(seq),)) for seq in seqs]
            segment_writer.write(stream.place(lines, sum(map(len, lines)), heads[0], heads[1], named))
        segment_writer.checkpoint(case.records)
        _enter(index, case)
    finally:
        segment_writer.close()
        index.close()
    return BronzeFill(window.take())


def _line(seq: int, written_at: bytes, partition: str) -> bytes:
    return encode_line(
        b'"offset":%d,"seq":%d,"meta":{"written_at":"%b","topic":"sync","type":"event","space_id":"sync",'
        b'"event_id":"item-%012d","ts":"%b","actor":"writer","partitions":["%b"]},"payload":{"event":{"type":"event",'
        b'"payload":{"schema":"item.put","data":{"list":"groceries","item":"item-%d","done":false,"n":%d}}}}}'
        % (seq - 1, seq, written_at, seq, written_at, partition.encode(), seq, seq)
    )


def _enter(index: LmdbIndex, case: SyncLog) -> None:
    """Enter all ids, those with neighbouring keys together: each page of the index is then touched once."""
    lots = [array("Q") for _ in range(_LOTS)]
    for seq in range(1, case.records + 1):
        lots[fingerprint_of_id(_id_of(seq))[0] * _LOTS >> 8].append(seq)
    for lot in lots:
        index.add([_entry(case, seq) for seq in lot], 0)
    index.add([], case.records)


def _id_of(seq: int) -> str:
    return f"item-{seq:012d}"


def _entry(case: SyncLog, seq: int) -> IndexEntry:
    return IndexEntry(seq, _TOPIC, seq - 1, _id_of(seq), None, _SPACE, (case.partition_of(seq),))
