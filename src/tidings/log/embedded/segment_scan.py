"""
Read a segment that may be damaged: every line, what it holds, and each place that is not the line that belongs there.

A log is good lines by the million, so whole blocks of them are looked at at once, each property over all lines; a
block in which anything at all is out of the ordinary is gone over again line by line, and judged.
"""

from __future__ import annotations

import hashlib
import operator
import zlib
from array import array
from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec

from ..segment import CRC_HEAD_BYTES, Flaw, is_whole
from .checkpoint import Seal
from .disk import File
from .layout import StreamKey
from .seq_set import SeqSet

__all__ = ["LineFlaw", "LinesSeen", "SegmentScan", "Tail", "scan_segment", "seal_agrees"]

_BLOCK_BYTES: Final = 256 << 10
"""Read and looked at in one go. What a block decodes to takes several times its size; larger ones are hardly faster."""
_FLAWS_MAX: Final = 1000
_HEAD: Final = b'{"crc":"%08x","offset":%d,"seq":%d,"meta":{"written_at":"'

LinesSeen = Callable[[list[int], list[str]], None]


class Tail(NamedTuple):
    """The place of the last record of something."""

    offset: int = -1
    seq: int = 0
    written_at: str = ""


class LineFlaw(NamedTuple):
    """Bytes of a segment that are not the line that belongs there."""

    byte_offset: int
    code: str
    message: str
    seq: int | None = None
    offset: int | None = None


class _Meta(msgspec.Struct, gc=False):
    written_at: str
    topic: str
    space_id: str
    event_id: str
    partitions: tuple[str, ...] = ()


class _Placed(msgspec.Struct, gc=False):
    offset: int
    seq: int
    meta: _Meta
    payload: msgspec.Raw


_PLACED: Final = msgspec.json.Decoder(_Placed)


class SegmentScan:
    """What one segment holds."""

    def __init__(self, before: Tail) -> None:
        self.lines = 0
        """Whole lines in order, on either side of flaws."""
        self.first = Tail()
        self.last = before
        self.flaws: list[LineFlaw] = []
        self.flaw_count = 0
        self.good_lines = 0
        """Lines before the first flaw."""
        self.good_bytes = 0
        self.good_last = before
        self.after: array[int] = array("Q")
        """Seqs of whole lines behind the first flaw."""
        self.twice: list[int] = []
        """Seqs that were in the set already."""
        self.late: LineFlaw | None = None
        self.sha256 = ""
        self.partitions: dict[str, int] = {}

    def add_flaw(self, flaw: LineFlaw) -> None:
        """Note a flaw; the first one ends what is good."""
        self.flaw_count += 1
        if len(self.flaws) < _FLAWS_MAX:
            self.flaws.append(flaw)


def scan_segment(
    file: File,
    size: int,
    key: StreamKey,
    before: Tail,
    *,
    is_dense: bool,
    is_adrift: bool = False,
    seqs: SeqSet | None = None,
    seen: LinesSeen | None = None,
) -> SegmentScan:
    """
    Check the first ``size`` bytes of a segment line by line.

    Args:
        before: The record that the first line follows.
        is_dense: Whether offsets have no gaps.
        is_adrift: Whether the first line may leave a gap: how many records are gone before it is not known.
        seqs: Takes in the seq of every whole line up to the first flaw.
        seen: Is told the seqs and event ids of those, some lines at a time.
    """
    walk = _SegmentWalk(key, before, is_dense=is_dense, is_adrift=is_adrift, seqs=seqs, seen=seen)
    digest = hashlib.sha256()
    rest: list[bytes] = []
    for start in range(0, size, _BLOCK_BYTES):
        block = file.read(start, min(_BLOCK_BYTES, size - start))
        digest.update(block)
        end = block.rfind(b"\n") + 1
        if end:
            walk.take(b"".join((*rest, block[:end])))
            rest = [block[end:]]
        else:
            rest.append(block)
    if any(rest):
        walk.scan.add_flaw(LineFlaw(walk.at, "line.unfinished", Flaw.UNFINISHED))
    walk.scan.sha256 = digest.hexdigest()
    return walk.scan


def seal_agrees(seal: Seal, scan: SegmentScan) -> bool:
    """Whether the seal describes what the segment holds."""
    first = Tail(seal.first_offset, seal.first_seq, seal.first_written_at)
    last = Tail(seal.last_offset, seal.last_seq, seal.last_written_at)
    return (first, last, seal.lines, seal.partitions) == (scan.first, scan.last, scan.lines, scan.partitions)


