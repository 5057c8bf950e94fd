"""
Finding what of the lake is missing or cannot be read; ``repair`` makes it whole again.

What bronze lacks is told by its seqs: every record has one, and none is left out. So one look finds records whose file is gone
and lines that were quarantined, or dropped unread, and that the log may have whole by now.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from .bronze import bronze_state, ends_early
from .consistency import Behind, count_disagreements, find_behind, find_repeated, find_repeating_jobs
from .errors import LakeDamaged
from .jobs.job import Job
from .lake import Lake, LakeMeta
from .schemas import BRONZE_EVENTS, QUARANTINE, SILVER_EVENTS, arrow_schema
from .state_files import StateFile, archived_seq
from .storage_errors import translate_read_errors
from .table_files import DataFile, entry_of
from .table_log import Note

Range = tuple[int, int]
"""Two seqs, both included."""
Seqs = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class DamagedFile:
    """A file of a table that cannot be read."""

    file: DataFile
    problem: str


@dataclass(frozen=True, slots=True)
class Damage:
    """What is the matter with a lake."""

    until: int
    """The seq that bronze says, or is known, to reach to."""
    files: Mapping[str, Sequence[DamagedFile]]
    """By table; a table that is not named is whole."""
    logs: Mapping[str, str]
    """Tables whose own log cannot be read or lacks commits, and why we know."""
    missing: Sequence[Range]
    """The seqs that the readable files of bronze lack."""
    present: Seqs = field(repr=False)
    repeated: Mapping[str, int] = field(default_factory=dict)
    """How many rows are there once too often, by table of the pipeline's core."""
    behind: Mapping[str, Behind] = field(default_factory=dict)
    """The tables of the core whose note is older than their last step."""
    wrong_jobs: Mapping[str, str] = field(default_factory=dict)
    """Tables of jobs whose rows are there twice, or are not what their note says, and how we know."""
    unfilled: int = 0
    """How many records of bronze silver has not taken in."""
    disagreements: int = 0
    """Of how many of the others bronze and silver do not say the same."""

    @property
    def missing_count(self) -> int:
        """How many records bronze lacks."""
        return sum(last - first + 1 for first, last in self.missing)

    @property
    def is_whole(self) -> bool:
        """Whether every table can be opened, every file of it read, and what is in them fits together."""
        return not (self.files or self.logs or self.repeated or self.behind or self.wrong_jobs or self.disagreements)

    @property
    def is_quarantine_hurt(self) -> bool:
        """Whether rows of the quarantine are lost: the log is then looked through for them."""
        return QUARANTINE.name in self.files.keys() | self.logs.keys()

    def readable(self, lake: Lake, table: str) -> list[DataFile]:
        """The files of a table that are whole; of one without a log that can be read, all that lie in its folder."""
        if table in self.logs:
            return loose_files(lake, table)
        bad = {each.file.name for each in self.files.get(table, ())}
        return [file for file in lake.files(table) if file.name not in bad] if lake.exists(table) else []


# Finding it


def find_meta(lake: Lake, epoch: str) -> LakeMeta | None:
    """
    What ``lake.json`` has to say if it is missing or cannot be read; ``None`` if it is whole, or there is no lake.

    Args:
        lake: Whose.
        epoch: The log's: of tables of several epochs those of this one are meant, otherwise the last that were written.

    Raises:
        LakeDamaged: Neither a table nor another file says which epoch the lake is of.
    """
    try:
        if lake.meta() is not None:
            return None
    except LakeDamaged as error:
        damaged = error
    else:
        damaged = LakeDamaged(lake.storage.uri("lake.json"), "is missing")
    with translate_read_errors(lake.storage):
        folders = [name for name in lake.storage.folders() if name.partition("-")[0] == "tables"]
    seen = {folder: _as_it_lies(lake, folder) for folder in folders}
    if not any(each.folders() for each in seen.values()):
        return None
    found = []
    for folder, each in seen.items():
        notes = [note for table in (BRONZE_EVENTS, SILVER_EVENTS) if (note := note_if_readable(each, table.name))]
        epochs = [str(note["epoch"]) for note in notes]
        epochs += [its for its in _epochs_of_state_files(lake) if folder in ("tables", f"tables-{its}")]
        if epochs:
            seq = max((int(note["seq"]) for note in notes), default=0)
            found.append((epochs[0] == epoch, seq, LakeMeta(1, epochs[0], folder, dict(each.moved))))
    if not found:
        damaged.hint = "put the file back from a backup; or move the lake away, and a run makes another from the log"
        raise damaged
    return max(found, key=lambda each: each[:2])[2]


