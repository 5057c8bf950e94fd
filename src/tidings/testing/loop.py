"""
An event loop in which a seed decides what happens next, and where nothing happens at the same time.

Callbacks run one at a time, and blocking jobs (``run_in_executor``, ``asyncio.to_thread``, the executors of a log) run beside
them as threads would, but one at a time too: a job stops before each call of an ``InterleavedDisk`` and at each lock of
``SimulatedThreads``, and goes on when it is chosen. Between two disk calls of one job, anything else may happen; or the
machine may stop. Time is the loop's own and moves only when there is nothing to do, or when a job is slow.

    loop = SimulatedLoop(seed=7)
    disk = InterleavedDisk(SimulatedDisk(seed=7), loop)
    loop.run_until_complete(scenario(disk, SimulatedClock(loop)))

The same seed and the same program take the same course, step for step; ``trace`` says which. Jobs are greenlets (the package
``greenlet``, which nothing else here needs).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import heapq
import math
import random
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from tidings.core.errors import TidingsError
from tidings.log.embedded.disk import (
    Disk,
    DiskSpace,
    Done,
    File,
    FileRoom,
    FolderLock,
    Job,
    SerialExecutor,
    wait_even_if_cancelled,
)

from .disk import SimulatedCrash

if TYPE_CHECKING:
    from greenlet import greenlet  # type: ignore[import-untyped]

_T = TypeVar("_T")

_NS: Final = 1_000_000_000
_START_NS: Final = 1_767_225_600 * _NS  # the first moment of 2026
_PACES: Final = (1.0, 1.0, 1.0, 0.03)
"""How likely a job is to go on. A slow one stays where it is while much else happens, time among it."""
_SLOW_S_MAX: Final = 0.05
_TIME_PACE: Final = 0.02
"""How likely time is to go on although a job could: the job takes its time."""


class Stuck(TidingsError):
    """Everybody waits for somebody else, for good; or the steps allowed are over."""

    code = "testing.stuck"
    text = "{problem}"
    problem: str


class _Future(asyncio.Future[Any]):
    """A future with a place of its own in sets: those of asyncio are ordered by address, which differs from run to run."""

    def __init__(self, serial: int, loop: asyncio.AbstractEventLoop) -> None:
        self.serial = serial
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self.serial

    def __eq__(self, other: object) -> bool:
        return self is other


class _Task(asyncio.Task[Any]):
    def __init__(self, serial: int, coro: Any, loop: asyncio.AbstractEventLoop, **options: Any) -> None:
        self.serial = serial
        super().__init__(coro, loop=loop, **options)

    def __hash__(self) -> int:
        return self.serial

    def __eq__(self, other: object) -> bool:
        return self is other


class _Job:
    __slots__ = ("greenlet", "name", "pace", "waits_for")

    def __init__(self, name: str, pace: float) -> None:
        self.name = name
        self.pace = pace
        self.waits_for: _Lock | None = None
        self.greenlet: greenlet


class SimulatedLoop(asyncio.BaseEventLoop):
    """
    An event loop whose course a seed decides.

    Args:
        seed: Decides everything that is left to chance.
        now_s: What ``time`` says at first.
        disorder: How often a callback runs before others that were there first, from 0 (never, as loops promise) to 1.
        loop_pace: How likely the loop is to go on where a job could too; a job's own pace is 1 or less.
        crash_at: Stop the machine at this step: ``SimulatedCrash`` is raised out of ``run_until_complete``. Call
            ``abandon`` then.
        steps_max: Give up after so many steps: something goes round in circles.
        trace_count_max: How many steps ``trace`` keeps.
        after_step: Called after each step, for checks that always hold. What it raises ends the run.
    """

    def __init__(
        self,
        seed: object = 0,
        *,
        now_s: float = 0.0,
        disorder: float = 0.0,
        loop_pace: float = 1.0,
        crash_at: int | None = None,
        steps_max: int = 1_000_000,
        trace_count_max: int = 400,
        after_step: Callable[[], None] = lambda: None,
    ) -> None:
        from greenlet import getcurrent  # only here: it is no requirement of the package

        super().__init__()
        self._getcurrent = getcurrent
        self._random = random.Random(f"loop {seed}")
        self._now_s = now_s
        self._clock_resolution = 1e-9
        self._disorder = disorder
        self._loop_pace = loop_pace
        self.crash_at = crash_at
        self.steps = 0
        self.steps_max = steps_max
        self.after_step = after_step
        self._serial = 0
        self._tasks: dict[int, _Task] = {}
        self._jobs: list[_Job] = []
        self._job_of: dict[greenlet, _Job] = {}
        self._trace: deque[str] = deque(maxlen=trace_count_max)
        self._digest = hashlib.blake2b(digest_size=8)
        self.set_task_factory(self._make_task)

    # What happened

    def note(self, text: str) -> None:
        """Enter something into the trace."""
        entry = f"{self.steps} {self._now_s:.4f} {text}"
        self._trace.append(entry)
        self._digest.update(entry.encode())

    @property
    def trace(self) -> list[str]:
        """The last steps, oldest first: number, time, what went on."""
        return list(self._trace)

    @property
    def digest(self) -> str:
        """Of all steps so far: the same for two runs that took the same course."""
        return self._digest.hexdigest()

    # What asyncio asks of a loop

    def time(self) -> float:
        return self._now_s

    def create_future(self) -> asyncio.Future[Any]:
        self._serial += 1
        return _Future(self._serial, self)

    def _make_task(self, loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> asyncio.Task[Any]:
        self._serial += 1
        task = self._tasks[self._serial] = _Task(self._serial, coro, loop, **options)
        if self._serial % 256 == 0:
            self._tasks = {serial: each for serial, each in self._tasks.items() if not each.done()}
        return task

    def _write_to_self(self) -> None:
        pass  # nobody sleeps in a call of the system

    def run_in_executor(  # type: ignore[override]
        self, executor: object, func: Callable[..., _T], *args: Any
    ) -> asyncio.Future[_T]:
        """Run a blocking job as a thread would, whatever executor is named."""
        future: asyncio.Future[_T] = self.create_future()

        def work() -> None:
            try:
                outcome: Any = func(*args)
            except BaseException as error:  # noqa: BLE001 - belongs to the one who waits
                self.call_soon(_tell, future, None, error)
            else:
                self.call_soon(_tell, future, outcome, None)

        self.start_job(getattr(func, "__qualname__", "job"), work)
        return future

    # One step

    def _run_once(self) -> None:
        ready, timers = self._ready, self._scheduled  # type: ignore[attr-defined]
        while timers and (timers[0]._cancelled or timers[0]._when <= self._now_s):
            timer = heapq.heappop(timers)
            timer._scheduled = False
            if not timer._cancelled:
                ready.append(timer)
        jobs = [job for job in self._jobs if job.waits_for is None or job.waits_for.is_free]
        loop_pace = self._loop_pace if ready else 0.0
        can_pass = not ready and bool(timers) and timers[0]._when < math.inf
        drawn = self._random.random() * (loop_pace + sum(job.pace for job in jobs) + (_TIME_PACE if can_pass else 0.0))
        if ready and drawn < loop_pace:
            self._count_step()
            self._run_callback(ready)
        elif jobs and (drawn := drawn - loop_pace) < sum(job.pace for job in jobs):
            self._count_step()
            self._go_on(next((job for job in jobs if (drawn := drawn - job.pace) < 0), jobs[-1]))
        elif can_pass:
            # Without a job, to the next timer. A slow job takes some time, but not as much as nobody's disk does.
            slow_s = self._random.random() * _SLOW_S_MAX if jobs else math.inf
            self._now_s = min(timers[0]._when, self._now_s + slow_s)
            self.note("time passes")
            return
        elif not self._stopping:  # type: ignore[attr-defined]
            raise Stuck("every task is blocked, nobody sleeps, and no job is left to go on")
        self._check_crash()
        self.after_step()

    def _run_callback(self, ready: Any) -> None:
        at = self._random.randrange(len(ready)) if self._disorder and self._random.random() < self._disorder else 0
        handle = ready[at]
        del ready[at]
        if handle._cancelled:
            return
        self.note(_name_of(handle))
        handle._run()

    def _count_step(self) -> None:
        self.steps += 1
        if self.steps > self.steps_max:
            raise Stuck(f"it is still not done after {self.steps_max} steps")

    def _check_crash(self) -> None:
        if self.crash_at is not None and self.steps >= self.crash_at:
            raise SimulatedCrash(None)

    # Jobs

    def start_job(self, name: str, work: Callable[[], None]) -> None:
        """Run something as a thread would."""
        from greenlet import greenlet

        job = _Job(name, self._random.choice(_PACES))

        def run() -> None:
            try:
                work()
            except SimulatedCrash:
                pass  # the thread ends with its machine
            finally:
                self._jobs.remove(job)
                del self._job_of[job.greenlet]

        job.greenlet = greenlet(run)
        self._job_of[job.greenlet] = job
        self._jobs.append(job)

    def _go_on(self, job: _Job) -> None:
        job.greenlet.parent = self._getcurrent()
        if self._random.random() < 0.25:
            job.pace = self._random.choice(_PACES)
        job.greenlet.switch()

    def pause(self, what: str) -> None:
        """
        A place where the scheduler may switch threads.

        In a job: it goes on when it is chosen again. In the loop's own thread: other threads may get on meanwhile, and
        nothing else.
        """
        job = self._job_of.get(self._getcurrent())
        if job is not None:
            self._leave(job, f"{job.name}: {what}")
            return
        while (jobs := [job for job in self._jobs if job.waits_for is None]) and self._random.random() < 0.5:
            self._count_step()
            self._go_on(self._random.choice(jobs))
        self.note(f"loop: {what}")

    def _leave(self, job: _Job, what: str) -> None:
        parent = job.greenlet.parent
        assert parent is not None
        parent.switch()
        self.note(what)

    def wait_for(self, lock: _Lock) -> None:
        """A place where a thread waits for another one that has the lock."""
        job = self._job_of.get(self._getcurrent())
        if job is not None:
            job.waits_for = lock
            self._leave(job, f"{job.name}: goes on with the lock")
            job.waits_for = None
            return
        jobs = [job for job in self._jobs if job.waits_for is None or job.waits_for.is_free]
        if not jobs:
            raise Stuck("the event loop waits for a lock that nobody will release")
        self._count_step()
        self._go_on(self._random.choice(jobs))

    # The end

    def abandon(self) -> None:
        """
        The machine has stopped: release everything without running anything any more.

        Jobs and tasks are unwound one after another. Whatever they call then must be dead already: stop the disk first.
        """
        self.set_exception_handler(lambda *_: None)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for job in list(self._jobs):
                job.greenlet.parent = self._getcurrent()
                while job.greenlet:  # it has begun, and has not ended
                    job.greenlet.throw(SimulatedCrash(None))
            self._jobs.clear()
            for task in list(self._tasks.values()):
                if not task.done():
                    task._log_destroy_pending = False  # type: ignore[attr-defined]
                    with contextlib.suppress(BaseException):  # of what it says while it ends nobody hears
                        task.get_coro().close()
            self._tasks.clear()
            self._ready.clear()  # type: ignore[attr-defined]
            self._scheduled.clear()  # type: ignore[attr-defined]
            self.close()


def _tell(future: asyncio.Future[Any], outcome: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(outcome)
    elif isinstance(error, StopIteration):
        future.set_exception(RuntimeError("a job raised StopIteration"))
    else:
        future.set_exception(error)


def _name_of(handle: asyncio.Handle) -> str:
    callback = handle._callback  # type: ignore[attr-defined]
    owner = getattr(callback, "__self__", None)
    if isinstance(owner, asyncio.Task):
        name = owner.get_name()
        return getattr(owner.get_coro(), "__qualname__", "task") if name.startswith("Task-") else name
    return str(getattr(callback, "__qualname__", type(callback).__name__))


class SimulatedClock:
    """A ``Clock`` that shows the loop's time."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self._loop = loop

    def now_ns(self) -> int:
        return _START_NS + round(self._loop.time() * _NS)

    def monotonic(self) -> float:
        return self._loop.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class _Lock:
    __slots__ = ("_depth", "_loop", "_owner")

    def __init__(self, loop: SimulatedLoop) -> None:
        self._loop = loop
        self._owner: object = None
        self._depth = 0

    @property
    def is_free(self) -> bool:
        return self._owner is None

    def __enter__(self) -> None:
        me = self._loop._getcurrent()
        if self._owner is not me:
            while self._owner is not None:
                self._loop.wait_for(self)
            self._owner = me
        self._depth += 1

    def __exit__(self, *exc: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._owner = None


class SimulatedThreads:
    """Threads of a ``SimulatedLoop``."""

    is_inline = False

    def __init__(self, loop: SimulatedLoop) -> None:
        self._loop = loop

    def serial_executor(self, name: str) -> SerialExecutor:
        return _SimulatedLane(self._loop, name)

    async def run(self, job: Callable[[], _T]) -> _T:
        return await wait_even_if_cancelled(self._loop.run_in_executor(None, job))

    def lock(self) -> AbstractContextManager[object]:
        return _Lock(self._loop)


class _SimulatedLane:
    def __init__(self, loop: SimulatedLoop, name: str) -> None:
        self._loop = loop
        self._name = name
        self._is_busy = False

    def run(self, job: Job, done: Done) -> None:
        assert not self._is_busy, "one job at a time"
        self._is_busy = True

        def work() -> None:
            error: BaseException | None = None
            try:
                job()
            except BaseException as caught:  # noqa: BLE001 - whatever it is belongs to the one who waits
                error = caught
            self._is_busy = False
            self._loop.call_soon(done, error)

        self._loop.start_job(self._name, work)

    def close(self) -> None:
        assert not self._is_busy, "closed when its work is done"


class InterleavedDisk:
    """
    A disk on which, before each call, somebody else may get on.

    Args:
        disk: What the calls are made on.
        loop: Decides who gets on.
    """

    def __init__(self, disk: Disk, loop: SimulatedLoop) -> None:
        self._disk = disk
        self._pause = loop.pause
        self.threads = SimulatedThreads(loop)

    def open(self, path: Path, *, create: bool = False, write: bool = False) -> File:
        self._pause(f"open {path.name}")
        return _InterleavedFile(self._disk.open(path, create=create, write=write), path.name, self._pause)

    def names(self, folder: Path) -> list[str]:
        self._pause(f"names {folder.name}")
        return self._disk.names(folder)

    def exists(self, path: Path) -> bool:
        self._pause(f"exists {path.name}")
        return self._disk.exists(path)

    def make_folder(self, path: Path) -> None:
        self._pause(f"make_folder {path.name}")
        self._disk.make_folder(path)

    def rename(self, source: Path, target: Path) -> None:
        self._pause(f"rename {source.name} {target.name}")
        self._disk.rename(source, target)

    def remove(self, path: Path) -> None:
        self._pause(f"remove {path.name}")
        self._disk.remove(path)

    def sync_files(self, files: Sequence[File]) -> None:
        for file in files:
            file.sync()

    def sync_folder(self, folder: Path) -> None:
        self._pause(f"sync_folder {folder.name}")
        self._disk.sync_folder(folder)

    def lock(self, path: Path, *, shared: bool = False) -> FolderLock | str:
        self._pause(f"lock {path.name}")
        return self._disk.lock(path, shared=shared)

    def exclusive(self, path: Path) -> AbstractContextManager[object]:
        return self._disk.exclusive(path)

    def room_of(self, path: Path) -> FileRoom | None:
        self._pause(f"room_of {path.name}")
        return self._disk.room_of(path)

    def space(self, path: Path) -> DiskSpace:
        return self._disk.space(path)


class _InterleavedFile:
    __slots__ = ("_file", "_name", "_pause")

    def __init__(self, file: File, name: str, pause: Callable[[str], None]) -> None:
        self._file = file
        self._name = name
        self._pause = pause

    def read(self, byte_offset: int, size: int) -> bytes:
        self._pause(f"read {self._name}")
        return self._file.read(byte_offset, size)

    def write(self, byte_offset: int, data: bytes) -> None:
        self._pause(f"write {self._name}")
        self._file.write(byte_offset, data)

    def allocate(self, size: int) -> None:
        self._pause(f"allocate {self._name}")
        self._file.allocate(size)

    def size(self) -> int:
        self._pause(f"size {self._name}")
        return self._file.size()

    def truncate(self, size: int) -> None:
        self._pause(f"truncate {self._name}")
        self._file.truncate(size)

    def sync(self) -> None:
        self._pause(f"sync {self._name}")
        self._file.sync()

    def close(self) -> None:
        self._file.close()
