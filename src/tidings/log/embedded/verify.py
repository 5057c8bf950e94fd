"""
Verify: read every byte of a log, change nothing, and name each place that is not as it was written.

Checked are the lines (checksum, format, the order of offset, seq and write time in each stream), the whole (every
seq up to the last is in exactly one line, or in a segment that was dropped on purpose, or noted as lost by an earlier
repair), the sealed segments (size, SHA-256, the chain of digests), checkpoint, journal, husks and group cursors, that
no event id comes twice, whoever chose it, and that the index knows each that does not lead to its record by itself.

Damage is an answer here, never an exception. A log that is being written can be verified: files are looked at in an
order in which a record cannot slip from one not yet read to one read already, and only as far as they reached at
the start. If anything was written meanwhile the report says so, and what that could explain counts as no damage.

Memory: a bit a record, a block of one file, and what the journal holds; event ids go through a temporary file.
"""

from __future__ import annotations

import contextlib
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from itertools import islice
from typing import Final

from ..encoding import content_digest
from ..record import DECODER, Record
from ..segment import decode, split_segment_name
from ..settings import LogSettings
from .cursors import CursorFile, CursorFiles, GroupFiles
from .disk import Disk, read_file
from .index import Index
from .inspection import SealBook, husk_flaws, read_meta
from .journal_view import read_journal
from .layout import Layout, StreamKey
from .segment_scan import Tail
from .seq_set import find_gaps, read_losses
from .verify_ids import IdRuns
from .verify_report import Finding, FindingBook, Severity, VerifyProgress, VerifyReport
from .verify_streams import Snapshot, StreamCheck, take_snapshot

__all__ = ["Finding", "Severity", "VerifyProgress", "VerifyReport", "verify"]

_GAPS_MAX: Final = 100
_TWINS_MAX: Final = 1000


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
    book = FindingBook(layout.workspace, findings_max)
    covers = index.covers if index is not None else 0  # as of now: a writer at work carries it on
    meta = read_meta(disk, layout)
    if isinstance(meta, str):
        book.note("error", "meta.damaged", layout.meta, meta, hint="repair gives the log a new epoch")
    epoch = None if isinstance(meta, str) else meta.epoch
    is_flat = (settings.layout if isinstance(meta, str) else meta.layout) == "flat"
    groups = CursorFiles(
        disk, layout.offsets
    ).read_all()  # before the log: a group may acknowledge what comes meanwhile
    start = take_snapshot(disk, layout, is_flat=is_flat)
    with contextlib.ExitStack() as stack:
        runs = stack.enter_context(IdRuns()) if ids else None
        streams = StreamCheck(
            disk,
            layout,
            start,
            book,
            is_flat=is_flat,
            index=index,
            covers=covers,
            runs=runs,
            progress=progress,
        )
        whole = _WholeCheck(disk, layout, start, book, streams, epoch)
        whole.check_checkpoint()
        streams.run()
        last_seq, pending = whole.check_journal(runs, is_flat=is_flat)
        whole.check_husks(runs)
        whole.check_cursors(groups)
        whole.check_seqs(last_seq)
        if runs is not None:
            whole.check_ids(runs)
        if index is not None:
            whole.check_index(covers, last_seq)
        whole.check_names()
    was_written = take_snapshot(disk, layout, is_flat=is_flat).marks != start.marks
    return VerifyReport(
        findings=book.settled(was_written=was_written),
        epoch=epoch,
        last_seq=last_seq,
        segments=streams.segments,
        lines=streams.lines,
        bytes=streams.bytes,
        journal_lines=pending,
        was_written=was_written,
        chain_heads={key.path: seals.head for key, seals in start.seals.items() if seals.seals},
        omitted=book.omitted,
    )


