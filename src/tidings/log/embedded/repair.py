"""
Repair: make a damaged log open again without destroying a byte of it.

``plan_repair`` reads and decides, ``carry_out`` does what the plan says. A topic's offsets have no gaps, so a record
that cannot be read parts its topic in two, and only one side can stay in the log. The rule: of each stream, keep the
longest run of whole records. It may begin at the start, or at the first segment behind a damaged one: then all before
it is marked as dropped, in the way retention does it, and offsets and cursors keep their meaning. What a journal still
holds fills holes first. Other streams are not touched.

A segment whose lines are whole but are not what was sealed was rewritten by somebody; nobody can say which line, so
none of it is kept.

Whatever leaves the log is copied, synced, to ``aside/<time>/`` with a ``manifest.json`` before the first change. If
acknowledged records leave it, the log gets a new epoch, also before the first change: a repair that is interrupted
may be started again at any point, and an interrupted one never passes for an untouched history. The manifest's
``lost`` and ``hidden`` tell ``verify`` which gaps are known; keep it when the copies are removed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from tidings.core.clock import Clock, format_utc

from ..errors import CorruptLog, LogError, WorkspaceBusy
from ..segment import encode_line, head_of, is_whole
from ..settings import LogSettings
from .checkpoint import CHAIN_START, Checkpoint, Seal, StreamMark, chained, encode_segment_drop
from .disk import Disk, read_file, replace_file
from .journal import encode_frame
from .layout import Layout, StreamKey, WorkspaceMeta, encode_meta
from .memory_index import MemoryIndex
from .recovery import settle_survey, survey
from .settler import Settler
from .verify import (
    Finding,
    JournalLine,
    SealBook,
    SegmentScan,
    SeqSet,
    Tail,
    find_gaps,
    husk_flaws,
    read_checkpoint,
    read_cursors,
    read_journal,
    read_losses,
    read_meta,
    read_seals,
    scan_segment,
    seal_agrees,
    segment_sizes,
    size_of,
    topic_of_cursor,
    verify,
)

__all__ = [
    "Cut",
    "RepairOutdated",
    "RepairPlan",
    "RepairResult",
    "Rewrite",
    "SetAside",
    "StreamRepair",
    "carry_out",
    "plan_repair",
]

_BLOCK_BYTES: Final = 1 << 20
_FRAME_LINES_MAX: Final = 10_000
_FOLDERS_MAX: Final = 10_000
_REPAIRED_JOURNAL: Final = "repaired.jsonl"


class RepairOutdated(LogError):
    """The files are not those that the plan was made for. Nothing was changed."""

    code = "log.repair_outdated"
    retryable = True
    hint = "plan again: somebody has written to the workspace since"

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path

    def __str__(self) -> str:
        return f"{self.path} has changed since the repair was planned"


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
    """Whole records that leave the log: they stand on the far side of one that is lost."""
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


class RepairResult(msgspec.Struct, frozen=True, kw_only=True):
    """What was done."""

    folder: str | None
    """Where the copies and their manifest are; ``None`` if there was nothing to do."""
    epoch: str
    is_new_epoch: bool
    last_seq: int

    def to_dict(self) -> dict[str, Any]:
        """The result as plain values."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain


def plan_repair(disk: Disk, layout: Layout, settings: LogSettings) -> RepairPlan:
    """
    Decide what a repair would do; reads only.

    The log should be closed: a plan made beside a writer is refused by ``carry_out``.

    Raises:
        WorkspaceMissing, WorkspaceUnusable, UnsupportedFormat
    """
    report = verify(disk, layout, settings)
    problems = tuple(finding for finding in report.findings if finding.severity != "info")
    is_needed = not report.is_sound or any(finding.code == "checkpoint.damaged" for finding in problems)
    if report.is_sound:
        try:
            survey(disk, layout, settings)
        except CorruptLog as error:
            is_needed = True
            problem = Finding(severity="error", code=error.code, path=error.path, message=error.problem, seq=error.seq)
            problems += (problem,)
    return _Planner(disk, layout, settings).plan(problems, is_needed, report.last_seq)


class _Piece(NamedTuple):
    """One segment of a stream as it was found."""

    number: int
    seal: Seal | None
    size: int | None
    scan: SegmentScan | None
    is_whole: bool
    """Whether all of it can stay, but perhaps for bytes appended to a sealed one."""
    good_lines: int
    """Lines from its start that can stay."""
    good_bytes: int
    good_last: Tail

    @property
    def lines(self) -> int:
        """Whole lines in it."""
        return self.scan.lines if self.scan is not None else 0


class _Run(NamedTuple):
    """Neighbouring pieces whose records follow one another: all whole but perhaps the last."""

    first: int
    until: int
    lines: int
    end: Tail


