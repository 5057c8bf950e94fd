"""Every job is found, in an order in which it finds what it reads."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.unit.pipeline.support import Workspace, event
from tidings.pipeline.errors import JobRefused, JobSetBroken, UnknownJob, UnknownJobSet
from tidings.pipeline.jobs.job import Job, OutputTable
from tidings.pipeline.jobs.registry import all_jobs, choose, in_order, job_sets, jobs_in_sets
from tidings.pipeline.schemas import CORE_TABLES, arrow_schema
from tidings.pipeline.settings import PipelineSettings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def job(name: str, reads: str, writes: str) -> Job:
    """A job that only has a place in the order."""
    return Job(
        name, "", tuple(reads.split()), tuple(OutputTable(each, "n int", "") for each in writes.split()), lambda *_: {}
    )


def test_a_job_comes_after_those_it_reads_from() -> None:
    """
    The order follows the tables; where it is free, it follows the names.
    """
    jobs = [job("c", "gold.a", "gold.c"), job("b", "silver.events", "gold.b"), job("a", "gold.b", "gold.a")]

    assert [each.name for each in in_order(jobs)] == ["b", "a", "c"]
    assert [each.name for each in choose(in_order(jobs), ["c", "b"])] == ["b", "c"]
    with pytest.raises(UnknownJob):
        choose(jobs, ["nonsense"])


def test_who_reads_what_was_erased_gets_it_up_to_date() -> None:
    """
    A job that is chosen by name brings along those that put the log's events in another shape for it, and no others.
    """
    chosen = [each.name for each in choose(all_jobs(), ["learning_actions", "temporal_index"])]

    assert chosen == ["erasures", "learning_told", "learning_actions", "temporal_told", "temporal_index"]


@pytest.mark.parametrize(
    "jobs",
    [
        [job("a", "gold.b", "gold.a"), job("b", "gold.a", "gold.b")],
        [job("a", "", "gold.x"), job("b", "", "gold.x")],
        [job("a", "", "gold.x"), job("a", "", "gold.y")],
        [job("a", "", "bronze.events")],
        [job("a", "", "silver.events")],
        [job("a", "silver.events", "bronze.orders")],
        [job("a", "", "gold.orders-by-type")],
        [job("a", "", "gold.Orders")],
        [job("a", "", "orders")],
        [job("a", "", "gold.a.b")],
        [job("a", "", "gold.../../x")],
    ],
    ids=[
        "a circle",
        "one table twice",
        "one name twice",
        "bronze",
        "silver",
        "layer",
        "-",
        "A",
        "bare",
        "dots",
        "path",
    ],
)
def test_jobs_that_cannot_be_ordered_are_refused(jobs: list[Job]) -> None:
    """
    A circle, two makers of one table, two jobs of one name, and tables that are the pipeline's own or that nobody would find are
    mistakes, not a matter of luck.
    """
    with pytest.raises(JobRefused, match=r"job '[ab]' is refused"):
        in_order(jobs)


def test_what_the_jobs_read_and_write_fits_together() -> None:
    """
    Every table that a job reads is one of the core's or another job's, and every promise is a list of columns.
    """
    jobs = all_jobs()
    made = {table.name for table in CORE_TABLES} | {output.table for each in jobs for output in each.writes}

    assert {table for each in jobs for table in each.reads} <= made
    for each in jobs:
        for output in each.writes:
            names = arrow_schema(output.schema).names
            assert len(names) == len(set(names))
            if each.partitioning is not None:
                assert (each.partitioning.seq_column or "date") in names
            assert output.about


SHOP = """
from tidings.pipeline.jobs.job import Job, OutputTable

JOBS = [Job("orders", "Counts orders.", ("gold.topic_minutes",), (OutputTable("gold.orders", "n int", "One count."),), dict)]
"""


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees the module that another one installed."""
    monkeypatch.delitem(sys.modules, "shop_jobs", raising=False)


def install(folder: Path, listing: str) -> None:
    """A package of somebody else that registers a set of jobs."""
    info = folder / "shop-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shop\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[tidings.jobs]\nshop = shop_jobs:JOBS\n")
    (folder / "shop_jobs.py").write_text(listing)


def test_only_the_operational_jobs_run_unless_a_set_is_switched_on() -> None:
    """
    Without further words no job of an application runs; a set that is switched on comes in order with the rest.
    """
    sets = job_sets()
    cognition = {each.name for each in sets["cognition"]}

    assert {each.name for each in jobs_in_sets()} == {each.name for each in sets["operations"]}
    assert cognition.isdisjoint(each.name for each in jobs_in_sets())
    assert jobs_in_sets(["cognition", "ledger"]) == all_jobs()


def test_other_packages_register_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    A package that names its jobs under the entry point group is found, and its jobs come after what they read.
    """
    install(tmp_path, SHOP)
    monkeypatch.syspath_prepend(tmp_path)

    names = [each.name for each in jobs_in_sets(["shop"])]

    assert names.index("orders") > names.index("topic_minutes")
    assert [each.name for each in choose(all_jobs(), ["orders"])] == ["orders"]


@pytest.mark.parametrize("listing", ["import nothing_of_that_name", "JOBS = [42]", "JOBS = None"])
def test_a_broken_set_is_named_and_holds_up_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listing: str
) -> None:
    """
    A set that cannot be loaded says so under its name when it is asked for, and the operational jobs run without it.
    """
    install(tmp_path, listing)
    monkeypatch.syspath_prepend(tmp_path)

    with pytest.raises(JobSetBroken, match="shop"):
        jobs_in_sets(["shop"])
    assert jobs_in_sets()


def test_a_set_that_nobody_registers_is_refused_with_those_there_are() -> None:
    """
    A misspelt set is an error that names the sets there are.
    """
    with pytest.raises(UnknownJobSet, match="operations, cognition"):
        jobs_in_sets(["cognitoin"])


@pytest.mark.parametrize("table", ["silver.events", "bronze.events", "gold.by-name"])
def test_a_job_that_was_never_registered_is_refused_too(tmp_path: Path, table: str) -> None:
    """
    A job that a program hands to a run itself fails before anything is computed or written, and what the pipeline made stays.
    """
    workspace = Workspace(tmp_path)
    workspace.append(event(number) for number in range(3))

    def never() -> SparkSession:
        raise AssertionError("nothing needs Spark")

    report = workspace.pipeline(PipelineSettings()).run(never, [job("a", "silver.events", table)])

    (failed,) = report.failed
    assert "TableRefused" in str(failed.error)
    assert workspace.column("silver.events", "seq") == [1, 2, 3]
    assert workspace.verify().is_equal
