"""
What the tool shows: tables and lines for people, JSON for programs, progress on long work.

Results go to stdout, everything else (notes, progress, errors) to stderr. With ``--json`` stdout holds one
JSON object or JSON Lines and nothing else. Text from records is shown to a terminal without the characters
that would steer it.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, Protocol

import orjson
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from tidings.core.errors import TidingsError
from tidings.log.record import Record

from .errors import as_json, as_text

__all__ = ["Output", "human_bytes", "plain"]

# A table in a pipe must not be squeezed into the 80 columns that rich assumes there.
_PIPE_COLUMNS: Final = 240
# C0 and C1 controls, and the marks that turn the direction of what follows.
_STEERING: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
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
        self.console = _console(self._stdout)
        self._notes = _console(self._stderr)

    # Results

    def json(self, value: object) -> None:
        """One line of JSON on stdout."""
        self.raw(orjson.dumps(value))

    def raw(self, line: bytes) -> None:
        """One line on stdout, byte for byte. A command writes either these or text, so the two cannot overtake."""
        self._stdout.buffer.write(line + b"\n")

    def text(self, line: str = "") -> None:
        """One line for people on stdout; nothing with ``--json``."""
        if not self.is_json:
            self._stdout.write(line + "\n")

    def table(self, title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """A table for people; a column whose name ends in ``>`` is aligned to the right."""
        table = Table(title=title, title_justify="left", header_style="bold", title_style="bold")
        for name in columns:
            table.add_column(name.rstrip(">"), justify="right" if name.endswith(">") else "left", overflow="fold")
        for row in rows:
            table.add_row(*(Text(plain(str(cell))) for cell in row))
        self.console.print(table)

    def facts(self, title: str, pairs: Iterable[tuple[str, object]]) -> None:
        """Names and values, one a line."""
        table = Table(title=title, title_justify="left", show_header=False, title_style="bold")
        table.add_column(style="bold")
        table.add_column(overflow="fold")
        for name, value in pairs:
            table.add_row(name, Text(plain(str(value))))
        self.console.print(table)

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
            self._stderr.write(plain_lines(as_text(error)) + "\n")
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


def plain_lines(text: str) -> str:
    """Like ``plain``, but lines stay lines."""
    return "\n".join(plain(line) for line in text.split("\n"))


def _console(stream: Any) -> Console:
    width = None if stream.isatty() else _PIPE_COLUMNS
    return Console(file=stream, width=width, highlight=False, markup=False, emoji=False)
