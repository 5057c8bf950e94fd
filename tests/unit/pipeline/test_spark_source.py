"""The log as a DataFrame and as a stream: the same rows as bronze, each once, from any session that registers it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from tests.integration.pipeline_support import SECONDS_MAX, environment
from tests.s3_server import new_bucket
from tests.spark_session import TEST_SETTINGS, connect_address
from tests.unit.pipeline.support import Workspace, event
from tidings.pipeline.bronze_task import ArchiveTarget, Written, decode_message
from tidings.pipeline.errors import ReadRefused, RecordsDropped, SegmentMissing
from tidings.pipeline.spark_source import SourceOptions
from tidings.spark import TidingsSource, register

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def session(spark: SparkSession) -> SparkSession:
    """A session that knows the format."""
    register(spark)
    return spark


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """A log of three topics with segments of ten lines."""
    workspace = Workspace(tmp_path_factory.mktemp("log"))
    workspace.append(event(number, f"t{number % 3}", partitions=("p",)) for number in range(100))
    return workspace


def read(session: SparkSession, workspace: Workspace, **options: object) -> DataFrame:
    return session.read.format("tidings").options(**{k: str(v) for k, v in options.items()}).load(str(workspace.folder))


def seqs(frame: DataFrame) -> list[int]:
    return sorted(row[0] for row in frame.select("seq").collect())


def test_a_read_gives_the_rows_of_bronze(session: SparkSession, log: Workspace) -> None:
    """
    Every record is a row, in the columns of the table of events and with the same values.
    """
    found = read(session, log).orderBy("seq").collect()

    log.pipeline(TEST_SETTINGS).run(lambda: session)
    assert [tuple(row) for row in found] == sorted(
        (tuple(row) for row in log.lake.read(session, "bronze.events").collect()), key=lambda row: row[2]
    )
    assert [row.seq for row in found] == list(range(1, 101))


def test_options_cut_by_seq_and_topic(session: SparkSession, log: Workspace) -> None:
    """
    ``since`` is left out, ``until`` is taken in, and only the topics that are named are read.
    """
    assert seqs(read(session, log, since=10, until=40)) == list(range(11, 41))
    assert seqs(read(session, log, topics="t0, t2", until=9)) == [1, 3, 4, 6, 7, 9]
    assert seqs(read(session, log, since=100)) == []
    assert seqs(read(session, log, until=1000)) == list(range(1, 101))


def test_conditions_hold_of_what_comes(session: SparkSession, log: Workspace) -> None:
    """
    Rows come if the conditions on topic, seq and time of writing hold of them, and no others.
    """
    whole = read(session, log)
    times = {row.seq: row.written_at for row in whole.select("seq", "written_at").collect()}
    moment = times[90]
    assert seqs(whole.where("topic = 't1' and seq between 20 and 30")) == [20, 23, 26, 29]
    late = [seq for seq, written_at in times.items() if written_at >= moment and seq != 95]
    assert seqs(whole.where(f"written_at >= timestamp'{moment.isoformat()}Z' and seq != 95")) == sorted(late)


def test_conditions_leave_out_segments(log: Workspace) -> None:
    """
    What a condition on topic, seq or time of writing rules out is not even read, and Spark is asked to look again.
    """
    from pyspark.sql.datasource import EqualTo, GreaterThan, GreaterThanOrEqual, In, LessThan, LessThanOrEqual
    from pyspark.sql.types import LongType, StructField, StructType

    def segments(*filters: Any) -> list[str]:
        reader = TidingsSource({"path": str(log.folder)}).reader(StructType([StructField("seq", LongType())]))
        assert list(reader.pushFilters(list(filters))) == list(filters)
        found: list[Any] = list(reader.partitions())
        return sorted(each.path for part in found for each in part.ranges)

    whole = segments()
    assert len(whole) == 12
    assert segments(EqualTo(("topic",), "t1")) == [name for name in whole if name.startswith("t1.")]
    assert segments(In(("topic",), ("t1", "t2")), EqualTo(("topic",), "t0")) == []
    assert segments(GreaterThan(("seq",), 95)) == [f"t{number}.00000004.jsonl" for number in range(3)]
    assert segments(GreaterThanOrEqual(("seq",), 31), LessThan(("seq",), 32)) == ["t0.00000002.jsonl"]
    assert segments(LessThanOrEqual(("seq",), 0)) == []
    future = datetime(2999, 1, 1, tzinfo=UTC)
    assert segments(LessThanOrEqual(("written_at",), future)) == whole
    assert segments(GreaterThan(("written_at",), future)) == [f"t{n}.00000004.jsonl" for n in range(3)]  # no seal says


def test_a_copy_elsewhere_is_read(log: Workspace, s3_url: str) -> None:
    """
    A copy of the log's folder in an object store is read as the log is; one that lacks what its checkpoint speaks of is refused.
    """
    from pyspark.sql.types import LongType, StructField, StructType

    bucket = new_bucket(s3_url)
    for path in log.layout.root.rglob("*.json*"):
        bucket.replace(path.relative_to(log.folder).as_posix(), path.read_bytes())

    def found() -> list[int]:
        options = {"path": bucket.url, **{f"storage.{name}": value for name, value in bucket.options}}
        reader: Any = TidingsSource(options).reader(StructType([StructField("seq", LongType())]))
        batches = [batch for part in reader.partitions() for batch in reader.read(part)]
        return sorted(seq for batch in batches for seq in batch["seq"].to_pylist())

    assert found() == list(range(1, 101))
    cut = max(log.layout.wal.glob("t0.*.jsonl"))
    bucket.replace(f".bus/wal/{cut.name}", cut.read_bytes()[:-10])
    with pytest.raises(SegmentMissing, match=cut.name):
        found()


def test_a_schema_reads_fewer_columns(session: SparkSession, log: Workspace) -> None:
    """
    A subset of the columns, in any order, is what comes; a column that there is not, or of another type, is refused.
    """
    frame = session.read.format("tidings").schema("payload string, seq bigint").load(str(log.folder))

    assert frame.columns == ["payload", "seq"]
    assert sorted(tuple(row) for row in frame.where("seq < 3").collect()) == [('{"n":0}', 1), ('{"n":1}', 2)]
    for ddl, problem in (("colour string", "no column 'colour'"), ("seq string", "'seq' is of type int64")):
        with pytest.raises(Exception, match=problem):
            session.read.format("tidings").schema(ddl).load(str(log.folder)).collect()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"colour": "red"}, "no option 'colour'"),
        ({"since": "soon"}, "since is a whole number from 0 on"),
        ({"mode": "lenient"}, "mode is one of FAILFAST"),
        ({"failOnDataLoss": "perhaps"}, "failOnDataLoss is true or false"),
        ({"maxRowsPerTrigger": "1", "maxBytesPerTrigger": "1"}, "bound the same thing"),
    ],
)
def test_options_that_say_nothing_are_refused(options: dict[str, str], problem: str) -> None:
    """
    An option that there is not, or that cannot be, is an error that says so.
    """
    with pytest.raises(ReadRefused, match=problem):
        SourceOptions.parse({"path": "ws", **options})


def test_lines_that_are_no_records(session: SparkSession, tmp_path: Path) -> None:
    """
    A damaged line stops a read that was told nothing; it is left out, or a row of its own, where that is asked for.
    """
    workspace = Workspace(tmp_path)
    workspace.append(event(number) for number in range(15))
    path = workspace.segments()[0]
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:4], lines[4].replace(b'"n":', b'"m":'), *lines[5:]]))

    with pytest.raises(Exception, match=f"{path.name}, byte {len(b''.join(lines[:4]))}: a line's checksum"):
        read(session, workspace).collect()
    assert seqs(read(session, workspace, mode="dropMalformed")) == [1, 2, 3, 4, *range(6, 16)]
    ddl = "topic string, seq bigint, _corrupt_record string"
    source = session.read.format("tidings").schema(ddl).option("mode", "PERMISSIVE")
    (bad,) = source.load(str(tmp_path)).where("seq is null").collect()
    assert bad.topic == "demo"
    assert json.loads(bad._corrupt_record)["byte_offset"] == len(b"".join(lines[:4]))


def test_no_workspace_is_told(session: SparkSession, tmp_path: Path) -> None:
    """
    A folder without a log is an error, not an empty frame.
    """
    with pytest.raises(Exception, match="holds no log"):
        session.read.format("tidings").load(str(tmp_path)).collect()


class Sink:
    """What a stream's batches hold, batch by batch."""

    def __init__(self, session: SparkSession, workspace: Workspace, checkpoint: Path, **options: object) -> None:
        self.batches: list[list[int]] = []
        stream = session.readStream.format("tidings").schema("seq bigint, topic string")
        self._frame = stream.options(**{k: str(v) for k, v in options.items()}).load(str(workspace.folder))
        self._checkpoint = checkpoint

    def run(self) -> list[list[int]]:
        """Take all there is, and end; the batches of this run."""
        self.batches = []

        def take(frame: DataFrame, _: int) -> None:
            self.batches.append(seqs(frame))

        writer = self._frame.writeStream.foreachBatch(take).option("checkpointLocation", str(self._checkpoint))
        writer.trigger(availableNow=True).start().awaitTermination()
        return [batch for batch in self.batches if batch]


