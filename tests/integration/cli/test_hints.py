"""What messages tell one to type is understood by the tool, and help and completion show all of it."""

from __future__ import annotations

import asyncio
import errno
import io
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import typer.main

import tidings
from tests.integration.cli.support import SMALL_SEGMENTS, fill, invoke
from tidings.bus import EventBus
from tidings.cli.output import as_typed, console, exit_code_of, from_os_error
from tidings.cli.pasting import tool
from tidings.cli.root import app

SOURCES: Final = Path(tidings.__file__).parent
# In backticks or quotes: what is to be typed. Elsewhere: the tool's name before one of its nouns.
_COMMAND: Final = re.compile(
    r"""[`']tidings ([a-z][^`'"\n]*)[`']|(?<!b")\btidings ((?:[a-z][a-z-]*)(?: [a-z][a-z-]*)?)"""
)
ROOT: Final[Any] = typer.main.get_command(app)


def commands() -> Iterator[str]:
    """Each command line that the package's sources name; what an f-string fills in is a word of it."""
    for path in sorted(SOURCES.rglob("*.py")):
        for found in _COMMAND.finditer(path.read_text(encoding="utf-8")):
            quoted, bare = found.groups()
            if quoted is not None:
                yield quoted.split(" | ")[0]
            elif bare.split()[0] in ROOT.list_commands(None):
                yield bare


def problem(line: str) -> str | None:
    """Why the tool would not understand a command line, whose arguments may be left out; ``None`` if it would."""
    command, words = ROOT, line.replace("...", "").split()
    while hasattr(command, "list_commands") and words and not words[0].startswith("-"):
        following = command.get_command(None, words[0])
        if following is None:
            return f"there is no {words[0]!r} in {line!r}"
        command = following
        words.pop(0)
    known = {name for param in command.params for name in (*param.opts, *param.secondary_opts)} | {"--help"}
    unknown = [word for word in words if word.startswith("-") and word != "-" and word.split("=")[0] not in known]
    return f"there is no {unknown[0]} in {line!r}" if unknown else None


def test_what_messages_say_to_type_is_understood() -> None:
    """Every ``tidings ...`` in a string of the package names a command and options that exist."""
    found = sorted(set(commands()))

    assert len(found) > 50
    assert [each for line in found if (each := problem(line)) is not None] == []


def test_a_wrong_command_in_a_message_would_be_noticed() -> None:
    """A command that is not there, and an option that it does not have, are told apart from those that are."""
    assert problem("log repair --dry-run") is None
    assert problem("log mend") is not None
    assert problem("serve --developer") is not None


