"""
The reference of the tool as a document, made from the commands themselves.

``python -m tidings.cli.reference > docs/reference/cli.md`` writes it; a test compares the two.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import typer.main

from .json_answers import documented
from .output import EXIT_MEANINGS
from .root import app

_SHARED = ("workspace", "is_json", "is_verbose", "is_debug")
_OF_NODES = ("node_asked", "token_shown")


def reference() -> str:
    """The whole document."""
    return "\n".join(_document()).rstrip() + "\n"


def _document() -> Iterator[str]:
    root = typer.main.get_command(app)
    yield "# The command line tool"
    yield ""
    yield "Made from the commands by `python -m tidings.cli.reference`; `--help` on any command says the same."
    yield ""
    yield "## Exit codes"
    yield ""
    yield "| code | meaning |"
    yield "|---|---|"
    yield from (f"| {code} | {meaning} |" for code, meaning in EXIT_MEANINGS.items())
    yield ""
    yield "Results go to stdout; notes, progress and errors go to stderr."
    yield "An error is `error: <sentence>` and, where something can be done, `hint: <what>`."
    yield 'With `--json` it is one object, `{"error": {"code", "message", "hint", "retryable"}}`, also on stderr.'
    yield ""
    yield "What `--json` answers stands with each command; a key with `?` is there where it applies. Keys are added, not renamed."
    yield ""
    yield "## Options of every command"
    yield ""
    found = dict(commands(root, "tidings"))
    yield from _options(found["tidings group list"], _SHARED)
    yield "Commands that are about no workspace have no `--workspace`."
    yield ""
    yield "## Options of commands that can ask a node"
    yield ""
    yield from _options(found["tidings group list"], _OF_NODES)
    yield "Without `--node` and `--workspace` the node of [the context in use](../howto/cli.md#through-a-node) is asked, if there is one."
    yield "What changes something asks the node that holds the workspace, if one does: output and exit codes are those of the files."
    yield ""
    for path, command in found.items():
        yield f"## {path}"
        yield ""
        yield f"`{' '.join([path, *_usage(command), '[OPTIONS]'])}`"
        yield ""
        yield inspect.cleandoc(command.help or "")
        yield ""
        yield from _arguments(command)
        of_nodes = [param.name for param in command.params if param.name in _OF_NODES]
        yield from _options(
            command, [param.name for param in command.params if param.name not in (*_SHARED, *_OF_NODES)]
        )
        if of_nodes:
            yield "It can ask a node: [`--node`, `--token`](#options-of-commands-that-can-ask-a-node)."
            yield ""
        yield documented(path.removeprefix("tidings "))
        yield ""
        yield "```"
        examples = inspect.cleandoc(command.epilog or "").removeprefix("\b").strip().splitlines()[1:]
        yield from (line.strip() for line in examples)
        yield "```"
        yield ""


def commands(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every command that does something, with what is typed to reach it."""
    if not hasattr(command, "commands"):
        yield path, command
        return
    for name in sorted(command.list_commands(None)):
        yield from commands(command.get_command(None, name), f"{path} {name}")


def _usage(command: Any) -> Iterator[str]:
    for param in command.params:
        if param.param_type_name == "argument":
            name = param.metavar or param.name
            yield name if param.required else f"[{name}]"


def _arguments(command: Any) -> Iterator[str]:
    arguments = [param for param in command.params if param.param_type_name == "argument"]
    if arguments:
        yield "| argument | |"
        yield "|---|---|"
        yield from (f"| `{param.metavar or param.name}` | {_words(param)} |" for param in arguments)
        yield ""


def _options(command: Any, names: Sequence[str]) -> Iterator[str]:
    options = [
        param
        for param in command.params
        if param.param_type_name == "option" and param.name != "help" and param.name in names
    ]
    if options:
        yield "| option | |"
        yield "|---|---|"
        yield from (f"| `{_spelling(param)}` | {_words(param)} |" for param in options)
        yield ""


def _spelling(param: Any) -> str:
    names = ", ".join(sorted(param.opts, key=len))
    return names if param.is_flag else f"{names} {param.metavar or 'VALUE'}"


def _words(param: Any) -> str:
    words: str = param.help or ""
    if param.required:
        words += " Required."
    envvar = getattr(param, "envvar", None)
    if envvar:
        words += f" Also `{envvar}`."
    default = param.default
    if default not in (None, False, (), []) and not callable(default):
        words += f" Default: `{getattr(default, 'value', default)}`."
    return words.replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(reference())
