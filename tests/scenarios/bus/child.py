"""
A bus in a process of its own, to be killed or to kill itself.

    python child.py <workspace> <mode> [<first number>]

``publish``: publishes and handles until killed. ``drain``: handles what is left, and ends. ``deadly`` and ``leaving``: the same,
but at event 3 the first group's handler ends the process, at once or by ``SystemExit``. Told on standard output, a line each:
``published <offset>``, ``handled <group> <offset> <attempt>``, ``buried <group> <offset> <retries>``.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any, Final

from tidings.bus import EventBus, ReceivedEvent
from tidings.types import Ack, Event, EventMeta, EventType

TOPIC: Final = "actions"
GROUPS: Final = {"first": 3, "second": 1, "third": 2}
"""Names, and how many workers each has."""


def tell(text: str) -> None:
    """One write a line: a line is there whole or not at all, and not in a buffer when the process dies."""
    os.write(sys.stdout.fileno(), text.encode() + b"\n")


def event(n: int) -> Event:
    """The event with this number."""
    return Event(EventMeta(topic=TOPIC, type=EventType.ACTION_EXECUTED, space_id="shared:home"), {"n": n})


def handler(group: str, mode: str) -> Any:
    """A group's handler."""

    async def handle(received: ReceivedEvent) -> Ack:
        tell(f"handled {group} {received.offset} {received.attempt}")
        if group == "first" and received.payload["n"] == 3:
            if mode == "deadly":
                os._exit(9)
            if mode == "leaving":
                raise SystemExit(9)
        await asyncio.sleep(0)
        return Ack()

    return handle


async def main(workspace: Path, mode: str, first: int) -> None:
    """Live."""
    async with EventBus(workspace=workspace) as bus:
        for group, workers in GROUPS.items():
            await bus.subscribe(TOPIC, group, handler(group, mode), workers=workers, backoff_base=0.0)
        tell("ready")
        if mode == "publish":
            while True:
                for verdict in await asyncio.gather(*(bus.publish(event(first + n)) for n in range(5))):
                    tell(f"published {verdict.offset}")
                first += 5
        while any(bus.lag(TOPIC, group) for group in GROUPS):  # noqa: ASYNC110 - the process is on its own
            await asyncio.sleep(0.001)
        for letter in await bus.dead_letters(TOPIC):
            tell(f"buried {letter.group} {letter.offset} {letter.retries}")


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 0))
