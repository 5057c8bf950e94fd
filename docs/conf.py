"""
How Sphinx makes a site of the pages: ``make docs``.

The pages stay plain Markdown, as a forge shows them.
Two things are done on the way: the navigation is made from the lists of links in ``index.md``, and a block in the
language ``mermaid`` is drawn in the browser, by a script that is part of the site.
"""

from __future__ import annotations

import html
import posixpath
import re
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

project = "Tidings"
extensions = ["myst_parser"]
root_doc = "docs/index"
include_patterns = ["*.md", "docs/*.md", "docs/**/*.md", "examples/*.md"]
myst_heading_anchors = 6
highlight_language = "text"

html_theme = "furo"
html_title = "Tidings"
html_static_path = ["../tools/site/static", "../tools/site/node_modules/@mermaid-js/tiny/dist"]
html_css_files = ["site.css"]
html_extra_path = ["../tools/site/index.html"]  # the pages keep their folders; this leads to the first of them
html_copy_source = False
html_show_copyright = False


class DrawnDiagrams(SphinxTransform):
    """A block in the language ``mermaid`` becomes the element that the script draws in."""

    default_priority = 200

    def apply(self) -> None:
        """Replace the blocks of one page."""
        for block in list(self.document.findall(nodes.literal_block)):
            if block.get("language") == "mermaid":
                element = f'<pre class="mermaid">{html.escape(block.astext())}</pre>'
                block.replace_self(nodes.raw("", element, format="html"))


def add_script(app: Sphinx, page: str, template: str, context: Any, document: nodes.document | None) -> None:
    """Load the script in pages that have a diagram; it draws them by itself."""
    if document is not None and any('class="mermaid"' in raw.astext() for raw in document.findall(nodes.raw)):
        app.add_js_file("mermaid.tiny.js", loading_method="defer")


def add_navigation(app: Sphinx, page: str, source: list[str]) -> None:
    """Put the links of each section of the first page into the navigation, in their order; the decisions come last."""
    if page != root_doc:
        return
    trees = []
    for title, section in re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", source[0], re.DOTALL | re.MULTILINE):
        links = re.findall(r"^- \[(.+?)\]\((.+?)\.md\)", section, re.MULTILINE)
        if links:
            trees.append((title, [f"{name} </{posixpath.normpath(f'docs/{file}')}>" for name, file in links]))
    trees.append(("Decisions", ["/docs/adr/*"]))
    for title, entries in trees:
        source[0] += "\n".join(["\n```{toctree}", ":hidden:", ":glob:", f":caption: {title}", "", *entries, "```\n"])


def outdated_pages(app: Sphinx, env: Any, added: set[str], changed: set[str], removed: set[str]) -> list[str]:
    """With a changed first page all pages are made anew, as each of them has the navigation."""
    return sorted(env.found_docs) if root_doc in changed else []


def setup(app: Sphinx) -> None:
    """Register them with Sphinx."""
    app.add_transform(DrawnDiagrams)
    app.connect("html-page-context", add_script)
    app.connect("source-read", add_navigation)
    app.connect("env-get-outdated", outdated_pages)
