"""The seven topics: who produces on each, and who consumes."""

from __future__ import annotations

from typing import Final, NamedTuple

__all__ = ["INTAKE", "PERSON", "SPACE", "WIRING", "WRITE_TOPIC", "ZONE", "Wire"]

SPACE: Final = "shared:household"
PERSON: Final = "alice"
ZONE: Final = "Europe/Berlin"
WRITE_TOPIC: Final = "bus.write.ingest"


class Wire(NamedTuple):
    """One topic's ends. A consumer's name is its group's."""

    producers: tuple[str, ...]
    consumers: tuple[str, ...]
    use: str


WIRING: Final = {
    "workspace": Wire(("workspace",), ("arbiter", "recall", "learning"), "what is salient now"),
    "hippo": Wire(("writer",), ("hippocampus", "consolidation"), "episodes to encode"),
    "affect": Wire(("classifier",), ("arbiter", "learning"), "how it felt"),
    "cortex": Wire(("predictor",), ("arbiter",), "needs and actions that might meet them"),
    "actions": Wire(("arbiter", "actuators"), ("actuators", "learning"), "decisions, and what came of them"),
    "prospective": Wire(("prospective",), ("arbiter", "workspace"), "reminders"),
    "temporal": Wire(("writer", "temporal"), ("temporal", "recall", "prospective"), "times, and patterns in them"),
}
INTAKE: Final = {WRITE_TOPIC: Wire(("attention",), ("writer",), "moments that were let in")}
"""What leads to the seven: the gate hands on what deserves attention, and the writer takes it from there."""
