"""
What consolidation works on: the memories that were encoded, what is known of them, and what was erased.

A tombstone of type ``memory``, ``blob`` or ``index`` names one object by its id. One of type ``profile``, and a request of
a data subject to be erased, names a person: all that was committed about them before it goes, and what comes later stays. Each
erases in the space of its own record, and in no other (``tidings.pipeline.erasures``).
``gold.erasures`` lists them, so that a job which reads a few days of the log need not search all of it for them.

``gold.memories`` and ``gold.memory_evidence`` have what payloads say, read once, when it is new. A new text is compared then, with
those texts of its space that share two of its keys (``consolidation_likeness``), and ``gold.memory_likeness`` keeps what is alike: so
a run costs what is new, however many memories there are.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np
import pandas as pd  # type: ignore[import-untyped, unused-ignore]
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.pandas.functions import pandas_udf
from pyspark.sql.types import BinaryType, DoubleType, StructField, StructType
from pyspark.sql.window import Window, WindowSpec

from tidings.pipeline.erasures import ERASURE_TYPES, erasures_in
from tidings.pipeline.jobs.job import InputWindow, Job, JobContext, OutputTable, Partitioning, setting

from .columns import brought, finite, instant, name_of_actor, number, text, texts, usable
from .consolidation_likeness import Sieve, likeness, nearest, packed_keys, paired, words_of

ERASURES: Final = "gold.erasures"
ALL_ERASURES: Final = {ERASURES: InputWindow("erased_seq", is_whole=True)}
"""How a partitioned job reads them: an erasure may name anything, however old, so a new one rebuilds all partitions."""
_SCHEMA: Final = (
    "space_id string, is_person boolean, object_id string, object_type string, erased_by string, erased_seq bigint, "
    "issued_at timestamp"
)

REFUSED_ERASURES: Final = "gold.refused_erasures"
_REFUSED_SCHEMA: Final = (
    "space_id string, named_space string, reason string, erased_by string, erased_seq bigint, issued_at timestamp"
)


def _build_erasures(tables: Mapping[str, DataFrame], context: JobContext) -> Mapping[str, DataFrame]:
    found = erasures_in(tables["silver.events"], F.coalesce(instant("issued_at"), F.col("ts")))
    return {
        ERASURES: found.where("refusal is null").drop("named_space", "refusal"),
        REFUSED_ERASURES: found.where("refusal is not null").select(
            "space_id", "named_space", F.col("refusal").alias("reason"), "erased_by", "erased_seq", "issued_at"
        ),
    }


def without_erased(rows: DataFrame, erased: DataFrame, *, id_column: str, person: Column, seq: Column) -> DataFrame:
    """
    ``rows`` (with a ``space_id``) without those that an erasure names.

    Args:
        rows: What was derived from events.
        erased: From ``erasures``.
        id_column: The column with the id of the event that a row is about.
        person: Whom the row is about.
        seq: When the row's event was committed; a person's erasure covers what was committed before it.
    """
    objects = erased.where(~F.col("is_person")).select("space_id", F.col("object_id").alias(id_column)).distinct()
    people = (
        erased.where(F.col("is_person"))
        .groupBy(F.col("space_id").alias("_space"), F.col("object_id").alias("_person"))
        .agg(F.max("erased_seq").alias("_erased_seq"))
    )
    is_theirs = (F.col("space_id") == F.col("_space")) & (person == F.col("_person")) & (seq < F.col("_erased_seq"))
    return rows.join(objects, ["space_id", id_column], "left_anti").join(people, is_theirs, "left_anti")


CONSOLIDATION_ERASURES_JOBS: Final = (
    Job(
        name="erasures",
        about="Lists what tombstones and data subjects' requests say is to be erased.",
        reads=("silver.events",),
        writes=(
            OutputTable(ERASURES, _SCHEMA, "An object or a person that is to be erased."),
            OutputTable(
                REFUSED_ERASURES,
                _REFUSED_SCHEMA,
                "An erasure that erases nothing, because it names another space than its own, or nothing at all.",
            ),
        ),
        build=_build_erasures,
        partitioning=Partitioning(
            lambda _: {"silver.events": InputWindow("seq", types=ERASURE_TYPES)}, seq_column="erased_seq"
        ),
    ),
)


CONSOLIDATION_TOPIC: Final = "consolidation"
_TEXT_CHARS_MAX: Final = 20_000
_OPEN_BANDS: Final = ("GREEN", "AMBER")


def is_guarded(band: Column) -> Column:
    """Whether a band is RED or BLACK, or one that nobody knows: what cannot be judged is guarded. No band is GREEN."""
    return ~F.upper(F.coalesce(band, F.lit("GREEN"))).isin(*_OPEN_BANDS)


def normalised(words: Column) -> Column:
    """A text in lower case with its spaces evened out."""
    return F.trim(F.regexp_replace(F.lower(words), r"[\s\p{Z}]+", " "))


MEMORIES: Final = "gold.memories"
LIKENESSES: Final = "gold.memory_likeness"
EVIDENCE: Final = "gold.memory_evidence"
SCORE_MIN: Final = 0.86
_NEIGHBOURS_MAX: Final = 32
_WORDS_FEW: Final = 5_000_000
_SEQS_SENT_MAX: Final = 100_000
_SHARED_MIN: Final = 2
"""With fewer keys in common two texts are not compared: duplicates share five and more, chance acquaintances one."""
_MEMORIES_SCHEMA: Final = (
    "space_id string, event_id string, seq bigint, ts timestamp, author string, text string, length int, text_key string, "
    "is_new_text boolean, packed_keys binary, confidence double, salience double, embedding array<double>, band string, "
    "is_sealed boolean"
)
_LIKENESSES_SCHEMA: Final = (
    "space_id string, seq bigint, other_seq bigint, text_key string, other_key string, jaccard double, cosine double"
)
_EVIDENCE_SCHEMA: Final = "space_id string, event_id string, seq bigint, kind string, value double, memory_date date"
_PACKED: Final = ("seq", "packed_keys", "is_new_text")
_WORDS: Final = "seq bigint, word bigint, is_name boolean"
_SHARED: Final = "seq bigint, other_seq bigint, shared bigint"
_PAIRS: Final = "seq bigint, other_seq bigint"
_LIKENESS: Final = StructType([StructField("jaccard", DoubleType()), StructField("cosine", DoubleType())])
_TEXT: Final = ("space_id", "text_key")
_ID: Final = ("space_id", "event_id")


def _keys(normal: pd.Series, space_hash: pd.Series, id_hash: pd.Series, text_hash: pd.Series) -> pd.Series:
    hashes = (each.to_numpy() for each in (space_hash, id_hash, text_hash))
    return pd.Series(packed_keys(normal.to_list(), *hashes), dtype=object)


def _likeness(one: pd.Series, other: pd.Series, one_vector: pd.Series, other_vector: pd.Series) -> pd.DataFrame:
    found = [likeness(*each) for each in zip(one, other, one_vector, other_vector, strict=True)]
    return pd.DataFrame(found, columns=["jaccard", "cosine"], dtype="float64")


def _keys_of(normal: Column) -> Column:
    """The keys that texts are compared by, packed."""
    # Built here and not on import: see ``columns.wall_clock``.
    keys = pandas_udf(_keys, BinaryType())  # type: ignore[call-overload, unused-ignore]
    return keys(normal, F.xxhash64("space_id"), F.xxhash64(*_ID), F.xxhash64(*_TEXT))  # type: ignore[no-any-return, unused-ignore]


def memories_told(events: DataFrame, context: JobContext) -> DataFrame:
    """
    One row a memory that was encoded, in the shape of ``gold.memories`` without ``is_new_text``.

    A text is the content's ``text``, or the content itself where it has none; it is cut at ``text_chars_max``, so that one
    huge memory does not decide what a run costs. What a memory does not say is null; ``ts`` is when it occurred.
    """
    chars = setting(context, "text_chars_max", _TEXT_CHARS_MAX, above=0)
    words = F.coalesce(text("content.text"), text("content"), text("text"))
    normal = F.when(F.length(F.col("_normal")) > 0, F.col("_normal"))
    embedding = F.from_json(F.coalesce(text("embedding"), text("content.embedding")), "array<double>")
    return (
        events.where((F.col("topic") == "hippo") & (F.col("type") == "HIPPO_ENCODE"))
        .select(
            *("space_id", "event_id", "seq"),
            F.coalesce(instant("occurred_at"), usable(F.col("ts"))).alias("ts"),
            F.coalesce(text("person_id"), name_of_actor(F.col("actor"))).alias("author"),
            F.substring(words, 1, chars).alias("text"),
            F.coalesce(number("confidence"), number("content.confidence")).alias("confidence"),
            F.coalesce(number("salience"), number("salience_score"), number("content.salience")).alias("salience"),
            F.when(F.forall(embedding, lambda each: finite(each).isNotNull()), embedding).alias("embedding"),
            "band",
            F.coalesce("is_sealed", F.lit(False)).alias("is_sealed"),
        )
        .where(F.col("ts").isNotNull())
        .withColumn("length", F.length("text"))
        .withColumn("_normal", normalised(F.col("text")))
        .withColumn("text_key", F.sha2(normal, 256))
        .withColumn("packed_keys", _keys_of(normal))
        .drop("_normal")
    )


def _build_memories(tables: Mapping[str, DataFrame], context: JobContext) -> Mapping[str, DataFrame]:
    events, old = tables["silver.events"], tables[MEMORIES]
    told = memories_told(events, context).localCheckpoint(eager=False)
    named, few_named = brought(told.select(*_ID, "seq", "ts", "text_key", "packed_keys"))
    said, few_said = brought(evidence(events).withColumn("_id_hash", F.xxhash64(*_ID)))
    words, few_words, known = _met(old, few_named, few_said)
    new, few_new = brought(_first_told(named, known))
    neighbours_max = setting(context, "neighbours_max", _NEIGHBOURS_MAX, above=0)
    if few_named is None or few_words is None or few_new is None:
        fresh = _words_in(named.withColumn("is_new_text", F.lit(True))).join(
            new.where("is_new_text").select("seq"), "seq"
        )
        pairs, few_pairs = brought(_likeliest(_shared(fresh, words, neighbours_max), neighbours_max))
    else:
        is_new = pc.is_in(few_named["seq"], few_new["seq"].filter(few_new["is_new_text"]))
        fresh_here = _words_here(few_named, is_new)
        few_pairs = nearest(_keys_in(fresh_here), _keys_in(few_words), neighbours_max, _SHARED_MIN)
        pairs = new.sparkSession.createDataFrame(few_pairs, _PAIRS)
    columns = [part.split()[0] for part in _MEMORIES_SCHEMA.split(", ")]
    made = {
        MEMORIES: told.join(new.select("seq", "is_new_text"), "seq").select(*columns),
        LIKENESSES: _compared(pairs, few_pairs, told, old, context).unionByName(_repeated(new)),
        EVIDENCE: _dated(said, new, known),
    }
    return made if few_named is None else {table: frame.coalesce(1) for table, frame in made.items()}


def _words_in(memories: DataFrame, sieve: Sieve | None = None) -> DataFrame:
    """The words of memories, of those that are looked for or all (``words_of``)."""

    def words(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            seqs, packed, has_keys = (batch.column(name) for name in _PACKED)
            yield words_of(seqs, packed, has_keys, sieve)

    return memories.select(*_PACKED).mapInArrow(words, _WORDS)


def _words_here(memories: pa.Table, has_keys: pa.ChunkedArray) -> pa.Table:
    """The same of few."""
    chunks = [memories["seq"], memories["packed_keys"], has_keys]
    return pa.Table.from_batches([words_of(*(each.combine_chunks() for each in chunks))])


def _keys_in(words: pa.Table) -> pa.Table:
    return words.filter(pc.invert(words["is_name"]))


def _met(old: DataFrame, named: pa.Table | None, said: pa.Table | None) -> tuple[DataFrame, pa.Table | None, DataFrame]:
    """
    The words that memories before have in common with what is new, or where much is new all of theirs; the same if they are not too
    many; and the memories before that may have the id or the text of a new one, or that something new is said of.
    """
    columns = (*_ID, "seq", "ts", "text_key")
    if named is None or said is None:
        return _words_in(old), None, old.select(*columns)
    here = _words_here(named, pa.chunked_array([np.ones(named.num_rows, dtype=bool)]))
    sieve = Sieve(np.concatenate([said["_id_hash"].to_numpy().astype(np.uint32), here["word"].to_numpy()]))
    if not (named.num_rows or said.num_rows):
        old = old.limit(0)
    words, few = brought(_words_in(old, sieve), few=_WORDS_FEW)
    seqs = words.where("is_name").select("seq").distinct()
    if few is not None:
        named_here = few.filter(few["is_name"]).select(["seq"])
        seqs = words.sparkSession.createDataFrame(named_here, "seq bigint")
        seqs = F.broadcast(seqs) if named_here.num_rows <= _SEQS_SENT_MAX else seqs.distinct()
        old = old if named_here.num_rows else old.limit(0)
    # What else is known of them is looked up where it is stored.
    known, _ = brought(old.select(*columns).join(seqs, "seq", "left_semi"))
    return words, few, known


def _shared(fresh: DataFrame, words: DataFrame, neighbours_max: int) -> DataFrame:
    """Which new texts share keys with which texts before them: ``seq``, ``other_seq`` and how many (``shared``)."""
    new, old = (each.where("not is_name").select("word", "seq") for each in (fresh, words))
    return (
        old.withColumn("is_new", F.lit(False))
        .unionByName(new.withColumn("is_new", F.lit(True)))
        .repartition("word")
        .sortWithinPartitions("word", "seq")
        .mapInArrow(functools.partial(paired, neighbours_max=neighbours_max), _SHARED)
    )


def _likeliest(shared: DataFrame, neighbours_max: int) -> DataFrame:
    """The new texts, each with those before it that it is compared with: the likeliest, then the latest."""
    likeliest = Window.partitionBy("seq").orderBy(F.desc("shared"), F.desc("other_seq"))
    return (
        shared.groupBy("seq", "other_seq")
        .agg(F.sum("shared").alias("shared"))
        .where(F.col("shared") >= _SHARED_MIN)
        .withColumn("_place", F.row_number().over(likeliest))
        .where(F.col("_place") <= neighbours_max)
        .select("seq", "other_seq")
    )


def _first_told(named: DataFrame, met: DataFrame) -> DataFrame:
    """The new memories, with ``is_new_text`` and the ``first_seq`` of those that say the same."""

    def of(key: Column) -> WindowSpec:
        return Window.partitionBy("space_id", key).orderBy("seq")

    # Of several with one id the first counts: the log forgets ids with what it drops, so one may come again with another text.
    of_text = of(F.coalesce("text_key", "event_id"))
    columns = (*_ID, "seq", "ts", "text_key")
    rows = named.select(*columns, F.lit(False).alias("_is_old")).unionByName(
        met.select(*columns, F.lit(True).alias("_is_old"))
    )
    return (
        rows.withColumn("_place", F.row_number().over(of(F.col("event_id"))))
        .where("_is_old or _place = 1")
        .withColumn("first_seq", F.first("seq").over(of_text))
        .withColumn("is_new_text", F.col("text_key").isNotNull() & (F.col("first_seq") == F.col("seq")))
        .where("not _is_old")
        .select(*columns, "first_seq", "is_new_text")
    )


def _compared(
    pairs: DataFrame, few: pa.Table | None, told: DataFrame, old: DataFrame, context: JobContext
) -> DataFrame:
    """The pairs of texts that are alike enough, with how much they are."""
    said = ("space_id", "seq", "text_key", "text", "embedding")
    # Nearness in time and a common author may add a tenth.
    is_enough = 0.45 * F.col("jaccard") + 0.45 * F.col("cosine") + 0.1 >= setting(
        context, "score_min", SCORE_MIN, above=0
    )
    one = told.select("seq", F.struct(*said).alias("one"))
    if few:
        # The texts are looked up where they are stored, in files that may have them. What is sent there are numbers: however few
        # the pairs are, their texts may be long.
        old = old.where(F.col("seq").between(pc.min(few["other_seq"]).as_py(), pc.max(few["other_seq"]).as_py()))
        pairs = F.broadcast(pairs)
    others = told.select(*said).unionByName(old.select(*said))
    found = others.select(F.col("seq").alias("other_seq"), F.struct(*said).alias("other")).join(pairs, "other_seq")
    like = pandas_udf(_likeness, _LIKENESS)(  # type: ignore[call-overload, unused-ignore]
        *(normalised(F.col(f"{side}.text")) for side in ("one", "other")), "one.embedding", "other.embedding"
    )
    return (
        (found.repartition(1) if few else found)
        .join(one, "seq")
        .where(F.col("one.space_id") == F.col("other.space_id"))
        .withColumn("_like", like)
        .select(
            *("one.space_id", "seq", "other_seq", "one.text_key", F.col("other.text_key").alias("other_key"), "_like.*")
        )
        .where(is_enough)
    )


def _repeated(new: DataFrame) -> DataFrame:
    """The new memories whose text was known before."""
    return new.where("text_key is not null and not is_new_text").select(
        *("space_id", "seq", F.col("first_seq").alias("other_seq"), "text_key", F.col("text_key").alias("other_key")),
        *(F.lit(1.0).alias("jaccard"), F.lit(1.0).alias("cosine")),
    )


def _dated(said: DataFrame, new: DataFrame, known: DataFrame) -> DataFrame:
    """What was said of memories, with the day of the memory if that was known before."""
    memory = new.unionByName(known, allowMissingColumns=True).select(
        *_ID, F.col("seq").alias("_seq"), F.to_date("ts").alias("_date")
    )
    memory_date = F.when(F.col("_seq") < F.col("seq"), F.col("_date")).alias("memory_date")
    return said.join(memory, list(_ID), "left").select(*_ID, "seq", "kind", "value", memory_date)


def evidence(events: DataFrame) -> DataFrame:
    """
    One row for each thing that an event says of a memory: that it was used (clicked, recalled or broadcast), the ``valence``
    annotated for it, and the ``salience`` that the attention gate gave it.
    """
    # Not by a path with [*], which gives a single match without its list.
    results = F.transform(
        texts("results"),
        lambda each: F.coalesce(F.get_json_object(each, "$.event_id"), F.get_json_object(each, "$.doc_id")),
    )
    recalled = F.coalesce(texts("event_ids"), texts("doc_ids"), results)
    kind = F.col("type")
    used = (
        F.when(kind == "RETRIEVAL_CLICK", F.array(text("doc_id")))
        .when(kind == "RECALL_RESULT", recalled)
        .when(kind == "WORKSPACE_BROADCAST", texts("salient_keys"))
    )
    is_felt, is_gated = kind == "AFFECT_ANNOTATED", kind.startswith("cognitive.attention.gate.")
    named = (
        F.when(is_felt, F.array(text("event_id")))
        .when(is_gated, F.array(text("content_id")))
        # One event uses a memory once, however often it names it.
        .otherwise(F.array_distinct(used))
    )
    value = F.when(is_felt, number("valence")).when(is_gated, number("salience_score"))
    return events.select(
        "space_id",
        F.explode(named).alias("event_id"),
        "seq",
        F.when(is_felt, "valence").when(is_gated, "salience").otherwise("use").alias("kind"),
        value.alias("value"),
    ).where(F.col("event_id").isNotNull() & ((F.col("kind") == "use") | F.col("value").isNotNull()))


def living(memories: DataFrame, erased: DataFrame) -> DataFrame:
    """``gold.memories`` without what ``gold.erasures`` names."""
    return without_erased(memories, erased, id_column="event_id", person=F.col("author"), seq=F.col("seq"))


CONSOLIDATION_MEMORIES_JOBS: Final = (
    Job(
        name="consolidation_memories",
        about="Takes memories, and what is said of them, out of payloads, and compares new texts with those before (for C1 to C4).",
        reads=("silver.events", MEMORIES),
        writes=(
            OutputTable(MEMORIES, _MEMORIES_SCHEMA, "A memory as it was encoded, with the keys of its text."),
            OutputTable(
                LIKENESSES,
                _LIKENESSES_SCHEMA,
                "Two memories of one space whose texts are alike or the same, the newer one first.",
            ),
            OutputTable(EVIDENCE, _EVIDENCE_SCHEMA, "What one event says of a memory: a use, a valence or a salience."),
        ),
        build=_build_memories,
        partitioning=Partitioning(lambda _: {"silver.events": InputWindow("seq")}, seq_column="seq"),
        settings_of="consolidation_duplicates",
    ),
)


JOBS: Final = (*CONSOLIDATION_ERASURES_JOBS, *CONSOLIDATION_MEMORIES_JOBS)
