"""
What consolidation works on: the memories that were encoded, without those erased; and what was erased.

A tombstone of type ``memory``, ``blob`` or ``index`` names one object by its id. One of type ``profile``, and a request of
a data subject to be erased, names a person: all that was committed about them before it goes, and what comes later stays.
``gold.erasures`` lists them, so that a job which reads a few hours of the log need not search all of it for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.window import Window

from tidings.pipeline.jobs.job import InputWindow, Job, JobContext, OutputTable, Partitioning, setting

from .columns import instant, name_of_actor, number, text, usable

ERASURES: Final = "gold.erasures"
ALL_ERASURES: Final = {ERASURES: InputWindow("erased_seq", is_whole=True)}
"""How a partitioned job reads them: an erasure may name anything, however old, so a new one rebuilds all partitions."""
_SCHEMA: Final = (
    "space_id string, is_person boolean, object_id string, object_type string, erased_by string, erased_seq bigint, "
    "issued_at timestamp"
)

ERASURE_TYPES: Final = ("TOMBSTONE_PROPAGATE", "TOMBSTONE_APPLIED", "DSAR_EXPORT", "DSAR_ERASE")
_ERASE_WORDS: Final = ("erase", "erasure", "delete", "deletion", "forget")


def erasures(events: DataFrame) -> DataFrame:
    """
    One row an erasure: ``space_id``, ``is_person``, ``object_id``, ``object_type``, ``erased_by`` (the event), ``erased_seq``,
    ``issued_at``.

    A ``DSAR_EXPORT`` erases only if its ``request`` says so: an export by itself takes nothing away. An erasure that names
    nothing is passed over.
    """
    is_dsar = F.col("type").startswith("DSAR_")
    wish = F.lower(F.coalesce(text("request"), text("kind"), text("action"), F.lit("")))
    is_meant = ~is_dsar | (F.col("type") == "DSAR_ERASE") | wish.isin(*_ERASE_WORDS)
    subject = F.coalesce(text("subject_id"), text("person_id"), text("user_id"))
    object_type = F.when(is_dsar, F.lit("profile")).otherwise(F.coalesce(F.lower(text("object_type")), F.lit("memory")))
    return (
        events.where(F.col("type").isin(*ERASURE_TYPES) & is_meant)
        .select(
            F.coalesce(text("space_id"), F.col("space_id")).alias("space_id"),
            (object_type == "profile").alias("is_person"),
            F.when(is_dsar, subject).otherwise(F.coalesce(text("object_id"), subject)).alias("object_id"),
            object_type.alias("object_type"),
            F.col("event_id").alias("erased_by"),
            F.col("seq").alias("erased_seq"),
            F.coalesce(instant("issued_at"), F.col("ts")).alias("issued_at"),
        )
        .where(F.col("object_id").isNotNull() & (F.col("object_id") != ""))
    )


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


def _build(tables: Mapping[str, DataFrame], context: JobContext) -> Mapping[str, DataFrame]:
    return {ERASURES: erasures(tables["silver.events"])}


CONSOLIDATION_ERASURES_JOBS: Final = (
    Job(
        name="erasures",
        about="Lists what tombstones and data subjects' requests say is to be erased.",
        reads=("silver.events",),
        writes=(OutputTable(ERASURES, _SCHEMA, "An object or a person that is to be erased."),),
        build=_build,
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


JOBS: Final = CONSOLIDATION_ERASURES_JOBS
