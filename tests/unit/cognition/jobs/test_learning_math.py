"""The arithmetic of learning gives the values that can be worked out by hand."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidings.cognition.jobs.learning_math import (
    Sample,
    Scored,
    bin_of,
    brier,
    expected_calibration_error,
    fit_logistic,
    fit_platt,
    fit_temperature,
    learning_rate,
    log_loss,
)
from tidings.cognition.ports import sigmoid


@pytest.mark.req("L4")
@pytest.mark.parametrize(("arousal", "valence", "expected"), [(0.65, 0.2, 0.0109), (0.9, -0.5, 0.01054)])
def test_affect_moves_the_learning_rate(arousal: float, valence: float, expected: float) -> None:
    """Excitement raises the rate and displeasure lowers it, by the stated formula."""
    assert learning_rate(0.01, arousal, valence) == pytest.approx(expected, abs=1e-12)


def test_unknown_affect_leaves_the_rate_alone() -> None:
    """Without affect the rate is eta, and surprise counts only with a gain."""
    assert learning_rate(0.01, None, None, surprise=0.9) == 0.01
    assert learning_rate(0.01, None, None, surprise=0.5, surprise_gain=0.4) == pytest.approx(0.012)


def test_one_step_of_the_logistic_fit_is_the_formula() -> None:
    """From w = 0 one row moves each weight by rate * (0.5 - y) * x, with no penalty on zero weights."""
    fit = fit_logistic([Sample({"a": 2.0, "b": -1.0}, 1.0, 0.1)], l2=0.5, passes=1)

    assert fit.weights == pytest.approx({"a": 0.1, "b": -0.05})


def test_the_penalty_pulls_every_weight() -> None:
    """A weight whose feature is absent from the row shrinks by 2 * rate * l2 * w."""
    fit = fit_logistic([Sample({"a": 1.0}, 1.0, 0.1)], l2=0.25, passes=1, start={"a": 0.0, "b": 2.0})

    assert fit.weights["b"] == pytest.approx(2.0 - 2 * 0.1 * 0.25 * 2.0)
    assert fit.weights["a"] == pytest.approx(0.05)


def test_each_row_learns_at_its_own_rate() -> None:
    """A row with rate 0 teaches nothing."""
    rows = [Sample({"a": 1.0}, 1.0, 0.1), Sample({"a": 1.0}, 0.0, 0.0)]

    assert fit_logistic(rows, l2=0.0, passes=1).weights == fit_logistic(rows[:1], l2=0.0, passes=1).weights


def test_adagrad_takes_a_first_step_of_the_rate() -> None:
    """With squared gradients of one row only, the first step is the rate itself, whatever the gradient's size."""
    fit = fit_logistic([Sample({"a": 5.0}, 1.0, 0.1)], l2=0.0, passes=1, method="adagrad")

    assert fit.weights["a"] == pytest.approx(0.1, rel=1e-6)


def test_a_fit_finds_the_direction() -> None:
    """More passes lower the loss, and the weight has the sign of its feature's effect."""
    rows = [Sample({"bias": 1.0, "x": float(n % 7) - 3}, 1.0 if n % 7 > 3 else 0.0, 0.1) for n in range(200)]
    short, long = fit_logistic(rows, passes=1), fit_logistic(rows, passes=20)

    assert long.loss < short.loss < math.log(2)
    assert long.weights["x"] > 0


def test_platt_recovers_a_known_calibration() -> None:
    """Outcomes as frequent as sigmoid(2 s - 1) says are fitted by A = 2, B = -1."""
    scores = [-2.0, -1.0, 0.0, 0.5, 1.0, 2.0]
    fit = fit_platt(scores, [sigmoid(2 * score - 1) for score in scores])

    assert (fit.a, fit.b) == pytest.approx((2.0, -1.0), abs=1e-4)


def test_platt_stays_finite_when_scores_separate() -> None:
    """A score that tells the classes apart perfectly gives a steep fit, not an endless one."""
    fit = fit_platt([-1.0, -0.5, 0.5, 1.0], [0.0, 0.0, 1.0, 1.0])

    assert math.isfinite(fit.a)
    assert fit.a > 5


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.5])
def test_temperature_is_recovered(temperature: float) -> None:
    """Outcomes as frequent as sigmoid(z / T) says give T back."""
    scores = [-3.0, -1.5, -0.2, 0.4, 1.0, 2.0]

    assert fit_temperature(scores, [sigmoid(z / temperature) for z in scores]) == pytest.approx(temperature, rel=1e-4)


def test_brier_by_hand() -> None:
    """The mean of (p - y)^2: (0.04 + 0.09) / 2."""
    assert brier([Scored(0.8, 1), Scored(0.3, 0)]) == pytest.approx(0.065)
    assert brier([]) == 0.0


def test_calibration_error_by_hand() -> None:
    """Each bin counts by its share of the rows, and what it misses is |accuracy - confidence|."""
    rows = [Scored(0.8, 1), Scored(0.85, 0), Scored(0.1, 0), Scored(0.15, 1)]

    # 0.8 and 0.85 share a bin: |1/2 - 0.825| = 0.325; 0.1 and 0.15 share one: |1/2 - 0.125| = 0.375; half the rows each.
    assert expected_calibration_error(rows) == pytest.approx(0.5 * 0.325 + 0.5 * 0.375)


def test_bins_take_what_lies_outside() -> None:
    """Values beyond the ends belong to the outer bins; the upper end itself to the last one."""
    assert [bin_of(v, 0.0, 1.0, 10) for v in (-1.0, 0.0, 0.05, 0.1, 0.99, 1.0, 7.0)] == [0, 0, 0, 1, 9, 9, 9]
    assert [bin_of(v, 2.0, 2.0, 10) for v in (1.0, 2.0, 3.0)] == [0, 5, 9]


@given(st.lists(st.tuples(st.floats(0, 1), st.sampled_from([0.0, 1.0])), min_size=1, max_size=40))
def test_scores_stay_in_their_ranges(pairs: list[tuple[float, float]]) -> None:
    """Brier and calibration error lie in 0..1 and loss is finite, whatever the rows; a fit never fails on them."""
    rows = [Scored(*pair) for pair in pairs]
    zs, ys = [40 * row.p - 20 for row in rows], [row.y for row in rows]

    assert 0 <= brier(rows) <= 1
    assert 0 <= expected_calibration_error(rows) <= 1
    assert math.isfinite(log_loss(rows))
    assert math.isfinite(fit_platt(zs, ys).a)
    assert 0.05 <= fit_temperature(zs, ys) <= 20 + 1e-9


def test_platt_finds_the_lowest_loss_from_far_away() -> None:
    """Where the first full step would overshoot, the fit is still as good as the best of a fine grid."""
    chance = random.Random(3)
    scores = [12 * (chance.random() - 0.5) for _ in range(32)]
    outcomes = [float(chance.random() < sigmoid(score / 3)) for score in scores]

    def loss(a: float, b: float) -> float:
        return log_loss(Scored(sigmoid(a * score + b), y) for score, y in zip(scores, outcomes, strict=True))

    fit = fit_platt(scores, outcomes)
    assert loss(fit.a, fit.b) <= min(loss(a / 20, b / 20) for a in range(-20, 40) for b in range(-40, 40)) + 1e-9
