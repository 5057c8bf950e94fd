"""Partitioned jobs: built step by step their tables are what they would be built at once, and a step costs no more than it must."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pyspark.sql import DataFrame, SparkSession

from tests.spark_session import TEST_SETTINGS
from tests.unit.pipeline.jobs.support import START
from tests.unit.pipeline.support import SMALL, Workspace
from tidings.core.clock import ns_of
from tidings.core.events import Event, EventMeta
from tidings.log.embedded import open_log
from tidings.pipeline.gold import JobResult
from tidings.pipeline.jobs.job import InputWindow, Job, JobContext, OutputTable, Partitioning
from tidings.pipeline.jobs.registry import all_jobs, choose
from tidings.pipeline.lake import Lake
from tidings.pipeline.settings import PipelineSettings
from tidings.testing import VirtualClock

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]

PARTITIONED = tuple(job for job in all_jobs() if job.partitioning is not None)
_READ = {table for job in PARTITIONED for table in job.reads}
WITH_INPUTS = tuple(
    job for job in all_jobs() if job in PARTITIONED or not _READ.isdisjoint(each.table for each in job.writes)
)
SUMMED = choose(all_jobs(), ["temporal_patterns", "temporal_gc"])
"""Made as a whole, of tables that are made bit by bit."""
SETTINGS = msgspec.structs.replace(
    TEST_SETTINGS,
    compact_files_min=4,
    jobs={
        "temporal_index": {"ttl_days": 3},
        "temporal_gc": {"ttl_days": 3},
        "learning_drift": {"reference_days": 2, "rows_min": 2},
        "consolidation_keeping": {"half_life_h": 4.0, "keep_min": 0.3},  # so that some are kept for a day or two
        "consolidation_rollups": {"patch_share_max": 0.0},  # else what is not over yet may be summed up later
    },
)
MINUTES = choose(all_jobs(), ["topic_minutes"])
TRAFFIC = choose(all_jobs(), ["sync_traffic"])


def append(workspace: Workspace, events: Sequence[Event], day: float) -> None:
    """Have the log take events, so many days after the start."""

    async def fill() -> None:
        clock = VirtualClock(ns_of(START + timedelta(days=day)))
        log = await open_log(workspace.folder, SMALL, clock=clock)
        try:
            await log.append_many(list(events))
        finally:
            await log.close()

    asyncio.run(fill())


class Chance:
    """Events of every kind that the jobs look at, whose times and names often have something to do with each other."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._numbers = itertools.count()

    def slice_of(self, day: float, count: int) -> list[Event]:
        """Events of about a day, some of them late by days."""
        return [self._event(day) for _ in range(count)]

    def _event(self, day: float) -> Event:
        chance, number = self._random, next(self._numbers)
        late = chance.choice([0.0, 0.0, 0.0, chance.uniform(0, 3)])
        at = START + timedelta(days=day - late, seconds=chance.uniform(-7200, 0))
        topic, kind, payload = self._told(number)
        if topic in ("hippo", "temporal"):
            # What happened is told under its own time, which is another than the event's.
            payload["occurred_at" if topic == "hippo" else "ts"] = (
                at - timedelta(hours=chance.choice([0, 30]))
            ).isoformat()
        meta = EventMeta(
            topic=topic,
            type=kind,
            space_id=chance.choice(["s1", "s2"]),
            event_id=f"e{number}",
            ts=at,
            actor=chance.choice(["ada", "ben"]),
            partitions=("p1", "p2") if topic == "sync" else (),
            trace_id=f"t{number // 3}",
        )
        return Event(meta, payload)

    def _told(self, number: int) -> tuple[str, str, dict[str, Any]]:
        chance = self._random
        near = number - chance.randrange(0, 6)
        p = chance.random()
        makers: list[Callable[[], tuple[str, str, dict[str, Any]]]] = [
            lambda: ("hippo", "HIPPO_ENCODE", {"content": {"text": f"about {near}"}, "tags": ["x"]}),
            lambda: ("temporal", "TEMPORAL_INGEST", {"event_id": f"e{near}", "tz": "Asia/Tokyo"}),
            lambda: ("affect", "AFFECT_ANNOTATED", {"arousal": p, "valence": p - 0.5, "event_id": f"e{near}"}),
            lambda: ("metacog", "METACOG_REPORT", {"surprise": p, "brier": p}),
            lambda: ("actions", "ACTION_DECISION", {"plan_id": f"pl{near // 4}", "confidence": p, "action": "lamp"}),
            lambda: (
                "actions",
                "ACTION_EXECUTED",
                {"plan_id": f"pl{near // 4}", "status": chance.choice(["OK", "NO"])},
            ),
            lambda: ("cortex", "CORTEX_PREDICTION", {"plan_id": f"pl{near // 4}", "heads": {"ok": {"value": p}}}),
            lambda: (
                *("retrieval", "RETRIEVAL_IMPRESSION"),
                {"query_id": f"q{near // 4}", "ranked": [{"doc_id": f"d{n}", "score": n} for n in range(5)]},
            ),
            lambda: ("retrieval", "RETRIEVAL_CLICK", {"query_id": f"q{near // 4}", "doc_id": f"d{number % 5}"}),
            lambda: (
                *("bus.gate.decisions.audit", "cognitive.attention.gate.admit"),
                {"request_id": f"pl{near // 4}", "gate_decision": {"action": "ADMIT", "priority": p}},
            ),
            lambda: ("sync", "EDIT", {"n": number}),
        ]
        return chance.choice(makers)()


