"""
Which rows of a job's tables have to be computed again: all of them, or those of the time ranges that new rows touch.

The note in each commit of a job says what it was made of: for each table it read the seq reached and the *build*, a name
that changes when that table was rebuilt as a whole; the settings; and a *history*, the ranges that its last commits replaced,
for the jobs that read it in turn. Where that does not add up (another build, other settings, a history that does not go back
far enough, a run that died between two of the job's tables) all of it is computed, which is always right.

A range is a pair of whole numbers on an axis, seconds since 1970 or the log's seqs; its end is excluded. Computing more than
needed is always right, only slower: so ranges are widened to whole partitions, and the nearest of very many are merged.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import duckdb
import numpy as np

from .jobs.job import InputWindow, Job, JobContext, Partitioning
from .lake import Lake, Note
from .schemas import BRONZE_EVENTS, SILVER_EVENTS, SILVER_SYNC_EVENTS
from .table_files import DataFile, translate_read_errors

if TYPE_CHECKING:
    import pyarrow as pa  # type: ignore[import-untyped]
    from pyspark.sql import Column

Range = tuple[int, int]

RANGES_MAX: Final = 32
DAY_S: Final = 86_400
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_EPOCH_DAY: Final = date(1970, 1, 1)
# What a calendar can name; a range may be meant to go on for ever.
_FIRST_S: Final = -62_135_596_800
_LAST_S: Final = 253_402_214_400


def merged(ranges: Iterable[Range], count_max: int = RANGES_MAX) -> tuple[Range, ...]:
    """The same ranges in order, none touching another; beyond ``count_max`` the smallest gaps between them are closed."""
    found: list[Range] = []
    for low, high in sorted(ranges):
        if high <= low:
            continue
        if found and low <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], high))
        else:
            found.append((low, high))
    if len(found) <= count_max:
        return tuple(found)
    by_size = sorted(range(1, len(found)), key=lambda at: found[at][0] - found[at - 1][1], reverse=True)
    starts = [0, *sorted(by_size[: count_max - 1])]
    ends = [*(start - 1 for start in starts[1:]), len(found) - 1]
    return tuple((found[start][0], found[end][1]) for start, end in zip(starts, ends, strict=True))


def widened(ranges: Iterable[Range], length: int, *, before: float = 0, after: float = 0) -> tuple[Range, ...]:
    """The ranges from so much before them to so much after them, in whole partitions of a length."""
    return merged(
        (int((low - before) // length) * length, -int(-(high + after) // length) * length) for low, high in ranges
    )


def may_hold_any(file: DataFile, column: str, ranges: tuple[Range, ...]) -> bool:
    """Whether a file may have rows in one of the ranges, by its bounds; bounds that are unknown hold anything."""
    least, most = file.minimum.get(column), file.maximum.get(column)
    low = -np.inf if least is None else _place(least)
    # Bounds may have been rounded down, and a day goes on until the next one.
    high = np.inf if most is None else _place(most) + (DAY_S if _is_day(most) else 1)
    return any(start <= high and low < end for start, end in ranges)


def holds_any(column: str, kind: str, ranges: tuple[Range, ...]) -> Column:
    """Whether a row lies in one of the ranges, as a condition for Spark."""
    from pyspark.sql import functions as F

    found: Column = F.lit(False)
    for low, high in ranges:
        is_in = (F.col(column) >= _literal(low, kind)) & (F.col(column) < _literal(high, kind))
        found = found | is_in
    return found


def gaps(values: pa.ChunkedArray | pa.Array, kind: str, ranges: tuple[Range, ...]) -> np.ndarray[Any, Any]:
    """For each value the number of the gap between ranges that it lies in, counted from 0; -1 if it lies in a range."""
    import pyarrow as pa
    import pyarrow.compute as pc  # type: ignore[import-untyped]

    if kind == "timestamp":
        numbers = np.floor_divide(
            _filled(pc.cast(pc.cast(values, pa.timestamp("us", tz="UTC")), pa.int64())), 1_000_000
        )
    elif kind == "date":
        numbers = _filled(pc.cast(pc.cast(values, pa.int32()), pa.int64())) * DAY_S
    else:
        numbers = _filled(values)
    lows = np.array([low for low, _ in ranges], dtype=np.int64)
    highs = np.array([high for _, high in ranges], dtype=np.int64)
    passed = np.searchsorted(highs, numbers, side="right")
    following = np.append(lows, np.iinfo(np.int64).max)[passed]
    return np.where(numbers >= following, -1, passed)


def _filled(values: Any) -> np.ndarray[Any, Any]:
    # A row without a place lies in no range: it stays with what comes before the first one.
    found: np.ndarray[Any, Any] = values.fill_null(np.iinfo(np.int64).min).to_numpy(zero_copy_only=False)
    return found.astype(np.int64)


def _is_day(value: Any) -> bool:
    return isinstance(value, date) and not isinstance(value, datetime)


def _place(value: Any) -> int:
    if isinstance(value, datetime):
        moment = value.replace(tzinfo=UTC) if value.tzinfo is None else value
        return (moment - _EPOCH) // timedelta(seconds=1)
    if isinstance(value, date):
        return (value - _EPOCH_DAY).days * DAY_S
    return int(value)


def _literal(place: int, kind: str) -> Column:
    from pyspark.sql import functions as F

    if kind == "timestamp":
        held = min(max(place, _FIRST_S), _LAST_S)
        return F.lit(_EPOCH + timedelta(seconds=held)).cast("timestamp")
    if kind == "date":
        held = min(max(place, _FIRST_S), _LAST_S)
        return F.lit(_EPOCH_DAY + timedelta(days=-(-held // DAY_S)))
    return F.lit(place)


FOR_EVER: Final = 1 << 60
_HISTORY_MAX: Final = 64
_PARTITIONS_MAX: Final = 100_000
_GROWING: Final = {table.name: "seq" for table in (BRONZE_EVENTS, SILVER_EVENTS, SILVER_SYNC_EVENTS)}


@dataclass(frozen=True, slots=True)
class JobPlan:
    """What is to be computed, and from what."""

    rebuilt: tuple[Range, ...] | None
    """The ranges whose rows are replaced; none of them if nothing was touched. None: all rows."""
    needed: Mapping[str, tuple[Range, ...]]
    """By table, where the rows lie that are needed; a table that is not named is needed as a whole."""
    windows: Mapping[str, InputWindow]
    note: Note
    """For the job's commits: what it is made of."""

    def needs(self, table: str, file: DataFile) -> bool:
        """Whether a file may have rows that are needed."""
        window = self.windows.get(table)
        if window is None:
            return True
        if window.types and not any(file.may_hold("type", kind, kind) for kind in window.types):
            return False
        return table not in self.needed or may_hold_any(file, window.at, self.needed[table])


