"""
Rollups (C3): days, weeks and months of a space, summed up in a budget of tokens, with versions.

A summary is made of the memories' own sentences: the best by words that are rare elsewhere, by recency and by being unlike
what was chosen already, told in the order they happened. Salient memories are covered first. The order of rows changes
nothing. What RED and BLACK memories say is never quoted.

A closed period is published once. A memory that comes later makes its rollup stale: a tenth or more of the memories makes a
new version, less patches it. A period is summed up again only if something that it is made of has changed; one that is not over
yet when a tenth of its memories has.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from typing import Any, Final, NamedTuple

import numpy as np
import pandas as pd  # type: ignore[import-untyped, unused-ignore]
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from tidings.core.errors import SettingsError
from tidings.core.events import Event
from tidings.core.ids import derived_id
from tidings.pipeline.jobs.job import InputWindow, Job, JobContext, OutputTable, Partitioning, setting

from .columns import as_of, brought, held, instant, iso, number, summaries, text, texts, zone_or_none
from .consolidation_duplicates import KEEP_SCORES
from .consolidation_memories import CONSOLIDATION_TOPIC, MEMORIES, is_guarded
from .temporal_features import FEATURES, HALF_LIFE_H

COVERAGE_MIN: Final = 0.8
SALIENT_MIN: Final = 0.7
_SENTENCES_MAX: Final = 2_000
_HOUR_MICROS: Final = 3_600_000_000
_TOKEN: Final = re.compile(r"\w+|[^\w\s]")
_WORD: Final = re.compile(r"\w+")
_SENTENCE_END: Final = re.compile(r"(?<=[.!?…])\s+|\s*\n\s*")


class Item(NamedTuple):
    """Something to sum up."""

    event_id: str
    at_micros: int
    text: str
    salience: float


class ChosenSentence(NamedTuple):
    """A sentence that was chosen."""

    event_id: str
    text: str
    score: float


class Summary(NamedTuple):
    """What is left of the items."""

    text: str
    """The chosen sentences, in the order of their items' times."""
    choices: tuple[ChosenSentence, ...]
    """The same, the best first."""
    token_count: int
    token_count_before: int
    coverage: float
    """The share of salient items that a chosen sentence stems from; 1 where none is salient."""


class _Sentence(NamedTuple):
    item: Item
    """The last one that says it."""
    said_by: frozenset[str]
    at: int
    text: str
    token_count: int
    weights: dict[str, float]
    base: float


def tokens_in(text: str) -> int:
    """How many words and signs a text has."""
    return sum(1 for _ in _TOKEN.finditer(text))


def sum_up(items: Iterable[Item], *, end_micros: int, half_life_h: float, tokens_max: int) -> Summary:
    """
    Choose sentences.

    Args:
        items: What there is to say.
        end_micros: Recency is seen from here: the period's end, so that a summary does not change as it ages.
        half_life_h: After so many hours a sentence's recency has halved.
        tokens_max: The budget.
    """
    ordered = sorted(items, key=lambda item: (item.at_micros, item.event_id))
    waiting = _sentences(ordered, end_micros, half_life_h, tokens_max)
    salient = {item.event_id for item in ordered if item.salience >= SALIENT_MIN}
    taken: list[tuple[_Sentence, float]] = []
    left = tokens_max
    covered: set[str] = set()
    bases = np.array([sentence.base for sentence in waiting])
    sizes = np.array([sentence.token_count for sentence in waiting])
    # How many salient items each sentence stems from that no chosen one does.
    missing = np.array([len(sentence.said_by & salient) for sentence in waiting])
    nearest, is_open = np.zeros(len(waiting)), np.ones(len(waiting), dtype=bool)
    likeness = _Likeness(waiting)
    while True:
        fits = is_open & (sizes <= left)
        if len(covered) < COVERAGE_MIN * len(salient) and (fits & (missing > 0)).any():
            fits &= missing > 0
        if not fits.any():
            break
        best = int(np.argmax(np.where(fits, bases - 0.3 * nearest, -np.inf)))
        chosen = waiting[best]
        taken.append((chosen, float(bases[best] - 0.3 * nearest[best])))
        is_open[best] = False
        left -= chosen.token_count
        newly = (chosen.said_by & salient) - covered
        covered |= newly
        if newly:
            missing -= np.array([len(sentence.said_by & newly) for sentence in waiting])
        np.maximum(nearest, likeness.to(best), out=nearest)
    told = sorted(taken, key=lambda pair: (pair[0].item.at_micros, pair[0].item.event_id, pair[0].at))
    return Summary(
        text=" ".join(sentence.text for sentence, _ in told),
        choices=tuple(
            ChosenSentence(sentence.item.event_id, sentence.text, round(score, 6)) for sentence, score in taken
        ),
        token_count=tokens_max - left,
        token_count_before=sum(tokens_in(item.text) for item in ordered),
        coverage=len(covered) / len(salient) if salient else 1.0,
    )


