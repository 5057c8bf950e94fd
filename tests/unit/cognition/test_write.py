"""A write becomes a memory, a receipt and events: all of them or none, and once."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from tests.unit.cognition.support import START, Bus, BusDown, make_event
from tidings.bus.events import Ack
from tidings.cognition.errors import InvalidRequest, MemoryStoreError
from tidings.cognition.payloads import ConsolidationTick, HippoEncode, MemoryReceiptCreated, TemporalIngest
from tidings.cognition.ports import zone_of
from tidings.cognition.taxonomy import trace_of
from tidings.cognition.write import (
    ConsolidationSettings,
    Ed25519Signer,
    HmacSigner,
    MemoryStore,
    MergeStrategy,
    StaticSpacePolicy,
    WriteHandler,
    WriteSettings,
    is_genuine,
)
from tidings.cognition.write.announcements import bucket_of
from tidings.core.events import SecurityBand
from tidings.testing import VirtualClock

WALK = "We walked along the shore until the lighthouse came into view, and then the rain began to fall on us all."
NEARLY_WALK = WALK.replace("on us all", "on us")
OTHER = "Quarterly figures were sent to the accountant on Monday."
HOUSEHOLD = StaticSpacePolicy(
    members={
        "shared:household": frozenset({"alice", "bob", "carol"}),
        "shared:couple": frozenset({"alice", "bob"}),
    },
    redacted={"shared:household": frozenset({"phone"})},
)


class World:
    """A handler with everything it needs, in one place."""

    def __init__(self, path: Path, **settings: Any) -> None:
        self.path = path
        self.bus = Bus()
        self.clock = VirtualClock()
        self.policy: Any = HOUSEHOLD
        self.signer = HmacSigner(b"k" * 32, "key-1")
        self.settings = WriteSettings(**settings)
        self.open()

    def open(self) -> None:
        self.store = MemoryStore(self.path, self.settings, self.signer)
        self.handler = WriteHandler(self.store, self.bus.publish, self.clock, self.policy)

    def reopen(self) -> None:
        self.store.close()
        self.open()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path / "memory.db")
    yield made
    made.store.close()


@pytest.mark.req("F114")
async def test_the_workflow_tells_its_stages_in_order(world: World) -> None:
    """Initiated, resolved, redacted, committed, then what was made of it; one trace id throughout."""
    answer = await world.handler(make_event({"text": WALK}, trace_id="trace-9"))

    assert isinstance(answer, Ack)
    assert world.bus.types() == [
        "cognitive.memory.write.initiated",
        "cognitive.memory.write.space_resolved",
        "cognitive.memory.write.redacted",
        "cognitive.memory.write.committed",
        "WRITE_ACCEPTED",
        "HIPPO_ENCODE",
        "HIPPO_ENCODED",
        "HIPPO_ENCODE",
        "MEMORY_RECEIPT_CREATED",
    ]
    assert {event.meta.trace_id for event in world.bus.events} == {"trace-9"}
    stages = [trace.stage for event in world.bus.on("cognitive.memory") if (trace := trace_of(event))]
    assert stages == ["initiated", "routing", "processing", "completion"]


@pytest.mark.req("F114")
async def test_memory_and_receipt_are_stored_and_agree(world: World) -> None:
    """The receipt is signed, bears the content's hash, and one changed field shows."""
    done = await world.handler.write(make_event({"text": WALK, "source": "diary", "confidence": 0.7}))
    memory = world.store.memory(done.receipt.memory_id)

    assert memory is not None
    assert memory.content == {"text": WALK}
    assert memory.content_hash == done.receipt.content_hash
    assert (done.receipt.provenance.source, done.receipt.provenance.confidence) == ("diary", 0.7)
    assert is_genuine(done.receipt, world.signer)
    assert not is_genuine(msgspec.structs.replace(done.receipt, actor="mallory"), world.signer)
    assert not is_genuine(done.receipt, HmacSigner(b"x" * 32, "key-1"))
    told = msgspec.convert(world.bus.of_type("MEMORY_RECEIPT_CREATED")[0].payload, MemoryReceiptCreated)
    assert (told.receipt_id, told.write_status) == (done.receipt.receipt_id, "committed")


