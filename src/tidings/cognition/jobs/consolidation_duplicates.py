"""
Near-duplicate memories (C1): scored, and merged into the best of them; and which memories to keep (C2).

    score = 0.45 Jaccard of 3-character shingles + 0.45 cosine + 0.05 [within tau of each other] + 0.05 [same author]

Which texts are alike is known from ``gold.memory_likeness``, where each new text was compared with those before it. Likeness is
not passed on: a memory is merged into one that it is like itself, and that one stays. Equal texts are merged with the best of
them.

``gold.keep_scores`` weighs recency, salience, use and feeling. RED, BLACK and unknown bands are protected whatever the score,
and so is what is sealed; near-duplicates are merged; the rest is kept or discarded by its score.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import reduce
from typing import Any, Final

import pandas as pd  # type: ignore[import-untyped, unused-ignore]
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from tidings.core.events import Event
from tidings.pipeline.jobs.job import InputWindow, Job, JobContext, OutputTable, Partitioning, setting, whole_days

from .columns import as_of, brought, clipped, hours_between, recency, summaries
from .consolidation_memories import (
    ALL_ERASURES,
    CONSOLIDATION_TOPIC,
    ERASURES,
    EVIDENCE,
    LIKENESSES,
    MEMORIES,
    SCORE_MIN,
    is_guarded,
    living,
)
from .temporal_features import HALF_LIFE_H, HALF_LIVES, RECENCY

DUPLICATES: Final = "gold.near_duplicates"
_TAU_S: Final = 600.0
_LISTED_MAX: Final = 1_000
_DUPLICATES_SCHEMA: Final = (
    "space_id string, event_id string, kept_event_id string, action string, score double, jaccard double, "
    "cosine double, is_near_in_time boolean, is_same_author boolean, date date"
)
_MERGED: Final = (
    "space_id string, event_id string, kept_event_id string, score double, jaccard double, cosine double, "
    "is_near_in_time boolean, is_same_author boolean, ts timestamp"
)


def duplicates_of(
    memories: DataFrame, erased: DataFrame, alike: DataFrame, *, score_min: float, tau_s: float
) -> DataFrame:
    """
    One row a memory that is merged into another.

    Args:
        memories: ``gold.memories``.
        erased: ``gold.erasures``.
        alike: ``gold.memory_likeness``.
        score_min: From this score on two memories are duplicates.
        tau_s: Two memories less than so many seconds apart are near in time.
    """
    alike, few = brought(alike)
    # Most memories are like no other: only those that are, or that repeat one, are looked up.
    wanted = alike.select(F.explode(F.array("seq", "other_seq")).alias("seq")).distinct()
    if few is not None:
        wanted = F.broadcast(wanted)
        memories = memories if few.num_rows else memories.limit(0)
    text = ("space_id", "text_key")
    of_text = Window.partitionBy(*text).orderBy(F.desc("length"), F.desc("confidence"), F.asc("ts"), F.asc("event_id"))
    found, _ = brought(
        living(
            memories.select(*text, "event_id", "seq", "ts", "author", "length", "confidence").join(wanted, "seq"),
            erased,
        )
    )
    known = found.withColumn("confidence", F.coalesce("confidence", F.lit(0.0))).withColumn(
        "best", F.first(F.struct("event_id", "ts", "author")).over(of_text)
    )
    is_best = F.col("event_id") == F.col("best.event_id")
    pairs = _pairs(known.where(is_best), alike.where("text_key != other_key"), score_min=score_min, tau_s=tau_s)
    merged, _ = brought(pairs.groupBy("space_id").applyInPandas(_merge_space, _MERGED))
    return _equal(known.where(~is_best), merged, tau_s).unionByName(merged)


def _score(tau_s: float, one: Column, other: Column) -> tuple[Column, Column]:
    seconds = F.abs(hours_between(one["ts"], other["ts"])) * 3600
    return seconds < tau_s, F.coalesce(one["author"] == other["author"], F.lit(False))


def _pairs(first: DataFrame, alike: DataFrame, *, score_min: float, tau_s: float) -> DataFrame:
    """Pairs of memories with different texts that are duplicates: ``a`` is the better one."""
    columns = ("event_id", "ts", "author", "length", "confidence")
    one = first.select("space_id", "text_key", F.struct(*columns).alias("one"))
    two = first.select("space_id", F.col("text_key").alias("other_key"), F.struct(*columns).alias("two"))
    is_near, is_same = _score(tau_s, F.col("one"), F.col("two"))
    scored = (
        alike.join(one, ["space_id", "text_key"])
        .join(two, ["space_id", "other_key"])
        .select(
            *("space_id", "one", "two", "jaccard", "cosine"),
            *(is_near.alias("is_near_in_time"), is_same.alias("is_same_author")),
        )
        .withColumn("score", _total())
        .where(F.col("score") >= score_min)
    )
    ranked = [
        F.struct(-F.col(f"{side}.length"), -F.col(f"{side}.confidence"), F.col(f"{side}.ts"), F.col(f"{side}.event_id"))
        for side in ("one", "two")
    ]
    is_one_better = ranked[0] < ranked[1]
    better = F.when(is_one_better, F.col("one")).otherwise(F.col("two"))
    worse = F.when(is_one_better, F.col("two")).otherwise(F.col("one"))
    return scored.select(
        "space_id",
        *[better[name].alias(f"a_{name}") for name in ("event_id", "ts", "length", "confidence")],
        *[worse[name].alias(f"b_{name}") for name in ("event_id", "ts", "length", "confidence")],
        *("score", "jaccard", "cosine", "is_near_in_time", "is_same_author"),
    )


def _total() -> Column:
    bonus = F.col("is_near_in_time").cast("double") + F.col("is_same_author").cast("double")
    return F.lit(0.45) * F.col("jaccard") + F.lit(0.45) * F.col("cosine") + F.lit(0.05) * bonus


def _merge_space(edges: pd.DataFrame) -> pd.DataFrame:
    """
    Who is merged into whom, in one space. From the best memory down: whoever is not merged yet stays, and those that it is
    a duplicate of, and better than, are merged into it.
    """
    best_first: dict[str, tuple[Any, ...]] = {}
    worse: dict[str, list[Any]] = {}
    for edge in edges.itertuples(index=False):
        best_first[edge.a_event_id] = (-edge.a_length, -edge.a_confidence, edge.a_ts, edge.a_event_id)
        best_first[edge.b_event_id] = (-edge.b_length, -edge.b_confidence, edge.b_ts, edge.b_event_id)
        worse.setdefault(edge.a_event_id, []).append(edge)
    gone: dict[str, Any] = {}
    for kept in sorted(best_first, key=best_first.__getitem__):
        if kept not in gone:
            for edge in worse.get(kept, ()):
                gone.setdefault(edge.b_event_id, edge)
    rows = [
        (
            *(edge.space_id, edge.b_event_id, edge.a_event_id, edge.score, edge.jaccard, edge.cosine),
            *(edge.is_near_in_time, edge.is_same_author, edge.b_ts),
        )
        for _, edge in sorted(gone.items())
    ]
    names = [part.split()[0] for part in _MERGED.split(", ")]
    return pd.DataFrame(rows, columns=names)


def _equal(again: DataFrame, merged: DataFrame, tau_s: float) -> DataFrame:
    """The memories whose text a better one has too, merged into that one or into what it was merged into."""
    fate = merged.select("space_id", F.col("event_id").alias("_first"), *_FATE)
    is_near, is_same = _score(tau_s, F.struct("ts", "author"), F.col("best"))
    of_text = again.select(
        "space_id",
        "event_id",
        "ts",
        F.col("best.event_id").alias("_first"),
        is_near.alias("is_near_in_time"),
        is_same.alias("is_same_author"),
    )
    plain = of_text.withColumn("jaccard", F.lit(1.0)).withColumn("cosine", F.lit(1.0)).withColumn("score", _total())
    joined = plain.alias("p").join(fate.alias("f"), ["space_id", "_first"], "left")
    is_passed_on = F.col("f.kept_event_id").isNotNull()
    return joined.select(
        "space_id",
        "p.event_id",
        F.coalesce("f.kept_event_id", "_first").alias("kept_event_id"),
        *[
            F.when(is_passed_on, F.col(f"f.{name}")).otherwise(F.col(f"p.{name}")).alias(name)
            for name in ("score", "jaccard", "cosine", "is_near_in_time", "is_same_author")
        ],
        "ts",
    )


_FATE: Final = ("kept_event_id", "score", "jaccard", "cosine", "is_near_in_time", "is_same_author")


def _build_duplicates(tables: Mapping[str, DataFrame], context: JobContext) -> Mapping[str, DataFrame]:
    found = duplicates_of(
        tables[MEMORIES],
        tables[ERASURES],
        tables[LIKENESSES],
        score_min=setting(context, "score_min", SCORE_MIN, above=0),
        tau_s=setting(context, "tau_s", _TAU_S, above=0),
    )
    action = F.lit("MERGE_DUPLICATES").alias("action")
    date = F.to_date("ts").alias("date")
    return {DUPLICATES: found.select("space_id", "event_id", "kept_event_id", action, *_FATE[1:], date)}


def _summarise(tables: Mapping[str, DataFrame], context: JobContext) -> Iterable[Event]:
    merged = F.array_sort(F.collect_list("event_id"))
    rows = (
        tables[DUPLICATES]
        .groupBy("space_id", "kept_event_id", "action")
        .agg(
            F.count("*").alias("merged_count"),
            F.slice(merged, 1, _LISTED_MAX).alias("merged_event_ids"),
            F.round(F.min("score"), 6).alias("score_min"),
            F.max("date").alias("_at"),
        )
    )
    return summaries(CONSOLIDATION_TOPIC, "RECON_ACTION", rows, context, order=("_at", "space_id", "kept_event_id"))


CONSOLIDATION_DUPLICATES_JOBS: Final = (
    Job(
        name="consolidation_duplicates",
        about="Finds memories that say the same, and which of them stays (C1).",
        reads=(MEMORIES, LIKENESSES, ERASURES),
        writes=(
            OutputTable(
                DUPLICATES, _DUPLICATES_SCHEMA, "A memory that is merged into another, and how alike they are."
            ),
        ),
        build=_build_duplicates,
        summarise=_summarise,
    ),
)


KEEP_SCORES: Final = "gold.keep_scores"
_KEEP_MIN: Final = 0.25
_SALIENCE: Final = 0.5
_USAGE_FULL: Final = 5
_KEEPING_SCHEMA: Final = (
    "space_id string, event_id string, seq bigint, ts timestamp, band string, recency double, salience double, "
    "usage double, used_count bigint, valence double, score double, decision string, reason string, kept_event_id string, "
    "date date"
)
_KEY: Final = ("space_id", "event_id")


def keep_score(recent: Column, salience: Column, usage: Column, valence: Column) -> Column:
    """K, from four numbers of which valence is in -1..1 and the others in 0..1."""
    return 0.35 * recent + 0.35 * salience + 0.20 * usage + 0.10 * (1 - F.abs(valence))


def _recent_h(context: JobContext) -> float:
    """After so many hours a memory's recency is 0."""
    return HALF_LIVES * setting(context, "half_life_h", HALF_LIFE_H, above=0)


