"""
What a middleware is, what its hooks get, and what they may return.

Write your own by subclassing ``Middleware`` and giving the hooks you need, plain or ``async``; those you leave out are never
called. Around one delivery the hooks run like the layers of an onion::

    before_handle   in order; after a decision other than "replace" no further one is called, and the handler does not run
    on_error        in reverse, if the attempt failed
    after_handle    in reverse, whatever came of it
    cleanup         in reverse, always, even after a hook that raised

A hook that raises fails the attempt (``MiddlewareError``), which is then tried again like one whose handler raised.

Around one publish: ``before_publish`` in order (it may replace the event, or raise to refuse it), ``after_publish`` in reverse,
always. Either way, only middlewares that were called on the way in are called on the way out.
"""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Mapping
from typing import Any, Final

import msgspec
import orjson

from tidings.core.clock import SYSTEM_CLOCK, Clock
from tidings.core.errors import TidingsError
from tidings.core.events import Capability, Event
from tidings.log.interface import Verdict

from ..errors import BusError
from ..events import ReceivedEvent
from ..texts import text_of

_FLAGS_COUNT_MAX: Final = 1024


class InvalidMiddleware(BusError):
    """A middleware cannot be used as it was given; ``argument`` names the part at fault."""

    code = "bus.invalid_middleware"
    text = "middleware {name!r}, {argument}: {problem}"
    name: str
    argument: str
    problem: str


class MiddlewareError(BusError):
    """A hook raised. ``others`` are errors of further hooks that had to run all the same."""

    code = "bus.middleware_failed"
    retryable = True

    def __init__(self, name: str, hook: str, cause: BaseException) -> None:
        super().__init__(name, hook, cause)
        self.name = name
        self.hook = hook
        self.cause = cause
        self.others: tuple[MiddlewareError, ...] = ()
        if isinstance(cause, TidingsError):
            # A policy's refusal does not become worth repeating because a middleware spoke it.
            self.retryable = cause.retryable  # type: ignore[misc]
            self.hint = cause.hint

    def describe(self) -> str:
        return (
            f"middleware {self.name!r} raised in {self.hook}: {type(self.cause).__name__}: {text_of(self.cause)[:200]}"
        )


class DecisionKind(enum.StrEnum):
    """What a middleware may do with an event before its handler sees it."""

    SKIP = "skip"
    DENY = "deny"
    QUARANTINE = "quarantine"
    REPLACE = "replace"


class Decision(msgspec.Struct, frozen=True):
    """A middleware's answer from ``before_handle``; answering None lets the event pass."""

    kind: DecisionKind
    reason: str = ""
    event: Event | None = None
    by: str = ""
    """The middleware that decided; the chain fills it in."""

    @classmethod
    def skip(cls, reason: str) -> Decision:
        """Acknowledge the event without handling it."""
        return cls(DecisionKind.SKIP, reason)

    @classmethod
    def deny(cls, reason: str) -> Decision:
        """This subscriber may not have the event: to the dead letters as denied, without a retry."""
        return cls(DecisionKind.DENY, reason)

    @classmethod
    def quarantine(cls, reason: str) -> Decision:
        """Nobody should handle the event until it was looked at: to the dead letters as quarantined, without a retry."""
        return cls(DecisionKind.QUARANTINE, reason)

    @classmethod
    def replace(cls, event: Event) -> Decision:
        """Go on with this event instead; what the log holds stays as it is."""
        return cls(DecisionKind.REPLACE, event=event)


class OutcomeKind(enum.StrEnum):
    """What came of one attempt."""

    ACKED = "acked"
    RETRY = "retry"
    DEAD = "dead"
    SKIPPED = "skipped"
    DENIED = "denied"
    QUARANTINED = "quarantined"
    FILTERED = "filtered"
    EXPIRED = "expired"


class Outcome(msgspec.Struct, frozen=True):
    """What came of one attempt, as ``after_handle`` gets it."""

    kind: OutcomeKind
    reason: str = ""
    error: BaseException | None = None
    """What the handler, a filter or a middleware raised; a Nack has a reason only."""

    @property
    def is_ok(self) -> bool:
        """Whether the handler ran and acknowledged."""
        return self.kind is OutcomeKind.ACKED

    @property
    def is_failure(self) -> bool:
        """Whether the attempt failed: it will be tried again, or was tried too often."""
        return self.kind is OutcomeKind.RETRY or self.kind is OutcomeKind.DEAD


class _Context:
    """What both contexts have: a stopwatch, and room for what hooks of one middleware tell each other."""

    __slots__ = ("_state", "clock", "entered", "started")

    # Set by each context itself: a call of a common ``__init__`` would be paid for every event.
    clock: Clock
    started: float
    _state: dict[Any, Any] | None
    entered: list[Any]
    """The chain's own note of which middlewares were called on the way in."""

    @property
    def state(self) -> dict[Any, Any]:
        """Anything; keys by the middleware itself (``ctx.state[self]``) do not collide."""
        if self._state is None:
            self._state = {}
        return self._state

    @property
    def is_stateless(self) -> bool:
        """Whether nothing was put into ``state``."""
        return not self._state

    @property
    def elapsed_s(self) -> float:
        """Seconds since it began, by the bus's clock."""
        return self.clock.monotonic() - self.started


