"""
One space's rows in, one fit out: what a Spark task of L4 does, on plain values.

The first four fifths of the rows, by time, are learnt from and the last fifth is only looked at: a fit is judged by what came
after it, as it would be in use. It is promoted if it did better there than what it would replace, which is the mean of the
labels for weights and the raw score for a calibration.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

from .learning_math import (
    Sample,
    Scored,
    brier,
    expected_calibration_error,
    fit_logistic,
    fit_platt,
    fit_temperature,
    learning_rate,
    log_loss,
    platt,
    sigmoid,
    with_temperature,
)

__all__ = ["FitSettings", "TrainingRow", "fit_calibration", "fit_weights", "sample_of"]

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
