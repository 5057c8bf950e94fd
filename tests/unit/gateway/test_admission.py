"""How many may connect, who is kept out, and what the ceiling does when too much waits."""

from __future__ import annotations

import pytest

from tests.beyond import Beyond, crossed
from tests.gateway_world import GatewayWorld, Reader, settings_of
from tidings.access.apps import AppRegistered
from tidings.access.guard import Directive
from tidings.gateway.errors import QueueFull
from tidings.gateway.refusals import AdmissionDenied, AppNotFound, SubscriptionClosed
from tidings.wire.gateway import CloseReason, Reconnect, SubscribeEvents


def fill(world: GatewayWorld, count: int, app: str = "default") -> list[Reader]:
    return [world.admit(f"{app}-{number}", app=app) for number in range(count)]


@pytest.mark.req("R123", "R221")
async def test_no_more_connect_than_the_node_allows_subscribed_or_not() -> None:
    """The third of two is refused before its upgrade, on record, and may come when one has gone."""
    async with GatewayWorld.running(
        settings_of(websocket__max_connections=2, websocket__max_connections_per_identity=2)
    ) as world:
        one, _ = fill(world, 2)
        with pytest.raises(AdmissionDenied) as caught:
            world.admit("late")
        assert caught.value.protocol_code == "ERR_RESOURCE_RATE_LIMIT"
        one.admission.release()
        one.admission.release()
        world.admit("late")

        assert world.gateway.registry.admitted == 2
        assert len(await world.audited("subscription_rejected")) == 1


@pytest.mark.req("R124")
async def test_no_identity_has_more_connections_than_one_may() -> None:
    """The cap of one identity is its own; another one still comes in."""
    async with GatewayWorld.running(settings_of(websocket__max_connections_per_identity=2)) as world:
        for _ in range(2):
            await world.subscribe("alice")
        with pytest.raises(AdmissionDenied) as caught:
            world.admit("alice")
        assert caught.value.protocol_code == "ERR_RESOURCE_PEER_LIMIT"
        await world.subscribe("bob")


@pytest.mark.bound("gateway.settings.WebSocketSettings.max_attempts_per_min_per_identity")
@crossed
async def test_an_identity_opens_a_limited_number_of_connections_a_minute(beyond: Beyond) -> None:
    """Opening and closing in a loop cannot fill the disk with records: beyond the rate it is refused, and that is recorded as a number."""
    async with GatewayWorld.running(settings_of(websocket__max_attempts_per_min_per_identity=20)) as world:
        waits = []
        for _ in range(beyond(20)):
            try:
                world.admit("alice").admission.release()
            except AdmissionDenied as error:
                waits.append(error.retry_after_s)
        world.admit("bob").admission.release()
        assert waits == [3] * (beyond(20) - 20)
        await world.settle(3.1)
        world.admit("alice").admission.release()
        with pytest.raises(AdmissionDenied):
            world.admit("alice")

        records = await world.audited("subscription_rejected")
        assert len(records) <= 12
        assert world.guard.directives() == []


@pytest.mark.req("R125")
async def test_a_cap_for_apps_is_the_same_for_all_of_them() -> None:
    """With two an app, two of each come in, and a third of neither."""
    async with GatewayWorld.running(settings_of(websocket__max_connections_per_app=2)) as world:
        world.change_app(AppRegistered(slug="shop"))
        for app in ("default", "shop"):
            fill(world, 2, app)
            with pytest.raises(AdmissionDenied):
                world.admit("late", app=app)


async def test_an_app_that_is_not_registered_has_no_subscribers() -> None:
    """There is nothing to subscribe to, and it is said so before the upgrade."""
    async with GatewayWorld.running() as world:
        with pytest.raises(AppNotFound):
            world.admit(app="nowhere")


@pytest.mark.req("R134", "R136", "R137")
@pytest.mark.parametrize("target", ["all", "identity:alice", "app:default"])
@pytest.mark.parametrize("decision", ["deny", "require_challenge"])
async def test_the_guard_keeps_newcomers_out_for_a_time(target: str, decision: str) -> None:
    """Whoever is meant is refused until the directive ends, also where a challenge would be asked for; who is there stays. Both are on record."""
    async with GatewayWorld.running() as world:
        there = await world.subscribe("alice")
        world.guard.apply(Directive(decision=decision, target=target, ttl_ms=10_000), by="root")  # type: ignore[arg-type]
        with pytest.raises(AdmissionDenied):
            world.admit("alice")
        assert there.reason is None
        if target == "identity:alice":
            world.admit("bob")
        await world.settle(10.1)
        world.admit("alice")

        assert len(await world.audited("dos_directive")) == 1