def tables_of(workspace: Workspace, jobs: Sequence[Job]) -> dict[str, list[Any]]:
    """All rows of the jobs' tables, in an order, numbers to nine digits."""
    names = [output.table for job in jobs for output in job.writes]
    return {name: sorted((_rounded(row) for row in workspace.rows(name)), key=repr) for name in names}


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.9g}")
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    return tuple(_rounded(each) for each in value) if isinstance(value, list | tuple) else value


def made(
    spark: SparkSession,
    workspace: Workspace,
    jobs: Sequence[Job],
    settings: PipelineSettings = SETTINGS,
    *,
    is_again: bool = False,
) -> dict[str, JobResult]:
    """Run the jobs; what became of each."""
    report = workspace.pipeline(settings).run(lambda: spark, jobs, again=[job.name for job in jobs] if is_again else ())
    assert [str(job.error) for job in report.failed] == []
    return {job.name: job for job in report.jobs}


@pytest.mark.heavy
@pytest.mark.parametrize("seed", [1, 2])
def test_slice_by_slice_is_what_it_is_at_once(spark: SparkSession, tmp_path: Path, seed: int) -> None:
    """
    After every slice of a random log, with late events, erasures and rows whose time runs out, each table of a partitioned job
    has the rows that it has when it is made anew from all of the log.
    """
    workspace, chance = Workspace(tmp_path), Chance(seed)
    partitioned: set[str] = set()
    for number, day in enumerate([0.0, 0.02, 1.1, 1.2, 4.3]):
        events = chance.slice_of(day, 60)
        if number == 2:
            gone = {"object_id": "e3", "object_type": "memory"}
            events.append(Event(EventMeta("hippo", "TOMBSTONE_PROPAGATE", "s1", f"gone{seed}", START), gone))
        append(workspace, events, day)
        results = made(spark, workspace, WITH_INPUTS)
        partitioned |= {name for name, result in results.items() if result.days}

    bit_by_bit = tables_of(workspace, WITH_INPUTS)
    made(spark, workspace, SUMMED)
    summed = tables_of(workspace, SUMMED)
    at_once = made(spark, workspace, WITH_INPUTS, is_again=True)
    made(spark, workspace, SUMMED, is_again=True)

    assert partitioned == {job.name for job in PARTITIONED if job.partitioning and not job.partitioning.seq_column}
    assert {result.days for result in at_once.values()} == {None}
    assert all(bit_by_bit[name] for name in ("gold.temporal_index", "gold.learning_ranker", "gold.learning_drift"))
    for name, rows in tables_of(workspace, WITH_INPUTS).items():
        assert bit_by_bit[name] == rows, name
    # No erasure of this log names another space.
    assert all(rows for table, rows in summed.items() if table != "gold.refused_erasures")
    assert summed == tables_of(workspace, SUMMED)


