"""History that retention has dropped, as sync clients of a whole node meet it: from the lake, or told as a gap."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import msgspec
import orjson
import pytest

from tests.integration.test_qa_sync_sockets import Place, Talker, item, message, place, settings
from tests.unit.pipeline.lake_support import all_records, archive, empty_lake
from tidings.core.clock import SYSTEM_CLOCK
from tidings.log.retention import plan_retention
from tidings.log.settings import LogSettings, TopicRetention
from tidings.server.settings import NodeSettings
from tidings.testing.node import RunningNode

COUNT = 23


def small() -> NodeSettings:
    return msgspec.structs.replace(
        settings(page_items_min=1), log=LogSettings(journal_bytes=1 << 20, segment_lines_max=5)
    )


async def drop(node: RunningNode, topic: str, **floors: int) -> int:
    """Drop what may go, given how far each partition has moved; the first offset that is left."""
    segments = node.log.topics()[topic].segments
    rule = {topic: TopicRetention(size_bytes_max=0)}
    now = datetime.datetime.now(datetime.UTC)
    await node.log.drop(plan_retention(segments, rule, now=now, partition_floors=floors))
    return node.log.topics()[topic].first_offset


async def paged(talker: Talker, *partitions: str) -> tuple[list[dict[str, Any]], set[int | None]]:
    """Everything, by paging, and what the pages said about gaps."""
    events: list[dict[str, Any]] = []
    gaps: set[int | None] = set()
    since, has_more = 0, True
    while has_more:
        asked = {"partitions": list(partitions), "since_committed_id": since, "limit": 4}
        page = (await talker.ask(message("sync", asked)))["payload"]
        events += page["events"]
        gaps.add(page.get("pruned_through_committed_id"))
        since, has_more = page["next_since_committed_id"], page["has_more"]
    return events, gaps


async def fill(here: Place) -> list[str]:
    writer = await here.talker("W")
    items = [item(f"e{number}", "P1" if number % 2 else "P2") for number in range(COUNT)]
    results = await writer.submit(*items)
    assert {each["status"] for each in results} == {"committed"}
    return [each["id"] for each in results]


@pytest.mark.parametrize("has_lake", [True, False])
async def test_an_old_cursor_is_served_from_the_lake_or_told_what_is_gone(tmp_path: Path, has_lake: bool) -> None:
    """With a lake a newcomer gets all there ever was; without, what is left, and up to where something may be missing."""
    options: dict[str, Any] = {"lake_path": str(tmp_path / "lake")} if has_lake else {}
    async with place(tmp_path / "w", small(), **options) as here:
        ids, node = await fill(here), here.node
        found, epoch = await all_records(node.log), node.log.position.epoch
        archive(empty_lake(tmp_path, SYSTEM_CLOCK), found, epoch=epoch, batch=1)
        assert await drop(node, "sync", P1=COUNT, P2=COUNT) == 20
        newcomer = await here.talker("N")

        events, gaps = await paged(newcomer, "P1", "P2")
        recent = await newcomer.sync("P1", "P2", since=21)
        (again,) = await newcomer.submit(item("e0", "P2"))

        assert [each["id"] for each in events] == (ids if has_lake else ids[20:])
        assert gaps == ({None} if has_lake else {20})
        assert [each["id"] for each in recent["events"]] == ids[21:]
        assert "pruned_through_committed_id" not in recent
        assert (again["status"], again["committed_id"]) == ("committed", 1)  # an id outlives its record
        assert node.log.position.seq == COUNT


async def test_dialect_b_is_served_from_the_lake_too_and_never_told_less_than_there_was(tmp_path: Path) -> None:
    """Its client has no word for a gap: from the lake it gets everything; without one it gets an error instead of a page."""
    for has_lake in (True, False):
        folder = tmp_path / str(has_lake)
        options: dict[str, Any] = {"lake_path": str(folder / "lake")} if has_lake else {}
        async with place(folder / "w", small(), **options) as here:
            line = await here.line()
            token = here.node.token("u", client_id="B1", projects=["proj"])
            await _camel(line, "connect", {"token": token, "clientId": "B1", "projectId": "proj"})
            made = [_project_item(number) for number in range(COUNT)]
            results = (await _camel(line, "submit_events", {"events": made}))["payload"]["results"]
            assert {each["status"] for each in results} == {"committed"}
            found, epoch = await all_records(here.node.log), here.node.log.position.epoch
            archive(empty_lake(folder, SYSTEM_CLOCK), found, epoch=epoch, batch=1)
            assert await drop(here.node, "sync.projects", proj=COUNT) == 20

            answer = await _camel(line, "sync", {"projectId": "proj", "sinceCommittedId": 0, "limit": 500})

            if has_lake:
                assert [each["id"] for each in answer["payload"]["events"]] == [each["id"] for each in made]
            else:
                assert (answer["type"], answer["payload"]["code"]) == ("error", "bad_request")
                assert answer["payload"]["details"] == {"prunedThroughCommittedId": 20}


async def test_an_event_stays_while_one_of_its_partitions_needs_it(tmp_path: Path) -> None:
    """Retention drops nothing before each partition of each event in a segment has moved past it."""
    async with place(tmp_path, small()) as here:
        ids = await fill(here)
        for floors in ({}, {"P1": COUNT}, {"P2": COUNT}, {"P1": COUNT, "P2": 4}):
            assert await drop(here.node, "sync", **floors) == 0
        assert await drop(here.node, "sync", P1=COUNT, P2=10) == 10
        events, gaps = await paged(await here.talker("N"), "P1", "P2")

    assert [each["id"] for each in events] == ids[10:]
    assert 10 in gaps


async def _camel(line: Talker, type: str, payload: Any) -> dict[str, Any]:
    return await line.ask(orjson.dumps({"type": type, "msgId": "m", "protocolVersion": "1.0", "payload": payload}))


def _project_item(number: int) -> dict[str, Any]:
    content = {"type": "note.add", "schemaVersion": 1, "payload": {"n": number}, "meta": {"clientTs": number}}
    return {"id": f"b{number}", "partition": "main", "projectId": "proj"} | content
