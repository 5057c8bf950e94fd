"""
Recovery: what the files say after a crash, and how to carry on from there.

``survey`` reads and decides; it changes nothing. ``settle_survey`` brings the files into the state that the survey
found to be the truth. The rule (docs/adr/0004-recovery.md):

- a commit is real if its frame in the journal is whole, or its lines are in a segment: segments are written
  from synced commits only;
- frames count as long as they follow one another without a gap; what comes after the first gap was one batch
  in flight, torn by the crash, and nobody was told: dropped;
- but if anything proves that a record was acknowledged (a later frame, a checkpoint, a seal, a group's cursor)
  and it cannot be read back, the log is not opened: ``CorruptLog`` says which file and which byte.

Segment bytes past the checkpoint are written again from what was read, even if they look right: after a failed
sync the page cache may show bytes that the disk never got.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from ..errors import CorruptLog
from ..segment import CheckedLine, Flaw, Head, head_of, is_whole, scan
from ..settings import LogSettings
from .checkpoint import CHAIN_START, Checkpoint, Seal, load_checkpoint, load_seals, renew_last_seal_line
from .cursors import CursorFiles
from .disk import Disk, read_file, size_of
from .journal import Frame, scan_journal
from .layout import Layout, StreamKey, WorkspaceMeta
from .segment_writer import Digest, SegmentWriter
from .state import Named, Segment, SegmentWrite, Stream

__all__ = ["RecoveredStream", "Survey", "settle_survey", "survey"]


class _Envelope(msgspec.Struct, gc=False):
    topic: str
    space_id: str
    partitions: tuple[str, ...] = ()


class _Placed(msgspec.Struct, gc=False):
    meta: _Envelope


_PLACED: Final = msgspec.json.Decoder(_Placed)


class MissingLine(NamedTuple):
    """A committed line that its segment does not hold yet."""

    data: bytes
    head: Head
    partitions: tuple[str, ...]


class RecoveredStream:
    """One stream as found, and what is missing from its files."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.chain = CHAIN_START
        self.sealed_through = 0
        self.tail: Segment | None = None
        """The last unsealed segment that holds whole lines."""
        self.rewrite_from = 0
        """Bytes of the tail below this are known to be on disk."""
        self.torn: tuple[int, int, str] | None = None
        """Segment, byte and flaw where the whole lines end, if anything follows them."""
        self.unsealed: list[Segment] = []
        self.digest: Digest | None = None
        """Of the whole lines of the first unsealed segment."""
        self.leftovers: list[int] = []
        """Files to remove: dropped segments, and unsealed ones beyond a torn one."""
        self.missing: list[MissingLine] = []
        self.fresh_count = 0
        """Lines in the files with a seq above the checkpoint's."""
        self.seen_seq = 0
        """The highest seq on a whole line beyond a tear: its file must not be trusted, but it was committed."""


class Survey(NamedTuple):
    """What the files say."""

    meta: WorkspaceMeta
    streams: dict[StreamKey, RecoveredStream]
    last_seq: int
    journal_files: list[Path]
    frames: list[Frame]
    """The frames that count, in seq order."""
    dropped_frames: int
    """Whole or torn frames that were in flight when the crash came."""
    checkpoint: Checkpoint | None

    @property
    def is_settled(self) -> bool:
        """Whether the segments hold everything and nothing has to be mended."""
        return not self.journal_files and not any(
            found.missing or found.torn or found.leftovers for found in self.streams.values()
        )


