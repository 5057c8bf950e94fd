"""Real processes on a real disk: a writer is killed at random moments, and followers read beside a living one."""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.conformance.support import SECONDS_MAX, append_all, drop_sealed, numbered, read_all
from tests.conformance.support import event as make_event
from tests.crash.child import SETTINGS
from tidings.log import Appended, Duplicate, Log, Query, Record
from tidings.log.embedded import open_follower, open_log
from tidings.log.errors import PositionTrimmed

_CHILD: Final = Path(__file__).with_name("child.py")
_ROUND_STRIDE: Final = 1_000_000


class Writer:
    """The child process, and what it has told so far."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.acknowledged: dict[int, tuple[str, Appended]] = {}
        self.is_open = False

    @classmethod
    async def start(cls, workspace: Path, first: int) -> Writer:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(_CHILD), str(workspace), str(first)), stdout=asyncio.subprocess.PIPE
        )
        writer = cls(process)
        assert await writer._line() == "opening"
        return writer

    async def _line(self) -> str:
        assert self.process.stdout is not None
        async with asyncio.timeout(60):
            return (await self.process.stdout.readline()).decode().rstrip("\n")

    async def listen(self, count: int) -> None:
        """Take note of this many more lines."""
        for _ in range(count):
            if not self._note(await self._line()):
                return

    def _note(self, line: str) -> bool:
        if line == "open":
            self.is_open = True
        elif line:
            number, topic, seq, offset, event_id = line.split()
            self.acknowledged[int(number)] = (topic, Appended(int(seq), int(offset), event_id))
        return bool(line)

    async def kill(self) -> None:
        """Kill it, and take note of what it told before."""
        self.process.kill()
        while self._note(await self._line()):
            pass
        await self.process.wait()


async def _check_kept(log: Log, told: dict[int, tuple[str, Appended]]) -> list[Record]:
    records = await read_all(log, Query())
    seqs = [record.seq for record in records]
    assert seqs == list(range(1, len(seqs) + 1)), "seqs are dense: nothing was dropped"
    by_number = {record.payload["n"]: record for record in records}
    assert len(by_number) == len(records), "every event is there once"
    for number, (topic, place) in told.items():
        record = by_number[number]
        assert (record.topic, record.seq, record.offset) == (topic, place.seq, place.offset)
        assert record.meta.event_id == place.event_id
        assert record.payload == {"n": number, "pad": "x" * (number % 400)}
    for topic in ("alpha", "beta"):
        offsets = [record.offset for record in records if record.topic == topic]
        assert offsets == list(range(len(offsets)))
    named = [record.seq for record in records if "p" in record.meta.partitions]
    # A living writer may have added more since: what is compared is what both readings can have seen.
    assert [record.seq for record in await read_all(log, Query(partitions=("p",), until=len(seqs)))] == named
    return records


async def _kill_again_and_again(workspace: Path, rounds: int, seed: int) -> None:
    rng = random.Random(seed)
    told: dict[int, tuple[str, Appended]] = {}
    for n in range(rounds):
        writer = await Writer.start(workspace, n * _ROUND_STRIDE)
        if n % 4 == 3:
            # At some moment of its recovery, which takes a few milliseconds.
            await asyncio.sleep(rng.random() * 0.03)
        else:
            await writer.listen(1 + rng.randint(0, 400))
        await writer.kill()
        told |= writer.acknowledged
        follower = await open_follower(workspace, SETTINGS)
        seen = await _check_kept(follower, told)
        await follower.close()
        log = await open_log(workspace, SETTINGS)
        assert await _check_kept(log, told) == seen, "a follower shows what recovery brings back"
        await _check_retries(log, seen, rng)
        await log.close()
    assert told


async def _check_retries(log: Log, seen: list[Record], rng: random.Random) -> None:
    for record in rng.sample(seen, min(5, len(seen))):
        meta = record.meta
        again = make_event(record.topic, record.payload, event_id=meta.event_id, partitions=meta.partitions)
        assert await log.append(again) == Duplicate(record.seq, record.offset, meta.event_id)


@pytest.mark.crash
@pytest.mark.slow
@pytest.mark.req("F32")
async def test_a_killed_writer_loses_nothing_it_acknowledged(tmp_path: Path) -> None:
    """Killed at random moments, also while recovering, the writer has lost nothing that it told anybody."""
    await _kill_again_and_again(tmp_path, 4, seed=1)


@pytest.mark.heavy
@pytest.mark.timeout(1800)
async def test_a_writer_killed_a_hundred_times_loses_nothing(tmp_path: Path) -> None:
    """The same, a hundred times over."""
    await _kill_again_and_again(tmp_path, 100, seed=2)


@pytest.mark.crash
@pytest.mark.slow
async def test_killed_twice_without_a_clean_closing_in_between(tmp_path: Path) -> None:
    """Recovery after recovery, each cut short by a kill, comes to the same records."""
    told: dict[int, tuple[str, Appended]] = {}
    for n in range(4):
        writer = await Writer.start(tmp_path, n * _ROUND_STRIDE)
        await writer.listen(60)
        await writer.kill()
        told |= writer.acknowledged
    log = await open_log(tmp_path, SETTINGS)
    await _check_kept(log, told)
    await log.close()


@pytest.mark.crash
@pytest.mark.slow
@pytest.mark.req("S28")
async def test_a_follower_beside_a_living_writer_sees_a_growing_prefix(tmp_path: Path) -> None:
    """Beside a living writer a follower reads whole records, each once, in order, and catches up."""
    writer = await Writer.start(tmp_path, 0)
    await writer.listen(200)
    follower = await open_follower(tmp_path, SETTINGS)
    seen: list[Record] = []
    query = Query(since=0)
    while len(seen) < 1500:
        await writer.listen(50)
        page = await follower.read(query, limit=70)
        seen += page.records
        query = page.next
    await writer.kill()
    last = max(place.seq for _, place in writer.acknowledged.values())
    seen += await read_all(follower, query)
    assert [record.seq for record in seen] == list(range(1, len(seen) + 1))
    await follower.close()

    log = await open_log(tmp_path, SETTINGS)
    records = await _check_kept(log, writer.acknowledged)
    assert records[: len(seen)] == seen
    assert len(records) >= last
    await log.close()


async def test_a_follower_that_comes_late_finds_what_is_sealed(tmp_path: Path) -> None:
    """A follower opened beside a writer with sealed segments shows all that is written, and then what is added."""
    log = await open_log(tmp_path, SETTINGS)
    await append_all(log, numbered("alpha", 120) + numbered("beta", 3))
    follower = await open_follower(tmp_path, SETTINGS)
    assert await follower.wait(122) >= 123
    assert await read_all(follower, Query()) == await read_all(log, Query())
    await append_all(log, numbered("alpha", 80))
    assert await follower.wait(202) == 203
    assert await read_all(follower, Query(topic="alpha")) == await read_all(log, Query(topic="alpha"))
    await follower.close()
    await log.close()


async def test_a_follower_notices_what_retention_dropped(tmp_path: Path) -> None:
    """Segments dropped under a follower, seen by it or not, are passed over or reported as trimmed; it goes on."""
    log = await open_log(tmp_path, SETTINGS)
    await append_all(log, numbered("alpha", 60) + numbered("beta", 3))
    follower = await open_follower(tmp_path, SETTINGS)
    assert await follower.wait(62) == 63
    await append_all(log, numbered("alpha", 130) + numbered("beta", 3))
    await drop_sealed(log, "alpha")
    await append_all(log, numbered("beta", 1))
    assert await follower.wait(196) == 197
    assert await read_all(follower, Query()) == await read_all(log, Query())
    with pytest.raises(PositionTrimmed):
        await follower.read(Query(topic="alpha", from_offset=0))
    await follower.close()
    await log.close()


async def test_a_follower_opened_after_a_crash_lives_to_see_the_next_writer(tmp_path: Path) -> None:
    """A follower that showed a crashed writer's journal shows what the next writer adds."""
    writer = await Writer.start(tmp_path, 0)
    await writer.listen(150)
    await writer.kill()
    follower = await open_follower(tmp_path, SETTINGS)
    before = await _check_kept(follower, writer.acknowledged)
    writer_after = await Writer.start(tmp_path, _ROUND_STRIDE)
    await writer_after.listen(40)
    reached = max(place.seq for _, place in writer_after.acknowledged.values())
    async with asyncio.timeout(SECONDS_MAX):
        seen = len(before)
        while seen < reached:
            seen = await follower.wait(seen)
    shown = await _check_kept(follower, writer.acknowledged)
    assert shown[: len(before)] == before
    assert len(shown) >= reached
    for topic in ("alpha", "beta"):
        own = [record.seq for record in shown if record.topic == topic]
        assert [record.seq for record in await read_all(follower, Query(topic=topic))][: len(own)] == own
    await follower.close()
    await writer_after.kill()
