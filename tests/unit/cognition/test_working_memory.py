"""Working memory holds a few things, lets them fade, and tells every change."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.cognition.support import Bus, BusDown
from tidings.cognition.errors import InvalidRequest
from tidings.cognition.working_memory import Candidate, WorkingMemory, core_salience, decayed, rank
from tidings.testing import VirtualClock


def memory(bus: Bus, clock: VirtualClock) -> WorkingMemory:
    return WorkingMemory("s", bus.publish, clock, session_id="one")


async def test_it_holds_eight_things_and_the_weakest_goes() -> None:
    """The ninth displaces the weakest; one weaker than all is not taken."""
    bus, clock = Bus(), VirtualClock()
    mind = memory(bus, clock)
    for number in range(8):
        assert await mind.update(f"k{number}", {}, 0.2 + number / 10)

    assert not await mind.update("faint", {}, 0.1)
    assert await mind.update("bright", {}, 0.95)
    assert [slot.key for slot in mind.slots()] == ["bright", *(f"k{number}" for number in range(7, 0, -1))]
    assert bus.types()[-2:] == ["cognitive.working_memory.evicted", "cognitive.working_memory.updated"]
    assert bus.events[-2].payload["key"] == "k0"
    assert mind.pressure == 1.0


async def test_weights_halve_in_90_seconds_and_updates_move_them() -> None:
    """After a half-life an update gives (1 - 0.2) * old + 0.2 * new."""
    bus, clock = Bus(), VirtualClock()
    mind = memory(bus, clock)
    await mind.update("k", {"a": 1}, 0.8)
    await clock.advance(90)

    assert mind.slots()[0].weight == pytest.approx(0.4)
    await mind.update("k", {"a": 2}, 1.0)
    assert mind.slots()[0].weight == pytest.approx(0.8 * 0.4 + 0.2)
    assert mind.slots()[0].content == {"a": 2}


async def test_rehearsal_lifts_by_a_tenth() -> None:
    """Up to 1; what is not held cannot be rehearsed."""
    bus, clock = Bus(), VirtualClock()
    mind = memory(bus, clock)
    await mind.update("k", {}, 0.95)

    assert await mind.rehearse("k")
    assert mind.slots()[0].weight == 1.0
    assert not await mind.rehearse("unknown")
    assert bus.events[-1].payload["reason"] == "rehearsed"


async def test_what_has_faded_is_evicted() -> None:
    """Below a hundredth it goes, and is told."""
    bus, clock = Bus(), VirtualClock()
    mind = memory(bus, clock)
    await mind.update("k", {}, 0.64)
    await clock.advance(6 * 90)

    assert await mind.forget_faded() == []
    await clock.advance(1)
    await clock.advance(90)
    assert await mind.forget_faded() == ["k"]
    assert mind.slots() == []
    assert bus.events[-1].payload["reason"] == "faded"


async def test_a_change_that_could_not_be_told_did_not_happen() -> None:
    """Told first, then changed; the second try is one event."""
    bus = Bus()
    bus.failures = [BusDown()]
    mind = memory(bus, VirtualClock())

    with pytest.raises(BusDown):
        await mind.update("k", {}, 0.5)
    assert mind.slots() == []
    assert await mind.update("k", {}, 0.5)
    assert len(bus.events) == 1


async def test_a_change_that_was_told_after_all_does_not_block_the_next_try() -> None:
    """The first try was stored though it failed; a rehearsal a moment later has another weight and goes through."""
    bus, clock = Bus(), VirtualClock()
    mind = memory(bus, clock)
    await mind.update("k", {}, 0.5)
    bus.failures_after = [BusDown()]
    with pytest.raises(BusDown):
        await mind.rehearse("k")
    await clock.advance(10)

    assert await mind.rehearse("k")
    assert mind.slots()[0].weight == pytest.approx(0.5 * 2 ** (-10 / 90) + 0.1)


def test_core_salience_is_a_weighted_sum() -> None:
    """With every feature at 1: 0.9 + 1.2 + 0.8 + 0.6 + 0.5 + 0.2 - 0.3."""
    full = Candidate(key="k", recency=1, query_match=1, goal=1, novelty=1, timefit=1, affect=1, cost=1)

    assert core_salience(full) == pytest.approx(3.9)


def test_ranking_is_min_max_and_softmax_at_06() -> None:
    """Best and worst of a batch are e^(1/0.6) apart, whatever their scores; equals share evenly."""
    shares = rank([Candidate(key="low", recency=0.1), Candidate(key="high", recency=0.2)])

    assert list(shares) == ["high", "low"]
    assert shares["high"] / shares["low"] == pytest.approx(math.exp(1 / 0.6))
    assert rank([Candidate(key="a"), Candidate(key="b")]) == {"a": 0.5, "b": 0.5}
    with pytest.raises(InvalidRequest):
        rank([Candidate(key=str(number)) for number in range(65)])


@given(st.lists(st.floats(0, 1), max_size=64))
def test_shares_sum_to_one(values: list[float]) -> None:
    """Each lies in 0..1, and a better candidate never gets less."""
    shares = rank([Candidate(key=str(at), query_match=value) for at, value in enumerate(values)])

    assert sum(shares.values()) == pytest.approx(1.0 if values else 0.0)
    assert all(0 < share <= 1 for share in shares.values())
    ordered = [values[int(key)] for key in shares]
    assert all(one >= other - 1e-9 for one, other in itertools.pairwise(ordered))


@given(st.floats(0, 1), st.floats(-10, 1e6))
def test_weights_only_ever_fade(weight: float, elapsed_s: float) -> None:
    """A clock that went back does not strengthen them."""
    assert 0 <= decayed(weight, elapsed_s) <= weight
