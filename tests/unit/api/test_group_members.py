"""Members in the node's own process, and what a killed node leaves behind of a shared group."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from tidings.bus.events import Ack, ReceivedEvent
from tidings.bus.store import DeadLetterState
from tidings.core.errors import SettingsError
from tidings.wire import groups as wire

from .world import Peer, World


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
    peer.say(wire.AckFrame(tags=peer.tags))
    await world.until(lambda: world.lag() == 0)

    await world.run(world.bus.leave(member))
    assert world.members() == {("demo", "g"): 1}


@pytest.mark.parametrize("options", [{"workers": 0}, {"workers": "2"}, {"workers": True}, {"order": "sorted"}], ids=str)
async def test_a_wrong_option_of_a_member_is_refused(world: World, options: dict[str, Any]) -> None:
    """A member with an option out of its range is refused, also by a group that runs, and the group goes on without it."""
    seen: list[int] = []

    async def handle(event: ReceivedEvent) -> None:
        seen.append(event.payload["n"])

    member = await world.run(world.bus.join("demo", "g", handle))
    with pytest.raises(SettingsError, match=next(iter(options))):
        await world.run(world.bus.join("demo", "g", handle, **options))
    await world.publish(2)
    await world.until(lambda: world.lag() == 0)

    assert seen == [0, 1]
    assert world.members() == {("demo", "g"): 1}
    await world.run(world.bus.leave(member))


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
    peer.say(wire.Credit(id=1, max_inflight=0), wire.AckFrame(tags=peer.tags))
    gate.set()
    await world.until(lambda: world.lag() == 0)
    assert world.claimed == {}
    await world.run(world.bus.leave(member))


def said(peer: Peer) -> list[tuple[str, int, int]]:
    """Space, number and attempt of what a peer was sent, in order."""
    records = [(frame.attempt, msgspec.json.decode(frame.record)) for frame in peer.heard(wire.Deliver)]
    return [(each["meta"]["space_id"], each["payload"]["n"], attempt) for attempt, each in records]


async def test_order_by_key_holds_across_members_retries_and_a_lost_member(world: World) -> None:
    """The next event of a key is handed out when the one before it is done with, whoever had that and however it ended."""
    peers = [await world.peer().joined(order="key", max_inflight=2, backoff_base=0.0) for _ in range(3)]
    spaces = ("a", "b", "c", "d")
    await world.run(world.log.append_many([world.event(n, space=spaces[n % 4]) for n in range(24)]))
    handled: dict[str, list[int]] = {space: [] for space in spaces}
    at: dict[str, int] = {}
    answered: set[tuple[int, int]] = set()
    failed = 0
    lost: list[Peer] = []

    def answer_all() -> bool:
        """Answer what has come since; every fifth event fails at first, and one member is cut off in the middle."""
        nonlocal failed
        for number, peer in enumerate(peers):
            for frame, (space, n, attempt) in zip(peer.heard(wire.Deliver), said(peer), strict=True):
                if (number, frame.tag) in answered or peer in lost:
                    continue
                answered.add((number, frame.tag))
                assert at.setdefault(space, n) == n, "two events of one key are out at once"
                assert all(n > before for before in handled[space]), "an event was overtaken"
                if number == 2 and len(answered) > 8:
                    lost.append(peer)
                    peer.talk.closed(1006)
                elif n % 5 == 0 and attempt == 1:
                    failed += 1
                    peer.say(wire.NackFrame(tag=frame.tag))
                else:
                    handled[space].append(n)
                    del at[space]
                    peer.say(wire.AckFrame(tags=[frame.tag]))
        return world.lag() == 0

    await world.until(answer_all, seconds_max=60)

    assert (len(lost), failed > 0) == (1, True)
    assert handled == {space: [n for n in range(24) if spaces[n % 4] == space] for space in spaces}


async def test_a_lone_member_gets_events_as_a_local_handler_would(world: World) -> None:
    """By offset as slots come free, and what it gives back comes before what it has not had."""
    peer = await world.peer().joined(max_inflight=2)
    await world.publish(6)
    await world.until(lambda: len(peer.tags) == 2)
    peer.say(*(wire.NackFrame(tag=tag, is_returned=True) for tag in peer.tags))
    await world.until(lambda: len(peer.tags) == 4)
    for _ in range(4):
        peer.say(wire.AckFrame(tags=peer.tags[-2:]))
        await world.pass_time(0.1)

    assert [(n, attempt) for _, n, attempt in said(peer)] == [(n, 1) for n in (0, 1, 0, 1, 2, 3, 4, 5)]
    assert world.lag() == 0


async def test_members_get_the_most_urgent_event_that_waits(world: World) -> None:
    """With ``by_priority`` the choice is made when a member has room, among all that wait."""
    peer = await world.peer().joined(max_inflight=1, by_priority=True)
    await world.publish(1)
    await world.until(lambda: peer.tags)
    await world.run(world.log.append_many([world.event(n, priority=n) for n in (1, 9, 5)]))
    await world.pass_time(0.1)
    for _ in range(4):
        peer.say(wire.AckFrame(tags=peer.tags[-1:]))
        await world.pass_time(0.1)

    assert [n for _, n, _ in said(peer)] == [0, 9, 5, 1]


async def test_a_paused_group_hands_out_nothing_when_a_member_comes_free(world: World) -> None:
    """What is out is finished; what waited for a member waits until the group is resumed."""
    peer = await world.peer().joined(max_inflight=1)
    await world.publish(2)
    await world.until(lambda: peer.tags)
    await world.run(world.bus.pause("demo", "g"))
    peer.say(wire.AckFrame(tags=peer.tags))
    await world.pass_time(1)
    assert (len(peer.tags), world.lag()) == (1, 1)

    await world.run(world.bus.resume("demo", "g"))
    await world.until(lambda: len(peer.tags) == 2)


async def test_a_dead_letter_of_a_shared_group_is_tried_again_by_a_member(world: World) -> None:
    """It goes to whoever has room, and is done with when that one acknowledges."""
    peer = await world.peer().joined(max_inflight=1, max_retries=0)
    await world.publish(1)
    await world.until(lambda: peer.tags)
    peer.say(wire.NackFrame(tag=peer.tags[0], reason="no good"))
    await world.until(lambda: world.lag() == 0)
    await world.run(world.bus.redrive("demo"))
    await world.until(lambda: len(peer.tags) == 2)
    peer.say(wire.NackFrame(tag=peer.tags[1], is_returned=True))
    await world.until(lambda: len(peer.tags) == 3)
    peer.say(wire.AckFrame(tags=peer.tags[2:]))

    async def is_done() -> bool:
        return not await world.bus.dead_letters("demo")

    async def until_done() -> None:
        while not await is_done():
            await world.clock.sleep(0.01)

    await world.run(until_done())


async def test_the_options_of_the_window_pass_through_a_connection(world: World) -> None:
    """A member may say how large the window is in bytes, how many retries wait, and when the group counts as stalled."""
    peer = await world.peer().joined(max_inflight_bytes=5_000, waiting_retries_max=7, stall_timeout_s=0.5)

    (told,) = peer.heard(wire.Subscribed)
    given = (told.options.max_inflight_bytes, told.options.waiting_retries_max, told.options.stall_timeout_s)
    assert given == (5_000, 7, 0.5)
    (subscription,) = world.bus.get_subscriptions("demo")
    settings = subscription.settings
    assert (settings.max_inflight_bytes, settings.waiting_retries_max, settings.stall_timeout_s) == given
    assert told.differs == []


async def dead_letters_of(world: World, *spaces: str) -> None:
    """Have the group give up on an event of each space, leave, and ask for all of them to be tried again."""

    async def fail(event: ReceivedEvent) -> Ack:
        raise ValueError("no good")

    member = await world.run(world.bus.join("demo", "g", fail, max_retries=0))
    await world.run(world.log.append_many([world.event(n, space=space) for n, space in enumerate(spaces)]))
    await world.until(lambda: world.lag() == 0)
    await world.run(world.bus.leave(member))
    await world.run(world.bus.redrive("demo"))


async def states_of(world: World, *states: DeadLetterState) -> list[str]:
    """The ids of the dead letters in these states."""
    return [letter.id for letter in await world.run(world.bus.dead_letters("demo", states=states))]


async def acknowledge(peer: Peer, count: int) -> None:
    """Acknowledge so many deliveries, one after another."""
    for _ in range(count):
        await peer.world.until(lambda: peer.talk.unanswered_count)
        peer.say(wire.AckFrame(tags=peer.tags))


async def test_a_redrive_that_no_member_may_see_waits_and_holds_up_no_other(world: World) -> None:
    """Dead letters go to members who may see them; those that nobody may see wait untried, however often members come and go."""
    await dead_letters_of(world, "home", "attic", "home", "attic")
    for count in (2, 0, 0):
        limited = await world.peer().joined(spaces=["attic"], max_retries=0)
        await acknowledge(limited, count)
        await world.pass_time(1.0)
        assert await states_of(world, "requested") == ["g-0", "g-2"]
        assert await states_of(world, "redriven") == ["g-1", "g-3"]
        limited.say(wire.Unsubscribe(id=1))
        await world.until(lambda: not world.members())

    everything = await world.peer().joined(max_retries=0)
    await acknowledge(everything, 2)
    await world.pass_time(1.0)
    assert said(everything) == [("home", 0, 2), ("home", 2, 2)]
    assert await states_of(world, "redriven") == ["g-0", "g-1", "g-2", "g-3"]


async def test_a_paused_group_hands_out_no_redrive_that_waited_for_a_member(world: World) -> None:
    """A dead letter that waits for a member is not handed to one who joins while the group is paused, but when it is resumed."""
    await dead_letters_of(world, "home")
    await world.peer().joined(spaces=["attic"])
    await world.pass_time(1.0)
    await world.run(world.bus.pause("demo", "g"))
    everything = await world.peer().joined()
    await world.pass_time(1.0)
    assert everything.tags == []

    await world.run(world.bus.resume("demo", "g"))
    await world.until(lambda: everything.tags)
    assert said(everything) == [("home", 0, 2)]


async def test_a_new_request_is_tried_while_another_waits_for_a_member(world: World) -> None:
    """A dead letter that nobody may see does not keep later requests waiting."""
    await dead_letters_of(world, "home", "attic")
    await world.run(world.bus.drop_dead_letters("demo", ["g-1"]))
    limited = await world.peer().joined(spaces=["attic"], max_retries=0)
    await world.pass_time(1.0)
    await world.run(world.log.append(world.event(2, space="attic")))
    await world.until(lambda: limited.tags)
    limited.say(wire.NackFrame(tag=limited.tags[0], reason="no good"))
    await world.until(lambda: world.lag() == 0)

    await world.run(world.bus.redrive("demo", ["g-2"]))
    await world.until(lambda: len(limited.tags) == 2)
    assert said(limited) == [("attic", 2, 1), ("attic", 2, 2)]
