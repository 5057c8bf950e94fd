"""Limits of the log: what is larger is split, waits or is rejected, and every acknowledged record can be read."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.beyond import Beyond, crossed
from tests.conformance.support import all_full_segments_sealed, append_all, event, numbered, read_all
from tidings.core.clock import datetime_of
from tidings.core.errors import InvalidEvent
from tidings.log import Log, LogSettings, Query, encoding, keys, reading
from tidings.log.embedded import open_log, segment_writer
from tidings.log.keys import KeyFile, KeyFileUnusable

SMALL: dict[str, Any] = {"journal_bytes": 1 << 20, "durability": "none"}


@asynccontextmanager
async def opened(workspace: Path, settings: LogSettings) -> AsyncIterator[Log]:
    """Open the log of a workspace for the block."""
    log = await open_log(workspace, settings)
    try:
        yield log
    finally:
        await log.close()


async def offsets(log: Log, topic: str = "demo") -> list[int]:
    """The offsets of all records of a topic, as they are read back."""
    return [record.offset for record in await read_all(log, Query(topic=topic))]


@pytest.mark.bound("log.settings.LogSettings.segment_lines_max")
@crossed
async def test_a_segment_takes_no_more_lines_than_its_limit(tmp_path: Path, beyond: Beyond) -> None:
    """Further records go to the next segment; all are read back, also after opening again."""
    settings = LogSettings(segment_lines_max=10, **SMALL)
    async with opened(tmp_path, settings) as log:
        await append_all(log, numbered("demo", beyond(10)))
        await all_full_segments_sealed(log)
        assert len(log.topics()["demo"].segments) == -(-beyond(10) // 10)
    async with opened(tmp_path, settings) as log:
        assert await offsets(log) == list(range(beyond(10)))


@pytest.mark.bound("log.settings.LogSettings.segment_bytes_max")
@crossed
async def test_a_segment_takes_no_more_bytes_than_its_limit(tmp_path: Path, beyond: Beyond) -> None:
    """Records beyond it go to further segments; one record that is larger has a segment of its own."""
    settings = LogSettings(segment_bytes_max=1_000_000, payload_bytes_max=16 << 20, **SMALL)
    large = {"text": "x" * beyond(1_000_000)}
    async with opened(tmp_path, settings) as log:
        await append_all(log, [event("demo", {"n": 0}), event("demo", large), event("demo", {"n": 2})])
        await append_all(log, [event("many", {"text": "x" * 100_000}) for _ in range(beyond(10))])
        await all_full_segments_sealed(log)
        assert len(log.topics()["demo"].segments) == 3
        for segment in log.topics()["many"].segments:
            assert segment.size_bytes <= 1_000_000 + 101_000
        assert await offsets(log) == [0, 1, 2]
        assert await offsets(log, "many") == list(range(beyond(10)))


@pytest.mark.bound(
    "log.settings.LogSettings.batch_bytes_max",
    "log.settings.LogSettings.staged_bytes_max",
    "log.settings.LogSettings.journal_bytes",
)
@crossed
async def test_a_list_larger_than_a_commit_is_stored_whole_and_in_order(tmp_path: Path, beyond: Beyond) -> None:
    """One event, and one list, beyond the bytes of a commit, of what waits and of a journal file are stored in order."""
    limit = 1 << 20
    settings = LogSettings(
        batch_bytes_max=1 << 16, staged_bytes_max=limit, journal_bytes=1 << 16, payload_bytes_max=16 << 20
    )
    text = "x" * 50_000
    async with opened(tmp_path, settings) as log:
        [large] = await append_all(log, [event("demo", {"text": "x" * beyond(limit)})])
        many = await append_all(log, [event("demo", {"text": text}) for _ in range(beyond(limit) // len(text) + 1)])
        assert [appended.offset for appended in (large, *many)] == list(range(len(many) + 1))
    async with opened(tmp_path, settings) as log:
        assert await offsets(log) == list(range(len(many) + 1))


@pytest.mark.bound("log.settings.LogSettings.journal_count_max")
@crossed
async def test_more_than_the_journal_holds_is_moved_on_the_way(tmp_path: Path, beyond: Beyond) -> None:
    """Publishing more than all journal files hold waits for the segments; the number of journal files stays at its limit."""
    settings = LogSettings(journal_bytes=1 << 16, journal_count_max=2)
    async with opened(tmp_path, settings) as log:
        for _ in range(beyond(2) * 4):
            await append_all(log, [event("demo", {"text": "x" * 20_000})])
            assert len(list((tmp_path / ".bus/journal").iterdir())) <= 2 + 1  # One may be prepared ahead.
        assert await offsets(log) == list(range(beyond(2) * 4))


@pytest.mark.bound("log.reading.PAGE_RECORDS_MAX", "log.reading.PAGE_BYTES_MAX")
@crossed
async def test_a_page_ends_at_its_limits_and_the_next_continues(tmp_path: Path, beyond: Beyond) -> None:
    """``records`` goes through more than a page of records, and of bytes, and gives each record once."""
    async with opened(tmp_path, LogSettings(payload_bytes_max=1 << 20, **SMALL)) as log:
        await append_all(log, numbered("demo", beyond(reading.PAGE_RECORDS_MAX)))
        await append_all(log, [event("large", {"text": "x" * (1 << 19)}) for _ in range(beyond(8))])
        assert [record.offset async for record in reading.records(log, Query(topic="demo"))] == list(
            range(beyond(reading.PAGE_RECORDS_MAX))
        )
        page = await log.read(Query(topic="large"), bytes_max=reading.PAGE_BYTES_MAX)
        assert len(page.records) <= 8
        assert [record.offset async for record in reading.records(log, Query(topic="large"))] == list(range(beyond(8)))


@pytest.mark.bound("log.embedded.segment_writer._OPEN_FILES_MAX")
@crossed
async def test_more_topics_than_open_files_are_all_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beyond: Beyond
) -> None:
    """Records of more topics than files may be open are all in their segments, also in a second round."""
    monkeypatch.setattr(segment_writer, "_OPEN_FILES_MAX", 4)
    async with opened(tmp_path, LogSettings(**SMALL)) as log:
        for _ in range(2):
            await append_all(log, [event(f"topic{number}", {}) for number in range(beyond(4))])
    async with opened(tmp_path, LogSettings(**SMALL)) as log:
        for number in range(beyond(4)):
            assert await offsets(log, f"topic{number}") == [0, 1]


@pytest.mark.bound("log.encoding._TS_NS_MAX")
@crossed
async def test_an_event_of_a_later_century_is_rejected(tmp_path: Path, beyond: Beyond) -> None:
    """The last microsecond of 2261 is stored; the next one, and the last of the year 9999, are rejected and take no seq."""
    last = datetime_of(encoding._TS_NS_MAX - 1000)
    later = last + timedelta(microseconds=1) if beyond(1) == 2 else datetime.max.replace(tzinfo=UTC)
    async with opened(tmp_path, LogSettings(**SMALL)) as log:
        with pytest.raises(InvalidEvent):
            await log.append(event("demo", {}, ts=later))
        [appended] = await append_all(log, [event("demo", {}, ts=last)])
        assert appended.seq == 1


@pytest.mark.bound("log.keys._FILE_BYTES_MAX")
@crossed
def test_a_larger_key_file_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beyond: Beyond) -> None:
    """A file at the limit is read; one beyond it raises, and is neither read whole nor changed."""
    path = tmp_path / "keys.json"
    KeyFile.create(path).add_key("shared:home")
    content = path.read_bytes()
    monkeypatch.setattr(keys, "_FILE_BYTES_MAX", len(content))
    KeyFile(path)
    path.write_bytes(content + b" " * (beyond(len(content)) - len(content)))
    with pytest.raises(KeyFileUnusable, match="larger"):
        KeyFile(path)
    assert path.read_bytes().strip() == content.strip()
    assert msgspec.json.decode(content)
