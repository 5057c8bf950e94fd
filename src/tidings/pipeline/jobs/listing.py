"""The job set ``operations``: what every log has, traffic, groups and dead letters, as registered in ``pyproject.toml``."""

from __future__ import annotations

from typing import Final

from . import (
    dead_letter_analysis,
    group_health,
    sync_traffic,
    topic_minutes,
)
from .job import Job

__all__ = ["JOBS"]

JOBS: Final[tuple[Job, ...]] = (
    *dead_letter_analysis.JOBS,
    *group_health.JOBS,
    *sync_traffic.JOBS,
    *topic_minutes.JOBS,
)
