"""A session starts by one setting, quietly, and says clearly when it cannot."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa  # type: ignore[import-untyped]
import pytest
from pyspark.sql import functions as F

from tests.unit.pipeline.support import Workspace, event
from tidings.core.errors import SettingsError
from tidings.core.settings import checked
from tidings.pipeline.errors import MasterUnreachable
from tidings.pipeline.session import (
    check_reachable,
    first_line,
    heap_mb,
    is_remote,
    session_for_little,
    session_for_short_rows,
    spark_conf,
    start_session,
)
from tidings.pipeline.settings import PipelineSettings
from tidings.spark import register

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


@pytest.mark.spark
def test_spark_shows_no_storage_option(spark: SparkSession, tmp_path: Path) -> None:
    """What Spark prints and keeps of a stream's plan has the names of storage options, and none of their values."""
    register(spark)
    Workspace(tmp_path).append([event(1)])
    names = (
        "AZURE_STORAGE_ACCOUNT_KEY",
        "AWS_SECRET_ACCESS_KEY",
        "google_service_account_key",
        "azure_storage_sas_key",
    )
    options = {f"storage.{name}": f"hidden-{number}" for number, name in enumerate(names)}

    stream = spark.readStream.format("tidings").options(path=str(tmp_path), **options).load()

    plan: Any = stream
    text = str(plan._jdf.queryExecution().toString()).lower()
    assert all(name.lower() in text for name in names)
    assert "hidden" not in text


