"""
What a job has to compute: which days of its tables, or which events, changed since they were made.

A job without ``Partitioning`` is given whole tables and its own are replaced as a whole. One by days is given what its changed
days are made from, and only those days are replaced; one by seq is given the rows of new events and adds to its tables. Which
days changed is told by the tables it reads: new rows of those that grow name their day, and the commits of other jobs name the
days that they replaced. The note in a job's own commits says what it was made of: the version of each table it read, and its
settings. What does not add up (other settings, a commit that names no days, a log that was cleaned up past the position) is
computed as a whole, which is always right, and the plan says why. Days are counted from 1970.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]

from .errors import LakeDamaged
from .jobs.job import InputWindow, Job, JobContext
from .lake import Lake
from .schemas import BRONZE_EVENTS, SILVER_EVENTS, SILVER_SYNC_EVENTS
from .status import JobState
from .storage_errors import translate_read_errors
from .table_files import DAY_COLUMN, DataFile
from .table_log import APP, UPKEEP_APP, Note, note_in

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

Days = frozenset[int]

GROWING: Final = {table.name: "seq" for table in (BRONZE_EVENTS, SILVER_EVENTS, SILVER_SYNC_EVENTS)}
_UNCHANGING: Final = ("OPTIMIZE", "VACUUM START", "VACUUM END", "ADD COLUMN", "SET TBLPROPERTIES", "CREATE TABLE")
"""Commits that leave a table's rows as they are."""
_DAYS_MAX: Final = 366
_COMPARED_MAX: Final = 500_000
"""Up to so many rows, two versions of a table are compared."""
_DIFFERING: Final = (
    'select distinct "{at}" from ((from before except all from after) union all (from after except all from before))'
)
NEVER_MADE: Final = "its tables were never made"
_DAY_US: Final = 86_400_000_000
_EPOCH: Final = date(1970, 1, 1)


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be computed, and from what."""

    note: Note
    """For the job's commits: what it is made of."""
    is_all: bool = True
    """Whether all rows are computed; otherwise only those of ``days`` or ``since``."""
    is_anew: bool = True
    """Whether what the job made before counts for nothing: it was never made, or by other settings, or of rows that have changed."""
    why_all: str = ""
    """Why all is computed, of a job that otherwise computes what changed."""
    days: Days = frozenset()
    """The days whose rows are replaced."""
    since: Mapping[str, int] = field(default_factory=dict)
    """By seq: after which seq the rows of a table are new."""
    windows: Mapping[str, InputWindow] = field(default_factory=dict)
    needed: Mapping[str, Days] = field(default_factory=dict)
    """By table, the days whose rows are needed"""
    begins: Mapping[str, int] = field(default_factory=dict)
    """or the first of them, of a job that is given what is recent. A table that neither names is needed as a whole."""

    @property
    def is_empty(self) -> bool:
        return not self.is_all and not self.days and not self.since

    def needs(self, table: str, file: DataFile) -> bool:
        """Whether a file may have rows that are needed."""
        window = self.windows.get(table)
        if window is None:
            return True
        if not _may_hold(file, window):
            return False
        if table in self.since:
            return file.may_hold(window.at, self.since[table] + 1, None)
        if table in self.begins:
            begin = self.begins[table]
            return _day_of(file.maximum.get(window.at), begin) >= begin
        if table not in self.needed:
            return True
        days = self.needed[table]
        low, high = _day_of(file.minimum.get(window.at), min(days)), _day_of(file.maximum.get(window.at), max(days))
        return any(low <= day <= high for day in days)

    def rows(self, table: str, frame: DataFrame, files: Sequence[DataFile]) -> DataFrame:
        """
        Of the rows of these files of a table, those that are needed.

        What is true of every row by the files' bounds is not asked of them: for each other number in a condition Spark compiles
        its code, and Java that code, anew.
        """
        window = self.windows.get(table)
        if window is None:
            return frame
        for name, values in window.wanted.items():
            frame = frame.where(frame[name].isin(*values))
        if table in self.since:
            return below(frame, files, window.at, self.since[table], is_above=True)
        if table in self.begins:
            return frame.where(frame[window.at] >= _date_of(self.begins[table]))
        if table in self.needed:
            days = self.dates_of(self.needed[table])
            if window.at == DAY_COLUMN and all(file.day in days for file in files):
                return frame
            if days:  # said of the column itself, which lets readers leave out parts of files
                after = days[-1] + timedelta(days=1)
                frame = frame.where((frame[window.at] >= days[0]) & (frame[window.at] < after))
            frame = frame.where(frame[window.at].cast("date").isin(days))
        return frame

    @property
    def beside(self) -> Days | None:
        """
        The days, other than those that are replaced, of which rows may be built from what is needed, though not all of them: a window
        that reaches before or after its day has them. Rows of any other day have no place. ``None``: any day may have rows.
        """
        if not self.needed:
            return None
        near = (_near(set(days), self.windows[table]) for table, days in self.needed.items())
        return frozenset().union(*near) - self.days

    @property
    def dates(self) -> list[date]:
        """The days whose rows are replaced, in their order."""
        return self.dates_of(self.days)

    @staticmethod
    def dates_of(days: Days) -> list[date]:
        """Days as dates, in their order."""
        return [_date_of(day) for day in sorted(days)]


