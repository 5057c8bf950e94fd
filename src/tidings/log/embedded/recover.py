"""
Recovery: what the files say after a crash, and how to carry on from there.

``plan_recovery`` reads and decides; it changes nothing. ``apply_recovery`` brings the files into the state that the
plan found to be the truth. The rule (docs/adr/0004-recovery.md):

- a commit is real if its frame in the journal is whole, or its lines are in a segment: segments are written
  from synced commits only;
- frames count as long as they follow one another without a gap; what comes after the first gap was one batch
  in flight, torn by the crash and never acknowledged: dropped;
- but if anything proves that a record was acknowledged (a later frame, a checkpoint, a seal, a group's cursor)
  and it cannot be read back, the log is not opened: ``CorruptLog`` says which file and which byte.

Segment bytes past the checkpoint are written again from what was read, even if they look right: after a failed
sync the page cache may show bytes that the disk never got.
"""

from __future__ import annotations

from bisect import bisect_right
from pathlib import Path
from typing import Final, NamedTuple

from ..errors import CorruptLog
from ..segment import Head, segment_name
from ..settings import LogSettings
from .checkpoint import CHAIN_START, renew_last_seal_line
from .cursors import CursorFiles
from .disk import Disk, is_full, read_file, size_of, sync_for_good
from .inspect import (
    START,
    CheckpointReport,
    FileProblem,
    Frame,
    JournalLine,
    LineInfo,
    SealReport,
    SegmentReport,
    cursors_ahead,
    lines_beyond,
    read_checkpoint,
    read_journal,
    read_seals,
    read_segment,
)
from .layout import Layout, StreamKey, WorkspaceMeta
from .segment_writer import Digest, SegmentWriter, Unflushed
from .state import Named, Segment, SegmentWrite, Stream

_ROOM_PER_WRITE_BYTES: Final = 8 << 10
"""A block for the last part of a segment, and one for the name of a new one."""


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
        self.torn: tuple[int, FileProblem] | None = None
        """The segment where the whole lines end, if anything follows them, and what is wrong there."""
        self.unsealed: list[Segment] = []
        self.digest: Digest | None = None
        """Of the whole lines of the first unsealed segment."""
        self.leftovers: list[int] = []
        """Files to remove: dropped segments, and unsealed ones beyond a torn one."""
        self.missing: list[JournalLine] = []
        """Committed lines that the segments do not hold yet."""
        self.fresh_count = 0
        """Lines in the files with a seq above the checkpoint's."""
        self.seen_seq = 0
        """The highest seq on a whole line beyond a tear: its file must not be trusted, but it was committed."""

    @property
    def last_seq(self) -> int:
        """The seq of its last record, with what is missing."""
        return self.missing[-1].info.seq if self.missing else self.stream.last_seq


class RecoveryPlan(NamedTuple):
    """What the files say, and so what has to be done to them."""

    meta: WorkspaceMeta
    streams: dict[StreamKey, RecoveredStream]
    last_seq: int
    journal_files: list[Path]
    frames: list[Frame]
    """The frames that count, in seq order."""
    dropped_frames: int
    """Whole frames that were in flight when the crash came."""
    checkpoint_seq: int

    @property
    def is_clean(self) -> bool:
        """Whether the segments hold everything and nothing has to be changed."""
        return not self.journal_files and not any(
            found.missing or found.torn or found.leftovers for found in self.streams.values()
        )


def plan_recovery(disk: Disk, layout: Layout, settings: LogSettings) -> RecoveryPlan:
    """
    Read what has to be read and decide what is true.

    Raises:
        CorruptLog: Acknowledged data is lost or altered.
        WorkspaceError: There is no log, or not one for this version.
    """
    return _Planner(disk, layout, settings).plan()


def add_sealed(stream: Stream, seals: SealReport) -> None:
    """Enter a stream's sealed segments, and how far it was dropped."""
    for seal in seals.seals.values():
        stream.next_number = seal.segment + 1
        if seal.segment in seals.dropped:
            stream.dropped_through_offset, stream.dropped_through_seq = seal.last_offset, seal.last_seq
        else:
            stream.segments.append(seal.to_segment())


