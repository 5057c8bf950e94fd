"""The endpoint of the groups without sockets, in virtual time: who is let in, what a member gets, and how things end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest

from tests.access_events import grant_event, revoke_event
from tidings.access.administration import SubjectRevoked, event_of
from tidings.access.resources import Action, actor, space, topic
from tidings.bus.events import ReceivedEvent
from tidings.bus.settings import BusSettings, TopicPolicy
from tidings.log.interface import Query
from tidings.server.group_settings import GroupsSettings
from tidings.wire import groups as wire

from .world import Peer, World


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = await World().open()
    yield made
    await made.close()


async def test_a_welcome_says_what_holds(world: World) -> None:
    """A believed token is welcomed with its subject, its expiry, the log's epoch and the endpoint's bounds."""
    peer = world.peer().hello("alice")
    by_header = world.peer({"authorization": f"Bearer {world.token('bob')}"})
    by_header.say(wire.Hello())

    (welcome,) = peer.heard(wire.Welcome)
    assert (welcome.subject, welcome.epoch) == ("alice", world.log.position.epoch)
    assert welcome.expires_at is not None
    assert welcome.max_inflight_max == GroupsSettings().member_inflight_max
    assert [each.subject for each in by_header.heard(wire.Welcome)] == ["bob"]


async def test_who_says_nothing_is_closed(world: World) -> None:
    """A connection that does not say hello in time is closed with the code for that, and one that did is not."""
    silent, polite = world.peer(), world.peer().hello()

    await world.pass_time(GroupsSettings().hello_timeout_s + 2)

    assert silent.closed_with == (wire.CLOSE_TIMED_OUT, "groups.malformed_frame")
    assert polite.closed_with is None


async def test_an_expired_token_closes_the_connection(world: World) -> None:
    """When the token expires the connection is closed with a typed code, and what it had goes on, not counted as tried."""
    peer = await world.peer().joined()
    brief = world.peer()
    brief.say(wire.Hello(token=world.token("brief", 60)))
    brief.say(wire.Subscribe(id=1, topic="demo", group="g"))
    await world.until(lambda: brief.heard(wire.Subscribed))
    await world.publish(2)
    await world.until(lambda: len(peer.tags) + len(brief.tags) == 2)

    await world.pass_time(62)
    await world.until(lambda: len(peer.tags) == 2)

    assert brief.closed_with == (wire.CLOSE_AUTH_FAILED, "access.token_expired")
    assert [frame.attempt for frame in peer.heard(wire.Deliver)] == [1, 1]


async def test_nothing_is_delivered_after_the_token_expired(world: World) -> None:
    """Between two looks of the sweeper, too: permission is looked at before each event."""
    peer = world.peer()
    peer.say(wire.Hello(token=world.token("brief", 60)), wire.Subscribe(id=1, topic="demo", group="g"))
    await world.until(lambda: peer.heard(wire.Subscribed))
    world.clock.jump(61)  # the wall clock alone: no timer is due

    await world.publish()
    await world.until(lambda: peer.closed_with)

    assert peer.tags == []


async def test_credit_bounds_what_is_out(world: World) -> None:
    """A member has at most as many unanswered events as it asked for; 0 takes a rest; the limit of the settings holds."""
    peer = await world.peer().joined(max_inflight=2)
    await world.publish(6)
    await world.until(lambda: len(peer.tags) == 2)
    peer.say(wire.Credit(id=1, max_inflight=0), wire.AckFrame(tags=peer.tags))
    await world.pass_time(1)
    assert len(peer.tags) == 2

    peer.say(wire.Credit(id=1, max_inflight=3))
    await world.until(lambda: len(peer.tags) == 5)
    await world.pass_time(1)
    assert len(peer.tags) == 5

    greedy = world.peer().hello()
    greedy.say(wire.Subscribe(id=1, topic="demo", group="h", max_inflight=10_000))
    await world.until(lambda: greedy.heard(wire.Subscribed))
    assert greedy.heard(wire.Subscribed)[0].max_inflight == GroupsSettings().member_inflight_max


async def test_a_peer_that_does_not_take_what_it_is_sent_gets_no_more() -> None:
    """With too much waiting to leave, a member gets nothing until the connection has drained; others go on."""
    world = await World().open(GroupsSettings(buffered_bytes_max=1024))
    stuck, other = await world.peer().joined(), await world.peer().joined()
    stuck.buffered_bytes = 5000
    await world.publish(3)
    await world.until(lambda: len(other.tags) == 3)
    other.say(wire.Credit(id=1, max_inflight=0))
    await world.publish(1)
    await world.pass_time(1)
    assert stuck.tags == []

    stuck.buffered_bytes = 0
    stuck.talk.drained()
    await world.until(lambda: len(stuck.tags) == 1)
    await world.close()


async def test_a_peer_that_does_not_take_what_it_is_sent_is_not_read_from() -> None:
    """With too much waiting to leave, what it sends is held, in order, until it has taken that."""
    world = await World().open(GroupsSettings(buffered_bytes_max=1024))
    peer = world.peer().hello()
    peer.buffered_bytes = 5000
    peer.say(wire.Ping(ref=1), wire.Ping(ref=2), wire.Ping(ref=3))

    assert peer.is_reading_paused
    assert [pong.ref for pong in peer.heard(wire.Pong)] == [1]

    peer.buffered_bytes = 0
    peer.talk.drained()
    await world.until(lambda: len(peer.heard(wire.Pong)) == 3)
    assert [pong.ref for pong in peer.heard(wire.Pong)] == [1, 2, 3]
    assert not peer.is_reading_paused
    await world.close()


async def test_a_cut_connection_counts_and_a_goodbye_does_not(world: World) -> None:
    """What a lost member had comes to the next one as a second attempt, at once; what one that left had, as the first."""
    for code, attempt in ((1006, 2), (1000, 1), (1001, 1)):
        lost = await world.peer().joined(f"g{code}")
        await world.publish()
        await world.until(lambda lost=lost: lost.tags)  # type: ignore[misc]
        other = await world.peer().joined(f"g{code}")
        started = world.clock.monotonic()
        lost.talk.closed(code)
        await world.until(lambda other=other: other.tags)  # type: ignore[misc]

        assert other.heard(wire.Deliver)[-1].attempt == attempt
        assert world.clock.monotonic() - started < 0.1
        other.say(wire.AckFrame(tags=other.tags))
        other.talk.closed(1000)


async def test_an_event_that_ends_every_member_becomes_a_dead_letter(world: World) -> None:
    """Attempts count although no node was ever killed: after the last one the event is given up, and the next goes on."""
    for _ in range(3):
        peer = await world.peer().joined(max_retries=2)
        if "demo" not in world.log.topics():
            await world.publish(2)
        await world.until(lambda peer=peer: peer.tags)  # type: ignore[misc]
        poison = [frame for frame in peer.heard(wire.Deliver) if b'"n":0' in bytes(frame.record)]
        peer.say(wire.AckFrame(tags=[frame.tag for frame in peer.heard(wire.Deliver) if frame not in poison] or [99]))
        peer.talk.closed(1006)
        await world.until(lambda: not world.bus.get_subscriptions("demo"))

    last = await world.peer().joined(max_retries=2)
    await world.until(lambda: world.lag() == 0)
    (letter,) = await world.run(world.bus.dead_letters("demo"))
    assert letter.error == "the connection of the member that had it was cut"
    assert last.tags == []


async def test_a_late_answer_keeps_its_place_taken(world: World) -> None:
    """Past the deadline the event goes to another member; the slow one is told, and gets nothing more until it answers."""
    slow = await world.peer().joined(max_inflight=1, ack_deadline_ms=1000, backoff_base=0.0)
    await world.publish(1)
    await world.until(lambda: slow.tags)
    assert slow.heard(wire.Deliver)[0].deadline_ms == 1000
    other = await world.peer().joined(max_inflight=1)
    await world.until(lambda: other.tags)

    assert slow.heard(wire.Withdrawn)[0].tag == slow.tags[0]
    assert other.heard(wire.Deliver)[0].attempt == 2
    slow.say(wire.AckFrame(tags=slow.tags))  # too late to count
    assert world.lag() == 1
    other.say(wire.AckFrame(tags=other.tags))
    await world.until(lambda: world.lag() == 0)


async def test_waiting_for_a_member_is_not_time_with_a_member() -> None:
    """A topic's deadline begins when an event is handed over: one that waits for a free place is not counted as tried."""
    policy = BusSettings(topics={"demo": TopicPolicy(ack_deadline_ms=1000)})
    world = await World().open(bus_settings=policy)
    peer = await world.peer().joined(max_inflight=1)
    assert peer.heard(wire.Subscribed)[0].options.ack_deadline_ms == 1000
    peer.say(wire.Credit(id=1, max_inflight=0))
    await world.publish(2)
    await world.pass_time(10)
    peer.say(wire.Credit(id=1, max_inflight=2))
    await world.until(lambda: len(peer.tags) == 2)

    assert [frame.attempt for frame in peer.heard(wire.Deliver)] == [1, 1]
    await world.close()