class _WholeCheck:
    """What no stream can show by itself."""

    def __init__(
        self,
        disk: Disk,
        layout: Layout,
        start: Snapshot,
        book: FindingBook,
        streams: StreamCheck,
        epoch: str | None,
    ) -> None:
        self._disk = disk
        self._layout = layout
        self._start = start
        self._book = book
        self._note = book.note
        self._streams = streams
        self._tails: dict[StreamKey, Tail] = streams.tails
        self._epoch = epoch

    def check_checkpoint(self) -> None:
        checkpoint = self._start.checkpoint
        if self._start.checkpoint_data is not None and checkpoint is None:
            path, message = self._layout.checkpoint, "its checksum does not match"
            hint = "opening the log writes a new one; until then a lost tail is harder to tell from a torn one"
            self._note("warning", "checkpoint.damaged", path, message, hint=hint)
        if checkpoint is not None:
            known = {key.path for key in {*self._start.sizes, *self._start.seals}}
            for name, mark in checkpoint.streams.items():
                if name not in known and mark.bytes:
                    path = self._layout.wal / f"{name}.{mark.segment:08d}.jsonl"
                    self._note("error", "segment.missing", path, f"the segment is missing; it had {mark.bytes} bytes")

    def check_journal(self, runs: IdRuns | None, *, is_flat: bool) -> tuple[int, int]:
        """Count in what only the journal has; the last seq of the log, and how many those are."""
        journal, checkpoint = self._start.journal, self._start.checkpoint
        in_segments = max([checkpoint.seq if checkpoint else 0, *(tail.seq for tail in self._tails.values())])
        last_seq, pending = journal.follow(in_segments), 0
        for seq in sorted(journal.lines):
            line = journal.lines[seq]
            tail = self._tails.get(line.key, Tail())
            if seq <= tail.seq or seq > last_seq:
                continue
            if is_flat and line.offset != tail.offset + 1:
                message = f"topic {line.key.topic!r} continues with offset {line.offset}; {tail.offset + 1} is nowhere"
                self._note(
                    "error", "journal.order", line.path, message, line.byte_offset, seq=seq, topic=line.key.topic,
                    offset=line.offset, if_written=True,
                )  # fmt: skip
            self._tails[line.key] = Tail(line.offset, seq)
            if self._streams.seqs.add(seq):
                pending += 1
                if runs is not None:
                    runs.add([seq], [line.event_id])
        acknowledged = max(journal.durable, self._streams.seen_seq)
        if acknowledged > last_seq:
            path, at = journal.flaw or (self._layout.journal, 0)
            message = f"damaged, but the records up to seq {acknowledged} were acknowledged"
            self._note("error", "journal.lost", path, message, at, seq=last_seq + 1, if_written=True)
        return last_seq, pending

    def check_husks(self, runs: IdRuns | None) -> None:
        for key, numbers in self._layout.id_files(self._disk).items():
            for number in numbers:
                path = self._layout.id_file(key, number)
                data = read_file(self._disk, path) or b""
                is_dropped = number in self._start.seals.get(key, SealBook(b"")).dropped
                for at, line, flaw in husk_flaws(data, key):
                    if flaw is not None:
                        hint = "repair takes the line out; the id in it is forgotten"
                        self._note("error", "husk.damaged", path, flaw, at, topic=key.topic, hint=hint)
                    elif runs is not None and is_dropped:
                        husk = DECODER.decode(line)
                        runs.add([husk.seq], [husk.meta.event_id])

    def check_cursors(self, groups: list[GroupFiles]) -> None:
        ends: dict[str, int] = {}
        for key, tail in self._tails.items():
            ends[key.topic] = max(ends.get(key.topic, -1), tail.offset)
        for files in groups:
            for each in files.found:
                self._check_cursor(files, each, ends.get(files.topic, -1))

    def _check_cursor(self, files: GroupFiles, cursor: CursorFile, end: int) -> None:
        path, topic, stored = cursor.path, cursor.topic, cursor.stored
        if stored is None:
            hint = "the group goes on from the other of its two files"
            if files.current is None:
                hint = "the group has no file that can be read: it must be told where to go on from"
            self._note("warning", "cursor.damaged", path, "the cursor cannot be read", topic=topic, hint=hint)
            return
        if cursor.is_ahead(end, self._epoch):
            message = f"the group has acknowledged offset {stored.highest}, but the topic ends at {end}"
            self._note("error", "cursor.ahead", path, message, topic=topic, offset=stored.highest)

    def check_seqs(self, last_seq: int) -> None:
        losses, damaged = read_losses(self._disk, self._layout, self._epoch)
        for path in damaged:
            self._note("warning", "aside.damaged", path, "the manifest of an earlier repair cannot be read")
        checkpoint = self._start.checkpoint
        known = self._start.journal.follow(checkpoint.seq if checkpoint else 0)
        gaps = find_gaps(self._streams.seqs, last_seq, self._streams.dropped, losses)
        for first, last in gaps.unexplained[:_GAPS_MAX]:
            what = f"seq {first} is" if first == last else f"the {last - first + 1} seqs from {first} to {last} are"
            message = f"{what} in no line, and nothing says why"
            self._note("error", "seq.gap", self._layout.wal, message, seq=first, if_written=last > known)
        self._book.omitted += max(0, len(gaps.unexplained) - _GAPS_MAX)
        if gaps.hidden:
            message = f"{gaps.hidden} more records are missing than the dropped segments held"
            self._note("error", "seq.count", self._layout.wal, message, if_written=True)

    def check_ids(self, runs: IdRuns) -> None:
        pairs = list(islice(runs.twice(), _TWINS_MAX))
        contents = self._contents({seq for pair in pairs for seq in pair}) if pairs else {}
        hint = "repair leaves both: nothing in the files says which of them has a right to the id"
        for first, second in pairs:
            one, other = contents.get(first), contents.get(second)
            say = "contents that cannot be compared, as one is sealed or gone"
            if one is not None and other is not None:
                say = "the same content" if one == other else "different contents"
            message = f"the records at seq {first} and seq {second} have the same event id, and {say}"
            self._note("error", "id.twice", self._layout.wal, message, seq=second, hint=hint)

    def _contents(self, seqs: set[int]) -> dict[int, str]:
        """A digest of what each of these records says, husks included; sealed ones are left out."""
        found: dict[int, str] = {}
        wanted = sorted(seqs)
        for key, sizes in self._start.sizes.items():
            for number in sizes:
                seal = self._start.seals[key].seals.get(number)
                low, high = (seal.first_seq, seal.last_seq) if seal is not None else (0, wanted[-1])
                within = wanted[bisect_left(wanted, low) : bisect_right(wanted, high)]
                data = (read_file(self._disk, self._layout.segment(key, number)) or b"") if within else b""
                for seq in within:
                    line = re.search(rb'^\{"crc":"[0-9a-f]{8}","offset":[0-9]+,"seq":%d,.*$' % seq, data, re.MULTILINE)
                    if line is not None and isinstance(record := decode(line[0]), Record):
                        found |= _content_of(record)
        journal = read_journal(self._disk, self._layout, is_flat=True, keeps_data=True)
        for seq in seqs & journal.lines.keys() - found.keys():
            if isinstance(record := decode(journal.lines[seq].data[:-1]), Record):
                found |= _content_of(record)
        for key, numbers in self._layout.id_files(self._disk).items():
            for number in numbers:
                data = read_file(self._disk, self._layout.id_file(key, number)) or b""
                for _, husk_line, flaw in husk_flaws(data, key):
                    if flaw is None and (husk := DECODER.decode(husk_line)).seq in seqs and husk.payload.get("digest"):
                        found[husk.seq] = husk.payload["digest"]
        return found

    def check_index(self, covers: int, last_seq: int) -> None:
        if covers == last_seq:
            return
        message = f"the index covers seq {covers} of {last_seq}; opening the log brings it up to date"
        severity: Severity = "warning" if covers > last_seq else "info"
        self._note(severity, "index.covers", self._layout.index, message, seq=covers, if_written=True)

    def check_names(self) -> None:
        for folder in (self._layout.wal, self._layout.ids):
            for name in self._disk.names(folder):
                if name.endswith(".jsonl") and split_segment_name(name) is None:
                    message = "the file's name is not a segment's: nothing reads it"
                    self._note("warning", "file.foreign", folder / name, message)


def _content_of(record: Record) -> dict[int, str]:
    return {} if record.meta.sealed is not None else {record.seq: content_digest(record).hex()}
