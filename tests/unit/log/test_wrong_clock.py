"""The time of writing, where the clock of the machine cannot be right."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.beyond import Beyond, crossed
from tidings.core.events import Event, EventMeta
from tidings.log.embedded.opening import open_log
from tidings.log.encoding import WRITTEN_NS_MAX
from tidings.log.interface import Query
from tidings.log.reading import records
from tidings.testing import VirtualClock


class WrongClock(VirtualClock):
    """A clock that shows what a test says."""

    shown_ns: int | None = None

    def now_ns(self) -> int:
        return super().now_ns() if self.shown_ns is None else self.shown_ns


@pytest.mark.bound("log.encoding.WRITTEN_NS_MAX")
@crossed
async def test_a_later_clock_is_not_believed(tmp_path: Path, beyond: Beyond) -> None:
    """A record gets the time of the one before until the clock is right again; it is stored all the same."""
    clock = WrongClock()
    log = await open_log(tmp_path, clock=clock)
    await log.append(Event(EventMeta("demo", "NOTED", "shared:home"), {}))
    clock.shown_ns = beyond(WRITTEN_NS_MAX)
    await log.append(Event(EventMeta("demo", "NOTED", "shared:home"), {}))
    clock.shown_ns = WRITTEN_NS_MAX - 1
    await log.append(Event(EventMeta("demo", "NOTED", "shared:home"), {}))
    first, second, third = [record.meta.written_at async for record in records(log, Query(topic="demo"))]
    await log.close()
    assert first == second
    assert third.startswith("2099-12-31")
