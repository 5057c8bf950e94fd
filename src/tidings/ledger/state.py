"""The ledger's state: its parts, each of which can be written to a snapshot and read back from it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Final, Protocol, TypeVar, cast

from .errors import MissingPart


class Part(Protocol):
    """
    One store of the ledger.

    It is changed by commands only, in the thread of the event loop, and its values are immutable: a snapshot is taken as a shallow copy
    (``freeze``) and encoded in another thread while commands go on.
    """

    name: ClassVar[str]
    """Its key in snapshots."""
    frozen_type: ClassVar[Any]
    """The type of what ``freeze`` returns, for msgspec."""

    def freeze(self) -> Any:
        """All there is, in a form that later changes do not touch. Quick: a copy of containers, not of values."""
        ...

    def restore(self, frozen: Any) -> None:
        """Become what ``freeze`` returned; called once, on an empty part."""
        ...


PartT = TypeVar("PartT")

RULES: Final = 2
"""The version of the rules by which commands are decided now. Each record has the version that decided it; see ADR 36."""
FIRST_RULES: Final = 1
"""That of records without a version: nothing is emitted when something is made."""


class Rehearsed(Exception):
    """A command that is only rehearsed has passed its checks, and would change something now."""


class LedgerState:
    """
    All parts of a ledger, by type.

    Args:
        parts: One of each.
    """

    def __init__(self, *parts: Part) -> None:
        self._parts: dict[type, Part] = {type(part): part for part in parts}
        self.rules = RULES
        """By which version of the rules a command is executed. An older one only while records of that version are executed again."""
        self.is_rehearsal = False
        """Whether a command is executed for its checks only."""

    def begin_change(self) -> None:
        """
        Called by a command that can be rehearsed, between its checks and its first change.

        Raises:
            Rehearsed: It is a rehearsal, which ends here.
        """
        if self.is_rehearsal:
            raise Rehearsed

    def part(self, kind: type[PartT]) -> PartT:
        """
        The part of this type.

        Raises:
            MissingPart: The ledger was not opened with it.
        """
        try:
            return cast("PartT", self._parts[kind])
        except KeyError:
            raise MissingPart(getattr(kind, "name", kind.__name__)) from None

    @property
    def parts(self) -> tuple[Part, ...]:
        """Every part."""
        return tuple(self._parts.values())


@contextmanager
def collector_paused() -> Iterator[None]:
    """
    Without the collector of cycles in between.

    There are none to find in thousands of new values that all stay, and looking for them takes as long as making them.
    """
    is_collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_collecting:
            gc.enable()
