"""
What the bus answers when it cannot do what it was asked.

    BusError
    ├── BusClosed               the bus was closed
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

__all__ = [
    "BusClosed",
    "BusError",
    "CursorDamaged",
    "DrainTimeout",
    "HandlerTimeout",
    "InvalidAnswer",
    "InvalidBatch",
    "InvalidHandler",
    "PayloadMismatch",
    "PublishTimeout",
    "SubscriptionExists",
    "TopicMismatch",
    "UnknownDeadLetter",
    "UnknownGroup",
]


class BusError(TidingsError):
    """The root of what the bus raises."""

    code = "bus.error"


class BusClosed(BusError):
    """The bus was closed."""

    code = "bus.closed"

    def describe(self) -> str:
        return "the bus is closed"


class PublishTimeout(BusError):
    """The window of a live subscription stayed full. The event was not stored."""

    code = "bus.publish_timeout"
    retryable = True
    hint = "the group is slower than its publishers: add workers, raise max_inflight, or publish with a longer timeout"

    def __init__(self, topic: str, group: str, timeout_s: float) -> None:
        super().__init__(topic, group, timeout_s)
        self.topic = topic
        self.group = group
        self.timeout_s = timeout_s

    def describe(self) -> str:
        return f"topic {self.topic!r}: the window of group {self.group!r} stayed full for {self.timeout_s:g} s"

    @property
    def public_text(self) -> str:
        """The same without the group: whoever may publish need not know who reads."""
        return f"topic {self.topic!r}: the window of a group stayed full for {self.timeout_s:g} s"


class SubscriptionExists(BusError):
    """A group has one live subscription a bus; more workers come with its ``workers`` option."""

    code = "bus.subscription_exists"
    hint = "raise workers on the subscription there is, or choose another group name"

    def __init__(self, topic: str, group: str) -> None:
        super().__init__(topic, group)
        self.topic = topic
        self.group = group

    def describe(self) -> str:
        return f"topic {self.topic!r}: group {self.group!r} has a subscription on this bus already"


class UnknownGroup(BusError):
    """The topic has no such group."""

    code = "bus.unknown_group"

    def __init__(self, topic: str, group: str) -> None:
        super().__init__(topic, group)
        self.topic = topic
        self.group = group

    def describe(self) -> str:
        return f"topic {self.topic!r} has no group {self.group!r}"


class TopicMismatch(BusError):
    """The topic argument and the event's own topic differ."""

    code = "bus.topic_mismatch"

    def __init__(self, given: str, own: str) -> None:
        super().__init__(given, own)
        self.given = given
        self.own = own

    def describe(self) -> str:
        return f"publish was given topic {self.given!r}, but the event's own topic is {self.own!r}"


class InvalidAnswer(BusError):
    """A handler returned something that is neither Ack nor Nack, nor nothing."""

    code = "bus.invalid_answer"
    hint = "return Ack(), Nack() or nothing from the handler"

    def __init__(self, answer: object) -> None:
        self.answer = cut(answer if not isinstance(answer, str) else repr(answer))[:80]
        super().__init__(self.answer)

    def describe(self) -> str:
        return f"the handler returned {self.answer}, which is neither Ack() nor Nack()"


class InvalidHandler(BusError):
    """A handler cannot be subscribed as it is."""

    code = "bus.invalid_handler"

    def __init__(self, handler: object, problem: str, hint: str | None = None) -> None:
        self.handler = getattr(handler, "__qualname__", type(handler).__name__)
        self.problem = problem
        self.hint = hint or (
            "a parameter takes the event (no annotation, Event), the envelope (EventMeta), the payload (a dataclass, Struct, "
            "TypedDict, pydantic model or dict) or, by its name, attempt: int"
        )
        super().__init__(self.handler, problem)

    def describe(self) -> str:
        return f"handler {self.handler}: {self.problem}"


class PayloadMismatch(BusError):
    """The payload is not of the type that the handler asks for. The event becomes a dead letter at once."""

    code = "bus.payload_mismatch"

    def __init__(self, type_name: str, path: str, problem: str) -> None:
        super().__init__(type_name, path, problem)
        self.type_name = type_name
        self.path = path
        self.problem = problem

    def describe(self) -> str:
        return f"the payload is no {self.type_name}: {self.path}: {self.problem}"


class DrainTimeout(BusError):
    """Groups had not handled all that was committed within the time; ``behind`` says how many events each lacks."""

    code = "bus.drain_timeout"
    retryable = True
    hint = "a handler is slow, an event waits for its retry, or a group is paused: 'tidings group list' shows which"

    def __init__(self, timeout_s: float, behind: dict[tuple[str, str], int]) -> None:
        super().__init__(timeout_s, behind)
        self.timeout_s = timeout_s
        self.behind = behind

    def describe(self) -> str:
        groups = ", ".join(
            f"{topic}/{group} lacks {count}" for (topic, group), count in sorted(self.behind.items())[:8]
        )
        return f"not all events were handled within {self.timeout_s:g} s: {groups}"


class HandlerTimeout(BusError):
    """The handler did not answer in time; the event goes to another worker."""

    code = "bus.handler_timeout"
    retryable = True

    def __init__(self, deadline_ms: int) -> None:
        super().__init__(deadline_ms)
        self.deadline_ms = deadline_ms

    def describe(self) -> str:
        return f"the handler did not answer within {self.deadline_ms} ms"


class CursorDamaged(BusError):
    """The group's place is unknown. Nothing was moved."""

    code = "bus.cursor_damaged"
    hint = "set the group's place with 'tidings group seek', from the start if in doubt: handlers see events again"

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(path, problem)
        self.path = path
        self.problem = problem

    def describe(self) -> str:
        return f"{self.path}: {self.problem}"

    @property
    def public_text(self) -> str:
        """The same without the path."""
        return "the group's stored place cannot be read"


class InvalidBatch(BusError):
    """A batch is empty or too large. Nothing of it was published."""

    code = "bus.invalid_batch"

    def __init__(self, count: int, count_max: int) -> None:
        super().__init__(count, count_max)
        self.count = count
        self.count_max = count_max

    def describe(self) -> str:
        return f"a batch holds 1 to {self.count_max} events, not {self.count}"


class UnknownDeadLetter(BusError):
    """There is no dead letter with that id."""

    code = "bus.unknown_dead_letter"

    def __init__(self, topic: str, letter_id: str) -> None:
        super().__init__(topic, letter_id)
        self.topic = topic
        self.letter_id = letter_id

    def describe(self) -> str:
        return f"topic {self.topic!r} has no dead letter {self.letter_id!r}"