class _Planner:
    """Makes one plan for one workspace."""

    def __init__(self, disk: Disk, layout: Layout, settings: LogSettings) -> None:
        self._disk = disk
        self._layout = layout
        self._settings = settings
        self._meta = layout.read_meta(disk)
        self._is_flat = self._meta.layout == "flat"
        self._checkpoint: CheckpointReport = read_checkpoint(disk, layout)
        self._streams: dict[StreamKey, RecoveredStream] = {}
        self._problems: list[FileProblem] = []
        """In sealed segments, where those had to be read."""

    def plan(self) -> RecoveryPlan:
        disk, layout, streams = self._disk, self._layout, self._streams
        files, sealed = layout.segments(disk), set(layout.sealed_streams(disk))
        for key in sorted({*files, *sealed}, key=lambda key: key.path):
            self._read_stream(key, files.get(key, []), is_sealed=key in sealed)
        self._refuse_lost_files()
        journal = read_journal(disk, layout)
        in_segments = max([self._checkpoint.seq, *(found.stream.last_seq for found in streams.values())])
        frames, last_seq = journal.follow(in_segments)
        acknowledged = max([in_segments, journal.durable, *(found.seen_seq for found in streams.values())])
        loss = journal.loss(layout.journal, last_seq, acknowledged)
        if loss is not None:
            raise loss.as_error()
        ends = self._find_missing(frames)
        self._refuse_unfilled_tears()
        self._refuse_unknown_files()
        self._refuse_gaps(last_seq)
        for _, problem in cursors_ahead(CursorFiles(disk, layout.offsets).read_all(), ends, self._meta.epoch):
            raise problem.as_error()
        dropped = sum(1 for frame in journal.frames if frame.is_whole and frame.first > last_seq)
        return RecoveryPlan(self._meta, streams, last_seq, list(journal.crcs), frames, dropped, self._checkpoint.seq)

    # Segments

    def _new_stream(self, key: StreamKey) -> RecoveredStream:
        settings = self._settings
        stream = Stream(key, lines_max=settings.segment_lines_max, bytes_max=settings.segment_bytes_max)
        found = self._streams[key] = RecoveredStream(stream)
        return found

    def _read_stream(self, key: StreamKey, numbers: list[int], *, is_sealed: bool) -> None:
        found = self._new_stream(key)
        if is_sealed:
            seals = read_seals(self._disk, self._layout, key).checked()
            self._add_sealed(found, seals)
            found.leftovers = [number for number in numbers if number in seals.dropped]
        self._add_unsealed(found, [number for number in numbers if number > found.sealed_through])

    def _add_sealed(self, found: RecoveredStream, seals: SealReport) -> None:
        stream, base = found.stream, self._checkpoint.seq
        add_sealed(stream, seals)
        found.chain, found.sealed_through = seals.head, seals.last
        before = START
        for seal in seals.seals.values():
            if seal.segment in seals.dropped:
                # Its file may be gone, so how many of its lines are past the checkpoint is known only roughly.
                found.fresh_count += max(0, min(seal.lines, seal.last_seq - base))
            else:
                path = self._layout.segment(stream.key, seal.segment)
                size = size_of(self._disk, path)
                if size != seal.bytes:
                    state = "is missing" if size is None else f"has {size} bytes"
                    problem = f"the sealed segment {state}; it was sealed with {seal.bytes}"
                    raise CorruptLog(path, 0, problem, seal.first_seq)
                if seal.last_seq > base:
                    self._problems += self._read_segment(found, seal.segment, before).problems[:1]
            before = seal.last

    def _add_unsealed(self, found: RecoveredStream, numbers: list[int]) -> None:
        stream, mark = found.stream, self._checkpoint.streams.get(found.stream.key.path)
        for number in numbers:
            if found.torn is not None or number != stream.next_number:
                # Beyond a torn segment nothing was synced: the journal still holds what these files show.
                if mark is not None and number <= mark.segment:
                    path = self._layout.segment(stream.key, number)
                    raise CorruptLog(path, 0, "an earlier segment of the stream is damaged or missing")
                found.leftovers.append(number)
                report = self._read_segment(found, number, START, is_leftover=True)
                found.seen_seq = max(found.seen_seq, report.highest_seq)
                continue
            report = self._read_segment(found, number, _last_of(stream))
            end, synced = report.good_bytes, self._checkpoint.synced_bytes(stream.key, number, report.size)
            if end < synced:
                message = report.problems[0].message if report.problems else "the data ends"
                raise CorruptLog(report.path, end, f"{message}, but {synced} bytes were on disk at the last checkpoint")
            if report.problems:
                found.torn = number, report.problems[0]
                found.seen_seq = report.highest_seq
            if report.good_lines:
                segment = Segment(number)
                segment.grow(report.good_lines, end, report.first, report.good_last, ())
                segment.flushed_bytes, segment.partitions = end, report.partitions
                stream.segments.append(segment)
                stream.next_number = number + 1
                found.unsealed.append(segment)
                found.digest = found.digest or report.good_digest
                found.tail, found.rewrite_from = segment, synced
            elif found.torn is None:
                break  # an empty file: it was just made, and will be written to under this number

    def _read_segment(
        self, found: RecoveredStream, number: int, before: Head, *, is_leftover: bool = False
    ) -> SegmentReport:
        """Read a segment's lines, and count those past the checkpoint unless its file is to go."""

        base = self._checkpoint.seq

        def count(infos: list[LineInfo]) -> None:
            if infos[-1].seq > base:
                found.fresh_count += len(infos) - bisect_right(infos, base, key=lambda info: info.seq)

        key = found.stream.key
        path, seen = self._layout.segment(key, number), None if is_leftover else count
        return read_segment(self._disk, path, key, before, is_flat=self._is_flat, after_gap=is_leftover, seen=seen)

    # The journal

    def _find_missing(self, frames: list[Frame]) -> dict[StreamKey, Head]:
        """Find what the segments do not hold yet; the last record of each stream with it."""
        ends = {key: _last_of(found.stream) for key, found in self._streams.items()}
        lines = (line for frame in frames for line in frame.lines)
        for key, line, problem in lines_beyond(lines, ends, is_flat=self._is_flat):
            if problem is not None:
                raise problem.as_error()
            (self._streams.get(key) or self._new_stream(key)).missing.append(line)
        return ends

    # What must not be

    def _refuse_lost_files(self) -> None:
        known = {key.path: found for key, found in self._streams.items()}
        for path, mark in self._checkpoint.streams.items():
            found = known.get(path)
            is_held = found is not None and (
                mark.segment <= found.sealed_through
                or any(segment.number == mark.segment for segment in found.unsealed)
                or not mark.bytes
            )
            if not is_held:
                file = self._layout.wal / segment_name(path, mark.segment)
                raise CorruptLog(file, 0, f"the segment is missing; it had {mark.bytes} bytes")

    def _refuse_unfilled_tears(self) -> None:
        for found in self._streams.values():
            if found.torn is not None and not found.missing:
                path, byte_offset, _, message, *_ = found.torn[1]
                problem = f"{message}, and no journal holds what was there"
                raise CorruptLog(path, byte_offset, problem, found.stream.last_seq + 1)

    def _refuse_unknown_files(self) -> None:
        """What lies beyond a tear or a missing file is written anew from the journal, or else kept and reported."""
        for key, found in self._streams.items():
            if found.seen_seq > found.last_seq:
                path, byte_offset = self._layout.segment(key, found.stream.next_number), 0
                if found.torn is not None:
                    path, byte_offset = found.torn[1].path, found.torn[1].byte_offset
                problem = f"damaged or missing, but later records of the stream, up to seq {found.seen_seq}, exist"
                raise CorruptLog(path, byte_offset, f"the segment is {problem}", found.last_seq + 1)

    def _refuse_gaps(self, last_seq: int) -> None:
        """Seqs have no gaps, so the records past the checkpoint can be counted."""
        if self._checkpoint.checkpoint is None:
            return
        held = sum(found.fresh_count + len(found.missing) for found in self._streams.values())
        base = self._checkpoint.seq
        if held < last_seq - base:
            if self._problems:
                raise self._problems[0].as_error()
            problem = f"{last_seq - base - held} of the records after seq {base} are nowhere"
            raise CorruptLog(self._layout.journal, 0, problem, base + 1)


