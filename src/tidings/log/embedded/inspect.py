"""
The one reader of a log's files: it reads what can be read, and reports what it met.

A report holds the good content and the problems, each with its place. What a problem means is for others to decide:
recovery stops at the first that concerns it, verify lists them all, repair plans by them.

A log is good lines by the million. So whole blocks of a segment are checked at once, each property over all lines; a
block in which anything is out of the ordinary is gone over again line by line.
"""

from __future__ import annotations

import hashlib
import operator
import re
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from ..errors import CorruptLog, WorkspaceError
from ..record import Record
from ..segment import CRC_HEAD_BYTES, Flaw, Head, decode, is_whole
from .checkpoint import CHAIN_START, Checkpoint, Seal, StreamMark, chained
from .cursors import CursorFile, GroupFiles
from .disk import Disk, File, read_file, size_of
from .layout import Layout, StreamKey, WorkspaceMeta

START: Final = Head(-1, 0, "")
"""What the first record of a stream follows."""
_BLOCK_BYTES: Final = 256 << 10
"""Read and checked in one go. What a block decodes to takes several times its size; larger ones are hardly faster."""
_PROBLEMS_MAX: Final = 1000
_LINE_START: Final = b'{"crc":"%08x","offset":%d,"seq":%d,"meta":{"written_at":"'
_FRAME: Final = re.compile(
    rb'\{"crc":"[0-9a-f]{8}","frame":\{"first":([0-9]+),"last":([0-9]+),"bytes":([0-9]+),"durable":([0-9]+)\}\}'
)
_FRAME_HEAD_BYTES_MAX: Final = 256


class FileProblem(NamedTuple):
    """A place in a file that is not as it was written."""

    path: Path
    byte_offset: int
    code: str
    message: str
    seq: int | None = None
    offset: int | None = None

    def as_error(self) -> CorruptLog:
        """The problem as the error that refuses to open the log."""
        return CorruptLog(self.path, self.byte_offset, self.message, self.seq)


# Small files


def read_meta(disk: Disk, layout: Layout) -> WorkspaceMeta | FileProblem:
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
        return FileProblem(layout.meta, 0, "meta.damaged", error.problem)


class CheckpointReport(NamedTuple):
    """The checkpoint's bytes, and what they say if they are whole."""

    data: bytes | None
    checkpoint: Checkpoint | None

    @property
    def seq(self) -> int:
        """Up to here everything is in the segments and on disk; 0 if nothing says so."""
        return 0 if self.checkpoint is None else self.checkpoint.seq

    @property
    def streams(self) -> dict[str, StreamMark]:
        """How much of each stream was on disk."""
        return {} if self.checkpoint is None else self.checkpoint.streams

    def synced_bytes(self, key: StreamKey, number: int, size: int) -> int:
        """How many bytes of an open segment, which is ``size`` long, are known to be on disk."""
        mark = self.streams.get(key.path)
        if mark is None or number > mark.segment:
            return 0
        return mark.bytes if number == mark.segment else size


def read_checkpoint(disk: Disk, layout: Layout) -> CheckpointReport:
    """
    The last checkpoint.

    A damaged one counts as none. Recovery then does not know less, it only reads more.
    """
    data = read_file(disk, layout.checkpoint)
    if data is None or not data.endswith(b"\n") or not is_whole(data[:-1]):
        return CheckpointReport(data, None)
    try:
        return CheckpointReport(data, msgspec.json.decode(data, type=Checkpoint))
    except ValueError:
        return CheckpointReport(data, None)


def segment_sizes(disk: Disk, layout: Layout) -> dict[StreamKey, dict[int, int]]:
    """How long each segment is, by stream and number."""
    sizes: dict[StreamKey, dict[int, int]] = {}
    for key, numbers in layout.segments(disk).items():
        for number in numbers:
            size = size_of(disk, layout.segment(key, number))
            if size is not None:
                sizes.setdefault(key, {})[number] = size
    return sizes


