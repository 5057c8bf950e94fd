"""Queues between engines hold so many and no more, let every class have its turn, and give up what may be given up, in one order."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.unit.gateway.engines import (
    Engines,
    app_event,
    graph_event,
    network_event,
    own_event,
    security_event,
    system_event,
)
from tidings.gateway.ceiling import Ceiling
from tidings.gateway.errors import QueueFull
from tidings.gateway.event_types import app_declaration
from tidings.gateway.names import EventClass
from tidings.gateway.queues import BoundedQueue, ClassQueues


def test_a_queue_takes_no_more_than_it_may_hold() -> None:
    """One more is refused, and those that are there keep their order."""
    queue: BoundedQueue[int] = BoundedQueue(3)
    for number in range(3):
        queue.put(number)
    with pytest.raises(QueueFull):
        queue.put(3)

    assert queue.peek() == 0
    assert queue.take_first(lambda each: each == 1) == 1
    assert queue.take_first(lambda each: each == 1) is None
    assert [queue.take(), queue.take(), queue.take(), queue.peek()] == [0, 2, None, None]


@pytest.mark.req("R77")
def test_every_class_gets_its_weight_of_each_turn() -> None:
    """8 graph, 4 security, 4 app, 2 network, 1 system while all have something waiting; within a class first in, first out."""
    queues: ClassQueues[tuple[EventClass, int]] = ClassQueues(1_000)
    for number in range(100):
        for each in EventClass:
            queues.put(each, (each, number))
    taken = [queues.take() for _ in range(19 * 5)]

    assert Counter(each[0] for each in taken[:19] if each) == {
        "graph": 8,
        "security": 4,
        "app": 4,
        "network": 2,
        "system": 1,
    }
    for event_class in EventClass:
        numbers = [each[1] for each in taken if each and each[0] is event_class]
        assert numbers == sorted(numbers)


def test_a_turn_that_a_class_has_no_use_for_goes_to_the_next() -> None:
    """Nothing waits while something is there, and an empty queue is left at once."""
    queues: ClassQueues[str] = ClassQueues(100)
    assert queues.take() is None
    queues.put(EventClass.SYSTEM, "s1")
    queues.put(EventClass.SYSTEM, "s2")
    queues.put(EventClass.NETWORK, "n1")

    assert sorted(filter(None, [queues.take() for _ in range(4)])) == ["n1", "s1", "s2"]
    queues.put(EventClass.GRAPH, "g1")
    assert (len(queues), queues.take(), len(queues)) == (1, "g1", 0)
    queues.put(EventClass.APP, "a1")
    queues.clear()
    assert (len(queues), queues.take()) == (0, None)


def test_an_envelope_counts_as_sixteen_entries() -> None:
    """The ceiling counts both exactly, and the lower classes wait from 80 percent on until it is 60 again."""
    ceiling = Ceiling(100)
    for _ in range(70):
        ceiling.hold_envelope("graph_manager", EventClass.GRAPH)
    ceiling.hold_entries(159)
    assert (ceiling.used, ceiling.is_paused) == (79.9375, False)
    ceiling.hold_entries(1)
    assert (ceiling.used, ceiling.is_paused, ceiling.room) == (80, True, 64)
    ceiling.release_entries(160)
    ceiling.hold_entries(64 + 80)
    assert ceiling.is_paused
    ceiling.release_entries(64 + 80)
    for _ in range(10):
        ceiling.release_envelope("graph_manager")
    assert (ceiling.used, ceiling.is_paused, ceiling.held_of("graph_manager")) == (60, False, 60)


@pytest.mark.req("R165")
def test_what_is_shed_is_the_oldest_of_the_lowest_class_wherever_it_waits() -> None:
    """System, then network, then app, then security, from the queue nearest to delivery on; graph events and the gateway's own never are."""
    engines = Engines()
    engines.declarations.declare(app_declaration("app.shop.order_paid", slug="shop", fields=("order_id",)))
    overflow = {"node_id": "n1", "classes": ("system",)}
    for count in (1, 2, 3):
        engines.tell(graph_event(count))
        engines.tell(security_event(count))
        engines.tell(app_event(count))
        engines.tell(network_event(count))
        engines.tell(system_event(count))
        engines.tell(own_event("system.event_queue_overflow", count, source="event_manager", summary=overflow))
        if count == 1:  # these wait for delivery,
            for each in engines.normalize():
                engines.bound.put(each.retained.event_class, each.retained)
        elif count == 2:  # these for their audience, and the rest to be normalized
            engines.normalizer.run(100)
    assert engines.ceiling.used == 18
    order = []
    while engines.shedder.shed_one():
        order.append(engines.shed[-1][0])

    assert order == [each for each in ("system", "network", "app", "security") for _ in range(3)]
    assert engines.ceiling.used == 6
    left = [engines.bound.depths(), engines.normalized.depths()]
    assert [{name: count for name, count in each.items() if count} for each in left] == [{"graph": 1, "system": 1}] * 2
    assert [each.source_manager for each in iter(engines.taken.take, None)] == ["graph_manager", "event_manager"]
    assert len(engines.index) == 4
