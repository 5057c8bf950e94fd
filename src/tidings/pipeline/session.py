"""
A Spark session from the settings: this machine's cores, a cluster, or a Spark Connect server, by one setting.

The session is quiet, uses UTC, and takes no more memory than the settings say, or than its share of the machine. Whoever
starts one closes it; starting costs seconds, so a process that runs the pipeline every so often keeps it, and one that finds
nothing to do never starts it (``SessionOnDemand``).
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol
from weakref import WeakKeyDictionary

from .errors import MasterUnreachable, PipelineError, SparkFailed
from .java import ClassArchive, find_java, java_cache
from .settings import PipelineSettings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_POLL_S: Final = 0.25


@dataclass(frozen=True, slots=True)
class ProgressStep:
    """How far a run is."""

    stage: str
    """``bronze``, ``silver``, or the name of a job."""
    done: int = 0
    total: int | None = None
    """Tasks, or ``None`` where nobody can say."""
    rows: int = 0
    """Rows that the stage has committed so far."""


class Progress(Protocol):
    """Receives progress."""

    def __call__(self, step: ProgressStep, /) -> None:
        """Called now and then, from any thread; must not block."""
        ...


@contextlib.contextmanager
def watched(spark: SparkSession, progress: Progress, stage: str, total: int, rows: int) -> Iterator[None]:
    """
    Report how many of a stage's tasks are done, for as long as the block runs.

    Over Spark Connect they cannot be counted from here; then only the beginning and the end are reported.
    """
    progress(ProgressStep(stage, 0, total, rows))
    if type(spark).__module__.startswith("pyspark.sql.connect"):
        yield
        progress(ProgressStep(stage, total, total, rows))
        return
    tracker, over = spark.sparkContext.statusTracker(), threading.Event()

    def poll() -> None:
        while not over.wait(_POLL_S):
            infos = [tracker.getStageInfo(number) for number in tracker.getActiveStageIds()]
            done = sum(info.numCompletedTasks for info in infos if info is not None)
            progress(ProgressStep(stage, min(done, total), total, rows))

    watcher = threading.Thread(target=poll, name="tidings-pipeline-progress", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
    progress(ProgressStep(stage, total, total, rows))


_HEAP_MB_MIN: Final = 1024
_HEAP_MB_MAX: Final = 16 * 1024
_ADDRESS: Final = re.compile(r"(?:spark|sc|k8s)://(?:https?://)?(?P<host>\[[^\]]+\]|[^:/,;]+)(?::(?P<port>[0-9]+))?")
_DEFAULT_PORTS: Final = {"spark": 7077, "sc": 15002, "k8s": 443}

_BATCH_ROWS: Final = "spark.sql.execution.arrow.maxRecordsPerBatch"
_BATCH_BYTES: Final = "spark.sql.execution.arrow.maxBytesPerBatch"
_BATCH_BYTES_MAX: Final = 32 << 20
_BATCH_ROWS_MIN: Final = 1 << 10
_BATCH_ROWS_MAX: Final = 1 << 16

_CONF: Final = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.parquet.compression.codec": "zstd",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    # Handing a batch to Python and back costs more than what is done with ten thousand numbers.
    _BATCH_ROWS: str(_BATCH_ROWS_MAX),
    _BATCH_BYTES: str(_BATCH_BYTES_MAX),
    "spark.sql.execution.pyspark.udf.faulthandler.enabled": "true",
    # Else each column asks the JVM where in our code it was made.
    "spark.python.sql.dataFrameDebugging.enabled": "false",
    # All jobs together compile far more than the hundred pieces of code that would be kept from one run to the next.
    "spark.sql.codegen.cache.maxEntries": "4000",
    # Jobs that run side by side share the cores, instead of the first one having them all.
    "spark.scheduler.mode": "FAIR",
    # What Spark never shows: its own words for it, all storage options, and keys of Azure and Google by Hadoop's names.
    "spark.redaction.regex": r"(?i)secret|password|token|(access|account|private|sas)[._]?key|[._]sas[._]|service[._]?account|^storage[.]",
    # A job that fails says so to its caller; what a user reads is our sentence and, with --spark-log, Spark's.
    "spark.log.level": "OFF",
}


_UNDIVIDED: Final = {"spark.sql.adaptive.enabled": "false", "spark.sql.shuffle.partitions": "1"}
"""For a query over not so many rows: looks at sizes, and parts, would cost more than they save."""
_LITTLE: Final = {**_UNDIVIDED, "spark.sql.codegen.wholeStage": "false", "spark.sql.codegen.factoryMode": "NO_CODEGEN"}
"""For a query over few rows: generating and compiling code would cost more than computing."""
_beside: WeakKeyDictionary[SparkSession, dict[tuple[tuple[str, str], ...], SparkSession]] = WeakKeyDictionary()
_beside_lock: Final = threading.Lock()


def session_for_little(spark: SparkSession, *, is_compiled: bool = False) -> SparkSession:
    """
    A session beside this one, in the same Spark, for queries over few rows; over Spark Connect the same one.

    Args:
        spark: This one.
        is_compiled: Whether there are so many that compiling code for them pays.
    """
    return _session_beside(spark, _UNDIVIDED if is_compiled else _LITTLE)


def session_for_short_rows(spark: SparkSession, row_bytes_max: int, settings: PipelineSettings) -> SparkSession:
    """
    A session beside this one for queries whose rows are no longer than this: what Spark hands to Python at a time is then bound by a
    number of rows. Measuring all columns after each row, as it does for a bound in bytes, takes longer than most of what is done
    with rows that have lists and maps. Where rows are long, or somebody set these bounds, the same session.
    """
    rows = min(_BATCH_BYTES_MAX // max(row_bytes_max, 1), _BATCH_ROWS_MAX)
    if rows < _BATCH_ROWS_MIN or not settings.spark.keys().isdisjoint((_BATCH_ROWS, _BATCH_BYTES)):
        return spark
    # A power of two, so that there are few of these sessions however the longest row grows.
    return _session_beside(spark, {_BATCH_ROWS: str(1 << rows.bit_length() - 1), _BATCH_BYTES: str((1 << 31) - 1)})


def _session_beside(spark: SparkSession, conf: Mapping[str, str]) -> SparkSession:
    """The session beside this one that has these settings; over Spark Connect the same one."""
    if type(spark).__module__.startswith("pyspark.sql.connect"):
        return spark
    key = tuple(conf.items())
    with _beside_lock:
        known = _beside.setdefault(spark, {})
        if key not in known:
            known[key] = spark.newSession()
            for name, value in conf.items():
                known[key].conf.set(name, value)
        return known[key]


class _StaticMethods:
    """The static methods of a class of the JVM, each looked up once."""

    def __init__(self, of: Any) -> None:
        self._of = of

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._of, name)
        setattr(self, name, found)
        return found


_FUNCTIONS: Final = ("functions", "org.apache.spark.sql.functions")
_CLASSES: Final = ("PythonUtils", "PythonSQLUtils", "PythonRDD", "SerDeUtil", "SimplePythonFunction")


def _remember_classes() -> None:
    """
    Have what pyspark asks the JVM for again and again be looked up once.

    It names a class for each column that it makes, some thousand times in a run over all jobs, and for some of these names the JVM
    goes through all of Spark's archives, time and again.
    """
    from pyspark import SparkContext

    jvm: Any = SparkContext._jvm
    for name in _FUNCTIONS:
        if name not in vars(jvm):
            setattr(jvm, name, _StaticMethods(getattr(jvm, name)))
    for name in _CLASSES:
        setattr(jvm, name, getattr(jvm, name))


def is_remote(master: str) -> bool:
    """Whether the address is that of a Spark Connect server: the session then has no JVM of its own."""
    return master.startswith("sc://")


@contextlib.contextmanager
def connect_mode(master: str) -> Iterator[None]:
    """
    Within the block PySpark makes columns and UDFs for Spark Connect if that is where ``master`` leads, also before there is a session.

    For the import of job sets: a UDF that a set builds on import belongs to the mode that it was built in.
    """
    name = "SPARK_CONNECT_MODE_ENABLED"
    if not is_remote(master):
        yield
        return
    own = os.environ  # noqa: TID251 - PySpark looks here
    before = own.get(name)
    own[name] = "1"
    try:
        yield
    finally:
        if before is None:
            own.pop(name, None)
        else:
            own[name] = before


def memory_mb() -> int:
    """How much memory this process may use: the machine's, or what its container is held to."""
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            found = min(found, int(Path(limit).read_text()))
    return found >> 20


