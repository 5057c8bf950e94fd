"""
A process with appointments and delayed events, made to be killed: run as ``schedule_child.py WORKSPACE``.

The first one makes them; the next ones go on. It says ``open`` when everything runs, and ``done`` when nothing is left to do.
"""

from __future__ import annotations

import asyncio
import sys
from datetime import timedelta

from tidings.bus import EventBus
from tidings.core.clock import SYSTEM_CLOCK, Clock
from tidings.core.events import Event, EventMeta
from tidings.ledger import Ledger, open_ledger
from tidings.schedule.actions import Actions
from tidings.schedule.appointment_runner import AppointmentRunner
from tidings.schedule.appointments import Appointments

ONCE_COUNT = 60
EVERY_COUNT = 25
SPAN_MS = 2500


async def make(bus: EventBus, runner: AppointmentRunner, clock: Clock) -> None:
    """Appointments and delayed events, all over the next few seconds."""
    now_ms = clock.now_ns() // 1_000_000
    catchup = {"miss_policy": {"kind": "catchup"}}
    every = {"kind": "periodic", "interval_ms": SPAN_MS // EVERY_COUNT}
    await runner.create(
        "test", {"appointment_id": "every", "recurrence": every, "max_fires": EVERY_COUNT, **catchup}, ring("every")
    )
    for number in range(ONCE_COUNT):
        rule = {"kind": "one_shot", "fire_at_ms": now_ms + SPAN_MS * number // ONCE_COUNT}
        await runner.create(
            "test", {"appointment_id": f"once-{number}", "recurrence": rule, **catchup}, ring(f"once-{number}")
        )
        delayed = Event(EventMeta("later", "TICK", "shared:test", f"later-{number}"), {"n": number})
        await bus.publish(delayed, delay=timedelta(milliseconds=SPAN_MS * (number + 1) / ONCE_COUNT))


def ring(name: str) -> dict[str, object]:
    """An action that publishes."""
    return {"topic": "rung", "event_type": "RING", "space": "shared:test", "payload": {"name": name}}


async def is_done(ledger: Ledger, bus: EventBus) -> bool:
    """Whether nothing waits any more."""
    pending = await ledger.read(lambda state: state.part(Appointments).count)
    return not pending and not [each async for each in bus.delayed_events()]


async def main(workspace: str) -> None:
    """Run until everything has fired."""
    async with EventBus(workspace=workspace) as bus, await open_ledger(bus.log, parts=[Appointments]) as ledger:
        runner = AppointmentRunner(ledger, Actions(publish=bus.publish))
        await runner.start()
        if "ledger" not in bus.log.topics() or not await runner.entries():
            await make(bus, runner, SYSTEM_CLOCK)
        print("open", flush=True)
        while not await is_done(ledger, bus):  # noqa: ASYNC110 - it polls: there is no event for both
            await asyncio.sleep(0.02)
        await runner.close()
    print("done", flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
