"""
The cognitive layer over the bus: what deserves attention, what is remembered, what shall happen later.

``attention`` gates events, ``taxonomy`` names them, ``write`` makes memories of them, ``prospective`` fires triggers,
``working_memory`` holds a few things in mind and ``neuromodulation`` sets the pace of learning. Each takes a ``publish``
callable and a clock, and needs nothing else of the bus.
"""

from .attention import AttentionGate
from .prospective import TriggerRunner
from .taxonomy import CognitiveEventType, CognitiveTrace, cognitive_event
from .working_memory import WorkingMemory
from .write import MemoryStore, WriteHandler

__all__ = [
    "AttentionGate",
    "CognitiveEventType",
    "CognitiveTrace",
    "MemoryStore",
    "TriggerRunner",
    "WorkingMemory",
    "WriteHandler",
    "cognitive_event",
]
