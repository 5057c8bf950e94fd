"""Before something is taken away: ask, and leave a record of who had it done."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any, Final

from tidings.core.events import Event, EventMeta
from tidings.log.interface import Log

from .errors import UsageProblem
from .output import Output

__all__ = ["AUDIT_TOPIC", "audit", "is_confirmed"]

AUDIT_TOPIC: Final = "audit"


def is_confirmed(out: Output, question: str, *, is_yes: bool) -> bool:
    """
    Whether to go ahead: by ``--yes``, or by what the person at the terminal answers.

    Raises:
        UsageProblem: Nobody is there to be asked.
    """
    if is_yes:
        return True
    if out.is_json or not sys.stdin.isatty():
        raise UsageProblem(
            "there is no terminal to ask on, so nothing was changed", "look with --dry-run, then give --yes"
        )
    out.note(f"{question} [y/N]")
    return sys.stdin.readline().strip().lower() in ("y", "yes")


async def audit(log: Log, verb: str, details: Mapping[str, Any]) -> int:
    """Record what is about to be done, durably, before it is done; returns the record's seq."""
    meta = EventMeta(topic=AUDIT_TOPIC, type=f"cli.{verb}", space_id="system", actor=f"cli:uid-{os.getuid()}")
    return (await log.append(Event(meta, details))).seq
