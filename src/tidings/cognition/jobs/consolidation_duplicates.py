"""
C1, near-duplicates: memories of one space that say the same, and the one of them that stays.

    score = 0.45 Jaccard of 3-character pieces + 0.45 cosine + 0.05 [within tau of each other] + 0.05 [same author]

From 0.86 on two memories are duplicates. The longest, most confident, earliest stays; the others point at it. A memory is
merged only into one that it is itself a duplicate of: likeness is not passed on from neighbour to neighbour, so a chain of
small changes does not merge its two ends. Texts that are equal (but for case and spaces) are judged once, by the best
of them, and share its fate.

The work is bounded: for each of its keys a memory meets the next ``neighbours_max`` others, and it is compared with as many
of those, the likeliest first. So what a million memories that look alike cost grows with their number and not its square.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import pandas as pd  # type: ignore[import-untyped, unused-ignore]
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F
from pyspark.sql.pandas.functions import pandas_udf
from pyspark.sql.types import ArrayType, DoubleType, LongType, StructField, StructType

from tidings.core.events import Event
from tidings.pipeline.jobs.job import Job, JobContext, OutputTable, setting

from .columns import hours_between, summaries
from .consolidation_likeness import band_keys, likeness
from .consolidation_memories import CONSOLIDATION_TOPIC, memories, normalised

__all__ = ["DUPLICATES", "JOBS", "duplicates_of"]

DUPLICATES: Final = "gold.near_duplicates"
_SCORE_MIN: Final = 0.86
_TAU_S: Final = 600.0
_NEIGHBOURS_MAX: Final = 32
_LISTED_MAX: Final = 1_000
_SHARED_MIN: Final = 2
"""With fewer keys in common two memories are not compared: duplicates share five and more, chance acquaintances one."""

_SCHEMA: Final = (
    "space_id string, event_id string, kept_event_id string, action string, score double, jaccard double, "
    "cosine double, is_near_in_time boolean, is_same_author boolean"
)
_MERGED: Final = (
    "space_id string, event_id string, kept_event_id string, score double, jaccard double, cosine double, "
    "is_near_in_time boolean, is_same_author boolean"
)
_LIKENESS: Final = StructType([StructField("jaccard", DoubleType()), StructField("cosine", DoubleType())])


@pandas_udf(ArrayType(LongType()))  # type: ignore[call-overload, untyped-decorator, unused-ignore]
def _keys(texts: pd.Series) -> pd.Series:
    return texts.map(band_keys)


@pandas_udf(_LIKENESS)  # type: ignore[call-overload, untyped-decorator, unused-ignore]
def _likeness(one: pd.Series, other: pd.Series, one_vector: pd.Series, other_vector: pd.Series) -> pd.DataFrame:
    found = [likeness(*each) for each in zip(one, other, one_vector, other_vector, strict=True)]
    return pd.DataFrame(found, columns=["jaccard", "cosine"], dtype="float64")


def duplicates_of(found: DataFrame, *, score_min: float, tau_s: float, neighbours_max: int) -> DataFrame:
    """
    One row a memory that is merged into another.

    Args:
        found: From ``memories``.
        score_min: From this score on two memories are duplicates.
        tau_s: Two memories less than so many seconds apart are near in time.
        neighbours_max: With so many others, of those that share keys with it, a memory is compared.
    """
    best_first = (F.desc("length"), F.desc("confidence"), F.asc("ts"), F.asc("event_id"))
    known = (
        found.withColumn("normal", normalised(F.col("text")))
        .where(F.length("normal") > 0)
        .withColumn("length", F.length("text"))
        .withColumn("confidence", F.coalesce("confidence", F.lit(0.0)))
        .withColumn("text_key", F.sha2("normal", 256))
        .withColumn("_place", F.row_number().over(Window.partitionBy("space_id", "text_key").orderBy(*best_first)))
    )
    first = known.where(F.col("_place") == 1).drop("_place", "text")
    merged = _merged(_alike(first, score_min=score_min, tau_s=tau_s, neighbours_max=neighbours_max))
    return _equal(known, first, merged, tau_s).unionByName(merged)


def _score(tau_s: float, one: str, other: str) -> tuple[Column, Column]:
    seconds = F.abs(hours_between(F.col(f"{one}.ts"), F.col(f"{other}.ts"))) * 3600
    return seconds < tau_s, F.coalesce(F.col(f"{one}.author") == F.col(f"{other}.author"), F.lit(False))


def _alike(first: DataFrame, *, score_min: float, tau_s: float, neighbours_max: int) -> DataFrame:
    """Pairs of different texts that are duplicates: ``a`` is the better one."""
    following = Window.partitionBy("space_id", "key").orderBy("ts", "event_id").rowsBetween(1, neighbours_max)
    keyed = first.select("space_id", "event_id", "ts", F.explode(F.array_distinct(_keys("normal"))).alias("key"))
    likeliest = Window.partitionBy("space_id", "event_id").orderBy(F.desc("shared"), F.asc("other"))
    pairs = (
        keyed.withColumn("others", F.collect_list("event_id").over(following))
        .select("space_id", "event_id", F.explode("others").alias("other"))
        .groupBy("space_id", "event_id", "other")
        .agg(F.count("*").alias("shared"))
        .where(F.col("shared") >= _SHARED_MIN)
        .withColumn("_place", F.row_number().over(likeliest))
        .where(F.col("_place") <= neighbours_max)
    )
    columns = ("event_id", "ts", "author", "normal", "embedding", "length", "confidence")
    side = first.select("space_id", F.struct(*columns).alias("one"))
    joined = (
        pairs.join(side, (pairs.space_id == side.space_id) & (F.col("event_id") == F.col("one.event_id")))
        .select(pairs.space_id, "other", "one")
        .alias("l")
    )
    right = first.select("space_id", F.struct(*columns).alias("two")).alias("r")
    both = joined.join(
        right, (F.col("l.space_id") == F.col("r.space_id")) & (F.col("l.other") == F.col("r.two.event_id"))
    ).select("l.space_id", "one", "two")
    is_near, is_same = _score(tau_s, "one", "two")
    alike = (
        both.withColumn("_like", _likeness("one.normal", "two.normal", "one.embedding", "two.embedding"))
        .select("space_id", "one", "two", "_like.*", is_near.alias("is_near_in_time"), is_same.alias("is_same_author"))
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
    return alike.select(
        "space_id",
        *[better[name].alias(f"a_{name}") for name in ("event_id", "ts", "length", "confidence")],
        *[worse[name].alias(f"b_{name}") for name in ("event_id", "ts", "length", "confidence")],
        *("score", "jaccard", "cosine", "is_near_in_time", "is_same_author"),
    )


def _total() -> Column:
    bonus = F.col("is_near_in_time").cast("double") + F.col("is_same_author").cast("double")
    return F.lit(0.45) * F.col("jaccard") + F.lit(0.45) * F.col("cosine") + F.lit(0.05) * bonus


def _merged(alike: DataFrame) -> DataFrame:
    return alike.groupBy("space_id").applyInPandas(_merge_space, _MERGED)


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
            *(edge.is_near_in_time, edge.is_same_author),
        )
        for _, edge in sorted(gone.items())
    ]
    names = [part.split()[0] for part in _MERGED.split(", ")]
    return pd.DataFrame(rows, columns=names)


def _equal(known: DataFrame, first: DataFrame, merged: DataFrame, tau_s: float) -> DataFrame:
    """The memories whose text another one has too, merged into that one or into what it was merged into."""
    again = known.where(F.col("_place") > 1).alias("again")
    fate = merged.select("space_id", F.col("event_id").alias("_first"), *_FATE)
    is_near, is_same = _score(tau_s, "again", "best")
    of_text = again.join(first.alias("best"), ["space_id", "text_key"]).select(
        "space_id",
        F.col("again.event_id").alias("event_id"),
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
    )


_FATE: Final = ("kept_event_id", "score", "jaccard", "cosine", "is_near_in_time", "is_same_author")


def _build(tables: Mapping[str, DataFrame], context: JobContext) -> Mapping[str, DataFrame]:
    found = duplicates_of(
        memories(tables["silver.events"], context).where(~F.col("is_sealed")),
        score_min=setting(context, "score_min", _SCORE_MIN, above=0),
        tau_s=setting(context, "tau_s", _TAU_S, above=0),
        neighbours_max=setting(context, "neighbours_max", _NEIGHBOURS_MAX, above=0),
    )
    action = F.lit("MERGE_DUPLICATES").alias("action")
    return {DUPLICATES: found.select("space_id", "event_id", "kept_event_id", action, *_FATE[1:])}


def _tell(tables: Mapping[str, DataFrame], context: JobContext) -> Iterable[Event]:
    merged = F.array_sort(F.collect_list("event_id"))
    told = (
        tables[DUPLICATES]
        .groupBy("space_id", "kept_event_id", "action")
        .agg(
            F.count("*").alias("merged_count"),
            F.slice(merged, 1, _LISTED_MAX).alias("merged_event_ids"),
            F.round(F.min("score"), 6).alias("score_min"),
        )
    )
    return summaries(CONSOLIDATION_TOPIC, "RECON_ACTION", told, context, keys=("space_id", "kept_event_id"))


JOBS: Final = (
    Job(
        name="consolidation_duplicates",
        about="Finds memories that say the same, and which of them stays (C1).",
        reads=("silver.events",),
        writes=(OutputTable(DUPLICATES, _SCHEMA, "A memory that is merged into another, and how alike they are."),),
        build=_build,
        summarise=_tell,
    ),
)