@pytest.mark.req("R135", "R137", "R205")
async def test_the_guard_closes_who_it_means() -> None:
    """With ``close_existing``, or one connection by its id: closed with ``subscription_rejected``, told and on record with how many."""
    async with GatewayWorld.running() as world:
        root = await world.administrator(event_type="security.dos_directive_applied")
        alice, bob, carol = [await world.subscribe(name) for name in ("alice", "bob", "carol")]
        world.guard.apply(Directive(decision="deny", target="identity:alice", close_existing=True), by="root")
        world.guard.apply(Directive(decision="deny", target=f"connection:{bob.open.connection_id}"), by="root")
        await world.settle()

        assert (alice.reason, bob.reason, carol.reason) == (
            CloseReason.SUBSCRIPTION_REJECTED,
            CloseReason.SUBSCRIPTION_REJECTED,
            None,
        )
        assert root.types == ["security.dos_directive_applied"] * 2
        assert [each["closed"] for each in await world.audited("dos_directive")] == [1, 1]


@pytest.mark.req("R136")
async def test_who_was_admitted_before_a_denial_does_not_get_in_by_subscribing_after_it() -> None:
    """Between the upgrade and the subscription the guard said no: ``subscription_rejected``, and nothing is registered."""
    async with GatewayWorld.running() as world:
        reader = world.admit("alice")
        world.guard.apply(Directive(decision="deny", target="identity:alice"), by="root")
        with pytest.raises(SubscriptionClosed) as caught:
            await world.open(reader)

        assert caught.value.close_reason is CloseReason.SUBSCRIPTION_REJECTED
        assert (len(world.gateway.registry), world.gateway.registry.admitted) == (0, 0)


@pytest.mark.req("R231")
async def test_who_subscribes_while_access_cannot_be_decided_may_come_back() -> None:
    """It is not told that it may not: the answer is one to come back after, and no offence."""
    async with GatewayWorld.running() as world:
        reader = world.admit("alice")
        doubt = world.doubtful_access_record()
        with pytest.raises(SubscriptionClosed) as caught:
            await world.open(reader, domain_id="orders")
        assert caught.value.close_reason is CloseReason.SUBSCRIPTION_REJECTED
        assert caught.value.close_reason.reconnect is not Reconnect.NO
        world.dismiss(doubt)
        await world.subscribe("alice", domain_id="orders")


async def test_the_guard_may_slow_down_and_never_speed_up() -> None:
    """An ``allow`` with a rate below the settings' holds for who is there and who comes, until it ends."""
    async with GatewayWorld.running(
        settings_of(delivery__max_msgs_per_sec=10, delivery__heartbeat_interval_ms=5000)
    ) as world:
        there = await world.subscribe("alice")
        world.guard.apply(Directive(decision="allow", target="all", msgs_per_sec_max=2, ttl_ms=4_000), by="root")
        new = await world.subscribe("bob")
        for number in range(20):
            world.commit(f"order:{number}")
        await world.settle()
        assert (len(there.frames), len(new.frames)) == (2, 2)
        await world.settle(20.0)
        assert len(there.frames) == len(new.frames) == 20
        assert (there.open.rate_max, new.open.rate_max) == (None, None)


@pytest.mark.req("R198")
async def test_who_overflows_again_and_again_is_kept_out() -> None:
    """Three overflows within a minute are reported to the guard, and the identity is denied for a time."""
    async with GatewayWorld.running(settings_of(queue__per_connection=1)) as world:
        for _ in range(3):
            await world.subscribe("slow")
            world.commit("order:1")
            world.commit("order:2")
            await world.settle()
        with pytest.raises(AdmissionDenied):
            world.admit("slow")


async def test_a_place_that_was_given_back_cannot_be_subscribed_on() -> None:
    """The connection went away while it subscribed: nothing is registered."""
    async with GatewayWorld.running() as world:
        reader = world.admit()
        reader.admission.release()
        with pytest.raises(SubscriptionClosed):
            await world.gateway.registry.open(
                reader.admission, reader.rights, SubscribeEvents(app_id="default", subscription_type="graph"), reader
            )
        assert len(world.gateway.registry) == 0


# The ceiling


def full_settings(**more: int):  # type: ignore[no-untyped-def]
    return settings_of(**{"queue__total_ceiling": 128, "queue__per_connection": 128, **more})


@pytest.mark.req("R131", "R189", "R155")
async def test_near_the_ceiling_lower_classes_wait_and_graph_events_do_not() -> None:
    """At four fifths everything but the graph is refused with ``queue_full``; at three fifths it is taken again."""
    async with GatewayWorld.running(full_settings()) as world:
        reader = await world.subscribe(begins=False)
        await world.settle()
        while not world.gateway.ceiling.is_paused:
            world.commit()
            await world.settle()
        with pytest.raises(QueueFull):
            world.tell("config_manager", "system.config_changed", {"cfg_seq": 1, "keys": ("k",)})
        world.commit()
        assert world.gateway.readiness() == ("queue_saturated",)
        reader.open.resume_sending()
        await world.settle()
        reader.ack()
        world.tell("config_manager", "system.config_changed", {"cfg_seq": 2, "keys": ("k",)})

        assert world.gateway.readiness() == ()


