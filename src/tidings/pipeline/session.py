"""
A Spark session from the settings: this machine's cores, a cluster, or a Spark Connect server, by one setting.

The session is quiet, speaks UTC, and takes no more memory than the settings say. Whoever starts one closes it;
starting costs seconds, so a process that runs the pipeline every so often keeps it.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from .errors import MasterUnreachable, PipelineError, SparkFailed
from .java import find_java
from .settings import PipelineSettings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["is_remote", "open_session", "spark_conf", "start_session"]

_ADDRESS: Final = re.compile(r"(?:spark|sc|k8s)://(?:https?://)?(?P<host>\[[^\]]+\]|[^:/,;]+)(?::(?P<port>[0-9]+))?")
_DEFAULT_PORTS: Final = {"spark": 7077, "sc": 15002, "k8s": 443}

_CONF: Final = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.parquet.compression.codec": "zstd",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.adaptive.coalescePartitions.parallelismFirst": "false",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.execution.pyspark.udf.faulthandler.enabled": "true",
    "spark.driver.extraJavaOptions": "-XX:+UseParallelGC -Duser.timezone=UTC",
    # A job that fails says so to its caller; what a user reads is our sentence and, with --spark-log, Spark's.
    "spark.log.level": "OFF",
}


def is_remote(master: str) -> bool:
    """Whether the address is that of a Spark Connect server: the session then has no JVM of its own."""
    return master.startswith("sc://")


def spark_conf(settings: PipelineSettings, *, is_loud: bool = False) -> dict[str, str]:
    """What Spark is told, by the names of its own settings."""
    conf = {
        **_CONF,
        "spark.driver.memory": f"{settings.driver_memory_mb}m",
        "spark.sql.shuffle.partitions": str(settings.shuffle_partitions),
    }
    if is_loud:
        conf["spark.log.level"] = "INFO"
    if settings.master.startswith("local"):
        conf["spark.driver.host"] = "127.0.0.1"
        conf["spark.driver.bindAddress"] = "127.0.0.1"
    return {**conf, **settings.spark}


def start_session(
    settings: PipelineSettings, *, environment: Mapping[str, str] | None = None, is_loud: bool = False
) -> SparkSession:
    """
    Start (or join) the session that the settings describe.

    Args:
        settings: Where it runs and what it may take.
        environment: Where Java is looked for; this process's own by default.
        is_loud: Whether Spark's own log goes to stderr.

    Raises:
        JavaMissing: Spark would have to run here, and there is no Java for it.
        MasterUnreachable: Nobody answers at ``settings.master``.
    """
    check_reachable(settings.master, settings.connect_ms_max)
    if not is_remote(settings.master):
        own = os.environ  # noqa: TID251 - pyspark starts the JVM and its workers with this environment, and with no other
        java = find_java(own if environment is None else environment, _java_cache(settings))
        own["JAVA_HOME"] = str(java.home)
        own.setdefault("PYSPARK_PYTHON", sys.executable)
        if settings.master.startswith("local"):
            own["SPARK_LOCAL_IP"] = "127.0.0.1"
    else:
        check_speaking(settings.master, settings.connect_ms_max)
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName("tidings")
    is_connect = is_remote(settings.master)
    builder = builder.remote(settings.master) if is_connect else builder.master(settings.master)
    for name, value in spark_conf(settings, is_loud=is_loud).items():
        # A server has its memory, its log and its host already; asking for others is refused.
        if not is_connect or name.startswith("spark.sql."):
            builder = builder.config(name, value)
    with _quiet_start(is_loud=is_loud):
        try:
            return builder.getOrCreate()
        except (PySparkException, OSError, RuntimeError) as error:
            if settings.master.startswith("local"):
                raise SparkFailed("its start", first_line(error)) from error
            raise MasterUnreachable(settings.master, first_line(error)) from error
        except Exception as error:
            if type(error).__module__.startswith("py4j"):
                raise MasterUnreachable(settings.master, first_line(error)) from error
            raise


@contextlib.contextmanager
def open_session(settings: PipelineSettings, *, is_loud: bool = False) -> Iterator[SparkSession]:
    """A session for as long as it is needed. Ending it also ends the JVM that was started for it."""
    session = start_session(settings, is_loud=is_loud)
    try:
        yield session
    finally:
        stop_session(session)


def stop_session(session: SparkSession) -> None:
    """End a session and, if there is one, its JVM: ``stop`` alone leaves the JVM and its pipes behind."""
    gateway = None
    if not type(session).__module__.startswith("pyspark.sql.connect"):
        from pyspark import SparkContext

        gateway = SparkContext._gateway
    session.stop()
    if gateway is None:
        return
    gateway.shutdown()
    if (process := getattr(gateway, "proc", None)) is not None:
        if process.stdin is not None:
            process.stdin.close()  # the JVM ends when this pipe does
        process.wait()
    SparkContext._gateway = None
    SparkContext._jvm = None


def check_reachable(master: str, connect_ms_max: int) -> None:
    """
    Whether somebody listens at a cluster's address: Spark itself would go on asking for minutes.

    Raises:
        MasterUnreachable: Nobody does.
    """
    found = _ADDRESS.match(master)
    if found is None:
        if not master.startswith("local"):
            raise MasterUnreachable(master, "that is no address of a master")
        return
    # Of several masters (spark://a:1,b:2) any one may be the living one; Spark asks them all.
    problem = ""
    scheme = master.partition("://")[0]
    for address in master.split(","):
        each = _ADDRESS.match(address if "://" in address else f"{scheme}://{address}")
        if each is None:
            continue
        host, port = each["host"].strip("[]"), int(each["port"] or _DEFAULT_PORTS[scheme])
        try:
            socket.create_connection((host, port), timeout=connect_ms_max / 1000).close()
        except OSError as error:
            problem = error.strerror or str(error)
        else:
            return
    raise MasterUnreachable(master, problem)


def check_speaking(master: str, connect_ms_max: int) -> None:
    """
    Whether whoever listens at a Spark Connect address speaks its protocol: Spark's client would wait for ten minutes.

    Raises:
        MasterUnreachable: It says nothing, or something else.
    """
    found = _ADDRESS.match(master)
    if found is None or "use_ssl=true" in master or "token=" in master:
        return  # behind TLS the client itself finds out at once
    import grpc  # type: ignore[import-untyped]

    with grpc.insecure_channel(f"{found['host']}:{found['port'] or _DEFAULT_PORTS['sc']}") as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=connect_ms_max / 1000)
        except grpc.FutureTimeoutError as error:
            raise MasterUnreachable(master, "what listens there does not speak Spark Connect") from error


def first_line(error: BaseException) -> str:
    """What an error says, in a line: Spark's go on for pages, and begin with where they passed through."""
    lines = [line.strip(" :\t") for line in str(error).splitlines()]
    telling = [line for line in lines if line and not line.startswith("An error occurred while calling")]
    return telling[0][:500] if telling else type(error).__name__


def _java_cache(settings: PipelineSettings) -> Path:
    if settings.java_cache is not None:
        return Path(settings.java_cache)
    try:
        return Path.home() / ".cache" / "tidings"
    except RuntimeError:  # a user without a home
        return Path(tempfile.gettempdir()) / f"tidings-{os.getuid()}"


@contextlib.contextmanager
def _quiet_start(*, is_loud: bool) -> Iterator[None]:
    """
    Keep what the JVM prints before it knows its log level off our stderr.

    The JVM inherits the file descriptor itself, and keeps it; so the descriptor points elsewhere while it is born.
    """
    if is_loud:
        yield
        return
    sys.stderr.flush()
    try:
        before = os.dup(2)
    except OSError as error:
        raise PipelineError(f"stderr is closed: {error}") from error
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)
        os.close(nowhere)
