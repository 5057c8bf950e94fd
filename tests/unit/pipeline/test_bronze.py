"""Every record of the log is in bronze exactly once, whatever state its files are in."""

from __future__ import annotations

import base64
import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa  # type: ignore[import-untyped]
import pytest

from tests.spark_session import TEST_SETTINGS
from tests.unit.pipeline.support import Workspace, event
from tidings.core.clock import SYSTEM_CLOCK
from tidings.log.segment import encode_line
from tidings.log.settings import LogSettings
from tidings.pipeline.bronze import Bronze, bronze_state, gap_rows, without_repeats
from tidings.pipeline.bronze_task import Message, Planned, Written
from tidings.pipeline.errors import LakeConflict, SegmentMissing
from tidings.pipeline.lake import Lake
from tidings.pipeline.schemas import BRONZE_EVENTS, QUARANTINE, arrow_schema
from tidings.pipeline.settings import PipelineSettings
from tidings.pipeline.source import Gap, SegmentRange, bundles
from tidings.pipeline.state_files import Hints, load_archived
from tidings.pipeline.table_files import write_file

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


@pytest.mark.parametrize("is_small", [True, False])
def test_each_run_takes_what_is_new(spark: SparkSession, tmp_path: Path, is_small: bool) -> None:
    """
    Run after run, the tables hold what the log holds, by Spark's tasks or, where it is little, without Spark; a run with nothing
    new commits nothing.
    """
    workspace = Workspace(tmp_path)
    settings = TEST_SETTINGS if is_small else msgspec.structs.replace(TEST_SETTINGS, small_rows_max=0)
    asked: list[int] = []

    def session() -> SparkSession:
        asked.append(1)
        return spark

    for first in (0, 25):
        workspace.append(event(number, f"t{number % 3}") for number in range(first, first + 25))
        report = workspace.pipeline(settings).run(session)
        assert report.bronze.rows == 25
    assert bool(asked) is not is_small
    versions = {table: workspace.lake.open(table).version() for table in workspace.lake.tables()}

    report = workspace.pipeline(settings).run(session)

    assert (report.bronze.rows, report.bronze.commits, report.until) == (0, 0, 50)
    assert {table: workspace.lake.open(table).version() for table in workspace.lake.tables()} == versions
    assert workspace.column("bronze.events", "seq") == list(range(1, 51))
    assert workspace.column("silver.events", "seq") == list(range(1, 51))
    assert _inodes(workspace, "silver.events") == _inodes(workspace, "bronze.events")  # no row was written twice
    assert workspace.verify().is_equal


def test_how_long_payloads_are_is_known_of_the_whole_table_or_not_at_all(spark: SparkSession, tmp_path: Path) -> None:
    """
    The table says how long its longest payload is; if an earlier version made a part of it, nobody knows.
    """
    workspace = Workspace(tmp_path)
    lengths: list[int | None] = []
    for number, text in enumerate(("ab", "x" * 1_000, "abc")):
        workspace.append([event(number, payload={"text": text})])
        workspace.pipeline(TEST_SETTINGS).run(lambda: spark)
        lengths.append(bronze_state(workspace.lake).payload_bytes)
    note = {"epoch": workspace.epoch, "seq": 3, "batch": 3}
    schema = arrow_schema(BRONZE_EVENTS.schema)
    workspace.lake.commit(BRONZE_EVENTS.name, schema, [], app="earlier", version=1, note=note)
    workspace.append([event(3)])
    workspace.pipeline(TEST_SETTINGS).run(lambda: spark)
    lengths.append(bronze_state(workspace.lake).payload_bytes)

    assert lengths == [len('{"text":"ab"}'), 1_011, 1_011, None]


def _inodes(workspace: Workspace, table: str) -> set[int]:
    return {(file.folder.path / file.name).stat().st_ino for file in workspace.lake.files(table)}


def test_the_space_layout_is_read_too(spark: SparkSession, tmp_path: Path) -> None:
    """
    With a folder a space, every record arrives, and topics are archived through the last offset of all spaces.
    """
    workspace = Workspace(tmp_path, LogSettings(journal_bytes=1 << 20, segment_lines_max=5, layout="space"))
    workspace.append(event(number, f"t{number % 2}", space_id=f"shared:{number % 3}") for number in range(60))

    workspace.pipeline(TEST_SETTINGS).run(lambda: spark)

    assert workspace.column("bronze.events", "seq") == list(range(1, 61))
    assert load_archived(workspace.lake.storage, workspace.epoch) == {"t0": 29, "t1": 29}
    assert workspace.verify().is_equal


