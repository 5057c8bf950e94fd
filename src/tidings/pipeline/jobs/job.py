"""
What a job of the pipeline is: a pure function of tables, with a name.

A job reads tables and answers with tables; it opens no file, asks no clock and keeps no state. The runner brings the
tables, pins the run and stores what comes back, so the same inputs give the same tables on any master.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from tidings.core.events import Event

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["Build", "Job", "JobContext", "Output", "Summarise"]


@dataclass(frozen=True, slots=True)
class JobContext:
    """What is fixed for one run, the same for all its jobs."""

    epoch: str
    until: int
    """The last seq that this run sees."""
    as_of: datetime
    """The run's idea of now: the time of writing of the record at ``until``. With it a run can be repeated."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The job's own settings, by name; a job states its defaults."""


Build = Callable[[Mapping[str, "DataFrame"], JobContext], Mapping[str, "DataFrame"]]
Summarise = Callable[[Mapping[str, "DataFrame"], JobContext], Iterable[Event]]


@dataclass(frozen=True, slots=True)
class Output:
    """A table that a job writes."""

    table: str
    """``layer.name``, for example ``gold.topic_minutes``."""
    schema: str
    """As a DDL string, columns with their types."""
    about: str
    """What a row is, in one sentence, for the catalogue."""
    replaced_by: tuple[str, ...] = ()
    """Columns whose values a run replaces together (a day, say). Empty: each run replaces the whole table."""


@dataclass(frozen=True, slots=True)
class Job:
    """One job."""

    name: str
    about: str
    reads: tuple[str, ...]
    writes: tuple[Output, ...]
    build: Build
    """From the tables it reads, by name, to the tables it writes, by name."""
    summarise: Summarise | None = None
    """Events to publish from the tables it wrote. Their ids must depend on the run's content alone, so that a repeated run repeats nothing."""
