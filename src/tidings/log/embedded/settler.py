"""
The settler brings committed lines from the journal into their segments, and keeps what is derived.

It runs behind the acknowledgement: a commit is durable in the journal before the settler hears of it, so
nothing here is in anybody's way. In order: write the chunks, seal full segments (sync, digest, seal), and
at a checkpoint sync every open segment, so that journal files can be used again; then feed the index.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Final, NamedTuple, Protocol

from .checkpoint import append_seal_line, encode_seal, save_checkpoint
from .disk import Disk, File, sync_for_good
from .index import Index, IndexEntry
from .layout import Layout, StreamKey
from .stream import Chunk, Segment

__all__ = ["Digest", "Settled", "Settler"]

_OPEN_FILES_MAX: Final = 256


class Digest(Protocol):
    """A SHA-256 of what was written so far."""

    def update(self, data: bytes, /) -> None:
        """Take in what follows."""
        ...

    def hexdigest(self) -> str:
        """The digest up to here."""
        ...


class Settled(NamedTuple):
    """What became of a segment: how many bytes its file holds, and its digest once it is sealed."""

    segment: Segment
    flushed_bytes: int
    digest: str | None


class _Writer:
    """How far one stream's files are written."""

    __slots__ = ("chain", "digest", "file", "is_dirty", "key", "number", "sealed_through", "size")

    def __init__(self, key: StreamKey, chain: str, sealed_through: int) -> None:
        self.key = key
        self.chain = chain
        self.sealed_through = sealed_through
        self.number = 0
        self.file: File | None = None
        self.digest: Digest = hashlib.sha256()
        self.size = 0
        self.is_dirty = False

    def begin(self, number: int) -> None:
        """Turn to a new segment; the one before is sealed."""
        self.number = number
        self.digest = hashlib.sha256()
        self.size = 0


class Settler:
    """
    Writes segments. Used by one thread at a time; keeps its own view of how far each file is.

    Args:
        disk: For segments.
        layout, index: Whose files these are.
        reserve_disk: For what is small and says how far the segments are: seals and checkpoints.
    """

    def __init__(self, disk: Disk, layout: Layout, index: Index, reserve_disk: Disk | None = None) -> None:
        self._disk = disk
        self._reserve_disk = reserve_disk or disk
        self._layout = layout
        self._index = index
        self._writers: dict[StreamKey, _Writer] = {}
        self._open_files: OrderedDict[StreamKey, _Writer] = OrderedDict()
        self._new_names: set[StreamKey] = set()
        self._settled: dict[int, Settled] = {}

    def adopt(
        self, key: StreamKey, *, chain: str, sealed_through: int, number: int, size: int, digest: Digest | None
    ) -> None:
        """
        Take over a stream as recovery found it; no file is opened for it.

        Args:
            chain: The digest of its last seal.
            sealed_through: The number of its last sealed segment.
            number: Its open segment, 0 if it has none.
            size: How many bytes of that are checked lines.
            digest: Of those bytes.
        """
        writer = self._writers[key] = _Writer(key, chain, sealed_through)
        if digest is not None:
            writer.number, writer.size, writer.digest = number, size, digest

    def write(self, chunks: Iterable[Chunk]) -> list[Settled]:
        """
        Write chunks in order; seal the segments they fill.

        Giving the same chunks again after an error is right: bytes have fixed places, and what was done
        before the error is reported then.
        """
        by_stream: dict[StreamKey, list[Chunk]] = {}
        for chunk in chunks:
            by_stream.setdefault(chunk.stream.key, []).append(chunk)
        for key, own in by_stream.items():
            self._write_stream(key, own)
        settled = list(self._settled.values())
        self._settled.clear()
        return settled

    def _write_stream(self, key: StreamKey, chunks: Sequence[Chunk]) -> None:
        writer = self._writers.get(key)
        if writer is None:
            writer = self._writers[key] = _Writer(key, chain="0" * 64, sealed_through=0)
        at = 0
        while at < len(chunks):
            # The chunks of one segment lie side by side: they are one write.
            segment, start, seals = chunks[at].segment, chunks[at].byte_offset, False
            lines: list[bytes] = []
            while at < len(chunks) and chunks[at].segment is segment:
                lines += chunks[at].lines
                seals = seals or chunks[at].seals
                at += 1
            if segment.number <= writer.sealed_through:
                continue  # done before an error that another stream met
            if segment.number != writer.number:
                writer.begin(segment.number)
            self._extend(writer, start, b"".join(lines))
            digest = self._seal(writer, segment) if seals else None
            self._settled[id(segment)] = Settled(segment, writer.size, digest)

    def _extend(self, writer: _Writer, start: int, data: bytes) -> None:
        fresh = data[max(0, writer.size - start) :]
        if fresh:
            file = self._file_of(writer)
            writer.is_dirty = True
            file.write(writer.size, fresh)
            writer.digest.update(fresh)
            writer.size += len(fresh)

    def _file_of(self, writer: _Writer) -> File:
        if writer.file is None:
            path = self._layout.segment(writer.key, writer.number)
            if not self._disk.exists(path):
                self._disk.make_folder(path.parent)
                self._new_names.add(writer.key)
            writer.file = self._disk.open(path, create=True)
            self._close_idle_file()
        self._open_files[writer.key] = writer
        self._open_files.move_to_end(writer.key)
        return writer.file

    def _close_idle_file(self) -> None:
        """Thousands of topics must not mean thousands of descriptors; the digest so far stays in memory."""
        if len(self._open_files) >= _OPEN_FILES_MAX:
            # Many at a time, as many syncs together cost little more than one; those unused for longest.
            idle = list(islice(self._open_files.values(), _OPEN_FILES_MAX // 2))
            self._sync(idle)
            for writer in idle:
                self._close(writer)

    def _seal(self, writer: _Writer, segment: Segment) -> str:
        # The order matters: first the lines are on disk, then the seal that vouches for them.
        self._sync([writer])
        self._sync_names()
        line, chain = encode_seal(segment, writer.digest.hexdigest(), writer.chain)
        append_seal_line(self._reserve_disk, self._layout, writer.key, line)
        writer.chain = chain
        writer.sealed_through = writer.number
        self._close(writer)
        return chain

    def _sync(self, writers: Iterable[_Writer]) -> None:
        dirty = [writer for writer in writers if writer.is_dirty]
        if dirty:
            path = self._layout.segment(dirty[0].key, dirty[0].number)
            sync_for_good(self._disk, [writer.file for writer in dirty if writer.file is not None], path)
            for writer in dirty:
                writer.is_dirty = False

    def _close(self, writer: _Writer) -> None:
        if writer.file is not None:
            writer.file.close()
            writer.file = None
        self._open_files.pop(writer.key, None)

    def _sync_names(self) -> None:
        folders = {self._layout.segment(key, 0).parent for key in self._new_names}
        if any(key.space_id is not None for key in self._new_names):
            folders.add(self._layout.wal)
        for folder in sorted(folders):
            self._disk.sync_folder(folder)
        self._new_names.clear()

    def checkpoint(self, seq: int) -> None:
        """Put everything up to ``seq``, which must have been written, on disk and say so."""
        self._sync(self._open_files.values())
        self._sync_names()
        marks = {key: (writer.number, writer.size) for key, writer in self._writers.items() if writer.number}
        save_checkpoint(self._reserve_disk, self._layout, seq, marks)

    def feed_index(self, entries: Sequence[IndexEntry], covers: int) -> None:
        """Enter records into the index."""
        self._index.add(entries, covers)

    def close(self) -> None:
        """Close the files."""
        for writer in list(self._open_files.values()):
            self._close(writer)
