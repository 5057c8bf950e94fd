"""
What came late (C4), and what may leave: segments of the log (C5), and rows that name what was erased (C6).

``gold.late_events`` lists events that were written long after they happened, out of order in their topic and space, or ahead
of the clock, which makes nothing that comes later late; ``gold.reconsolidations`` lists the rollups that late memories make stale.

``gold.compaction_list``: a segment is released when all groups have read it, its time is past and the lake holds it; each
other one has the reason why not.

``gold.scrub_list``: every row of every table that names an erased object or is an erased person's, with the erasure. The
scrub (``tidings pipeline scrub``) removes them; no text is quoted here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import reduce
from typing import Any, Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from tidings.core.errors import SettingsError
from tidings.core.events import Event
from tidings.pipeline.erasures import ERASURE_TYPES
from tidings.pipeline.jobs.job import InputWindow, Job, JobContext, OutputTable, Partitioning, setting

from .columns import as_of, digest, held, hours_between, iso, name_of_actor, summaries, text
from .consolidation_duplicates import DUPLICATES, KEEP_SCORES
from .consolidation_memories import CONSOLIDATION_TOPIC, ERASURES, MEMORIES, living
from .consolidation_rollups import PATCH_SHARE_MAX, ROLLUPS, ROLLUPS_TOLD, told_rollups
from .temporal_candidates import CANDIDATES
from .temporal_features import DAYS, FEATURES, PATTERNS, RECENCY
from .temporal_index import INDEX

LATE_EVENTS: Final = "gold.late_events"
RECONSOLIDATIONS: Final = "gold.reconsolidations"
_SKEW_S: Final = 10.0
_LATE_S: Final = 3_600.0
_DAYS: Final = 30
_LISTED_MAX: Final = 1_000

_LATE_SCHEMA: Final = (
    "topic string, space_id string, event_id string, offset bigint, seq bigint, ts timestamp, written_at timestamp, "
    "date date, late_s double, behind_s double, is_late boolean, is_out_of_order boolean, is_ahead boolean"
)
_RECON_SCHEMA: Final = (
    "space_id string, rollup_id string, period string, from_ts timestamp, to_ts timestamp, told_version int, "
    "told_seq bigint, late_count bigint, late_share double, action string, event_ids array<string>"
)


def late_events(events: DataFrame, *, skew_s: float, late_s: float) -> DataFrame:
    """
    The events that are late, out of order or ahead, with by how much; ``date`` is the day of writing.

    An event is out of order by the latest time of an earlier one that was written the same day or the day before: what is
    further behind is late anyway. Nothing has happened after it was written, so a time that is ahead counts as that of its
    writing: a wrong clock is one finding, and not one of everybody who comes after it.
    """
    written = events.withColumn("date", F.to_date("written_at")).withColumn("_happened", F.least("ts", "written_at"))
    that_day = ("topic", "space_id", "date")
    before = Window.partitionBy(*that_day).orderBy("offset").rowsBetween(Window.unboundedPreceding, -1)
    day_before = written.groupBy("topic", "space_id", F.date_add("date", 1).alias("date")).agg(
        F.max("_happened").alias("_yesterday")
    )
    latest = F.greatest(F.max("_happened").over(before), F.col("_yesterday"))
    found = (
        written.join(day_before, list(that_day), "left")
        .withColumn("_latest", latest)
        .withColumn("late_s", hours_between(F.col("ts"), F.col("written_at")) * 3600)
        .withColumn("behind_s", hours_between(F.col("ts"), F.col("_latest")) * 3600)
        .withColumn("behind_s", F.greatest(F.coalesce("behind_s", F.lit(0.0)), F.lit(0.0)))
        .withColumn("is_late", F.col("late_s") > late_s)
        .withColumn("is_out_of_order", F.col("behind_s") > skew_s)
        .withColumn("is_ahead", F.col("late_s") < -skew_s)
    )
    return found.where(F.col("is_late") | F.col("is_out_of_order") | F.col("is_ahead")).select(
        *("topic", "space_id", "event_id", "offset", "seq", "ts", "written_at", "date", "late_s", "behind_s"),
        *("is_late", "is_out_of_order", "is_ahead"),
    )


def reconsolidations(told: DataFrame, memories: DataFrame, erased: DataFrame, context: JobContext) -> DataFrame:
    """The rollups ``told`` (``gold.rollups_told``) that have got memories since; if none was, nothing is looked through."""
    share_max = setting(context, "patch_share_max", PATCH_SHARE_MAX)
    told, count, near = held(told_rollups(told).withColumnRenamed("space_id", "_space"))
    came = living((memories if count else memories.limit(0)), erased).select("space_id", "event_id", "seq", "ts")
    is_stale = (
        (F.col("space_id") == F.col("_space"))
        & (F.col("ts") >= F.col("told_from"))
        & (F.col("ts") < F.col("told_to"))
        & (F.col("seq") > F.col("told_seq"))
    )
    known = F.greatest(F.size(F.coalesce("told_ids", F.array().cast("array<string>"))), F.lit(1))
    stale = (
        came.join(near(told), is_stale)
        .groupBy("space_id", "rollup_id", "told_period", "told_from", "told_to", "told_version", "told_seq")
        .agg(
            F.count("*").alias("late_count"),
            (F.count("*") / F.first(known)).alias("late_share"),
            F.slice(F.array_sort(F.collect_list("event_id")), 1, _LISTED_MAX).alias("event_ids"),
        )
    )
    action = F.when(F.col("late_share") < share_max, "PATCH").otherwise(F.lit("UPDATE_SUMMARY"))
    return stale.select(
        *("space_id", "rollup_id", F.col("told_period").alias("period")),
        *(F.col("told_from").alias("from_ts"), F.col("told_to").alias("to_ts")),
        *("told_version", "told_seq", "late_count", "late_share", action.alias("action"), "event_ids"),
    )


def _build_late(tables: Mapping[str, DataFrame], context: JobContext) -> Mapping[str, DataFrame]:
    skew_s, late_s = setting(context, "skew_s", _SKEW_S, above=0), setting(context, "late_s", _LATE_S, above=0)
    return {LATE_EVENTS: late_events(tables["silver.events"], skew_s=skew_s, late_s=late_s)}


def _build_stale(tables: Mapping[str, DataFrame], context: JobContext) -> Mapping[str, DataFrame]:
    if tables[ROLLUPS_TOLD].isEmpty():
        return {RECONSOLIDATIONS: tables[ROLLUPS_TOLD].sparkSession.createDataFrame([], _RECON_SCHEMA)}
    return {RECONSOLIDATIONS: reconsolidations(tables[ROLLUPS_TOLD], tables[MEMORIES], tables[ERASURES], context)}


CONSOLIDATION_LATE_JOBS: Final = (
    Job(
        name="consolidation_late",
        about="Finds late and out-of-order events (C4).",
        reads=("silver.events",),
        writes=(
            OutputTable(LATE_EVENTS, _LATE_SCHEMA, "An event that came late, out of order, or ahead of its time."),
        ),
        build=_build_late,
        partitioning=Partitioning(
            lambda _: {"silver.events": InputWindow("written_at", days_before=1)},
            lifetime_days=lambda context: setting(context, "days", _DAYS, above=0),
        ),
    ),
    Job(
        name="consolidation_stale",
        about="Finds the summaries that late memories make stale (C4).",
        reads=(ROLLUPS_TOLD, MEMORIES, ERASURES),
        writes=(
            OutputTable(
                RECONSOLIDATIONS, _RECON_SCHEMA, "A rollup that was published before all of its memories had come."
            ),
        ),
        build=_build_stale,
        settings_of="consolidation_late",
    ),
)


COMPACTION: Final = "gold.compaction_list"
REGISTRY_DAYS: Final[Mapping[str, int]] = {
    "SENSORY_FRAME": 7,
    "WORKSPACE_BROADCAST": 1,
    "HIPPO_ENCODE": 30,
    "ACTION_DECISION": 90,
    "ACTION_EXECUTED": 365,
    "PROSPECTIVE_SCHEDULE": 365,
    "LEARNING_TICK": 30,
    "TOMBSTONE_PROPAGATE": 9_999,
    "DSAR_EXPORT": 2_555,
    "ML_RUN_EVENT": 90,
    "JOB_STATUS_CHANGED": 7,
    "MEMORY_RECEIPT_CREATED": 30,
    "INTEGRATION_THING_CHANGED": 30,
    "PRESENCE_DEVICE_CHANGED": 7,
    "SAFETY_BAND_CHANGED": 365,
    "PROSPECTIVE_REMIND_TICK": 30,
    "REINDEX_REQUEST": 90,
    "USER_CREATED": 365,
    "USER_ROLE_ASSIGNED": 365,
    "USER_SPACE_ACCESS_GRANTED": 365,
    "USER_STATUS_CHANGED": 365,
}
"""How many days the registry of topics keeps events of a type."""

_RETENTION_SCHEMA: Final = (
    "topic string, space_id string, segment bigint, first_offset bigint, last_offset bigint, size_bytes bigint, "
    "is_released boolean, released_offset bigint, group_floor bigint, held_by string, reason string"
)


def released(events: DataFrame, cursors: DataFrame, context: JobContext) -> DataFrame:
    """
    One row a topic: ``topic``, ``first_offset``, ``last_offset``, ``aged_offset``, ``group_floor``, ``held_by``, ``released_offset``.

    Args:
        events: ``bronze.events``.
        cursors: ``silver.group_cursors``.
    """
    rules: dict[str, Any] = setting(context, "retention_days", {})
    days = _days_of(rules)
    # Not by adding days to a time: a rule of a million years is past the calendar's end.
    age_days = (F.unix_micros(as_of(context)) - F.unix_micros("written_at")) / F.lit(86_400_000_000)
    # Counted by topic, type and whole days of age first: then the rules are asked of some rows, and not of every event. Where a
    # rule has a part of a day, the day that it ends in counts twice: before its end and after.
    parts = sorted({float(each) for each in rules.values() if each % 1})
    is_within = [(age_days < each).alias(f"_within_{at}") for at, each in enumerate(parts)]
    is_kept = F.col("_age") < days
    for at, each in enumerate(parts):
        is_kept = F.when(days == each, F.col(f"_within_{at}")).otherwise(is_kept)
    topics = (
        events.groupBy("topic", "type", F.floor(age_days).alias("_age"), *is_within)
        .agg(F.min("offset").alias("_first"), F.max("offset").alias("_last"))
        .groupBy("topic")
        .agg(
            F.min("_first").alias("first_offset"),
            F.max("_last").alias("last_offset"),
            F.min(F.when(days.isNull() | is_kept, F.col("_first"))).alias("_kept"),
        )
        .withColumn("aged_offset", F.coalesce(F.col("_kept") - 1, F.col("last_offset")))
    )
    committed = F.when(F.col("epoch") == context.epoch, F.coalesce("committed", F.lit(-1))).otherwise(F.lit(-1))
    floors = (
        cursors.select("topic", F.col("group").alias("_group"), committed.cast("bigint").alias("_committed"))
        .groupBy("topic")
        .agg(F.min(F.struct("_committed", "_group")).alias("_lowest"))
        .select("topic", F.col("_lowest._committed").alias("group_floor"), F.col("_lowest._group").alias("_group"))
    )
    return (
        topics.join(floors, "topic", "left")
        .withColumn("released_offset", F.least("aged_offset", F.coalesce("group_floor", "aged_offset")))
        .withColumn("held_by", F.when(F.col("group_floor") < F.col("aged_offset"), F.col("_group")))
        .drop("_kept", "_group")
    )


def _days_of(rules: Mapping[str, Any]) -> Column:
    for topic, days in rules.items():
        if isinstance(days, bool) or not isinstance(days, int | float) or not days >= 0:
            raise SettingsError(f"retention_days.{topic}", f"must be a number of days, got {days!r}")
    common = rules.get("*")
    found = F.lit(None if common is None else float(common)).cast("double")
    for kind, days in REGISTRY_DAYS.items():
        found = F.when(F.col("type") == kind, F.lit(float(days))).otherwise(found)
    for topic, days in sorted(rules.items()):
        if topic != "*":
            found = F.when(F.col("topic") == topic, F.lit(float(days))).otherwise(found)
    return found


def _build_retention(tables: Mapping[str, DataFrame], context: JobContext) -> Mapping[str, DataFrame]:
    topics = released(tables["bronze.events"], tables["silver.group_cursors"], context)
    known = tables["silver.segments"].join(topics.drop("first_offset", "last_offset"), "topic", "left")
    is_read = F.col("group_floor").isNull() | (F.col("last_offset") <= F.col("group_floor"))
    is_released = F.coalesce(F.col("is_sealed") & (F.col("last_offset") <= F.col("released_offset")), F.lit(False))
    is_held = F.col("held_by").isNotNull()
    reason = (
        F.when(is_released, "read by all groups and past its time")
        .when(F.col("released_offset").isNull(), "not in the lake")
        .when(~F.col("is_sealed"), "it is being written")
        .when(~is_read & is_held, F.concat(F.lit("not read by "), F.col("held_by")))
        .otherwise(F.lit("still to be kept"))
    )
    return {
        COMPACTION: known.select(
            *("topic", "space_id", "segment", "first_offset", "last_offset", "size_bytes"),
            is_released.alias("is_released"),
            *("released_offset", "group_floor", "held_by"),
            reason.alias("reason"),
        )
    }


CONSOLIDATION_RETENTION_JOBS: Final = (
    Job(
        name="consolidation_retention",
        about="Lists the segments of the log that all groups have read and whose time has passed (C5).",
        reads=("bronze.events", "silver.group_cursors", "silver.segments"),
        writes=(OutputTable(COMPACTION, _RETENTION_SCHEMA, "A segment of the log, and whether it may go."),),
        build=_build_retention,
    ),
)


SCRUB: Final = "gold.scrub_list"
_SCRUB_SCHEMA: Final = (
    "table string, space_id string, row_key string, hash string, object_type string, object_id string, "
    "erased_by string, erased_seq bigint, issued_at timestamp, action string"
)
_READS: Final = (
    *("silver.events", ERASURES, INDEX, FEATURES, RECENCY, DAYS, PATTERNS, CANDIDATES),
    *(DUPLICATES, KEEP_SCORES, ROLLUPS),
)

_OF_PEOPLE: Final = {PATTERNS: "concat_ws('|', scope, person_id)", DAYS: "concat_ws('|', person_id, local_date)"}
_KEPT_TOPICS: Final = ("access", "audit")
_ROW: Final = ("table", "space_id", "row_key")
_ERASURE: Final = ("object_type", "object_id", "erased_by", "erased_seq", "issued_at")


def named_rows(tables: Mapping[str, DataFrame]) -> DataFrame:
    """One row for each row of a table and each memory it names: ``table``, ``space_id``, ``row_key``, ``_named``."""
    told = _scrubbed(tables["silver.events"])
    about = F.when(F.col("topic").isin("temporal", "affect"), text("event_id"))
    pair = F.array("event_id", "kept_event_id")
    parts = [
        _named("silver.events", told, F.col("event_id"), F.array(F.col("event_id"), about)),
        _named(INDEX, tables[INDEX], F.col("hash"), F.array("doc_id")),
        _named(FEATURES, tables[FEATURES], _moment("event_id"), F.array("event_id")),
        _named(RECENCY, tables[RECENCY], _moment("event_id"), F.array("event_id")),
        _named(CANDIDATES, tables[CANDIDATES], F.concat_ws("|", "request_id", "event_id"), F.array("event_id")),
        _named(DUPLICATES, tables[DUPLICATES], F.concat_ws("|", "event_id", "kept_event_id"), pair),
        _named(KEEP_SCORES, tables[KEEP_SCORES], F.col("event_id"), F.array("event_id")),
        _named(ROLLUPS, tables[ROLLUPS], F.col("rollup_id"), F.col("provenance.event_ids")),
    ]
    return reduce(DataFrame.unionByName, parts)


def _scrubbed(events: DataFrame) -> DataFrame:
    """The events that may go. What erases is the reason for the deletion, and stays."""
    return events.where(~F.col("type").isin(*ERASURE_TYPES) & ~F.col("topic").isin(*_KEPT_TOPICS))


def _moment(id_column: str) -> Column:
    return F.concat_ws("|", F.col(id_column), iso(F.col("ts")))


def _named(table: str, rows: DataFrame, key: Column, ids: Column) -> DataFrame:
    return rows.select(
        F.lit(table).alias("table"),
        "space_id",
        key.alias("row_key"),
        F.explode(F.array_distinct(F.array_compact(ids))).alias("_named"),
    )


def _build_scrub(tables: Mapping[str, DataFrame], context: JobContext) -> Mapping[str, DataFrame]:
    events = tables["silver.events"]
    if tables[ERASURES].isEmpty():  # nothing to look for, in nine tables
        return {SCRUB: events.sparkSession.createDataFrame([], _SCRUB_SCHEMA)}
    erasure = F.struct("erased_seq", *[name for name in _ERASURE if name != "erased_seq"]).alias("erasure")
    erased = tables[ERASURES].select("space_id", "is_person", F.col("object_id").alias("_named"), erasure)
    objects, people = erased.where(~F.col("is_person")), erased.where(F.col("is_person"))
    # What is looked for, each with the first erasure that asks for it: objects, memories of people, and the people.
    of_people = _memories_of_people(events).join(
        people.withColumnRenamed("_named", "named_person"), ["space_id", "named_person"]
    )
    theirs = of_people.where(F.col("seq") < F.col("erasure.erased_seq")).select(
        "space_id", F.col("named_id").alias("_named"), "erasure"
    )
    wanted = (
        objects.select("space_id", "_named", "erasure")
        .unionByName(theirs)
        .groupBy("space_id", "_named")
        .agg(F.min("erasure").alias("erasure"))
    )
    # A row about a person as such goes if nothing was committed of them since.
    came_back = of_people.where((F.col("seq") > F.col("erasure.erased_seq")) & ~F.col("is_summary")).select(
        "space_id", F.col("named_person").alias("_named"), "erasure"
    )
    gone = (
        people.select("space_id", "_named", "erasure")
        .join(came_back, ["space_id", "_named", "erasure"], "left_anti")
        .groupBy("space_id", "_named")
        .agg(F.min("erasure").alias("erasure"))
    )
    rows = named_rows(tables)
    about_people = reduce(
        DataFrame.unionByName,
        (
            tables[table].select(
                F.lit(table).alias("table"),
                "space_id",
                F.expr(key).alias("row_key"),
                F.col("person_id").alias("_named"),
            )
            for table, key in _OF_PEOPLE.items()
        ),
    )
    listed = rows.join(wanted, ["space_id", "_named"]).unionByName(about_people.join(gone, ["space_id", "_named"]))
    action = F.when(F.col("table") == ROLLUPS, "rebuild").otherwise(F.lit("delete"))
    return {
        SCRUB: listed.groupBy(*_ROW)
        .agg(F.min("erasure").alias("erasure"))
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


def _summarise(tables: Mapping[str, DataFrame], context: JobContext) -> Iterable[Event]:
    counts = (
        tables[SCRUB]
        .groupBy("space_id", "erased_by", "object_type", "table", "action")
        .agg(
            F.min("erased_seq").alias("erased_seq"),
            F.count("*").alias("rows"),
            F.lower(F.hex(F.bit_xor(F.xxhash64("hash")))).alias("checksum"),
        )
    )
    rows = counts.groupBy("space_id", "erased_by", "object_type").agg(
        F.min("erased_seq").alias("_at"),
        F.array_sort(F.collect_list(F.struct("table", "action", "rows", "checksum"))).alias("tables"),
    )
    return summaries(CONSOLIDATION_TOPIC, "SCRUB_LISTED", rows, context, order=("_at", "space_id", "erased_by"))


CONSOLIDATION_SCRUB_JOBS: Final = (
    Job(
        name="consolidation_scrub",
        about="Lists the rows of the lake that name what was erased, with an audit record (C6).",
        reads=_READS,
        writes=(
            OutputTable(
                SCRUB, _SCRUB_SCHEMA, "A row of a table that names what was erased, and what is to be done with it."
            ),
        ),
        build=_build_scrub,
        summarise=_summarise,
    ),
)


JOBS: Final = (*CONSOLIDATION_LATE_JOBS, *CONSOLIDATION_RETENTION_JOBS, *CONSOLIDATION_SCRUB_JOBS)
