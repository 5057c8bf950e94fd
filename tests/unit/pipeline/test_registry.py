"""Every job is found, in an order in which it finds what it reads."""

from __future__ import annotations

import pytest

from tidings.pipeline.errors import UnknownJob
from tidings.pipeline.jobs.job import Job, Output
from tidings.pipeline.jobs.registry import all_jobs, choose, in_order
from tidings.pipeline.schemas import CORE_TABLES, arrow_schema


def job(name: str, reads: str, writes: str) -> Job:
    """A job that only has a place in the order."""
    return Job(
        name, "", tuple(reads.split()), tuple(Output(each, "n int", "") for each in writes.split()), lambda *_: {}
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

    assert chosen == ["erasures", "learning_actions", "temporal_told", "temporal_index"]


@pytest.mark.parametrize(
    "jobs",
    [
        [job("a", "gold.b", "gold.a"), job("b", "gold.a", "gold.b")],
        [job("a", "", "gold.x"), job("b", "", "gold.x")],
        [job("a", "", "gold.x"), job("a", "", "gold.y")],
    ],
    ids=["a circle", "one table twice", "one name twice"],
)
def test_jobs_that_cannot_be_ordered_are_refused(jobs: list[Job]) -> None:
    """
    A circle, two makers of one table and two jobs of one name are mistakes, not a matter of luck.
    """
    with pytest.raises(ValueError, match="job"):
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
            assert set(output.replaced_by) <= set(names)
            assert output.about
