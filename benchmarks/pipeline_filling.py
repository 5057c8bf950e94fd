"""
A log for the pipeline to read: eight topics of very different sizes, lines of about 250 bytes, a week of events.

Segments, seals and checkpoint are written with the engine's own parts, as a writer would have left them; there is no index, as
nobody looks anything up. A log can be written on, which is how new events come in between two runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Final

from tidings.core.clock import SYSTEM_CLOCK, format_utc
from tidings.log import LogSettings
from tidings.log.embedded.disk import OsDisk
from tidings.log.embedded.index import MemoryIndex
from tidings.log.embedded.layout import Layout, StreamKey
from tidings.log.embedded.segment_writer import SegmentWriter
from tidings.log.embedded.state import Stream
from tidings.log.segment import Head, encode_line

__all__ = ["GrowingLog"]

BATCH: Final = 2_000
"""Records that share a time of writing, as those of one commit do."""
_SHARES: Final = (
    ("user.message", 22),
    ("agent.action", 18),
    ("sensor.reading", 18),
    ("tool.result", 16),
    ("task.state", 10),
    ("memory.write", 8),
    ("system.metric", 7),
    ("audit", 1),
)
_TYPES: Final = ("CREATED", "UPDATED", "OBSERVED", "COMPLETED")
_START_NS: Final = 1_767_225_600_000_000_000
_WEEK_NS: Final = 7 * 86_400 * 1_000_000_000


class GrowingLog:
    """
    A log that is made here and can be written on.

    Args:
        workspace: Where it is made.
        total: How many events fill its week; events behind that come faster after one another on the last day.
    """

    def __init__(self, workspace: Path, total: int) -> None:
        self._layout, self._disk, settings = Layout(workspace), OsDisk(), LogSettings()
        self._disk.make_folder(self._layout.root)
        self.epoch = self._layout.create(self._disk, SYSTEM_CLOCK, settings.layout).epoch
        self._segment_writer = SegmentWriter(self._disk, self._layout, MemoryIndex())
        self._streams = {
            topic: Stream(StreamKey(topic), lines_max=settings.segment_lines_max, bytes_max=settings.segment_bytes_max)
            for topic, _ in _SHARES
        }
        self._offsets = dict.fromkeys(self._streams, 0)
        self._topics = _shuffled_topics()
        self._total = total
        self.seq = 0
        self.bytes = 0

    def __enter__(self) -> GrowingLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._segment_writer.close()

    def write(self, count: int) -> None:
        """Append so many events, and note them in the checkpoint."""
        for first in range(self.seq, self.seq + count, BATCH):
            self._write_batch(range(first + 1, min(first + BATCH, self.seq + count) + 1))
        self.seq += count
        self._segment_writer.checkpoint(self.seq)

    def _write_batch(self, seqs: range) -> None:
        written_at = format_utc(self._time_ns(seqs[-1]) + 4_000_000)
        of_topic: dict[str, list[tuple[int, int]]] = {}
        for seq in seqs:
            topic = next(self._topics)
            of_topic.setdefault(topic, []).append((self._offsets[topic], seq))
            self._offsets[topic] += 1
        for topic, places in of_topic.items():
            lines = [self._line(topic, offset, seq, written_at) for offset, seq in places]
            heads = [Head(*place, written_at.decode()) for place in (places[0], places[-1])]
            size = sum(map(len, lines))
            self._segment_writer.write(self._streams[topic].place(lines, size, heads[0], heads[1]))
            self.bytes += size

    def _line(self, topic: str, offset: int, seq: int, written_at: bytes) -> bytes:
        user = seq * 2_654_435_761 % 4_999
        return encode_line(
            b'"offset":%d,"seq":%d,"meta":{"written_at":"%b","topic":"%b","type":"%b","space_id":"person:u%d",'
            b'"event_id":"%016x","ts":"%b"},"payload":{"value":%d.%03d,"text":"event %d"}}'
            % (
                offset,
                seq,
                written_at,
                topic.encode(),
                _TYPES[seq % len(_TYPES)].encode(),
                user % 50,
                seq * 11_400_714_819_323_198_485 % (1 << 64),
                format_utc(self._time_ns(seq) // 1000 * 1000),
                user % 40,
                seq % 1000,
                seq,
            )
        )

    def _time_ns(self, seq: int) -> int:
        return _START_NS + min(seq, self._total) * _WEEK_NS // self._total + max(0, seq - self._total) * 1_000_000


def _shuffled_topics() -> Iterator[str]:
    """Topics in their shares, well mixed, the same way every time."""
    names = [name for name, share in _SHARES for _ in range(share)]
    return itertools.cycle([names[place * 37 % len(names)] for place in range(len(names))])
