"""What consolidation works on: the memories that were encoded, as far as they can be read, without those erased."""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.window import Window

from tidings.pipeline.jobs.job import JobContext, setting

from .columns import instant, name_of_actor, number, text, usable
from .consolidation_erasures import erasures, without_erased

__all__ = ["CONSOLIDATION_TOPIC", "is_guarded", "memories", "normalised"]

CONSOLIDATION_TOPIC: Final = "consolidation"
_TEXT_CHARS_MAX: Final = 20_000
_OPEN_BANDS: Final = ("GREEN", "AMBER")


def is_guarded(band: Column) -> Column:
    """Whether a band is RED or BLACK, or one that nobody knows: what cannot be judged is guarded. No band is GREEN."""
    return ~F.upper(F.coalesce(band, F.lit("GREEN"))).isin(*_OPEN_BANDS)


def normalised(words: Column) -> Column:
    """A text in lower case with its spaces evened out."""
    return F.trim(F.regexp_replace(F.lower(words), r"[\s\p{Z}]+", " "))


def memories(events: DataFrame, context: JobContext) -> DataFrame:
    """
    One row a memory: ``space_id``, ``event_id``, ``seq``, ``ts`` (when it occurred), ``author``, ``text``, ``confidence``,
    ``salience``, ``embedding``, ``band``, ``is_sealed``.

    A text is the content's ``text``, or the content itself where it has none; it is cut at ``text_chars_max``, so that one
    huge memory does not decide what a run costs. What a memory does not say is null.
    """
    chars = setting(context, "text_chars_max", _TEXT_CHARS_MAX, above=0)
    words = F.coalesce(text("content.text"), text("content"), text("text"))
    found = (
        events.where((F.col("topic") == "hippo") & (F.col("type") == "HIPPO_ENCODE"))
        .select(
            *("space_id", "event_id", "seq"),
            F.coalesce(instant("occurred_at"), usable(F.col("ts"))).alias("ts"),
            F.coalesce(text("person_id"), name_of_actor(F.col("actor"))).alias("author"),
            F.substring(words, 1, chars).alias("text"),
            F.coalesce(number("confidence"), number("content.confidence")).alias("confidence"),
            F.coalesce(number("salience"), number("salience_score"), number("content.salience")).alias("salience"),
            F.from_json(F.coalesce(text("embedding"), text("content.embedding")), "array<double>").alias("embedding"),
            "band",
            F.coalesce("is_sealed", F.lit(False)).alias("is_sealed"),
        )
        .where(F.col("ts").isNotNull())
        # The log forgets ids with what it drops, so one may come again with another text: the first one counts.
        .withColumn("_place", F.row_number().over(Window.partitionBy("space_id", "event_id").orderBy("seq")))
        .where("_place = 1")
        .drop("_place")
    )
    return without_erased(found, erasures(events), id_column="event_id", person=F.col("author"), seq=F.col("seq"))
