"""The job set ``cognition``: temporal, consolidation and learning jobs, as registered in ``pyproject.toml``."""

from __future__ import annotations

from typing import Final

from tidings.pipeline.jobs.job import Job

from . import (
    consolidation_duplicates,
    consolidation_erasures,
    consolidation_keeping,
    consolidation_late,
    consolidation_retention,
    consolidation_rollups,
    consolidation_scrub,
    learning_actions,
    learning_bus,
    learning_drift,
    learning_fit,
    learning_gate,
    learning_predictions,
    learning_quality,
    learning_ranker,
    temporal_candidates,
    temporal_features,
    temporal_index,
    temporal_patterns,
    temporal_told,
)

__all__ = ["JOBS"]

JOBS: Final[tuple[Job, ...]] = (
    *consolidation_duplicates.JOBS,
    *consolidation_erasures.JOBS,
    *consolidation_keeping.JOBS,
    *consolidation_late.JOBS,
    *consolidation_retention.JOBS,
    *consolidation_rollups.JOBS,
    *consolidation_scrub.JOBS,
    *learning_actions.JOBS,
    *learning_bus.JOBS,
    *learning_drift.JOBS,
    *learning_fit.JOBS,
    *learning_gate.JOBS,
    *learning_predictions.JOBS,
    *learning_quality.JOBS,
    *learning_ranker.JOBS,
    *temporal_candidates.JOBS,
    *temporal_features.JOBS,
    *temporal_index.JOBS,
    *temporal_patterns.JOBS,
    *temporal_told.JOBS,
)
