"""Members in the node's own process, and what a killed node leaves behind of a shared group."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tidings.bus.events import Ack, ReceivedEvent
from tidings.server.group_members import SharedClaims
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

    member = await world.run(world.door.members.subscribe("demo", "g", handle, workers=1))
    peer = await world.peer().joined(max_inflight=1)
    assert world.door.members.counts() == {("demo", "g"): 2}
    await world.publish(2)
    await world.until(lambda: peer.tags and seen)
    peer.say(wire.Ack(tags=peer.tags))
    await world.until(lambda: world.lag() == 0)

    await world.run(member.leave())
    assert world.door.members.counts() == {("demo", "g"): 1}


async def test_a_local_handler_that_raises_is_a_failed_attempt(world: World) -> None:
    """Errors of a local member are the bus's to count; the event becomes a dead letter with the error's own type."""
    attempts: list[int] = []

    async def handle(event: ReceivedEvent) -> Ack:
        attempts.append(event.attempt)
        raise ValueError("no good")

    options = wire.GroupOptions(max_retries=1, backoff_base=0.0)
    member = await world.run(world.door.members.subscribe("demo", "g", handle, options=options))
    await world.publish()
    await world.until(lambda: world.lag() == 0)
    (letter,) = await world.run(world.bus.dead_letters("demo"))

    assert attempts == [1, 2]
    assert letter.error_type == "builtins.ValueError"
    await world.run(member.leave())


async def test_a_plain_function_does_not_hold_up_the_loop(world: World) -> None:
    """A local handler that is no coroutine runs in a thread of its own."""
    threads: list[int] = []

    def handle(event: ReceivedEvent) -> Ack:
        threads.append(threading.get_ident())
        return Ack()

    member = await world.run(world.door.members.subscribe("demo", "g", handle))
    await world.publish()
    async with asyncio.timeout(20):
        while not threads:  # noqa: ASYNC110 - a thread has no event for us
            await asyncio.sleep(0.001)

    assert threads != [threading.get_ident()]
    await world.until(lambda: world.lag() == 0)
    await world.run(member.leave())


async def test_leaving_gives_back_what_is_not_finished(world: World) -> None:
    """A local member that leaves while its handler hangs gives the event back untried."""
    taken: list[int] = []

    async def hang(event: ReceivedEvent) -> Ack:
        taken.append(event.attempt)
        await asyncio.get_running_loop().create_future()
        return Ack()

    member = await world.run(world.door.members.subscribe("demo", "g", hang))
    await world.publish()
    await world.until(lambda: taken)
    peer = await world.peer().joined()
    await world.run(member.leave(timeout_s=0.0))
    await world.until(lambda: peer.tags)

    assert peer.heard(wire.Deliver)[0].attempt == 1


def test_only_what_a_local_handler_has_is_claimed(tmp_path: Path) -> None:
    """If the node is killed, events that waited for a member or were with a remote one do not count as tried."""
    claims = SharedClaims(tmp_path)
    claims.share("demo", "g")
    shared = claims("demo", "g")
    shared.begin(4)
    shared.take(0, 100, 1)
    shared.taker(1)(101, 2)
    shared.take(2, 102, 1)
    exposed = claims.shared["demo", "g"]
    exposed.expose(101)
    exposed.expose(102)
    shared.take(2, 103, 1)  # the same worker's next event, which goes elsewhere

    killed = SharedClaims(tmp_path)("demo", "g")
    assert killed.left_over() == {101: 2}
    shared.clear(1)
    assert killed.left_over() == {}
    shared.close()


def test_a_group_of_the_bus_alone_is_claimed_as_ever(tmp_path: Path) -> None:
    """A group that is not shared notes everything that its handler has."""
    claims = SharedClaims(tmp_path)
    own = claims("demo", "own")
    own.begin(1)
    own.take(0, 7, 3)
    claims.share("demo", "own")

    assert claims("demo", "own").left_over() == {7: 3}
    claims.unshare("demo", "own")
    own.clear(0)
    own.close()
    assert claims("demo", "own").left_over() == {}
