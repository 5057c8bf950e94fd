"""
What a job of the pipeline is: a pure function of tables, with a name; and what most jobs need.

A job reads tables and answers with tables; it opens no file, asks no clock and keeps no state. The runner reads the tables,
pins the run and stores what comes back, so the same inputs give the same tables on any master.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from tidings.core.errors import SettingsError
from tidings.core.events import Event

from ..schemas import struct_of

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


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


@dataclass(frozen=True, slots=True)
class InputWindow:
    """Which rows of a table that it reads a day of a job's tables is made from."""

    at: str
    """The column that says where a row lies: a timestamp or a date (a day in UTC), or for a job by seq the seq."""
    days_before: int = 0
    """A day is made from the rows of so many days before it"""
    days_after: int = 0
    """to so many days after it."""
    types: tuple[str, ...] = ()
    """Only rows of these types matter; empty: all do."""
    topics: tuple[str, ...] = ()
    """Only rows of these topics matter; empty: all do."""
    is_whole: bool = False
    """Every day is made from all rows of it, and any change of it rebuilds all days. For tables that are small."""
    names_days: bool = False
    """With ``is_whole``: only the days that changed rows name are rebuilt. Changed are new rows of a table that grows, and of one that
    is made anew the rows that it has and did not have, or had and has no more."""

    @property
    def wanted(self) -> Mapping[str, tuple[str, ...]]:
        """By column, the values that rows must have one of."""
        return {name: values for name, values in (("type", self.types), ("topic", self.topics)) if values}


@dataclass(frozen=True, slots=True)
class Partitioning:
    """
    How a job computes only what new rows touch.

    By days: each of its tables has a column ``date`` and is stored by it. A day whose input changed is computed again from
    the days that its ``InputWindow`` names, and takes the place of what was there. Or by seq: each row comes from one event,
    so the rows of new events are added and none is ever computed again.
    """

    windows: Callable[[JobContext], Mapping[str, InputWindow]]
    """Which rows are needed, by table."""
    seq_column: str = ""
    """By seq: the column of its tables that has the seq of the event that a row comes from; one that has a column ``date`` is
    stored by it. Empty: by days."""
    lifetime_days: Callable[[JobContext], int] | None = None
    """How long a row stays, from its own time on; without it for ever."""
    moving_days: Callable[[JobContext], int] | None = None
    """By days: so many days back what a row says depends on the time of the run, so those days are computed by every run."""


@dataclass(frozen=True, slots=True)
class Job:
    """One job."""

    name: str
    about: str
    reads: tuple[str, ...]
    writes: tuple[OutputTable, ...]
    build: Build
    """From the tables it reads, by name, to the tables it writes, by name. Not asked where there is no row to read: its tables
    are empty then."""
    summarise: Summarise | None = None
    """Events to publish from the tables it wrote, oldest news first. Their ids must depend on the run's content alone: those that were
    published before are left out, and of the others a run publishes a page (``summaries_max``, 1,000 if not set), the next run the next."""
    partitioning: Partitioning | None = None
    """How to compute only what new rows touch. None: the tables are rebuilt from all of what it reads."""
    recent: Callable[[JobContext], Mapping[str, InputWindow]] | None = None
    """Without a partitioning: of these tables it is given the rows from ``days_before`` the run's own day on, and none that are older."""
    every_s: float | None = None
    """In runs that follow the log: at most once in so much of the log's time, 0 for every run. None: every run for one that has a
    partitioning, and the setting ``rebuild_interval_s`` for one that is made anew from all of what it reads."""
    settings_of: str = ""
    """The job whose settings it shares; empty: it has its own."""


def whole_days(seconds: float) -> int:
    """How many days before or after a day a time of that length may reach."""
    return math.ceil(seconds / 86_400)


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


_DATED: Final = r"^\d{4}-\d{2}-\d{2}"


def time_in(text: Column) -> Column:
    """
    The time in a text, ISO 8601 with year, month and day; null for anything else.

    Spark's cast alone puts a time without a day on the day on which the run takes place, and would make tables depend on that.
    """
    from pyspark.sql import functions as F

    return F.when(text.rlike(_DATED), text.try_cast("timestamp"))


def shaped(frame: DataFrame, output: OutputTable) -> DataFrame:
    """The columns that an output's schema names, in its order and of its types; others are left behind."""
    from pyspark.sql import functions as F

    # Each column costs conversations with the JVM, so those that are right are left alone.
    found = {column.name: column.dataType for column in frame.schema}
    wanted = struct_of(output.schema)
    if [*found.items()] == [(column.name, column.dataType) for column in wanted]:
        return frame
    return frame.select(
        *(
            f"`{each.name}`"
            if found.get(each.name) == each.dataType
            else F.col(f"`{each.name}`").cast(each.dataType).alias(each.name)
            for each in wanted
        )
    )
