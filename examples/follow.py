"""Follow a topic live: what is there already, then each event as it is committed, none twice and none left out."""

import asyncio

from tidings.core.events import Event, EventMeta
from tidings.log import Log, Query
from tidings.log.embedded import open_log
from tidings.log.reading import tail


async def follow(log: Log, count: int) -> None:
    async for record in tail(log, Query(topic="steps")):
        print("seen", record.payload["step"])
        if record.payload["step"] == count:
            return


async def main() -> None:
    log = await open_log("workspace")
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(follow(log, count=3))
        for step in (1, 2, 3):
            await log.append(Event(EventMeta("steps", "TAKEN", "shared:home"), {"step": step}))
    await log.close()


asyncio.run(main())
