"""
Taking a segment out of a living log: readers no longer see it, then its files go (``drops``), off the loop.

Where there is no room for what must stay of it, it is put back as it was.
"""

from __future__ import annotations

from typing import NamedTuple

from ..errors import StorageFull
from ..retention import Decision
from .disk import Disk, is_full
from .drops import drop_segment
from .husks import Husks
from .index import Index, IndexFull
from .layout import Layout
from .reader import SegmentReader
from .segment_writer import FlushScheduler
from .state import LogState, Segment, Stream

__all__ = ["Droppable", "SegmentDropper"]


class Droppable(NamedTuple):
    """A segment that may go, where it is, and whether its ids are kept."""

    stream: Stream
    segment: Segment
    keep_ids: bool


class SegmentDropper:
    """
    Carries out what retention decides.

    Args:
        disk, layout, state, index, husks, segments: The log.
        flushing: On whose thread the work is done, with nothing beside it.
    """

    def __init__(
        self,
        *,
        disk: Disk,
        layout: Layout,
        state: LogState,
        index: Index,
        husks: Husks,
        segments: SegmentReader,
        flushing: FlushScheduler,
    ) -> None:
        self._disk = disk
        self._layout = layout
        self._state = state
        self._index = index
        self._husks = husks
        self._segments = segments
        self._flushing = flushing

    def find(self, decision: Decision) -> Droppable | None:
        """What a decision is about, if it may go: only a stream's oldest, only if it is sealed, only the one that was meant."""
        info = decision.segment
        topic = self._state.topics.get(info.topic)
        stream = topic.streams.get(info.space_id) if topic is not None else None
        segment = stream.segments[0] if stream is not None and stream.segments else None
        if stream is None or segment is None or segment.digest is None:
            return None
        if (segment.number, segment.last_seq) != (info.number, info.last_seq):
            return None
        return Droppable(stream, segment, decision.keep_ids)

    def is_unwritten(self, decision: Decision) -> bool:
        """Whether the segment cannot go yet, because its lines are not all in its file."""
        info = decision.segment
        topic = self._state.topics.get(info.topic)
        stream = topic.streams.get(info.space_id) if topic is not None else None
        return stream is not None and any(
            segment.number == info.number and segment.digest is None for segment in stream.segments
        )

    async def drop(self, found: Droppable) -> None:
        """
        Take a segment out.

        Raises:
            StorageFull: There is no room for what must stay of it; it is there as before.
            OSError, IndexFull: How much of it is gone is not known.
        """
        stream, segment = found.stream, found.segment
        dropped_before = stream.dropped_through_offset, stream.dropped_through_seq
        stream.segments.pop(0)
        stream.dropped_through_offset, stream.dropped_through_seq = segment.last_offset, segment.last_seq
        husks = self._husks if found.keep_ids else None
        path = self._layout.segment(stream.key, segment.number)
        try:
            await self._flushing.run_alone(
                lambda: drop_segment(self._disk, self._layout, stream.key, segment.number, self._index, husks)
            )
        except (OSError, IndexFull) as error:
            if (isinstance(error, IndexFull) or is_full(error)) and self._disk.exists(path):
                stream.segments.insert(0, segment)
                stream.dropped_through_offset, stream.dropped_through_seq = dropped_before
                raise StorageFull(str(path)) from error
            raise
        finally:
            self._segments.forget(stream.key, segment.number)
