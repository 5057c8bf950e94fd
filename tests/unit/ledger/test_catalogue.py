"""A catalogue says all that is wrong with it by name, and a ledger never stands without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.ledger.support import run, told
from tidings.happenings.variants import Cardinality
from tidings.ledger.catalogue import (
    BUILTIN_CATALOGUE,
    Catalogue,
    CatalogueInvalid,
    CatalogueSource,
    CurrentCatalogue,
    SetCatalogue,
    catalogue_command,
    load_catalogue,
    parse_catalogue,
)
from tidings.ledger.state import LedgerState

VERSION = "schema_version = 1\n"
TYPES = VERSION + '[[subjects]]\nname = "a"\n[[subjects]]\nname = "b"\n'


def relation(**keys: object) -> str:
    given: dict[str, Any] = {"predicate": "p", "source_type": "a", "target_type": "b"} | keys
    return "[[relation]]\n" + "".join(f"{key} = {value!r}\n" for key, value in given.items())


def rack(*shelves: str, name: str = "r", charter: str = "for tests") -> str:
    text = f'[[racks]]\nname = "{name}"\ncharter = "{charter}"\n'
    return text + "".join(f'[[racks.shelves]]\nname = "{shelf}"\nshape = 1\n' for shelf in shelves)


def test_a_catalogue_is_read_from_its_document() -> None:
    """Declarations are found by their names, and cardinalities are many unless said."""
    current = CurrentCatalogue()
    text = (
        TYPES + rack("s", "x.y") + relation(target_cardinality="at_most_one") + relation(predicate="q", source_type="*")
    )
    current.put(parse_catalogue(text), CatalogueSource.CONFIGURED)

    predicate = current.predicate("p")
    assert predicate is not None
    assert (predicate.source_cardinality, predicate.target_cardinality) == (Cardinality.MANY, Cardinality.AT_MOST_ONE)
    assert [predicate.takes_source(kind) for kind in "ab"] == [True, False]
    assert [predicate.takes_target(kind) for kind in "ab"] == [False, True]
    anything = current.predicate("q")
    assert anything is not None
    assert anything.takes_source("r.s")
    assert current.predicate("z") is None
    assert [current.declares_type(kind) for kind in ("a", "b", "r.s")] == [True, True, False]
    declared = current.rack("r")
    assert declared is not None
    assert [shelf.name for shelf in declared.shelves] == ["s", "x.y"]
    assert current.rack("q") is None


@pytest.mark.parametrize(
    ("text", "stage", "place"),
    [
        ("schema_version = ", "parse", "document"),
        (b"\xff", "parse", "document"),
        ("", "schema", "document"),
        ("schema_version = 2", "schema", "schema_version"),
        ("schema_version = '1'", "schema", "schema_version"),
        (VERSION + "colour = 1", "schema", "document"),
        (VERSION + '[[subjects]]\nname = "a"\nage = 3', "schema", "subjects[0]"),
        (VERSION + '[[subjects]]\nname = ""', "schema", "subjects"),
        (VERSION + '[[subjects]]\nname = "a b"', "schema", "subjects"),
        (VERSION + '[[subjects]]\nname = "a.b"', "schema", "subjects"),
        (VERSION + '[[subjects]]\nname = "*"', "schema", "subjects"),
        (VERSION + '[[subjects]]\nname = "a"\n[[subjects]]\nname = "a"', "schema", "subjects"),
        (VERSION + rack(charter=" "), "schema", "racks.r"),
        (VERSION + rack(name="a.b"), "schema", "racks"),
        (VERSION + rack() + rack(), "schema", "racks"),
        (VERSION + rack("s", "s"), "schema", "racks.r.shelves"),
        (VERSION + rack(".s"), "schema", "racks.r.shelves"),
        (TYPES + relation(source_type=[]), "schema", "relation.p.source_type"),
        (TYPES + relation(source_type="c"), "schema", "relation.p.source_type"),
        (TYPES + relation(target_type=["a", "c"]), "schema", "relation.p.target_type"),
        (TYPES + relation(target_cardinality="some"), "schema", "relation[0].target_cardinality"),
        (TYPES + relation() + relation(), "schema", "relation"),
        (TYPES + relation(inverse="q"), "schema", "relation.p.inverse"),
        (TYPES + relation(inverse="q") + relation(predicate="q"), "schema", "relation.p.inverse"),
        (TYPES + relation(inverse="q") + relation(predicate="q", inverse="p"), "schema", "relation.p.inverse"),
    ],
)
def test_what_is_wrong_is_named(text: str | bytes, stage: str, place: str) -> None:
    """A document that is no TOML, has unknown keys or wrong kinds, or declares what cannot be, is refused at its place."""
    with pytest.raises(CatalogueInvalid) as refused:
        parse_catalogue(text)

    assert (refused.value.stage, refused.value.place.removeprefix("$.")) == (stage, place)


def state_with(catalogue: Catalogue | None) -> LedgerState:
    state = LedgerState(CurrentCatalogue())
    if catalogue is not None:
        run(state, SetCatalogue(catalogue=catalogue))
    return state


@pytest.mark.parametrize("content", [None, "nonsense"])
@pytest.mark.parametrize(("before", "source"), [(None, "builtin"), (parse_catalogue(TYPES), "lkg")])
def test_a_file_that_cannot_be_used_leaves_the_last_good_one(
    tmp_path: Path, content: str | None, before: Catalogue | None, source: str
) -> None:
    """A missing or broken file: what the ledger had stays in use, or what declares nothing; the reason is told."""
    path = tmp_path / "catalogue.toml"
    if content is not None:
        path.write_text(content)
    state = state_with(before)

    command = catalogue_command(state, path)
    assert command is not None
    happenings = told(run(state, command))

    assert [(each["type"], each["source"]) for each in happenings] == [("catalogue_fallback", source)]
    assert "catalogue cannot be used" in happenings[0]["reason"]
    current = state.part(CurrentCatalogue)
    assert (current.catalogue, current.source) == (before or BUILTIN_CATALOGUE, source)

    path.write_text(TYPES)
    repaired = catalogue_command(state, path)
    assert repaired is not None
    run(state, repaired)
    assert (current.catalogue, current.source) == (load_catalogue(path), "configured")
    assert catalogue_command(state, path) is None


def test_another_catalogue_is_told() -> None:
    """The first one is not told, the same again is no change, another one is told; nothing given leaves it as it was."""
    first, second = parse_catalogue(TYPES), parse_catalogue(VERSION + rack("s"))
    state = state_with(None)

    assert run(state, SetCatalogue(catalogue=first)).happenings == []
    assert not run(state, SetCatalogue(catalogue=first)).is_changed
    assert told(run(state, SetCatalogue(catalogue=second))) == [
        {"type": "catalogue_reloaded", "from_schema_version": 1, "to_schema_version": 1, "rack_count": 1}
    ]
    assert catalogue_command(state, None) is None
    with pytest.raises(CatalogueInvalid):
        catalogue_command(state, Catalogue(schema_version=7))
