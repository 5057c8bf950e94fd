"""A session starts by one setting, quietly, and says clearly when it cannot."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.mark.spark
def test_the_session_computes_in_utc(spark: SparkSession) -> None:
    """
    A session answers queries, and its clock stands in UTC.
    """
    row = spark.sql("select sum(id) as total, current_timezone() as zone from range(5)").first()

    assert row is not None
    assert (row.total, row.zone) == (10, "UTC")