def _sentences(items: Sequence[Item], end_micros: int, half_life_h: float, tokens_max: int) -> list[_Sentence]:
    """Every sentence that has words, each once, in the order of the items' times; the best ones if there are too many."""
    found: dict[str, tuple[Item, int, str]] = {}
    said_by: dict[str, set[str]] = {}
    for item in items:
        for at, raw in enumerate(_SENTENCE_END.split(item.text)):
            text = _cut(raw.strip(), tokens_max)
            if _WORD.search(text):
                key = " ".join(text.lower().split())
                found[key] = (item, at, text)
                said_by.setdefault(key, set()).add(item.event_id)
    words = {key: Counter(_WORD.findall(key)) for key in found}
    seen_in = Counter(word for counts in words.values() for word in counts)
    weigh = {word: math.log((1 + len(found)) / (1 + count)) + 1 for word, count in seen_in.items()}
    weights = {key: {word: n * weigh[word] for word, n in counts.items()} for key, counts in words.items()}
    means = {key: sum(weights[key].values()) / words[key].total() for key in found}
    best = max(means.values(), default=1.0)
    sentences = []
    for key, (item, at, text) in found.items():
        age_h = max(0, end_micros - item.at_micros) / _HOUR_MICROS
        base = 0.7 * means[key] / best + 0.3 * 2.0 ** (-age_h / half_life_h)
        sentences.append(_Sentence(item, frozenset(said_by[key]), at, text, tokens_in(text), weights[key], base))
    if len(sentences) <= _SENTENCES_MAX:
        return sentences
    kept = sorted(range(len(sentences)), key=lambda at: (-sentences[at].base, at))[:_SENTENCES_MAX]
    return [sentences[at] for at in sorted(kept)]


def _cut(text: str, tokens_max: int) -> str:
    """A sentence longer than the whole budget ends where the budget does."""
    for at, token in enumerate(_TOKEN.finditer(text), 1):
        if at == tokens_max:
            return text[: token.end()]
    return text


class _Likeness:
    """The cosine of any sentence to all: by each of its words, the sentences that have it and how much it weighs in them."""

    def __init__(self, sentences: Sequence[_Sentence]) -> None:
        self._count = len(sentences)
        self._sentences = [_normed(sentence.weights) for sentence in sentences]
        places: dict[str, list[int]] = {}
        for at, weights in enumerate(self._sentences):
            for word in weights:
                places.setdefault(word, []).append(at)
        self._places = {word: np.array(found) for word, found in places.items()}
        self._weights = {word: np.array([self._sentences[at][word] for at in found]) for word, found in places.items()}

    def to(self, at: int) -> np.ndarray[Any, Any]:
        """How like that sentence each one is."""
        found = np.zeros(self._count)
        for word, weight in self._sentences[at].items():
            found[self._places[word]] += weight * self._weights[word]
        return found


def _normed(weights: dict[str, float]) -> dict[str, float]:
    length = math.sqrt(sum(weight * weight for weight in weights.values()))
    return {word: weight / length for word, weight in weights.items()}


