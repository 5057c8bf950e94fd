"""
C2, the keep score: what each memory is worth, and what is to become of it.

    K = 0.35 recency + 0.35 salience + 0.20 usage + 0.10 (1 - |valence|)

A memory is kept from 0.25 on. RED and BLACK are never discarded, nor merged away; nor is what cannot be read. Salience is
the memory's own, or what the attention gate gave it, or 0.5. Usage grows with each time the memory was clicked, recalled or
broadcast, up to ``usage_full`` times. Valence is the last affect that was annotated, or 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from tidings.pipeline.jobs.job import Job, JobContext, OutputTable, setting

from .columns import as_of, clipped, number, recency, text, texts
from .consolidation_duplicates import DUPLICATES
from .consolidation_memories import is_guarded, memories
from .temporal_features import HALF_LIFE_H, RECENCY

__all__ = ["JOBS", "KEEP_SCORES", "keep_score"]

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


def _build(tables: Mapping[str, DataFrame], context: JobContext) -> Mapping[str, DataFrame]:
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


JOBS: Final = (
    Job(
        name="consolidation_keeping",
        about="Scores what each memory is worth and plans what becomes of it (C2).",
        reads=("silver.events", DUPLICATES, RECENCY),
        writes=(OutputTable(KEEP_SCORES, _SCHEMA, "A memory's keep score and fate: protect, keep, merge or discard."),),
        build=_build,
    ),
)
