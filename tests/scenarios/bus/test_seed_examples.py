"""What the examples of the bus's document do, looked at more closely; ``test_document_programs`` runs them as written."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.scenarios.bus.support import soon
from tidings.bus import EventBus
from tidings.filters import CompoundFilter, SimpleFilter
from tidings.middleware import MetricsMiddleware, TracingMiddleware
from tidings.subscription import SubscriptionRegistry
from tidings.types import Ack, Event, EventMeta, EventType, Nack


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The examples name no workspace: theirs is ``./workspace``."""
    monkeypatch.chdir(tmp_path)


async def handled(bus: EventBus, topic: str, group: str) -> None:
    """Wait until a group is done with its topic."""
    await soon(lambda: bus.lag(topic, group) == 0)


@pytest.mark.req("F16", "F17")
async def test_basic_event_publishing(tmp_path: Path) -> None:
    """The older shape of EventMeta, with the topic as an EventType, and publish with two arguments."""
    bus = EventBus()
    await bus.start()

    # Create event
    meta = EventMeta(
        topic=EventType.WORKSPACE_BROADCAST,
        space_id="family-001",
        actor={"user_id": "alice"},
        device={"device_id": "phone-1"},
    )

    event = Event(meta=meta, payload={"message": "Hello world"})

    # Publish
    await bus.publish(event, meta.topic.value)  # type: ignore[attr-defined]

    assert meta.type is EventType.WORKSPACE_BROADCAST
    await bus.close()
    (line,) = (tmp_path / "workspace/.bus/wal/WORKSPACE_BROADCAST.00000001.jsonl").read_text().splitlines()
    stored = json.loads(line)
    assert (stored["offset"], stored["payload"]) == (0, {"message": "Hello world"})
    assert (stored["meta"]["actor"], stored["meta"]["device"]) == ({"user_id": "alice"}, {"device_id": "phone-1"})


@pytest.mark.req("F49", "F50")
async def test_advanced_subscription_with_filters() -> None:
    """A registry gives an id and the subscription; a bus that is given the registry runs it, filters and all."""
    seen: list[Any] = []
    registry = SubscriptionRegistry()

    # Create filters
    priority_filter = SimpleFilter("meta.priority", "high", "exact")
    user_filter = SimpleFilter("meta.actor.user_id", "alice", "exact")
    compound_filter = CompoundFilter("AND", [priority_filter, user_filter])

    # Register subscription
    async def handle_high_priority_alice_events(event: Event) -> Ack:
        seen.append(event.payload)
        return Ack()

    sub_id, subscription = registry.register_subscription(
        topic="WORKSPACE_BROADCAST", handler=handle_high_priority_alice_events, advanced_filters=[compound_filter]
    )

    assert registry.get(sub_id) is subscription
    bus = EventBus(registry=registry)
    for user, priority in [("alice", "high"), ("alice", "low"), ("bob", "high")]:
        meta = EventMeta(
            topic=EventType.WORKSPACE_BROADCAST, space_id="family-001", actor={"user_id": user}, priority=priority
        )
        await bus.publish(Event(meta=meta, payload={"from": user, "priority": priority}))
    await handled(bus, "WORKSPACE_BROADCAST", subscription.group)
    await bus.close()
    assert seen == [{"from": "alice", "priority": "high"}]


@pytest.mark.req("F41", "F42", "F43", "F44", "F51", "F75")
async def test_a_bus_with_middleware_and_a_durable_subscriber() -> None:
    """Sections 5.1 to 5.3: middlewares by name, a subscriber with every option, and an event."""
    got: list[Event] = []
    bus = EventBus(middlewares=[TracingMiddleware(), MetricsMiddleware()])

    async def on_action_executed(ev: Event) -> Ack:
        # idempotent by event_id or idem_key
        got.append(ev)
        return Ack()

    await bus.subscribe(
        topic="actions", group="learner",
        handler=on_action_executed,
        max_inflight=128, workers=2,
        backoff_base=0.5, backoff_mult=2.0, backoff_max=30.0, max_retries=5)  # fmt: skip

    ev = Event(
        meta=EventMeta(topic="actions", type=EventType.ACTION_EXECUTED,
                       space_id="shared:household", trace_id="trace-123",
                       idem_key="act:a1|ok"),
        payload={"action_id": "a1", "status": "ok"})  # fmt: skip
    await bus.publish(ev)

    await handled(bus, "actions", "learner")
    await bus.close()
    assert [event.meta for event in got] == [ev.meta]
    assert got[0].payload == {"action_id": "a1", "status": "ok"}


