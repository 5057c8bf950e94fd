"""
One Spark session for a whole pytest run.

A test package that needs it writes ``from tests.spark_session import spark`` in its ``conftest.py`` (with
``__all__ = ["spark"]``), marks its tests ``spark`` and takes the fixture ``spark``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tidings.pipeline.session import SessionOnDemand, start_session
from tidings.pipeline.settings import PipelineSettings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["TEST_SETTINGS", "connect_address", "spark"]

# For a handful of rows compiling takes most of the time: of queries by Spark, and of Spark by the JVM.
TEST_SETTINGS = PipelineSettings(
    master="local[2]",
    shuffle_partitions=1,
    driver_memory_mb=1024,
    spark={
        "spark.driver.extraJavaOptions": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m",
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.codegen.factoryMode": "NO_CODEGEN",
        "spark.sql.adaptive.enabled": "false",
        "spark.sql.constraintPropagation.enabled": "false",
        "spark.sql.leafNodeDefaultParallelism": "1",
        "spark.default.parallelism": "1",
        "spark.python.sql.dataFrameDebugging.enabled": "false",  # else each column asks the JVM thrice where it came from
        # No checksum files beside the data, and no second rename of what a task wrote.
        "spark.hadoop.fs.file.impl": "org.apache.hadoop.fs.RawLocalFileSystem",
        "spark.hadoop.mapreduce.fileoutputcommitter.algorithm.version": "2",
        "spark.hadoop.mapreduce.fileoutputcommitter.marksuccessfuljobs": "false",
        # One JVM for all: it is also the server of the test that comes over Spark Connect.
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": "0",
    },
)


def connect_address(spark: SparkSession) -> str:
    """Where the session's JVM answers as a Spark Connect server, from now on."""
    service = getattr(getattr(spark._jvm, "org.apache.spark.sql.connect.service.SparkConnectService$"), "MODULE$")
    service.start(spark.sparkContext._jsc.sc())
    return f"sc://127.0.0.1:{service.localPort()}"


_shared = contextlib.ExitStack()
_users: list[str] = []


@pytest.fixture(scope="session")
def spark(request: pytest.FixtureRequest) -> Iterator[SparkSession]:
    """Spark on two threads of this machine, in UTC."""
    # Each conftest that imports this has a fixture of its own. They share the session, and the last one out ends it.
    if not _users:
        _shared.enter_context(SessionOnDemand(TEST_SETTINGS))()
    _users.append(request.node.nodeid)
    try:
        yield start_session(TEST_SETTINGS)
    finally:
        _users.pop()
        if not _users:
            _shared.close()
