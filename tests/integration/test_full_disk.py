"""A full disk through the surfaces of the product: the bus, a node's HTTP, the command line. It is served from, and mended."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from tests.integration.cli.support import run
from tests.integration.full_disk import CrowdedDisk, small_file_system, use_up
from tests.integration.node_support import until_answered
from tests.scenarios.bus.support import soon
from tidings.bus import EventBus
from tidings.bus.store.files import open_files
from tidings.log.embedded.disk import Disk
from tidings.log.errors import StorageFull
from tidings.log.interface import Query
from tidings.log.settings import LogSettings
from tidings.testing.node import node_settings, running_node
from tidings.types import Ack, Event, EventMeta

SETTINGS = LogSettings(journal_bytes=1 << 20, segment_lines_max=200, reserve_bytes=6 << 20)
TOPIC = "demo"


def event(n: int = 0, size: int = 1000) -> Event:
    return Event(EventMeta(topic=TOPIC, type="NOTED", space_id="shared:home"), {"n": n, "pad": "x" * size})


async def publish_until_full(bus: EventBus) -> None:
    """Publish until there is no room for more."""

    async def publish() -> None:
        while True:
            await bus.publish_many([event(n) for n in range(100)], timeout_s=0.01)

    with pytest.raises(StorageFull):
        await publish()


async def handle_all(bus: EventBus, group: str) -> int:
    """Have a group handle its backlog; how many events that were."""
    count = 0

    async def handler(_: Any) -> Ack:
        nonlocal count
        count += 1
        return Ack()

    subscription = await bus.subscribe(TOPIC, group, handler)
    await soon(lambda: bus.lag(TOPIC, group) == 0)
    await bus.unsubscribe(subscription)
    return count


async def mend(workspace: Path, disk: Disk | None, *, is_reopened: bool, fill: Any) -> None:
    """Fill a disk with events, handle and compact them on the full disk, and publish again."""
    async with EventBus(open_log=partial(open_files, workspace, SETTINGS, disk=disk)) as bus:
        await bus.publish_many([event(n) for n in range(2000)])
        if not is_reopened:
            fill()
            await publish_until_full(bus)
            await _mend(bus)
            return
    fill()
    async with EventBus(open_log=partial(open_files, workspace, SETTINGS, disk=disk)) as bus:
        assert bus.health().is_storage_full
        with pytest.raises(StorageFull):
            await bus.publish(event(), timeout_s=0.0)
        await _mend(bus)


async def _mend(bus: EventBus) -> None:
    end = bus.log.topics()[TOPIC].next_offset
    assert await handle_all(bus, "first") == end
    assert (await bus.position_of(TOPIC, "first")).cursor.committed == end - 1  # type: ignore[union-attr]
    plan = await bus.compact()
    assert plan.freed_bytes > 1_000_000
    await bus.publish(event(), timeout_s=20.0)
    assert not bus.health().is_storage_full
    records = (await bus.log.read(Query(topic="audit"))).records
    assert [record.meta.type for record in records][:2] == ["bus.log.compact", "bus.log.compact.ended"]


@pytest.mark.parametrize("is_reopened", [False, True])
async def test_a_full_disk_is_mended_by_handling_and_compacting(tmp_path: Path, is_reopened: bool) -> None:
    """With no byte free the backlog is handled, its places are kept, and compact drops it; then publishing goes on by itself."""
    disk = CrowdedDisk()

    def fill() -> None:
        disk.left_bytes = 0

    await mend(tmp_path, disk, is_reopened=is_reopened, fill=fill)


async def test_the_reserve_of_a_small_closed_log_is_enough_to_mend_it(tmp_path: Path) -> None:
    """With default sizes a closed log keeps little back: on a full disk it opens, keeps its places and compacts with that."""
    disk = CrowdedDisk(4096)
    settings = msgspec.structs.replace(SETTINGS, reserve_bytes=None)
    async with EventBus(open_log=partial(open_files, tmp_path, settings, disk=disk)) as bus:
        await bus.publish_many([event(n) for n in range(3500)])
    assert (tmp_path / ".bus" / "reserve").stat().st_size < 600_000
    disk.left_bytes = 0

    async with EventBus(open_log=partial(open_files, tmp_path, settings, disk=disk)) as bus:
        assert bus.health().is_storage_full
        await _mend(bus)


async def test_compacting_goes_on_however_many_events_wait_for_the_segments(tmp_path: Path) -> None:
    """On a full disk each drop keeps its ids, while the log flushes beside it: all sealed segments go."""
    disk = CrowdedDisk(4096)
    settings = msgspec.structs.replace(SETTINGS, reserve_bytes=None)
    async with EventBus(open_log=partial(open_files, tmp_path, settings, disk=disk)) as bus:
        await bus.publish_many([event(n) for n in range(4000)])
        assert await handle_all(bus, "first") == 4000
        disk.left_bytes = 0
        with pytest.raises(StorageFull):
            await bus.publish_many([Event(EventMeta(f"t{n}", "NOTED", "s:1"), {}) for n in range(1000)], timeout_s=0.01)
        for _ in range(3):
            await bus.compact()
        assert bus.log.topics()[TOPIC].size_bytes < 300_000
        await bus.publish(event(), timeout_s=20.0)


@pytest.fixture
def file_system(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MB."""
    try:
        with small_file_system(tmp_path / "small", "16m") as folder:
            yield folder
    except PermissionError as error:
        pytest.skip(f"no file system can be mounted here: {error}")


