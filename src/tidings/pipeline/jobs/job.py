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

__all__ = ["Build", "Job", "JobContext", "Look", "Output", "Pieces", "Summarise"]


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
    """The column that says in which piece a row lies, where the job has pieces. Empty: each run replaces the whole table."""


@dataclass(frozen=True, slots=True)
class Look:
    """What a job in pieces wants of a table that it reads."""

    at: str
    """The column that says where a row lies: a timestamp, a date or a seq."""
    before_s: float = 0.0
    """A piece depends on rows from so long before it"""
    after_s: float = 0.0
    """to so long after it."""
    types: tuple[str, ...] = ()
    """Only rows of these types matter; empty: all do."""
    is_whole: bool = False
    """Every piece depends on all rows of it, and any new row makes all pieces anew. For tables that are small."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """
    How a job's tables fall into pieces of which each can be made anew without the others.

    A piece is a stretch of time of ``length_s``. A row of an output belongs to the piece that its column ``replaced_by``
    lies in, and depends on those rows of the tables read that lie in the piece, or within the reach of their ``Look``.
    """

    looks: Callable[[JobContext], Mapping[str, Look]]
    """What is wanted of each table."""
    length_s: int = 3600
    is_by_seq: bool = False
    """Instead of time: a row comes from one event and is known by its seq, so what is new is the only piece to make."""
    lasts_s: Callable[[JobContext], float] | None = None
    """How long a row stays, from its own time on; without it for ever."""


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
    pieces: Pieces | None = None
    """How to make only what new rows touch. None: the tables are made anew from all of what it reads."""
    settings_of: str = ""
    """The job whose settings it shares; empty: it has its own."""
