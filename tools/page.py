"""Write a generated page, or check that it is current."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from .marks import Problem

__all__ = ["run"]


def run(
    prog: str,
    description: str,
    page: str,
    build: Callable[[Path], tuple[str, Sequence[Problem]]],
    argv: Sequence[str] | None = None,
) -> int:
    """
    Run the command that makes a page.

    Args:
        prog, description: For ``--help``.
        page: The page's path below the repository.
        build: Takes the repository. Returns the text of the page, and the problems that keep it from being made.
        argv: The arguments; those of the process unless given.

    Returns:
        The exit code: 0 if the page is (now) current, else 1.
    """
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when the page is stale")
    parser.add_argument("--root", type=Path, default=Path(__file__).parent.parent, help="the repository")
    arguments = parser.parse_args(argv)
    text, problems = build(arguments.root)
    for problem in problems:
        print(problem, file=sys.stderr)
    if problems:
        return 1
    path: Path = arguments.root / page
    is_current = path.exists() and path.read_text(encoding="utf-8") == text
    if arguments.check:
        if not is_current:
            print(f"{page} is stale: run `make conformance` and commit it", file=sys.stderr)
        return 0 if is_current else 1
    if not is_current:
        path.write_text(text, encoding="utf-8")
        print(f"wrote {page}")
    return 0
