"""What a bus keeps beside its log: offsets, dead letters and claims. ``interface`` says what a store does, ``files`` is one on files."""

from .dead_letters import Attempt, DeadLetter, DeadLetterFilter, DeadLetterState, Reason
from .interface import Claims, Cursor, GroupPosition, GroupStore

__all__ = [
    "Attempt",
    "Claims",
    "Cursor",
    "DeadLetter",
    "DeadLetterFilter",
    "DeadLetterState",
    "GroupPosition",
    "GroupStore",
    "Reason",
]
