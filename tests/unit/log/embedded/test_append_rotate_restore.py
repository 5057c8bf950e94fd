"""The life of a topic's files: lines are added, segments are cut, and opening again finds all of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conformance.support import append_all, numbered, read_all
from tidings.log import LogSettings, Query
from tidings.log.embedded import open_log


@pytest.mark.req("F29", "F125")
async def test_what_was_appended_and_cut_is_restored(tmp_path: Path) -> None:
    """Segments are cut at so many lines; a log that is opened again has every record, and goes on in the last segment."""
    settings = LogSettings(segment_lines_max=10, journal_bytes=1 << 20)
    log = await open_log(tmp_path, settings)
    await append_all(log, numbered("a", 25))
    before = await read_all(log, Query())
    await log.close()

    log = await open_log(tmp_path, settings)
    after = await read_all(log, Query())
    await append_all(log, numbered("a", 6))
    await log.close()

    files = sorted((tmp_path / ".bus" / "wal").glob("a.*.jsonl"))
    assert after == before
    assert [file.name for file in files] == [f"a.{number:08d}.jsonl" for number in (1, 2, 3, 4)]
    assert [len(file.read_bytes().splitlines()) for file in files] == [10, 10, 10, 1]
