"""
Makes the pages of the reference that follow from the code.

    python -m tools.reference            write them
    python -m tools.reference --check    say which are not current; write nothing
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from tidings.cli.reference import reference as cli_page

from .happenings_page import happenings_page
from .node_pages import http_page, metrics_page, sockets_page
from .python_pages import PACKAGES, page_name, python_page
from .table_pages import job_tables_page

__all__ = ["PAGES", "main"]

FOLDER: Final = Path(__file__).parents[1] / "docs" / "reference"
PAGES: Final[Mapping[str, Callable[[], str]]] = {
    **{page_name(package): functools.partial(python_page, package) for package in PACKAGES},
    "cli.md": cli_page,
    "happenings.md": happenings_page,
    "metrics.md": metrics_page,
    "http-operations.md": http_page,
    "socket-frames.md": sockets_page,
    "job-tables.md": job_tables_page,
}
"""What makes each of them."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the pages, or check them."""
    parser = argparse.ArgumentParser(prog="python -m tools.reference", description="Make the reference from the code.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page is not current")
    options = parser.parse_args(arguments)
    old = []
    for name, make in PAGES.items():
        path, page = FOLDER / name, make()
        if not path.exists() or path.read_text(encoding="utf-8") != page:
            old.append(name)
            if not options.check:
                path.write_text(page, encoding="utf-8")
    if options.check and old:
        print(f"not current: {', '.join(old)}; python -m tools.reference", file=sys.stderr)
    return 1 if options.check and old else 0


if __name__ == "__main__":
    sys.exit(main())
