"""
Verify: read every byte of a log, change nothing, and name each place that is not as it was written.

Checked are the lines (checksum, format, the order of offset, seq and write time in each stream), the whole (every
seq up to the last is in exactly one line, or in a segment that was dropped on purpose, or noted as lost by an earlier
repair), the sealed segments (size, SHA-256, the chain of digests), checkpoint, journal, dedupe tombstones and group cursors, that
no event id comes twice, whoever chose it, and that the index knows each that does not lead to its record by itself.

Damage is an answer here, never an exception. A log that is being written can be verified: files are read in an
order in which a record cannot slip from one not yet read to one read already, and only as far as they reached at
the start. If anything was written meanwhile the report says so, and what that could explain counts as no damage.

Memory: a bit a record, a block of one file, and what the journal holds; event ids go through a temporary file.
"""

from __future__ import annotations

import contextlib
import hashlib
import heapq
import re
import tempfile
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import IO, Any, Final, Literal, NamedTuple

import msgspec

from tidings.core.ids import seq_in_event_id

from ..encoding import content_digest
from ..record import Record
from ..segment import Head, decode, segment_name, split_segment_name
from ..settings import LogSettings
from .checkpoint import Seal
from .cursors import CursorFiles
from .disk import Disk, read_file, size_of
from .index import Index
from .inspect import (
    START,
    CheckpointReport,
    FileProblem,
    JournalReport,
    LineInfo,
    SealReport,
    SegmentReport,
    cursors_ahead,
    lines_beyond,
    read_checkpoint,
    read_journal,
    read_meta,
    read_seals,
    read_segment,
    read_tombstones,
    segment_sizes,
)
from .layout import Layout, StreamKey
from .seq_set import SeqSet, find_gaps, read_losses

_GAPS_MAX: Final = 100
_DUPLICATES_MAX: Final = 1000
_RUN_IDS: Final = 500_000
_ID_BYTES: Final = 16
_READ_IDS: Final = 4096

Severity = Literal["error", "warning", "info"]


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
    """How far verifying is; reported after every segment."""

    path: str
    segments: int
    segments_total: int
    lines: int
    bytes: int
    bytes_total: int


class VerifyReport(msgspec.Struct, frozen=True, kw_only=True):
    """All that was found, by file and place in it, and how much was read."""

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


class _Snapshot(NamedTuple):
    """The log's files at one moment, read in the order that records travel in."""

    checkpoint: CheckpointReport
    journal: JournalReport
    sizes: dict[StreamKey, dict[int, int]]
    seals: dict[StreamKey, SealReport]

    @property
    def marks(self) -> tuple[object, ...]:
        """What differs if anything was written between two snapshots."""
        return self.checkpoint.data, self.journal.crcs, self.sizes, {key: each.crc for key, each in self.seals.items()}


def _take_snapshot(disk: Disk, layout: Layout) -> _Snapshot:
    # A record goes from the journal to a segment and is sealed there. Read in that order, one that moves
    # meanwhile is seen twice at worst.
    checkpoint, journal = read_checkpoint(disk, layout), read_journal(disk, layout)
    sizes = segment_sizes(disk, layout)
    keys = {*sizes, *layout.sealed_streams(disk)}
    return _Snapshot(checkpoint, journal, sizes, {key: read_seals(disk, layout, key) for key in keys})


def verify(
    disk: Disk,
    layout: Layout,
    settings: LogSettings,
    *,
    ids: bool = True,
    index: Index | None = None,
    progress: Callable[[VerifyProgress], None] | None = None,
    findings_max: int = 10_000,
) -> VerifyReport:
    """
    Check a whole log without changing it.

    Args:
        ids: Look for event ids that come twice; without it, only for what opening the log depends on.
        index: Is asked whether it covers the log and, with ``ids``, whether it knows each id.
        progress: Called after every segment.
        findings_max: How many findings to keep; further ones are counted.

    Raises:
        WorkspaceMissing: There is no log.
        WorkspaceUnusable: It cannot be read.
        UnsupportedFormat: A newer version wrote it.
    """
    return _Verifier(disk, layout, settings, index, progress, findings_max).run(ids=ids)