@pytest.mark.heavy
@pytest.mark.parametrize("is_reopened", [False, True])
async def test_a_file_system_that_is_really_full_is_mended(file_system: Path, is_reopened: bool) -> None:
    """The same on a file system without a free block: index, claims and all."""
    await mend(file_system / "w", None, is_reopened=is_reopened, fill=lambda: use_up(file_system))


@pytest.mark.heavy
async def test_the_tool_works_on_a_file_system_that_is_really_full(file_system: Path) -> None:
    """Where nothing fits any more, ``log stats``, ``log verify`` and ``log retention --yes`` work, and the last leaves its record."""
    workspace = file_system / "w"
    async with EventBus(workspace=workspace, log_settings=SETTINGS) as bus:
        await bus.publish_many([event(n) for n in range(2000)])
    use_up(file_system)

    for command in (("log", "stats"), ("log", "verify")):
        assert run(*command, "-w", workspace).returncode == 0
    done = run("log", "retention", "--max-bytes", "300KB", "--yes", "--json", "-w", workspace)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["freed_bytes"] > 1_000_000
    shown = run("log", "read", "audit", "--json", "-w", workspace)
    assert b"retention" in shown.stdout


async def test_dead_letters_on_a_full_disk_leave_room_for_everything_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A group whose handler always fails waits for room; the others keep their places, and the log opens again."""
    disk = CrowdedDisk()
    settings = msgspec.structs.replace(SETTINGS, reserve_bytes=2 << 20)
    bus = EventBus(open_log=partial(open_files, tmp_path, settings, disk=disk))
    for _ in range(10):
        await bus.publish_many([event(n, size=20_000) for n in range(20)])
    disk.left_bytes = 0

    async def fail(_: Any) -> None:
        raise ValueError("it never works")

    await bus.subscribe(TOPIC, "failing", fail, max_retries=0)
    await soon(lambda: "a dead letter of group failing cannot be stored" in caplog.text)
    left_bytes = (tmp_path / ".bus" / "reserve").stat().st_size
    handled = await handle_all(bus, "working")
    await bus.close(timeout_s=0.01)
    async with EventBus(open_log=partial(open_files, tmp_path, settings, disk=disk)) as again:
        place = await again.position_of(TOPIC, "working")
        letters = await again.dead_letters(TOPIC)

    assert left_bytes > 300_000
    assert handled == 200
    assert place.cursor.committed == 199  # type: ignore[union-attr]
    assert len(letters) < 200


async def test_records_from_the_reserve_leave_room_to_open_and_to_keep_places(tmp_path: Path) -> None:
    """However many records with a right to the reserve come, the last of them are refused, and everything else goes on."""
    disk = CrowdedDisk()
    settings = msgspec.structs.replace(SETTINGS, reserve_bytes=2 << 20)
    bus = EventBus(open_log=partial(open_files, tmp_path, settings, disk=disk))
    await bus.publish_many([event(n) for n in range(100)])
    disk.left_bytes = 0

    async def use_the_reserve() -> None:
        for n in range(1000):
            await bus.log.append(event(n, size=20_000), from_reserve=True)

    with pytest.raises(StorageFull):
        await use_the_reserve()
    left_bytes = (tmp_path / ".bus" / "reserve").stat().st_size
    end = bus.log.topics()[TOPIC].next_offset
    await bus.close()
    async with EventBus(open_log=partial(open_files, tmp_path, settings, disk=disk)) as again:
        handled = await handle_all(again, "first")
        place = await again.position_of(TOPIC, "first")

    assert left_bytes > 200_000
    assert handled == end
    assert place.cursor.committed == end - 1  # type: ignore[union-attr]


async def test_a_reserve_that_is_not_whole_is_used_too(tmp_path: Path) -> None:
    """Where there was no room to make the reserve as large as the settings say, a full disk is mended with what there is."""
    disk = CrowdedDisk()
    settings = msgspec.structs.replace(SETTINGS, segment_lines_max=1000)
    async with EventBus(open_log=partial(open_files, tmp_path, settings, disk=disk)) as bus:
        for _ in range(4):
            await bus.publish_many([event(n) for n in range(500)])
    disk.left_bytes = 0
    larger = msgspec.structs.replace(settings, reserve_bytes=64 << 20)

    async with EventBus(open_log=partial(open_files, tmp_path, larger, disk=disk)) as bus:
        handled = await handle_all(bus, "first")
        plan = await bus.compact()

    assert handled == 2000
    assert plan.freed_bytes > 1_000_000


async def test_the_tool_leaves_the_reserve_as_large_as_it_is(tmp_path: Path) -> None:
    """A command that writes does not give away what the workspace's own program has kept back."""
    settings = msgspec.structs.replace(SETTINGS, reserve_bytes=20 << 20)
    async with EventBus(workspace=tmp_path, log_settings=settings) as bus:
        await bus.publish(event())
        await handle_all(bus, "first")

    done = run("group", "pause", TOPIC, "first", "-w", tmp_path)

    assert done.returncode == 0, done.stderr
    assert (tmp_path / ".bus" / "reserve").stat().st_size == 20 << 20