@pytest.mark.heavy
def test_a_run_reads_only_what_its_days_depend_on(spark: SparkSession, tmp_path: Path) -> None:
    """However long the history grows, a run over the next day is given as many files as before, and rebuilds one day."""
    workspace = Workspace(tmp_path)
    settings = msgspec.structs.replace(SETTINGS, compact_files_min=1000)
    read, there = [], []
    for day in range(4):
        at = START + timedelta(days=day)
        batch = [Event(EventMeta("t", "X", "s1", f"e{day}-{number}", at), {"n": number}) for number in range(5)]
        append(workspace, batch, day)
        result = made(spark, workspace, MINUTES, settings)["topic_minutes"]
        read.append(result.files_read)
        there.append(result.files_there)
        assert result.rows == {"gold.topic_minutes": 1}
        assert result.days == (None if day == 0 else 1)

    assert there == [1, 2, 3, 4]
    assert read == [1] * 4
    assert workspace.column("gold.topic_minutes", "events") == [5] * 4


def test_a_job_is_given_what_is_recent_and_what_it_made_before(spark: SparkSession, tmp_path: Path) -> None:
    """
    Of a table whose last day alone is recent a run reads no older files and rows; and a job that reads its own table finds there
    what the last run made, unless that was by other settings, or the job is done again.
    """
    workspace = Workspace(tmp_path)

    def build(tables: Mapping[str, DataFrame], _: JobContext) -> Mapping[str, DataFrame]:
        return {"gold.seen": tables["bronze.events"].select("seq").unionByName(tables["gold.seen"])}

    job = Job(
        name="seen",
        about="What was there.",
        reads=("bronze.events", "gold.seen"),
        writes=(OutputTable("gold.seen", "seq bigint", "A record."),),
        build=build,
        recent=lambda _: {"bronze.events": InputWindow("written_at", days_before=1)},
    )
    found, read = [], []
    other = msgspec.structs.replace(SETTINGS, jobs={"seen": {"x": 1}})
    for day, settings in ((0, SETTINGS), (1, SETTINGS), (3, SETTINGS), (4, other)):
        append(workspace, [Event(EventMeta("t", "X", "s1", f"e{day}", START), {})], day)
        read.append(made(spark, workspace, [job], settings)["seen"].files_read)
        found.append(sorted(workspace.column("gold.seen", "seq")))

    made(spark, workspace, [job], other, is_again=True)
    found.append(sorted(workspace.column("gold.seen", "seq")))

    assert found == [[1], [1, 1, 2], [1, 1, 2, 3], [3, 4], [3, 4]]
    assert read == [1, 3, 2, 2]


def test_one_record_of_a_wrong_clock_empties_no_index(spark: SparkSession, tmp_path: Path) -> None:
    """
    The index of a log whose clock once stood forty years ahead has the moments that it had, and those that come after; also if
    a run took that time for its own, as versions before this one did, and dropped all rows as past their life.
    """
    workspace = Workspace(tmp_path)
    jobs = choose(all_jobs(), ["temporal_index"])
    settings = msgspec.structs.replace(SETTINGS, jobs={"temporal_index": {"ttl_days": 3650}})

    def memory(number: int) -> Event:
        return Event(EventMeta("hippo", "HIPPO_ENCODE", "s1", f"m{number}", START), {"content": {"text": "x"}})

    append(workspace, [memory(1)], 0)
    append(workspace, [memory(2)], 14_610)
    was_believed = workspace.pipeline(settings)
    was_believed._clock = VirtualClock(ns_of(START + timedelta(days=14_610)))
    assert was_believed.run(lambda: spark, jobs).failed == ()
    assert workspace.rows("gold.temporal_index") == []

    append(workspace, [memory(3)], 1)
    made(spark, workspace, jobs, settings)

    assert set(workspace.column("gold.temporal_index", "doc_id")) == {"m1", "m2", "m3"}


