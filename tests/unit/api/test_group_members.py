"""Members in the node's own process, and what a killed node leaves behind of a shared group."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from tidings.bus.events import Ack, ReceivedEvent
from tidings.wire import groups as wire

from .world import World


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = await World().open()
    yield made
    await made.close()


async def test_a_handler_of_the_node_shares_with_members_elsewhere(world: World) -> None:
    """Local and remote members of a group divide its events between them."""
    seen: list[int] = []

    async def handle(event: ReceivedEvent) -> Ack:
        seen.append(event.payload["n"])
        return Ack()

    member = await world.run(world.bus.join("demo", "g", handle, workers=1))
    peer = await world.peer().joined(max_inflight=1)
    assert world.members() == {("demo", "g"): 2}
    await world.publish(2)
    await world.until(lambda: peer.tags and seen)
    peer.say(wire.Ack(tags=peer.tags))
    await world.until(lambda: world.lag() == 0)

    await world.run(world.bus.leave(member))
    assert world.members() == {("demo", "g"): 1}


async def test_a_local_handler_that_raises_is_a_failed_attempt(world: World) -> None:
    """Errors of a local member are the bus's to count; the event becomes a dead letter with the error's own type."""
    attempts: list[int] = []

    async def handle(event: ReceivedEvent) -> Ack:
        attempts.append(event.attempt)
        raise ValueError("no good")

    member = await world.run(world.bus.join("demo", "g", handle, max_retries=1, backoff_base=0.0))
    await world.publish()
    await world.until(lambda: world.lag() == 0)
    (letter,) = await world.run(world.bus.dead_letters("demo"))

    assert attempts == [1, 2]
    assert letter.error_type == "builtins.ValueError"
    await world.run(world.bus.leave(member))


async def test_a_plain_function_does_not_hold_up_the_loop(world: World) -> None:
    """A local handler that is no coroutine runs in a thread of its own."""
    threads: list[int] = []

    def handle(event: ReceivedEvent) -> Ack:
        threads.append(threading.get_ident())
        return Ack()

    member = await world.run(world.bus.join("demo", "g", handle))
    await world.publish()
    async with asyncio.timeout(20):
        while not threads:  # noqa: ASYNC110 - a thread has no event for us
            await asyncio.sleep(0.001)

    assert threads != [threading.get_ident()]
    await world.until(lambda: world.lag() == 0)
    await world.run(world.bus.leave(member))


async def test_leaving_gives_back_what_is_not_finished(world: World) -> None:
    """A local member that leaves while its handler hangs gives the event back untried."""
    taken: list[int] = []

    async def hang(event: ReceivedEvent) -> Ack:
        taken.append(event.attempt)
        await asyncio.get_running_loop().create_future()
        return Ack()

    member = await world.run(world.bus.join("demo", "g", hang))
    await world.publish()
    await world.until(lambda: taken)
    peer = await world.peer().joined()
    await world.run(world.bus.leave(member, timeout_s=0.0))
    await world.until(lambda: peer.tags)

    assert peer.heard(wire.Deliver)[0].attempt == 1


async def test_only_what_a_local_handler_has_is_claimed(world: World) -> None:
    """If the node is killed, events that wait for a member or are with a remote one do not count as tried."""
    taken: list[int] = []
    gate = asyncio.Event()

    async def hold(event: ReceivedEvent) -> Ack:
        taken.append(event.offset)
        await gate.wait()
        return Ack()

    member = await world.run(world.bus.join("demo", "g", hold))
    peer = await world.peer().joined(max_inflight=1)
    await world.publish(4)
    await world.until(lambda: taken and peer.tags)

    assert list(world.claimed.values()) == [(taken[0], 1)]
    peer.say(wire.Credit(id=1, max_inflight=0), wire.Ack(tags=peer.tags))
    gate.set()
    await world.until(lambda: world.lag() == 0)
    assert world.claimed == {}
    await world.run(world.bus.leave(member))