def _windows(_: JobContext) -> Mapping[str, InputWindow]:
    return {
        MEMORIES: InputWindow("ts"),
        EVIDENCE: InputWindow("memory_date", is_whole=True, names_days=True),
        DUPLICATES: InputWindow("date", is_whole=True, names_days=True),
        **ALL_ERASURES,
    }


def _build_keeping(tables: Mapping[str, DataFrame], context: JobContext) -> Mapping[str, DataFrame]:
    half_life_h = F.lit(setting(context, "half_life_h", HALF_LIFE_H, above=0))
    salience = F.coalesce("memory.salience", "gate_salience", F.lit(setting(context, "salience_default", _SALIENCE)))
    full = setting(context, "usage_full", _USAGE_FULL, above=0)
    memory = F.struct("seq", "ts", "band", "is_sealed", "salience").alias("memory")
    # The index forgets after its time; what it does not list is scored by the common half-life.
    facts = (
        living(tables[MEMORIES], tables[ERASURES]).select(*_KEY, memory),
        tables[RECENCY].select(*_KEY, F.col("recency").alias("indexed_recency")),
        tables[DUPLICATES].select(*_KEY, "kept_event_id"),
        tables[EVIDENCE].select(*_KEY, "kind", "value", "seq"),
    )
    known = (
        reduce(lambda one, other: one.unionByName(other, allowMissingColumns=True), facts)
        .groupBy(*_KEY)
        .agg(
            F.any_value("memory", True).alias("memory"),
            F.max("indexed_recency").alias("indexed_recency"),
            F.max("kept_event_id").alias("kept_event_id"),
            F.count_if(F.col("kind") == "use").alias("used_count"),
            F.max_by("value", F.when(F.col("kind") == "valence", F.col("seq"))).alias("valence"),
            F.max_by("value", F.when(F.col("kind") == "salience", F.col("seq"))).alias("gate_salience"),
        )
        .where("memory is not null")
        .select("*", "memory.seq", "memory.ts", "memory.band", "memory.is_sealed")
    )
    is_recent = hours_between(F.col("ts"), as_of(context)) < _recent_h(context)
    own_recency = recency(F.col("ts"), as_of(context), half_life_h)
    found = (
        known.withColumn("recency", F.when(is_recent, F.coalesce("indexed_recency", own_recency)).otherwise(F.lit(0.0)))
        .withColumn("salience", clipped(salience, 0.0, 1.0))
        .withColumn("usage", F.least(F.col("used_count") / F.lit(full), F.lit(1.0)))
        .withColumn("valence", F.coalesce(clipped(F.col("valence"), -1.0, 1.0), F.lit(0.0)))
        .withColumn("score", keep_score(F.col("recency"), F.col("salience"), F.col("usage"), F.col("valence")))
    )
    keep_min = setting(context, "keep_min", _KEEP_MIN)
    decided = _decided(found, keep_min)
    return {
        KEEP_SCORES: decided.select(
            *("space_id", "event_id", "seq", "ts", "band", "recency", "salience", "usage", "used_count", "valence"),
            *("score", "decision", "reason", "kept_event_id", F.to_date("ts").alias("date")),
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
        reads=(MEMORIES, EVIDENCE, ERASURES, DUPLICATES, RECENCY),
        writes=(
            OutputTable(
                KEEP_SCORES, _KEEPING_SCHEMA, "A memory's keep score and fate: protect, keep, merge or discard."
            ),
        ),
        build=_build_keeping,
        # A score changes as its memory ages, until that is no longer recent; then only with what becomes known of it.
        partitioning=Partitioning(_windows, moving_days=lambda context: whole_days(_recent_h(context) * 3600)),
    ),
)


JOBS: Final = (*CONSOLIDATION_DUPLICATES_JOBS, *CONSOLIDATION_KEEPING_JOBS)