@pytest.mark.req("F23")
async def test_publish_from_anywhere(tmp_path: Path) -> None:
    """The playbook's publish needs no start, and finds its files where the layout says."""
    bus = EventBus()

    await bus.publish(Event(meta=EventMeta(topic="workspace",
        type=EventType.WORKSPACE_BROADCAST, space_id="shared:household"),
        payload={"summary": "Top 5 salient items"}))  # fmt: skip

    await bus.close()
    assert (tmp_path / "workspace/.bus/wal/workspace.00000001.jsonl").exists()


@pytest.mark.req("F63", "F64")
async def test_a_durable_consumer_with_idempotency(tmp_path: Path) -> None:
    """The playbook's consumer, subscribed by position as the cheat sheet has it, sees each key once."""
    processed: list[Any] = []
    bus = EventBus()
    SEEN = set()  # in practice, use a small LRU keyed by meta.event_id or idem_key

    async def on_ws(ev: Event) -> Ack:
        key = ev.meta.idem_key or ev.meta.event_id
        if key in SEEN:
            return Ack()
        SEEN.add(key)
        processed.append(ev.payload["n"])
        return Ack()

    await bus.subscribe("workspace", "arbiter", on_ws, workers=1, max_inflight=10)
    for n in range(3):
        meta = EventMeta(topic="workspace", type=EventType.WORKSPACE_BROADCAST, space_id="s", idem_key=f"k{n}")
        event = Event(meta=meta, payload={"n": n})
        await bus.publish(event)
        await bus.publish(event)  # the log knows it already

    await handled(bus, "workspace", "arbiter")
    await bus.close()
    assert processed == [0, 1, 2]
    offsets = json.loads((tmp_path / "workspace/.bus/offsets/workspace__arbiter.json").read_text())
    assert offsets["committed"] == 2
    assert offsets["segment"] == 1


def test_end_to_end(tmp_path: Path) -> None:
    """Appendix B: middlewares by position, no start, a short wait, a close."""
    got: list[Any] = []

    async def main() -> None:
        bus = EventBus([TracingMiddleware(), MetricsMiddleware()])

        async def learner(ev: Event) -> Ack:
            # dedupe with idem_key
            got.append(ev.payload)
            return Ack()

        await bus.subscribe(topic="actions", group="learner", handler=learner,
                            max_inflight=100, workers=2,
                            backoff_base=0.5, backoff_mult=2.0, backoff_max=30.0, max_retries=5)  # fmt: skip

        # simulate execution event
        ev = Event(meta=EventMeta(topic="actions", type=EventType.ACTION_EXECUTED,
                                  space_id="shared:household", idem_key="act:a1|ok"),
                   payload={"action_id": "a1", "status": "ok"})  # fmt: skip
        await bus.publish(ev)

        await handled(bus, "actions", "learner")  # let worker handle
        await bus.close()

    asyncio.run(main())

    assert got == [{"action_id": "a1", "status": "ok"}]
    assert json.loads((tmp_path / "workspace/.bus/offsets/actions__learner.json").read_text())["committed"] == 0


@pytest.mark.req("F9")
async def test_ack_and_nack_need_no_arguments() -> None:
    """The marker classes of Appendix A: ``Ack()`` is done, ``Nack()`` is tried again."""
    answers: list[Ack | Nack] = [Nack(), Ack()]
    attempts: list[int] = []
    bus = EventBus()

    async def handler(ev: Any) -> Ack | Nack:
        attempts.append(ev.attempt)
        return answers.pop(0)

    await bus.subscribe("actions", "learner", handler, backoff_base=0.0)
    await bus.publish(Event(EventMeta("actions", EventType.ACTION_EXECUTED, "s"), {}))
    await handled(bus, "actions", "learner")
    await bus.close()

    assert attempts == [1, 2]