def cores_of(settings: PipelineSettings) -> int:
    """About how many tasks run at once."""
    return (os.cpu_count() or 2) if settings.master.startswith("local") else 8


def heap_mb(settings: PipelineSettings, available_mb: int | None = None) -> int:
    """The JVM's heap: what the settings say, or a third of the memory there is. The rest is for Python, Arrow and DuckDB."""
    if settings.driver_memory_mb is not None:
        return settings.driver_memory_mb
    return min(max((memory_mb() if available_mb is None else available_mb) // 3, _HEAP_MB_MIN), _HEAP_MB_MAX)


# Java collects everything when its room for classes grows past a first limit, which Spark passes several times. And with its usual
# thresholds it spends a third of a run on compiling well, for the most part of what plans queries, which is soon well enough.
# Where times have no zone, and letters no language, those of the JVM count: of the driver's and of each executor's. They come last, where
# the JVM takes them whatever else it is given: tables do not depend on them.
_JAVA_PLACE: Final = "-Duser.timezone=UTC -Duser.language=en -Duser.country=US"
_JAVA_OPTIONS: Final = (
    "-XX:+UseParallelGC -XX:MetaspaceSize=512m -XX:Tier4InvocationThreshold=25000"
    " -XX:Tier4MinInvocationThreshold=3000 -XX:Tier4CompileThreshold=75000"
)
# All sets of jobs fill the 48 MB that such a JVM has for code, and what is loaded then fails.
_BRIEF_OPTIONS: Final = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m"
"""For a JVM that ends before code that is compiled well would have paid: it is compiled quickly, and once."""


def spark_conf(
    settings: PipelineSettings, *, is_loud: bool = False, is_brief: bool = False, java_options: str = ""
) -> dict[str, str]:
    """Settings for Spark, by its own names; ``start_session`` says what they depend on."""
    heap, cores = heap_mb(settings), cores_of(settings)
    conf = {
        **_CONF,
        "spark.driver.memory": f"{heap}m",
        "spark.driver.extraJavaOptions": f"{_BRIEF_OPTIONS if is_brief else _JAVA_OPTIONS} {java_options}".rstrip(),
        "spark.sql.shuffle.partitions": str(settings.shuffle_partitions or 2 * cores),
        # What is sent to every task is unpacked in the heap, at several times its size, once for each join that runs.
        "spark.sql.autoBroadcastJoinThreshold": f"{min(max(heap // 256, 2), 32)}m",
    }
    if is_loud:
        conf["spark.log.level"] = "INFO"
    if settings.master.startswith("local"):
        conf["spark.driver.host"] = "127.0.0.1"
        conf["spark.driver.bindAddress"] = "127.0.0.1"
        conf["spark.python.daemon.module"] = "tidings.pipeline.worker_daemon"
        # Files of this machine are quicker looked up than a Spark job is started that looks them up.
        conf["spark.sql.sources.parallelPartitionDiscovery.threshold"] = "100000"
    conf |= settings.spark
    for options in ("spark.driver.extraJavaOptions", "spark.executor.extraJavaOptions"):
        conf[options] = f"{conf.get(options, '')} {_JAVA_PLACE}".lstrip()
    return conf


def start_session(
    settings: PipelineSettings,
    *,
    environment: Mapping[str, str] | None = None,
    is_loud: bool = False,
    is_brief: bool = False,
    archive: Path | None = None,
) -> SparkSession:
    """
    Start (or join) the session that the settings describe.

    Args:
        settings: Where it runs and what it may take.
        environment: Where Java is looked for; this process's own by default.
        is_loud: Whether Spark's own log goes to stderr.
        is_brief: Whether it is for little work, after which it ends.
        archive: Where the JVM writes an archive of classes when it ends (``ClassArchive``).

    Raises:
        JavaMissing: Spark would have to run here, and there is no Java for it.
        MasterUnreachable: Nobody answers at ``settings.master``.
    """
    check_reachable(settings.master, settings.connect_ms_max)
    java_options = ""
    if not is_remote(settings.master):
        own = os.environ  # noqa: TID251 - pyspark starts the JVM and its workers with this environment, and with no other
        cache = java_cache(settings.java_cache)
        java = find_java(own if environment is None else environment, cache)
        classes = ClassArchive(cache, java)
        java_options = classes.using() if archive is None else classes.making(archive)
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
    conf = spark_conf(settings, is_loud=is_loud, is_brief=is_brief, java_options=java_options)
    for name, value in conf.items():
        # A server has its memory, its log and its host already; asking for others is refused.
        if not is_connect or name.startswith("spark.sql."):
            builder = builder.config(name, value)
    # A JVM that makes an archive tells stdout of it.
    with _quiet_start(*(() if is_loud else (2,) if archive is None else (1, 2))):
        try:
            session = builder.getOrCreate()
        except (PySparkException, OSError, RuntimeError) as error:
            if settings.master.startswith("local"):
                raise SparkFailed("its start", first_line(error)) from error
            raise MasterUnreachable(settings.master, first_line(error)) from error
        except Exception as error:
            if type(error).__module__.startswith("py4j"):
                raise MasterUnreachable(settings.master, first_line(error)) from error
            raise
    if not is_connect:
        _remember_classes()
    return session


class SessionOnDemand:
    """
    A session that is started when it is first asked for, by any thread, and ended with the block.

    Args:
        settings: Where it runs and what it may take.
        is_loud: Whether Spark's own log goes to stderr.
        starting: Called before it is started.
        is_brief: Asked then whether it is for little work, after which it ends.
    """

    def __init__(
        self,
        settings: PipelineSettings,
        *,
        is_loud: bool = False,
        starting: Callable[[], None] = lambda: None,
        is_brief: Callable[[], bool] = lambda: False,
    ) -> None:
        self._settings = settings
        self._is_loud = is_loud
        self._starting = starting
        self._is_brief = is_brief
        self._session: SparkSession | None = None
        self._lock = threading.Lock()
        self._failure: Exception | None = None
        """Why the last try to start it failed."""

    def __call__(self) -> SparkSession:
        """
        The session.

        Raises:
            JavaMissing, MasterUnreachable, SparkFailed: It cannot be started.
        """
        known = self._failure
        with self._lock:
            if self._session is None:
                if self._failure is not None and self._failure is not known:
                    raise self._failure  # it came while this one waited, who need not wait for the same answer again
                self._starting()
                try:
                    self._session = start_session(self._settings, is_loud=self._is_loud, is_brief=self._is_brief())
                except Exception as error:
                    self._failure = error
                    raise
            return self._session

    def stop(self) -> None:
        """End the session, if there is one; the next call starts another."""
        with self._lock:
            if self._session is not None:
                session, self._session = self._session, None
                stop_session(session)

    def __enter__(self) -> SessionOnDemand:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


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


@contextlib.contextmanager
def translate_spark_errors(stage: str) -> Iterator[None]:
    """
    While Spark works on a stage.

    Raises:
        SparkFailed: Spark gave up on it.
    """
    try:
        yield
    except PipelineError:
        raise
    except Exception as error:
        if type(error).__module__.split(".")[0] not in ("py4j", "pyspark", "grpc"):
            raise
        raise SparkFailed(stage, first_line(error)) from error


def first_line(error: BaseException) -> str:
    """What an error says, in a line: Spark's go on for pages, and begin with where they passed through."""
    lines = [line.strip(" :\t") for line in str(error).splitlines()]
    if details := [
        line for line in lines if line.startswith("details = ")
    ]:  # of a Connect server, behind what gRPC calls itself
        return details[0].removeprefix("details = ").strip('"')[:500]
    useful = [line for line in lines if line and not line.startswith("An error occurred while calling")]
    return useful[0][:500] if useful else type(error).__name__


@contextlib.contextmanager
def _quiet_start(*descriptors: int) -> Iterator[None]:
    """
    Keep what the JVM prints, before it knows its log level and when it ends, off these descriptors of ours.

    The JVM inherits a descriptor itself, and keeps it; so it points elsewhere while the JVM is born.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    with contextlib.ExitStack() as stack:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        stack.callback(os.close, nowhere)
        for each in descriptors:
            try:
                before = os.dup(each)
            except OSError as error:
                raise PipelineError(f"descriptor {each} is closed: {error}") from error
            stack.callback(os.close, before)
            stack.callback(os.dup2, before, each)
            os.dup2(nowhere, each)
        yield
