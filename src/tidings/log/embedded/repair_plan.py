"""
What a repair would do: which records stay, and what each file becomes.

A topic's offsets have no gaps, so a record that cannot be read divides its topic, and only one side can stay in the
log. The rule: of each stream, keep the longest run of whole records. It may begin at the start, or at the first segment
behind a damaged one: then all before it is marked as dropped, in the way retention does it, and offsets keep their
meaning; seals for those are made from their neighbours. What a journal still holds fills holes first. Other
streams are not touched. A group that is ahead of what is left is set back, in its file and in the backup of it alike;
whether a group of the ended epoch may go on is for the bus to say, so no epoch is changed.

A segment whose lines are whole but are not what was sealed was rewritten by somebody; which line is not known, so
none of it is kept.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from ..errors import CorruptLog
from ..segment import Head, encode_line, head_of, is_whole
from ..settings import LogSettings
from .checkpoint import CHAIN_START, Checkpoint, Seal, StreamMark, chained, encode_segment_drop, make_seal
from .cursors import CursorFiles, set_back
from .disk import Disk, read_file, size_of
from .inspect import (
    START,
    FileProblem,
    JournalLine,
    LineInfo,
    SealReport,
    SegmentReport,
    cursors_ahead,
    read_checkpoint,
    read_journal,
    read_meta,
    read_seals,
    read_segment,
    read_tombstones,
    segment_sizes,
)
from .journal import encode_frame
from .layout import Layout, StreamKey
from .recover import plan_recovery
from .seq_set import SeqSet, find_gaps, read_losses
from .verify import Finding, verify

_BLOCK_BYTES: Final = 1 << 20
_FRAME_LINES_MAX: Final = 10_000
_REPAIRED_JOURNAL: Final = "repaired.jsonl"
_NO_DIGEST: Final = "0" * 64


class SetAside(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that are copied before they leave the log. Paths are relative to the log's folder."""

    path: str
    byte_offset: int
    size: int
    sha256: str
    why: str

    @property
    def copy_name(self) -> str:
        """The copy's path below the folder of this repair."""
        return self.path if not self.byte_offset else f"{self.path}.from-{self.byte_offset}"


class Rewrite(msgspec.Struct, frozen=True, kw_only=True):
    """A file that gets new content as a whole."""

    path: str
    data: bytes
    why: str


class Cut(msgspec.Struct, frozen=True, kw_only=True):
    """A segment that is cut to ``size`` bytes."""

    path: str
    size: int


class StreamRepair(msgspec.Struct, frozen=True, kw_only=True):
    """What becomes of one stream."""

    topic: str
    space_id: str | None
    kept: int
    """Records that stay, or come back from the journal."""
    set_aside: int
    """Whole records that leave the log: they lie on the far side of one that is lost."""
    first_offset: int
    """Of what is kept; one more than ``last_offset`` if nothing is."""
    last_offset: int
    dropped_segments: tuple[int, ...] = ()
    cut_segment: int | None = None
    removed_segments: tuple[int, ...] = ()


class RepairPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What a repair would do, and what the log holds afterwards."""

    is_needed: bool
    loses_records: bool
    """Whether acknowledged records leave the log; then it gets a new epoch."""
    lost_count: int
    """Acknowledged records that will not be in the log, damaged or set aside."""
    lost: tuple[tuple[int, int], ...]
    """The ranges of seqs that are in no line afterwards, but for those of dropped segments."""
    hidden: int
    """Lost records whose seqs lie among those of dropped segments."""
    last_seq: int
    """Where the log goes on from; no seq is given out twice."""
    epoch: str | None
    """The log's epoch now; ``None`` if it cannot be read."""
    problems: tuple[Finding, ...]
    aside: tuple[SetAside, ...] = ()
    rewrites: tuple[Rewrite, ...] = ()
    cuts: tuple[Cut, ...] = ()
    removals: tuple[str, ...] = ()
    streams: tuple[StreamRepair, ...] = ()
    """Those that change."""
    checkpoint: Checkpoint
    layout: str
    settings: LogSettings

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain values, without the bytes to be written."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        del plain["settings"], plain["checkpoint"]
        plain["rewrites"] = [{"path": each.path, "size": len(each.data), "why": each.why} for each in self.rewrites]
        return plain