def _last_of(stream: Stream) -> Head:
    return Head(stream.last_offset, stream.last_seq, "")


class Unmoved(NamedTuple):
    """What the journal holds and the segments have no room for."""

    flushed_seq: int
    """Up to here the segments hold everything."""
    lines: list[JournalLine]
    """All lines after that, in seq order."""
    unflushed: list[Unflushed]
    """Where those that the segments lack belong."""
    files: list[tuple[Path, int]]
    """The journal files that hold them, oldest first, and the last seq in each."""


def apply_recovery(disk: Disk, layout: Layout, plan: RecoveryPlan, writer: SegmentWriter) -> Unmoved | None:
    """
    Make the files say what the plan found: cut torn ends, write what is missing, seal, checkpoint, and only then
    remove the journal. Doing it twice, or half and then again, has the same result.

    The disk may be full. So what the journal does not need is cut off first, and its files are emptied one after another, the
    oldest first: there must be room for what one of them holds, and removing it makes that room again.

    Returns:
        What the disk had no room for, which stays in the journal; ``None`` if all is in the segments.
    """
    writes: list[SegmentWrite] = []
    for key, recovered in plan.streams.items():
        for number in recovered.leftovers:
            disk.remove(layout.segment(key, number))
        writes += _adopt(disk, layout, key, recovered, writer)
    if not plan.is_clean:
        _secure_names_and_seals(disk, layout, plan)  # first: a new seal must not outlive the name of its segment
    _write(writer, writes)
    files = _trim_journal(disk, plan)
    for at, (path, last_seq) in enumerate(files):
        firsts = [found.missing[0].info.seq for found in plan.streams.values() if found.missing]
        flushed_seq = min(firsts, default=plan.last_seq + 1) - 1
        writes = _place_missing(plan, last_seq)
        try:
            _write(writer, writes)
            writer.checkpoint(plan.last_seq if at == len(files) - 1 else max(last_seq, plan.checkpoint_seq))
        except OSError as error:
            if not is_full(error):
                raise
            return _leave(disk, plan, flushed_seq, [_unflushed(writes, last_seq)], files[at:])
        disk.remove(path)
    if not files:
        writer.checkpoint(plan.last_seq)
    if plan.journal_files:
        disk.sync_folder(layout.journal)
    return None


