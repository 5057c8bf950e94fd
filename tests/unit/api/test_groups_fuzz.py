"""Whatever peers send, drop or leave unanswered: nothing is lost, nobody gets more than it asked for, nothing breaks."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from tidings.server.group_settings import GroupsSettings
from tidings.wire import groups as wire

from .world import Peer, World

PEERS = st.integers(0, 2)
STEPS = st.one_of(
    st.tuples(st.just("hello"), PEERS, st.sampled_from(["worker", "stranger"])),
    st.tuples(st.just("subscribe"), PEERS, st.integers(1, 3)),
    st.tuples(st.just("credit"), PEERS, st.integers(0, 3)),
    st.tuples(st.just("ack"), PEERS, st.integers(0, 3)),
    st.tuples(st.just("nack"), PEERS, st.integers(0, 3)),
    st.tuples(st.just("return"), PEERS, st.integers(0, 3)),
    st.tuples(st.just("unsubscribe"), PEERS, st.integers(1, 3)),
    st.tuples(st.just("publish"), PEERS, st.integers(0, 9)),
    st.tuples(st.just("cut"), PEERS, st.sampled_from([1000, 1001, 1006])),
    st.tuples(st.just("noise"), PEERS, st.binary(max_size=30)),
    st.tuples(st.just("wait"), PEERS, st.floats(0.0, 3.0)),
    st.tuples(st.just("full"), PEERS, st.booleans()),
)


class Table:
    """Three seats at the endpoint; whoever loses its connection is followed by a new one."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.seats = [world.peer() for _ in range(3)]

    async def take(self, step: tuple[str, int, Any]) -> None:
        verb, seat, value = step
        peer = self.seats[seat]
        if peer.closed_with is not None:
            peer.talk.closed(peer.closed_with[0])
            peer = self.seats[seat] = self.world.peer()
        open_tags = peer.tags[-6:]
        match verb:
            case "hello":
                peer.say(wire.Hello(token=self.world.token(value)))
            case "subscribe":
                peer.say(wire.Subscribe(id=value, topic="demo", group="g", max_inflight=2))
            case "credit":
                peer.say(wire.Credit(id=1, max_inflight=value))
            case "ack" if open_tags:
                peer.say(wire.AckFrame(tags=open_tags[: value + 1]))
            case "nack" | "return" if open_tags:
                peer.say(wire.NackFrame(tag=open_tags[value % len(open_tags)], is_returned=verb == "return"))
            case "unsubscribe":
                peer.say(wire.Unsubscribe(id=value))
            case "publish":
                peer.say(wire.Publish(ref=value, event=msgspec.Raw(self.world.wire_event(value))))
            case "cut":
                peer.talk.closed(value)
                self.seats[seat] = self.world.peer()
            case "noise":
                peer.talk.received(value)
            case "wait":
                await self.world.pass_time(value)
            case "full":
                peer.buffered_bytes = 1 << 30 if value else 0
                peer.talk.drained()
        await self.world.pass_time(0.0)


def outstanding(peer: Peer, answered: set[int]) -> int:
    return len([tag for tag in peer.tags if tag not in answered])


@given(st.lists(STEPS, min_size=5, max_size=40))
def test_nothing_is_lost_whatever_members_do(steps: list[tuple[str, int, Any]]) -> None:
    """After any sequence of frames, noise and cuts, a good member gets every event that was neither acknowledged nor buried."""

    async def run() -> None:
        world = await World().open(GroupsSettings(deliveries_count_max=8))
        await world.publish(4)
        table = Table(world)
        for step in steps:
            await table.take(step)
        for peer in table.seats:
            if peer.closed_with is None:
                peer.talk.closed(1006)
        good = await world.peer().joined(max_inflight=3)
        answered: set[int] = set()

        def drain() -> bool:
            assert outstanding(good, answered) <= 3
            fresh = [tag for tag in good.tags if tag not in answered]
            if fresh:
                answered.update(fresh)
                good.say(wire.AckFrame(tags=fresh))
            return world.lag() == 0

        await world.until(drain, step_s=0.05)
        buried = {letter.offset for letter in await world.run(world.bus.dead_letters("demo"))}
        assert buried <= set(range(world.log.topics()["demo"].next_offset))
        await world.close()

    asyncio.run(run())