def test_rows_of_days_that_no_window_reaches_fail_the_job(spark: SparkSession, tmp_path: Path) -> None:
    """
    A job that counts by Tokyo's days what its window takes for days in UTC fails by name, and says what to give; with that window the
    rows made day by day are those made at once. A row without a day fails the job too.
    """
    workspace = Workspace(tmp_path)

    def job(name: str, day: str, **window: int) -> Job:
        def build(tables: Mapping[str, DataFrame], _: JobContext) -> Mapping[str, DataFrame]:
            return {f"gold.{name}": tables["silver.events"].selectExpr(f"{day} as date").groupBy("date").count()}

        return Job(
            name=name,
            about="Orders by day.",
            reads=("silver.events",),
            writes=(OutputTable(f"gold.{name}", "date date, count bigint", "One day."),),
            build=build,
            partitioning=Partitioning(lambda _: {"silver.events": InputWindow("ts", **window)}),  # type: ignore[arg-type]
        )

    tokyo = "to_date(from_utc_timestamp(ts, 'Asia/Tokyo'))"
    jobs = [
        job("blind", tokyo),
        job("reaching", tokyo, days_before=1),
        job("dayless", "if(extract(hour from ts) = 23, null, to_date(ts))"),
    ]
    problems: list[dict[str, str]] = []
    for day in range(3):
        hours = [START.replace(hour=hour) + timedelta(days=day) for hour in (1, 12, 16)] + (
            [START.replace(hour=23) + timedelta(days=2)] if day == 2 else []
        )
        append(
            workspace,
            [Event(EventMeta("t", "X", "s1", f"e{day}-{n}", at), {}) for n, at in enumerate(hours)],
            day + 0.9,
        )
        report = workspace.pipeline(SETTINGS).run(lambda: spark, jobs)
        problems.append({job.name: str(job.error) for job in report.failed})

    counts = workspace.rows("gold.reaching", "date", "count")
    made(spark, workspace, jobs[1:2], is_again=True)
    assert counts == workspace.rows("gold.reaching", "date", "count")
    assert [count for _, count in counts] == [2, 3, 3, 2]
    assert problems[0] == {}
    assert problems[1].keys() == {"blind"}
    assert problems[2].keys() == {"blind", "dayless"}
    assert "of days that its windows do not reach: 2026-03-04" in problems[1]["blind"]
    assert "days_before or days_after" in problems[1]["blind"]
    assert "without a date" in problems[2]["dayless"]


def test_a_table_by_seq_with_a_date_is_stored_by_it_and_a_job_without_rows_is_not_asked(
    spark: SparkSession, tmp_path: Path
) -> None:
    """
    New events are added in files of their own day, of the topics alone that matter; who reads days is given the files of those;
    and a job for which there is no row has an empty table, without being asked.
    """
    workspace = Workspace(tmp_path)

    def seen(tables: Mapping[str, DataFrame], _: JobContext) -> Mapping[str, DataFrame]:
        return {"gold.seen": tables["silver.events"].selectExpr("seq", "to_date(ts) as date")}

    def days(tables: Mapping[str, DataFrame], _: JobContext) -> Mapping[str, DataFrame]:
        return {"gold.days": tables["gold.seen"].groupBy("date").count()}

    def never(_: Mapping[str, DataFrame], __: JobContext) -> Mapping[str, DataFrame]:
        raise AssertionError("there is nothing to ask for")

    jobs = [
        Job(
            name="seen",
            about="What was there.",
            reads=("silver.events",),
            writes=(OutputTable("gold.seen", "seq bigint, date date", "An event."),),
            build=seen,
            partitioning=Partitioning(lambda _: {"silver.events": InputWindow("seq", topics=("t",))}, seq_column="seq"),
        ),
        Job(
            name="days",
            about="How many there were.",
            reads=("gold.seen",),
            writes=(OutputTable("gold.days", "date date, count bigint", "A day."),),
            build=days,
            partitioning=Partitioning(lambda _: {"gold.seen": InputWindow("date")}),
        ),
        Job(
            name="never",
            about="Reads what nobody wrote.",
            reads=("silver.dead_letters",),
            writes=(OutputTable("gold.never", "seq bigint", "A dead letter."),),
            build=never,
        ),
    ]
    read, rows = [], []
    for number, (topic, day) in enumerate([("t", 0), ("t", 1), ("other", 1), ("t", 0)]):
        at = START + timedelta(days=day)
        append(workspace, [Event(EventMeta(topic, "X", "s1", f"e{number}", at), {})], 2.0)
        results = made(spark, workspace, jobs)
        read.append(results["days"].files_read)
        rows.append(results["seen"].rows)

    assert [file.day for file in workspace.lake.files("gold.seen")] == [
        START.date() + timedelta(days=each) for each in (0, 0, 1)
    ]
    assert rows == [{"gold.seen": 1}, {"gold.seen": 1}, None, {"gold.seen": 1}]
    assert read == [1, 1, 0, 2]
    assert workspace.column("gold.days", "count") == [1, 2]
    assert workspace.rows("gold.never") == []


