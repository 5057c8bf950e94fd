"""
Verify: read every byte of a log, change nothing, and name each place that is not as it was written.

Checked are the lines (checksum, format, the order of offset, seq and write time in each stream), the whole (every
seq up to the last is in exactly one line, or in a segment that was dropped on purpose, or noted as lost by an earlier
repair), the sealed segments (size, SHA-256, the chain of digests), checkpoint, journal, husks and group cursors and,
if asked for, that no event id comes twice and that the index knows each.

Damage is an answer here, never an exception. A log that is being written can be verified: files are looked at in an
order in which a record cannot slip from one not yet read to one read already, and only as far as they reached at
the start. If anything was written meanwhile the report says so, and what that could explain counts as no damage.

Memory: a bit a record, a block of one file, and what the journal holds.
"""

from __future__ import annotations

import hashlib
import heapq
import re
import tempfile
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, Final, Literal, NamedTuple

import msgspec

from tidings.core.ids import seq_in_event_id

from ..errors import WorkspaceError
from ..record import DECODER, Record
from ..segment import CRC_HEAD_BYTES, Flaw, decode, is_whole, split_segment_name
from ..settings import LogSettings
from .checkpoint import CHAIN_START, Checkpoint, Seal, chained
from .disk import Disk, File, read_file
from .index import Index
from .layout import Layout, StreamKey, WorkspaceMeta

__all__ = ["Finding", "Severity", "VerifyProgress", "VerifyReport", "verify"]

Severity = Literal["error", "warning", "info"]

_BLOCK_BYTES: Final = 4 << 20
_PAGE_BITS: Final = 20
_PAGE_SEQS: Final = 1 << _PAGE_BITS
_PAGE_MASK: Final = _PAGE_SEQS - 1
_FLAWS_MAX: Final = 1000
_GAPS_MAX: Final = 100
_RUN_IDS: Final = 500_000
_ID_BYTES: Final = 16
_FRAME: Final = re.compile(rb'\{"crc":"[0-9a-f]{8}","frame":\{')
_ALL_ONES: Final = 0xFF
_HEAD: Final = b'"offset":%d,"seq":%d,"meta":{"written_at":"'