def survey(disk: Disk, layout: Layout, settings: LogSettings) -> Survey:
    """
    Read what has to be read and decide what is true.

    Raises:
        CorruptLog: Acknowledged data is lost or altered.
        WorkspaceError: There is no log, or not one for this version.
    """
    meta = layout.read_meta(disk)
    checkpoint = load_checkpoint(disk, layout)
    files = layout.segments(disk)
    sealed = set(layout.sealed_streams(disk))
    is_dense = meta.layout == "flat"
    streams: dict[StreamKey, RecoveredStream] = {}
    for key in sorted({*files, *sealed}, key=lambda key: key.path):
        seals = load_seals(disk, layout, key) if key in sealed else ([], set[int]())
        numbers = files.get(key, [])
        streams[key] = _survey_stream(disk, layout, settings, key, numbers, seals, checkpoint, is_dense=is_dense)
    if checkpoint is not None:
        _refuse_lost_files(layout, checkpoint, streams)

    journal_files = [layout.journal / name for name in disk.names(layout.journal) if name.endswith(".jsonl")]
    scans = [scan_journal(path, read_file(disk, path) or b"") for path in journal_files]
    base = checkpoint.seq if checkpoint else 0
    in_segments = max([base, *(found.stream.last_seq for found in streams.values())])
    found_frames = sorted(frame for scanned in scans for frame in scanned.frames)
    frames, last_seq = _follow(found_frames, in_segments)

    acknowledged = max(
        [in_segments, *(scanned.durable for scanned in scans), *(found.seen_seq for found in streams.values())]
    )
    if acknowledged > last_seq:
        path, byte_offset, problem = next(
            (scanned.flaw for scanned in scans if scanned.flaw), (layout.journal, 0, "lost")
        )
        raise CorruptLog(
            path, byte_offset, f"{problem}, but the records up to seq {acknowledged} were acknowledged", last_seq + 1
        )
    _find_missing(layout, settings, meta, streams, frames)
    _refuse_unfilled_tears(layout, streams)
    _refuse_unknown_files(layout, streams)
    if checkpoint is not None:
        _refuse_gaps(layout, checkpoint, streams, last_seq)
    _refuse_cursors_ahead(disk, layout, meta, streams)
    dropped = sum(1 for frame in found_frames if frame.first > last_seq)
    return Survey(meta, streams, last_seq, journal_files, frames, dropped, checkpoint)


def _survey_stream(
    disk: Disk,
    layout: Layout,
    settings: LogSettings,
    key: StreamKey,
    numbers: list[int],
    seals_and_drops: tuple[list[Seal], set[int]],
    checkpoint: Checkpoint | None,
    *,
    is_dense: bool,
) -> RecoveredStream:
    stream = Stream(key, lines_max=settings.segment_lines_max, bytes_max=settings.segment_bytes_max)
    found = RecoveredStream(stream)
    base = checkpoint.seq if checkpoint else 0
    seals, dropped = seals_and_drops
    for seal in seals:
        found.chain, found.sealed_through = seal.chain, seal.segment
        if seal.segment in dropped:
            stream.dropped_through_offset, stream.dropped_through_seq = seal.last_offset, seal.last_seq
            # Its file may be gone, so how many of its lines are past the checkpoint is known only roughly.
            found.fresh_count += max(0, min(seal.lines, seal.last_seq - base))
            continue
        path = layout.segment(key, seal.segment)
        size = size_of(disk, path)
        if size != seal.bytes:
            state = "is missing" if size is None else f"has {size} bytes"
            raise CorruptLog(path, 0, f"the sealed segment {state}; it was sealed with {seal.bytes}", seal.first_seq)
        stream.segments.append(seal.to_segment())
        if seal.last_seq > base:
            found.fresh_count += _count_after(disk, path, base)
    found.leftovers = [number for number in numbers if number in dropped]
    stream.next_number = found.sealed_through + 1

    mark = checkpoint.streams.get(key.path) if checkpoint else None
    for number in numbers:
        if number <= found.sealed_through:
            continue
        if found.torn is not None or number != stream.next_number:
            # Beyond a torn segment nothing was synced: the journal still holds what these files show.
            if mark is not None and number <= mark.segment:
                raise CorruptLog(
                    layout.segment(key, number), 0, "an earlier segment of the stream is damaged or missing"
                )
            found.leftovers.append(number)
            found.seen_seq = max(found.seen_seq, _highest_seq(read_file(disk, layout.segment(key, number)) or b"", 0))
            continue
        path = layout.segment(key, number)
        data = read_file(disk, path) or b""
        segment, fresh, end, flaw = _scan_segment(data, number, stream, base, is_dense=is_dense)
        synced = 0 if mark is None or number > mark.segment else (mark.bytes if number == mark.segment else len(data))
        if end < synced:
            raise CorruptLog(
                path, end, f"{flaw or 'the data ends'}, but {synced} bytes were on disk at the last checkpoint"
            )
        if end < len(data):
            found.torn = (number, end, flaw or Flaw.UNFINISHED)
            found.seen_seq = _highest_seq(data, end)
        found.fresh_count += fresh
        if segment.lines:
            stream.segments.append(segment)
            stream.next_number = number + 1
            found.unsealed.append(segment)
            found.digest = found.digest or hashlib.sha256(memoryview(data)[:end])
            found.tail, found.rewrite_from = segment, synced
        elif found.torn is None:
            break  # an empty file: it was just made, and will be written to under this number
    return found