def plan_repair(disk: Disk, layout: Layout, settings: LogSettings) -> RepairPlan:
    """
    Decide what a repair would do; reads only.

    The log should be closed: a plan made beside a writer is refused by ``carry_out``.

    Raises:
        WorkspaceMissing, WorkspaceUnusable, UnsupportedFormat
    """
    report = verify(disk, layout, settings, ids=False)  # an id that comes twice stops nothing, and repair leaves both
    problems = tuple(finding for finding in report.findings if finding.severity != "info")
    is_needed = not report.is_sound or any(finding.code == "checkpoint.damaged" for finding in problems)
    if report.is_sound:
        try:
            plan_recovery(disk, layout, settings)
        except CorruptLog as error:
            is_needed = True
            problem = Finding(severity="error", code=error.code, path=error.path, message=error.problem, seq=error.seq)
            problems += (problem,)
    return _Planner(disk, layout, settings).plan(problems, is_needed, report.last_seq)


class _FoundSegment(NamedTuple):
    """One segment of a stream as it was found."""

    number: int
    seal: Seal | None
    size: int | None
    report: SegmentReport
    is_whole: bool
    """Whether all of it can stay, but perhaps for bytes appended to a sealed one."""
    good_lines: int
    """Lines from its start that can stay."""
    good_bytes: int
    good_last: Head


class _Run(NamedTuple):
    """Neighbouring segments whose records follow one another: all whole but perhaps the last."""

    first: int
    until: int
    lines: int
    end: Head


def _end_of_drops(seals: SealReport) -> Head:
    last = max(seals.dropped & seals.seals.keys(), default=None)
    return START if last is None else seals.seals[last].last


def _longest_run(segments: list[_FoundSegment], start: Head, held: Callable[[Head], int]) -> _Run:
    """
    The run of most records; of equal ones the later, for it keeps offsets and cursors as they are.

    Damage in a segment ends a run, which keeps the lines before it; the next run begins with the next segment.

    Args:
        start: What the first segment follows.
        held: How many records the journal would add behind a place.
    """
    best, most = _Run(0, 0, 0, start), held(start)
    first, lines, end = 0, 0, start
    for at, segment in enumerate(segments):
        if segment.is_whole or segment.good_lines:
            lines, end = lines + segment.good_lines, segment.good_last
            count = lines + held(end)
            if count >= most:
                best, most = _Run(first, at + 1, lines, end), count
        if not segment.is_whole:
            first, lines = at + 1, 0
    return best


def _complete_drops(seals: SealReport, last: int, sizes: dict[int, int]) -> None:
    """
    Fill in what damaged lines of the seals said about dropped segments.

    Retention drops the oldest first: what lies before a dropped segment and has no file was dropped too. Where its
    seal is gone, the neighbours' seals say what was in it.
    """
    before = START
    for number in range(1, last + 1):
        if number not in sizes:
            seals.dropped.add(number)
        if number not in seals.seals:
            after = next(seals.seals[each] for each in range(number + 1, last + 1) if each in seals.seals)
            seals.seals[number] = _seal_between(number, before, after.first, 0, _NO_DIGEST)
        before = seals.seals[number].last


def _seal_between(number: int, low: Head, high: Head, size: int, sha256: str) -> Seal:
    """A seal for a segment of which only the neighbours are known."""
    first = Head(low.offset + 1, low.seq + 1, low.written_at)
    last = Head(max(low.offset, high.offset - 1), max(low.seq, high.seq - 1), high.written_at)
    return make_seal(number, first, last, lines=max(0, high.offset - low.offset - 1), size=size, sha256=sha256)


def _seal_for(segment: _FoundSegment, seals: SealReport, segments: list[_FoundSegment]) -> Seal:
    """The seal of a segment that is dropped; without one of its own, it says what its neighbours leave for it."""
    if segment.seal is not None:
        return segment.seal
    before = [each.good_last for each in segments if each.number < segment.number]
    after = [each.report.first for each in segments if each.number > segment.number and each.report.lines]
    low = before[-1] if before else _end_of_drops(seals)
    high = after[0] if after else segment.good_last
    return _seal_between(segment.number, low, high, segment.size or 0, segment.report.sha256 or _NO_DIGEST)


