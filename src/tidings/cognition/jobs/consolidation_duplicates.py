"""
Near-duplicate memories (C1): found, scored, and merged into the best of them; and which memories to keep (C2).

    score = 0.45 Jaccard of 3-character shingles + 0.45 cosine + 0.05 [within tau of each other] + 0.05 [same author]

A text's shingles are its overlapping runs of three characters. ``band_keys`` gives each text 24 keys, made of four MinHashes
each. Two texts that share 69 % of their shingles (fewer cannot make a near-duplicate) share five keys on average, and two or
more almost always; only such pairs are compared. Likeness is not passed on: a memory is merged into one that it is like
itself, and that one stays. Equal texts are merged with the best of them.

``gold.keep_scores`` weighs recency, salience, use and feeling. RED, BLACK and unknown bands are protected whatever the score,
and so is what is sealed; near-duplicates are merged; the rest is kept or discarded by its score.
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

from .columns import as_of, clipped, hours_between, number, recency, summaries, text, texts
from .consolidation_memories import CONSOLIDATION_TOPIC, is_guarded, memories, normalised
from .temporal_features import HALF_LIFE_H, RECENCY

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

_DUPLICATES_SCHEMA: Final = (
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


def _build_duplicates(tables: Mapping[str, DataFrame], context: JobContext) -> Mapping[str, DataFrame]:
    found = duplicates_of(
        memories(tables["silver.events"], context).where(~F.col("is_sealed")),
        score_min=setting(context, "score_min", _SCORE_MIN, above=0),
        tau_s=setting(context, "tau_s", _TAU_S, above=0),
        neighbours_max=setting(context, "neighbours_max", _NEIGHBOURS_MAX, above=0),
    )
    action = F.lit("MERGE_DUPLICATES").alias("action")
    return {DUPLICATES: found.select("space_id", "event_id", "kept_event_id", action, *_FATE[1:])}


def _summarise(tables: Mapping[str, DataFrame], context: JobContext) -> Iterable[Event]:
    merged = F.array_sort(F.collect_list("event_id"))
    rows = (
        tables[DUPLICATES]
        .groupBy("space_id", "kept_event_id", "action")
        .agg(
            F.count("*").alias("merged_count"),
            F.slice(merged, 1, _LISTED_MAX).alias("merged_event_ids"),
            F.round(F.min("score"), 6).alias("score_min"),
        )
    )
    return summaries(CONSOLIDATION_TOPIC, "RECON_ACTION", rows, context, keys=("space_id", "kept_event_id"))


CONSOLIDATION_DUPLICATES_JOBS: Final = (
    Job(
        name="consolidation_duplicates",
        about="Finds memories that say the same, and which of them stays (C1).",
        reads=("silver.events",),
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
        writes=(
            OutputTable(
                KEEP_SCORES, _KEEPING_SCHEMA, "A memory's keep score and fate: protect, keep, merge or discard."
            ),
        ),
        build=_build_keeping,
    ),
)


JOBS: Final = (*CONSOLIDATION_DUPLICATES_JOBS, *CONSOLIDATION_KEEPING_JOBS)
