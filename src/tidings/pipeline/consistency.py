"""
Finding what is wrong with tables whose files are all whole: rows that are there more than once, a note that is older than the last
step of its application, and events that bronze and silver disagree on. Earlier versions made all three.

Two compactions of one version, which delta-rs lets pass, put every row of the compacted files into the table twice. Housekeeping that
repeated a note which it had read too early took back the note of a run. Then the steps of that run's application no longer follow one
another, and every run after it is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import duckdb
import numpy as np

from .jobs.job import Job
from .lake import Lake
from .schemas import (
    BRONZE_EVENTS,
    CORE_TABLES,
    QUARANTINE,
    SILVER_DEAD_LETTERS,
    SILVER_EVENTS,
    SILVER_GROUP_CURSORS,
    SILVER_GROUP_POSITIONS,
    SILVER_SEGMENTS,
    SILVER_SYNC_EVENTS,
)
from .storage_errors import translate_read_errors
from .table_files import DataFile

MEMORY_MB: Final = 1024
_SEQ_MAX: Final = (1 << 63) - 1
_APPS: Final = {table.name: table.name.partition(".")[0] for table in CORE_TABLES if table.name != QUARANTINE.name}
"""Whose count the notes of a table carry."""
_KEYS: Final = {
    BRONZE_EVENTS.name: "seq",
    QUARANTINE.name: "file, byte_offset, reason, epoch, first_seq, last_seq",
    SILVER_EVENTS.name: "seq",
    SILVER_SYNC_EVENTS.name: "seq, partition",
    SILVER_GROUP_CURSORS.name: 'topic, "group"',
    SILVER_GROUP_POSITIONS.name: 'topic, "group", seen_at',
    SILVER_DEAD_LETTERS.name: "*",
    SILVER_SEGMENTS.name: "topic, space_id, segment",
}
"""What no two rows of a table have in common."""
IS_WHOLE: Final = "(payload is not null or sealed is not null)"
_SAYS: Final = "event_id, space_id, topic, hash(type, partitions, payload) as said, true as is_there"


@dataclass(frozen=True, slots=True)
class Behind:
    """A table whose note is older than the last step of the application that fills it."""

    step: int
    """What the application has counted to."""
    noted: int
    """The step that the note is of."""
    seq: int
    """The highest seq of the table's rows, or what the note says if that is more."""

    def describe(self) -> str:
        """Say what is the matter."""
        return f"its note is of step {self.noted}, and the last step was {self.step}"


def find_behind(lake: Lake, tables: Iterable[str]) -> dict[str, Behind]:
    """Find the tables of the pipeline's core whose note is older than their last step."""
    found = {}
    for table in tables:
        if (app := _APPS.get(table)) is None:
            continue
        note, step = lake.note(table), lake.done(table, app)
        if step is not None and step > (noted := int(note.get("batch", 0))) and "batch" in note:
            seq = max([int(note.get("seq", 0)), *(file.maximum.get("seq") or 0 for file in lake.files(table))])
            found[table] = Behind(step, noted, seq)
    return found


def find_repeated(lake: Lake, tables: Iterable[str]) -> dict[str, int]:
    """Find rows that tables of the pipeline's core have more than once: by table, how many too many."""
    found = {}
    for table in tables:
        if (key := _KEYS.get(table)) is None or not lake.files(table):
            continue
        with translate_read_errors(lake.folder(table)), _connected() as duck:
            duck.register("rows", lake.dataset(table))
            ((count,),) = duck.execute(
                f"select count(*) - (select count(*) from (select distinct {key} from rows)) from rows"
            ).fetchall()
        if count:
            found[table] = int(count)
    return found


def find_repeating_jobs(lake: Lake, jobs: Sequence[Job], tables: Iterable[str]) -> dict[str, str]:
    """Find tables of jobs whose rows are there twice, or are ahead of what their note says: by table, how that is known."""
    found = {}
    columns = {
        output.table: job.partitioning.seq_column
        for job in jobs
        if job.partitioning is not None and job.partitioning.seq_column
        for output in job.writes
    }
    for table in tables:
        if table in _APPS or table == QUARANTINE.name:
            continue
        if _is_compacted_twice(lake, table):
            found[table] = "its files were put together twice at once"
        elif (column := columns.get(table)) is not None:
            seq = int(lake.note(table).get("seq", 0))
            if any((file.maximum.get(column) or 0) > seq for file in lake.files(table)):
                found[table] = f"it has rows past seq {seq}, which its note names as the last"
    return found


def _is_compacted_twice(lake: Lake, table: str) -> bool:
    """Whether delta-rs let two compactions of one version pass each other, as far as the table's log goes back."""
    versions = [
        (int(commit["version"]), int(commit["readVersion"]))
        for commit in lake.commits(table)
        if commit.get("operation") == "OPTIMIZE" and commit.get("readVersion") is not None
    ]
    return any(read < other < version for version, read in versions for other, _ in versions)


def count_disagreements(lake: Lake, until: int | None = None) -> int:
    """Count the events up to a seq, or all, that bronze and silver disagree on; 0 without silver."""
    if not (lake.exists(BRONZE_EVENTS.name) and lake.exists(SILVER_EVENTS.name)):
        return 0
    with translate_read_errors(lake.tables_folder), _connected() as duck:
        duck.register("bronze", lake.dataset(BRONZE_EVENTS.name))
        duck.register("silver", lake.dataset(SILVER_EVENTS.name))
        ((missing,),) = duck.execute(
            f"select count(*) from (select distinct {_SAYS} from bronze where {IS_WHOLE} and seq <= ?) b"
            f" full join (select distinct {_SAYS} from silver) s using (event_id, space_id, topic, said)"
            " where b.is_there is null or s.is_there is null",
            [_SEQ_MAX if until is None else until],
        ).fetchall()
    return int(missing)


def files_that_repeat(lake: Lake, table: str) -> list[DataFile]:
    """Choose the files that have a row which is also elsewhere in the table, or twice in the file."""
    files = lake.files(table)
    seqs = [_seqs_in(lake, table, file) for file in files]
    every, counts = np.unique(np.concatenate(seqs), return_counts=True) if seqs else (np.empty(0), np.empty(0))
    repeated = every[counts > 1]
    return [file for file, those in zip(files, seqs, strict=True) if np.isin(those, repeated).any()]


def _seqs_in(lake: Lake, table: str, file: DataFile) -> np.ndarray[Any, Any]:
    with translate_read_errors(lake.folder(table)):
        column = lake.dataset(table, [file]).to_table(["seq"])["seq"]
    found: np.ndarray[Any, Any] = column.to_numpy()
    return found


def mended_note(note: Mapping[str, Any], behind: Behind) -> dict[str, Any]:
    """Make the note with which the steps of a table follow one another again; what is not known to be there is taken once more."""
    return {**note, "batch": behind.step, "seq": behind.seq} | ({"digest": ""} if "digest" in note else {})


def _connected() -> duckdb.DuckDBPyConnection:
    return duckdb.connect(config={"memory_limit": f"{MEMORY_MB}MB"})
