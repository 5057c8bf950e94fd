"""The six engines, joined: an event passes all of them, in their order, through bounded queues, and each says what went wrong."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.gateway_world import GatewayWorld, Reader, settings_of
from tidings.access.apps import AppEventType
from tidings.access.errors import AccessUnavailable
from tidings.access.visibility import ReadScope
from tidings.gateway.binding import AudienceBinder
from tidings.gateway.delivery import Deliverer
from tidings.gateway.errors import DescriptorRefused, QueueFull
from tidings.gateway.gateway import Gateway
from tidings.gateway.intake import SourceIntake, TaggedDescriptor
from tidings.gateway.names import EventClass
from tidings.gateway.normalization import Normalizer
from tidings.gateway.queues import BoundedQueue, ClassQueues
from tidings.gateway.refusals import SubscriptionClosed
from tidings.gateway.registry import SubscriberRegistry
from tidings.gateway.telemetry import Telemetry
from tidings.wire.gateway import CloseReason

ENGINES = {
    "intake": SourceIntake,
    "_normalizer": Normalizer,
    "_binder": AudienceBinder,
    "registry": SubscriberRegistry,
    "_deliverer": Deliverer,
    "telemetry": Telemetry,
}
PIPELINE = ("intake", "_normalizer", "_binder", "_deliverer")


def waiting(gateway: Gateway) -> tuple[int, int, int]:
    """How many events wait behind intake, behind normalization and behind binding."""
    return len(gateway._taken), len(gateway._normalized), len(gateway._bound)


@pytest.mark.req("R59", "R147")
async def test_an_event_passes_every_engine_and_none_out_of_turn() -> None:
    """A later engine finds nothing until the one before it has run; only behind the last is there a frame; a step runs them in this order."""
    async with GatewayWorld.running() as world:
        gateway, reader = world.gateway, await world.subscribe()
        await world.settle()
        now_s = world.clock.monotonic()
        run: dict[str, Callable[[], object]] = {
            "normalize": lambda: gateway._normalizer.run(10),
            "bind": lambda: gateway._binder.run(10),
            "deliver": lambda: gateway._deliverer.run(10, now_s),
        }
        world.commit()
        seen = [(*waiting(gateway), len(reader.frames))]
        for engine in ("deliver", "bind", "normalize", "deliver", "bind", "normalize", "deliver"):
            run[engine]()
            seen.append((*waiting(gateway), len(reader.frames)))

        taken, normalized, bound, sent = (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)
        assert seen == [taken, taken, taken, normalized, normalized, bound, bound, sent]
        assert {name: type(getattr(gateway, name)) for name in ENGINES} == ENGINES
        assert len({kind.__module__ for kind in ENGINES.values()}) == 6


@pytest.mark.req("R59")
async def test_a_step_runs_the_engines_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Normalization, binding, delivery: each once, and what came in goes out with it."""
    async with GatewayWorld.running() as world:
        gateway, reader = world.gateway, await world.subscribe()
        order: list[str] = []
        for name in PIPELINE[1:]:
            engine = getattr(gateway, name)

            def spied(*args: Any, name: str = name, run: Callable[..., int] = engine.run) -> int:
                order.append(name)
                return run(*args)

            monkeypatch.setattr(engine, "run", spied)
        world.commit()
        gateway.step()

        assert order == list(PIPELINE[1:])
        assert reader.seqs == [1]


@pytest.mark.req("R149")
async def test_engines_know_nothing_of_each_other_but_the_bounded_queue_between_them() -> None:
    """The output of each is the input of the next; none holds another of them; a queue that is full takes no more."""
    async with GatewayWorld.running(settings_of(queue__total_ceiling=64, queue__per_connection=8)) as world:
        gateway = world.gateway
        engines = [getattr(gateway, name) for name in PIPELINE]
        for engine in engines:
            held = [
                each for each in vars(engine).values() if isinstance(each, tuple(ENGINES[name] for name in PIPELINE))
            ]
            assert held == []
        intake, normalizer, binder, deliverer = map(vars, engines)
        assert intake["_out"] is normalizer["_intake"]
        assert normalizer["_out"] is binder["_taken"]
        assert binder["_bound"] is deliverer["_bound"]
        one, many = BoundedQueue[int](64), ClassQueues[int](64)
        assert (type(intake["_out"]), intake["_out"].capacity) == (type(one), one.capacity)
        for queues in (normalizer["_out"], binder["_bound"]):
            assert type(queues) is type(many)
            for number in range(64):
                queues.put(EventClass.SYSTEM, number)
            with pytest.raises(QueueFull):
                queues.put(EventClass.SYSTEM, 64)
            queues.clear()
        for engine in (*engines, gateway.telemetry):
            assert gateway.registry not in [each for each in vars(engine).values() if engine is not gateway._deliverer]
        assert all(vars(each).get("_telemetry", gateway.telemetry) is gateway.telemetry for each in engines)


