"""Starting, being ready, new settings, stopping; and what is kept for how long."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

import pytest

from tests.beyond import Beyond, crossed
from tests.gateway_world import GatewayWorld, settings_of
from tidings.access.apps import AppEventType, AppRegistered
from tidings.access.visibility import CapsuleDenied, ReadCapsule, ReadRequest
from tidings.gateway.constants import FLUSH_TIMEOUT_S
from tidings.gateway.errors import QueueFull
from tidings.gateway.event_types import SOURCE_MANAGERS
from tidings.gateway.gateway import ReloadVetoed
from tidings.gateway.refusals import GatewayDraining, GatewayNotReady
from tidings.gateway.resume_index import Retained
from tidings.gateway.settings import EventSettings
from tidings.gateway.subscribers import Subscriber
from tidings.wire.gateway import CloseReason


@pytest.mark.req("R141", "R142")
async def test_nobody_is_admitted_before_the_engines_run_and_a_listener_is_bound() -> None:
    """Not ready from the first moment; with engines but no listener still not; descriptors are refused until the engines run."""
    world = GatewayWorld()
    assert world.gateway.readiness() == ("starting", "listener_unavailable")
    with pytest.raises(GatewayNotReady):
        world.admit()
    with pytest.raises(QueueFull):
        world.commit()
    world.gateway.start()
    assert world.gateway.readiness() == ("starting", "listener_unavailable")
    with pytest.raises(GatewayNotReady):
        world.admit()
    world.gateway.listener_bound(True)
    assert world.gateway.readiness() == ()
    world.admit()
    world.gateway.listener_bound(False)
    with pytest.raises(GatewayNotReady):
        world.admit()
    await world.stop()


@pytest.mark.req("R139")
@pytest.mark.parametrize("missing", sorted(SOURCE_MANAGERS - {"event_manager"}))
async def test_readiness_waits_for_the_channel_of_every_manager(missing: str) -> None:
    """With one manager's channel missing the gateway stays ``starting``."""
    world = GatewayWorld(without=missing)
    world.start()

    assert world.gateway.readiness() == ("starting",)
    await world.stop()


@pytest.mark.req("R143", "R144", "R145", "R146", "R227")
async def test_a_stop_refuses_closes_with_its_reason_records_and_drops_everything() -> None:
    """Nobody comes in any more, everybody is told that it is a shutdown, that is on record, and nothing is kept."""
    world = GatewayWorld()
    world.start()
    reader = await world.subscribe(begins=False)
    world.commit()
    await world.settle()
    world.gateway.drain()
    with pytest.raises(GatewayDraining):
        world.admit()
    assert reader.reason is None
    await world.clock.run_until(world.gateway.stop(1.0))

    assert reader.closed == (CloseReason.SHUTDOWN, {"reason": "shutdown"})
    assert [each["reason"] for each in await world.audited("subscription_closed")] == ["shutdown"]
    assert (len(world.gateway.index), len(world.gateway.registry)) == (0, 0)
    with pytest.raises(QueueFull):
        world.commit()
    await world.stop()


@pytest.mark.req("R145")
@pytest.mark.bound("gateway.constants.FLUSH_TIMEOUT_S")
@crossed
async def test_a_stop_gives_a_log_that_does_not_write_a_limited_time(
    monkeypatch: pytest.MonkeyPatch, beyond: Beyond
) -> None:
    """However long the node would wait: everybody is closed after two seconds all the same, and then it has stopped."""
    world = GatewayWorld()
    world.start()
    readers = [await world.subscribe(f"reader{number}") for number in range(3)]
    await world.settle()

    async def never(events: object, **options: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(world.log, "append_many", never)
    before_s = world.clock.monotonic()
    await world.clock.run_until(world.gateway.stop(beyond(int(FLUSH_TIMEOUT_S))))

    assert [each.reason for each in readers] == [CloseReason.SHUTDOWN] * 3
    assert 0 < world.clock.monotonic() - before_s <= FLUSH_TIMEOUT_S
    await world.clock.run_until(world.audit.close(0.0))
    await world.log.close()


async def test_an_engine_that_fails_closes_everybody_rather_than_leave_a_gap() -> None:
    """What was on its way may be lost, so nobody may go on as if it had not been."""
    async with GatewayWorld.running() as world:
        reader = await world.subscribe()
        world.gateway.builder.with_contract = lambda *_: 1 / 0  # type: ignore[assignment, method-assign]
        world.commit()
        await world.settle()

        assert reader.reason is CloseReason.INTERNAL_ERROR
        assert world.gateway.readiness() == ("engine_failed",)


# Settings


@pytest.mark.req("R212", "R213", "R211")
@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"queue__total_ceiling": 1000}, "queue.total_ceiling"),
        ({"security__admin_channels": ("network.*",)}, "security.admin_channels"),
        ({"websocket__max_connections": 2, "websocket__max_connections_per_identity": 2}, "websocket.max_connections"),
        ({"websocket__max_connections_per_identity": 1}, "websocket.max_connections_per_identity"),
        ({"websocket__max_connections_per_app": 2}, "websocket.max_connections_per_app"),
        ({"queue__per_connection": 1}, "queue.per_connection"),
    ],
)
async def test_settings_below_what_is_in_use_or_fixed_are_vetoed_and_change_nothing(
    changes: dict[str, int], path: str
) -> None:
    """The veto names the setting, is on record, and those who are connected stay as they are."""
    async with GatewayWorld.running() as world:
        readers = [await world.subscribe(name, begins=False) for name in ("a", "a", "b")]
        for _ in range(2):
            world.commit()
        await world.settle()
        with pytest.raises(ReloadVetoed) as caught:
            world.gateway.prepare(settings_of(**changes))

        assert caught.value.path == path
        assert world.gateway.settings == EventSettings()
        assert all(reader.reason is None for reader in readers)
        assert [each["keys"] for each in await world.audited("config_rejected")] == [[f"event.{path}"]]


