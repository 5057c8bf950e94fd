"""
Finding what of the lake is missing or cannot be read, and making bronze whole again, from the log and from silver.

What bronze lacks is told by its seqs: every record has one, and none is left out. So one look finds records whose file is gone
and lines that were quarantined, or dropped unread, and that the log now has whole. They are added, and the files that cannot
be read are taken out, in one commit; until then readers see the old version. What neither log nor silver has any more is
lost, and the quarantine says so. The tables that are made from bronze are then made anew by the pipeline itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from tidings.log.record import Record
from tidings.log.segment import decode

from .bronze import bronze_state
from .errors import LakeDamaged, SegmentMissing
from .jobs.job import Job
from .lake import Lake, stem
from .log_place import LogPlace
from .schemas import (
    BRONZE_EVENTS,
    QUARANTINE,
    SILVER_DEAD_LETTERS,
    SILVER_EVENTS,
    SILVER_GROUP_CURSORS,
    SILVER_SEGMENTS,
    SILVER_SYNC_EVENTS,
    arrow_schema,
)
from .segment_reader import read_ranges
from .settings import PipelineSettings
from .source import LogSource
from .state_files import Hints
from .table_files import DataFile, remove_action, translate_read_errors, write_file

_APP: Final = "repair"
_FROM_BRONZE: Final = frozenset(
    table.name
    for table in (SILVER_EVENTS, SILVER_SYNC_EVENTS, SILVER_GROUP_CURSORS, SILVER_DEAD_LETTERS, SILVER_SEGMENTS)
)
"""What every run can make again, from bronze or from the workspace's own files."""
_CHUNK_BYTES: Final = 64 << 20
_LINE_BYTES_MAX: Final = 64 << 20
_LOST: Final = "lost: its file in the lake is gone, and the log holds it no more"

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
    """The seq that bronze says it reaches to."""
    files: Mapping[str, Sequence[DamagedFile]]
    """By table; a table that is not named is whole."""
    logs: Mapping[str, str]
    """Tables whose own log cannot be read, and why: nothing can be committed to them."""
    missing: Sequence[Range]
    """The seqs that the readable files of bronze lack."""
    present: Seqs = field(repr=False)

    @property
    def missing_count(self) -> int:
        """How many records bronze lacks."""
        return sum(last - first + 1 for first, last in self.missing)

    @property
    def is_whole(self) -> bool:
        """Whether every file of every table can be read."""
        return not self.files and not self.logs


@dataclass(frozen=True, slots=True)
class BronzeRepair:
    """What became of bronze."""

    recovered: int = 0
    """Records that came back."""
    healed: int = 0
    """Rows of the quarantine that are no longer true."""
    lost: Sequence[Range] = ()
    """Seqs of records that only the lake had, and has no more."""

    @property
    def has_changed(self) -> bool:
        """Whether the table was changed."""
        return bool(self.recovered or self.lost)


@dataclass(frozen=True, slots=True)
class LakeRepairPlan:
    """What is made anew."""

    jobs: Sequence[Job]
    """Those that write a damaged table, in order."""
    is_silver_anew: bool
    dropped: frozenset[str]
    """Tables that nothing can be made from again: only their damaged files go."""


def plan_repair(damage: Damage, jobs: Sequence[Job]) -> LakeRepairPlan:
    """What takes away the damage, once bronze is whole."""
    damaged = frozenset(damage.files)
    chosen = [job for job in jobs if damaged & {output.table for output in job.writes}]
    made = {output.table for job in chosen for output in job.writes}
    rest = damaged - made - {BRONZE_EVENTS.name, QUARANTINE.name}
    return LakeRepairPlan(chosen, bool(rest & _FROM_BRONZE), rest - _FROM_BRONZE)


