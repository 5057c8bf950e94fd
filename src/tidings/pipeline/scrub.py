"""
Removing from the lake what the jobs list: rows that name what was erased (C6), and rows past their life (T6).

``plan_scrub`` finds the rows. ``gold.scrub_list`` names them by table and key; an event among them also has a copy in bronze,
and rows elsewhere that refer to it by its seq. ``gold.temporal_deletions`` names rows of the time index. No Spark is needed:
only the columns that decide are read. The rows of ``silver.events`` come last, because all that depends on an event is found
through them: as long as one is there, an interrupted plan can be made again.

``Scrub`` carries a plan out. An event in bronze keeps its position, so that readers of what the log has dropped find no gap:
its payload and all that says who, where and why are removed, and ``extra`` names the erasure. Every other row is deleted. Each
table is one commit, whose note makes the jobs that read it start anew. What was done is published when all of it is done;
until then ``scrub.json`` keeps what is to be published.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import duckdb
import msgspec
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from tidings.core.events import Event, EventMeta
from tidings.core.ids import content_id

from .erasures import ERASURE_TYPES, read_erasure
from .erasures import Erasure as ReadErasure
from .housekeeping import left_to_vacuum, vacuum
from .lake import Lake, stem
from .lake_scan import ERASED_BY
from .schemas import BRONZE_EVENTS, SILVER_DEAD_LETTERS, SILVER_EVENTS
from .state_files import StateFile, load_state, save_state
from .storage_errors import translate_read_errors, translate_write_errors
from .table_files import DAY_COLUMN, DataFile, FileOutput, remove_action

SCRUB_LIST: Final = "gold.scrub_list"
DELETIONS: Final = "gold.temporal_deletions"
_INDEX: Final = "gold.temporal_index"
_ROWS_MAX: Final = 1_000_000
"""One plan takes up so many listed rows; the next takes the rest."""
_MEMORY_MB: Final = 1024

_MOMENT: Final = "concat_ws('|', event_id, strftime(make_timestamp(epoch_us(ts)), '%Y-%m-%dT%H:%M:%S.%fZ'))"
_KEYS: Final[Mapping[str, str]] = {
    _INDEX: "hash",
    "gold.temporal_features": _MOMENT,
    "gold.recency": _MOMENT,
    "gold.temporal_days": "concat_ws('|', person_id, local_date)",
    "gold.temporal_patterns": "concat_ws('|', scope, person_id)",
    "gold.temporal_candidates": "concat_ws('|', request_id, event_id)",
    "gold.near_duplicates": "concat_ws('|', event_id, kept_event_id)",
    "gold.keep_scores": "event_id",
    "gold.rollups": "rollup_id",
}
"""How a row's key is made, the way C6 makes it."""
_EVENT_SEQS: Final = ("seq", "decision_seq", "impression_seq", "prediction_seq")
"""A table that has one of these columns, and no key above, has rows that are each about the event of that seq."""
_NOT_BY_SEQ: Final = frozenset({BRONZE_EVENTS.name, SILVER_EVENTS.name, SILVER_DEAD_LETTERS.name, *_KEYS})


@dataclass(frozen=True, slots=True, order=True)
class Erasure:
    """The event that asks for rows to go, and in which space; no event for rows that are only past their life."""

    space_id: str
    erased_by: str


@dataclass(slots=True)
class FileRows:
    """Rows of one file, by their place in it, with the event that asks for each to go."""

    file: DataFile
    rows: list[int] = field(default_factory=list)
    erased_by: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ScrubPlan:
    """What goes, from which tables, in this order."""

    list_seq: int | None
    """The seq that the list of C6 takes into account; ``None`` if it was never made."""
    files: Mapping[str, list[FileRows]]
    """By table."""
    versions: Mapping[str, int]
    """The version of each table that the rows were found in."""
    counts: Mapping[Erasure, Mapping[str, int]]
    """How many rows of each table an erasure takes."""
    is_all: bool = True
    """Whether that is all there is to do; a very long list is worked off in several plans."""
    refused: frozenset[str] = frozenset()
    """The events that rows are listed for and that have no right to erase them, or are not in bronze: those rows stay."""

    @property
    def rows(self) -> dict[str, int]:
        """How many rows of each table."""
        return {table: sum(len(each.rows) for each in files) for table, files in self.files.items()}