class _Planner:
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

    def _pieces(self, key: StreamKey) -> tuple[SealBook, list[_Piece]]:
        book, sizes = read_seals(self._disk, self._layout, key), self._sizes.get(key, {})
        first = max((number for number in book.dropped if number in book.seals), default=0)
        _complete_drops(book, first, sizes)
        numbers = {*book.seals, *sizes} - book.dropped
        before, is_adrift = Tail(), False
        if first:
            seal = book.seals[first]
            before = Tail(seal.last_offset, seal.last_seq, seal.last_written_at)
        pieces: list[_Piece] = []
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
    ) -> _Piece:
        seal = book.seals.get(number)
        if size is None:
            return _Piece(number, seal, None, None, False, 0, 0, before)
        kept_size = size if seal is None else min(size, seal.bytes)
        scan = self._scan(key, number, kept_size, before, None, is_adrift=is_adrift)
        is_altered = seal is not None and not scan.flaw_count and kept_size == seal.bytes and scan.sha256 != seal.sha256
        if is_altered:
            return _Piece(number, seal, size, scan, False, 0, 0, before)
        is_short = seal is not None and kept_size < seal.bytes
        is_whole = not scan.flaw_count and not is_short
        return _Piece(number, seal, size, scan, is_whole, scan.good_lines, scan.good_bytes, scan.good_last)

    def _scan(
        self, key: StreamKey, number: int, size: int, before: Tail, seqs: SeqSet | None, *, is_adrift: bool = False
    ) -> SegmentScan:
        file = self._disk.open(self._layout.segment(key, number))
        try:
            return scan_segment(file, size, key, before, is_dense=self._is_flat, is_adrift=is_adrift, seqs=seqs)
        finally:
            file.close()

    def _acknowledged(self, found: dict[StreamKey, tuple[SealBook, list[_Piece]]]) -> int:
        known = [self._journal.durable, self._checkpoint.seq if self._checkpoint else 0]
        for book, pieces in found.values():
            known += [seal.last_seq for seal in book.seals.values()]
            known += [piece.scan.last.seq for piece in pieces if piece.scan is not None]
        losses, _ = read_losses(self._disk, self._layout, self._epoch)
        known += [last for loss in losses for _, last in loss.lost]
        return max(known)

    # Deciding what stays

    def _plan_stream(self, key: StreamKey, book: SealBook, pieces: list[_Piece], last_seq: int) -> bool:
        """Plan one stream; whether anything of it changes."""
        run = _longest_run(pieces, _end_of_drops(book), lambda end: self._held(key, end, last_seq))
        before, kept = pieces[: run.first], pieces[run.first : run.until]
        dropped = [_seal_for(each, book, pieces) for each in before]
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

    def _fill(self, key: StreamKey, run: _Run, pieces: list[_Piece], last_seq: int) -> tuple[Tail, set[int]]:
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

    def _loose_lines(self, key: StreamKey, piece: _Piece, end: Tail) -> list[bytes]:
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

    def _seals(self, key: StreamKey, book: SealBook, dropped: list[Seal], kept: list[_Piece]) -> bytes | None:
        """The stream's seals after the repair; ``None`` if they are right as they are."""
        whole = [piece for piece in kept if piece.is_whole]
        last_sealed = max((piece.number for piece in whole if piece.seal is not None), default=0)
        entries = [book.seals[number] for number in sorted(book.dropped & set(book.seals))] + dropped
        for piece in whole:
            if piece.number <= last_sealed:
                assert piece.scan is not None, "a whole piece was read"
                is_right = piece.seal is not None and seal_agrees(piece.seal, piece.scan)
                entries.append(piece.seal if is_right and piece.seal else _seal_of(piece.number, piece.scan))
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
        for name, committed in read_cursors(self._disk, self._layout).items():
            topic = topic_of_cursor(name)
            ends = [(tail.offset, number) for key, (tail, number) in self._ends.items() if key.topic == topic]
            end, number = max(ends, default=(-1, 1))
            if committed is not None and committed > end:
                is_ahead = True
                path = self._layout.offsets / name
                cursor = msgspec.json.decode(read_file(self._disk, path) or b"{}", type=dict[str, Any])
                cursor["committed"] = end
                if "segment" in cursor:
                    cursor["segment"] = number
                self._rewrite(path, msgspec.json.encode(cursor), f"the topic ends at offset {end}")
        return is_ahead

    def _plan_small_files(self) -> None:
        if self._checkpoint_data is not None:
            self._set_aside(self._layout.checkpoint, 0, None, "the checkpoint is written anew")

    # Keeping account

    def _relative(self, path: Path) -> str:
        return str(path.relative_to(self._layout.root))

    def _remove_piece(self, key: StreamKey, piece: _Piece, why: str) -> None:
        if piece.size is not None:
            path = self._layout.segment(key, piece.number)
            self._set_aside(path, 0, None, why)
            self._removals.append(self._relative(path))

    def _cut_piece(self, key: StreamKey, piece: _Piece, size: int) -> None:
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
        sha256 = _digest(self._disk, path, byte_offset, size)
        self._aside.append(
            SetAside(path=self._relative(path), byte_offset=byte_offset, size=size, sha256=sha256, why=why)
        )