def read_tombstones(
    disk: Disk, layout: Layout, key: StreamKey, number: int
) -> Iterator[tuple[bytes, Record | FileProblem]]:
    """The lines of a file of dedupe tombstones: each one's bytes, and the tombstone or what is wrong with it."""
    path = layout.id_file(key, number)
    at, seq = 0, 0
    for line in (read_file(disk, path) or b"").splitlines(keepends=True):
        found = decode(line.rstrip(b"\n")) if line.endswith(b"\n") else Flaw.UNFINISHED
        if isinstance(found, Record) and (found.topic != key.topic or found.seq <= seq):
            found = Flaw.ORDER
        if isinstance(found, Flaw):
            yield line, FileProblem(path, at, "tombstone.damaged", found)
        else:
            seq = found.seq
            yield line, found
        at += len(line)


def cursors_ahead(
    groups: Iterable[GroupFiles], ends: dict[StreamKey, Head], epoch: str | None
) -> Iterator[tuple[CursorFile, FileProblem]]:
    """The cursors that are ahead of their topics: a group cannot have acknowledged what was never committed."""
    topic_ends: dict[str, int] = {}
    for key, head in ends.items():
        topic_ends[key.topic] = max(topic_ends.get(key.topic, -1), head.offset)
    for files in groups:
        end = topic_ends.get(files.topic, -1)
        for cursor in files.found:
            if cursor.stored is not None and cursor.is_ahead(end, epoch):
                highest = cursor.stored.highest
                message = f"the group has acknowledged offset {highest}, but the topic ends at {end}"
                yield cursor, FileProblem(cursor.path, 0, "cursor.ahead", message, offset=highest)


# Seals

_SEAL_BLOCK_BYTES: Final = 1 << 20


class SealReport:
    """A stream's seals."""

    def __init__(self, path: Path, data: bytes) -> None:
        self.path = path
        self.crc = zlib.crc32(data)
        self.seals: dict[int, Seal] = {}
        """By segment, in order."""
        self.last = 0
        """The number of the last sealed segment."""
        self.dropped: set[int] = set()
        self.problems: list[FileProblem] = []
        self.torn_at: int | None = None
        """Where the last line was torn by a crash: harmless, its segment is sealed again."""
        self.head: str = CHAIN_START
        """The last digest of the chain."""
        at = 0
        while at < len(data):
            line_end = data.find(b"\n", at)
            line = data[at : len(data) if line_end < 0 else line_end]
            if line_end >= 0 and is_whole(line):
                self._add(at, line)
            elif line_end in (-1, len(data) - 1):
                self.torn_at = at
            else:
                self._note(at, "seal.checksum", "a seal's checksum does not match")
            at = len(data) if line_end < 0 else line_end + 1

    def _add(self, at: int, line: bytes) -> None:
        try:
            seal = parse_seal_line(line)
        except (ValueError, TypeError) as error:
            self._note(at, "seal.format", f"a line passes its checksum but is no seal: {error}")
            return
        if isinstance(seal, int):
            self.dropped.add(seal)
            return
        if seal.segment <= self.last:
            self._note(at, "seal.order", f"segment {seal.segment} is sealed again, or too late")
            return
        if seal.chain != chained(self.head, seal.sha256):
            self._note(at, "seal.chain", f"the chain of digests breaks at segment {seal.segment}")
        self.head = seal.chain  # as recorded, so that one break is reported once
        self.seals[seal.segment] = seal
        self.last = seal.segment

    def _note(self, at: int, code: str, message: str) -> None:
        self.problems.append(FileProblem(self.path, at, code, message))

    def checked(self) -> SealReport:
        """
        The same, if it has no problem.

        Raises:
            CorruptLog: The first problem.
        """
        if self.problems:
            raise self.problems[0].as_error()
        return self


def parse_seal_line(line: bytes) -> Seal | int:
    """
    A line of a stream's seals: a seal, or the number of a segment that was dropped.

    Raises:
        ValueError, TypeError: It is neither.
    """
    content = msgspec.json.decode(line, type=dict[str, Any])
    return int(content["dropped"]) if "dropped" in content else msgspec.convert(content, Seal)


