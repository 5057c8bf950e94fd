"""
Running a measurement in a process of its own, so that each begins with a clean heap and no warm state.

A measurement is a plain function from one struct (the case) to another (the result). Its name and the case travel to
``benchmarks.child`` as JSON, and the result comes back the same way.
"""

from __future__ import annotations

import importlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar, get_type_hints

import msgspec

__all__ = ["MeasurementFailed", "Runner", "answer", "in_child", "in_process", "instructions_of", "run_to_kill"]

ROOT: Final = Path(__file__).parents[1]
CHILD_S_MAX: Final = 3000.0

_C = TypeVar("_C", bound=msgspec.Struct)
_R = TypeVar("_R", bound=msgspec.Struct)
_COLLECTED: Final = re.compile(rb"Collected\s*:\s*([0-9]+)")


class MeasurementFailed(Exception):
    """A measuring process ended without a result."""

    def __init__(self, name: str, status: int, said: str) -> None:
        super().__init__(name, status, said)
        self.name = name
        self.status = status
        self.said = said

    def __str__(self) -> str:
        return f"{self.name} ended with status {self.status}:\n{self.said}"


class Runner(Protocol):
    """How a bench has a measurement run."""

    def __call__(self, measure: Callable[[_C], _R], case: _C) -> _R: ...


def in_process(measure: Callable[[_C], _R], case: _C) -> _R:
    """Run it here: for tests, which want no numbers."""
    return measure(case)


def in_child(measure: Callable[[_C], _R], case: _C) -> _R:
    """
    Run it in a process of its own.

    Raises:
        MeasurementFailed: It gave no result.
    """
    done = _start(measure, case)
    if done.returncode:
        raise MeasurementFailed(_name_of(measure), done.returncode, done.stderr.decode(errors="replace"))
    result_type: type[_R] = get_type_hints(measure)["return"]
    return msgspec.json.decode(done.stdout, type=result_type)


def run_to_kill(measure: Callable[[_C], None], case: _C) -> None:
    """
    Run something that ends by killing its own process.

    Raises:
        MeasurementFailed: It ended in another way.
    """
    done = _start(measure, case)
    if done.returncode != -signal.SIGKILL:
        raise MeasurementFailed(_name_of(measure), done.returncode, done.stderr.decode(errors="replace"))


def instructions_of(measure: Callable[[_C], _R], case: _C) -> int:
    """
    The instructions that a whole run executes, counted by valgrind.

    Raises:
        MeasurementFailed: It did not run, or nothing was counted.
        FileNotFoundError: There is no valgrind.
    """
    done = _start(measure, case, ("valgrind", "--tool=callgrind", f"--callgrind-out-file={os.devnull}"))
    found = _COLLECTED.search(done.stderr)
    if done.returncode or found is None:
        raise MeasurementFailed(_name_of(measure), done.returncode, done.stderr.decode(errors="replace"))
    return int(found[1])


def answer(request: bytes) -> bytes:
    """The child's part: find the function, run it on its case, encode what it found."""
    name, case = msgspec.json.decode(request, type=tuple[str, msgspec.Raw])
    module, _, function = name.partition(":")
    measure: Callable[[Any], Any] = getattr(importlib.import_module(module), function)
    hints = get_type_hints(measure)
    del hints["return"]
    (case_type,) = hints.values()
    return msgspec.json.encode(measure(msgspec.json.decode(case, type=case_type)))


def _name_of(measure: Callable[..., object]) -> str:
    return f"{measure.__module__}:{measure.__qualname__}"


def _start(
    measure: Callable[..., object], case: msgspec.Struct, prefix: Sequence[str] = ()
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [*prefix, sys.executable, "-m", "benchmarks.child"],
        input=msgspec.json.encode((_name_of(measure), case)),
        capture_output=True,
        cwd=ROOT,
        timeout=CHILD_S_MAX,
        check=False,
    )