ROLLUPS: Final = "gold.rollups"
TOLD_TYPE: Final = "CONSOLIDATION_DONE"
PATCH_SHARE_MAX: Final = 0.1
_EVENTS_MAX: Final = 10_000
_HIGHLIGHTS_MAX: Final = 5
_TOKENS_MAX: Final = {"day": 400, "week": 1_200, "month": 3_600}
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_EPOCH_DAY: Final = date(1970, 1, 1)

_FEATURES_TYPE: Final = "struct<circadian: double, weekly: double, token_cost_saved: bigint>"
_HIGHLIGHTS_TYPE: Final = "array<struct<event_id: string, text: string, score: double>>"
_SCHEMA: Final = (
    "rollup_id string, space_id string, period string, from_ts timestamp, to_ts timestamp, version int, summary string, "
    f"highlights {_HIGHLIGHTS_TYPE}, features {_FEATURES_TYPE}, "
    "provenance struct<event_ids: array<string>, version: int>, coverage double, event_count bigint, "
    "withheld_count bigint, token_count bigint, digest string, is_closed boolean, is_told boolean, action string, "
    "diffs struct<added: array<string>, removed: array<string>>, basis string, date date"
)
_MADE: Final = (
    "rollup_id string, space_id string, period string, from_micros bigint, to_micros bigint, summary string, "
    f"highlights {_HIGHLIGHTS_TYPE}, features {_FEATURES_TYPE}, event_ids array<string>, coverage double, "
    "event_count bigint, withheld_count bigint, token_count bigint, digest string, basis string, date date"
)
_MADE_COLUMNS: Final = (
    *("rollup_id", "space_id", "period", "from_micros", "to_micros", "summary", "highlights", "features", "event_ids"),
    *("coverage", "event_count", "withheld_count", "token_count", "digest", "basis", "date"),
)
_PERIOD: Final = ("space_id", "period", "start")
_PERIODS_DAYS: Final = {"day": 1, "week": 7, "month": 31}
_PERIOD_DAYS: Final = max(_PERIODS_DAYS.values()) + 1
_PERIODS_FEW: Final = 50_000
_METHOD: Final = 2
"""Part of every basis: with another one all periods are summed up again."""


ROLLUPS_TOLD: Final = "gold.rollups_told"
_TOLD_SCHEMA: Final = (
    "space_id string, rollup_id string, seq bigint, version int, digest string, event_ids array<string>, period string, "
    "from_ts timestamp, to_ts timestamp, start date"
)
KEPT_DAYS: Final = "gold.kept_days"
_KEPT_DAYS_SCHEMA: Final = "space_id string, date date, day date, members bigint, members_hash bigint"


def _zone(context: JobContext) -> str:
    tz = setting(context, "tz", "UTC")
    if zone_or_none(tz) is None:
        raise SettingsError("tz", f"{tz!r} is no time zone")
    return tz


def _build_told(tables: Mapping[str, DataFrame], context: JobContext) -> Mapping[str, DataFrame]:
    events = tables["silver.events"]
    told = events.where((F.col("topic") == CONSOLIDATION_TOPIC) & (F.col("type") == TOLD_TYPE)).select(
        *("space_id", text("rollup_id").alias("rollup_id"), "seq"),
        number("version").try_cast("int").alias("version"),
        *(text("digest").alias("digest"), texts("provenance.event_ids").alias("event_ids")),
        *(text("period").alias("period"), instant("from").alias("from_ts"), instant("to").alias("to_ts")),
    )
    start = F.to_date(F.from_utc_timestamp("from_ts", _zone(context))).alias("start")
    return {ROLLUPS_TOLD: told.where("rollup_id is not null and version is not null").select("*", start)}


def told_rollups(told: DataFrame) -> DataFrame:
    """
    The last that was told of each rollup, of ``gold.rollups_told``: ``space_id``, ``rollup_id``, ``told_seq``, ``told_version``,
    ``told_digest``, ``told_ids``, ``told_period`` and ``told_from`` to ``told_to``.
    """
    names = {
        "seq": "told_seq",
        "version": "told_version",
        "digest": "told_digest",
        "event_ids": "told_ids",
        "period": "told_period",
        "from_ts": "told_from",
        "to_ts": "told_to",
    }
    last = F.max(F.struct(*(F.col(name).alias(alias) for name, alias in names.items()))).alias("told")
    return told.groupBy("space_id", "rollup_id").agg(last).select("space_id", "rollup_id", "told.*")


