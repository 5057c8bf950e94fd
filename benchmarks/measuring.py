"""
One measurement on a machine that others use too.

Wall time on such a machine says as much about the others as about the code. So a ``Window`` takes three things at once: wall
time, the process's own CPU time (which moves less with foreign load), and how many cores others kept busy
meanwhile, which tells the quiet rounds from the rest.
"""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import msgspec
import uvloop

__all__ = [
    "QUIET_CORES_MAX",
    "Loop",
    "Percentiles",
    "Taken",
    "Window",
    "forget_cached",
    "one_core",
    "percentiles",
    "run_on",
    "scratch",
]

Loop = Literal["uvloop", "asyncio"]
QUIET_CORES_MAX: Final = 0.4
"""A round during which others used less than this is quiet."""
_QUIET_WALL_S_MIN: Final = 0.1
"""The kernel counts in steps of 10 ms: of a shorter round nothing can be said."""

_T = TypeVar("_T")
_STAT: Final = Path("/proc/stat")


class Taken(msgspec.Struct, frozen=True):
    """What one window took."""

    wall_s: float
    cpu_s: float
    others_cores: float | None
    """Cores that other processes (and the hypervisor) kept busy; ``None`` where the system does not say."""
    steal_cores: float | None
    minor_faults: int

    @property
    def is_quiet(self) -> bool:
        """Whether hardly anything else ran."""
        if self.others_cores is None or self.wall_s < _QUIET_WALL_S_MIN:
            return False
        return self.others_cores < QUIET_CORES_MAX


class Window:
    """
    Measures from its making to ``take``, as often as asked.

    Garbage of whatever came before is collected first, so that nobody pays for another's.
    """

    def __init__(self) -> None:
        gc.collect()
        self._faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        self._machine = _machine_s()
        self._cpu = time.process_time()
        self._wall = time.perf_counter()

    def take(self) -> Taken:
        """What was used since the window was opened."""
        wall_s = time.perf_counter() - self._wall
        cpu_s = time.process_time() - self._cpu
        others = steal = None
        now = _machine_s()
        if now is not None and self._machine is not None:
            others = max(0.0, (now[0] - self._machine[0] - cpu_s) / wall_s)
            steal = max(0.0, (now[1] - self._machine[1]) / wall_s)
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - self._faults
        return Taken(wall_s, cpu_s, others, steal, faults)


def _machine_s() -> tuple[float, float] | None:
    """Seconds that all cores together were busy since boot, and those the hypervisor took."""
    try:
        fields = [int(text) for text in _STAT.read_text().splitlines()[0].split()[1:9]]
    except OSError:
        return None
    user, nice, system, _, _, irq, softirq, steal = fields
    ticks = os.sysconf("SC_CLK_TCK")
    return (user + nice + system + irq + softirq + steal) / ticks, steal / ticks


class Percentiles(msgspec.Struct, frozen=True):
    """Latencies, in microseconds."""

    p50: float
    p95: float
    p99: float


def percentiles(latencies_ns: Sequence[int]) -> Percentiles:
    """The usual three of some latencies."""
    ordered = sorted(latencies_ns)
    p50, p95, p99 = (ordered[min(len(ordered) - 1, len(ordered) * share // 100)] / 1000 for share in (50, 95, 99))
    return Percentiles(p50, p95, p99)


def run_on(loop: Loop, main: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
    """Run a coroutine to its end on the loop that is asked for."""
    factory = uvloop.new_event_loop if loop == "uvloop" else asyncio.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main())


@contextmanager
def one_core(is_wanted: bool) -> Iterator[None]:
    """Keep this process, all threads it starts included, on a single core."""
    if not is_wanted or not hasattr(os, "sched_setaffinity"):
        yield
        return
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(allowed)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


@contextmanager
def scratch(folder: str) -> Iterator[Path]:
    """A fresh folder on the disk that is measured, gone afterwards."""
    made = Path(tempfile.mkdtemp(prefix="case-", dir=folder))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def forget_cached(folder: Path) -> None:
    """Ask the kernel to drop what it caches of the files below ``folder``, so that the disk is read again."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
