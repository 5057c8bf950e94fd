"""
What of a job is to be made: all of it, or the pieces that rows have touched since it last ran.

The note in each commit of a job says what it was made of: of each table it read the seq reached and the *build*, a name
that changes when that table was made anew as a whole; the settings; and a *trail*, the stretches that its last commits
replaced, for the jobs that read it in turn. Where that does not add up (another build, other settings, a trail that does
not go back far enough, a run that died between two of the job's tables) all of it is made, which is always right.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import duckdb

from .jobs.job import Job, JobContext, Look, Pieces
from .lake import Lake, Note
from .lake_log import DataFile, told_of_files
from .schemas import BRONZE_EVENTS, SILVER_EVENTS, SILVER_SYNC_EVENTS
from .stretches import Stretch, joined, may_hold_any, widened

__all__ = ["Notes", "Plan", "Planner"]

FOR_EVER: Final = 1 << 60
_TRAIL_MAX: Final = 64
_PIECES_MAX: Final = 100_000
_GROWING: Final = {table.name: "seq" for table in (BRONZE_EVENTS, SILVER_EVENTS, SILVER_SYNC_EVENTS)}


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be made, and of what."""

    made: tuple[Stretch, ...] | None
    """The stretches whose rows are replaced; none of them if nothing was touched. None: all rows."""
    wanted: Mapping[str, tuple[Stretch, ...]]
    """By table, where the rows lie that are needed; a table that is not named is needed as a whole."""
    looks: Mapping[str, Look]
    note: Note
    """For the job's commits: what it is made of."""

    def wants(self, table: str, file: DataFile) -> bool:
        """Whether a file may have rows that are needed."""
        look = self.looks.get(table)
        if look is None:
            return True
        if look.types and not any(file.may_hold("type", kind, kind) for kind in look.types):
            return False
        return table not in self.wanted or may_hold_any(file, look.at, self.wanted[table])


class Notes:
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