def _as_it_lies(lake: Lake, folder: str) -> Lake:
    """The lake with its tables in this folder, and each in the last folder that it was moved to."""
    found = lake.seen_as(LakeMeta(1, "", folder))
    moved: dict[str, str] = {}
    for layer in found.tables_folder.folders():
        for name, number in sorted(found.numbered(layer)):
            there = {f"{layer}.{name}": f"{name}-{number}"}
            if lake.seen_as(LakeMeta(1, "", folder, there)).exists(f"{layer}.{name}"):
                moved |= there
    return lake.seen_as(LakeMeta(1, "", folder, moved))


def note_if_readable(lake: Lake, table: str) -> Note:
    """What a table's last commit says; nothing if its log cannot be read."""
    try:
        return lake.note(table)
    except LakeDamaged:
        return {}


def _epochs_of_state_files(lake: Lake) -> Iterator[str]:
    for name in lake.storage.sizes():
        if name in ("archived.json", "positions.json", "jobs.json"):
            try:
                yield msgspec.json.decode((lake.storage.read(name) or b"").partition(b"\n")[0], type=StateFile).epoch
            except msgspec.DecodeError:
                continue


def find_damaged_logs(lake: Lake) -> tuple[int, dict[str, str]]:
    """The seq that bronze reaches to, or is known to have reached to; and the tables whose own log is damaged, and why we know."""
    logs: dict[str, str] = {}
    seqs: dict[str, int] = {}
    # A run may commit meanwhile: what follows from another thing is looked at before it, and bronze last.
    archived = archived_seq(lake.storage, lake.epoch)
    for table in sorted(lake.folders(), key=lambda table: table == BRONZE_EVENTS.name):
        try:
            if lake.exists(table):
                lake.files(table)
                seqs[table] = int(lake.note(table).get("seq", 0))
            elif _data_files(lake.folder(table).sizes()):
                logs[table] = "its log is gone"
        except LakeDamaged as error:
            logs[table] = error.problem
    name = BRONZE_EVENTS.name
    reached = seqs.get(name, 0)
    if name in seqs and (behind := find_behind(lake, [name]).get(name)) is not None:
        reached = behind.seq  # no commit is lost: its note was taken back
    until = max(reached, seqs.get(SILVER_EVENTS.name, 0), archived)
    if until > reached:
        logs.setdefault(name, ends_early(reached, until))
    return until, logs


def find_damage(lake: Lake, advance: Callable[[int], None] | None = None, jobs: Sequence[Job] = ()) -> Damage:
    """
    Read every file of every table.

    Args:
        lake: Where they are.
        advance: Told how many files were read so far.
        jobs: Those that may have made tables.

    Raises:
        LakeUnreachable: The object store does not answer; that is no damage.
    """
    damaged: dict[str, list[DamagedFile]] = {}
    done = 0
    until, logs = find_damaged_logs(lake)
    for table in lake.folders():
        if table in logs or not lake.exists(table):
            continue
        files = lake.files(table)  # before the folder is listed, as a run may commit meanwhile
        sizes = lake.folder(table).sizes()
        for file in files:
            if (problem := _problem(file, sizes.get(file.name))) is not None:
                damaged.setdefault(table, []).append(DamagedFile(file, problem))
            done += 1
            if advance is not None:
                advance(done)
    name = BRONZE_EVENTS.name
    found = Damage(until, damaged, logs, (), np.empty(0, np.int64))
    present = seqs_of(lake, found.readable(lake, name))
    until = until or int(max(present, default=0))
    whole = [table for table in lake.folders() if table not in logs and table not in damaged and lake.exists(table)]
    unfilled = disagreements = 0
    missing = gaps_in(present, until)
    if name in whole and SILVER_EVENTS.name in whole:
        filled = int(lake.note(SILVER_EVENTS.name).get("seq", 0))
        unfilled = int(np.count_nonzero((present > filled) & (present <= until)))
        disagreements = 0 if missing else count_disagreements(lake, filled)
    return Damage(
        until,
        damaged,
        logs,
        missing,
        present[present <= until],
        repeated=find_repeated(lake, whole),
        behind=find_behind(lake, whole),
        wrong_jobs=find_repeating_jobs(lake, jobs, whole),
        unfilled=unfilled,
        disagreements=disagreements,
    )


