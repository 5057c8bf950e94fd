"""Coming back with a resume token: what follows it is replayed, or the client is sent to read over HTTP."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.gateway_world import GatewayWorld, Reader, settings_of
from tidings.gateway.refusals import SubscriptionClosed
from tidings.wire.gateway import CloseReason


async def history(world: GatewayWorld, count: int, identity: str = "reader") -> Reader:
    """A reader who was sent so many, and has gone."""
    reader = await world.subscribe(identity)
    for number in range(count):
        world.commit(f"order:{number}")
        await world.settle()
    reader.leave()
    return reader


@pytest.mark.req("R178")
@pytest.mark.parametrize("filters", [{"domain_id": "orders"}, {"object_ids": ("order:1",)}])
async def test_what_was_missed_is_told_by_the_same_filter(filters: dict[str, Any]) -> None:
    """A filter decides of an event that was missed as it does of one that is live."""
    claims = {"topics": frozenset({"orders", "letters"})}
    async with GatewayWorld.running() as world:
        reader = await world.subscribe(claims=claims, **filters)
        live = await world.subscribe("another", claims=claims, **filters)
        world.commit("order:1")
        await world.settle()
        reader.leave()
        world.commit("order:2", topic="letters")
        world.commit("order:1")
        await world.settle()
        back = await world.subscribe(claims=claims, resume=reader.tokens[0], **filters)
        world.commit("order:2", topic="letters")
        world.commit("order:1")
        await world.settle()

        assert back.seqs == [3, 5]
        assert live.seqs == [1, 3, 5]


async def refused(world: GatewayWorld, token: str, **options: Any) -> dict[str, object]:
    """A token is refused; returns where the client is sent instead."""
    with pytest.raises(SubscriptionClosed) as caught:
        await world.subscribe(resume=token, **options)
    assert caught.value.close_reason is CloseReason.RESUME_INVALID
    assert caught.value.data is not None
    return caught.value.data


@pytest.mark.req("R116", "R119", "R179", "R181")
async def test_what_followed_the_token_comes_in_order_and_before_anything_live() -> None:
    """The buffer is filled before a live event can be: first what was missed, then the rest; both ends of it are on record."""
    async with GatewayWorld.running() as world:
        before = await history(world, 5)
        for number in range(3):
            world.commit(f"away:{number}")
        await world.settle()
        back = await world.subscribe(resume=before.tokens[1], begins=False)
        world.commit("live:1")
        await world.settle()
        assert back.frames == []
        assert (back.open.is_resumed, back.open.replayed_count, back.open.since) == (True, 6, 2)
        back.open.resume_sending()
        await world.settle()

        assert back.seqs == [3, 4, 5, 6, 7, 8, 9]
        (record,) = await world.audited("resume_accepted")
        assert (record["subject"], record["replayed"]) == ("reader", 6)


@pytest.mark.req("R116")
async def test_a_token_may_be_shown_again_and_the_newer_connection_takes_over() -> None:
    """The same identity with the same token: the older connection is closed, told why, and nothing is missing on the newer one."""
    async with GatewayWorld.running() as world:
        reader = await world.subscribe()
        for number in range(3):
            world.commit(f"order:{number}")
        await world.settle()
        token = reader.tokens[0]
        second = await world.subscribe(resume=token)
        assert reader.reason is CloseReason.TAKEN_OVER
        third = await world.subscribe(resume=token)
        await world.settle()

        assert second.reason is CloseReason.TAKEN_OVER
        assert third.seqs == [2, 3]
        assert third.reason is None


async def test_of_several_connections_the_one_not_heard_of_for_longest_is_taken_over() -> None:
    """Two with the same filters stay open side by side; the silent one is taken to be the one that comes back. Other filters are another subscription."""
    async with GatewayWorld.running(settings_of(delivery__heartbeat_interval_ms=5000)) as world:
        lively, silent = await world.subscribe(), await world.subscribe()
        other = await world.subscribe(domain_id="orders")
        silent.answers_pings = False
        world.commit()
        await world.settle(6.0)
        await world.subscribe(resume=lively.tokens[0])

        assert (lively.reason, silent.reason, other.reason) == (None, CloseReason.TAKEN_OVER, None)


@pytest.mark.req("R117", "R183", "R184", "R235", "R121", "R242")
async def test_every_bad_token_gets_the_same_answer() -> None:
    """Made up, cut, changed, another life's, another identity's, of an event that is not asked for: one reason, one ``data``, where to read on; the causes are on record only."""
    async with GatewayWorld.running(seed=7) as elsewhere:
        foreign = (await history(elsewhere, 3)).tokens[2]
    async with GatewayWorld.running(settings_of(websocket__max_connections_per_identity=100)) as world:
        reader = await history(world, 3)
        token = reader.tokens[2]
        await world.subscribe("stranger")
        cases: list[tuple[str, dict[str, Any]]] = [
            ("made up", {}),
            ("", {}),
            (token[:-4], {}),
            (token[:40] + ("A" if token[40] != "A" else "B") + token[41:], {}),
            (foreign, {}),
            (token, {"identity": "stranger"}),
            (token, {"event_type": "graph.acl_changed"}),
            (token, {"claims": {"topics": frozenset({"none"})}}),
        ]
        answers = [await refused(world, each, **options) for each, options in cases]

        assert {(each["action"], each["method"], each["path"]) for each in answers} == {
            ("http_catch_up", "GET", "/v1/envelopes")
        }
        assert all(each["since"] == 3 for each in answers)
        assert all(each.keys() == answers[0].keys() for each in answers)
        records = await world.audited("resume_refused")
        assert len(records) == len(cases)
        assert len({each["cause"] for each in records}) == 3
        assert world.gateway.telemetry.failures["resume_invalid"] == len(cases)


@pytest.mark.req("R118", "R237", "R121")
async def test_a_token_beyond_the_window_is_refused() -> None:
    """With a window of four, the fifth last is gone: the client is told to read from the seq that its token is of."""
    async with GatewayWorld.running(settings_of(delivery__resume_window=4)) as world:
        reader = await history(world, 6)

        assert (await refused(world, reader.tokens[0]))["since"] == 1
        assert (await refused(world, reader.tokens[1]))["since"] == 2
        back = await world.subscribe(resume=reader.tokens[2])
        await world.settle()
        assert back.seqs == [4, 5, 6]


@pytest.mark.req("R118")
async def test_every_class_that_is_asked_for_must_still_have_what_followed() -> None:
    """A token of a class whose window holds it is refused if another subscribed class has lost events since."""
    async with GatewayWorld.running(settings_of(delivery__resume_window=4)) as world:
        channels = ("graph.*", "system.config_changed")
        root = await world.administrator(channels=channels)
        world.tell("config_manager", "system.config_changed", {"cfg_seq": 1, "keys": ("k",)})
        await world.settle()
        for number in range(6):
            world.commit(f"order:{number}")
        await world.settle()
        (token,) = [each["resume_token"] for each in root.envelopes if each["event_type"] == "system.config_changed"]
        claims = {"roles": frozenset({"admin"})}

        await refused(world, token, identity="root", claims=claims, channels=channels)


@pytest.mark.req("R120")
async def test_a_replay_asks_for_the_rights_of_today() -> None:
    """What was revoked in between is not replayed; a token whose own event may no longer be seen is like a forged one."""
    async with GatewayWorld.running() as world:
        for topic in ("a", "b"):
            world.grant("bob", f"topic:{topic}")
        claims = {"space_prefixes": ("m",)}
        bob = await world.subscribe("bob", claims=claims)
        for topic in ("a", "b", "a", "b"):
            world.commit(topic=topic)
        await world.settle()
        bob.leave()
        world.revoke("bob", "topic:b")
        back = await world.subscribe("bob", claims=claims, resume=bob.tokens[0])
        await world.settle()

        assert back.seqs == [bob.seqs[2]]
        await refused(world, bob.tokens[1], identity="bob", claims=claims)


@pytest.mark.req("R120", "R185")
async def test_a_long_replay_lets_others_have_their_turn_and_keeps_order_and_rights() -> None:
    """Thousands of kept envelopes are looked through in slices; what is committed and revoked meanwhile counts."""
    settings = settings_of(
        delivery__resume_window=10_000, queue__per_connection=10_000, delivery__max_msgs_per_sec=100_000
    )
    async with GatewayWorld.running(settings) as world:
        for topic in ("a", "b"):
            world.grant("bob", f"topic:{topic}")
        claims = {"space_prefixes": ("m",)}
        bob = await world.subscribe("bob", claims=claims)
        for number in range(4_000):
            world.commit(topic="b" if number % 10 else "a")
        await world.settle()
        bob.leave()
        turns = 0
        opening = asyncio.ensure_future(world.subscribe("bob", claims=claims, resume=bob.tokens[0]))
        while not opening.done():
            turns += 1
            if turns == 2:
                world.revoke("bob", "topic:b")
                live = world.commit(topic="a")
            await asyncio.sleep(0)
        back = opening.result()
        await world.settle()

        assert turns > 3
        assert back.seqs == [*range(bob.seqs[0] + 10, bob.seqs[-1], 10), live]


@pytest.mark.req("R13")
async def test_of_one_identity_only_so_many_ended_connections_are_remembered() -> None:
    """Whoever connects again and again makes neither memory nor a resume cost more: tokens of its sixty-fourth last connection are good, older ones are not."""
    async with GatewayWorld.running() as world:
        tokens = []
        for _ in range(70):
            reader = await world.subscribe("restless")
            world.commit()
            await world.settle()
            tokens += reader.tokens
            reader.leave()

        await refused(world, tokens[5], identity="restless")
        back = await world.subscribe("restless", resume=tokens[6])
        await world.settle()
        assert back.seqs == list(range(8, 71))


async def test_more_than_a_buffer_holds_is_not_replayed() -> None:
    """Whoever missed more than its buffer takes is sent to read over HTTP."""
    async with GatewayWorld.running(settings_of(queue__per_connection=4)) as world:
        reader = await history(world, 2)
        for number in range(5):
            world.commit(f"away:{number}")
        await world.settle()

        await refused(world, reader.tokens[0])
        assert world.gateway.ceiling.used < 4


async def test_a_new_subscriber_gets_everything_above_its_since_and_nothing_below() -> None:
    """Events that are on their way when somebody subscribes are not above the seq that it is told to read up to: so they come once, over HTTP."""
    async with GatewayWorld.running() as world:
        world.commit("order:1", parts=3)
        reader = await world.subscribe()
        assert reader.open.since == 1
        world.commit("order:2", parts=2)
        await world.settle()

        assert reader.seqs == [2, 2]
        again = await world.subscribe("other")
        assert again.open.since == 2


@pytest.mark.req("R122", "R225", "R2")
async def test_the_gateway_knows_no_storage() -> None:
    """A token that is too old is refused, not looked up: no engine holds a log, a file or a database."""
    async with GatewayWorld.running(settings_of(delivery__resume_window=1)) as world:
        reader = await history(world, 3)
        reads: list[object] = []
        world.log.read = lambda *args, **more: reads.append(args)  # type: ignore[assignment, method-assign]
        await refused(world, reader.tokens[0])

        assert reads == []


@pytest.mark.req("R146", "R239")
async def test_a_token_of_an_earlier_life_is_worth_nothing() -> None:
    """After a stop everything kept is gone; the next gateway has another key, and refuses the token."""
    first = GatewayWorld(seed=1)
    first.start()
    reader = await history(first, 2)
    await first.stop()
    assert len(first.gateway.index) == 0

    async with GatewayWorld.running(seed=2) as world:
        world.committed_seq = 2
        await refused(world, reader.tokens[0])


async def test_coming_back_to_a_node_that_started_again_is_no_offence() -> None:
    """Twenty connections of one identity show tokens of an earlier life: each is sent to read over HTTP, and none is kept out for it."""
    async with GatewayWorld.running(seed=2) as world:
        for _ in range(20):
            await refused(world, "AQ" + "A" * 86)

        await world.subscribe()
