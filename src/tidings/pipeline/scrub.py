"""
Carrying out what C6 and T6 list: rows that name what was erased, and rows past their life, leave the lake.

An event in bronze keeps its place, so that readers of what the log has dropped find no hole: its payload and all that says
who, where and why are taken out, and ``extra`` names the erasure. Every other row is deleted. Each table is one commit, and
its note tells the jobs that read it to begin anew. The old files are swept once nobody reads them any more.

Interrupted anywhere, the next scrub goes on: a table that was done has no such rows, and the rest is found again. What was
done is told when all of it is; until then ``scrub.json`` remembers what is to be told.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from tidings.core.events import Event, EventMeta
from tidings.core.ids import content_id

from .lake import Lake, sync_file
from .lake_log import add_action, remove_action, told_of_files
from .positions import replace_atomically, sync_folder
from .schemas import BRONZE_EVENTS
from .scrub_plan import Erasure, FileRows, ScrubPlan
from .serving_rows import ERASED_BY

__all__ = ["SCRUB_TOPIC", "Scrub", "begun_event"]

SCRUB_TOPIC: Final = "consolidation"
_APP: Final = "scrub"
_PENDING: Final = "scrub.json"
_TOLD_MAX: Final = 1000
_EMPTIED: Final = ("payload", "sealed", "actor", "device", "trace_id", "idem_key", "priority", "qos")
"""What of an erased record is taken out. Places, times, type, space, id and partitions stay: readers go by them."""


class _Told(msgspec.Struct, frozen=True):
    """One erasure and what it took, still to be told."""

    space_id: str
    erased_by: str
    tables: list[dict[str, Any]]


class _Pending(msgspec.Struct, frozen=True):
    epoch: str
    told: list[_Told]


@dataclass(frozen=True, slots=True)
class Scrub:
    """
    Takes rows out of a lake. Whoever uses it holds the lake's lock.

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
            self._rewrite(table, files)

    def sweep(self, *, age_hours_min: float) -> int:
        """Delete files that no table needs any more, and has not for so long; how many."""
        return sum(self.lake.sweep(table, age_hours_min=age_hours_min) for table in self.lake.tables())

    def left_to_sweep(self) -> int:
        """How many files are there that no table needs, and readers of an older version may."""
        count = 0
        for table in self.lake.tables():
            wanted = {file.path for file in self.lake.files(table)}
            count += sum(path not in wanted for path in self.lake.path(table).rglob("*.parquet"))
        return count

    def to_tell(self) -> list[Event]:
        """What was done and not told yet, or the beginning of it."""
        pending = self._load()
        return [] if pending is None else [_applied(each, pending.epoch) for each in pending.told[:_TOLD_MAX]]

    def told(self, count: int) -> None:
        """The first so many of that were told."""
        pending = self._load()
        if pending is not None and len(pending.told) > count:
            self._save(_Pending(pending.epoch, pending.told[count:]))
            return
        (self.lake.root / _PENDING).unlink(missing_ok=True)
        sync_folder(self.lake.root)

    def _remember(self, plan: ScrubPlan) -> None:
        before = self._load()
        known = {} if before is None else {Erasure(each.space_id, each.erased_by): each for each in before.told}
        # What an interrupted scrub meant to do is what is told of it, not what the next one found still to be done.
        fresh = [
            _Told(erasure.space_id, erasure.erased_by, _shown(tables))
            for erasure, tables in sorted(plan.counts.items())
            if erasure not in known and erasure.erased_by
        ]
        self._save(_Pending(self._epoch(), [*known.values(), *fresh]))

    def _save(self, pending: _Pending) -> None:
        with self.lake.writing(self.lake.root):
            replace_atomically(self.lake.root / _PENDING, msgspec.json.encode(pending) + b"\n")

    def _load(self) -> _Pending | None:
        try:
            found = msgspec.json.decode((self.lake.root / _PENDING).read_bytes(), type=_Pending)
        except (FileNotFoundError, msgspec.DecodeError):
            return None
        return found if found.epoch == self._epoch() else None

    def _epoch(self) -> str:
        meta = self.lake.meta()
        return "" if meta is None else meta.epoch

    def _rewrite(self, table: str, files: Sequence[FileRows]) -> None:
        folder = self.lake.path(table)
        version = (self.lake.done(table, _APP) or 0) + 1
        change = _emptied if table == BRONZE_EVENTS.name else _without
        adds = []
        for number, each in enumerate(files):
            target = folder / f"{_APP}-{version:012d}-{self.run}-{number:05d}.parquet"
            with told_of_files(folder), self.lake.writing(target):
                if _copy(each, target, change):
                    sync_file(target)
                    adds.append(add_action(folder, target))
        removes = [remove_action(each.file, now_ms=self.now_ns // 1_000_000) for each in files]
        note = self.lake.note(table)
        if table != BRONZE_EVENTS.name:
            # Bronze has the rows it had. Of the others, what was made from them is to be made anew.
            note = {**note, "build": f"{_APP}-{self.run}"}
        self.lake.commit(table, self.lake.schema(table), adds, removes, app=_APP, version=version, note=note)


def _copy(each: FileRows, target: Path, change: Any) -> bool:
    """Write a file's rows to another, changed; whether any were left. A group of rows at a time is in memory."""
    reasons = dict(zip(each.rows, each.erased_by, strict=True))
    writer: Any = None
    first = 0
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(pq.ParquetFile(each.file.path))
        for group in range(source.num_row_groups):
            rows = source.read_row_group(group)
            here = {row - first: reasons[row] for row in range(first, first + rows.num_rows) if row in reasons}
            first += rows.num_rows
            kept = change(rows, here) if here else rows
            if kept.num_rows:
                if writer is None:
                    writer = stack.enter_context(pq.ParquetWriter(target, rows.schema, compression="zstd"))
                writer.write_table(kept, row_group_size=kept.num_rows)
    return writer is not None


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


def _applied(told: _Told, epoch: str) -> Event:
    """
    ``SCRUB_APPLIED``, for one erasure and space. Not ``TOMBSTONE_APPLIED``: that erases itself, for a person also what came
    between their wish and its fulfilment.
    """
    payload = {"erased_by": told.erased_by, "space_id": told.space_id, "tables": told.tables, "epoch": epoch}
    return _event("SCRUB_APPLIED", told.space_id, payload)


def begun_event(plan: ScrubPlan) -> Event:
    """``SCRUB_BEGUN``: what is about to be done, for the log to hold before it is."""
    erasures = sorted({each.erased_by for each in plan.counts if each.erased_by})
    payload = {
        "list_seq": plan.list_seq,
        "tables": _shown(plan.rows),
        "erasures": len(erasures),
        "erased_by": erasures[:_TOLD_MAX],
    }
    return _event("SCRUB_BEGUN", "system", payload)


def _event(kind: str, space_id: str, payload: dict[str, Any]) -> Event:
    """An event whose id follows from what it says, so that saying it again is saying it once."""
    event_id = content_id("ev", payload, SCRUB_TOPIC, kind, space_id)
    return Event(EventMeta(topic=SCRUB_TOPIC, type=kind, space_id=space_id, event_id=event_id), payload)
