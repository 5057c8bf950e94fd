"""
Many appointments: making them, what they take in memory, and how exactly they fire.

Beside the making stands a bare SQLite that stores the same: a row each with spec, action and next time, that time indexed, as many rows
in a transaction as appointments in a call. It fires nothing.
"""

from __future__ import annotations

import asyncio
import gc
import shutil
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from tidings.ledger import open_ledger
from tidings.schedule.actions import Actions, ScheduledAction
from tidings.schedule.appointment_runner import AppointmentRunner
from tidings.schedule.appointment_specs import AppointmentSpec, appointment_spec
from tidings.schedule.appointments import AppointmentEntry, Appointments
from tidings.schedule.recurrence import OneShot
from tidings.schedule.settings import ScheduleSettings

from .measuring import percentiles, run_on
from .report import Row, at_least, at_most, noted
from .running import Runner
from .scales import Scale

__all__ = ["bench", "measure_firing", "measure_memory"]

_BATCH: Final = 1000
_CREATOR: Final = "org.example.player"
_YEAR_MS: Final = 365 * 86_400_000
_FIRES_PER_S: Final = 1000
_LEAD_S: Final = 2.0
_SETTINGS: Final = ScheduleSettings(
    appointments_max=10_000_000, appointments_per_creator_max=10_000_000, local_zone="UTC"
)


class Many(msgspec.Struct, frozen=True):
    """How many appointments, where, and for how long some of them fire."""

    folder: str
    count: int
    pace_s: float


class Fired(msgspec.Struct, frozen=True):
    """Seconds, and milliseconds between when an action was due and when it began."""

    created_s: float
    sqlite_s: float
    late_p50_ms: float
    late_p99_ms: float
    late_max_ms: float
    fired_count: int
    opened_s: float


class Memory(msgspec.Struct, frozen=True):
    """Bytes for each appointment."""

    each: float