def below(frame: DataFrame, files: Sequence[DataFile], column: str, seq: int, *, is_above: bool = False) -> DataFrame:
    """The rows of these files whose seq in a column is at most this, or above it; not asked of them where it is true of all."""
    others = (None, seq) if is_above else (seq + 1, None)
    if not any(file.may_hold(column, *others) for file in files):
        return frame
    return frame.where(frame[column] > seq if is_above else frame[column] <= seq)


@dataclass(frozen=True, slots=True)
class Changes:
    """
    What changed since the tables of jobs were made, as of one run.

    Args:
        lake: Where the tables are.
        until, as_of: Up to which seq the run sees, and what it calls now.
    """

    lake: Lake
    until: int
    as_of: datetime
    compared_max: int = _COMPARED_MAX
    """Up to so many rows, two versions of a table are compared."""

    def plan(self, job: Job, context: JobContext, state: JobState, *, is_again: bool) -> Plan | None:
        """What the job has to compute to be up to date; ``None`` if it is."""
        notes = [self.lake.note(output.table) for output in job.writes]
        recipe = _recipe(job, context)
        made = min((int(note.get("seq", 0)) for note in notes), default=0)
        positions: Mapping[str, Sequence[Any]] | None = None
        made_at = ""
        why_all = _why_anew(job, notes, recipe, is_again=is_again)
        if not why_all:
            oldest = min(notes, key=lambda note: int(note["seq"]))
            is_known = state.made == made and state.seq > made
            positions, made_at = (state.inputs, state.as_of) if is_known else (oldest["inputs"], str(oldest["as_of"]))
            made = state.seq if is_known else made
        windows = {} if job.partitioning is None else dict(job.partitioning.windows(context))
        own = {output.table for output in job.writes}
        inputs = {table: self._position(table) for table in job.reads if table not in own}
        note: Note = {"recipe": recipe, "inputs": inputs, "days": None}
        if job.partitioning is None:
            is_due = positions is None or made < self.until or self._has_changed(inputs, positions)
            recent = {} if job.recent is None else dict(job.recent(context))
            today = _day_of(self.as_of, 0)
            begins = {table: today - window.days_before for table, window in recent.items()}
            return Plan(note, is_anew=positions is None, windows=recent, begins=begins) if is_due else None
        if positions == inputs and made >= self.until:
            return None
        if job.partitioning.seq_column:
            note["grows_by"] = job.partitioning.seq_column
            since = why_all if positions is None else self._grown(windows, positions)
            if isinstance(since, str):
                return Plan(note, windows=windows, why_all=since)
            kept = {name: note[name] for name in note if name != "days"}
            return Plan(kept, is_all=False, since=since, windows=windows)
        days = why_all if positions is None else self._changed_days(job, context, windows, positions, made_at)
        if isinstance(days, str):
            return Plan(note, windows=windows, why_all=days)
        note["days"] = [_date_of(day).isoformat() for day in sorted(days)]
        needed = {
            table: frozenset(near for day in days for near in range(day - each.days_before, day + each.days_after + 1))
            for table, each in windows.items()
            if not each.is_whole
        }
        return Plan(note, is_all=False, days=days, windows=windows, needed=needed)

    def _position(self, table: str) -> list[Any]:
        """Where a table stands: its version, the seq it reaches to, and of a small one that is taken whole its digest."""
        for version, note in self._commits(table):
            if "digest" in note:
                return [0, 0, note["digest"]]
            if int(note.get("seq", 0)) <= self.until:  # what came while the run is under way is the next one's
                return [version, int(note.get("seq", 0)), *self._moved(table)]
        return [-1, 0]

    def _commits(self, table: str) -> Iterator[tuple[int, Note]]:
        """The commits that changed a table's rows, the newest first: their versions and notes, as far as its log goes back."""
        for entry in self.lake.commits(table):
            if entry.get("operation") not in _UNCHANGING and entry.get(APP) != UPKEEP_APP:
                yield int(entry["version"]), note_in(entry, self.lake.folder(table), table) or {}

    def _has_changed(self, inputs: Mapping[str, Sequence[Any]], positions: Mapping[str, Sequence[Any]]) -> bool:
        """Whether a table is another than it was."""
        moved = [table for table, position in inputs.items() if positions.get(table) != position]
        return any(
            "digest" in self.lake.note(table) or self._changes(table, positions.get(table)) != [] for table in moved
        )

    def _changes(self, table: str, position: Sequence[Any] | None) -> list[Note] | str:
        """Return the notes of a table's commits since a position, however many; or why all of it may have changed."""
        if position is None:
            return f"{table} was not read before"
        if list(position[2:]) != self._moved(table):
            return f"a repair made {table} anew"
        found: list[Note] = []
        last = -1
        for version, note in self._commits(table):
            if version <= position[0]:
                # A table that lost its last commit has another one by the same number.
                is_joined = version < position[0] or int(note.get("seq", 0)) == position[1]
                return found if is_joined else f"{table} lost commits"
            if note.get("days", ()) is None:
                return f"all of {table} was made anew"
            if int(note.get("seq", -1)) < position[1]:
                return f"{table} lost commits"
            found.append(note)
            last = version
        if position[0] >= 0:
            return f"the log of {table} begins at version {last}, and version {position[0]} was read last"
        return found if all("days" not in note for note in found) else f"{table} was not there before"

    def _moved(self, table: str) -> list[str]:
        """Where a repair made the table anew, if it did: its versions count from there."""
        return [self.lake.moved[table]] if table in self.lake.moved else []

    def _grown(
        self, windows: Mapping[str, InputWindow], positions: Mapping[str, Sequence[Any]]
    ) -> dict[str, int] | str:
        """For a job by seq: after which seq each table that has new rows for it is to be read; or why all is read."""
        since: dict[str, int] = {}
        has_grown = False
        for table, window in windows.items():
            changes = self._changes(table, positions.get(table))
            if isinstance(changes, str):
                return changes
            if changes and window.is_whole:
                return f"{table} has changed, which every row is made from"
            if not window.is_whole:
                since[table] = int(positions[table][1])
                has_grown |= bool(changes) and bool(
                    self._new_days(table, window.at, window, since[table], is_row_enough=True)
                )
        return since if has_grown else {}

    def _changed_days(
        self,
        job: Job,
        context: JobContext,
        windows: Mapping[str, InputWindow],
        positions: Mapping[str, Sequence[Any]],
        made_at: str,
    ) -> Days | str:
        """The days that changes of the tables it reads touch, and those that rows have left; or why all are computed."""
        found: set[int] = set()
        for table, window in windows.items():
            if window.names_days and not (table in GROWING or "grows_by" in self.lake.note(table)):
                differing = self._differing_days(table, window.at, positions.get(table))
                if isinstance(differing, str):
                    return differing
                found |= _near(differing, window)
                continue
            changes = self._changes(table, positions.get(table))
            if isinstance(changes, str):
                return changes
            grows_by = GROWING.get(table) or next((note["grows_by"] for note in changes if "grows_by" in note), None)
            if grows_by is not None and changes:
                reached = int(positions[table][1])
                is_row_enough = window.is_whole and not window.names_days
                days = self._new_days(table, grows_by, window, reached, is_row_enough=is_row_enough)
            else:
                named = (note["days"] for note in changes if "days" in note)
                days = {_day_of(day, 0) for each in named for day in each}
            if days and window.is_whole and not window.names_days:
                return f"{table} has changed, which every day is made from"
            found |= _near(days, window)
        if made_at and datetime.fromisoformat(made_at) > self.as_of and _moves(job):
            return "the last run's time was ahead, by a wrong clock"  # rows were past their time, and are not
        found |= self._lapsed(job, context, made_at)
        if len(found) > _DAYS_MAX:
            return f"{len(found)} days have changed, and more than {_DAYS_MAX} are computed at once"
        return frozenset(found)

    def _new_days(
        self, table: str, seq_column: str, window: InputWindow, since: int, *, is_row_enough: bool
    ) -> set[int]:
        """The days of a table's rows past a seq. Looked up here, which is quicker than asking Spark."""
        files = self.lake.files(
            table,
            lambda file: file.may_hold(seq_column, since + 1, self.until) and _may_hold(file, window),
        )
        found: set[int] = set()
        condition = (pc.field(seq_column) > since) & (pc.field(seq_column) <= self.until)
        for name, values in window.wanted.items():
            condition &= pc.field(name).isin(list(values))
        with translate_read_errors(self.lake.folder(table)):
            if not files:
                return found
            rows = self.lake.dataset(table, files)
            for batch in rows.to_batches(columns=[window.at], filter=condition):
                if batch.num_rows and is_row_enough:
                    return {0}
                found |= set(np.unique(_day_numbers(batch.column(0))).tolist())
        return found

    def _differing_days(self, table: str, at: str, position: Sequence[Any] | None) -> set[int] | str:
        """Of a table that is made anew: the days of the rows that it has now or had then, and not both; or why nobody can tell."""
        now = self._position(table)
        if position is None or min(now[0], position[0]) < 0:
            return f"{table} was not there before"
        if list(position[2:]) != self._moved(table):
            return f"a repair made {table} anew"
        if now[0] == position[0]:
            return set()
        import duckdb  # slow to import, and few need it

        try:
            files = [self.lake.files(table, version=version) for version in (position[0], now[0])]
            if (count := sum(file.rows for found in files for file in found)) > self.compared_max:
                return f"two versions of {table} have {count} rows, and up to {self.compared_max} are compared"
            with translate_read_errors(self.lake.folder(table)), duckdb.connect() as duck:
                for name, found in zip(("before", "after"), files, strict=True):
                    duck.register(name, self.lake.dataset(table, found))
                rows: Any = duck.sql(_DIFFERING.format(at=at)).to_arrow_table()
        except LakeDamaged:
            return f"version {position[0]} of {table}, which was read last, has been cleaned up"
        return set(np.unique(_day_numbers(rows.column(0).combine_chunks())).tolist())

    def _lapsed(self, job: Job, context: JobContext, made_at: str) -> set[int]:
        """The days that rows have left, or begun to leave, since the last run because their time was over, and those that move with time."""
        if job.partitioning is None or not made_at:
            return set()
        made, now = datetime.fromisoformat(made_at), self.as_of
        spans: list[tuple[int, int]] = []
        if job.partitioning.lifetime_days is not None:
            lifetime = timedelta(days=job.partitioning.lifetime_days(context))
            spans.append((_day_of(made - lifetime, 0), _day_of(now - lifetime, 0)))
        if job.partitioning.moving_days is not None:
            moving = timedelta(days=job.partitioning.moving_days(context))
            spans.append((_day_of(made - moving, 0), _day_of(now, 0)))
        found: set[int] = set()
        for output in job.writes if spans else ():
            for file in self.lake.files(output.table):
                for low, high in spans:
                    first = _day_of(file.minimum.get("date"), low)
                    last = _day_of(file.maximum.get("date"), high)
                    found |= set(range(max(first, low), min(last, high) + 1))
        return found