def test_lines_that_are_no_records_are_quarantined(spark: SparkSession, tmp_path: Path) -> None:
    """
    A damaged line and a foreign one are kept with file, byte and reason; all others are in bronze.
    """
    workspace = Workspace(tmp_path)
    workspace.append(event(number) for number in range(35))
    sealed, path = workspace.segments()[0], workspace.segments()[1]
    lines = sealed.read_bytes().splitlines(keepends=True)
    damaged = lines[4].replace(b'"n":', b'"m":')
    sealed.write_bytes(b"".join([*lines[:4], damaged, *lines[5:]]))
    foreign = encode_line(b'"hello":"stranger"}')
    whole = path.read_bytes()
    path.write_bytes(foreign + whole)

    report = workspace.pipeline(TEST_SETTINGS).run(lambda: spark)

    assert report.bronze.quarantined >= 2
    found = workspace.rows("bronze.quarantine", "file", "byte_offset", "reason", "line")
    assert (sealed.name, len(b"".join(lines[:4])), "a line's checksum does not match", _base64(damaged)) in found
    assert any(row[:2] == (path.name, 0) and row[3] == _base64(foreign) for row in found)
    assert 5 not in workspace.column("bronze.events", "seq")
    versions = workspace.lake.open("bronze.quarantine").version()
    workspace.pipeline(TEST_SETTINGS).run(lambda: spark)
    assert workspace.lake.open("bronze.quarantine").version() == versions


def _base64(line: bytes) -> str:
    return base64.b64encode(line.removesuffix(b"\n")).decode()


def test_a_quarantined_line_is_not_told_twice() -> None:
    """
    A run that lost its hints meets lines again that were set apart before; they stay one row each.
    """
    gaps = [Gap(f"demo.{number:08d}.jsonl", "demo", number, number, number, number) for number in (1, 3, 5)]
    known = pa.Table.from_pylist(gap_rows(gaps[:2], "e", 1), schema=arrow_schema(QUARANTINE.schema))
    fresh = pa.Table.from_pylist(gap_rows(gaps[1:], "e", 2), schema=arrow_schema(QUARANTINE.schema))

    assert without_repeats(fresh, known)["first_seq"].to_pylist() == [5]


def _found(workspace: Workspace, run: str, until: int) -> tuple[Bronze, list[Message]]:
    """What a run has in hand that read up to a seq, and found a line at each multiple of ten bytes that is no record."""
    lake, schema = Lake(workspace.lake.storage, SYSTEM_CLOCK), arrow_schema(QUARANTINE.schema)
    rows = [{"file": "demo/1", "byte_offset": 10 * n, "reason": "torn", "epoch": workspace.epoch} for n in range(until)]
    entry = write_file(
        lake.folder(QUARANTINE.name), f"{run}.parquet", schema, [pa.Table.from_pylist(rows, schema=schema)]
    )
    assert entry is not None
    planned = Planned(0, until, (), Hints(workspace.epoch, until), 0)
    bronze = Bronze(lake, workspace.source(), PipelineSettings(), run=run)
    return bronze, [planned, Written(QUARANTINE.name, entry)]


@pytest.mark.parametrize("comes_first", ["bronze.quarantine", "bronze.events"])
def test_of_two_runs_one_sets_lines_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, comes_first: str) -> None:
    """
    Two runs that find the same lines at once quarantine each of them once, wherever the second overtakes the first; and so does
    a run that goes on after one that died before its commit to bronze.
    """
    workspace = Workspace(tmp_path)
    workspace.append([event(1)])
    workspace.lake.begin(workspace.epoch)
    bronze, messages = _found(workspace, "one", 2)
    other, others = _found(workspace, "two", 3)
    commit = Lake.commit

    def overtaken(lake: Lake, table: str, *args: Any, **options: Any) -> int:
        if table == comes_first and options["app"] == "bronze":
            monkeypatch.setattr(Lake, "commit", commit)
            assert other.take(others, workspace.epoch).quarantined == (3 if comes_first == "bronze.quarantine" else 1)
        return commit(lake, table, *args, **options)

    monkeypatch.setattr(Lake, "commit", overtaken)
    with pytest.raises(LakeConflict):
        bronze.take(messages, workspace.epoch)

    assert workspace.column(QUARANTINE.name, "byte_offset") == [0, 10, 20]
    assert bronze_state(workspace.lake).seq == 3


def test_what_retention_took_unread_is_told(spark: SparkSession, tmp_path: Path) -> None:
    """
    A range that was dropped before it was archived is a row of the quarantine, not a silent gap.
    """
    workspace = Workspace(tmp_path)
    workspace.append(event(number) for number in range(45))
    assert workspace.retain("demo", 0) == 4

    workspace.pipeline(TEST_SETTINGS).run(lambda: spark)

    (row,) = workspace.rows("bronze.quarantine", "topic", "reason", "first_seq", "last_seq")
    assert row == ("demo", "dropped by retention before it was archived", 1, 40)
    assert workspace.column("bronze.events", "offset") == [40, 41, 42, 43, 44]