async def test_receipts_may_be_signed_for_others(tmp_path: Path) -> None:
    """With a private key; another key's owner did not sign it."""
    keys = [Ed25519Signer(Ed25519PrivateKey.from_private_bytes(bytes([n]) * 32), "k") for n in (1, 2)]
    store = MemoryStore(tmp_path / "m.db", signer=keys[0])
    done = await WriteHandler(store, Bus().publish, VirtualClock()).write(make_event({"text": WALK}))
    store.close()

    assert is_genuine(done.receipt, keys[0])
    assert not is_genuine(done.receipt, keys[1])


@pytest.mark.req("F115", "F121")
async def test_encoding_reaches_hippocampus_and_temporal_index(world: World) -> None:
    """HIPPO_ENCODE has its shape, HIPPO_ENCODED the fingerprint and triples, temporal gets ts, tz and tags only."""
    occurred = "2025-09-06T19:30:00-05:00"
    payload = {"text": f"{WALK} with @bob", "tags": ["sea"], "tz": "America/Chicago", "occurred_at": occurred}
    done = await world.handler.write(make_event({**payload, "qos": {"latency_budget_ms": 49}}))
    encode, encoded = world.bus.on("hippo")
    (ingest,) = world.bus.on("temporal")

    shaped = msgspec.convert(encode.payload, HippoEncode)
    assert shaped.content == {"text": payload["text"]}
    assert shaped.occurred_at == datetime.fromisoformat(occurred)
    assert encoded.payload["bucket"] == "2025-09-06-evening"
    assert encoded.payload["lane"] == "FAST"
    assert encoded.payload["novelty"] == pytest.approx(0.9975274)
    facts = {(triple["predicate"], triple["object"]) for triple in encoded.payload["triples"]}
    assert facts == {("has_time", "2025-09-06-evening"), ("has_topic", "sea"), ("mentions", "bob")}
    indexed = msgspec.convert(ingest.payload, TemporalIngest)
    assert (indexed.ts, indexed.tz, indexed.tags) == (datetime.fromisoformat(occurred), "America/Chicago", ("sea",))
    assert "shore" not in str(ingest.payload)
    assert done.encoding.operation == "create"


async def test_a_second_delivery_writes_and_tells_nothing_new(world: World) -> None:
    """The same event, and another one with the same idem_key, get the first receipt."""
    event = make_event({"text": WALK}, idem_key="k")
    first = await world.handler.write(event)
    told = len(world.bus.events)
    await world.clock.advance(3600)
    second = await world.handler.write(event)
    assert len(world.bus.events) == told
    third = await world.handler.write(make_event({"text": WALK}, event_id="other", idem_key="k"))

    assert (first.is_repeat, second.is_repeat, third.is_repeat) == (False, True, True)
    assert first.receipt == second.receipt == third.receipt
    assert len(world.bus.of_type("cognitive.memory.write.committed")) == 1
    memory = world.store.memory(first.receipt.memory_id)
    assert memory is not None
    assert memory.said_count == 1


@pytest.mark.parametrize(
    ("payload", "more", "space", "how"),
    [
        ({"space_hint": "shared:household"}, {}, "shared:household", "hint"),
        ({"space_hint": "shared:strangers"}, {}, "personal:alice", "personal"),
        ({"participants": ["bob"]}, {}, "shared:couple", "participants"),
        ({"participants": ["bob", "carol"]}, {}, "shared:household", "participants"),
        ({"participants": ["mallory"]}, {}, "personal:alice", "personal"),
        ({}, {"space_id": "shared:couple"}, "shared:couple", "envelope"),
        ({}, {"space_id": "shared:strangers"}, "personal:alice", "personal"),
        ({"space_hint": "shared:couple"}, {"band": SecurityBand.BLACK}, "personal:alice", "personal"),
    ],
)
async def test_a_space_is_resolved(
    world: World, payload: dict[str, Any], more: dict[str, Any], space: str, how: str
) -> None:
    """A permitted wish, else the participants' space, else the envelope's, else the actor's own."""
    done = await world.handler.write(make_event({"text": WALK, **payload}, **more))
    (resolved,) = world.bus.of_type("cognitive.memory.write.space_resolved")

    assert done.receipt.space_id == space
    assert (resolved.payload["resolved_space_id"], resolved.payload["how"]) == (space, how)


