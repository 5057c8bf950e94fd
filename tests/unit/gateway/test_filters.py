"""What may be subscribed to, and by whom: checked before anything is registered, and again for every event."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gateway_world import TOPIC, GatewayWorld
from tidings.access.apps import AppEnabled, AppEventType, AppRegistered, ChannelRemoved, CrossAppChannel
from tidings.access.context import ADMIN_ROLE
from tidings.access.resources import Action
from tidings.gateway.refusals import SubscriptionClosed
from tidings.gateway.settings import EventSettings, SecuritySettings
from tidings.wire.gateway import CloseReason

ADMIN = {"roles": frozenset({ADMIN_ROLE})}
SHOP = (
    AppRegistered(slug="shop"),
    AppEventType(slug="shop", event_type="app.shop.sold", payload_fields=("count",), audience="app", topic="sales"),
    AppEventType(
        slug="shop",
        event_type="app.shop.moved",
        payload_fields=("object_ids",),
        is_object_scoped=True,
        audience="acl",
        topic="sales",
    ),
)


async def refused(world: GatewayWorld, **options: Any) -> SubscriptionClosed:
    """What a subscription is refused with; nothing of it is left."""
    before = world.gateway.registry.admitted
    with pytest.raises(SubscriptionClosed) as caught:
        await world.subscribe(**options)
    assert (len(world.gateway.registry), world.gateway.registry.admitted) == (0, before)
    return caught.value


@pytest.mark.req("R92", "R96", "R94", "R95", "R182")
@pytest.mark.parametrize(
    "frame",
    [
        {"subscription_type": "weather"},
        {"subscription_type": "app.nobody"},
        {"subscription_type": None, "channels": None},
        {"subscription_type": "graph", "channels": ("graph.*",)},
        {"channels": ()},
        {"channels": tuple(f"graph.n{number}" for number in range(33))},
        {"channels": ("graph.never_declared",)},
        {"channels": ("*",)},
        {"channels": ("graph.*",), "event_type": "graph.acl_changed"},
        {"subscription_type": "graph", "event_type": "network.peer_admitted"},
        {"subscription_type": "graph", "event_type": "graph.never_declared"},
        {"subscription_type": "network", "object_ids": ("order:1",)},
        {"channels": ("graph.*", "network.*"), "object_ids": ("order:1",)},
        {"object_ids": ()},
        {"object_ids": ("no-colon",)},
        {"object_ids": tuple(f"order:{number}" for number in range(65))},
        {"peer_identity_id": "bob"},
        {"domain_id": "Not A Topic!"},
    ],
    ids=str,
)
async def test_a_filter_that_cannot_stand_is_refused_with_its_type(frame: dict[str, Any]) -> None:
    """Whatever a filter gets wrong, the answer is ``filter_invalid``, it is on record, and nothing is registered."""
    async with GatewayWorld.running() as world:
        error = await refused(world, claims=ADMIN, **frame)

        assert error.close_reason is CloseReason.FILTER_INVALID
        (record,) = await world.audited("subscription_rejected")
        assert record["reason"] == "filter_invalid"
        assert world.gateway.telemetry.failures["filter_invalid"] == 1


@pytest.mark.req("R10", "R87", "R90", "R91", "R93", "R95", "R98", "R99", "R217")
@pytest.mark.parametrize(
    "frame",
    [
        {"app_id": "shop"},
        {"domain_id": "secrets"},
        {"subscription_type": "system"},
        {"subscription_type": "security"},
        {"channels": ("graph.*", "security.subscription_opened")},
        {"subscription_type": "network", "peer_identity_id": "bob"},
        {"subscription_type": "app.shop"},
        {"subscription_type": "graph", "event_type": "graph.acl_changed"},
    ],
    ids=str,
)
async def test_a_filter_beyond_the_bearers_rights_is_refused(frame: dict[str, Any]) -> None:
    """Another app, a topic that may not be read, administrators' channels, peers, another app's channel: ``permission_denied``, and nothing stays."""
    gated = EventSettings(security=SecuritySettings(admin_channels=("graph.acl_changed",)))
    async with GatewayWorld.running(gated) as world:
        world.change_app(*SHOP)
        error = await refused(world, **frame)

        assert error.close_reason is CloseReason.PERMISSION_DENIED
        assert (await world.audited("subscription_rejected"))[0]["reason"] == "acl_denied"


@pytest.mark.req("R98")
async def test_an_admin_channel_within_a_family_is_left_out_for_others() -> None:
    """Who is no administrator may have the family, and gets of it what is not for administrators only."""
    gated = EventSettings(security=SecuritySettings(admin_channels=("graph.acl_changed",)))
    async with GatewayWorld.running(gated) as world:
        reader = await world.subscribe()
        root = await world.administrator(subscription_type="graph")
        world.commit(event_type="graph.acl_changed")
        world.commit()
        await world.settle()

        assert reader.types == ["graph.object_mutated"]
        assert root.types == ["graph.acl_changed", "graph.object_mutated"]


@pytest.mark.req("R217", "R98")
async def test_whoever_loses_administration_gets_no_more_of_it() -> None:
    """The admin bit opened the channel; the right that it stood for is asked for again for every event."""
    async with GatewayWorld.running() as world:
        world.grant("carol", "node", Action.ADMINISTER)
        carol = await world.subscribe("carol", subscription_type="system", claims={"topics": frozenset({TOPIC})})
        world.tell("config_manager", "system.config_changed", {"cfg_seq": 1, "keys": ("a",)})
        await world.settle()
        world.revoke("carol", "node", Action.ADMINISTER)
        world.tell("config_manager", "system.config_changed", {"cfg_seq": 2, "keys": ("a",)})
        await world.settle()

        assert [each["payload_summary"]["cfg_seq"] for each in carol.envelopes] == [1]


@pytest.mark.req("R91", "R40")
async def test_a_subscriber_sees_events_of_its_own_app() -> None:
    """The same topic and the same rights: whoever is in another app gets nothing of it."""
    async with GatewayWorld.running() as world:
        world.change_app(AppRegistered(slug="shop"))
        here, there = await world.subscribe("one"), await world.subscribe("two", app="shop")
        world.commit(app="shop")
        await world.settle()

        assert (here.seqs, there.seqs) == ([], [2])


@pytest.mark.req("R93", "R178")
async def test_a_domain_narrows_to_one_topic() -> None:
    """With a domain, only events of that topic come."""
    async with GatewayWorld.running() as world:
        claims = {"topics": frozenset({"a", "b"})}
        both = await world.subscribe("one", claims=claims)
        one = await world.subscribe("two", claims=claims, domain_id="b")
        world.commit(topic="a")
        world.commit(topic="b")
        await world.settle()

        assert (both.seqs, one.seqs) == ([1, 2], [2])


@pytest.mark.req("R94", "R178")
async def test_object_ids_narrow_to_events_that_name_one_of_them() -> None:
    """An event comes if it names any of the objects, whole as it is, and only to who may read it."""
    async with GatewayWorld.running() as world:
        reader = await world.subscribe(object_ids=("order:1", "order:2"))
        stranger = await world.subscribe("stranger", object_ids=("order:1",), claims={"topics": frozenset({"other"})})
        world.commit("order:1", "order:9")
        world.commit("order:3")
        world.commit("order:2")
        await world.settle()

        assert reader.seqs == [1, 3]
        assert reader.envelopes[0]["payload_summary"]["object_ids"] == ["order:1", "order:9"]
        assert stranger.frames == []


@pytest.mark.req("R96")
async def test_an_event_type_narrows_and_two_channels_do_not_double() -> None:
    """One type of a class; and an event that fits two channels comes once."""
    async with GatewayWorld.running() as world:
        narrow = await world.subscribe("one", event_type="graph.acl_changed")
        double = await world.subscribe("two", channels=("graph.*", "graph.acl_changed"))
        world.commit()
        world.commit(event_type="graph.acl_changed")
        await world.settle()

        assert (narrow.seqs, double.seqs) == ([2], [1, 2])


@pytest.mark.req("R95", "R220", "R37")
async def test_of_peers_one_sees_oneself_and_with_the_right_all() -> None:
    """Without clearance a subscriber gets what is about itself; with the right to read of the node, everything, or one peer's."""
    async with GatewayWorld.running() as world:
        world.grant("watcher", "node", Action.READ)
        own = await world.subscribe("peer-1", subscription_type="network")
        named = await world.subscribe("peer-1", subscription_type="network", peer_identity_id="peer-1")
        every = await world.subscribe("watcher", subscription_type="network")
        one = await world.subscribe("watcher", subscription_type="network", peer_identity_id="peer-2")
        for name in ("peer-1", "peer-2"):
            world.tell(
                "network_manager",
                "network.peer_admitted",
                {"connection_id": name, "path": "/sync"},
                scope_hint={"peer_identity_id": name},
            )
        await world.settle()

        def ids(reader: Any) -> list[str]:
            return [each["scope"]["peer_identity_id"] for each in reader.envelopes]

        assert (ids(own), ids(every), ids(one)) == (["peer-1"], ["peer-1", "peer-2"], ["peer-2"])
        assert ids(named) == ["peer-1"]


