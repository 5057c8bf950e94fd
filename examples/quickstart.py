"""Store an event, and read it back: it was on disk before ``append`` returned."""

import asyncio

from tidings.core.events import Event, EventMeta
from tidings.log import Query
from tidings.log.embedded import open_log
from tidings.log.reading import records


async def main() -> None:
    log = await open_log("workspace")
    done = await log.append(Event(EventMeta("greetings", "SAID", "shared:home"), {"text": "hello"}))
    print(f"stored at seq {done.seq}")
    async for record in records(log, Query(topic="greetings")):
        print(record.offset, record.payload["text"])
    await log.close()


asyncio.run(main())
