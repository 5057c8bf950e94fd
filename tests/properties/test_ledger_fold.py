"""Whatever was done, the ledger comes back as it was: from the log alone, from a snapshot and the rest, and with the same happenings."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.properties.ledger_commands import COMMANDS, PARTS, PRELUDE, state_of
from tests.scenarios.ledger.graph_support import CATALOGUE
from tidings.happenings.bus import Envelope
from tidings.ledger import Command, LedgerSettings, open_ledger
from tidings.ledger.snapshots import MemorySnapshots
from tidings.log.memory import MemoryLog
from tidings.testing import VirtualClock


@given(st.lists(COMMANDS, min_size=5, max_size=60), st.data())
def test_snapshot_and_the_rest_equal_a_full_replay(commands: list[Command], data: st.DataObject) -> None:
    """State from snapshot and tail, from the log alone, and from before the restart are equal to the byte; so are the happenings."""
    cut = data.draw(st.integers(0, len(commands)))
    batch = data.draw(st.integers(1, 7))

    async def check() -> None:
        clock = VirtualClock()
        log, snapshots = MemoryLog(clock=clock), MemorySnapshots()
        kept_whole = LedgerSettings(history_count_max=None, history_age_s_max=None, batch_count_max=batch)
        told: list[Envelope] = []
        async with await open_ledger(
            log, catalogue=CATALOGUE, parts=PARTS, clock=clock, snapshots=snapshots, settings=kept_whole
        ) as ledger:
            receiver = ledger.happenings.subscribe()
            await ledger.execute_many(PRELUDE)
            await ledger.execute_many(commands[:cut])
            await ledger.take_snapshot()
            await ledger.execute_many(commands[cut:])
            await ledger.grammar.scan()  # as opening does
            before = await state_of(ledger)
            if ledger.happenings.last_seq:
                while not told or told[-1].seq < ledger.happenings.last_seq:
                    told += await receiver.recv_many()
        for kept in (snapshots, MemorySnapshots()):
            async with await open_ledger(log, parts=PARTS, clock=clock, snapshots=kept, settings=kept_whole) as ledger:
                assert await state_of(ledger) == before
                assert [each async for each in ledger.happenings.history()] == told
                assert ledger.happenings.last_seq == (told[-1].seq if told else 0)

    asyncio.run(check())


_FOLD: Final = """
import asyncio, hashlib, sys, msgspec
from tests.properties.ledger_commands import PARTS
from tidings.ledger.recovery import recover
from tidings.ledger.records import CommandReader
from tidings.ledger.snapshots import MemorySnapshots
from tidings.ledger.standard import STANDARD_PARTS
from tidings.log.embedded import open_log

async def main() -> None:
    log = await open_log(sys.argv[1])
    found = await recover(log, MemorySnapshots(), (*STANDARD_PARTS, *PARTS), CommandReader())
    for part in found.state.parts:
        print(part.name, hashlib.sha256(msgspec.msgpack.encode(part.freeze())).hexdigest())
    await log.close()

asyncio.run(main())
"""


def test_the_fold_is_the_same_in_processes_with_other_hashes(tmp_path: Path) -> None:
    """No command depends on the order of a set: processes that hash strings differently make the same state, and tell the same."""
    commands: list[Command] = []

    @settings(max_examples=15)
    @given(st.lists(COMMANDS, min_size=20, max_size=60))
    def collect(some: list[Command]) -> None:
        commands.extend(some)

    async def fill() -> None:
        async with await open_ledger(tmp_path, catalogue=CATALOGUE, parts=PARTS) as ledger:
            await ledger.execute_many(PRELUDE)
            await ledger.execute_many(commands)

    collect()
    asyncio.run(fill())
    root = Path(__file__).parents[2]
    found = [
        subprocess.run(
            [sys.executable, "-c", _FOLD, str(tmp_path)],
            cwd=root,
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(root)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "77")
    ]

    assert found[0] == found[1] != ""
    assert len(commands) > 300