class _Verifier:
    """One check of one workspace."""

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
        self._index = index
        self._progress = progress
        self._findings_max = findings_max
        self._findings: list[tuple[Finding, bool]] = []
        """With each: whether a writer at work would explain it."""
        self._omitted = 0
        self._covers = index.covers if index is not None else 0  # as of now: a writer at work carries it on
        meta = read_meta(disk, layout)
        if isinstance(meta, FileProblem):
            self._note_problem("error", meta, hint="repair gives the log a new epoch")
        self._epoch = None if isinstance(meta, FileProblem) else meta.epoch
        self._is_flat = (settings.layout if isinstance(meta, FileProblem) else meta.layout) == "flat"
        # Before the log: a group may acknowledge what comes meanwhile.
        self._groups = CursorFiles(disk, layout.offsets).read_all()
        self._start = _take_snapshot(disk, layout)
        self._journal_lines = self._start.journal.lines
        self._sizes = [size for sizes in self._start.sizes.values() for size in sizes.values()]
        self._bytes_total = sum(self._sizes)
        self._ids: DuplicateIds | None = None
        self._segments = self._lines = self._bytes = 0
        self._seqs = SeqSet()
        self._ends: dict[StreamKey, Head] = {}
        """The last record of each stream."""
        self._dropped: list[Seal] = []
        self._seen_seq = 0
        """The highest seq behind a tear: it was committed, so the journal must lead at least there."""

    def run(self, *, ids: bool) -> VerifyReport:
        start = self._start
        with contextlib.ExitStack() as stack:
            self._ids = stack.enter_context(DuplicateIds()) if ids else None
            for folder in self._layout.missing_folders(self._disk):
                self._note("info", "folder.missing", folder, "the folder is missing; it is made when the log is opened")
            self._check_checkpoint()
            for key in sorted(start.seals, key=lambda key: key.path):
                self._check_stream(key)
            last_seq, pending = self._check_journal()
            self._check_tombstones()
            self._check_cursors()
            self._check_seqs(last_seq)
            self._check_ids()
            self._check_index(last_seq)
            self._check_names()
        was_written = _take_snapshot(self._disk, self._layout).marks != start.marks
        return VerifyReport(
            findings=self._sorted_findings(was_written=was_written),
            epoch=self._epoch,
            last_seq=last_seq,
            segments=self._segments,
            lines=self._lines,
            bytes=self._bytes,
            journal_lines=pending,
            was_written=was_written,
            chain_heads={key.path: seals.head for key, seals in start.seals.items() if seals.seals},
            omitted=self._omitted,
        )

    # Findings

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
        """
        Write down what was found.

        Args:
            if_written: It is damage only if nobody wrote to the log meanwhile.
        """
        if len(self._findings) >= self._findings_max:
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
        self._findings.append((finding, if_written))

    def _note_problem(
        self,
        severity: Severity,
        problem: FileProblem,
        *,
        topic: str | None = None,
        hint: str | None = None,
        if_written: bool = False,
    ) -> None:
        path, at, code, message, seq, offset = problem
        self._note(
            severity, code, path, message, at, seq=seq, topic=topic, offset=offset, hint=hint, if_written=if_written
        )

    def _sorted_findings(self, *, was_written: bool) -> tuple[Finding, ...]:
        """The findings by file and byte, now that it is known whether the log was written to."""
        findings: list[Finding] = []
        for finding, if_written in self._findings:
            if if_written and was_written:
                message = f"{finding.message} (the log was being written: verify again, or when it is closed)"
                findings.append(msgspec.structs.replace(finding, severity="info", message=message))
            else:
                findings.append(finding)
        return tuple(sorted(findings, key=lambda finding: (finding.path, finding.byte_offset)))

    # Streams

    def _check_stream(self, key: StreamKey) -> None:
        seals, sizes = self._start.seals[key], self._start.sizes.get(key, {})
        for problem in seals.problems:
            self._note_problem("error", problem, topic=key.topic)
        if seals.torn_at is not None:
            message = "the last seal was torn by a crash; opening the log writes it again"
            # Harmless: without its seal the segment counts as open.
            self._note("info", "seal.torn", seals.path, message, seals.torn_at, topic=key.topic)
        end, expected = START, 1
        for number in sorted({*seals.seals, *sizes}):
            seal = seals.seals.get(number)
            if number > expected and (expected not in seals.dropped or seals.problems):
                message = "neither the segment nor its seal is here"
                self._note_missing(key, self._layout.segment(key, expected), message)
            expected = number + 1
            if number in seals.dropped:
                end = self._check_dropped(key, number, seal, end, is_left=number in sizes)
            elif seal is not None:
                end = self._check_sealed(key, seal, end)
            else:
                if number < seals.last:
                    self._note("error", "seal.missing", seals.path, f"segment {number} has no seal", topic=key.topic)
                end, is_over = self._check_open(key, number, sizes[number], end, is_last=number == max(sizes))
                if is_over:
                    break
        self._check_mark(key, seals, sizes)
        self._ends[key] = end

    def _check_dropped(self, key: StreamKey, number: int, seal: Seal | None, end: Head, *, is_left: bool) -> Head:
        if is_left:
            path = self._layout.segment(key, number)
            message = "the segment was dropped and its file is still here; opening the log removes it"
            self._note("info", "segment.leftover", path, message, topic=key.topic, if_written=True)
        if seal is None:
            return end
        self._dropped.append(seal)
        return seal.last

    def _check_mark(self, key: StreamKey, seals: SealReport, sizes: dict[int, int]) -> None:
        mark = self._start.checkpoint.streams.get(key.path)
        if mark is None or not mark.bytes or mark.segment <= seals.last:
            return
        path, size = self._layout.segment(key, mark.segment), sizes.get(mark.segment)
        if size is None:
            self._note_missing(key, path, f"the segment is missing; it had {mark.bytes} bytes")
        elif size < mark.bytes:
            message = f"the data ends, but {mark.bytes} bytes were on disk at the last checkpoint"
            self._note("error", "segment.short", path, message, size, topic=key.topic)

    def _note_missing(self, key: StreamKey, path: Path, message: str, seq: int | None = None) -> None:
        self._note("error", "segment.missing", path, message, seq=seq, topic=key.topic)

    def _check_sealed(self, key: StreamKey, seal: Seal, before: Head) -> Head:
        path = self._layout.segment(key, seal.segment)
        size = size_of(self._disk, path)
        if size is None:
            if seal.segment in read_seals(self._disk, self._layout, key).dropped:  # meanwhile, by a writer at work
                self._dropped.append(seal)
            else:
                message = f"the sealed segment is missing, with {seal.lines} records from offset {seal.first_offset}"
                self._note_missing(key, path, message, seal.first_seq)
            return seal.last
        if size != seal.bytes:
            message = f"the sealed segment has {size} bytes; it was sealed with {seal.bytes}"
            self._note("error", "segment.size", path, message, min(size, seal.bytes), topic=key.topic)
        report = self._read(key, path, min(size, seal.bytes), before)
        self._add_behind_problems(report)
        self._note_problems(key, report)
        if report.sha256 != seal.sha256:
            at = report.problems[0].byte_offset if report.problems else 0
            message = f"segment {seal.segment} is not what was sealed: its SHA-256 does not match its seal"
            self._note("error", "segment.digest", path, message, at, seq=seal.first_seq, topic=key.topic)
        elif not report.problems and not report.agrees_with(seal):
            message = f"the seal of segment {seal.segment} does not describe it"
            self._note("error", "seal.bounds", self._layout.seal_file(key), message, topic=key.topic)
        return seal.last

    def _check_open(self, key: StreamKey, number: int, size: int, before: Head, *, is_last: bool) -> tuple[Head, bool]:
        """Check a segment without a seal; whether what comes after it is for recovery to write again."""
        path = self._layout.segment(key, number)
        report = self._read(key, path, size, before)
        if not report.problems:
            self._note_problems(key, report)
            return report.last, False
        synced, end = self._start.checkpoint.synced_bytes(key, number, size), report.good_last
        if report.good_bytes >= synced and self._is_in_journal(key, end):
            message = "the segment ends torn; the journal holds what belongs there, and opening the log writes it"
            self._seen_seq = max(self._seen_seq, report.highest_seq)
            self._note("info", "segment.torn", path, message, report.good_bytes, seq=end.seq + 1, topic=key.topic)
            return end, True
        self._add_behind_problems(report)
        is_growing = is_last and report.problem_count == 1 and report.problems[0].code == "line.unfinished"
        self._note_problems(key, report, if_written=is_growing)
        return report.last, False

    def _is_in_journal(self, key: StreamKey, end: Head) -> bool:
        return any(
            info.seq > end.seq
            and info.stream_key(is_flat=self._is_flat) == key
            and (not self._is_flat or info.offset == end.offset + 1)
            for info in (line.info for line in self._journal_lines.values())
        )

    def _read(self, key: StreamKey, path: Path, size: int, before: Head) -> SegmentReport:
        def seen(infos: list[LineInfo]) -> None:
            for seq in self._seqs.add_rising([info.seq for info in infos]):
                self._note_twice(seq, path)
            if self._ids is not None:
                self._ids.add((info.seq, info.meta.event_id) for info in infos)
                self._check_indexed(infos, path)

        report = read_segment(self._disk, path, key, before, is_flat=self._is_flat, size=size, seen=seen)
        if report.is_missing:  # dropped a moment ago
            self._note("error", "segment.missing", path, "the segment went away", topic=key.topic, if_written=True)
            return report
        self._segments += 1
        self._lines += report.lines
        self._bytes += size
        if self._progress is not None:
            self._progress(
                VerifyProgress(
                    path=str(path.relative_to(self._layout.workspace)),
                    segments=self._segments,
                    segments_total=len(self._sizes),
                    lines=self._lines,
                    bytes=self._bytes,
                    bytes_total=self._bytes_total,
                )
            )
        return report

    def _add_behind_problems(self, report: SegmentReport) -> None:
        for seq in report.after:
            if not self._seqs.add(seq):
                self._note_twice(seq, report.path)

    def _note_twice(self, seq: int, path: Path) -> None:
        self._note("error", "seq.twice", path, f"another line has seq {seq} too", seq=seq)

    def _check_indexed(self, infos: list[LineInfo], path: Path) -> None:
        if self._index is None:
            return
        for seq, event_id in ((info.seq, info.meta.event_id) for info in infos):
            # What leads to its record by itself needs no index.
            is_known = seq > self._covers or seq_in_event_id(event_id) == seq
            if not is_known and all(place.seq != seq for place in self._index.find_id(event_id)):
                hint = "remove the folder index/ while the log is closed: it is built again"
                message = f"the index does not know the event id of seq {seq}: a repeat of it would be stored"
                self._note("warning", "index.unknown_id", path, message, seq=seq, hint=hint)

    def _note_problems(self, key: StreamKey, report: SegmentReport, *, if_written: bool = False) -> None:
        for problem in report.problems:
            self._note_problem("error", problem, topic=key.topic, if_written=if_written)
        self._omitted += report.problem_count - len(report.problems)
        if report.late is not None:
            self._note_problem("warning", report.late, topic=key.topic)

    # The log as a whole

    def _check_checkpoint(self) -> None:
        checkpoint = self._start.checkpoint
        if checkpoint.data is not None and checkpoint.checkpoint is None:
            path, message = self._layout.checkpoint, "its checksum does not match"
            hint = "opening the log writes a new one; until then a lost end is harder to tell from a torn one"
            self._note("warning", "checkpoint.damaged", path, message, hint=hint)
        known = {key.path for key in self._start.seals}
        for name, mark in checkpoint.streams.items():
            if name not in known and mark.bytes:
                path = self._layout.wal / segment_name(name, mark.segment)
                self._note("error", "segment.missing", path, f"the segment is missing; it had {mark.bytes} bytes")

    def _check_journal(self) -> tuple[int, int]:
        """Count in what only the journal has; the last seq of the log, and how many those are."""
        journal = self._start.journal
        in_segments = max([self._start.checkpoint.seq, *(end.seq for end in self._ends.values())])
        (_, last_seq), pending = journal.follow(in_segments), 0
        lines = [self._journal_lines[seq] for seq in sorted(self._journal_lines) if seq <= last_seq]
        for key, line, problem in lines_beyond(lines, self._ends, is_flat=self._is_flat):
            if problem is not None:
                self._note_problem("error", problem, topic=key.topic, if_written=True)
            if self._seqs.add(line.info.seq):
                pending += 1
                if self._ids is not None:
                    self._ids.add([(line.info.seq, line.info.meta.event_id)])
        loss = journal.loss(self._layout.journal, last_seq, max(journal.durable, self._seen_seq))
        if loss is not None:
            self._note_problem("error", loss, if_written=True)
        return last_seq, pending

    def _tombstones(self) -> Iterator[tuple[StreamKey, int, Record | FileProblem]]:
        for key, numbers in self._layout.id_files(self._disk).items():
            for number in numbers:
                for _, found in read_tombstones(self._disk, self._layout, key, number):
                    yield key, number, found

    def _check_tombstones(self) -> None:
        for key, number, found in self._tombstones():
            if isinstance(found, FileProblem):
                hint = "repair takes the line out; the id in it is forgotten"
                self._note_problem("error", found, topic=key.topic, hint=hint)
            elif self._ids is not None and key in self._start.seals and number in self._start.seals[key].dropped:
                self._ids.add([(found.seq, found.meta.event_id)])

    def _check_cursors(self) -> None:
        for files in self._groups:
            for path in (each.path for each in files.found if each.stored is None):
                hint = "the group goes on from the other of its two files"
                if files.current is None:
                    hint = "the group has no file that can be read: set its position with a seek"
                message = "the cursor cannot be read"
                self._note("warning", "cursor.damaged", path, message, topic=files.topic, hint=hint)
        for cursor, problem in cursors_ahead(self._groups, self._ends, self._epoch):
            self._note_problem("error", problem, topic=cursor.topic)

    def _check_seqs(self, last_seq: int) -> None:
        losses, damaged = read_losses(self._disk, self._layout, self._epoch)
        for path in damaged:
            self._note("warning", "aside.damaged", path, "the manifest of an earlier repair cannot be read")
        _, known = self._start.journal.follow(self._start.checkpoint.seq)
        gaps = find_gaps(self._seqs, last_seq, self._dropped, losses)
        for first, last in gaps.unexplained[:_GAPS_MAX]:
            what = f"seq {first} is" if first == last else f"the {last - first + 1} seqs from {first} to {last} are"
            message = f"{what} in no line, and nothing says why"
            self._note("error", "seq.gap", self._layout.wal, message, seq=first, if_written=last > known)
        self._omitted += max(0, len(gaps.unexplained) - _GAPS_MAX)
        if gaps.hidden:
            message = f"{gaps.hidden} more records are missing than the dropped segments held"
            self._note("error", "seq.count", self._layout.wal, message, if_written=True)

    def _check_ids(self) -> None:
        pairs = [] if self._ids is None else list(islice(self._ids.twice(), _DUPLICATES_MAX))
        contents = self._contents({seq for pair in pairs for seq in pair}) if pairs else {}
        hint = "repair leaves both: nothing in the files says which of them has a right to the id"
        for first, second in pairs:
            one, other = contents.get(first), contents.get(second)
            compared = "contents that cannot be compared, as one is sealed or gone"
            if one is not None and other is not None:
                compared = "the same content" if one == other else "different contents"
            message = f"the records at seq {first} and seq {second} have the same event id, and {compared}"
            self._note("error", "id.twice", self._layout.wal, message, seq=second, hint=hint)

    def _contents(self, seqs: set[int]) -> dict[int, str]:
        """A digest of the content of each of these records, tombstones included; sealed ones are left out."""
        lines: list[bytes] = []
        wanted = sorted(seqs)
        for key, sizes in self._start.sizes.items():
            for number in sizes:
                seal = self._start.seals[key].seals.get(number)
                low, high = (seal.first_seq, seal.last_seq) if seal is not None else (0, wanted[-1])
                within = wanted[bisect_left(wanted, low) : bisect_right(wanted, high)]
                data = (read_file(self._disk, self._layout.segment(key, number)) or b"") if within else b""
                for seq in within:
                    line = re.search(rb'^\{"crc":"[0-9a-f]{8}","offset":[0-9]+,"seq":%d,.*$' % seq, data, re.MULTILINE)
                    lines += [line[0]] if line is not None else []
        lines += [self._journal_lines[seq].line for seq in seqs & self._journal_lines.keys()]
        records = [record for line in lines if isinstance(record := decode(line), Record)]
        found = {record.seq: content_digest(record).hex() for record in records if record.meta.sealed is None}
        for _, _, tombstone in self._tombstones():
            if isinstance(tombstone, Record) and tombstone.seq in seqs and tombstone.payload.get("digest"):
                found[tombstone.seq] = tombstone.payload["digest"]
        return found

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


