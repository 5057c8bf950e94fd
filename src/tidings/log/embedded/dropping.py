"""
Carrying out retention: how one sealed segment is dropped from an open log.

Readers no longer see the segment, then its files go, off the loop. The order is what makes it safe to stop at any step:
first what must stay (dedupe tombstones, and their ids in the index), then the line in the seals that says the segment was
dropped on purpose, and only then the file. A file that outlives its line is removed when the log is opened next; a
missing file without a line would be refused as a loss. The index is updated last, when the file has made room for that: an
entry that stays behind leads to no record and is ignored. Where there is no room for what must stay of the
segment, it is put back as it was.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

import msgspec

from ..errors import StorageFull
from ..record import Record
from ..retention import SegmentDecision
from ..segment import decode
from .checkpoint import append_seal_line, encode_segment_drop
from .disk import Disk, is_full, read_file
from .index import Index, IndexFull, entries_of
from .layout import Layout, StreamKey
from .reader import SegmentReader
from .segment_writer import FlushScheduler
from .state import LogState, Segment, Stream
from .tombstones import Tombstones

logger = logging.getLogger(__name__)


class Droppable(NamedTuple):
    """A segment that may go, where it is, and whether its ids are kept."""

    stream: Stream
    segment: Segment
    keep_ids: bool


class SegmentDropper:
    """
    Carries out what retention decides.

    Args:
        disk, layout, state, index, tombstones, segments: The log.
        flushing: On whose thread the work is done, with nothing beside it.
    """

    def __init__(
        self,
        *,
        disk: Disk,
        layout: Layout,
        state: LogState,
        index: Index,
        tombstones: Tombstones,
        segments: SegmentReader,
        flushing: FlushScheduler,
    ) -> None:
        self._disk = disk
        self._layout = layout
        self._state = state
        self._index = index
        self._tombstones = tombstones
        self._segments = segments
        self._flushing = flushing

    def find(self, decision: SegmentDecision) -> Droppable | None:
        """What a decision is about, if it may go: only a stream's oldest, only if it is sealed, only the one that was meant."""
        info, stream = decision.segment, self._stream_of(decision)
        segment = stream.segments[0] if stream is not None and stream.segments else None
        if stream is None or segment is None or segment.digest is None:
            return None
        if (segment.number, segment.last_seq) != (info.number, info.last_seq):
            return None
        return Droppable(stream, segment, decision.keep_ids)

    def is_unwritten(self, decision: SegmentDecision) -> bool:
        """Whether the segment cannot go yet, because its lines are not all in its file."""
        stream, number = self._stream_of(decision), decision.segment.number
        return stream is not None and any(each.number == number and each.digest is None for each in stream.segments)

    def _stream_of(self, decision: SegmentDecision) -> Stream | None:
        topic = self._state.topics.get(decision.segment.topic)
        return topic.streams.get(decision.segment.space_id) if topic is not None else None

    async def drop(self, found: Droppable) -> None:
        """
        Take a segment out.

        Raises:
            StorageFull, IndexFull: There is no room for what must stay of it; it is there as before.
            OSError: How much of it is gone is not known.
        """
        stream, segment = found.stream, found.segment
        dropped_before = stream.dropped_through_offset, stream.dropped_through_seq
        stream.segments.pop(0)
        stream.dropped_through_offset, stream.dropped_through_seq = segment.last_offset, segment.last_seq
        all_dropped_before = self._state.dropped_through_seq
        self._state.note_drop(stream)
        tombstones = self._tombstones if found.keep_ids else None
        path = self._layout.segment(stream.key, segment.number)
        try:
            await self._flushing.run_alone(
                lambda: _drop_files(self._disk, self._layout, stream.key, segment.number, self._index, tombstones)
            )
        except (OSError, IndexFull) as error:
            if (isinstance(error, IndexFull) or is_full(error)) and self._disk.exists(path):
                stream.segments.insert(0, segment)
                stream.dropped_through_offset, stream.dropped_through_seq = dropped_before
                self._state.dropped_through_seq = all_dropped_before
                if isinstance(error, IndexFull):
                    raise
                raise StorageFull(str(path)) from error
            raise
        finally:
            self._segments.forget(stream.key, segment.number)


def _drop_files(
    disk: Disk, layout: Layout, key: StreamKey, number: int, index: Index, tombstones: Tombstones | None
) -> None:
    """Drop one sealed segment; with ``tombstones``, its ids are kept."""
    path = layout.segment(key, number)
    lines = (read_file(disk, path) or b"").splitlines()
    records = [record for line in lines if isinstance(record := decode(line), Record)]
    if tombstones is not None:
        tombstones.keep(key, number, records)
        try:
            index.add(entries_of(records, are_tombstones=True), index.covers)
        except (OSError, IndexFull):
            tombstones.discard(key, number)  # the segment stays, and nothing has to be kept of it
            raise
    append_seal_line(disk, layout, key, encode_segment_drop(number))
    gone = entries_of(records)
    if tombstones is not None:
        gone = [msgspec.structs.replace(entry, event_id=None, idem_key=None) for entry in gone]
    disk.remove(path)
    disk.sync_folder(path.parent)
    try:
        index.remove(gone)
    except (OSError, IndexFull) as error:
        if isinstance(error, OSError) and not is_full(error):
            raise
        logger.warning("the index keeps the entries of %s, for want of room: %s", path, error)
