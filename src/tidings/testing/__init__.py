"""
Stand-ins for the world, for tests of Tidings and of what is built on it.

``VirtualClock`` is a clock that moves only when told: sleeping through a day takes moments, and every run
takes the same course. ``SimulatedDisk`` is a disk in memory that crashes after any call you choose, and
then holds what a real one might: what was synced, and any part of the rest.

    clock = VirtualClock()
    await clock.run_until(nightly_report(clock))

    disk = SimulatedDisk(seed=7, crash_after=12)
    with pytest.raises(SimulatedCrash):
        write_everything(disk)
    for mode in CRASH_MODES:
        check_recovery(disk.after_crash(mode))

Both stand where the real ones do: a ``VirtualClock`` for any ``tidings.core.clock.Clock``, a
``SimulatedDisk`` for any ``tidings.log.embedded.disk.Disk``.
"""

from .clock import NeverFinished, VirtualClock
from .disk import CRASH_MODES, Call, CrashMode, SimulatedCrash, SimulatedDisk

__all__ = [
    "CRASH_MODES",
    "Call",
    "CrashMode",
    "NeverFinished",
    "SimulatedCrash",
    "SimulatedDisk",
    "VirtualClock",
]