def _leave(
    disk: Disk, plan: RecoveryPlan, flushed_seq: int, unflushed: list[Unflushed], files: list[tuple[Path, int]]
) -> Unmoved:
    """Leave these files in the journal; the next commits follow them."""
    unflushed += [_unflushed(_place_missing(plan, last_seq), last_seq) for _, last_seq in files[len(unflushed) :]]
    for path, _ in files:
        # What was cut off must not come back with a power cut: its seqs are given out again.
        file = disk.open(path, write=True)
        try:
            sync_for_good(disk, [file], path)
        finally:
            file.close()
    disk.sync_folder(files[0][0].parent)
    lines = [line for frame in plan.frames for line in frame.lines if line.info.seq > flushed_seq]
    return Unmoved(flushed_seq, lines, unflushed, files)


def _unflushed(writes: list[SegmentWrite], seq: int) -> Unflushed:
    size = sum(len(line) for write in writes for line in write.lines)
    return Unflushed(writes, size, seq, size + len(writes) * _ROOM_PER_WRITE_BYTES)


def _write(writer: SegmentWriter, writes: list[SegmentWrite]) -> None:
    for segment, flushed_bytes, digest in writer.write(writes):
        segment.flushed_bytes = flushed_bytes
        segment.digest = digest


def _trim_journal(disk: Disk, plan: RecoveryPlan) -> list[tuple[Path, int]]:
    """
    Free what the journal holds beyond the frames that count and that are not known to be in the segments.

    Returns:
        The files that are left, and the last seq in each, oldest first.
    """
    covered = plan.checkpoint_seq
    for recovered in plan.streams.values():
        if recovered.missing:  # after a repair a checkpoint may be beyond what the journal still has to give
            covered = min(covered, recovered.missing[0].info.seq - 1)
    ends: dict[Path, tuple[int, int]] = {}
    for frame in plan.frames:
        if frame.last > covered:
            line = frame.lines[-1]
            seq, end = ends.get(frame.path, (0, 0))
            ends[frame.path] = (max(seq, frame.last), max(end, line.byte_offset + len(line.line) + 1))
    for path in plan.journal_files:
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


