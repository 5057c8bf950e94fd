"""
The log in Spark: ``register(spark)``, then ``spark.read.format("tidings").load(workspace)``.

Wherever that session's Python runs (driver, executors, a Spark Connect server), the package must be installed with its extra
``pipeline``, and see the workspace at the same path. ``docs/topics/spark.md`` shows what can be done with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["register"]


def register(spark: SparkSession) -> None:
    """
    Make the format ``tidings`` known to a session, for ``spark.read`` and ``spark.readStream``.

    Also switches on ``spark.sql.python.filterPushdown.enabled`` in the session, so that conditions on topic, seq and time of
    writing are used to leave out segments.
    """
    from tidings.pipeline.spark_source import TidingsSource

    spark.dataSource.register(TidingsSource)
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
