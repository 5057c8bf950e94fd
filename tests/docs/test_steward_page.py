"""The page about the steward says what the code does."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Final

from tidings.wire.steward.requests import REQUESTS, StewardRequest

PAGE: Final = Path(__file__).parents[2] / "docs" / "topics" / "steward.md"
RIGHTS: Final = {"nothing": "-", "read": "`read`", "subscribe": "`subscribe`", "act": "`publish`"}


def row(op: str, kind: type[StewardRequest]) -> str:
    """The line of an operation."""
    capability = "-" if kind.capability is None else f"`{kind.capability}`"
    right = RIGHTS[kind.need]
    if kind.capability not in (None, "plugins"):
        right += ", `administer`"
    first = inspect.getdoc(kind).partition("\n\n")[0]  # type: ignore[union-attr]  # each has one; else this fails
    meaning = " ".join(first.split()).replace("``", "`")
    return f"| `{op}` | {capability} | {right} | {meaning} |"


def test_the_page_has_every_operation_with_what_it_takes() -> None:
    """The table of operations is that of the declarations, in their order."""
    section = PAGE.read_text().partition("## Operations")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `.*$", section, re.MULTILINE) == [row(op, kind) for op, kind in REQUESTS.items()]