def test_a_table_that_is_made_anew_names_the_days_that_changed_and_time_the_last_ones(
    spark: SparkSession, tmp_path: Path
) -> None:
    """
    Of a table that every run makes anew only the days of rows that came or went are computed again, and the last days, which move
    with time; all other days stay in the files they are in.
    """
    workspace = Workspace(tmp_path)

    def counts(tables: Mapping[str, DataFrame], _: JobContext) -> Mapping[str, DataFrame]:
        of_topic = tables["silver.events"].where("topic = 't'")
        return {"gold.counts": of_topic.selectExpr("to_date(ts) as date").groupBy("date").count()}

    jobs = [
        Job(
            name="counts",
            about="How many there were.",
            reads=("silver.events",),
            writes=(OutputTable("gold.counts", "date date, count bigint", "A day."),),
            build=counts,
        ),
        Job(
            name="copies",
            about="The same, by days.",
            reads=("gold.counts",),
            writes=(OutputTable("gold.copies", "date date, count bigint", "A day."),),
            build=lambda tables, _: {"gold.copies": tables["gold.counts"]},
            partitioning=Partitioning(
                lambda _: {"gold.counts": InputWindow("date", is_whole=True, names_days=True)}, moving_days=lambda _: 1
            ),
        ),
    ]

    def run(name: str, topic: str, day: float) -> tuple[int | None, list[int], set[str]]:
        append(workspace, [Event(EventMeta(topic, "X", "s1", name, START + timedelta(days=day)), {})], 10.0)
        result = made(spark, workspace, jobs)["copies"]
        files = {file.name for file in workspace.lake.files("gold.copies") if file.day == START.date()}
        return result.days, list(workspace.column("gold.copies", "count")), files

    days, counted, before = run("first", "t", 0)
    assert (days, counted) == (None, [1])
    assert run("fifth", "t", 5) == (1, [1, 1], before)
    assert run("now", "t", 10) == (1, [1, 1, 1], before)
    assert run("other", "elsewhere", 10) == (1, [1, 1, 1], before)  # the last days alone
    days, counted, after = run("late", "t", 0)
    assert (days, sorted(counted)) == (2, [1, 1, 2])
    assert before.isdisjoint(after)


@pytest.mark.heavy
def test_a_late_event_changes_its_own_days_alone(spark: SparkSession, tmp_path: Path) -> None:
    """Rows of other days stay in the files they are in; the day gets the event's row."""
    workspace, jobs = Workspace(tmp_path), choose(all_jobs(), ["learning_predictions"])

    def predict(name: str, day: float) -> Event:
        meta = EventMeta("cortex", "CORTEX_PREDICTION", "s1", name, START + timedelta(days=day))
        return Event(meta, {"heads": {"ok": {"value": 0.5}}})

    for day in (0, 3):
        append(workspace, [predict(f"e{day}", day)], day)
        made(spark, workspace, jobs)
    before = {file.name for file in workspace.lake.files("gold.learning_predictions")}

    append(workspace, [predict("late", 0)], 4.0)
    result = made(spark, workspace, jobs)["learning_predictions"]

    after = {file.name for file in workspace.lake.files("gold.learning_predictions")}
    assert len(before - after) == 1
    assert result.days == 2  # also the day before, for which it might have been an outcome
    assert sorted(workspace.column("gold.learning_predictions", "row_id")) == ["e0:ok", "e3:ok", "late:ok"]


def test_new_events_change_their_own_day_alone(spark: SparkSession, tmp_path: Path) -> None:
    """
    The day's rows are computed again and take the place of those that were there; rows of other days stay in the files they are
    in, and a run whose new events a job does not look at commits nothing to its tables.
    """
    workspace = Workspace(tmp_path)
    append(
        workspace, [Event(EventMeta("sync", "X", "s1", f"e{day}", START, partitions=("p",)), {}) for day in (0, 1)], 0.0
    )
    append(workspace, [Event(EventMeta("sync", "X", "s1", "next", START, partitions=("p",)), {})], 1.0)
    made(spark, workspace, TRAFFIC)
    before = {file.name: file.day for file in workspace.lake.files("gold.sync_traffic")}

    append(workspace, [Event(EventMeta("sync", "X", "s1", "late", START, partitions=("p",)), {})], 1.0)
    result = made(spark, workspace, TRAFFIC)["sync_traffic"]
    after = {file.name: file.day for file in workspace.lake.files("gold.sync_traffic")}
    version = workspace.lake.open("gold.sync_traffic").version()
    append(workspace, [Event(EventMeta("t", "X", "s1", "other", START), {})], 1.0)
    idle = made(spark, workspace, TRAFFIC)["sync_traffic"]

    assert set(before.values()) == {START.date(), START.date() + timedelta(days=1)}
    assert {day for name, day in before.items() if name not in after} == {START.date() + timedelta(days=1)}
    assert (result.days, result.rows) == (1, {"gold.sync_traffic": 1})
    assert sorted(workspace.column("gold.sync_traffic", "events")) == [2, 2]
    assert (idle.rows, workspace.lake.open("gold.sync_traffic").version()) == (None, version)


