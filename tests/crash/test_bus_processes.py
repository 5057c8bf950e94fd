"""Real processes with several groups: killed at random moments, or killing themselves at one event."""

from __future__ import annotations

import asyncio
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Final

import pytest

from tests.scenarios.bus import child
from tidings.bus import EventBus
from tidings.bus.store.files import FileClaims

_CHILD: Final = Path(child.__file__)


class Child:
    """The process, and what it has told so far."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.published: list[int] = []
        self.handled: list[tuple[str, int, int]] = []
        self.buried: list[tuple[str, int, int]] = []
        self.is_ready = False

    @classmethod
    async def start(cls, workspace: Path, mode: str, first: int = 0) -> Child:
        command = (sys.executable, str(_CHILD), str(workspace), mode, str(first))
        return cls(await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE))

    async def listen(self, count: int | None = None) -> None:
        """Take note of so many lines, or of all to the end."""
        assert self.process.stdout is not None
        async with asyncio.timeout(60):
            while count is None or count > 0:
                line = (await self.process.stdout.readline()).decode().split()
                if not line:
                    return
                self._note(line)
                count = None if count is None else count - 1

    def _note(self, line: list[str]) -> None:
        match line:
            case ["ready"]:
                self.is_ready = True
            case ["published", offset]:
                self.published.append(int(offset))
            case ["handled", group, offset, attempt]:
                self.handled.append((group, int(offset), int(attempt)))
            case ["buried", group, offset, retries]:
                self.buried.append((group, int(offset), int(retries)))
            case _:
                raise AssertionError(f"the child said {line}")

    async def end(self) -> int:
        """Listen to the end; the exit code."""
        await self.listen()
        return await self.process.wait()

    async def kill(self) -> None:
        """Kill it, and take note of what it told before."""
        self.process.kill()
        await self.end()


@pytest.mark.crash
@pytest.mark.slow
@pytest.mark.req("F45", "F46", "F52", "F53", "F68", "F128")
@pytest.mark.parametrize("lives", [3, pytest.param(12, marks=pytest.mark.heavy)])
async def test_killed_again_and_again_every_group_gets_every_event(tmp_path: Path, lives: int) -> None:
    """Whatever moment a process is killed at, each group has handled each published event when all is drained."""
    rng = random.Random(5)
    published: set[int] = set()
    handled: set[tuple[str, int]] = set()
    for life in range(lives):
        process = await Child.start(tmp_path, "publish", life * 100_000)
        await process.listen(rng.randint(1, 600))
        await process.kill()
        published |= set(process.published)
        handled |= {(group, offset) for group, offset, _ in process.handled}
    last = await Child.start(tmp_path, "drain")
    assert await last.end() == 0
    handled |= {(group, offset) for group, offset, _ in last.handled}

    end = 1 + max(offset for _, offset in handled)
    assert published <= set(range(end))
    assert handled == {(group, offset) for group in child.GROUPS for offset in range(end)}
    assert last.buried == []


@pytest.mark.crash
@pytest.mark.slow
@pytest.mark.req("F60")
@pytest.mark.parametrize("mode", ["deadly", pytest.param("leaving", marks=pytest.mark.heavy)])
async def test_an_event_that_ends_the_process_is_buried_after_six_lives(tmp_path: Path, mode: str) -> None:
    """A handler that ends the process at one event is called for it six times; then that event is a dead letter."""
    async with EventBus(workspace=tmp_path) as bus:
        for n in range(12):
            await bus.publish(child.event(n))
    handled: Counter[tuple[str, int]] = Counter()
    attempts: list[int] = []
    codes: list[int] = []
    while len(codes) < 10 and codes[-1:] != [0]:
        process = await Child.start(tmp_path, mode)
        codes.append(await process.end())
        handled.update((group, offset) for group, offset, _ in process.handled)
        attempts += [attempt for group, offset, attempt in process.handled if (group, offset) == ("first", 3)]

    assert codes == [9] * 6 + [0]
    assert attempts == [1, 2, 3, 4, 5, 6]
    assert process.buried == [("first", 3, 5)]
    assert set(handled) == {(group, offset) for group in child.GROUPS for offset in range(12)}


def test_claims_outlive_the_process_that_made_them(tmp_path: Path) -> None:
    """What was claimed and not cleared is found again, with its attempt; what was cleared is not."""
    path = tmp_path / "claims" / "t__g.slots"
    claims = FileClaims(path)
    assert claims.left_over() == {}
    claims.begin(4)
    claims.take(0, 17, 1)
    claims.take(1, 18, 3)
    claims.take(3, 0, 2)
    claims.clear(0)

    assert FileClaims(path).left_over() == {18: 3, 0: 2}
    claims.close()
    assert FileClaims(path).left_over() == {18: 3, 0: 2}
    again = FileClaims(path)
    again.begin(2)
    assert FileClaims(path).left_over() == {}
    again.close()


def test_claims_that_were_cut_are_read_as_far_as_they_go(tmp_path: Path) -> None:
    """A cut or empty claims file names what it still can, and is no error."""
    path = tmp_path / "t__g.slots"
    claims = FileClaims(path)
    claims.begin(2)
    claims.take(0, 5, 1)
    claims.take(1, 6, 1)
    claims.close()
    data = path.read_bytes()

    path.write_bytes(data[:20])
    assert FileClaims(path).left_over() == {5: 1}
    path.write_bytes(b"")
    assert FileClaims(path).left_over() == {}