class Finding(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing that was found, and where."""

    severity: Severity
    code: str
    path: str
    message: str
    byte_offset: int = 0
    seq: int | None = None
    topic: str | None = None
    offset: int | None = None
    hint: str | None = None


class VerifyProgress(msgspec.Struct, frozen=True, kw_only=True):
    """How far verifying is; told after every segment."""

    path: str
    segments: int
    segments_total: int
    lines: int
    bytes: int
    bytes_total: int


class VerifyReport(msgspec.Struct, frozen=True, kw_only=True):
    """All that was found, by file and place in it, and how much was looked at."""

    findings: tuple[Finding, ...]
    epoch: str | None
    last_seq: int
    """Up to here the log was checked."""
    segments: int
    lines: int
    """In segments."""
    bytes: int
    """In segments."""
    journal_lines: int
    """Committed records that are not in their segments yet."""
    was_written: bool
    """Whether the log was written to meanwhile; then what came after the start was not checked."""
    chain_heads: dict[str, str]
    """Each stream's last digest. Kept elsewhere, it proves later that nothing before it was altered."""
    omitted: int = 0
    """Findings beyond the limit, counted only."""

    @property
    def is_sound(self) -> bool:
        """Whether nothing is lost or altered."""
        return not any(finding.severity == "error" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain | {"is_sound": self.is_sound}


def verify(
    disk: Disk,
    layout: Layout,
    settings: LogSettings,
    *,
    ids: bool = False,
    index: Index | None = None,
    progress: Callable[[VerifyProgress], None] | None = None,
    findings_max: int = 10_000,
) -> VerifyReport:
    """
    Check a whole log without changing it.

    Args:
        ids: Also look for event ids that come twice; sorts them in a temporary file.
        index: Is asked whether it covers the log and, with ``ids``, whether it knows each id.
        progress: Called after every segment.
        findings_max: How many findings to keep; further ones are counted.

    Raises:
        WorkspaceMissing: There is no log.
        WorkspaceUnusable: It cannot be read.
        UnsupportedFormat: A newer version wrote it.
    """
    check = _Check(disk, layout, settings, index, progress, findings_max)
    with IdRuns() as runs:
        return check.run(runs if ids else None)


# Reading what may be damaged. Repair uses these too.


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


class SeqSet:
    """A set of seqs, one bit each."""

    def __init__(self) -> None:
        self._pages: dict[int, bytearray] = {}

    def add(self, seq: int) -> bool:
        """Put it in; false if it was in already."""
        return not self.add_many((seq,))

    def add_many(self, seqs: Iterable[int]) -> list[int]:
        """Put them in; those that were in already."""
        pages, number, page = self._pages, -1, bytearray()
        twice: list[int] = []
        for seq in seqs:
            if seq >> _PAGE_BITS != number:
                number = seq >> _PAGE_BITS
                page = pages[number] if number in pages else self._new_page(number)
            byte, bit = (seq & _PAGE_MASK) >> 3, 1 << (seq & 7)
            held = page[byte]
            if held & bit:
                twice.append(seq)
            else:
                page[byte] = held | bit
        return twice

    def _new_page(self, number: int) -> bytearray:
        page = self._pages[number] = bytearray(_PAGE_SEQS >> 3)
        return page

    def missing(self, last: int) -> Iterator[tuple[int, int]]:
        """The ranges from 1 to ``last`` that are not in it."""
        start = 1  # of the range that is missing so far
        for number in sorted(self._pages):
            page, base = self._pages[number], number * _PAGE_SEQS
            for at, byte in enumerate(page):
                if byte == _ALL_ONES and start == base + at * 8:
                    start += 8
                    continue
                for seq in _seqs_of(byte, base + at * 8) if byte else ():
                    if seq > last:
                        break
                    if seq > start:
                        yield start, seq - 1
                    start = seq + 1
        if start <= last:
            yield start, last


def _seqs_of(byte: int, base: int) -> list[int]:
    return [base + bit for bit in range(8) if byte >> bit & 1]


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


LineSeen = Callable[[int, str], None]


def scan_segment(
    file: File,
    size: int,
    key: StreamKey,
    before: Tail,
    *,
    is_dense: bool,
    is_adrift: bool = False,
    seqs: SeqSet | None = None,
    seen: LineSeen | None = None,
) -> SegmentScan:
    """
    Check the first ``size`` bytes of a segment line by line.

    Args:
        before: The record that the first line follows.
        is_dense: Whether offsets have no gaps.
        is_adrift: Whether the first line may leave a gap: how many records are gone before it is not known.
        seqs: Takes in the seq of every whole line up to the first flaw.
        seen: Is told seq and event id of each of those.
    """
    walk = _SegmentWalk(key, before, is_dense=is_dense, is_adrift=is_adrift, seqs=seqs, seen=seen)
    digest = hashlib.sha256()
    rest: list[bytes] = []
    for start in range(0, size, _BLOCK_BYTES):
        block = file.read(start, min(_BLOCK_BYTES, size - start))
        digest.update(block)
        rest.append(block)
        if b"\n" in block:
            *lines, last = b"".join(rest).split(b"\n")
            rest = [last]
            walk.take(lines)
    if any(rest):
        walk.scan.add_flaw(LineFlaw(walk.at, "line.unfinished", Flaw.UNFINISHED))
    walk.scan.sha256 = digest.hexdigest()
    return walk.scan


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
        seen: LineSeen | None,
    ) -> None:
        self.scan = SegmentScan(before)
        self.at = 0
        self._key = key
        self._is_dense = is_dense
        self._is_adrift = is_adrift
        self._seqs = seqs
        self._seen = seen

    def take(self, lines: list[bytes]) -> None:
        """Go on with these lines; they are given without their newlines."""
        done = 0
        while done < len(lines):
            if not self._is_adrift:
                done = self._take_good(lines, done)
            if done < len(lines):
                self._take_one(lines[done])
                done += 1

    def _take_good(self, lines: list[bytes], done: int) -> int:
        """
        Take lines from ``done`` on for as long as each is just the one that comes next; how far that was.

        A log is such lines by the million, so this loop does nothing else. What it will not take, ``_take_one``
        looks at again and judges.
        """
        scan, key, at, crc32, parse = self.scan, self._key, self.at, zlib.crc32, _PLACED.decode
        topic, space_id, is_dense, seen = key.topic, key.space_id, self._is_dense, self._seen
        offset, seq, written_at = scan.last
        taken: list[int] = []
        first: Tail | None = None
        for line in lines if not done else lines[done:]:
            if line[:CRC_HEAD_BYTES] != b'{"crc":"%08x",' % crc32(line[CRC_HEAD_BYTES:]):
                break
            try:
                placed = parse(line)
            except msgspec.DecodeError:
                break
            meta, next_offset, next_seq = placed.meta, placed.offset, placed.seq
            if (
                next_seq <= seq
                or (next_offset != offset + 1 if is_dense else next_offset <= offset)
                or meta.topic != topic
                or (space_id is not None and meta.space_id != space_id)
                or meta.written_at < written_at
                or not line.startswith(_HEAD % (next_offset, next_seq), CRC_HEAD_BYTES)
            ):
                break
            offset, seq, written_at = next_offset, next_seq, meta.written_at
            if first is None:
                first = Tail(offset, seq, written_at)
            at += len(line) + 1
            taken.append(seq)
            if meta.partitions:
                for name in meta.partitions:
                    scan.partitions[name] = seq
            if seen is not None and not scan.flaw_count:
                seen(seq, meta.event_id)
        if first is not None:
            self.at = at
            self._count(taken, first, Tail(offset, seq, written_at))
        return done + len(taken)

    def _count(self, taken: list[int], first: Tail, last: Tail) -> None:
        scan = self.scan
        if not scan.lines:
            scan.first = first
        scan.lines += len(taken)
        scan.last = last
        if scan.flaw_count:
            scan.after.extend(taken)
            return
        scan.good_lines += len(taken)
        scan.good_bytes, scan.good_last = self.at, last
        if self._seqs is not None:
            scan.twice += self._seqs.add_many(taken)

    def _take_one(self, line: bytes) -> None:
        """Judge a line that may be anything; afterwards the walk knows again what comes next, if it was one."""
        scan, line_at = self.scan, self.at
        self.at += len(line) + 1
        if not is_whole(line):
            self._add_flaw(LineFlaw(line_at, "line.checksum", Flaw.CHECKSUM))
            return
        try:
            placed = _PLACED.decode(line)
        except msgspec.DecodeError as error:
            self._add_flaw(LineFlaw(line_at, "line.format", f"{Flaw.FORMAT}: {error}"))
            return
        meta, offset, seq = placed.meta, placed.offset, placed.seq
        if not line.startswith(_HEAD % (offset, seq), CRC_HEAD_BYTES):
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
        for name in meta.partitions:
            scan.partitions[name] = seq
        if self._seen is not None and not scan.flaw_count:
            self._seen(seq, meta.event_id)
        place = Tail(offset, seq, meta.written_at)
        self._count([seq], place, place)

    def _add_flaw(self, flaw: LineFlaw) -> None:
        self.scan.add_flaw(flaw)
        self._is_adrift = True


class SealFlaw(NamedTuple):
    """A line of the seals that does not hold."""

    byte_offset: int
    code: str
    message: str


class SealBook:
    """A stream's seals, as far as they can be read."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.seals: dict[int, Seal] = {}
        self.dropped: set[int] = set()
        self.flaws: list[SealFlaw] = []
        self.torn_at: int | None = None
        """Where the last line was torn by a crash: harmless, the segment is sealed again."""
        self.head = CHAIN_START
        at = 0
        while at < len(data):
            line_end = data.find(b"\n", at)
            line = data[at : len(data) if line_end < 0 else line_end]
            is_last = line_end in (-1, len(data) - 1)
            if line_end < 0 or not is_whole(line):
                if is_last:
                    self.torn_at = at
                else:
                    self.flaws.append(SealFlaw(at, "seal.checksum", "a seal's checksum does not match"))
            else:
                self._take(at, line)
            at = len(data) if line_end < 0 else line_end + 1

    def _take(self, at: int, line: bytes) -> None:
        try:
            content = msgspec.json.decode(line, type=dict[str, Any])
            if "dropped" in content:
                self.dropped.add(int(content["dropped"]))
                return
            seal = msgspec.convert(content, Seal)
        except (msgspec.DecodeError, ValueError, TypeError) as error:
            self.flaws.append(SealFlaw(at, "seal.format", f"a line passes its checksum but is no seal: {error}"))
            return
        if seal.segment in self.seals or seal.segment < max(self.seals, default=0):
            self.flaws.append(SealFlaw(at, "seal.order", f"segment {seal.segment} is sealed again, or too late"))
            return
        if seal.chain != chained(self.head, seal.sha256):
            message = f"the chain of digests breaks at segment {seal.segment}"
            self.flaws.append(SealFlaw(at, "seal.chain", message))
        self.head = seal.chain  # as recorded, so that one break is told once
        self.seals[seal.segment] = seal

    @property
    def last(self) -> int:
        """The number of the last sealed segment."""
        return max(self.seals, default=0)


class JournalLine(NamedTuple):
    """A committed line in the journal."""

    seq: int
    offset: int
    key: StreamKey
    data: bytes
    path: Path
    byte_offset: int


class JournalView:
    """The journal's lines that an intact frame head vouches for, and what they prove."""

    def __init__(self) -> None:
        self.lines: dict[int, JournalLine] = {}
        self.frames: list[tuple[int, int]] = []
        """First and last seq of each whole frame."""
        self.durable = 0
        """The highest seq that a frame says was on disk."""
        self.flaw: tuple[Path, int] | None = None
        self.crcs: dict[str, int] = {}

    def follow(self, last_seq: int) -> int:
        """How far whole frames lead without a gap, from ``last_seq`` on."""
        for first, last in sorted(self.frames):
            if first > last_seq + 1:
                break
            last_seq = max(last_seq, last)
        return last_seq


class _FrameHead(msgspec.Struct):
    first: int
    last: int
    bytes: int
    durable: int


class _Frame(msgspec.Struct):
    frame: _FrameHead


def read_journal(disk: Disk, layout: Layout, *, is_flat: bool, keeps_data: bool) -> JournalView:
    """
    Read what can be read of the journal.

    A line counts only below an intact frame head: a commit that found no room may leave whole lines behind,
    whose seqs were given out again; but its head was wiped out.
    """
    view = JournalView()
    for name in disk.names(layout.journal):
        if name.endswith(".jsonl"):
            path = layout.journal / name
            data = (read_file(disk, path) or b"").rstrip(b"\0")
            view.crcs[name] = zlib.crc32(data)
            _read_journal_file(view, path, data, is_flat, keeps_data)
    return view


def _read_journal_file(view: JournalView, path: Path, data: bytes, is_flat: bool, keeps_data: bool) -> None:
    at = 0
    while at < len(data):
        found = _FRAME.search(data, at)
        if found is None:
            if data[at:].strip(b"\0"):
                view.flaw = view.flaw or (path, at)
            return
        head_end = data.find(b"\n", found.start())
        line = data[found.start() : head_end] if head_end >= 0 else b""
        if data[at : found.start()].strip(b"\0") or not is_whole(line):
            view.flaw = view.flaw or (path, at if data[at : found.start()].strip(b"\0") else found.start())
        if not is_whole(line):
            at = found.end()
            continue
        frame = msgspec.json.decode(line, type=_Frame).frame
        view.durable = max(view.durable, frame.durable)
        body_end = head_end + 1 + frame.bytes
        count = 0
        at, end = head_end + 1, min(body_end, len(data))
        while at < end:
            line_end = data.find(b"\n", at, end)
            body = data[at : end if line_end < 0 else line_end]
            nested = _FRAME.search(body)
            if nested is not None:  # the next frame begins within this one: a leftover that was written over
                at += nested.start()
                break
            record = decode(body) if line_end >= 0 else Flaw.UNFINISHED
            if isinstance(record, Record) and frame.first <= record.seq <= frame.last:
                key = StreamKey(record.topic, None if is_flat else record.meta.space_id)
                kept = data[at : line_end + 1] if keeps_data else b""
                view.lines[record.seq] = JournalLine(record.seq, record.offset, key, kept, path, at)
                count += record.seq == frame.first + count
            elif view.flaw is None:
                view.flaw = (path, at)
            at = end if line_end < 0 else line_end + 1
        if count == frame.last - frame.first + 1 and body_end <= len(data):
            view.frames.append((frame.first, frame.last))


class Loss(msgspec.Struct, frozen=True):
    """What an earlier repair noted as lost; the part of its manifest that explains gaps."""

    lost: tuple[tuple[int, int], ...] = ()
    hidden: int = 0
    """Lost records whose seqs lie among those of dropped segments."""
    epoch: str | None = None
    """The epoch that the repair ended."""


def read_losses(disk: Disk, layout: Layout, epoch: str | None) -> tuple[list[Loss], list[Path]]:
    """
    The losses that earlier repairs noted, and the manifests that cannot be read.

    A repair ends the epoch before it takes anything away. A manifest of the present ``epoch`` is of one that was
    interrupted before that: it explains nothing.
    """
    losses: list[Loss] = []
    damaged: list[Path] = []
    for name in disk.names(layout.aside):
        path = layout.aside / name / "manifest.json"
        data = read_file(disk, path)
        if data is None:
            continue  # a repair that was interrupted before it changed anything
        try:
            loss = msgspec.json.decode(data, type=Loss)
        except msgspec.DecodeError:
            damaged.append(path)
            continue
        if loss.epoch != epoch:
            losses.append(loss)
    return losses, damaged


class Gaps(NamedTuple):
    """Seqs that no line has."""

    unexplained: list[tuple[int, int]]
    hidden: int
    """How many more are missing among the dropped segments than those held."""


def find_gaps(seqs: SeqSet, last_seq: int, dropped: Iterable[Seal], losses: Iterable[Loss]) -> Gaps:
    """
    The seqs up to ``last_seq`` that are in no line, but for those that drops and earlier losses explain.

    A seal says between which seqs its records were and how many, not which: within such a range the missing can
    only be counted.
    """
    seals, known = list(dropped), list(losses)
    lost = _merged((first, last) for loss in known for first, last in loss.lost)
    ranges = _merged((seal.first_seq, seal.last_seq) for seal in seals)
    unexplained: list[tuple[int, int]] = []
    among_drops = 0
    for gap in seqs.missing(last_seq):
        for part in _without(gap, lost):
            outside = list(_without(part, ranges))
            unexplained += outside
            among_drops += _count([part]) - _count(outside)
    allowed = sum(seal.lines for seal in seals) + sum(loss.hidden for loss in known)
    return Gaps(unexplained, max(0, among_drops - allowed))


def _count(ranges: Iterable[tuple[int, int]]) -> int:
    return sum(last - first + 1 for first, last in ranges)


def _merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return merged


def _without(part: tuple[int, int], ranges: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    start, end = part
    for first, last in ranges:
        if last < start:
            continue
        if first > end:
            break
        if first > start:
            yield start, first - 1
        start = last + 1
    if start <= end:
        yield start, end


class IdRuns:
    """Finds ids that come twice: digests in sorted runs in a temporary file, merged at the end."""

    def __init__(self) -> None:
        self._file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by __exit__
        self._runs: list[tuple[int, int]] = []
        self._fresh: list[bytes] = []

    def __enter__(self) -> IdRuns:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, seq: int, event_id: str) -> None:
        """Take in one id."""
        digest = hashlib.blake2b(event_id.encode("utf-8", "surrogatepass"), digest_size=_ID_BYTES).digest()
        self._fresh.append(digest + seq.to_bytes(8, "big"))
        if len(self._fresh) >= _RUN_IDS:
            self._spill()

    def _spill(self) -> None:
        self._fresh.sort()
        start = self._file.seek(0, 2)
        self._file.write(b"".join(self._fresh))
        self._runs.append((start, len(self._fresh)))
        self._fresh = []

    def _run(self, start: int, count: int) -> Iterator[bytes]:
        width, block = _ID_BYTES + 8, 4096
        for at in range(0, count, block):
            self._file.seek(start + at * width)
            data = self._file.read(min(block, count - at) * width)
            yield from (data[i : i + width] for i in range(0, len(data), width))

    def twice(self) -> Iterator[tuple[int, int]]:
        """Pairs of seqs with the same id."""
        self._fresh.sort()
        before = b""
        for entry in heapq.merge(self._fresh, *(self._run(*run) for run in self._runs)):
            if entry[:_ID_BYTES] == before[:_ID_BYTES]:
                yield int.from_bytes(before[_ID_BYTES:], "big"), int.from_bytes(entry[_ID_BYTES:], "big")
            before = entry


class _Cursor(msgspec.Struct):
    committed: int


def read_cursors(disk: Disk, layout: Layout) -> dict[str, int | None]:
    """Each group cursor's last acknowledged offset by file name; ``None`` where it cannot be read."""
    found: dict[str, int | None] = {}
    for name in disk.names(layout.offsets):
        if name.endswith(".json") and "__" in name:
            try:
                data = read_file(disk, layout.offsets / name) or b""
                found[name] = msgspec.json.decode(data, type=_Cursor).committed
            except msgspec.DecodeError:
                found[name] = None
    return found


def topic_of_cursor(name: str) -> str:
    """The topic in a cursor's file name; a topic may begin with underscores."""
    body = name.removesuffix(".json")
    start = len(body) - len(body.lstrip("_"))
    return body[:start] + body[start:].partition("__")[0]


def read_checkpoint(disk: Disk, layout: Layout) -> tuple[bytes | None, Checkpoint | None]:
    """The checkpoint's bytes, and what they say if they are whole."""
    data = read_file(disk, layout.checkpoint)
    if data is None or not data.endswith(b"\n") or not is_whole(data[:-1]):
        return data, None
    try:
        return data, msgspec.json.decode(data, type=Checkpoint)
    except msgspec.DecodeError:
        return data, None


def read_meta(disk: Disk, layout: Layout) -> WorkspaceMeta | str:
    """
    The workspace's description, or what is wrong with it.

    Raises:
        WorkspaceMissing, WorkspaceUnusable, UnsupportedFormat
    """
    try:
        return layout.read_meta(disk)
    except WorkspaceError as error:
        if type(error) is not WorkspaceError:
            raise
        return error.problem


def segment_sizes(disk: Disk, layout: Layout) -> dict[StreamKey, dict[int, int]]:
    """How long each segment is, by stream and number."""
    sizes: dict[StreamKey, dict[int, int]] = {}
    for key, numbers in layout.segments(disk).items():
        for number in numbers:
            size = size_of(disk, layout.segment(key, number))
            if size is not None:
                sizes.setdefault(key, {})[number] = size
    return sizes


def size_of(disk: Disk, path: Path) -> int | None:
    """A file's length; ``None`` if there is none."""
    try:
        file = disk.open(path)
    except FileNotFoundError:
        return None
    try:
        return file.size()
    finally:
        file.close()


def read_seals(disk: Disk, layout: Layout, key: StreamKey) -> SealBook:
    """A stream's seals, as far as they can be read."""
    return SealBook(read_file(disk, layout.seal_file(key)) or b"")


def seal_agrees(seal: Seal, scan: SegmentScan) -> bool:
    """Whether the seal describes what the segment holds."""
    first = Tail(seal.first_offset, seal.first_seq, seal.first_written_at)
    last = Tail(seal.last_offset, seal.last_seq, seal.last_written_at)
    return (first, last, seal.lines, seal.partitions) == (scan.first, scan.last, scan.lines, scan.partitions)


def husk_flaws(data: bytes, key: StreamKey) -> Iterator[tuple[int, bytes, str | None]]:
    """Each line of a husk file: where it is, its bytes, and what is wrong with it."""
    at, seq = 0, 0
    for line in data.splitlines(keepends=True):
        husk = decode(line.rstrip(b"\n"))
        if not line.endswith(b"\n"):
            yield at, line, Flaw.UNFINISHED
        elif isinstance(husk, Flaw):
            yield at, line, husk
        elif husk.topic != key.topic or husk.seq <= seq:
            yield at, line, Flaw.ORDER
        else:
            seq = husk.seq
            yield at, line, None
        at += len(line)


# The check itself.


class _Snapshot(NamedTuple):
    """The log's files at one moment, read in the order that records travel in."""

    checkpoint_data: bytes | None
    checkpoint: Checkpoint | None
    journal: JournalView
    sizes: dict[StreamKey, dict[int, int]]
    seals: dict[StreamKey, SealBook]

    @property
    def marks(self) -> tuple[object, ...]:
        """What differs if anything was written between two snapshots."""
        seals = {key: zlib.crc32(book.data) for key, book in self.seals.items()}
        return self.checkpoint_data, self.journal.crcs, self.sizes, seals


def _take_snapshot(disk: Disk, layout: Layout, *, is_flat: bool) -> _Snapshot:
    # A record goes from the journal to a segment and is sealed there. Read in that order, one that moves
    # meanwhile is seen twice at worst.
    data, checkpoint = read_checkpoint(disk, layout)
    journal = read_journal(disk, layout, is_flat=is_flat, keeps_data=False)
    sizes = segment_sizes(disk, layout)
    keys = {*sizes, *layout.sealed_streams(disk)}
    return _Snapshot(data, checkpoint, journal, sizes, {key: read_seals(disk, layout, key) for key in keys})


class _Check:
    def __init__(
        self,
        disk: Disk,
        layout: Layout,
        settings: LogSettings,
        index: Index | None,
        progress: Callable[[VerifyProgress], None] | None,
        findings_max: int,
    ) -> None:
        self._disk = disk
        self._layout = layout
        self._settings = settings
        self._index = index
        self._covers = index.covers if index is not None else 0
        self._progress = progress
        self._findings_max = findings_max
        self._found: list[tuple[Finding, bool]] = []
        """With each: whether a writer at work would explain it."""
        self._omitted = 0
        self._seqs = SeqSet()
        self._tails: dict[StreamKey, Tail] = {}
        self._dropped: list[Seal] = []
        self._seen_seq = 0
        """The highest seq behind a tear: it was committed, so the journal must lead at least there."""
        self._runs: IdRuns | None = None
        self._segments = self._lines = self._bytes = 0
        self._segments_total = self._bytes_total = 0

    def run(self, runs: IdRuns | None) -> VerifyReport:
        disk, layout = self._disk, self._layout
        self._runs = runs
        meta = read_meta(disk, layout)
        if isinstance(meta, str):
            self._note("error", "meta.damaged", layout.meta, meta, hint="repair gives the log a new epoch")
        self._epoch = None if isinstance(meta, str) else meta.epoch
        self._is_flat = (self._settings.layout if isinstance(meta, str) else meta.layout) == "flat"
        cursors = read_cursors(disk, layout)  # before the log: a group may acknowledge what comes meanwhile
        self._start = _take_snapshot(disk, layout, is_flat=self._is_flat)
        self._segments_total = sum(map(len, self._start.sizes.values()))
        self._bytes_total = sum(sum(sizes.values()) for sizes in self._start.sizes.values())
        self._check_checkpoint()
        for key in sorted({*self._start.sizes, *self._start.seals}, key=lambda key: key.path):
            self._check_stream(key)
        last_seq, pending = self._check_journal()
        self._check_husks()
        self._check_cursors(cursors)
        self._check_whole(last_seq)
        self._check_index(last_seq)
        self._check_names()
        was_written = _take_snapshot(disk, layout, is_flat=self._is_flat).marks != self._start.marks
        return VerifyReport(
            findings=tuple(self._settled(was_written)),
            epoch=self._epoch,
            last_seq=last_seq,
            segments=self._segments,
            lines=self._lines,
            bytes=self._bytes,
            journal_lines=pending,
            was_written=was_written,
            chain_heads={key.path: book.head for key, book in self._start.seals.items() if book.seals},
            omitted=self._omitted,
        )

    def _note(
        self,
        severity: Severity,
        code: str,
        path: Path,
        message: str,
        at: int = 0,
        *,
        seq: int | None = None,
        topic: str | None = None,
        offset: int | None = None,
        hint: str | None = None,
        if_written: bool = False,
    ) -> None:
        if len(self._found) >= self._findings_max:
            self._omitted += 1
            return
        finding = Finding(
            severity=severity,
            code=code,
            path=str(path.relative_to(self._layout.workspace)),
            message=message,
            byte_offset=at,
            seq=seq,
            topic=topic,
            offset=offset,
            hint=hint,
        )
        self._found.append((finding, if_written))

    def _settled(self, was_written: bool) -> list[Finding]:
        findings: list[Finding] = []
        for finding, if_written in self._found:
            if if_written and was_written:
                message = f"{finding.message} (the log was being written: verify again, or when it is closed)"
                findings.append(msgspec.structs.replace(finding, severity="info", message=message))
            else:
                findings.append(finding)
        return sorted(findings, key=lambda finding: (finding.path, finding.byte_offset))

    def _check_checkpoint(self) -> None:
        if self._start.checkpoint_data is not None and self._start.checkpoint is None:
            hint = "opening the log writes a new one; until then a lost tail is harder to tell from a torn one"
            self._note(
                "warning", "checkpoint.damaged", self._layout.checkpoint, "its checksum does not match", hint=hint
            )
        if self._start.checkpoint is not None:
            known = {key.path for key in {*self._start.sizes, *self._start.seals}}
            for name, mark in self._start.checkpoint.streams.items():
                if name not in known and mark.bytes:
                    path = self._layout.wal / f"{name}.{mark.segment:08d}.jsonl"
                    self._note("error", "segment.missing", path, f"the segment is missing; it had {mark.bytes} bytes")

    def _check_stream(self, key: StreamKey) -> None:
        book, sizes = self._start.seals[key], self._start.sizes.get(key, {})
        seal_file = self._layout.seal_file(key)
        for flaw in book.flaws:
            self._note("error", flaw.code, seal_file, flaw.message, flaw.byte_offset, topic=key.topic)
        if book.torn_at is not None:
            message = "the last seal was torn by a crash; opening the log writes it again"
            # A line torn off was never the only word on a segment: without its seal the segment counts as open.
            self._note("info", "seal.torn", seal_file, message, book.torn_at, topic=key.topic)
        tail, expected = Tail(), 1
        for number in sorted({*book.seals, *sizes}):
            seal, path = book.seals.get(number), self._layout.segment(key, number)
            if number > expected:
                self._note_missing(key, expected, book)
            expected = number + 1
            if number in book.dropped:
                if seal is not None:
                    tail = Tail(seal.last_offset, seal.last_seq, seal.last_written_at)
                    self._dropped.append(seal)
                if number in sizes:
                    message = "the segment was dropped and its file is still here; opening the log removes it"
                    self._note("info", "segment.leftover", path, message, topic=key.topic, if_written=True)
            elif seal is not None:
                tail = self._check_sealed(key, seal, tail)
            else:
                if number < book.last:
                    self._note("error", "seal.missing", seal_file, f"segment {number} has no seal", topic=key.topic)
                tail, is_over = self._check_open(key, number, sizes[number], tail, is_last=number == max(sizes))
                if is_over:
                    break
        self._check_mark(key, book, sizes)
        self._tails[key] = tail

    def _note_missing(self, key: StreamKey, number: int, book: SealBook) -> None:
        if number in book.dropped and not book.flaws:
            return
        path = self._layout.segment(key, number)
        self._note("error", "segment.missing", path, "neither the segment nor its seal is here", topic=key.topic)

    def _check_mark(self, key: StreamKey, book: SealBook, sizes: dict[int, int]) -> None:
        mark = self._start.checkpoint.streams.get(key.path) if self._start.checkpoint is not None else None
        if mark is None or not mark.bytes or mark.segment <= book.last:
            return
        path, size = self._layout.segment(key, mark.segment), sizes.get(mark.segment)
        if size is None:
            self._note(
                "error", "segment.missing", path, f"the segment is missing; it had {mark.bytes} bytes", topic=key.topic
            )
        elif size < mark.bytes:
            message = f"the data ends, but {mark.bytes} bytes were on disk at the last checkpoint"
            self._note("error", "segment.short", path, message, size, topic=key.topic)

    def _check_sealed(self, key: StreamKey, seal: Seal, before: Tail) -> Tail:
        path = self._layout.segment(key, seal.segment)
        end = Tail(seal.last_offset, seal.last_seq, seal.last_written_at)
        size = size_of(self._disk, path)
        if size is None:
            if seal.segment in read_seals(self._disk, self._layout, key).dropped:  # meanwhile, by a writer at work
                self._dropped.append(seal)
            else:
                message = f"the sealed segment is missing, with {seal.lines} records from offset {seal.first_offset}"
                self._note("error", "segment.missing", path, message, seq=seal.first_seq, topic=key.topic)
            return end
        if size != seal.bytes:
            message = f"the sealed segment has {size} bytes; it was sealed with {seal.bytes}"
            self._note("error", "segment.size", path, message, min(size, seal.bytes), topic=key.topic)
        scan = self._scan(key, path, min(size, seal.bytes), before)
        for seq in scan.after:
            self._mark(seq, path)
        self._note_flaws(key, path, scan)
        if scan.sha256 != seal.sha256:
            at = scan.flaws[0].byte_offset if scan.flaws else 0
            message = f"segment {seal.segment} is not what was sealed: its SHA-256 does not match its seal"
            self._note("error", "segment.digest", path, message, at, seq=seal.first_seq, topic=key.topic)
        elif not scan.flaw_count and not seal_agrees(seal, scan):
            message = f"the seal of segment {seal.segment} does not describe it"
            self._note("error", "seal.bounds", self._layout.seal_file(key), message, topic=key.topic)
        return end

    def _check_open(self, key: StreamKey, number: int, size: int, before: Tail, *, is_last: bool) -> tuple[Tail, bool]:
        """Check a segment without a seal; whether what comes after it is for recovery to write again."""
        path = self._layout.segment(key, number)
        scan = self._scan(key, path, size, before)
        if not scan.flaw_count:
            self._note_flaws(key, path, scan)
            return scan.last, False
        mark = self._start.checkpoint.streams.get(key.path) if self._start.checkpoint is not None else None
        synced = 0 if mark is None or number > mark.segment else (mark.bytes if number == mark.segment else size)
        if scan.good_bytes >= synced and self._is_in_journal(key, scan.good_last):
            message = "the segment ends torn; the journal holds what belongs there, and opening the log writes it"
            at = scan.good_bytes
            self._seen_seq = max([self._seen_seq, *scan.after])
            self._note("info", "segment.torn", path, message, at, seq=scan.good_last.seq + 1, topic=key.topic)
            return scan.good_last, True
        for seq in scan.after:
            self._mark(seq, path)
        is_growing = is_last and scan.flaw_count == 1 and scan.flaws[0].code == "line.unfinished"
        self._note_flaws(key, path, scan, if_written=is_growing)
        return scan.last, False

    def _is_in_journal(self, key: StreamKey, tail: Tail) -> bool:
        lines = self._start.journal.lines.values()
        return any(
            line.key == key and line.seq > tail.seq and (not self._is_flat or line.offset == tail.offset + 1)
            for line in lines
        )

    def _scan(self, key: StreamKey, path: Path, size: int, before: Tail) -> SegmentScan:
        def seen(seq: int, event_id: str) -> None:
            self._take_id(seq, event_id, path)

        try:
            file = self._disk.open(path)
        except FileNotFoundError:  # dropped a moment ago
            self._note("error", "segment.missing", path, "the segment went away", topic=key.topic, if_written=True)
            return SegmentScan(before)
        try:
            scan = scan_segment(
                file,
                size,
                key,
                before,
                is_dense=self._is_flat,
                seqs=self._seqs,
                seen=None if self._runs is None else seen,
            )
        finally:
            file.close()
        for seq in scan.twice:
            self._note_twice(seq, path)
        self._segments += 1
        self._lines += scan.lines
        self._bytes += size
        if self._progress is not None:
            self._progress(
                VerifyProgress(
                    path=str(path.relative_to(self._layout.workspace)),
                    segments=self._segments,
                    segments_total=self._segments_total,
                    lines=self._lines,
                    bytes=self._bytes,
                    bytes_total=self._bytes_total,
                )
            )
        return scan

    def _mark(self, seq: int, path: Path) -> None:
        if not self._seqs.add(seq):
            self._note_twice(seq, path)

    def _note_twice(self, seq: int, path: Path) -> None:
        self._note("error", "seq.twice", path, f"another line has seq {seq} too", seq=seq)

    def _take_id(self, seq: int, event_id: str, path: Path) -> None:
        if seq_in_event_id(event_id) == seq:
            return  # made by the log from the seq: as unique as that, and found without the index
        assert self._runs is not None
        self._runs.add(seq, event_id)
        index = self._index
        if index is not None and seq <= self._covers and all(place.seq != seq for place in index.find_id(event_id)):
            hint = "remove the folder index/ while the log is closed: it is built again"
            message = f"the index does not know the event id of seq {seq}: a repeat of it would be stored"
            self._note("warning", "index.unknown_id", path, message, seq=seq, hint=hint)

    def _note_flaws(self, key: StreamKey, path: Path, scan: SegmentScan, *, if_written: bool = False) -> None:
        for flaw in scan.flaws:
            at, code, message, seq, offset = flaw
            self._note("error", code, path, message, at, seq=seq, topic=key.topic, offset=offset, if_written=if_written)
        self._omitted += scan.flaw_count - len(scan.flaws)
        if scan.late is not None:
            at, code, message, seq, offset = scan.late
            self._note("warning", code, path, message, at, seq=seq, topic=key.topic, offset=offset)

    def _check_journal(self) -> tuple[int, int]:
        """Count in what only the journal has; the last seq of the log, and how many those are."""
        journal, checkpoint = self._start.journal, self._start.checkpoint
        in_segments = max([checkpoint.seq if checkpoint else 0, *(tail.seq for tail in self._tails.values())])
        last_seq, pending = journal.follow(in_segments), 0
        for seq in sorted(journal.lines):
            line = journal.lines[seq]
            tail = self._tails.get(line.key, Tail())
            if seq <= tail.seq or seq > last_seq:
                continue
            if self._is_flat and line.offset != tail.offset + 1:
                message = f"topic {line.key.topic!r} continues with offset {line.offset}; {tail.offset + 1} is nowhere"
                self._note(
                    "error", "journal.order", line.path, message, line.byte_offset, seq=seq, topic=line.key.topic,
                    offset=line.offset, if_written=True,
                )  # fmt: skip
            self._tails[line.key] = Tail(line.offset, seq)
            if self._seqs.add(seq):
                pending += 1
        acknowledged = max(journal.durable, self._seen_seq)
        if acknowledged > last_seq:
            path, at = journal.flaw or (self._layout.journal, 0)
            message = f"damaged, but the records up to seq {acknowledged} were acknowledged"
            self._note("error", "journal.lost", path, message, at, seq=last_seq + 1, if_written=True)
        return last_seq, pending

    def _check_husks(self) -> None:
        for key, numbers in self._layout.id_files(self._disk).items():
            for number in numbers:
                path = self._layout.id_file(key, number)
                data = read_file(self._disk, path) or b""
                for at, line, flaw in husk_flaws(data, key):
                    if flaw is not None:
                        hint = "repair takes the line out; the id in it is forgotten"
                        self._note("error", "husk.damaged", path, flaw, at, topic=key.topic, hint=hint)
                    elif self._runs is not None:
                        husk = DECODER.decode(line)
                        if number in self._start.seals.get(key, SealBook(b"")).dropped:
                            self._runs.add(husk.seq, husk.meta.event_id)

    def _check_cursors(self, cursors: dict[str, int | None]) -> None:
        for name, committed in cursors.items():
            path, topic = self._layout.offsets / name, topic_of_cursor(name)
            if committed is None:
                hint = "the group goes on from its backup"
                self._note("warning", "cursor.damaged", path, "the cursor cannot be read", topic=topic, hint=hint)
                continue
            end = max((tail.offset for key, tail in self._tails.items() if key.topic == topic), default=-1)
            if committed > end:
                message = f"the group has acknowledged offset {committed}, but the topic ends at {end}"
                self._note("error", "cursor.ahead", path, message, topic=topic, offset=committed)

    def _check_whole(self, last_seq: int) -> None:
        losses, damaged = read_losses(self._disk, self._layout, self._epoch)
        for path in damaged:
            self._note("warning", "aside.damaged", path, "the manifest of an earlier repair cannot be read")
        checkpoint = self._start.checkpoint
        known = self._start.journal.follow(checkpoint.seq if checkpoint else 0)
        gaps = find_gaps(self._seqs, last_seq, self._dropped, losses)
        for first, last in gaps.unexplained[:_GAPS_MAX]:
            what = f"seq {first} is" if first == last else f"the {last - first + 1} seqs from {first} to {last} are"
            self._note(
                "error", "seq.gap", self._layout.wal, f"{what} in no line, and nothing says why",
                seq=first, if_written=last > known,
            )  # fmt: skip
        self._omitted += max(0, len(gaps.unexplained) - _GAPS_MAX)
        if gaps.hidden:
            message = f"{gaps.hidden} more records are missing than the dropped segments held"
            self._note("error", "seq.count", self._layout.wal, message, if_written=True)
        if self._runs is not None:
            for first, second in self._runs.twice():
                message = f"the records at seq {first} and seq {second} have the same event id"
                self._note("error", "id.twice", self._layout.wal, message, seq=second)

    def _check_index(self, last_seq: int) -> None:
        if self._index is None or self._covers == last_seq:
            return
        message = f"the index covers seq {self._covers} of {last_seq}; opening the log brings it up to date"
        severity: Severity = "warning" if self._covers > last_seq else "info"
        self._note(severity, "index.covers", self._layout.index, message, seq=self._covers, if_written=True)

    def _check_names(self) -> None:
        for folder in (self._layout.wal, self._layout.ids):
            for name in self._disk.names(folder):
                if name.endswith(".jsonl") and split_segment_name(name) is None:
                    message = "the file's name is not a segment's: nothing reads it"
                    self._note("warning", "file.foreign", folder / name, message)
