"""Silver of a micro-batch costs what is new: no Spark, no letter and no list of segments that was read before."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from tests.spark_session import TEST_SETTINGS
from tests.unit.pipeline.support import Workspace, event
from tidings.bus.store import Attempt
from tidings.bus.store.dead_letter_files import DeadLetterFiles
from tidings.core.clock import SYSTEM_CLOCK, ns_of
from tidings.log.embedded import open_log
from tidings.log.embedded.cursors import StoredCursor, encode_cursor
from tidings.log.embedded.disk import File, OsDisk
from tidings.log.record import Record
from tidings.log.segment import decode
from tidings.pipeline import group_files, silver
from tidings.pipeline.runner import Pipeline
from tidings.testing import VirtualClock

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LETTER = ("topic", "group", "offset", "error", "category", "attempts", "history", "state", "error_type")


def no_spark() -> NoReturn:
    """A session that must not be asked for."""
    raise AssertionError("Spark is not needed for so little")


def take_in(workspace: Workspace) -> None:
    """One run over bronze and silver, without Spark."""
    workspace.pipeline(TEST_SETTINGS).run(no_spark)


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    """A log of two topics with three segments each, and its tables."""
    workspace = Workspace(tmp_path / "ws")
    workspace.append(event(number, f"t{number % 2}") for number in range(50))
    take_in(workspace)
    return workspace


# Ids that may come again


def test_what_retention_dropped_of_another_topic_costs_nothing(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the log dropped records of one topic, an event of another is no suspect: nothing is looked up, and no Spark starts."""
    assert workspace.retain("t0", 0, archived={"t0": 100}) == 2
    workspace.append([event(500, "t1")])

    with monkeypatch.context() as patched:
        patched.setattr(silver, "_IDS_THROUGH_MAX", -1)  # then whatever is looked up asks for Spark
        take_in(workspace)

    assert workspace.column("silver.events", "event_id").count("ev-500") == 1
    assert workspace.verify().is_equal


def test_a_new_id_of_a_topic_that_retention_shortened_needs_no_spark(workspace: Workspace) -> None:
    """An id that the table does not have is looked up in this process."""
    assert workspace.retain("t0", 0, archived={"t0": 100}) == 2
    workspace.append([event(500, "t0"), event(501, "t1")])

    take_in(workspace)

    assert len(workspace.column("silver.events", "seq")) == 52
    assert workspace.verify().is_equal


@pytest.mark.spark
@pytest.mark.parametrize(
    ("name", "limit"),
    [("", 0), ("_IDS_MAX", 2), ("_IDS_MAX", 0), ("_IDS_THROUGH_MAX", 1)],
    ids=["here", "one id too many", "many ids too many", "many rows too many"],
)
def test_an_id_that_the_log_forgot_is_one_row(
    spark: SparkSession, workspace: Workspace, monkeypatch: pytest.MonkeyPatch, name: str, limit: int
) -> None:
    """
    An event that comes again after the log dropped it is in bronze twice and in silver once, whether few ids are looked up here or
    many by Spark; with another payload it is another event.
    """
    if name:
        monkeypatch.setattr(silver, name, limit)
    assert workspace.retain("t0", 0, archived={"t0": 100}) == 2
    workspace.append([event(0, "t0"), event(2, "t0", {"n": "other"}), event(500, "t0")])

    workspace.pipeline(TEST_SETTINGS).run(lambda: spark)

    ids = workspace.column("silver.events", "event_id")
    assert [ids.count(f"ev-{number}") for number in (0, 2, 500)] == [1, 2, 1]
    assert workspace.column("bronze.events", "event_id").count("ev-0") == 2
    assert workspace.verify().is_equal


# Dead letters


class Watching(OsDisk):
    """A disk that notes what is opened."""

    def __init__(self, opened: list[Path]) -> None:
        super().__init__()
        self._opened = opened

    def open(self, path: Path, **options: Any) -> File:
        """Open it, and note that."""
        self._opened.append(path)
        return super().open(path, **options)


def pipeline(workspace: Workspace, disk: OsDisk | None = None, clock: Any = SYSTEM_CLOCK) -> Pipeline:
    """The pipeline with a disk or a clock of one's own."""
    name = f"run{clock.now_ns():x}"
    return Pipeline(workspace.folder, TEST_SETTINGS, clock=clock, run=name, disk=disk)


