"""
The greater part of verify: each stream's segments against their lines, their seals and the checkpoint.

Keeps what the check of the whole asks for afterwards: which seqs were seen, where each stream ends, what was dropped.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tidings.core.ids import seq_in_event_id

from .checkpoint import Checkpoint, Seal, StreamMark
from .disk import Disk, size_of
from .index import Index
from .inspection import SealBook, read_checkpoint, read_seals, segment_sizes
from .journal_view import JournalView, read_journal
from .layout import Layout, StreamKey
from .segment_scan import SegmentScan, Tail, scan_segment, seal_agrees
from .seq_set import SeqSet
from .verify_ids import IdRuns
from .verify_report import FindingBook, VerifyProgress

__all__ = ["Snapshot", "StreamCheck", "take_snapshot"]


class Snapshot(NamedTuple):
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

    def mark_of(self, key: StreamKey) -> StreamMark | None:
        """What the checkpoint says about a stream."""
        return self.checkpoint.streams.get(key.path) if self.checkpoint is not None else None


def take_snapshot(disk: Disk, layout: Layout, *, is_flat: bool) -> Snapshot:
    """Look at all files, and read the small ones."""
    # A record goes from the journal to a segment and is sealed there. Read in that order, one that moves
    # meanwhile is seen twice at worst.
    data, checkpoint = read_checkpoint(disk, layout)
    journal = read_journal(disk, layout, is_flat=is_flat, keeps_data=False)
    sizes = segment_sizes(disk, layout)
    keys = {*sizes, *layout.sealed_streams(disk)}
    return Snapshot(data, checkpoint, journal, sizes, {key: read_seals(disk, layout, key) for key in keys})


class StreamCheck:
    """The check of all streams of one snapshot."""

    def __init__(
        self,
        disk: Disk,
        layout: Layout,
        start: Snapshot,
        book: FindingBook,
        *,
        is_flat: bool,
        index: Index | None,
        covers: int,
        runs: IdRuns | None,
        progress: Callable[[VerifyProgress], None] | None,
    ) -> None:
        self._disk = disk
        self._layout = layout
        self._start = start
        self._note = book.note
        self._book = book
        self._is_flat = is_flat
        self._index = index
        self._covers = covers
        self._runs = runs
        self._progress = progress
        self._segments_total = sum(map(len, start.sizes.values()))
        self._bytes_total = sum(sum(sizes.values()) for sizes in start.sizes.values())
        self.segments = self.lines = self.bytes = 0
        self.seqs = SeqSet()
        self.tails: dict[StreamKey, Tail] = {}
        """Where each stream ends."""
        self.dropped: list[Seal] = []
        self.seen_seq = 0
        """The highest seq behind a tear: it was committed, so the journal must lead at least there."""

    def run(self) -> None:
        """Check every stream."""
        for key in sorted({*self._start.sizes, *self._start.seals}, key=lambda key: key.path):
            self._check_stream(key)

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
            seal = book.seals.get(number)
            if number > expected and (expected not in book.dropped or book.flaws):
                path = self._layout.segment(key, expected)
                message = "neither the segment nor its seal is here"
                self._note("error", "segment.missing", path, message, topic=key.topic)
            expected = number + 1
            if number in book.dropped:
                tail = self._take_dropped(key, number, seal, tail, is_left=number in sizes)
            elif seal is not None:
                tail = self._check_sealed(key, seal, tail)
            else:
                if number < book.last:
                    self._note("error", "seal.missing", seal_file, f"segment {number} has no seal", topic=key.topic)
                tail, is_over = self._check_open(key, number, sizes[number], tail, is_last=number == max(sizes))
                if is_over:
                    break
        self._check_mark(key, book, sizes)
        self.tails[key] = tail

    def _take_dropped(self, key: StreamKey, number: int, seal: Seal | None, tail: Tail, *, is_left: bool) -> Tail:
        if is_left:
            path = self._layout.segment(key, number)
            message = "the segment was dropped and its file is still here; opening the log removes it"
            self._note("info", "segment.leftover", path, message, topic=key.topic, if_written=True)
        if seal is None:
            return tail
        self.dropped.append(seal)
        return Tail(seal.last_offset, seal.last_seq, seal.last_written_at)

    def _check_mark(self, key: StreamKey, book: SealBook, sizes: dict[int, int]) -> None:
        mark = self._start.mark_of(key)
        if mark is None or not mark.bytes or mark.segment <= book.last:
            return
        path, size = self._layout.segment(key, mark.segment), sizes.get(mark.segment)
        if size is None:
            message = f"the segment is missing; it had {mark.bytes} bytes"
            self._note("error", "segment.missing", path, message, topic=key.topic)
        elif size < mark.bytes:
            message = f"the data ends, but {mark.bytes} bytes were on disk at the last checkpoint"
            self._note("error", "segment.short", path, message, size, topic=key.topic)

    def _check_sealed(self, key: StreamKey, seal: Seal, before: Tail) -> Tail:
        path = self._layout.segment(key, seal.segment)
        end = Tail(seal.last_offset, seal.last_seq, seal.last_written_at)
        size = size_of(self._disk, path)
        if size is None:
            if seal.segment in read_seals(self._disk, self._layout, key).dropped:  # meanwhile, by a writer at work
                self.dropped.append(seal)
            else:
                message = f"the sealed segment is missing, with {seal.lines} records from offset {seal.first_offset}"
                self._note("error", "segment.missing", path, message, seq=seal.first_seq, topic=key.topic)
            return end
        if size != seal.bytes:
            message = f"the sealed segment has {size} bytes; it was sealed with {seal.bytes}"
            self._note("error", "segment.size", path, message, min(size, seal.bytes), topic=key.topic)
        scan = self._scan(key, path, min(size, seal.bytes), before)
        self._take_behind_flaws(scan, path)
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
        mark = self._start.mark_of(key)
        synced = 0 if mark is None or number > mark.segment else (mark.bytes if number == mark.segment else size)
        if scan.good_bytes >= synced and self._is_in_journal(key, scan.good_last):
            message = "the segment ends torn; the journal holds what belongs there, and opening the log writes it"
            at = scan.good_bytes
            self.seen_seq = max([self.seen_seq, *scan.after])
            self._note("info", "segment.torn", path, message, at, seq=scan.good_last.seq + 1, topic=key.topic)
            return scan.good_last, True
        self._take_behind_flaws(scan, path)
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
        def seen(seqs: list[int], event_ids: list[str]) -> None:
            self._take_ids(seqs, event_ids, path)

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
                seqs=self.seqs,
                seen=None if self._runs is None else seen,
            )
        finally:
            file.close()
        for seq in scan.twice:
            self._note_twice(seq, path)
        self.segments += 1
        self.lines += scan.lines
        self.bytes += size
        if self._progress is not None:
            self._progress(
                VerifyProgress(
                    path=str(path.relative_to(self._layout.workspace)),
                    segments=self.segments,
                    segments_total=self._segments_total,
                    lines=self.lines,
                    bytes=self.bytes,
                    bytes_total=self._bytes_total,
                )
            )
        return scan

    def _take_behind_flaws(self, scan: SegmentScan, path: Path) -> None:
        for seq in scan.after:
            if not self.seqs.add(seq):
                self._note_twice(seq, path)

    def _note_twice(self, seq: int, path: Path) -> None:
        self._note("error", "seq.twice", path, f"another line has seq {seq} too", seq=seq)

    def _take_ids(self, seqs: list[int], event_ids: list[str], path: Path) -> None:
        assert self._runs is not None, "only asked for with them"
        self._runs.add(seqs, event_ids)
        index = self._index
        if index is None:
            return
        for seq, event_id in zip(seqs, event_ids, strict=True):
            # What leads to its record by itself needs no index.
            is_known = seq > self._covers or seq_in_event_id(event_id) == seq
            if not is_known and all(place.seq != seq for place in index.find_id(event_id)):
                hint = "remove the folder index/ while the log is closed: it is built again"
                message = f"the index does not know the event id of seq {seq}: a repeat of it would be stored"
                self._note("warning", "index.unknown_id", path, message, seq=seq, hint=hint)

    def _note_flaws(self, key: StreamKey, path: Path, scan: SegmentScan, *, if_written: bool = False) -> None:
        for flaw in scan.flaws:
            at, code, message, seq, offset = flaw
            self._note("error", code, path, message, at, seq=seq, topic=key.topic, offset=offset, if_written=if_written)
        self._book.omitted += scan.flaw_count - len(scan.flaws)
        if scan.late is not None:
            at, code, message, seq, offset = scan.late
            self._note("warning", code, path, message, at, seq=seq, topic=key.topic, offset=offset)
