"""
Fixtures for tests of programs that use Tidings; pytest finds them by itself where Tidings is installed.

``tidings_world`` is a machine for the program's bus (virtual time, a disk in memory, a crash button), ``tidings_clock`` its clock,
``tidings_bus`` a bus on it, and ``tidings_node`` a node that runs in a thread beside the test. They work with any way to run
``async`` tests, and in tests without one. Until a test asks for one of them, nothing of Tidings is loaded but this module.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tidings.bus import EventBus
    from tidings.server.settings import NodeSettings
    from tidings.testing import VirtualClock, World
    from tidings.testing.node import RunningNode


@pytest.fixture
def tidings_world() -> Iterator[World]:
    """A machine on which the program's own bus can run: ``tidings_world.add(bus)``."""
    from tidings.testing import World

    world = World()
    yield world
    world.leave()


@pytest.fixture
def tidings_clock(tidings_world: World) -> VirtualClock:
    """The clock of ``tidings_world``, which stands still until it is moved."""
    return tidings_world.clock


@pytest.fixture
def tidings_bus(tidings_world: World) -> EventBus:
    """A bus on ``tidings_world``, without handlers yet; the first publish starts it."""
    from tidings.bus import EventBus

    bus = EventBus()
    tidings_world.add(bus)
    return bus


@pytest.fixture
def tidings_node_settings() -> NodeSettings | None:
    """The settings of ``tidings_node``; override this fixture for others. Without any, those of ``tidings.testing.node``."""
    return None


@pytest.fixture
def tidings_node(tmp_path: Path, tidings_node_settings: NodeSettings | None) -> Iterator[RunningNode]:
    """
    A node on a free port of the loopback, with ``url``, ``ws_url``, ``token(...)`` and ``headers(...)``.

    Its workspace is in the test's ``tmp_path``. It has a thread and an event loop of its own, so a test may block.
    """
    from tidings.testing.node import running_node

    started: concurrent.futures.Future[tuple[RunningNode, Callable[[], object]]] = concurrent.futures.Future()

    async def serve() -> None:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        async with running_node(tmp_path / "workspace", tidings_node_settings) as node:
            started.set_result((node, lambda: loop.call_soon_threadsafe(ended.set)))
            await ended.wait()

    with concurrent.futures.ThreadPoolExecutor(1, "tidings-node") as thread:
        running = thread.submit(asyncio.run, serve())
        either: tuple[concurrent.futures.Future[Any], ...] = (started, running)
        concurrent.futures.wait(either, return_when=concurrent.futures.FIRST_COMPLETED)
        if not started.done():
            running.result()  # raises what kept it from starting
        node, end = started.result()
        yield node
        end()
        running.result()
