"""
Whether the lake says what the log says: counts, an order-free checksum and the highest seq, from both sides.

The log's side is read line by line with the log's own decoder, the lake's side from the files that its tables' logs name;
the two share no code but the function that digests a record. Records that the log no longer holds are not compared.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import duckdb
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from tidings.log.embedded.disk import Disk
from tidings.log.embedded.layout import Layout, StreamKey
from tidings.log.record import Record
from tidings.log.segment import decode

from .bronze import bronze_state, check_reach
from .consistency import IS_WHOLE, count_disagreements, find_repeated
from .lake import Lake
from .schemas import BRONZE_EVENTS, QUARANTINE, SILVER_EVENTS
from .storage_errors import translate_read_errors

_BLOCK_BYTES: Final = 4 << 20
_MASK: Final = (1 << 64) - 1
_COLUMNS: Final = ["topic", "offset", "seq", "event_id", "space_id", "payload", "sealed"]


@dataclass(slots=True)
class StreamDigest:
    """One side's account of a stream."""

    count: int = 0
    checksum: int = 0
    first_offset: int | None = None
    last_offset: int = -1
    last_seq: int = 0

    def add(self, topic: str, offset: int, seq: int, event_id: str, payload: bytes) -> None:
        """Count a record in. The order does not matter; a record more, less or other does."""
        digest = zlib.crc32(payload, zlib.crc32(f"{topic}\x00{offset}\x00{seq}\x00{event_id}\x00".encode()))
        self.count += 1
        self.checksum = (self.checksum + digest * (2 * seq + 1)) & _MASK
        self.first_offset = offset if self.first_offset is None else min(self.first_offset, offset)
        self.last_offset = max(self.last_offset, offset)
        self.last_seq = max(self.last_seq, seq)


@dataclass(frozen=True, slots=True)
class StreamComparison:
    """A topic (or a space's part of one), from both sides."""

    stream: str
    log: StreamDigest
    lake: StreamDigest

    @property
    def is_equal(self) -> bool:
        """Whether both sides say the same."""
        return self.log == self.lake


@dataclass(frozen=True, slots=True)
class LakeComparison:
    """What was found."""

    until: int
    streams: tuple[StreamComparison, ...]
    quarantined: int
    repeated_offsets: int
    """Records that bronze has more than once, and events that silver has more than once."""
    missing_in_silver: int
    """Ids that bronze has and silver has not, or the other way round."""
    erased: int = 0
    """Records that were erased in the lake: of them, places and ids are compared and not what they said."""

    @property
    def is_equal(self) -> bool:
        """Whether the lake says what the log says."""
        return not self.repeated_offsets and not self.missing_in_silver and all(each.is_equal for each in self.streams)


def compare_with_log(
    lake: Lake, layout: Layout, disk: Disk, advance: Callable[[int], None] | None = None
) -> LakeComparison:
    """
    Compare the lake with the log, for the records up to the seq that the lake reaches to.

    Args:
        lake, layout, disk: Both sides.
        advance: Told how many records were read so far.

    Raises:
        LakeDamaged: A file of the lake cannot be read, or bronze has lost commits, or ``lake.json`` is gone.
    """
    lake.known_meta()
    check_reach(lake)
    report = advance or (lambda _: None)
    until = bronze_state(lake).seq
    erased = _erased(lake)
    is_by_space = layout.read_meta(disk).layout == "space"
    logs: dict[tuple[str, str], StreamDigest] = {}
    done = 0
    for key, numbers in layout.segments(disk).items():
        side = StreamDigest()
        for number in numbers:
            for record in _records(layout, disk, key, number):
                if record.seq > until:
                    break
                payload = b"" if record.seq in erased else bytes(record.payload_json)
                side.add(record.topic, record.offset, record.seq, record.meta.event_id, payload)
                done += 1
                if done % 10_000 == 0:
                    report(done)
        if side.count:
            logs[key.topic, key.space_id or ""] = side
    lakes = {place: StreamDigest() for place in logs}
    for row in _lake_rows(lake):
        place = (row["topic"], row["space_id"] if is_by_space else "")
        held = logs.get(place)
        if held is None or held.first_offset is None or row["offset"] < held.first_offset:
            continue  # the log has dropped it
        lakes[place].add(row["topic"], row["offset"], row["seq"], row["event_id"], _payload(row))
        done += 1
        if done % 10_000 == 0:
            report(done)
    report(done)
    streams = tuple(
        StreamComparison(f"{place[1]}/{place[0]}" if place[1] else place[0], logs[place], lakes[place])
        for place in sorted(logs)
    )
    return LakeComparison(until, streams, _count(lake, QUARANTINE.name), *_within_lake(lake), erased=len(erased))


def _records(layout: Layout, disk: Disk, key: StreamKey, number: int) -> Iterator[Record]:
    """The records of a segment; lines that are none, and one that is still being written, are passed over."""
    file = disk.open(layout.segment(key, number))
    try:
        at, rest = 0, b""
        while block := file.read(at, _BLOCK_BYTES):
            at += len(block)
            *lines, rest = (rest + block).split(b"\n")
            for line in lines:
                record = decode(line)
                if isinstance(record, Record):
                    yield record
    finally:
        file.close()


def _lake_rows(lake: Lake) -> Iterator[dict[str, Any]]:
    if not lake.exists(BRONZE_EVENTS.name):
        return
    for file in lake.files(BRONZE_EVENTS.name):
        with translate_read_errors(file.folder), pq.ParquetFile(file.open()) as parquet:
            for batch in parquet.iter_batches(batch_size=20_000, columns=_COLUMNS):
                yield from batch.to_pylist()


def _erased(lake: Lake) -> frozenset[int]:
    """The seqs of records that were erased: those without a payload of either kind."""
    if not lake.exists(BRONZE_EVENTS.name):
        return frozenset()
    with translate_read_errors(lake.tables_folder), duckdb.connect(config={"memory_limit": "1GB"}) as duck:
        duck.register("bronze", lake.dataset(BRONZE_EVENTS.name))
        rows = duck.execute(f"select seq from bronze where not {IS_WHOLE}").fetchall()
    return frozenset(row[0] for row in rows)


def _payload(row: dict[str, Any]) -> bytes:
    if row["sealed"] is None:
        return b"" if row["payload"] is None else str(row["payload"]).encode()
    _, _, rest = str(row["sealed"]).partition('},"payload":')
    return rest[:-1].encode()


def _count(lake: Lake, table: str) -> int:
    return sum(file.rows for file in lake.files(table)) if lake.exists(table) else 0


def _within_lake(lake: Lake) -> tuple[int, int]:
    """How many records bronze or silver has more than once, and how many events bronze and silver disagree on."""
    tables = [table for table in (BRONZE_EVENTS.name, SILVER_EVENTS.name) if lake.exists(table)]
    return sum(find_repeated(lake, tables).values()), count_disagreements(lake)
