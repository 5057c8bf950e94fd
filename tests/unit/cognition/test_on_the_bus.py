"""The cognitive layer on the bus itself: handlers subscribe, publish is the bus's own, consumers hear of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from tests.unit.cognition.support import START, make_event
from tests.unit.cognition.test_gate import HOPELESS
from tidings.bus import EventBus
from tidings.bus.events import Ack
from tidings.cognition import (
    AttentionGate,
    CognitiveEventType,
    CognitiveTrace,
    MemoryStore,
    WriteHandler,
    cognitive_event,
)
from tidings.cognition.neuromodulation import LEARNING_TOPIC, learning_tick, neuromod_adjustment
from tidings.cognition.payloads import AffectAnnotated, LearningTick, NeuromodAdjustment, TemporalIngest, payload_of
from tidings.cognition.taxonomy import trace_of
from tidings.cognition.write.requests import ConsolidationSettings, WriteSettings
from tidings.core.clock import SYSTEM_CLOCK
from tidings.core.events import Event, EventMeta, EventType


class Listener:
    """A durable group that keeps what it gets."""

    def __init__(self) -> None:
        self._got: asyncio.Queue[Event] = asyncio.Queue()

    async def __call__(self, event: Event) -> Ack:
        self._got.put_nowait(event)
        return Ack()

    async def next(self) -> Event:
        return await asyncio.wait_for(self._got.get(), 10)


@pytest.fixture
async def bus(tmp_path: Path) -> AsyncIterator[EventBus]:
    made = EventBus(workspace=tmp_path)
    yield made
    await made.close()


@pytest.mark.req("F114", "F121")
async def test_a_write_event_reaches_the_temporal_indexer(bus: EventBus, tmp_path: Path) -> None:
    """Published as a write, handled by a durable group, heard on topic temporal with ts, tz and tags."""
    store, indexer = MemoryStore(tmp_path / "memory.db"), Listener()
    await bus.subscribe(topic="bus.write.ingest", group="p02", handler=WriteHandler(store, bus.publish, SYSTEM_CLOCK))
    await bus.subscribe(topic="temporal", group="indexer", handler=indexer)
    await bus.publish(make_event({"text": "We saw the sea", "tags": ["sea"], "tz": "Europe/Berlin"}))

    heard = msgspec.convert((await indexer.next()).payload, TemporalIngest)
    await bus.close()  # the handler is still at work on its outbox
    store.close()

    assert (heard.ts, heard.tz, heard.tags) == (START, "Europe/Berlin", ("sea",))


@pytest.mark.req("F115", "F116", "F117")
async def test_writes_reach_hippocampus_episodes_and_consolidation(bus: EventBus, tmp_path: Path) -> None:
    """Three writes, handled by a durable group: each is encoded on topic hippo, they make an episode, and call for consolidation."""
    settings = WriteSettings(consolidation=ConsolidationSettings(writes=3, duplicates=9, age_s=3600))
    store, hippocampus, consolidator = MemoryStore(tmp_path / "memory.db", settings), Listener(), Listener()
    await bus.subscribe(topic="bus.write.ingest", group="p02", handler=WriteHandler(store, bus.publish, SYSTEM_CLOCK))
    await bus.subscribe(topic="hippo", group="ca3", handler=hippocampus)
    await bus.subscribe(topic="consolidation", group="p03", handler=consolidator)
    texts = ["apple pie with cinnamon", "a quantum of patience", "zebras in the snow"]
    for text in texts:
        await bus.publish(make_event({"text": text}, event_id=text.split()[0]))

    heard = [await hippocampus.next() for _ in range(6)]
    tick = await consolidator.next()
    await bus.close()
    episodes = store.episodes("personal:alice")
    store.close()

    encodes = [event for event in heard if event.meta.type is EventType.HIPPO_ENCODE]
    assert sorted(event.payload["content"]["text"] for event in encodes) == sorted(texts)
    assert [event.meta.type.name for event in heard if event not in encodes] == ["HIPPO_ENCODED"] * 3
    assert (tick.payload["space_id"], list(tick.payload["reason"])) == ("personal:alice", ["write_count"])
    assert [episode.memories for episode in episodes] == [3]


@pytest.mark.req("F120")
async def test_affect_reaches_the_arbiter(bus: EventBus) -> None:
    """The annotation comes out on topic affect as it went in."""
    arbiter = Listener()
    await bus.subscribe(topic="affect", group="arbiter", handler=arbiter)
    felt = AffectAnnotated(event_id="ev-9", valence=0.12, arousal=0.73, tags=("urgent",), confidence=0.67)
    meta = EventMeta(topic="affect", type=EventType.AFFECT_ANNOTATED, space_id="personal:alice")
    await bus.publish(Event(meta, payload_of(felt)))

    assert msgspec.convert((await arbiter.next()).payload, AffectAnnotated) == felt


@pytest.mark.req("F109", "F111")
async def test_an_admission_is_heard_by_the_workspace(bus: EventBus) -> None:
    """The gate's decision is an event like any other."""
    workspace = Listener()
    await bus.subscribe(topic="bus.attention_gate.admitted", group="workspace", handler=workspace)
    event = make_event({"text": "urgent meeting now"})
    await AttentionGate(SYSTEM_CLOCK, publish=bus.publish).handle(event)

    heard = await workspace.next()
    assert heard.meta.type == "cognitive.attention.gate.boost"
    assert heard.payload["content_id"] == event.meta.event_id


