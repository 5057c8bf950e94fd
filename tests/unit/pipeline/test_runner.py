"""A run brings all tables to one seq; one that dies is carried on by the next; one that does not fit is refused."""

from __future__ import annotations

import contextlib
import functools
import itertools
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from tests.beyond import Beyond, crossed
from tests.spark_session import TEST_SETTINGS
from tests.unit.pipeline.support import Workspace, event
from tidings.core.clock import SYSTEM_CLOCK
from tidings.core.events import Event, EventMeta
from tidings.core.ids import LogIdMaker
from tidings.log.embedded import staging
from tidings.log.embedded.cursors import StoredCursor, encode_cursor
from tidings.log.embedded.disk import OsDisk
from tidings.log.embedded.layout import WorkspaceMeta, encode_meta
from tidings.pipeline import bronze, runner
from tidings.pipeline.bronze import Bronze
from tidings.pipeline.errors import EpochChanged, JavaMissing, JobFailed, LakeOfAnotherLog, PositionLost
from tidings.pipeline.jobs.job import Build, InputWindow, Job, JobContext, OutputTable, Partitioning
from tidings.pipeline.lake import Lake
from tidings.pipeline.runner import RunReport
from tidings.pipeline.session import ProgressStep
from tidings.pipeline.settings import PipelineSettings
from tidings.pipeline.silver import FROM_THE_BEGINNING, Silver
from tidings.pipeline.status import JobStates, idle_at
from tidings.pipeline.summaries import OWN_DEVICE

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark


def count_topics(tables: Mapping[str, DataFrame], context: JobContext) -> Mapping[str, DataFrame]:
    """How many events a topic has."""
    return {"gold.counts": tables["silver.events"].groupBy("topic").count().withColumnRenamed("count", "events")}


def tell_counts(tables: Mapping[str, DataFrame], context: JobContext) -> list[Event]:
    """One event a topic."""
    rows = tables["gold.counts"].collect()
    return [event(0, "counts", {"events": row.events}, event_id=f"counts-{row.topic}-{row.events}") for row in rows]


COUNTS = Job(
    "counts",
    "Counts.",
    ("silver.events",),
    (OutputTable("gold.counts", "topic string, events bigint", "One topic."),),
    count_topics,
    tell_counts,
)


class Died(BaseException):
    """The end of a process, as far as a test can make one."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log with something of everything."""
    made = Workspace(tmp_path_factory.mktemp("made") / "ws")
    made.append(event(number, f"t{number % 2}") for number in range(25))
    made.append(
        event(100 + number, "sync", actor=f"phone-{number % 2}", partitions=("p1", "p2")) for number in range(4)
    )
    made.append([event(200, "sync.projects", actor="web", partitions=("proj",))])
    return made.folder


