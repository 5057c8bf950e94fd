"""
Runs a program of ``document_programs`` as the asyncio prompt would, where ``await`` may stand outside of a function.

    python -m tests.scenarios.bus.document_program PROGRAM [MORE]

MORE is code that goes on where the program ended, with its names, to show what came of it.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "document_programs"


async def _go_on(parts: list[Any], names: dict[str, Any]) -> None:
    for part in parts:
        outcome = eval(part, names)
        if inspect.isawaitable(outcome):
            await outcome


def main(program: str, more: str = "") -> None:
    """Run one program, and then ``more``."""
    source = (FOLDER / f"{program}.txt").read_text(encoding="utf-8")
    names: dict[str, Any] = {"__name__": "__main__"}
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    parts = [compile(text, f"{program}.txt", "exec", flags, dont_inherit=True) for text in (source, more)]
    if "asyncio.run(" in source:  # a program with a loop of its own
        exec(parts[0], names)
    else:
        asyncio.run(_go_on(parts, names))


if __name__ == "__main__":
    main(*sys.argv[1:])
