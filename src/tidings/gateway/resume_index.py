"""
The envelopes that are kept for those who come back: ``event.delivery.resume_window`` of each class, in memory only.

An envelope is here from normalization on, before any later engine sees it. When it is its turn to be delivered it gets its ordinal, its place in
the one order in which all subscribers see all classes; from then on it is among its class's window, and the oldest beyond that leaves.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from tidings.access.visibility import ReadCapsule
from tidings.wire.gateway import event_prefix

from .envelopes import EventEnvelope, encode
from .names import EventClass


class Retained:
    """One envelope, with what is known of it by now."""

    __slots__ = ("anchor", "capsule", "channel", "envelope", "event_class", "holders", "ordinal", "prefix")

    def __init__(self, event_class: EventClass, channel: str, envelope: EventEnvelope, anchor: int) -> None:
        self.event_class: Final = event_class
        self.channel: Final = channel
        """``graph``, ``system``, ``network``, ``security`` or ``app.<slug>``."""
        self.envelope = envelope
        """Without its contract until it is bound."""
        self.anchor: Final = anchor
        self.ordinal: int | None = None
        """Its place in the order of delivery; ``None`` as long as it waits."""
        self.capsule: ReadCapsule | None = None
        self.prefix = b""
        """Its frame up to the trace id: the same bytes for all subscribers."""
        self.holders = 1
        """Queues and buffers that hold it: at first the queue that it is put into."""

    def bind(self, capsule: ReadCapsule, envelope: EventEnvelope) -> None:
        """It has its audience: the capsule, and the envelope with its contract."""
        self.capsule = capsule
        self.envelope = envelope
        self.prefix = event_prefix(envelope.event_type, encode(envelope))


class ResumeIndex:
    """
    The retained envelopes, by id and in the order of their delivery.

    Args:
        window: How many of each class are kept once they were delivered.
    """

    def __init__(self, window: int) -> None:
        self._window = window
        self._by_id: dict[str, Retained] = {}
        self._delivered: Final[dict[EventClass, deque[Retained]]] = {each: deque() for each in EventClass}
        self._evicted: Final = dict.fromkeys(EventClass, 0)
        self._ordinal = 0

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def last_ordinal(self) -> int:
        """That of the envelope delivered last; 0 if there was none."""
        return self._ordinal

    def add(self, retained: Retained) -> None:
        """Keep an envelope that now begins to wait."""
        self._by_id[retained.envelope.event_id] = retained

    def number(self, retained: Retained) -> int:
        """It is the next to be delivered: gives it its ordinal, and lets the oldest of its class go if there are too many."""
        self._ordinal += 1
        retained.ordinal = self._ordinal
        delivered = self._delivered[retained.event_class]
        delivered.append(retained)
        self._evict(retained.event_class, delivered)
        return self._ordinal

    def forget(self, retained: Retained) -> None:
        """It will not be delivered: it was shed, or nobody may see it."""
        self._by_id.pop(retained.envelope.event_id, None)

    def find(self, event_id: str, anchor: int) -> Retained | None:
        """A delivered envelope that is still kept, if its anchor is the one that is said."""
        found = self._by_id.get(event_id)
        return found if found is not None and found.ordinal is not None and found.anchor == anchor else None

    def after(self, event_class: EventClass, ordinal: int) -> list[Retained]:
        """The kept envelopes of a class that were delivered after this ordinal, oldest first."""
        found = []
        for retained in reversed(self._delivered[event_class]):
            if (retained.ordinal or 0) <= ordinal:
                break
            found.append(retained)
        found.reverse()
        return found

    def last_before(self, event_class: EventClass, ordinal: int) -> Retained | None:
        """The newest kept envelope of a class that was delivered at or before this ordinal."""
        return next(
            (each for each in reversed(self._delivered[event_class]) if (each.ordinal or 0) <= ordinal),
            None,
        )

    def evicted_ordinal(self, event_class: EventClass) -> int:
        """The highest ordinal of this class that is no longer kept; 0 if all are."""
        return self._evicted[event_class]

    def resize(self, window: int) -> None:
        """Keep as many of each class from now on; what is more leaves at once, oldest first."""
        self._window = window
        for each, delivered in self._delivered.items():
            self._evict(each, delivered)

    def clear(self) -> None:
        """Keep nothing: the gateway has stopped."""
        self._by_id.clear()
        for each, delivered in self._delivered.items():
            delivered.clear()
            self._evicted[each] = self._ordinal

    def _evict(self, event_class: EventClass, delivered: deque[Retained]) -> None:
        while len(delivered) > self._window:
            oldest = delivered.popleft()
            self._by_id.pop(oldest.envelope.event_id, None)
            self._evicted[event_class] = oldest.ordinal or 0
