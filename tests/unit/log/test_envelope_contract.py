"""The envelope as other programs read it from the files: pinned, so that a change of it is a decision."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec
import pytest

from tidings.core.events import Actor, Capability, Device, Event, EventMeta, EventType, QoS, SecurityBand
from tidings.log import Query
from tidings.log.memory import MemoryLog
from tidings.log.record import DECODER
from tidings.testing import VirtualClock

FULL = EventMeta(
    topic="actions",
    type=EventType.ACTION_EXECUTED,
    space_id="shared:household",
    event_id="0190c0de-0000-7000-8000-000000000001",
    ts=datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC),
    actor=Actor(user_id="alice", caps=(Capability.WRITE,)),
    trace_id="4bf92f3577b34da6a3ce929d0e0e4736",
    idem_key="tidy-up-7",
    ttl_sec=60,
    device=Device(device_id="phone1", platform="ios"),
    partitions=["b", "a", "b"],
    band=SecurityBand.AMBER,
    priority=7,
    qos=QoS(priority=7, latency_budget_ms=50),
    extra={"x_room": "kitchen"},
)


async def stored(meta: EventMeta) -> dict[str, object]:
    log = MemoryLog(clock=VirtualClock(), epoch="e")
    await log.append(Event(meta, {"plan_id": "p1", "status": "OK"}))
    (record,) = (await log.read(Query())).records
    found: dict[str, object] = msgspec.json.decode(record.to_json())
    return found


@pytest.mark.req("F130")
async def test_a_full_envelope_is_stored_under_these_names() -> None:
    """Every field of an event's envelope stands in the file under the name, in the order and in the form agreed on."""
    record = await stored(FULL)

    assert list(record) == ["offset", "seq", "meta", "payload"]
    assert record["meta"] == {
        "written_at": "2026-01-01T00:00:00.000000Z",
        "topic": "actions",
        "type": "ACTION_EXECUTED",
        "space_id": "shared:household",
        "event_id": "0190c0de-0000-7000-8000-000000000001",
        "ts": "2026-01-02T03:04:05.678901Z",
        "actor": {"user_id": "alice", "caps": ["WRITE"]},
        "trace_id": "4bf92f3577b34da6a3ce929d0e0e4736",
        "idem_key": "tidy-up-7",
        "ttl_sec": 60,
        "device": {"device_id": "phone1", "platform": "ios"},
        "partitions": ["a", "b"],
        "band": "AMBER",
        "priority": 7,
        "qos": {"priority": 7, "latency_budget_ms": 50},
        "extra": {"x_room": "kitchen"},
    }
    assert record["payload"] == {"plan_id": "p1", "status": "OK"}


@pytest.mark.req("F130")
async def test_what_is_not_given_is_not_stored() -> None:
    """A plain event's envelope has the six fields that every event has, and no others."""
    record = await stored(EventMeta(topic="actions", type="NOTED", space_id="s"))

    meta = record["meta"]
    assert isinstance(meta, dict)
    assert sorted(meta) == ["event_id", "space_id", "topic", "ts", "type", "written_at"]


@pytest.mark.req("F74", "F130")
async def test_readers_pass_over_keys_that_came_later() -> None:
    """A record with keys that this version does not know reads like one without them."""
    record = await stored(FULL)
    meta = record["meta"]
    assert isinstance(meta, dict)
    later = msgspec.json.encode({**record, "meta": {**meta, "from_the_future": {"a": 1}}, "shape": 2})

    assert DECODER.decode(later).meta == DECODER.decode(msgspec.json.encode(record)).meta