class DuplicateIds:
    """
    Finds ids that come twice: their digests in sorted runs, merged at the end.

    The runs lie in a temporary file, which is made when the first one is full: a small log needs none.
    """

    def __init__(self, run_ids: int = _RUN_IDS) -> None:
        self._run_ids = run_ids
        self._file: IO[bytes] | None = None
        self._runs: list[tuple[int, int]] = []
        self._fresh: list[bytes] = []

    def __enter__(self) -> DuplicateIds:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, seqs_and_ids: Iterable[tuple[int, str]]) -> None:
        """Add the ids of these records."""
        blake2b = hashlib.blake2b
        self._fresh += [
            blake2b(event_id.encode("utf-8", "surrogatepass"), digest_size=_ID_BYTES).digest() + seq.to_bytes(8)
            for seq, event_id in seqs_and_ids
        ]
        if len(self._fresh) >= self._run_ids:
            self._spill()

    def _spill(self) -> None:
        if self._file is None:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by __exit__
        self._fresh.sort()
        start = self._file.seek(0, 2)
        self._file.write(b"".join(self._fresh))
        self._runs.append((start, len(self._fresh)))
        self._fresh = []

    def _run(self, file: IO[bytes], start: int, count: int) -> Iterator[bytes]:
        width = _ID_BYTES + 8
        for at in range(0, count, _READ_IDS):
            file.seek(start + at * width)
            data = file.read(min(_READ_IDS, count - at) * width)
            yield from (data[i : i + width] for i in range(0, len(data), width))

    def twice(self) -> Iterator[tuple[int, int]]:
        """Pairs of seqs with the same id."""
        self._fresh.sort()
        file = self._file
        spilled = [] if file is None else [self._run(file, start, count) for start, count in self._runs]
        before = b""
        for entry in heapq.merge(self._fresh, *spilled):
            if entry[:_ID_BYTES] == before[:_ID_BYTES]:
                yield int.from_bytes(before[_ID_BYTES:], "big"), int.from_bytes(entry[_ID_BYTES:], "big")
            before = entry