def measure_firing(case: Many) -> Fired:
    """Make appointments over the next years, and some that fire now; then open the ledger again."""
    workspace = Path(case.folder, "ledger")

    async def main() -> tuple[float, list[float], float]:
        late_ms: list[float] = []

        async def ring(action: ScheduledAction, firing: str) -> None:
            late_ms.append(time.time() * 1000 - action.payload["due_ms"])

        actions = Actions()
        actions.register("notify.push", ring)
        async with await open_ledger(workspace, parts=[Appointments]) as ledger:
            runner = AppointmentRunner(ledger, actions, settings=_SETTINGS)
            await runner.start()
            first_ms = round(time.time() * 1000) + 86_400_000
            begin = time.perf_counter()
            for first in range(0, case.count, _BATCH):
                await runner.create_many(_CREATOR, _many(first, min(first + _BATCH, case.count), first_ms, case.count))
            created_s = time.perf_counter() - begin
            soon_ms = round((time.time() + _LEAD_S) * 1000)
            count = round(_FIRES_PER_S * case.pace_s)
            for first in range(0, count, _BATCH):
                numbers = range(first, min(first + _BATCH, count))
                near = [_one(f"near-{n}", soon_ms + 1000 * n // _FIRES_PER_S) for n in numbers]
                await runner.create_many(_CREATOR, near)
            while len(late_ms) < count:  # noqa: ASYNC110 - what counts is not to be in the way
                await asyncio.sleep(0.05)
            await runner.close()
        begin = time.perf_counter()
        async with await open_ledger(workspace, parts=[Appointments]) as ledger:
            opened_s = time.perf_counter() - begin
            pending = await ledger.read(lambda state: state.part(Appointments).count)
            assert pending == case.count
        return created_s, late_ms, opened_s

    try:
        created_s, late_ms, opened_s = run_on("uvloop", main)
        late = percentiles([round(each * 1000) for each in late_ms])  # of microseconds, so in milliseconds
        return Fired(created_s, _sqlite_s(case), late.p50, late.p99, max(late_ms), len(late_ms), opened_s)
    finally:
        shutil.rmtree(case.folder, ignore_errors=True)


def _one(name: str, due_ms: int) -> tuple[AppointmentSpec, ScheduledAction]:
    spec = AppointmentSpec(appointment_id=name, recurrence=OneShot(fire_at_ms=due_ms))
    return spec, ScheduledAction(target_shelf="notify.push", request_type="send", payload={"due_ms": due_ms})


def _many(first: int, end: int, first_ms: int, count: int) -> list[tuple[AppointmentSpec, ScheduledAction]]:
    # Not in the order of their times: 7,919 is a prime.
    return [_one(f"reminder-{n:07d}", first_ms + n * 7919 % count * _YEAR_MS // count) for n in range(first, end)]


def _sqlite_s(case: Many) -> float:
    """The seconds that a bare SQLite takes to store as much."""
    folder = Path(case.folder)
    folder.mkdir(parents=True, exist_ok=True)
    connection = sqlite3.connect(folder / "rows.db", isolation_level=None)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute(
        "CREATE TABLE appointments (creator TEXT, id TEXT, spec BLOB, action BLOB, next_fire_ms INTEGER,"
        " PRIMARY KEY (creator, id)) WITHOUT ROWID"
    )
    connection.execute("CREATE INDEX next_fire ON appointments (next_fire_ms)")
    begin = time.perf_counter()
    for first in range(0, case.count, _BATCH):
        made = _many(first, min(first + _BATCH, case.count), 0, case.count)
        rows: list[tuple[Any, ...]] = [
            (_CREATOR, spec.appointment_id, msgspec.json.encode(spec), msgspec.json.encode(action), _due_ms(action))
            for spec, action in made
        ]
        connection.execute("BEGIN")
        connection.executemany("INSERT INTO appointments VALUES (?, ?, ?, ?, ?)", rows)
        connection.execute("COMMIT")
    took_s = time.perf_counter() - begin
    connection.close()
    return took_s


def _due_ms(action: ScheduledAction) -> int:
    due_ms: int = action.payload["due_ms"]
    return due_ms


def measure_memory(case: Many) -> Memory:
    """Fill the part that keeps appointments, and nothing else; how much the process has grown."""
    part = Appointments()
    gc.collect()
    before = _resident_bytes()
    for first in range(0, case.count, _BATCH):
        for spec, action in _many(first, min(first + _BATCH, case.count), 1_800_000_000_000, case.count):
            checked = appointment_spec(spec)
            part.put(
                AppointmentEntry(creator=_CREATOR, spec=checked, action=action, issue=1, next_fire_ms=_due_ms(action))
            )
    gc.collect()
    assert part.count == case.count
    return Memory((_resident_bytes() - before) / case.count)


def _resident_bytes() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


def bench(run: Runner, scale: Scale, folder: str, is_one_core: bool) -> Iterator[Row]:
    """Appointments by the million."""
    case = Many(str(Path(folder) / "appointments"), scale.appointments, scale.appointments_pace_s)
    fired = run(measure_firing, case)
    making = noted("appointments", f"making {case.count:,}, durable", "1/s", case.count / fired.created_s)
    sqlite = case.count / fired.sqlite_s
    making = msgspec.structs.replace(making, baselines={"SQLite": sqlite}, ratio=making.ours / sqlite)
    yield at_least(making, 20_000)
    firing = noted(
        "appointments",
        f"lateness of {_FIRES_PER_S:,} fires/s, p99",
        "ms",
        fired.late_p99_ms,
        p50=fired.late_p50_ms,
        max=fired.late_max_ms,
        fires=fired.fired_count,
    )
    yield at_most(firing, 50)
    yield noted("appointments", f"opening a ledger with {case.count:,}", "s", fired.opened_s)
    memory = run(measure_memory, case)
    yield at_most(noted("appointments", "memory of a pending one", "bytes", max(memory.each, 0.001)), 300)
