"""Follow a topic from another process: all that is there, then each event as it is written, none twice, none left out. Ctrl-C ends it."""

import asyncio
import contextlib

from tidings.log import Query
from tidings.log.embedded import open_follower
from tidings.log.reading import tail


async def main() -> None:
    log = await open_follower("workspace")
    try:
        async for record in tail(log, Query(topic="orders")):
            print(record.offset, record.meta.type, record.payload, flush=True)
    finally:
        await log.close()


with contextlib.suppress(KeyboardInterrupt):
    asyncio.run(main())