class Planner:
    """
    Finds out what the jobs of one run have to make.

    Args:
        lake: Where the tables are.
        notes: What their commits say.
        until, as_of: What is fixed for the run.
        run: A name that no other run has.
    """

    def __init__(self, lake: Lake, notes: Notes, *, until: int, as_of: datetime, run: str) -> None:
        self._lake = lake
        self._notes = notes
        self._until = until
        self._as_of = as_of
        self._run = run

    def plan(self, job: Job, context: JobContext, *, is_again: bool) -> Plan:
        """What the job has to make to be up to date with the tables it reads."""
        looks = {} if job.pieces is None else dict(job.pieces.looks(context))
        inputs = {}
        for table in looks:
            found = self._notes.of(table)
            inputs[table] = {"build": str(found.get("build", "")), "seq": int(found.get("seq", 0))}
        recipe = _recipe(job, context)
        notes = [self._notes.of(output.table) for output in job.writes]
        made = None if is_again or job.pieces is None else self._touched(job.pieces, looks, notes, recipe)
        wanted = {} if job.pieces is None else self._wanted(job.pieces, looks, context, made)
        note: Note = {"recipe": recipe, "inputs": inputs, **self._trail(notes, made)}
        if job.pieces is not None and job.pieces.lasts_s is not None:
            note["lasts_s"] = job.pieces.lasts_s(context)
        if job.pieces is not None and job.pieces.is_by_seq:
            note["grows_by"] = job.writes[0].replaced_by[0]
        return Plan(made, wanted, looks, note)

    def _touched(
        self, pieces: Pieces, looks: Mapping[str, Look], notes: Sequence[Note], recipe: str
    ) -> tuple[Stretch, ...] | None:
        first = notes[0]
        if any(note.get("recipe") != recipe or note.get("build") != first.get("build") for note in notes):
            return None
        oldest = min(notes, key=lambda note: int(note["seq"]))
        found: list[Stretch] = []
        for table, look in looks.items():
            position = oldest["inputs"].get(table)
            stretches = None if position is None else self._changed(table, look, position, pieces)
            if stretches is None:
                return None
            found += stretches
        return joined([*found, *self._lapsed(pieces, oldest)])

    def _changed(
        self, table: str, look: Look, position: Mapping[str, Any], pieces: Pieces
    ) -> tuple[Stretch, ...] | None:
        """The stretches that changes of a table since a position touch; None for all."""
        note = self._notes.of(table)
        if str(note.get("build", "")) != position["build"]:
            return None
        since = int(position["seq"])
        if (column := note.get("grows_by", _GROWING.get(table))) is not None:
            return self._grown(table, column, look, since, pieces)
        if int(note.get("seq", 0)) == since:
            return ()
        if "trail" not in note or since < int(note["trail_from"]):
            return None
        replaced = [(low, high) for seq, stretches in note["trail"] if seq > since for low, high in stretches]
        if look.is_whole:
            return None if replaced else ()
        return widened(replaced, pieces.length_s, before=look.after_s, after=look.before_s)

    def _grown(self, table: str, column: str, look: Look, since: int, pieces: Pieces) -> tuple[Stretch, ...] | None:
        """The same for a table whose new rows are those past a seq. Looked up here, which is quicker than asking Spark."""
        if not self._lake.exists(table):
            return ()
        files = self._lake.files(
            table,
            lambda file: (
                file.may_hold(column, since + 1, self._until)
                and (not look.types or any(file.may_hold("type", kind, kind) for kind in look.types))
            ),
        )
        if not files:
            return ()
        length = pieces.length_s
        places = {
            "timestamp": f'floor(epoch_us("{look.at}") / 1000000.0 / {length})',
            "date": f'floor(epoch("{look.at}") / {length})',
        }
        is_row_enough = look.is_whole or pieces.is_by_seq
        place = "1" if is_row_enough else places[self._kind(table, look.at)]
        of_types = f"and type in ({', '.join('?' * len(look.types))})" if look.types else ""
        limit = 1 if is_row_enough else _PIECES_MAX + 1
        with told_of_files(self._lake.path(table)), duckdb.connect(config={"threads": 1}) as duck:
            rows = duck.execute(
                f'select distinct cast({place} as bigint) as place from read_parquet(?) where "{column}" > ? {of_types}'
                f" limit {limit}",
                [[str(file.path) for file in files], since, *look.types],
            ).fetchall()
        if pieces.is_by_seq:
            return ((since + 1, self._until + 1),) if rows else ()
        if len(rows) > _PIECES_MAX or (look.is_whole and rows):
            return None
        touched = [(row[0] * length, row[0] * length + length) for row in rows if row[0] is not None]
        return widened(touched, length, before=look.after_s, after=look.before_s)

    def _kind(self, table: str, column: str) -> str:
        import pyarrow as pa  # type: ignore[import-untyped]

        return "date" if pa.types.is_date(self._lake.schema(table).field(column).type) else "timestamp"

    def _lapsed(self, pieces: Pieces, oldest: Note) -> tuple[Stretch, ...]:
        """The pieces that rows have left, or begun to leave, since the last run because their time was over."""
        lasts_s = oldest.get("lasts_s")
        if lasts_s is None:
            return ()
        before = datetime.fromisoformat(str(oldest["as_of"])).timestamp()
        low, high = math.floor(before - lasts_s), math.floor(self._as_of.timestamp() - lasts_s) + 1
        return widened([(low, high)], pieces.length_s)

    def _wanted(
        self, pieces: Pieces, looks: Mapping[str, Look], context: JobContext, made: tuple[Stretch, ...] | None
    ) -> dict[str, tuple[Stretch, ...]]:
        if made is None:
            if pieces.lasts_s is None:
                return {}
            made = ((math.floor(self._as_of.timestamp() - pieces.lasts_s(context)), FOR_EVER),)
        return {
            table: widened(made, 1, before=look.before_s, after=look.after_s)
            for table, look in looks.items()
            if not look.is_whole
        }

    def _trail(self, notes: Sequence[Note], made: tuple[Stretch, ...] | None) -> Note:
        if made is None:
            return {"build": self._run, "trail": [], "trail_from": self._until}
        oldest = min(notes, key=lambda note: int(note["seq"]))
        # A run that died between two tables left one of them ahead: the trail of the other one is continued for both.
        trail = [*oldest["trail"], [self._until, [list(stretch) for stretch in made]]]
        dropped = trail[:-_TRAIL_MAX]
        trail_from = dropped[-1][0] if dropped else oldest["trail_from"]
        return {"build": oldest["build"], "trail": trail[-_TRAIL_MAX:], "trail_from": trail_from}


def _recipe(job: Job, context: JobContext) -> str:
    """Stands for all that decides about every piece alike."""
    told = [
        sorted((name, repr(value)) for name, value in context.settings.items()),
        [(output.table, output.schema, output.replaced_by) for output in job.writes],
        None if job.pieces is None else job.pieces.length_s,
    ]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]
