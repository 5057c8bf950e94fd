"""Limits of /sync at a node's socket: at the limit a message is answered; beyond it the answer is typed, and nothing is stored."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.beyond import Beyond, crossed
from tests.integration.test_qa_sync_sockets import Talker, item, message, place, settings


def submit_message(items: list[dict[str, Any]]) -> bytes:
    return message("submit_events", {"events": items})


async def filled(talker: Talker, count: int, **more: Any) -> None:
    for start in range(0, count, 5):
        results = await talker.submit(*(item(f"f{number}", **more) for number in range(start, min(count, start + 5))))
        assert {result["status"] for result in results} == {"committed"}


@pytest.mark.bound("sync.settings.SyncSettings.batch_items_max")
@crossed
async def test_a_larger_batch_is_rejected(tmp_path: Path, beyond: Beyond) -> None:
    """A batch at the limit is committed; a larger one is answered with an error, and nothing of it is stored."""
    async with place(tmp_path, settings(batch_items_max=5)) as here:
        talker = await here.talker("C1")
        answer = await talker.ask(submit_message([item(f"e{number}") for number in range(beyond(5))]))
        assert answer["type"] == "error"
        assert await here.stored() == []
        assert {each["status"] for each in await talker.submit(*(item(f"e{n}") for n in range(5)))} == {"committed"}


@pytest.mark.bound("sync.settings.SyncSettings.message_bytes_max")
@crossed
async def test_a_longer_message_is_refused(tmp_path: Path, beyond: Beyond) -> None:
    """A message beyond the limit is a ``bad_request``; the connection stays, and nothing is stored."""
    async with place(tmp_path, settings(message_bytes_max=4096), message_bytes_max=1 << 20) as here:
        talker = await here.talker("C1")
        empty = len(submit_message([item("a", more="")]))
        answer = await talker.ask(submit_message([item("a", more="x" * (beyond(4096) - empty))]))
        assert answer["payload"]["code"] == "bad_request"
        assert await here.stored() == []
        assert await talker.is_alive()


@pytest.mark.bound("sync.settings.SyncSettings.event_depth_max")
@crossed
async def test_a_deeper_event_is_rejected(tmp_path: Path, beyond: Beyond) -> None:
    """An item whose event nests deeper is rejected by itself; its neighbour is committed."""

    def nested(depth: int) -> dict[str, Any]:
        value: Any = 1
        for _ in range(depth):
            value = [value]
        return {"type": "event", "payload": {"schema": "note", "data": value}}

    async with place(tmp_path, settings(event_depth_max=12)) as here:
        talker = await here.talker("C1")
        answer = await talker.ask(submit_message([item("deep", event=nested(beyond(12) - 3 + 1)), item("good")]))
        statuses = [result["status"] for result in answer["payload"].get("results", [])]
        assert "committed" not in statuses[:1]
        assert [result["status"] for result in await talker.submit(item("flat", event=nested(4)))] == ["committed"]


@pytest.mark.bound("sync.settings.SyncSettings.page_items_max", "sync.settings.SyncSettings.page_bytes_max")
@crossed
@pytest.mark.parametrize("kind", ["items", "bytes"])
async def test_a_page_ends_at_its_limits(tmp_path: Path, kind: str, beyond: Beyond) -> None:
    """A client that is further behind gets several pages, and each event once."""
    sync: dict[str, Any] = (
        {"page_items_min": 1, "page_items_max": 6, "page_items_default": 6}
        if kind == "items"
        else {"page_bytes_max": 2048}
    )
    async with place(tmp_path, settings(**sync)) as here:
        writer = await here.talker("W")
        count = beyond(6)
        data = "x" * (10 if kind == "items" else 1500)
        await filled(writer, count, event={"type": "event", "payload": {"schema": "note", "data": data}})
        reader, since, seen, pages = await here.talker("R"), 0, [], 0
        while pages < 100:
            page = await reader.sync("P1", since=since)
            pages += 1
            assert len(page["events"]) <= 6
            seen += [each["id"] for each in page["events"]]
            since = page["next_since_committed_id"]
            if not page["has_more"]:
                break
        assert (seen, pages > 1) == ([f"f{number}" for number in range(count)], True)


@pytest.mark.bound("sync.settings.SyncSettings.sync_partitions_max")
@crossed
async def test_a_sync_of_more_partitions_is_rejected(tmp_path: Path, beyond: Beyond) -> None:
    """As many partitions as allowed are synced; more are answered with an error."""
    async with place(tmp_path, settings(sync_partitions_max=5)) as here:
        talker = await here.talker("C1")
        names = [f"P{number}" for number in range(beyond(5))]
        answer = await talker.ask(
            message("sync", {"partitions": names, "subscription_partitions": names, "since_committed_id": 0})
        )
        assert answer["type"] == "error"
        assert (await talker.sync(*names[:5]))["has_more"] is False


@pytest.mark.bound("sync.settings.SyncSettings.connections_max")
@crossed
async def test_one_more_connection_is_refused(tmp_path: Path, beyond: Beyond) -> None:
    """As many clients as allowed are connected; each further one is closed, and a place is free when one leaves."""
    async with place(tmp_path, settings(connections_max=3)) as here:
        for number in range(3):
            await here.talker(f"C{number}")
        for number in range(3, beyond(3)):
            line = await here.line()
            line.say(here.connect_message(f"C{number}"))
            assert await line.client.ended() is not None


@pytest.mark.bound("sync.settings.SyncSettings.requests_queued_max")
@crossed
async def test_more_requests_than_may_wait_are_refused_or_answered_in_order(tmp_path: Path, beyond: Beyond) -> None:
    """Requests sent in one piece are each answered once, with a result or with ``rate_limited``; the connection goes on."""
    async with place(tmp_path, settings(requests_queued_max=4)) as here:
        talker = await here.talker("C1")
        count = beyond(4) + 1  # one is being handled
        talker.say(*(submit_message([item(f"e{number}")]) for number in range(count)))
        answers = await talker.hear(count)
        kinds = {answer["payload"].get("code", answer["type"]) for answer in answers}
        assert kinds <= {"submit_events_result", "rate_limited"}
        committed = [answer for answer in answers if answer["type"] == "submit_events_result"]
        assert len(await here.stored()) == len(committed)
        assert await talker.is_alive()


@pytest.mark.bound("sync.settings.SyncSettings.write_buffer_bytes_max")
@crossed
async def test_a_peer_that_does_not_read_is_closed(tmp_path: Path, beyond: Beyond) -> None:
    """Broadcasts beyond the buffer end the connection of a peer that reads nothing; a reader gets every one."""
    async with place(tmp_path, settings(write_buffer_bytes_max=65_536)) as here:
        writer, reader, deaf = await here.talker("W"), await here.talker("R"), await here.talker("D")
        await reader.sync("P1")
        await deaf.sync("P1")
        deaf.client.transport.underlying_transport.pause_reading()
        before = len(here.node.connections)
        event = {"type": "event", "payload": {"schema": "note", "data": "x" * min(beyond(65_536), 500_000)}}
        count = 0
        async with asyncio.timeout(20):
            while len(here.node.connections) == before:
                await writer.submit(item(f"e{count}", event=event))
                count += 1
        assert [each["payload"]["id"] for each in await reader.hear(count)] == [f"e{n}" for n in range(count)]