def _place_missing(plan: RecoveryPlan, last_seq: int) -> list[SegmentWrite]:
    """Where the missing lines up to ``last_seq`` belong."""
    writes: list[SegmentWrite] = []
    for recovered in plan.streams.values():
        own = [line for line in recovered.missing if line.info.seq <= last_seq]
        if own:
            recovered.missing = recovered.missing[len(own) :]
            infos = [line.info for line in own]
            named: Named = [(info.seq, info.meta.partitions) for info in infos if info.meta.partitions]
            lines = [line.data for line in own]
            writes += recovered.stream.place(lines, sum(map(len, lines)), infos[0].head, infos[-1].head, named)
    return writes


def _secure_names_and_seals(disk: Disk, layout: Layout, plan: RecoveryPlan) -> None:
    """
    Sync what may be in the page cache only.

    A writer that was killed, or whose sync failed, leaves names and seal lines that can be read but that a power
    cut would take away; and after this the journal, which could replace them, is gone.
    """
    folders = {layout.wal, layout.seals}
    for key in plan.streams:
        if disk.exists(layout.seal_file(key)):
            renew_last_seal_line(disk, layout, key)
        folders |= {layout.segment(key, 0).parent, layout.seal_file(key).parent}
    for folder in sorted(folders):
        if disk.exists(folder):
            disk.sync_folder(folder)


def _adopt(
    disk: Disk, layout: Layout, key: StreamKey, recovered: RecoveredStream, writer: SegmentWriter
) -> list[SegmentWrite]:
    stream, tail = recovered.stream, recovered.tail
    if recovered.torn is not None and (tail is None or recovered.torn[0] != tail.number):
        _cut(disk, layout.segment(key, recovered.torn[0]), 0, 0)
    if tail is not None and (recovered.torn is not None or tail.size_bytes > recovered.rewrite_from):
        _cut(disk, layout.segment(key, tail.number), tail.size_bytes, recovered.rewrite_from)
    unsealed = recovered.unsealed
    first_number, first_size = (unsealed[0].number, unsealed[0].size_bytes) if unsealed else (0, 0)
    writer.adopt(
        key,
        chain=recovered.chain,
        sealed_through=recovered.sealed_through,
        number=first_number,
        size=first_size,
        digest=recovered.digest,
    )
    writes: list[SegmentWrite] = []
    for segment in unsealed:
        # The writer adopted the first; the others it digests as if they were written now.
        if segment is unsealed[0]:
            write = SegmentWrite(stream, segment, segment.size_bytes, [])
        else:
            content = read_file(disk, layout.segment(key, segment.number)) or b""
            write = SegmentWrite(stream, segment, 0, [content[: segment.size_bytes]])
        write.seals = segment.is_sealed = segment is not unsealed[-1]
        if write.seals or write.lines:
            writes.append(write)
    return writes


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
