"""
What was erased: tombstones and the erasures that people asked for, and how a job leaves out what they name.

A tombstone of type ``memory``, ``blob`` or ``index`` names one object by its id. One of type ``profile``, and a request of
a data subject to be erased, names a person: all that was committed about them before it goes, and what comes later stays.

``gold.erasures`` lists them, so that a job which looks at a few hours of the log need not search all of it for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from tidings.pipeline.jobs.job import InputWindow, Job, JobContext, OutputTable, Partitioning

from .columns import instant, text

__all__ = ["ALL_ERASURES", "ERASURES", "ERASURE_TYPES", "JOBS", "erasures", "without_erased"]

ERASURES: Final = "gold.erasures"
ALL_ERASURES: Final = {ERASURES: InputWindow("erased_seq", is_whole=True)}
"""How a job in pieces looks at them: an erasure may name anything, however old, so a new one makes all pieces anew."""
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


JOBS: Final = (
    Job(
        name="erasures",
        about="Lists what tombstones and data subjects' requests say is to be erased.",
        reads=("silver.events",),
        writes=(OutputTable(ERASURES, _SCHEMA, "An object or a person that is to be erased.", ("erased_seq",)),),
        build=_build,
        partitioning=Partitioning(lambda _: {"silver.events": InputWindow("seq", types=ERASURE_TYPES)}, is_by_seq=True),
    ),
)