def plan_scrub(lake: Lake, *, rows_max: int = _ROWS_MAX) -> ScrubPlan:
    """
    Find what the jobs have listed.

    Raises:
        LakeDamaged: A table cannot be read.
    """
    with translate_read_errors(lake.tables_folder), _connected() as duck:
        finder = _Finder(lake, duck)
        is_all = finder.list_rows(rows_max)
        finder.find(BRONZE_EVENTS.name, f"{_ERASED_EVENTS} where {_IS_WHOLE}")
        for table in sorted(set(lake.tables()) - _NOT_BY_SEQ):
            if (column := next((name for name in _EVENT_SEQS if name in lake.schema(table).names), None)) is not None:
                finder.find(table, _BY_EVENT_SEQ.format(column=column))
        for table, key in _KEYS.items():
            finder.find(table, _LISTED.format(table=table, key=key) + (_EXPIRED if table == _INDEX else ""))
        finder.find(SILVER_EVENTS.name, _ERASED_EVENTS)
    note = lake.note(SCRUB_LIST)
    seq = int(note["seq"]) if note else None
    return ScrubPlan(seq, finder.files, finder.versions, finder.counts, is_all, frozenset(finder.refused))


_IS_WHOLE: Final = "(r.payload is not null or r.sealed is not null)"
_PLACE: Final = "select r.row_number, l.space_id, coalesce(l.erased_by, '') from r join "
_ERASED_EVENTS: Final = (
    _PLACE + "listed l on l.\"table\" = 'silver.events' and r.space_id = l.space_id and r.event_id = l.row_key"
)
_BY_EVENT_SEQ: Final = _PLACE + 'erased_seqs l on r."{column}" = l.seq'
_LISTED: Final = _PLACE + "listed l on l.\"table\" = '{table}' and r.space_id = l.space_id and {key} = l.row_key"
_EXPIRED: Final = " union " + _PLACE + "lapsed l on r.hash = l.hash"


