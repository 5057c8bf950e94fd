"""The protocol's nineteen scenarios, as transcripts, played against the sync endpoint without sockets, on both engines of the log."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.scenarios.sync_transcripts.player import Closed, load, play
from tests.unit.sync.support import EVERYTHING, OPEN_SCHEMAS, Peer, World, event, open_world
from tidings.access.context import TokenClaims
from tidings.log.embedded import open_log
from tidings.log.embedded.index import MemoryIndex
from tidings.log.interface import Log
from tidings.log.memory import MemoryLog
from tidings.log.settings import LogSettings
from tidings.sync.settings import SyncSettings
from tidings.testing import SimulatedDisk, VirtualClock


class PeerLine:
    """A ``Line`` to an endpoint without sockets."""

    def __init__(self, world: World, peer: Peer, token: str) -> None:
        self.world = world
        self.peer = peer
        self.token = token
        self.client_id = peer.client_id
        self.pending: list[dict[str, Any]] = []

    async def send(self, message: dict[str, Any]) -> None:
        self.peer.throw(msgspec.json.encode(message))

    async def receive(self) -> dict[str, Any]:
        await self.world.settle()
        self.pending += self.peer.take()
        if self.pending:
            return self.pending.pop(0)
        if self.peer.transport.code is not None:
            raise Closed(self.peer.transport.code)
        raise AssertionError("nothing came")

    async def cut(self) -> None:
        self.peer.leave()


class MemoryStage:
    """A ``Stage`` in one process. After a crash a new endpoint stands on what the log has."""

    def __init__(self, exits: contextlib.AsyncExitStack, settings: SyncSettings) -> None:
        self.exits = exits
        self.settings = settings
        self.clock = VirtualClock()
        self.lines: list[PeerLine] = []
        self.world: World

    async def start(self) -> None:
        log = await self.open_log()
        self.exits.push_async_callback(log.close)
        self.world = await self.exits.enter_async_context(open_world(self.settings, log=log, clock=self.clock))

    async def open_log(self) -> Log:
        return MemoryLog(clock=self.clock)

    async def reopened(self) -> Log:
        return self.world.log

    async def connect(self, client_id: str, claims: dict[str, Any] | None, lifetime_s: int) -> PeerLine:
        given = EVERYTHING if claims is None else msgspec.convert(claims, TokenClaims)
        token = self.world.token(client_id, given, lifetime_s=max(1, lifetime_s))
        if lifetime_s < 0:
            await self.clock.advance(1 - lifetime_s)
        line = PeerLine(self.world, self.world.peer(client_id), token)
        self.lines.append(line)
        return line

    async def fill(self, count: int) -> None:
        await self.world.fill(count)

    async def pass_time(self, seconds: float) -> None:
        await self.clock.advance(seconds)

    async def crash(self) -> None:
        # From here on nothing reaches the clients: whatever the server stores now it cannot tell them.
        for line in self.lines:
            line.peer.transport.code = 1006
        await self.world.log.wait(self.world.log.position.seq)
        log = await self.reopened()
        self.world = await self.exits.enter_async_context(open_world(self.settings, log=log, clock=self.clock))

    async def reload(self, settings: dict[str, Any]) -> None:
        self.world.service.reload(msgspec.structs.replace(self.settings, **settings))


class DiskStage(MemoryStage):
    """The same on files: a crash is a loss of power, and only what was synced is there afterwards."""

    def __init__(self, exits: contextlib.AsyncExitStack, settings: SyncSettings) -> None:
        super().__init__(exits, settings)
        self.disk = SimulatedDisk()

    async def open_log(self) -> Log:
        small = LogSettings(journal_bytes=1 << 20, journal_count_max=2)
        workspace = Path("/data/workspace")
        return await open_log(workspace, small, disk=self.disk, index=MemoryIndex(), clock=self.clock)

    async def reopened(self) -> Log:
        self.disk = self.disk.after_crash("lose_all")
        log = await self.open_log()
        self.exits.push_async_callback(log.close)
        return log


# What a client alone must do (SC06, SC07, SC08) is shown by the client's tests; here the server's part of it is played.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("SC00", marks=pytest.mark.req("SC00")),
        pytest.param("SC01", marks=pytest.mark.req("SC01")),
        pytest.param("SC02", marks=pytest.mark.req("SC02")),
        pytest.param("SC03", marks=pytest.mark.req("SC03")),
        pytest.param("SC04", marks=pytest.mark.req("SC04")),
        pytest.param("SC05", marks=pytest.mark.req("SC05")),
        "SC06",
        "SC07",
        "SC08",
        pytest.param("SC09", marks=pytest.mark.req("SC09")),
        pytest.param("SC10", marks=pytest.mark.req("SC10")),
        pytest.param("SC11", marks=pytest.mark.req("SC11")),
        pytest.param("SC12", marks=pytest.mark.req("SC12")),
        pytest.param("SC13", marks=pytest.mark.req("SC13")),
        pytest.param("SC14", marks=pytest.mark.req("SC14")),
        pytest.param("SC15", marks=pytest.mark.req("SC15")),
        pytest.param("SC16", marks=pytest.mark.req("SC16")),
        pytest.param("SC17", marks=pytest.mark.req("SC17")),
        pytest.param("SC18", marks=pytest.mark.req("SC18")),
    ],
)
@pytest.mark.parametrize("stage_type", [MemoryStage, DiskStage])
async def test_the_scenario_goes_as_written(name: str, stage_type: type[MemoryStage]) -> None:
    """Every message of the transcript comes as written, and nothing else does."""
    transcript = load(name)
    settings = msgspec.convert({"schemas": OPEN_SCHEMAS} | transcript["settings"], SyncSettings)

    async with contextlib.AsyncExitStack() as exits:
        stage = stage_type(exits, settings)
        await stage.start()
        await play(transcript, stage)


@pytest.mark.req("S26", "S27", "S28")
async def test_after_a_loss_of_power_the_log_decides() -> None:
    """What was stored and not answered is there; what was committed before too; subscriptions come with new connections."""
    settings = SyncSettings(schemas=OPEN_SCHEMAS)
    async with contextlib.AsyncExitStack() as exits:
        stage = DiskStage(exits, settings)
        await stage.start()
        origin = await stage.world.client("C1")
        (told,) = await origin.submit(event("told"))
        untold = await stage.connect("C2", None, 60)
        connect = {"token": untold.token, "client_id": "C2", "supported_profiles": ["canonical"]}
        assert (await untold.peer.ask("connect", connect))["type"] == "connected"
        untold.peer.say("submit_events", {"events": [event("untold")]})
        await stage.crash()

        peer, again = await stage.world.client("C3"), await stage.world.client("C2")
        page = await peer.sync("P1")
        results = await again.submit(event("told"), event("untold"), event("new"))

        assert [each["id"] for each in page["events"]] == ["told", "untold"]
        assert results[0] == told
        assert [result["committed_id"] for result in results] == [1, 2, 3]
        assert [message["payload"]["id"] for message in peer.take()] == ["new"]