class BrokenPolicy:
    """A policy whose backend is gone."""

    def may_write(self, actor_id: str, space_id: str) -> bool:
        raise ConnectionError

    def shared_space(self, actor_id: str, participants: tuple[str, ...]) -> str | None:
        raise ConnectionError

    def redactions(self, space_id: str) -> frozenset[str]:
        raise ConnectionError


async def test_a_policy_that_fails_ends_in_the_own_space_and_keeps_nothing(tmp_path: Path) -> None:
    """Fail closed: the actor's own space, the whole content redacted, and both said."""
    bus = Bus()
    store = MemoryStore(tmp_path / "m.db")
    handler = WriteHandler(store, bus.publish, VirtualClock(), BrokenPolicy())
    done = await handler.write(make_event({"text": WALK, "tags": ["sea"], "space_hint": "shared:couple"}))
    memory = store.memory(done.receipt.memory_id)
    store.close()

    assert memory is not None
    assert (memory.space_id, memory.content) == ("personal:alice", {"text": "[redacted]"})
    assert done.encoding.flags == ("conservative_redaction",)
    assert bus.of_type("cognitive.memory.write.space_resolved")[0].payload["how"] == "fallback"
    assert "shore" not in str([event.payload for event in bus.events])


@pytest.mark.parametrize(
    ("payload", "more", "kept"),
    [
        ({}, {}, "a@example.org or 555-123-4567"),
        ({"obligations": ["REDACT_PII"]}, {}, "[email] or [phone]"),
        ({}, {"band": SecurityBand.AMBER}, "[email] or [phone]"),
        ({}, {"band": None}, "[email] or [phone]"),
        ({"space_hint": "shared:household"}, {}, "a@example.org or [phone]"),
    ],
)
async def test_personal_data_is_redacted_before_anything_is_told(
    world: World, payload: dict[str, Any], more: dict[str, Any], kept: str
) -> None:
    """By obligation, by band, by the space's policy; nested content, tags and all."""
    raw = "a@example.org or 555-123-4567"
    content = {"text": raw, "deep": [{"note": raw}]}
    done = await world.handler.write(make_event({"content": content, "tags": [raw], **payload}, **more))
    memory = world.store.memory(done.receipt.memory_id)

    assert memory is not None
    assert memory.content == {"text": kept, "deep": [{"note": kept}]}
    told = str([event.payload for event in world.bus.events])
    assert ("555-123-4567" in told) == ("555" in kept)
    assert ("a@example.org" in told) == ("example" in kept)
    early = world.bus.events[:3]
    assert not any("example" in str(event.payload) for event in early)


@pytest.mark.parametrize(
    ("strategy", "content"),
    [
        (MergeStrategy.MERGE_CONTENT, {"text": f"{WALK} {NEARLY_WALK}"}),
        (
            MergeStrategy.APPEND_CONTEXT,
            {"text": WALK, "context": [{"text": NEARLY_WALK, "said_at": START.isoformat()}]},
        ),
        (MergeStrategy.TEMPORAL_UPDATE, {"text": WALK}),
    ],
)
async def test_a_near_duplicate_is_merged(tmp_path: Path, strategy: MergeStrategy, content: dict[str, Any]) -> None:
    """Above 0.9 the memory there is takes it in, by the strategy; its revision and count rise."""
    world = World(tmp_path / "m.db", strategy=strategy)
    first = await world.handler.write(make_event({"text": WALK}, event_id="a"))
    second = await world.handler.write(make_event({"text": NEARLY_WALK}, event_id="b"))
    memory = world.store.memory(first.receipt.memory_id)
    world.store.close()

    assert second.receipt.operation == "merge"
    assert second.encoding.similarity > 0.9
    assert second.receipt.memory_id == first.receipt.memory_id
    assert second.receipt.receipt_id != first.receipt.receipt_id
    assert memory is not None
    assert (memory.content, memory.revision, memory.said_count) == (content, 2, 2)


async def test_link_only_keeps_near_duplicates_apart(tmp_path: Path) -> None:
    """They are stored for themselves and linked both ways."""
    world = World(tmp_path / "m.db", strategy=MergeStrategy.LINK_ONLY)
    one = (await world.handler.write(make_event({"text": WALK}, event_id="a"))).receipt.memory_id
    other = (await world.handler.write(make_event({"text": WALK}, event_id="b"))).receipt.memory_id
    links = world.store.links(one), world.store.links(other)
    world.store.close()

    assert links == ({other: 1.0}, {one: 1.0})


