"""
What is known of the runs: for each job how far its tables are, what it cost last, and what failed and when.

Kept in ``jobs.json`` beside the tables, replaced as a whole. A table's own commits say what is true of it: an old or damaged
file only costs repeated work. Published twice is no harm: the ids of summaries depend on their content, and the log knows them.
"""

from __future__ import annotations

import functools
import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from tidings.log.embedded.disk import OsDisk
from tidings.log.embedded.layout import Layout

from .schemas import SILVER_EVENTS
from .state_files import StateFile, load_state, save_state
from .storage import Storage

if TYPE_CHECKING:
    from .lake import Lake

_FILE: Final = "jobs.json"


class JobState(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is known of one job."""

    seq: int = 0
    """Its tables take the log up to here into account."""
    made: int = 0
    """The seq of the run that last wrote them: with tables of another one this says nothing."""
    inputs: dict[str, list[Any]] = {}
    """Where each table that it reads stood."""
    as_of: str = ""
    """What that run called now, by the log's own time."""
    published: int = 0
    """Its summary was published for this seq."""
    has_more: bool = False
    """A page of its summary was published, and others are to follow."""
    ran_at: str = ""
    """When it last wrote something, by the clock,"""
    seconds: float = 0.0
    """how long that took,"""
    rows: int = 0
    """how many rows it wrote,"""
    days: int | None = None
    """to how many days of its tables (``None``: to all of them, or it does not go by days),"""
    why_all: str = ""
    """Why it then computed all rows, of a job that otherwise computes what changed;"""
    bytes_read: int = 0
    """and how large the files were that it was given."""
    every_s: float = 0.0
    """In runs that follow the log it waits until so much of the log's time has passed; 0: it runs every time."""
    failed_at: str = ""
    """When it failed; empty if it did not the last time"""
    problem: str = ""
    """and why."""


class _States(StateFile, frozen=True):
    jobs: dict[str, JobState]
    until: int = 0
    """The seq of the last run in which no job failed."""
    request: str = ""
    """What a run was asked for that left nothing to do"""
    files: str = ""
    """and what the workspace's files looked like before it."""


class JobStates:
    """
    The states of all jobs of a lake, for one run; any thread may change them.

    Args:
        lake: Where the lake is.
        epoch: Of the log; what is known of another one does not count.
    """

    def __init__(self, lake: Storage, epoch: str) -> None:
        self._lake = lake
        self.epoch = epoch
        found = load_state(lake, _FILE, _States, epoch, has_checksum=False)
        self._jobs = {} if found is None else dict(found.jobs)
        self.until = 0 if found is None else found.until
        """The seq of the last run in which no job failed."""
        self._rest = ("", "") if found is None else (found.request, found.files)
        self._lock = threading.Lock()

    def of(self, job: str) -> JobState:
        """What is known of a job."""
        return self._jobs.get(job) or JobState()

    def failed(self) -> dict[str, JobState]:
        """The jobs that failed the last time they ran, by name."""
        return {name: state for name, state in sorted(self._jobs.items()) if state.problem}

    def update(self, job: str, **changes: Any) -> None:
        """Change what is known of a job, on disk when this returns."""
        with self._lock:
            self._take_in()
            before = self.of(job)
            after = msgspec.structs.replace(before, **changes)
            if after != before or job not in self._jobs:
                self._jobs[job] = after
                self._save()

    def reached(self, until: int, request: str = "", files: str = "") -> None:
        """A run ended in which no job failed; with what it was asked for, if it left nothing to do."""
        with self._lock:
            self._take_in()
            self.until, self._rest = until, (request, files)
            self._save()

    def _take_in(self) -> None:
        """What another run of the same lake noted of jobs meanwhile."""
        if (found := load_state(self._lake, _FILE, _States, self.epoch, has_checksum=False)) is not None:
            self._jobs |= found.jobs

    def _save(self) -> None:
        content = _States(self.epoch, self._jobs, self.until, *self._rest)
        save_state(self._lake, _FILE, content)


def idle_at(lake: Storage, layout: Layout, request: str) -> int | None:
    """
    The seq that the tables reach to, if the last run was asked for the same, left nothing to do, and no file of the log, of
    groups' positions or of dead letters has changed since; otherwise ``None``. Reads no table.
    """
    found = load_state(lake, _FILE, _States, layout.read_meta(OsDisk()).epoch, has_checksum=False)
    is_idle = found is not None and found.request == request and found.files == files_digest(layout)
    return found.until if found is not None and is_idle else None


def files_digest(layout: Layout) -> str:
    """Stands for the files that tables are made from: which there are, how large they are, and when they were changed."""
    digest = hashlib.sha256()
    for folder in (layout.wal, layout.offsets, layout.dlq):
        for line in sorted(_files(folder)):
            digest.update(line.encode(errors="surrogateescape"))
    return digest.hexdigest()


def _files(folder: Path | str) -> Iterator[str]:
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    yield from _files(entry.path)
                else:
                    found = entry.stat()
                    yield f"{entry.path}\0{found.st_size}\0{found.st_mtime_ns}\n"
    except FileNotFoundError:
        return


@dataclass(frozen=True, slots=True)
class TableStatus:
    """A table as it stands."""

    name: str
    rows: int
    files: int
    bytes: int
    seq: int | None
    """It takes the log up to here into account; ``None`` for a table that does not go by seqs."""
    behind: int | None
    """How many seqs bronze is ahead of it; what the pipeline itself published counts only if other records are among it."""
    job: str
    """Which job makes it; empty for those of the pipeline's core."""
    last: JobState | None
    """What is known of that job: what it cost last, and whether and when it failed."""
    due: str
    """``now``, ``with new records``, or by runs that follow the log from this time of the log on."""
    problem: str = ""
    """Why it cannot be gone on with: its own log cannot be read, and then nothing else is known of it, or its note was taken back."""


def table_statuses(
    lake: Lake, states: JobStates, *, reached: int, pending: int | None, has_news: Callable[[int], bool]
) -> list[TableStatus]:
    """
    Every table of a lake. Needs neither Spark nor the jobs.

    Args:
        lake: Where they are.
        states: What is known of the jobs.
        reached: The last seq of bronze.
        pending: How many records a run would take in; ``None`` if nobody knows.
        has_news: Whether there are records past a seq that the pipeline did not publish itself.
    """
    from .catalogue import describe
    from .consistency import find_behind
    from .damage import find_damaged_logs

    _, damaged = find_damaged_logs(lake)
    found = [
        TableStatus(name, 0, 0, 0, None, None, "", None, "now", problem) for name, problem in sorted(damaged.items())
    ]
    has_news = functools.cache(has_news)
    # What is filled together reaches as far, also where there was nothing for one of them.
    together = {"bronze": reached}
    tables = [name for name in lake.tables() if name not in damaged]
    refused = {name: behind.describe() for name, behind in find_behind(lake, tables).items()}
    for name in sorted(tables, key=lambda each: each != SILVER_EVENTS.name):
        table = describe(lake, name)
        if name == SILVER_EVENTS.name:
            together["silver"] = table.seq or 0
        job = str(lake.note(name).get("job", ""))
        last = states.of(job) if job else None
        seq = table.seq if last is None or table.seq != last.made else last.seq
        if seq is not None:
            seq = max(seq, together.get(name.partition(".")[0], 0))
        behind = None if seq is None else max(reached - seq, 0)
        if behind and seq is not None and last is not None and not has_news(seq):
            behind = 0
        due = "now" if (last is not None and last.problem) or behind or pending else "with new records"
        if due == "now" and last is not None and last.every_s and last.as_of and not last.problem:
            due = (datetime.fromisoformat(last.as_of) + timedelta(seconds=last.every_s)).isoformat()
        found.append(
            TableStatus(name, table.rows, table.files, table.bytes, seq, behind, job, last, due, refused.get(name, ""))
        )
    return sorted(found, key=lambda each: each.name)
