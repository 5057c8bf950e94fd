"""
``gold.group_lag`` and ``gold.retries``: how far each group is behind, and how hard it had to try.

Lag is counted against what the run has seen, so a group whose cursor file was read a moment later than the log may stand
past the end; that is no lag, not a negative one.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from .columns import setting, shaped
from .job import Job, JobContext, Output

__all__ = ["JOBS", "group_lag", "moment", "retries"]

STALLED_AFTER_S: Final = 300.0
_LAG: Final = Output(
    table="gold.group_lag",
    schema=(
        "topic string, group string, committed bigint, head_offset bigint, lag bigint, oldest_waiting_at timestamp,"
        " waiting_s double, cursor_at timestamp, idle_s double, state string"
    ),
    about="One group at the end of the run: how many events it has not acknowledged, and how long the oldest has waited.",
)
_RETRIES: Final = Output(
    table="gold.retries",
    schema=(
        "topic string, group string, date date, letters bigint, attempts bigint, retries bigint, attempts_max int,"
        " attempts_mean double, trying_s_mean double, trying_s_max double"
    ),
    about="One group's dead letters of one day: how often they were tried, and over how long.",
)


def moment(time: datetime) -> Column:
    """A time of the run as a column, to the microsecond and whatever the session's zone."""
    whole = int(time.timestamp()) * 1_000_000 + time.microsecond
    return F.timestamp_micros(F.lit(whole))


def group_lag(
    events: DataFrame, cursors: DataFrame, as_of: datetime, *, stalled_after_s: float = STALLED_AFTER_S
) -> DataFrame:
    """
    Where each group stands.

    ``state`` is ``caught_up``; ``behind``; or ``stalled``, when events wait and the cursor has not moved for
    ``stalled_after_s``.

    Args:
        events: ``bronze.events``.
        cursors: ``silver.group_cursors``; ``committed`` is the last acknowledged offset, -1 for none.
        as_of: The run's idea of now.
        stalled_after_s: How long a cursor may stand still while events wait.
    """
    heads = events.groupBy("topic").agg(F.max("offset").alias("head_offset"))
    waiting = (
        events.select("topic", "offset", "written_at")
        .join(F.broadcast(cursors.select("topic", "group", "committed")), "topic")
        .where(F.col("offset") > F.col("committed"))
        .groupBy("topic", "group")
        .agg(F.min("written_at").alias("oldest_waiting_at"))
    )
    now = moment(as_of)
    lag = F.greatest(F.lit(0), F.coalesce(F.col("head_offset") - F.col("committed"), F.lit(0)))
    idle_s = F.greatest(F.lit(0.0), now.cast("double") - F.col("cursor_at").cast("double"))
    waiting_s = F.greatest(F.lit(0.0), now.cast("double") - F.col("oldest_waiting_at").cast("double"))
    state = (
        F.when(F.col("lag") == 0, "caught_up").when(F.col("idle_s") > stalled_after_s, "stalled").otherwise("behind")
    )
    return (
        cursors.select("topic", "group", "committed", F.col("at").alias("cursor_at"))
        .join(heads, "topic", "left")
        .join(waiting, ["topic", "group"], "left")
        .withColumns({"lag": lag, "idle_s": idle_s})
        .withColumns({"waiting_s": F.when(F.col("oldest_waiting_at").isNotNull(), waiting_s), "state": state})
    )


def retries(letters: DataFrame) -> DataFrame:
    """How often dead letters were tried, by group and day of failing. A letter without attempts (expired, denied) counts none."""
    history = F.from_json("history", "array<struct<at:string,error:string>>")
    times = F.array_compact(F.transform(history, lambda attempt: attempt["at"].try_cast("timestamp")))
    trying_s = F.col("failed_at").cast("double") - F.array_min(times).cast("double")
    return (
        letters.select(
            "topic",
            "group",
            F.to_date("failed_at").alias("date"),
            F.coalesce(F.col("attempts"), F.lit(0)).alias("attempts"),
            F.greatest(F.lit(0.0), trying_s).alias("trying_s"),
        )
        .withColumn("trying_s", F.when(F.col("attempts") > 0, F.col("trying_s")))
        .groupBy("topic", "group", "date")
        .agg(
            F.count("*").alias("letters"),
            F.sum("attempts").alias("sum_attempts"),
            F.sum(F.greatest(F.lit(0), F.col("attempts") - 1)).alias("retries"),
            F.max("attempts").alias("attempts_max"),
            F.avg("attempts").alias("attempts_mean"),
            F.avg("trying_s").alias("trying_s_mean"),
            F.max("trying_s").alias("trying_s_max"),
        )
        .withColumnRenamed("sum_attempts", "attempts")
    )


def _build(tables: Mapping[str, DataFrame], context: JobContext) -> Mapping[str, DataFrame]:
    stalled_after_s = setting(context, "stalled_after_s", STALLED_AFTER_S)
    lag = group_lag(
        tables["bronze.events"], tables["silver.group_cursors"], context.as_of, stalled_after_s=stalled_after_s
    )
    return {
        _LAG.table: shaped(lag, _LAG),
        _RETRIES.table: shaped(retries(tables["silver.dead_letters"]), _RETRIES),
    }


JOBS: Final = (
    Job(
        name="group_health",
        about="Lag of each group, and how often its dead letters were tried.",
        reads=("bronze.events", "silver.group_cursors", "silver.dead_letters"),
        writes=(_LAG, _RETRIES),
        build=_build,
    ),
)