async def test_something_alike_is_linked_and_something_else_is_not(world: World) -> None:
    """From 0.8 to 0.9 a link; below nothing. Novelty falls with likeness."""
    alike = WALK.replace("the rain began", "the hail began")
    first, second, third = [
        await world.handler.write(make_event({"text": text}, event_id=text)) for text in (WALK, alike, OTHER)
    ]

    assert 0.8 <= second.encoding.similarity <= 0.9
    assert (second.receipt.operation, second.encoding.linked_to) == ("link", first.receipt.memory_id)
    assert (third.receipt.operation, third.encoding.linked_to) == ("create", None)
    assert second.encoding.novelty < third.encoding.novelty


async def test_duplicates_are_looked_for_in_the_space_and_for_a_week_only(world: World) -> None:
    """Another space's memory, and one of 169 hours ago, are no duplicates."""
    await world.handler.write(make_event({"text": WALK}, event_id="a"))
    elsewhere = await world.handler.write(make_event({"text": WALK, "space_hint": "shared:couple"}, event_id="b"))
    await world.clock.advance(167 * 3600)
    soon = await world.handler.write(make_event({"text": WALK}, event_id="c"))
    await world.clock.advance(169 * 3600)
    late = await world.handler.write(make_event({"text": WALK}, event_id="d"))

    assert elsewhere.receipt.operation == "create"
    assert soon.receipt.operation == "merge"
    assert late.receipt.operation == "create"


@pytest.mark.req("F116")
async def test_consolidation_is_called_for_when_enough_has_gathered(tmp_path: Path) -> None:
    """After so many writes of a space, or so long, once; the count then starts again."""
    world = World(tmp_path / "m.db", consolidation=ConsolidationSettings(writes=3, duplicates=9, age_s=3600))
    texts = [f"{number} {name}" for number, name in enumerate(["apple pie", "quantum", "zebra", "velvet", "umbrella"])]
    for at, text in enumerate(texts):
        await world.handler.write(make_event({"text": text * 3}, event_id=text))
        if at == 3:
            await world.clock.advance(3600)
    ticks = [msgspec.convert(event.payload, ConsolidationTick) for event in world.bus.on("consolidation")]
    world.store.close()

    assert [tick.reason for tick in ticks] == [("write_count",), ("age",)]
    assert ticks[0].space_id == "personal:alice"
    assert ticks[1].scope.from_ == START
    assert (ticks[1].scope.to - ticks[1].scope.from_).total_seconds() == 3600


@pytest.mark.req("F117")
async def test_memories_gather_into_episodes(world: World) -> None:
    """By space and part of the day; a silence of more than two hours begins another; latest first."""
    for at, hour in enumerate([12, 13, 16, 18]):
        ts = datetime(2025, 9, 6, hour, tzinfo=UTC)
        await world.handler.write(make_event({"text": f"{at} {WALK[at * 20 :]}"}, event_id=str(at), ts=ts))
    episodes = world.store.episodes("personal:alice")

    assert [(each.bucket, each.number, each.memories) for each in episodes] == [
        ("2025-09-06-evening", 1, 1),
        ("2025-09-06-afternoon", 2, 1),
        ("2025-09-06-afternoon", 1, 2),
    ]


@pytest.mark.req("F117")
@pytest.mark.parametrize(
    ("moment", "bucket"),
    [
        ("2025-09-06T05:00", "2025-09-06-morning"),
        ("2025-09-06T12:00", "2025-09-06-afternoon"),
        ("2025-09-06T17:00", "2025-09-06-evening"),
        ("2025-09-06T22:00", "2025-09-06-night"),
        ("2025-09-07T04:59", "2025-09-06-night"),
    ],
)
def test_a_bucket_is_a_local_date_and_part_of_the_day(moment: str, bucket: str) -> None:
    """The night belongs to the date it began on."""
    zone = zone_of("America/Chicago")

    assert bucket_of(datetime.fromisoformat(moment).replace(tzinfo=zone).astimezone(UTC), zone) == bucket


