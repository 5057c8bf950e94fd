"""
C6, the scrub: which rows of the lake still name somebody or something that was erased.

Every other job leaves erased subjects out when it builds its tables anew. This one looks at what the tables hold: each row
that an erasure names is listed with its table and key, for ``tidings pipeline scrub`` to take out (``pipeline.scrub``), and
stays listed for as long as it is there. A summary that draws on an erased memory is to be built anew. The list names rows by
key and digest and quotes nothing; it and the event ``SCRUB_LISTED`` are the audit.

What was permitted to whom, and who had what changed for others (topics ``access`` and ``audit``), stays: both are kept to be
looked at later, and an account of an erasure must outlive it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import reduce
from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from tidings.core.events import Event
from tidings.pipeline.jobs.job import Job, JobContext, OutputTable

from .columns import digest, iso, name_of_actor, summaries, text
from .consolidation_duplicates import DUPLICATES
from .consolidation_erasures import ERASURE_TYPES, ERASURES
from .consolidation_keeping import KEEP_SCORES
from .consolidation_memories import CONSOLIDATION_TOPIC
from .consolidation_rollups import ROLLUPS
from .temporal_candidates import CANDIDATES
from .temporal_features import FEATURES, RECENCY
from .temporal_index import INDEX
from .temporal_patterns import PATTERNS

__all__ = ["JOBS", "SCRUB", "named_rows"]

SCRUB: Final = "gold.scrub_list"
_SCHEMA: Final = (
    "table string, space_id string, row_key string, hash string, object_type string, object_id string, "
    "erased_by string, erased_seq bigint, issued_at timestamp, action string"
)
_READS: Final = (
    *("silver.events", ERASURES, INDEX, FEATURES, RECENCY, PATTERNS, CANDIDATES, DUPLICATES, KEEP_SCORES, ROLLUPS),
)

_KEPT_TOPICS: Final = ("access", "audit")
_ROW: Final = ("table", "space_id", "row_key")
_ERASURE: Final = ("object_type", "object_id", "erased_by", "erased_seq", "issued_at")


def named_rows(tables: Mapping[str, DataFrame]) -> DataFrame:
    """
    One row for each row of a table and each memory it names: ``table``, ``space_id``, ``row_key``, ``named_id``; and for what is
    about a person as such, ``named_person``.
    """
    events = tables["silver.events"]
    told = _scrubbed(events)
    about = F.coalesce(F.when(F.col("topic").isin("temporal", "affect"), text("event_id")), F.col("event_id"))
    merged = tables[DUPLICATES]
    pair = F.array("event_id", "kept_event_id")
    parts = [
        _named("silver.events", told, F.col("event_id"), F.array(F.col("event_id"), about)),
        _named(INDEX, tables[INDEX], F.col("hash"), F.array("doc_id")),
        _named(FEATURES, tables[FEATURES], _moment("event_id"), F.array("event_id")),
        _named(RECENCY, tables[RECENCY], _moment("event_id"), F.array("event_id")),
        _named(PATTERNS, tables[PATTERNS], F.concat_ws("|", "scope", "person_id"), None, F.col("person_id")),
        _named(CANDIDATES, tables[CANDIDATES], F.concat_ws("|", "request_id", "event_id"), F.array("event_id")),
        _named(DUPLICATES, merged, F.concat_ws("|", "event_id", "kept_event_id"), pair),
        _named(KEEP_SCORES, tables[KEEP_SCORES], F.col("event_id"), F.array("event_id")),
        _named(ROLLUPS, tables[ROLLUPS], F.col("rollup_id"), F.col("provenance.event_ids")),
    ]
    return reduce(DataFrame.unionByName, parts)


def _scrubbed(events: DataFrame) -> DataFrame:
    """The events that may go. What erases is the reason for the deletion, and stays."""
    return events.where(~F.col("type").isin(*ERASURE_TYPES) & ~F.col("topic").isin(*_KEPT_TOPICS))


def _moment(id_column: str) -> Column:
    return F.concat_ws("|", F.col(id_column), iso(F.col("ts")))


def _named(
    table: str,
    rows: DataFrame,
    key: Column,
    ids: Column | None,
    person: Column | None = None,
) -> DataFrame:
    nothing = F.array(F.lit(None).cast("string"))
    listed = F.array_distinct(F.when(F.size(ids) > 0, ids).otherwise(nothing)) if ids is not None else nothing
    return rows.select(
        F.lit(table).alias("table"),
        "space_id",
        key.alias("row_key"),
        F.explode(listed).alias("named_id"),
        (F.lit(None).cast("string") if person is None else person).alias("named_person"),
    )


def _build(tables: Mapping[str, DataFrame], context: JobContext) -> Mapping[str, DataFrame]:
    events = tables["silver.events"]
    if tables[ERASURES].isEmpty():  # nothing to look for, in nine tables
        return {SCRUB: events.sparkSession.createDataFrame([], _SCHEMA)}
    erased = tables[ERASURES].withColumnRenamed("space_id", "_space")
    objects, people = erased.where(~F.col("is_person")), erased.where(F.col("is_person"))
    rows = named_rows(tables)
    is_here = F.col("space_id") == F.col("_space")
    theirs = (
        _memories_of_people(events)
        .join(people, is_here & (F.col("named_person") == F.col("object_id")) & (F.col("seq") < F.col("erased_seq")))
        .select("space_id", "named_id", *_ERASURE)
    )
    last = (
        _memories_of_people(events)
        .where(~F.col("is_summary"))
        .groupBy("space_id", "named_person")
        .agg(F.max("seq").alias("last_seq"))
    )
    found = [
        rows.join(objects, is_here & (F.col("named_id") == F.col("object_id"))).select(*_ROW, *_ERASURE),
        rows.join(theirs, ["space_id", "named_id"]).select(*_ROW, *_ERASURE),
        # A row about a person as such goes if nothing was committed of them since.
        rows.where((F.col("table") == PATTERNS) & F.col("named_person").isNotNull())
        .join(people, is_here & (F.col("named_person") == F.col("object_id")))
        .join(last, ["space_id", "named_person"], "left")
        .where(F.coalesce(F.col("last_seq") < F.col("erased_seq"), F.lit(True)))
        .select(*_ROW, *_ERASURE),
    ]
    listed = reduce(DataFrame.unionByName, found)
    first = F.min(F.struct("erased_seq", *[name for name in _ERASURE if name != "erased_seq"])).alias("erasure")
    action = F.when(F.col("table") == ROLLUPS, "rebuild").otherwise(F.lit("delete"))
    return {
        SCRUB: listed.groupBy(*_ROW)
        .agg(first)
        .select(*_ROW, "erasure.*")
        .select(
            *_ROW,
            digest(F.col("table"), F.col("space_id"), F.col("row_key")).alias("hash"),
            *("object_type", "object_id", "erased_by", "erased_seq", "issued_at"),
            action.alias("action"),
        )
    }


def _memories_of_people(events: DataFrame) -> DataFrame:
    """
    Whose each event is: its author's, or its person's, under its own id and, where it tells of the time of a memory, under
    that one's. What somebody says of another's memory (how it felt, that it was recalled) does not make it theirs.
    """
    told = _scrubbed(events)
    ids = F.array("event_id", F.when(F.col("topic") == "temporal", text("event_id")))
    person = F.coalesce(text("person_id"), name_of_actor(F.col("actor"))).alias("named_person")
    is_summary = (F.col("type").startswith("TEMPORAL_") & (F.col("type") != "TEMPORAL_INGEST")).alias("is_summary")
    each = told.select("space_id", F.explode(F.array_distinct(ids)).alias("named_id"), person, "seq", is_summary)
    return each.where(F.col("named_id").isNotNull() & F.col("named_person").isNotNull())


def _tell(tables: Mapping[str, DataFrame], context: JobContext) -> Iterable[Event]:
    counts = (
        tables[SCRUB]
        .groupBy("space_id", "erased_by", "object_type", "table", "action")
        .agg(F.count("*").alias("rows"), F.lower(F.hex(F.bit_xor(F.xxhash64("hash")))).alias("checksum"))
    )
    told = counts.groupBy("space_id", "erased_by", "object_type").agg(
        F.array_sort(F.collect_list(F.struct("table", "action", "rows", "checksum"))).alias("tables")
    )
    return summaries(CONSOLIDATION_TOPIC, "SCRUB_LISTED", told, context, keys=("space_id", "erased_by"))


JOBS: Final = (
    Job(
        name="consolidation_scrub",
        about="Lists the rows of the lake that name what was erased, with an audit record (C6).",
        reads=_READS,
        writes=(
            OutputTable(SCRUB, _SCHEMA, "A row of a table that names what was erased, and what is to be done with it."),
        ),
        build=_build,
        summarise=_tell,
    ),
)
