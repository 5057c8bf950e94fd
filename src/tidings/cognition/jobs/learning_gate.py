"""
L7, ``gold.gate_*``: what the attention gate decided, what it should have decided, and where its threshold ought to be.

The first job sets every decision against its outcome, the second one sums up.

A decision is regretted when something was let in and came to nothing, or was kept out and would have been wanted. Regret is
shown by feature, so that one can see which feature misleads, and a threshold is proposed that would have been regretted least.
Only decisions that the score made count for that: policy and capacity do not ask the threshold.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from tidings.core.events import Event
from tidings.pipeline.jobs.job import (
    InputWindow,
    Job,
    JobContext,
    OutputTable,
    Partitioning,
    setting,
    shaped,
    whole_days,
)

from .consolidation_memories import ALL_ERASURES, ERASURES
from .learning_columns import LEARNING_TOPIC, learnable, summary_event, time_of, with_outcome
from .learning_told import GATE_TYPES, TOLD

WINDOW_S: Final = 86_400
ROWS_MIN: Final = 20
_CANDIDATES: Final = tuple(
    round(0.40 + 0.05 * step, 2) for step in range(11)
)  # the range the gate itself adapts within
ROWS: Final = OutputTable(
    table="gold.gate_rows",
    schema=(
        "space_id string, date date, ts timestamp, seq bigint, action string, band string, intent string, priority double,"
        " load double, admit double, is_scored boolean, features map<string,double>, y double, is_regretted boolean"
    ),
    about="One decision of the gate: at which priority, under which threshold, and what came of it (null: not known).",
)
DECISIONS: Final = OutputTable(
    table="gold.gate_decisions",
    schema=(
        "space_id string, date date, action string, band string, intent string, decisions bigint, priority_mean double,"
        " load_mean double, with_outcome bigint, regretted bigint, regret double"
    ),
    about="One kind of decision of the gate on one day: how often, at which priority, and how often it was regretted.",
)
REGRET: Final = OutputTable(
    table="gold.gate_regret",
    schema=(
        "space_id string, feature string, level string, with_outcome bigint, regretted bigint, regret double,"
        " lift double"
    ),
    about="Decisions of one space with a feature low, middling or high: the share regretted, and that against the space's own.",
)
PROPOSALS: Final = OutputTable(
    table="gold.gate_proposals",
    schema=(
        "space_id string, rows bigint, admit_now double, regretted_now bigint, admit_proposed double,"
        " regretted_proposed bigint, last_at timestamp"
    ),
    about="One space: the admission threshold in force, and the one that would have been regretted least.",
)


def decision_rows(told: DataFrame, *, window_s: int = WINDOW_S) -> DataFrame:
    """Each audited decision with the first outcome of its request or trace after it; ``y`` is null where none is known."""
    decided = told.where("gate.action is not null").select(
        *("space_id", "date", "ts", "seq", "gate.*", "features", "keys")
    )
    is_let_in = F.col("action").isin("ADMIT", "BOOST")
    found = with_outcome(decided, told, ("seq",), window_s, F.lit(True)).withColumn("y", F.col("found.y"))
    return found.withColumn("is_regretted", F.when(F.col("y").isNotNull(), is_let_in != (F.col("y") >= 0.5)))


def distribution(rows: DataFrame) -> DataFrame:
    """How often each kind of decision was made, and regretted."""
    return (
        rows.groupBy("space_id", "date", "action", "band", "intent")
        .agg(
            F.count("*").alias("decisions"),
            F.avg("priority").alias("priority_mean"),
            F.avg("load").alias("load_mean"),
            F.count("y").alias("with_outcome"),
            F.count_if("is_regretted").alias("regretted"),
        )
        .withColumn("regret", F.try_divide("regretted", "with_outcome"))
    )


def regret(rows: DataFrame) -> DataFrame:
    """Regret by feature and level: low below a third, high from two thirds on. ``lift`` is the difference to the whole space."""
    level: Column = F.when(F.col("value") < 1 / 3, "low").when(F.col("value") < 2 / 3, "middle").otherwise("high")
    known = rows.where("y is not null")
    overall = Window.partitionBy("space_id")
    return (
        known.withColumn("_space_regret", F.avg(F.col("is_regretted").cast("double")).over(overall))
        .select("space_id", "is_regretted", "_space_regret", F.explode("features").alias("feature", "value"))
        .groupBy("space_id", "feature", level.alias("level"), "_space_regret")
        .agg(F.count("*").alias("with_outcome"), F.count_if("is_regretted").alias("regretted"))
        .withColumn("regret", F.col("regretted") / F.col("with_outcome"))
        .withColumn("lift", F.col("regret") - F.col("_space_regret"))
    )


def proposals(rows: DataFrame, *, rows_min: int = ROWS_MIN) -> DataFrame:
    """
    The admission threshold each space would have regretted least, from 0.40 to 0.90 in steps of 0.05.

    The one in force is the last one seen. On a tie the threshold nearest to it is proposed, so that nothing moves without
    need; then the lower one. A space with fewer than ``rows_min`` scored decisions of known outcome gets no proposal.
    """
    known = rows.where("y is not null and is_scored and priority is not null").select(
        "space_id", "ts", "seq", "priority", "admit", "y"
    )
    now = known.groupBy("space_id").agg(
        F.max_by("admit", "seq").alias("admit_now"), F.max("ts").alias("last_at"), F.count("*").alias("rows")
    )
    tried = (
        known.drop("admit", "ts")
        .join(now.where(F.col("rows") >= rows_min), "space_id")
        .withColumn("candidate", F.explode(F.array_distinct(F.array(F.col("admit_now"), *map(F.lit, _CANDIDATES)))))
        .groupBy("space_id", "rows", "admit_now", "last_at", "candidate")
        .agg(F.count_if((F.col("priority") >= F.col("candidate")) != (F.col("y") >= 0.5)).alias("regretted"))
    )
    best = F.struct("regretted", F.abs(F.col("candidate") - F.col("admit_now")), "candidate")
    return tried.groupBy("space_id", "rows", "admit_now", "last_at").agg(
        F.min_by("candidate", best).alias("admit_proposed"),
        F.min_by("regretted", best).alias("regretted_proposed"),
        F.max(F.when(F.col("candidate") == F.col("admit_now"), F.col("regretted"))).alias("regretted_now"),
    )


def _build_rows(tables: Mapping[str, DataFrame], context: JobContext) -> Mapping[str, DataFrame]:
    known = learnable(tables[TOLD.table], tables[ERASURES])
    rows = decision_rows(known, window_s=setting(context, "gate_window_s", WINDOW_S))
    return {ROWS.table: shaped(rows, ROWS)}


def _windows(context: JobContext) -> Mapping[str, InputWindow]:
    window_s = setting(context, "gate_window_s", WINDOW_S)
    return {
        TOLD.table: InputWindow("ts", days_after=whole_days(window_s), types=GATE_TYPES),
        **ALL_ERASURES,
    }


def _build_days(tables: Mapping[str, DataFrame], context: JobContext) -> Mapping[str, DataFrame]:
    return {DECISIONS.table: shaped(distribution(tables[ROWS.table]), DECISIONS)}


def _build(tables: Mapping[str, DataFrame], context: JobContext) -> Mapping[str, DataFrame]:
    rows = tables[ROWS.table]
    proposed = proposals(rows, rows_min=setting(context, "rows_min", ROWS_MIN))
    return {
        REGRET.table: shaped(regret(rows), REGRET),
        PROPOSALS.table: shaped(proposed, PROPOSALS),
    }


def _summarise(tables: Mapping[str, DataFrame], context: JobContext) -> Iterable[Event]:
    better = tables[PROPOSALS.table].where("regretted_proposed < regretted_now")
    for row in better.withColumn("last_us", F.unix_micros("last_at")).orderBy("last_us", "space_id").toLocalIterator():
        payload = {
            "threshold": "admit",
            "now": round(row["admit_now"], 6),
            "proposed": round(row["admit_proposed"], 6),
            "rows": row["rows"],
            "regretted_now": row["regretted_now"],
            "regretted_proposed": row["regretted_proposed"],
        }
        yield summary_event(
            LEARNING_TOPIC, "GATE_THRESHOLD_PROPOSAL", row["space_id"], time_of(row["last_us"]), payload
        )


JOBS: Final = (
    Job(
        name="learning_gate_rows",
        about="L7: the gate's decisions, each with what came of it.",
        reads=(TOLD.table, ERASURES),
        writes=(ROWS,),
        build=_build_rows,
        partitioning=Partitioning(_windows),
    ),
    Job(
        name="learning_gate",
        about="L7: regret by feature, threshold proposals.",
        reads=(ROWS.table,),
        writes=(REGRET, PROPOSALS),
        build=_build,
        summarise=_summarise,
    ),
    Job(
        name="learning_gate_days",
        about="L7: how the gate decides, by space and day.",
        reads=(ROWS.table,),
        writes=(DECISIONS,),
        build=_build_days,
        partitioning=Partitioning(lambda _: {ROWS.table: InputWindow("date")}),
    ),
)
