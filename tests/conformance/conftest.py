"""
The engines that must pass this suite, each test once for every one of them.

A new engine joins by one entry in ``ENGINES``: a function that opens an empty log in a folder of its own.
The tests use the interface and the settings, nothing else.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Final

import pytest

from tests.conformance.support import SMALL, OpenEngine
from tidings.core.clock import SYSTEM_CLOCK, Clock
from tidings.log import Log, LogSettings
from tidings.log.encryption import Encryptor
from tidings.testing import VirtualClock

Opener = Callable[[Path, LogSettings, Clock, Encryptor | None], Awaitable[Log]]


async def _open_memory(folder: Path, settings: LogSettings, clock: Clock, encryptor: Encryptor | None) -> Log:
    from tidings.log.memory import MemoryLog

    return MemoryLog(settings, clock=clock, encryptor=encryptor)


async def _open_embedded(folder: Path, settings: LogSettings, clock: Clock, encryptor: Encryptor | None) -> Log:
    from tidings.log.embedded import open_log

    return await open_log(folder, settings, clock=clock, encryptor=encryptor)


ENGINES: Final[dict[str, Opener]] = {"memory": _open_memory, "embedded": _open_embedded}


@pytest.fixture(params=list(ENGINES))
def engine(request: pytest.FixtureRequest) -> str:
    """The name of the engine under test."""
    name: str = request.param
    return name


@pytest.fixture
async def open_engine(engine: str, tmp_path: Path) -> AsyncIterator[OpenEngine]:
    """Opens logs of the engine under test, each empty and apart from the others."""
    opened: list[Log] = []

    async def open_one(
        settings: LogSettings = SMALL, *, clock: Clock = SYSTEM_CLOCK, encryptor: Encryptor | None = None
    ) -> Log:
        log = await ENGINES[engine](tmp_path / f"log{len(opened)}", settings, clock, encryptor)
        opened.append(log)
        return log

    yield open_one
    for log in opened:
        await log.close()


@pytest.fixture
async def log(open_engine: OpenEngine) -> Log:
    """An empty log."""
    return await open_engine()


@pytest.fixture
def clock() -> VirtualClock:
    """A clock that the test moves."""
    return VirtualClock()