@pytest.mark.spark
def test_workers_set_aside_what_they_loaded(spark: SparkSession) -> None:
    """
    What Spark's Python workers loaded is left out of their collections of garbage, so that these cost what tasks left behind.
    """

    def frozen(_: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import gc

        yield pa.RecordBatch.from_pydict({"frozen": [gc.get_freeze_count()]})

    # One worker, task after task: the first one's loading is set aside when it is done.
    counts = [spark.range(1).coalesce(1).mapInArrow(frozen, "frozen bigint").first() for _ in range(4)]

    assert any(row is not None and row.frozen > 10_000 for row in counts)


_BATCH_ROWS = "spark.sql.execution.arrow.maxRecordsPerBatch"
_BATCH_BYTES = "spark.sql.execution.arrow.maxBytesPerBatch"


@pytest.mark.spark
def test_what_pyspark_asks_of_the_jvm_is_looked_up_once(spark: SparkSession) -> None:
    """
    The functions that columns are made with are the same objects each time they are asked for, and do what they say.
    """
    jvm: Any = spark._jvm

    assert jvm.functions.col is jvm.functions.col
    assert jvm.PythonSQLUtils is jvm.PythonSQLUtils
    assert spark.range(3).select(F.sum(F.col("id") * 2)).first() == (6,)


@pytest.mark.spark
def test_sessions_for_fewer_rows_are_made_once(spark: SparkSession) -> None:
    """
    Beside a session there is one for few rows, that compiles nothing, and one for more, which does; neither divides its work.
    """
    little, more = session_for_little(spark), session_for_little(spark, is_compiled=True)

    assert session_for_little(spark) is little
    assert session_for_little(spark, is_compiled=True) is more is not little
    assert {each.conf.get("spark.sql.shuffle.partitions") for each in (little, more)} == {"1"}
    assert little.conf.get("spark.sql.codegen.factoryMode") == "NO_CODEGEN"
    assert spark_conf(PipelineSettings()).keys().isdisjoint({"spark.sql.codegen.factoryMode"})


@pytest.mark.spark
def test_short_rows_are_counted_and_long_ones_measured(spark: SparkSession) -> None:
    """
    What Spark hands to Python at a time is bound by a number of rows where the longest row is short, so that it never is more than
    32 MiB, and by bytes where it is long or somebody said how much.
    """
    settings = PipelineSettings()
    given = PipelineSettings(spark={"spark.sql.execution.arrow.maxRecordsPerBatch": "100"})
    short, longer = (session_for_short_rows(spark, size, settings) for size in (1_500, 20_000))

    assert [int(each.conf.get(_BATCH_ROWS) or 0) for each in (short, longer)] == [16_384, 1_024]
    assert {each.conf.get(_BATCH_BYTES) for each in (short, longer)} == {str((1 << 31) - 1)}
    assert session_for_short_rows(spark, 1_501, settings) is short
    assert session_for_short_rows(spark, 40_000, settings) is spark
    assert session_for_short_rows(spark, 1_500, given) is spark
    assert spark_conf(settings)[_BATCH_BYTES] == str(32 << 20)


@pytest.mark.parametrize(("rows", "size", "expected"), [(250_000, 1, True), (250_001, 1, False), (1, 1 << 27, False)])
def test_what_is_computed_in_one_part(rows: int, size: int, expected: bool) -> None:
    """
    A job over few enough rows in few enough bytes is computed in one part; with a limit of 0 none is.
    """
    assert PipelineSettings().is_undivided(rows, size) is expected
    assert not PipelineSettings(undivided_rows_max=0).is_undivided(rows, size)


@pytest.mark.parametrize(
    "master",
    ["spark://127.0.0.1:9", "sc://127.0.0.1:9", "k8s://https://127.0.0.1:9", "spark://127.0.0.1:9,127.0.0.1:1"],
)
def test_a_master_that_does_not_answer_is_told_at_once(master: str) -> None:
    """
    Nobody waits for minutes to learn that an address is wrong, and no JVM is started to find out.
    """
    with pytest.raises(MasterUnreachable) as caught:
        start_session(PipelineSettings(master=master, connect_ms_max=500))

    assert caught.value.master == master
    assert caught.value.retryable


def test_any_master_of_several_will_do() -> None:
    """
    Of several masters one that answers is enough, and this machine needs no door.
    """
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        door.listen()
        check_reachable(f"spark://127.0.0.1:9,127.0.0.1:{door.getsockname()[1]}", 500)
    check_reachable("local[*]", 500)
    with pytest.raises(MasterUnreachable):
        check_reachable("nonsense", 500)


def test_memory_and_noise_are_bounded_by_settings() -> None:
    """
    The heap is what the settings say, Spark's log is off unless asked for, and a user's own settings win.
    """
    settings = PipelineSettings(driver_memory_mb=700, shuffle_partitions=3, spark={"spark.sql.shuffle.partitions": "9"})

    quiet, loud = spark_conf(settings), spark_conf(settings, is_loud=True)

    assert quiet["spark.driver.memory"] == "700m"
    assert quiet["spark.sql.shuffle.partitions"] == "9"
    assert (quiet["spark.log.level"], loud["spark.log.level"]) == ("OFF", "INFO")
    assert is_remote("sc://host:1")
    assert not is_remote("spark://host:1")


def test_a_jvm_for_little_work_compiles_quickly() -> None:
    """
    What is started for little work, after which it ends, is not compiled for long work; a user's own options for Java take its place.
    """
    name = "spark.driver.extraJavaOptions"
    brief, long = (
        spark_conf(PipelineSettings(), is_brief=each, java_options="-Xlog:disable")[name] for each in (True, False)
    )

    assert "-XX:TieredStopAtLevel=1" in brief
    assert "TieredStopAtLevel" not in long
    assert all("-Xlog:disable" in each for each in (brief, long))
    assert spark_conf(PipelineSettings(spark={name: "-Xint"}), is_brief=True)[name].startswith("-Xint -D")


def test_an_error_of_a_connect_server_says_what_went_wrong() -> None:
    """Of what gRPC says of a call that failed, the details are the line that a user is shown."""
    rpc = '<_MultiThreadedRendezvous of RPC that terminated with:\n\tstatus = StatusCode.INTERNAL\n\tdetails = "no room"\n>'

    assert first_line(RuntimeError(rpc)) == "no room"
    assert first_line(RuntimeError("one\ntwo")) == "one"


def test_tables_depend_on_no_language_of_a_jvm() -> None:
    """Driver and executors are told UTC and English, behind whatever else a user gives them: of two the JVM takes the last."""
    names = [f"spark.{each}.extraJavaOptions" for each in ("driver", "executor")]
    turkish = dict.fromkeys(names, "-Duser.language=tr")
    place = "-Duser.timezone=UTC -Duser.language=en -Duser.country=US"

    for conf in (spark_conf(PipelineSettings()), spark_conf(PipelineSettings(spark=turkish), is_brief=True)):
        assert [conf[name].endswith(place) for name in names] == [True, True]


def test_the_heap_follows_the_machine() -> None:
    """
    Without a setting the heap is a third of the memory, within bounds, and what Spark may send to every task is small
    against it.
    """
    unset = PipelineSettings()

    assert [heap_mb(unset, available) for available in (1024, 24 * 1024, 1 << 20)] == [1024, 8192, 16 * 1024]
    assert heap_mb(PipelineSettings(driver_memory_mb=700), 24 * 1024) == 700
    for heap, threshold in ((512, "2m"), (1024, "4m"), (16 * 1024, "32m")):
        conf = spark_conf(PipelineSettings(driver_memory_mb=heap))
        assert conf["spark.sql.autoBroadcastJoinThreshold"] == threshold


def test_a_setting_out_of_its_range_is_named() -> None:
    """
    A value that cannot be is refused before anything starts.
    """
    assert checked(PipelineSettings()) == PipelineSettings()
    with pytest.raises(SettingsError) as caught:
        checked(PipelineSettings(split_bytes_max=1))
    assert caught.value.path == "split_bytes_max"
