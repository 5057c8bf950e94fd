"""The reference of happenings, made from the declarations of the variants, their golden files, and the places that make them."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from tidings.happenings.description import VariantDescription, describe_variants
from tidings.happenings.happening import variants

__all__ = ["Site", "find_sites", "happenings_page", "render"]

ROOT: Final = Path(__file__).parents[1]
SOURCES: Final = ROOT / "src" / "tidings"
GOLDEN: Final = ROOT / "tests" / "unit" / "happenings" / "golden"
DECLARATIONS: Final = "happenings/variants.py"

_INTRODUCTION: Final = """\
# Happenings

Every variant of a happening, from its declaration in `src/tidings/happenings/variants.py`.
This page is made by `python -m tools.reference`, and a test keeps it current; [the topic](../topics/happenings.md) explains the rest.

In JSON every happening has `type`, the variant's name, and `at_ms`, when it was emitted, in milliseconds since 1970 in UTC.
A field that may be `null` is there all the same; one that may be absent is left out.
The set is open: consumers pass over types that they do not know.

The columns *plugin* and *shelf* name the field that a filter on plugins or shelves compares, *subjects* those whose values a filter on subjects compares, *labels* those by which subscribers coalesce, beside `variant`.
A variant without such a field is let through by no filter that asks for one.

## Variants

| variant | told when | fields | plugin | shelf | subjects | labels | made in |
|---|---|---|---|---|---|---|---|
"""


class Site(NamedTuple):
    """A place in the code that makes a happening."""

    variant: str
    path: str
    """Below ``src/tidings``."""
    scope: str
    """The function, or the class and its method."""


def find_sites(sources: Path = SOURCES) -> list[Site]:
    """Every call of a variant's class in our own code, by variant, path and scope."""
    names = {variant.__name__: name for name, variant in variants().items()}
    found: set[Site] = set()
    for path in sorted(sources.rglob("*.py")):
        relative, text = path.relative_to(sources).as_posix(), path.read_text(encoding="utf-8")
        if relative != DECLARATIONS and "happenings.variants" in text:  # nobody else can name them
            tree = ast.parse(text)
            known = _imported(tree) & names.keys()
            found |= {Site(names[name], relative, scope) for name, scope in _calls(tree, ()) if name in known}
    return sorted(found)


def _imported(tree: ast.AST) -> set[str]:
    """The names that a module has from that of the variants."""
    froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    return {each.name for node in froms if (node.module or "").endswith("happenings.variants") for each in node.names}


def _calls(node: ast.AST, scope: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """The name of everything that is called, or chosen to be, with its scope."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _calls(child, (*scope, child.name))
            continue
        match child:
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
                yield name, ".".join(scope)
            case ast.IfExp(body=ast.Name(id=first), orelse=ast.Name(id=second)):  # one of two, called further down
                yield first, ".".join(scope)
                yield second, ".".join(scope)
        yield from _calls(child, scope)


def render(described: Sequence[VariantDescription], sites: Sequence[Site], golden: Mapping[str, str]) -> str:
    """The page: a table of the variants, then the JSON of each."""
    rows = [_row(each, [site for site in sites if site.variant == each.name]) for each in described]
    forms = [f"### {name.replace('.', ', ')}\n\n```json\n{text}```\n" for name, text in golden.items()]
    return _INTRODUCTION + "\n".join(rows) + "\n\n## JSON\n\n" + "\n".join(forms)


def _row(described: VariantDescription, sites: Sequence[Site]) -> str:
    fields = "; ".join(
        f"`{field.name}`" if field.form == "text" else f"`{field.name}`: {_marked(field.form)}"
        for field in described.fields
    )
    cells = [
        f"`{described.name}`",
        described.text.replace("``", "`"),
        fields,
        _code([described.plugin] if described.plugin else []),
        _code([described.shelf] if described.shelf else []),
        _code(described.subjects),
        _code(described.labels[1:]),
        ", ".join(f"`{site.path}` (`{site.scope}`)" for site in sites) or "-",
    ]
    return f"| {' | '.join(cells)} |"


def _marked(form: str) -> str:
    return f"`{form}`" if form.startswith("{") and " or {" not in form else form.replace("{", "`{").replace("}", "}`")


def _code(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "-"


def happenings_page() -> str:
    """The page as it should be: our own variants, whoever else declared some in this process."""
    ours = {name for name, variant in variants().items() if variant.__module__.startswith("tidings.")}
    described = [each for each in describe_variants() if each.name in ours]
    order = {each.name: place for place, each in enumerate(described)}
    paths = sorted(GOLDEN.glob("*.json"), key=lambda path: (order[path.name.partition(".")[0]], path.name))
    golden = {path.stem: path.read_text(encoding="utf-8") for path in paths}
    return render(described, find_sites(), golden)
