"""
What every test shares: two Hypothesis profiles, that an interrupt interrupts, and one Spark session a run.

``ci`` draws the same examples every time, so a run differs from the last one only where the code does;
it is the default. ``dev`` draws fresh ones, and more of them: ``pytest --hypothesis-profile=dev``.
"""

from __future__ import annotations

import importlib
import signal
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, Phase, settings

# A shell that runs us in the background has interrupts ignored, and the processes that tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Neither profile has a deadline, and both allow slow drawing: a busy machine is no bug.
settings.register_profile(
    "ci",
    derandomize=True,
    database=None,
    max_examples=50,
    stateful_step_count=30,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "dev",
    max_examples=500,
    stateful_step_count=60,
    print_blob=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("ci")


SHARED_SESSIONS: Final = {
    "tests/unit/cognition/jobs/": "spark of the application",
    "tests/unit/pipeline/": "spark of the pipeline",
    "tests/integration/test_pipeline_": "spark of the pipeline",
}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """Tests that share a Spark session, which takes long to start, run in one process; there are two such sessions for two cores."""
    scheduler: Any = importlib.import_module("xdist.scheduler").LoadScopeScheduling(config, log)
    scheduler._split_scope = lambda nodeid: next(
        (session for folder, session in SHARED_SESSIONS.items() if nodeid.startswith(folder)), nodeid
    )
    return scheduler
