"""What the pipeline's tests share: logs to read, made by the log itself."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tidings.core.clock import SYSTEM_CLOCK
from tidings.core.events import Event, EventMeta
from tidings.log.embedded import open_log
from tidings.log.embedded.disk import OsDisk
from tidings.log.embedded.layout import Layout
from tidings.log.encryption import Encryptor
from tidings.log.retention import plan_retention
from tidings.log.settings import LogSettings, TopicRetention
from tidings.pipeline.gold import Publish
from tidings.pipeline.lake import Lake
from tidings.pipeline.runner import Pipeline
from tidings.pipeline.settings import PipelineSettings
from tidings.pipeline.source import LogSource
from tidings.pipeline.verify import LakeComparison, compare_with_log

__all__ = ["SMALL", "Workspace", "event"]

SMALL = LogSettings(journal_bytes=1 << 20, segment_lines_max=10)
_runs = itertools.count()


def event(number: int, topic: str = "demo", payload: dict[str, Any] | None = None, **meta: Any) -> Event:
    """An event that can be told from others by its number."""
    fields = {"type": "MADE", "space_id": "shared:home", "event_id": f"ev-{number}", **meta}
    return Event(EventMeta(topic=topic, **fields), {"n": number} if payload is None else payload)


class Workspace:
    """A log and its lake in a folder."""

    def __init__(self, folder: Path, settings: LogSettings = SMALL, encryptor: Encryptor | None = None) -> None:
        self.folder = folder
        self.log_settings = settings
        self.layout = Layout(folder)
        self._encryptor = encryptor

    @property
    def lake(self) -> Lake:
        """The lake, as somebody finds it who opens it now."""
        return Lake(self.folder / "lake", SYSTEM_CLOCK)

    def append(self, events: Iterable[Event]) -> None:
        """Have the log take events, and close it."""
        given = list(events)

        async def fill() -> None:
            log = await open_log(self.folder, self.log_settings, encryptor=self._encryptor)
            try:
                await log.append_many(given)
            finally:
                await log.close()

        asyncio.run(fill())

    def retain(self, topic: str, size_bytes_max: int, archived: dict[str, int] | None = None) -> int:
        """Have the log drop old segments of a topic; how many went."""

        async def drop() -> int:
            log = await open_log(self.folder, self.log_settings, encryptor=self._encryptor)
            try:
                segments = [segment for info in log.topics().values() for segment in info.segments]
                rules = {topic: TopicRetention(size_bytes_max=size_bytes_max)}
                plan = plan_retention(segments, rules, now=datetime.now(UTC), archived_through=archived)
                await log.drop(plan)
                return len(plan.drops)
            finally:
                await log.close()

        return asyncio.run(drop())

    @property
    def epoch(self) -> str:
        """The log's epoch."""
        return self.layout.read_meta(OsDisk()).epoch

    def segments(self) -> list[Path]:
        """The segment files, in order."""
        return sorted(self.layout.wal.rglob("*.jsonl"))

    def source(self) -> LogSource:
        """The log as the pipeline reads it."""
        return LogSource(self.layout, OsDisk())

    def pipeline(self, settings: PipelineSettings, publish: Publish | None = None) -> Pipeline:
        """The pipeline, ready for one run."""
        run = f"{os.getpid():x}x{next(_runs)}"
        return Pipeline(self.folder, settings, clock=SYSTEM_CLOCK, run=run, publish=publish)

    def verify(self) -> LakeComparison:
        """Log and lake, compared."""
        return compare_with_log(self.lake, self.layout, OsDisk())

    def rows(self, table: str, *columns: str) -> list[tuple[Any, ...]]:
        """A table's rows, read without Spark, in order."""
        found: list[tuple[Any, ...]] = []
        for file in self.lake.files(table):
            rows = self.lake.dataset(table, [file]).to_table(list(columns) or None).to_pylist()
            found += [tuple(row.values()) for row in rows]
        return sorted(found, key=repr)

    def column(self, table: str, name: str) -> Sequence[Any]:
        """One column of a table, sorted."""
        return sorted((row[0] for row in self.rows(table, name)), key=lambda value: (value is None, value))
