"""``RemoteBus`` in virtual time, against an endpoint in the same process and against a node that falls silent."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tidings.bus.events import Ack, Nack, ReceivedEvent
from tidings.client.errors import ConnectFailed, RemoteStopped
from tidings.client.groups import RemoteBus, socket_url
from tidings.client.link import EndpointConnector, Inbox, Link
from tidings.core.errors import SettingsError
from tidings.log.interface import Appended, Duplicate
from tidings.wire import groups as wire

from .world import World


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = await World().open()
    yield made
    await made.close()


class Lines:
    """Opens connections to an endpoint, and can cut them or let them fail."""

    def __init__(self, world: World) -> None:
        self._connector = EndpointConnector(world.endpoint, path="/groups")
        self.links: list[Link] = []
        self.failures = 0

    async def connect(self, url: str) -> Link:
        if self.failures:
            self.failures -= 1
            raise ConnectFailed(url, "not now")
        self.links.append(await self._connector.connect(url))
        return self.links[-1]


class Mute:
    """A node that welcomes and then says nothing: its machine is gone."""

    def __init__(self) -> None:
        self.headers: dict[str, str] = {}
        self.sent: list[wire.ClientFrame] = []
        self.closed_with: int | None = None
        self.inbox = Inbox(10, lambda: None, lambda: None)
        self.inbox.put(wire.encode(wire.Welcome(subject="s", epoch="e")))

    async def connect(self, url: str) -> Mute:
        if self.closed_with is not None:
            raise ConnectFailed(url, "gone")
        return self

    @property
    def is_open(self) -> bool:
        return self.inbox.is_open

    def send(self, message: bytes) -> None:
        self.sent.append(wire.decode_from_client(message))

    async def receive(self) -> list[bytes]:
        return await self.inbox.take()

    async def close(self, code: int = 1000, reason: str = "") -> None:
        self.closed_with = self.closed_with or code
        self.inbox.close(code, reason)


def bus_of(world: World, lines: Lines, token: str | None = None) -> RemoteBus:
    given = token or world.token("worker")
    return RemoteBus("http://node", given, connector=lines, clock=world.clock, rng=random.Random(1))


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:8787", "ws://127.0.0.1:8787/groups"),
        ("https://node.example/", "wss://node.example/groups"),
        ("ws://host:1/below", "ws://host:1/below/groups"),
    ],
)
def test_the_endpoint_is_found_from_the_address(url: str, expected: str) -> None:
    """The address that a node prints leads to its endpoint."""
    assert socket_url(url) == expected


async def test_the_bus_connects_again_and_takes_up_its_subscriptions(world: World) -> None:
    """After a cut and some failures the subscription is there again, and what was not answered comes again."""
    lines = Lines(world)
    bus = bus_of(world, lines)
    seen: list[tuple[int, int]] = []
    gate = asyncio.Event()

    async def handle(event: ReceivedEvent) -> Ack:
        seen.append((event.payload["n"], event.attempt))
        await gate.wait()
        return Ack()

    await world.run(bus.start())
    await world.run(bus.subscribe("demo", "g", handle))
    await world.publish()
    await world.until(lambda: seen == [(0, 1)])
    lines.failures = 3
    await lines.links[0].close(1006)
    gate.set()
    await world.until(lambda: len(seen) == 2)
    await world.until(lambda: world.bus.get_subscriptions("demo") and world.lag() == 0)

    assert seen == [(0, 1), (0, 2)]
    assert bus.connection_count == 2
    await world.run(bus.close())


async def test_a_publish_outlives_the_connection(world: World) -> None:
    """An event whose answer was lost is sent again on the next connection, and stored once."""
    lines = Lines(world)
    bus = bus_of(world, lines)
    await world.run(bus.start())
    publishing = asyncio.ensure_future(bus.publish(world.event(1)))
    await asyncio.sleep(0)
    await lines.links[0].close(1006)
    await world.run(_awaited(publishing))

    assert world.log.position.seq == 1
    assert bus.connection_count == 2
    await world.run(bus.close())


async def _awaited(future: asyncio.Future[Appended | Duplicate]) -> Appended | Duplicate:
    return await future


async def test_a_node_that_falls_silent_is_noticed() -> None:
    """A node that answers no ping for long enough is given up, and the bus connects again."""
    world = await World().open()
    mute = Mute()
    bus = RemoteBus("http://node", "t", connector=mute, clock=world.clock, rng=random.Random(1))
    await world.run(bus.start())
    await world.pass_time(120)

    assert any(isinstance(frame, wire.Ping) for frame in mute.sent)
    assert mute.closed_with == 1006
    await world.run(bus.close())
    await world.close()


async def test_a_quiet_node_is_not_given_up(world: World) -> None:
    """Where nothing happens pings are answered, and the connection stays."""
    bus = bus_of(world, Lines(world))
    await world.run(bus.start())
    await world.pass_time(600)

    assert bus.connection_count == 1
    await world.run(bus.close())


async def test_a_fresh_token_is_made_for_each_connection(world: World) -> None:
    """When the token expires the bus comes back with a new one; one that stays bad is given up after some tries."""
    made: list[str] = []

    def token() -> str:
        made.append(world.token("worker", lifetime_s=60))
        return made[-1]

    bus = RemoteBus("http://node", token, connector=Lines(world), clock=world.clock, rng=random.Random(1))
    await world.run(bus.start())
    await world.until(lambda: bus.connection_count == 3, step_s=1.0)
    assert len(set(made)) == 3
    await world.run(bus.close())

    bad = RemoteBus("http://node", lambda: "bad", connector=Lines(world), clock=world.clock, rng=random.Random(1))
    with pytest.raises(RemoteStopped, match="4401"):
        await world.run(bad.start())
    await world.run(bad.close())


async def test_answers_are_a_handlers(world: World) -> None:
    """Ack, Nack with a delay, and nonsense from a remote handler are what they are for the bus."""
    bus = bus_of(world, Lines(world))
    answers: list[object] = [Nack("later", delay_s=90.0), "nonsense", Ack()]
    times: list[float] = []

    async def handle(event: ReceivedEvent) -> object:
        times.append(world.clock.monotonic())
        return answers[event.attempt - 1]

    await world.run(bus.start())
    await world.run(bus.subscribe("demo", "g", handle, backoff_base=0.0))
    await world.publish()
    await world.until(lambda: world.lag() == 0, step_s=1.0)

    assert len(times) == 3
    assert times[1] - times[0] >= 90
    await world.run(bus.close())


async def test_a_member_that_returns_nothing_has_acknowledged(world: World) -> None:
    """A handler that returns nothing is done, a plain function too."""
    bus = bus_of(world, Lines(world))
    await world.run(bus.start())
    subscription = await world.run(bus.subscribe("demo", "g", lambda event: None))
    await world.publish()
    async with asyncio.timeout(20):
        while not subscription.handled_count:  # noqa: ASYNC110 - a thread has no event for us
            await asyncio.sleep(0.001)
    await world.until(lambda: world.lag() == 0)
    assert await world.run(bus.unsubscribe(subscription))
    assert not await world.run(bus.unsubscribe(subscription))
    await world.until(lambda: not world.bus.get_subscriptions("demo"))
    await world.run(bus.close())


@pytest.mark.parametrize(
    "options",
    [
        *({"workers": 0}, {"workers": 20_000}, {"prefetch": -1}, {"order": "sorted"}, {"max_retries": -1}),
        *({"ack_deadline_ms": 0}, {"backoff_base": float("nan")}, {"start": -1}, {"max_inflight": "many"}),
    ],
    ids=str,
)
async def test_a_wrong_option_is_refused_before_the_node_hears_of_it(world: World, options: dict[str, Any]) -> None:
    """An option out of its range is a ``SettingsError`` that names it; the connection, and all else that it carries, goes on."""

    async def handle(event: ReceivedEvent) -> Ack:
        return Ack()

    async def job() -> None:
        async with bus_of(world, Lines(world)) as bus:
            with pytest.raises(SettingsError, match=next(iter(options))):
                await bus.subscribe("demo", "g", handle, **options)
            await bus.publish(world.event())

    await world.run(job())


async def test_a_member_may_ask_for_as_many_events_as_there_can_be(world: World) -> None:
    """Workers and prefetch together are cut to what a membership can have, and are no breach of the protocol."""

    async def handle(event: ReceivedEvent) -> Ack:
        return Ack()

    async def job() -> None:
        async with bus_of(world, Lines(world)) as bus:
            subscription = await bus.subscribe("demo", "g", handle, workers=10_000, prefetch=10_000)
            assert subscription.is_active

    await world.run(job())