class PublishContext(_Context):
    """
    One publish on its way through the chain.

    Args:
        event: The event; hooks that replace it change this.
        topic: Where it goes.
        size_bytes: How large its payload is as JSON; found out when it is asked for, if left out.
        clock: The bus's clock.
        started: When the publish began, by that clock; now if left out.
    """

    __slots__ = ("_size_bytes", "event", "topic")

    def __init__(
        self,
        event: Event,
        topic: str,
        size_bytes: int | None = None,
        *,
        clock: Clock = SYSTEM_CLOCK,
        started: float | None = None,
    ) -> None:
        self.clock = clock
        self.started = clock.monotonic() if started is None else started
        self._state = None
        self.entered = []
        self.event = event
        self.topic = topic
        self._size_bytes = size_bytes

    @property
    def size_bytes(self) -> int | None:
        """How large the event's payload is as JSON; ``None`` if it is none."""
        if self._size_bytes is None:
            try:
                self._size_bytes = len(orjson.dumps(self.event.payload))
            except orjson.JSONEncodeError:
                return None  # the log says what is wrong with it
        return self._size_bytes

    @size_bytes.setter
    def size_bytes(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes


class HandleContext(_Context):
    """
    One attempt to handle one event, on its way through the chain.

    Args:
        event: The event; a "replace" decision changes this, and the handler gets what is here.
        capabilities: The subscriber's.
        clock: The bus's clock.
        started: When the attempt began, by that clock; now if left out.
        topic: The event's, where it is known without decoding the envelope.
    """

    __slots__ = ("_trace", "attempt", "capabilities", "event", "group", "offset", "topic")

    def __init__(
        self,
        event: ReceivedEvent,
        capabilities: frozenset[Capability] = frozenset(),
        *,
        clock: Clock = SYSTEM_CLOCK,
        started: float | None = None,
        topic: str | None = None,
    ) -> None:
        self.clock = clock
        self.started = clock.monotonic() if started is None else started
        self._state = None
        self.entered = []
        self.event = event
        self.topic = event.record.meta.topic if topic is None else topic
        self.group = event.group
        self.offset = event.record.offset
        self.attempt = event.attempt
        self.capabilities = capabilities
        self._trace: dict[str, str] | None = None

    @property
    def trace(self) -> dict[str, str]:
        """``trace_id`` and ``span_id`` of the attempt, where tracing is on; for logs."""
        if self._trace is None:
            self._trace = {}
        return self._trace


class Middleware:
    """
    The base of all middlewares: hooks that do nothing.

    ``name`` is what feature flags and errors call it; the class's name unless given. ``priority`` orders the chain, lower first
    (tracing 10, metrics 20, access 30, content safety 40, policies 50, yours 100). ``enabled`` may be changed at any time; an
    event already on its way keeps the layers it has entered.
    """

    name: str = ""
    priority: int = 100
    enabled: bool = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" not in cls.__dict__:
            cls.name = cls.__name__

    def before_publish(self, ctx: PublishContext) -> Event | Awaitable[Event | None] | None:
        """Before the event is stored. Answer another event to store that one instead; raise to refuse it."""
        return None

    def after_publish(self, ctx: PublishContext, verdict: Verdict | Exception) -> Awaitable[None] | None:
        """After the log answered (the event is durable then), or with what kept the event from it."""
        return None

    def before_handle(self, ctx: HandleContext) -> Decision | Awaitable[Decision | None] | None:
        """Before the handler. Answer None to let the event pass, or a ``Decision``."""
        return None

    def after_handle(self, ctx: HandleContext, outcome: Outcome) -> Awaitable[None] | None:
        """After the attempt, whatever came of it, and before its cursor moves."""
        return None

    def on_error(self, ctx: HandleContext, error: BaseException) -> Awaitable[None] | None:
        """When the attempt failed with an error."""
        return None

    def cleanup(self, ctx: HandleContext) -> Awaitable[None] | None:
        """Last of all, always."""
        return None


class FeatureFlags:
    """
    Switches by name. A name that was never switched is on.

    Args:
        initial: How some switches stand at first.
    """

    __slots__ = ("_off", "_on", "version")

    def __init__(self, initial: Mapping[str, bool] | None = None) -> None:
        self._on: set[str] = set()
        self._off: set[str] = set()
        self.version = 0
        """Rises with every change, so that a chain knows when to compile itself anew."""
        for name, is_on in (initial or {}).items():
            self.switch(name, is_on)

    def switch(self, name: str, is_on: bool) -> None:
        """
        Turn a name on or off, for events from now on.

        Raises:
            InvalidMiddleware: There are too many names.
        """
        if name not in self._on and name not in self._off and len(self._on) + len(self._off) >= _FLAGS_COUNT_MAX:
            raise InvalidMiddleware(name, "flags", f"there are {_FLAGS_COUNT_MAX} flags already")
        (self._on if is_on else self._off).add(name)
        (self._off if is_on else self._on).discard(name)
        self.version += 1

    def enable(self, name: str) -> None:
        """Turn a name on."""
        self.switch(name, True)

    def disable(self, name: str) -> None:
        """Turn a name off."""
        self.switch(name, False)

    def is_enabled(self, name: str) -> bool:
        """Whether a name is on."""
        return name not in self._off

    def as_dict(self) -> dict[str, bool]:
        """Every name that was switched, and whether it is on."""
        return {name: name in self._on for name in sorted(self._on | self._off)}
