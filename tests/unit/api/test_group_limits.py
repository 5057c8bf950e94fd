"""Limits of ``/groups``: at the limit a frame is served; beyond it the answer is typed, or waits, and other connections are served."""

from __future__ import annotations

import pytest

from tests.beyond import Beyond, crossed
from tidings.server.group_settings import GroupsSettings
from tidings.wire import groups as wire

from .world import World


@pytest.mark.bound("server.group_settings.GroupsSettings.hello_timeout_s")
@crossed
async def test_a_connection_without_a_hello_is_closed(beyond: Beyond) -> None:
    """A peer that says hello in time stays; one that is silent for longer is closed."""
    world = await World().open(GroupsSettings(hello_timeout_s=5.0))
    silent, polite = world.peer(), world.peer()
    await world.pass_time(4.0)
    polite.hello()
    await world.pass_time(beyond(5) - 4.0)
    await world.until(lambda: silent.closed_with is not None)
    assert polite.closed_with is None
    await world.close()


@pytest.mark.bound("server.group_settings.GroupsSettings.memberships_count_max")
@crossed
async def test_one_more_membership_is_refused(beyond: Beyond) -> None:
    """As many memberships as allowed are taken; each further one is refused, and the connection stays."""
    world = await World().open(GroupsSettings(memberships_count_max=3))
    peer = world.peer().hello()
    for number in range(beyond(3)):
        peer.say(wire.Subscribe(id=number, topic="demo", group=f"g{number}"))
    await world.until(lambda: len(peer.heard(wire.Subscribed)) + len(peer.heard(wire.Unsubscribed)) == beyond(3))
    assert len(peer.heard(wire.Subscribed)) == 3
    assert peer.closed_with is None
    await world.close()


@pytest.mark.bound(
    "server.group_settings.GroupsSettings.groups_count_max",
    "server.group_settings.GroupsSettings.groups_per_subject_max",
    "server.group_settings.GroupsSettings.groups_per_topic_max",
)
@crossed
@pytest.mark.parametrize("name", ["groups_count_max", "groups_per_subject_max", "groups_per_topic_max"])
async def test_one_more_group_is_refused(name: str, beyond: Beyond) -> None:
    """As many groups as allowed are made; each further one is refused; a group that exists can still be joined."""
    world = await World().open(GroupsSettings(**{name: 3}))
    peer = world.peer().hello()
    for number in range(beyond(3)):
        peer.say(wire.Subscribe(id=number, topic="demo", group=f"g{number}"))
        await world.until(
            lambda number=number: len(peer.heard(wire.Subscribed)) + len(peer.heard(wire.Unsubscribed)) == number + 1  # type: ignore[misc]
        )
    assert [answer.id for answer in peer.heard(wire.Subscribed)] == [0, 1, 2]
    other = await world.peer().joined("g0")
    assert other.closed_with is None
    await world.close()


@pytest.mark.bound("server.group_settings.GroupsSettings.member_inflight_max")
@crossed
async def test_a_member_that_requests_more_gets_the_limit(beyond: Beyond) -> None:
    """A member never has more unanswered events than allowed, whatever it requests; it gets the others as it answers."""
    world = await World().open(GroupsSettings(member_inflight_max=3))
    peer = await world.peer().joined(max_inflight=beyond(3))
    await world.run(world.bus.publish_many([world.event(number) for number in range(10)]))
    await world.until(lambda: len(peer.tags) == 3)
    await world.pass_time(0.5)
    assert len(peer.tags) == 3
    while len(peer.tags) < 10:
        before = len(peer.tags)
        peer.say(wire.AckFrame(tags=[peer.tags[-1]]))
        await world.until(lambda before=before: len(peer.tags) > before)  # type: ignore[misc]
    await world.close()


@pytest.mark.bound("server.group_settings.GroupsSettings.deliveries_count_max")
@crossed
async def test_a_group_has_no_more_deliveries_than_allowed(beyond: Beyond) -> None:
    """Over all members of a group, no more events are unanswered than allowed; the others wait."""
    world = await World().open(GroupsSettings(deliveries_count_max=4))
    one = await world.peer().joined(max_inflight=100)
    other = await world.peer().joined(max_inflight=100)
    await world.run(world.bus.publish_many([world.event(number) for number in range(beyond(4))]))
    await world.until(lambda: len(one.tags) + len(other.tags) == 4)
    await world.pass_time(0.5)
    assert len(one.tags) + len(other.tags) == 4
    await world.close()


@pytest.mark.bound("server.group_settings.GroupsSettings.publishes_count_max")
@crossed
async def test_reading_pauses_while_too_many_publishes_wait(beyond: Beyond) -> None:
    """Publishes sent at once are all answered in the end; while more wait than allowed, nothing is read."""
    world = await World().open(GroupsSettings(publishes_count_max=5))
    peer = world.peer().hello()
    for number in range(beyond(5)):
        peer.say(wire.Publish(ref=number, event=world.wire_event(number)))  # type: ignore[arg-type]
        if number + 1 > 5:
            assert peer.is_reading_paused
    await world.until(lambda: len(peer.heard(wire.Published)) == beyond(5))
    assert not peer.is_reading_paused
    await world.close()


@pytest.mark.bound("server.group_settings.GroupsSettings.publish_timeout_s")
@crossed
async def test_a_publish_that_waits_too_long_is_refused(beyond: Beyond) -> None:
    """While a group's window stays full, a publish is refused after its time, and nothing of it is stored."""
    world = await World().open(GroupsSettings(publish_timeout_s=0.2, group_stall_timeout_s=3_600.0))
    await world.peer().joined(max_inflight=1, stall_timeout_s=3_600.0)
    member = world.peer().hello("publisher")
    await world.run(
        world.bus.subscribe(
            "demo", "slow", lambda event: world.clock.sleep(3_600), max_inflight=1, stall_timeout_s=3_600
        )
    )
    await world.run(world.bus.publish(world.event()))
    for number in range(beyond(1)):
        member.say(wire.Publish(ref=number, event=world.wire_event(number + 1)))  # type: ignore[arg-type]
    await world.until(lambda: len(member.heard(wire.Published)) == beyond(1))
    assert world.log.topics()["demo"].next_offset == 1
    await world.close()


@pytest.mark.bound("server.group_settings.GroupsSettings.buffered_bytes_max")
@crossed
async def test_a_member_whose_buffer_is_full_gets_nothing_until_it_drains(beyond: Beyond) -> None:
    """While more waits for a peer than allowed, it gets no events; others of its group do."""
    world = await World().open(GroupsSettings(buffered_bytes_max=1_024))
    deaf = await world.peer().joined(max_inflight=100)
    reader = await world.peer().joined(max_inflight=100)
    deaf.buffered_bytes = beyond(1_024)
    await world.run(world.bus.publish_many([world.event(number) for number in range(20)]))
    await world.until(lambda: len(reader.tags) >= 18)
    assert len(deaf.tags) <= 2
    await world.close()
