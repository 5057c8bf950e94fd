"""
A writer to be killed: appends to a workspace and tells each acknowledgement on its standard output.

    python child.py <workspace> <first number>

``open`` is printed when the log is, then a line ``<number> <topic> <seq> <offset> <event id>`` for each event. It never
stops by itself, and never closes.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from tidings.core.events import Event, EventMeta
from tidings.log import Appended, LogSettings
from tidings.log.embedded import open_log

SETTINGS = LogSettings(journal_bytes=1 << 20, segment_lines_max=50)


def tell(text: str) -> None:
    """One write a line: a line is there whole or not at all, and not in a buffer when the process dies."""
    os.write(sys.stdout.fileno(), text.encode() + b"\n")


async def main(workspace: Path, number: int) -> None:
    """Append until killed."""
    tell("opening")
    log = await open_log(workspace, SETTINGS)
    tell("open")
    while True:
        events = [
            Event(
                EventMeta(
                    topic=("alpha", "beta")[n % 2],
                    type="NOTED",
                    space_id="shared:home",
                    event_id=f"own-{n}" if n % 3 else None,
                    partitions=("p",) if n % 5 == 0 else (),
                ),
                {"n": n, "pad": "x" * (n % 400)},
            )
            for n in range(number, number + 7)
        ]
        number += len(events)
        answers = await asyncio.gather(*(log.append(event) for event in events))
        for event, answer in zip(events, answers, strict=True):
            assert isinstance(answer, Appended)
            tell(f"{event.payload['n']} {event.meta.topic} {answer.seq} {answer.offset} {answer.event_id}")


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