def _build_days(tables: Mapping[str, DataFrame], context: JobContext) -> Mapping[str, DataFrame]:
    members = F.bit_xor(F.xxhash64("event_id", "salience", "ts", "is_withheld")).alias("members_hash")
    kept = _kept(tables[KEEP_SCORES], _zone(context))
    return {KEPT_DAYS: kept.groupBy("space_id", "date", "day").agg(F.count("*").alias("members"), members)}


def _windows(_: JobContext) -> Mapping[str, InputWindow]:
    # The longest period has 31 days, and a day may begin half a day before or after that of UTC.
    return {
        KEPT_DAYS: InputWindow("date", days_before=1, days_after=_PERIOD_DAYS, is_whole=True, names_days=True),
        ROLLUPS_TOLD: InputWindow("start", is_whole=True, names_days=True),
    }


def _build(tables: Mapping[str, DataFrame], context: JobContext) -> Mapping[str, DataFrame]:
    tz = _zone(context)
    standing, few = brought(_standing(tables[KEPT_DAYS], tables[ROLLUPS], context), few=_PERIODS_FEW)
    stale = standing.where("not is_same").select(*_PERIOD, "basis")
    same = standing.where("is_same").select(*_PERIOD)
    last = tables[ROLLUPS].withColumn("start", F.col("date"))
    made = _made(_of_periods(stale, few, tables, context, tz), context, tz).unionByName(
        last.join(same, list(_PERIOD), "left_semi").select(
            *("rollup_id", "space_id", "period", F.unix_micros("from_ts").alias("from_micros")),
            *(F.unix_micros("to_ts").alias("to_micros"), "summary", "highlights", "features"),
            *(F.col("provenance.event_ids").alias("event_ids"), "coverage", "event_count", "withheld_count"),
            *("token_count", "digest", "basis", "date"),
        )
    )
    told = told_rollups(tables[ROLLUPS_TOLD])
    share_max = setting(context, "patch_share_max", PATCH_SHARE_MAX)
    before = F.coalesce("told_ids", F.array().cast("array<string>"))
    known = made.join(told, ["space_id", "rollup_id"], "left").withColumns(
        {
            "added": F.array_sort(F.array_except("event_ids", before)),
            "removed": F.array_sort(F.array_except(before, F.col("event_ids"))),
            "is_told": F.coalesce(F.col("told_digest") == F.col("digest"), F.lit(False)),
        }
    )
    changed = (F.size("added") + F.size("removed")) / F.greatest(F.size(before), F.lit(1))
    action = (
        F.when(F.col("told_version").isNull(), "CREATE")
        .when(F.col("is_told"), "NONE")
        .when(changed < share_max, "PATCH")
        .otherwise(F.lit("UPDATE_SUMMARY"))
    )
    version = F.when(F.col("action") == "UPDATE_SUMMARY", F.col("told_version") + 1).otherwise(
        F.coalesce("told_version", F.lit(1))
    )
    done = known.withColumn("action", action).withColumn("version", version.cast("int"))
    return {
        ROLLUPS: done.select(
            *("rollup_id", "space_id", "period"),
            F.timestamp_micros("from_micros").alias("from_ts"),
            F.timestamp_micros("to_micros").alias("to_ts"),
            *("version", "summary", "highlights", "features"),
            F.struct("event_ids", "version").alias("provenance"),
            *("coverage", "event_count", "withheld_count", "token_count", "digest"),
            (F.timestamp_micros("to_micros") <= as_of(context)).alias("is_closed"),
            *("is_told", "action"),
            F.struct("added", "removed").alias("diffs"),
            *("basis", "date"),
        )
    }


