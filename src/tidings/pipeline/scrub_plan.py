"""
What is to leave the lake: the rows that C6 and T6 list, found in the tables' files.

C6 (``gold.scrub_list``) names rows by table and key. An event among them also has a copy in bronze, and rows elsewhere that
know it by its seq; those are found from it. T6 (``gold.temporal_deletions``) names rows of the time index that are past
their life or erased. Nothing here changes anything, and no Spark is needed: only the columns that decide are read.

The order of a plan is the order to carry it out in. The rows of ``silver.events`` come last, because all that depends on an
event is found through them: for as long as one is there, a plan that was interrupted is made again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import duckdb

from .lake import Lake
from .lake_log import DataFile, told_of_files
from .schemas import BRONZE_EVENTS, SILVER_DEAD_LETTERS, SILVER_EVENTS

__all__ = ["DELETIONS", "SCRUB_LIST", "Erasure", "FileRows", "ScrubPlan", "plan_scrub"]

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
    counts: Mapping[Erasure, Mapping[str, int]]
    """How many rows of each table an erasure takes."""
    is_all: bool = True
    """Whether that is all there is to do; a very long list is worked off in several plans."""

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
    with told_of_files(lake.tables_folder), _connected() as duck:
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
    return ScrubPlan(int(note["seq"]) if note else None, finder.files, finder.counts, is_all)


_IS_WHOLE: Final = "(r.payload is not null or r.sealed is not null)"
_PLACE: Final = "select r.filename, r.file_row_number, l.space_id, coalesce(l.erased_by, '') from r join "
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
        self.counts: dict[Erasure, dict[str, int]] = {}

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
        self._take(
            "erased_seqs",
            SILVER_EVENTS.name,
            "seq bigint, space_id varchar, erased_by varchar",
            "select r.seq, l.space_id, l.erased_by from r join listed l"
            " on l.\"table\" = 'silver.events' and r.space_id = l.space_id and r.event_id = l.row_key",
        )
        counts = self._duck.execute("select (select count(*) from listed), (select count(*) from lapsed)").fetchone()
        return counts is not None and max(counts) <= rows_max

    def _take(self, name: str, table: str, columns: str, query: str) -> None:
        files = self._paths(table)
        if not files:
            self._duck.execute(f"create table {name} ({columns})")
            return
        self._duck.execute(f"create table {name} as with r as ({_source()}) {query}", [files])

    def find(self, table: str, query: str) -> None:
        """Note where the rows are that a query finds."""
        known = {str(file.path): file for file in self._lake.files(table)} if self._lake.exists(table) else {}
        if not known:
            return
        found: dict[str, FileRows] = {}
        seen = set()
        for path, row, space_id, erased_by in self._rows(table, query, list(known)):
            if (path, row) in seen:
                continue  # several erasures name it; one is enough
            seen.add((path, row))
            each = found.setdefault(path, FileRows(known[path]))
            each.rows.append(row)
            each.erased_by.append(erased_by)
            of_erasure = self.counts.setdefault(Erasure(space_id or "", erased_by), {})
            of_erasure[table] = of_erasure.get(table, 0) + 1
        if found:
            self.files[table] = list(found.values())

    def _rows(self, table: str, query: str, files: list[str]) -> Iterator[tuple[Any, ...]]:
        # Ordered, so that the same tables give the same plan.
        self._duck.execute(f"with r as ({_source()}) select * from ({query}) order by all", [files])
        while rows := self._duck.fetchmany(10_000):
            yield from rows

    def _paths(self, table: str) -> list[str]:
        return [str(file.path) for file in self._lake.files(table)] if self._lake.exists(table) else []


def _source() -> str:
    return "select * from read_parquet(?, filename = true, file_row_number = true, union_by_name = true)"


def _connected() -> duckdb.DuckDBPyConnection:
    duck = duckdb.connect(config={"threads": 2, "memory_limit": f"{_MEMORY_MB}MB"})
    duck.execute("set timezone = 'UTC'")
    return duck
