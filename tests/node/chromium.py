"""
A headless Chromium that tests drive by its DevTools protocol, over a pipe: no driver, no port.

    async with chromium(tmp_path) as page:
        await page.go("http://127.0.0.1:8787/healthz")
        assert await page.run("1 + 1") == 2
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Final

CHROMIUM: Final = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SECONDS_MAX: Final = 60.0
_FLAGS: Final = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
    "--remote-debugging-pipe",
)

# Chromium reads commands at descriptor 3 and answers at 4.
_AT_3_AND_4: Final = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.dup2(int(sys.argv[2]), 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Page:
    """One page."""

    def __init__(self, reader: asyncio.StreamReader, write_fd: int) -> None:
        self._reader = reader
        self._write_fd = write_fd
        self._numbers = itertools.count(1)
        self._session: str | None = None

    async def open(self) -> None:
        """Make the page."""
        target = await self._ask("Target.createTarget", url="about:blank")
        attached = await self._ask("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]

    async def go(self, url: str) -> None:
        """Load an address."""
        answer = await self._ask("Page.navigate", url=url)
        assert "errorText" not in answer, answer
        await self.until("document.readyState + location.href", lambda found: found == f"complete{url}")

    async def run(self, expression: str) -> Any:
        """The value of an expression, awaited if it is a promise."""
        answer = await self._ask(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True, userGesture=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def until(self, expression: str, holds: Callable[[Any], bool]) -> Any:
        """Wait until something holds for the value of an expression; that value."""
        async with asyncio.timeout(SECONDS_MAX):
            while not holds(found := await self.run(expression)):  # noqa: ASYNC110 - a page has no event for it
                await asyncio.sleep(0.01)
        return found

    async def _ask(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        session = {} if self._session is None else {"sessionId": self._session}
        os.write(
            self._write_fd, json.dumps({"id": number, "method": method, "params": params, **session}).encode() + b"\0"
        )
        async with asyncio.timeout(SECONDS_MAX):
            while True:
                message = json.loads((await self._reader.readuntil(b"\0"))[:-1])
                if message.get("id") == number:
                    assert "error" not in message, message
                    found: dict[str, Any] = message["result"]
                    return found


@contextlib.asynccontextmanager
async def chromium(folder: Path) -> AsyncIterator[Page]:
    """A page of a browser of its own, whose profile is in a folder."""
    assert CHROMIUM is not None
    commands_out, commands_in = os.pipe()
    answers_out, answers_in = os.pipe()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-S", "-c", _AT_3_AND_4, str(commands_out), str(answers_in)),
        *(CHROMIUM, *_FLAGS, f"--user-data-dir={folder / 'profile'}", "about:blank"),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        pass_fds=(commands_out, answers_in),
    )
    os.close(commands_out)
    os.close(answers_in)
    reader = asyncio.StreamReader(limit=16 << 20)
    pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(answers_out, "rb")
    )
    page = Page(reader, commands_in)
    try:
        await page.open()
        yield page
    finally:
        process.terminate()
        await process.wait()
        os.close(commands_in)
        pipe.close()
