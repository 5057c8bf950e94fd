"""
Replacements for clock, disk and event loop, for tests of Tidings and of what is built on it.

``World`` puts them together for a program's bus: virtual time, a disk in memory, a button that crashes it. The fixtures of
``tidings.pytest_plugin`` give it to every test; docs/howto/testing.md shows how.

    world = World()
    world.add(bus)
    await bus.publish("orders", {"number": 1}, type="ORDER_PLACED", space="shared:shop")
    await world.drain()

``VirtualClock`` is a clock that moves only when a test moves it: sleeping through a day takes moments, and every run
takes the same course. ``SimulatedDisk`` is a disk in memory that crashes after any call you choose, and
then holds what a real one might: what was synced, and any part of the rest.

    clock = VirtualClock()
    await clock.run_until(nightly_report(clock))

    disk = SimulatedDisk(seed=7, crash_after=12)
    with pytest.raises(SimulatedCrash):
        write_everything(disk)
    for mode in CRASH_MODES:
        check_recovery(disk.after_crash(mode))

``SimulatedLoop`` is an event loop in which a seed decides, at every disk call and every await, who gets on next, and
where the machine stops; see ``tidings.testing.loop``.

    loop = SimulatedLoop(seed=7, crash_at=1234)
    disk = InterleavedDisk(SimulatedDisk(seed=7), loop)
    loop.run_until_complete(scenario(disk, SimulatedClock(loop)))

They take the places of the real ones: a ``VirtualClock`` (or a ``SimulatedClock``) for any ``tidings.core.clock.Clock``, a
``SimulatedDisk`` (or an ``InterleavedDisk`` around it) for any ``tidings.log.embedded.disk.Disk``.
"""

from .clock import NeverFinished, VirtualClock
from .disk import DiskCall, SimulatedCrash, SimulatedDisk
from .loop import InterleavedDisk, SimulatedClock, SimulatedLoop, SimulatedThreads, Stuck
from .survival import CRASH_MODES, CrashMode
from .world import Ending, World

__all__ = [
    "CRASH_MODES",
    "CrashMode",
    "DiskCall",
    "Ending",
    "InterleavedDisk",
    "NeverFinished",
    "SimulatedClock",
    "SimulatedCrash",
    "SimulatedDisk",
    "SimulatedLoop",
    "SimulatedThreads",
    "Stuck",
    "VirtualClock",
    "World",
]
