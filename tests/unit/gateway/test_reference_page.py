"""The gateway's reference is true."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tidings.gateway.settings import NOT_RELOADABLE, EventSettings

PAGE = (Path(__file__).parents[3] / "docs/reference/gateway.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("section", EventSettings.__struct_fields__)
def test_the_page_has_every_setting(section: str) -> None:
    """Name, default, range and whether a reload takes it stand in the page, in the code's order."""
    values = getattr(EventSettings(), section)
    table = PAGE.split(f"### {type(values).__name__}\n")[1].split("\n### ")[0].split("\nA reload")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("| `")]

    def default_of(value: object) -> str:
        match value:
            case None:
                return "none"
            case bool():
                return f"`{str(value).lower()}`"
            case int():
                return f"`{value:_}`"
        assert isinstance(value, tuple)
        return f"`{list(value)}`"

    assert [(row[0], row[1], row[3] == "yes") for row in rows] == [
        (f"`{name}`", default_of(getattr(values, name)), f"{section}.{name}" not in NOT_RELOADABLE)
        for name in values.__struct_fields__
    ]
    for row in rows:
        if " to " in row[2]:
            lowest, highest = (int(each.replace("_", "")) for each in row[2].split(" to "))
            for outside in (lowest - 1, highest + 1):
                with pytest.raises(msgspec.ValidationError):
                    msgspec.convert({row[0].strip("`"): outside}, type(values))
            msgspec.convert({row[0].strip("`"): highest}, type(values))
