"""
Joins the requirements (docs/requirements.toml) and the tests' marks into docs/conformance.md.

A requirement is shown (by tests), measured (by a benchmark, whose command is named), unmet (with what is lacking and what holds
instead), or open.

    python -m tools.conformance            write the page
    python -m tools.conformance --check    say whether it is current; write nothing

Both fail, and name file and line, on a mark with an unknown id, on a mark on nothing that pytest runs, and on a mark for what is
said to be measured or unmet. The page depends on those two inputs alone, so that the same tree gives the same bytes on every
machine.
"""

from __future__ import annotations

import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from . import page
from .marks import Evidence, Problem, gather, read_tree

__all__ = ["Family", "Outcome", "build", "main", "parse_requirements", "render"]

REQUIREMENTS: Final = "docs/requirements.toml"
PAGE: Final = "docs/conformance.md"


State = Literal["shown", "measured", "unmet", "open"]
_STATES: Final[tuple[State, ...]] = ("shown", "measured", "unmet", "open")


@dataclass(frozen=True)
class Family:
    """
    A set of requirements that share a prefix; ``lines`` maps each id to what it asks for.

    ``measured`` maps ids to where a benchmark measures them, ``unmet`` maps ids to why they are not met and what holds instead.
    """

    prefix: str
    title: str
    about: str
    lines: Mapping[str, str]
    measured: Mapping[str, str]
    unmet: Mapping[str, str]

    def states(self, tests: Mapping[str, set[str]]) -> Iterator[State]:
        """The state of each requirement."""
        for each in self.lines:
            if each in self.measured:
                yield "measured"
            elif each in self.unmet:
                yield "unmet"
            else:
                yield "shown" if each in tests else "open"


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
        measured, unmet = table.get("measured", {}), table.get("unmet", {})
        families.append(Family(prefix, table["title"], table["about"], table["ids"], measured, unmet))
        problems.extend(
            Problem(REQUIREMENTS, 0, f"{each} stands among the {prefix} requirements")
            for each in table["ids"]
            if not (each.startswith(prefix) and each.removeprefix(prefix).isdigit())
        )
        problems.extend(
            Problem(REQUIREMENTS, 0, f"{each} is said to be measured or unmet, and is no requirement")
            for each in (*measured, *unmet)
            if each not in table["ids"]
        )
        problems.extend(
            Problem(REQUIREMENTS, 0, f"{each} is said to be both measured and unmet")
            for each in measured
            if each in unmet
        )
    return families, problems


def render(families: Sequence[Family], evidence: Iterable[Evidence]) -> str:
    """Write the page: counts first, then a table for each family."""
    tests: dict[str, set[str]] = {}
    for claim in evidence:
        tests.setdefault(claim.name, set()).add(claim.test)
    counts = {family.prefix: Counter(family.states(tests)) for family in families}
    every = sum(counts.values(), Counter[State]())
    out = [
        "# Conformance",
        "",
        "Made by `make conformance` from `docs/requirements.toml` and the tests' `req` marks; not edited by hand.",
        "",
        f"Of {every.total()} requirements {every['shown']} are shown by tests, {every['measured']} are measured by benchmarks, "
        f"{every['unmet']} are not met as written, and {every['open']} are open.",
        "",
        f"| family | | {' | '.join(_STATES)} | all |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for family in families:
        found = counts[family.prefix]
        figures = " | ".join(str(found[state]) for state in _STATES)
        out.append(f"| [{family.prefix}](#{_anchor(family)}) | {family.title} | {figures} | {found.total()} |")
    for family in families:
        out += ["", f"## {family.prefix}: {family.title}", "", family.about, ""]
        out += ["| id | requirement | shown by |", "|---|---|---|"]
        for each, line in family.lines.items():
            out.append(f"| {each} | {_cell(line)} | {_evidence(family, each, tests.get(each, ()))} |")
    return "\n".join(out) + "\n"


def build(root: Path) -> Outcome:
    """Read requirements and tests below ``root`` and decide what the page must be."""
    families, problems = parse_requirements((root / REQUIREMENTS).read_text(encoding="utf-8"))
    known = {each for family in families for each in family.lines}
    evidence, mark_problems = gather(read_tree(root))
    unknown = {
        Problem(claim.path, claim.line, f"unknown requirement {claim.name!r}")
        for claim in evidence
        if claim.name not in known
    }
    others = {each for family in families for each in (*family.measured, *family.unmet)}
    doubtful = {
        Problem(claim.path, claim.line, f"{claim.name} is said to be measured or unmet: no test may claim it")
        for claim in evidence
        if claim.name in others
    }
    return Outcome(render(families, evidence), sorted({*problems, *mark_problems, *unknown, *doubtful}))


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code: 0 when the page is (now) current, 1 when it is not."""
    return page.run("conformance", "Which test shows which requirement.", PAGE, _built, argv)


def _built(root: Path) -> tuple[str, Sequence[Problem]]:
    outcome = build(root)
    return outcome.page, outcome.problems


def _anchor(family: Family) -> str:
    return f"{family.prefix}-{family.title}".lower().replace(" ", "-")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _evidence(family: Family, each: str, tests: Iterable[str]) -> str:
    if each in family.measured:
        return f"measured: {_cell(family.measured[each])}"
    if each in family.unmet:
        return f"**not met as written**: {_cell(family.unmet[each])}"
    return "<br>".join(f"`{_cell(test)}`" for test in sorted(tests)) or "open"


if __name__ == "__main__":
    sys.exit(main())
