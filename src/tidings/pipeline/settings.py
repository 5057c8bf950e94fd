"""The pipeline's settings: every bound has its unit in its name, and a range in its type."""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec

from tidings.core.settings import Settings

_MIB = 1 << 20


class PipelineSettings(Settings, frozen=True, kw_only=True):
    """Where the pipeline runs, and how much it takes on at a time."""

    master: str = "local[*]"
    """``local[n]``, ``spark://host:port``, ``k8s://https://host:port``, or ``sc://host:port`` (Spark Connect)."""
    driver_memory_mb: Annotated[int, msgspec.Meta(ge=512, le=1 << 20)] | None = None
    """The JVM's heap. With ``local[n]`` everything that Spark itself does happens in it. By default a third of the memory that the
    process may use, within 1 and 16 GB."""
    task_memory_mb: Annotated[int, msgspec.Meta(ge=128, le=1 << 20)] = 512
    """What converting lines within one task may take beside the lines it holds."""
    shuffle_partitions: Annotated[int, msgspec.Meta(ge=1, le=10_000)] | None = None
    """Into so many parts rows are divided between two steps, at most: small ones are put together. By default twice the cores."""
    connect_ms_max: Annotated[int, msgspec.Meta(ge=100, le=600_000)] = 5_000
    """How long a master may take to answer the door before the run gives up."""
    spark: dict[str, str] = msgspec.field(default_factory=dict)
    """Further settings of Spark's own, by their names; they win over ours."""
    java_cache: str | None = None
    """Where the bundled Java's home is made; by default below the user's cache folder."""

    split_bytes_max: Annotated[int, msgspec.Meta(ge=64 * 1024, le=256 * _MIB)] = 64 * _MIB
    """One task reads about this much of the log: larger segments are split, smaller ones put together."""
    small_rows_max: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 20_000
    """Up to so many rows, in no more than ``split_bytes_max``, are little work: so many new records are read in this process, and
    a job that reads so many is computed without compiling code for it. 0: nothing is."""
    undivided_rows_max: Annotated[int, msgspec.Meta(ge=0, le=10_000_000)] = 250_000
    """A job that reads up to so many rows, in no more than ``split_bytes_max``, is computed in one part, and its tables are written
    in this process. 0: none is."""
    shared_bytes_max: Annotated[int, msgspec.Meta(ge=0, le=1 << 40)] = 64 * _MIB
    """Of an object store that Spark has no library for: tables with files of together so much, as rows in Spark's memory until a run
    ends, are read once for all its jobs. 0: each job reads for itself."""
    commit_bytes_max: Annotated[int, msgspec.Meta(ge=_MIB, le=1 << 40)] = 8192 * _MIB
    """One commit to bronze takes at most this much of the log; a longer way is gone in several."""
    commit_files_max: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 20_000
    """One commit to bronze reads at most this many segments."""
    compact_files_min: Annotated[int, msgspec.Meta(ge=2, le=100_000)] = 32
    """With so many small files a table is due for compaction."""
    compact_bytes_max: Annotated[int, msgspec.Meta(ge=_MIB, le=1 << 40)] = 64 * _MIB
    """A file below this size is small, and compaction makes files of about this size."""
    checkpoint_commits: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 20
    """After so many commits a table's log is summed up, and what of it is older than ``keep_hours`` is deleted."""
    vacuum_hours: Annotated[int, msgspec.Meta(ge=0, le=24 * 366)] = 6
    """So often files are looked for that are no part of a table any more."""
    keep_hours: Annotated[int, msgspec.Meta(ge=0, le=24 * 366)] = 24
    """Such files, and older versions of a table, stay for so long, for those who are reading them."""
    quarantine_line_bytes_max: Annotated[int, msgspec.Meta(ge=64, le=64 * _MIB)] = _MIB
    """A quarantined line is kept up to this length; the file and byte say where the rest is."""
    dedupe_days: Annotated[int, msgspec.Meta(ge=0, le=36_500)] = 7
    """Silver looks for an event's id in its own batch and among events whose files were written so many days back."""

    follow_interval_ms: Annotated[int, msgspec.Meta(ge=10, le=3_600_000)] = 1000
    """With ``--follow``: how long the query waits between looks at the log."""
    rebuild_interval_s: Annotated[float, msgspec.Meta(ge=0, le=86_400 * 366)] = 900.0
    """In runs that follow the log (``--every``): how much of the log's time must pass before a job that makes its tables anew
    from all of history does so again. Jobs that take up only what changed run every time."""

    jobs_at_once_max: Annotated[int, msgspec.Meta(ge=1, le=64)] | None = None
    """So many jobs that do not need each other's tables run side by side; by default as many as there are cores, at most four. With
    ``--follow`` one fewer than there are cores, at most."""
    jobs: dict[str, dict[str, object]] = msgspec.field(default_factory=dict)
    """Settings of jobs, by the job's name."""

    def is_small(self, rows: int, size: int) -> bool:
        """Whether so many rows in so many bytes are little work."""
        return rows <= self.small_rows_max and size <= self.split_bytes_max

    def is_undivided(self, rows: int, size: int) -> bool:
        """Whether a job that reads so many rows in so many bytes is computed in one part."""
        return rows <= self.undivided_rows_max and size <= self.split_bytes_max


class ExportFormat(enum.StrEnum):
    """What an export is written as."""

    JSONL = "jsonl"
    PARQUET = "parquet"
