"""The sync protocol's scenarios over real sockets, through a whole node on a real workspace."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import orjson
import pytest

from tests.access_events import revoke_event
from tests.integration.node_support import SECONDS_MAX, Client, connect, until
from tests.scenarios.sync_transcripts.player import Closed, load, play
from tests.unit.sync.support import EVERYTHING, OPEN_SCHEMAS
from tidings.access.context import TokenClaims
from tidings.access.resources import Action, partition
from tidings.access.tokens import TokenIssuer
from tidings.core.clock import SystemClock
from tidings.core.events import Event, EventMeta
from tidings.server.settings import NodeSettings
from tidings.sync.settings import SyncSettings
from tidings.testing.node import RunningNode, node_settings, running_node

SCENARIOS = [f"SC{number:02}" for number in range(19)]


class JumpingClock(SystemClock):
    """The machine's clock, with leaps: whoever sleeps wakes when a leap passes its time."""

    __slots__ = ("_leap_s", "_leapt")

    def __init__(self) -> None:
        self._leap_s = 0.0
        self._leapt = asyncio.Event()

    def now_ns(self) -> int:
        return super().now_ns() + int(self._leap_s * 1e9)

    def monotonic(self) -> float:
        return super().monotonic() + self._leap_s

    async def sleep(self, seconds: float) -> None:
        until_s = self.monotonic() + seconds
        while (left_s := until_s - self.monotonic()) > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._leapt.wait()

    def leap(self, seconds: float) -> None:
        self._leap_s += seconds
        leapt, self._leapt = self._leapt, asyncio.Event()
        leapt.set()


class SocketLine:
    """A ``Line`` over a socket."""

    def __init__(self, stage: SocketStage, client: Client, client_id: str, token: str) -> None:
        self.stage = stage
        self.client = client
        self.client_id = client_id
        self.token = token
        self.taken = 0

    async def send(self, message: dict[str, Any]) -> None:
        self.stage.seq_before = self.stage.node.log.position.seq
        if not self.client.is_gone:
            self.client.say(msgspec.json.encode(message))

    async def receive(self) -> dict[str, Any]:
        await self.client.hear(self.taken + 1)
        if self.taken < len(self.client.heard):
            self.taken += 1
            message: dict[str, Any] = orjson.loads(self.client.heard[self.taken - 1])
            return message
        raise Closed(self.client.close_code or 1006)

    async def cut(self) -> None:
        self.client.transport.disconnect(False)
        await until(lambda: self.client.is_gone)


class SocketStage:
    """A ``Stage`` on a node; a crash is a node that ends while nobody hears its answers."""

    def __init__(
        self, workspace: Path, settings: NodeSettings, clock: JumpingClock, exits: contextlib.AsyncExitStack
    ) -> None:
        self.workspace = workspace
        self.settings = settings
        self.clock = clock
        self.exits = exits
        self.node: RunningNode
        self.lines: list[SocketLine] = []
        self.seq_before = 0

    async def start(self) -> None:
        opening = running_node(self.workspace, self.settings, clock=self.clock)
        self.node = await self.exits.enter_async_context(opening)

    async def connect(self, client_id: str, claims: dict[str, Any] | None, lifetime_s: int) -> SocketLine:
        given = EVERYTHING if claims is None else msgspec.convert(claims, TokenClaims)
        issuer = TokenIssuer(self.settings.access.tokens, self.clock)
        token = issuer.issue(f"user-of-{client_id}", client_id=client_id, claims=given, lifetime_s=max(lifetime_s, 1))
        if lifetime_s <= 0:
            self.clock.leap(1 - lifetime_s)
        line = SocketLine(self, await connect(f"{self.node.ws_url}/sync"), client_id, token)
        self.lines.append(line)
        return line

    async def fill(self, count: int) -> None:
        await self.node.log.append_many([Event(EventMeta("filler", "FILLER", "test"), {}) for _ in range(count)])

    async def pass_time(self, seconds: float) -> None:
        self.clock.leap(seconds)

    async def crash(self) -> None:
        await until(lambda: self.node.log.position.seq > self.seq_before)
        for line in self.lines:
            await line.cut()
        await self.node.stop(0.0)
        await self.start()

    async def reload(self, settings: dict[str, Any]) -> None:
        sync = msgspec.structs.replace(self.node.settings.sync, **settings)
        self.node.reload(msgspec.structs.replace(self.node.settings, sync=sync))

    async def end(self) -> None:
        for line in self.lines:
            await line.cut()