def _end_of_drops(book: SealBook) -> Tail:
    seals = [book.seals[number] for number in book.dropped if number in book.seals]
    last = max(seals, key=lambda seal: seal.segment, default=None)
    return Tail() if last is None else Tail(last.last_offset, last.last_seq, last.last_written_at)


def _longest_run(pieces: list[_Piece], start: Tail, held: Callable[[Tail], int]) -> _Run:
    """
    The run of most records; of equal ones the later, for it keeps offsets and cursors as they are.

    Damage in a piece ends a run, which keeps the lines before it; the next run begins with the next piece.

    Args:
        start: What the first piece follows.
        held: How many records the journal would add behind a place.
    """
    best, most = _Run(0, 0, 0, start), held(start)
    first, lines, end = 0, 0, start
    for at, piece in enumerate(pieces):
        if piece.is_whole or piece.good_lines:
            lines, end = lines + piece.good_lines, piece.good_last
            count = lines + held(end)
            if count >= most:
                best, most = _Run(first, at + 1, lines, end), count
        if not piece.is_whole:
            first, lines = at + 1, 0
    return best


def _seal_of(number: int, scan: SegmentScan) -> Seal:
    return Seal(
        segment=number,
        first_offset=scan.first.offset,
        last_offset=scan.last.offset,
        first_seq=scan.first.seq,
        last_seq=scan.last.seq,
        first_written_at=scan.first.written_at,
        last_written_at=scan.last.written_at,
        lines=scan.lines,
        bytes=scan.good_bytes,
        sha256=scan.sha256,
        chain="",
        partitions=scan.partitions,
    )


def _complete_drops(book: SealBook, last: int, sizes: dict[int, int]) -> None:
    """
    Fill in what damaged lines of the seals said about dropped segments.

    Retention drops the oldest first: what lies before a dropped segment and has no file was dropped too. Where its
    seal is gone, the neighbours' seals say what was in it.
    """
    before = Tail()
    for number in range(1, last + 1):
        if number not in sizes:
            book.dropped.add(number)
        if number not in book.seals:
            after = next(book.seals[each] for each in range(number + 1, last + 1) if each in book.seals)
            until = Tail(after.first_offset, after.first_seq, after.first_written_at)
            book.seals[number] = _seal_between(number, before, until, 0, "0" * 64)
        seal = book.seals[number]
        before = Tail(seal.last_offset, seal.last_seq, seal.last_written_at)


def _seal_between(number: int, low: Tail, high: Tail, size: int, sha256: str) -> Seal:
    """A seal for a segment of which only the neighbours are known."""
    return Seal(
        segment=number,
        first_offset=low.offset + 1,
        last_offset=max(low.offset, high.offset - 1),
        first_seq=low.seq + 1,
        last_seq=max(low.seq, high.seq - 1),
        first_written_at=low.written_at,
        last_written_at=high.written_at,
        lines=max(0, high.offset - low.offset - 1),
        bytes=size,
        sha256=sha256,
        chain="",
    )


def _seal_for(piece: _Piece, book: SealBook, pieces: list[_Piece]) -> Seal:
    """The seal of a segment that is dropped; without one of its own, it says what its neighbours leave for it."""
    if piece.seal is not None:
        return piece.seal
    before = [each.good_last for each in pieces if each.number < piece.number]
    after = [each.scan.first for each in pieces if each.number > piece.number and each.lines and each.scan is not None]
    low = before[-1] if before else _end_of_drops(book)
    high = after[0] if after else piece.good_last
    sha256 = piece.scan.sha256 if piece.scan is not None else "0" * 64
    return _seal_between(piece.number, low, high, piece.size or 0, sha256)


def _frames(lines: dict[int, bytes]) -> Iterable[bytes]:
    """Journal frames of these lines: neighbouring seqs share one."""
    run: list[int] = []
    for seq in [*sorted(lines), -1]:
        if run and (seq != run[-1] + 1 or len(run) >= _FRAME_LINES_MAX):
            yield encode_frame([lines[each] for each in run], first=run[0], last=run[-1], durable=0)
            run = []
        run.append(seq)


def _digest(disk: Disk, path: Path, byte_offset: int, size: int) -> str:
    digest = hashlib.sha256()
    file = disk.open(path)
    try:
        for at in range(byte_offset, byte_offset + size, _BLOCK_BYTES):
            digest.update(file.read(at, min(_BLOCK_BYTES, byte_offset + size - at)))
    finally:
        file.close()
    return digest.hexdigest()