@pytest.mark.req("R148")
async def test_each_engine_has_its_own_way_to_say_that_it_failed() -> None:
    """Intake raises to the manager; normalization and binding put on record; the registry refuses; delivery closes; telemetry turns not ready."""
    async with GatewayWorld.running() as world:
        gateway, telemetry = world.gateway, world.gateway.telemetry
        reader = await world.subscribe()
        with pytest.raises(DescriptorRefused):
            world.commit("no object")
        assert telemetry.rejected_descriptors["graph_manager", "invalid_descriptor"] == 1

        await world.settle()
        seq = world.commit("order:1")
        tagged = gateway._taken.take()
        assert tagged is not None
        spanning = world.graph_descriptor(seq, "order:1", app="system", app_id="default")
        gateway._taken.put(TaggedDescriptor(tagged.source_manager, tagged.local_order, spanning))
        await world.settle()
        assert telemetry.rejected_descriptors["graph_manager", "scope_violation"] == 1

        world.commit("order:2", read_scope=ReadScope("orders", "main", tuple(f"p{n}" * 40 for n in range(60))))
        await world.settle()
        assert telemetry.dropped_by["graph", "binding_failed"] == 1

        with pytest.raises(SubscriptionClosed) as refused:
            await world.subscribe("other", subscription_type="nothing")
        assert refused.value.close_reason is CloseReason.FILTER_INVALID

        closing = world.doubtful_access_record()
        world.commit("order:8")
        gateway._normalizer.run(9)
        with pytest.raises(AccessUnavailable):
            gateway._binder.run(1)
        await world.settle(0.1)
        assert not telemetry.is_ready
        world.dismiss(closing)
        await world.settle(0.1)
        assert telemetry.is_ready

        reader.fails = True
        world.commit("order:3")
        await world.settle()
        assert reader.reason is CloseReason.INTERNAL_ERROR
        assert await world.audited("descriptor_rejected")
        assert await world.audited("audience_binding_failed")


@pytest.mark.req("R61")
async def test_nothing_is_delivered_that_was_not_checked_and_no_hint_widens_an_audience() -> None:
    """Descriptors that are wrong in any way reach nobody; one that claims that everybody may read it reaches those who may, and nobody else."""
    async with GatewayWorld.running() as world:
        reader = await world.subscribe("reader")
        stranger = await world.subscribe("stranger", claims={"topics": frozenset({"letters"})})
        hint = {"audience": "app", "allow_identities": ["stranger"], "allow_apps": ["default"]}
        wrong: list[dict[str, Any]] = [
            {"payload_summary": {"object_ids": ("order:1",), "body": "x"}},
            {"payload_summary": {}},
            {"scope_hint": {"app_id": "shop"}},
            {"scope_hint": {"tenant": "x"}},
            {"app_id": "shop"},
            {"domain_id": None},
            {"read_scope": ReadScope("letters", "main")},
            {"read_scope": None},
            {"sequence_anchor_hint": -1},
            {"event_class": "system"},
            {"event_type": "graph.unheard_of"},
            {"source_manager": "config_manager"},
            {"operation_context": None},
        ]
        for each in wrong:
            with pytest.raises(DescriptorRefused):
                world.commit("order:1", audience_hint=hint, **each)
        world.commit("order:9", audience_hint=hint)
        await world.settle(1.0)

        assert [each["payload_summary"]["object_ids"] for each in reader.envelopes] == [["order:9"]]
        assert stranger.frames == []
        assert b"allow_identities" not in reader.frames[0]
        assert len(await world.audited("descriptor_rejected")) == len(wrong)


