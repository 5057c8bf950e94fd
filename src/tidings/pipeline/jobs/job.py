"""
What a job of the pipeline is: a pure function of tables, with a name; and what most jobs need.

A job reads tables and answers with tables; it opens no file, asks no clock and keeps no state. The runner reads the tables,
pins the run and stores what comes back, so the same inputs give the same tables on any master.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar, cast

from tidings.core.errors import SettingsError
from tidings.core.events import Event

from ..schemas import columns_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


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
class OutputTable:
    """A table that a job writes."""

    table: str
    """``layer.name``, for example ``gold.topic_minutes``."""
    schema: str
    """As a DDL string, columns with their types."""
    about: str
    """What a row is, in one sentence, for the catalogue."""
    partitioned_by: tuple[str, ...] = ()
    """The column that says in which partition a row lies. Empty: each run replaces the whole table."""


@dataclass(frozen=True, slots=True)
class InputWindow:
    """Which rows of a table that it reads a partitioned job needs."""

    at: str
    """The column that says where a row lies: a timestamp, a date or a seq."""
    before_s: float = 0.0
    """A partition depends on rows from so long before it"""
    after_s: float = 0.0
    """to so long after it."""
    types: tuple[str, ...] = ()
    """Only rows of these types matter; empty: all do."""
    is_whole: bool = False
    """Every partition depends on all rows of it, and any new row rebuilds them all. For tables that are small."""


@dataclass(frozen=True, slots=True)
class Partitioning:
    """
    How a job's tables are divided so that each partition can be rebuilt without the others.

    A partition is a time range of ``length_s``. A row of an output belongs to the partition that its column
    ``partitioned_by`` lies in, and depends on those rows of the tables read that lie in the partition, or within the reach
    of their ``InputWindow``.
    """

    windows: Callable[[JobContext], Mapping[str, InputWindow]]
    """Which rows are needed, by table."""
    length_s: int = 3600
    is_by_seq: bool = False
    """Instead of time: a row comes from one event and is known by its seq, so only what is new is computed."""
    lifetime_s: Callable[[JobContext], float] | None = None
    """How long a row stays, from its own time on; without it for ever."""


@dataclass(frozen=True, slots=True)
class Job:
    """One job."""

    name: str
    about: str
    reads: tuple[str, ...]
    writes: tuple[OutputTable, ...]
    build: Build
    """From the tables it reads, by name, to the tables it writes, by name."""
    summarise: Summarise | None = None
    """Events to publish from the tables it wrote. Their ids must depend on the run's content alone, so that a repeated run repeats nothing."""
    partitioning: Partitioning | None = None
    """How to compute only what new rows touch. None: the tables are rebuilt from all of what it reads."""
    settings_of: str = ""
    """The job whose settings it shares; empty: it has its own."""


_T = TypeVar("_T")


def setting(context: JobContext, name: str, default: _T, *, above: float | None = None) -> _T:
    """
    A setting of the job, or its default; a whole number will do where the default is a fraction.

    Raises:
        SettingsError: It is of another type than the default, or not above ``above``.
    """
    given: Any = context.settings.get(name, default)
    if isinstance(default, float) and type(given) is int:
        given = float(given)
    if isinstance(default, tuple) and isinstance(given, list):
        given = tuple(given)
    kind: Any = type(default)
    if type(given) is not kind:
        raise SettingsError(name, f"expected {kind.__name__}, got {given!r}")
    if above is not None and not given > above:
        raise SettingsError(name, f"must be above {above:g}, got {given!r}")
    return cast("_T", given)


def shaped(frame: DataFrame, output: OutputTable) -> DataFrame:
    """The columns that an output's schema names, in its order and of its types; others are left behind."""
    from pyspark.sql import functions as F

    return frame.select(*(F.col(f"`{name}`").cast(kind).alias(name) for name, kind in columns_of(output.schema)))
