"""
The time index (T1), and what has to leave it (T6).

``gold.temporal_told``: which moment each event tells of. An event may name another time than its own in its payload; stored
once, by the day of that time, it can be looked up, so that a day of the index is rebuilt without searching every payload of the log.

``gold.temporal_index``: one row a moment and granularity, in the bucket of its UTC time and its space.

``gold.temporal_deletions``: rows that are past their life or erased, and whether the index still has them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from tidings.core.events import Event
from tidings.pipeline.jobs.job import InputWindow, Job, JobContext, OutputTable, Partitioning, setting
from tidings.pipeline.schemas import columns_of

from .columns import as_of, digest, held, instant, iso, name_of_actor, offset_in, summaries, text, texts, usable
from .consolidation_memories import ALL_ERASURES, ERASURES, without_erased

TEMPORAL_TOPIC: Final = "temporal"
TOLD: Final = "gold.temporal_told"
_SCHEMA: Final = (
    "space_id string, event_id string, named_id string, ts timestamp, date date, tz string, person_id string, "
    "tags array<string>, seq bigint, trace_id string, is_hippo boolean, is_temporal boolean"
)
_COLUMNS: Final = tuple(name for name, _ in columns_of(_SCHEMA))


def moments_told(events: DataFrame, context: JobContext) -> DataFrame:
    """
    One row an event that tells of a moment: which one, when, where and whose.

    The space is the one that the record was committed in, whatever a payload says: nobody indexes into another's space.
    """
    topics = setting(context, "topics", ("hippo", TEMPORAL_TOPIC))
    written_at = F.coalesce(text("occurred_at"), text("ts"))
    happened = F.when(F.col("topic") == TEMPORAL_TOPIC, instant("ts")).when(
        F.col("topic") == "hippo", instant("occurred_at")
    )
    is_summary = F.col("type").startswith("TEMPORAL_") & (F.col("type") != "TEMPORAL_INGEST")
    is_moment = (
        F.when(F.col("topic") == TEMPORAL_TOPIC, ~is_summary)
        .when(F.col("topic") == "hippo", F.col("type") == "HIPPO_ENCODE")
        .otherwise(F.lit(True))
    )
    return (
        events.where(F.col("topic").isin(*topics) & is_moment)
        .select(
            "space_id",
            "event_id",
            F.when(F.col("topic") == TEMPORAL_TOPIC, text("event_id")).alias("named_id"),
            F.coalesce(happened, usable(F.col("ts"))).alias("ts"),
            F.coalesce(text("tz"), text("tz", "device"), offset_in(written_at)).alias("tz"),
            F.coalesce(text("person_id"), name_of_actor(F.col("actor"))).alias("person_id"),
            F.coalesce(texts("tags"), F.array().cast("array<string>")).alias("tags"),
            "seq",
            "trace_id",
            (F.col("topic") == "hippo").alias("is_hippo"),
            (F.col("topic") == TEMPORAL_TOPIC).alias("is_temporal"),
        )
        .where(F.col("ts").isNotNull() & F.col("space_id").isNotNull() & F.col("event_id").isNotNull())
        .withColumn("date", F.to_date("ts"))
    )


def _build(tables: Mapping[str, DataFrame], context: JobContext) -> Mapping[str, DataFrame]:
    return {TOLD: moments_told(tables["silver.events"], context).select(*_COLUMNS)}


TEMPORAL_TOLD_JOBS: Final = (
    Job(
        name="temporal_told",
        about="Writes down which moment each event tells of (for T1 and T6).",
        reads=("silver.events",),
        writes=(OutputTable(TOLD, _SCHEMA, "What one event says of a moment."),),
        build=_build,
        partitioning=Partitioning(lambda _: {"silver.events": InputWindow("seq")}, seq_column="seq"),
        settings_of="temporal_index",
    ),
)


INDEX: Final = "gold.temporal_index"
DELETIONS: Final = "gold.temporal_deletions"
GRANULARITIES: Final = ("minute", "hour", "day", "week", "month")
_PATTERNS: Final = {"minute": "yyyy-MM-dd-HH-mm", "hour": "yyyy-MM-dd-HH", "day": "yyyy-MM-dd", "month": "yyyy-MM"}
_TTL_DAYS: Final = 180
_DELETIONS_DAYS: Final = 30
_KEY: Final = ("space_id", "doc_id", "ts")

_INDEX_SCHEMA: Final = (
    "space_id string, g string, time_bucket string, doc_id string, ts timestamp, date date, hash string, "
    "attributes struct<tz: string, person_id: string, tags: array<string>>, seq bigint, expires_at timestamp"
)
_DELETIONS_SCHEMA: Final = (
    "space_id string, g string, time_bucket string, doc_id string, ts timestamp, hash string, reason string, "
    "erased_by string, gone_at timestamp, is_in_index boolean"
)


def moments(told: DataFrame, context: JobContext) -> DataFrame:
    """
    One row a space, event and time: ``space_id``, ``doc_id``, ``ts``, ``tz``, ``person_id``, ``tags``, ``seq``.

    Args:
        told: ``gold.temporal_told``.
        context: The run.
    """
    # A write tells memory and the sense of time under two ids but in one trace. Where that leads to exactly one memory of
    # the same moment, both are about it; otherwise the id that the writer gave stands.
    traced = (
        told.where(F.col("is_hippo") & F.col("trace_id").isNotNull())
        .groupBy("space_id", "trace_id", "ts")
        .agg(F.count_distinct("event_id").alias("_count"), F.min("event_id").alias("traced_id"))
        .where(F.col("_count") == 1)
        .drop("_count")
    )
    doc_id = F.when(F.col("is_temporal"), F.coalesce("traced_id", "named_id", "event_id")).otherwise(F.col("event_id"))
    return (
        told.join(traced, ["space_id", "trace_id", "ts"], "left")
        .withColumn("doc_id", doc_id)
        .groupBy(*_KEY)
        .agg(
            _best("tz").alias("tz"),
            _best("person_id").alias("person_id"),
            F.array_sort(F.array_distinct(F.flatten(F.collect_set("tags")))).alias("tags"),
            F.max("seq").alias("seq"),
        )
        .withColumn("tz", F.coalesce("tz", F.lit(setting(context, "tz_default", "UTC"))))
    )


def _best(column: str) -> Column:
    """What is known; of several, what topic ``temporal`` says, which knows best of times; then what was said last."""
    candidate = F.struct(F.col(column).isNotNull(), "is_temporal", "seq", F.col(column).alias("value"))
    return F.max(candidate)["value"]


def index_rows(found: DataFrame, context: JobContext) -> DataFrame:
    """One row a moment and granularity, in the shape of ``gold.temporal_index``, whatever its age."""
    week = F.format_string("%04d-W%02d", F.expr("extract(YEAROFWEEK FROM ts)"), F.weekofyear("ts"))
    bucket = F.when(F.col("g") == "week", week)
    for name, pattern in _PATTERNS.items():
        bucket = bucket.when(F.col("g") == name, F.date_format("ts", pattern))
    days = setting(context, "ttl_days", _TTL_DAYS, above=0)
    return found.withColumn("g", F.explode(F.array(*map(F.lit, GRANULARITIES)))).select(
        "space_id",
        "g",
        F.concat(bucket, F.lit("|"), "space_id").alias("time_bucket"),
        "doc_id",
        "ts",
        F.to_date("ts").alias("date"),
        digest(F.col("space_id"), F.col("doc_id"), F.unix_micros("ts"), F.col("g")).alias("hash"),
        F.struct("tz", "person_id", "tags").alias("attributes"),
        "seq",
        (F.col("ts") + F.expr(f"INTERVAL '{days}' DAY")).alias("expires_at"),
    )


def _lifetime_days(context: JobContext) -> int:
    return setting(context, "ttl_days", _TTL_DAYS, above=0)


def _build_index(tables: Mapping[str, DataFrame], context: JobContext) -> Mapping[str, DataFrame]:
    living = without_erased(
        moments(tables[TOLD], context),
        tables[ERASURES],
        id_column="doc_id",
        person=F.col("person_id"),
        seq=F.col("seq"),
    )
    return {INDEX: index_rows(living, context).where(F.col("expires_at") > as_of(context))}


def _summarise_index(tables: Mapping[str, DataFrame], context: JobContext) -> Iterable[Event]:
    # Combined by xor the digest is free of the order of rows; each row's own hash is unique.
    checksum = F.lower(F.hex(F.bit_xor(F.xxhash64("hash"))))
    built = (
        tables[INDEX]
        .groupBy("space_id", "g")
        .agg(
            F.struct(iso(F.min("ts")).alias("from"), iso(F.max("ts")).alias("to")).alias("window"),
            F.count("*").alias("written"),
            F.array(checksum).alias("hashes"),
        )
    )
    return summaries(TEMPORAL_TOPIC, "TEMPORAL_INDEX_BUILT", built, context, order=("window.to", "space_id", "g"))


def _build_deletions(tables: Mapping[str, DataFrame], context: JobContext) -> Mapping[str, DataFrame]:
    told, index, now = tables[TOLD], tables[INDEX], as_of(context)
    ttl = setting(context, "ttl_days", _TTL_DAYS, above=0)
    days = setting(context, "deletions_days", _DELETIONS_DAYS, above=0)
    # Only moments that expired of late, or that an erasure may name, are put together again.
    begin, end = (now - F.expr(f"INTERVAL '{each}' DAY") for each in (ttl + days, ttl))
    of_late = (F.col("ts") > begin) & (F.col("ts") <= end)
    # Said of the days that files are stored by too, so that the others are not even opened.
    gone_or_named = told.where(of_late & F.col("date").between(F.to_date(begin), F.to_date(end)))
    if not tables[ERASURES].isEmpty():
        names = F.array_compact(F.array("event_id", "named_id", "person_id"))
        hit = (
            told.select("space_id", "ts", F.explode(names).alias("object_id"))
            .join(tables[ERASURES].select("space_id", "object_id"), ["space_id", "object_id"], "left_semi")
            .select("space_id", "ts", F.lit(True).alias("_hit"))
            .distinct()
        )
        gone_or_named = told.join(hit, ["space_id", "ts"], "left").where(F.col("_hit") | of_late).drop("_hit")
    chosen, count, near = held(gone_or_named)
    # An index that was not made for long holds what is past its life.
    left = index.where((F.col("expires_at") <= now) & ~of_late).select(
        *_ROW,
        F.lit("expired").alias("reason"),
        F.lit(None).cast("string").alias("erased_by"),
        F.col("expires_at").alias("gone_at"),
        F.lit(True).alias("is_in_index"),
    )
    if not count:  # as mostly: nothing is put together, or looked through for it
        return {DELETIONS: left}
    gone = _gone(moments(chosen, context), tables[ERASURES], context).localCheckpoint(eager=False)
    hashes = near(gone.select("hash"))
    present = index.join(hashes, "hash", "left_semi").select("hash", F.lit(True).alias("_present"))
    return {
        DELETIONS: gone.join(present.distinct(), "hash", "left")
        .withColumn("is_in_index", F.coalesce("_present", F.lit(False)))
        .where(F.col("is_in_index") | (F.col("gone_at") > now - F.expr(f"INTERVAL '{days}' DAY")))
        .drop("_present")
        .unionByName(left.join(hashes, "hash", "left_anti"))
        .select(*left.columns)
    }


_ROW: Final = ("space_id", "g", "time_bucket", "doc_id", "ts", "hash")


def _gone(found: DataFrame, erasures: DataFrame, context: JobContext) -> DataFrame:
    """The rows of the index that moments would have, of those that were erased or are past their life."""
    # The earliest erasure that names a moment is the one that took it away.
    erased = erasures.withColumnRenamed("space_id", "_space")
    names_it = F.when(F.col("is_person"), F.col("object_id") == F.col("person_id")).otherwise(
        F.col("object_id") == F.col("doc_id")
    ) & (~F.col("is_person") | (F.col("seq") < F.col("erased_seq")))
    first = (
        found.join(erased, (F.col("space_id") == F.col("_space")) & names_it)
        .groupBy(*_KEY)
        .agg(F.min(F.struct("erased_seq", "erased_by", "issued_at")).alias("erasure"))
    )
    is_erased, is_expired = F.col("erasure").isNotNull(), F.col("expires_at") <= as_of(context)
    rows = index_rows(found, context).join(first, list(_KEY), "left")
    return rows.where(is_erased | is_expired).select(
        *_ROW,
        F.when(is_erased, "erased").otherwise("expired").alias("reason"),
        F.col("erasure.erased_by").alias("erased_by"),
        F.coalesce("erasure.issued_at", "expires_at").alias("gone_at"),
    )


TEMPORAL_INDEX_JOBS: Final = (
    Job(
        name="temporal_index",
        about="Builds the time index: one row a moment and granularity (T1).",
        reads=(TOLD, ERASURES),
        writes=(OutputTable(INDEX, _INDEX_SCHEMA, "A moment in its bucket of one granularity."),),
        build=_build_index,
        summarise=_summarise_index,
        partitioning=Partitioning(lambda _: {TOLD: InputWindow("ts"), **ALL_ERASURES}, lifetime_days=_lifetime_days),
    ),
    Job(
        name="temporal_gc",
        about="Lists what left the time index, past its life or erased, and what an older index still holds (T6).",
        reads=(TOLD, ERASURES, INDEX),
        writes=(OutputTable(DELETIONS, _DELETIONS_SCHEMA, "A row that the time index lost, why, and since when."),),
        build=_build_deletions,
    ),
)


JOBS: Final = (*TEMPORAL_TOLD_JOBS, *TEMPORAL_INDEX_JOBS)
