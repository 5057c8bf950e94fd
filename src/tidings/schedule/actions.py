"""
Actions: what an appointment or a watch does when it fires.

An action is a request to a shelf, or an event for a topic:

    ScheduledAction(target_shelf="audio.player", request_type="play", payload={"station": "news"})
    ScheduledAction(topic="alarms", event_type="DOOR_OPEN", space="shared:house", payload={"door": "front"})

``Actions`` knows who answers for a shelf and dispatches. What came of it is a class, never free text: ``ok``, or the class of the
error with its subclass behind a slash (``not_found/no_handler``).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec

from tidings.access.administration import ACCESS_TOPIC
from tidings.access.apps import APPS_TOPIC
from tidings.access.audit import AUDIT_TOPIC
from tidings.bus.reserved import SCHEDULE_TOPIC
from tidings.core.clock import SYSTEM_CLOCK, Clock, within
from tidings.core.errors import InvalidName, TidingsError
from tidings.core.events import Event, EventMeta
from tidings.core.ids import derived_id
from tidings.core.names import SYNC_TOPICS, check_space, check_topic, check_type
from tidings.core.validation import reread
from tidings.ledger.errors import ErrorClass, LedgerError
from tidings.ledger.records import LEDGER_TOPIC

from .errors import BadSpec

logger = logging.getLogger(__name__)

ACTION_PAYLOAD_BYTES_MAX: Final = 64 * 1024
"""An action is kept with its appointment or watch for as long as that lives."""
NAME_CHARS_MAX: Final = 256
OK: Final = "ok"
_encode: Final = msgspec.json.Encoder().encode
_RESERVED_TOPICS: Final = frozenset({ACCESS_TOPIC, APPS_TOPIC, AUDIT_TOPIC, LEDGER_TOPIC, SCHEDULE_TOPIC}) | SYNC_TOPICS


class ScheduledAction(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """
    A request to a shelf (``target_shelf``, ``request_type``), or an event for a topic (``topic``, ``event_type``, ``space``).

    Raises:
        ValueError: It is neither, or both; a name is not one; the payload is no JSON, too large or, for a topic, no object.
    """

    target_shelf: str | None = None
    request_type: str | None = None
    topic: str | None = None
    event_type: str | None = None
    space: str | None = None
    payload: Any = None

    def __post_init__(self) -> None:
        shelf, request_type = self.target_shelf, self.request_type
        event = (self.topic, self.event_type, self.space)
        if shelf and request_type and event == (None, None, None):
            if len(shelf) > NAME_CHARS_MAX or len(request_type) > NAME_CHARS_MAX:
                raise ValueError(f"an action's shelf and request type have at most {NAME_CHARS_MAX} characters")
        elif all(event) and shelf is None and request_type is None:
            self._check_event()
        else:
            raise ValueError(
                "an action names a target_shelf and a request_type, or a topic, an event_type and a space, and not both"
            )
        try:
            size = len(_encode(self.payload))
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"an action's payload is no JSON: {error}") from error
        if size > ACTION_PAYLOAD_BYTES_MAX:
            raise ValueError(
                f"an action's payload is {size} bytes of JSON; at most {ACTION_PAYLOAD_BYTES_MAX} are allowed"
            )

    def _check_event(self) -> None:
        try:
            check_topic(self.topic)
            check_type(self.event_type)
            check_space(self.space)
        except InvalidName as error:
            raise ValueError(str(error)) from error
        if self.topic in _RESERVED_TOPICS:
            raise ValueError(f"no action may publish to the topic {self.topic!r}")
        if not isinstance(self.payload, dict):
            raise ValueError("the payload of an action that publishes is a JSON object")


def action_of(value: ScheduledAction | Any) -> ScheduledAction:
    """
    An action, from JSON or as it is.

    Raises:
        BadSpec: It is none; the text says what is wrong.
    """
    action: ScheduledAction = reread(
        value, ScheduledAction, lambda path, problem: BadSpec(f"{'.'.join(filter(None, ('action', path)))}: {problem}")
    )
    return action


Handler = Callable[[ScheduledAction, str], Awaitable[object]]
"""Does what an action asks for. The text names this firing: it is the same when one is dispatched again after a crash."""


class Actions:
    """
    Who does what actions ask for.

    Args:
        request: Called for a shelf that no handler is registered for; what routes requests to plugins. It raises what went wrong.
        publish: Stores an event, for actions with a topic: a bus's ``publish``.
        clock: By which dispatches end.
        timeout_s: How long a handler may take.
    """

    def __init__(
        self,
        *,
        request: Handler | None = None,
        publish: Callable[[Event], Awaitable[object]] | None = None,
        clock: Clock = SYSTEM_CLOCK,
        timeout_s: float = 30.0,
    ) -> None:
        self._handlers: dict[str, Handler] = {}
        self._request = request
        self._publish = publish
        self._clock = clock
        self._timeout_s = timeout_s
        self._running: set[asyncio.Future[object]] = set()

    def register(self, shelf: str, handler: Handler) -> None:
        """
        Have ``handler`` do what is asked of a shelf, also in place of a plugin there.

        Raises:
            ValueError: Another handler does already.
        """
        if shelf in self._handlers:
            raise ValueError(f"there is a handler for {shelf!r} already")
        self._handlers[shelf] = handler

    def unregister(self, shelf: str) -> None:
        """Take a shelf's handler away; nothing if there is none."""
        self._handlers.pop(shelf, None)

    async def dispatch(self, action: ScheduledAction, firing: str) -> str:
        """
        Do an action, and say what came of it; never raises, and takes no longer than ``timeout_s``.

        Args:
            action: What to do.
            firing: Names this firing. One that is dispatched again, because a crash left open whether it was done, has the same
                name: an event is then stored once, and a handler can tell.

        Returns:
            ``ok``, or the class of the error and, where it has one, ``/`` and its subclass.
        """
        if action.topic is not None:
            doing = None if self._publish is None else self._publishing(self._publish, action, firing)
        else:
            handler = self._handlers.get(action.target_shelf or "", self._request)
            doing = None if handler is None else _handling(handler, action, firing)
        if doing is None:
            return f"{ErrorClass.NOT_FOUND}/no_handler"
        task: asyncio.Future[object] = asyncio.ensure_future(doing)
        self._running.add(task)  # a task that does not end when it is cancelled must not be lost to the collector
        task.add_done_callback(self._ended)
        try:
            is_done = await within(self._clock, self._timeout_s, task)
        except asyncio.CancelledError:
            task.cancel()
            raise
        if not is_done:
            task.cancel()
            return f"{ErrorClass.UNAVAILABLE}/timeout"
        if task.cancelled():
            return f"{ErrorClass.UNAVAILABLE}/cancelled"
        error = task.exception()
        if error is None:
            return OK
        if not isinstance(error, TidingsError):
            logger.error("the handler of %s failed", action.topic or action.target_shelf, exc_info=error)
        return outcome_of(error)

    def _ended(self, task: asyncio.Future[object]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # it was looked at, or came too late for anyone to look

    async def close(self) -> None:
        """End what still runs past its time."""
        for task in list(self._running):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({task}, timeout=0)

    async def _publishing(
        self, publish: Callable[[Event], Awaitable[object]], action: ScheduledAction, firing: str
    ) -> object:
        assert action.topic is not None
        assert action.event_type is not None
        assert action.space is not None
        meta = EventMeta(action.topic, action.event_type, action.space, event_id=derived_id("act", firing))
        return await publish(Event(meta, action.payload))


async def _handling(handler: Handler, action: ScheduledAction, firing: str) -> object:
    return await handler(action, firing)


def outcome_of(error: BaseException) -> str:
    """An error as its class and, where it has one, ``/`` and its subclass."""
    if isinstance(error, LedgerError):
        return f"{error.error_class}/{error.subclass}" if error.subclass else str(error.error_class)
    if isinstance(error, TidingsError):
        return str(ErrorClass.UNAVAILABLE if error.retryable else ErrorClass.CONTRACT_VIOLATION)
    return str(ErrorClass.INTERNAL)
