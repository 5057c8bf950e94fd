"""The deciding half of repair: read what can be read, and say what each file becomes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

from ..segment import encode_line, head_of, is_whole
from ..settings import LogSettings
from .checkpoint import CHAIN_START, Checkpoint, Seal, StreamMark, chained, encode_segment_drop
from .cursors import CursorFiles, set_back
from .disk import Disk, read_file, size_of
from .inspection import (
    SealBook,
    digest_of,
    husk_flaws,
    read_checkpoint,
    read_meta,
    read_seals,
    segment_sizes,
)
from .journal import encode_frame
from .journal_view import JournalLine, read_journal
from .layout import Layout, StreamKey
from .repair_pieces import Piece, Run, complete_drops, end_of_drops, longest_run, seal_for, seal_of
from .repair_plan import Cut, RepairPlan, Rewrite, SetAside, StreamRepair
from .segment_scan import SegmentScan, Tail, scan_segment, seal_agrees
from .seq_set import SeqSet, find_gaps, read_losses
from .verify_report import Finding

__all__ = ["RepairPlanner"]

_FRAME_LINES_MAX: Final = 10_000
_REPAIRED_JOURNAL: Final = "repaired.jsonl"


class RepairPlanner:
    """Makes one plan for one workspace."""

    def __init__(self, disk: Disk, layout: Layout, settings: LogSettings) -> None:
        self._disk = disk
        self._layout = layout
        self._settings = settings
        self._meta = read_meta(disk, layout)
        self._epoch = None if isinstance(self._meta, str) else self._meta.epoch
        self._kind = settings.layout if isinstance(self._meta, str) else self._meta.layout
        self._is_flat = self._kind == "flat"
        self._checkpoint_data, self._checkpoint = read_checkpoint(disk, layout)
        self._journal = read_journal(disk, layout, is_flat=self._is_flat, keeps_data=True)
        self._journal_lines: dict[StreamKey, list[JournalLine]] = {}
        for line in self._journal.lines.values():
            self._journal_lines.setdefault(line.key, []).append(line)
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
        self._pooled: dict[int, bytes] = {}
        self._ends: dict[StreamKey, tuple[Tail, int]] = {}

    def plan(self, problems: tuple[Finding, ...], is_needed: bool, known_seq: int) -> RepairPlan:
        """
        Decide.

        Args:
            problems: What was found, for the plan to tell.
            is_needed: Whether any of it asks for a repair; if not, the plan changes nothing.
            known_seq: Up to where verify could follow the log.
        """
        found = {key: self._pieces(key) for key in self._keys} if is_needed else {}
        last_seq = self._journal.follow(max(known_seq, self._acknowledged(found)))
        changed: set[str] = set()
        for key, (book, pieces) in found.items():
            if self._plan_stream(key, book, pieces, last_seq):
                changed.add(key.path)
        is_lossy, lost, hidden = False, list[tuple[int, int]](), 0
        if is_needed:
            self._plan_journal()
            self._plan_husks()
            is_cursor_ahead = self._plan_cursors()
            self._plan_small_files()
            losses, _ = read_losses(self._disk, self._layout, self._epoch)
            lost, hidden = find_gaps(self._kept, last_seq, self._dropped, losses)
            is_lossy = bool(lost or hidden or self._dropped_now or is_cursor_ahead or isinstance(self._meta, str))
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
        marks = self._checkpoint.streams if self._checkpoint else {}
        return {
            path: mark
            for path, mark in marks.items()
            if path not in changed and sizes.get(path, {}).get(mark.segment, -1) >= mark.bytes
        }

    # Finding out what is whole

    def _pieces(self, key: StreamKey) -> tuple[SealBook, list[Piece]]:
        book, sizes = read_seals(self._disk, self._layout, key), self._sizes.get(key, {})
        first = max((number for number in book.dropped if number in book.seals), default=0)
        complete_drops(book, first, sizes)
        numbers = {*book.seals, *sizes} - book.dropped
        before, is_adrift = Tail(), False
        if first:
            seal = book.seals[first]
            before = Tail(seal.last_offset, seal.last_seq, seal.last_written_at)
        pieces: list[Piece] = []
        for number in range(first + 1, max(numbers, default=first) + 1):
            piece = self._piece(key, number, book, sizes.get(number), before, is_adrift=is_adrift)
            pieces.append(piece)
            end = piece.good_last
            if not piece.is_whole and piece.seal is not None:
                end = Tail(piece.seal.last_offset, piece.seal.last_seq, piece.seal.last_written_at)
            is_adrift = not piece.is_whole and piece.seal is None
            before = end if end.seq >= before.seq else before
        return book, pieces

    def _piece(
        self, key: StreamKey, number: int, book: SealBook, size: int | None, before: Tail, *, is_adrift: bool
    ) -> Piece:
        seal = book.seals.get(number)
        if size is None:
            return Piece(number, seal, None, None, False, 0, 0, before)
        kept_size = size if seal is None else min(size, seal.bytes)
        scan = self._scan(key, number, kept_size, before, None, is_adrift=is_adrift)
        is_altered = seal is not None and not scan.flaw_count and kept_size == seal.bytes and scan.sha256 != seal.sha256
        if is_altered:
            return Piece(number, seal, size, scan, False, 0, 0, before)
        is_short = seal is not None and kept_size < seal.bytes
        is_whole = not scan.flaw_count and not is_short
        return Piece(number, seal, size, scan, is_whole, scan.good_lines, scan.good_bytes, scan.good_last)

    def _scan(
        self, key: StreamKey, number: int, size: int, before: Tail, seqs: SeqSet | None, *, is_adrift: bool = False
    ) -> SegmentScan:
        file = self._disk.open(self._layout.segment(key, number))
        try:
            return scan_segment(file, size, key, before, is_dense=self._is_flat, is_adrift=is_adrift, seqs=seqs)
        finally:
            file.close()

    def _acknowledged(self, found: dict[StreamKey, tuple[SealBook, list[Piece]]]) -> int:
        known = [self._journal.durable, self._checkpoint.seq if self._checkpoint else 0]
        for book, pieces in found.values():
            known += [seal.last_seq for seal in book.seals.values()]
            known += [piece.scan.last.seq for piece in pieces if piece.scan is not None]
        losses, _ = read_losses(self._disk, self._layout, self._epoch)
        known += [last for loss in losses for _, last in loss.lost]
        return max(known)

    # Deciding what stays

    def _plan_stream(self, key: StreamKey, book: SealBook, pieces: list[Piece], last_seq: int) -> bool:
        """Plan one stream; whether anything of it changes."""
        run = longest_run(pieces, end_of_drops(book), lambda end: self._held(key, end, last_seq))
        before, kept = pieces[: run.first], pieces[run.first : run.until]
        dropped = [seal_for(each, book, pieces) for each in before]
        self._dropped += [book.seals[number] for number in sorted(book.dropped & set(book.seals))] + dropped
        self._dropped_now += sum(seal.lines for seal in dropped if seal.segment not in book.dropped)
        for piece in before:
            self._remove_piece(key, piece, "it stands before records that are kept, on the far side of damage")
        cut: int | None = None
        for piece in kept:
            size = piece.good_bytes if not piece.is_whole or piece.seal is None else piece.seal.bytes
            if piece.size is not None and piece.size > size:
                cut = piece.number
                self._cut_piece(key, piece, size)
            if size:
                self._scan(key, piece.number, size, Tail(), self._kept, is_adrift=True)
        removed = pieces[run.until :]
        end, pooled = self._fill(key, run, pieces, last_seq)
        for piece in removed:
            self._remove_piece(key, piece, "it stands behind a record that cannot be read")
        sealed = self._seals(key, book, dropped, kept)
        is_changed = bool(before or removed or cut is not None or sealed is not None)
        if sealed is not None:
            self._rewrite(self._layout.seal_file(key), sealed, "the seals follow the segments that are kept")
        number = kept[-1].number if kept else (pieces[0].number if pieces else 1)
        self._ends[key] = end, number
        if is_changed:
            in_files = sum(piece.lines for piece in pieces)
            starts = [piece.scan.first.offset for piece in kept if piece.scan is not None and piece.good_lines]
            self._streams.append(
                StreamRepair(
                    topic=key.topic,
                    space_id=key.space_id,
                    kept=run.lines + len(pooled),
                    set_aside=max(0, in_files - run.lines - sum(1 for seq in pooled if seq in self._loose)),
                    first_offset=starts[0] if starts else end.offset + 1 - len(pooled),
                    last_offset=end.offset,
                    dropped_segments=tuple(piece.number for piece in before),
                    cut_segment=cut,
                    removed_segments=tuple(piece.number for piece in removed if piece.size is not None),
                )
            )
        return is_changed

    def _held(self, key: StreamKey, end: Tail, last_seq: int) -> int:
        """How many records the journal would add to a stream that ends there."""
        lines = [line for line in self._journal_lines.get(key, []) if end.seq < line.seq <= last_seq]
        if not self._is_flat:
            return len(lines)
        offsets, offset = {line.offset for line in lines}, end.offset
        while offset + 1 in offsets:
            offset += 1
        return offset - end.offset

    def _fill(self, key: StreamKey, run: Run, pieces: list[Piece], last_seq: int) -> tuple[Tail, set[int]]:
        """Carry the run on with lines from the journal and, where those fill the hole, from behind it."""
        end, pooled = run.end, set[int]()
        held = [line for line in self._journal_lines.get(key, []) if end.seq < line.seq <= last_seq]
        lines = {line.seq: line.data for line in held}
        offsets = {line.offset for line in held}
        self._loose: set[int] = set()
        is_last = run.until == len(pieces)
        if end.offset + 1 in offsets or (not self._is_flat and is_last):
            for piece in pieces[max(run.first, run.until - 1) :]:
                for line in self._loose_lines(key, piece, end):
                    head = head_of(line)
                    if head is not None and head.seq not in lines:
                        lines[head.seq] = line
                        self._loose.add(head.seq)
        for seq in sorted(lines):
            head = head_of(lines[seq])
            if head is None or head.offset <= end.offset or (self._is_flat and head.offset != end.offset + 1):
                continue
            end = Tail(head.offset, seq, head.written_at)
            pooled.add(seq)
            self._kept.add(seq)
            self._pooled[seq] = lines[seq]
        return end, pooled

    def _loose_lines(self, key: StreamKey, piece: Piece, end: Tail) -> list[bytes]:
        if piece.scan is None or (piece.scan.flaw_count == 0 and not piece.is_whole):
            return []  # gone, or altered as a whole
        wanted = set(piece.scan.after) if piece.scan.flaw_count else None
        data = read_file(self._disk, self._layout.segment(key, piece.number)) or b""
        found: list[bytes] = []
        for line in data.splitlines(keepends=True):
            head = head_of(line) if line.endswith(b"\n") and is_whole(line[:-1]) else None
            if head is not None and head.seq > end.seq and (wanted is None or head.seq in wanted):
                found.append(line)
        return found

    def _seals(self, key: StreamKey, book: SealBook, dropped: list[Seal], kept: list[Piece]) -> bytes | None:
        """The stream's seals after the repair; ``None`` if they are right as they are."""
        whole = [piece for piece in kept if piece.is_whole]
        last_sealed = max((piece.number for piece in whole if piece.seal is not None), default=0)
        entries = [book.seals[number] for number in sorted(book.dropped & set(book.seals))] + dropped
        for piece in whole:
            if piece.number <= last_sealed:
                assert piece.scan is not None, "a whole piece was read"
                is_right = piece.seal is not None and seal_agrees(piece.seal, piece.scan)
                entries.append(piece.seal if is_right and piece.seal else seal_of(piece.number, piece.scan))
        drops = sorted(book.dropped & set(book.seals)) + [seal.segment for seal in dropped]
        is_same = not dropped and not book.flaws and set(book.dropped) == set(drops)
        if is_same and entries == [book.seals[number] for number in sorted(book.seals)]:
            return None
        data, chain = b"", CHAIN_START
        for seal in entries:
            chain = chained(chain, seal.sha256)
            data += encode_line(msgspec.json.encode(msgspec.structs.replace(seal, chain=chain))[1:])
        return data + b"".join(map(encode_segment_drop, drops))

    # The other files

    def _plan_journal(self) -> None:
        for name in self._journal.crcs:
            path = self._layout.journal / name
            used = len((read_file(self._disk, path) or b"").rstrip(b"\0"))
            if used:
                self._set_aside(path, 0, used, "the journal is written anew")
            if name != _REPAIRED_JOURNAL or not self._pooled:
                self._removals.append(self._relative(path))
        if self._pooled:
            frames = b"".join(_frames(self._pooled))
            why = "records that the segments do not hold yet"
            target = self._relative(self._layout.journal / _REPAIRED_JOURNAL)
            self._rewrites.insert(0, Rewrite(path=target, data=frames, why=why))

    def _plan_husks(self) -> None:
        for key, numbers in self._layout.id_files(self._disk).items():
            for number in numbers:
                path = self._layout.id_file(key, number)
                lines = list(husk_flaws(read_file(self._disk, path) or b"", key))
                if any(flaw is not None for _, _, flaw in lines):
                    good = b"".join(line for _, line, flaw in lines if flaw is None)
                    self._rewrite(path, good, "ids that cannot be read are taken out")

    def _plan_cursors(self) -> bool:
        """Set groups back that are ahead of the log; whether there are any."""
        is_ahead = False
        for files in CursorFiles(self._disk, self._layout.offsets).read_all():
            ends = [(tail.offset, number) for key, (tail, number) in self._ends.items() if key.topic == files.topic]
            end, number = max(ends, default=(-1, 1))
            for cursor in files.found:
                if cursor.is_ahead(end, self._epoch):
                    is_ahead = True
                    self._rewrite(cursor.path, set_back(cursor, end, number), f"the topic ends at offset {end}")
        return is_ahead

    def _plan_small_files(self) -> None:
        if self._checkpoint_data is not None:
            self._set_aside(self._layout.checkpoint, 0, None, "the checkpoint is written anew")

    # Keeping account

    def _relative(self, path: Path) -> str:
        return str(path.relative_to(self._layout.root))

    def _remove_piece(self, key: StreamKey, piece: Piece, why: str) -> None:
        if piece.size is not None:
            path = self._layout.segment(key, piece.number)
            self._set_aside(path, 0, None, why)
            self._removals.append(self._relative(path))

    def _cut_piece(self, key: StreamKey, piece: Piece, size: int) -> None:
        path = self._layout.segment(key, piece.number)
        why = "it stands behind a record that cannot be read"
        if piece.is_whole:
            why = "bytes behind the end of a sealed segment"
        elif piece.scan is not None and piece.scan.flaws:
            why = piece.scan.flaws[0].message
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
