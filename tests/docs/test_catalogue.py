"""The catalogue's reference page is what the code reads."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from tidings.ledger.catalogue import (
    Catalogue,
    PredicateDeclaration,
    RackDeclaration,
    ShelfDeclaration,
    TypeDeclaration,
    parse_catalogue,
)

PAGE: Final = (Path(__file__).parents[2] / "docs/reference/catalogue.md").read_text()
SECTIONS: Final[dict[str, Any]] = {
    "The document": Catalogue,
    "`[[racks]]`": RackDeclaration,
    "`[[racks.shelves]]`": ShelfDeclaration,
    "`[[subjects]]`": TypeDeclaration,
    "`[[relation]]`": PredicateDeclaration,
}


@pytest.mark.parametrize("section", SECTIONS)
def test_the_page_has_every_key_with_its_default(section: str) -> None:
    """Each table lists the keys that are read there, and whether they must be given."""
    text = PAGE.partition(f"## {section}\n")[2].partition("\n## ")[0]
    listed = {
        key: default != "required"
        for key, default in re.findall(r"^\| `(\w+)` \| [^|]+ \| ([^|]+) \|", text, re.MULTILINE)
    }

    assert listed == {field.encode_name: not field.required for field in msgspec.structs.fields(SECTIONS[section])}


def test_the_example_can_be_used() -> None:
    """The document on the page is a catalogue."""
    found = re.search(r"```toml\n(.+?)```", PAGE, re.DOTALL)
    assert found is not None

    catalogue = parse_catalogue(found[1])

    assert [predicate.name for predicate in catalogue.predicates] == ["album_of", "contains"]
