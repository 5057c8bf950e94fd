"""
Pages and broadcasts together are everything, however commits, syncs and dispatches interleave.

Readers page at their own pace while writers commit, and nothing waits for anything to settle; in the end each reader must
have seen every event of its partitions, and been told of live ones in order.
"""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.sync.support import OPEN_SCHEMAS, Peer, World, event, open_world, project_item
from tidings.log.interface import Query
from tidings.sync.settings import SyncSettings

SETTINGS = SyncSettings(schemas=OPEN_SCHEMAS, page_items_min=1, held_bytes_max=1024)


class Reader:
    """A client that pages until it is told that there is no more, then listens."""

    def __init__(self, peer: Peer, names: list[str]) -> None:
        self.peer = peer
        self.names = names
        self.since = 0
        self.is_waiting = False
        self.is_done = False
        self.seen: set[str] = set()
        self.live: list[int] = []

    def step(self, limit: int) -> None:
        """Take what has come; ask for the next page if one is due."""
        for message in self.peer.take():
            self._take(message)
        if not self.is_waiting and not self.is_done:
            self.is_waiting = True
            self._ask(limit)

    def _ask(self, limit: int) -> None:
        subscriptions = {"subscription_partitions": self.names}
        wanted = {"partitions": self.names, "since_committed_id": self.since, "limit": limit}
        self.peer.say("sync", wanted | (subscriptions if self.since == 0 else {}))

    def _take(self, message: dict[str, Any]) -> None:
        payload = message["payload"]
        if message["type"] == "event_broadcast":
            self._see(payload)
            self.live.append(payload["committed_id"])
        else:
            assert message["type"] == "sync_response", message
            for each in payload["events"]:
                self._see(each)
            self.since = payload["next_since_committed_id"]
            self.is_waiting, self.is_done = False, not payload["has_more"]

    def _see(self, shown: dict[str, Any]) -> None:
        self.seen.add(shown["id"])


class ProjectReader(Reader):
    """The same in dialect B, where broadcasts are held back while it pages."""

    def _ask(self, limit: int) -> None:
        self.peer.say_camel("sync", {"projectId": "proj", "sinceCommittedId": self.since, "limit": limit})

    def _take(self, message: dict[str, Any]) -> None:
        payload = message["payload"]
        if message["type"] == "event_broadcast":
            assert not self.is_waiting or not self.is_done
            self._see(payload)
            self.live.append(payload["committedId"])
        else:
            for each in payload["events"]:
                self._see(each)
            self.since = payload["nextSinceCommittedId"]
            self.is_waiting, self.is_done = False, not payload["hasMore"]


steps = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(1, 4), st.sampled_from([["P1"], ["P2"], ["P1", "P2"], ["P3"]])),
        st.tuples(st.just("write_project"), st.integers(1, 4), st.none()),
        st.tuples(st.just("read"), st.integers(0, 2), st.integers(1, 3)),
        st.tuples(st.just("turn"), st.integers(1, 5), st.none()),
    ),
    min_size=5,
    max_size=60,
)


async def run(world: World, plan: list[tuple[str, int, Any]]) -> None:
    writer, project_writer = await world.client("W1"), await world.project_client("W2")
    readers = [
        Reader(await world.client("R1"), ["P1"]),
        Reader(await world.client("R2"), ["P1", "P2"]),
        ProjectReader(await world.project_client("R3"), ["proj"]),
    ]
    written = 0
    for verb, number, detail in plan:
        match verb:
            case "write":
                writer.say("submit_events", {"events": [event(f"e{written + n}", *detail) for n in range(number)]})
                written += number
            case "write_project":
                items = [project_item(f"e{written + n}") for n in range(number)]
                project_writer.say_camel("submit_events", {"events": items})
                written += number
            case "read":
                readers[number].step(detail)
            case "turn":
                for _ in range(number):
                    await asyncio.sleep(0)
    for reader in readers:
        while not reader.is_done or reader.is_waiting:
            reader.step(2)
            await world.settle()
    await world.settle()
    for reader in readers:
        reader.step(1)
        topic = "sync.projects" if isinstance(reader, ProjectReader) else "sync"
        page = await world.log.read(Query(topic=topic, partitions=tuple(reader.names)), limit=1000)
        assert reader.seen == {record.meta.event_id for record in page.records}
        assert reader.live == sorted(set(reader.live)), "live events come once, in order"


@given(steps)
def test_nobody_misses_anything(plan: list[tuple[str, int, Any]]) -> None:
    """Whatever the interleaving, pages and broadcasts together are all events of the reader's partitions."""

    async def whole() -> None:
        async with open_world(SETTINGS) as world:
            await run(world, plan)

    asyncio.run(whole())
