"""
The job set ``ledger``: what the ledger told and held.

``silver.happenings``: every happening, one row each, by variant; ``silver.ledger_records``: the records that told them.
``gold.custody_timelines``: one row a custody, from the first report or its taking to its release. ``gold.relation_history``: from which seq of the
log to which each relation was there, with its claimants; so the graph as of any seq is the rows with ``from_seq <= seq`` and no ``to_seq`` up to it.
``gold.admin_actions``: what administrators did.

The last two are made by executing the commands of the log again, with the ledger's own code, in one task that holds the state and not the
history. Commands of parts that users have added are passed over.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from tidings.happenings.description import describe_variants
from tidings.ledger.records import LEDGER_TOPIC

from .job import InputWindow, Job, JobContext, OutputTable, Partitioning, shaped

if TYPE_CHECKING:
    import pyarrow as pa  # type: ignore[import-untyped]

_HAPPENINGS: Final = OutputTable(
    table="silver.happenings",
    schema=(
        "seq bigint, happening_seq bigint, variant string, at timestamp, plugin string, shelf string,"
        " subjects array<string>, happening string"
    ),
    about="One happening: its own seq, its variant, the plugin and shelf that filters compare, the subjects it touches, and its JSON.",
)
_RECORDS: Final = OutputTable(
    table="silver.ledger_records",
    schema="seq bigint, offset bigint, payload string",
    about="One record of the ledger as the log has it, so that they are found without going through all events.",
)
_RECORD: Final = "at_ms bigint, seq bigint, happenings array<string>"


def records_of(events: DataFrame) -> DataFrame:
    """The records of the ledger."""
    return events.where((F.col("topic") == LEDGER_TOPIC) & F.col("type").startswith("ledger."))


def happenings(records: DataFrame) -> DataFrame:
    """The happenings in the ledger's records, by their own seq."""
    told = records.select("seq", F.from_json("payload", _RECORD).alias("record")).select(
        "seq",
        F.col("record.seq").alias("first_seq"),
        F.col("record.at_ms").alias("at_ms"),
        F.posexplode("record.happenings").alias("place", "happening"),
    )
    named = told.select(
        "seq",
        (F.col("first_seq") + F.col("place")).alias("happening_seq"),
        F.get_json_object("happening", "$.type").alias("variant"),
        F.timestamp_millis(F.coalesce(_member("at_ms").cast("bigint"), "at_ms")).alias("at"),
        "happening",
    )
    by_plugin: defaultdict[str, list[str]] = defaultdict(list)
    by_shelf: defaultdict[str, list[str]] = defaultdict(list)
    by_subjects: defaultdict[tuple[tuple[str, bool], ...], list[str]] = defaultdict(list)
    for each in describe_variants():
        forms = {field.name: field.form for field in each.fields}
        if each.plugin is not None:
            by_plugin[each.plugin].append(each.name)
        if each.shelf is not None:
            by_shelf[each.shelf].append(each.name)
        by_subjects[tuple((name, forms[name].startswith("list of")) for name in each.subjects)].append(each.name)
    return named.select(
        "*",
        _by_variant({tuple(names): _member(field) for field, names in by_plugin.items()}).alias("plugin"),
        _by_variant({tuple(names): _member(field) for field, names in by_shelf.items()}).alias("shelf"),
        _by_variant({tuple(names): _ids(fields) for fields, names in by_subjects.items()}).alias("subjects"),
    )


def _member(name: str) -> Column:
    return F.get_json_object("happening", f"$.{name}")


def _ids(fields: tuple[tuple[str, bool], ...]) -> Column:
    """The ids in these fields, each with whether it holds a list."""
    lists = [
        F.coalesce(F.from_json(_member(name), "array<string>"), F.array().cast("array<string>"))
        if is_list
        else F.array(_member(name))
        for name, is_list in fields
    ]
    return F.array_compact(F.concat(*lists)) if lists else F.array().cast("array<string>")


def _by_variant(values: Mapping[tuple[str, ...], Column]) -> Column:
    return F.coalesce(*(F.when(F.col("variant").isin(*names), value) for names, value in values.items()))


_CUSTODIES: Final = OutputTable(
    table="gold.custody_timelines",
    schema=(
        "plugin string, handle_id string, shelf string, custody_type string, began_at timestamp, taken_at timestamp,"
        " released_at timestamp, held_s double, reports bigint, last_health string, last_reported_at timestamp,"
        " failure string, failure_reason string, first_happening_seq bigint, last_happening_seq bigint"
    ),
    about="One custody: when it was taken and released, how often its state was reported and how it was last, and what failed.",
)
_CUSTODY_VARIANTS: Final = (
    *("custody_taken", "custody_released", "custody_state_reported"),
    *("custody_aborted", "custody_degraded"),
)


