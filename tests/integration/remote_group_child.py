"""A member of a group in a process of its own: notes each event in a file, after a while, and acknowledges it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

from tidings.client.groups import RemoteBus
from tidings.types import Ack, ReceivedEvent


async def main(url: str, token: str, out: str, delay_s: float) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    file = os.open(out, os.O_CREAT | os.O_APPEND | os.O_WRONLY)

    async def handle(event: ReceivedEvent) -> Ack:
        await asyncio.sleep(delay_s)
        os.write(file, b"%d\n" % event.payload["n"])
        return Ack()

    async with RemoteBus(url, token) as bus:
        await bus.subscribe("demo", "shared", handle, workers=4)
        await stop.wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4])))