@pytest.mark.req("R99", "R75", "R177")
async def test_another_apps_events_come_by_a_registered_and_validated_channel_only() -> None:
    """Without the channel the filter is refused; with it, events of its topics come, and when it is gone no more of them."""
    async with GatewayWorld.running() as world:
        world.change_app(*SHOP, AppRegistered(slug="desk"))
        channel = CrossAppChannel(
            channel="sales", owner_app_id="shop", reader_app_ids=("desk",), domain_ids=("sales",), acl_validated=False
        )
        world.change_app(channel)
        error = await refused(world, app="desk", subscription_type="app.shop")
        assert error.close_reason is CloseReason.PERMISSION_DENIED

        world.change_app(
            type(channel)(
                **{**{name: getattr(channel, name) for name in channel.__struct_fields__}, "acl_validated": True}
            )
        )
        desk = await world.subscribe(app="desk", subscription_type="app.shop")
        for number, domain in enumerate(("sales", "stock"), 1):
            world.tell("app.shop", "app.shop.sold", {"count": number}, domain_id=domain)
        await world.settle()
        world.change_app(ChannelRemoved(channel="sales"))
        world.tell("app.shop", "app.shop.sold", {"count": 3}, domain_id="sales")
        await world.settle()

        assert [each["payload_summary"]["count"] for each in desk.envelopes] == [1]