@pytest.mark.req("F112")
async def test_what_does_not_matter_is_dropped_and_told(bus: EventBus) -> None:
    """A durable group that asks the gate passes on what matters; the rest goes nowhere but to those who listen for drops."""
    gate = AttentionGate(publish=bus.publish)
    passed, dropped = Listener(), Listener()

    async def attend(event: Event) -> Ack:
        if gate.drop(event):
            await gate.flush()
            return Ack()
        return await passed(event)

    await bus.subscribe(topic="bus.write.ingest", group="attention", handler=attend)
    await bus.subscribe(topic="bus.attention_gate.dropped", group="reviewer", handler=dropped)
    hopeless = make_event(HOPELESS, event_id="hopeless")
    await bus.publish(hopeless)
    await bus.publish(make_event({"text": "urgent meeting now"}, event_id="urgent"))

    assert (await passed.next()).meta.event_id == "urgent"
    told = await dropped.next()
    assert (told.meta.type, told.payload["content_id"]) == ("cognitive.attention.gate.drop", "hopeless")
    assert await bus.dead_letters("bus.write.ingest") == []


@pytest.mark.req("F113")
@pytest.mark.parametrize(
    "name",
    [
        *("ATTENTION_REQUEST", "WORKING_MEMORY_UPDATE", "GLOBAL_WORKSPACE_BROADCAST", "COGNITIVE_LOAD_ALERT"),
        "FOCUS_SHIFT_REQUEST",
    ],
)
async def test_a_cognitive_event_reaches_the_workspace_with_type_and_trace(bus: EventBus, name: str) -> None:
    """Each of the five types is published to topic workspace and handled there, by its name and with its trace."""
    workspace = Listener()
    await bus.subscribe(topic="workspace", group="arbiter", handler=workspace)
    trace = CognitiveTrace(
        trace_id="t", space_id="s", started_at=START, stage_started_at=START, latency_budget_ms=100, actor_id="alice"
    )
    await bus.publish(cognitive_event(CognitiveEventType(name), trace, {"n": 1}, event_id="e1", ts=START))

    heard = await workspace.next()
    assert (heard.meta.type.name, heard.payload) == (name, {"n": 1})
    assert trace_of(heard) == trace


@pytest.mark.req("F118")
async def test_a_mood_on_the_bus_sets_the_learners_rate(bus: EventBus) -> None:
    """An annotation makes a neuromodulation signal, heard by the learner, which tells of its batch in turn."""
    told = Listener()

    async def neuromodulator(event: Event) -> Ack:
        felt = msgspec.convert(event.payload, AffectAnnotated)
        moods = {"arousal": felt.arousal, "valence": felt.valence, "surprise": 0.0}
        await bus.publish(
            neuromod_adjustment(
                space_id=event.meta.space_id, cause_id=event.meta.event_id, eta=0.01, now=event.meta.ts, **moods
            )
        )
        return Ack()

    async def learner(event: Event) -> Ack:
        if event.meta.type == "NEUROMOD_ADJUSTMENT":
            rate = event.payload["eta_adjusted"]
            await bus.publish(
                learning_tick(
                    batch_id="b", space_id="s", count=1, started_at=START, completed_at=START, metrics={"eta": rate}
                )
            )
        return await told(event)

    await bus.subscribe(topic="affect", group="p06", handler=neuromodulator)
    await bus.subscribe(topic=LEARNING_TOPIC, group="learner", handler=learner)
    felt = AffectAnnotated(event_id="ev-9", valence=0.2, arousal=0.65, tags=(), confidence=0.9)
    await bus.publish(Event(EventMeta("affect", EventType.AFFECT_ANNOTATED, "s", ts=START), payload_of(felt)))

    signal, tick = await told.next(), await told.next()
    assert msgspec.convert(signal.payload, NeuromodAdjustment).eta_adjusted == pytest.approx(0.0109)
    assert tick.meta.type == "LEARNING_TICK"
    assert msgspec.convert(tick.payload, LearningTick).metrics["eta"] == pytest.approx(0.0109)
