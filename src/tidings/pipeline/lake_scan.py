"""
Finding records in the files of ``bronze.events``, with pyarrow alone and within a bound of memory.

Two passes. The first reads only seq, topic, offset and what the query asks for, and chooses which records come next. The
second reads those rows in full, a small batch at a time, and keeps as many as the bytes allow. Files and row groups whose
bounds rule them out are not opened.

The table keeps the payload byte for byte and every part of the envelope that this version knows, so a record that comes back
equals the one that went in, sealed ones included. A record that was erased since has neither a payload nor a sealed one,
which no other row has: it comes back with its position, its id, an empty payload and the event that erased it.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from tidings.core.events import ENVELOPE
from tidings.log.interface import Query
from tidings.log.record import Record, RecordMeta, Sealed

from .table_files import DataFile

RECORD_COLUMNS: Final = ("offset", "seq", *(field.name for field in ENVELOPE), "payload")
_FOREIGN: Final = "meta."
"""Keys of the envelope that the writer of the table did not know are kept among the extras under this prefix."""


ERASED_BY: Final = "erased_by"
"""Among the extras of an erased record: the event that asked for it."""
_NOTHING: Final = b"{}"


class _SealedPayload(msgspec.Struct, frozen=True):
    how: Sealed
    payload: msgspec.Raw


def record_of(row: Mapping[str, Any]) -> Record:
    """The record that a row was made from, or what is left of it."""
    sealed = None if row["sealed"] is None else msgspec.json.decode(row["sealed"], type=_SealedPayload)
    if sealed is not None:
        payload = sealed.payload
    elif row["payload"] is not None:
        payload = msgspec.Raw(row["payload"].encode())
    else:
        payload = msgspec.Raw(_NOTHING)
    values = {field.name: _FROM_COLUMN[field.kind](row.get(field.name)) for field in ENVELOPE if field.name != "sealed"}
    values["extra"] = _extra_of(values["extra"])
    meta = RecordMeta(**values, sealed=None if sealed is None else sealed.how)
    return Record.of(row["offset"], row["seq"], meta, payload)


def is_erased(record: Record) -> bool:
    """Whether a record from the lake is what is left of one that was erased."""
    return bytes(record.payload_json) == _NOTHING and ERASED_BY in (record.meta.extra or {})


def _text_of(time: datetime) -> str:
    """A time the way the log writes it: in UTC, with six decimals."""
    return time.astimezone(UTC).replace(tzinfo=None).isoformat(timespec="microseconds") + "Z"


def _value_of(text: str | None) -> Any:
    """What was kept as JSON, or as plain text where that could not be taken for JSON."""
    if text is None:
        return None
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


_FROM_COLUMN: Final[Mapping[str, Callable[[Any], Any]]] = {
    "text": lambda text: text,
    "number": lambda number: number,
    "time": _text_of,
    "names": lambda names: tuple(names or ()),
    "any": _value_of,
    "object": lambda text: None if text is None else msgspec.json.decode(text),
}


def _extra_of(kept: dict[str, Any] | None) -> dict[str, Any] | None:
    if kept is None:
        return None
    own = {name: value for name, value in kept.items() if not name.startswith(_FOREIGN)}
    return own if own or not kept else None


_PLACES_PER_BATCH: Final = 65_536
_BATCH_BYTES: Final = 4 << 20
_ROWS_PER_BATCH_MAX: Final = 1024
_READ_BUFFER_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class ScanQuery:
    """What a query asks of the archive, as bounds on seqs (after, up to and including) and conditions on rows."""

    after: int
    until: int
    topic: str | None = None
    from_offset: int | None = None
    to_offset: int | None = None
    from_time: datetime | None = None
    to_time: datetime | None = None
    partitions: tuple[str, ...] = ()
    event_ids: tuple[str, ...] = ()
    backwards: bool = False

    @classmethod
    def of(cls, query: Query, *, until: int) -> ScanQuery:
        """A query, ended at ``until`` at the latest."""
        return cls(
            after=query.since or 0,
            until=until if query.until is None else min(query.until, until),
            topic=query.topic,
            from_offset=query.from_offset,
            to_offset=query.to_offset,
            from_time=query.from_time,
            to_time=query.to_time,
            partitions=query.partitions,
            event_ids=query.event_ids,
            backwards=query.backwards,
        )

    def may_be_in(self, file: DataFile) -> bool:
        """Whether the bounds of a file leave room for what is wanted."""
        if not file.may_hold("seq", self.after + 1, self.until):
            return False
        if self.topic is not None and not file.may_hold("topic", self.topic, self.topic):
            return False
        to_offset = None if self.to_offset is None else self.to_offset - 1
        if self.topic is not None and not file.may_hold("offset", self.from_offset, to_offset):
            return False
        return not self.event_ids or any(file.may_hold("event_id", each, each) for each in self.event_ids)

    def columns(self) -> list[str]:
        """The columns that decide."""
        named = {"seq": True, "topic": self.topic is not None, "offset": self.topic is not None}
        named["written_at"] = self.from_time is not None or self.to_time is not None
        named["partitions"] = bool(self.partitions)
        named["event_id"] = bool(self.event_ids)
        return [name for name, is_needed in named.items() if is_needed]


@dataclass(slots=True)
class ScanResult:
    """The seqs that come next, in the order of reading, and how far that order is known to be complete."""

    seqs: list[int] = field(default_factory=list)
    files: list[DataFile] = field(default_factory=list)
    """Where they are."""
    horizon: int | None = None
    """The search ended early: all that is wanted up to here (down to here, backwards) was looked at."""
    is_full: bool = False
    """There may be more than was asked for."""


def find(files: Sequence[DataFile], wanted: ScanQuery, *, count: int, files_max: int) -> ScanResult:
    """
    Choose the next ``count`` records.

    A filter may pass over much: after ``files_max`` files without enough records the search ends at a horizon, from where
    the reader goes on, so that no single read takes as long as the history.

    Args:
        files: All of the table's.
        wanted: What is asked for.
        count: How many records at most.
        files_max: After how many files to stop, if a horizon can be given by then.
    """
    sign = -1 if wanted.backwards else 1
    nearest = operator.attrgetter("maximum" if wanted.backwards else "minimum")
    candidates = sorted(
        (file for file in files if wanted.may_be_in(file)), key=lambda file: sign * int(nearest(file)["seq"])
    )
    found = ScanResult()
    kept = np.empty(0, np.int64)  # seqs times ``sign``, in order: what comes first in the order of reading stands first
    horizon = sign * (wanted.until + 1 if wanted.backwards else wanted.after)
    for looked_at, file in enumerate(candidates):
        edge = sign * int(nearest(file)["seq"])
        if len(kept) >= count and edge > kept[-1]:
            break
        if looked_at >= files_max and edge - 1 > horizon:
            found.horizon = sign * (edge - 1)
            break
        is_used = False
        for seqs in _matches(file, wanted):
            fresh = seqs * sign
            if len(kept) >= count:
                fresh = fresh[fresh < kept[-1]]
            if len(fresh):
                kept = np.sort(np.concatenate([kept, fresh]))[:count]
                is_used = True
        if is_used:
            found.files.append(file)
    found.is_full = len(kept) >= count
    found.seqs = (kept * sign).tolist()
    if found.horizon is not None:
        found.seqs = [seq for seq in found.seqs if sign * seq <= sign * found.horizon]
    return found


def _matches(file: DataFile, wanted: ScanQuery) -> Iterator[np.ndarray[Any, np.dtype[np.int64]]]:
    """The seqs of a file's rows that fit, a batch at a time."""
    with pq.ParquetFile(file.open(), buffer_size=_READ_BUFFER_BYTES, pre_buffer=False) as parquet:
        groups = [number for number in range(parquet.num_row_groups) if _may_hold(parquet, number, wanted)]
        for batch in parquet.iter_batches(_PLACES_PER_BATCH, row_groups=groups, columns=wanted.columns()):
            yield _fitting(batch, wanted).to_numpy(zero_copy_only=False)


