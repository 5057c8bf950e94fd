"""``tidings errors``: what a code means that a message, a log line or an answer over HTTP has."""

from __future__ import annotations

import contextlib
import importlib
import inspect
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import typer

import tidings
from tidings.core.errors import TidingsError

from .output import UsageProblem, all_errors, exit_code_of_kind
from .session import Session, command

app = typer.Typer(rich_markup_mode=None)


@command(
    app,
    "errors",
    has_workspace=False,
    examples="tidings errors log.storage_full\ntidings errors\ntidings errors --json",
)
def errors(
    session: Session,
    code: Annotated[
        str | None, typer.Argument(metavar="CODE", help="The code, or the class in Python; all of them if left out.")
    ] = None,
) -> None:
    """Say what an error's code means, whether trying again can help, and what to do."""
    known = {kind.code: _facts(kind) for kind in _known_errors()}
    if code is None:
        session.out.listing(
            "Errors",
            ("code", "meaning"),
            [known[each] for each in sorted(known)],
            lambda each: (each["code"], each["meaning"].partition(". ")[0].rstrip(".")),
            empty="there are none",
        )
        return
    wanted = code.lower()
    found = next((each for each in known.values() if wanted in _names(each)), None)
    if found is None:
        near = get_close_matches(wanted, known, n=3)
        raise UsageProblem(
            f"there is no error {code!r}", f"there are: {', '.join(near)}" if near else "see `tidings errors`"
        )
    if session.out.is_json:
        session.out.json(found)
        return
    session.out.facts(
        found["code"],
        [
            ("meaning", found["meaning"]),
            ("in Python", f"{found['module']}.{found['name']}"),
            ("trying again", "can help" if found["retryable"] else "does not help as it is"),
            ("exit code", found["exit_code"]),
            *([("what to do", found["hint"])] if found["hint"] else []),
        ],
    )


def _names(facts: dict[str, Any]) -> tuple[str, ...]:
    """What an error is asked for by, in small letters: its code, and its class as tracebacks name it."""
    name = facts["name"].lower()
    return facts["code"].lower(), name, f"{facts['module']}.{name}"


def _facts(kind: type[TidingsError]) -> dict[str, Any]:
    return {
        "code": kind.code,
        "name": kind.__name__,
        "module": kind.__module__,
        "meaning": " ".join((inspect.getdoc(kind) or "").replace("``", "`").split()),
        "retryable": bool(kind.retryable),
        "exit_code": int(exit_code_of_kind(kind)),
        "hint": kind.hint,
    }


def _known_errors() -> list[type[TidingsError]]:
    """Every error of the package, as far as what is installed lets its modules be loaded; for a code that two share, the first."""
    root = Path(tidings.__path__[0])
    for path in sorted(root.rglob("*.py")):
        if '\n    code = "' in path.read_text(encoding="utf-8"):
            with contextlib.suppress(ModuleNotFoundError):
                importlib.import_module(".".join(("tidings", *path.relative_to(root).with_suffix("").parts)))
    kinds: dict[str, type[TidingsError]] = {}
    for kind in all_errors():
        if kind.__module__.startswith("tidings."):
            kinds.setdefault(kind.code, kind)
    return list(kinds.values())
