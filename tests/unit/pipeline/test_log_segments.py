"""The segments of a log, as the pipeline sees them beside whoever writes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.unit.pipeline.support import SMALL, Workspace, event
from tidings.log.embedded import open_log
from tidings.log.embedded.disk import OsDisk
from tidings.log.retention import SegmentInfo
from tidings.pipeline.source import log_segments


def seen(workspace: Workspace) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = log_segments(workspace.layout, OsDisk()).to_pylist()
    return rows


def engines_own(workspace: Workspace) -> list[SegmentInfo]:
    """What the engine itself says of its segments."""

    async def ask() -> list[SegmentInfo]:
        log = await open_log(workspace.folder, workspace.log_settings)
        try:
            return [segment for info in log.topics().values() for segment in info.segments]
        finally:
            await log.close()

    return asyncio.run(ask())


@pytest.mark.parametrize("layout", ["flat", "space"])
def test_rows_say_what_the_engine_says(tmp_path: Path, layout: Any) -> None:
    """
    Sealed and open segments, of several topics and spaces, have the bounds that the engine has for them.
    """
    workspace = Workspace(tmp_path, msgspec.structs.replace(SMALL, layout=layout))
    workspace.append(event(number, f"t{number % 2}", space_id=f"s:{number % 3}") for number in range(155))
    workspace.append([event(900, payload={"long": "x" * 3_000_000})])

    own = engines_own(workspace)

    assert len({row["is_sealed"] for row in seen(workspace)}) == 2
    assert sorted(tuple(str(value) for value in list(row.values())[:9]) for row in seen(workspace)) == sorted(
        tuple(
            str(value)
            for value in (
                *(each.topic, each.space_id, each.number, each.is_sealed, each.first_offset, each.last_offset),
                *(each.first_seq, each.last_seq, each.size_bytes),
            )
        )
        for each in own
    )


def test_without_a_lock_beside_the_writer(tmp_path: Path) -> None:
    """
    While another process has the log open its segments are listed, a line that is being written left out.
    """
    workspace = Workspace(tmp_path)

    async def pin() -> list[dict[str, Any]]:
        log = await open_log(tmp_path, workspace.log_settings)
        try:
            await log.append_many([event(number) for number in range(25)])
            return seen(workspace)
        finally:
            await log.close()

    workspace.append(event(100 + number) for number in range(12))
    assert [row["segment"] for row in asyncio.run(pin())][:2] == [1, 2]
    last = workspace.segments()[-1]
    whole = seen(workspace)[-1]
    last.write_bytes(last.read_bytes() + b'{"crc":"00000000","offset":99,"seq":')
    assert seen(workspace)[-1] == whole


def test_dropped_segments_are_not_listed(tmp_path: Path) -> None:
    """
    What retention dropped is gone from the list; a seal that is damaged makes its segment an open one, never a free one.
    """
    workspace = Workspace(tmp_path)
    workspace.append(event(number) for number in range(65))
    assert workspace.retain("demo", 8000) > 0
    before = seen(workspace)
    assert [row["segment"] for row in before] == [int(path.name.split(".")[1]) for path in workspace.segments()]
    seals = workspace.layout.seals / "demo.jsonl"
    lines = seals.read_bytes().splitlines(keepends=True)
    first = next(row for row in before if row["is_sealed"])
    seals.write_bytes(
        b"".join(
            line.replace(b'"lines"', b'"LINES"') if b'"segment":%d,' % first["segment"] in line else line
            for line in lines
        )
    )

    after = seen(workspace)

    assert [row["segment"] for row in after] == [row["segment"] for row in before]
    assert [row["is_sealed"] for row in after] == [row["is_sealed"] and row is not first for row in before]
    assert [row["last_offset"] for row in after] == [row["last_offset"] for row in before]