def carry_out(disk: Disk, layout: Layout, plan: RepairPlan, clock: Clock) -> RepairResult:
    """
    Do what the plan says; the log opens afterwards.

    Interrupted at any disk call, it has lost nothing: plan again and carry that out.

    Raises:
        WorkspaceBusy: The log is open.
        RepairOutdated: The files are not those the plan was made for; nothing was changed.
        OSError: The disk failed or is full; plan again when it works.
    """
    lock = disk.lock(layout.lock)
    if isinstance(lock, str):
        raise WorkspaceBusy(layout.workspace, lock)
    try:
        if not plan.is_needed:
            meta = layout.read_meta(disk)
            return RepairResult(folder=None, epoch=meta.epoch, is_new_epoch=False, last_seq=plan.last_seq)
        return _carry_out(disk, layout, plan, clock)
    finally:
        lock.release()


def _carry_out(disk: Disk, layout: Layout, plan: RepairPlan, clock: Clock) -> RepairResult:
    for each in plan.aside:
        path = layout.root / each.path
        size = size_of(disk, path)
        if size is None or size < each.byte_offset + each.size:
            raise RepairOutdated(str(path))
        if _digest(disk, path, each.byte_offset, each.size) != each.sha256:
            raise RepairOutdated(str(path))
    folder = _copy_aside(disk, layout, plan, clock)
    if plan.loses_records:
        # First of all changes: once anything else has gone, nothing would show that history was replaced.
        meta = layout.new_meta(clock, plan.layout)
        replace_file(disk, layout.meta, encode_meta(meta))
    else:
        meta = layout.read_meta(disk)
    # The seq comes before the cuts too: it must not be given out again, whatever is cut off.
    replace_file(disk, layout.checkpoint, encode_line(msgspec.json.encode(plan.checkpoint)[1:]))
    for rewrite in plan.rewrites:
        replace_file(disk, layout.root / rewrite.path, rewrite.data)
    for cut in plan.cuts:
        _cut(disk, layout.root / cut.path, cut.size)
    for removal in plan.removals:
        disk.remove(layout.root / removal)
    for parent in sorted({(layout.root / removal).parent for removal in plan.removals}):
        disk.sync_folder(parent)
    for name in disk.names(layout.index):
        disk.remove(layout.index / name)
    _settle(disk, layout, plan.settings, meta)
    return RepairResult(
        folder=str(folder.relative_to(layout.workspace)),
        epoch=meta.epoch,
        is_new_epoch=plan.loses_records,
        last_seq=plan.last_seq,
    )


def _copy_aside(disk: Disk, layout: Layout, plan: RepairPlan, clock: Clock) -> Path:
    stamp = format_utc(clock.now_ns()).decode().translate({ord(mark): None for mark in "-:."})
    names = set(disk.names(layout.aside))
    tries = (f"{stamp}-{n}" if n else stamp for n in range(_FOLDERS_MAX))
    folder = layout.aside / next(name for name in tries if name not in names)
    disk.make_folder(folder)
    folders = {layout.root, layout.aside, folder}
    for each in plan.aside:
        target = folder / each.copy_name
        disk.make_folder(target.parent)
        while target.parent != folder.parent:
            target = target.parent
            folders.add(target)
        _copy(disk, layout.root / each.path, folder / each.copy_name, each.byte_offset, each.size)
    for each_folder in sorted(folders):
        disk.sync_folder(each_folder)
    manifest = plan.to_dict() | {
        "made_at": format_utc(clock.now_ns()).decode(),
        "aside": [msgspec.to_builtins(each) | {"copy": each.copy_name} for each in plan.aside],
    }
    replace_file(disk, folder / "manifest.json", msgspec.json.format(msgspec.json.encode(manifest), indent=1))
    return folder


def _copy(disk: Disk, source: Path, target: Path, byte_offset: int, size: int) -> None:
    original = disk.open(source)
    try:
        copy = disk.open(target, create=True)
        try:
            for at in range(0, size, _BLOCK_BYTES):
                copy.write(at, original.read(byte_offset + at, min(_BLOCK_BYTES, size - at)))
            copy.sync()
        finally:
            copy.close()
    finally:
        original.close()


def _cut(disk: Disk, path: Path, size: int) -> None:
    file = disk.open(path, write=True)
    try:
        if file.size() > size:
            file.truncate(size)
        file.sync()
    finally:
        file.close()


def _settle(disk: Disk, layout: Layout, settings: LogSettings, meta: WorkspaceMeta) -> None:
    """Recover, as opening would: a repair is done when that works."""
    found = survey(disk, layout, settings)
    assert found.meta == meta, "nobody else changes it under the lock"
    settler = Settler(disk, layout, MemoryIndex())
    try:
        settle_survey(disk, layout, found, settler)
    finally:
        settler.close()
