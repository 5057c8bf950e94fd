"""Every place in the code that makes a happening is on a list, and what leads to it is done here, one by one."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from tidings.happenings.filters import HappeningFilter
from tidings.happenings.happening import Happening, variants
from tools.happenings_page import SOURCES, Site, find_sites
from tools.reference import FOLDER

from .test_consistent_view import CASES, World, log, world

__all__ = ["log", "world"]  # fixtures

SITES: Final = find_sites()


def recorder(variant: type[Happening], made: set[tuple[str, str]]) -> Callable[..., Happening]:
    """Makes what the class makes, and notes who asked for it."""

    def make(**fields: Any) -> Happening:
        code = sys._getframe(1).f_code
        path = Path(code.co_filename).relative_to(SOURCES).as_posix()
        made.add((path, code.co_qualname.partition(".<locals>")[0]))
        return variant(**fields)

    return make


@pytest.mark.req("H76")
@pytest.mark.parametrize("site", SITES, ids=lambda site: f"{site.variant}-{site.scope}")
async def test_a_place_that_makes_a_happening_does_so(
    world: World, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    Doing what leads to a variant makes it in this very place, and it is told.
    """
    made: set[tuple[str, str]] = set()
    variant = variants()[site.variant]
    module = importlib.import_module(f"tidings.{site.path.removesuffix('.py').replace('/', '.')}")
    monkeypatch.setattr(module, variant.__name__, recorder(variant, made))

    await CASES[site.variant].act(world)

    assert (site.path, site.scope) in made
    only = HappeningFilter(variants=(site.variant,))
    assert [each async for each in world.ledger.happenings.history(filter=only)]


@pytest.mark.req("H76")
def test_every_place_is_on_the_list() -> None:
    """
    The page of happenings names each place, and no variant of ours is without one.
    """
    page = (FOLDER / "happenings.md").read_text(encoding="utf-8")
    ours = {name for name, variant in variants().items() if variant.__module__.startswith("tidings.")}

    assert {site.variant for site in SITES} == ours
    assert [site for site in SITES if f"`{site.path}` (`{site.scope}`)" not in page] == []