async def test_the_first_member_says_how_the_group_works(world: World) -> None:
    """A later member that asks for something else is let in, and told what holds instead."""
    await world.peer().joined(max_retries=7, order="key")
    later = await world.peer().joined(max_retries=2, start="latest")

    (told,) = later.heard(wire.Subscribed)
    assert (told.options.max_retries, told.options.order) == (7, "key")
    assert sorted(told.differs) == ["max_retries", "start"]


async def test_unsubscribing_waits_for_answers(world: World) -> None:
    """A member that unsubscribes gets nothing more, and is let go when it has answered what it had."""
    peer = await world.peer().joined(max_inflight=1)
    await world.publish(2)
    await world.until(lambda: peer.tags)
    peer.say(wire.Unsubscribe(id=1))
    assert peer.heard(wire.Unsubscribed) == []

    peer.say(wire.AckFrame(tags=peer.tags))
    assert [frame.error for frame in peer.heard(wire.Unsubscribed)] == [None]
    await world.until(lambda: not world.bus.get_subscriptions("demo"))
    assert len(peer.tags) == 1
    peer.say(wire.Unsubscribe(id=9))  # never was
    assert peer.heard(wire.Unsubscribed)[-1] == wire.Unsubscribed(id=9)


async def test_a_moved_group_withdraws_what_is_out(world: World) -> None:
    """Seeking takes back what members had, and hands out from the new place; late answers change nothing."""
    peer = await world.peer().joined(max_inflight=2)
    await world.publish(4)
    await world.until(lambda: len(peer.tags) == 2)
    early = list(peer.tags)

    await world.run(world.bus.seek("demo", "g", 3))
    assert {frame.tag for frame in peer.heard(wire.Withdrawn)} == set(early)
    peer.say(wire.AckFrame(tags=early))
    await world.until(lambda: len(peer.tags) == 3)
    assert msgspec.json.decode(peer.heard(wire.Deliver)[-1].record)["offset"] == 3
    peer.say(wire.AckFrame(tags=peer.tags[2:]))
    await world.until(lambda: world.lag() == 0)


