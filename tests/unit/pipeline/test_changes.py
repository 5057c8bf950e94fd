"""Which rows of a table a job is given, and what is not asked of every row because the files' bounds say it."""

from __future__ import annotations

from datetime import UTC, date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tidings.pipeline.changes import Plan, below
from tidings.pipeline.jobs.job import InputWindow
from tidings.pipeline.storage import Storage
from tidings.pipeline.table_files import DataFile

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark
TABLE = "silver.events"


def file(least: Any = None, most: Any = None, *, column: str = "seq", day: date | None = None) -> DataFile:
    """A file with bounds of one column."""
    bounds = [{} if each is None else {column: each} for each in (least, most)]
    return DataFile(Storage.of(Path("nowhere")), "a.parquet", 1, 1, bounds[0], bounds[1], day)


def seqs(frame: DataFrame) -> list[int]:
    """What is left."""
    return sorted(row["seq"] for row in frame.collect())


@pytest.mark.parametrize(
    ("files", "is_asked"), [([file(4, 9)], False), ([file(4, 9), file(3, 3)], True), ([file()], True)]
)
def test_new_rows_are_told_by_their_files_or_one_by_one(
    spark: SparkSession, files: list[DataFile], is_asked: bool
) -> None:
    """
    Rows past a seq: where every file begins past it no condition is made, and where one does not, or nobody knows, it is.
    """
    frame = spark.range(3, 10).withColumnRenamed("id", "seq")
    plan = Plan({}, is_all=False, since={TABLE: 3}, windows={TABLE: InputWindow("seq")})

    found = plan.rows(TABLE, frame, files)

    assert (found is not frame) is is_asked
    assert seqs(found) == [*([] if is_asked else [3]), *range(4, 10)]
    assert seqs(below(frame, [file(3, 9)], "seq", 5)) == [3, 4, 5]
    assert below(frame, [file(3, 9)], "seq", 9) is frame


def test_rows_of_days_are_those_of_these_days_and_no_others(spark: SparkSession) -> None:
    """
    Of two days that are apart, rows of both and not of the day between; files that are stored by day say it themselves.
    """
    moments = [datetime(2026, 3, day, hour, tzinfo=UTC) for day in (1, 2, 3, 4) for hour in (0, 23)]
    frame = spark.createDataFrame(list(enumerate(moments)), "seq int, ts timestamp").selectExpr(
        "*", "to_date(ts) as date"
    )
    days = frozenset(date(2026, 3, day).toordinal() - date(1970, 1, 1).toordinal() for day in (2, 4))

    for at in ("ts", "date"):
        plan = Plan({}, is_all=False, days=days, windows={TABLE: InputWindow(at)}, needed={TABLE: days})
        assert seqs(plan.rows(TABLE, frame, [file()])) == [2, 3, 6, 7]
        stored = [file(day=date(2026, 3, day)) for day in (2, 4)]
        assert (plan.rows(TABLE, frame, stored) is frame) is (at == "date")
        assert plan.rows(TABLE, frame, [*stored, file(day=date(2026, 3, 3))]) is not frame
