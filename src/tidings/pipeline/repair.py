"""
Making what ``damage`` finds missing or unreadable in the lake whole again, from the log and from what else the lake has.

Records that bronze lacks are added, and the files that cannot be read are taken out, in one commit; until then readers see the
old version. What neither log nor silver has any more is
lost, and the quarantine says so. What silver then lacks of bronze is told by seqs too. All other tables are made anew by the
pipeline itself.

A table whose own log cannot be read is begun in another folder, which ``lake.json`` names once it is whole. Bronze keeps what
its files hold, for retention may have dropped it from the log: of rows that are in several of them, because files were put
together or rewritten, one is taken, and an erased one rather than one that still says something.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import duckdb
import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]

from tidings.log.record import Record
from tidings.log.segment import decode

from .bronze_task import quarantine_row
from .consistency import files_that_repeat, mended_note
from .damage import Damage, Range, Seqs, find_damage, find_meta, gaps_in, loose_files, note_if_readable, seqs_of
from .errors import SegmentMissing
from .jobs.job import Job
from .lake import Lake, stem
from .line_conversion import BRONZE_ENCODING
from .log_place import LogPlace
from .schemas import (
    BRONZE_EVENTS,
    QUARANTINE,
    SILVER_EVENTS,
    SILVER_GROUP_POSITIONS,
    SILVER_SYNC_EVENTS,
    arrow_schema,
)
from .segment_reader import MisplacedLine, read_ranges
from .settings import PipelineSettings
from .silver import FROM_THE_BEGINNING
from .source import LogSource
from .state_files import Hints
from .status import JobStates
from .storage import Storage
from .storage_errors import translate_read_errors, translate_write_errors
from .table_files import DataFile, remove_action, write_file

_APP: Final = "repair"
_MENDED: Final = frozenset(table.name for table in (BRONZE_EVENTS, QUARANTINE, SILVER_EVENTS))
"""What is made whole here."""
_CHUNK_BYTES: Final = 64 << 20
_LINE_BYTES_MAX: Final = 64 << 20
_LOST: Final = "lost: its file in the lake is gone, and the log holds it no more"


@dataclass(frozen=True, slots=True)
class BronzeRepair:
    """What became of bronze."""

    recovered: int = 0
    """Records that came back from the log or from silver."""
    healed: int = 0
    """Rows of the quarantine that are no longer true."""
    lost: Sequence[Range] = ()
    """Seqs of records that only the lake had, and has no more."""


class LakeRepair:
    """
    A repair of a lake: first ``look``, then perhaps ``mend``; what is left is a run of the pipeline over ``jobs``.

    Args:
        lake: What is repaired.
        place: The log.
        settings: How much memory may be used.
        jobs: All jobs there are, in order.
        run: A name that no other run has.
        now_ns: The time.
    """

    def __init__(
        self, lake: Lake, place: LogPlace, settings: PipelineSettings, jobs: Sequence[Job], *, run: str, now_ns: int
    ) -> None:
        self._lake = lake
        self._place = place
        self._settings = settings
        self._run = run
        self._now_ns = now_ns
        self.jobs = jobs
        """Those that write a damaged table: to be done again."""
        self.silver_anew: frozenset[str] = frozenset()
        """Tables that a run has to fill from the beginning."""
        self._kept: frozenset[str] = frozenset()
        """Tables that nothing can be made from again: they keep what can be read of them."""
        self.is_meta_made = False
        """Whether ``lake.json`` has to be written anew."""
        self.damage = Damage(0, {}, {}, (), np.empty(0, np.int64))
        self.done = BronzeRepair()
        self.set_aside: list[str] = []
        """The folders of damaged tables that begin anew elsewhere."""

    def look(self, advance: Callable[[int], None] | None = None) -> None:
        """
        Find the damage, and what takes it away; nothing is changed. ``advance`` is told how many files were read so far.

        Raises:
            LakeUnreachable: The object store does not answer; that is no damage.
            LakeDamaged: Nothing says which epoch the lake is of.
        """
        meta = find_meta(self._lake, self._place.layout.read_meta(self._place.disk).epoch)
        if meta is not None:
            self.is_meta_made = True
            self._lake = self._lake.seen_as(meta)
        self.damage = damage = find_damage(self._lake, advance, self.jobs)
        damaged = damage.files.keys() | damage.logs.keys()
        wrong = damaged | damage.wrong_jobs.keys()
        self.jobs = [job for job in self.jobs if wrong & {output.table for output in job.writes}]
        made = {output.table for job in self.jobs for output in job.writes}
        self.silver_anew = frozenset(damaged) & FROM_THE_BEGINNING - ({SILVER_EVENTS.name} - damage.logs.keys())
        self.silver_anew |= damage.repeated.keys() & FROM_THE_BEGINNING
        if damage.disagreements:
            self.silver_anew |= {SILVER_EVENTS.name}
        if SILVER_EVENTS.name in self.silver_anew:
            self.silver_anew |= {SILVER_SYNC_EVENTS.name}
        self._kept = frozenset(damaged - made - self.silver_anew - _MENDED)

    def mend(self) -> None:
        """
        Make bronze and its quarantine, silver's events and ``lake.json`` whole, and room for what is made anew.

        Raises:
            LakeConflict: A run committed meanwhile; run it again.
            PositionLost, SegmentMissing: The log does not hold what it says.
            LakeUnwritable
        """
        if self.is_meta_made:
            self._lake.save_meta()
            self._lake = Lake(self._lake.storage, self._lake.clock)
        lake, damage = self._lake, self.damage
        self.set_aside = [str(lake.folder(table)) for table in damage.logs]
        self.done = repair_bronze(lake, self._place, damage, self._settings, run=self._run, now_ns=self._now_ns)
        repair_silver_events(lake, damage, self.done, self._settings, run=self._run, now_ns=self._now_ns)
        if (self.done.healed or self.done.lost) and lake.exists(SILVER_SYNC_EVENTS.name):
            self.silver_anew |= {SILVER_SYNC_EVENTS.name}
        make_room(lake, damage, self._kept, run=self._run, now_ns=self._now_ns)
        self._mend_notes(lake)
        if not damage.is_whole:
            JobStates(lake.storage, lake.epoch).reached(0)  # whatever a run was asked for, something is left to do

    @property
    def needs_run(self) -> bool:
        """Whether a run of the pipeline over ``jobs`` has to follow."""
        return bool(self.jobs or self.silver_anew or self.damage.unfilled)

    def _mend_notes(self, lake: Lake) -> None:
        """Have the steps of tables follow one another again, and the positions of groups be there once."""
        for table, behind in self.damage.behind.items():
            if table == BRONZE_EVENTS.name:
                continue  # done with its rows
            version, note = lake.standing(table)
            lake.commit(
                table,
                lake.schema(table),
                (),
                app=_APP,
                version=(lake.done(table, _APP) or 0) + 1,
                note=mended_note(note, behind),
                read_version=version,
            )
        name = SILVER_GROUP_POSITIONS.name
        if name in self.damage.repeated:
            ddl = SILVER_GROUP_POSITIONS.schema
            rows, version = _distinct(lake, name, lake.files(name), arrow_schema(ddl)), lake.done(name, _APP) or 0
            lake.write_rows(rows, name, ddl, app=_APP, version=version + 1, note=lake.note(name), run=self._run)


# Bronze and its quarantine


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
    name, schema = BRONZE_EVENTS.name, arrow_schema(BRONZE_EVENTS.schema)
    is_moved = name in damage.logs
    is_mended = name in damage.repeated or name in damage.behind or QUARANTINE.name in damage.repeated
    if not damage.missing and not is_moved and not damage.is_quarantine_hurt and not is_mended:
        return BronzeRepair()
    gone = [] if is_moved else [each.file for each in damage.files.get(name, ())]
    target = lake.moving(name) if is_moved else lake
    if is_moved:
        read_version, note = None, note_if_readable(lake, name)
    else:
        read_version, note = lake.standing(name)
    note = note or {"epoch": lake.epoch, "batch": 1}
    if (behind := damage.behind.get(name)) is not None:
        note = mended_note(note, behind)
    version = (target.done(name, _APP) or 0) + 1
    folder = target.folder(name)
    entries = []
    if is_moved:
        entries = list(_once(lake, folder, loose_files(lake, name), damage.until, stem(_APP, version, run)))
    elif name in damage.repeated:
        repeating = [file for file in files_that_repeat(lake, name) if file not in gone]
        entries = list(_once(lake, folder, repeating, damage.until, stem(_APP, version, run)))
        gone += repeating
    kept = len(entries)
    dropped: list[Range] = []
    bad: list[MisplacedLine] = []
    found: list[Seqs] = []
    known = damage.present
    sources = (_from_log(place, damage, settings.task_memory_mb, dropped, bad), _from_silver(lake, damage))
    for number, part in enumerate(sources):
        fresh = _notingseqs_of(_not_among(part, known), found)
        with translate_write_errors(folder):
            entry = write_file(folder, f"{stem(_APP, version, run)}-{number}.parquet", schema, fresh)
        if entry is not None:
            entries.append(entry)
            known = np.unique(np.concatenate([known, *found]))
    hurt = [each.file for each in damage.files.get(name, ())] if not is_moved else []
    bounds = [(file.minimum.get("seq", 1), file.maximum.get("seq", damage.until)) for file in hurt]
    bounds += dropped if is_moved or damage.is_quarantine_hurt else []
    lost = _within(gaps_in(known, damage.until), bounds)
    if QUARANTINE.name in damage.logs:
        target = target.moving(QUARANTINE.name)
    again = [quarantine_row(each, lake.epoch, settings.quarantine_line_bytes_max, now_ns // 1000) for each in bad]
    lost, healed = _mend_quarantine(lake, target, place, damage, lost, again, run=run, now_ns=now_ns)
    if entries or gone or is_moved or behind is not None:
        target.commit(
            name,
            schema,
            target.adds(entries),
            [remove_action(file, now_ms=now_ns // 1_000_000) for file in gone],
            app=_APP,
            version=version,
            note={**note, "seq": damage.until, "days": None},
            read_version=read_version,
        )
    if target is not lake:
        target.save_meta()
        lake.meta()
    return BronzeRepair(sum(int(entry["rows"]) for entry in entries[kept:]), healed, lost)


def _once(lake: Lake, folder: Storage, files: Sequence[DataFile], until: int, name: str) -> Iterator[dict[str, Any]]:
    """Write files to a folder of bronze that hold each record up to a seq once that these files hold; their entries."""
    table, schema = BRONZE_EVENTS.name, arrow_schema(BRONZE_EVENTS.schema)
    gone = pc.field("payload").is_null() & pc.field("sealed").is_null()
    with translate_read_errors(lake.folder(table)):
        rows = lake.dataset(table, files, schema).to_table(["seq"], filter=gone) if files else None
    erased: Seqs = np.unique(rows["seq"].to_numpy()) if rows is not None else np.empty(0, np.int64)
    known: Seqs = np.empty(0, np.int64)
    for number, file in enumerate(files):
        kept: list[Seqs] = []

        def chosen(file: DataFile = file, kept: list[Seqs] = kept, known: Seqs = known) -> Iterator[pa.Table]:
            for batch in lake.dataset(table, [file], schema).to_batches():
                part = pa.Table.from_batches([batch])
                seqs = part["seq"].to_numpy()
                says = pc.or_(pc.is_valid(part["payload"]), pc.is_valid(part["sealed"])).to_numpy()
                wanted = (seqs <= until) & ~np.isin(seqs, known) & ~(says & np.isin(seqs, erased))
                wanted &= ~np.isin(seqs, np.concatenate(kept)) if kept else True
                first = np.zeros(len(seqs), dtype=bool)
                first[np.unique(np.where(wanted, seqs, -1), return_index=True)[1]] = True  # a file may repeat itself
                wanted &= first
                kept.append(seqs[wanted])
                yield part.filter(pa.array(wanted))

        with translate_write_errors(folder):
            entry = write_file(folder, f"{name}-{number}-kept.parquet", schema, chosen(), **BRONZE_ENCODING)
        if entry is not None:
            known = np.unique(np.concatenate([known, *kept]))
            yield entry


def _from_log(
    place: LogPlace, damage: Damage, memory_mb: int, dropped: list[Range], bad: list[MisplacedLine]
) -> Iterator[pa.Table]:
    """
    What the log holds of the stretches that bronze lacks something of, or of all if the quarantine lacks something; ``dropped`` gets
    the ranges that retention took, and ``bad`` the lines that are no records.
    """
    missing = [(1, damage.until)] if damage.is_quarantine_hurt else damage.missing
    if not missing:
        return
    source = LogSource(place.layout, place.disk)
    for chunk in source.pin(missing[0][0] - 1, Hints("", 0), until=missing[-1][1]).chunks(_CHUNK_BYTES):
        dropped += [(gap.first_seq, gap.last_seq) for gap in chunk.gaps]
        if any(low <= chunk.until and high > chunk.since for low, high in missing):
            for each in chunk.ranges:
                lines = read_ranges(place, [each], chunk.since, chunk.until)
                bad += lines.damaged
                for table, found in lines.tables(memory_mb=memory_mb):
                    bad += found
                    yield table


def _from_silver(lake: Lake, damage: Damage) -> Iterator[pa.Table]:
    """What silver still has of it: the same columns, without what was erased."""
    if not damage.missing:
        return
    low, high = damage.missing[0][0], damage.missing[-1][1]
    files = [file for file in damage.readable(lake, SILVER_EVENTS.name) if file.may_hold("seq", low, high)]
    held = lake.dataset(SILVER_EVENTS.name, files, arrow_schema(BRONZE_EVENTS.schema))
    known: Seqs = np.empty(0, np.int64)
    with translate_read_errors(lake.folder(SILVER_EVENTS.name)):
        for batch in held.to_batches(filter=(pc.field("seq") >= low) & (pc.field("seq") <= high)):
            part = pa.Table.from_batches([batch])
            yield from _not_among([part], known)
            known = np.union1d(known, part["seq"].to_numpy())


def _not_among(parts: Iterable[pa.Table], known: Seqs) -> Iterator[pa.Table]:
    for part in parts:
        seqs = part["seq"].to_numpy()
        yield part.filter(pa.array(~np.isin(seqs, known, assume_unique=True)))


def _notingseqs_of(parts: Iterable[pa.Table], found: list[Seqs]) -> Iterator[pa.Table]:
    for part in parts:
        found.append(part["seq"].to_numpy())
        yield part


def _within(gaps: Sequence[Range], bounds: Iterable[Range]) -> list[Range]:
    """Of the seqs that are missing, those that lie within bounds."""
    return [
        (max(low, first), min(high, last))
        for low, high in _merged(bounds)
        for first, last in gaps
        if first <= high and last >= low
    ]


def _merged(ranges: Iterable[Range]) -> list[Range]:
    """The same seqs in ranges that are apart, in order."""
    found: list[Range] = []
    for low, high in sorted(ranges):
        if found and low <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(found[-1][1], high))
        else:
            found.append((low, high))
    return found


def _mend_quarantine(
    lake: Lake,
    target: Lake,
    place: LogPlace,
    damage: Damage,
    lost: Sequence[Range],
    again: Sequence[Mapping[str, Any]],
    *,
    run: str,
    now_ns: int,
) -> tuple[list[Range], int]:
    """
    Leave out of the quarantine what the log has whole by now, and add what is lost and what was met ``again``; what is newly lost,
    and how many rows were left out.
    """
    name, schema = QUARANTINE.name, arrow_schema(QUARANTINE.schema)
    before = _distinct(lake, name, damage.readable(lake, name), schema).to_pylist()
    epoch = lake.epoch
    kept = [row for row in before if not _is_healed(place, epoch, row)]
    places = {(row["file"], row["byte_offset"]) for row in kept}
    back = [row for row in again if damage.is_quarantine_hurt and (row["file"], row["byte_offset"]) not in places]
    known = _merged((row["first_seq"], row["last_seq"]) for row in kept if row["first_seq"] is not None)
    news = [(low, high) for low, high in lost if not any(first <= low and high <= last for first, last in known)]
    fresh = [
        {"reason": _LOST, "first_seq": first, "last_seq": last, "found_at": now_ns // 1000, "epoch": epoch}
        for first, last in news
    ]
    if len(kept) != len(before) or fresh or damage.is_quarantine_hurt or name in damage.repeated:
        target.write_rows(
            pa.Table.from_pylist([*kept, *back, *fresh], schema=schema),
            name,
            QUARANTINE.schema,
            app=_APP,
            version=(target.done(name, _APP) or 0) + 1,
            note=note_if_readable(lake, name) or {"epoch": epoch, "seq": damage.until},
            run=run,
        )
    return news, len(before) - len(kept)


def _distinct(lake: Lake, table: str, files: Sequence[DataFile], schema: pa.Schema) -> pa.Table:
    """The rows of files, each once: what was put together is there twice as long as the parts are kept."""
    with translate_read_errors(lake.folder(table)):
        rows = lake.dataset(table, files, schema).to_table()
    return rows.group_by(schema.names, use_threads=False).aggregate([])


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


# Silver's events, and what else keeps what it has


def repair_silver_events(
    lake: Lake, damage: Damage, done: BronzeRepair, settings: PipelineSettings, *, run: str, now_ns: int
) -> int:
    """
    Give ``silver.events`` what it lacks of bronze, which is whole by now, and take out of it what cannot be read; how many rows
    it gained. Without Spark: only the rows that it lacks are looked at, for repeats and erased ones have none.
    """
    name, schema = SILVER_EVENTS.name, arrow_schema(SILVER_EVENTS.schema)
    gone = [each.file for each in damage.files.get(name, ())]
    if name in damage.logs or not lake.exists(name) or not (gone or done.recovered):
        return 0
    files = damage.readable(lake, name)
    note = lake.note(name)
    held = lake.files(BRONZE_EVENTS.name)
    missing = np.setdiff1d(seqs_of(lake, held), seqs_of(lake, files, name))
    missing = missing[missing <= int(note["seq"])]
    low, high = (int(missing[0]), int(missing[-1])) if len(missing) else (1, 0)
    held = [file for file in held if file.may_hold("seq", low, high)]
    bronze = lake.dataset(BRONZE_EVENTS.name, held, schema)
    with (
        translate_read_errors(lake.tables_folder),
        duckdb.connect(config={"memory_limit": f"{settings.task_memory_mb}MB"}) as duck,
    ):
        duck.register("bronze", bronze)
        duck.register("silver", lake.dataset(name, files, schema))
        duck.register("missing", pa.table({"seq": missing}))
        repeats = duck.sql(_REPEATS).to_arrow_table()["seq"].to_numpy()
    wanted = np.setdiff1d(missing, repeats)

    def rows() -> Iterator[pa.Table]:
        is_there = pc.field("payload").is_valid() | pc.field("sealed").is_valid()
        for batch in bronze.to_batches(filter=(pc.field("seq") >= low) & (pc.field("seq") <= high) & is_there):
            yield pa.Table.from_batches([batch]).filter(pa.array(np.isin(batch["seq"].to_numpy(), wanted)))

    version = (lake.done(name, _APP) or 0) + 1
    with translate_read_errors(lake.tables_folder), translate_write_errors(lake.folder(name)):
        entry = write_file(lake.folder(name), f"{stem(_APP, version, run)}.parquet", schema, rows(), **BRONZE_ENCODING)
    gained = 0 if entry is None else int(entry["rows"])
    if gone or gained:
        lake.commit(
            name,
            schema,
            lake.adds([] if entry is None else [entry]),
            [remove_action(file, now_ms=now_ns // 1_000_000) for file in gone],
            app=_APP,
            version=version,
            # Rows that came back change nothing for those who read them before.
            note={**note, "days": None} if done.healed or done.lost or gained != sum(f.rows for f in gone) else note,
        )
    return gained


_REPEATS: Final = """
    with said as (select seq, event_id, hash(space_id, topic, type, partitions, payload) as words
                  from bronze semi join missing using (seq) where payload is not null),
         known as (from said union all
                   select seq, event_id, hash(space_id, topic, type, partitions, payload)
                   from silver semi join said using (event_id) where payload is not null)
    select distinct said.seq from said join known using (event_id, words) where known.seq < said.seq
"""
"""The rows among those that are missing in silver that repeat an earlier one: those have no row there."""


def make_room(lake: Lake, damage: Damage, kept: Iterable[str], *, run: str, now_ns: int) -> None:
    """
    Have tables whose log cannot be read begin anew in other folders: empty for those who make them, or with what only they can
    have. From the others that nothing can be made from again the damaged files are taken out.
    """
    for table in sorted({*kept, *damage.logs} - {BRONZE_EVENTS.name, QUARANTINE.name}):
        if table in damage.logs:
            target = lake.moving(table)
            if table == SILVER_GROUP_POSITIONS.name:
                ddl = SILVER_GROUP_POSITIONS.schema
                rows = _distinct(lake, table, loose_files(lake, table), arrow_schema(ddl))
                note = {"epoch": lake.epoch, "seq": damage.until, "batch": 0}
                target.write_rows(rows, table, ddl, app=_APP, version=1, note=note, run=run)
            target.save_meta()
            lake.meta()
            continue
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
