"""What was made again of the records is what they tell, whoever read before, however much of it is kept, and whatever was dropped."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.conformance.support import drop_sealed
from tests.gateway_world import GatewayWorld
from tidings.access.errors import AccessUnavailable
from tidings.core.events import Event, EventMeta
from tidings.log.errors import PositionTrimmed
from tidings.log.interface import Query
from tidings.log.memory import MemoryLog
from tidings.log.settings import LogSettings
from tidings.server import envelope_history
from tidings.server.envelope_history import EnvelopeHistory
from tidings.testing import VirtualClock


def item(*objects: str, topic: str = "a") -> Event:
    return Event(EventMeta(topic, "NOTED", "home", objects=list(objects)), {"text": "x" * 100})


async def seqs(history: EnvelopeHistory, since: int | None, until: int | None = None) -> list[int]:
    """Everything between two places."""
    query, found = Query(since=since, until=until), []
    while True:
        page = await history.read(query, bytes_max=2_000)
        found += [each.seq for each in page.told]
        if page.at_end:
            return found
        assert query.since is None or page.through_seq > query.since, "a page that is not the end goes on"
        query = page.next


@pytest.fixture
def world() -> GatewayWorld:
    return GatewayWorld()


@pytest.fixture
def log() -> MemoryLog:
    return MemoryLog(LogSettings(segment_bytes_max=4_096), clock=VirtualClock())


@pytest.mark.parametrize("seed", range(4))
async def test_readers_at_any_place_find_what_is_there(
    world: GatewayWorld, log: MemoryLog, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Many at once, while records are committed and little is kept: each finds every seq that tells something, in order and once."""
    monkeypatch.setattr(envelope_history, "_KEPT_BYTES_MAX", 40_000)
    monkeypatch.setattr(envelope_history, "_BLOCKS_MAX", 4)
    history, rng = EnvelopeHistory(log, world.gateway, "default"), random.Random(seed)
    telling: list[int] = []

    async def commit() -> None:
        for _ in range(300):
            count, parts = rng.choice(((0, 0), (0, 0), (1, 1), (2, 1), (150, 3)))
            seq = (await log.append(item(*(f"o:{number}" for number in range(count))))).seq
            telling.extend([seq] * parts)

    async def read() -> None:
        for _ in range(30):
            end = log.position.seq
            since, until = rng.randint(0, end), rng.choice((end, rng.randint(0, end)))
            found = await seqs(history, since, until)
            assert found == [seq for seq in telling if since < seq <= until]

    await asyncio.gather(commit(), *(read() for _ in range(6)))
    assert await seqs(history, 0) == telling == await seqs(history, None)
    assert len(history._blocks) <= 4
    assert history._size_bytes == sum(block.size_bytes for block in history._blocks.values()) <= 40_000


async def test_an_envelope_is_made_once_for_all_who_read_it(world: GatewayWorld, log: MemoryLog) -> None:
    """Whoever reads it later gets the same bytes."""
    history = EnvelopeHistory(log, world.gateway, "default")
    await log.append(item("o:1"))
    pages = [await history.read(Query(since=0), bytes_max=1 << 20) for _ in range(2)]
    await log.append(item("o:2"))
    pages.append(await history.read(Query(since=0), bytes_max=1 << 20))

    first, again, more = [[each.encoded for each in page.told] for page in pages]
    assert first == again == more[:1]
    assert (len(more), [page.effort for page in pages]) == (2, [2, 1, 3])


async def test_what_tells_nothing_is_passed_over_at_once(world: GatewayWorld, log: MemoryLog) -> None:
    """A long stretch without objects is read once, and takes no step of its own after that."""
    history = EnvelopeHistory(log, world.gateway, "default")
    for _ in range(500):
        await log.append(item())
    await log.append(item("o:1"))
    assert await seqs(history, 0) == [501]

    page = await history.read(Query(since=3), bytes_max=1 << 20)
    assert ([each.seq for each in page.told], page.at_end, page.effort) == ([501], True, 1)


async def test_what_retention_dropped_is_not_shown_from_memory(world: GatewayWorld, log: MemoryLog) -> None:
    """Whoever stands before it is told so, as by the log; whoever stands behind it reads on, in the same block too."""
    history = EnvelopeHistory(log, world.gateway, "default")
    for number in range(60):
        await log.append(item(f"o:{number}", topic="ab"[number % 2]))
    assert len(await seqs(history, 0)) == 60
    await drop_sealed(log, "a")
    dropped = log.dropped_through_seq
    fresh = EnvelopeHistory(log, world.gateway, "default")

    assert 0 < dropped < 60
    for each in (history, fresh):
        with pytest.raises(PositionTrimmed):
            await each.read(Query(since=dropped - 1), bytes_max=1 << 20)
        assert await seqs(each, dropped) == list(range(dropped + 1, 61))
    kept = [seq for seq in range(1, 61) if seq % 2 == 0 or seq > dropped]
    assert await seqs(history, None) == kept


async def test_nothing_is_made_while_access_cannot_be_decided(world: GatewayWorld, log: MemoryLog) -> None:
    """Then, and when it can be again, nothing is left out."""
    history = EnvelopeHistory(log, world.gateway, "default")
    await log.append(item("o:1"))
    doubtful = world.doubtful_access_record()
    with pytest.raises(AccessUnavailable):
        await history.read(Query(since=0), bytes_max=1 << 20)
    world.dismiss(doubtful)

    assert await seqs(history, 0) == [1]
