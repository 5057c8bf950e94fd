"""
Plugins in other processes: a connection that serves one is called like a handler of this process.

Each call is a frame with a number, and the plugin answers with that number, in any order. How long a call may take is the ledger's business; one
that was given up is withdrawn. When the connection ends, what it had not answered has failed, and the plugin is unloaded.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import itertools
from typing import TYPE_CHECKING, Any, Final

from tidings.ledger.directory import Plugins
from tidings.ledger.errors import ErrorClass, PluginFailure, PluginUnloaded
from tidings.ledger.handlers import Assignment, Correction, PluginRequest
from tidings.ledger.plugins import Plugin
from tidings.wire.steward import answers, frames, requests

from .errors import InvalidBase64

if TYPE_CHECKING:
    from .authority import Caller

_UNKNOWN_CLASS: Final = ErrorClass.INTERNAL


def payload_of(payload_b64: str) -> bytes:
    """
    The bytes in a ``payload_b64``.

    Raises:
        InvalidBase64: It is none.
    """
    try:
        return base64.b64decode(payload_b64, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidBase64(str(error)) from None


def payload_b64(payload: bytes) -> str:
    """Bytes as text."""
    return base64.b64encode(payload).decode()


class RemoteRespondent:
    """
    A handler whose plugin is at the other end of a connection.

    Args:
        plugin: Its name.
        caller: The connection.
        count_max: Calls that may wait for their answer.
    """

    def __init__(self, plugin: str, caller: Caller, count_max: int) -> None:
        self.plugin = plugin
        self._caller = caller
        self._count_max = count_max
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._is_gone = False

    async def handle_request(self, request: PluginRequest) -> bytes:
        """Ask the plugin."""
        return await self.call(
            kind="request",
            shelf=request.shelf,
            request_type=request.request_type,
            instance_id=request.instance_id,
            payload_b64=payload_b64(request.payload),
        )

    async def call(self, **what: Any) -> bytes:
        """
        Call the plugin, and wait for its answer.

        Raises:
            PluginFailure: It answered with an error, or too much waits for it already.
            PluginUnloaded: It is gone.
        """
        if self._is_gone:
            raise PluginUnloaded(self.plugin)
        if len(self._waiting) >= self._count_max or self._caller.is_full:
            problem = f"{self.plugin!r} has not answered or not read {len(self._waiting)} calls"
            raise PluginFailure(ErrorClass.RESOURCE_EXHAUSTED, problem, "too_many_calls")
        number = next(self._numbers)
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        self._caller.send([frames.encode(answers.CallFrame(call=number, **what))])
        try:
            return await answer
        except asyncio.CancelledError:
            if number in self._waiting:
                self._caller.send([frames.encode(answers.CallWithdrawn(withdrawn=number))])
            raise
        finally:
            self._waiting.pop(number, None)

    def answered(self, answer: requests.AnswerRequest) -> None:
        """The plugin has answered. What nobody waits for any more is passed over."""
        waiting = self._waiting.pop(answer.call, None)
        if waiting is None or waiting.done():
            return
        if answer.error is None:
            try:
                waiting.set_result(payload_of(answer.payload_b64))
            except InvalidBase64 as error:
                waiting.set_exception(error)
            return
        given = answer.error
        known = given.error_class in ErrorClass.__members__.values()
        subclass = given.details.get("subclass", "") if isinstance(given.details, dict) else ""
        error_class = ErrorClass(given.error_class) if known else _UNKNOWN_CLASS
        waiting.set_exception(PluginFailure(error_class, given.message[:500], str(subclass)[:100]))

    def gone(self) -> None:
        """The connection has ended: nothing more will be answered."""
        self._is_gone = True
        waiting, self._waiting = self._waiting, {}
        for each in waiting.values():
            if not each.done():
                each.set_exception(PluginUnloaded(self.plugin))


class RemoteWarden(RemoteRespondent):
    """The same for a plugin that takes custody."""

    async def take_custody(self, assignment: Assignment) -> None:
        """Have it take custody."""
        await self.call(
            kind="take_custody",
            shelf=assignment.shelf,
            handle_id=assignment.handle_id,
            custody_type=assignment.custody_type,
            payload_b64=payload_b64(assignment.payload),
        )

    async def correct_course(self, correction: Correction) -> None:
        """Have it correct its course."""
        await self.call(
            kind="correct_course",
            shelf=correction.shelf,
            handle_id=correction.handle_id,
            correction_type=correction.correction_type,
            payload_b64=payload_b64(correction.payload),
        )

    async def release_custody(self, handle_id: str) -> None:
        """Have it let go."""
        await self.call(kind="release_custody", handle_id=handle_id)


class ServedPlugin:
    """
    A plugin that is loaded, and is called over one connection.

    Args:
        plugin: As the ledger has it.
        handler: What calls it.
        directory: Where it is entered.
    """

    def __init__(self, plugin: Plugin, handler: RemoteRespondent | None, directory: Plugins) -> None:
        self.plugin = plugin
        self._handler = handler
        self._directory = directory

    def take_answer(self, message: bytes) -> bool:
        """Whether a message is an answer to a call; then it is taken."""
        if self._handler is None:
            return False
        try:
            request = requests.decode_request(message)
        except requests.RequestInvalid:
            return False
        if not isinstance(request, requests.AnswerRequest):
            return False
        self._handler.answered(request)
        return True

    def end(self) -> None:
        """The connection has ended: it is called no more. What it announced and claimed stays."""
        if self._handler is not None:
            self._handler.gone()
        if self.plugin in self._directory.loaded:
            self._directory.forget(self.plugin, "its connection ended")
