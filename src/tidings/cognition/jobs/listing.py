"""The job set ``cognition``: temporal, consolidation and learning jobs, as registered in ``pyproject.toml``."""

from __future__ import annotations

from typing import Final

from tidings.pipeline.jobs.job import Job

from . import (
    consolidation_duplicates,
    consolidation_memories,
    consolidation_retention,
    consolidation_rollups,
    learning_fit,
    learning_gate,
    learning_quality,
    learning_rows,
    learning_told,
    temporal_candidates,
    temporal_features,
    temporal_index,
)

JOBS: Final[tuple[Job, ...]] = tuple(
    job
    for module in (
        *(consolidation_duplicates, consolidation_memories, consolidation_retention, consolidation_rollups),
        *(learning_fit, learning_gate, learning_quality, learning_rows, learning_told),
        *(temporal_candidates, temporal_features, temporal_index),
    )
    for job in module.JOBS
)