@contextlib.asynccontextmanager
async def stage_for(workspace: Path, sync: SyncSettings) -> AsyncIterator[SocketStage]:
    base = node_settings()
    tokens = msgspec.structs.replace(base.access.tokens, leeway_s=0)
    settings = msgspec.structs.replace(base, sync=sync, access=msgspec.structs.replace(base.access, tokens=tokens))
    async with contextlib.AsyncExitStack() as exits:
        stage = SocketStage(workspace, settings, JumpingClock(), exits)
        await stage.start()
        yield stage
        await stage.end()


@pytest.mark.parametrize("name", SCENARIOS)
async def test_the_scenario_goes_as_written_over_sockets(tmp_path: Path, name: str) -> None:
    """Every message of the transcript comes as written through httptools, picows and the log on disk."""
    transcript = load(name)
    sync = msgspec.convert({"schemas": OPEN_SCHEMAS} | transcript["settings"], SyncSettings)

    async with asyncio.timeout(SECONDS_MAX * 2), stage_for(tmp_path, sync) as stage:
        await play(transcript, stage)


async def test_nothing_after_a_revocation_is_delivered_on_a_live_socket(tmp_path: Path) -> None:
    """Two readers hear a stream of commits; the one whose right is revoked in the midst of it hears nothing with a higher seq."""
    async with stage_for(tmp_path, SyncSettings(schemas=OPEN_SCHEMAS)) as stage:
        lines = {name: await _joined(stage, name) for name in ("writer", "keeps", "loses")}
        log = stage.node.log
        revoked_at = 0
        for number in range(30):
            if number == 15:
                revocation = revoke_event("user-of-loses", Action.SYNC, partition("P1"), actor="root")
                revoked_at = (await log.append(revocation)).seq
            await lines["writer"].send(_message("submit_events", {"events": [_item(number)]}))
            assert (await lines["writer"].receive())["type"] == "submit_events_result"
        kept = await _broadcasts(lines["keeps"], 30)
        await stage.node.services.dispatcher.reached(log.position.seq)
        await lines["loses"].send(_message("heartbeat", {}))
        lost = await _broadcasts(lines["loses"], None)

    assert len(kept) == 30
    assert lost == [seq for seq in kept if seq < revoked_at]
    assert len(lost) == 15


async def _joined(stage: SocketStage, name: str) -> SocketLine:
    line = await stage.connect(name, None, 3600)
    profiles = {"required_profile": "canonical", "supported_profiles": ["canonical"]}
    await line.send(_message("connect", {"token": line.token, "client_id": name, "last_committed_id": 0} | profiles))
    assert (await line.receive())["type"] == "connected"
    if name != "writer":
        names = {"partitions": ["P1"], "subscription_partitions": ["P1"], "since_committed_id": 0}
        await line.send(_message("sync", names))
        assert (await line.receive())["type"] == "sync_response"
    return line


async def _broadcasts(line: SocketLine, count: int | None) -> list[int]:
    """The committed ids that were broadcast: so many, or all before the answer to a heartbeat."""
    found: list[int] = []
    while count is None or len(found) < count:
        message = await line.receive()
        if message["type"] == "heartbeat_ack":
            break
        if message["type"] == "event_broadcast":
            found.append(message["payload"]["committed_id"])
    return found


def _message(type: str, payload: dict[str, Any]) -> dict[str, Any]:
    return {"type": type, "msg_id": "m", "timestamp": 0, "protocol_version": "1.0", "payload": payload}


def _item(number: int) -> dict[str, Any]:
    event = {"type": "event", "payload": {"schema": "note", "data": {"n": number}}}
    return {"id": f"e{number}", "partitions": ["P1"], "event": event}
