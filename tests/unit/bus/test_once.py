"""A memory of keys: bounded, and what is asked for stays longest."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from tidings.bus import KeyMemory, once
from tidings.core.errors import SettingsError
from tidings.core.events import Event, EventMeta
from tidings.types import Ack, Nack


def event(key: str | None = None, event_id: str = "e") -> Event:
    return Event(EventMeta("t", "NOTED", "s", event_id=event_id, idem_key=key), {})


@pytest.mark.req("F64")
def test_the_key_that_was_asked_for_longest_ago_is_forgotten() -> None:
    """The memory never holds more than it may."""
    memory = KeyMemory(2)
    memory.add("a")
    memory.add("b")
    assert "a" in memory
    memory.add("c")

    assert ("a" in memory, "b" in memory, "c" in memory, len(memory)) == (True, False, True, 2)
    memory.discard("a")
    assert "a" not in memory
    with pytest.raises(SettingsError):
        KeyMemory(0)


@pytest.mark.req("F63", "F64")
async def test_what_was_acknowledged_is_not_done_again() -> None:
    """By its idempotency key, or else by its id; a Nack or an error is no deed."""
    done: list[str] = []
    answer: object = Nack("later")

    async def act(one: Event) -> object:
        done.append(one.meta.event_id)
        return answer

    handler = once(act)
    assert isinstance(await handler(event("k", "e1")), Nack)
    answer = Ack()
    assert isinstance(await handler(event("k", "e1")), Ack)
    assert isinstance(await handler(event("k", "e2")), Ack)
    assert isinstance(await handler(event(None, "e3")), Ack)
    assert isinstance(await handler(event(None, "e3")), Ack)
    assert done == ["e1", "e1", "e3"]


async def test_the_same_key_is_not_handled_twice_at_once() -> None:
    """The second waits for the first, and is acknowledged unseen once that is done."""
    release, count = asyncio.Event(), 0

    async def act(_: Event) -> None:
        nonlocal count
        count += 1
        await release.wait()

    handler = once(act)
    first, second = asyncio.ensure_future(handler(event("k"))), asyncio.ensure_future(handler(event("k")))
    await asyncio.sleep(0)
    assert (count, second.done()) == (1, False)
    release.set()
    assert await first is None
    assert isinstance(await second, Ack)
    assert count == 1


def test_a_plain_function_is_refused() -> None:
    """It could not be awaited: it would be called, be taken for failed, and be called again."""

    def plain(_: object) -> Ack:
        return Ack()

    with pytest.raises(SettingsError, match="coroutine function"):
        once(plain)  # type: ignore[arg-type]


async def test_a_handler_of_lists_gets_what_is_new() -> None:
    """Of a list, what was acknowledged before is acknowledged again unseen, and of one key only the first is handled."""
    got: list[list[str]] = []

    async def act(events: list[Event]) -> object:
        got.append([one.meta.event_id for one in events])
        return [Nack("later") if one.meta.event_id == "bad" else Ack() for one in events]

    handler = once(act)
    first: Any = await handler([event("k", "e1"), event("k", "e2"), event(None, "bad")])
    again: Any = await handler([event("k", "e3"), event(None, "bad"), event(None, "e4")])

    assert got == [["e1", "bad"], ["bad", "e4"]]
    assert [isinstance(each, Ack) for each in first] == [True, True, False]
    assert [isinstance(each, Ack) for each in again] == [True, False, True]
    assert all(isinstance(each, Ack) for each in cast(list[object], await handler([event("k", "e5")])))


async def test_a_typed_handler_can_be_one_that_acts_once() -> None:
    """Its parameters mean what they mean for ``subscribe``."""
    got: list[object] = []

    async def act(payload: dict[str, Any], one: Event) -> None:
        got.append((dict(payload), one.meta.event_id))

    handler = once(act)
    await handler(event(None, "e1"))
    await handler(event(None, "e1"))

    assert got == [({}, "e1")]


async def test_a_key_counts_within_its_topic_space_and_kind() -> None:
    """The same key in another topic or space, and an id that another event has as its key, are other events."""
    done: list[tuple[str, str, str]] = []

    async def act(one: Event) -> None:
        done.append((one.meta.topic, one.meta.space_id, one.meta.event_id))

    handler = once(act)
    events = [
        Event(EventMeta("orders", "T", "s", "e1", idem_key="order-1"), {}),
        Event(EventMeta("refunds", "T", "s", "e2", idem_key="order-1"), {}),
        Event(EventMeta("orders", "T", "other", "e3", idem_key="order-1"), {}),
        Event(EventMeta("orders", "T", "s", "order-1"), {}),
        Event(EventMeta("orders", "T", "s", "s", idem_key="e2"), {}),
    ]
    for one in [*events, *events]:
        assert not isinstance(await handler(one), Nack)

    assert done == [(one.meta.topic, one.meta.space_id, one.meta.event_id) for one in events]


async def test_handlers_of_several_topics_share_keys_on_purpose() -> None:
    """With a key function of the caller's own, one memory holds for two topics."""
    done: list[str] = []

    async def act(one: Event) -> None:
        done.append(one.meta.topic)

    memory = KeyMemory()
    handlers = [once(act, memory, key_of=lambda one: one.meta.idem_key) for _ in range(2)]
    for handler, topic in zip(handlers, ("orders", "refunds"), strict=True):
        await handler(Event(EventMeta(topic, "T", "s", idem_key="order-1"), {}))

    assert done == ["orders"]