def test_an_archived_segment_may_go(spark: SparkSession, tmp_path: Path) -> None:
    """
    Once a run has it, retention may drop a segment; the tables keep it, and the log goes on.
    """
    workspace = Workspace(tmp_path)
    workspace.append(event(number) for number in range(45))
    assert workspace.retain("demo", 0, archived=load_archived(workspace.lake.storage, workspace.epoch)) == 0
    workspace.pipeline(TEST_SETTINGS).run(lambda: spark)
    assert load_archived(workspace.lake.storage, workspace.epoch) == {"demo": 44}
    assert load_archived(workspace.lake.storage, "another") == {}

    assert workspace.retain("demo", 0, archived=load_archived(workspace.lake.storage, workspace.epoch)) == 4
    workspace.append(event(100 + number) for number in range(5))
    workspace.pipeline(TEST_SETTINGS).run(lambda: spark)

    assert workspace.column("bronze.events", "seq") == list(range(1, 51))
    assert workspace.verify().is_equal


def test_many_small_segments_and_one_large_topic(spark: SparkSession, tmp_path: Path) -> None:
    """
    However the log is cut into files, and however the run cuts them again, each record arrives once.
    """
    workspace = Workspace(tmp_path, LogSettings(journal_bytes=1 << 20, segment_lines_max=3))
    workspace.append(
        event(number, "big" if number % 10 else f"small{number}", {"text": "x" * 9000}) for number in range(200)
    )
    settings = PipelineSettings(
        master=TEST_SETTINGS.master, split_bytes_max=64 * 1024, commit_files_max=40, commit_bytes_max=1 << 20
    )

    report = workspace.pipeline(settings).run(lambda: spark)

    assert report.bronze.commits > 1
    assert workspace.column("bronze.events", "seq") == list(range(1, 201))
    assert workspace.verify().is_equal


def test_a_large_payload_arrives(spark: SparkSession, tmp_path: Path) -> None:
    """
    A record of five megabytes among small ones arrives as it is.
    """
    workspace = Workspace(tmp_path, LogSettings())
    workspace.append([event(1), event(2, payload={"text": "ä" * 2_500_000}), event(3)])

    workspace.pipeline(TEST_SETTINGS).run(lambda: spark)

    assert workspace.column("bronze.events", "event_id") == ["ev-1", "ev-2", "ev-3"]
    assert workspace.verify().is_equal


def test_a_segment_that_grows_meanwhile(spark: SparkSession, tmp_path: Path) -> None:
    """
    A segment that was read while it was open is read on from where that ended, sealed or not.
    """
    workspace = Workspace(tmp_path)
    for number in (0, 3, 6, 12):  # ten lines make a segment
        workspace.append(event(number + step) for step in range(6 if number == 6 else 3))
        workspace.pipeline(TEST_SETTINGS).run(lambda: spark)

    assert workspace.column("bronze.events", "seq") == list(range(1, 16))
    assert bronze_state(workspace.lake).seq == 15
    assert workspace.verify().is_equal


def test_work_is_spread_evenly() -> None:
    """
    Large files are split and small ones put together, so that tasks take about as long as each other.
    """
    mb = 1 << 20
    ranges = [SegmentRange("big", "a", 0, 200 * mb), *(SegmentRange(f"s{n}", "b", 0, 1000) for n in range(5000))]

    found = bundles(ranges, 32 * mb, 2)

    sizes = [sum(each.size for each in bundle) for bundle in found]
    assert max(sizes) <= 41 * mb
    assert max(len(bundle) for bundle in found) <= 2000
    covered = sorted((each.start, each.end) for bundle in found for each in bundle if each.path == "big")
    assert covered[0][0] == 0
    assert covered[-1][1] == 200 * mb
    assert all(before[1] == after[0] for before, after in itertools.pairwise(covered))


def test_reading_a_file_that_is_gone_is_an_error_and_no_gap(spark: SparkSession, tmp_path: Path) -> None:
    """
    A segment that vanishes without a word from retention stops the run; nothing is committed.
    """
    workspace = Workspace(tmp_path)
    workspace.append(event(number) for number in range(25))
    workspace.segments()[1].unlink()

    with pytest.raises(SegmentMissing) as caught:
        workspace.pipeline(TEST_SETTINGS).run(lambda: spark)

    assert caught.value.path == "demo.00000002.jsonl"
    assert not workspace.lake.exists("bronze.events")
