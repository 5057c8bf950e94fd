"""
Whether the log accepts events, and if not, why: it is closed, the disk is full, or storage has failed.

A full disk passes: refusing ends when there is room. A fence stays: the disk cannot be trusted any more, and what is true is
for the next opening to find out. Here is what is known; what follows from it is the engine's to do.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from tidings.core.errors import TidingsError

from ..errors import LogClosed, LogFenced, StorageFull
from .index import IndexDamaged

__all__ = ["Admission"]

logger = logging.getLogger(__name__)


class Admission:
    """
    Why events are refused, if they are.

    Args:
        workspace: Which log this is, for the operator.
    """

    __slots__ = ("_workspace", "is_full", "is_index_damaged", "refusal")

    def __init__(self, workspace: Path) -> None:
        self._workspace = workspace
        self.refusal: Callable[[], TidingsError] | None = None
        """Makes the error that says why nothing is accepted; ``None`` while all is well."""
        self.is_full = False
        self.is_index_damaged = False
        """Going on without the index could take duplicates for new; it is derived, so the next opening makes it anew."""

    @property
    def is_fenced(self) -> bool:
        """Whether storage has failed."""
        return self.refusal is not None and self.refusal is not LogClosed and not self.is_full

    @property
    def is_plainly_closed(self) -> bool:
        """Whether nothing but closing keeps events out: all that was accepted can still be committed."""
        return self.refusal is LogClosed

    def close(self) -> None:
        """Accept nothing more; a reason that was there before stays."""
        self.refusal = self.refusal or LogClosed

    def note_full(self, path: str) -> bool:
        """There is no room on the disk; whether that is news."""
        if self.is_full:
            return False
        self.is_full = True
        self.refusal = self.refusal or (lambda: StorageFull(path))
        logger.error("no space left for the log (%s): events are refused until there is room", path)
        return True

    def note_room(self, *, is_closing: bool) -> None:
        """The disk took something: it is not full, or no longer."""
        if self.is_full:
            self.is_full = False
            if not is_closing:
                self.refusal = None
            logger.warning("there is room again: accepting events (workspace %s)", self._workspace)

    def fence(self, error: BaseException) -> Callable[[], TidingsError]:
        """Storage has failed; returns what makes the error that says so."""
        cause = str(error) or type(error).__name__
        logger.error("storage error, the log accepts no more events (workspace %s): %s", self._workspace, cause)
        self.is_full = False
        self.is_index_damaged = self.is_index_damaged or isinstance(error, IndexDamaged)
        self.refusal = lambda: LogFenced(cause)
        return self.refusal
