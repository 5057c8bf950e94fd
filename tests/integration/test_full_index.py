"""An index at its limit: said in its own words, no reason to refuse what needs no entry, and mended by retention."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.conformance.support import drop_sealed
from tidings.log import LogSettings
from tidings.log.embedded import EmbeddedLog, open_log
from tidings.log.embedded.index import IndexFull
from tidings.log.interface import Appended, Duplicate, Query
from tidings.types import Event, EventMeta

MIB = 1 << 20
SETTINGS = LogSettings(journal_bytes=MIB, segment_lines_max=500, index_bytes_max=MIB)


def event(event_id: str | None = None, partitions: tuple[str, ...] = ()) -> Event:
    return Event(EventMeta("demo", "NOTED", "s:1", event_id=event_id, partitions=partitions), {})


async def fill(log: EmbeddedLog) -> int:
    """Store events with ids until the index has no room for more; how many were stored."""
    count = 0
    for n in range(100):
        verdicts = await log.append_many([event(f"e{n}.{m}") for m in range(1000)])
        count += sum(isinstance(verdict, Appended) for verdict in verdicts)
        await log._flush_all()
        if log.health().is_index_full:
            return count
    raise AssertionError("there was always room")


async def until_writable(log: EmbeddedLog) -> None:
    async with asyncio.timeout(20):
        while not log.health().is_writable:  # noqa: ASYNC110 - it looks again by itself, in real time
            await asyncio.sleep(0.01)


async def test_a_full_index_is_no_full_disk(tmp_path: Path) -> None:
    """Health and error name the index; what needs no entry is stored, what needs one is refused, and what is stored is known."""
    log = await open_log(tmp_path, SETTINGS)
    count = await fill(log)

    health = log.health()
    assert (health.is_writable, health.is_storage_full, health.is_index_full) == (False, False, True)
    assert "index" in (health.problem or "")
    for refused in (event("new"), event(partitions=("p",))):
        with pytest.raises(IndexFull):
            await log.append(refused)
    assert (await log.append(event())).seq == count + 1
    assert [type(verdict) for verdict in await log.append_many([event(), event()])] == [Appended, Appended]
    assert log.health().is_index_full
    await log.close()


async def test_retention_makes_room_in_a_full_index(tmp_path: Path) -> None:
    """When old segments are dropped, their entries go, and events with ids are stored again; those that stayed are duplicates."""
    log = await open_log(tmp_path, SETTINGS)
    await fill(log)
    last = (await log.read(Query(backwards=True), limit=1)).records[0].meta.event_id
    await drop_sealed(log)
    await until_writable(log)

    assert isinstance(await log.append(event("new")), Appended)
    assert isinstance(await log.append(event(last)), Duplicate)
    assert isinstance(await log.append(event("e0.0")), Appended)
    await log.close()


@pytest.mark.parametrize("is_dropped", [False, True])
async def test_a_log_with_a_full_index_opens(tmp_path: Path, is_dropped: bool) -> None:
    """It opens, serves everything, knows every id as far as it takes events, and goes on after retention or with a larger limit."""
    log = await open_log(tmp_path, SETTINGS)
    count = await fill(log)
    await log.close()

    log = await open_log(tmp_path, SETTINGS)
    assert log.health().is_index_full
    assert log.position.seq == count
    with pytest.raises(IndexFull):
        await log.append(event("new"))
    if is_dropped:
        await drop_sealed(log)
        await until_writable(log)
    else:
        await log.close()
        log = await open_log(tmp_path, LogSettings(journal_bytes=MIB, index_bytes_max=64 * MIB))
        assert isinstance(await log.append(event("e0.0")), Duplicate)
        assert isinstance(await log.append(event(f"e{(count - 1) // 1000}.0")), Duplicate)
    assert isinstance(await log.append(event("new")), Appended)
    await log.close()