@pytest.mark.slow
def test_a_stream_reads_on(session: SparkSession, tmp_path: Path) -> None:
    """
    A query that is started again goes on behind the last seq that it had, in batches of the size that is asked for.
    """
    workspace = Workspace(tmp_path / "ws")
    workspace.append(event(number, f"t{number % 2}") for number in range(25))
    sink = Sink(session, workspace, tmp_path / "checkpoint", maxRowsPerTrigger=10)

    assert sink.run() == [list(range(1, 11)), list(range(11, 21)), list(range(21, 26))]
    workspace.append([event(100, "t2")])
    assert sink.run() == [[26]]


def stream(workspace: Workspace, **options: str) -> Any:
    """The stream's reader, as Spark's planner has it."""
    from pyspark.sql.types import LongType, StructField, StructType

    given = {"path": str(workspace.folder), **options}
    return TidingsSource(given).streamReader(StructType([StructField("seq", LongType())]))


def taken(reader: Any, start: dict[str, Any], end: dict[str, Any]) -> list[int]:
    """The seqs that a micro-batch gives."""
    batches = [batch for part in reader.partitions(start, end) for batch in reader.read(part)]
    return sorted(seq for batch in batches for seq in batch["seq"].to_pylist())


def test_a_stream_by_bytes_and_topic(tmp_path: Path) -> None:
    """
    A bound on bytes makes several batches, each comes out the same when it is planned again, and a topic's records are all there.
    """
    workspace = Workspace(tmp_path)
    workspace.append(event(number, f"t{number % 2}") for number in range(60))
    reader = stream(workspace, maxBytesPerTrigger="1", topics="t1", since="10")
    start, batches = reader.initialOffset(), 0
    found: list[int] = []
    while (end := reader.latestOffset(start, reader.getDefaultReadLimit())) != start:
        batch = taken(reader, start, end)
        assert taken(stream(workspace, topics="t1"), start, end) == batch
        start, found, batches = end, found + batch, batches + 1

    assert batches > 1
    assert found == list(range(12, 61, 2))


