"""A streaming query keeps bronze and silver up to the log, exactly once, whatever else commits or ends it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from tests.spark_session import TEST_SETTINGS
from tests.unit.pipeline.support import Workspace, event
from tidings.pipeline.bronze import Bronze, BronzeFill
from tidings.pipeline.errors import LakeConflict, LakeUnwritable, SparkFailed
from tidings.pipeline.following import Following

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow]

SETTINGS = msgspec.structs.replace(TEST_SETTINGS, follow_interval_ms=50)


def reaches(query: Following, until: int) -> int:
    """Wait until silver reaches a seq; the rows that it gained on the way."""
    gained = 0
    for _ in range(120):
        batches = query.wait(1.0)
        gained += sum(batch.silver["silver.events"] for batch in batches)
        if batches and batches[-1].bronze.until >= until:
            return gained
    raise AssertionError(f"silver never reached {until}")


def test_what_is_written_is_in_silver_once(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    Records arrive as they are written; a batch that failed, a run in between and a new query repeat and lose nothing.
    """
    workspace = Workspace(tmp_path)
    workspace.append(event(number, f"t{number % 3}") for number in range(25))
    with workspace.pipeline(SETTINGS).follow(lambda: spark) as query:
        assert workspace.column("silver.events", "seq") == list(range(1, 26))
        workspace.append(event(number, f"t{number % 3}") for number in range(25, 40))
        assert reaches(query, 40) == 15

        # What goes wrong in a batch is raised where it is waited for; the batch is not done, and not forgotten.
        with monkeypatch.context() as patched:
            patched.setattr(Bronze, "take", full)
            workspace.append([event(100)])
            with pytest.raises(LakeUnwritable):
                reaches(query, 41)

    # A run takes the records of that batch, which the query's checkpoint does not know of.
    workspace.append([event(101)])
    workspace.pipeline(TEST_SETTINGS).run(lambda: spark)
    with workspace.pipeline(SETTINGS).follow(lambda: spark) as query:
        workspace.append([event(102)])
        assert reaches(query, 43) == 1

    assert workspace.column("silver.events", "seq") == list(range(1, 44))
    assert workspace.verify().is_equal


def test_nobody_waits_for_spark_to_start(spark: SparkSession, tmp_path: Path) -> None:
    """
    What is written while Spark starts and the query is set up is in silver before there is a query; a record that cannot be taken
    then is taken later.
    """
    workspace, started = Workspace(tmp_path), threading.Event()
    workspace.append([event(0)])

    def slowly() -> SparkSession:
        assert started.wait(60)
        return spark

    following = workspace.pipeline(SETTINGS).follow(slowly)
    with ThreadPoolExecutor(1) as pool, ExitStack() as stack:
        opening = pool.submit(following.__enter__)
        stack.push(following)
        workspace.append([event(1), event(2)])

        assert reaches(following, 3) == 2
        assert not opening.done()
        started.set()

        query = opening.result()
        workspace.append([event(3)])
        assert reaches(query, 4) == 1
    assert workspace.verify().is_equal


def test_what_an_earlier_query_left_in_the_lake_is_of_no_matter(spark: SparkSession, tmp_path: Path) -> None:
    """
    Bytes that are no checkpoint, where one was once kept, neither stop a query nor are touched; and a query leaves none there.
    """
    workspace = Workspace(tmp_path)
    workspace.append([event(0)])
    left = workspace.lake.storage.path / "follow" / workspace.epoch
    (left / "offsets").mkdir(parents=True)
    for path in (left / "metadata", left / "offsets" / "0"):
        path.write_bytes(b"\x00junk")

    with workspace.pipeline(SETTINGS).follow(lambda: spark) as query:
        workspace.append([event(1)])
        assert reaches(query, 2) == 1

    assert sorted(path.name for path in left.rglob("*")) == ["0", "metadata", "offsets"]
    assert workspace.verify().is_equal


def test_a_query_that_cannot_be_set_up_leaves_nothing_behind(tmp_path: Path) -> None:
    """
    What keeps Spark from starting is raised, and nobody goes on looking at the log.
    """
    workspace = Workspace(tmp_path)
    workspace.append([event(0)])

    def never() -> SparkSession:
        raise SparkFailed("its start", "no room")

    following = workspace.pipeline(SETTINGS).follow(never)
    with pytest.raises(SparkFailed):
        following.__enter__()

    assert not [thread for thread in threading.enumerate() if thread.name == "tidings-pipeline-meanwhile"]


def full(*_: object) -> BronzeFill:
    raise LakeUnwritable("lake", "No space left")


def test_a_run_beside_it_takes_nothing_away(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    Where another run commits first, the query takes what is left.
    """
    workspace = Workspace(tmp_path)
    workspace.append([event(0)])
    take = Bronze.take

    def late(bronze: Bronze, *args: object) -> BronzeFill:
        monkeypatch.setattr(Bronze, "take", take)
        raise LakeConflict("bronze.events", "another run took what is new")

    with workspace.pipeline(SETTINGS).follow(lambda: spark) as query:
        monkeypatch.setattr(Bronze, "take", late)
        workspace.append([event(1), event(2)])
        assert reaches(query, 3) == 2

    assert workspace.verify().is_equal


def test_two_threads_that_keep_house_leave_each_record_once(spark: SparkSession, tmp_path: Path) -> None:
    """
    The query and the jobs beside it both keep house, at every look and of every table: log and lake are equal in the end.
    """
    workspace = Workspace(tmp_path)
    workspace.append([event(0)])
    busy = msgspec.structs.replace(SETTINGS, compact_files_min=2, vacuum_hours=0, checkpoint_commits=3)
    pipeline, is_over = workspace.pipeline(busy), threading.Event()

    def run_jobs() -> int:
        rounds = 0
        while not is_over.wait(0.01):
            pipeline.run_gold(lambda: spark, ())
            rounds += 1
        return rounds

    with ThreadPoolExecutor(1) as pool, pipeline.follow(lambda: spark) as query:
        beside = pool.submit(run_jobs)
        try:
            for number in range(1, 13):
                workspace.append([event(number)])
                reaches(query, number + 1)
        finally:
            is_over.set()
        assert beside.result() > 0

    assert workspace.column("bronze.events", "seq") == workspace.column("silver.events", "seq") == list(range(1, 14))
    assert len(workspace.lake.files("bronze.events")) < 13
    assert workspace.verify().is_equal
