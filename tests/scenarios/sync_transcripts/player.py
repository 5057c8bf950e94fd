"""
Plays transcripts of the sync protocol: what clients send, and what must come back.

A transcript is a list of steps. It knows nothing of how messages travel: a ``Stage`` makes the connections, so the same
transcript plays without sockets and over real ones.

| step | meaning |
|---|---|
| ``{"join": C, "partitions": [...]}`` | connect as C, sync from 0 (or ``since``) and subscribe |
| ``{"open": C}`` | a connection that has said nothing |
| ``{"from": C, "send": type, "payload": {...}}`` | a message; ``$token`` stands for C's token |
| ``{"to": C, "expect": type, "payload": {...}}`` | the next message to C is this, and has at least these fields |
| ``{"to": C, "in_any_order": [{"expect": type, ...}, ...]}`` | the next messages to C are these, of different types, in whatever order |
| ``{"to": C, "quiet": true}`` | nothing is on its way to C: a heartbeat is answered first |
| ``{"to": C, "closed": code}`` | C's connection was closed |
| ``{"cut": C}``, ``{"fill": n}``, ``{"pass_s": n}``, ``{"crash": true}``, ``{"reload": {...}}`` | the line breaks; the count moves on by n; time passes; the server dies after storing what it was sent, and starts again; its settings change |

In what is expected, ``$any`` is anything, ``$name`` the same value wherever it stands, ``$name+2`` that number plus two, and
``{"$absent": true}`` a field that must not be there. In what is sent, names stand for the values they were given.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, Final, Protocol

import orjson

FOLDER: Final = Path(__file__).parent
ABSENT: Final = {"$absent": True}


class Closed(Exception):
    """The connection was closed, with this code."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class Line(Protocol):
    """One connection."""

    token: str
    client_id: str

    async def send(self, message: dict[str, Any]) -> None: ...
    async def receive(self) -> dict[str, Any]:
        """The next message; raises ``Closed`` if there is none and the connection is closed."""
        ...

    async def cut(self) -> None: ...


class Stage(Protocol):
    """Where a transcript is played."""

    async def connect(self, client_id: str, claims: dict[str, Any] | None, lifetime_s: int) -> Line: ...
    async def fill(self, count: int) -> None: ...
    async def pass_time(self, seconds: float) -> None: ...
    async def crash(self) -> None: ...
    async def reload(self, settings: dict[str, Any]) -> None: ...


def load(name: str) -> dict[str, Any]:
    """A transcript by its scenario, for example ``SC01``."""
    transcript: dict[str, Any] = orjson.loads((FOLDER / f"{name}.json").read_bytes())
    return transcript


async def play(transcript: dict[str, Any], stage: Stage) -> None:
    """Play all steps; an ``AssertionError`` says which one did not go as written."""
    player = _Player(stage)
    for number, step in enumerate(transcript["steps"], 1):
        try:
            await player.step(step)
        except AssertionError as error:
            raise AssertionError(f"{transcript['scenario']} step {number} {step}: {error}") from error
        except Closed as closed:
            raise AssertionError(f"{transcript['scenario']} step {number} {step}: closed {closed.code}") from closed


class _Player:
    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.lines: dict[str, Line] = {}
        self.values: dict[str, Any] = {}
        self.ids = itertools.count(1)

    async def step(self, step: dict[str, Any]) -> None:
        match step:
            case {"join": client}:
                await self._join(client, step)
            case {"open": client}:
                await self._open(client, step)
            case {"from": client, "send": type}:
                await self._send(client, type, self._filled(step.get("payload", {})), step.get("envelope", {}))
            case {"to": client, "expect": type}:
                message = await self.lines[client].receive()
                assert message["type"] == type, f"got {message}"
                self._match(step.get("payload", {}), message["payload"], "payload")
            case {"to": client, "in_any_order": expected}:
                wanted = {each["expect"]: each["payload"] for each in expected}
                for _ in expected:
                    message = await self.lines[client].receive()
                    assert message["type"] in wanted, f"got {message}"
                    self._match(wanted.pop(message["type"]), message["payload"], "payload")
            case {"to": client, "quiet": True}:
                await self._send(client, "heartbeat", {}, {})
                message = await self.lines[client].receive()
                assert message["type"] == "heartbeat_ack", f"got {message}"
            case {"to": client, "closed": code}:
                got = await self._close_code(client)
                assert got == code, f"closed with {got}"
            case {"cut": client}:
                await self.lines[client].cut()
            case {"fill": count}:
                await self.stage.fill(count)
            case {"pass_s": seconds}:
                await self.stage.pass_time(seconds)
            case {"crash": True}:
                await self.stage.crash()
            case {"reload": settings}:
                await self.stage.reload(settings)
            case _:
                raise AssertionError("no such step")

    async def _close_code(self, client: str) -> int:
        try:
            message = await self.lines[client].receive()
        except Closed as closed:
            return closed.code
        raise AssertionError(f"still open, and got {message}")

    async def _open(self, client: str, step: dict[str, Any]) -> None:
        name = step.get("as", client)
        self.lines[client] = await self.stage.connect(name, step.get("claims"), step.get("lifetime_s", 3600))

    async def _join(self, client: str, step: dict[str, Any]) -> None:
        await self._open(client, step)
        line = self.lines[client]
        profile = step.get("profile", "canonical")
        await self._send(
            client,
            "connect",
            {"token": line.token, "client_id": line.client_id, "last_committed_id": 0, "required_profile": profile}
            | {"supported_profiles": [profile]},
            {},
        )
        message = await line.receive()
        assert message["type"] == "connected", f"got {message}"
        names = step.get("partitions", [])
        if names:
            since = self._filled(step.get("since", 0))
            wanted = {"partitions": names, "subscription_partitions": names, "since_committed_id": since}
            await self._send(client, "sync", wanted, {})
            message = await line.receive()
            assert message["type"] == "sync_response", f"got {message}"

    async def _send(self, client: str, type: str, payload: Any, envelope: dict[str, Any]) -> None:
        line = self.lines[client]
        if isinstance(payload, dict) and payload.get("token") == "$token":
            payload = payload | {"token": line.token}
        message = {"type": type, "msg_id": f"m{next(self.ids)}", "timestamp": 0, "protocol_version": "1.0"}
        await line.send(message | {"payload": payload} | envelope)

    def _filled(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self._filled(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [self._filled(inner) for inner in value]
        return self._value(value) if isinstance(value, str) and value.startswith("$") and value != "$token" else value

    def _value(self, text: str) -> Any:
        name, plus, more = text.partition("+")
        return self.values[name] + int(more) if plus else self.values[name]

    def _match(self, wanted: Any, got: Any, path: str) -> None:
        if isinstance(wanted, str) and wanted.startswith("$"):
            if wanted == "$any":
                return
            if wanted not in self.values and "+" not in wanted:
                self.values[wanted] = got
            wanted = self._value(wanted)
        if isinstance(wanted, dict):
            assert isinstance(got, dict), f"{path} is {got!r}"
            for key, inner in wanted.items():
                if inner == ABSENT:
                    assert key not in got, f"{path}.{key} is there: {got[key]!r}"
                else:
                    assert key in got, f"{path}.{key} is missing in {got}"
                    self._match(inner, got[key], f"{path}.{key}")
        elif isinstance(wanted, list):
            assert isinstance(got, list), f"{path} is {got!r}"
            assert len(got) == len(wanted), f"{path} is {got!r}"
            for index, inner in enumerate(wanted):
                self._match(inner, got[index], f"{path}[{index}]")
        else:
            assert got == wanted, f"{path} is {got!r}, not {wanted!r}"