def seal_lines(disk: Disk, layout: Layout, key: StreamKey, start: int = 0) -> Iterator[tuple[Seal | int, int]]:
    """
    The whole lines of a stream's seals from a byte on, each with the byte after it: seals, and numbers of segments that were dropped.

    Nothing is checked beyond that, as ``read_seals`` does; no more than a block is held.
    """
    path = layout.seal_file(key)
    if not disk.exists(path):
        return
    file = disk.open(path)
    try:
        at, rest = start, b""
        while block := file.read(at + len(rest), _SEAL_BLOCK_BYTES):
            *lines, rest = (rest + block).split(b"\n")
            for line in lines:
                at += len(line) + 1
                if is_whole(line):
                    yield parse_seal_line(line), at
    finally:
        file.close()


def read_seals(disk: Disk, layout: Layout, key: StreamKey) -> SealReport:
    """A stream's seals, as far as they can be read."""
    path = layout.seal_file(key)
    return SealReport(path, read_file(disk, path) or b"")


# Lines


class _Envelope(msgspec.Struct, gc=False):
    written_at: str
    topic: str
    space_id: str
    event_id: str
    idem_key: str | None = None
    partitions: tuple[str, ...] = ()


class LineInfo(msgspec.Struct, gc=False):
    """A record's line without its content: its place, and what files and index need to know of it."""

    offset: int
    seq: int
    meta: _Envelope
    payload: msgspec.Raw

    @property
    def head(self) -> Head:
        """The part of the line that places it."""
        return Head(self.offset, self.seq, self.meta.written_at)

    def stream_key(self, *, is_flat: bool) -> StreamKey:
        """The stream it belongs to."""
        return StreamKey(self.meta.topic, None if is_flat else self.meta.space_id)


_LINE_INFO: Final = msgspec.json.Decoder(LineInfo)


def _parse(line: bytes) -> LineInfo | str:
    """Check a line, given without its newline; what is wrong with it, if anything."""
    problem = str(Flaw.FORMAT)
    try:
        info = _LINE_INFO.decode(line)
        if _starts_right(line, info):
            return info
    except (ValueError, RecursionError) as error:
        problem = f"{Flaw.FORMAT}: {error}"
    return problem if is_whole(line) else Flaw.CHECKSUM


def _parse_block(block: bytes, lines: list[bytes]) -> list[LineInfo] | None:
    """
    The lines of a block in which every line is whole and a record; ``None`` if one is not.

    The decoder sees a row of JSON values and no lines. But after a closing brace at the end of a line, the brace
    that opens the next can only begin another value: as many values as lines are then one a line.
    """
    if {line[-1:] for line in lines} != {b"}"}:
        return None
    try:
        infos = _LINE_INFO.decode_lines(block)
    except ValueError:
        return None
    if len(infos) != len(lines) or not all(map(_starts_right, lines, infos)):
        return None
    return infos


def _starts_right(line: bytes, info: LineInfo) -> bool:
    """Whether the line begins with its own checksum, and then with its place in just the form that readers search."""
    return line.startswith(_LINE_START % (zlib.crc32(line[CRC_HEAD_BYTES:]), info.offset, info.seq))


# The journal


class JournalLine(NamedTuple):
    """A committed line in the journal."""

    byte_offset: int
    line: bytes
    info: LineInfo
    path: Path

    @property
    def data(self) -> bytes:
        """The line with its newline."""
        return self.line + b"\n"


class Frame(NamedTuple):
    """One commit as found in a journal file, below an intact head."""

    first: int
    last: int
    durable: int
    lines: list[JournalLine]
    """Its whole lines."""
    path: Path
    is_whole: bool
    """Whether its lines are exactly those from ``first`` to ``last``; if not, it was perhaps never acknowledged."""


