"""What is on its way into the ledger: commands of callers, what became of each, and what one commit stores."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from tidings.core.events import Event
from tidings.happenings.happening import AnyHappening

from .commands import Command


class Prepared(msgspec.Struct, gc=False):
    """A command that may be executed: checked, and read back from its JSON, so that what is done now is what will be done again."""

    command: Command
    json: bytes
    """Of the command; of one that emits, of its happenings."""


class CommandRequest(msgspec.Struct, eq=False):
    """Commands of one caller, and the answers so far."""

    commands: Sequence[Prepared]
    answer: asyncio.Future[Any]
    results: list[Any] | None = None
    """One for each command that is done with, the error of one that was refused; ``None`` if the answer is that of the only command."""
    taken: int = 0
    """How many of the commands were taken out of the queue."""

    def add(self, result: object) -> None:
        """The next command is done with. Answers the caller after the last one."""
        if self.results is not None:
            self.results.append(result)
            if len(self.results) < len(self.commands):
                return
            result = self.results
        if self.answer.done():
            return
        if isinstance(result, BaseException):
            self.answer.set_exception(result)
        else:
            self.answer.set_result(result)


Slice = tuple[CommandRequest, Sequence[Prepared]]
"""Commands of one request that go into one commit."""


class CommandStep(msgspec.Struct, eq=False):
    """A command that was executed, or refused."""

    request: CommandRequest
    result: Any
    first_event: int
    """Where its records begin among those of the commit."""
    end: int
    """How many happenings there are in the commit up to and with its own."""
    is_stored: bool
    """Whether it has records."""


class Commit:
    """What is appended in one call."""

    def __init__(self, at_ms: int, next_offset: int) -> None:
        self.at_ms = at_ms
        self.next_offset = next_offset
        """The offset of its first record."""
        self.steps: list[CommandStep] = []
        self.events: list[Event] = []
        self.happenings: list[AnyHappening] = []
        self.first_seq: int | None = None
        """Of its happenings, if it has any."""
