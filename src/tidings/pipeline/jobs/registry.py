"""
The jobs there are, in sets, in an order in which each finds what it reads.

A package registers a set under the entry point group ``tidings.jobs``: the set's name, and where its ``Job``s are listed.

    [project.entry-points."tidings.jobs"]
    billing = "shop.jobs:JOBS"

The set ``operations`` is the pipeline's own and always on. Any other set is switched on by its name, or a job of it is named.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Final

from ..errors import JobRefused, JobSetBroken, UnknownJob, UnknownJobSet
from ..schemas import is_core_table, is_table_name
from .job import Job

GROUP: Final = "tidings.jobs"
OPERATIONS: Final = "operations"


def job_sets() -> dict[str, tuple[Job, ...]]:
    """
    Every registered set of jobs, by name. Importing them imports PySpark.

    Raises:
        JobSetBroken: A set cannot be imported, or lists something that is no job.
    """
    return {name: _load(entry) for name, entry in _registered().items()}


def jobs_in_sets(names: Iterable[str] = ()) -> tuple[Job, ...]:
    """
    The jobs of the set ``operations`` and of the sets named, in order. Other sets are not even imported.

    Raises:
        UnknownJobSet: No package registers a set of that name.
        JobSetBroken: A set cannot be imported, or lists something that is no job.
    """
    registered = _registered()
    wanted = [OPERATIONS, *(name for name in dict.fromkeys(names) if name != OPERATIONS)]
    for name in wanted:
        if name not in registered:
            raise UnknownJobSet(name, tuple(registered))
    return in_order([job for name in wanted for job in _load(registered[name])])


def all_jobs() -> tuple[Job, ...]:
    """Every job of every set, in order."""
    return in_order([job for jobs in job_sets().values() for job in jobs])


def _registered() -> dict[str, EntryPoint]:
    """The sets by name, the pipeline's own first."""
    found = sorted(entry_points(group=GROUP), key=lambda entry: (entry.name != OPERATIONS, entry.name))
    return {entry.name: entry for entry in found}


def _load(entry: EntryPoint) -> tuple[Job, ...]:
    try:
        jobs = tuple(entry.load())
    except Exception as error:
        if entry.name == OPERATIONS:  # our own: what is missing is the extra ``pipeline``, and the caller says so
            raise
        raise JobSetBroken(entry.name, f"{type(error).__name__}: {error}") from error
    for job in jobs:
        if not isinstance(job, Job):
            raise JobSetBroken(entry.name, f"{entry.value} lists {job!r}, which is no Job")
        try:
            _check_tables(job)
        except JobRefused as error:
            raise JobSetBroken(entry.name, str(error)) from error
    return jobs


def choose(jobs: Sequence[Job], names: Iterable[str] | None) -> tuple[Job, ...]:
    """
    The jobs of these names, in order; all of them for ``None``.

    What a job by seq writes is no more than the log in another order, and what was erased is among it: whoever reads
    such a table is given it as it should be. So those jobs come along unasked.

    Raises:
        UnknownJob: There is none of that name.
    """
    if names is None:
        return tuple(jobs)
    wanted = set(names)
    for name in sorted(wanted - {job.name for job in jobs}):
        raise UnknownJob(name)
    read = {table for job in jobs if job.name in wanted for table in job.reads}
    return tuple(job for job in jobs if job.name in wanted or (_is_by_seq(job) and not read.isdisjoint(_tables(job))))


def _check_tables(job: Job) -> None:
    """
    Make sure that a job's tables have names that tables are found by, and are none of the pipeline's own.

    Raises:
        JobRefused: They are not.
    """
    for output in job.writes:
        if not is_table_name(output.table):
            raise JobRefused(job.name, f"{output.table!r} is no name of a table: a layer and a name, in a-z, 0-9 and _")
        if is_core_table(output.table):
            raise JobRefused(job.name, f"it writes {output.table}, which is the pipeline's own, and jobs only read it")


def _is_by_seq(job: Job) -> bool:
    return job.partitioning is not None and bool(job.partitioning.seq_column)


def _tables(job: Job) -> set[str]:
    return {output.table for output in job.writes}


def in_order(jobs: Sequence[Job]) -> tuple[Job, ...]:
    """
    The jobs so that each comes after those whose tables it reads; otherwise by name.

    Raises:
        JobRefused: Two jobs have one name or write one table, or they wait for each other; or a job writes a table that is not its own.
    """
    makers: dict[str, str] = {}
    for job in jobs:
        _check_tables(job)
        for output in job.writes:
            if output.table in makers:
                raise JobRefused(job.name, f"job {makers[output.table]!r} writes {output.table} too")
            makers[output.table] = job.name
    waiting = {job.name: job for job in sorted(jobs, key=lambda each: each.name)}
    if len(waiting) != len(jobs):
        names = [job.name for job in jobs]
        raise JobRefused(next(name for name in names if names.count(name) > 1), "another job has the same name")
    ordered: list[Job] = []
    while waiting:
        ready = [
            job
            for job in waiting.values()
            if not any((maker := makers.get(table)) in waiting and maker != job.name for table in job.reads)
        ]
        if not ready:
            raise JobRefused(next(iter(waiting)), f"jobs wait for each other: {', '.join(waiting)}")
        ordered.append(ready[0])
        del waiting[ready[0].name]
    return tuple(ordered)