@pytest.mark.parametrize(
    ("payload", "more", "field"),
    [
        ({}, {}, "payload.content"),
        ({"content": 5}, {}, "payload.content"),
        ({"content": {"text": 5}}, {}, "payload.content.text"),
        ({"text": "x" * 50_001}, {}, "payload.content.text"),
        ({"content": {"blob": "x" * 200_001}}, {}, "payload.content"),
        ({"text": "x", "tz": "Mars/Olympus"}, {}, "tz"),
        ({"text": "x", "occurred_at": "2025-01-01T00:00"}, {}, "payload.occurred_at"),
        ({"text": "x", "tags": "sea"}, {}, "payload.tags"),
        ({"text": "x", "tags": ["t"] * 65}, {}, "payload.tags"),
        ({"text": "x", "confidence": 2}, {}, "payload.confidence"),
        ({"text": "x"}, {"actor": None}, "meta.actor"),
    ],
)
async def test_what_cannot_be_written_is_refused(
    world: World, payload: dict[str, Any], more: dict[str, Any], field: str
) -> None:
    """With the field at fault; trying again would not help."""
    with pytest.raises(InvalidRequest) as caught:
        await world.handler(make_event(payload, **more))
    assert caught.value.field == field
    assert not caught.value.retryable


@pytest.mark.req("F114")
async def test_a_failed_transaction_leaves_nothing_and_is_told(world: World) -> None:
    """Memory, receipt and outbox go together or not at all; the failure is published and raised; a retry succeeds."""
    breaker = sqlite3.connect(world.path)
    breaker.execute(
        "CREATE TRIGGER refuse BEFORE INSERT ON outbox WHEN NEW.event_type = 'HIPPO_ENCODED'"
        " BEGIN SELECT RAISE(ABORT, 'disk is unwell'); END"
    )
    breaker.commit()
    event = make_event({"text": WALK})

    with pytest.raises(MemoryStoreError, match="unwell"):
        await world.handler(event)
    for table in ("memories", "bands", "receipts", "episodes", "gathered", "outbox"):
        assert breaker.execute(f"SELECT count(*) FROM {table}").fetchone() == (0,)
    (failed,) = world.bus.of_type("cognitive.memory.write.failed")
    assert (failed.payload["error"], failed.payload["retryable"]) == ("cognition.memory_store", True)
    breaker.execute("DROP TRIGGER refuse")
    breaker.commit()
    breaker.close()
    await world.handler(event)
    assert "cognitive.memory.write.committed" in world.bus.types()


async def test_a_retry_that_ends_otherwise_is_told_beside_the_first(world: World) -> None:
    """The bus fails after storing the resolution, the policy changes, the retry writes elsewhere: both are in the log."""
    world.bus.failures_after = [BusDown()]
    event = make_event({"text": WALK, "space_hint": "shared:couple"})
    with pytest.raises(BusDown):
        await world.handler(event)
    await world.clock.advance(5)
    world.bus.failures_after = []
    await world.handler(event)
    world.policy = StaticSpacePolicy()
    world.reopen()
    done = await world.handler.write(event)

    resolved = world.bus.of_type("cognitive.memory.write.space_resolved")
    assert [each.meta.space_id for each in resolved] == ["shared:couple", "personal:alice"]
    assert (done.is_repeat, done.receipt.space_id) == (True, "shared:couple")


async def test_a_bus_that_is_down_at_first_stops_the_write_before_it_begins(world: World) -> None:
    """What cannot be told is not done; the bus tries the event again."""
    world.bus.failures = [BusDown()]
    event = make_event({"text": WALK})

    with pytest.raises(BusDown):
        await world.handler(event)
    assert (await world.handler.write(event)).is_repeat is False


def test_a_file_of_another_format_is_refused(tmp_path: Path) -> None:
    """It is not touched, and the error says which formats."""
    path = tmp_path / "m.db"
    with sqlite3.connect(path) as made:
        made.execute("PRAGMA user_version = 99")
    made.close()

    with pytest.raises(MemoryStoreError, match="format 99"):
        MemoryStore(path)


async def test_a_damaged_candidate_does_not_keep_new_memories_out(world: World) -> None:
    """The new one is stored unmerged, and flagged."""
    await world.handler.write(make_event({"text": WALK}, event_id="a"))
    with sqlite3.connect(world.path) as other:
        other.execute("UPDATE memories SET content = '{'")
    other.close()
    done = await world.handler.write(make_event({"text": WALK}, event_id="b"))

    assert (done.receipt.operation, done.encoding.flags) == ("create", ("dedupe_failed",))
