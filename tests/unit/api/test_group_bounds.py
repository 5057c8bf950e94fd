"""What one connection of ``/groups`` can make others wait for, and the node hold, is bounded by the node's settings."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from tests.beyond import Beyond, crossed
from tidings.server.group_settings import GroupsSettings, options_given
from tidings.server.memory import MemoryAccount, MemoryBudget
from tidings.server.settings import ServerSettings
from tidings.wire import groups as wire

from .world import Peer, World


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = await World().open()
    yield made
    await made.close()


BOUNDS = {
    "max_inflight": "group_inflight_max",
    "max_inflight_bytes": "group_inflight_bytes_max",
    "waiting_retries_max": "group_waiting_retries_max",
    "max_retries": "group_retries_max",
    "backoff_base": "group_backoff_s_max",
    "backoff_max": "group_backoff_s_max",
    "stall_timeout_s": "group_stall_timeout_s",
}


@pytest.mark.bound(
    "server.group_settings.GroupsSettings.group_inflight_max",
    "server.group_settings.GroupsSettings.group_inflight_bytes_max",
    "server.group_settings.GroupsSettings.group_waiting_retries_max",
    "server.group_settings.GroupsSettings.group_retries_max",
    "server.group_settings.GroupsSettings.group_backoff_s_max",
    "wire.groups.GroupOptions.max_inflight",
    "wire.groups.GroupOptions.max_inflight_bytes",
    "wire.groups.GroupOptions.waiting_retries_max",
    "wire.groups.GroupOptions.backoff_max",
    "wire.groups.GroupOptions.stall_timeout_s",
)
@crossed
@pytest.mark.parametrize("option", BOUNDS)
async def test_an_option_over_its_bound_gets_the_bound(option: str, beyond: Beyond) -> None:
    """A member that requests more gets the bound, and is told so; the bound itself is taken as it is."""
    settings = GroupsSettings(
        group_inflight_max=10,
        group_inflight_bytes_max=2_000,
        group_waiting_retries_max=10,
        group_retries_max=10,
        group_backoff_s_max=10.0,
        group_stall_timeout_s=2.0,
    )
    bound = getattr(settings, BOUNDS[option])
    world = await World().open(settings)
    for number, (asked, differs) in enumerate(((bound, []), (beyond(bound), [option]))):
        peer = world.peer().hello()
        options = wire.GroupOptions(**{option: asked})
        peer.say(wire.Subscribe(id=1, topic="demo", group=f"g{number}", options=options))
        await world.until(lambda peer=peer: peer.heard(wire.Subscribed))  # type: ignore[misc]
        (answer,) = peer.heard(wire.Subscribed)
        assert (getattr(answer.options, option), answer.differs) == (bound, differs)
    await world.close()


async def test_a_default_over_the_bound_gets_the_bound() -> None:
    """A member that names no options is bounded too."""
    given = options_given(wire.GroupOptions(), GroupsSettings(group_inflight_max=7, group_inflight_bytes_max=5_000))

    assert (given["max_inflight"], given["max_inflight_bytes"], given["stall_timeout_s"]) == (7, 5_000, 1.0)


async def waits_of(world: World, count: int) -> list[float]:
    """Publish one event after another; the seconds that each took."""
    waits = []
    for number in range(count):
        started = world.clock.monotonic()
        await world.run(world.bus.publish(world.event(number)))
        waits.append(world.clock.monotonic() - started)
    return waits


GREEDY: dict[str, Any] = {"max_inflight": 1, "stall_timeout_s": 86_400.0}


async def evil_member(world: World) -> Peer:
    peer = world.peer().hello("evil")
    options = wire.GroupOptions(**GREEDY)
    peer.say(wire.Subscribe(id=1, topic="demo", group="evil", max_inflight=1, options=options))
    await world.until(lambda: peer.heard(wire.Subscribed))
    return peer


@pytest.mark.bound("server.group_settings.GroupsSettings.group_stall_timeout_s")
@crossed
async def test_a_member_that_acknowledges_nothing_stops_publishers_for_a_second(world: World, beyond: Beyond) -> None:
    """With a window of one and a stall timeout of a day: all publishers together wait about a second, however many there are."""
    await evil_member(world)

    waits = await waits_of(world, beyond(4))

    assert 0.5 < sum(waits) < 1.5


@pytest.mark.bound("bus.settings.SubscriptionSettings.full_timeout_s")
@crossed
async def test_a_member_that_acknowledges_slowly_stops_publishers_for_a_second(world: World, beyond: Beyond) -> None:
    """An event that leaves the window now and then does not make publishers wait for the next."""
    evil = await evil_member(world)
    answered = 0

    async def slowly() -> None:
        nonlocal answered
        while True:
            await world.clock.sleep(0.4)
            evil.say(wire.AckFrame(tags=evil.tags[answered:] or [0]))
            answered = len(evil.tags)

    slow = asyncio.ensure_future(slowly())
    try:
        waits = await waits_of(world, beyond(9))
    finally:
        slow.cancel()

    assert sum(waits) < 2.0


@pytest.mark.bound(
    "server.group_settings.GroupsSettings.group_stall_pause_s", "bus.settings.SubscriptionSettings.stall_pause_s"
)
@crossed
async def test_a_stalled_group_is_not_live_again_at_once(world: World, beyond: Beyond) -> None:
    """Caught up, it is not waited for during the pause; after it, it is again, for a second."""
    evil = await evil_member(world)
    await waits_of(world, 3)
    for _ in range(3):
        await world.until(lambda: evil.tags)
        evil.say(wire.AckFrame(tags=evil.tags))
        evil.frames.clear()
        await world.pass_time(0.1)
    assert world.bus.lag("demo", "evil") == 0
    assert sum(await waits_of(world, 3)) < 0.1

    for _ in range(3):
        await world.until(lambda: evil.tags)
        evil.say(wire.AckFrame(tags=evil.tags))
        evil.frames.clear()
    await world.pass_time(beyond(30))
    assert 0.5 < sum(await waits_of(world, 3)) < 1.5


async def test_a_retry_is_delayed_no_longer_than_the_bound() -> None:
    """The delay that a member names for a retry is cut to the node's longest."""
    world = await World().open(GroupsSettings(group_backoff_s_max=10.0))
    peer = await world.peer().joined()
    await world.publish(1)
    await world.until(lambda: peer.tags)
    peer.say(wire.NackFrame(tag=peer.tags[0], delay_s=86_400.0))
    await world.pass_time(9)
    assert len(peer.tags) == 1

    await world.pass_time(2)

    assert len(peer.tags) == 2
    await world.close()