class JournalReport:
    """
    What the journal's files hold.

    A line counts only below an intact frame head: a commit that found no room may leave whole lines behind, whose seqs
    were given out again; but its head was wiped out. Past a problem the search goes on for later heads: they may be
    leftovers of an earlier use of the file, or the proof that what was there was acknowledged. Their seqs tell which.
    """

    def __init__(self, files: Iterable[tuple[Path, bytes]]) -> None:
        self.frames: list[Frame] = []
        self.durable = 0
        """The highest seq that a frame says was on disk."""
        self.problems: list[FileProblem] = []
        """Places that are neither a frame nor unused. A file that was used before has some, and so has a torn commit."""
        self.crcs: dict[Path, int] = {}
        """Of each file, without the unused end."""
        for path, content in files:
            data = content.rstrip(b"\0")
            self.crcs[path] = zlib.crc32(data)
            self._read_file(path, data)

    def _read_file(self, path: Path, data: bytes) -> None:
        at = 0
        while (found := _FRAME.search(data, at)) is not None:
            if data[at : found.start()].strip(b"\0"):
                self._note(path, at, "bytes that are not a frame")
            if data[found.end() : found.end() + 1] != b"\n" or not is_whole(found[0]):
                self._note(path, found.start(), "a frame head's checksum does not match")
                at = found.end()
            else:
                at = self._read_frame(path, data, found)
        if data[at:].strip(b"\0"):
            self._note(path, at, "bytes that are not a frame")

    def _read_frame(self, path: Path, data: bytes, head: re.Match[bytes]) -> int:
        """Add the frame below an intact head; where it ends, or where the next one begins within it."""
        first, last, size, durable = map(int, head.groups())
        at = start = head.end() + 1
        end = min(start + size, len(data))
        lines: list[JournalLine] = []
        torn_at: int | None = None
        while at < end:
            line_end = data.find(b"\n", at, end)
            until = end if line_end < 0 else line_end + 1
            line = data[at : until - 1]
            info = _parse(line) if line_end >= 0 else Flaw.UNFINISHED
            if isinstance(info, LineInfo) and first <= info.seq <= last:
                if info.seq != first + len(lines) and torn_at is None:
                    torn_at = at
                lines.append(JournalLine(at, line, info, path))
            else:
                torn_at = at if torn_at is None else torn_at
                later = _FRAME.search(data, at, until + _FRAME_HEAD_BYTES_MAX)
                if later is not None and later.start() < until:  # the file was used again, and this is a leftover
                    at = later.start()
                    break
            at = until
        if torn_at is None and (len(lines) != last - first + 1 or start + size > len(data)):
            torn_at = at
        if torn_at is not None:
            self._note(path, torn_at, "a frame is not whole")
        self.durable = max(self.durable, durable)
        self.frames.append(Frame(first, last, durable, lines, path, is_whole=torn_at is None))
        return at

    def _note(self, path: Path, at: int, message: str) -> None:
        self.problems.append(FileProblem(path, at, "journal.damaged", message))

    @property
    def lines(self) -> dict[int, JournalLine]:
        """Every whole line below an intact head, by seq."""
        return {line.info.seq: line for frame in self.frames for line in frame.lines}

    def loss(self, folder: Path, last_seq: int, acknowledged: int) -> FileProblem | None:
        """What is wrong if the journal leads to ``last_seq`` only, but ``acknowledged`` is known to have been committed."""
        if acknowledged <= last_seq:
            return None
        path, at, _, message, *_ = (*self.problems, FileProblem(folder, 0, "", "lost"))[0]
        message = f"{message}, but the records up to seq {acknowledged} were acknowledged"
        return FileProblem(path, at, "journal.lost", message, last_seq + 1)

    def follow(self, last_seq: int) -> tuple[list[Frame], int]:
        """
        The whole frames that lead on from ``last_seq`` without a gap, and how far.

        Frames that ``last_seq`` is beyond are among them.
        """
        counted: list[Frame] = []
        for frame in sorted((frame for frame in self.frames if frame.is_whole), key=operator.itemgetter(0, 1, 2)):
            if frame.first > last_seq + 1:
                break
            counted.append(frame)
            last_seq = max(last_seq, frame.last)
        return counted, last_seq


def read_journal(disk: Disk, layout: Layout) -> JournalReport:
    """Read what can be read of the journal."""
    paths = [layout.journal / name for name in disk.names(layout.journal) if name.endswith(".jsonl")]
    return JournalReport((path, read_file(disk, path) or b"") for path in paths)


