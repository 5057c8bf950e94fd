"""
A ledger to be killed: takes names and emits, and tells each answer on its standard output.

    python ledger_child.py <workspace> <round>

``open`` is printed when the ledger is, then ``done <name>``, ``stored <seq> <handle>`` and ``seen <seq> <handle>``. It never stops by itself,
and never closes.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from tests.unit.ledger.ledger_support import Names, TakeName
from tidings.happenings.variants import CustodyReleased
from tidings.ledger import LedgerSettings, open_ledger

SETTINGS = LedgerSettings(
    snapshot_records_max=50, record_bytes_max=1024, history_count_max=None, history_age_s_max=None
)


def tell(text: str) -> None:
    """One write a line: a line is there whole or not at all, and not in a buffer when the process dies."""
    os.write(sys.stdout.fileno(), text.encode() + b"\n")


async def main(workspace: Path, name: str) -> None:
    """Work until killed."""
    ledger = await open_ledger(workspace, parts=[Names], settings=SETTINGS)
    tell("open")
    receiver = ledger.happenings.subscribe()

    async def hear() -> None:
        while True:
            for envelope in await receiver.recv_many():
                assert isinstance(envelope.happening, CustodyReleased)
                tell(f"seen {envelope.seq} {envelope.happening.handle_id}")

    async def take(caller: int) -> None:
        for number in range(1_000_000):
            taken = f"{name}.{caller}.{number}"
            await ledger.execute(TakeName(taken=taken, by="p", times=(1, 0, 3, 40)[number % 4]))
            tell(f"done {taken}")
            stored = CustodyReleased(at_ms=1, plugin="p", handle_id=f"stored.{taken}")
            tell(f"stored {await ledger.happenings.emit_durable(stored)} {stored.handle_id}")
            ledger.happenings.emit(CustodyReleased(at_ms=1, plugin="p", handle_id=f"plain.{taken}"))

    await asyncio.gather(hear(), *(take(caller) for caller in range(3)))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
