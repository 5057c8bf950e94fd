"""
Join the limits of the source, docs/bounds.toml and the tests' ``bound`` marks into docs/bounds.md.

A limit is a module constant or a field of a settings class whose name ends in ``_max``, ``_bytes``, ``_count`` or
``_s``, or begins with ``max_``. Each one has a row in
docs/bounds.toml, which states what happens beyond it, or belongs to a class of exempt ones, with one reason for the class. A limit with a
row is shown by a test that crosses it in operation, once by one and once tenfold, or it is open.

    python -m tools.bounds            write the page
    python -m tools.bounds --check    exit with 1 if the page is not current; write nothing

Both fail, and name file and line, on a limit without row and class, on a row or a pattern that matches no limit, on a mark for an unknown
limit, on a mark on nothing that pytest runs, and on a marked test without the parameter ``beyond`` (see tests/beyond.py).
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from . import page
from .marks import Evidence, Problem, gather, read_tree

__all__ = ["Limit", "build", "limits_of", "main"]

SOURCE: Final = "src/tidings"
BOUNDS: Final = "docs/bounds.toml"
PAGE: Final = "docs/bounds.md"
PARAMETER: Final = "beyond"

_LIMIT: Final = re.compile(r"^max_|_(?:max|bytes|count|s)$", re.IGNORECASE)
_SETTINGS: Final = re.compile(r"(?:Settings|Options|Limits)$")


@dataclass(frozen=True, order=True)
class Limit:
    """A limit of the source; ``name`` is ``package.module.NAME`` or ``package.module.Class.field``."""

    name: str
    path: str
    line: int


@dataclass(frozen=True)
class ExemptClass:
    """Limits that need no row, for one reason."""

    title: str
    reason: str
    patterns: Sequence[str]


@dataclass(frozen=True)
class Page:
    """The page as it should be, and the problems that keep it from being made."""

    text: str
    problems: Sequence[Problem]


def limits_of(root: Path) -> list[Limit]:
    """List the limits of the source below ``root``, sorted by name."""
    limits: list[Limit] = []
    base = root / SOURCE
    for path in sorted(base.rglob("*.py")):
        module = path.relative_to(base).with_suffix("").as_posix().replace("/", ".")
        shown = path.relative_to(root).as_posix()
        tree = ast.parse(path.read_text(encoding="utf-8"))
        limits += (Limit(f"{module}.{name}", shown, line) for name, line in _limit_names(tree.body))
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and _SETTINGS.search(node.name):
                limits += (Limit(f"{module}.{node.name}.{name}", shown, line) for name, line in _limit_names(node.body))
    return sorted(limits)


def build(root: Path) -> Page:
    """Decide what the page must be, from the source, the rows and the marks below ``root``."""
    limits = limits_of(root)
    table = tomllib.loads((root / BOUNDS).read_text(encoding="utf-8"))
    rows: Mapping[str, str] = table["bounds"]
    classes = [ExemptClass(title, each["reason"], each["names"]) for title, each in table["exempt"].items()]
    evidence, problems = gather(read_tree(root), "bound")
    tests: dict[str, set[str]] = {}
    for claim in evidence:
        tests.setdefault(claim.name, set()).add(claim.test)
    problems += _table_problems(limits, rows, classes)
    problems += _mark_problems(evidence, rows)
    return Page(_render(limits, rows, classes, tests), sorted(set(problems)))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return 0 if the page is (now) current, else 1."""
    description = "Write the page of limits and the tests that cross them."
    return page.run("bounds", description, PAGE, _built, argv)


def _built(root: Path) -> tuple[str, Sequence[Problem]]:
    made = build(root)
    return made.text, made.problems


def _limit_names(body: Iterable[ast.stmt]) -> Iterator[tuple[str, int]]:
    for node in body:
        match node:
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
                if _LIMIT.search(name):
                    yield name, node.lineno
            case _:
                pass


def _table_problems(
    limits: Sequence[Limit], rows: Mapping[str, str], classes: Sequence[ExemptClass]
) -> Iterator[Problem]:
    names = {limit.name for limit in limits}
    for limit in limits:
        exempt = [each.title for each in classes if _is_in(limit.name, each)]
        if limit.name in rows and exempt:
            yield Problem(BOUNDS, 0, f"{limit.name} has a row and is exempt as {exempt[0]!r}")
        elif limit.name not in rows and not exempt:
            yield Problem(limit.path, limit.line, f"{limit.name} has no row in {BOUNDS} and belongs to no exempt class")
        elif len(exempt) > 1:
            yield Problem(BOUNDS, 0, f"{limit.name} is in two exempt classes: {', '.join(exempt)}")
    for name in rows:
        if name not in names:
            yield Problem(BOUNDS, 0, f"{name} is not a limit of the source")
    for each in classes:
        for pattern in each.patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                yield Problem(BOUNDS, 0, f"{pattern} of the exempt class {each.title!r} matches no limit")


def _mark_problems(evidence: Iterable[Evidence], rows: Mapping[str, str]) -> Iterator[Problem]:
    for claim in evidence:
        if claim.name not in rows:
            yield Problem(claim.path, claim.line, f"{claim.name!r} has no row in {BOUNDS}")
        if PARAMETER not in claim.parameters:
            yield Problem(claim.path, claim.line, f"a test that crosses a limit takes the parameter {PARAMETER!r}")


def _is_in(name: str, exempt: ExemptClass) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in exempt.patterns)


def _render(
    limits: Sequence[Limit],
    rows: Mapping[str, str],
    classes: Sequence[ExemptClass],
    tests: Mapping[str, set[str]],
) -> str:
    exempt = {each.title: [limit.name for limit in limits if _is_in(limit.name, each)] for each in classes}
    shown = sum(name in tests for name in rows)
    out = [
        "# Limits",
        "",
        "Made by `make conformance` from the source, `docs/bounds.toml` and the tests' `bound` marks; not edited by hand.",
        "",
        f"The source has {len(limits)} limits. {len(rows)} of them can be reached by a client, a handler, a file or the clock: {shown} are crossed "
        f"by a test, by one and tenfold, and {len(rows) - shown} are open. {sum(map(len, exempt.values()))} are exempt.",
        "",
        "| limit | beyond it | crossed by |",
        "|---|---|---|",
    ]
    for name in sorted(rows):
        crossed = "<br>".join(f"`{test}`" for test in sorted(tests.get(name, ()))) or "open"
        out.append(f"| `{name}` | {rows[name].replace('|', chr(92) + '|')} | {crossed} |")
    out += ["", "## Exempt", "", "| class | reason | limits |", "|---|---|---:|"]
    out += (f"| {each.title} | {each.reason} | {len(exempt[each.title])} |" for each in classes)
    return "\n".join(out) + "\n"


if __name__ == "__main__":
    sys.exit(main())