def _highest_seq(data: bytes, start: int) -> int:
    """The highest seq on any whole line from ``start`` on, whatever stands between."""
    heads = (head_of(line) for line in data[start:].split(b"\n") if is_whole(line))
    return max((head.seq for head in heads if head is not None), default=0)


def _count_after(disk: Disk, path: Path, seq: int) -> int:
    data = read_file(disk, path) or b""
    return sum(1 for line in scan(data) if isinstance(line, CheckedLine) and line.head.seq > seq)


def _scan_segment(
    data: bytes, number: int, stream: Stream, base: int, *, is_dense: bool
) -> tuple[Segment, int, int, str | None]:
    """Take in the whole lines of an unsealed segment that continue the stream; where and why they end."""
    segment = Segment(number)
    offset, seq, end, fresh = stream.last_offset, stream.last_seq, 0, 0
    first: Head | None = None
    last: Head | None = None
    flaw: str | None = None
    lines = 0
    named: list[tuple[int, tuple[str, ...]]] = []
    for line in scan(data):
        if not isinstance(line, CheckedLine):
            flaw = line[1]
            break
        head = line.head
        if head.seq <= seq or head.offset <= offset or (is_dense and head.offset != offset + 1):
            flaw = Flaw.ORDER
            break
        first, last, offset, seq = first or head, head, head.offset, head.seq
        lines += 1
        fresh += seq > base
        end += len(line.data)
        if b'"partitions":' in line.data:
            named.append((seq, _PLACED.decode(line.data).meta.partitions))
    if first is not None and last is not None:
        segment.grow(lines, end, first, last, named)
        segment.flushed_bytes = end
    return segment, fresh, end, flaw


def _refuse_lost_files(layout: Layout, checkpoint: Checkpoint, streams: dict[StreamKey, RecoveredStream]) -> None:
    known = {key.path: found for key, found in streams.items()}
    for path, mark in checkpoint.streams.items():
        found = known.get(path)
        held = found is not None and (
            mark.segment <= found.sealed_through
            or any(segment.number == mark.segment for segment in found.unsealed)
            or not mark.bytes
        )
        if not held:
            raise CorruptLog(
                layout.wal / f"{path}.{mark.segment:08d}.jsonl", 0, f"the segment is missing; it had {mark.bytes} bytes"
            )


def _follow(frames: list[Frame], in_segments: int) -> tuple[list[Frame], int]:
    """The frames that count: those the segments go beyond, then each that continues the one before."""
    counted: list[Frame] = []
    last_seq = in_segments
    for frame in frames:
        if frame.first > last_seq + 1:
            break
        counted.append(frame)
        last_seq = max(last_seq, frame.last)
    return counted, last_seq


def _find_missing(
    layout: Layout,
    settings: LogSettings,
    meta: WorkspaceMeta,
    streams: dict[StreamKey, RecoveredStream],
    frames: list[Frame],
) -> None:
    is_dense = meta.layout == "flat"
    for frame in frames:
        for line in frame.lines:
            envelope = _PLACED.decode(line.data).meta
            key = StreamKey(envelope.topic, None if is_dense else envelope.space_id)
            found = streams.get(key)
            if found is None:
                stream = Stream(key, lines_max=settings.segment_lines_max, bytes_max=settings.segment_bytes_max)
                found = streams[key] = RecoveredStream(stream)
            before = found.missing[-1].head if found.missing else None
            last_seq = before.seq if before else found.stream.last_seq
            last_offset = before.offset if before else found.stream.last_offset
            if line.head.seq <= last_seq:
                continue
            if is_dense and line.head.offset != last_offset + 1:
                raise CorruptLog(
                    frame.path,
                    line.byte_offset,
                    f"topic {key.topic!r} continues with offset {line.head.offset}; {last_offset + 1} is nowhere",
                    line.head.seq,
                )
            found.missing.append(MissingLine(line.data, line.head, envelope.partitions))