def _moves(job: Job) -> bool:
    """Whether a job's rows depend on the time of the run."""
    of_days = job.partitioning
    return of_days is not None and (of_days.lifetime_days is not None or of_days.moving_days is not None)


def _may_hold(file: DataFile, window: InputWindow) -> bool:
    """Whether a file may have rows of the types and topics that matter."""
    return all(any(file.may_hold(name, value, value) for value in values) for name, values in window.wanted.items())


def _near(days: set[int], window: InputWindow) -> set[int]:
    """The days that are made from rows of these days."""
    return {near for day in days for near in range(day - window.days_after, day + window.days_before + 1)}


def _why_anew(job: Job, notes: Sequence[Note], recipe: str, *, is_again: bool) -> str:
    """Why what the job's tables hold counts for nothing; empty if it counts."""
    if is_again:
        return "it was asked for"
    for output, note in zip(job.writes, notes, strict=True):
        if not note:
            return NEVER_MADE
        if note.get("job", job.name) != job.name:
            return f"job {note['job']} made {output.table}"
        if note.get("recipe") != recipe:
            return "its settings or its columns are others than before"
    return "" if notes else "it writes no table"


def _recipe(job: Job, context: JobContext) -> str:
    """Stands for all that decides about every row alike."""
    parts = [
        sorted((name, repr(value)) for name, value in context.settings.items()),
        [(output.table, output.schema) for output in job.writes],
        None if job.partitioning is None else job.partitioning.seq_column or "date",
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _day_numbers(values: pa.Array) -> np.ndarray[Any, Any]:
    """The days that timestamps or dates lie in; nulls are left out."""
    known = values.drop_null()
    if pa.types.is_date(known.type):
        days: np.ndarray[Any, Any] = pc.cast(pc.cast(known, pa.date32()), pa.int32()).to_numpy(zero_copy_only=False)
        return days.astype(np.int64)
    micros: np.ndarray[Any, Any] = pc.cast(pc.cast(known, pa.timestamp("us", "UTC")), pa.int64()).to_numpy(
        zero_copy_only=False
    )
    found: np.ndarray[Any, Any] = np.floor_divide(micros, _DAY_US)
    return found


def _date_of(day: int) -> date:
    return _EPOCH + timedelta(days=day)


def _day_of(value: Any, otherwise: int) -> int:
    """The day of a time, a date, or a date in ISO 8601; ``otherwise`` if there is none."""
    if value is None:
        return otherwise
    if isinstance(value, datetime):
        return (
            value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)
        ).toordinal() - _EPOCH.toordinal()
    return (value if isinstance(value, date) else date.fromisoformat(str(value))).toordinal() - _EPOCH.toordinal()
