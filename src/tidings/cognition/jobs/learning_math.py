"""
The arithmetic of learning, as plain functions: logistic regression, calibration, scores; and fitting one training set.

No Spark here. The same rows in the same order give the same numbers.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from ..neuromodulation import adjusted_eta
from ..ports import sigmoid

_Numbers = np.ndarray[Any, np.dtype[np.float64]]
PROBABILITY_FLOOR: Final = 1e-6
"""Probabilities are kept this far from 0 and 1 where a logarithm is taken."""
_TEMPERATURE_MIN: Final = 0.05
_TEMPERATURE_MAX: Final = 20.0
_GOLDEN: Final = (math.sqrt(5) - 1) / 2
_SEARCH_STEPS: Final = 80
_NEWTON_STEPS_MAX: Final = 50
_STEP_PART_MIN: Final = 1e-9
_STEP_MIN: Final = 1e-12
_ROUNDING: Final = 1e-12
_NEWTON_RIDGE: Final = 1e-6
"""Keeps Platt's fit finite where a score separates the classes perfectly."""
_ADAGRAD_FLOOR: Final = 1e-8


class Sample(NamedTuple):
    """One row to learn from: what was known, what came of it, how much it counts, and its own learning rate."""

    features: Mapping[str, float]
    y: float
    rate: float
    weight: float = 1.0


class Scored(NamedTuple):
    """A probability that was given, and what came of it."""

    p: float
    y: float


class LogisticFit(NamedTuple):
    """Weights by feature, and how the fit went."""

    weights: dict[str, float]
    loss: float
    """Mean log loss over the rows it was fitted on, after the last pass."""
    passes: int


class Calibration(NamedTuple):
    """Platt's A and B."""

    a: float
    b: float


def learning_rate(
    eta: float, arousal: float | None, valence: float | None, *, surprise: float = 0.0, surprise_gain: float = 0.0
) -> float:
    """``adjusted_eta`` of a row. Unknown affect leaves eta as it is, and surprise only counts with a gain above 0."""
    return adjusted_eta(
        eta,
        arousal=0.5 if arousal is None else arousal,
        valence=0.0 if valence is None else valence,
        surprise=surprise,
        surprise_gain=surprise_gain,
    )


def fit_logistic(
    rows: Sequence[Sample],
    *,
    l2: float = 1e-4,
    passes: int = 5,
    method: Literal["sgd", "adagrad"] = "sgd",
    start: Mapping[str, float] | None = None,
) -> LogisticFit:
    """
    Fit weights by w <- w - rate (sigmoid(w.x) - y) x - 2 rate l2 w, row after row, each at its own rate.

    With ``adagrad`` a feature's step is divided by the root of its squared gradients so far.

    Args:
        rows: In the order to learn them in.
        l2: The penalty; applied to every weight at every row.
        passes: How often to go through the rows.
        method: How steps shrink.
        start: Weights to begin with; zero where none is given.
    """
    names = sorted({name for row in rows for name in row.features} | set(start or {}))
    places = {name: place for place, name in enumerate(names)}
    weights = [0.0 if start is None else start.get(name, 0.0) for name in names]
    squares, penalty = [0.0] * len(names), 2.0 * l2
    # Features are taken in the order of their names: a sum of floats depends on its order.
    given = [[(places[name], row.features[name]) for name in sorted(row.features)] for row in rows]
    for _ in range(passes):
        for row, known in zip(rows, given, strict=True):
            error = (sigmoid(sum([weights[place] * value for place, value in known])) - row.y) * row.weight
            slopes = [penalty * weight for weight in weights]
            for place, value in known:
                slopes[place] += error * value
            rate = row.rate
            if method == "adagrad":
                squares = [square + slope * slope for square, slope in zip(squares, slopes, strict=True)]
                rates = [rate / (math.sqrt(square) + _ADAGRAD_FLOOR) for square in squares]
                weights = [w - each * slope for w, each, slope in zip(weights, rates, slopes, strict=True)]
            else:
                weights = [weight - rate * slope for weight, slope in zip(weights, slopes, strict=True)]
    fitted = dict(zip(names, weights, strict=True))
    return LogisticFit(fitted, log_loss(Scored(_score(fitted, row.features), row.y) for row in rows), passes)


def _score(weights: Mapping[str, float], features: Mapping[str, float]) -> float:
    return sigmoid(sum(weights.get(name, 0.0) * features[name] for name in sorted(features)))