@pytest.mark.heavy
def test_other_settings_make_everything_anew(spark: SparkSession, tmp_path: Path) -> None:
    """Days that were made under one setting are not left beside days made under another."""
    workspace, chance = Workspace(tmp_path), Chance(5)
    jobs = choose(all_jobs(), ["learning_predictions"])
    for day in (0.0, 0.1):
        append(workspace, chance.slice_of(day, 20), day)
        first = made(spark, workspace, jobs)["learning_predictions"]
    append(workspace, chance.slice_of(0.2, 20), 0.2)
    other = msgspec.structs.replace(SETTINGS, jobs={"learning_predictions": {"prediction_window_s": 60}})

    changed = made(spark, workspace, jobs, other)["learning_predictions"]

    assert first.days is not None
    assert changed.days is None


@pytest.mark.heavy
def test_while_following_a_summary_is_told_once_an_interval(spark: SparkSession, tmp_path: Path) -> None:
    """A partitioned job runs every time; what it has to say costs all of its table, and waits for the interval to end."""
    workspace = Workspace(tmp_path)
    (minutes,) = MINUTES
    told: list[Event] = []

    def tell(tables: Mapping[str, DataFrame], context: JobContext) -> list[Event]:
        count = tables["gold.topic_minutes"].count()
        return [Event(EventMeta("told", "COUNT", "s1", f"told-{count}"), {"count": count})]

    def publish(events: Sequence[Event]) -> bool:
        told.extend(events)
        return True

    published = []
    settings = msgspec.structs.replace(SETTINGS, rebuild_interval_s=3600.0)
    for number, minute in enumerate((0, 10, 70)):
        at = START + timedelta(minutes=minute)
        append(workspace, [Event(EventMeta("t", "X", "s1", f"e{number}", at), {})], minute / 1440)
        report = workspace.pipeline(settings, publish).run(
            lambda: spark, [replace(minutes, summarise=tell)], is_paced=True
        )
        (result,) = report.jobs
        assert result.rows is not None
        published.append(result.published)

    assert published == [1, 0, 1]
    assert [event.payload for event in told] == [{"count": 1}, {"count": 3}]


class Died(BaseException):
    """The end of a process, as far as a test can make one."""


@pytest.mark.heavy
@pytest.mark.parametrize(
    "after",
    [(False, True), (True, False)],
    ids=["before the first and after the second", "after the first and before the second"],
)
def test_a_run_that_dies_between_two_tables_leaves_nothing_half(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: tuple[bool, bool]
) -> None:
    """Wherever a job with two tables ends, before or after a commit, the next run leaves both as if nothing had happened."""
    workspace, chance = Workspace(tmp_path), Chance(9)
    jobs = choose(all_jobs(), ["learning_ranker", "learning_clicks"])
    append(workspace, chance.slice_of(0.0, 80), 0.0)
    made(spark, workspace, jobs)
    for number, table in enumerate(("gold.learning_ranker", "gold.learning_impressions")):
        append(workspace, chance.slice_of(0.1 + number, 60), 0.1 + number)
        with monkeypatch.context() as patched, contextlib.suppress(Died):
            patched.setattr(Lake, "commit", _dying(table, after=after[number]))
            workspace.pipeline(SETTINGS).run(lambda: spark, jobs)
    append(workspace, chance.slice_of(3.0, 20), 3.0)

    results = made(spark, workspace, jobs)
    bit_by_bit = tables_of(workspace, jobs)
    made(spark, workspace, jobs, is_again=True)

    assert results["learning_ranker"].days is not None
    assert bit_by_bit == tables_of(workspace, jobs)


def _dying(table: str, *, after: bool) -> Callable[..., Any]:
    original = Lake.commit

    def commit(lake: Lake, name: str, *args: Any, **options: Any) -> Any:
        if name == table and not after:
            raise Died
        answer = original(lake, name, *args, **options)
        if name == table:
            raise Died
        return answer

    return commit