def _kept(scores: DataFrame, tz: str) -> DataFrame:
    """The memories that are kept, with the day that they fall on."""
    return scores.where(F.col("decision").isin("keep", "protect")).select(
        *("space_id", "event_id", "ts", "date", "salience", "score"),
        (is_guarded(F.col("band")) | (F.col("reason") == "sealed")).alias("is_withheld"),
        F.to_date(F.from_utc_timestamp("ts", tz)).alias("day"),
    )


def _by_period(of_days: DataFrame) -> DataFrame:
    """Each row once for each period that its ``day`` falls into."""
    return of_days.withColumn("period", F.explode(F.array(*map(F.lit, _TOKENS_MAX)))).withColumn("start", _start())


def _standing(kept_days: DataFrame, rollups: DataFrame, context: JobContext) -> DataFrame:
    """
    Each period with its ``basis``, which stands for the settings and for all the memories it is made of, and whether what the last
    run made of it is the same still. A period that is not over is the same until a share of its memories (``patch_share_max``) is
    another: it will change again anyway.
    """
    tokens = tuple(setting(context, f"tokens_{period}_max", most, above=0) for period, most in _TOKENS_MAX.items())
    made_by = repr((_METHOD, _zone(context), setting(context, "half_life_h", HALF_LIFE_H, above=0), tokens))
    method = hashlib.sha256(made_by.encode()).hexdigest()[:16]
    # By day first: a week or a month is made of days.
    days, _ = brought(
        kept_days.groupBy("space_id", "day").agg(
            F.sum("members").alias("members"), F.bit_xor("members_hash").alias("_hash")
        ),
        few=_PERIODS_FEW,
    )
    now = (
        _by_period(days)
        .groupBy(*_PERIOD)
        .agg(F.sum("members").alias("members"), F.bit_xor("_hash").alias("_hash"))
        .withColumn("basis", F.concat_ws(":", F.lit(method), "members", F.hex("_hash")))
    )
    known = rollups.where(F.col("basis").startswith(method))
    before, _ = brought(
        known.select("space_id", "period", F.col("date").alias("start"), "to_ts", F.col("basis").alias("_basis")),
        few=_PERIODS_FEW,
    )
    members = F.split("_basis", ":")[1].cast("bigint")
    changed = F.abs(F.col("members") - members) / members
    is_little = changed < setting(context, "patch_share_max", PATCH_SHARE_MAX)
    is_same = (F.col("_basis") == F.col("basis")) | ((F.col("to_ts") > as_of(context)) & is_little)
    joined = now.join(before, list(_PERIOD), "left")
    return joined.select(*_PERIOD, "basis", F.coalesce(is_same, F.lit(False)).alias("is_same"))


def _of_periods(
    stale: DataFrame, standing: pa.Table | None, tables: Mapping[str, DataFrame], context: JobContext, tz: str
) -> DataFrame:
    """The memories of the periods that changed, at most ``events_max`` a period: the most worth keeping."""
    scores, memories, features = tables[KEEP_SCORES], tables[MEMORIES], tables[FEATURES]
    if standing is not None:
        # Few periods have changed: only their days are read.
        days = _days_of(standing.filter(pc.invert(standing["is_same"])))
        scores, features = (each.where(F.col("date").isin(days)) for each in (scores, features))
        first, last = (days[0], days[-1]) if days else (_EPOCH_DAY, _EPOCH_DAY)
        memories = memories.where((F.col("ts") >= F.lit(first)) & (F.col("ts") < F.lit(last + timedelta(days=1))))
        stale = F.broadcast(stale)
    worth = F.row_number().over(Window.partitionBy(*_PERIOD).orderBy(F.desc("score"), F.asc("event_id")))
    chosen, _, near = held(
        _by_period(_kept(scores, tz))
        .join(stale, list(_PERIOD))
        .withColumn("_place", worth)
        .where(F.col("_place") <= setting(context, "events_max", _EVENTS_MAX, above=0))
        .select(
            *("space_id", "period", "event_id", "salience", "is_withheld", "basis", "ts"),
            F.datediff("start", F.lit(_EPOCH_DAY)).alias("start_day"),
        ),
        few=_EVENTS_MAX * len(_TOKENS_MAX),
    )
    # What is known of them, looked up where it is stored.
    key = ("space_id", "event_id")
    when = F.struct("ts", "hod", "local_date").alias("when")
    known = memories.select(*key, "text").unionByName(features.select(*key, when), allowMissingColumns=True)
    return (
        known.join(near(chosen), list(key))
        .repartition("space_id", "period", "start_day")
        .groupBy(*chosen.columns)
        .agg(F.max("text").alias("text"), F.min("when").alias("when"))
        .select(
            *("space_id", "period", "start_day", "event_id", "salience", "is_withheld", "basis"),
            F.unix_micros("ts").alias("at_micros"),
            F.when(~F.col("is_withheld"), F.col("text")).alias("text"),
            F.coalesce(F.floor("when.hod"), F.hour("ts")).cast("int").alias("hour"),
            F.datediff(F.coalesce("when.local_date", F.to_date("ts")), F.lit(_EPOCH_DAY)).alias("local_day"),
        )
    )


