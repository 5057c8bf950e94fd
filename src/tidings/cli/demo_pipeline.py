"""
The demo's pass of the pipeline: beside the node, in a process of its own, with a progress bar, and a report at the end.

The node is not waited for and does not wait: the pass reads the segments that the node writes, gives way to it on a busy
machine, and ends with it. What the jobs would tell the log is left to a run while no node has the workspace.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import signal
import sys
from pathlib import Path
from typing import Any, Final

from .session import Session

__all__ = ["REPORT", "has_pipeline", "pass_and_report"]

"""What the report shows first, and nothing that takes long on a small log."""
REPORT: Final = "report.html"
_NEEDED: Final = ("pyspark", "duckdb", "deltalake", "pyarrow")
_NICENESS: Final = 10
_END_S_MAX: Final = 5.0


def has_pipeline() -> bool:
    """Whether the packages of the pipeline are installed."""
    return all(importlib.util.find_spec(name) is not None for name in _NEEDED)


async def pass_and_report(session: Session) -> None:
    """Bring the tables up to the log, write the report, and say where it is; or say in a line why not."""
    out, workspace = session.out, session.workspace
    if not has_pipeline():
        out.note("no pass of the pipeline: its packages are not installed (pip install 'tidings[pipeline]')")
        return
    if not out.is_json:
        out.text("The pipeline goes over all this once, beside the node; the address of its report follows.")
        out.flush()
    where = ("--workspace", str(workspace))
    page = workspace / REPORT
    for command in (("run", "--once", *where), ("report", "--output", str(page), *where)):
        code, said = await _tool("pipeline", *command, is_shown=not out.is_json)
        if code:
            out.note(f"the pass of the pipeline ended early (exit code {code}){said}; the node goes on")
            return
    uri = page.resolve().as_uri()
    if out.is_json:
        out.json({"report": uri})
    else:
        out.text(f"The report of the pipeline is at {uri}. For a fresh one: {_again(workspace)}")
    out.flush()


def _again(workspace: Path) -> str:
    return f"tidings pipeline run -w {workspace} && tidings pipeline report -o {workspace / REPORT} -w {workspace}"


async def _tool(*args: str, is_shown: bool) -> tuple[int, str]:
    """Run a command of the tool to its end; its exit code, and what it said if nobody saw it."""
    nowhere = asyncio.subprocess.DEVNULL
    # A session of its own: Ctrl-C is for the node, which ends this in turn. Its bars reach the terminal all the same.
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tidings.cli", *args),
        stdin=nowhere,
        stdout=None if is_shown else nowhere,
        stderr=None if is_shown else asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        with contextlib.suppress(ProcessLookupError):
            os.setpriority(os.PRIO_PGRP, process.pid, _NICENESS)
        _, errors = await process.communicate()
    finally:
        await _ended(process)
    said = (errors or b"").decode(errors="replace").strip()
    return process.returncode or 0, f": {said[-400:]}" if said else ""


async def _ended(process: Any) -> None:
    """See that the process and those it started are gone, whatever ended the wait for it."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), _END_S_MAX)
