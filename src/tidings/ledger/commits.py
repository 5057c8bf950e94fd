"""What is on its way into the ledger: commands of callers, what became of each, and what one commit stores."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from tidings.core.events import Event
from tidings.happenings.variants import AnyHappening

from .commands import Command


class Prepared(msgspec.Struct, gc=False):
    """A command that may be executed: checked, and read back from its JSON, so that what is done now is what will be done again."""

    command: Command
    json: bytes
    """Of the command; of one that emits, of its happenings."""


class CommandRequest:
    """Commands of one caller, and the answers so far."""

    __slots__ = ("answer", "commands", "is_many", "results", "taken")

    def __init__(self, commands: Sequence[Prepared], *, is_many: bool) -> None:
        self.commands = commands
        self.is_many = is_many
        self.answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.results: list[Any] = []
        """One a command that is done with; the error of one that was refused."""
        self.taken = 0
        """How many of the commands were taken out of the queue."""

    def add(self, result: object) -> None:
        """The next command is done with. Answers the caller after the last one."""
        self.results.append(result)
        if len(self.results) != len(self.commands) or self.answer.done():
            return
        if self.is_many:
            self.answer.set_result(self.results)
        elif isinstance(result, BaseException):
            self.answer.set_exception(result)
        else:
            self.answer.set_result(result)


Slice = tuple[CommandRequest, Sequence[Prepared]]
"""Commands of one request that go into one commit."""


class CommandStep:
    """A command that was executed, or refused."""

    __slots__ = ("end", "first_event", "is_stored", "request", "result")

    def __init__(self, request: CommandRequest, result: object, first_event: int, end: int, *, is_stored: bool) -> None:
        self.request = request
        self.result = result
        self.first_event = first_event
        """Where its records begin among those of the commit."""
        self.end = end
        """How many happenings there are in the commit up to and with its own."""
        self.is_stored = is_stored
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
