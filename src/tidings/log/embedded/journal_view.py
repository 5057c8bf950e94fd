"""
The journal, read as far as it can be: the lines that an intact frame head vouches for, and what they prove.
"""

from __future__ import annotations

import re
import zlib
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from ..record import Record
from ..segment import Flaw, decode, is_whole
from .disk import Disk, read_file
from .layout import Layout, StreamKey

__all__ = ["JournalLine", "JournalView", "read_journal"]

_FRAME: Final = re.compile(rb'\{"crc":"[0-9a-f]{8}","frame":\{')


class JournalLine(NamedTuple):
    """A committed line in the journal."""

    seq: int
    offset: int
    key: StreamKey
    event_id: str
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
                view.lines[record.seq] = JournalLine(
                    record.seq, record.offset, key, record.meta.event_id, kept, path, at
                )
                count += record.seq == frame.first + count
            elif view.flaw is None:
                view.flaw = (path, at)
            at = end if line_end < 0 else line_end + 1
        if count == frame.last - frame.first + 1 and body_end <= len(data):
            view.frames.append((frame.first, frame.last))
