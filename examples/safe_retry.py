"""A producer that does not know whether its event arrived sends it again: it is stored once."""

import asyncio

from tidings.core.events import Event, EventMeta
from tidings.log import Duplicate
from tidings.log.embedded import open_log


def payment() -> Event:
    return Event(EventMeta("payments", "PAID", "person:alice", event_id="payment-17"), {"cents": 1250})


async def main() -> None:
    log = await open_log("workspace")
    first = await log.append(payment())
    again = await log.append(payment())  # as after a lost answer
    print(f"the second is a duplicate: {isinstance(again, Duplicate)}")
    print(f"both answers name seq {first.seq}: {first.seq == again.seq}")
    await log.close()


asyncio.run(main())
