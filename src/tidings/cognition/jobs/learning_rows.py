"""
Training rows: what was known at the time, and what came of it.

L1 ``gold.learning_actions``: a decision, the last affect and report before it, its features and its outcome.
L2 ``gold.learning_ranker``: documents that were shown, with sampled negatives; ``gold.learning_impressions``: the lists.
L3 ``gold.learning_predictions``: each head of a prediction with the first outcome after it.

Nothing from after a decision leaks in, and nothing is learnt from what was erased.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping
from typing import Any, Final

import pyarrow as pa  # type: ignore[import-untyped]
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from tidings.pipeline.jobs.job import (
    InputWindow,
    Job,
    JobContext,
    OutputTable,
    Partitioning,
    setting,
    shaped,
    whole_days,
)

from .consolidation_memories import ALL_ERASURES, ERASURES
from .learning_columns import AsOf, learnable, of_type, with_outcome
from .learning_math import PROBABILITY_FLOOR
from .learning_told import ACTIONS_TYPES, PREDICTIONS_TYPES, RANKER_TYPES, TOLD

ACTIONS_WINDOW_S: Final = 3600
LOOKBACK_S: Final = 3600
REPORT_LOOKBACK_S: Final = 172_800
_OWN_FEATURES: Final = ("bias", "confidence", "risk", "margin", "arousal", "valence", "surprise")
ACTIONS_OUTPUT: Final = OutputTable(
    table="gold.learning_actions",
    schema=(
        "row_id string, space_id string, date date, action string, decided_at timestamp, y double, outcome_status string,"
        " latency_ms double, features map<string,double>, arousal double, valence double, surprise double, brier double,"
        " decision_topic string, decision_offset bigint, decision_seq bigint, outcome_topic string, outcome_offset bigint,"
        " outcome_seq bigint, affect_seq bigint, metacog_seq bigint"
    ),
    about="One decision: what was known when it was made, and whether what it led to succeeded (null: not known yet).",
)


def action_rows(
    told: DataFrame,
    *,
    window_s: int = ACTIONS_WINDOW_S,
    lookback_s: int = LOOKBACK_S,
    report_lookback_s: int = REPORT_LOOKBACK_S,
) -> DataFrame:
    """
    Training rows from decisions.

    ``y`` is 1 for success (``success`` true, or ``status`` OK), 0 for anything else that was executed, and null where nothing
    was within the window. A partial success is no success.

    Args:
        told: ``gold.learning_told``.
        window_s: How long after a decision its outcome counts.
        lookback_s: How old affect may be.
        report_lookback_s: How old a self-assessment may be; these come a few a day.
    """
    said = of_type(told, *ACTIONS_TYPES).select(
        F.col("event_id").alias("row_id"),
        *("space_id", "ts", "seq", "offset", "topic", "type", "plans"),
        *("action", "confidence", "risk", "best_alternative", F.col("features").alias("given")),
        *(F.coalesce("y", F.lit(0.0)).alias("y"), "status", "latency_ms", "arousal", "valence", "surprise", "brier"),
    )
    known = said.groupBy("space_id").applyInArrow(_known_then(window_s, lookback_s, report_lookback_s), _KNOWN)
    return _with_features(known)


_KNOWN: Final = (
    "row_id string, space_id string, ts timestamp, seq bigint, offset bigint, topic string, action string,"
    " confidence double, risk double, best_alternative double, given map<string,double>,"
    " affect_seq bigint, arousal double, valence double, metacog_seq bigint, surprise double, brier double,"
    " done_seq bigint, done_topic string, done_offset bigint, y double, status string, latency_ms double"
)
_OWN: Final = ("row_id", "space_id", "ts", "seq", "offset", "topic", "action", "confidence", "risk", "best_alternative")
_AFFECT: Final = {"affect_seq": "seq", "arousal": "arousal", "valence": "valence"}
_REPORT: Final = {"metacog_seq": "seq", "surprise": "surprise", "brier": "brier"}
_DONE: Final = {
    "done_seq": "seq",
    "done_topic": "topic",
    "done_offset": "offset",
    "y": "y",
    "status": "status",
    "latency_ms": "latency_ms",
}


def _known_then(window_s: int, lookback_s: int, report_lookback_s: int) -> Callable[[Any], Any]:
    """Of the events of one space: its decisions, each with the affect and the report known then, and its outcome."""

    def match(table: Any) -> Any:
        order = sorted(range(table.num_rows), key=table["seq"].to_pylist().__getitem__)
        kinds, keys = table["type"].to_pylist(), table["plans"].to_pylist()
        times = [micros / 1e6 for micros in table["ts"].cast(pa.int64()).to_pylist()]
        facts = {"affect": AsOf(lookback_s), "report": AsOf(report_lookback_s)}
        waiting: dict[str, list[tuple[float, int]]] = {}
        outcome: dict[int, int] = {}
        decisions, affects, reports = [], [], []
        for row in order:
            at = times[row]
            if kinds[row] == "ACTION_DECISION":
                decisions.append(row)
                affects.append(facts["affect"].known(at))
                reports.append(facts["report"].known(at))
                for key in keys[row]:
                    bisect.insort(waiting.setdefault(key, []), (at, row))
            elif kinds[row] == "ACTION_EXECUTED":
                for asked in (waiting.get(key, []) for key in keys[row] if key is not None):
                    first, last = (
                        bisect.bisect_left(asked, (at - window_s, 0)),
                        bisect.bisect_right(asked, (at, table.num_rows)),
                    )
                    for _, decision in asked[first:last]:
                        if at < times[outcome.setdefault(decision, row)]:
                            outcome[decision] = row
            else:
                facts["report" if kinds[row] == "METACOG_REPORT" else "affect"].add(at, row)
        done = [outcome.get(row) for row in decisions]
        columns = {name: table[name].take(pa.array(decisions, pa.int64())) for name in (*_OWN, "given")}
        for rows, names in ((affects, _AFFECT), (reports, _REPORT), (done, _DONE)):
            places = pa.array(rows, pa.int64())
            columns |= {called: table[name].take(places) for called, name in names.items()}
        return pa.table(columns)

    return match


def _with_features(rows: DataFrame) -> DataFrame:
    own = {
        "bias": F.lit(1.0),
        "confidence": F.col("confidence"),
        "risk": F.col("risk"),
        "margin": F.col("confidence") - F.col("best_alternative"),
        "arousal": F.col("arousal"),
        "valence": F.col("valence"),
        "surprise": F.col("surprise"),
    }
    pairs = [part for name in _OWN_FEATURES for part in (F.lit(name), own[name])]
    known = F.map_filter(F.create_map(*pairs), lambda _, found: found.isNotNull())
    # A producer's feature of the same name as one of ours gives way: two meanings under one weight teach nothing.
    given = F.map_filter("given", lambda name, _: ~name.isin(*_OWN_FEATURES))
    return rows.select(
        "row_id",
        "space_id",
        F.to_date("ts").alias("date"),
        "action",
        F.col("ts").alias("decided_at"),
        "y",
        F.col("status").alias("outcome_status"),
        "latency_ms",
        F.map_concat(known, given).alias("features"),
        "arousal",
        "valence",
        "surprise",
        "brier",
        F.col("topic").alias("decision_topic"),
        F.col("offset").alias("decision_offset"),
        F.col("seq").alias("decision_seq"),
        F.col("done_topic").alias("outcome_topic"),
        F.col("done_offset").alias("outcome_offset"),
        F.col("done_seq").alias("outcome_seq"),
        "affect_seq",
        "metacog_seq",
    )


def _build_actions(tables: Mapping[str, DataFrame], context: JobContext) -> Mapping[str, DataFrame]:
    rows = action_rows(
        learnable(tables[TOLD.table], tables[ERASURES]),
        window_s=setting(context, "action_window_s", ACTIONS_WINDOW_S),
        lookback_s=setting(context, "lookback_s", LOOKBACK_S),
        report_lookback_s=setting(context, "report_lookback_s", REPORT_LOOKBACK_S),
    )
    return {ACTIONS_OUTPUT.table: shaped(rows, ACTIONS_OUTPUT)}


def _windows_actions(context: JobContext) -> Mapping[str, InputWindow]:
    known_s = max(setting(context, "lookback_s", LOOKBACK_S), setting(context, "report_lookback_s", REPORT_LOOKBACK_S))
    window_s = setting(context, "action_window_s", ACTIONS_WINDOW_S)
    return {
        TOLD.table: InputWindow(
            "ts", days_before=whole_days(known_s), days_after=whole_days(window_s), types=ACTIONS_TYPES
        ),
        **ALL_ERASURES,
    }


LEARNING_ACTIONS_JOBS: Final = (
    Job(
        name="learning_actions",
        about="L1: decisions with what was known then and what came of them.",
        reads=(TOLD.table, ERASURES),
        writes=(ACTIONS_OUTPUT,),
        build=_build_actions,
        partitioning=Partitioning(_windows_actions),
    ),
)


CLICK_WINDOW_S: Final = 3600
NEGATIVES_PER_POSITIVE: Final = 4
NEGATIVES_MIN: Final = 2
ROWS: Final = OutputTable(
    table="gold.learning_ranker",
    schema=(
        "row_id string, space_id string, date date, query_id string, doc_id string, position int, score double,"
        " y double, weight double, features map<string,double>, shown_at timestamp, impression_topic string,"
        " impression_offset bigint, impression_seq bigint, click_seq bigint"
    ),
    about="One document that was shown: clicked (y = 1), or one of the sampled rest.",
)
IMPRESSIONS: Final = OutputTable(
    table="gold.learning_impressions",
    schema=(
        "impression_id string, space_id string, date date, query_id string, shown_at timestamp, shown bigint,"
        " clicked bigint, first_click_position int, impression_seq bigint"
    ),
    about="One list of results: how many documents it showed and how many were clicked.",
)


def shown_lists(told: DataFrame, *, click_window_s: int = CLICK_WINDOW_S) -> DataFrame:
    """
    Every list of results with its ``documents``. Only a click after the impression, in time and in the log, counts.

    Of a document listed twice the first place counts.
    """
    lists = of_type(told, "RETRIEVAL_IMPRESSION").select(
        *(F.col("event_id").alias("impression_id"), "date", "ts", "seq", "topic", "offset", "space_id", "query_id"),
        F.col("documents").alias("items"),
    )
    clicks = (
        of_type(told, "RETRIEVAL_CLICK")
        .select("space_id", "query_id", F.struct("seq", "doc_id", F.unix_micros("ts").alias("us")).alias("click"))
        .groupBy("space_id", "query_id")
        .agg(F.collect_list("click").alias("clicks"))
    )

    def click_seq(doc_id: Column) -> Column:
        counts = F.filter(
            "clicks",
            lambda click: (
                (click["doc_id"] == doc_id)
                & (click["seq"] > F.col("seq"))
                & (click["us"] - F.unix_micros("ts")).between(0, click_window_s * 1_000_000)
            ),
        )
        return F.array_min(F.transform(counts, lambda click: click["seq"]))

    documents = F.transform(
        "items",
        lambda each, place: F.struct(
            each["doc_id"].alias("doc_id"),
            place.alias("position"),
            each["score"].alias("score"),
            each["features"].alias("given"),
            click_seq(each["doc_id"]).alias("click_seq"),
        ),
    )
    doc_ids = F.transform("items", lambda each: each["doc_id"])
    first = F.filter(documents, lambda each, place: F.array_position(doc_ids, each["doc_id"]) == place + 1)
    return (
        lists.where("query_id is not null and exists(items, each -> each.doc_id is not null)")
        .join(clicks, ["space_id", "query_id"], "left")
        .withColumn("documents", first)
        .withColumn("clicked", F.filter("documents", lambda each: each["click_seq"].isNotNull()))
        .drop("items", "clicks")
    )


def ranker_rows(
    lists: DataFrame, *, per_positive: int = NEGATIVES_PER_POSITIVE, negatives_min: int = NEGATIVES_MIN
) -> DataFrame:
    """
    All clicked documents, and of each list ``per_positive`` others a click, at least ``negatives_min``.

    Which ones depends on a hash of query and document alone. Their weight is how many each of them stands for.
    """
    others = F.transform(
        F.filter("documents", lambda each: each["click_seq"].isNull()),
        lambda each: F.struct(
            F.sha2(F.concat_ws("\u001f", "space_id", "query_id", each["doc_id"]), 256).alias("chance"),
            each.alias("document"),
        ),
    )
    by_chance = F.array_sort(
        "_others",
        lambda one, other: (
            F.when(one["chance"] < other["chance"], -1).when(one["chance"] > other["chance"], 1).otherwise(0)
        ),
    )
    kept = F.least(F.size("_others"), F.greatest(F.lit(negatives_min), F.size("clicked") * per_positive))
    sampled = F.transform(F.slice(by_chance, 1, F.col("_kept")), lambda each: each["document"])
    given = F.map_filter("given", lambda name, _: ~name.isin("bias", "score", "position"))
    own = F.create_map(
        F.lit("bias"), F.lit(1.0), F.lit("score"), F.coalesce(F.col("score"), F.lit(0.0)), F.lit("position"), _decay()
    )
    y = F.when(F.col("click_seq").isNotNull(), 1.0).otherwise(0.0)
    return (
        lists.withColumn("_others", others)
        .withColumn("_kept", kept)
        .select("*", F.inline(F.concat("clicked", sampled)))
        .select(
            F.concat_ws(":", "impression_id", "doc_id").alias("row_id"),
            *("space_id", "date", "query_id", "doc_id", "position", "score", y.alias("y")),
            F.when(y == 1, 1.0).otherwise(F.size("_others") / F.col("_kept")).alias("weight"),
            F.map_concat(own, given).alias("features"),
            F.col("ts").alias("shown_at"),
            F.col("topic").alias("impression_topic"),
            F.col("offset").alias("impression_offset"),
            F.col("seq").alias("impression_seq"),
            "click_seq",
        )
    )


def impression_rows(lists: DataFrame) -> DataFrame:
    """Each list of results with its counts."""
    return lists.select(
        *("impression_id", "space_id", "date", "query_id", F.col("ts").alias("shown_at")),
        F.col("seq").alias("impression_seq"),
        F.size("documents").alias("shown"),
        F.size("clicked").alias("clicked"),
        F.array_min(F.transform("clicked", lambda each: each["position"])).alias("first_click_position"),
    )


def _decay() -> Column:
    # How much of a reader's eye a place gets, as the usual discount has it; a plain number would grow without bound.
    return 1.0 / F.log2(F.col("position") + 2.0)


def _build_ranker(tables: Mapping[str, DataFrame], context: JobContext) -> Mapping[str, DataFrame]:
    # Both tables are made of it.
    lists = shown_lists(
        learnable(tables[TOLD.table], tables[ERASURES]),
        click_window_s=setting(context, "click_window_s", CLICK_WINDOW_S),
    ).localCheckpoint(eager=False)
    rows = ranker_rows(
        lists,
        per_positive=setting(context, "negatives_per_positive", NEGATIVES_PER_POSITIVE),
        negatives_min=max(1, setting(context, "negatives_min", NEGATIVES_MIN)),
    )
    return {ROWS.table: shaped(rows, ROWS), IMPRESSIONS.table: shaped(impression_rows(lists), IMPRESSIONS)}


def _windows_ranker(context: JobContext) -> Mapping[str, InputWindow]:
    window_s = setting(context, "click_window_s", CLICK_WINDOW_S)
    return {TOLD.table: InputWindow("ts", days_after=whole_days(window_s), types=RANKER_TYPES), **ALL_ERASURES}


LEARNING_RANKER_JOBS: Final = (
    Job(
        name="learning_ranker",
        about="L2: documents shown, clicked or not, with sampled negatives.",
        reads=(TOLD.table, ERASURES),
        writes=(ROWS, IMPRESSIONS),
        build=_build_ranker,
        partitioning=Partitioning(_windows_ranker),
    ),
)


PREDICTIONS_WINDOW_S: Final = 86_400
PREDICTIONS_OUTPUT: Final = OutputTable(
    table="gold.learning_predictions",
    schema=(
        "row_id string, space_id string, date date, head string, p double, z double, y double, predicted_at timestamp,"
        " features map<string,double>, prediction_topic string, prediction_offset bigint, prediction_seq bigint,"
        " outcome_topic string, outcome_offset bigint, outcome_seq bigint, outcome_id string"
    ),
    about="One head of one prediction: what it said, and what came of it (null: not known yet).",
)


def prediction_rows(told: DataFrame, *, window_s: int = PREDICTIONS_WINDOW_S) -> DataFrame:
    """
    Calibration rows.

    ``p`` is the head's value, where that is a probability; other heads are left out. ``z`` is the score that was given with it,
    otherwise the logit of ``p``.

    Args:
        told: ``gold.learning_told``.
        window_s: How long after a prediction its outcome counts.
    """
    said = of_type(told, "CORTEX_PREDICTION").select(
        *("event_id", "space_id", "date", "ts", "seq", "topic", "offset", "keys", "features", F.inline("heads"))
    )
    held = F.least(F.greatest(F.col("p"), F.lit(PROBABILITY_FLOOR)), F.lit(1 - PROBABILITY_FLOOR))
    said = said.withColumn("z", F.coalesce("z", F.log(held / (1 - held))))
    is_of_head = F.col("outcome_head").isNull() | (F.col("outcome_head") == F.col("head"))
    return with_outcome(said, told, ("seq", "head"), window_s, is_of_head).select(
        F.concat_ws(":", "event_id", "head").alias("row_id"),
        "space_id",
        "date",
        "head",
        "p",
        "z",
        "found.y",
        F.col("ts").alias("predicted_at"),
        "features",
        F.col("topic").alias("prediction_topic"),
        F.col("offset").alias("prediction_offset"),
        F.col("seq").alias("prediction_seq"),
        "found.outcome_topic",
        "found.outcome_offset",
        "found.outcome_seq",
        "found.outcome_id",
    )


def _build_predictions(tables: Mapping[str, DataFrame], context: JobContext) -> Mapping[str, DataFrame]:
    rows = prediction_rows(
        learnable(tables[TOLD.table], tables[ERASURES]),
        window_s=setting(context, "prediction_window_s", PREDICTIONS_WINDOW_S),
    )
    return {PREDICTIONS_OUTPUT.table: shaped(rows, PREDICTIONS_OUTPUT)}


def _windows_predictions(context: JobContext) -> Mapping[str, InputWindow]:
    window_s = setting(context, "prediction_window_s", PREDICTIONS_WINDOW_S)
    return {
        TOLD.table: InputWindow("ts", days_after=whole_days(window_s), types=PREDICTIONS_TYPES),
        **ALL_ERASURES,
    }


LEARNING_PREDICTIONS_JOBS: Final = (
    Job(
        name="learning_predictions",
        about="L3: what heads predicted against what came of it.",
        reads=(TOLD.table, ERASURES),
        writes=(PREDICTIONS_OUTPUT,),
        build=_build_predictions,
        partitioning=Partitioning(_windows_predictions),
    ),
)


JOBS: Final = (*LEARNING_ACTIONS_JOBS, *LEARNING_RANKER_JOBS, *LEARNING_PREDICTIONS_JOBS)
