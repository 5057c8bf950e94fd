"""
Joins the requirements (docs/requirements.toml) and the tests' marks into docs/conformance.md.

    python -m tools.conformance            write the page
    python -m tools.conformance --check    say whether it is current; write nothing

Both fail, and name file and line, on a mark with an unknown id or on nothing that pytest runs. The page
depends on those two inputs alone, so that the same tree gives the same bytes on every machine.
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from .req_marks import Evidence, Problem, gather, read_tree

__all__ = ["Family", "Outcome", "build", "main", "parse_requirements", "render"]

REQUIREMENTS: Final = "docs/requirements.toml"
PAGE: Final = "docs/conformance.md"


@dataclass(frozen=True)
class Family:
    """A set of requirements that share a prefix; ``lines`` maps each id to what it asks for."""

    prefix: str
    title: str
    about: str
    lines: Mapping[str, str]


@dataclass(frozen=True)
class Outcome:
    """The page as it should be, and what stands in the way of believing it."""

    page: str
    problems: Sequence[Problem]


def parse_requirements(text: str) -> tuple[list[Family], list[Problem]]:
    """Read the requirements' file; ids that do not belong to their family are problems."""
    families: list[Family] = []
    problems: list[Problem] = []
    for prefix, table in tomllib.loads(text).items():
        families.append(Family(prefix, table["title"], table["about"], table["ids"]))
        problems.extend(
            Problem(REQUIREMENTS, 0, f"{each} stands among the {prefix} requirements")
            for each in table["ids"]
            if not (each.startswith(prefix) and each.removeprefix(prefix).isdigit())
        )
    return families, problems


def render(families: Sequence[Family], evidence: Iterable[Evidence]) -> str:
    """Write the page: counts first, then a table for each family."""
    tests: dict[str, set[str]] = {}
    for claim in evidence:
        tests.setdefault(claim.requirement_id, set()).add(claim.test)
    total = sum(len(family.lines) for family in families)
    shown = sum(each in tests for family in families for each in family.lines)
    out = [
        "# Conformance",
        "",
        "Made by `make conformance` from `docs/requirements.toml` and the tests' `req` marks; not edited by hand.",
        "",
        f"{shown} of {total} requirements are shown by tests; {total - shown} are open.",
        "",
        "| family | | shown | open | all |",
        "|---|---|---:|---:|---:|",
    ]
    for family in families:
        count = sum(each in tests for each in family.lines)
        size = len(family.lines)
        out.append(f"| [{family.prefix}](#{_anchor(family)}) | {family.title} | {count} | {size - count} | {size} |")
    for family in families:
        out += ["", f"## {family.prefix}: {family.title}", "", family.about, ""]
        out += ["| id | requirement | shown by |", "|---|---|---|"]
        out += [f"| {each} | {_cell(line)} | {_listing(tests.get(each, ()))} |" for each, line in family.lines.items()]
    return "\n".join(out) + "\n"


def build(root: Path) -> Outcome:
    """Read requirements and tests below ``root`` and decide what the page must be."""
    families, problems = parse_requirements((root / REQUIREMENTS).read_text(encoding="utf-8"))
    known = {each for family in families for each in family.lines}
    evidence, mark_problems = gather(read_tree(root))
    unknown = {
        Problem(claim.path, claim.line, f"unknown requirement {claim.requirement_id!r}")
        for claim in evidence
        if claim.requirement_id not in known
    }
    return Outcome(render(families, evidence), sorted({*problems, *mark_problems, *unknown}))


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code: 0 when the page is (now) current, 1 when it is not."""
    parser = argparse.ArgumentParser(prog="conformance", description="Which test shows which requirement.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail when the page is stale")
    parser.add_argument("--root", type=Path, default=Path(__file__).parent.parent, help="the repository")
    arguments = parser.parse_args(argv)
    root: Path = arguments.root
    outcome = build(root)
    for problem in outcome.problems:
        print(problem, file=sys.stderr)
    if outcome.problems:
        return 1
    page = root / PAGE
    is_current = page.exists() and page.read_text(encoding="utf-8") == outcome.page
    if arguments.check:
        if not is_current:
            print(f"{PAGE} is stale: run `make conformance` and commit it", file=sys.stderr)
        return 0 if is_current else 1
    if not is_current:
        page.write_text(outcome.page, encoding="utf-8")
        print(f"wrote {PAGE}")
    return 0


def _anchor(family: Family) -> str:
    return f"{family.prefix}-{family.title}".lower().replace(" ", "-")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _listing(tests: Iterable[str]) -> str:
    return "<br>".join(f"`{_cell(test)}`" for test in sorted(tests)) or "open"


if __name__ == "__main__":
    sys.exit(main())
