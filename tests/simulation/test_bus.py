"""
The whole bus in a world where a seed decides what happens next: publishers, groups, operators, crashes at any step.

A failure names its seed and shows the steps that led to it; ``python -m tests.simulation SEED`` shows all of them.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.simulation.world import SeedFailed, Simulation
from tidings.log.embedded.disk import File
from tidings.testing import InterleavedDisk

FORCED: Final[dict[str, Any]] = {
    "profile": "whole",
    "operations": ["redrive", "drop_letter", "pause", "leave", "reopen"],
    "behaviours": ["fail", "slow", "publish", "nack", "spawn"],
}
PER_TEST: Final = 20
PER_HEAVY_TEST: Final = 100


@pytest.fixture(autouse=True)
def _in_silence() -> Iterator[None]:
    """Handlers fail by the hundred, and each time somebody logs it."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.req("F53", "F54", "F68", "F71", "F127", "F131")
@pytest.mark.parametrize("first", range(0, 5 * PER_TEST, PER_TEST))
def test_a_bus_keeps_its_promises_whatever_comes_between(first: int) -> None:
    """Nothing acknowledged is lost, nothing unacknowledged is dropped, order and bounds hold, and all is done in the end."""
    for seed in range(first, first + PER_TEST):
        Simulation(seed, **FORCED).run()


@pytest.mark.heavy
@pytest.mark.parametrize("first", range(1000, 1000 + 30 * PER_HEAVY_TEST, PER_HEAVY_TEST))
def test_a_bus_keeps_its_promises_for_thousands_of_seeds(first: int) -> None:
    """The same, for many more."""
    for seed in range(first, first + PER_HEAVY_TEST):
        Simulation(seed, **FORCED).run()


def test_a_seed_takes_the_same_course_every_time() -> None:
    """Step for step, in another process with other hashes too."""
    seeds = [3, 5]
    courses = []
    for seed in seeds:
        simulation = Simulation(seed, **FORCED)
        simulation.run()
        courses.append(simulation.digests)
    program = (
        "import logging; logging.disable(50)\n"
        "from tests.simulation.test_bus import FORCED\n"
        "from tests.simulation.world import Simulation\n"
        f"for seed in {seeds}:\n"
        "    simulation = Simulation(seed, **FORCED); simulation.run(); print(simulation.digests)\n"
    )
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONHASHSEED": "77", "PYTHONPATH": str(root)}
    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=root, env=environment, capture_output=True, text=True, check=True
    )
    assert ran.stdout.splitlines() == [str(course) for course in courses]


class GapDisk(InterleavedDisk):
    """A disk on which a file that is replaced is gone for a moment: what two renames instead of one come to."""

    def rename(self, source: Path, target: Path) -> None:
        if target.parent.name == "offsets":
            self.remove(target)
        super().rename(source, target)


class HastyDisk(InterleavedDisk):
    """A disk that says its journal is synced, and has not done it."""

    def open(self, path: Path, *, create: bool = False, write: bool = False) -> File:
        file = super().open(path, create=create, write=write)
        if path.parent.name == "journal":
            file.sync = lambda: None  # type: ignore[method-assign]
        return file


class ForgetfulDisk(InterleavedDisk):
    """A disk that does not tell the names of a group's files: who is not listed does not hold anything back."""

    def names(self, folder: Path) -> list[str]:
        names = super().names(folder)
        if folder.name == "offsets" and names:
            return [name for name in names if not name.startswith(names[0])]  # its backup neither
        return names


@pytest.mark.parametrize(
    ("disk", "forced"),
    [
        (GapDisk, {"operations": ["compact"], "behaviours": ["slow"]}),
        (ForgetfulDisk, {"operations": ["compact"], "behaviours": ["slow"]}),
        (HastyDisk, {"operations": [], "behaviours": [], "crashes": 3}),
    ],
)
def test_a_planted_fault_is_found(disk: type[InterleavedDisk], forced: dict[str, Any]) -> None:
    """A cursor that is missing for a moment, groups that are overlooked, a journal without syncs: some seed shows it."""
    for seed in range(200):
        try:
            Simulation(seed, interleaved=disk, **(FORCED | forced)).run()
        except SeedFailed:
            return
    pytest.fail("a check that cannot fail is none")


def test_a_handler_that_never_ends_is_found() -> None:
    """What must be done in the end and is not is a failure, and not a test that hangs."""
    simulation = Simulation(3, **(FORCED | {"crashes": 0, "behaviours": ["hang"], "operations": []}))
    with pytest.raises(SeedFailed, match="has not ended"):
        simulation.run()
