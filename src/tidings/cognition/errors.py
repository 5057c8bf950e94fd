"""
What the cognitive layer answers when it cannot do what it was asked.

    CognitionError
    ├── InvalidRequest          something a caller handed in is missing or out of range
    ├── NoHealthyConsumer       no consumer may be given the event
    ├── TriggerLimit            the runner holds as many triggers as it may
    ├── UnknownTrigger          no trigger has that id
    └── MemoryStoreError        the memory store could not read or commit

A refusal by the gate is no error: it is a decision, with reasons.
"""

from __future__ import annotations

from tidings.core.errors import TidingsError

__all__ = [
    "CognitionError",
    "InvalidRequest",
    "MemoryStoreError",
    "NoHealthyConsumer",
    "TriggerLimit",
    "UnknownTrigger",
]


class CognitionError(TidingsError):
    """The root of what the cognitive layer raises."""

    code = "cognition.error"


class InvalidRequest(CognitionError):
    """A value is missing or out of range; ``field`` names it."""

    code = "cognition.invalid_request"

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(field, problem)
        self.field = field
        self.problem = problem

    def describe(self) -> str:
        return f"{self.field}: {self.problem}"


class NoHealthyConsumer(CognitionError):
    """Every consumer is failing, overloaded, too slow or silent."""

    code = "cognition.no_healthy_consumer"
    retryable = True
    hint = "look at the consumers' failures and load; the event may be tried again when one has recovered"

    def __init__(self, event_type: str, consumers: int) -> None:
        super().__init__(event_type, consumers)
        self.event_type = event_type
        self.consumers = consumers

    def describe(self) -> str:
        return f"none of {self.consumers} consumers is healthy enough to take {self.event_type!r}"


class TriggerLimit(CognitionError):
    """The runner is full."""

    code = "cognition.trigger_limit"
    hint = "cancel triggers that are no longer wanted, or raise triggers_max"

    def __init__(self, triggers_max: int) -> None:
        super().__init__(triggers_max)
        self.triggers_max = triggers_max

    def describe(self) -> str:
        return f"the runner holds {self.triggers_max} triggers already"


class UnknownTrigger(CognitionError):
    """There is no trigger with that id."""

    code = "cognition.unknown_trigger"

    def __init__(self, trigger_id: str) -> None:
        super().__init__(trigger_id)
        self.trigger_id = trigger_id

    def describe(self) -> str:
        return f"there is no trigger {self.trigger_id!r}"


class MemoryStoreError(CognitionError):
    """The store could not do it; nothing of the transaction remains."""

    code = "cognition.memory_store"
    retryable = True
    hint = "check that the store's file is writable and its disk has room"

    def __init__(self, operation: str, problem: str) -> None:
        super().__init__(operation, problem)
        self.operation = operation
        self.problem = problem

    def describe(self) -> str:
        return f"memory store: {self.operation} failed: {self.problem}"
