"""
A client that is killed at any of its steps goes on as if nothing had happened.

A killed process leaves the files as its last system call left them. So the store's files are copied before every single
SQL statement of a run, together with what the server had at that moment, and each copy is gone on with.
"""

from __future__ import annotations

import asyncio
import copy
import random
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec
import pytest

from tests.unit.client.support import ModelServer, Network, numbers
from tidings.client import ClientSettings, ClientStore, SyncClient
from tidings.client import database as database_module
from tidings.client.database import open_connection
from tidings.testing import VirtualClock
from tidings.wire.sync_frames import CommittedEvent

SETTINGS: Final = ClientSettings(
    page_events=3, batch_events_max=4, refresh_events=4, snapshot_events=5, retry_s_min=0.01
)
PARTITION: Final = ["P1"]


class Moment(msgspec.Struct):
    """What a kill would have left."""

    files: Path
    server_events: list[CommittedEvent]
    told: frozenset[int]
    """The drafts whose submission had returned: these must not get lost."""
    begun: frozenset[int]


class Recorder:
    """Copies the files before every statement."""

    def __init__(self, store: Path, into: Path, server: ModelServer) -> None:
        self.store = store
        self.into = into
        self.server = server
        self.told: set[int] = set()
        self.begun: set[int] = set()
        self.moments: list[Moment] = []

    def before(self, statement: str) -> None:
        folder = self.into / str(len(self.moments))
        folder.mkdir()
        for name in (self.store.name, f"{self.store.name}-wal"):
            if (self.store.parent / name).exists():
                shutil.copyfile(self.store.parent / name, folder / name)
        self.moments.append(
            Moment(folder / self.store.name, list(self.server.events), frozenset(self.told), frozenset(self.begun))
        )


def make_client(path: Path, network: Network, clock: VirtualClock, seed: int = 1) -> SyncClient[list[int]]:
    return SyncClient(
        "ws://server/sync",
        token="token",
        client_id="ana",
        store=ClientStore(path, is_inline=True),
        partitions=PARTITION,
        view=numbers(),
        settings=SETTINGS,
        connector=network,
        clock=clock,
        rng=random.Random(seed),
    )


async def eventful_run(path: Path, server: ModelServer, recorder: Recorder) -> None:
    """Drafts, broadcasts, pages, a lost answer, a rejection, a snapshot, a cut line, a prune."""
    clock, network = VirtualClock(), Network(server)
    server.reject = lambda item: ("validation_failed", []) if b"113" in bytes(item.event) else None
    for n in range(7):
        server.commit(payload={"n": n})
    network.is_up = False
    async with make_client(path, network, clock) as client:

        async def submit(n: int) -> None:
            recorder.begun.add(n)
            await client.submit(PARTITION, "noted", {"n": n}, id=f"own-{n}")
            recorder.told.add(n)

        for n in range(110, 116):
            await submit(n)
        server.lose_results = 1
        network.is_up = True
        await clock.run_until(client.drained(), seconds_max=60)
        for n in range(7, 12):
            server.commit(payload={"n": n})
        await asyncio.gather(*(submit(n) for n in range(116, 120)))
        await clock.run_until(client.drained(), seconds_max=60)
        await client.prune()
        server.cut()
        await submit(120)
        await clock.run_until(client.drained(), seconds_max=60)
        await client.release("own-113")
        await clock.run_until(client.drained(), seconds_max=60)


def revived(events: list[CommittedEvent]) -> ModelServer:
    """A server that has these events and nothing against any draft."""
    server = ModelServer()
    server.events = copy.copy(events)
    server.by_id = {event.id: event for event in events}
    server.last_id = len(events)
    return server


async def check_goes_on(moment: Moment) -> None:
    server, clock = revived(moment.server_events), VirtualClock()
    async with make_client(moment.files, Network(server), clock) as client:
        await clock.run_until(client.caught_up(), seconds_max=60)
        for kept in await client.quarantine():
            await client.release(kept.event.id)
        await clock.run_until(client.drained(), seconds_max=60)
        await clock.run_until(client.caught_up(), seconds_max=60)

        own = [event.id for event in server.events if event.id.startswith("own-")]
        assert len(own) == len(set(own)), "no draft is committed twice"
        assert {f"own-{n}" for n in moment.told} <= set(own), "no draft that was taken is lost"
        assert set(own) <= {f"own-{n}" for n in moment.begun}
        in_order = [msgspec.json.decode(event.event)["payload"]["n"] for event in server.events]
        assert client.view == in_order, "the view is the server's history"


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    live, into = tmp_path / "live", tmp_path / "moments"
    live.mkdir()
    into.mkdir()
    recorder = Recorder(live / "ana.db", into, ModelServer())

    def open_traced(path: str) -> sqlite3.Connection:
        connection = open_connection(path)
        connection.set_trace_callback(recorder.before)
        return connection

    monkeypatch.setattr(database_module, "open_connection", open_traced)
    yield recorder
    monkeypatch.undo()


@pytest.mark.crash
@pytest.mark.req("S18", "S23", "S27")
async def test_a_client_killed_at_any_statement_goes_on(recorded: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed before any statement of an eventful run, the next client loses nothing, repeats nothing, shows everything."""
    await eventful_run(recorded.store, recorded.server, recorded)
    monkeypatch.undo()

    assert len(recorded.moments) > 150
    for moment in recorded.moments:
        await check_goes_on(moment)


@pytest.mark.crash
async def test_a_tail_that_was_not_written_whole_takes_only_itself(tmp_path: Path) -> None:
    """Cut anywhere in its write-ahead file, the store opens, and holds the drafts of whole transactions, oldest first."""
    path, clock = tmp_path / "ana.db", VirtualClock()
    network = Network(ModelServer())
    network.is_up = False
    async with make_client(path, network, clock) as client:
        for n in range(6):
            await client.submit(PARTITION, "noted", {"n": n})
        main, tail = path.read_bytes(), path.with_name("ana.db-wal").read_bytes()

    seen = set()
    rng = random.Random(3)
    for cut in sorted(rng.sample(range(len(tail)), 60)):
        copied = tmp_path / f"cut-{cut}.db"
        copied.write_bytes(main)
        copied.with_name(f"{copied.name}-wal").write_bytes(tail[:cut])
        async with make_client(copied, network, clock) as client:
            assert client.view == list(range(len(client.view)))
            seen.add(len(client.view))

    assert max(seen) >= 5
