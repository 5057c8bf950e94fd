"""The seven topics: who produces on each, and who consumes."""

from __future__ import annotations

from typing import Final, NamedTuple

__all__ = ["SPACE", "WIRING", "Wire"]

SPACE: Final = "shared:household"


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
