"""Appointments and delayed events in a world where a seed decides what happens next: people, an operator, crashes at any step."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, Final

import pytest

from tests.simulation.book import Broken
from tests.simulation.schedule_world import ScheduleSimulation
from tidings.bus.delayed import DelayedEvents
from tidings.schedule.actions import Actions, ScheduledAction

PER_TEST: Final = 12
PER_HEAVY_TEST: Final = 100


@pytest.fixture(autouse=True)
def _in_silence() -> Iterator[None]:
    """Lives end in the middle, and somebody logs it."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def _run(seeds: range) -> None:
    for seed in seeds:
        ScheduleSimulation(seed).run()


@pytest.mark.req("H47")
def test_what_was_promised_happens_once_whatever_comes_between() -> None:
    """Every appointment fires as often as it was to fire and tells so, and every delayed event is published, once, unless it was cancelled."""
    _run(range(PER_TEST))


@pytest.mark.heavy
@pytest.mark.timeout(900)
@pytest.mark.parametrize("first", range(1000, 1000 + 5 * PER_HEAVY_TEST, PER_HEAVY_TEST))
def test_what_was_promised_happens_once_for_many_seeds(first: int) -> None:
    """The same, for many more."""
    _run(range(first, first + PER_HEAVY_TEST))


@pytest.mark.heavy
def test_an_action_without_a_name_of_its_own_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """If what is dispatched again after a crash were not recognised, something would ring twice."""
    dispatch, count = Actions.dispatch, iter(range(10**9))

    async def forgetful(self: Actions, action: ScheduledAction, firing: str) -> str:
        return await dispatch(self, action, f"{firing}/{next(count)}")

    monkeypatch.setattr(Actions, "dispatch", forgetful)

    with pytest.raises(Broken, match="was rung"):
        _run(range(200))


@pytest.mark.heavy
def test_a_cancellation_that_is_not_stored_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """If cancelling a delayed event were only remembered, it would be published after a restart."""
    settle = DelayedEvents._settle

    async def forgetful(self: DelayedEvents, kind: str, entries: Any) -> None:
        if kind != "DELAYED_CANCELLED":
            await settle(self, kind, entries)

    monkeypatch.setattr(DelayedEvents, "_settle", forgetful)

    with pytest.raises(Broken, match="was published"):
        _run(range(200))