async def test_what_cannot_be_had_is_refused_by_number(world: World) -> None:
    """A bad name, a number in use, too many, no right, a group that is the node's own: each has its answer, and the connection
    goes on."""
    peer = await world.peer().joined()

    async def handler(event: object) -> None: ...

    await world.bus.subscribe("demo", "own", handler)
    for number, (topic_name, group) in {
        2: ("../etc", "g"),
        1: ("demo", "h"),
        3: ("secret", "g"),
        4: ("demo", "own"),
    }.items():
        peer.say(wire.Subscribe(id=number, topic=topic_name, group=group))
    await world.until(lambda: len(peer.heard(wire.Unsubscribed)) == 4)

    told = {frame.id: frame.error.code for frame in peer.heard(wire.Unsubscribed) if frame.error is not None}
    assert told == {
        2: "event.invalid_name",
        1: "groups.membership_exists",
        3: "access.forbidden",
        4: "bus.subscription_exists",
    }
    assert peer.closed_with is None
    await world.publish()
    await world.until(lambda: peer.tags)  # the first membership is as it was


async def test_memberships_are_bounded() -> None:
    """One connection has so many memberships and no more."""
    world = await World().open(GroupsSettings(memberships_count_max=1))
    peer = await world.peer().joined()
    peer.say(wire.Subscribe(id=2, topic="demo", group="h"))

    (refused,) = peer.heard(wire.Unsubscribed)
    assert refused.error is not None
    assert refused.error.code == "groups.too_many_memberships"
    await world.close()