def _days_of(periods: pa.Table) -> list[date]:
    """The days of UTC that periods may have a part in, in their order."""
    found: set[date] = set()
    for period, start in zip(periods["period"].to_pylist(), periods["start"].to_pylist(), strict=True):
        found |= {start + timedelta(days=day) for day in range(-1, _PERIODS_DAYS[period] + 1)}
    return sorted(found)


def _start() -> Column:
    """The first day of the period that ``day`` lies in."""
    return (
        F.when(F.col("period") == "day", F.col("day"))
        .when(F.col("period") == "week", F.trunc("day", "week"))
        .otherwise(F.trunc("day", "month"))
    )


def _made(found: DataFrame, context: JobContext, tz: str) -> DataFrame:
    """The rollup of each period."""
    half_life_h = setting(context, "half_life_h", HALF_LIFE_H, above=0)
    tokens_max = {
        period: setting(context, f"tokens_{period}_max", default, above=0) for period, default in _TOKENS_MAX.items()
    }

    def make(rows: pd.DataFrame) -> pd.DataFrame:
        period = str(rows["period"].iloc[0])
        start, end = _bounds(int(rows["start_day"].iloc[0]), period, tz)
        first = _EPOCH_DAY + timedelta(days=int(rows["start_day"].iloc[0]))
        made = (*_rollup(rows, period, start, end, half_life_h, tokens_max[period]), rows["basis"].iloc[0], first)
        return pd.DataFrame([made], columns=list(_MADE_COLUMNS))

    return found.groupBy("space_id", "period", "start_day").applyInPandas(make, _MADE)


def _rollup(
    rows: pd.DataFrame, period: str, start: datetime, end: datetime, half_life_h: float, tokens_max: int
) -> tuple[Any, ...]:
    space_id = str(rows["space_id"].iloc[0])
    told = rows[rows["text"].notna()]
    items = [
        Item(str(row.event_id), int(row.at_micros), str(row.text), float(row.salience))
        for row in told.itertuples(index=False)
    ]
    summary = sum_up(items, end_micros=_micros(end), half_life_h=half_life_h, tokens_max=tokens_max)
    event_ids = sorted(str(each) for each in rows["event_id"])
    features = {
        "circadian": _circadian(Counter(int(hour) for hour in rows["hour"])),
        "weekly": _weekly(Counter(int(day) for day in rows["local_day"])),
        "token_cost_saved": max(0, summary.token_count_before - summary.token_count),
    }
    highlights = [choice._asdict() for choice in summary.choices[:_HIGHLIGHTS_MAX]]
    told_text = "\x1f".join([summary.text, *event_ids])
    return (
        *(derived_id("ru", space_id, period, start.isoformat()), space_id, period, _micros(start), _micros(end)),
        *(summary.text, highlights, features, event_ids, summary.coverage),
        *(len(rows), int(rows["is_withheld"].sum()), summary.token_count),
        hashlib.sha256(told_text.encode("utf-8", "surrogatepass")).hexdigest(),
    )