def test_what_a_hint_says_can_be_pasted_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command line in a hint begins with what finds this tool in this folder."""
    monkeypatch.setattr("sys.argv", ["./.venv/bin/tidings"])

    assert as_typed("start one with `tidings serve --dev`") == f"start one with `{tool()} serve --dev`"
    assert tool() == ".venv/bin/tidings"
    missing = invoke("events", "tail", "-w", "/nowhere")
    assert (missing.exit_code, "`.venv/bin/tidings serve --dev`" in missing.stderr) == (2, True)


def test_a_file_where_a_workspace_is_wanted_is_said(tmp_path: Path) -> None:
    """What is to be done stands in the hint, as it does where there is no log yet."""
    (tmp_path / "file").touch()
    event = ("log", "append", "t", "--type", "T", "--space", "s", "--payload", "{}")

    in_file, missing = invoke(*event, "-w", tmp_path / "file"), invoke("topic", "list", "-w", tmp_path / "none")

    assert (in_file.exit_code, "name a folder with -w" in in_file.stderr) == (3, True)
    assert (missing.exit_code, "log append" in missing.stderr) == (3, True)


def test_a_folder_that_may_not_be_written_is_said_to_be_one(tmp_path: Path) -> None:
    """Whatever the operating system refuses for want of a right has a hint about rights, and the exit code of files."""
    for number in (errno.EACCES, errno.EPERM, errno.EROFS):
        told = from_os_error(OSError(number, os.strerror(number), str(tmp_path)))

        assert (exit_code_of(told), told.hint) == (
            3,
            "check who owns the folder and who may write it; -w names another",
        )


def test_an_address_without_http_is_asked_about() -> None:
    """What is neither a context nor an address, and looks like the latter, is answered with the address that was meant."""
    done = invoke("group", "list", "--node", "127.0.0.1:8787")

    assert (done.exit_code, "is http://127.0.0.1:8787 meant?" in done.stderr) == (2, True)


def test_an_append_without_an_event_shows_one_that_can_be_pasted(tmp_path: Path) -> None:
    """The line in the hint is whole: as it stands it appends."""
    hint = re.search(r"for example `\S+(?: -m tidings.cli)? (.*)`", invoke("log", "append", "orders").stderr)

    assert hint is not None
    assert invoke(*shlex.split(hint[1]), "-w", tmp_path).exit_code == 0


@pytest.mark.parametrize("noun", ["", *(name for name in ROOT.list_commands(None))])
def test_help_of_nouns_fits_eighty_columns_and_is_whole(noun: str) -> None:
    """No line of it is longer than 80 columns, and no sentence is cut off; that of verbs is looked at with the reference."""
    shown = invoke(*noun.split(), "--help", env={"COLUMNS": "80"}).stdout.split("Examples:")[0]

    assert [line for line in shown.splitlines() if len(line) > 80] == []
    assert not re.search(r"[a-z,]\.\.\.$", shown, re.MULTILINE)


def test_shells_complete_commands_and_options() -> None:
    """The tool answers a shell that asks how a word may go on, for a noun, a verb and an option; a misspelt noun gets its likes."""

    def completed(line: str) -> list[str]:
        env = {"_TIDINGS_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1)}
        return invoke(env=env).stdout.split()

    assert completed("tidings gro") == ["group"]
    assert completed("tidings group se") == ["seek"]
    assert "--to-offset" in completed("tidings group seek --to")
    assert "Did you mean group?" in invoke("gruop", "list").stderr


def test_tables_fit_eighty_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal of 80 columns no line is longer and no number and no heading is broken; a table of too much shows its rows one by one."""
    monkeypatch.setattr("tidings.cli.output._PIPE_COLUMNS", 80)
    fill(tmp_path / "w", ("a-topic-with-a-rather-long-name", 25), ("demo", 3))
    asyncio.run(subscribed(tmp_path / "w"))
    looks = ("topic list", "topic show demo", "log stats", "group list", "log retention --max-bytes 1KB")

    shown = "".join(invoke(*look.split(), "-w", tmp_path / "w").stdout for look in looks) + invoke("errors").stdout
    assert [line for line in shown.splitlines() if len(line) > 80] == []
    assert re.search(r"committed +next +lag +early +failed +oldest +dead\n", shown)

    monkeypatch.setattr("tidings.cli.output._PIPE_COLUMNS", 40)
    narrow = invoke("topic", "list", "-w", tmp_path / "w").stdout
    assert ("Topics, 2 of 2\n" in narrow, bool(re.search(r"^records +25$", narrow, re.MULTILINE))) == (True, True)


def test_what_is_piped_is_not_too_wide_and_no_color_means_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of errors in a pipe has a sentence a line; with NO_COLOR a terminal gets no escape at all."""
    assert [line for line in invoke("errors").stdout.splitlines() if len(line) > 200] == []

    shown = io.StringIO()
    monkeypatch.setattr(shown, "isatty", lambda: True)
    for variables, is_styled in (({}, True), ({"NO_COLOR": "1"}, False)):
        monkeypatch.setattr("os.environ", {"TERM": "xterm", **variables})
        console(shown).print("bold", style="bold")
        assert ("\x1b" in shown.getvalue()) is is_styled
        shown.truncate(0)


async def subscribed(workspace: Path) -> None:
    async with EventBus(workspace, log_settings=SMALL_SEGMENTS) as bus:
        await bus.subscribe("a-topic-with-a-rather-long-name", "a-group", lambda event: None)
        await bus.drain()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("topic list", "there are no topics yet"),
        ("group list", "there are no groups yet"),
        ("dlq list", "there are no dead letters"),
        ("log read", "there are no such records"),
        ("log retention --max-age-days 1", "nothing may go"),
        ("grant --list", "there are no grants"),
        ("policy list", "there are no policies"),
        ("gateway audit", "nothing is on record"),
        ("subject list", "there are no subjects"),
        ("table list", "there are no tables yet"),
        ("pipeline status", "there are no tables yet"),
    ],
)
def test_nothing_is_said_in_a_sentence(tmp_path: Path, words: str, said: str) -> None:
    """What has nothing to show says so, to people; a program that asked for JSON gets nothing at all."""
    fill(tmp_path / "w")

    people = invoke(*words.split(), "-w", tmp_path / "w")
    program = invoke(*words.split(), "--json", "-w", tmp_path / "w")

    assert (people.exit_code, said in people.stdout + people.stderr) == (0, True), people.stdout
    assert (program.stderr, "│" in people.stdout) == ("", False)