@pytest.mark.req("R212")
async def test_new_settings_hold_from_their_commit_on() -> None:
    """Preparing changes nothing; committing does: the pace, the buffer, the window, the heartbeat, the limits."""
    async with GatewayWorld.running() as world:
        reader = await world.subscribe()
        new = settings_of(
            queue__per_connection=3,
            delivery__resume_window=2,
            delivery__max_msgs_per_sec=1,
            delivery__heartbeat_interval_ms=5000,
            websocket__max_connections=1,
            websocket__max_connections_per_identity=1,
        )
        world.gateway.prepare(new)
        assert world.gateway.settings == EventSettings()
        world.gateway.commit(new)
        for _ in range(3):
            world.commit()
        await world.settle()
        assert reader.seqs == [1]
        await world.settle(5.0)
        assert reader.seqs == [1, 2, 3]
        assert len(reader.pings) == 1
        reader.answers_pings = True
        world.commit()
        await world.settle()

        assert reader.reason is CloseReason.BUFFER_OVERFLOW
        assert world.gateway.index.find(reader.envelopes[0]["event_id"], 1) is None
        assert len(await world.audited("config_applied")) == 1


# What is kept


@pytest.mark.req("R170")
async def test_capsules_are_asked_for_in_batches_of_one_app_domain_and_channel() -> None:
    """However the events are mixed, a batch is of one app, one topic and one channel, and the order of delivery is that of the commits."""
    async with GatewayWorld.running() as world:
        world.change_app(
            AppRegistered(slug="shop"),
            AppEventType(slug="shop", event_type="app.shop.sold", audience="app", topic="sales"),
        )
        batches: list[Sequence[ReadRequest]] = []
        issue = world.gateway.issuer.issue

        def noted(batch: Sequence[ReadRequest]) -> list[ReadCapsule | CapsuleDenied]:
            batches.append(batch)
            return issue(batch)

        world.gateway.issuer.issue = noted  # type: ignore[method-assign]
        reader = await world.subscribe(claims={"topics": frozenset({"a", "b"})})
        seqs = [world.commit(topic=topic) for topic in "abab"]
        world.tell("app.shop", "app.shop.sold", {}, domain_id="sales")
        world.commit(topic="a", app="shop")
        await world.settle()

        assert reader.seqs == seqs
        assert sorted(len(each) for each in batches if each[0].subscription_type == "graph") == [1, 2, 2]
        assert all(
            len({(each.app_id, each.domain_id, each.subscription_type) for each in batch}) == 1 for batch in batches
        )


@pytest.mark.req("R172", "R73", "R237")
async def test_a_capsule_goes_with_its_envelope() -> None:
    """Within the window it is kept, unchanged; when the envelope leaves the window and every buffer, nothing refers to it."""
    async with GatewayWorld.running(settings_of(delivery__resume_window=2)) as world:
        reader = await world.subscribe()
        world.commit()
        await world.settle()
        first = world.gateway.index.find(reader.envelopes[0]["event_id"], 1)
        assert first is not None
        capsule = first.capsule
        world.commit()
        await world.settle()
        assert first.capsule is capsule
        assert first.holders == 1
        world.commit()
        await world.settle()
        assert world.gateway.index.find(reader.envelopes[0]["event_id"], 1) is None
        assert next(iter(reader.open.sent or ())) is first
        reader.ack(0)

        assert first.holders == 0
        assert first not in (reader.open.sent or ())


@pytest.mark.req("R180", "R238")
async def test_a_connections_state_is_its_subscription_and_fixed_bookkeeping() -> None:
    """Id, context, filters, a bounded buffer, the last token, the heartbeat; the rest are numbers and flags, and nothing grows but the buffer."""
    async with GatewayWorld.running(settings_of(queue__per_connection=8)) as world:
        reader = await world.subscribe()
        for _ in range(200):
            world.commit()
            await world.settle(0.1)
            reader.ack()
        subscriber = reader.open
        parts = {name: getattr(subscriber, name) for name in Subscriber.__slots__ if not name.startswith("__")}
        held = {name: value for name, value in parts.items() if isinstance(value, deque | list | dict | set)}

        assert set(held) <= {"sent", "unsent"}
        assert sum(map(len, held.values())) <= 8
        for name in ("connection_id", "context", "filters", "last_ack_token", "next_ping_s", "heard_s"):
            assert parts[name] is not None
        plain = (int, float, bool, str, type(None), Retained)
        known = {"_bounds", "_keeper", "ack_latency", "context", "filters", "rights", "sink", *held}
        assert all(isinstance(value, plain) for name, value in parts.items() if name not in known)