@pytest.mark.heavy
async def test_the_tool_drops_many_dead_letters_on_a_file_system_that_is_really_full(file_system: Path) -> None:
    """``dlq drop --all`` has room for what it writes, however many letters there are."""
    workspace = file_system / "w"
    async with EventBus(workspace=workspace, log_settings=SETTINGS) as bus:

        async def fail(_: Any) -> None:
            raise ValueError("it never works")

        await bus.subscribe(TOPIC, "failing", fail, max_retries=0, workers=50)
        await bus.publish_many([event(n, size=10) for n in range(1000)])
        await soon(lambda: bus.lag(TOPIC, "failing") == 0)
    use_up(file_system)

    done = run("dlq", "drop", TOPIC, "--all", "--yes", "-w", workspace)

    assert done.returncode == 0, done.stderr
    assert not json.loads(run("dlq", "list", TOPIC, "--json", "-w", workspace).stdout or b"[]")


async def test_a_right_is_taken_away_on_a_full_disk(tmp_path: Path) -> None:
    """Where events are refused because there is no room, a revocation is stored, and holds at once."""
    disk = CrowdedDisk()
    settings = msgspec.structs.replace(node_settings(), log=SETTINGS)
    async with running_node(tmp_path, settings, disk=disk) as node, httpx.AsyncClient(base_url=node.url) as client:
        await node.bus.publish_many([event(n) for n in range(50)])
        disk.left_bytes = 0
        await publish_until_full(node.bus)
        admin, other = node.headers("root", roles=["admin"]), node.headers("bob", roles=["admin"])
        right = {"subject": "bob", "action": "read", "resource": f"topic:{TOPIC}"}
        before = await client.get(f"/v1/events?topic={TOPIC}&limit=1", headers=other)
        revoked = await client.post("/v1/access/revocations", json=right, headers=admin)
        after = await client.get(f"/v1/events?topic={TOPIC}&limit=1", headers=other)
        assert node.bus.health().is_storage_full

    assert (before.status_code, revoked.status_code) == (200, 201), revoked.text
    assert after.status_code in {401, 403}