def _data_files(sizes: Iterable[str]) -> list[str]:
    return sorted(name for name in sizes if name.endswith(".parquet") and not name.startswith("_delta_log/"))


def loose_files(lake: Lake, table: str) -> list[DataFile]:
    """The files in a table's folder that can be read, whatever its log says; those with the most rows first."""
    folder = lake.folder(table)
    found = []
    for name in _data_files(sizes := folder.sizes()):
        try:
            with translate_read_errors(folder):
                rows = int(entry_of(folder, name)["rows"])
        except LakeDamaged:
            continue
        file = DataFile(folder, name, sizes[name], rows, {}, {})
        if _problem(file, file.size) is None:
            found.append(file)
    return sorted(found, key=lambda file: -file.rows)


def check_held(lake: Lake, epoch: str, seq: int) -> None:
    """
    Make sure that bronze holds what it is known to have held: its log reaches that far, and its files, which are not read, are there.

    Raises:
        LakeDamaged: It does not.
    """
    name = BRONZE_EVENTS.name
    meta = lake.known_meta()
    reached = bronze_state(lake).seq if meta is not None and meta.epoch == epoch else 0
    if reached < seq:
        raise LakeDamaged(str(lake.folder(name)), ends_early(reached, seq))
    files = lake.files(name)  # first: what a run commits after that is in the folder, and is not asked for
    sizes = lake.folder(name).sizes()
    for file in files:
        if (problem := _size_problem(file, sizes.get(file.name))) is not None:
            raise LakeDamaged(file.uri, problem)


def _size_problem(file: DataFile, size: int | None) -> str | None:
    if size is None:
        return "is missing"
    return None if size == file.size else f"has {size} bytes instead of {file.size}"


def _problem(file: DataFile, size: int | None) -> str | None:
    if (problem := _size_problem(file, size)) is not None:
        return problem
    try:
        with (
            translate_read_errors(file.folder),
            pq.ParquetFile(file.open(), page_checksum_verification=True) as parquet,
        ):
            rows = sum(batch.num_rows for batch in parquet.iter_batches())
    except LakeDamaged as error:
        return f"cannot be read: {error.problem}"
    return None if rows == file.rows else f"has {rows} rows instead of {file.rows}"


def seqs_of(lake: Lake, files: Sequence[DataFile], table: str = BRONZE_EVENTS.name) -> Seqs:
    """The seqs of files of bronze or of silver's events, in order."""
    if not files:
        return np.empty(0, np.int64)
    with translate_read_errors(files[0].folder):
        column = lake.dataset(table, files, arrow_schema(BRONZE_EVENTS.schema)).to_table(["seq"])["seq"]
    found: Seqs = np.unique(column.drop_null().to_numpy())
    return found


def gaps_in(present: Seqs, until: int) -> list[Range]:
    """The ranges from 1 to ``until`` that are not there."""
    edges = np.concatenate(([0], present[present <= until], [until + 1]))
    at = np.flatnonzero(np.diff(edges) > 1)
    return [(int(edges[each]) + 1, int(edges[each + 1]) - 1) for each in at]
