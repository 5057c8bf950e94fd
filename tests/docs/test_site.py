"""The site that ``make docs`` builds: every page is in it and can be searched for, every link leads somewhere, nothing comes from elsewhere."""

from __future__ import annotations

import json
import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

import pytest

REPOSITORY: Final = Path(__file__).parents[2]
SITE: Final = REPOSITORY / "build/docs"
_LOADED: Final = {"script": "src", "img": "src", "iframe": "src", "link": "href"}


class Links(HTMLParser):
    """What a page links to, what it loads, and the places in it that can be linked to."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.linked: list[str] = []
        self.loaded: list[str] = []
        self.places: set[str] = set()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if "id" in given:
            self.places.add(given["id"])
        if tag == "a" and "href" in given:
            self.linked.append(given["href"])
        if tag in _LOADED and _LOADED[tag] in given:
            self.loaded.append(given[_LOADED[tag]])


@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_the_site_is_whole() -> None:
    """It builds without a warning; links and what pages load are files of the site; the search knows every page; diagrams have their script."""
    done = subprocess.run(["make", "docs"], cwd=REPOSITORY, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {page: Links(page) for page in sorted(SITE.rglob("*.html"))}
    sources = [path for path in (REPOSITORY / "docs").rglob("*.md") if path.name != "README.md"]
    assert {SITE / source.relative_to(REPOSITORY).with_suffix(".html") for source in sources} <= pages.keys()

    wrong = []
    for page, links in pages.items():
        for address in (*links.linked, *links.loaded):
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                assert address not in links.loaded, (page, address)
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            known = pages.get(target)
            if not target.is_file() or (parts.fragment and known and unquote(parts.fragment) not in known.places):
                wrong.append(f"{page.relative_to(SITE)}: {address}")
    assert wrong == []

    found = re.fullmatch(r"Search\.setIndex\((.*)\)", (SITE / "searchindex.js").read_text(encoding="utf-8").strip())
    assert found is not None
    index = json.loads(found[1])
    assert {f"{source.relative_to(REPOSITORY).with_suffix('')}" for source in sources} <= set(index["docnames"])
    assert {"retent", "idempot"} <= index["terms"].keys() | index["titleterms"].keys()
    drawn = [page for page in pages if 'class="mermaid"' in page.read_text(encoding="utf-8")]
    assert drawn
    assert all(any("mermaid" in address for address in pages[page].loaded) for page in drawn)