def _fitting(batch: Any, wanted: ScanQuery) -> Any:
    seq = batch["seq"]
    fits = pc.and_(pc.greater(seq, wanted.after), pc.less_equal(seq, wanted.until))
    if wanted.topic is not None:
        fits = pc.and_(fits, pc.equal(batch["topic"], wanted.topic))
        if wanted.from_offset is not None:
            fits = pc.and_(fits, pc.greater_equal(batch["offset"], wanted.from_offset))
        if wanted.to_offset is not None:
            fits = pc.and_(fits, pc.less(batch["offset"], wanted.to_offset))
    if wanted.from_time is not None:
        fits = pc.and_(fits, pc.greater_equal(batch["written_at"], _moment(wanted.from_time)))
    if wanted.to_time is not None:
        fits = pc.and_(fits, pc.less(batch["written_at"], _moment(wanted.to_time)))
    if wanted.event_ids:
        fits = pc.and_(fits, pc.is_in(batch["event_id"], value_set=pa.array(wanted.event_ids, pa.string())))
    seqs = seq.filter(fits)
    if wanted.partitions and len(seqs):
        named = batch["partitions"].filter(fits)
        of_wanted = pc.is_in(pc.list_flatten(named), value_set=pa.array(wanted.partitions, pa.string()))
        seqs = seqs.take(pc.unique(pc.list_parent_indices(named).filter(of_wanted)))
    return seqs


