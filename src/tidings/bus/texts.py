"""
Errors and answers of other people's code, as text that can be stored and logged.

Handlers raise and return what they like: an error whose ``str()`` raises, is not Unicode, or is a whole document must not become
the group's own failure. ``FailureLog`` logs failed attempts, and bounds how many.
"""

from __future__ import annotations

import asyncio
import logging
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Final

from tidings.core.clock import Clock
from tidings.log.record import Record

logger = logging.getLogger("tidings.bus.failures")

_PASSED_OVER: Final = (f"{Path(__file__).parents[1]}{os.sep}", f"{Path(asyncio.__file__).parent}{os.sep}")
"""This package, and what runs its handlers."""
_CHARS_MAX: Final = 4096
_TRACEBACK_CHARS_MAX: Final = 8192
_LOGGED_COUNT_MAX: Final = 10
_LOGGED_PER_S: Final = 10.0


class RaisedElsewhere(Exception):
    """
    What a handler at the other end of a connection raised.

    Args:
        kind: The name of its class, with that of its module.
        text: What it said.
    """

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(kind, text)
        self.kind = kind
        self.text = text

    def __str__(self) -> str:
        return self.text


def kind_of(error: BaseException) -> str:
    """The name of an error's class, with that of its module; of one raised elsewhere, as it is called there."""
    if isinstance(error, RaisedElsewhere):
        return cut(error.kind)
    return cut(f"{type(error).__module__}.{type(error).__qualname__}")


def text_of(error: BaseException) -> str:
    """An error's text; its type's name if it has none."""
    try:
        text = str(error)
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException:  # noqa: BLE001 - it has no text, then
        text = ""
    return cut(text) or type(error).__name__


def cut(text: object) -> str:
    """A text of bounded length that every encoding takes."""
    try:
        text = text if isinstance(text, str) else repr(text)
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException:  # noqa: BLE001 - not even that
        text = f"<{type(text).__name__}>"
    if len(text) > _CHARS_MAX:
        text = f"{text[:_CHARS_MAX]}... ({len(text):,} characters)"
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


def frames_of(error: BaseException) -> TracebackType | None:
    """An error's traceback from the handler on, without the frames of this package that called it; all of it where the log shows details."""
    frames = error.__traceback__
    if logger.isEnabledFor(logging.DEBUG):
        return frames
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(_PASSED_OVER):
        frames = frames.tb_next
    return frames or error.__traceback__


def traceback_of(error: BaseException) -> str:
    """An error's traceback as Python prints it (``frames_of``), of bounded length: its end, where it was raised. Empty if it has none."""
    if error.__traceback__ is None:
        return ""
    try:
        text = "".join(traceback.format_exception(type(error), error, frames_of(error)))
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException:  # noqa: BLE001 - its text cannot be made
        text = "".join(traceback.format_tb(frames_of(error)))
    text = text.encode(errors="backslashreplace").decode()
    if len(text) > _TRACEBACK_CHARS_MAX:
        text = f"... ({len(text) - _TRACEBACK_CHARS_MAX:,} characters left out)\n{text[-_TRACEBACK_CHARS_MAX:]}"
    return text


def _is_writable(error: BaseException) -> bool:
    """Whether an error's traceback can be written to a file as it is, and is not too long for that."""
    try:
        text = "".join(traceback.format_exception(error)).encode()
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException:  # noqa: BLE001 - its text cannot be made, or is not Unicode
        return False
    return len(text) <= _TRACEBACK_CHARS_MAX


class FailureLog:
    """
    Logs a group's failed attempts with their tracebacks (``frames_of``): a warning if the event is tried again, an error if it is dead-lettered.

    Of each kind at most ten in ten seconds are logged; the next one that is says how many were not. Of events of encrypted spaces
    only the error's type is logged, as its text may quote the payload.

    Args:
        topic, group: Whose.
        clock: What time it is.
        is_encrypted: Whether a space is.
    """

    def __init__(self, topic: str, group: str, clock: Clock, is_encrypted: Callable[[str], bool]) -> None:
        self._where = f"group {group} of topic {topic}"
        self._clock = clock
        self._is_encrypted = is_encrypted
        self._logged: dict[int, tuple[float, int]] = {}
        """For each level since when is counted, and how many were logged since."""
        self._suppressed = 0

    def retried(self, record: Record, attempt: int, error: BaseException, delay_s: float) -> None:
        """An attempt has failed, and there will be another."""
        self._log(logging.WARNING, record, error, f"attempt {attempt} failed, the next is in {delay_s:.2f} s")

    def dead_lettered(self, record: Record, error: BaseException, reason: str) -> None:
        """The event has become a dead letter, or stays one after a redrive."""
        self._log(logging.ERROR, record, error, f"is a dead letter ({reason})")

    def flush(self) -> None:
        """Say how many were not logged, if nothing was since."""
        if self._suppressed:
            logger.warning("%s: %d failed attempts were not logged", self._where, self._suppressed)
            self._suppressed = 0

    def _log(self, level: int, record: Record, error: BaseException, what: str) -> None:
        now = self._clock.monotonic()
        since, count = self._logged.get(level, (now, 0))
        if now - since >= _LOGGED_PER_S:
            since, count = now, 0
        self._logged[level] = (since, count + 1)
        if count >= _LOGGED_COUNT_MAX:
            self._suppressed += 1
            return
        is_secret = record.meta.sealed is not None or self._is_encrypted(record.meta.space_id)
        said = "its text is left out, as the space is encrypted" if is_secret else text_of(error)
        more = f" ({self._suppressed} failed attempts before were not logged)" if self._suppressed else ""
        self._suppressed = 0
        has_traceback = not is_secret and error.__traceback__ is not None
        is_writable = has_traceback and _is_writable(error)
        if has_traceback and not is_writable:
            more += f"\n{traceback_of(error)}"
        logger.log(
            level,
            "%s: the event at offset %d: %s: %s: %s%s",
            self._where,
            record.offset,
            what,
            kind_of(error).rpartition(".")[2],
            said,
            more,
            exc_info=(type(error), error, frames_of(error)) if is_writable else None,
        )