def lines_beyond(
    lines: Iterable[JournalLine], ends: dict[StreamKey, Head], *, is_flat: bool
) -> Iterator[tuple[StreamKey, JournalLine, FileProblem | None]]:
    """
    The lines that the streams do not hold yet, and a problem where records are missing before one.

    Args:
        lines: By seq.
        ends: The last record of each stream; moved on with the lines.
    """
    for line in lines:
        info, key = line.info, line.info.stream_key(is_flat=is_flat)
        end = ends.get(key, START)
        if info.seq <= end.seq:
            continue
        problem = None
        if is_flat and info.offset != end.offset + 1:
            message = f"topic {key.topic!r} continues with offset {info.offset}; {end.offset + 1} is nowhere"
            problem = FileProblem(line.path, line.byte_offset, "journal.order", message, info.seq, info.offset)
        ends[key] = info.head
        yield key, line, problem


# Segments


class SegmentReport:
    """What one segment holds."""

    def __init__(self, path: Path, before: Head) -> None:
        self.path = path
        self.is_missing = False
        self.size = 0
        """How many bytes were read."""
        self.lines = 0
        """Whole lines in order, on either side of problems."""
        self.first = START
        self.last = before
        self.problems: list[FileProblem] = []
        self.problem_count = 0
        self.good_lines = 0
        """Lines before the first problem."""
        self.good_bytes = 0
        self.good_last = before
        self.good_digest = hashlib.sha256()
        """Of the lines before the first problem; more can be added."""
        self.partitions: dict[str, int] = {}
        """Each partition that those lines name, with the last seq that does."""
        self.after: array[int] = array("Q")
        """Seqs of whole lines behind the first problem."""
        self.highest_seq = 0
        """The highest seq on any whole line, in its place or not: it was committed."""
        self.late: FileProblem | None = None
        """The first record that was written before the one in front of it."""
        self.digest: Any = None
        """Of all bytes that were read: if all is good, ``good_digest`` itself."""

    @property
    def sha256(self) -> str:
        """Of all bytes that were read; to be asked for before anything is added to ``good_digest``. Empty if there is no file."""
        return "" if self.digest is None else self.digest.hexdigest()

    def add_problem(self, problem: FileProblem) -> None:
        """Note a problem; the first one ends what is good."""
        self.problem_count += 1
        self.highest_seq = max(self.highest_seq, problem.seq or 0)
        if len(self.problems) < _PROBLEMS_MAX:
            self.problems.append(problem)

    def agrees_with(self, seal: Seal) -> bool:
        """Whether the seal describes what the segment holds."""
        described = seal.first, seal.last, seal.lines, seal.partitions
        return described == (self.first, self.last, self.lines, self.partitions)


def read_segment(
    disk: Disk,
    path: Path,
    key: StreamKey,
    before: Head,
    *,
    is_flat: bool,
    after_gap: bool = False,
    start: int = 0,
    size: int | None = None,
    seen: Callable[[list[LineInfo]], None] | None = None,
) -> SegmentReport:
    """
    Check a segment line by line.

    Args:
        before: The record that the first line follows.
        is_flat: Whether the stream is a whole topic, so that its offsets have no gaps.
        after_gap: Whether the first line may leave a gap: how many records are gone before it is not known.
        start: The byte to begin at, where a line begins.
        size: The byte to end at; the end of the file if left out.
        seen: Is given every whole line up to the first problem, some lines at a time.
    """
    walk = _SegmentWalk(SegmentReport(path, before), key, start, is_flat=is_flat, after_gap=after_gap, seen=seen)
    try:
        file = disk.open(path)
    except FileNotFoundError:
        walk.report.is_missing = True
        return walk.report
    try:
        walk.run(file, file.size() if size is None else size)
    finally:
        file.close()
    return walk.report


