"""
L4, ``gold.learning_fits``: weights for decisions and ranking, calibrations for heads, a fit a space.

Each space is fitted by one task, on its most recent rows in the order of time, each row at its own learning rate. A fit stands
until a tenth of what it was made from is new, or something was erased in its space: so a run costs what is new. What is good
enough is published as a setting (``UTILITY_WEIGHTS_UPDATE``, ``RANKER_WEIGHT_UPDATE``, ``CALIBRATION_UPDATE``, ``HABIT_TUNE``), and every
fit as ``ML_RUN_EVENT``: train, eval and, where it was, promote. The numbers in events are rounded to nine digits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import pyarrow as pa  # type: ignore[import-untyped]
from pyspark.sql import Column, DataFrame, Row, Window
from pyspark.sql import functions as F

from tidings.core.events import Event
from tidings.pipeline.jobs.job import Job, JobContext, OutputTable, setting, shaped

from .columns import held
from .consolidation_memories import ERASURES
from .learning_columns import LEARNING_TOPIC, summary_event, time_of
from .learning_math import FitSettings, TrainingRow, fit_calibration, fit_weights

ROWS_MAX: Final = 20_000
REFIT_SHARE: Final = 0.1
_OF: Final = ("set_name", "space_id")
_DIGITS: Final = 9
FITS: Final = OutputTable(
    table="gold.learning_fits",
    schema=(
        "set_name string, space_id string, model string, weights map<string,double>, platt_a double, platt_b double,"
        " temperature double, rows bigint, rows_train bigint, rows_eval bigint, rate_mean double, is_clipped boolean,"
        " loss_train double, loss_eval double, loss_temperature double, loss_baseline double, brier_eval double,"
        " brier_baseline double, ece_eval double, is_promoted boolean, first_at timestamp, last_at timestamp,"
        " last_seq bigint, dataset string"
    ),
    about="One fit: the weights or the calibration of one space, how it did on later rows, and what it was fitted on.",
)
HABITS: Final = OutputTable(
    table="gold.learning_habits",
    schema=(
        "space_id string, action string, tries bigint, successes double, strength double, latency_ms_mean double,"
        " last_at timestamp"
    ),
    about="One action of one space: how often it was tried, and how well it works ((successes + 1) / (tries + 2)).",
)
_KNOBS: Final = {"actions": "UTILITY_WEIGHTS_UPDATE", "ranker": "RANKER_WEIGHT_UPDATE"}


def labelled_rows(actions: DataFrame, ranker: DataFrame, predictions: DataFrame) -> DataFrame:
    """The labelled rows of all sets in one shape."""
    nothing = F.lit(None).cast("double")
    of_actions = actions.select(
        *_shape("actions", "decided_at", "decision_seq", weight=F.lit(1.0), p=nothing, z=nothing),
        "arousal",
        "valence",
        "surprise",
    )
    of_ranker = ranker.select(
        *_shape("ranker", "shown_at", "impression_seq", weight=F.col("weight"), p=nothing, z=nothing),
        *(nothing.alias(name) for name in ("arousal", "valence", "surprise")),
    )
    heads = F.concat(F.lit("head:"), F.col("head"))
    of_heads = predictions.select(
        *_shape(heads, "predicted_at", "prediction_seq", weight=F.lit(1.0), p=F.col("p"), z=F.col("z")),
        *(nothing.alias(name) for name in ("arousal", "valence", "surprise")),
    )
    return of_actions.unionByName(of_ranker).unionByName(of_heads).where("y is not null")


def standing(rows: DataFrame, before: DataFrame, erased: DataFrame, share: float, *, rows_min: int = 0) -> DataFrame:
    """
    Each set and space that has a fit or rows enough for one, and whether the fit that there is of it ``is_same`` still.

    Args:
        rows: From ``labelled_rows``.
        before: ``gold.learning_fits`` as the last run left it.
        erased: ``gold.erasures``.
        share: From this share of new rows on it is another.
        rows_min: With fewer rows there is no fit.
    """
    forgotten = erased.groupBy("space_id").agg(F.max("erased_seq").alias("_erased_seq"))
    known = before.select(*_OF, F.col("rows").alias("_rows"), F.col("last_seq").alias("_last_seq"))
    is_same = (F.col("_fresh") < share * F.col("_rows")) & (F.coalesce("_erased_seq", F.lit(0)) <= F.col("_last_seq"))
    return (
        rows.select(*_OF, "seq")
        .join(known, list(_OF), "left")
        .groupBy(*_OF, "_rows", "_last_seq")
        .agg(F.count_if(F.col("seq") > F.col("_last_seq")).alias("_fresh"), F.count("*").alias("_count"))
        .where(F.col("_rows").isNotNull() | (F.col("_count") >= rows_min))
        .join(forgotten, "space_id", "left")
        .select(*_OF, F.coalesce(is_same, F.lit(False)).alias("is_same"))
    )


def training_rows(rows: DataFrame, drift: DataFrame, *, rows_max: int = ROWS_MAX) -> DataFrame:
    """
    Of ``labelled_rows`` at most ``rows_max`` a set and space, the most recent.

    ``is_drifting`` says that a feature of the space drifted on its last day.
    """
    latest = Window.partitionBy(*_OF).orderBy(F.desc("at"), F.desc("seq"), F.desc("row_id"))
    drifting = drift.groupBy(F.col("set_name").alias("_set"), F.col("space_id").alias("_space")).agg(
        F.max(F.struct("date", "is_drifted"))["is_drifted"].alias("is_drifting")
    )
    family = F.when(F.col("set_name").startswith("head:"), F.lit("predictions")).otherwise(F.col("set_name"))
    return (
        rows.withColumn("_nth", F.row_number().over(latest))
        .where(F.col("_nth") <= rows_max)
        .drop("_nth")
        .join(drifting, (family == F.col("_set")) & (F.col("space_id") == F.col("_space")), "left")
        .withColumn("is_drifting", F.coalesce("is_drifting", F.lit(False)))
        .drop("_set", "_space")
    )


def _shape(name: str | Column, at: str, seq: str, *, weight: Column, p: Column, z: Column) -> list[Column]:
    return [
        (F.lit(name) if isinstance(name, str) else name).alias("set_name"),
        F.col("space_id"),
        F.col("row_id"),
        F.col(at).alias("at"),
        F.col(seq).alias("seq"),
        F.col("features"),
        F.col("y"),
        weight.alias("weight"),
        p.alias("p"),
        z.alias("z"),
    ]


def fits(rows: DataFrame, settings: FitSettings) -> DataFrame:
    """A fit for each set and space of ``training_rows`` that has enough of them."""
    return rows.groupBy("set_name", "space_id").applyInArrow(_fit_group(settings), FITS.schema)


def _fit_group(settings: FitSettings) -> Callable[[Any], Any]:
    columns = [
        part.strip().split(maxsplit=1) for part in FITS.schema.replace("string,double", "string;double").split(",")
    ]
    kinds = {
        "string": pa.string(),
        "bigint": pa.int64(),
        "double": pa.float64(),
        "boolean": pa.bool_(),
        "timestamp": pa.timestamp("us", "UTC"),
        "map<string;double>": pa.map_(pa.string(), pa.float64()),
    }
    schema = pa.schema([(name, kinds[kind]) for name, kind in columns])

    def fit(table: Any) -> Any:
        given = sorted(table.to_pylist(), key=lambda row: (row["at"], row["seq"], row["row_id"]))
        head = given[0]
        rows = [_training_row(row) for row in given]
        fitter = fit_calibration if head["set_name"].startswith("head:") else fit_weights
        found = fitter(rows, settings, is_drifting=head["is_drifting"])
        if found is None:
            return schema.empty_table()
        row = {
            **dict.fromkeys(schema.names),
            **found,
            "set_name": head["set_name"],
            "space_id": head["space_id"],
            "weights": sorted(found.get("weights", {}).items()),
            "first_at": head["at"],
            "last_at": given[-1]["at"],
            "last_seq": max(each["seq"] for each in given),
        }
        return pa.Table.from_pylist([row], schema=schema)

    return fit


def _training_row(row: Mapping[str, Any]) -> TrainingRow:
    return TrainingRow(
        row_id=row["row_id"],
        features=dict(row["features"] or ()),
        y=row["y"],
        weight=row["weight"],
        p=row["p"],
        z=row["z"],
        arousal=row["arousal"],
        valence=row["valence"],
        surprise=row["surprise"],
    )


def habits(actions: DataFrame) -> DataFrame:
    """How well each action works in each space. An action nobody has tried yet stands at one half."""
    return (
        actions.where("y is not null and action is not null")
        .groupBy("space_id", "action")
        .agg(
            F.count("*").alias("tries"),
            F.sum("y").alias("successes"),
            F.avg("latency_ms").alias("latency_ms_mean"),
            F.max("decided_at").alias("last_at"),
        )
        .withColumn("strength", (F.col("successes") + 1) / (F.col("tries") + 2))
    )


def _build(tables: Mapping[str, DataFrame], context: JobContext) -> Mapping[str, DataFrame]:
    defaults = FitSettings()
    settings = FitSettings(**{name: setting(context, name, getattr(defaults, name)) for name in FitSettings._fields})
    if settings.method not in ("sgd", "adagrad"):
        raise ValueError(f"method must be sgd or adagrad, not {settings.method!r}")
    rows = labelled_rows(
        tables["gold.learning_actions"], tables["gold.learning_ranker"], tables["gold.learning_predictions"]
    )
    before, share = tables[FITS.table], setting(context, "refit_share", REFIT_SHARE)
    groups, _, near = held(standing(rows, before, tables[ERASURES], share, rows_min=settings.rows_min))
    found = before.join(groups.where("is_same").drop("is_same"), list(_OF), "left_semi")
    stale = groups.where("not is_same").drop("is_same")
    if not stale.isEmpty():  # as mostly it is, and then no row is read again
        chosen = training_rows(
            rows.join(near(stale), list(_OF), "left_semi"),
            tables["gold.learning_drift"],
            rows_max=setting(context, "rows_max", ROWS_MAX),
        )
        found = shaped(fits(chosen, settings), FITS).unionByName(found)
    return {FITS.table: found, HABITS.table: shaped(habits(tables["gold.learning_actions"]), HABITS)}


def _summarise(tables: Mapping[str, DataFrame], context: JobContext) -> Iterable[Event]:
    last_us = F.unix_micros("last_at")
    runs = tables[FITS.table].withColumn("last_us", last_us).orderBy("last_us", "set_name", "space_id")
    for row in runs.toLocalIterator():
        yield from _published_event(row)
    tuned = tables[HABITS.table].withColumn("last_us", last_us).orderBy("last_us", "space_id", "action")
    for row in tuned.toLocalIterator():
        payload = {"action": row["action"], "tries": row["tries"], "strength": round(row["strength"], _DIGITS)}
        yield summary_event(LEARNING_TOPIC, "HABIT_TUNE", row["space_id"], time_of(row["last_us"]), payload)


def _published_event(row: Row) -> Iterable[Event]:
    """The events of one fit: how it went, and the knob to turn if it was promoted."""
    run_id = f"run-{row['dataset']}"
    last_at = time_of(row["last_us"])
    at = last_at.isoformat()
    metrics = {name: row[name] for name in ("loss_eval", "loss_baseline", "brier_eval", "brier_baseline", "ece_eval")}
    stages = {
        "train": {"rows": row["rows_train"], "loss": _rounded(row["loss_train"]), "is_clipped": row["is_clipped"]},
        "eval": {"rows": row["rows_eval"], **{name: _rounded(value) for name, value in metrics.items()}},
    }
    if row["is_promoted"]:
        stages["promote"] = {"set": row["set_name"]}
    for kind, said in stages.items():
        payload = {
            "run_id": run_id,
            "kind": kind,
            "started_at": at,
            "completed_at": at,
            "dataset": f"{row['set_name']}@{row['dataset']}",
            "metrics": said,
        }
        yield summary_event(LEARNING_TOPIC, "ML_RUN_EVENT", row["space_id"], last_at, payload)
    if not row["is_promoted"]:
        return
    knob: dict[str, Any] = {"run_id": run_id}
    if row["model"] == "calibration":
        knob["head"] = row["set_name"].removeprefix("head:")
        knob["platt"] = {"A": _rounded(row["platt_a"]), "B": _rounded(row["platt_b"])}
        knob["temperature"] = _rounded(row["temperature"])
    else:
        knob["weights"] = {name: _rounded(weight) for name, weight in sorted(row["weights"].items())}
    kind = _KNOBS.get(row["set_name"], "CALIBRATION_UPDATE")
    yield summary_event(LEARNING_TOPIC, kind, row["space_id"], last_at, knob)


def _rounded(number: float | None) -> float | None:
    # Enough digits to act on. The last ones of a sum may differ with the number of cores, and would make another event.
    return None if number is None else round(number, _DIGITS)


JOBS: Final = (
    Job(
        name="learning_fit",
        about="L4: weights, Platt and temperature by space, published as settings and runs.",
        reads=(
            "gold.learning_actions",
            "gold.learning_ranker",
            "gold.learning_predictions",
            "gold.learning_drift",
            FITS.table,
            ERASURES,
        ),
        writes=(FITS, HABITS),
        build=_build,
        summarise=_summarise,
    ),
)
