"""
What every test shares: three Hypothesis profiles, that an interrupt interrupts, an order by a seed, and one Spark session a run.

``ci`` draws the same examples every time, so a run differs from the last one only where the code does;
it is the default. ``full``, which ``make heavy`` uses, does so too and draws more. ``dev`` draws fresh ones, and more still:
``pytest --hypothesis-profile=dev``.
"""

from __future__ import annotations

import importlib
import random
import signal
from itertools import groupby
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, Phase, settings

# A shell that runs us in the background has interrupts ignored, and the processes that tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No profile has a deadline, and all allow slow drawing: a busy machine is no bug.
settings.register_profile(
    "ci",
    derandomize=True,
    database=None,
    max_examples=25,
    stateful_step_count=25,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("full", settings.get_profile("ci"), max_examples=60, stateful_step_count=30)
settings.register_profile(
    "dev",
    max_examples=500,
    stateful_step_count=60,
    print_blob=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("ci")


SPARK: Final = ("tests/integration/test_pipeline_", "tests/unit/cognition/jobs/", "tests/unit/pipeline/")
LONG: Final = ("tests/crash/", "tests/properties/", "tests/simulation/")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--order-seed``, which shows tests that depend on the ones before them."""
    parser.addoption(
        "--order-seed", type=int, default=None, help="shuffle modules, and the tests within each, by a seed"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Shuffle modules and their tests by the seed. Every process of a run shuffles alike."""
    seed: int | None = config.getoption("--order-seed")
    if seed is None:
        return
    chooser = random.Random(seed)
    modules = [list(tests) for _, tests in groupby(items, key=lambda item: item.nodeid.partition("::")[0])]
    chooser.shuffle(modules)
    for tests in modules:
        chooser.shuffle(tests)
    items[:] = [test for tests in modules for test in tests]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """
    Tests that share the Spark session, which takes long to start and to warm up, run in one process, and first.

    The tests of one file stay together, with the fixtures they share. Long ones come last, one by one: so all processes end at
    about the same time.
    """
    scheduler: Any = importlib.import_module("xdist.scheduler").LoadScopeScheduling(config, log)

    def scope(nodeid: str) -> str:
        if nodeid.startswith(SPARK):
            return "spark"
        return nodeid if nodeid.startswith(LONG) else nodeid.partition("::")[0]

    scheduler._split_scope = scope
    return scheduler
