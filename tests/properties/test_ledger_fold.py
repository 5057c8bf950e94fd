"""Whatever was done, the ledger comes back as it was: from the log alone, from a snapshot and the rest, and with the same happenings."""

from __future__ import annotations

import asyncio

from hypothesis import given
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
        settings = LedgerSettings(history_count_max=None, history_age_s_max=None, batch_count_max=batch)
        told: list[Envelope] = []
        async with await open_ledger(
            log, catalogue=CATALOGUE, parts=PARTS, clock=clock, snapshots=snapshots, settings=settings
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
            async with await open_ledger(log, parts=PARTS, clock=clock, snapshots=kept, settings=settings) as ledger:
                assert await state_of(ledger) == before
                assert [each async for each in ledger.happenings.history()] == told
                assert ledger.happenings.last_seq == (told[-1].seq if told else 0)

    asyncio.run(check())