@pytest.mark.req("R158", "R159", "R162", "R227")
async def test_every_refusal_of_a_descriptor_is_counted_told_and_on_record_with_its_context() -> None:
    """Administrators see it as an event, the audit log has source, type, app and trace; one across apps is a violation of security too."""
    async with GatewayWorld.running() as world:
        admin = await world.administrator(channels=("system.*", "security.*"))
        for changes in (
            {"payload_summary": {"object_ids": ("order:1",), "secret": "x"}},
            {"scope_hint": {"app_id": "shop"}},
        ):
            with pytest.raises(DescriptorRefused):
                world.commit("order:1", **changes)
        await world.settle(1.0)
        told = [each for each in admin.envelopes if each["source_manager"] == "event_manager"]
        rejected = await world.audited("descriptor_rejected")
        counts = dict(world.gateway.telemetry.rejected_descriptors)

        assert counts == {("graph_manager", "invalid_descriptor"): 1, ("graph_manager", "scope_violation"): 1}
        summaries = [
            each["payload_summary"] for each in told if each["event_type"] == "system.event_descriptor_rejected"
        ]
        assert [(each["source"], each["error"]) for each in summaries] == list(counts)
        violations = [each for each in told if each["event_type"] == "security.cross_app_violation"]
        assert [each["payload_summary"]["source"] for each in violations] == ["graph_manager"]
        assert [(each["source_manager"], each["event_type"], each["app_id"]) for each in rejected] == [
            ("graph_manager", "graph.object_mutated", "default")
        ] * 2
        assert [each["trace_id"] for each in rejected] == ["t1", "t2"]
        assert world.gateway.ceiling.held_of("graph_manager") == 0


@pytest.mark.req("R33", "R71")
async def test_anchor_turn_and_gating_follow_from_the_class() -> None:
    """Told in the reverse order they come graph, security, app, network, system; graph alone has a seq; each has its contract; who may subscribe differs by class."""
    paid = AppEventType(
        slug="default", event_type="app.default.paid", topic="orders", payload_fields=("n",), audience="app"
    )
    health: dict[str, Any] = {
        "component": "log",
        "state": "failed",
        "reasons": (),
        "previous_state": "healthy",
        "health_seq": 1,
    }
    abuse: dict[str, Any] = {"kind": "overflow", "offences": 3, "window_ms": 1}
    async with GatewayWorld.running() as world:
        world.change_app(paid)
        channels = ("graph.*", "security.*", "app.default.*", "network.*", "system.*")
        admin = await world.administrator(channels=channels)
        await world.settle(1.0)
        before = len(admin.frames)
        world.tell("health_manager", "system.health_state_changed", health)
        peer = {"connection_id": "1", "path": "/sync"}
        world.tell("network_manager", "network.peer_admitted", peer, scope_hint={"peer_identity_id": "bob"})
        world.tell("app.default", "app.default.paid", {"n": 1}, domain_id="orders")
        world.guard.announcer.tell("security.dos_abuse_detected", abuse)
        world.commit("order:1")
        await world.settle()

        found = [(each["event_type"].partition(".")[0], *each["sequence_anchor"]) for each in admin.envelopes[before:]]
        assert found == [
            ("graph", "global_seq"),
            ("security", "event_seq"),
            ("app", "event_seq"),
            ("network", "event_seq"),
            ("system", "event_seq"),
        ]
        assert len({each["audience_contract"] for each in admin.envelopes[before:]}) == 5
        assert all(re.fullmatch("[0-9a-f]{64}", each["audience_contract"]) for each in admin.envelopes)
        may: dict[str, Reader | None] = {}
        for channel in ("graph", "security", "app.default", "network", "system"):
            try:
                may[channel] = await world.subscribe("reader", subscription_type=channel)
            except SubscriptionClosed:
                may[channel] = None
        assert [channel for channel, reader in may.items() if reader] == ["graph", "app.default", "network"]
        for name in ("bob", "reader"):  # of peers a reader sees what is about itself
            world.tell("network_manager", "network.peer_admitted", peer, scope_hint={"peer_identity_id": name})
        await world.settle()
        assert may["network"] is not None
        assert [each["scope"] for each in may["network"].envelopes] == [{"peer_identity_id": "reader"}]


@pytest.mark.req("R52")
async def test_being_named_in_a_scope_grants_nothing() -> None:
    """An event for one identity alone is seen by that one if it may read the record, and otherwise by nobody; the contract opens nothing."""
    async with GatewayWorld.running() as world:
        alice = await world.subscribe("alice")
        bob = await world.subscribe("bob", claims={"topics": frozenset({"letters"})})
        for name in ("alice", "bob"):
            world.commit(f"order:{name}", by=name, scope_hint={"requester_identity_id": name})
        world.commit("order:all")
        await world.settle(1.0)

        assert [each["payload_summary"]["object_ids"] for each in alice.envelopes] == [["order:alice"], ["order:all"]]
        assert bob.frames == []
        contract = alice.envelopes[0]["audience_contract"]
        with pytest.raises(SubscriptionClosed) as refused:
            await world.subscribe("bob", claims={"topics": frozenset({"letters"})}, resume=contract)
        assert refused.value.close_reason is CloseReason.RESUME_INVALID
