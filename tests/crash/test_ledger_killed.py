"""A real process with a ledger on a real disk is killed at random moments, again and again."""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path

import pytest

from tests.crash.ledger_child import SETTINGS
from tests.unit.ledger.ledger_support import Names, owners
from tidings.happenings.variants import CustodyReleased
from tidings.ledger import open_ledger


async def _lines_until_killed(workspace: Path, number: int, lines: int) -> list[str]:
    """What the process told before it was killed, after about so many lines."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.crash.ledger_child", str(workspace), str(number)),
        stdout=asyncio.subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    assert process.stdout is not None
    told: list[str] = []
    async with asyncio.timeout(60):
        while len(told) < lines:
            told.append((await process.stdout.readline()).decode())
        process.kill()
        told += (await process.stdout.read()).decode().splitlines(keepends=True)
        await process.wait()
    return [line.rstrip("\n") for line in told if line.endswith("\n")]


@pytest.mark.req("H9")
@pytest.mark.parametrize("rounds", [3, pytest.param(40, marks=pytest.mark.heavy)])
async def test_a_killed_ledger_has_what_it_answered_and_no_seq_twice(tmp_path: Path, rounds: int) -> None:
    """Commands that were answered are there, durable happenings are there under their seqs, and no seq that was seen means two things."""
    rng = random.Random(rounds)
    done: set[str] = set()
    by_seq: dict[int, str] = {}
    for number in range(rounds):
        for line in await _lines_until_killed(tmp_path, number, rng.randint(1, 400)):
            kind, *values = line.split()
            if kind == "done":
                done.add(values[0])
            elif kind in ("stored", "seen"):
                seq, handle_id = int(values[0]), values[1]
                assert by_seq.setdefault(seq, handle_id) == handle_id, f"seq {seq} was given twice"
        states = []
        for _ in range(2):  # a second opening finds the same
            async with await open_ledger(tmp_path, parts=[Names], settings=SETTINGS) as ledger:
                found = await owners(ledger)
                assert done <= found.keys()
                history = {each.seq: each.happening async for each in ledger.happenings.history()}
                for seq, handle_id in by_seq.items():
                    if not handle_id.startswith("plain."):
                        stored = history[seq]
                        assert isinstance(stored, CustodyReleased)
                        assert stored.handle_id == handle_id
                assert ledger.happenings.last_seq >= max(by_seq, default=0)
                states.append((found, history))
        assert states[0] == states[1]