class NoteCache:
    """The tables' notes as one run sees them: each is read once, and again after a commit to its table."""

    def __init__(self, lake: Lake) -> None:
        self._lake = lake
        self._known: dict[str, Note] = {}

    def of(self, table: str) -> Note:
        """What the last commit to the table says; nothing if there was none."""
        if table not in self._known:
            self._known[table] = self._lake.note(table)
        return self._known[table]

    def forget(self, table: str) -> None:
        """The table was, or may have been, committed to."""
        self._known.pop(table, None)


class JobPlanner:
    """
    Finds out what the jobs of one run have to compute.

    Args:
        lake: Where the tables are.
        notes: What their commits say.
        until, as_of: What is fixed for the run.
        run: A name that no other run has.
    """

    def __init__(self, lake: Lake, notes: NoteCache, *, until: int, as_of: datetime, run: str) -> None:
        self._lake = lake
        self._notes = notes
        self._until = until
        self._as_of = as_of
        self._run = run

    def plan(self, job: Job, context: JobContext, *, is_again: bool) -> JobPlan:
        """What the job has to compute to be up to date with the tables it reads."""
        windows = {} if job.partitioning is None else dict(job.partitioning.windows(context))
        inputs = {}
        for table in windows:
            found = self._notes.of(table)
            inputs[table] = {"build": str(found.get("build", "")), "seq": int(found.get("seq", 0))}
        recipe = _recipe(job, context)
        notes = [self._notes.of(output.table) for output in job.writes]
        rebuilt = (
            None if is_again or job.partitioning is None else self._touched(job.partitioning, windows, notes, recipe)
        )
        needed = {} if job.partitioning is None else self._needed(job.partitioning, windows, context, rebuilt)
        note: Note = {"recipe": recipe, "inputs": inputs, **self._history(notes, rebuilt)}
        if job.partitioning is not None and job.partitioning.lifetime_days is not None:
            note["lasts_s"] = DAY_S * job.partitioning.lifetime_days(context)
        if job.partitioning is not None and job.partitioning.seq_column:
            note["grows_by"] = job.partitioning.seq_column
        return JobPlan(rebuilt, needed, windows, note)

    def _touched(
        self, partitioning: Partitioning, windows: Mapping[str, InputWindow], notes: Sequence[Note], recipe: str
    ) -> tuple[Range, ...] | None:
        first = notes[0]
        if any(note.get("recipe") != recipe or note.get("build") != first.get("build") for note in notes):
            return None
        oldest = min(notes, key=lambda note: int(note["seq"]))
        found: list[Range] = []
        for table, window in windows.items():
            position = oldest["inputs"].get(table)
            ranges = None if position is None else self._changed(table, window, position, partitioning)
            if ranges is None:
                return None
            found += ranges
        return merged([*found, *self._lapsed(oldest)])

    def _changed(
        self, table: str, window: InputWindow, position: Mapping[str, Any], partitioning: Partitioning
    ) -> tuple[Range, ...] | None:
        """The ranges that changes of a table since a position touch; None for all."""
        note = self._notes.of(table)
        if str(note.get("build", "")) != position["build"]:
            return None
        since = int(position["seq"])
        if (column := note.get("grows_by", _GROWING.get(table))) is not None:
            return self._grown(table, column, window, since, partitioning)
        if int(note.get("seq", 0)) == since:
            return ()
        if "trail" not in note or since < int(note["trail_from"]):
            return None
        replaced = [(low, high) for seq, ranges in note["trail"] if seq > since for low, high in ranges]
        if window.is_whole:
            return None if replaced else ()
        return widened(replaced, DAY_S, before=DAY_S * window.days_after, after=DAY_S * window.days_before)

    def _grown(
        self, table: str, column: str, window: InputWindow, since: int, partitioning: Partitioning
    ) -> tuple[Range, ...] | None:
        """The same for a table whose new rows are those past a seq. Looked up here, which is quicker than asking Spark."""
        if not self._lake.exists(table):
            return ()
        files = self._lake.files(
            table,
            lambda file: (
                file.may_hold(column, since + 1, self._until)
                and (not window.types or any(file.may_hold("type", kind, kind) for kind in window.types))
            ),
        )
        if not files:
            return ()
        length = DAY_S
        places = {
            "timestamp": f'floor(epoch_us("{window.at}") / 1000000.0 / {length})',
            "date": f'floor(epoch("{window.at}") / {length})',
        }
        is_row_enough = window.is_whole or bool(partitioning.seq_column)
        place = "1" if is_row_enough else places[self._kind(table, window.at)]
        of_types = f"and type in ({', '.join('?' * len(window.types))})" if window.types else ""
        limit = 1 if is_row_enough else _PARTITIONS_MAX + 1
        with translate_read_errors(self._lake.folder(table)), duckdb.connect(config={"threads": 1}) as duck:
            duck.register("fresh", self._lake.dataset(table, files))
            rows = duck.execute(
                f'select distinct cast({place} as bigint) as place from fresh where "{column}" > ? {of_types}'
                f" limit {limit}",
                [since, *window.types],
            ).fetchall()
        if partitioning.seq_column:
            return ((since + 1, self._until + 1),) if rows else ()
        if len(rows) > _PARTITIONS_MAX or (window.is_whole and rows):
            return None
        touched = [(row[0] * length, row[0] * length + length) for row in rows if row[0] is not None]
        return widened(touched, length, before=length * window.days_after, after=length * window.days_before)

    def _kind(self, table: str, column: str) -> str:
        import pyarrow as pa

        return "date" if pa.types.is_date(self._lake.schema(table).field(column).type) else "timestamp"

    def _lapsed(self, oldest: Note) -> tuple[Range, ...]:
        """The partitions that rows have left, or begun to leave, since the last run because their time was over."""
        lasts_s = oldest.get("lasts_s")
        if lasts_s is None:
            return ()
        before = datetime.fromisoformat(str(oldest["as_of"])).timestamp()
        low, high = math.floor(before - lasts_s), math.floor(self._as_of.timestamp() - lasts_s) + 1
        return widened([(low, high)], DAY_S)

    def _needed(
        self,
        partitioning: Partitioning,
        windows: Mapping[str, InputWindow],
        context: JobContext,
        rebuilt: tuple[Range, ...] | None,
    ) -> dict[str, tuple[Range, ...]]:
        if rebuilt is None:
            if partitioning.lifetime_days is None:
                return {}
            rebuilt = ((math.floor(self._as_of.timestamp() - DAY_S * partitioning.lifetime_days(context)), FOR_EVER),)
        return {
            table: widened(rebuilt, 1, before=DAY_S * window.days_before, after=DAY_S * window.days_after)
            for table, window in windows.items()
            if not window.is_whole
        }

    def _history(self, notes: Sequence[Note], rebuilt: tuple[Range, ...] | None) -> Note:
        if rebuilt is None:
            return {"build": self._run, "trail": [], "trail_from": self._until}
        oldest = min(notes, key=lambda note: int(note["seq"]))
        # A run that died between two tables left one of them ahead: the history of the other one is continued for both.
        trail = [*oldest["trail"], [self._until, [list(range_) for range_ in rebuilt]]]
        dropped = trail[:-_HISTORY_MAX]
        trail_from = dropped[-1][0] if dropped else oldest["trail_from"]
        return {"build": oldest["build"], "trail": trail[-_HISTORY_MAX:], "trail_from": trail_from}


def _recipe(job: Job, context: JobContext) -> str:
    """Stands for all that decides about every partition alike."""
    parts = [
        sorted((name, repr(value)) for name, value in context.settings.items()),
        [(output.table, output.schema) for output in job.writes],
        None if job.partitioning is None else job.partitioning.seq_column or "date",
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
