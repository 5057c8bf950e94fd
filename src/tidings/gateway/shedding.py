"""What is given up when there is no more room: the oldest that waits in the lowest class. Graph events never are."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from .ceiling import Ceiling
from .event_types import EVENT_MANAGER
from .intake import TaggedDescriptor
from .names import LOWER_CLASSES, EventClass, class_of
from .normalization import Normalized
from .queues import BoundedQueue, ClassQueues
from .resume_index import ResumeIndex, Retained


class Shedder:
    """
    Sheds what waits in the queues between the engines: system, then network, then app, then security, each from its oldest on.

    What the gateway itself tells is spared: it is little, it has its own reserve, and it is what says that something was shed.

    Args:
        intake, normalized, bound: The three queues, the youngest events in the first.
        index, ceiling: Where what is shed is given back.
        on_shed: Told class, type and source of each.
    """

    def __init__(
        self,
        intake: BoundedQueue[TaggedDescriptor],
        normalized: ClassQueues[Normalized],
        bound: ClassQueues[Retained],
        index: ResumeIndex,
        ceiling: Ceiling,
        on_shed: Callable[[EventClass, str, str], None],
    ) -> None:
        self._intake = intake
        self._normalized = normalized
        self._bound = bound
        self._index = index
        self._ceiling = ceiling
        self._on_shed = on_shed

    def shed_one(self) -> bool:
        """Give one up; says whether there was one."""
        for event_class in LOWER_CLASSES:
            retained = self._bound.shed_oldest(event_class, lambda each: each.envelope.source_manager != EVENT_MANAGER)
            if retained is None:
                found = self._normalized.shed_oldest(
                    event_class, lambda each: each.retained.envelope.source_manager != EVENT_MANAGER
                )
                retained = None if found is None else found.retained
            if retained is not None:
                self._index.forget(retained)
                self._release(event_class, retained.envelope.event_type, retained.envelope.source_manager)
                return True
            tagged = self._intake.take_first(partial(_may_go, event_class))
            if tagged is not None:
                self._release(event_class, tagged.descriptor.event_type, tagged.source_manager)
                return True
        return False

    def _release(self, event_class: EventClass, event_type: str, source: str) -> None:
        self._ceiling.release_envelope(source)
        self._on_shed(event_class, event_type, source)


def _may_go(event_class: EventClass, tagged: TaggedDescriptor) -> bool:
    return tagged.source_manager != EVENT_MANAGER and class_of(tagged.descriptor.event_class) is event_class
