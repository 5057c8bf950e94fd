"""
The log in Spark: ``register(spark)``, then ``spark.read.format("tidings").load(workspace)``.

Wherever that session's Python runs (driver, executors, a Spark Connect server), the package must be installed with its extra
``pipeline``, and see the workspace at the same path. ``docs/topics/spark.md`` shows what can be done with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader

from tidings.pipeline.schemas import BRONZE_EVENTS, MESSAGES

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType

__all__ = ["TidingsSource", "register"]


def register(spark: SparkSession) -> None:
    """
    Make the format ``tidings`` known to a session, for ``spark.read`` and ``spark.readStream``.

    Also switches on ``spark.sql.python.filterPushdown.enabled`` in the session, so that conditions on topic, seq and time of
    writing are used to leave out segments.
    """
    spark.dataSource.register(TidingsSource)
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")


class TidingsSource(DataSource):
    """The data source, as Spark wants it. Spark makes one in a process of its own for each query, so little is imported here."""

    @classmethod
    def name(cls) -> str:
        return "tidings"

    def schema(self) -> str:
        return BRONZE_EVENTS.schema if self.options.get("archive") is None else MESSAGES

    def reader(self, schema: StructType) -> DataSourceReader:
        from tidings.pipeline.spark_source import LogReader, SourceOptions

        return LogReader(SourceOptions.parse(self.options), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        from tidings.pipeline.spark_source import LogStreamReader, SourceOptions

        return LogStreamReader(SourceOptions.parse(self.options), schema)