async def test_a_node_on_a_full_disk_serves_reads_and_refuses_at_once(tmp_path: Path) -> None:
    """It starts, reads and probes are answered, publishes get 503 with the code and Retry-After; with room all goes on."""
    disk = CrowdedDisk()
    settings = msgspec.structs.replace(node_settings(), log=SETTINGS)
    async with running_node(tmp_path, settings, disk=disk) as node:
        await node.bus.publish_many([event(n) for n in range(50)])
    disk.left_bytes = 0

    async with running_node(tmp_path, settings, disk=disk) as node, httpx.AsyncClient(base_url=node.url) as client:
        admin = node.headers("root", roles=["admin"])
        body = {"meta": {"topic": TOPIC, "type": "NOTED", "space_id": "shared:home"}, "payload": {}}
        async with asyncio.timeout(5):
            refused = await client.post("/v1/events", json=body, headers=admin)
            many = await client.post("/v1/events", json=[body, body], headers=admin)
        ready, alive = await client.get("/readyz"), await client.get("/healthz")
        read = await client.get(f"/v1/events?topic={TOPIC}", headers=admin)
        handled = await handle_all(node.bus, "worker")
        disk.left_bytes = None

        async def codes() -> list[str]:
            return [reason["code"] for reason in (await client.get("/readyz")).json()["reasons"]]

        await until_answered(codes, [])
        stored = await client.post("/v1/events", json=body, headers=admin)

    for answer in (refused, many):
        assert (answer.status_code, answer.json()["code"]) == (503, "log.storage_full")
        assert answer.headers["retry-after"]
        assert str(tmp_path) not in answer.text
    assert (ready.status_code, ready.json()["reasons"][0]["code"]) == (503, "log.storage_full")
    assert alive.status_code == 200
    assert len(read.json()["events"]) == handled == 50
    assert stored.status_code == 201


async def test_publishes_that_wait_leave_places_for_reads_and_probes(tmp_path: Path) -> None:
    """However many publishes wait for a full window, reads and probes are answered, and further publishes are told to come back."""
    base = node_settings()
    server = msgspec.structs.replace(base.server, requests_max=8)
    settings = msgspec.structs.replace(base, log=SETTINGS, server=server)
    async with running_node(tmp_path, settings) as node:
        opened = asyncio.Event()

        async def handler(_: Any) -> Ack:
            await opened.wait()
            return Ack()

        await node.bus.subscribe(TOPIC, "slow", handler, max_inflight=1)
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=node.url, limits=limits) as client:
            admin = node.headers("root", roles=["admin"])
            body = {"meta": {"topic": TOPIC, "type": "NOTED", "space_id": "shared:home"}, "payload": {}}

            async def post(subject: str = "root") -> httpx.Response:
                headers = node.headers(subject, roles=["admin"])
                return await client.post("/v1/events", json=body, headers=headers)

            first = await post()
            waiting = [asyncio.create_task(post(f"root-{number}")) for number in range(4)]
            refused = await _until_refused(post)
            read = await client.get(f"/v1/events?topic={TOPIC}", headers=admin)
            ready = await client.get("/readyz")
            opened.set()
            answers = await asyncio.gather(*waiting)

    assert first.status_code == 201
    assert (refused.status_code, refused.json()["code"]) == (503, "node.too_many_publishes")
    assert refused.headers["retry-after"]
    assert (read.status_code, ready.status_code) == (200, 200)
    assert [answer.status_code for answer in answers] == [201] * 4


async def _until_refused(post: Any) -> httpx.Response:
    async with asyncio.timeout(20):
        while True:
            asking = asyncio.create_task(post())
            done, _ = await asyncio.wait({asking}, timeout=0.5)
            if done:
                return asking.result()  # type: ignore[no-any-return]
            asking.cancel()
