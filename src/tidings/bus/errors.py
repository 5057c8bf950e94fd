"""
What the bus answers when it cannot do what it was asked.

    BusError
    ├── BusClosed               the bus was closed
    ├── OtherEventLoop          the bus runs in another event loop
    ├── NotThroughNode          the bus works through a node, which does not offer this
    ├── PublishTimeout          a live subscription's window stayed full for too long; nothing was stored
    ├── SubscriptionExists      the group has a live subscription with other options
    ├── UnknownGroup            no such group
    ├── TopicMismatch           ``publish(event, topic)`` with another topic than the event's
    ├── InvalidHandler          a handler asks for something that there is not
    ├── InvalidAnswer           a handler returned something that is neither Ack nor Nack
    ├── PayloadMismatch         the payload is not of the type that the handler asks for
    ├── DrainTimeout            groups had not handled all events within the time
    ├── InvalidBatch            a batch is empty or too large
    ├── HandlerTimeout          a handler did not answer within the acknowledgement deadline
    ├── CursorDamaged           neither the offset file nor its backup can be read
    └── UnknownDeadLetter       no dead letter has that id
"""

from __future__ import annotations

from tidings.core.errors import TidingsError

from .texts import cut


class BusError(TidingsError):
    """The root of what the bus raises."""

    code = "bus.error"


class BusClosed(BusError):
    """The bus was closed."""

    code = "bus.closed"
    text = "the bus is closed"
    hint = "publish before it is closed (the end of 'async with bus:' closes it), or open it again: 'await bus.start()'"


class OtherEventLoop(BusError):
    """The bus was started in another event loop than the one that it is called in. Nothing was done."""

    code = "bus.other_event_loop"
    text = "the bus was started in another event loop, and not closed there"
    hint = (
        "close it in the loop that started it ('async with bus:' does), then any loop may start it again; "
        "from another thread, use asyncio.run_coroutine_threadsafe(bus.publish(...), loop)"
    )


class NotThroughNode(BusError):
    """The bus works through a node (``run(through=...)``), and what was asked for needs the log itself."""

    code = "bus.not_through_node"
    text = "the bus works through {url}, where it can only publish, cancel delayed events and handle"
    hint = "ask the node over HTTP for the rest, as with tidings.HttpClient"
    url: str


class PublishTimeout(BusError):
    """The window of a live subscription stayed full. The event was not stored."""

    code = "bus.publish_timeout"
    retryable = True
    hint = "the group is slower than its publishers: add workers, raise max_inflight, or publish with a longer timeout"
    text = "topic {topic!r}: the window of group {group!r} stayed full for {timeout_s:g} s"
    topic: str
    group: str
    timeout_s: float

    @property
    def public_text(self) -> str:
        """The same without the group: whoever may publish need not know who reads."""
        return f"topic {self.topic!r}: the window of a group stayed full for {self.timeout_s:g} s"


class TooManyDelayed(BusError):
    """As many delayed events wait as may, or as many bytes. The event was not stored."""

    code = "bus.too_many_delayed_events"
    retryable = True
    hint = "wait until some are published, or cancel some; the limits are the settings bus.delayed.*"
    text = "the limit of delayed events {scope} is reached: {limit} {unit}"
    scope: str
    limit: int
    unit: str


class SubscriptionExists(BusError):
    """A group has one live subscription a bus; more workers come with its ``workers`` option."""

    code = "bus.subscription_exists"
    hint = "raise workers on the subscription there is, or choose another group name"
    text = "topic {topic!r}: group {group!r} has a subscription on this bus already"
    topic: str
    group: str


class ReservedGroup(BusError):
    """The group is the bus's own: its position says which delayed events are settled."""

    code = "bus.reserved_group"
    hint = "choose another group name; delayed events are listed and cancelled with delayed_events and cancel_delayed"
    text = "topic {topic!r}: group {group!r} is kept by the bus for delayed events"
    topic: str
    group: str


class UnknownGroup(BusError):
    """The topic has no such group."""

    code = "bus.unknown_group"
    text = "topic {topic!r} has no group {group!r}"
    topic: str
    group: str


class TopicMismatch(BusError):
    """The topic argument and the event's own topic differ."""

    code = "bus.topic_mismatch"
    text = "publish was given topic {given!r}, but the event's own topic is {own!r}"
    given: str
    own: str


class InvalidAnswer(BusError):
    """A handler returned something that is neither Ack nor Nack, nor nothing."""

    code = "bus.invalid_answer"
    hint = "return Ack(), Nack() or nothing from the handler"
    text = "the handler returned {answer}, which is neither Ack() nor Nack()"

    def __init__(self, answer: object) -> None:
        self.answer = cut(answer if not isinstance(answer, str) else repr(answer))[:80]
        super().__init__(self.answer)


class InvalidHandler(BusError):
    """A handler cannot be subscribed as it is."""

    code = "bus.invalid_handler"
    text = "handler {handler}: {problem}"

    def __init__(self, handler: object, problem: str, hint: str | None = None) -> None:
        self.handler = getattr(handler, "__qualname__", type(handler).__name__)
        self.problem = problem
        self.hint = hint or (
            "a parameter takes the event (no annotation, Event), the envelope (EventMeta), the payload (a dataclass, Struct, "
            "TypedDict, pydantic model or dict) or, by its name, attempt: int"
        )
        super().__init__(self.handler, problem)


class PayloadMismatch(BusError):
    """The payload is not of the type that the handler asks for. The event becomes a dead letter at once."""

    code = "bus.payload_mismatch"
    text = "the payload is no {type_name}: {path}: {problem}"
    type_name: str
    path: str
    problem: str


class DrainTimeout(BusError):
    """Groups had not handled all that was committed within the time; ``behind`` says how many events each lacks."""

    code = "bus.drain_timeout"
    retryable = True
    hint = "a handler is slow, an event waits for its retry, or a group is paused: 'tidings group list -w WORKSPACE' shows it"
    timeout_s: float
    behind: dict[tuple[str, str], int]

    def describe(self) -> str:
        groups = ", ".join(
            f"{topic}/{group} lacks {count}" for (topic, group), count in sorted(self.behind.items())[:8]
        )
        return f"not all events were handled within {self.timeout_s:g} s: {groups}"


class HandlerTimeout(BusError):
    """The handler did not answer in time; the event goes to another worker."""

    code = "bus.handler_timeout"
    retryable = True
    text = "the handler did not answer within {deadline_ms} ms"
    deadline_ms: int


class CursorDamaged(BusError):
    """The group's place is unknown. Nothing was moved."""

    code = "bus.cursor_damaged"
    hint = "set the group's place with 'tidings group seek', from the start if in doubt: handlers see events again"
    text = "{path}: {problem}"
    path: str
    problem: str

    @property
    def public_text(self) -> str:
        """The same without the path."""
        return "the group's stored place cannot be read"


class InvalidBatch(BusError):
    """A batch is empty or too large. Nothing of it was published."""

    code = "bus.invalid_batch"
    text = "a batch holds 1 to {count_max} events, not {count}"
    count: int
    count_max: int


class UnknownDeadLetter(BusError):
    """There is no dead letter with that id."""

    code = "bus.unknown_dead_letter"
    text = "topic {topic!r} has no dead letter {letter_id!r}"
    topic: str
    letter_id: str