def _bounds(start_day: int, period: str, tz: str) -> tuple[datetime, datetime]:
    """When the period begins and ends, in UTC: a day over a change of clocks has 23 or 25 hours."""
    first = _EPOCH_DAY + timedelta(days=start_day)
    if period == "month":
        after = (first.replace(day=28) + timedelta(days=4)).replace(day=1)
    else:
        after = first + timedelta(days=7 if period == "week" else 1)
    zone = zone_or_none(tz)
    start, end = (datetime(each.year, each.month, each.day, tzinfo=zone).astimezone(UTC) for each in (first, after))
    return start, end


def _micros(at: datetime) -> int:
    return (at - _EPOCH) // timedelta(microseconds=1)


def _circadian(hours: Counter[int]) -> float:
    total = hours.total()
    divergence = sum(n / total * math.log(24 * n / total) for _, n in sorted(hours.items()))
    return min(1.0, max(0.0, divergence / math.log(24)))


def _weekly(days: Counter[int]) -> float:
    """The periodicity of ``temporal_patterns``, over the whole weeks from the first day to the last."""
    monday = 4  # the first Monday, in days after 1 January 1970
    first = (min(days) - monday) // 7 * 7 + monday
    series = [days[day] for day in range(first, (max(days) - monday) // 7 * 7 + monday + 7)]
    mean = sum(series) / len(series)
    spread = sum((x - mean) ** 2 for x in series)
    if len(set(series)) == 1:
        return 0.0
    return abs(sum((x - mean) * (y - mean) for x, y in zip(series, series[7:], strict=False))) / spread


def _summarise(tables: Mapping[str, DataFrame], context: JobContext) -> Iterable[Event]:
    fresh = tables[ROLLUPS].where(F.col("is_closed") & ~F.col("is_told"))
    rows = fresh.select(
        *("rollup_id", "space_id", "period", "version", "action", "digest", "diffs", "coverage", "event_count"),
        iso(F.col("from_ts")).alias("from"),
        iso(F.col("to_ts")).alias("to"),
        F.struct("provenance.event_ids").alias("provenance"),
    )
    return summaries(CONSOLIDATION_TOPIC, TOLD_TYPE, rows, context, order=("to", "space_id", "rollup_id"))


CONSOLIDATION_ROLLUPS_JOBS: Final = (
    Job(
        name="consolidation_told",
        about="Writes down which rollups were told (for C3 and C4).",
        reads=("silver.events",),
        writes=(OutputTable(ROLLUPS_TOLD, _TOLD_SCHEMA, "A rollup as it was told."),),
        build=_build_told,
        partitioning=Partitioning(
            lambda _: {"silver.events": InputWindow("seq", types=(TOLD_TYPE,), topics=(CONSOLIDATION_TOPIC,))},
            seq_column="seq",
        ),
        settings_of="consolidation_rollups",
    ),
    Job(
        name="consolidation_days",
        about="Counts what was kept of each day, with what tells whether it is still the same (for C3).",
        reads=(KEEP_SCORES,),
        writes=(OutputTable(KEPT_DAYS, _KEPT_DAYS_SCHEMA, "How many memories of a space's day are kept, and which."),),
        build=_build_days,
        partitioning=Partitioning(lambda _: {KEEP_SCORES: InputWindow("date")}),
        settings_of="consolidation_rollups",
    ),
    Job(
        name="consolidation_rollups",
        about="Sums up each space's days, weeks and months from what was kept (C3).",
        reads=(ROLLUPS_TOLD, MEMORIES, KEEP_SCORES, KEPT_DAYS, FEATURES, ROLLUPS),
        writes=(
            OutputTable(ROLLUPS, _SCHEMA, "One day, week or month of a space, summed up; ``date`` is its first day."),
        ),
        build=_build,
        summarise=_summarise,
        # A period comes to its end as time passes.
        partitioning=Partitioning(_windows, moving_days=lambda _: _PERIOD_DAYS),
    ),
)


JOBS: Final = CONSOLIDATION_ROLLUPS_JOBS
