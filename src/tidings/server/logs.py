"""The node's own words: lines for people or JSON for machines, on stderr, each with the id of the request it belongs to."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from typing import Any, Final

import orjson

from tidings.core.clock import format_utc

from .edge import REQUEST_ID
from .request_ids import legible
from .settings import ServerSettings

__all__ = ["JsonFormatter", "TextFormatter", "node_logging", "set_level"]

_OWN: Final = "tidings"
_FOREIGN: Final = ("uvicorn", "uvicorn.error")
_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, what the line carries as extra, and the error's text."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": format_utc(int(record.created * 1e9)).decode(),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": legible(record.getMessage()),
        }
        line.update((name, value) for name, value in vars(record).items() if name not in _STANDARD)
        request_id = REQUEST_ID.get()
        if request_id is not None:
            line.setdefault("request_id", request_id)
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=str).decode()


class TextFormatter(logging.Formatter):
    """A line for people. What came from outside cannot begin a line of its own."""

    def format(self, record: logging.LogRecord) -> str:
        when = format_utc(int(record.created * 1e9)).decode()
        message = legible(record.getMessage())
        request_id = getattr(record, "request_id", None) or REQUEST_ID.get()
        line = f"{when} {record.levelname.lower():<7} {record.name.removeprefix('tidings.')}: {message}"
        if request_id is not None:
            line += f" [{request_id}]"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def set_level(settings: ServerSettings) -> None:
    """Say as much as the settings ask for."""
    level = settings.log_level.upper()
    logging.getLogger(_OWN).setLevel(level)
    for name in _FOREIGN:
        logging.getLogger(name).setLevel(level if level != "DEBUG" else "INFO")


@contextlib.contextmanager
def node_logging(settings: ServerSettings) -> Iterator[None]:
    """Write what Tidings and the HTTP server log to stderr while it lasts."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if settings.log_format == "json" else TextFormatter())
    loggers = [logging.getLogger(name) for name in (_OWN, "uvicorn")]
    before = [(each, each.level, each.propagate, list(each.handlers)) for each in loggers]
    for each in loggers:
        each.handlers = [handler]
        each.propagate = False
    set_level(settings)
    try:
        yield
    finally:
        for each, level, propagates, handlers in before:
            each.setLevel(level)
            each.propagate = propagates
            each.handlers = handlers
