"""Telemetry counts what engines do, reports it to health, puts it on record and tells administrators; it shows nobody's contents."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from tests.beyond import Beyond, crossed
from tests.gateway_world import GatewayWorld, settings_of
from tidings.access.announcements import Announcement
from tidings.access.audit import AuditLog, AuditRecord
from tidings.access.errors import AuditUnavailable
from tidings.gateway.constants import OWN_EVENTS_PER_S_MAX
from tidings.gateway.descriptors import EventDescriptor
from tidings.gateway.errors import QueueFull, ScopeViolation
from tidings.gateway.own_events import ManagerEvents
from tidings.gateway.refusals import GatewayNotReady, SubscriptionClosed
from tidings.gateway.telemetry import LATENCY_BUCKETS_S, LatencyHistogram
from tidings.log.errors import StorageFull
from tidings.testing import VirtualClock
from tidings.wire.gateway import CloseReason


def metrics_of(world: GatewayWorld) -> Any:
    return world.gateway.telemetry.stats(world.gateway.pipeline_state())


@pytest.mark.req("R195")
async def test_depth_flow_latency_heartbeats_and_reasons_are_counted() -> None:
    """After deliveries, a late acknowledgement, a missed heartbeat and a refusal, the counts say exactly that."""
    async with GatewayWorld.running(settings_of(delivery__heartbeat_interval_ms=5000)) as world:
        alice, bob = await world.subscribe("alice"), await world.subscribe("bob")
        bob.answers_pings = False
        for number in range(3):
            world.commit(f"order:{number}")
        assert metrics_of(world).total_queued >= 3
        await world.settle(2.0)
        alice.ack()
        await world.settle(10.0)
        with pytest.raises(SubscriptionClosed):
            await world.subscribe("carol", subscription_type="system")
        await world.settle()
        found = metrics_of(world)

    assert found.produced["graph"] == 3
    assert found.delivered["graph"] == 6
    assert found.ack_latency.count == 1
    assert found.ack_latency.p50_s == 2.5
    assert found.heartbeat_failures == 1
    assert found.failures == {"heartbeat_timeout": 1, "acl_denied": 1}
    assert found.dropped == {}
    assert found.total_queued == 0


@pytest.mark.req("R203")
async def test_each_connection_has_its_own_use_depth_and_latency() -> None:
    """One who acknowledges after a second and one who does not are told apart: buffer, what is unacknowledged, and histogram."""
    async with GatewayWorld.running(settings_of(queue__per_connection=8)) as world:
        quick = await world.subscribe("quick")
        await world.subscribe("idle")
        for number in range(4):
            world.commit(f"order:{number}")
        await world.settle(0.7)
        quick.ack()
        world.commit("order:5")
        await world.settle()
        first, second = world.gateway.registry.connections()

    assert (first.unacked_count, first.use) == (1, 0.125)
    assert (second.unacked_count, second.use, second.ack_latency) == (5, 0.625, None)
    assert first.ack_latency is not None
    assert (first.ack_latency.count, first.ack_latency.p99_s) == (1, 1.0)
    assert quick.open.ack_latency is not None
    assert quick.open.ack_latency.counts[LATENCY_BUCKETS_S.index(1.0)] == 1


@pytest.mark.req("R196", "R206")
async def test_health_hears_at_the_configured_interval() -> None:
    """Readiness and liveness are reported as often as the setting says, and at once when they change."""
    async with GatewayWorld.running(settings_of(telemetry__heartbeat_interval_ms=1000)) as world:
        await world.settle(0.1)
        before = len(world.health)
        await world.settle(5.0)
        regular = world.health[before:]
        world.doubtful_access_record()
        await world.settle(0.1)

        assert len(regular) in (5, 6)
        assert set(regular) == {("healthy", ())}
        assert world.health[-1] == ("degraded", ("acl_unavailable",))


@pytest.mark.req("R196")
async def test_a_pump_that_stands_still_while_something_waits_is_not_alive() -> None:
    """Liveness is progress: work that waits over a whole interval without a step is reported as a failure."""
    async with GatewayWorld.running(settings_of(telemetry__heartbeat_interval_ms=1000)) as world:
        await world.settle(0.1)
        world.gateway._scheduled = asyncio.get_running_loop().call_soon(int)  # as if the loop had lost the step
        world.gateway._wake = lambda: None  # type: ignore[method-assign]
        world.commit("order:1")
        await world.settle(2.5)

        assert world.health[-1] == ("failed", ("engine_failed",))


@pytest.mark.req("R197")
async def test_each_change_of_readiness_is_on_record() -> None:
    """Not ready, and ready again: two records, each with its reasons; no record while nothing changes."""
    async with GatewayWorld.running() as world:
        await world.settle(1.0)
        doubtful = world.doubtful_access_record()
        await world.settle(1.0)
        world.dismiss(doubtful)
        await world.settle(1.0)
        found = await world.audited("readiness_changed")

    assert [(each["is_ready"], each["reasons"]) for each in found] == [(False, ["acl_unavailable"]), (True, [])]


@pytest.mark.req("R199")
async def test_saturation_that_lasts_is_told_as_degraded() -> None:
    """A queue above its mark for less than the threshold is no news; for longer it is, once, and so is its end."""
    settings = settings_of(
        queue__total_ceiling=100,
        queue__per_connection=100,
        telemetry__heartbeat_interval_ms=1000,
        telemetry__degraded_threshold_ms=3000,
        delivery__max_msgs_per_sec=1,
        delivery__heartbeat_interval_ms=60_000,
    )
    async with GatewayWorld.running(settings) as world:
        told: list[str] = []
        listener = world.gateway.telemetry.announcer.listener
        assert listener is not None

        def note(announcement: Announcement) -> None:
            told.append(announcement.event_type)
            listener(announcement)

        world.gateway.telemetry.announcer.listener = note
        reader = await world.subscribe("slow")
        for number in range(78):
            world.commit(f"order:{number}")
        await world.settle(2.5)
        early = [name for name in told if "pipeline" in name]
        await world.settle(1.5)
        late = [name for name in told if "pipeline" in name]
        while world.gateway.ceiling.is_paused:
            reader.ack()
            await world.settle(1.0)
        await world.settle(1.0)

    assert early == []
    assert late == ["system.event_pipeline_degraded"]
    assert [name for name in told if "pipeline" in name] == [
        "system.event_pipeline_degraded",
        "system.event_pipeline_recovered",
    ]


@pytest.mark.req("R200")
async def test_missing_access_control_or_settings_is_told_as_degraded_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a wait for the threshold, and with the reason."""
    async with GatewayWorld.running() as world:
        told: list[Announcement] = []
        world.gateway.telemetry.announcer.listener = told.append
        doubtful = world.doubtful_access_record()
        await world.settle(0.1)
        world.dismiss(doubtful)
        await world.settle(0.1)

        def fail(window: int) -> None:
            raise MemoryError

        monkeypatch.setattr(world.gateway.index, "resize", fail)
        with pytest.raises(MemoryError):
            world.gateway.commit(settings_of(delivery__resume_window=5))
        await world.settle(0.1)
        pipeline = [(each.event_type, each.payload["reasons"]) for each in told if "pipeline" in each.event_type]

    assert pipeline == [
        ("system.event_pipeline_degraded", ("acl_unavailable",)),
        ("system.event_pipeline_recovered", ()),
        ("system.event_pipeline_degraded", ("config_invalid",)),
    ]


