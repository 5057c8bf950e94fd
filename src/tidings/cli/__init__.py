"""The command line tool ``tidings``: one module a noun, ``main`` as the entry point."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """The entry point of the ``tidings`` command."""
    try:
        from .root import app

        app(prog_name="tidings")
    except (
        KeyboardInterrupt
    ):  # while its modules are imported, which takes long enough to press Ctrl-C; then it answers itself
        sys.exit(130)
