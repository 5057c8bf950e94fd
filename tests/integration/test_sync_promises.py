"""What sync promises about disk, restarts, retention and overload, through a whole node and real sockets."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.integration.node_support import SECONDS_MAX, connect, until
from tests.integration.test_qa_sync_sockets import Place, Talker, item, message, place, settings
from tests.integration.test_sync_rights import camel
from tidings.core.events import Event, EventMeta
from tidings.log import LogSettings, Query, TopicRetention
from tidings.log.embedded.disk import File, OsDisk
from tidings.log.reading import records
from tidings.testing.node import running_node


class HeldFile:
    """A file whose sync can be held up."""

    def __init__(self, file: File, disk: HeldDisk) -> None:
        self._file = file
        self._disk = disk

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def sync(self) -> None:
        self._disk.waiting += 1
        assert self._disk.may_sync.wait(SECONDS_MAX)
        self._disk.waiting -= 1
        self._file.sync()


class HeldDisk(OsDisk):
    """The machine's disk, whose journal is not synced before a test says so."""

    def __init__(self) -> None:
        self.may_sync = threading.Event()
        self.may_sync.set()
        self.waiting = 0

    def open(self, path: Path, *, create: bool = False, write: bool = False) -> File:
        file = super().open(path, create=create, write=write)
        return HeldFile(file, self) if "journal" in path.parts else file


@pytest.mark.req("S7")
async def test_an_item_is_told_of_after_it_is_on_disk_and_not_before(tmp_path: Path) -> None:
    """While the disk has not answered nobody hears of it, origin or peer; then both hear the id that the log has it under."""
    disk = HeldDisk()
    async with asyncio.timeout(SECONDS_MAX), running_node(tmp_path, settings(), disk=disk) as node:
        here = Place(node)
        writer, reader = await here.talker("W"), await here.talker("R")
        await reader.sync("P1")
        disk.may_sync.clear()
        try:
            writer.say(message("submit_events", {"events": [item("a"), item("b")]}))
            await until(lambda: disk.waiting)
            # The answer to a heartbeat is the first that either of them hears.
            assert await reader.is_alive()
            assert await writer.is_alive()
            assert await here.stored() == []
        finally:
            disk.may_sync.set()

        (answer,) = await writer.hear()
        given = [result["committed_id"] for result in answer["payload"]["results"]]
        told = [each["payload"]["committed_id"] for each in await reader.hear(2)]
        stored = [record.seq async for record in records(node.log, Query(topic="sync"))]
        assert given == told == stored
        await here.leave()


@pytest.mark.req("S26")
async def test_after_a_restart_the_log_answers_and_subscriptions_begin_anew(tmp_path: Path) -> None:
    """What was committed is there, a retry gets its first id; broadcasts come to a connection once it has synced again."""
    async with place(tmp_path) as here:
        talker = await here.talker("C1")
        await talker.sync("P1")
        first = await talker.submit(item("a"), item("b"))
    async with place(tmp_path) as here:
        writer, back, other = [await here.talker(name) for name in ("C1", "C2", "C3")]
        assert await writer.submit(item("b"), item("a")) == list(reversed(first))
        assert [each["id"] for each in (await back.sync("P1"))["events"]] == ["a", "b"]
        await writer.submit(item("c"))

        assert [each["payload"]["id"] for each in await back.hear()] == ["c"]
        assert await other.is_alive()  # connected and not synced: nothing was broadcast to it
        assert (await other.sync("P1"))["effective_subscriptions"] == ["P1"]


@pytest.mark.req("S29")
async def test_retention_leaves_what_sync_clients_may_still_ask_for(tmp_path: Path) -> None:
    """
    Under a rule that drops everything, a topic without partitions shrinks, and no event that names partitions goes.

    A node never takes a partition for moved on by itself, so such events stay for as long as nobody says that it has.
    """
    rules = {"*": TopicRetention(size_bytes_max=0)}
    log = LogSettings(journal_bytes=1 << 20, segment_lines_max=5, retention=rules)
    async with place(tmp_path, msgspec.structs.replace(settings(), log=log)) as here:
        talker = await here.talker("C1")
        for start in range(0, 30, 10):
            await talker.submit(*(item(f"e{n}", "P1", f"P{n}") for n in range(start, start + 10)))
        await here.node.log.append_many([Event(EventMeta("plain", "NOTED", "s"), {}) for _ in range(30)])

        plan = await here.node.run_retention()

        assert {drop.segment.topic for drop in plan.drops} == {"plain"}
        page = await talker.sync("P7", "P1")
        assert [each["id"] for each in page["events"]] == [f"e{n}" for n in range(30)]
        assert "pruned_through_committed_id" not in page


@pytest.mark.req("S31")
@pytest.mark.parametrize("dialect", ["a", "b"])
async def test_a_client_has_so_many_drafts_under_way_over_all_its_connections(tmp_path: Path, dialect: str) -> None:
    """
    The bound is the client's: a new connection does not begin at nothing while the old one's drafts wait for the disk.

    Dialect A is told ``rate_limited``; dialect B is not read from until there is room, and then everything is committed.
    """
    disk = HeldDisk()
    given = settings(in_flight_drafts_max=3)
    async with asyncio.timeout(SECONDS_MAX), running_node(tmp_path, given, disk=disk) as node:
        here = Place(node)
        lines: list[Talker] = []
        disk.may_sync.clear()
        try:
            for number in range(3):
                lines.append(await _line(here, dialect))
                lines[-1].say(_batch(dialect, number))
                if number == 0:
                    await until(lambda: disk.waiting)
                elif dialect == "a":
                    (answer,) = await lines[-1].hear()
                    assert answer["payload"]["code"] == "rate_limited"
            if dialect == "b":
                # What cannot be refused waits: further requests of the client are not even read.
                for line in lines:
                    line.say(camel("sync", {"projectId": "proj", "sinceCommittedId": 0}))
                await until(lambda: _paused(node) == 3)
        finally:
            disk.may_sync.set()
        if dialect == "a":
            results: list[dict[str, Any]] = []
            while not results:  # until what waited for the disk is done, there is no room
                answer = await lines[2].ask(message("submit_events", {"events": [item("again")]}))
                results = answer["payload"].get("results", [])
            assert results[0]["status"] == "committed"
        else:
            for line in lines:
                heard: list[str] = []
                while {"submit_events_result", "sync_response"} - set(heard):
                    heard += [each["type"] for each in await line.hear()]
        await here.leave()


def _paused(node: Any) -> int:
    connections = node.connections.endpoints["/sync"]._connections
    return sum(connection._is_paused for connection in connections)


async def _line(here: Place, dialect: str) -> Talker:
    if dialect == "a":
        return await here.talker("C1")
    line = Talker(await connect(f"{here.node.ws_url}/sync"))
    here._clients.append(line.client)
    token = here.node.token("u", client_id="C1", projects=["proj"])
    assert (await line.ask(camel("connect", {"token": token, "clientId": "C1", "projectId": "proj"})))[
        "type"
    ] == "connected"
    return line


def _batch(dialect: str, number: int) -> bytes:
    ids = [f"{number}-{place}" for place in range(1 if number else 3)]
    if dialect == "a":
        return message("submit_events", {"events": [item(id) for id in ids]})
    common = {"partition": "P1", "projectId": "proj", "type": "note", "schemaVersion": 1, "payload": {}}
    return camel("submit_events", {"events": [common | {"id": id, "meta": {"clientTs": 1}} for id in ids]})