class Letters:
    """Writes dead letters of the log's records."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self.files = DeadLetterFiles(OsDisk(), workspace.layout.dlq, SYSTEM_CLOCK)
        workspace.layout.dlq.mkdir(exist_ok=True)

    def add(self, topic: str, numbers: Sequence[int]) -> None:
        """One for each of these records of a topic, by their place in its first segment."""
        segment = next(path for path in self._workspace.segments() if path.name.startswith(f"{topic}."))
        lines = segment.read_bytes().splitlines()
        for number in numbers:
            record = decode(lines[number])
            assert isinstance(record, Record)
            attempts = [Attempt("2026-11-15T10:00:00.000000Z", "no")] * 2
            self.files.add(record, "workers", ValueError(f"no {number}"), attempts, "retries")


def test_letters_that_were_read_before_are_not_read_again(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    A run with a new event and no new letter opens no file of letters; with new ones it reads those behind what it read, also behind a
    line that was cut; and what became of a letter is read from the whole file.
    """
    letters = Letters(workspace)
    letters.add("t0", [0, 1, 2])
    letters.add("t1", [0])
    take_in(workspace)
    opened: list[Path] = []
    workspace.append([event(500)])
    pipeline(workspace, Watching(opened)).run(no_spark)
    assert not [path for path in opened if path.parent == workspace.layout.dlq]

    with monkeypatch.context() as patched:
        patched.setattr(DeadLetterFiles, "find", no_spark)
        with letters.files.path("t1").open("ab") as file:
            file.write(b'{"crc":"cut')
        take_in(workspace)
        letters.add("t0", [3])
        letters.add("t1", [1, 2])
        take_in(workspace)
    assert [row[1] for row in workspace.rows("silver.dead_letters", "topic", "offset")] == [0, 1, 2, 3, 0, 1, 2]

    letters.files.request("t0", ["workers-1"])
    letters.files.begin("t0", "workers-1")
    letters.files.finish("t0", "workers-1", ValueError("again"))
    letters.files.drop("t1", ["workers-2"])
    letters.add("t0", [4])
    take_in(workspace)
    rows = workspace.rows("silver.dead_letters", *LETTER)
    states = {(row[0], row[2], row[3]): (row[5], row[7]) for row in rows}
    assert states["t0", 1, "again"] == (3, "dead")
    assert states["t0", 2, "no 2"] == (2, "dead")
    assert states["t1", 2, "no 2"] == (2, "dropped")
    assert len(json.loads(next(row[6] for row in rows if row[3] == "again"))) == 3
    assert sorted(row[7] for row in rows) == ["dead"] * 7 + ["dropped"]

    workspace.pipeline(TEST_SETTINGS).run(no_spark, silver_anew={"silver.dead_letters"})
    assert workspace.rows("silver.dead_letters", *LETTER) == rows


@pytest.mark.parametrize("files", [2, 11], ids=["one more", "elevenfold"])
def test_more_files_of_letters_than_are_noted_are_read_again(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, files: int
) -> None:
    """Beyond the number of files whose places a table's log notes the letters are as right, and only read again as a whole."""
    monkeypatch.setattr(silver, "_LETTER_FILES_MAX", 1)
    workspace.append(event(600 + number, f"x{number}") for number in range(files))
    letters = Letters(workspace)
    for number in range(files):
        letters.add(f"x{number}", [0])
    take_in(workspace)
    letters.add("t0", [0])
    take_in(workspace)

    topics = workspace.column("silver.dead_letters", "topic")
    assert topics == sorted(["t0", *(f"x{number}" for number in range(files))])


# What a run calls now


def append_at(workspace: Workspace, number: int, at: datetime) -> None:
    """Have the log take an event while its clock shows that time."""

    async def fill() -> None:
        log = await open_log(workspace.folder, workspace.log_settings, clock=VirtualClock(ns_of(at)))
        try:
            await log.append_many([event(number)])
        finally:
            await log.close()

    asyncio.run(fill())


@pytest.mark.parametrize(
    ("ahead", "is_log"),
    [
        (timedelta(0), True),
        (timedelta(days=1), True),
        (timedelta(days=1, seconds=1), False),
        (timedelta(days=10), False),
        (timedelta(days=14_610), False),
    ],
    ids=["now", "a day", "a second more", "tenfold", "forty years"],
)
def test_one_wrong_clock_does_not_stop_the_pipelines_time(tmp_path: Path, ahead: timedelta, is_log: bool) -> None:
    """
    A record that was written up to a day ahead of this machine's clock is the run's now; beyond that the machine's clock is, also for the
    records that follow, which the log gives the same time; and the status says so. On a machine that is decades behind the log's time counts.
    """
    now = datetime(2026, 11, 19, 12, tzinfo=UTC)
    workspace = Workspace(tmp_path)
    append_at(workspace, 1, now - timedelta(days=2))
    append_at(workspace, 2, now + ahead)
    append_at(workspace, 3, now)
    clock = VirtualClock(ns_of(now))
    run = pipeline(workspace, clock=clock)
    run.run(no_spark)

    assert run.as_of() == (now + ahead if is_log else now)
    assert run.ahead_until() == (None if is_log else now + ahead)
    clock.jump(60)
    is_log = ahead <= timedelta(days=1, seconds=60)
    assert run.as_of() == (now + ahead if is_log else now + timedelta(seconds=60))
    assert pipeline(workspace, clock=VirtualClock(0)).as_of() == now + ahead


# Groups and segments


def test_runs_that_follow_each_other_look_at_groups_and_segments_once_a_minute(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    Runs within a minute of each other, as they follow the log, store positions and segments once; after it again; and a single run at
    once. The groups' cursors are stored when they move.
    """
    clock = VirtualClock(SYSTEM_CLOCK.now_ns() + 60_000_000_000)  # the tables were just made
    workspace.layout.offsets.mkdir(exist_ok=True)
    seen: list[tuple[int, int, int]] = []
    for number, (wait_s, is_paced) in enumerate([(0, True), (0, True), (59, True), (1, True), (1, False)]):
        clock.jump(wait_s)
        cursor = StoredCursor(committed=number, segment=1, ts="2026-11-15T10:00:00.000000Z", epoch=workspace.epoch)
        (workspace.layout.offsets / "t0__workers.json").write_bytes(encode_cursor(cursor))
        workspace.append([event(700 + number, "t0")])
        with monkeypatch.context() as patched:
            if number in (1, 2):
                patched.setattr(silver, "log_segments", no_spark)
            Pipeline(workspace.folder, TEST_SETTINGS, clock=clock, run=f"r{number}").run(no_spark, is_paced=is_paced)
        (committed,) = workspace.column("silver.group_cursors", "committed")
        last = max(workspace.column("silver.segments", "last_seq"))
        seen.append((committed, len(workspace.rows("silver.group_positions")), last))

    assert seen == [(0, 1, 51), (1, 1, 51), (2, 1, 51), (3, 2, 54), (4, 3, 55)]
    assert group_files.letter_files(workspace.layout) == []