class _SegmentWalk:
    """The walk over one segment's lines, block by block."""

    def __init__(
        self,
        key: StreamKey,
        before: Tail,
        *,
        is_dense: bool,
        is_adrift: bool,
        seqs: SeqSet | None,
        seen: LinesSeen | None,
    ) -> None:
        self.scan = SegmentScan(before)
        self.at = 0
        self._key = key
        self._is_dense = is_dense
        self._is_adrift = is_adrift
        self._seqs = seqs
        self._seen = seen

    def take(self, block: bytes) -> None:
        """Go on with these bytes; they end with a newline."""
        lines = block.split(b"\n")
        lines.pop()
        placed = None if self._is_adrift else _decode_good(block, lines)
        if placed is not None and self._continues(placed):
            self.at += len(block)
            self._count(placed)
        else:
            for line in lines:
                self._take_one(line)

    def _continues(self, placed: list[_Placed]) -> bool:
        """Whether each of these records is just the one that comes next."""
        before, key = self.scan.last, self._key
        metas = [each.meta for each in placed]
        if {meta.topic for meta in metas} != {key.topic}:
            return False
        if key.space_id is not None and {meta.space_id for meta in metas} != {key.space_id}:
            return False
        offsets = [before.offset, *[each.offset for each in placed]]
        if self._is_dense:
            if offsets != list(range(before.offset, before.offset + len(offsets))):
                return False
        elif not _rises(offsets):
            return False
        times = [before.written_at, *[meta.written_at for meta in metas]]
        return _rises([before.seq, *[each.seq for each in placed]]) and all(map(operator.le, times, times[1:]))

    def _count(self, placed: list[_Placed]) -> None:
        """Take in records that were found to be in order, up to ``at``."""
        scan, first, last = self.scan, placed[0], placed[-1]
        if not scan.lines:
            scan.first = Tail(first.offset, first.seq, first.meta.written_at)
        scan.lines += len(placed)
        scan.last = Tail(last.offset, last.seq, last.meta.written_at)
        for each in placed:
            if each.meta.partitions:
                for name in each.meta.partitions:
                    scan.partitions[name] = each.seq
        seqs = [each.seq for each in placed]
        if scan.flaw_count:
            scan.after.extend(seqs)
            return
        scan.good_lines += len(placed)
        scan.good_bytes, scan.good_last = self.at, scan.last
        if self._seqs is not None:
            scan.twice += self._seqs.add_rising(seqs)
        if self._seen is not None:
            self._seen(seqs, [each.meta.event_id for each in placed])

    def _take_one(self, line: bytes) -> None:
        """Judge a line that may be anything; afterwards the walk knows again what comes next, if it was one."""
        scan, line_at = self.scan, self.at
        self.at += len(line) + 1
        if not is_whole(line):
            self._add_flaw(LineFlaw(line_at, "line.checksum", Flaw.CHECKSUM))
            return
        try:
            placed = _PLACED.decode(line)
        except ValueError as error:
            self._add_flaw(LineFlaw(line_at, "line.format", f"{Flaw.FORMAT}: {error}"))
            return
        meta, offset, seq = placed.meta, placed.offset, placed.seq
        if not _has_its_head(line, placed):
            self._add_flaw(LineFlaw(line_at, "line.format", Flaw.FORMAT, seq, offset))
            return
        if meta.topic != self._key.topic or self._key.space_id not in (None, meta.space_id):
            message = f"the record belongs to topic {meta.topic!r} of space {meta.space_id!r}"
            self._add_flaw(LineFlaw(line_at, "line.misplaced", message, seq, offset))
            return
        before = scan.last
        is_later = seq > before.seq and offset > before.offset
        if not is_later or (self._is_dense and not self._is_adrift and offset != before.offset + 1):
            message = f"{Flaw.ORDER}: offset {offset}, seq {seq} after offset {before.offset}, seq {before.seq}"
            scan.add_flaw(LineFlaw(line_at, "line.order", message, seq, offset))
            if not is_later:
                return
        if meta.written_at < before.written_at and scan.late is None:
            message = f"written at {meta.written_at}, but the record before it at {before.written_at}"
            scan.late = LineFlaw(line_at, "line.time", message, seq, offset)
        self._is_adrift = False
        self._count([placed])

    def _add_flaw(self, flaw: LineFlaw) -> None:
        self.scan.add_flaw(flaw)
        self._is_adrift = True


def _decode_good(block: bytes, lines: list[bytes]) -> list[_Placed] | None:
    """
    The records of a block in which every line is whole and a record; ``None`` if one is not.

    The decoder sees a row of JSON values and no lines. But after a closing brace at the end of a line, the brace
    that opens the next can only begin another value: as many values as lines are then one a line.
    """
    if {line[-1:] for line in lines} != {b"}"}:
        return None
    try:
        placed = _PLACED.decode_lines(block)
    except ValueError:
        return None
    if len(placed) != len(lines) or not all(map(_has_its_head, lines, placed)):
        return None
    return placed


def _has_its_head(line: bytes, placed: _Placed) -> bool:
    """Whether the line begins with its own checksum, and then with its place in just the form that readers search."""
    return line.startswith(_HEAD % (zlib.crc32(line[CRC_HEAD_BYTES:]), placed.offset, placed.seq))


def _rises(numbers: list[int]) -> bool:
    return all(map(operator.lt, numbers, numbers[1:]))