@pytest.mark.req("R39", "R40")
async def test_an_app_event_for_readers_takes_the_right_to_read_its_record() -> None:
    """Of one app, two subscribers: who may read the topic gets the event, the other does not; what is for the app gets both."""
    async with GatewayWorld.running() as world:
        world.change_app(*SHOP)
        may = await world.subscribe(
            "one", app="shop", subscription_type="app.shop", claims={"topics": frozenset({"sales"})}
        )
        may_not = await world.subscribe("two", app="shop", subscription_type="app.shop")
        scope = {"read_scope": world.graph_descriptor(1, topic="sales").read_scope}
        world.tell("app.shop", "app.shop.moved", {"object_ids": ("item:1",)}, domain_id="sales", **scope)
        world.tell("app.shop", "app.shop.sold", {"count": 1}, domain_id="sales")
        await world.settle()

        assert (may.types, may_not.types) == (["app.shop.moved", "app.shop.sold"], ["app.shop.sold"])


async def test_an_object_is_the_same_in_every_spelling() -> None:
    """Objects are asked for as they are stored: composed, whatever the filter is written in."""
    async with GatewayWorld.running() as world:
        reader = await world.subscribe(object_ids=("place:Orle\u0301ans",))
        world.commit("place:Orl\u00e9ans")
        await world.settle()

        assert reader.seqs == [1]


async def test_nobody_subscribes_in_an_app_that_was_switched_off_after_they_were_admitted() -> None:
    """Between connecting and subscribing an app can go: then the subscription is refused."""
    async with GatewayWorld.running() as world:
        world.change_app(*SHOP)
        admission = world.admit("alice", app="shop")
        world.change_app(AppEnabled(slug="shop", is_enabled=False))
        with pytest.raises(SubscriptionClosed) as caught:
            await world.open(admission)

        assert caught.value.close_reason is CloseReason.PERMISSION_DENIED


async def test_subscribers_of_an_app_that_is_switched_off_are_closed() -> None:
    """A disabled app's subscribers end with ``permission_denied``; its channel takes nothing more."""
    async with GatewayWorld.running() as world:
        world.change_app(*SHOP)
        reader = await world.subscribe(app="shop", subscription_type="app.shop")
        world.change_app(AppEnabled(slug="shop", is_enabled=False))

        assert reader.reason is CloseReason.PERMISSION_DENIED


@pytest.mark.req("R12", "R97", "R11")
async def test_context_and_filters_of_a_subscriber_cannot_be_changed() -> None:
    """Both are frozen, the subscriber's are never replaced, and who it is is who was admitted."""
    async with GatewayWorld.running() as world:
        reader = await world.subscribe("alice")

        assert reader.open.context is reader.admission.context
        with pytest.raises(AttributeError):
            reader.open.context.requester_identity_id = "bob"  # type: ignore[misc]
        with pytest.raises(AttributeError):
            reader.open.filters.app_id = "shop"  # type: ignore[misc]
        assert world.gateway.registry.connections()[0].identity_id == "alice"
