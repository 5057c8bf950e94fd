"""The documents about the tool are true."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from tests.integration.cli.support import invoke
from tidings.cli.json_answers import ANSWERS
from tidings.cli.reference import reference
from tidings.cli.root import app

DOCS = Path(__file__).parents[3] / "docs"
REFERENCE = (DOCS / "reference" / "cli.md").read_text(encoding="utf-8")
HOWTO = (DOCS / "howto" / "cli.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^## (tidings .+)$", REFERENCE, re.MULTILINE)


def test_the_reference_is_what_the_commands_say() -> None:
    """``docs/reference/cli.md`` is current; renew it with ``python -m tidings.cli.reference``."""
    assert reference() == REFERENCE


@pytest.mark.parametrize("command", COMMANDS)
def test_the_reference_has_every_option_of_the_help(command: str) -> None:
    """Whatever option ``--help`` shows stands in the reference, and the help has examples and fits 80 columns."""
    shown = invoke(*command.split()[1:], "--help", env={"COLUMNS": "80"})

    section = REFERENCE.split(f"## {command}\n")[1].split("\n## ")[0]
    options = set(re.findall(r"^  .*?(--[a-z-]+)", shown.stdout.split("Examples:")[0], re.MULTILINE)) - {"--help"}
    assert shown.exit_code == 0
    assert "Examples:" in shown.stdout
    assert [line for line in shown.stdout.split("Examples:")[0].splitlines() if len(line) > 80] == []
    assert {
        option for option in options if option not in section and option not in REFERENCE.split("## tidings")[0]
    } == set()
    assert "--json" in options


def test_every_command_says_what_it_answers_in_json() -> None:
    """Each command has its answer in the reference, and no other has one; tests that ask for JSON compare what they get."""
    assert sorted(ANSWERS) == sorted(command.removeprefix("tidings ") for command in COMMANDS)
    assert REFERENCE.count("\n`--json`: ") == len(COMMANDS)


def example_lines(text: str) -> Iterator[str]:
    for block in re.findall(r"```\n(.*?)```", text, re.DOTALL):
        for line in block.splitlines():
            yield from (part.strip() for part in line.split(" | ") if part.strip().startswith("tidings "))


@pytest.mark.parametrize("line", sorted({*example_lines(HOWTO), *example_lines(REFERENCE)}))
def test_every_example_in_the_documents_is_understood(line: str) -> None:
    """Each command line that the documents show names a command and options that exist."""
    words = shlex.split(line.split(" > ")[0])[1:]
    command: Any = typer.main.get_command(app)
    with_name = "tidings"
    while hasattr(command, "commands"):
        with_name = words.pop(0)
        command = command.get_command(None, with_name)
        assert command is not None

    command.make_context(with_name, words)