def drop_damaged(lake: Lake, damage: Damage, tables: Iterable[str], *, now_ns: int) -> None:
    """Take damaged files out of tables, so that the rest can be read."""
    for table in tables:
        gone = [each.file for each in damage.files[table]]
        lake.commit(
            table,
            lake.schema(table),
            (),
            [remove_action(file, now_ms=now_ns // 1_000_000) for file in gone],
            app=_APP,
            version=(lake.done(table, _APP) or 0) + 1,
            note={**lake.note(table), "days": None},
            is_by_day=gone[0].day is not None,
        )


def find_damage(lake: Lake, advance: Callable[[int], None] | None = None) -> Damage:
    """
    Read every file of every table.

    Args:
        lake: Where they are.
        advance: Told how many files were read so far.

    Raises:
        LakeUnreachable: The object store does not answer; that is no damage.
    """
    damaged: dict[str, list[DamagedFile]] = {}
    logs: dict[str, str] = {}
    done = 0
    for table in lake.tables():
        try:
            files = lake.files(table)
        except LakeDamaged as error:
            logs[table] = error.problem
            continue
        sizes = lake.folder(table).sizes()
        for file in files:
            if (problem := _problem(file, sizes.get(file.name))) is not None:
                damaged.setdefault(table, []).append(DamagedFile(file, problem))
            done += 1
            if advance is not None:
                advance(done)
    if not lake.exists(BRONZE_EVENTS.name) or BRONZE_EVENTS.name in logs:
        return Damage(0, damaged, logs, (), np.empty(0, np.int64))
    until = bronze_state(lake).seq
    present = _seqs(lake, {each.file.name for each in damaged.get(BRONZE_EVENTS.name, ())})
    return Damage(until, damaged, logs, _gaps(present, until), present)


def _problem(file: DataFile, size: int | None) -> str | None:
    if size is None:
        return "is missing"
    if size != file.size:
        return f"has {size} bytes instead of {file.size}"
    try:
        with (
            translate_read_errors(file.folder),
            pq.ParquetFile(file.open(), page_checksum_verification=True) as parquet,
        ):
            rows = sum(batch.num_rows for batch in parquet.iter_batches())
    except LakeDamaged as error:
        return f"cannot be read: {error.problem}"
    return None if rows == file.rows else f"has {rows} rows instead of {file.rows}"


def _seqs(lake: Lake, without: set[str]) -> Seqs:
    """The seqs of bronze's readable files, in order."""
    files = [file for file in lake.files(BRONZE_EVENTS.name) if file.name not in without]
    with translate_read_errors(lake.folder(BRONZE_EVENTS.name)):
        column = lake.dataset(BRONZE_EVENTS.name, files).to_table(["seq"])["seq"]
    found: Seqs = np.unique(column.to_numpy())
    return found


def _gaps(present: Seqs, until: int) -> list[Range]:
    """The ranges from 1 to ``until`` that are not there."""
    edges = np.concatenate(([0], present[present <= until], [until + 1]))
    at = np.flatnonzero(np.diff(edges) > 1)
    return [(int(edges[each]) + 1, int(edges[each + 1]) - 1) for each in at]


def repair_bronze(
    lake: Lake, place: LogPlace, damage: Damage, settings: PipelineSettings, *, run: str, now_ns: int
) -> BronzeRepair:
    """
    Give bronze what it lacks, and take out of it what cannot be read.

    Raises:
        LakeConflict: A run committed meanwhile; nothing was changed.
        PositionLost, SegmentMissing: The log does not hold what it says.
        LakeUnwritable
    """
    gone = [each.file for each in damage.files.get(BRONZE_EVENTS.name, ())]
    if not damage.missing:
        return BronzeRepair()
    read_version = int(lake.open(BRONZE_EVENTS.name).version())
    schema = arrow_schema(BRONZE_EVENTS.schema)
    folder = lake.folder(BRONZE_EVENTS.name)
    version = (lake.done(BRONZE_EVENTS.name, _APP) or 0) + 1
    found: list[Seqs] = []
    known = damage.present
    entries = []
    for number, part in enumerate((_from_log(place, damage, settings.task_memory_mb), _from_silver(lake, damage))):
        fresh = _noting_seqs(_not_among(part, known), found)
        with lake.writing(folder):
            entry = write_file(folder, f"{stem(_APP, version, run)}-{number}.parquet", schema, fresh)
        if entry is not None:
            entries.append(entry)
            known = np.unique(np.concatenate([known, *found]))
    recovered = sum(int(entry["rows"]) for entry in entries)
    lost = _within(_gaps(known, damage.until), gone)
    healed = _mend_quarantine(lake, place, damage, lost, run=run, now_ns=now_ns)
    if entries or gone:
        lake.commit(
            BRONZE_EVENTS.name,
            schema,
            lake.adds(entries),
            [remove_action(file, now_ms=now_ns // 1_000_000) for file in gone],
            app=_APP,
            version=version,
            note={**lake.note(BRONZE_EVENTS.name), "days": None},
            read_version=read_version,
        )
    return BronzeRepair(recovered, healed, lost)


def _from_log(place: LogPlace, damage: Damage, memory_mb: int) -> Iterator[pa.Table]:
    """What the log holds of the stretches that bronze lacks something of."""
    first, last = damage.missing[0][0], damage.missing[-1][1]
    source = LogSource(place.layout, place.disk)
    for chunk in source.pin(first - 1, Hints("", 0), until=last).chunks(_CHUNK_BYTES):
        if any(low <= chunk.until and high > chunk.since for low, high in damage.missing):
            for each in chunk.ranges:
                lines = read_ranges(place, [each], chunk.since, chunk.until)
                for table, _ in lines.tables(memory_mb=memory_mb):
                    yield table


def _from_silver(lake: Lake, damage: Damage) -> Iterator[pa.Table]:
    """What silver still has of it: the same columns, without what was erased."""
    if not lake.exists(SILVER_EVENTS.name) or SILVER_EVENTS.name in damage.logs:
        return
    bad = {each.file.name for each in damage.files.get(SILVER_EVENTS.name, ())}
    low, high = damage.missing[0][0], damage.missing[-1][1]
    files = [
        file for file in lake.files(SILVER_EVENTS.name) if file.name not in bad and file.may_hold("seq", low, high)
    ]
    held = lake.dataset(SILVER_EVENTS.name, files, arrow_schema(BRONZE_EVENTS.schema))
    with translate_read_errors(lake.folder(SILVER_EVENTS.name)):
        for batch in held.to_batches(filter=(pc.field("seq") >= low) & (pc.field("seq") <= high)):
            yield pa.Table.from_batches([batch])


def _not_among(parts: Iterable[pa.Table], known: Seqs) -> Iterator[pa.Table]:
    for part in parts:
        seqs = part["seq"].to_numpy()
        yield part.filter(pa.array(~np.isin(seqs, known, assume_unique=True)))


def _noting_seqs(parts: Iterable[pa.Table], found: list[Seqs]) -> Iterator[pa.Table]:
    for part in parts:
        found.append(part["seq"].to_numpy())
        yield part


def _within(gaps: Sequence[Range], files: Sequence[DataFile]) -> list[Range]:
    """Of the seqs that are missing, those that the files may have held."""
    found = []
    for file in files:
        low, high = file.minimum.get("seq", 1), file.maximum.get("seq", gaps[-1][1] if gaps else 0)
        found += [(max(low, first), min(high, last)) for first, last in gaps if first <= high and last >= low]
    return sorted(set(found))


def _mend_quarantine(
    lake: Lake, place: LogPlace, damage: Damage, lost: Sequence[Range], *, run: str, now_ns: int
) -> int:
    """Leave out of the quarantine what the log has whole by now, and add what is lost; how many rows were left out."""
    name, schema = QUARANTINE.name, arrow_schema(QUARANTINE.schema)
    bad = {each.file.name for each in damage.files.get(name, ())}
    files = [file for file in lake.files(name) if file.name not in bad] if lake.exists(name) else []
    with translate_read_errors(lake.folder(name)):
        before = lake.dataset(name, files, schema).to_table().to_pylist()
    epoch = str(lake.note(BRONZE_EVENTS.name)["epoch"])
    kept = [row for row in before if not _is_healed(place, epoch, row)]
    fresh = [
        {"reason": _LOST, "first_seq": first, "last_seq": last, "found_at": now_ns // 1000, "epoch": epoch}
        for first, last in lost
    ]
    if len(kept) != len(before) or fresh or bad:
        lake.write_rows(
            pa.Table.from_pylist([*kept, *fresh], schema=schema),
            name,
            QUARANTINE.schema,
            app=_APP,
            version=(lake.done(name, _APP) or 0) + 1,
            note=lake.note(name) or {"epoch": epoch, "seq": damage.until},
            run=run,
        )
    return len(before) - len(kept)


def _is_healed(place: LogPlace, epoch: str, row: Mapping[str, Any]) -> bool:
    """Whether the log now has a record where the quarantine says that there was none."""
    if row["file"] is None or row["epoch"] != epoch:
        return False
    try:
        with place.open(row["file"]) as segment:
            if row["line_bytes"] is None:
                return True  # the segment was dropped unread, and is there again
            segment.seek(row["byte_offset"])
            line, _, _ = segment.read(_LINE_BYTES_MAX).partition(b"\n")
    except SegmentMissing:
        return False
    return isinstance(decode(line), Record)