def _refuse_unfilled_tears(layout: Layout, streams: dict[StreamKey, RecoveredStream]) -> None:
    for key, found in streams.items():
        if found.torn is not None and not found.missing:
            number, byte_offset, flaw = found.torn
            raise CorruptLog(
                layout.segment(key, number),
                byte_offset,
                f"{flaw}, and no journal holds what stood there",
                found.stream.last_seq + 1,
            )


def _refuse_unknown_files(layout: Layout, streams: dict[StreamKey, RecoveredStream]) -> None:
    """What stands beyond a tear or a missing file is written anew from the journal, or else kept and reported."""
    for key, found in streams.items():
        last_seq = found.missing[-1].head.seq if found.missing else found.stream.last_seq
        if found.seen_seq > last_seq:
            number = found.torn[0] if found.torn is not None else found.stream.next_number
            raise CorruptLog(
                layout.segment(key, number),
                found.torn[1] if found.torn is not None else 0,
                f"the segment is damaged or missing, but later records of the stream, up to seq {found.seen_seq}, exist",
                last_seq + 1,
            )


def _refuse_gaps(
    layout: Layout, checkpoint: Checkpoint, streams: dict[StreamKey, RecoveredStream], last_seq: int
) -> None:
    """Seqs have no gaps, so the records past the checkpoint can be counted."""
    held = sum(found.fresh_count + len(found.missing) for found in streams.values())
    expected = last_seq - checkpoint.seq
    if held < expected:
        raise CorruptLog(
            layout.journal,
            0,
            f"{expected - held} of the records after seq {checkpoint.seq} are nowhere",
            checkpoint.seq + 1,
        )


def _refuse_cursors_ahead(
    disk: Disk, layout: Layout, meta: WorkspaceMeta, streams: dict[StreamKey, RecoveredStream]
) -> None:
    """A group cannot have acknowledged what was never committed."""
    ends: dict[str, int] = {}
    for key, found in streams.items():
        ends[key.topic] = max(ends.get(key.topic, -1), _end_of(found))
    for files in CursorFiles(disk, layout.offsets).read_all():
        last = ends.get(files.topic, -1)
        for cursor in files.found:
            if cursor.stored is not None and cursor.is_ahead(last, meta.epoch):
                problem = f"the group has acknowledged offset {cursor.stored.highest}, but the topic ends at {last}"
                raise CorruptLog(cursor.path, 0, problem)


def _end_of(found: RecoveredStream) -> int:
    return found.missing[-1].head.offset if found.missing else found.stream.last_offset


def settle_survey(disk: Disk, layout: Layout, found: Survey, segment_writer: SegmentWriter) -> None:
    """
    Make the files say what the survey found: cut torn ends, write what is missing, seal, checkpoint, and only then
    remove the journal. Doing it twice, or half and then again, comes to the same.

    The disk may be full. So what the journal does not need is cut off first, and its files are emptied one after another, the
    oldest first: there must be room for what one of them holds, and removing it makes that room again.
    """
    chunks: list[SegmentWrite] = []
    for key, recovered in found.streams.items():
        for number in recovered.leftovers:
            disk.remove(layout.segment(key, number))
        chunks += _mend(disk, layout, key, recovered, segment_writer)
    if not found.is_settled:
        _secure_names_and_seals(disk, layout, found)  # first: a new seal must not outlive the name of its segment
    _write(segment_writer, chunks)
    files = _trim_journal(disk, found)
    for path, last_seq in files:
        _write(segment_writer, _place_missing(found, last_seq))
        if path is not files[-1][0]:
            segment_writer.checkpoint(max(last_seq, found.checkpoint.seq if found.checkpoint else 0))
            disk.remove(path)
    segment_writer.checkpoint(found.last_seq)
    for path, _ in files[-1:]:
        disk.remove(path)
    if found.journal_files:
        disk.sync_folder(layout.journal)


def _write(segment_writer: SegmentWriter, chunks: list[SegmentWrite]) -> None:
    for segment, flushed_bytes, digest in segment_writer.write(chunks):
        segment.flushed_bytes = flushed_bytes
        segment.digest = digest


