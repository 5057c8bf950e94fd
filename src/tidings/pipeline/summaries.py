"""
Which of a job's summaries are published: those that never were, a page a run.

A summary's id follows from its content. ``silver.events`` holds every event that the pipeline published itself (``OWN_DEVICE``), also
those that the log has dropped since, so an id that it holds is not published again. Of the others a run publishes a page, first
those of the space that was published longest ago: what does not fit waits for the next run, and is not overtaken for ever.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]

from tidings.core.events import Event

from .lake import Lake
from .schemas import SILVER_EVENTS, arrow_schema
from .storage_errors import translate_read_errors

OWN_DEVICE: Final = "tidings-pipeline"
"""The ``device`` of what the pipeline itself publishes: it makes no run due."""
SUMMARIES_MAX: Final = 1_000
"""How many events of one job a run publishes, unless its setting ``summaries_max`` says otherwise."""
_CHUNK: Final = 10_000
"""So many events are compared with the table at a time: memory is bound by these and a page, whatever a job has to say."""
_READ: Final = ("event_id", "topic", "type", "space_id", "seq")
_Stream = tuple[str, str, str | None]


@dataclass(frozen=True, slots=True)
class Page:
    """What a run publishes of one job."""

    events: Sequence[Event]
    has_more: bool
    """Whether there are others that were never published."""


@dataclass(slots=True)
class Published:
    """
    What the pipeline published before, as one job's summaries are compared with it.

    Args:
        lake: Where ``silver.events`` is.
    """

    lake: Lake
    _last_seqs: dict[_Stream, int] = field(default_factory=dict)

    def page(self, events: Iterable[Event], count_max: int) -> Page:
        """
        Choose at most ``count_max`` events whose ids were never published.

        Args:
            events: What a job has to say, oldest news first; read once, and not held.
            count_max: The size of the page.
        """
        # Sorted as ``sorted`` would, with no more in memory than the page.
        chosen = heapq.nsmallest(count_max + 1, self._unpublished(events), key=self._last_seq)
        return Page(chosen[:count_max], len(chosen) > count_max)

    def _unpublished(self, events: Iterable[Event]) -> Iterator[Event]:
        remaining = iter(events)
        while chunk := list(itertools.islice(remaining, _CHUNK)):
            known = self._known(chunk)
            yield from (event for event in chunk if event.meta.event_id not in known)

    def _last_seq(self, event: Event) -> int:
        """The seq of the last published event of the same topic, type and space; 0 if there is none."""
        meta = event.meta
        return self._last_seqs.get((meta.topic, str(meta.type), meta.space_id), 0)

    def _known(self, events: Sequence[Event]) -> set[str]:
        """The ids among these that were published; on the way, note when each topic, type and space was published last."""
        topics = sorted({event.meta.topic for event in events})
        ids = pa.array([event.meta.event_id for event in events], pa.string())
        known: set[str] = set()
        if not self.lake.exists(SILVER_EVENTS.name):
            return known
        files = self.lake.files(
            SILVER_EVENTS.name, lambda file: any(file.may_hold("topic", topic, topic) for topic in topics)
        )
        if not files:
            return known
        rows = self.lake.dataset(SILVER_EVENTS.name, files, arrow_schema(SILVER_EVENTS.schema))
        is_own = (pc.field("device") == OWN_DEVICE) & pc.field("topic").isin(topics)
        with translate_read_errors(self.lake.folder(SILVER_EVENTS.name)):
            for batch in rows.to_batches(columns=list(_READ), filter=is_own):
                if not batch.num_rows:
                    continue
                is_known = pc.is_in(batch["event_id"], value_set=ids)
                known.update(batch["event_id"].filter(is_known).to_pylist())
                last = (
                    pa.Table.from_batches([batch]).group_by(["topic", "type", "space_id"]).aggregate([("seq", "max")])
                )
                for row in last.to_pylist():
                    stream = row["topic"], row["type"], row["space_id"]
                    self._last_seqs[stream] = max(self._last_seqs.get(stream, 0), row["seq_max"])
        return known