def fit_platt(scores: Sequence[float], outcomes: Sequence[float]) -> Calibration:
    """
    A and B of p = sigmoid(A s + B) with the least log loss, by Newton's method from A = 1, B = 0.

    A step that would raise the loss is halved until it lowers it: a full one from far away lands on the flat ends of the
    sigmoid, from where the next goes further off still. The loss is convex, so what cannot be lowered is the answer.
    """
    s, y = np.asarray(scores, dtype=float), np.asarray(outcomes, dtype=float)
    a, b = 1.0, 0.0
    loss = _platt_loss(s, y, a, b)
    for _ in range(_NEWTON_STEPS_MAX):
        p = _sigmoids(a * s + b)
        spread = p * (1.0 - p)
        slope_a = _NEWTON_RIDGE * (a - 1.0) + float(((p - y) * s).sum())
        slope_b = _NEWTON_RIDGE * b + float((p - y).sum())
        h_aa, h_ab, h_bb = (float((spread * each).sum()) for each in (s * s, s, 1.0))
        h_aa, h_bb = h_aa + _NEWTON_RIDGE, h_bb + _NEWTON_RIDGE
        size = h_aa * h_bb - h_ab * h_ab
        if size <= 0.0:
            break
        step_a = (h_bb * slope_a - h_ab * slope_b) / size
        step_b = (h_aa * slope_b - h_ab * slope_a) / size
        part = 1.0
        # Where the loss is flat but for rounding, the slope still shows the way.
        most = loss + _ROUNDING * abs(loss)
        while (lower := _platt_loss(s, y, a - part * step_a, b - part * step_b)) > most and part > _STEP_PART_MIN:
            part /= 2
        if lower > most:
            break
        a, b, loss = a - part * step_a, b - part * step_b, lower
        if max(abs(step_a), abs(step_b)) < _STEP_MIN:
            break
    return Calibration(a, b)


def _platt_loss(scores: _Numbers, outcomes: _Numbers, a: float, b: float) -> float:
    """What Platt's fit lowers: the log loss, with ln(1 + e^z) written so that it neither overflows nor flattens out."""
    z = a * scores + b
    lost = np.maximum(z, 0.0) + np.log1p(np.exp(-np.abs(z))) - outcomes * z
    return 0.5 * _NEWTON_RIDGE * ((a - 1.0) ** 2 + b * b) + float(lost.sum())


def _sigmoids(z: _Numbers) -> _Numbers:
    small = np.exp(-np.abs(z))
    found: _Numbers = np.where(z >= 0.0, 1.0, small) / (1.0 + small)
    return found


def fit_temperature(scores: Sequence[float], outcomes: Sequence[float]) -> float:
    """T in 0.05 to 20 for which sigmoid(z / T) has the least log loss. The loss has one valley in 1 / T."""

    z, y = np.asarray(scores, dtype=float), np.asarray(outcomes, dtype=float)

    def loss(inverse: float) -> float:
        p = np.clip(_sigmoids(z * inverse), PROBABILITY_FLOOR, 1.0 - PROBABILITY_FLOOR)
        return float(-(y * np.log(p) + (1.0 - y) * np.log(1.0 - p)).mean())

    low, high = 1.0 / _TEMPERATURE_MAX, 1.0 / _TEMPERATURE_MIN
    left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    loss_left, loss_right = loss(left), loss(right)
    for _ in range(_SEARCH_STEPS):
        if loss_left <= loss_right:
            high, right, loss_right = right, left, loss_left
            left = high - _GOLDEN * (high - low)
            loss_left = loss(left)
        else:
            low, left, loss_left = left, right, loss_right
            right = low + _GOLDEN * (high - low)
            loss_right = loss(right)
    return 2.0 / (low + high)


def platt(score: float, calibration: Calibration) -> float:
    """sigmoid(A s + B)."""
    return sigmoid(calibration.a * score + calibration.b)


def with_temperature(z: float, temperature: float) -> float:
    """sigmoid(z / T)."""
    return sigmoid(z / temperature)


def brier(rows: Iterable[Scored]) -> float:
    """Mean (p - y)^2; 0 for no rows."""
    total, count = 0.0, 0
    for p, y in rows:
        total += (p - y) ** 2
        count += 1
    return total / count if count else 0.0


def log_loss(rows: Iterable[Scored]) -> float:
    """Mean -(y ln p + (1 - y) ln(1 - p)); 0 for no rows."""
    total, count = 0.0, 0
    for p, y in rows:
        held = _held(p)
        total -= y * math.log(held) + (1.0 - y) * math.log(1.0 - held)
        count += 1
    return total / count if count else 0.0


def expected_calibration_error(rows: Iterable[Scored], bins: int = 10) -> float:
    """Sum over equal-width bins of p of share * |accuracy - confidence|; 0 for no rows."""
    sums = [[0, 0.0, 0.0] for _ in range(bins)]
    for p, y in rows:
        cell = sums[bin_of(p, 0.0, 1.0, bins)]
        cell[0] += 1
        cell[1] += p
        cell[2] += y
    total = sum(cell[0] for cell in sums)
    return sum(abs(cell[2] - cell[1]) for cell in sums) / total if total else 0.0


def bin_of(value: float, low: float, high: float, bins: int) -> int:
    """Which of ``bins`` equal parts of low..high a value is in; what lies outside belongs to the part nearest to it."""
    if high <= low:
        return 0 if value < low else bins - 1 if value > high else bins // 2
    return min(bins - 1, max(0, math.floor((value - low) / (high - low) * bins)))


def _held(p: float) -> float:
    return min(1.0 - PROBABILITY_FLOOR, max(PROBABILITY_FLOOR, p))


_TRAINED_SHARE: Final = 0.8


