"""Which dead letters are meant: each condition by itself, and all of them joined by and."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from tidings.bus.errors import UnknownDeadLetter
from tidings.bus.store.dead_letters import EVERY, DeadLetter, DeadLetterFilter, named


def letter(**values: Any) -> DeadLetter:
    plain: dict[str, Any] = {
        "id": "g-1",
        "topic": "actions",
        "group": "g",
        "offset": 1,
        "seq": 2,
        "event_id": "ev-1",
        "space_id": "shared:home",
        "error": "no luck",
        "error_type": "builtins.ValueError",
        "traceback_digest": "",
        "retries": 5,
        "failed_at": "2026-01-02T00:00:00.000000Z",
    }
    return DeadLetter(**(plain | values))


def day(number: int) -> datetime:
    return datetime(2026, 1, number, tzinfo=UTC)


@pytest.mark.parametrize(
    "wanted",
    [
        DeadLetterFilter(),
        DeadLetterFilter(group="g"),
        DeadLetterFilter(reason="retries"),
        DeadLetterFilter(error_type="builtins.ValueError"),
        DeadLetterFilter(error_type="ValueError"),
        DeadLetterFilter(error_contains="luck"),
        DeadLetterFilter(error_contains="ValueE"),
        DeadLetterFilter(since=day(2)),
        DeadLetterFilter(group="g", reason="retries", error_contains="no", since=day(1), states=EVERY),
    ],
)
def test_what_fits_is_let_through(wanted: DeadLetterFilter) -> None:
    """A letter for which every given condition holds is meant."""
    assert wanted.matches(letter())


@pytest.mark.parametrize(
    "wanted",
    [
        DeadLetterFilter(states=("dropped",)),
        DeadLetterFilter(group="other"),
        DeadLetterFilter(reason="expired"),
        DeadLetterFilter(error_type="Error"),
        DeadLetterFilter(error_contains="Luck"),
        DeadLetterFilter(since=day(3)),
        DeadLetterFilter(group="g", reason="expired"),
    ],
)
def test_what_does_not_fit_is_kept_out(wanted: DeadLetterFilter) -> None:
    """One condition that does not hold is enough."""
    assert not wanted.matches(letter())


def test_states_alone_do_not_narrow_letters_down() -> None:
    """A verb's own states say nothing about which letters are meant; any other condition does."""
    assert not DeadLetterFilter(states=("dead",)).has_conditions
    assert DeadLetterFilter(group="g").has_conditions


def test_letters_are_named_once_and_in_order() -> None:
    """Named letters come in the order of their names, each once; an unknown name is an error."""
    letters = {each: letter(id=each) for each in ("g-1", "g-2", "g-3")}

    assert [each.id for each in named("actions", letters, ["g-3", "g-1", "g-3"])] == ["g-3", "g-1"]
    with pytest.raises(UnknownDeadLetter, match="g-4"):
        named("actions", letters, ["g-1", "g-4"])
