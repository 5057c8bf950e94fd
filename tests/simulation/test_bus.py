"""
The whole bus in a world where a seed decides what happens next: publishers, groups, operators, crashes at any step.

A failure names its seed and shows the steps that led to it; ``python -m tests.simulation SEED`` shows all of them.
"""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, cast

import pytest

from tests.simulation.world import SeedFailed, Simulation
from tidings.bus.store.offset_files import OffsetFiles
from tidings.log.embedded.disk import File
from tidings.testing import InterleavedDisk

PER_TEST: Final = 20
PER_HEAVY_TEST: Final = 100
GAP_STEPS: Final = 30


@pytest.fixture(autouse=True)
def _in_silence() -> Iterator[None]:
    """Handlers fail by the hundred, and each time somebody logs it."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.req("F53", "F54", "F68", "F71", "F127", "F131")
@pytest.mark.parametrize(
    "first",
    [
        *range(0, 2 * PER_TEST, PER_TEST),
        *(pytest.param(first, marks=pytest.mark.heavy) for first in range(2 * PER_TEST, 6 * PER_TEST, PER_TEST)),
    ],
)
def test_a_bus_keeps_its_promises_whatever_comes_between(first: int) -> None:
    """Nothing acknowledged is lost, nothing unacknowledged is dropped, order and bounds hold, and all is done in the end."""
    for seed in range(first, first + PER_TEST):
        Simulation(seed).run()


@pytest.mark.heavy
@pytest.mark.timeout(900)
@pytest.mark.parametrize("first", range(1000, 1000 + 30 * PER_HEAVY_TEST, PER_HEAVY_TEST))
def test_a_bus_keeps_its_promises_for_thousands_of_seeds(first: int) -> None:
    """The same, for many more."""
    for seed in range(first, first + PER_HEAVY_TEST):
        Simulation(seed).run()


def test_a_seed_takes_the_same_course_every_time() -> None:
    """Step for step, in another process with other hashes too."""
    seeds = [3, 5]
    courses = []
    for seed in seeds:
        simulation = Simulation(seed)
        simulation.run()
        courses.append(simulation.digests)
    program = (
        "import logging; logging.disable(50)\n"
        ""
        "from tests.simulation.world import Simulation\n"
        f"for seed in {seeds}:\n"
        "    simulation = Simulation(seed); simulation.run(); print(simulation.digests)\n"
    )
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONHASHSEED": "77", "PYTHONPATH": str(root)}
    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=root, env=environment, capture_output=True, text=True, check=True
    )
    assert ran.stdout.splitlines() == [str(course) for course in courses]


class GapDisk(InterleavedDisk):
    """A disk on which a file that is replaced is gone for a while: what two renames instead of one come to."""

    def rename(self, source: Path, target: Path) -> None:
        if target.parent.name == "offsets":
            self.remove(target)
            for _ in range(GAP_STEPS):  # a crash comes at one step of thousands: it would seldom meet a gap of one
                self._pause(f"without {target.name}")
        super().rename(source, target)


class HastyFile:
    """A file that says it is synced, and has not done it."""

    def __init__(self, file: File) -> None:
        self.read, self.write, self.size = file.read, file.write, file.size
        self.truncate, self.close = file.truncate, file.close

    def sync(self) -> None:
        pass


class HastyDisk(InterleavedDisk):
    """A disk whose journal is never synced."""

    def open(self, path: Path, *, create: bool = False, write: bool = False) -> File:
        file: Any = super().open(path, create=create, write=write)
        if path.parent.name == "journal":
            file = HastyFile(file)
        return cast("File", file)


def found(**options: Any) -> str:
    """What the first of sixty seeds that fails says; nothing if all keep their promises."""
    for seed in range(60):
        try:
            Simulation(seed, profile="whole", **options).run()
        except SeedFailed as error:
            return str(error.problem)
    return ""


def test_a_file_that_is_missing_for_a_moment_is_found() -> None:
    """A crash at that moment leaves a group without its place."""
    operations = ["compact", "seek", "leave"]
    pattern = "neither the offset file nor its backup|cannot go on|has not had|never given"
    told = found(interleaved=GapDisk, operations=operations, behaviours=["slow"], crashes=4)
    assert re.search(pattern, told)


def test_a_journal_without_syncs_is_found() -> None:
    """After a power cut something that a publisher was told is stored is not."""
    pattern = "and is None|and then to|nowhere|topic ends at|later records|no journal holds"
    assert re.search(pattern, found(interleaved=HastyDisk, operations=[], behaviours=[], crashes=3))


def test_a_group_that_is_overlooked_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compaction drops what the group has not had."""
    whole = OffsetFiles.acknowledged

    def acknowledged(store: OffsetFiles, *args: Any) -> Any:
        return {topic: dict(list(groups.items())[1:]) for topic, groups in whole(store, *args).items()}

    monkeypatch.setattr(OffsetFiles, "acknowledged", acknowledged)
    assert "has not had" in found(operations=["compact"], behaviours=["slow"], crashes=0)


def test_a_handler_that_never_ends_is_found() -> None:
    """What must be done in the end and is not is a failure, and not a test that hangs."""
    simulation = Simulation(3, profile="whole", crashes=0, behaviours=["hang"], operations=[])
    with pytest.raises(SeedFailed, match=r"has not ended|its window stayed full"):
        simulation.run()