async def test_a_lost_right_ends_the_membership_before_the_next_event(world: World) -> None:
    """Revoking the right to subscribe ends the membership, and nothing committed behind the revocation was sent."""
    peer = await world.peer().joined()
    revocation = revoke_event("worker", Action.SUBSCRIBE, topic("demo"), actor="test")
    await world.run(world.log.append_many([world.event(0), revocation, world.event(1), world.event(2)]))
    await world.until(lambda: peer.heard(wire.Unsubscribed))
    await world.pass_time(5)

    (ended,) = peer.heard(wire.Unsubscribed)
    assert ended.error is not None
    assert ended.error.code == "access.forbidden"
    sent = [msgspec.json.decode(frame.record)["payload"]["n"] for frame in peer.heard(wire.Deliver)]
    assert sent in ([], [0])


async def test_a_revoked_subject_is_closed_at_once(world: World) -> None:
    """Without a word from the peer and before any timer: the revocation alone closes its connection."""
    peer, other = world.peer().hello("mallory"), world.peer().hello("alice")
    started = world.clock.monotonic()
    await world.run(world.log.append(event_of(SubjectRevoked(subject="mallory"), actor="test")))
    await world.until(lambda: peer.closed_with)

    assert world.clock.monotonic() - started < 0.1
    assert peer.closed_with == (wire.CLOSE_REVOKED, "access.token_revoked")
    assert other.closed_with is None


async def test_a_silent_membership_ends_with_its_right(world: World) -> None:
    """A membership that has nothing to get ends with the revocation, not with the next event; the connection goes on."""
    peer = await world.peer().joined()
    await world.run(world.log.append(revoke_event("worker", Action.SUBSCRIBE, topic("demo"), actor="test")))
    await world.until(lambda: peer.heard(wire.Unsubscribed), seconds_max=0.5)
    await world.until(lambda: not world.bus.get_subscriptions("demo"))

    assert peer.closed_with is None


def numbers(peer: Peer) -> list[int]:
    return [msgspec.json.decode(frame.record)["payload"]["n"] for frame in peer.heard(wire.Deliver)]


async def test_a_member_gets_events_of_its_spaces_only(world: World) -> None:
    """Each event goes to a member that may see its space, however much room the others have, and none is held up by another."""
    home = await world.peer().joined(subject="h", spaces=["home"], max_inflight=2)
    work = await world.peer().joined(subject="w", spaces=["work"], max_inflight=10)
    await world.run(world.log.append_many([world.event(n, space="work" if n % 2 else "home") for n in range(8)]))
    await world.until(lambda: len(work.tags) == 4, seconds_max=1)
    await world.until(lambda: len(home.tags) == 2, seconds_max=1)
    await world.pass_time(5)
    assert numbers(home) == [0, 2]

    home.say(wire.AckFrame(tags=home.tags))
    work.say(wire.AckFrame(tags=work.tags))
    await world.until(lambda: len(home.tags) == 4, seconds_max=1)
    home.say(wire.AckFrame(tags=home.tags))
    await world.until(lambda: world.lag() == 0, seconds_max=1)

    assert (sorted(numbers(home)), sorted(numbers(work))) == ([0, 2, 4, 6], [1, 3, 5, 7])