def _moment(time: datetime) -> Any:
    return pa.scalar(time, pa.timestamp("us", "UTC"))


def _may_hold(parquet: Any, group: int, wanted: ScanQuery) -> bool:
    row_group = parquet.metadata.row_group(group)
    bounds = {"seq": (wanted.after + 1, wanted.until)}
    if wanted.topic is not None:
        high = None if wanted.to_offset is None else wanted.to_offset - 1
        bounds["offset"] = (wanted.from_offset or 0, (1 << 62) if high is None else high)
    for at in range(row_group.num_columns):
        column = row_group.column(at)
        if column.path_in_schema in bounds and (known := column.statistics) is not None and known.has_min_max:
            low, high = bounds[column.path_in_schema]
            if known.max < low or known.min > high:
                return False
    return True


def load(found: ScanResult, *, backwards: bool, bytes_max: int) -> list[Record]:
    """
    The records that were found, in the order of reading, as many as ``bytes_max`` allows, but at least one.

    Files are read one after the other though their seqs interleave. So once the bytes are used up, what lies furthest in the
    order of reading is let go, and nothing at or beyond it is taken any more: what is left is a beginning without holes.
    """
    sign = -1 if backwards else 1
    held: dict[int, Record] = {}
    furthest: list[int] = []
    size, cut = 0, None
    for row in _rows(found):
        order = sign * row["seq"]
        if cut is not None and order >= cut:
            continue
        record = record_of(row)
        held[order] = record
        heapq.heappush(furthest, -order)
        size += _size(record)
        while size > bytes_max and len(held) > 1:
            cut = -heapq.heappop(furthest)
            size -= _size(held.pop(cut))
    return [held[order] for order in sorted(held)]


def _rows(found: ScanResult) -> Iterator[dict[str, Any]]:
    chosen = pa.array(found.seqs, pa.int64())
    if not found.seqs:
        return
    low, high = min(found.seqs), max(found.seqs)
    wanted = ScanQuery(after=low - 1, until=high)
    for file in found.files:
        if not file.may_hold("seq", low, high):
            continue
        with pq.ParquetFile(file.open(), buffer_size=_READ_BUFFER_BYTES, pre_buffer=False) as parquet:
            for group in range(parquet.num_row_groups):
                if _may_hold(parquet, group, wanted):
                    yield from _chosen(parquet, group, chosen)


def _chosen(parquet: Any, group: int, chosen: Any) -> Iterable[dict[str, Any]]:
    row_group = parquet.metadata.row_group(group)
    # Rows of one group differ in size, but seldom by much; a batch of a few megabytes holds a few hundred of them.
    row_bytes = max(1, row_group.total_byte_size // max(1, row_group.num_rows))
    rows = max(1, min(_ROWS_PER_BATCH_MAX, _BATCH_BYTES // row_bytes))
    left = len(chosen)
    for batch in parquet.iter_batches(rows, row_groups=[group], columns=list(RECORD_COLUMNS)):
        fitting = batch.filter(pc.is_in(batch["seq"], value_set=chosen))
        left -= fitting.num_rows
        yield from fitting.to_pylist()
        if left <= 0:
            return


def _size(record: Record) -> int:
    return len(record.payload_json) + len(record.meta_json)
