"""A session starts by one setting, quietly, and says clearly when it cannot."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.pipeline.support import Workspace, event
from tidings.core.errors import SettingsError
from tidings.core.settings import checked
from tidings.pipeline.errors import MasterUnreachable
from tidings.pipeline.session import check_reachable, heap_mb, is_remote, spark_conf, start_session
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
    What is started for little work, after which it ends, is not compiled for long work; a user's own options for Java win.
    """
    name = "spark.driver.extraJavaOptions"
    brief, long = (
        spark_conf(PipelineSettings(), is_brief=each, java_options="-Xlog:disable")[name] for each in (True, False)
    )

    assert "-XX:TieredStopAtLevel=1" in brief
    assert "TieredStopAtLevel" not in long
    assert all("-Xlog:disable" in each for each in (brief, long))
    assert spark_conf(PipelineSettings(spark={name: "-Xint"}), is_brief=True)[name] == "-Xint"


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
