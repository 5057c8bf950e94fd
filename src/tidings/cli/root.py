"""The tool as a whole: the nouns it knows, and the one place where errors become text and exit codes."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Annotated, Any, Final

import typer
import typer.main
from typer.core import TyperGroup

from tidings import __version__
from tidings.core.errors import TidingsError
from tidings.log.embedded.disk import is_full
from tidings.log.errors import StorageFull
from tidings.log.line_codec import IS_COMPILED

from .output import EXIT_MEANINGS, ExitCode, Output, UsageProblem, discard_stdout, exit_code_of, from_missing_module

_MODULES: Final = {
    "demo": ("demo", "app"),
    "serve": ("serve", "app"),
    "work": ("work", "app"),
    "log": ("log", "app"),
    "topic": ("log", "topic_app"),
    "group": ("group", "app"),
    "dlq": ("dlq", "app"),
    "context": ("context", "app"),
    "doctor": ("doctor", "app"),
    "bench": ("bench", "app"),
    "errors": ("error_codes", "app"),
    "key": ("keys", "key_app"),
    "token": ("keys", "token_app"),
    "policy": ("access", "policy_app"),
    "subject": ("ledger", "subject_app"),
    "relation": ("ledger", "relation_app"),
    "custody": ("ledger", "custody_app"),
    "events": ("events", "app"),
    "happenings": ("happenings", "app"),
    "appointment": ("schedule", "appointment_app"),
    "watch": ("schedule", "watch_app"),
    "grammar": ("schedule", "grammar_app"),
    "gateway": ("managers", "gateway_app"),
    "app": ("managers", "app_app"),
    "guard": ("managers", "guard_app"),
    "config": ("managers", "config_app"),
    "pipeline": ("pipeline", "app"),
    "table": ("table", "app"),
    "grant": ("access", "app"),
    "revoke": ("access", "app"),
}
"""For each noun, and each verb without one, the module and the app that has its commands; loaded when it is asked for."""


class _Root(TyperGroup):
    """Runs a command line, and reports what ends it early."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(_MODULES)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.commands and cmd_name in _MODULES:
            module, attribute = _MODULES[cmd_name]
            noun = typer.main.get_group(getattr(importlib.import_module(f"tidings.cli.{module}"), attribute))
            self.commands[cmd_name] = found = noun.commands.get(cmd_name, noun)
            found.name = cmd_name
            found.short_help = found.short_help or found.help  # whole, not cut off at the end of a line
        return super().get_command(ctx, cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and self.get_command(ctx, args[0]) is None and (near := get_close_matches(args[0], _MODULES)):
            ctx.fail(f"No such command {args[0]!r}. Did you mean {' or '.join(near)}?")
        return super().resolve_command(ctx, args)

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        given = list(sys.argv[1:] if args is None else args)
        is_debug = "--debug" in given
        try:
            # Not standalone: a command that ends early by ``typer.Exit`` gives its code here.
            code = super().main(given, prog_name, complete_var, False, windows_expand_args, **extra)
        except typer.TyperException as error:
            hint = f"see `{_asked_for(error)} --help`"
            if getattr(error, "option_name", None) == "--node":
                hint = "it asks no node: if it works on a workspace's files, name that with -w DIR"
            code = _report(UsageProblem(error.format_message(), hint), given)
        except (TidingsError, ModuleNotFoundError) as error:
            known = error if isinstance(error, TidingsError) else from_missing_module(error)
            if known is None:
                raise
            code = _report(known, given)
            if is_debug:
                traceback.print_exc()
        except typer.Abort:
            code = ExitCode.INTERRUPTED
        sys.exit(_flushed(code if isinstance(code, int) else ExitCode.OK, given))


def _flushed(code: int, given: list[str]) -> int:
    """The exit code, once all output is out: a full device may say so only now."""
    error = _flush_or_discard()
    return code if error is None or not is_full(error) else _report(StorageFull("the standard output"), given)


def _flush_or_discard() -> OSError | None:
    """Let all output out. If that fails, the rest goes nowhere: the interpreter must not try once more at its end."""
    try:
        sys.stdout.flush()
    except OSError as error:
        discard_stdout()
        sys.stdout.flush()
        return error
    return None


def _asked_for(error: typer.TyperException) -> str:
    context = getattr(error, "ctx", None)
    return context.command_path if context is not None else "tidings"


def _report(error: TidingsError, given: list[str]) -> ExitCode:
    _flush_or_discard()
    Output(is_json="--json" in given).error(error)
    return exit_code_of(error)


def _exit_codes() -> str:
    return "\n".join(f"  {code:>3}  {meaning}" for code, meaning in EXIT_MEANINGS.items())


app = typer.Typer(
    name="tidings",
    cls=_Root,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    epilog=f"\b\nExit codes:\n{_exit_codes()}",
)


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"tidings {__version__} ({'compiled' if IS_COMPILED else 'Python alone'})")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    is_version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """A durable event platform: the log and the groups that read it, the node that serves them, the pipeline over it all."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
