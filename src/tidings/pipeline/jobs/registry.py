"""
The jobs there are, in an order in which each finds what it reads.

A module of this package that has ``JOBS`` takes part; nothing else needs to be written down. Importing this imports all of
them, and with them PySpark.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable, Sequence

from ..errors import UnknownJob
from .job import Job

__all__ = ["all_jobs", "choose", "in_order"]


def all_jobs() -> tuple[Job, ...]:
    """Every job, in order."""
    package = __name__.rpartition(".")[0]
    folder = importlib.import_module(package).__path__
    found: list[Job] = []
    for module in sorted(each.name for each in pkgutil.iter_modules(folder)):
        if module not in ("registry", "job"):
            found += getattr(importlib.import_module(f"{package}.{module}"), "JOBS", ())
    return in_order(found)


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


def _is_by_seq(job: Job) -> bool:
    return job.pieces is not None and job.pieces.is_by_seq


def _tables(job: Job) -> set[str]:
    return {output.table for output in job.writes}


def in_order(jobs: Sequence[Job]) -> tuple[Job, ...]:
    """
    The jobs so that each comes after those whose tables it reads; otherwise by name.

    Raises:
        ValueError: Two jobs have one name or write one table, or they wait for each other.
    """
    makers: dict[str, str] = {}
    for job in jobs:
        for output in job.writes:
            if output.table in makers:
                raise ValueError(f"jobs {makers[output.table]!r} and {job.name!r} both write {output.table}")
            makers[output.table] = job.name
    waiting = {job.name: job for job in sorted(jobs, key=lambda each: each.name)}
    if len(waiting) != len(jobs):
        raise ValueError("two jobs have the same name")
    ordered: list[Job] = []
    while waiting:
        ready = [
            job
            for job in waiting.values()
            if not any((maker := makers.get(table)) in waiting and maker != job.name for table in job.reads)
        ]
        if not ready:
            raise ValueError(f"jobs wait for each other: {', '.join(waiting)}")
        ordered.append(ready[0])
        del waiting[ready[0].name]
    return tuple(ordered)
