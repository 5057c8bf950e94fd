"""What the conformance tests share: making events, reading to the end, waiting for a condition."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, Final, Protocol

from msgspec.structs import replace

from tidings.core.clock import Clock
from tidings.core.events import Event, EventMeta
from tidings.log import Appended, Log, LogSettings, Query, Record, TopicInfo, TopicRetention
from tidings.log.encryption import Encryptor
from tidings.log.retention import RetentionPlan, plan_retention

SMALL: Final = LogSettings(journal_bytes=1 << 20)
"""The defaults, but for what an engine would prepare on disk before its first event."""
SECONDS_MAX: Final = 20.0
"""How long anything awaited may take before the test fails instead of hanging."""
_PAGES_MAX: Final = 10_000


class OpenEngine(Protocol):
    """Opens a log of the engine under test; closed when the test ends."""

    async def __call__(
        self, settings: LogSettings = ..., *, clock: Clock = ..., encryptor: Encryptor | None = ...
    ) -> Log: ...


def event(topic: str = "demo", payload: Mapping[str, Any] | None = None, /, **meta: Any) -> Event:
    """An event that any engine takes, unless ``meta`` or the payload spoil it."""
    envelope: dict[str, Any] = {"topic": topic, "type": "NOTED", "space_id": "shared:home"} | meta
    return Event(EventMeta(**envelope), {} if payload is None else payload)


def numbered(topic: str, count: int, **meta: Any) -> list[Event]:
    """Events whose payloads count from 0, all of one length."""
    return [event(topic, {"n": f"{n:06}"}, **meta) for n in range(count)]


async def append_all(log: Log, events: Iterable[Event]) -> list[Appended]:
    """Append events of which none is refused or known."""
    verdicts = await log.append_many(list(events))
    appended = [verdict for verdict in verdicts if isinstance(verdict, Appended)]
    assert len(appended) == len(verdicts), verdicts
    return appended


async def read_all(log: Log, query: Query, *, limit: int = 1000, bytes_max: int = 4 << 20) -> list[Record]:
    """Follow a query page by page to its end."""
    found: list[Record] = []
    for _ in range(_PAGES_MAX):
        page = await log.read(query, limit=limit, bytes_max=bytes_max)
        assert len(page.records) <= limit
        found += page.records
        if page.at_end:
            return found
        query = page.next
    raise AssertionError(f"no end after {_PAGES_MAX} pages")


async def read_seqs(log: Log, query: Query, *, limit: int = 1000) -> list[int]:
    """The seqs a query finds, in the order it finds them."""
    return [record.seq for record in await read_all(log, query, limit=limit)]


def topics_but_digests(log: Log) -> dict[str, TopicInfo]:
    """The topics, without what an engine may add to a sealed segment a moment later."""
    return {
        name: replace(info, segments=tuple(replace(segment, digest=None) for segment in info.segments))
        for name, info in log.topics().items()
    }


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that an engine does behind the acknowledgement."""
    async with asyncio.timeout(SECONDS_MAX):
        while not condition():  # noqa: ASYNC110 - the interface has no event for it
            await asyncio.sleep(0.002)


async def all_full_segments_sealed(log: Log) -> None:
    """Wait until of every topic only the active segment is open."""

    def is_sealed() -> bool:
        return all(segment.is_sealed for topic in log.topics().values() for segment in topic.segments[:-1])

    await until(is_sealed)


async def plan_to_drop_sealed(log: Log, *topics: str, keep_ids: bool = False) -> RetentionPlan:
    """A plan by which everything goes that may: all sealed segments of these topics (of all, if none is named)."""
    await all_full_segments_sealed(log)
    segments = [segment for topic in log.topics().values() for segment in topic.segments]
    partitions = {partition for segment in segments for partition in segment.partitions}
    rule = TopicRetention(size_bytes_max=0, keep_ids=keep_ids)
    return plan_retention(
        segments,
        dict.fromkeys(topics or ("*",), rule),
        now=datetime(2026, 1, 1, tzinfo=UTC),
        partition_floors=dict.fromkeys(partitions, log.position.seq),
    )


async def drop_sealed(log: Log, *topics: str, keep_ids: bool = False) -> RetentionPlan:
    """Drop all sealed segments of these topics."""
    plan = await plan_to_drop_sealed(log, *topics, keep_ids=keep_ids)
    await log.drop(plan)
    return plan