def _trim_journal(disk: Disk, found: Survey) -> list[tuple[Path, int]]:
    """
    Free what the journal holds beyond the frames that count and that are not known to be in the segments.

    Returns:
        The files that are left, and the last seq in each, oldest first.
    """
    covered = found.checkpoint.seq if found.checkpoint else 0
    for recovered in found.streams.values():
        if recovered.missing:  # after a repair a checkpoint may be beyond what the journal still has to give
            covered = min(covered, recovered.missing[0].head.seq - 1)
    ends: dict[Path, tuple[int, int]] = {}
    for frame in found.frames:
        if frame.last > covered:
            line = frame.lines[-1]
            seq, end = ends.get(frame.path, (0, 0))
            ends[frame.path] = (max(seq, frame.last), max(end, line.byte_offset + len(line.data)))
    for path in found.journal_files:
        if path not in ends:
            disk.remove(path)
            continue
        file = disk.open(path, write=True)
        try:
            if file.size() > ends[path][1]:
                file.truncate(ends[path][1])
        finally:
            file.close()
    return sorted(((path, seq) for path, (seq, _) in ends.items()), key=lambda each: each[1])


def _place_missing(found: Survey, last_seq: int) -> list[SegmentWrite]:
    """Where the missing lines up to ``last_seq`` belong."""
    chunks: list[SegmentWrite] = []
    for recovered in found.streams.values():
        own = [line for line in recovered.missing if line.head.seq <= last_seq]
        if own:
            recovered.missing = recovered.missing[len(own) :]
            named: Named = [(line.head.seq, line.partitions) for line in own if line.partitions]
            lines = [line.data for line in own]
            chunks += recovered.stream.place(lines, sum(map(len, lines)), own[0].head, own[-1].head, named)
    return chunks


def _secure_names_and_seals(disk: Disk, layout: Layout, found: Survey) -> None:
    """
    Put on disk what may only look as if it were there.

    A writer that was killed, or whose sync failed, leaves names and seal lines that can be read but that a power
    cut would take away; and after this the journal, which could replace them, is gone.
    """
    folders = {layout.wal, layout.seals}
    for key in found.streams:
        if disk.exists(layout.seal_file(key)):
            renew_last_seal_line(disk, layout, key)
        folders |= {layout.segment(key, 0).parent, layout.seal_file(key).parent}
    for folder in sorted(folders):
        if disk.exists(folder):
            disk.sync_folder(folder)


def _mend(
    disk: Disk, layout: Layout, key: StreamKey, recovered: RecoveredStream, segment_writer: SegmentWriter
) -> list[SegmentWrite]:
    stream, tail = recovered.stream, recovered.tail
    if recovered.torn is not None and (tail is None or recovered.torn[0] != tail.number):
        _cut(disk, layout.segment(key, recovered.torn[0]), 0, 0)
    if tail is not None and (recovered.torn is not None or tail.size_bytes > recovered.rewrite_from):
        _cut(disk, layout.segment(key, tail.number), tail.size_bytes, recovered.rewrite_from)
    unsealed = recovered.unsealed
    first_number, first_size = (unsealed[0].number, unsealed[0].size_bytes) if unsealed else (0, 0)
    segment_writer.adopt(
        key,
        chain=recovered.chain,
        sealed_through=recovered.sealed_through,
        number=first_number,
        size=first_size,
        digest=recovered.digest,
    )
    chunks: list[SegmentWrite] = []
    for segment in unsealed:
        # The segment_writer adopted the first; the others it takes in, and digests, as if they were written now.
        if segment is unsealed[0]:
            chunk = SegmentWrite(stream, segment, segment.size_bytes, [])
        else:
            content = read_file(disk, layout.segment(key, segment.number)) or b""
            chunk = SegmentWrite(stream, segment, 0, [content[: segment.size_bytes]])
        chunk.seals = segment.is_sealed = segment is not unsealed[-1]
        if chunk.seals or chunk.lines:
            chunks.append(chunk)
    return chunks


def _cut(disk: Disk, path: Path, size: int, rewrite_from: int) -> None:
    file = disk.open(path, write=True)
    try:
        if file.size() > size:
            file.truncate(size)
        if size > rewrite_from:
            file.write(rewrite_from, file.read(rewrite_from, size - rewrite_from))
        file.sync()
    finally:
        file.close()
