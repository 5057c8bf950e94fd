"""Lag, retries and kinds of failure are those that can be counted by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.unit.pipeline.jobs.support import (
    CURSORS_SCHEMA,
    LETTERS_SCHEMA,
    Stream,
    at,
    context,
    rows_of,
    table,
)
from tidings.pipeline.jobs.operations import DEAD_LETTERS, GROUP_HEALTH, retries

pytestmark = pytest.mark.spark


def letter(
    offset: int, error: str, *, failed_s: float, group: str = "g", attempts: int = 6, category: str | None = None
) -> tuple[Any, ...]:
    tried = [{"at": at(failed_s - 10 * n).isoformat(), "error": error} for n in range(attempts, 0, -1)]
    history = json.dumps(tried)
    return ("t", group, offset, offset + 1, f"e{offset}", error, category, attempts, at(failed_s), history)


@pytest.mark.req("L8")
def test_lag_is_what_was_not_acknowledged(spark: SparkSession) -> None:
    """A group's lag, the age of the oldest waiting event, and whether its cursor still moves."""
    stream = Stream()
    for n in range(5):
        stream.add("X", {}, at_s=n * 100, topic="t")
    cursors = [
        ("t", "done", 4, 1, at(500), "e"),
        ("t", "past", 6, 1, at(500), "e"),
        ("t", "new", -1, 1, at(990), "e"),
        ("t", "stuck", 1, 1, at(150), "e"),
        ("empty", "idle", -1, 1, at(0), "e"),
    ]
    (job,) = GROUP_HEALTH
    built = job.build(
        {
            "bronze.events": stream.frame(spark),
            "silver.group_cursors": table(spark, cursors, CURSORS_SCHEMA),
            "silver.dead_letters": table(spark, [], LETTERS_SCHEMA),
        },
        context(1000),
    )
    found = {row["group"]: row for row in rows_of(built["gold.group_lag"])}

    assert {name: (row["lag"], row["state"]) for name, row in found.items()} == {
        "done": (0, "caught_up"),
        "past": (0, "caught_up"),
        "new": (5, "behind"),
        "stuck": (3, "stalled"),
        "idle": (0, "caught_up"),
    }
    assert found["stuck"]["waiting_s"] == 800.0
    assert found["stuck"]["idle_s"] == 850.0
    assert found["done"]["waiting_s"] is None
    assert rows_of(built["gold.retries"]) == []


@pytest.mark.req("L8")
def test_retries_are_counted_by_group_and_day(spark: SparkSession) -> None:
    """Attempts add up; retries leave the first delivery out; a letter that was never tried has none."""
    letters = [
        letter(1, "boom", failed_s=100, attempts=6),
        letter(2, "boom", failed_s=200, attempts=2),
        letter(3, "expired", failed_s=300, attempts=0),
        letter(4, "boom", failed_s=86_400, attempts=1),
    ]
    first, second = rows_of(retries(table(spark, letters, LETTERS_SCHEMA)), "date")

    assert (first["letters"], first["attempts"], first["retries"], first["attempts_max"]) == (3, 8, 6, 6)
    assert first["trying_s_mean"] == pytest.approx((60 + 20) / 2)
    assert (second["letters"], second["retries"]) == (1, 0)


@pytest.mark.req("L8")
def test_failures_of_one_kind_are_one_row_and_five_in_a_day_are_poison(spark: SparkSession) -> None:
    """Ids and numbers do not tell failures apart; a kind that came five times within a day is poison."""
    letters = [letter(n, f"order {n} of '{n}x' timed out", failed_s=n * 3600.0) for n in range(5)]
    letters += [letter(10 + n, "KeyError: 'name'", failed_s=n * 50_000.0, group="h") for n in range(5)]
    letters += [letter(20, "odd", failed_s=0, group="h", category="system")]
    (job,) = DEAD_LETTERS
    built = job.build({"silver.dead_letters": table(spark, letters, LETTERS_SCHEMA)}, context())
    timeouts, odd, keys = rows_of(built["gold.dead_letter_categories"], "group", "letters")

    assert (timeouts["category"], timeouts["error_shape"]) == ("transient", "order # of '*' timed out")
    assert (timeouts["letters"], timeouts["share"], timeouts["is_poison"]) == (5, 1.0, True)
    assert timeouts["event_ids"] == ["e0", "e1", "e2", "e3", "e4"]
    assert (odd["category"], odd["letters"], odd["is_poison"]) == ("system", 1, False)
    assert (keys["category"], keys["within_day_max"], keys["is_poison"]) == ("validation", 2, False)
    assert keys["share"] == pytest.approx(5 / 6)