@pytest.mark.req("R130", "R132", "R133", "R165", "R166")
async def test_above_the_ceiling_lower_classes_are_shed_first_and_it_is_told() -> None:
    """While nothing can go on, the lowest class gives way, oldest first; each is counted and on record, the episode is told once, and the count never passes the ceiling."""
    async with GatewayWorld.running(full_settings()) as world:
        root = await world.administrator(channels=("system.config_changed", "system.event_queue_overflow"))
        await world.settle()
        doubt = world.doubtful_access_record()
        for number in range(12):
            world.tell("config_manager", "system.config_changed", {"cfg_seq": number, "keys": ("k",)})
        for number in range(104):
            world.commit(f"order:{number}")
            assert world.gateway.ceiling.used <= 128
        await world.settle(0.2)
        shed = await world.audited("shed")
        world.dismiss(doubt)
        await world.settle(1.0)

        kept = [
            each["payload_summary"]["cfg_seq"]
            for each in root.envelopes
            if each["event_type"] == "system.config_changed"
        ]
        assert kept == list(range(12 - len(kept), 12))
        assert 0 < len(kept) < 12
        assert len(shed) == 12 - len(kept)
        assert root.types.count("system.event_queue_overflow") == 1
        assert world.gateway.telemetry.dropped_per_class() == {"system": len(shed)}


@pytest.mark.req("R132", "R167", "R14")
async def test_then_connections_are_shed_the_fullest_first() -> None:
    """Buffers fill the ceiling: the fullest connection is closed with ``queue_full``, of two equally full the older; graph events are never given up."""
    async with GatewayWorld.running(full_settings()) as world:
        lean = await world.subscribe("lean")
        fat, fatter, equal = [await world.subscribe(f"fat{number}") for number in range(3)]
        world.commit()
        await world.settle()
        fat.ack()
        lean.ack()
        seqs = [1]
        while lean.reason is None and fatter.reason is None:
            seqs.append(world.commit())
            assert world.gateway.ceiling.used <= 128
            await world.settle()
            lean.ack()
        assert (lean.reason, fat.reason, fatter.reason, equal.reason) == (None, None, CloseReason.QUEUE_FULL, None)
        assert lean.seqs == seqs
        assert world.gateway.telemetry.failures["queue_full"] == 1


@pytest.mark.req("R167", "R224")
async def test_a_graph_event_that_finds_no_room_closes_everybody_who_would_miss_it() -> None:
    """With access out nothing can be given up: the event is refused to its manager, the node is not ready, and graph subscribers must read it over HTTP."""
    async with GatewayWorld.running(full_settings()) as world:
        reader = await world.subscribe()
        root = await world.administrator(event_type="security.subscription_dropped")
        world.commit()
        await world.settle()
        doubt = world.doubtful_access_record()
        while world.gateway.ceiling.has_room_for_envelope("graph_manager"):
            assert "intake_saturated" not in world.gateway.readiness()
            world.commit()
        with pytest.raises(QueueFull):
            world.commit()
        assert world.gateway.ceiling.used <= 128
        lost = world.committed_seq
        assert reader.reason is CloseReason.QUEUE_FULL
        assert root.reason is None
        assert "intake_saturated" in world.gateway.readiness()
        await world.settle(0.1)
        assert "intake_saturated" in world.health[-1][1]
        world.dismiss(doubt)
        await world.settle(1.0)
        assert root.types == ["security.subscription_dropped"]
        with pytest.raises(SubscriptionClosed) as caught:  # a token from before it would pass over it
            await world.subscribe(resume=reader.tokens[-1])
        assert caught.value.close_reason is CloseReason.RESUME_INVALID
        again = await world.subscribe()
        assert again.open.since == lost


@pytest.mark.req("R132")
async def test_who_holds_most_gives_way_before_anybody_misses_an_event() -> None:
    """One event for 501 finds room for fewer: the one whose buffer is full of others is closed, and the 500 get it."""
    settings = settings_of(
        queue__total_ceiling=64,
        queue__per_connection=64,
        websocket__max_connections=1_000,
        websocket__max_connections_per_identity=1_000,
    )
    async with GatewayWorld.running(settings) as world:
        fat = await world.subscribe("fat")
        lean = [await world.subscribe("lean", object_ids=("order:all",)) for _ in range(500)]
        await world.settle(1.0)
        for _ in range(30):
            world.commit()
            await world.settle()
        world.commit("order:all")
        await world.settle()

        assert fat.reason is CloseReason.QUEUE_FULL
        assert [(reader.seqs, reader.reason) for reader in lean] == [([31], None)] * 500


@pytest.mark.req("R13", "R241")
async def test_more_subscribers_than_the_ceiling_has_entries_are_closed_and_not_buffered_for() -> None:
    """One event for 800, under a ceiling of 768 entries: as many get it as fit, the others are closed."""
    settings = settings_of(
        queue__total_ceiling=64,
        queue__per_connection=64,
        websocket__max_connections=1_000,
        websocket__max_connections_per_identity=1_000,
    )
    async with GatewayWorld.running(settings) as world:
        readers = [await world.subscribe() for _ in range(800)]
        await world.settle(1.0)
        world.commit()
        await world.settle()

        got = [reader for reader in readers if reader.frames]
        assert 300 < len(got) <= 768
        assert all(reader.reason is (None if reader.frames else CloseReason.QUEUE_FULL) for reader in readers)
        assert world.gateway.ceiling.used <= 128
