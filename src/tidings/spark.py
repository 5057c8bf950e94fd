"""
The log in Spark: ``spark = session()``, or ``register(spark)`` with a session of your own; then
``spark.read.format("tidings").load(workspace)``.

Wherever that session's Python runs (driver, executors, a Spark Connect server), the package must be installed with its extra
``pipeline``, and see the workspace at the same path. ``docs/topics/spark.md`` shows what can be done with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader

from tidings.pipeline.schemas import BRONZE_EVENTS, MESSAGES

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType

__all__ = ["TidingsSource", "register", "session"]


def session(master: str = "local[*]", conf: Mapping[str, str] | None = None) -> SparkSession:
    """
    Start a Spark session, or join this process's own, in which the format ``tidings`` is known.

    It computes in UTC, its Python is this one, and where the machine has no Java of version 17 or later its JVM is the one that comes
    with the extra ``pipeline``.

    Args:
        master: Where Spark runs: ``local[*]``, a cluster (``spark://host:7077``) or a Spark Connect server (``sc://host:15002``).
        conf: Spark's own settings, by name; they go before those that are set here.

    Raises:
        JavaMissing: Spark would have to run here, and no Java can be found.
        MasterUnreachable: Nothing answers at ``master``.
    """
    from tidings.pipeline.session import start_session
    from tidings.pipeline.settings import PipelineSettings

    spark = start_session(PipelineSettings(master=master, spark={"spark.log.level": "ERROR", **(conf or {})}))
    register(spark)
    return spark


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
