"""Catching up: pages that together are everything, once, in order; and what comes after them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.sync.support import OPEN_SCHEMAS, event, open_world, types
from tidings.access.context import TokenClaims
from tidings.log.interface import Page, Query
from tidings.log.memory import MemoryLog
from tidings.log.record import Record
from tidings.log.retention import plan_retention
from tidings.log.settings import LogSettings, TopicRetention
from tidings.sync.settings import SyncSettings
from tidings.testing import VirtualClock

SMALL_PAGES = SyncSettings(schemas=OPEN_SCHEMAS, page_items_min=1)


@pytest.mark.req("S12", "S14", "S16")
async def test_pages_give_everything_once_in_order() -> None:
    """Whatever the page size, the union of the pages is what intersects, and the end of the cycle stays."""
    async with open_world(SMALL_PAGES) as world:
        writer, reader = await world.client("C1"), await world.client("C2")
        items = [event(f"e{n}", *(["P1"] if n % 3 else ["P2", "P1"] if n % 2 else ["P3"])) for n in range(30)]
        results = await writer.submit(*items)
        wanted = [
            result["committed_id"] for item, result in zip(items, results, strict=True) if "P1" in item["partitions"]
        ]

        got: list[int] = []
        since, has_more, ends = 0, True, set()
        while has_more:
            answer = await reader.ask("sync", {"partitions": ["P1"], "since_committed_id": since, "limit": 4})
            page = answer["payload"]
            assert len(page["events"]) <= 4
            got += [each["committed_id"] for each in page["events"]]
            since, has_more = page["next_since_committed_id"], page["has_more"]
            ends.add(page["sync_to_committed_id"])
            await writer.submit(event(f"meanwhile-{since}"))

        assert got == wanted
        assert ends == {30}


async def test_the_last_page_says_that_it_is_the_last() -> None:
    """Also when it is exactly full."""
    async with open_world(SMALL_PAGES) as world:
        client = await world.client()
        await client.submit(*(event(f"e{n}") for n in range(4)))

        pages = [await client.sync("P1", since=since, limit=2) for since in (0, 2)]

        assert [page["has_more"] for page in pages] == [True, False]


async def test_no_event_falls_between_page_and_broadcast() -> None:
    """Commits racing with a sync are on the page or come as broadcasts; together they are all of them."""
    async with open_world(SMALL_PAGES) as world:
        writer, reader = await world.client("C1"), await world.client("C2")
        for round in range(20):
            names = {"partitions": ["P1"], "subscription_partitions": ["P1"], "since_committed_id": 0, "limit": 1000}
            writer.say("submit_events", {"events": [event(f"before-{round}")]})
            reader.say("sync", names)
            writer.say("submit_events", {"events": [event(f"after-{round}")]})
            await world.settle()
            writer.take()
            messages = reader.take()
            ids = [each["id"] for m in messages if m["type"] == "sync_response" for each in m["payload"]["events"]]
            ids += [m["payload"]["id"] for m in messages if m["type"] == "event_broadcast"]

            assert {f"before-{round}", f"after-{round}"} <= set(ids)
            assert (await reader.ask("sync", names | {"subscription_partitions": []}))["type"] == "sync_response"


@pytest.mark.req("S13")
async def test_one_foreign_partition_refuses_the_whole_sync() -> None:
    """In what is asked for or in what is subscribed to: forbidden, no data, the subscriptions as before."""
    async with open_world() as world:
        writer = await world.client("C1")
        await writer.submit(event("a"))
        reader = await world.client("C2", TokenClaims(partitions=frozenset({"P1", "P2"})))
        await reader.sync("P2")

        for payload in (
            {"partitions": ["P1", "P3"], "since_committed_id": 0},
            {"partitions": ["P1"], "subscription_partitions": ["P1", "P3"], "since_committed_id": 0},
        ):
            answer = await reader.ask("sync", payload)
            assert answer["type"] == "error"
            assert answer["payload"]["code"] == "forbidden"
        assert reader.transport.code is None
        await writer.submit(event("b", "P1"), event("c", "P2"))
        assert [message["payload"]["id"] for message in reader.take()] == ["c"]


async def test_subscriptions_are_replaced_as_a_whole_or_left_alone() -> None:
    """Absent leaves them, a list replaces them, an empty list ends them; every page tells what holds."""
    async with open_world() as world:
        writer, reader = await world.client("C1"), await world.client("C2")
        sync: dict[str, Any] = {"partitions": ["P1"], "since_committed_id": 0}

        async def effective(**more: Any) -> list[str]:
            answer = await reader.ask("sync", sync | more)
            names: list[str] = answer["payload"]["effective_subscriptions"]
            return names

        assert await effective() == []
        await writer.submit(event("a"))
        assert reader.take() == []
        assert await effective(subscription_partitions=["P2", "P1", "P2"]) == ["P1", "P2"]
        assert await effective() == ["P1", "P2"]
        await writer.submit(event("b"), event("c", "P2", "P1"))
        assert [message["payload"]["id"] for message in reader.take()] == ["b", "c"]
        assert await effective(subscription_partitions=["P3"]) == ["P3"]
        await writer.submit(event("d"))
        assert reader.take() == []
        assert await effective(subscription_partitions=[]) == []
        await writer.submit(event("e", "P3"))
        assert reader.take() == []


@pytest.mark.req("S24")
async def test_a_cursor_from_the_future_gets_an_empty_page_and_the_real_maximum() -> None:
    """So that the client can see that something is wrong with its cursor."""
    async with open_world() as world:
        client = await world.client()
        await client.submit(event("a"))

        page = await client.sync("P1", since=2**62)

        assert page["events"] == []
        assert page["has_more"] is False
        assert page["sync_to_committed_id"] == page["next_since_committed_id"] == 1


@pytest.mark.req("S32")
@pytest.mark.parametrize(("limit", "count"), [(None, 60), (-5, 20), (0, 20), (20, 20), (30, 30), (10**9, 40)])
async def test_the_limit_is_moved_into_the_advertised_range(limit: int | None, count: int) -> None:
    """Too small, too large or absent: never an error."""
    settings = SyncSettings(
        schemas=OPEN_SCHEMAS, page_items_min=20, page_items_max=40 if limit else 100, page_items_default=60
    )
    async with open_world(settings) as world:
        client = await world.client()
        await client.submit(*(event(f"e{n}") for n in range(100)))

        page = await client.sync("P1", **({} if limit is None else {"limit": limit}))

        assert len(page["events"]) == count


@pytest.mark.req("S32")
async def test_without_other_settings_the_range_is_50_to_1000() -> None:
    """The bounds of the protocol are the defaults, and are advertised."""
    async with open_world() as world:
        client = await world.client()
        await client.submit(*(event(f"e{n}") for n in range(60)))

        assert len((await client.sync("P1", limit=1))["events"]) == 50


@pytest.mark.req("S17")
async def test_requests_of_one_connection_are_answered_in_turn() -> None:
    """Two syncs sent at once get two pages, one after the other."""
    async with open_world() as world:
        client = await world.client()
        await client.submit(event("a"), event("b", "P2"))

        client.say("sync", {"partitions": ["P1"], "since_committed_id": 0})
        client.say("sync", {"partitions": ["P2"], "since_committed_id": 0})
        await world.settle()

        assert [m["payload"]["partitions"] for m in client.take()] == [["P1"], ["P2"]]


async def test_requests_beyond_the_queue_are_rate_limited() -> None:
    """A client that asks faster than it can be answered is told so."""
    async with open_world(SyncSettings(schemas=OPEN_SCHEMAS, requests_queued_max=4)) as world:
        client = await world.client()

        for _ in range(10):
            client.say("sync", {"partitions": ["P1"], "since_committed_id": 0})
        await world.settle()

        answers = client.take()
        assert types(answers).count("sync_response") == 4
        assert [a["payload"]["code"] for a in answers if a["type"] == "error"] == ["rate_limited"] * 6


async def test_many_partitions_are_one_sync() -> None:
    """More partitions than one event may have are read as one, each event once."""
    async with open_world(SMALL_PAGES) as world:
        client = await world.client()
        await client.submit(*(event(f"e{n}", f"P{n}", f"P{n + 70}") for n in range(90)))
        names = [f"P{n}" for n in range(160)]

        got, since, has_more = [], 0, True
        while has_more:
            page = await client.sync(*names, since=since, limit=7)
            got += [each["committed_id"] for each in page["events"]]
            since, has_more = page["next_since_committed_id"], page["has_more"]

        assert got == list(range(1, 91))


@pytest.mark.parametrize(
    "payload",
    [
        {"partitions": [], "since_committed_id": 0},
        {"partitions": ["P1"]},
        {"partitions": ["P1"], "since_committed_id": -1},
        {"partitions": ["P1"], "since_committed_id": "0"},
        {"partitions": ["P1"], "since_committed_id": 1.5},
        {"partitions": "P1", "since_committed_id": 0},
        {"partition": "P1", "since_committed_id": 0},
        {"partitions": ["P1"], "partition": "P1", "since_committed_id": 0},
        {"partitions": [""], "since_committed_id": 0},
        {"partitions": ["P1"], "since_committed_id": 0, "limit": "many"},
        {"partitions": ["P1"], "since_committed_id": 0, "subscription_partitions": None},
        {"partitions": ["P1"], "since_committed_id": 0, "subscription_partitions": [""]},
        {"partitions": [f"P{n}" for n in range(10_000)], "since_committed_id": 0},
    ],
)
async def test_a_sync_that_makes_no_sense_is_a_bad_request(payload: dict[str, Any]) -> None:
    """The connection stays open and its subscriptions stay as they were."""
    async with open_world() as world:
        client = await world.client()
        await client.sync("P1")

        answer = await client.ask("sync", payload)

        assert answer["payload"]["code"] == "bad_request"
        assert (await client.ask("sync", {"partitions": ["P1"], "since_committed_id": 0}))["payload"][
            "effective_subscriptions"
        ] == ["P1"]


# History that is not in the log any more


async def pruned_log(clock: VirtualClock) -> tuple[MemoryLog, list[Record]]:
    """A log whose first segments were dropped, and what was in them."""
    log = MemoryLog(LogSettings(segment_lines_max=10), clock=clock)
    async with open_world(SMALL_PAGES, log=log, clock=clock) as world:
        client = await world.client()
        await client.submit(*(event(f"e{n}", "P1" if n % 2 else "P2") for n in range(35)))
    before = (await log.read(Query(topic="sync"))).records
    rules = {"sync": TopicRetention(size_bytes_max=0)}
    segments = log.topics()["sync"].segments
    floors = {"P1": 20, "P2": 20}
    await log.drop(plan_retention(segments, rules, now=_now(clock), partition_floors=floors))
    kept = (await log.read(Query(topic="sync"))).records
    assert kept[0].seq == 21
    return log, before[:20]


def _now(clock: VirtualClock) -> Any:
    from tidings.core.clock import datetime_of

    return datetime_of(clock.now_ns())


async def test_an_event_stays_until_all_its_partitions_have_moved_on() -> None:
    """Retention drops nothing of a segment in which one partition still needs an event."""
    clock = VirtualClock()
    log = MemoryLog(LogSettings(segment_lines_max=2), clock=clock)
    async with open_world(log=log, clock=clock) as world:
        client = await world.client()
        await client.submit(event("a", "P1", "P2"), event("b", "P1"), event("c", "P1"))
    rules = {"sync": TopicRetention(size_bytes_max=0)}
    segments = log.topics()["sync"].segments

    held = plan_retention(segments, rules, now=_now(clock), partition_floors={"P1": 3})
    free = plan_retention(segments, rules, now=_now(clock), partition_floors={"P1": 3, "P2": 1})

    assert not held.drops
    assert [decision.segment.last_seq for decision in free.drops] == [2]
    await log.close()


async def test_a_cursor_older_than_the_log_is_told_what_is_missing() -> None:
    """What is left is given, and the page says up to which id events may be gone."""
    clock = VirtualClock()
    log, _ = await pruned_log(clock)
    async with open_world(SMALL_PAGES, log=log, clock=clock) as world:
        client = await world.client()

        old = await client.sync("P1", since=5)
        fresh = await client.sync("P1", since=20)

        assert old["pruned_through_committed_id"] == 20
        assert [each["committed_id"] for each in old["events"]] == list(range(22, 36, 2))
        assert "pruned_through_committed_id" not in fresh
        assert fresh["events"] == old["events"]
    await log.close()


class ListArchive:
    """Dropped records in a list."""

    def __init__(self, records: list[Record]) -> None:
        self.records = records

    async def read(self, query: Query, limit: int) -> Page:
        found = [
            record
            for record in self.records
            if (not query.partitions or set(query.partitions) & set(record.meta.partitions))
            and (not query.event_ids or record.meta.event_id in query.event_ids)
            and (query.since is None or record.seq > query.since)
            and (query.until is None or record.seq <= query.until)
        ]
        return Page(found[:limit], query, len(found) <= limit)


async def test_an_archive_makes_old_cursors_good() -> None:
    """With an archive the pages go on from it into the log, and nothing is said to be missing."""
    clock = VirtualClock()
    log, dropped = await pruned_log(clock)
    async with open_world(SMALL_PAGES, log=log, clock=clock, archive=ListArchive(dropped)) as world:
        client = await world.client()

        got, since, has_more = [], 0, True
        while has_more:
            page = await client.sync("P1", since=since, limit=3)
            assert "pruned_through_committed_id" not in page
            got += [each["committed_id"] for each in page["events"]]
            since, has_more = page["next_since_committed_id"], page["has_more"]

        assert got == list(range(2, 36, 2))
    await log.close()


async def test_a_retry_of_a_pruned_event_is_not_committed_again() -> None:
    """Ids outlive their records: the first seq comes back, and with an archive the first time too."""
    clock = VirtualClock()
    log, dropped = await pruned_log(clock)
    await clock.advance(60)
    async with open_world(SMALL_PAGES, log=log, clock=clock, archive=ListArchive(dropped)) as world:
        client = await world.client()

        (result,) = await client.submit(event("e1", "P1"))

        assert result["committed_id"] == 2
        assert result["status_updated_at"] == dropped[1].meta.time.timestamp() * 1000
        assert log.position.seq == 35
    await log.close()
