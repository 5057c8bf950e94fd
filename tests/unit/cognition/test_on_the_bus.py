"""The cognitive layer on the bus itself: handlers subscribe, publish is the bus's own, consumers hear of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from tests.unit.cognition.support import START, make_event
from tidings.bus import EventBus
from tidings.bus.events import Ack
from tidings.cognition import AttentionGate, MemoryStore, WriteHandler
from tidings.cognition.payloads import AffectAnnotated, TemporalIngest, payload_of
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