class _Finder:
    """Looks for listed rows, table by table, and counts them."""

    def __init__(self, lake: Lake, duck: duckdb.DuckDBPyConnection) -> None:
        self._lake = lake
        self._duck = duck
        self.files: dict[str, list[FileRows]] = {}
        self.versions: dict[str, int] = {}
        self.counts: dict[Erasure, dict[str, int]] = {}
        self.refused: set[str] = set()

    def list_rows(self, rows_max: int) -> bool:
        """Take up the lists; whether all of them."""
        # An event goes after the rows that were found through it: where not all fit, those come first.
        self._take(
            "listed",
            SCRUB_LIST,
            '"table" varchar, space_id varchar, row_key varchar, erased_by varchar',
            f'select "table", space_id, row_key, erased_by from r order by "table" = \'{SILVER_EVENTS.name}\', '
            f"erased_seq limit {rows_max + 1}",
        )
        self._take(
            "lapsed",
            DELETIONS,
            "hash varchar, space_id varchar, erased_by varchar",
            f"select hash, space_id, erased_by from r where is_in_index limit {rows_max + 1}",
        )
        (counts,) = self._duck.execute("select (select count(*) from listed), (select count(*) from lapsed)").fetchall()
        self._leave_out_refused()
        self._take(
            "erased_seqs",
            SILVER_EVENTS.name,
            "seq bigint, space_id varchar, erased_by varchar",
            "select r.seq, l.space_id, l.erased_by from r join listed l"
            " on l.\"table\" = 'silver.events' and r.space_id = l.space_id and r.event_id = l.row_key",
        )
        return bool(max(counts) <= rows_max)

    def _leave_out_refused(self) -> None:
        """
        Strike rows off the lists whose erasure has no right to their space, or cannot be read.

        The lists are what jobs wrote, perhaps of an earlier version. So each erasure is read again before anything goes for good.
        """
        of_erasures = (
            "select distinct erased_by, space_id from listed union select distinct erased_by, space_id from lapsed"
        )
        named = set(self._duck.execute(f"from ({of_erasures}) where erased_by is not null").fetchall())
        allowed: set[tuple[str, str]] = set()
        if named and self._lake.exists(BRONZE_EVENTS.name):
            is_erasure = pc.field("type").isin(ERASURE_TYPES)
            columns = ["event_id", "space_id", "type", "payload"]
            for batch in self._lake.dataset(BRONZE_EVENTS.name).to_batches(columns=columns, filter=is_erasure):
                for row in batch.to_pylist():
                    found = read_erasure(row["type"], row["space_id"], row["payload"])
                    if isinstance(found, ReadErasure):
                        allowed.add((row["event_id"], found.space_id))
        refused = sorted(named - allowed)
        self.refused = {erased_by for erased_by, _ in refused}
        self._duck.execute("create table refused (erased_by varchar, space_id varchar)")
        if refused:
            self._duck.executemany("insert into refused values (?, ?)", refused)
            for name in ("listed", "lapsed"):
                self._duck.execute(
                    f"delete from {name} using refused r where {name}.erased_by = r.erased_by and {name}.space_id = r.space_id"
                )

    def _take(self, name: str, table: str, columns: str, query: str) -> None:
        if not self._lake.exists(table):
            self._duck.execute(f"create table {name} ({columns})")
            return
        self._duck.register("r", self._lake.dataset(table))
        self._duck.execute(f"create table {name} as {query}")

    def find(self, table: str, query: str) -> None:
        """Note where the rows are that a query finds."""
        if not self._lake.exists(table):
            return
        version = int(self._lake.open(table).version())
        found = [
            each
            for file in self._lake.files(table, version=version)
            if (each := self._in_file(table, file, query)).rows
        ]
        if found:
            self.files[table] = found
            self.versions[table] = version

    def _in_file(self, table: str, file: DataFile, query: str) -> FileRows:
        found = FileRows(file)
        rows = self._lake.dataset(table, [file]).to_table(self._columns(table, query))
        numbered = rows.append_column("row_number", pa.array(range(rows.num_rows), pa.int64()))
        self._duck.register("r", numbered)
        seen = set()
        # Ordered, so that the same tables give the same plan.
        self._duck.execute(f"select * from ({query}) order by all")
        for row, space_id, erased_by in self._duck.fetchall():
            if row in seen:
                continue  # several erasures name it; one is enough
            seen.add(row)
            found.rows.append(row)
            found.erased_by.append(erased_by)
            of_erasure = self.counts.setdefault(Erasure(space_id or "", erased_by), {})
            of_erasure[table] = of_erasure.get(table, 0) + 1
        return found

    def _columns(self, table: str, query: str) -> list[str]:
        """The columns that a query may mean: few, and payloads are large."""
        names = self._lake.schema(table).names
        return [name for name in names if re.search(rf"\b{re.escape(name)}\b", query)]


def _connected() -> duckdb.DuckDBPyConnection:
    duck = duckdb.connect(config={"threads": 2, "memory_limit": f"{_MEMORY_MB}MB"})
    duck.execute("set timezone = 'UTC'")
    return duck


SCRUB_TOPIC: Final = "consolidation"
_APP: Final = "scrub"
_PENDING: Final = "scrub.json"
_EVENTS_MAX: Final = 1000
_EMPTIED: Final = ("payload", "sealed", "actor", "device", "trace_id", "idem_key", "priority", "qos", "objects")
"""What of an erased record is taken out. Places, times, type, space, id and partitions stay: readers go by them."""