@pytest.fixture(scope="module")
def ran(spark: SparkSession, made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same log after a run."""
    folder = tmp_path_factory.mktemp("ran") / "ws"
    shutil.copytree(made, folder)
    Workspace(folder).pipeline(TEST_SETTINGS).run(lambda: spark)
    return folder


@pytest.fixture
def workspace(made: Path, tmp_path: Path) -> Workspace:
    """A copy of the log."""
    shutil.copytree(made, tmp_path / "ws")
    return Workspace(tmp_path / "ws")


@pytest.fixture
def filled(ran: Path, tmp_path: Path) -> Workspace:
    """A copy of the log and its tables after a run."""
    shutil.copytree(ran, tmp_path / "ws")
    return Workspace(tmp_path / "ws")


STEPS: tuple[tuple[str, type | Any, str], ...] = (
    ("before a commit", Lake, "commit"),
    ("while files are written", Lake, "write_files"),
    ("before the hints", bronze, "save_hints"),
    ("before the quarantine", bronze.Bronze, "_set_apart"),
    ("before the archive is noted", runner, "save_archived"),
)


def dying(owner: Any, name: str, nth: int, *, after: bool) -> Callable[..., Any]:
    """The step, but for the nth time it is taken it ends the process, before or after it is done."""
    original: Callable[..., Any] = getattr(owner, name)
    calls = itertools.count(1)

    def dies(*args: Any, **options: Any) -> Any:
        is_end = next(calls) == nth
        if is_end and not after:
            raise Died
        answer = original(*args, **options)
        if is_end:
            raise Died
        return answer

    return dies


@pytest.mark.parametrize(
    "afters",
    [(False, True), *(pytest.param(afters, marks=pytest.mark.heavy) for afters in ((False, False), (True, True)))],
    ids=["in turn", "not done", "done"],
)
def test_runs_that_die_are_carried_on(
    spark: SparkSession, workspace: Workspace, monkeypatch: pytest.MonkeyPatch, afters: tuple[bool, bool]
) -> None:
    """
    Wherever runs end, before or after a step, one after the other, the last leaves tables that say what the log says, once.
    """
    count = 30
    for number, (_, owner, name) in enumerate(STEPS, 1):
        workspace.append(event(1000 * number + each, f"t{each % 2}") for each in range(3))
        count += 3
        with monkeypatch.context() as patched, contextlib.suppress(Died):
            patched.setattr(owner, name, dying(owner, name, 1 + 2 * (number % 2), after=afters[number // 2 % 2]))
            workspace.pipeline(TEST_SETTINGS).run(lambda: spark, [COUNTS])
    report = workspace.pipeline(TEST_SETTINGS).run(lambda: spark, [COUNTS])

    _is_right(workspace, report, count)


@pytest.mark.heavy
@pytest.mark.parametrize(("owner", "name"), [step[1:] for step in STEPS], ids=[step[0] for step in STEPS])
@pytest.mark.parametrize("after", [False, True], ids=["not done", "done"])
def test_a_run_that_dies_is_carried_on(
    spark: SparkSession, workspace: Workspace, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, after: bool
) -> None:
    """
    Wherever a run ends, before or after a step, the next ones leave tables that say what the log says, once.
    """
    for nth in (1, 3):
        workspace.append(event(1000 * nth + number, f"t{number % 2}") for number in range(7))
        with monkeypatch.context() as patched, contextlib.suppress(Died):
            patched.setattr(owner, name, dying(owner, name, nth, after=after))
            workspace.pipeline(TEST_SETTINGS).run(lambda: spark, [COUNTS])
    report = workspace.pipeline(TEST_SETTINGS).run(lambda: spark, [COUNTS])

    _is_right(workspace, report, 44)


def _is_right(workspace: Workspace, report: RunReport, count: int) -> None:
    verdict = workspace.verify()
    assert report.until == verdict.until == count
    assert verdict.is_equal
    assert workspace.column("silver.events", "seq") == list(range(1, count + 1))
    assert sum(workspace.column("gold.counts", "events")) == count
    assert len(workspace.rows("silver.sync_events")) == 9


def test_sync_events_are_spread_over_their_partitions(filled: Workspace) -> None:
    """
    An event that names two partitions is a row in each, with its dialect and client.
    """
    rows = filled.rows("silver.sync_events", "event_id", "partition", "dialect", "client_id", "project_id")
    assert ("ev-100", "p1", "A", "phone-0", None) in rows
    assert ("ev-100", "p2", "A", "phone-0", None) in rows
    assert ("ev-200", "proj", "B", "web", "proj") in rows
    assert len(rows) == 9


def test_an_id_that_comes_again_is_one_row_in_silver(spark: SparkSession, filled: Workspace) -> None:
    """
    If the log forgot an id with the records it dropped, and it comes again, bronze has both and silver the first.
    """
    assert filled.retain("t0", 0, archived={"t0": 100}) == 1
    filled.append([event(0, "t0"), event(999, "t0")])

    filled.pipeline(TEST_SETTINGS).run(lambda: spark)

    assert filled.column("bronze.events", "event_id").count("ev-0") == 2
    ids = filled.column("silver.events", "event_id")
    assert ids.count("ev-0") == 1
    assert "ev-999" in ids
    assert filled.verify().is_equal


def test_nobody_loses_a_row_because_a_stranger_has_its_id(
    spark: SparkSession, filled: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    Events of another space, or that say something else, are rows of their own whatever their ids: if the id comes twice in
    one run, and if it comes again after the log dropped the first. What was lost would be told by verify.
    """
    assert filled.retain("t0", 0, archived={"t0": 100}) == 1
    monkeypatch.setattr(staging, "LogIdMaker", lambda: LogIdMaker(bytes))  # no chance: the ids can be foreseen
    before = len(filled.column("bronze.events", "seq"))
    taken = f"ev-{before + 3:032x}"
    stranger: dict[str, Any] = {"space_id": "personal:mallory"}
    filled.append(
        [
            event(0, "t0", **stranger),
            event(0, "other", {}, event_id=taken, **stranger),
            Event(EventMeta("other", "MADE", "personal:alice"), {"text": "mine"}),
            event(4, "t0"),
            event(2, "t0", {"n": "something else"}),
        ]
    )

    filled.pipeline(TEST_SETTINGS).run(lambda: spark)

    rows = filled.rows("silver.events", "event_id", "space_id")
    assert sorted(row[1] for row in rows if row[0] == taken) == ["personal:alice", "personal:mallory"]
    assert sorted(row[1] for row in rows if row[0] == "ev-0") == ["personal:mallory", "shared:home"]
    assert [row[0] for row in rows].count("ev-4") == 1
    assert [row[0] for row in rows].count("ev-2") == 2
    assert filled.verify().is_equal


def test_groups_and_dead_letters_are_tables(spark: SparkSession, workspace: Workspace) -> None:
    """
    Where groups stand and what they gave up on is read from the bus's files, and again only if they changed.
    """
    offsets, dlq = workspace.layout.offsets, workspace.layout.dlq
    offsets.mkdir()
    dlq.mkdir()
    cursor = StoredCursor(committed=7, segment=1, ts="2026-11-15T10:00:00.000000Z", epoch=workspace.epoch)
    (offsets / "t0__workers.json").write_bytes(encode_cursor(cursor))
    (offsets / "t0__damaged.json").write_text('{"crc":"00000000","committed":1}\n')
    (offsets / "t0__damaged.json.bak").write_bytes(encode_cursor(msgspec.structs.replace(cursor, committed=3)))
    (offsets / "t0__lost.json").write_text('{"crc":"00000000","committed":9}\n')
    from tidings.bus.store import Attempt
    from tidings.bus.store.dead_letter_files import DeadLetterFiles
    from tidings.log.segment import decode

    record = decode(workspace.segments()[0].read_bytes().splitlines()[2])
    DeadLetterFiles(OsDisk(), dlq, SYSTEM_CLOCK).add(
        record,  # type: ignore[arg-type]
        "workers",
        ValueError("no"),
        [Attempt("2026-11-15T10:00:00.000000Z", "no")] * 2,
        "retries",
    )

    workspace.pipeline(TEST_SETTINGS).run(lambda: spark)
    version = workspace.lake.open("silver.group_cursors").version()
    workspace.pipeline(TEST_SETTINGS).run(lambda: spark)

    assert workspace.rows("silver.group_cursors", "topic", "group", "committed") == [
        ("t0", "damaged", 3),
        ("t0", "lost", -1),
        ("t0", "workers", 7),
    ]
    (letter,) = workspace.rows("silver.dead_letters", "group", "error", "category", "attempts", "state")
    assert letter == ("workers", "no", "retries", 2, "dead")
    assert workspace.lake.open("silver.group_cursors").version() == version

    # Lag over time: a run that finds nothing moved adds nothing.
    assert workspace.rows("silver.group_positions", "group", "committed", "head_offset", "lag") == [
        ("damaged", 3, 12, 9),
        ("lost", -1, 12, 13),
        ("workers", 7, 12, 5),
    ]
    workspace.append([event(9000, "t0")])
    workspace.pipeline(TEST_SETTINGS).run(lambda: spark)
    assert sorted(workspace.column("silver.group_positions", "lag")) == [5, 6, 9, 10, 13, 14]


def test_a_group_of_a_topic_without_a_readable_record_ends_no_run(spark: SparkSession, workspace: Workspace) -> None:
    """
    Where a topic's only segment has damaged lines alone, or there is none, its groups are behind nothing.
    """
    segment = next(path for path in workspace.segments() if path.name.startswith("t0."))
    segment.with_name(segment.name.replace("t0.", "t8.", 1)).write_text("no record\n")
    workspace.layout.offsets.mkdir()
    cursor = StoredCursor(committed=-1, segment=1, ts="2026-11-15T10:00:00.000000Z", epoch=workspace.epoch)
    for topic in ("t8", "t9"):
        (workspace.layout.offsets / f"{topic}__early.json").write_bytes(encode_cursor(cursor))

    workspace.pipeline(TEST_SETTINGS).run(lambda: spark)

    assert workspace.rows("silver.group_positions", "topic", "committed", "head_offset", "lag") == [
        ("t8", -1, -1, 0),
        ("t9", -1, -1, 0),
    ]


def test_a_job_runs_once_for_what_there_is(spark: SparkSession, workspace: Workspace) -> None:
    """
    A job that was done for a seq is not done again for it, unless that is asked for; its summary is told once.
    """
    told: list[Event] = []

    def publish(events: Sequence[Event]) -> bool:
        told.extend(events)
        return True

    first = workspace.pipeline(TEST_SETTINGS, publish).run(lambda: spark, [COUNTS])
    again = workspace.pipeline(TEST_SETTINGS, publish).run(lambda: spark, [COUNTS])
    forced = workspace.pipeline(TEST_SETTINGS, publish).run(lambda: spark, [COUNTS], again=["counts"])

    assert first.jobs[0].rows == {"gold.counts": 4}
    assert first.jobs[0].published == 4
    assert (again.jobs[0].rows, again.jobs[0].published) == (None, 0)
    assert forced.jobs[0].rows == {"gold.counts": 4}
    assert len(told) == 4


def test_a_summary_that_could_not_be_told_is_told_later(spark: SparkSession, workspace: Workspace) -> None:
    """
    While another process has the log, summaries wait; the next run has them, under the same ids.
    """
    told: list[str] = []
    workspace.pipeline(TEST_SETTINGS, lambda _: False).run(lambda: spark, [COUNTS])

    def publish(events: Sequence[Event]) -> bool:
        told.extend(str(each.meta.event_id) for each in events)
        return True

    workspace.pipeline(TEST_SETTINGS, publish).run(lambda: spark, [COUNTS])

    assert sorted(told) == ["counts-sync-4", "counts-sync.projects-1", "counts-t0-13", "counts-t1-12"]


def counts_of_spaces(tables: Mapping[str, DataFrame], context: JobContext) -> Mapping[str, DataFrame]:
    """How many events of topic ``news`` a space has."""
    news = tables["silver.events"].where("topic = 'news'").groupBy("space_id").count()
    return {"gold.spaces": news.withColumnRenamed("count", "events")}


def tell_spaces(tables: Mapping[str, DataFrame], context: JobContext) -> list[Event]:
    """One event a space, in the order of their names."""
    return [
        event(0, "told", {"n": row.events}, event_id=f"{row.space_id}-{row.events}", space_id=row.space_id)
        for row in tables["gold.spaces"].orderBy("space_id").collect()
    ]


SPACES = Job(
    "spaces",
    "Counts.",
    ("silver.events",),
    (OutputTable("gold.spaces", "space_id string, events bigint", "One space."),),
    counts_of_spaces,
    tell_spaces,
)


class Telling:
    """A workspace whose jobs' summaries go to its log."""

    def __init__(self, workspace: Workspace, spark: SparkSession, count_max: int) -> None:
        self.workspace = workspace
        self._spark = spark
        self._settings = msgspec.structs.replace(TEST_SETTINGS, jobs={"spaces": {"summaries_max": count_max}})
        self._numbers = itertools.count()
        self._told: list[str] = []

    def news(self, spaces: Sequence[str]) -> None:
        """Something happens in these spaces."""
        self.workspace.append(event(next(self._numbers), "news", space_id=space_id) for space_id in spaces)

    def run(self) -> list[str]:
        """One run; the ids that it published, in their order."""
        self._told = []
        report = self.workspace.pipeline(self._settings, self._publish).run(lambda: self._spark, [SPACES])
        assert report.failed == ()
        assert report.jobs[0].published == len(self._told)
        return self._told

    def _publish(self, events: Sequence[Event]) -> bool:
        self._told += [str(event.meta.event_id) for event in events]
        self.workspace.append(events)
        return True


@pytest.mark.slow
@pytest.mark.bound("pipeline.summaries.SUMMARIES_MAX")
@crossed
def test_what_a_page_of_summaries_leaves_over_comes_with_the_next(
    spark: SparkSession, tmp_path: Path, beyond: Beyond
) -> None:
    """
    With more spaces than a page each run publishes a page of those that were not published, until all were, once; also without any new
    record. News of the last space is published at once; and where all have news in each run, none is left out for ever.
    """
    count_max = 2
    telling = Telling(Workspace(tmp_path), spark, count_max)
    spaces = [f"s{number:02}" for number in range(beyond(count_max))]
    telling.news(spaces)

    pages = [telling.run() for _ in range(-(-len(spaces) // count_max) + 1)]
    assert all(len(page) == count_max for page in pages[:-2])
    assert sorted(itertools.chain(*pages)) == [f"{space}-1" for space in spaces]
    assert pages[-1] == []

    telling.news(spaces[-1:])
    assert telling.run() == [f"{spaces[-1]}-2"]

    turns: list[str] = []
    for _ in pages[:-1]:
        telling.news(spaces)
        turns += telling.run()
    assert {name.partition("-")[0] for name in turns} == set(spaces)


def test_what_was_published_is_not_published_again_when_the_log_dropped_it(spark: SparkSession, tmp_path: Path) -> None:
    """Retention drops the topic of the summaries, and with it the log's memory of their ids; the next runs publish none of them again."""
    telling = Telling(Workspace(tmp_path), spark, 1000)
    spaces = [f"s{number:02}" for number in range(25)]
    telling.news(spaces)
    assert len(telling.run()) == 25
    telling.news(spaces[:1])
    assert telling.run() == ["s00-2"]
    telling.workspace.append(event(number, "other") for number in range(1000, 1010))
    telling.run()

    assert telling.workspace.retain("told", 1) > 0
    telling.news(spaces[:1])

    assert telling.run() == ["s00-3"]
    assert telling.run() == []


def test_a_job_that_fails_stops_no_other(spark: SparkSession, workspace: Workspace) -> None:
    """
    Each failure is told with its job; the other jobs are done, and the failed one's tables are as they were.
    """

    def broken(tables: Mapping[str, DataFrame], context: JobContext) -> Mapping[str, DataFrame]:
        raise ValueError("no idea")

    def other(tables: Mapping[str, DataFrame], context: JobContext) -> Mapping[str, DataFrame]:
        return {"gold.other": tables["silver.events"].select("topic", "seq")}

    def nothing(tables: Mapping[str, DataFrame], context: JobContext) -> Mapping[str, DataFrame]:
        return {}

    output = (OutputTable("gold.other", "topic string", "One."),)
    jobs = [
        Job("broken", "", ("silver.events",), (OutputTable("gold.broken", "n int", ""),), broken),
        Job("other", "", ("silver.events",), output, other),
        Job("nothing", "", (), (OutputTable("gold.nothing", "n int", ""),), nothing),
        COUNTS,
    ]

    report = workspace.pipeline(TEST_SETTINGS).run(lambda: spark, jobs)

    problems = {job.name: str(job.error) for job in report.failed}
    assert "no idea" in problems["broken"]
    assert "'seq' that it did not promise" in problems["other"]
    assert "did not build it" in problems["nothing"]
    assert all(isinstance(job.error, JobFailed) for job in report.failed)
    assert report.jobs[-1].rows == {"gold.counts": 4}
    assert not workspace.lake.exists("gold.broken")


def test_a_job_waits_for_tables_that_were_never_made(spark: SparkSession, workspace: Workspace) -> None:
    """
    Where a job fails that has never made its table, a job that reads it, and one that reads that one's, are not run and store
    nothing; once it has been made, a later failure leaves them to what there is.
    """
    is_broken = True

    def first(tables: Mapping[str, DataFrame], context: JobContext) -> Mapping[str, DataFrame]:
        if is_broken:
            raise ValueError("no idea")
        return {"gold.first": tables["silver.events"].select("topic")}

    def copy(source: str, target: str) -> Build:
        return lambda tables, _: {target: tables[source].select("topic")}

    def job(name: str, source: str, build: Build) -> Job:
        return Job(name, "", (source,), (OutputTable(f"gold.{name}", "topic string", ""),), build)

    jobs = [
        job("first", "silver.events", first),
        job("second", "gold.first", copy("gold.first", "gold.second")),
        job("third", "gold.second", copy("gold.second", "gold.third")),
        COUNTS,
    ]

    def outcome() -> dict[str, tuple[bool, str]]:
        report = workspace.pipeline(TEST_SETTINGS).run(lambda: spark, jobs)
        return {result.name: (result.rows is not None, result.waits_for) for result in report.jobs}

    assert outcome() == {
        "first": (False, ""),
        "second": (False, "first"),
        "third": (False, "second"),
        "counts": (True, ""),
    }
    assert not any(workspace.lake.exists(f"gold.{name}") for name in ("first", "second", "third"))

    is_broken = False
    assert [was_run for was_run, _ in outcome().values()] == [True, True, True, False]
    is_broken = True
    workspace.append([event(9000, "new")])
    assert outcome()["second"] == (True, "")
    assert "new" not in workspace.column("gold.third", "topic")


def test_a_spark_that_cannot_be_started_is_no_jobs_fault(workspace: Workspace) -> None:
    """
    Where Spark cannot be started the run says so; no job is noted as failed, and what needs no Spark was done.
    """

    def session() -> SparkSession:
        raise JavaMissing(("none",))

    with pytest.raises(JavaMissing):
        workspace.pipeline(TEST_SETTINGS).run(session, [COUNTS])

    assert JobStates(workspace.lake.storage, workspace.layout.read_meta(OsDisk()).epoch).failed() == {}
    assert workspace.verify().is_equal


def test_a_job_may_read_a_table_that_was_never_made(spark: SparkSession, workspace: Workspace) -> None:
    """
    A table that nobody has filled yet is an empty one, not an error.
    """

    def build(tables: Mapping[str, DataFrame], context: JobContext) -> Mapping[str, DataFrame]:
        return {"gold.sum": tables["gold.counts"].select("topic")}

    late = Job(
        "late", "", ("gold.counts", "silver.dead_letters"), (OutputTable("gold.sum", "topic string", ""),), build
    )
    report = workspace.pipeline(TEST_SETTINGS).run(lambda: spark, [late, COUNTS])

    assert report.jobs[0].rows == {"gold.sum": 0}


def test_the_runs_idea_of_now_comes_from_the_log(spark: SparkSession, workspace: Workspace) -> None:
    """
    Jobs get the time of writing of the last record, and their own settings.
    """
    seen: list[JobContext] = []

    def build(tables: Mapping[str, DataFrame], context: JobContext) -> Mapping[str, DataFrame]:
        seen.append(context)
        return count_topics(tables, context)

    settings = PipelineSettings(master="local[2]", jobs={"counts": {"limit": 3}})
    job = Job("counts", "", COUNTS.reads, COUNTS.writes, build)
    workspace.pipeline(settings).run(lambda: spark, [job])

    (context,) = seen
    assert context.as_of == max(workspace.column("bronze.events", "written_at"))
    assert (context.until, context.epoch, context.settings) == (30, workspace.epoch, {"limit": 3})


def no_spark() -> SparkSession:
    """A session that must not be asked for."""
    raise AssertionError("Spark was started")


def test_a_run_with_nothing_new_starts_no_spark(spark: SparkSession, filled: Workspace) -> None:
    """
    With nothing new in the log Spark is not even started, and what the pipeline itself published is nothing new: it reaches
    the tables with the next record of somebody else.
    """
    assert filled.pipeline(TEST_SETTINGS).run(no_spark).until == 30
    segments = filled.lake.note("silver.segments")
    filled.append([event(900 + number, device=OWN_DEVICE) for number in range(3)])
    assert filled.pipeline(TEST_SETTINGS).run(no_spark).until == 30
    assert filled.lake.note("silver.segments") == segments  # jobs that read it are not due

    filled.append([event(910)])
    report = filled.pipeline(TEST_SETTINGS).run(lambda: spark)

    assert (report.until, report.bronze.rows) == (34, 4)


def test_beside_a_stream_jobs_run_for_what_others_wrote(
    spark: SparkSession, filled: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    Jobs over what silver holds run for all that they have not seen, once; rows that the pipeline itself published make none of
    them due.
    """
    pipeline = filled.pipeline(TEST_SETTINGS)
    (first,) = pipeline.run_gold(lambda: spark, [COUNTS])
    again = pipeline.run_gold(no_spark, [COUNTS])
    monkeypatch.setattr(runner.Pipeline, "_is_own", lambda *_: False)  # a stream takes in whatever comes
    filled.append([event(900, device=OWN_DEVICE)])
    filled.pipeline(TEST_SETTINGS).run(lambda: spark)

    assert first.rows == {"gold.counts": 4}
    assert again == ()
    assert filled.lake.note("silver.events")["seq"] == 31
    assert filled.pipeline(TEST_SETTINGS).run_gold(no_spark, [COUNTS]) == ()


@pytest.mark.parametrize(("cores", "at_once"), [(2, 1), (8, 3)])
def test_beside_a_stream_a_core_is_left_to_it(
    spark: SparkSession, filled: Workspace, monkeypatch: pytest.MonkeyPatch, cores: int, at_once: int
) -> None:
    """What fills silver meanwhile does not wait for the jobs: of three that could run side by side, on two cores one runs at a time."""
    running, most, lock, are_there = 0, 0, threading.Lock(), threading.Event()

    def job(number: int) -> Job:
        table = f"gold.counts_{number}"

        def build(tables: Mapping[str, DataFrame], context: JobContext) -> Mapping[str, DataFrame]:
            nonlocal running, most
            with lock:
                running += 1
                most = max(most, running)
                if running == at_once:
                    are_there.set()
            assert are_there.wait(60)
            with lock:
                running -= 1
            return {table: count_topics(tables, context)["gold.counts"]}

        return replace(COUNTS, name=table, build=build, writes=(replace(COUNTS.writes[0], table=table),))

    jobs = [job(number) for number in range(3)]
    monkeypatch.setattr(runner, "cores_of", lambda _: cores)

    results = filled.pipeline(TEST_SETTINGS).run_gold(lambda: spark, jobs)

    assert [result.error for result in results] == [None] * 3
    assert most == at_once


def test_a_run_that_left_nothing_to_do_is_known_without_a_look_at_the_tables(
    spark: SparkSession, workspace: Workspace
) -> None:
    """
    What was asked for and done is known to be done until a file of the log changes; something else that is asked for is not,
    nor is a run in which a job failed, or could not tell the log what it found.
    """
    idle = functools.partial(idle_at, workspace.lake.storage, workspace.layout)
    workspace.pipeline(TEST_SETTINGS, lambda _: False).run(lambda: spark, [COUNTS], request="counts")
    assert idle("counts") is None
    workspace.pipeline(TEST_SETTINGS, lambda _: True).run(lambda: spark, [COUNTS], request="counts")
    assert (idle("counts"), idle("more")) == (30, None)

    workspace.append([event(500)])

    assert idle("counts") is None


def test_a_summary_that_cannot_be_published_stops_nobody(spark: SparkSession, workspace: Workspace) -> None:
    """
    If the log refuses what a job has to say, the job is reported and noted, the others are done, and the next run tries the
    summary again without making the table anew.
    """
    told: list[Event] = []

    def refusing(events: Sequence[Event]) -> bool:
        raise ValueError("payload.events: not a finite number")

    def publish(events: Sequence[Event]) -> bool:
        told.extend(events)
        return True

    silent = replace(COUNTS, name="silent", writes=(replace(COUNTS.writes[0], table="gold.silent"),), build=_silent)
    first = workspace.pipeline(TEST_SETTINGS, refusing).run(lambda: spark, [COUNTS, replace(silent, summarise=None)])
    state = JobStates(workspace.lake.storage, workspace.epoch).of("counts")
    second = workspace.pipeline(TEST_SETTINGS, publish).run(lambda: spark, [COUNTS])

    assert [(job.name, str(job.error)) for job in first.failed] == [
        ("counts", "job 'counts' failed: its summary: ValueError: payload.events: not a finite number")
    ]
    assert first.jobs[1].rows == {"gold.silent": 4}
    assert state.problem == "its summary: ValueError: payload.events: not a finite number"
    assert (second.failed, second.jobs[0].rows, second.jobs[0].published) == ((), None, 4)
    assert {event.meta.device for event in told} == {OWN_DEVICE}
    assert JobStates(workspace.lake.storage, workspace.epoch).of("counts").problem == ""


def _silent(tables: Mapping[str, DataFrame], context: JobContext) -> Mapping[str, DataFrame]:
    return {"gold.silent": count_topics(tables, context)["gold.counts"]}


def test_jobs_that_do_not_need_each_other_run_side_by_side(spark: SparkSession, filled: Workspace) -> None:
    """Two jobs that read the same table are at work at the same time; one that reads theirs comes after both."""
    both = threading.Barrier(2, timeout=60)
    seen: list[str] = []

    def build(name: str) -> Build:
        def made(tables: Mapping[str, DataFrame], context: JobContext) -> Mapping[str, DataFrame]:
            if name != "last":
                both.wait()
            seen.append(name)
            return {f"gold.{name}": next(iter(tables.values())).select("topic")}

        return made

    jobs = [
        Job(name, "", reads, (OutputTable(f"gold.{name}", "topic string", ""),), build(name))
        for name, reads in (("a", ("silver.events",)), ("b", ("silver.events",)), ("last", ("gold.a", "gold.b")))
    ]
    report = filled.pipeline(TEST_SETTINGS).run(lambda: spark, jobs)

    assert report.failed == ()
    assert seen[-1] == "last"


def test_whoever_others_wait_for_longest_goes_first(spark: SparkSession, filled: Workspace) -> None:
    """One at a time: by what jobs took last, first the one with the longest way behind it, however short it is itself."""
    seen: list[str] = []

    def build(name: str) -> Build:
        def made(tables: Mapping[str, DataFrame], context: JobContext) -> Mapping[str, DataFrame]:
            seen.append(name)
            return {f"gold.{name}": next(iter(tables.values())).select("topic")}

        return made

    jobs = [
        Job(name, "", (reads,), (OutputTable(f"gold.{name}", "topic string", ""),), build(name))
        for name, reads in (
            ("a", "silver.events"),
            ("b", "silver.events"),
            ("first", "silver.events"),
            ("second", "gold.first"),
        )
    ]
    states = JobStates(filled.lake.storage, filled.epoch)
    for name, seconds in {"a": 3.0, "b": 9.0, "first": 0.5, "second": 8.9}.items():
        states.update(name, seconds=seconds)
    settings = msgspec.structs.replace(TEST_SETTINGS, jobs_at_once_max=1)

    assert filled.pipeline(settings).run(lambda: spark, jobs).failed == ()

    assert seen == ["first", "b", "second", "a"]


def test_rows_of_short_events_are_handed_over_by_number(spark: SparkSession, workspace: Workspace) -> None:
    """
    A job over much, whose rows each come from one event, has its batches bound by a number of rows as long as no payload is long;
    from the first long one on by bytes. Jobs of other kinds are always bound by bytes.
    """
    seen: dict[str, list[bool]] = {"by_seq": [], "whole": []}

    def build(name: str) -> Build:
        def made(tables: Mapping[str, DataFrame], context: JobContext) -> Mapping[str, DataFrame]:
            events = tables["silver.events"]
            bytes_max = events.sparkSession.conf.get("spark.sql.execution.arrow.maxBytesPerBatch") or ""
            seen[name].append(int(bytes_max) < (1 << 31) - 1)
            return {f"gold.{name}": events.select("seq")}

        return made

    by_seq = Partitioning(lambda _: {"silver.events": InputWindow("seq")}, seq_column="seq")
    jobs = [
        Job(
            name,
            "",
            ("silver.events",),
            (OutputTable(f"gold.{name}", "seq bigint", ""),),
            build(name),
            partitioning=how,
        )
        for name, how in (("by_seq", by_seq), ("whole", None))
    ]
    settings = msgspec.structs.replace(TEST_SETTINGS, undivided_rows_max=0)

    def run() -> None:
        assert workspace.pipeline(settings).run(lambda: spark, jobs).failed == ()

    run()
    workspace.append([event(10_000, payload={"text": "x" * 40_000})])
    run()
    workspace.append([event(10_001)])
    run()

    assert seen == {"by_seq": [False, True, True], "whole": [True, True, True]}
    assert workspace.column("gold.by_seq", "seq") == workspace.column("silver.events", "seq")


def test_a_new_epoch_is_refused_until_it_is_accepted(spark: SparkSession, filled: Workspace) -> None:
    """
    After repair gave the log a new epoch, the tables are set aside whole, if that is accepted, and begun anew.
    """
    old = filled.epoch
    _renew_epoch(filled, keeps_trace=True)

    with pytest.raises(EpochChanged) as caught:
        filled.pipeline(TEST_SETTINGS).run(lambda: spark)
    assert (caught.value.lake_epoch, caught.value.log_epoch) == (old, filled.epoch)
    assert filled.lake.exists("bronze.events")
    report = filled.pipeline(TEST_SETTINGS).run(lambda: spark, accepts_epoch=True)

    assert report.bronze.rows == 30
    assert (filled.lake.storage.path / "tables" / "bronze" / "events" / "_delta_log").is_dir()
    assert filled.lake.tables_folder.path.name == f"tables-{filled.epoch}"
    assert filled.verify().is_equal


def test_the_lake_of_another_log_is_refused(spark: SparkSession, filled: Workspace) -> None:
    """
    A lake whose epoch this log never had is left untouched, accepted or not.
    """
    _renew_epoch(filled, keeps_trace=False)

    for accepts_epoch in (False, True):
        with pytest.raises(LakeOfAnotherLog):
            filled.pipeline(TEST_SETTINGS).run(lambda: spark, accepts_epoch=accepts_epoch)
    assert filled.column("bronze.events", "seq") == list(range(1, 31))


def _renew_epoch(workspace: Workspace, *, keeps_trace: bool) -> None:
    meta = workspace.layout.read_meta(OsDisk())
    if keeps_trace:
        aside = workspace.layout.aside / "20261115T100000"
        aside.mkdir(parents=True)
        (aside / "meta.json").write_bytes(workspace.layout.meta.read_bytes())
    fresh = WorkspaceMeta(format=meta.format, epoch="f" * 16, created_at=meta.created_at, layout=meta.layout)
    workspace.layout.meta.write_bytes(encode_meta(fresh))


def test_a_log_from_a_backup_is_refused(spark: SparkSession, filled: Workspace) -> None:
    """
    A log that is shorter than what the lake took from it is not read on.
    """
    saved = {path: path.read_bytes() for path in filled.layout.root.rglob("*") if path.is_file()}
    filled.append(event(5000 + number) for number in range(5))
    filled.pipeline(TEST_SETTINGS).run(lambda: spark)
    for path in filled.layout.root.rglob("*"):
        if path.is_file() and path not in saved:
            path.unlink()
    for path, data in saved.items():
        path.write_bytes(data)

    with pytest.raises(PositionLost):
        filled.pipeline(TEST_SETTINGS).run(lambda: spark)


def test_progress_names_stages_and_rows(spark: SparkSession, workspace: Workspace) -> None:
    """
    Whoever asks is told each stage, its tasks and the rows so far.
    """
    steps: list[ProgressStep] = []

    workspace.pipeline(TEST_SETTINGS).run(lambda: spark, [COUNTS], progress=steps.append)

    assert list(dict.fromkeys(step.stage for step in steps)) == ["bronze", "silver", "counts"]
    assert [step.rows for step in steps if step.stage == "bronze"][-1] == 30
    assert all(step.total is None or step.done <= step.total for step in steps)


@pytest.mark.parametrize("step", ["fill_bronze", "fill_silver"])
def test_two_runs_at_once_lose_and_repeat_nothing(
    spark: SparkSession, workspace: Workspace, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """
    Of two runs that do the same step the second goes on from what the first did; what is there is what one run would have made.
    """
    owner, name = {"fill_bronze": (Bronze, "take"), "fill_silver": (Silver, "fill")}[step]
    original = getattr(owner, name)

    def overtaken(*args: Any) -> Any:
        monkeypatch.setattr(owner, name, original)
        workspace.pipeline(TEST_SETTINGS).run(lambda: spark, [COUNTS])
        return original(*args)

    monkeypatch.setattr(owner, name, overtaken)
    workspace.pipeline(TEST_SETTINGS).run(lambda: spark, [COUNTS])

    assert workspace.verify().is_equal
    assert len(workspace.rows("bronze.events")) == len(workspace.rows("silver.events")) == 30
    assert sum(row[0] for row in workspace.rows("gold.counts", "events")) == 30


def test_a_job_that_another_run_has_done_is_done(
    spark: SparkSession, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    Another run does a job while this one computes it: here it is done too, not failed, and the table is as after one of them.
    """
    mine, other = workspace.pipeline(TEST_SETTINGS), workspace.pipeline(TEST_SETTINGS)
    writing, coming = Lake.write_files, iter([other])

    def write_files(self: Lake, *given: Any, **named: Any) -> Any:
        found = writing(self, *given, **named)
        if self is mine.lake:
            for beside in coming:
                assert beside.run(lambda: spark, [COUNTS]).failed == ()
        return found

    monkeypatch.setattr(Lake, "write_files", write_files)
    report = mine.run(lambda: spark, [COUNTS])

    assert (report.failed, report.jobs[0].rows, list(coming)) == ((), None, [])
    assert JobStates(workspace.lake.storage, workspace.epoch).failed() == {}
    assert len(workspace.rows("gold.counts")) == 4
    assert workspace.verify().is_equal


def test_silver_can_be_made_anew(spark: SparkSession, filled: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Silver is derived: made anew from bronze it has the same rows, and whoever reads it meanwhile sees the old ones.
    """
    before = filled.rows("silver.events", "seq", "event_id", "payload")
    seen: list[int] = []
    commit = Lake.commit

    def watched(lake: Lake, table: str, *args: Any, **options: Any) -> int:
        seen.append(len(filled.rows("silver.events", "seq")))
        return commit(lake, table, *args, **options)

    monkeypatch.setattr(Lake, "commit", watched)
    filled.pipeline(TEST_SETTINGS).run(lambda: spark, silver_anew=FROM_THE_BEGINNING)

    assert set(seen) == {len(before)}
    assert filled.rows("silver.events", "seq", "event_id", "payload") == before
    assert len(filled.rows("silver.sync_events")) == 9


def test_while_following_a_job_that_costs_all_of_history_waits_its_turn(
    spark: SparkSession, workspace: Workspace
) -> None:
    """A paced run takes new records in and leaves such a job's tables for later; its turn comes by the log's own time."""
    patient = msgspec.structs.replace(TEST_SETTINGS, rebuild_interval_s=3600.0)
    eager = msgspec.structs.replace(TEST_SETTINGS, rebuild_interval_s=0.0)
    workspace.pipeline(patient).run(lambda: spark, [COUNTS], is_paced=True)
    workspace.append([event(300, "t0")])

    early = workspace.pipeline(patient).run(lambda: spark, [COUNTS], is_paced=True)
    asked = workspace.pipeline(patient).run(lambda: spark, [COUNTS])
    workspace.append([event(301, "t0")])
    due = workspace.pipeline(eager).run(lambda: spark, [COUNTS], is_paced=True)

    assert early.bronze.rows == 1
    assert early.jobs[0].rows is None
    assert asked.jobs[0].rows == {"gold.counts": 4}
    assert due.jobs[0].rows == {"gold.counts": 4}