class FitSettings(NamedTuple):
    """How to fit; each of these is a setting of the job."""

    eta: float = 0.01
    l2: float = 1e-4
    passes: int = 5
    method: Literal["sgd", "adagrad"] = "sgd"
    surprise_gain: float = 0.0
    drift_clip: float = 0.5
    """Where a feature drifts, no row learns faster than this part of eta."""
    rows_min: int = 20
    features_max: int = 256
    bins: int = 10


class TrainingRow(NamedTuple):
    """One row, in the order to learn in."""

    row_id: str
    features: Mapping[str, float]
    y: float
    weight: float
    p: float | None
    z: float | None
    arousal: float | None
    valence: float | None
    surprise: float | None


def sample_of(row: TrainingRow, settings: FitSettings, *, is_drifting: bool) -> Sample:
    """A row with its own learning rate: affect moves it, drift caps it."""
    rate = learning_rate(
        settings.eta, row.arousal, row.valence, surprise=row.surprise or 0.0, surprise_gain=settings.surprise_gain
    )
    if is_drifting:
        rate = min(rate, settings.drift_clip * settings.eta)
    return Sample(row.features, row.y, rate, row.weight)


def fit_weights(rows: Sequence[TrainingRow], settings: FitSettings, *, is_drifting: bool) -> dict[str, Any] | None:
    """Logistic weights for a space's rows; ``None`` for too few of them."""
    if len(rows) < settings.rows_min:
        return None
    kept = _bounded(rows, settings.features_max)
    samples = [sample_of(row, settings, is_drifting=is_drifting) for row in kept]
    cut = _cut(len(samples))
    trained, judged = samples[:cut], samples[cut:]
    fit = fit_logistic(trained, l2=settings.l2, passes=settings.passes, method=settings.method)
    prior = sum(row.y * row.weight for row in trained) / sum(row.weight for row in trained)
    guesses = [
        Scored(sigmoid(sum(fit.weights.get(name, 0.0) * row.features[name] for name in sorted(row.features))), row.y)
        for row in judged
    ]
    return {
        "model": "logistic",
        "weights": fit.weights,
        "rate_mean": sum(row.rate for row in trained) / len(trained),
        "loss_train": fit.loss,
        **_judgement(guesses, [Scored(prior, row.y) for row in judged], settings.bins),
        **_facts(rows, cut, is_drifting=is_drifting),
    }


def fit_calibration(rows: Sequence[TrainingRow], settings: FitSettings, *, is_drifting: bool) -> dict[str, Any] | None:
    """Platt's A and B, and the temperature, for one head of a space; ``None`` for too few rows."""
    scored = [(row.z, row.p, row.y) for row in rows if row.z is not None and row.p is not None]
    if len(scored) < settings.rows_min:
        return None
    cut = _cut(len(scored))
    zs, ys = [z for z, _, _ in scored[:cut]], [y for _, _, y in scored[:cut]]
    calibration, temperature = fit_platt(zs, ys), fit_temperature(zs, ys)
    return {
        "model": "calibration",
        "platt_a": calibration.a,
        "platt_b": calibration.b,
        "temperature": temperature,
        "loss_train": log_loss(Scored(platt(z, calibration), y) for z, y in zip(zs, ys, strict=True)),
        "loss_temperature": log_loss(Scored(with_temperature(z, temperature), y) for z, _, y in scored[cut:]),
        **_judgement(
            [Scored(platt(z, calibration), y) for z, _, y in scored[cut:]],
            [Scored(p, y) for _, p, y in scored[cut:]],
            settings.bins,
        ),
        **_facts(rows, cut, is_drifting=is_drifting),
    }


def _cut(count: int) -> int:
    return min(count - 1, max(1, int(count * _TRAINED_SHARE)))


def _bounded(rows: Sequence[TrainingRow], features_max: int) -> Sequence[TrainingRow]:
    """The rows with no more than so many features in all: the most frequent, so that a space's state stays small."""
    seen = Counter(name for row in rows for name in row.features)
    if len(seen) <= features_max:
        return rows
    kept = set(sorted(seen, key=lambda name: (-seen[name], name))[:features_max])
    return [row._replace(features={name: row.features[name] for name in row.features if name in kept}) for row in rows]


def _judgement(guesses: list[Scored], baseline: list[Scored], bins: int) -> dict[str, Any]:
    loss, loss_before = log_loss(guesses), log_loss(baseline)
    return {
        "rows_eval": len(guesses),
        "loss_eval": loss,
        "loss_baseline": loss_before,
        "brier_eval": brier(guesses),
        "brier_baseline": brier(baseline),
        "ece_eval": expected_calibration_error(guesses, bins),
        "is_promoted": loss < loss_before,
    }


def _facts(rows: Sequence[TrainingRow], cut: int, *, is_drifting: bool) -> dict[str, Any]:
    digest = hashlib.sha256()
    for row in rows:
        digest.update(f"{row.row_id}\x1f{row.y!r}\x1e".encode())
    return {
        "rows": len(rows),
        "rows_train": cut,
        "is_clipped": is_drifting,
        "dataset": digest.hexdigest()[:32],
    }


JOBS: Final = ()
