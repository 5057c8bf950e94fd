"""
Before something is changed: the plan is shown, the person is asked, and a record of who had it done is left.

A verb that changes the workspace plans first, and shows that with ``--dry-run``; then it asks, opens the log as its one writer, plans anew,
as things may have moved meanwhile, records it with ``audit``, and does it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import Annotated, Any

import typer

from tidings.bus.audit import Audit
from tidings.log.errors import WorkspaceBusy
from tidings.log.interface import Log

from .errors import ExitCode, UsageProblem
from .output import Output
from .session import Session

__all__ = ["YesOption", "ask", "asker", "audit", "check_dry_run", "keep_to_oneself"]

YesOption = Annotated[bool, typer.Option("--yes", help="Do not ask.")]


def check_dry_run(*, is_dry_run: bool, is_yes: bool) -> None:
    """
    Make sure that the options agree.

    Raises:
        UsageProblem: They do not.
    """
    if is_dry_run and is_yes:
        raise UsageProblem("--dry-run and --yes exclude each other")


def keep_to_oneself(session: Session) -> None:
    """
    Make sure that nobody has the workspace open, before anybody is asked about what cannot be done.

    Raises:
        WorkspaceBusy: Somebody has.
    """
    if (writer := session.writer()) is not None:
        raise WorkspaceBusy(session.workspace, writer)


def ask(out: Output, question: str, *, is_yes: bool) -> None:
    """
    Go ahead by ``--yes``, or by what the person at the terminal answers; otherwise the command ends here.

    Raises:
        UsageProblem: Nobody is there to be asked.
    """
    if is_yes:
        return
    if out.is_json or not sys.stdin.isatty():
        raise UsageProblem(
            "there is no terminal to ask on, so nothing was changed", "look with --dry-run, then give --yes"
        )
    out.note(f"{question} [y/N]")
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        out.note("nothing was changed")
        raise typer.Exit(ExitCode.PROBLEM)


def asker() -> Audit:
    """The user of the machine, as the audit names them."""
    return Audit(f"cli:uid-{os.getuid()}", "cli")


def audit(
    log: Log, verb: str, details: Mapping[str, Any], *, frees_space: bool = False
) -> AbstractAsyncContextManager[int | None]:
    """Make a change within this: it is on record before, and how it ended after. See ``Audit.of``."""
    return asker().of(log, verb, details, frees_space=frees_space)
