"""A relative path is meant from where the process is when it is given, wherever the process goes later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.scenarios.bus.support import TOPIC, World, soon
from tidings.bus import EventBus
from tidings.client.store import ClientStore
from tidings.log.embedded import open_log
from tidings.log.embedded.follower import open_follower
from tidings.log.interface import Query
from tidings.log.keys import KeyFile
from tidings.log.settings import LogSettings
from tidings.types import Ack

CUT = LogSettings(journal_bytes=1 << 20, journal_count_max=2, segment_lines_max=4)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Another folder; the process is in the one above it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    return tmp_path / "elsewhere"


def names_in(folder: Path) -> list[str]:
    """What is in a folder."""
    return [path.name for path in folder.iterdir()]


async def handle(event: Any) -> Ack:
    """Fail with one event, so that there is a dead letter."""
    if event.offset == 9:
        raise LookupError
    return Ack()


@pytest.mark.parametrize("workspace", ["w", Path("w"), None], ids=["text", "path", "default"])
async def test_a_bus_stays_where_it_was_made(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, workspace: str | Path | None
) -> None:
    """Cursors, dead letters, claims and segments of a process that changes its folder all land in the first one."""
    options: dict[str, Any] = {} if workspace is None else {"workspace": workspace}
    folder = elsewhere.parent / (workspace or "workspace")
    world, bus = World(), EventBus(log_settings=CUT, **options)
    monkeypatch.chdir(elsewhere)  # even before it is started
    async with bus:
        await bus.subscribe(TOPIC, "g", handle, max_retries=0)
        await bus.publish_many([world.event(n) for n in range(10)])
        await soon(lambda: bus.lag(TOPIC, "g") == 0)
        monkeypatch.chdir("/")
        await bus.compact()
        await bus.subscribe(TOPIC, "late", handle, max_retries=0)
        await bus.publish_many([world.event(n) for n in range(10, 20)])
        await soon(lambda: bus.lag(TOPIC, "late") == 0)

    assert names_in(elsewhere) == []
    async with EventBus(workspace=folder) as again:
        assert await again.groups() == [(TOPIC, "g"), (TOPIC, "late")]
        assert {letter.group for letter in await again.dead_letters(TOPIC)} == {"g", "late"}
        assert [event.offset async for event in again.replay(TOPIC)] == list(range(8, 20))


async def test_a_log_and_its_follower_stay_where_they_were_opened(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log writes on, and a follower reads on, in the folder that the path named when they were opened."""
    log = await open_log("w", CUT)
    follower = await open_follower("w", CUT)
    monkeypatch.chdir(elsewhere)
    world = World()
    await log.append_many([world.event(n) for n in range(10)])
    await log.close()

    page = await follower.read(Query(topic=TOPIC))

    assert [record.offset for record in page.records] == list(range(10))
    await follower.close()
    assert names_in(elsewhere) == []


async def test_a_clients_store_and_a_key_file_are_found_again(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is opened or read again later is the file that the path named at first."""
    keys, store = KeyFile.create("keys.json"), ClientStore("client.db")
    monkeypatch.chdir(elsewhere)

    keys.reload()
    await store.open("a-client")
    await store.close()

    assert "client.db" in names_in(elsewhere.parent)
    assert names_in(elsewhere) == []