def test_a_stream_tells_what_it_lost(tmp_path: Path) -> None:
    """
    What was dropped before a query began is no loss; what is dropped after that, unread, stops it unless it may go on.
    """
    workspace = Workspace(tmp_path)
    workspace.append(event(number) for number in range(35))
    workspace.retain("demo", 0)
    reader = stream(workspace)
    everything = reader.getDefaultReadLimit()
    start = reader.initialOffset()
    end = reader.latestOffset(start, everything)
    assert taken(reader, start, end) == [31, 32, 33, 34, 35]
    workspace.append(event(number) for number in range(35, 65))
    workspace.retain("demo", 0)
    last = reader.latestOffset(end, everything)

    with pytest.raises(RecordsDropped):
        taken(reader, end, last)
    assert taken(stream(workspace, failOnDataLoss="false"), end, last) == [61, 62, 63, 64, 65]
    with pytest.raises(ReadRefused, match="new checkpoint"):
        reader.latestOffset({**end, "epoch": "0" * 16}, everything)


def test_each_attempt_of_a_task_writes_files_of_its_own(
    log: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    A task that Spark runs twice, at once or after a failure, leaves the file of its other attempt alone.
    """
    from pyspark import TaskContext
    from pyspark.sql.types import StructType

    target = ArchiveTarget(lake=str(tmp_path), epoch=log.epoch, run="r", memory_mb=128, line_bytes_max=100)
    options = {"path": str(log.folder), "archive": msgspec.json.encode(target).decode()}
    reader: Any = TidingsSource(options).reader(StructType([]))
    (part,) = reader.partitions()
    written = []
    for attempt in (7, 8):
        context = TaskContext()
        context._taskAttemptId = attempt
        monkeypatch.setattr(TaskContext, "_taskContext", context)
        (messages,) = reader.read(part)
        written += [decode_message(text) for text in messages["message"].to_pylist()]

    files = {message.entry["name"]: message.entry["rows"] for message in written if isinstance(message, Written)}
    assert list(files.values()) == [100, 100]
    assert {path.name for path in tmp_path.rglob("*.parquet")} == files.keys()


@pytest.mark.slow
def test_the_program_of_the_page_runs(session: SparkSession, tmp_path: Path) -> None:
    """
    What the page for Spark people shows can be pasted, on a machine without Java: it prints what the workspace holds.
    """
    workspace = Workspace(tmp_path / "shop")
    workspace.append(event(number, "orders", {"total": 2.5}) for number in range(4))
    workspace.append([event(8, "orders", type="PAID"), event(9, "visits", type="PAID")])
    page = Path(__file__).parents[3] / "docs" / "topics" / "spark.md"
    (program,) = re.findall(r"^```py\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)

    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=environment(tmp_path, has_java=False),
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert re.search(r"\|MADE\|\s+4\|\s*10\.0\|", done.stdout)
    assert re.search(r"\|\s+5\|[^\n]*\|\s*\{\"n\":8\}\|", done.stdout)
    assert seqs(session.read.parquet(str(tmp_path / "paid" / "rows"))) == [5]


@pytest.mark.slow
@pytest.mark.heavy
def test_over_spark_connect(session: SparkSession, log: Workspace, tmp_path: Path) -> None:
    """
    A session without a JVM reads and streams the same.
    """
    from pyspark.sql.connect.session import SparkSession as ConnectSession

    remote: Any = ConnectSession.builder.remote(connect_address(session)).create()
    try:
        register(remote)
        assert seqs(read(remote, log).where("topic = 't1' and seq > 90")) == [92, 95, 98]
        target = tmp_path / "rows"
        stream = remote.readStream.format("tidings").load(str(log.folder)).select("seq")
        writer = stream.writeStream.format("parquet").option("checkpointLocation", str(tmp_path / "checkpoint"))
        writer.trigger(availableNow=True).start(str(target)).awaitTermination()
        assert seqs(session.read.parquet(str(target))) == list(range(1, 101))
    finally:
        remote.stop()
