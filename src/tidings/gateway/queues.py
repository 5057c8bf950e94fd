"""What joins the engines: queues that hold so many and no more."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Final, Generic, TypeVar

from .errors import QueueFull
from .names import EventClass

T = TypeVar("T")

CLASS_WEIGHTS: Final[Mapping[EventClass, int]] = {
    EventClass.GRAPH: 8,
    EventClass.SECURITY: 4,
    EventClass.APP: 4,
    EventClass.NETWORK: 2,
    EventClass.SYSTEM: 1,
}
"""How many each class gets of a turn in which all classes have something waiting, in the order in which they get them."""


class BoundedQueue(Generic[T]):
    """First in, first out."""

    __slots__ = ("_items", "capacity")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._items: deque[T] = deque()

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: T) -> None:
        """
        Add an item behind the others.

        Raises:
            QueueFull: The queue holds as many as it may.
        """
        if len(self._items) >= self.capacity:
            raise QueueFull("queue", f"holds {self.capacity}, which is all that it may")
        self._items.append(item)

    def take(self) -> T | None:
        """The oldest item, or ``None``."""
        return self._items.popleft() if self._items else None

    def peek(self) -> T | None:
        """The oldest item, which stays."""
        return self._items[0] if self._items else None

    def take_first(self, wanted: Callable[[T], bool]) -> T | None:
        """The oldest of those that are wanted. The others keep their order."""
        for place, item in enumerate(self._items):
            if wanted(item):
                del self._items[place]
                return item
        return None

    def clear(self) -> None:
        """Drop everything."""
        self._items.clear()


class ClassQueues(Generic[T]):
    """
    A queue for each class. Order is kept within a class.

    Args:
        capacity: Of each queue.
    """

    def __init__(self, capacity: int) -> None:
        self._queues: Final = {each: BoundedQueue[T](capacity) for each in EventClass}
        self._turn: Final = tuple(CLASS_WEIGHTS)
        self._begin(0)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def depths(self) -> dict[EventClass, int]:
        """How many wait in each class."""
        return {each: len(queue) for each, queue in self._queues.items()}

    def put(self, event_class: EventClass, item: T) -> None:
        """
        Add an item behind the others of its class.

        Raises:
            QueueFull: Its queue holds as many as it may.
        """
        self._queues[event_class].put(item)
        self._length += 1

    def take(self) -> T | None:
        """
        The next item by weighted round robin, or ``None`` if nothing waits.

        While every class has something waiting, each gets its weight of every turn, so none starves; what a class has no use for goes to
        the next at once. When nothing waits any more, the next turn begins with the highest class.
        """
        if not self._length:
            return None
        while True:
            if self._left and (item := self._queues[self._turn[self._at]].take()) is not None:
                self._left -= 1
                self._length -= 1
                if not self._length:
                    self._begin(0)
                return item
            self._begin((self._at + 1) % len(self._turn))

    def _begin(self, place: int) -> None:
        """It is the turn of the class at this place."""
        self._at = place
        self._left = CLASS_WEIGHTS[self._turn[place]]

    def shed_oldest(self, event_class: EventClass, may_go: Callable[[T], bool]) -> T | None:
        """The oldest item of a class that may go, out of turn."""
        item = self._queues[event_class].take_first(may_go)
        if item is not None:
            self._length -= 1
        return item

    def clear(self, classes: Iterable[EventClass] = EventClass) -> None:
        """Drop everything in these classes."""
        for each in classes:
            self._length -= len(self._queues[each])
            self._queues[each].clear()
