"""A write that fails is told as failed, whatever failed; and no failure tells of the content."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.cognition.support import Bus, BusDown, make_event
from tidings.bus.events import ReceivedEvent
from tidings.cognition.errors import InvalidRequest, MemoryStoreError
from tidings.cognition.write import MemoryStore, StaticSpacePolicy, WriteHandler
from tidings.core.events import Event
from tidings.log.interface import Query
from tidings.log.memory import MemoryLog
from tidings.testing import VirtualClock

FAILED = "cognitive.memory.write.failed"
SECRET = "We walked along the shore"


def writer(bus: Bus, policy: Any = None, signer: Any = None) -> tuple[MemoryStore, WriteHandler]:
    store = MemoryStore(":memory:", signer=signer)
    return store, WriteHandler(store, bus.publish, VirtualClock(), policy)


@pytest.mark.parametrize(
    ("payload", "more"),
    [
        ({"text": SECRET}, {"actor": None}),
        ({}, {}),
        ({"content": {"text": 5}}, {}),
        ({"content": {"text": "\ud800"}}, {}),
        ({"content": {"text": SECRET, "thing": object()}}, {}),
        ({"text": SECRET, "tags": "sea"}, {}),
        ({"text": SECRET, "confidence": 2}, {"idem_key": "k"}),
        ({"text": SECRET, "qos": {"latency_budget_ms": float("inf")}, "tz": "Mars/Olympus"}, {}),
    ],
)
@pytest.mark.req("F114")
async def test_a_write_that_cannot_be_read_is_told_as_failed(payload: dict[str, Any], more: dict[str, Any]) -> None:
    """With the event it came by, and that trying again will not help."""
    bus = Bus()
    with pytest.raises(InvalidRequest) as caught:
        await writer(bus)[1](make_event(payload, **more))

    (failed,) = bus.events
    assert (failed.meta.type, failed.payload["source_event_id"]) == (FAILED, "ev-1")
    assert failed.payload["error"] == "cognition.invalid_request"
    assert failed.payload["problem"] == str(caught.value)
    assert failed.payload["retryable"] is False
    assert SECRET not in str(failed.payload)


async def test_each_attempt_of_a_write_that_cannot_be_read_is_told() -> None:
    """The bus delivers it again: the attempts are told apart."""
    bus, log = Bus(), MemoryLog()
    await log.append(make_event({"nothing": 1}))
    (record,) = (await log.read(Query())).records
    for attempt in (1, 2):
        with pytest.raises(InvalidRequest):
            await writer(bus)[1](ReceivedEvent(record, "p02", attempt))

    assert [event.payload["attempt"] for event in bus.of_type(FAILED)] == [1, 2]


class Unwell(Exception):
    """Of no kind that anybody foresaw."""


class UnwellPolicy:
    """A policy that raises what nobody foresaw, or answers what is no answer."""

    def may_write(self, actor_id: str, space_id: str) -> bool:
        raise Unwell(SECRET)

    def shared_space(self, actor_id: str, participants: tuple[str, ...]) -> str | None:
        raise Unwell(SECRET)

    def redactions(self, space_id: str) -> Any:
        return None


async def test_a_policy_may_fail_in_any_way() -> None:
    """The actor's own space, nothing of the content kept, both said; the memory is written."""
    bus = Bus()
    store, handler = writer(bus, UnwellPolicy())
    done = await handler.write(make_event({"text": SECRET, "space_hint": "shared:couple"}))
    memory = store.memory(done.receipt.memory_id)

    assert memory is not None
    assert (memory.space_id, memory.content) == ("personal:alice", {"text": "[redacted]"})
    assert bus.of_type("cognitive.memory.write.space_resolved")[0].payload["notes"] == ["policy_failed:Unwell"]
    assert SECRET not in str([event.payload for event in bus.events])


class UnwellSigner:
    """A signer whose key is out of reach."""

    algorithm, key_id = "x", "k"

    def sign(self, data: bytes) -> bytes:
        raise Unwell("key store gone")

    def is_valid(self, data: bytes, signature: bytes) -> bool:
        return False


async def test_a_signer_that_fails_leaves_nothing_and_is_told() -> None:
    """A memory without its receipt is not kept; trying again may help."""
    bus = Bus()
    store, handler = writer(bus, signer=UnwellSigner())
    with pytest.raises(MemoryStoreError, match="key store gone"):
        await handler(make_event({"text": SECRET}))

    (failed,) = bus.of_type(FAILED)
    assert (failed.payload["error"], failed.payload["retryable"]) == ("cognition.memory_store", True)
    assert store.episodes("personal:alice") == []
    assert await handler.outbox.rows() == []


async def test_a_strangers_error_is_told_by_its_kind_only() -> None:
    """What it says may quote what was not redacted yet."""
    bus = Bus()
    bus.failures = [Unwell(SECRET)]
    with pytest.raises(Unwell):
        await writer(bus)[1](make_event({"text": SECRET}))

    (failed,) = bus.events
    assert (failed.payload["error"], failed.payload["retryable"]) == ("Unwell", True)
    assert SECRET not in str(failed.payload)


async def test_a_failure_that_cannot_be_told_hides_no_failure() -> None:
    """The bus is down for good: what went wrong first is raised, with a note of what went wrong then."""
    bus = Bus()
    bus.failures = [BusDown()]
    with pytest.raises(InvalidRequest) as caught:
        await writer(bus)[1](make_event({}))

    assert any("BusDown" in note for note in caught.value.__notes__)


async def test_the_same_key_of_another_actor_is_another_write() -> None:
    """Each actor's writes are known again by that actor's keys."""
    bus = Bus()
    store, handler = writer(bus, StaticSpacePolicy(members={"shared:home": frozenset({"alice", "bob"})}))

    def said(actor: str, text: str) -> Event:
        return make_event({"text": text}, event_id=text, actor=actor, space_id="shared:home", idem_key="k")

    first, second = await handler.write(said("alice", "cats")), await handler.write(said("bob", "taxes and duties"))
    again = await handler.write(said("bob", "taxes and duties"))

    assert [done.receipt.actor for done in (first, second, again)] == ["alice", "bob", "bob"]
    assert (second.is_repeat, again.is_repeat) == (False, True)
    memory = store.memory(second.receipt.memory_id)
    assert memory is not None
    assert memory.content == {"text": "taxes and duties"}