def paying_peer(world: World, **limits: int) -> tuple[Peer, MemoryAccount]:
    """A peer whose memory is charged to an account."""
    account = MemoryBudget(msgspec.structs.replace(ServerSettings(), **limits)).open("127.0.0.1")
    account.identify("worker")

    class Paying(Peer):
        memory = account  # type: ignore[assignment]

    return Paying(world).hello(), account


@pytest.mark.bound("server.group_settings.GroupsSettings.publishes_bytes_max")
@crossed
async def test_waiting_publishes_are_charged_and_pause_reading(beyond: Beyond) -> None:
    """With more bytes of waiting publishes than the setting allows nothing is read, until half of them are durable; then all is given back."""
    world = await World().open(GroupsSettings(publishes_bytes_max=100_000, group_stall_timeout_s=5.0))
    await evil_member(world)
    await world.run(world.bus.publish(world.event()))
    peer, account = paying_peer(world)
    text = "x" * 20_000
    for ref in range(20):
        peer.say(wire.Publish(ref=ref, event=msgspec.Raw(world.wire_event(ref, idem_key=f"{ref}-{text[:100]}"))))
    small = account.held_bytes
    assert 0 < small < 100_000
    assert not peer.is_reading_paused
    count = 2 + beyond(1)
    for ref in range(20, 20 + count):
        event = msgspec.json.encode(
            {"meta": {"topic": "demo", "type": "T", "space_id": "home"}, "payload": {"t": text}}
        )
        peer.say(wire.Publish(ref=ref, event=msgspec.Raw(event)))
    assert account.held_bytes > 100_000
    assert peer.is_reading_paused

    await world.pass_time(10)

    assert len(peer.heard(wire.Published)) == 20 + count
    assert not peer.is_reading_paused
    assert account.held_bytes == 0
    await world.close()


async def test_a_publish_without_memory_for_it_is_refused(world: World) -> None:
    """Beyond the memory of its connection a publish is refused, and may be tried again; the connection stays."""
    await evil_member(world)
    await world.run(world.bus.publish(world.event()))
    peer, account = paying_peer(world, memory_bytes_per_connection_max=65_536)
    event = msgspec.json.encode(
        {"meta": {"topic": "demo", "type": "T", "space_id": "home"}, "payload": {"t": "x" * 20_000}}
    )
    for ref in range(10):
        peer.say(wire.Publish(ref=ref, event=msgspec.Raw(event)))
    refused = [frame.verdict.error for frame in peer.heard(wire.Published)]
    assert [None if error is None else (error.code, error.retryable) for error in refused] == [
        ("node.memory_exhausted", True)
    ] * 9

    await world.pass_time(10)

    assert len(peer.heard(wire.Published)) == 10
    assert account.held_bytes == 0
    assert peer.closed_with is None


async def test_a_closed_connection_gives_its_memory_back(world: World) -> None:
    """Publishes that wait when the peer goes are charged until they end, and no longer."""
    await evil_member(world)
    await world.run(world.bus.publish(world.event()))
    peer, account = paying_peer(world)
    for ref in range(10):
        peer.say(wire.Publish(ref=ref, event=msgspec.Raw(world.wire_event(ref))))
    peer.talk.closed(1006)
    account.close()
    assert account.held_bytes >= 0

    await world.pass_time(10)

    assert account.held_bytes == 0


@pytest.mark.bound("server.group_settings.GroupsSettings.group_inflight_bytes_total_max")
@crossed
async def test_the_windows_of_all_groups_are_bounded_together(beyond: Beyond) -> None:
    """However large the windows that members request, all together stay within the bound, but for 64 KiB of each group beyond it."""
    total = 4 << 20
    world = await World().open(GroupsSettings(group_inflight_bytes_total_max=total))
    windows: list[int] = []
    for number in range(beyond(8)):
        peer = await world.peer().joined(f"g{number}", max_inflight_bytes=1 << 40)
        (answer,) = peer.heard(wire.Subscribed)
        assert answer.options.max_inflight_bytes is not None
        assert answer.differs == ["max_inflight_bytes"]
        windows.append(answer.options.max_inflight_bytes)

    assert windows[0] == total // 8
    assert windows == sorted(windows, reverse=True)
    assert windows[-1] >= 65_536
    assert sum(size for size in windows if size > 65_536) <= total
    await world.close()
