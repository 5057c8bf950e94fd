"""What a run of the pipeline is doing, on stderr while it does it: a line for each stage that begins and ends, and bars on a terminal."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from tidings.core.clock import Clock
from tidings.pipeline.units import short_duration, short_number

from .output import Output

if TYPE_CHECKING:
    from tidings.pipeline.session import ProgressStep


@dataclass(slots=True)
class _Stage:
    began: float
    bar: TaskID | None = None
    """While it is under way; a stage may go on after a part of it was done."""
    rows: int | None = None
    """As last said."""


class RunProgress:
    """
    Receives the steps of one run, from any thread.

    With ``--json`` nothing is shown. On a terminal a stage has a bar while it is under way, elsewhere a line when it begins;
    either way a line says when it is done, how many rows it made and how long it took.
    """

    def __init__(self, out: Output, clock: Clock) -> None:
        self._out, self._clock = out, clock
        console = Console(stderr=True, highlight=False, markup=False, emoji=False)
        self._has_bars = console.is_terminal and not out.is_json
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rows]} rows"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not self._has_bars,
        )
        self._stages: dict[str, _Stage] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> RunProgress:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def __call__(self, step: ProgressStep, /) -> None:
        with self._lock:
            is_done = step.total is not None and step.done >= step.total
            stage = self._stages.get(step.stage)
            if stage is None:
                if not self._has_bars:
                    self._out.note(f"{step.stage} ...")
                stage = self._stages[step.stage] = _Stage(self._clock.monotonic())
            if stage.bar is None:
                if is_done and stage.rows == step.rows:
                    return  # it has been said
                stage.bar = self._progress.add_task(step.stage, total=step.total, rows=0)
            if is_done:
                self._progress.remove_task(stage.bar)
                stage.bar, stage.rows = None, step.rows
                took = short_duration(1000 * (self._clock.monotonic() - stage.began))
                self._say(f"{step.stage}: {short_number(step.rows)} rows in {took}")
            else:
                self._progress.update(stage.bar, completed=step.done, total=step.total, rows=short_number(step.rows))

    def _say(self, line: str) -> None:
        if self._has_bars:
            self._progress.console.print(line)
        else:
            self._out.note(line)
