"""
A process that works on a workspace, for tests with several of them.

    python -m tests.integration.compacting_child write WORKSPACE ROUNDS     store and drop small segments as fast as it can
    python -m tests.integration.compacting_child follow WORKSPACE           follow until the writer's last record; print how many were read

A follower that retention has overtaken goes on with the oldest record that is kept, as its error says.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from tests.conformance.support import append_all, drop_sealed, event
from tidings.log import LogSettings, Query
from tidings.log.embedded import open_follower, open_log
from tidings.log.errors import PositionTrimmed
from tidings.log.reading import tail

SETTINGS = LogSettings(journal_bytes=1 << 20, segment_lines_max=5)


async def write(workspace: Path, rounds: int) -> None:
    log = await open_log(workspace, SETTINGS)
    for n in range(rounds):
        await append_all(log, [event("a", {"n": n}) for _ in range(11)])
        await drop_sealed(log)
    await append_all(log, [event("a", {"is_last": True})])
    await log.close()


async def follow(workspace: Path) -> None:
    log = await open_follower(workspace, SETTINGS)
    count, seq, query = 0, 0, Query()
    while True:
        try:
            async for record in tail(log, query):
                assert record.seq > seq
                seq, count = record.seq, count + 1
                if record.payload.get("is_last"):
                    print(count, flush=True)
                    return
        except PositionTrimmed as error:
            query = Query(since=error.first)


if __name__ == "__main__":
    if sys.argv[1] == "write":
        asyncio.run(write(Path(sys.argv[2]), int(sys.argv[3])))
    else:
        asyncio.run(follow(Path(sys.argv[2])))
