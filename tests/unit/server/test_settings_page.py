"""The page about the node's settings is true."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from tidings.server.settings import RELOADABLE, NodeSettings, ServerSettings

PAGE: Final = (Path(__file__).parents[3] / "docs/reference/node-settings.md").read_text(encoding="utf-8")


def rows(section: str) -> list[list[str]]:
    text = PAGE.split(f"## {section}\n")[1].split("\n## ")[0]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| `")]


def default_of(value: object) -> str:
    match value:
        case None:
            return "none"
        case bool():
            return f"`{str(value).lower()}`"
        case int():
            return f"`{value:_}`"
        case float():
            return f"`{value:g}`"
        case tuple():
            return f"`{list(value)}`"
    return f"`{value}`"


def test_the_page_has_every_setting_of_the_server() -> None:
    """Name and default of each setting, and whether SIGHUP takes it over, stand in the page in the code's order."""
    found = [(row[0], row[1], row[4] == "yes") for row in rows("ServerSettings")]

    values = ServerSettings()
    assert found == [
        (f"`{name}`", default_of(getattr(values, name)), name in RELOADABLE) for name in values.__struct_fields__
    ]


def test_the_page_has_every_section() -> None:
    """Each section of the tree is listed with the struct that it is."""
    assert [(row[0].strip("`"), row[1].rpartition(".")[2].strip("`")) for row in rows("Sections")] == [
        (field.name, type(getattr(NodeSettings(), field.name)).__name__)
        for field in msgspec.structs.fields(NodeSettings)
    ]