class _Planner:
    """Makes one plan for one workspace."""

    def __init__(self, disk: Disk, layout: Layout, settings: LogSettings) -> None:
        self._disk = disk
        self._layout = layout
        self._settings = settings
        self._meta = read_meta(disk, layout)
        self._epoch = None if isinstance(self._meta, FileProblem) else self._meta.epoch
        self._kind = settings.layout if isinstance(self._meta, FileProblem) else self._meta.layout
        self._is_flat = self._kind == "flat"
        self._checkpoint = read_checkpoint(disk, layout)
        self._journal = read_journal(disk, layout)
        self._journal_lines: dict[StreamKey, list[JournalLine]] = {}
        for line in self._journal.lines.values():
            self._journal_lines.setdefault(line.info.stream_key(is_flat=self._is_flat), []).append(line)
        self._sizes = segment_sizes(disk, layout)
        keys = {*self._sizes, *layout.sealed_streams(disk), *self._journal_lines}
        self._keys = sorted(keys, key=lambda key: key.path)
        self._aside: list[SetAside] = []
        self._rewrites: list[Rewrite] = []
        self._cuts: list[Cut] = []
        self._removals: list[str] = []
        self._streams: list[StreamRepair] = []
        self._kept = SeqSet()
        self._dropped: list[Seal] = []
        self._dropped_now = 0
        self._to_journal: dict[int, bytes] = {}
        self._ends: dict[StreamKey, tuple[Head, int]] = {}

    def plan(self, problems: tuple[Finding, ...], is_needed: bool, known_seq: int) -> RepairPlan:
        """
        Decide.

        Args:
            problems: What was found, as the plan lists it.
            is_needed: Whether any of it asks for a repair; if not, the plan changes nothing.
            known_seq: Up to where verify could follow the log.
        """
        found = {key: self._read_stream(key) for key in self._keys} if is_needed else {}
        _, last_seq = self._journal.follow(max(known_seq, self._acknowledged(found)))
        changed: set[str] = set()
        for key, (seals, segments) in found.items():
            if self._plan_stream(key, seals, segments, last_seq):
                changed.add(key.path)
        is_lossy, lost, hidden = False, list[tuple[int, int]](), 0
        if is_needed:
            self._plan_journal()
            self._plan_tombstones()
            is_cursor_ahead = self._plan_cursors()
            self._set_aside(self._layout.checkpoint, 0, None, "the checkpoint is written anew")
            losses, _ = read_losses(self._disk, self._layout, self._epoch)
            lost, hidden = find_gaps(self._kept, last_seq, self._dropped, losses)
            is_lossy = bool(
                lost or hidden or self._dropped_now or is_cursor_ahead or isinstance(self._meta, FileProblem)
            )
        if is_lossy:
            self._set_aside(self._layout.meta, 0, None, "the log gets a new epoch")
        return RepairPlan(
            is_needed=is_needed,
            loses_records=is_lossy,
            lost_count=sum(last - first + 1 for first, last in lost) + hidden + self._dropped_now,
            lost=tuple(lost),
            hidden=hidden,
            last_seq=last_seq,
            epoch=self._epoch,
            problems=problems,
            aside=tuple(self._aside),
            rewrites=tuple(self._rewrites),
            cuts=tuple(self._cuts),
            removals=tuple(self._removals),
            streams=tuple(self._streams),
            checkpoint=Checkpoint(last_seq, self._marks(changed)),
            layout=self._kind,
            settings=self._settings,
        )

    def _marks(self, changed: set[str]) -> dict[str, StreamMark]:
        """
        What the checkpoint still says: nothing about streams that change or have lost something.

        A repair that stops half-way must not be contradicted by it.
        """
        sizes = {key.path: own for key, own in self._sizes.items()}
        return {
            path: mark
            for path, mark in self._checkpoint.streams.items()
            if path not in changed and sizes.get(path, {}).get(mark.segment, -1) >= mark.bytes
        }

    # Finding out what is whole

    def _read_stream(self, key: StreamKey) -> tuple[SealReport, list[_FoundSegment]]:
        seals, sizes = read_seals(self._disk, self._layout, key), self._sizes.get(key, {})
        first = max((number for number in seals.dropped if number in seals.seals), default=0)
        _complete_drops(seals, first, sizes)
        numbers = {*seals.seals, *sizes} - seals.dropped
        before, after_gap = seals.seals[first].last if first else START, False
        segments: list[_FoundSegment] = []
        for number in range(first + 1, max(numbers, default=first) + 1):
            segment = self._segment(key, number, seals, sizes.get(number), before, after_gap=after_gap)
            segments.append(segment)
            end = segment.good_last
            if not segment.is_whole and segment.seal is not None:
                end = segment.seal.last
            after_gap = not segment.is_whole and segment.seal is None
            before = end if end.seq >= before.seq else before
        return seals, segments

    def _segment(
        self, key: StreamKey, number: int, seals: SealReport, size: int | None, before: Head, *, after_gap: bool
    ) -> _FoundSegment:
        seal = seals.seals.get(number)
        kept_size = size if seal is None or size is None else min(size, seal.bytes)
        report = self._read(key, number, kept_size, before, after_gap=after_gap)
        is_altered = seal is not None and report.size == seal.bytes and report.sha256 != seal.sha256
        if report.is_missing or (is_altered and not report.problems):
            return _FoundSegment(number, seal, size, report, False, 0, 0, before)
        is_whole = not report.problems and (seal is None or report.size == seal.bytes)
        return _FoundSegment(
            number, seal, size, report, is_whole, report.good_lines, report.good_bytes, report.good_last
        )

    def _read(
        self,
        key: StreamKey,
        number: int,
        size: int | None,
        before: Head,
        *,
        after_gap: bool,
        seen: Callable[[list[LineInfo]], None] | None = None,
    ) -> SegmentReport:
        path = self._layout.segment(key, number)
        return read_segment(
            self._disk, path, key, before, is_flat=self._is_flat, after_gap=after_gap, size=size, seen=seen
        )

    def _keep(self, infos: list[LineInfo]) -> None:
        self._kept.add_rising([info.seq for info in infos])

    def _acknowledged(self, found: dict[StreamKey, tuple[SealReport, list[_FoundSegment]]]) -> int:
        known = [self._journal.durable, self._checkpoint.seq]
        for seals, segments in found.values():
            known += [seal.last_seq for seal in seals.seals.values()]
            known += [segment.report.last.seq for segment in segments]
        losses, _ = read_losses(self._disk, self._layout, self._epoch)
        known += [last for loss in losses for _, last in loss.lost]
        return max(known)

    # Deciding what stays

    def _plan_stream(self, key: StreamKey, seals: SealReport, segments: list[_FoundSegment], last_seq: int) -> bool:
        """Plan one stream; whether anything of it changes."""
        run = _longest_run(segments, _end_of_drops(seals), lambda end: self._held(key, end, last_seq))
        before, kept = segments[: run.first], segments[run.first : run.until]
        dropped = [_seal_for(each, seals, segments) for each in before]
        self._dropped += [seals.seals[number] for number in sorted(seals.dropped & set(seals.seals))] + dropped
        self._dropped_now += sum(seal.lines for seal in dropped if seal.segment not in seals.dropped)
        for segment in before:
            self._remove_segment(key, segment, "it lies before records that are kept, on the far side of damage")
        cut: int | None = None
        for segment in kept:
            size = segment.good_bytes if not segment.is_whole or segment.seal is None else segment.seal.bytes
            if segment.size is not None and segment.size > size:
                cut = segment.number
                self._cut_segment(key, segment, size)
            if size:
                self._read(key, segment.number, size, START, after_gap=True, seen=self._keep)
        removed = segments[run.until :]
        end, to_journal = self._fill(key, run, segments, last_seq)
        for segment in removed:
            self._remove_segment(key, segment, "it lies behind a record that cannot be read")
        sealed = self._seals(key, seals, dropped, kept)
        is_changed = bool(before or removed or cut is not None or sealed is not None)
        if sealed is not None:
            self._rewrite(self._layout.seal_file(key), sealed, "the seals follow the segments that are kept")
        number = kept[-1].number if kept else (segments[0].number if segments else 1)
        self._ends[key] = end, number
        if is_changed:
            in_files = sum(segment.report.lines for segment in segments)
            starts = [segment.report.first.offset for segment in kept if segment.good_lines]
            self._streams.append(
                StreamRepair(
                    topic=key.topic,
                    space_id=key.space_id,
                    kept=run.lines + len(to_journal),
                    set_aside=max(0, in_files - run.lines - sum(1 for seq in to_journal if seq in self._from_behind)),
                    first_offset=starts[0] if starts else end.offset + 1 - len(to_journal),
                    last_offset=end.offset,
                    dropped_segments=tuple(segment.number for segment in before),
                    cut_segment=cut,
                    removed_segments=tuple(segment.number for segment in removed if segment.size is not None),
                )
            )
        return is_changed

    def _journal_after(self, key: StreamKey, end: Head, last_seq: int) -> list[JournalLine]:
        return [line for line in self._journal_lines.get(key, []) if end.seq < line.info.seq <= last_seq]

    def _held(self, key: StreamKey, end: Head, last_seq: int) -> int:
        """How many records the journal would add to a stream that ends there."""
        lines = self._journal_after(key, end, last_seq)
        if not self._is_flat:
            return len(lines)
        offsets, offset = {line.info.offset for line in lines}, end.offset
        while offset + 1 in offsets:
            offset += 1
        return offset - end.offset

    def _fill(self, key: StreamKey, run: _Run, segments: list[_FoundSegment], last_seq: int) -> tuple[Head, set[int]]:
        """Carry the run on with lines from the journal and, where those fill the hole, from behind it."""
        end, to_journal = run.end, set[int]()
        held = self._journal_after(key, end, last_seq)
        lines = {line.info.seq: line.data for line in held}
        offsets = {line.info.offset for line in held}
        self._from_behind: set[int] = set()
        is_last = run.until == len(segments)
        if end.offset + 1 in offsets or (not self._is_flat and is_last):
            for segment in segments[max(run.first, run.until - 1) :]:
                for line in self._lines_behind(key, segment, end):
                    head = head_of(line)
                    if head is not None and head.seq not in lines:
                        lines[head.seq] = line
                        self._from_behind.add(head.seq)
        for seq in sorted(lines):
            head = head_of(lines[seq])
            if head is None or head.offset <= end.offset or (self._is_flat and head.offset != end.offset + 1):
                continue
            end = Head(head.offset, seq, head.written_at)
            to_journal.add(seq)
            self._kept.add(seq)
            self._to_journal[seq] = lines[seq]
        return end, to_journal

    def _lines_behind(self, key: StreamKey, segment: _FoundSegment, end: Head) -> list[bytes]:
        if not segment.report.problems and not segment.is_whole:
            return []  # gone, or altered as a whole
        wanted = set(segment.report.after) if segment.report.problems else None
        data = read_file(self._disk, self._layout.segment(key, segment.number)) or b""
        found: list[bytes] = []
        for line in data.splitlines(keepends=True):
            head = head_of(line) if line.endswith(b"\n") and is_whole(line[:-1]) else None
            if head is not None and head.seq > end.seq and (wanted is None or head.seq in wanted):
                found.append(line)
        return found

    def _seals(self, key: StreamKey, seals: SealReport, dropped: list[Seal], kept: list[_FoundSegment]) -> bytes | None:
        """The stream's seals after the repair; ``None`` if they are right as they are."""
        whole = [segment for segment in kept if segment.is_whole]
        last_sealed = max((segment.number for segment in whole if segment.seal is not None), default=0)
        entries = [seals.seals[number] for number in sorted(seals.dropped & set(seals.seals))] + dropped
        for segment in whole:
            if segment.number <= last_sealed:
                seal, report = segment.seal, segment.report
                if seal is None or not report.agrees_with(seal):
                    seal = make_seal(
                        segment.number,
                        report.first,
                        report.last,
                        lines=report.lines,
                        size=report.good_bytes,
                        sha256=report.sha256,
                        partitions=report.partitions,
                    )
                entries.append(seal)
        drops = sorted(seals.dropped & set(seals.seals)) + [seal.segment for seal in dropped]
        is_same = not dropped and not seals.problems and set(seals.dropped) == set(drops)
        if is_same and entries == [seals.seals[number] for number in sorted(seals.seals)]:
            return None
        data, chain = b"", CHAIN_START
        for seal in entries:
            chain = chained(chain, seal.sha256)
            data += encode_line(msgspec.json.encode(msgspec.structs.replace(seal, chain=chain))[1:])
        return data + b"".join(map(encode_segment_drop, drops))

    # The other files

    def _plan_journal(self) -> None:
        for path in self._journal.crcs:
            used = len((read_file(self._disk, path) or b"").rstrip(b"\0"))
            if used:
                self._set_aside(path, 0, used, "the journal is written anew")
            if path.name != _REPAIRED_JOURNAL or not self._to_journal:
                self._removals.append(self._relative(path))
        if self._to_journal:
            frames = b"".join(_frames(self._to_journal))
            why = "records that the segments do not hold yet"
            target = self._relative(self._layout.journal / _REPAIRED_JOURNAL)
            self._rewrites.insert(0, Rewrite(path=target, data=frames, why=why))

    def _plan_tombstones(self) -> None:
        for key, numbers in self._layout.id_files(self._disk).items():
            for number in numbers:
                lines = list(read_tombstones(self._disk, self._layout, key, number))
                good = [line for line, found in lines if not isinstance(found, FileProblem)]
                if len(good) < len(lines):
                    path = self._layout.id_file(key, number)
                    self._rewrite(path, b"".join(good), "ids that cannot be read are taken out")

    def _plan_cursors(self) -> bool:
        """Set groups back that are ahead of the log; whether there are any."""
        groups = CursorFiles(self._disk, self._layout.offsets).read_all()
        ahead = list(cursors_ahead(groups, {key: head for key, (head, _) in self._ends.items()}, self._epoch))
        for cursor, _ in ahead:
            ends = [(head.offset, number) for key, (head, number) in self._ends.items() if key.topic == cursor.topic]
            end, number = max(ends, default=(-1, 1))
            self._rewrite(cursor.path, set_back(cursor, end, number), f"the topic ends at offset {end}")
        return bool(ahead)

    # What becomes of a file

    def _relative(self, path: Path) -> str:
        return str(path.relative_to(self._layout.root))

    def _remove_segment(self, key: StreamKey, segment: _FoundSegment, why: str) -> None:
        if segment.size is not None:
            path = self._layout.segment(key, segment.number)
            self._set_aside(path, 0, None, why)
            self._removals.append(self._relative(path))

    def _cut_segment(self, key: StreamKey, segment: _FoundSegment, size: int) -> None:
        path = self._layout.segment(key, segment.number)
        why = "it lies behind a record that cannot be read"
        if segment.is_whole:
            why = "bytes behind the end of a sealed segment"
        elif segment.report.problems:
            why = segment.report.problems[0].message
        self._set_aside(path, size, None, why)
        self._cuts.append(Cut(path=self._relative(path), size=size))

    def _rewrite(self, path: Path, data: bytes, why: str) -> None:
        self._set_aside(path, 0, None, why)
        self._rewrites.append(Rewrite(path=self._relative(path), data=data, why=why))

    def _set_aside(self, path: Path, byte_offset: int, size: int | None, why: str) -> None:
        found = size_of(self._disk, path)
        if found is None:
            return
        size = found - byte_offset if size is None else size
        sha256 = digest_of(self._disk, path, byte_offset, size)
        self._aside.append(
            SetAside(path=self._relative(path), byte_offset=byte_offset, size=size, sha256=sha256, why=why)
        )


def _frames(lines: dict[int, bytes]) -> Iterable[bytes]:
    """Journal frames of these lines: neighbouring seqs share one."""
    run: list[int] = []
    for seq in [*sorted(lines), -1]:
        if run and (seq != run[-1] + 1 or len(run) >= _FRAME_LINES_MAX):
            yield encode_frame([lines[each] for each in run], first=run[0], last=run[-1], durable=0)
            run = []
        run.append(seq)


def digest_of(disk: Disk, path: Path, byte_offset: int, size: int) -> str:
    """The SHA-256 of a part of a file."""
    digest = hashlib.sha256()
    file = disk.open(path)
    try:
        for at in range(byte_offset, byte_offset + size, _BLOCK_BYTES):
            digest.update(file.read(at, min(_BLOCK_BYTES, byte_offset + size - at)))
    finally:
        file.close()
    return digest.hexdigest()
