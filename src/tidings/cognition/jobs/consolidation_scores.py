"""
Which memories to keep (C2), and what came late (C4).

``gold.keep_scores`` weighs recency, salience, use and feeling. RED, BLACK and unknown bands are protected whatever the score,
and so is what is sealed; near-duplicates are merged; the rest is kept or discarded by its score.

``gold.late_events`` lists events that were written long after they happened, out of order in their topic and space, or ahead
of the clock; ``gold.reconsolidations`` lists the rollups that late memories make stale.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from tidings.pipeline.jobs.job import Job, JobContext, OutputTable, setting

from .columns import as_of, clipped, hours_between, instant, number, recency, text, texts
from .consolidation_duplicates import DUPLICATES
from .consolidation_memories import CONSOLIDATION_TOPIC, is_guarded, memories
from .consolidation_rollups import PATCH_SHARE_MAX, TOLD_TYPE, told_rollups
from .temporal_features import HALF_LIFE_H, RECENCY

__all__ = [
    "CONSOLIDATION_KEEPING_JOBS",
    "CONSOLIDATION_LATE_JOBS",
    "JOBS",
    "KEEP_SCORES",
    "LATE_EVENTS",
    "RECONSOLIDATIONS",
    "keep_score",
    "late_events",
]

KEEP_SCORES: Final = "gold.keep_scores"
_KEEP_MIN: Final = 0.25
_SALIENCE: Final = 0.5
_USAGE_FULL: Final = 5
_SCHEMA: Final = (
    "space_id string, event_id string, seq bigint, ts timestamp, band string, recency double, salience double, "
    "usage double, used_count bigint, valence double, score double, decision string, reason string, kept_event_id string"
)
_KEY: Final = ("space_id", "event_id")


def keep_score(recent: Column, salience: Column, usage: Column, valence: Column) -> Column:
    """K, from four numbers of which valence is in -1..1 and the others in 0..1."""
    return 0.35 * recent + 0.35 * salience + 0.20 * usage + 0.10 * (1 - F.abs(valence))


def uses(events: DataFrame) -> DataFrame:
    """How often each memory was used: one row a memory that was clicked, recalled or broadcast."""
    recalled = F.coalesce(
        texts("event_ids"), texts("doc_ids"), texts("results[*].event_id"), texts("results[*].doc_id")
    )
    named = (
        F.when(F.col("type") == "RETRIEVAL_CLICK", F.array(text("doc_id")))
        .when(F.col("type") == "RECALL_RESULT", recalled)
        .when(F.col("type") == "WORKSPACE_BROADCAST", texts("salient_keys"))
    )
    # One event uses a memory once, however often it names it.
    each = events.select("space_id", F.explode(F.array_distinct(named)).alias("event_id"))
    return each.where(F.col("event_id").isNotNull()).groupBy(*_KEY).agg(F.count("*").alias("used_count"))


def feelings(events: DataFrame) -> DataFrame:
    """The last valence annotated for each memory, within -1..1."""
    valence = clipped(number("valence"), -1.0, 1.0)
    told = events.where(F.col("type") == "AFFECT_ANNOTATED").select(
        "space_id", text("event_id").alias("event_id"), valence.alias("valence"), "seq"
    )
    known = told.where(F.col("event_id").isNotNull() & F.col("valence").isNotNull())
    return known.groupBy(*_KEY).agg(F.max_by("valence", "seq").alias("valence"))


def gate_saliences(events: DataFrame) -> DataFrame:
    """The last salience that the attention gate gave to each content."""
    told = events.where(F.col("type").startswith("cognitive.attention.gate.")).select(
        "space_id", text("content_id").alias("event_id"), number("salience_score").alias("gate_salience"), "seq"
    )
    known = told.where(F.col("event_id").isNotNull() & F.col("gate_salience").isNotNull())
    return known.groupBy(*_KEY).agg(F.max_by("gate_salience", "seq").alias("gate_salience"))


def _build_keeping(tables: Mapping[str, DataFrame], context: JobContext) -> Mapping[str, DataFrame]:
    events = tables["silver.events"]
    # The index forgets after its time; what is older is scored by the common half-life.
    scored = tables[RECENCY].groupBy(*_KEY).agg(F.max("recency").alias("indexed_recency"))
    merged = tables[DUPLICATES].select(*_KEY, "kept_event_id")
    half_life_h = F.lit(setting(context, "half_life_h", HALF_LIFE_H, above=0))
    salience = F.coalesce("salience", "gate_salience", F.lit(setting(context, "salience_default", _SALIENCE)))
    full = setting(context, "usage_full", _USAGE_FULL, above=0)
    known = memories(events, context).drop("text", "embedding", "confidence", "author")
    for more in (scored, merged, uses(events), feelings(events), gate_saliences(events)):
        known = known.join(more, list(_KEY), "left")
    found = (
        known.withColumn("recency", F.coalesce("indexed_recency", recency(F.col("ts"), as_of(context), half_life_h)))
        .withColumn("salience", clipped(salience, 0.0, 1.0))
        .withColumn("used_count", F.coalesce("used_count", F.lit(0)).cast("bigint"))
        .withColumn("usage", F.least(F.col("used_count") / F.lit(full), F.lit(1.0)))
        .withColumn("valence", F.coalesce("valence", F.lit(0.0)))
        .withColumn("score", keep_score(F.col("recency"), F.col("salience"), F.col("usage"), F.col("valence")))
    )
    keep_min = setting(context, "keep_min", _KEEP_MIN)
    decided = _decided(found, keep_min)
    return {
        KEEP_SCORES: decided.select(
            *("space_id", "event_id", "seq", "ts", "band", "recency", "salience", "usage", "used_count", "valence"),
            *("score", "decision", "reason", "kept_event_id"),
        )
    }


def _decided(found: DataFrame, keep_min: float) -> DataFrame:
    """In this order: what is guarded stays, what cannot be read stays, what says the same is merged, then the score decides."""
    guarded, sealed, twin = is_guarded(F.col("band")), F.col("is_sealed"), F.col("kept_event_id").isNotNull()
    is_worth = F.col("score") >= keep_min
    decision = (
        F.when(guarded | sealed, "protect").when(twin, "merge").when(is_worth, "keep").otherwise(F.lit("discard"))
    )
    reason = (
        F.when(guarded, F.concat(F.lit("band "), F.upper("band")))
        .when(sealed, "sealed")
        .when(twin, F.concat(F.lit("says the same as "), F.col("kept_event_id")))
        .when(is_worth, F.lit(f"score at least {keep_min:g}"))
        .otherwise(F.lit(f"score below {keep_min:g}"))
    )
    return found.withColumn("decision", decision).withColumn("reason", reason)


CONSOLIDATION_KEEPING_JOBS: Final = (
    Job(
        name="consolidation_keeping",
        about="Scores what each memory is worth and plans what becomes of it (C2).",
        reads=("silver.events", DUPLICATES, RECENCY),
        writes=(OutputTable(KEEP_SCORES, _SCHEMA, "A memory's keep score and fate: protect, keep, merge or discard."),),
        build=_build_keeping,
    ),
)


LATE_EVENTS: Final = "gold.late_events"
RECONSOLIDATIONS: Final = "gold.reconsolidations"
_SKEW_S: Final = 10.0
_LATE_S: Final = 3_600.0
_DAYS: Final = 30
_LISTED_MAX: Final = 1_000

_LATE_SCHEMA: Final = (
    "topic string, space_id string, event_id string, offset bigint, seq bigint, ts timestamp, written_at timestamp, "
    "late_s double, behind_s double, is_late boolean, is_out_of_order boolean, is_ahead boolean"
)
_RECON_SCHEMA: Final = (
    "space_id string, rollup_id string, period string, from_ts timestamp, to_ts timestamp, told_version int, "
    "told_seq bigint, late_count bigint, late_share double, action string, event_ids array<string>"
)


def late_events(events: DataFrame, *, skew_s: float, late_s: float) -> DataFrame:
    """The events that are late, out of order or ahead, with by how much."""
    before = Window.partitionBy("topic", "space_id").orderBy("offset").rowsBetween(Window.unboundedPreceding, -1)
    behind_s = hours_between(F.col("ts"), F.max("ts").over(before)) * 3600
    found = (
        events.withColumn("late_s", hours_between(F.col("ts"), F.col("written_at")) * 3600)
        .withColumn("behind_s", F.greatest(F.coalesce(behind_s, F.lit(0.0)), F.lit(0.0)))
        .withColumn("is_late", F.col("late_s") > late_s)
        .withColumn("is_out_of_order", F.col("behind_s") > skew_s)
        .withColumn("is_ahead", F.col("late_s") < -skew_s)
    )
    return found.where(F.col("is_late") | F.col("is_out_of_order") | F.col("is_ahead")).select(
        *("topic", "space_id", "event_id", "offset", "seq", "ts", "written_at", "late_s", "behind_s"),
        *("is_late", "is_out_of_order", "is_ahead"),
    )


def reconsolidations(events: DataFrame, context: JobContext) -> DataFrame:
    """The rollups that were told and have got memories since."""
    share_max = setting(context, "patch_share_max", PATCH_SHARE_MAX)
    spans = events.where((F.col("topic") == CONSOLIDATION_TOPIC) & (F.col("type") == TOLD_TYPE)).select(
        F.col("seq").alias("told_seq"),
        text("period").alias("period"),
        instant("from").alias("from_ts"),
        instant("to").alias("to_ts"),
    )
    told = told_rollups(events).join(spans, "told_seq").withColumnRenamed("space_id", "_space")
    came = memories(events, context).select("space_id", "event_id", "seq", "ts")
    is_stale = (
        (F.col("space_id") == F.col("_space"))
        & (F.col("ts") >= F.col("from_ts"))
        & (F.col("ts") < F.col("to_ts"))
        & (F.col("seq") > F.col("told_seq"))
    )
    known = F.greatest(F.size(F.coalesce("told_ids", F.array().cast("array<string>"))), F.lit(1))
    stale = (
        came.join(told, is_stale)
        .groupBy("space_id", "rollup_id", "period", "from_ts", "to_ts", "told_version", "told_seq")
        .agg(
            F.count("*").alias("late_count"),
            (F.count("*") / F.first(known)).alias("late_share"),
            F.slice(F.array_sort(F.collect_list("event_id")), 1, _LISTED_MAX).alias("event_ids"),
        )
    )
    action = F.when(F.col("late_share") < share_max, "PATCH").otherwise(F.lit("UPDATE_SUMMARY"))
    return stale.select(
        *("space_id", "rollup_id", "period", "from_ts", "to_ts", "told_version", "told_seq", "late_count"),
        *("late_share", action.alias("action"), "event_ids"),
    )


def _build_late(tables: Mapping[str, DataFrame], context: JobContext) -> Mapping[str, DataFrame]:
    events = tables["silver.events"]
    days = setting(context, "days", _DAYS, above=0)
    recent = events.where(F.col("written_at") > as_of(context) - F.expr(f"INTERVAL '{days}' DAY"))
    return {
        LATE_EVENTS: late_events(
            recent,
            skew_s=setting(context, "skew_s", _SKEW_S, above=0),
            late_s=setting(context, "late_s", _LATE_S, above=0),
        ),
        RECONSOLIDATIONS: reconsolidations(events, context),
    }


CONSOLIDATION_LATE_JOBS: Final = (
    Job(
        name="consolidation_late",
        about="Finds late and out-of-order events, and the summaries they make stale (C4).",
        reads=("silver.events",),
        writes=(
            OutputTable(LATE_EVENTS, _LATE_SCHEMA, "An event that came late, out of order, or ahead of its time."),
            OutputTable(RECONSOLIDATIONS, _RECON_SCHEMA, "A rollup that was told before all of its memories had come."),
        ),
        build=_build_late,
    ),
)


JOBS: Final = (*CONSOLIDATION_KEEPING_JOBS, *CONSOLIDATION_LATE_JOBS)
