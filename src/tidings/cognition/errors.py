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


class CognitionError(TidingsError):
    """The root of what the cognitive layer raises."""

    code = "cognition.error"


class InvalidRequest(CognitionError):
    """A value is missing or out of range; ``field`` names it."""

    code = "cognition.invalid_request"
    text = "{field}: {problem}"
    field: str
    problem: str


class NoHealthyConsumer(CognitionError):
    """Every consumer is failing, overloaded, too slow or silent."""

    code = "cognition.no_healthy_consumer"
    retryable = True
    hint = "look at the consumers' failures and load; the event may be tried again when one has recovered"
    text = "none of {consumers} consumers is healthy enough to take {event_type!r}"
    event_type: str
    consumers: int


class TriggerLimit(CognitionError):
    """The runner is full."""

    code = "cognition.trigger_limit"
    hint = "cancel triggers that are no longer wanted, or raise triggers_max"
    text = "the runner holds {triggers_max} triggers already"
    triggers_max: int


class UnknownTrigger(CognitionError):
    """There is no trigger with that id."""

    code = "cognition.unknown_trigger"
    text = "there is no trigger {trigger_id!r}"
    trigger_id: str


class MemoryStoreError(CognitionError):
    """The store could not do it; nothing of the transaction remains."""

    code = "cognition.memory_store"
    retryable = True
    hint = "check that the store's file is writable and its disk has room"
    text = "memory store: {operation} failed: {problem}"
    operation: str
    problem: str
