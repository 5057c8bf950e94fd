"""
Logs for the pipeline to read: eight topics of very different sizes, lines of about 250 bytes, a week of events or more.
``Kinds.PLAIN`` is for the operational jobs; ``Kinds.LIFE`` has what the jobs of every set look for.

Segments, seals and checkpoint are written with the engine's own parts, as a writer would have left them; there is no index, as
nobody looks anything up. A log can be written on, which is how new events come in between two runs.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from enum import Enum
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

__all__ = ["GrowingLog", "Kinds"]

BATCH: Final = 2_000
"""Records that share a time of writing, as those of one commit do."""
Kind = tuple[str, str, int, str]
"""Topic, type, share of the events, and the payload as a template of ``seq``, ``user``, ``step``, ``part`` and ``words``."""
_TYPES: Final = ("CREATED", "UPDATED", "OBSERVED", "COMPLETED")
_PLAIN: Final[tuple[Kind, ...]] = tuple(
    (topic, "", share, '{{"value":{user}.{part:03d},"text":"event {seq}"}}')
    for topic, share in (
        ("user.message", 22),
        ("agent.action", 18),
        ("sensor.reading", 18),
        ("tool.result", 16),
        ("task.state", 10),
        ("memory.write", 8),
        ("system.metric", 7),
        ("audit", 1),
    )
)
_RANKED: Final = ",".join(f'{{{{"doc_id":"d{number}","score":0.{9 - number}}}}}' for number in range(5))
_LIFE: Final[tuple[Kind, ...]] = (
    ("hippo", "HIPPO_ENCODE", 20, '{{"content":{{"text":"{words}"}},"confidence":0.{part:03d},"person_id":"u{user}"}}'),
    ("actions", "ACTION_DECISION", 10, '{{"plan_id":"p{step}","confidence":0.{part:03d},"action":"lamp{user}"}}'),
    ("actions", "ACTION_EXECUTED", 10, '{{"plan_id":"p{step}","status":"OK","latency_ms":{part}}}'),
    ("affect", "AFFECT_ANNOTATED", 5, '{{"arousal":0.{part:03d},"valence":0.2}}'),
    ("cortex", "CORTEX_PREDICTION", 5, '{{"plan_id":"p{step}","heads":{{"ok":{{"value":0.{part:03d}}}}}}}'),
    ("retrieval", "RETRIEVAL_IMPRESSION", 5, '{{"query_id":"q{step}","ranked":[' + _RANKED + "]}}"),
    ("retrieval", "RETRIEVAL_CLICK", 2, '{{"query_id":"q{step}","doc_id":"d1"}}'),
    ("attention", "cognitive.attention.gate.admit", 3, '{{"request_id":"r{step}","priority":0.{part:03d}}}'),
    ("sensory", "SENSORY_FRAME", 40, '{{"value":{user}.{part:03d}}}'),
)
_WORDS: Final = tuple(
    first + last for first in ("ka", "lo", "mi", "nu", "pe", "ri", "so", "tu", "va", "ze") for last in "bdfglmnprs"
)


class Kinds(Enum):
    """What the events are."""

    PLAIN = _PLAIN
    LIFE = _LIFE


_START_NS: Final = 1_767_225_600_000_000_000
_DAY_NS: Final = 86_400 * 1_000_000_000
_WEEK_NS: Final = 7 * _DAY_NS
_GOLDEN: Final = 11_400_714_819_323_198_485
"""Times this, numbers in order are spread evenly."""


class GrowingLog:
    """
    A log that is made here and can be written on.

    Args:
        workspace: Where it is made.
        total: How many events come evenly spread; those behind them come one a millisecond.
        kinds: What they are.
        week: How many of them come in a week; by default all.
    """

    def __init__(self, workspace: Path, total: int, kinds: Kinds = Kinds.PLAIN, *, week: int = 0) -> None:
        self._layout, self._disk, settings = Layout(workspace), OsDisk(), LogSettings()
        self._disk.make_folder(self._layout.root)
        self.epoch = self._layout.create(self._disk, SYSTEM_CLOCK, settings.layout).epoch
        self._segment_writer = SegmentWriter(self._disk, self._layout, MemoryIndex())
        self._streams = {
            topic: Stream(StreamKey(topic), lines_max=settings.segment_lines_max, bytes_max=settings.segment_bytes_max)
            for topic, *_ in kinds.value
        }
        self._offsets = dict.fromkeys(self._streams, 0)
        self._kinds = _shuffled(kinds)
        self._total, self._week = total, week or total
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
        of_topic: dict[str, list[tuple[int, int, Kind]]] = {}
        for seq in seqs:
            kind = next(self._kinds)
            of_topic.setdefault(kind[0], []).append((self._offsets[kind[0]], seq, kind))
            self._offsets[kind[0]] += 1
        for topic, places in of_topic.items():
            lines = [self._line(kind, offset, seq, written_at) for offset, seq, kind in places]
            heads = [Head(offset, seq, written_at.decode()) for offset, seq, _ in (places[0], places[-1])]
            size = sum(map(len, lines))
            self._segment_writer.write(self._streams[topic].place(lines, size, heads[0], heads[1]))
            self.bytes += size

    def _line(self, kind: Kind, offset: int, seq: int, written_at: bytes) -> bytes:
        topic, type_, _, template = kind
        user = seq * 2_654_435_761 % 4_999
        payload = template.format(
            seq=seq, user=user % 40, part=seq % 1000, step=seq // 20, words=_words(seq) if "{words}" in template else ""
        )
        second, micros = divmod(self._time_ns(seq) // 1000, 1_000_000)
        day, second = divmod(second, 86_400)
        return encode_line(
            b'"offset":%d,"seq":%d,"meta":{"written_at":"%b","topic":"%b","type":"%b","space_id":"person:u%d",'
            b'"event_id":"%016x","ts":"%b%02d:%02d:%02d.%06dZ"},"payload":%b}'
            % (
                offset,
                seq,
                written_at,
                topic.encode(),
                (type_ or _TYPES[seq % len(_TYPES)]).encode(),
                user % 50,
                seq * _GOLDEN % (1 << 64),
                _date(day),
                second // 3600,
                second // 60 % 60,
                second % 60,
                micros,
                payload.encode(),
            )
        )

    def _time_ns(self, seq: int) -> int:
        return _START_NS + min(seq, self._total) * _WEEK_NS // self._week + max(0, seq - self._total) * 1_000_000


@functools.lru_cache(4)
def _date(day: int) -> bytes:
    return format_utc(day * _DAY_NS)[:11]


def _words(seq: int) -> str:
    """Twelve words; one text in fifty is nearly that of a while ago."""
    text = (seq - 500 if seq % 50 == 0 else seq) * _GOLDEN
    return " ".join([_WORDS[(text >> shift) % len(_WORDS)] for shift in range(0, 60, 5)])


def _shuffled(kinds: Kinds) -> Iterator[Kind]:
    """Events in their shares, well mixed, the same way every time."""
    each = [kind for kind in kinds.value for _ in range(kind[2])]
    return itertools.cycle([each[place * 37 % len(each)] for place in range(len(each))])