class _Applied(msgspec.Struct, frozen=True):
    """One erasure and what it took, still to be published."""

    space_id: str
    erased_by: str
    tables: list[dict[str, Any]]


class _Pending(StateFile, frozen=True):
    applied: list[_Applied] = msgspec.field(name="told")


@dataclass(frozen=True, slots=True)
class Scrub:
    """
    Takes rows out of a lake.

    Args:
        lake: Where the tables are.
        run: A name that no other run has.
        now_ns: For the times that a table's log wants.
    """

    lake: Lake
    run: str
    now_ns: int

    def carry_out(self, plan: ScrubPlan) -> None:
        """
        Take out what the plan names, table by table.

        Raises:
            LakeConflict: A table changed since the plan was made; what was done stays done.
            LakeUnwritable, LakeDamaged
        """
        if plan.files:
            self._remember(plan)
        for table, files in plan.files.items():
            self._rewrite(table, files, plan.versions[table])

    def vacuum(self, *, keep_hours: int) -> int:
        """Delete files that no table needs any more, and has not for so long; how many."""
        return sum(vacuum(self.lake, table, keep_hours=keep_hours) for table in self.lake.tables())

    def left_to_vacuum(self) -> int:
        """How many files are there that no table needs, and readers of an older version may."""
        return sum(left_to_vacuum(self.lake, table) for table in self.lake.tables())

    def unpublished(self) -> list[Event]:
        """The events about what was done that are not published yet, or the first of them."""
        pending = self._load()
        return (
            [] if pending is None else [_applied_event(each, pending.epoch) for each in pending.applied[:_EVENTS_MAX]]
        )

    def mark_published(self, count: int) -> None:
        """The first so many of those were published."""
        pending = self._load()
        if pending is not None and len(pending.applied) > count:
            self._save(_Pending(pending.epoch, pending.applied[count:]))
            return
        self.lake.storage.delete([_PENDING])

    def _remember(self, plan: ScrubPlan) -> None:
        before = self._load()
        known = {} if before is None else {Erasure(each.space_id, each.erased_by): each for each in before.applied}
        # What an interrupted scrub meant to do is what is published, not what the next one found still to be done.
        fresh = [
            _Applied(erasure.space_id, erasure.erased_by, _shown(tables))
            for erasure, tables in sorted(plan.counts.items())
            if erasure not in known and erasure.erased_by
        ]
        self._save(_Pending(self._epoch(), [*known.values(), *fresh]))

    def _save(self, pending: _Pending) -> None:
        save_state(self.lake.storage, _PENDING, pending)

    def _load(self) -> _Pending | None:
        return load_state(self.lake.storage, _PENDING, _Pending, self._epoch(), has_checksum=False)

    def _epoch(self) -> str:
        meta = self.lake.meta()
        return "" if meta is None else meta.epoch

    def _rewrite(self, table: str, files: Sequence[FileRows], read_version: int) -> None:
        folder = self.lake.folder(table)
        version = (self.lake.done(table, _APP) or 0) + 1
        change = _emptied if table == BRONZE_EVENTS.name else _without
        entries = []
        for number, each in enumerate(files):
            name = f"{stem(_APP, version, self.run)}-{number:05d}.parquet"
            with translate_read_errors(folder), translate_write_errors(folder):
                if (entry := _copy(each, name, change)) is not None:
                    entries.append(entry)
        removes = [remove_action(each.file, now_ms=self.now_ns // 1_000_000) for each in files]
        note = self.lake.note(table)
        if table != BRONZE_EVENTS.name:
            # Bronze has the rows it had. Of the others, what was made from them is to be made anew.
            note = {**note, "days": None}
        self.lake.commit(
            table,
            self.lake.schema(table),
            self.lake.adds(entries),
            removes,
            app=_APP,
            version=version,
            note=note,
            is_by_day=files[0].file.day is not None,
            read_version=read_version,
        )


def _copy(each: FileRows, name: str, change: Any) -> dict[str, Any] | None:
    """
    Write a file's rows to another, changed; its entry, or ``None`` if no rows are left. A group of rows at a time is in memory.
    """
    reasons = dict(zip(each.rows, each.erased_by, strict=True))
    day = None if each.file.day is None else each.file.day.isoformat()
    output: FileOutput | None = None
    first = 0
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(pq.ParquetFile(each.file.open()))
        for group in range(source.num_row_groups):
            rows = source.read_row_group(group)
            here = {row - first: reasons[row] for row in range(first, first + rows.num_rows) if row in reasons}
            first += rows.num_rows
            kept = change(rows, here) if here else rows
            if kept.num_rows:
                if output is None:
                    place = name if day is None else f"{DAY_COLUMN}={day}/{name}"
                    output = stack.enter_context(FileOutput(each.file.folder, place, source.schema_arrow))
                output.add(kept)
    return None if output is None else output.entry(day)


def _mask(count: int, chosen: Iterable[int]) -> Any:
    found = [False] * count
    for row in chosen:
        found[row] = True
    return pa.array(found, pa.bool_())


def _without(rows: Any, doomed: Mapping[int, str]) -> Any:
    return rows.filter(pc.invert(_mask(rows.num_rows, doomed)))


def _emptied(rows: Any, doomed: Mapping[int, str]) -> Any:
    """Rows of bronze of which some say no more than that something was there, and by what it was erased."""
    mask = _mask(rows.num_rows, doomed)
    for at, column in enumerate(rows.schema):
        if column.name in _EMPTIED:
            rows = rows.set_column(at, column, pc.if_else(mask, pa.scalar(None, column.type), rows[at]))
        elif column.name == "is_sealed":
            rows = rows.set_column(at, column, pc.if_else(mask, pa.scalar(False, column.type), rows[at]))
        elif column.name == "extra":
            named = [
                msgspec.json.encode({ERASED_BY: doomed[row]}).decode() if row in doomed else None
                for row in range(rows.num_rows)
            ]
            fresh = pa.array(named, pa.string()).cast(column.type)
            rows = rows.set_column(at, column, pc.if_else(mask, fresh, rows[at]))
    return rows


def _shown(tables: Mapping[str, int]) -> list[dict[str, Any]]:
    return [{"table": table, "rows": count} for table, count in sorted(tables.items())]


def _applied_event(applied: _Applied, epoch: str) -> Event:
    """
    ``SCRUB_APPLIED``, for one erasure and space. Not ``TOMBSTONE_APPLIED``: that erases itself, for a person also what came
    between their wish and its fulfilment.
    """
    payload = {"erased_by": applied.erased_by, "space_id": applied.space_id, "tables": applied.tables, "epoch": epoch}
    return _event("SCRUB_APPLIED", applied.space_id, payload)


def begun_event(plan: ScrubPlan) -> Event:
    """``SCRUB_BEGUN``: what is about to be done, for the log to hold before it is."""
    erasures = sorted({each.erased_by for each in plan.counts if each.erased_by})
    payload = {
        "list_seq": plan.list_seq,
        "tables": _shown(plan.rows),
        "erasures": len(erasures),
        "erased_by": erasures[:_EVENTS_MAX],
    }
    return _event("SCRUB_BEGUN", "system", payload)


def _event(kind: str, space_id: str, payload: dict[str, Any]) -> Event:
    """An event whose id follows from what it says, so that saying it again is saying it once."""
    event_id = content_id("ev", payload, SCRUB_TOPIC, kind, space_id)
    return Event(EventMeta(topic=SCRUB_TOPIC, type=kind, space_id=space_id, event_id=event_id), payload)