class _SegmentWalk:
    """The walk over one segment's lines, block by block."""

    def __init__(
        self,
        report: SegmentReport,
        key: StreamKey,
        start: int,
        *,
        is_flat: bool,
        after_gap: bool,
        seen: Callable[[list[LineInfo]], None] | None,
    ) -> None:
        self.report = report
        report.good_bytes = self._at = start
        self._key = key
        self._is_flat = is_flat
        self._after_gap = after_gap
        self._seen = seen

    def run(self, file: File, end: int) -> None:
        """Read up to the byte ``end``."""
        report = self.report
        rest: list[bytes] = []
        digest: Any = report.good_digest  # until the first problem; from then on of all bytes
        for start in range(self._at, end, _BLOCK_BYTES):
            block = file.read(start, min(_BLOCK_BYTES, end - start))
            report.size += len(block)
            cut = block.rfind(b"\n") + 1
            if not cut:
                rest.append(block)
                continue
            lines, rest = b"".join([*rest, block[:cut]]), [block[cut:]] if cut < len(block) else []
            begin = self._at
            self._read(lines)
            if digest is report.good_digest and report.problem_count:
                good = report.good_bytes - begin
                digest.update(lines[:good])
                digest, lines = digest.copy(), lines[good:]
            digest.update(lines)
        if rest:
            report.add_problem(FileProblem(report.path, self._at, "line.unfinished", Flaw.UNFINISHED))
            digest = digest.copy()
            digest.update(b"".join(rest))
        report.digest = digest

    def _read(self, block: bytes) -> None:
        """Go on with these bytes; they end with a newline."""
        lines = block.split(b"\n")
        lines.pop()
        # Where there is one line, as in a topic of one event, that one is looked at directly.
        infos = None if self._after_gap or len(lines) == 1 else _parse_block(block, lines)
        if infos is not None and self._continues(infos):
            self._at += len(block)
            self._count(infos)
        else:
            for line in lines:
                self._read_line(line)

    def _continues(self, infos: list[LineInfo]) -> bool:
        """Whether each of these records is just the one that comes next."""
        before, key = self.report.last, self._key
        metas = [info.meta for info in infos]
        if {meta.topic for meta in metas} != {key.topic}:
            return False
        if key.space_id is not None and {meta.space_id for meta in metas} != {key.space_id}:
            return False
        offsets = [before.offset, *[info.offset for info in infos]]
        if self._is_flat:
            if offsets != list(range(before.offset, before.offset + len(offsets))):
                return False
        elif not _rises(offsets):
            return False
        times = [before.written_at, *[meta.written_at for meta in metas]]
        return _rises([before.seq, *[info.seq for info in infos]]) and all(map(operator.le, times, times[1:]))

    def _count(self, infos: list[LineInfo]) -> None:
        """Add records that were found to be in order, up to ``_at``."""
        report = self.report
        last = infos[-1].head
        if not report.lines:
            report.first = last if len(infos) == 1 else infos[0].head
        report.lines += len(infos)
        report.last = last
        if last.seq > report.highest_seq:
            report.highest_seq = last.seq
        if report.problem_count:
            report.after.extend([info.seq for info in infos])
            return
        report.good_lines += len(infos)
        report.good_bytes, report.good_last = self._at, last
        for info in infos:
            for name in info.meta.partitions:
                report.partitions[name] = info.seq
        if self._seen is not None:
            self._seen(infos)

    def _read_line(self, line: bytes) -> None:
        """Judge a line that may be anything; afterwards the walk knows again what comes next, if it was one."""
        report, at = self.report, self._at
        self._at += len(line) + 1
        info = _parse(line)
        if isinstance(info, str):
            self._after_gap = True
            code = "line.checksum" if info == Flaw.CHECKSUM else "line.format"
            report.add_problem(FileProblem(report.path, at, code, info))
            return
        meta, offset, seq = info.meta, info.offset, info.seq
        if meta.topic != self._key.topic or self._key.space_id not in (None, meta.space_id):
            self._after_gap = True
            message = f"the record belongs to topic {meta.topic!r} of space {meta.space_id!r}"
            report.add_problem(FileProblem(report.path, at, "line.misplaced", message, seq, offset))
            return
        before = report.last
        is_later = seq > before.seq and offset > before.offset
        if not is_later or (self._is_flat and not self._after_gap and offset != before.offset + 1):
            message = f"{Flaw.ORDER}: offset {offset}, seq {seq} after offset {before.offset}, seq {before.seq}"
            report.add_problem(FileProblem(report.path, at, "line.order", message, seq, offset))
            if not is_later:
                return
        if meta.written_at < before.written_at and report.late is None:
            message = f"written at {meta.written_at}, but the record before it at {before.written_at}"
            report.late = FileProblem(report.path, at, "line.time", message, seq, offset)
        self._after_gap = False
        self._count([info])


def _rises(numbers: list[int]) -> bool:
    return all(map(operator.lt, numbers, numbers[1:]))