async def test_an_event_that_no_member_may_see_waits_for_one_who_may(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """It is neither shown, nor passed over, nor buried, and the log says so; the others go on, and a grant sets it free."""
    peer = await world.peer().joined(spaces=["home"])
    await world.run(world.log.append_many([world.event(0, space="secret"), world.event(1), world.event(2)]))
    await world.until(lambda: len(peer.tags) == 2)
    peer.say(wire.AckFrame(tags=peer.tags))
    await world.pass_time(600)
    assert numbers(peer) == [1, 2]
    assert world.lag() == 1
    assert await world.run(world.bus.dead_letters("demo")) == []
    assert "'secret'" in caplog.text

    await world.run(world.log.append(grant_event("worker", Action.SUBSCRIBE, space("secret"), actor="test")))
    await world.until(lambda: len(peer.tags) == 3, seconds_max=1)
    peer.say(wire.AckFrame(tags=peer.tags[2:]))
    await world.until(lambda: world.lag() == 0)

    assert numbers(peer) == [1, 2, 0]


async def test_a_newcomer_gets_what_the_others_may_not_see(world: World) -> None:
    """What waited for somebody who may see its space goes to the first such member that joins."""
    await world.peer().joined(subject="h", spaces=["home"])
    await world.run(world.log.append(world.event(0, space="work")))
    await world.pass_time(1)
    late = await world.peer().joined(subject="w", spaces=["work"])
    await world.until(lambda: late.tags, seconds_max=1)

    assert numbers(late) == [0]


async def test_a_revoked_space_falls_silent_at_its_place(world: World) -> None:
    """Nothing of a space that is committed behind its revocation is delivered, in one batch with it either."""
    peer = await world.peer().joined()
    lost = revoke_event("worker", Action.SUBSCRIBE, space("home"), actor="test")
    await world.run(world.log.append_many([lost, world.event(0), world.event(1, space="work")]))
    await world.until(lambda: peer.tags)
    await world.pass_time(5)

    assert numbers(peer) == [1]


async def published(peer: Peer, world: World, **event: object) -> str:
    """What became of an event that was published: a verdict, or the code of its refusal."""
    ref = len(peer.heard(wire.Published))
    peer.say(wire.Publish(ref=ref, event=msgspec.Raw(world.wire_event(**event))))  # type: ignore[arg-type]
    await world.until(lambda: len(peer.heard(wire.Published)) > ref)
    verdict = peer.heard(wire.Published)[-1].verdict
    return verdict.error.code if verdict.error is not None else verdict.verdict


async def test_nobody_publishes_in_anothers_name_or_space(world: World) -> None:
    """The actor is the token's subject unless a grant says otherwise, and the space is one of the token's."""
    peer = world.peer().hello("worker", spaces=["home"])

    assert await published(peer, world) == "appended"
    assert await published(peer, world, actor="worker") == "appended"
    assert await published(peer, world, actor="boss") == "api.foreign_actor"
    assert await published(peer, world, space="work") == "access.forbidden"
    await world.run(world.log.append(grant_event("worker", Action.PUBLISH, actor("boss"), actor="test")))
    await world.run(world.dispatcher.reached(world.log.position.seq))
    assert await published(peer, world, actor="boss") == "appended"
    assert await published(peer, world, actor="boss2") == "api.foreign_actor"


@pytest.mark.parametrize("lost", [topic("demo"), space("home")])
async def test_a_publish_that_waited_is_asked_for_its_right_again(world: World, lost: object) -> None:
    """A right that is revoked while a publish waits for a full window is gone when it goes on: nothing is stored."""
    await world.bus.subscribe("demo", "slow", lambda event: world.clock.sleep(3600), max_inflight=1)
    await world.publish(1)
    publisher = world.peer().hello("alice")
    publisher.say(wire.Publish(ref=1, event=msgspec.Raw(world.wire_event(7))))
    await world.pass_time(1)
    assert publisher.heard(wire.Published) == []

    await world.run(world.log.append(revoke_event("alice", Action.PUBLISH, lost, actor="test")))  # type: ignore[arg-type]
    await world.bus.pause("demo", "slow")  # its window holds nobody up any more
    await world.until(lambda: publisher.heard(wire.Published))

    (answer,) = publisher.heard(wire.Published)
    assert answer.verdict.error is not None
    assert answer.verdict.error.code == "access.forbidden"
    assert [each["n"] for each in await stored(world)] == [0]


async def stored(world: World) -> list[dict[str, object]]:
    page = await world.run(world.log.read(Query(topic="demo")))
    return [dict(record.payload) for record in page.records]


async def test_the_answer_to_a_subscription_comes_before_its_events(world: World) -> None:
    """With a backlog waiting and other members at work, a new member is told that it is one before it gets anything."""
    await world.peer().joined(max_inflight=1)
    await world.publish(5)
    later = await world.peer().joined(max_inflight=3)
    await world.until(lambda: len(later.tags) == 3)

    assert [type(frame).__name__ for frame in later.frames[:3]] == ["Welcome", "Subscribed", "Deliver"]


async def test_nothing_is_delivered_before_access_is_known() -> None:
    """As long as the dispatcher has not handed a record round, no member gets it; then it does."""
    world = await World().open(is_followed=False)
    peer = await world.peer().joined()
    await world.publish()
    await world.pass_time(5)
    assert peer.tags == []

    world.dispatcher.start()
    await world.until(lambda: peer.tags)
    await world.close()


async def test_a_dispatcher_that_ended_stops_delivery_without_blame() -> None:
    """If nobody can say who may see what, nothing is delivered, connections are closed, and no attempt is counted."""
    world = await World().open()
    peer = await world.peer().joined()
    await world.dispatcher.close()
    await world.publish()
    await world.pass_time(60)

    assert peer.tags == []
    world.endpoint.failed("the book failed")
    assert peer.closed_with == (wire.CLOSE_GOING_AWAY, "node.stopping")
    assert await world.run(world.bus.dead_letters("demo")) == []
    await world.close()


async def test_publishing_is_answered_by_number_and_bounded() -> None:
    """Each publish gets its verdict; with too many under way nothing more is read until some are done."""
    world = await World().open(GroupsSettings(publishes_count_max=3))
    peer = world.peer().hello()
    for number in range(3):
        peer.say(wire.Publish(ref=number, event=msgspec.Raw(world.wire_event(number))))
    assert peer.is_reading_paused

    await world.until(lambda: len(peer.heard(wire.Published)) == 3)
    assert not peer.is_reading_paused
    bad = [b"{}", b'"text"', world.wire_event(topic="secret"), world.wire_event(topic="access")]
    for number, content in enumerate(bad, 10):
        peer.say(wire.Publish(ref=number, event=msgspec.Raw(content)))
    await world.until(lambda: len(peer.heard(wire.Published)) == 7)
    verdicts = {frame.ref: frame.verdict for frame in peer.heard(wire.Published)}
    assert [verdicts[n].verdict for n in range(3)] == ["appended"] * 3
    assert [verdicts[n].error.code for n in range(10, 14) if verdicts[n].error] == [
        "event.invalid",
        "event.invalid",
        "access.forbidden",
        "api.reserved_topic",
    ]
    assert world.log.position.seq == 3
    await world.close()


@pytest.mark.parametrize("asked", ["join", "publish"])
async def test_what_fails_unexpectedly_is_answered_too(
    world: World, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that meets an error of ours ends the connection with a reason: nobody waits for an answer that never comes."""

    async def fail(*_: object, **__: object) -> None:
        raise RuntimeError("as the test wanted")

    peer = world.peer().hello()
    monkeypatch.setattr(world.bus, asked, fail)
    if asked == "join":
        peer.say(wire.Subscribe(id=1, topic="demo", group="g"))
    else:
        peer.say(wire.Publish(ref=1, event=msgspec.Raw(world.wire_event())))
    await world.until(lambda: peer.closed_with)

    (problem,) = peer.heard(wire.Problem)
    assert peer.closed_with == (wire.CLOSE_FAILED, "node.internal_error")
    assert (problem.error.code, problem.error.retryable) == ("node.internal_error", True)
    assert "as the test wanted" not in problem.error.detail
    monkeypatch.undo()
    await world.close()


async def test_shutting_waits_for_answers_and_says_goodbye(world: World) -> None:
    """An endpoint that is shut hands out nothing more, waits for what is out, closes with a code, and takes nobody new."""
    peer = await world.peer().joined(max_inflight=1)
    await world.publish(2)
    await world.until(lambda: peer.tags)

    async def shut() -> None:
        await world.endpoint.stop(30.0)

    async def answer() -> None:
        await world.clock.sleep(5)
        assert peer.closed_with is None
        peer.say(wire.AckFrame(tags=peer.tags))

    async def both() -> None:
        await asyncio.gather(shut(), answer())

    await world.run(both())
    assert len(peer.tags) == 1
    assert peer.closed_with == (wire.CLOSE_GOING_AWAY, "node.stopping")
    late = world.peer()
    assert late.closed_with == (wire.CLOSE_GOING_AWAY, "node.stopping")


async def test_shutting_answers_publishes_that_are_under_way(world: World) -> None:
    """What an endpoint that is shut still stores, it answers before it closes; it reads nothing more meanwhile."""
    gate = asyncio.Event()

    async def hold(event: ReceivedEvent) -> None:
        await gate.wait()

    await world.run(world.bus.subscribe("demo", "slow", hold, max_inflight=1))
    await world.publish()
    peer = world.peer().hello()
    peer.say(wire.Publish(ref=7, event=msgspec.Raw(world.wire_event(1))))

    async def make_room() -> None:
        await world.clock.sleep(5)
        assert peer.is_reading_paused
        assert peer.closed_with is None
        gate.set()

    async def both() -> None:
        await asyncio.gather(world.endpoint.stop(30.0), make_room())

    await world.run(both())
    assert [(frame.ref, frame.verdict.verdict) for frame in peer.heard(wire.Published)] == [(7, "appended")]
    assert peer.closed_with == (wire.CLOSE_GOING_AWAY, "node.stopping")


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\xff",
        b"[]",
        b'{"type":"subscribe"}',
        b'{"type":"subscribe","id":1,"topic":"","group":"g"}',
        b'{"type":"subscribe","id":-1,"topic":"t","group":"g"}',
        b'{"type":"subscribe","id":1,"topic":"t","group":"g","max_inflight":0}',
        b'{"type":"subscribe","id":1,"topic":"t","group":"g","options":{"order":"random"}}',
        b'{"type":"nack","tag":1,"delay_s":1e300}',
        b'{"type":"ack","tags":[]}',
        b'{"type":"ack","tags":["1"]}',
        b'{"type":"hello","token":"again"}',
        b"[" * 10_000,
    ],
)
async def test_a_breach_of_the_protocol_is_told_and_closed(world: World, message: bytes) -> None:
    """Whatever a peer sends that is no frame, or a frame that makes no sense, it is told so and closed; nobody else notices."""
    peer, other = world.peer().hello(), world.peer().hello()
    peer.talk.received(message)

    assert peer.closed_with == (wire.CLOSE_PROTOCOL, "groups.malformed_frame")
    assert isinstance(peer.frames[-1], wire.Problem)
    assert other.closed_with is None


async def test_answers_to_nothing_are_passed_over(world: World) -> None:
    """An answer given twice, for another's delivery or for none, changes nothing."""
    peer, stranger = await world.peer().joined(max_inflight=1), world.peer().hello("stranger")
    await world.publish(2)
    await world.until(lambda: peer.tags)
    stranger.say(wire.AckFrame(tags=peer.tags))
    assert world.lag() == 2

    peer.say(
        wire.AckFrame(tags=peer.tags),
        wire.AckFrame(tags=peer.tags),
        wire.NackFrame(tag=peer.tags[0]),
        wire.NackFrame(tag=77),
    )
    await world.until(lambda: len(peer.tags) == 2)
    assert world.lag() == 1
    assert peer.closed_with is None