def custody_timelines(told: DataFrame) -> DataFrame:
    """One row from taking to release; a handle that is taken again has another row. A report may come before the taking it belongs to."""
    of_handle = Window.partitionBy("plugin", "handle_id").orderBy("happening_seq")
    before = of_handle.rowsBetween(Window.unboundedPreceding, -1)
    custody = told.where(F.col("variant").isin(*_CUSTODY_VARIANTS)).withColumn("handle_id", _member("handle_id"))
    numbered = custody.withColumn(
        "number", F.coalesce(F.count_if(F.col("variant") == "custody_released").over(before), F.lit(0))
    )

    def when(variant: str, value: Column) -> Column:
        return F.when(F.col("variant") == variant, value)

    failed = F.col("variant").isin("custody_aborted", "custody_degraded")
    at, order = F.col("at"), F.col("happening_seq")
    return (
        numbered.groupBy("plugin", "handle_id", "number")
        .agg(
            F.max(when("custody_taken", F.col("shelf"))).alias("shelf"),
            F.max(when("custody_taken", _member("custody_type"))).alias("custody_type"),
            F.min("at").alias("began_at"),
            F.min(when("custody_taken", at)).alias("taken_at"),
            F.max(when("custody_released", at)).alias("released_at"),
            F.count_if(F.col("variant") == "custody_state_reported").alias("reports"),
            F.max_by(_member("health"), when("custody_state_reported", order)).alias("last_health"),
            F.max(when("custody_state_reported", at)).alias("last_reported_at"),
            F.max_by(F.regexp_replace("variant", "^custody_", ""), F.when(failed, order)).alias("failure"),
            F.max_by(_member("reason"), F.when(failed, order)).alias("failure_reason"),
            F.min("happening_seq").alias("first_happening_seq"),
            F.max("happening_seq").alias("last_happening_seq"),
        )
        .withColumn("held_s", (F.unix_millis("released_at") - F.unix_millis("taken_at")) / F.lit(1000.0))
    )


_RELATIONS: Final = OutputTable(
    table="gold.relation_history",
    schema=(
        "source_id string, predicate string, target_id string, from_seq bigint, to_seq bigint, from_at timestamp,"
        " to_at timestamp, claimants array<string>, is_suppressed boolean"
    ),
    about="A relation with its claimants, from the log's seq that made it so to the one that changed it; no end: it is so now.",
)
_ACTIONS: Final = OutputTable(
    table="gold.admin_actions",
    schema=(
        "seq bigint, admin_plugin string, kind string, at timestamp, target_plugin string, target_subject string,"
        " target string, additional_subjects array<string>, reason string, prior_reason string"
    ),
    about="What an administrator did, to what, and why.",
)
_FOLDED: Final = (
    "source_id string, predicate string, target_id string, from_seq bigint, to_seq bigint, from_ms bigint, to_ms bigint,"
    " claimants array<string>, is_suppressed boolean, action string"
)


def folded(records: DataFrame) -> DataFrame:
    """The commands of the ledger, executed again: relations with their times, and what administrators did (``action``, as JSON)."""
    in_order = records.select("offset", "seq", "payload").repartition(1).sortWithinPartitions("offset")
    return in_order.mapInArrow(_fold, _FOLDED)


def _fold(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Runs in a Spark task: all records in order, of which only the state is kept."""
    from .ledger_fold import fold_records

    return fold_records(batches)


def _build_happenings(tables: Mapping[str, DataFrame], context: JobContext) -> Mapping[str, DataFrame]:
    records = records_of(tables["silver.events"])
    return {
        _HAPPENINGS.table: shaped(happenings(records), _HAPPENINGS),
        _RECORDS.table: shaped(records, _RECORDS),
    }


def _build_custodies(tables: Mapping[str, DataFrame], context: JobContext) -> Mapping[str, DataFrame]:
    return {_CUSTODIES.table: shaped(custody_timelines(tables[_HAPPENINGS.table]), _CUSTODIES)}


def _build_state(tables: Mapping[str, DataFrame], context: JobContext) -> Mapping[str, DataFrame]:
    found = folded(tables[_RECORDS.table])
    relations = found.where(F.col("action").isNull()).select(
        "*", F.timestamp_millis("from_ms").alias("from_at"), F.timestamp_millis("to_ms").alias("to_at")
    )

    def entry(name: str) -> Column:
        return F.get_json_object("action", f"$.{name}")

    actions = found.where(F.col("action").isNotNull()).select(
        F.col("from_seq").alias("seq"),
        F.timestamp_millis("from_ms").alias("at"),
        *(entry(name).alias(name) for name in ("admin_plugin", "kind", "target_plugin", "target_subject", "reason")),
        entry("prior_reason").alias("prior_reason"),
        F.coalesce(entry("target_addressing"), entry("target_relation")).alias("target"),
        F.coalesce(F.from_json(entry("additional_subjects"), "array<string>"), F.array().cast("array<string>")).alias(
            "additional_subjects"
        ),
    )
    return {_RELATIONS.table: shaped(relations, _RELATIONS), _ACTIONS.table: shaped(actions, _ACTIONS)}


JOBS: Final = (
    Job(
        name="happenings",
        about="Takes the ledger's records out of the log, and the happenings out of them.",
        reads=("silver.events",),
        writes=(_HAPPENINGS, _RECORDS),
        build=_build_happenings,
        partitioning=Partitioning(
            lambda _: {"silver.events": InputWindow("seq", topics=(LEDGER_TOPIC,))}, seq_column="seq"
        ),
    ),
    Job(
        name="custody_timelines",
        about="Puts the happenings of each custody together.",
        reads=(_HAPPENINGS.table,),
        writes=(_CUSTODIES,),
        build=_build_custodies,
    ),
    Job(
        name="ledger_state",
        about="Executes the ledger's commands again: when each relation was there, and what administrators did.",
        reads=(_RECORDS.table,),
        writes=(_RELATIONS, _ACTIONS),
        build=_build_state,
    ),
)
