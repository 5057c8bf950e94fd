"""
L2, ``gold.learning_ranker``: what was shown and what was clicked, a row a document.

Every clicked document is kept. Of the others each query keeps a few, chosen by a hash of the query and the document, so the
same log gives the same sample on any machine. A kept negative carries the weight of those left out: weighted sums are as
if nothing had been left out. ``gold.learning_impressions`` keeps the counts before sampling, for click rates.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from tidings.pipeline.jobs.job import InputWindow, Job, JobContext, OutputTable, Partitioning, setting, shaped

from .consolidation_erasures import ALL_ERASURES, ERASURES
from .learning_columns import learnable, of_type, text, value, within

__all__ = ["IMPRESSIONS", "JOBS", "ROWS", "impression_rows", "ranker_rows", "shown_documents"]

CLICK_WINDOW_S: Final = 3600
NEGATIVES_PER_POSITIVE: Final = 4
NEGATIVES_MIN: Final = 2
SHOWN_MAX: Final = 200
_TYPES: Final = ("RETRIEVAL_IMPRESSION", "RETRIEVAL_CLICK")
ROWS: Final = OutputTable(
    table="gold.learning_ranker",
    schema=(
        "row_id string, space_id string, date date, query_id string, doc_id string, position int, score double,"
        " y double, weight double, features map<string,double>, shown_at timestamp, impression_topic string,"
        " impression_offset bigint, impression_seq bigint, click_seq bigint"
    ),
    about="One document that was shown: clicked (y = 1), or one of the sampled rest.",
    partitioned_by=("shown_at",),
)
IMPRESSIONS: Final = OutputTable(
    table="gold.learning_impressions",
    schema=(
        "impression_id string, space_id string, date date, query_id string, shown_at timestamp, shown bigint,"
        " clicked bigint, first_click_position int, impression_seq bigint"
    ),
    about="One list of results: how many documents it showed and how many were clicked.",
    partitioned_by=("shown_at",),
)


def shown_documents(events: DataFrame, *, click_window_s: int = CLICK_WINDOW_S) -> DataFrame:
    """
    Every document that was shown, with ``y``. Only a click after the impression, in time and in the log, counts.

    Of a list no more than ``top_k`` documents (and never more than 200) were on show; of a document listed twice the first
    place counts.
    """
    item = "struct<doc_id:string,score:string,features:map<string,string>>"
    limit = F.least(F.coalesce(value("top_k").try_cast("int"), F.lit(SHOWN_MAX)), F.lit(SHOWN_MAX))
    listed = of_type(events, "RETRIEVAL_IMPRESSION").select(
        F.col("event_id").alias("impression_id"),
        "space_id",
        F.to_date("ts").alias("date"),
        "ts",
        "seq",
        "topic",
        "offset",
        text("query_id").alias("query_id"),
        F.posexplode(F.slice(F.from_json(text("ranked"), f"array<{item}>"), 1, F.greatest(limit, F.lit(0)))).alias(
            "position", "item"
        ),
    )
    shown = (
        listed.where("item.doc_id is not null and query_id is not null")
        .withColumn("doc_id", F.col("item.doc_id"))
        .withColumn("_nth", F.row_number().over(Window.partitionBy("seq", "doc_id").orderBy("position")))
        .where("_nth = 1")
    )
    clicks = of_type(events, "RETRIEVAL_CLICK").select(
        F.col("space_id").alias("_space"),
        text("query_id").alias("_query"),
        text("doc_id").alias("_doc"),
        F.col("ts").alias("_ts"),
        F.col("seq").alias("_seq"),
    )
    clicked = (
        shown.select("seq", "space_id", "query_id", "doc_id", "ts")
        .join(
            clicks,
            (F.col("space_id") == F.col("_space"))
            & (F.col("query_id") == F.col("_query"))
            & (F.col("doc_id") == F.col("_doc"))
            & (F.col("_seq") > F.col("seq"))
            & within("_ts", "ts", click_window_s),
        )
        .groupBy("seq", "doc_id")
        .agg(F.min("_seq").alias("click_seq"))
    )
    numbers = F.transform_values("item.features", lambda _, found: found.try_cast("double"))
    features = F.map_filter(numbers, lambda name, found: found.isNotNull() & ~name.isin("bias", "score", "position"))
    own = F.create_map(
        F.lit("bias"), F.lit(1.0), F.lit("score"), F.coalesce(F.col("score"), F.lit(0.0)), F.lit("position"), _decay()
    )
    return (
        shown.withColumn("score", F.col("item.score").try_cast("double"))
        .join(clicked, ["seq", "doc_id"], "left")
        .withColumn("y", F.when(F.col("click_seq").isNotNull(), 1.0).otherwise(0.0))
        .withColumn("features", F.map_concat(own, F.coalesce(features, F.create_map().cast("map<string,double>"))))
    )


def ranker_rows(
    shown: DataFrame, *, per_positive: int = NEGATIVES_PER_POSITIVE, negatives_min: int = NEGATIVES_MIN
) -> DataFrame:
    """
    All clicked documents, and of each list ``per_positive`` others a click, at least ``negatives_min``.

    Which ones depends on a hash of query and document alone. Their weight is how many each of them stands for.
    """
    of_list = Window.partitionBy("seq")
    by_chance = Window.partitionBy("seq", "y").orderBy(
        F.sha2(F.concat_ws("\u001f", "space_id", "query_id", "doc_id"), 256), "doc_id"
    )
    counted = shown.withColumns(
        {
            "_positives": F.sum("y").over(of_list),
            "_negatives": F.sum(1 - F.col("y")).over(of_list),
            "_nth": F.row_number().over(by_chance),
        }
    ).withColumn(
        "_kept", F.least(F.col("_negatives"), F.greatest(F.lit(negatives_min), F.col("_positives") * per_positive))
    )
    return counted.where("y = 1 or _nth <= _kept").select(
        F.concat_ws(":", "impression_id", "doc_id").alias("row_id"),
        "space_id",
        "date",
        "query_id",
        "doc_id",
        "position",
        "score",
        "y",
        F.when(F.col("y") == 1, 1.0).otherwise(F.col("_negatives") / F.col("_kept")).alias("weight"),
        "features",
        F.col("ts").alias("shown_at"),
        F.col("topic").alias("impression_topic"),
        F.col("offset").alias("impression_offset"),
        F.col("seq").alias("impression_seq"),
        "click_seq",
    )


def impression_rows(shown: DataFrame) -> DataFrame:
    """Each list of results with its counts."""
    return shown.groupBy(
        "impression_id",
        "space_id",
        "date",
        "query_id",
        F.col("ts").alias("shown_at"),
        F.col("seq").alias("impression_seq"),
    ).agg(
        F.count("*").alias("shown"),
        F.sum("y").cast("bigint").alias("clicked"),
        F.min(F.when(F.col("y") == 1, F.col("position"))).alias("first_click_position"),
    )


def _decay() -> Column:
    # How much of a reader's eye a place gets, as the usual discount has it; a plain number would grow without bound.
    return 1.0 / F.log2(F.col("position") + 2.0)


def _build(tables: Mapping[str, DataFrame], context: JobContext) -> Mapping[str, DataFrame]:
    shown = shown_documents(
        learnable(tables["silver.events"], tables[ERASURES]),
        click_window_s=setting(context, "click_window_s", CLICK_WINDOW_S),
    )
    rows = ranker_rows(
        shown,
        per_positive=setting(context, "negatives_per_positive", NEGATIVES_PER_POSITIVE),
        negatives_min=max(1, setting(context, "negatives_min", NEGATIVES_MIN)),
    )
    return {ROWS.table: shaped(rows, ROWS), IMPRESSIONS.table: shaped(impression_rows(shown), IMPRESSIONS)}


def _looks(context: JobContext) -> Mapping[str, InputWindow]:
    window_s = setting(context, "click_window_s", CLICK_WINDOW_S)
    return {"silver.events": InputWindow("ts", after_s=window_s, types=_TYPES), **ALL_ERASURES}


JOBS: Final = (
    Job(
        name="learning_ranker",
        about="L2: documents shown, clicked or not, with sampled negatives.",
        reads=("silver.events", ERASURES),
        writes=(ROWS, IMPRESSIONS),
        build=_build,
        partitioning=Partitioning(_looks),
    ),
)
