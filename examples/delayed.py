"""An event that is published later, also if the program ends in between; and one that is taken back before its time."""

import asyncio
from datetime import timedelta

from tidings import Bus

bus = Bus("workspace")
thanked = asyncio.Event()


@bus.subscriber("letters", group="post")
async def send(letter: dict[str, str]) -> None:
    print(f"to {letter['to']}: thank you")
    thanked.set()


async def write(to: str, delay: timedelta) -> str:
    stored = await bus.publish("letters", {"to": to}, type="THANKS_DUE", space="shared:shop", delay=delay)
    return stored.event_id


async def main() -> None:
    async with bus:
        await write("ana", timedelta(seconds=0.1))
        regretted = await write("ben", timedelta(days=30))
        print("waiting:", [event.event.payload["to"] async for event in bus.delayed_events()])
        print("taken back:", await bus.cancel_delayed(regretted))
        await thanked.wait()
        print("waiting:", bus.delayed_count)


asyncio.run(main())