@pytest.mark.req("R218")
async def test_settings_that_cannot_be_applied_turn_readiness_false(monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit that fails leaves the gateway not ready, refusing newcomers, until one succeeds; a veto leaves it as it was."""
    async with GatewayWorld.running() as world:
        gateway, applied = world.gateway, world.gateway.registry.apply

        def fail(settings: object) -> None:
            raise MemoryError

        monkeypatch.setattr(gateway.registry, "apply", fail)
        with pytest.raises(MemoryError):
            gateway.commit(settings_of(queue__per_connection=5))
        with pytest.raises(GatewayNotReady, match="config_invalid"):
            world.admit()
        monkeypatch.setattr(gateway.registry, "apply", applied)
        gateway.commit(settings_of(queue__per_connection=5))
        world.admit()

        assert [each["type"] for each in await world.audited() if "config" in each["type"]] == [
            "operational.event.config_rejected",
            "operational.event.config_applied",
        ]


@pytest.mark.req("R201", "R207")
async def test_samples_and_records_hold_types_and_apps_and_no_object_or_payload() -> None:
    """With ``emit_samples`` each interval's types and apps are on record; neither there nor in any count is an object's id."""
    settings = msgspec.convert(
        {"telemetry": {"emit_samples": True, "heartbeat_interval_ms": 1000}}, type(GatewayWorld().gateway.settings)
    )
    async with GatewayWorld.running(settings) as world:
        reader = await world.subscribe("alice")
        for _ in range(3):
            world.commit("patient:4711-the-secret-one")
        await world.settle(1.5)
        reader.leave()
        records = await world.audited()
        counted = msgspec.json.encode(metrics_of(world))

    samples = [each["samples"] for each in records if each["type"] == "operational.event.sample"]
    assert {"event_type": "graph.object_mutated", "app_id": "default", "count": 3} in samples[0]
    assert b"4711" not in msgspec.json.encode(records) + counted


async def test_without_emit_samples_there_are_none() -> None:
    """Nothing about what is delivered is put on record unless it is asked for."""
    async with GatewayWorld.running() as world:
        await world.subscribe("alice")
        world.commit("order:1")
        await world.settle(11.0)

        assert await world.audited("sample") == []


@pytest.mark.req("R202")
async def test_what_telemetry_keeps_does_not_grow_with_traffic() -> None:
    """A thousand deliveries and latencies later its histogram has as many buckets, and samples as many keys as types and apps at most."""
    settings = msgspec.convert({"telemetry": {"emit_samples": True}}, type(GatewayWorld().gateway.settings))
    async with GatewayWorld.running(settings) as world:
        telemetry = world.gateway.telemetry
        for number in range(1000):
            telemetry.produced("graph", f"graph.type_{number}", "default")
            telemetry.acked(number / 100)

        assert telemetry.ack_latency.count == 1000
        assert len(telemetry.ack_latency.counts) == len(LATENCY_BUCKETS_S) + 1
        assert len(telemetry._samples) == 256


def test_a_histogram_says_between_which_bounds_a_share_lies() -> None:
    """A bound belongs to its own bucket; beyond the last bound there is no bound to name."""
    times = LatencyHistogram()
    for seconds in (0.001, 0.0011, 0.2, 11.0):
        times.observe(seconds)

    assert (times.count, times.quantile(0.25), times.quantile(0.5), times.quantile(0.75)) == (4, 0.001, 0.005, 0.25)
    assert times.quantile(0.99) is None
    assert LatencyHistogram().quantile(0.5) is None


@pytest.mark.req("R204", "R195")
async def test_failures_are_counted_by_their_reason() -> None:
    """Each of the named reasons has its own count, at the engine that knows it."""
    settings = settings_of(queue__per_connection=1, delivery__heartbeat_interval_ms=5000)
    async with GatewayWorld.running(settings) as world:

        async def refused(**frame: Any) -> None:
            with pytest.raises(SubscriptionClosed):
                await world.subscribe("x", **frame)

        await refused(subscription_type="security")
        await refused(subscription_type="graph", object_ids=("not an object",))
        await refused(resume="forged")
        full = await world.subscribe("full")
        world.commit("order:1")
        world.commit("order:2")
        await world.settle()
        silent = await world.subscribe("silent")
        silent.answers_pings = False
        await world.settle(11.0)
        world.gateway.telemetry.rejected(None, "auth_failed", cause="no token")
        counted = metrics_of(world)
        found = counted.failures

    assert counted.dropped["graph"] == {"buffer_overflow": 1}
    assert full.reason is CloseReason.BUFFER_OVERFLOW
    assert found == {
        "acl_denied": 1,
        "filter_invalid": 1,
        "resume_invalid": 1,
        "buffer_overflow": 1,
        "heartbeat_timeout": 1,
        "auth_failed": 1,
    }


@pytest.mark.req("R221")
async def test_an_acknowledgement_that_takes_unusually_long_is_on_record() -> None:
    """One that came after more than ten seconds is, with how long it took; one that came sooner is not."""
    async with GatewayWorld.running() as world:
        reader = await world.subscribe("alice")
        world.commit("order:1")
        await world.settle(9.0)
        reader.ack()
        world.commit("order:2")
        await world.settle(11.0)
        reader.ack()
        found = await world.audited("delivery_latency")

    assert [(each["stage"], each["ms"]) for each in found] == [("ack", 11_000)]


async def test_strangers_do_not_fill_the_disk() -> None:
    """Of a thousand refusals without a token within a second ten are put on record one by one, and the others as one number."""
    async with GatewayWorld.running() as world:
        for _ in range(1000):
            world.gateway.telemetry.rejected(None, "auth_failed", cause="no token")
        await world.settle(1.5)
        found = await world.audited("subscription_rejected")

    assert len(found) == 11
    assert found[-1]["count"] == 990
    assert world.gateway.telemetry.failures["auth_failed"] == 1000


async def test_a_publisher_whose_records_cannot_be_told_takes_nobodys_place_on_record() -> None:
    """Of ten thousand of them a hundred are put on record one by one and the others as a number; somebody else's subscription still is as well."""
    async with GatewayWorld.running() as world:
        for _ in range(10_000):
            with pytest.raises(ScopeViolation):
                world.commit(app="nobody")
        await world.subscribe("alice")
        await world.settle(1.5)
        rejected = await world.audited("descriptor_rejected")
        (opened,) = await world.audited("subscription_opened")

    assert (len(rejected), rejected[-1]["count"]) == (101, 9_900)
    assert opened["context"]["requester_identity_id"] == "alice"
    assert world.gateway.telemetry.rejected_descriptors["graph_manager", "scope_violation"] == 10_000


async def test_whoever_is_denied_and_comes_back_all_the_time_does_not_fill_the_disk_either() -> None:
    """An identity that the guard denies is refused each time, and recorded ten times a second at most; its denial is not prolonged."""
    async with GatewayWorld.running() as world:
        context = world.admit("loud").admission.context
        for _ in range(10):
            world.gateway.telemetry.rejected(context, "filter_invalid")
        for _ in range(100):
            with pytest.raises(Exception, match="denied"):
                world.admit("loud")
        denial = world.guard.directives()[0].directive

        assert (denial.target, denial.ttl_ms) == ("identity:loud", 30_000)
        assert len(world.guard.directives()) == 1
        assert len(await world.audited("subscription_rejected")) <= 21


# What managers announce


class Channel:
    """An intake channel that notes what comes, and may be full."""

    def __init__(self) -> None:
        self.taken: list[EventDescriptor] = []
        self.is_full = False

    def submit(self, descriptor: EventDescriptor, proof: int) -> None:
        if self.is_full:
            raise QueueFull("x", "y")
        assert proof == descriptor.sequence_anchor_hint
        self.taken.append(descriptor)


def voice(clock: VirtualClock) -> tuple[ManagerEvents, Channel]:
    channel = Channel()
    return ManagerEvents(channel, clock, node_id="n1", new_trace_id=lambda: "t"), channel


def said(number: int, name: str = "security.subscription_dropped") -> Announcement:
    return Announcement(source_manager="event_manager", event_type=name, payload={"connection_id": str(number)})


@pytest.mark.bound("gateway.constants.OWN_EVENTS_PER_S_MAX")
@crossed
async def test_a_flood_of_one_name_is_merged_into_one_event_with_its_count(beyond: Beyond) -> None:
    """Ten of a name go in within a second; the others are one event at its end, and the next second begins anew. Other names have their own ten."""
    clock = VirtualClock()
    events, channel = voice(clock)

    count = beyond(OWN_EVENTS_PER_S_MAX)
    for number in range(count):
        events.tell(said(number))
    events.tell(said(0, "security.subscription_closed"))
    events.flush()
    within = len(channel.taken)
    await clock.advance(1.0)
    events.flush()
    events.tell(said(99))

    assert within == OWN_EVENTS_PER_S_MAX + 1
    merged = channel.taken[within]
    assert (merged.payload_summary["count"], merged.payload_summary["connection_id"]) == (
        count - OWN_EVENTS_PER_S_MAX,
        str(count - 1),
    )
    assert channel.taken[-1].payload_summary == {"connection_id": "99", "count": 1}
    assert [each.sequence_anchor_hint for each in channel.taken] == list(range(1, len(channel.taken) + 1))


async def test_what_the_gateway_does_not_take_stops_nobody() -> None:
    """A manager whose event is refused goes on: what the event tells of has happened all the same."""
    events, channel = voice(VirtualClock())
    channel.is_full = True

    events.tell(said(1))

    assert (channel.taken, events.refused_count) == ([], 1)


async def test_a_system_event_says_which_node_it_is_of() -> None:
    """The node is in the summary, since no scope names it; other classes do not have it."""
    events, channel = voice(VirtualClock())

    events.tell(said(1, "system.event_queue_overflow"))
    events.tell(said(1))

    assert [each.payload_summary.get("node_id") for each in channel.taken] == ["n1", None]


# Records


async def test_records_are_written_in_order_and_once_although_the_log_fails_in_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While the log refuses, what must be on record is refused; what was taken before is written when the log takes it again."""
    world = GatewayWorld()
    append, append_many, is_failing = world.log.append, world.log.append_many, True

    async def sometimes(event: Any, **options: Any) -> Any:
        if is_failing and event.payload["n"] % 2:
            raise StorageFull("x")
        return await append(event, **options)

    async def sometimes_many(events: Any, **options: Any) -> Any:
        if is_failing:
            raise StorageFull("x")
        return await append_many(events, **options)

    monkeypatch.setattr(world.log, "append", sometimes)
    monkeypatch.setattr(world.log, "append_many", sometimes_many)
    audit = AuditLog(world.log, world.clock, queue_count_max=10)
    for number in range(8):
        audit.submit(AuditRecord(category="event.x", data={"n": number}))
    await world.settle(0.5)
    with pytest.raises(AuditUnavailable):
        audit.submit(AuditRecord(category="event.x"), is_required=True)
    for number in range(8, 10):
        audit.note(AuditRecord(category="event.x", data={"n": number}))
    audit.note(AuditRecord(category="event.x", data={"n": 10}))
    assert audit.refused_count == 2
    is_failing = False
    await world.settle(1.0)
    assert await world.clock.run_until(audit.flush(1.0))

    assert [each["n"] for each in await world.audited()] == list(range(10))
    assert audit.problem is None
