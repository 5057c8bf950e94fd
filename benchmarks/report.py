"""What a run found: rows with a verdict, the machine they were found on, and how both are shown."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from tidings.log.line_codec import IS_COMPILED

__all__ = ["Machine", "Report", "Row", "at_least", "at_most", "line_of", "machine_of", "noted", "show", "unsure"]

Verdict = Literal["pass", "miss", "unsure", "info"]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One figure, next to what it is compared with."""

    bench: str
    case: str
    unit: str
    ours: float
    baselines: dict[str, float] = {}
    ratio: float | None = None
    """Ours divided by the first baseline."""
    target: str = ""
    verdict: Verdict = "info"
    detail: dict[str, float | str] = {}


class Machine(msgspec.Struct, frozen=True):
    """Where the figures come from; without it they mean nothing."""

    cpu: str
    cores: int
    python: str
    loops: str
    lines: str
    """Whether the log's lines are put together by compiled code."""
    system: str
    file_system: str
    nice: int
    """How much this run gives way to others; 0 is not at all."""
    load_before: tuple[float, float, float]


class Report(msgspec.Struct, frozen=True):
    """A whole run."""

    started_at: str
    command: str
    scale: str
    machine: Machine
    rows: list[Row]
    load_after: tuple[float, float, float]
    others_cores: float | None
    """Cores that other processes kept busy, over the whole run."""
    steal_cores: float | None
    wall_s: float


def noted(bench: str, case: str, unit: str, ours: float, **detail: float | str) -> Row:
    """A figure without a target."""
    return Row(bench=bench, case=case, unit=unit, ours=ours, detail=detail)


def at_least(row: Row, floor: float, text: str | None = None) -> Row:
    """The row, judged: ours must not be below ``floor``."""
    return _judged(row, row.ours >= floor, text or f">= {_figure(floor)}")


def at_most(row: Row, ceiling: float, text: str | None = None) -> Row:
    """The row, judged: ours must not be above ``ceiling``."""
    return _judged(row, row.ours <= ceiling, text or f"<= {_figure(ceiling)}")


def unsure(row: Row) -> Row:
    """The row without its verdict: the figures contradict themselves."""
    return msgspec.structs.replace(row, verdict="unsure")


def _judged(row: Row, holds: bool, target: str) -> Row:
    return msgspec.structs.replace(row, target=target, verdict="pass" if holds else "miss")


def machine_of(folder: Path) -> Machine:
    """This machine, and the disk that ``folder`` is on."""
    return Machine(
        cpu=_cpu_model(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        python=f"{platform.python_implementation()} {platform.python_version()}",
        loops=f"uvloop {version('uvloop')}, asyncio",
        lines="compiled" if IS_COMPILED else "in Python",
        system=f"{platform.system()} {platform.release()}",
        file_system=_file_system(folder),
        nice=os.getpriority(os.PRIO_PROCESS, 0),
        load_before=os.getloadavg(),
    )


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _file_system(folder: Path) -> str:
    """The type of the file system below the longest mount point that ``folder`` lies in."""
    try:
        mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return "unknown"
    resolved = folder.resolve()
    inside = [(point, kind) for point, kind in mounts if resolved.is_relative_to(point)]
    kind = max(inside, key=lambda mount: len(mount[0]), default=("", "unknown"))[1]
    return f"{kind} (memory, not a disk: syncs cost nothing)" if kind in ("tmpfs", "ramfs") else kind


def show(report: Report) -> None:
    """Print the report as a table."""
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 170, highlight=False)
    machine = report.machine
    console.print(
        f"{machine.cpu}, {machine.cores} cores; {machine.python}; {machine.loops}; lines {machine.lines}; {machine.system}"
    )
    console.print(
        f"disk: {machine.file_system}; nice {machine.nice}; load before: {_load(machine.load_before)}; scale: {report.scale}"
    )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("bench", "case", "unit"):
        table.add_column(name, overflow="fold")
    table.add_column("ours", justify="right", no_wrap=True)
    table.add_column("baselines", overflow="fold")
    table.add_column("ratio", justify="right", no_wrap=True)
    for name in ("target", "verdict"):
        table.add_column(name)
    table.add_column("beside", overflow="fold")
    before = ""
    for row in report.rows:
        if before and row.bench != before:
            table.add_section()
        table.add_row(*_cells(row, before))
        before = row.bench
    console.print(table)
    console.print(_footer(report))


def line_of(row: Row) -> str:
    """The row as one line of text: for whoever waits for the table."""
    return "  ".join(filter(None, (f"{row.case}: {_figure(row.ours)} {row.unit}", row.target, *_beside(row))))


def _beside(row: Row) -> tuple[str, str]:
    return (
        ", ".join(f"{name} {_figure(value)}" for name, value in row.baselines.items()),
        ", ".join(f"{name} {_figure(v) if isinstance(v, float) else v}" for name, v in row.detail.items()),
    )


def _cells(row: Row, before: str) -> Sequence[str]:
    baselines, detail = _beside(row)
    colour = {"pass": "[green]pass[/]", "miss": "[red]miss[/]", "unsure": "[yellow]unsure[/]", "info": ""}[row.verdict]
    return (
        "" if row.bench == before else row.bench,
        row.case,
        row.unit,
        _figure(row.ours),
        baselines,
        "" if row.ratio is None else f"{row.ratio:.2f}",
        row.target,
        colour,
        detail,
    )


def _footer(report: Report) -> str:
    beside = "unknown"
    if report.others_cores is not None and report.steal_cores is not None:
        beside = f"{report.others_cores:.2f} cores (of it stolen by the hypervisor: {report.steal_cores:.2f})"
    met = sum(row.verdict == "pass" for row in report.rows)
    judged = sum(row.verdict != "info" for row in report.rows)
    return (
        f"{met} of {judged} targets met in {report.wall_s:.0f} s. Load after: {_load(report.load_after)}. "
        f"Other processes used {beside}.\n"
        "Where they used more than 0.4 cores, wall figures say how busy the machine was, too; CPU figures move less."
    )


def _load(load: tuple[float, float, float]) -> str:
    return " ".join(f"{figure:.2f}" for figure in load)


def _figure(value: float) -> str:
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
