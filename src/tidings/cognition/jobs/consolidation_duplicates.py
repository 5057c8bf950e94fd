"""
Near-duplicate memories (C1): found, scored, and merged into the best of them.

    score = 0.45 Jaccard of 3-character shingles + 0.45 cosine + 0.05 [within tau of each other] + 0.05 [same author]

A text's shingles are its overlapping runs of three characters. ``band_keys`` gives each text 24 keys, made of four MinHashes
each. Two texts that share 69 % of their shingles (fewer cannot make a near-duplicate) share five keys on average, and two or
more almost always; only such pairs are compared.

Likeness is not passed on: a memory is merged into one that it is like itself, and that one stays. Equal texts share the fate
of the best of them.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import pandas as pd  # type: ignore[import-untyped, unused-ignore]
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F
from pyspark.sql.pandas.functions import pandas_udf
from pyspark.sql.types import ArrayType, DoubleType, LongType, StructField, StructType

from tidings.core.events import Event
from tidings.pipeline.jobs.job import Job, JobContext, OutputTable, setting

from .columns import hours_between, summaries
from .consolidation_memories import CONSOLIDATION_TOPIC, memories, normalised

__all__ = ["BANDS", "CONSOLIDATION_DUPLICATES_JOBS", "DUPLICATES", "JOBS", "band_keys", "duplicates_of", "likeness"]

BANDS: Final = 24
_ROWS: Final = 4
_PIECE_CHARS: Final = 3
_CODE_BITS: Final = 21  # a code point of Unicode: three of them fit into 64 bits


def _mixed(values: Any) -> Any:
    """64-bit numbers spread evenly: each bit of the result depends on every bit put in (the finaliser of splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


_SALTS: Final = _mixed(np.arange(1, BANDS * _ROWS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))


def band_keys(text: str) -> list[int]:
    """The keys of a text, one a band, the same in every process; none for an empty text."""
    if not text:
        return []
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4").astype(np.uint64)
    padded = np.concatenate([codes, np.zeros(max(0, _PIECE_CHARS - len(codes)), dtype=np.uint64)])
    shift = np.uint64(_CODE_BITS)
    pieces = np.unique((((padded[:-2] << shift) | padded[1:-1]) << shift) | padded[2:])
    lowest = _mixed(_mixed(pieces)[:, None] ^ _SALTS[None, :]).min(axis=0)
    keys = np.zeros(BANDS, dtype=np.uint64)
    for row in range(_ROWS):
        keys = _mixed(keys ^ lowest[row::_ROWS])
    return [int(key) for key in keys.astype(np.int64)]


def likeness(
    one: str, other: str, one_vector: Sequence[float] | None, other_vector: Sequence[float] | None
) -> tuple[float, float]:
    """
    Jaccard of the pieces, and cosine: of the embeddings where both texts have one of the same length, else of how often each
    piece occurs.
    """
    pieces, others = _pieces(one), _pieces(other)
    together = len(pieces.keys() | others.keys())
    jaccard = len(pieces.keys() & others.keys()) / together if together else 0.0
    vectors = _cosine_of_vectors(one_vector, other_vector)
    return jaccard, _cosine(pieces, others) if vectors is None else vectors


# Pairs come sorted by one of their texts, so the last few are asked for again and again.
@functools.lru_cache(maxsize=8)
def _pieces(text: str) -> Counter[str]:
    if len(text) <= _PIECE_CHARS:
        return Counter([text] if text else [])
    return Counter(text[at : at + _PIECE_CHARS] for at in range(len(text) - _PIECE_CHARS + 1))


def _cosine(one: Counter[str], other: Counter[str]) -> float:
    product = sum(count * other[piece] for piece, count in one.items() if piece in other)
    lengths = sum(n * n for n in one.values()) * sum(n * n for n in other.values())
    return product / math.sqrt(lengths) if lengths else 0.0


def _cosine_of_vectors(one: Sequence[float] | None, other: Sequence[float] | None) -> float | None:
    if one is None or other is None or len(one) != len(other):
        return None
    a, b = np.asarray(one, dtype=float), np.asarray(other, dtype=float)
    with np.errstate(over="ignore", invalid="ignore"):
        length = float(np.sqrt(np.dot(a, a)) * np.sqrt(np.dot(b, b)))
        cosine = float(np.dot(a, b)) / length if length and math.isfinite(length) else math.nan
    return min(1.0, max(-1.0, cosine)) if math.isfinite(cosine) else None


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


CONSOLIDATION_DUPLICATES_JOBS: Final = (
    Job(
        name="consolidation_duplicates",
        about="Finds memories that say the same, and which of them stays (C1).",
        reads=("silver.events",),
        writes=(OutputTable(DUPLICATES, _SCHEMA, "A memory that is merged into another, and how alike they are."),),
        build=_build,
        summarise=_tell,
    ),
)


JOBS: Final = CONSOLIDATION_DUPLICATES_JOBS
