"""
What the gateway's fan-out is compared with: servers that do nothing but send the same bytes to everybody.

``picows`` is the floor, since the node itself sends through it; ``websockets`` is what Python programs mostly use. A client that sends
``broadcast COUNT TEXT`` has everybody, itself included, sent the text so many times.

    python -m benchmarks.gateway_rivals picows | websockets
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

import uvloop
from picows import WSFrame, WSListener, WSMsgType, WSTransport, WSUpgradeRequest, ws_create_server

from .sync_serving import Server, process

__all__ = ["has_websockets", "rival"]

_COMMAND: Final = "broadcast "


@contextmanager
def rival(name: str) -> Iterator[Server]:
    """One of the two in a process of its own."""
    with process([sys.executable, "-m", "benchmarks.gateway_rivals", name], "ws") as server:
        yield server


def has_websockets() -> bool:
    """Whether the package is installed; ``make bench`` does that."""
    return find_spec("websockets") is not None


def _say(port: int) -> None:
    print(json.dumps({"url": f"ws://127.0.0.1:{port}/"}), flush=True)


def _asked(message: str) -> tuple[int, str]:
    count, _, text = message.removeprefix(_COMMAND).partition(" ")
    return int(count), text


async def _serve_picows() -> None:
    everybody: dict[WSTransport, None] = {}

    class Peer(WSListener):
        def on_ws_connected(self, transport: WSTransport) -> None:
            everybody[transport] = None

        def on_ws_disconnected(self, transport: WSTransport) -> None:
            everybody.pop(transport, None)

        def on_ws_frame(self, transport: WSTransport, frame: WSFrame) -> None:
            if frame.msg_type is WSMsgType.TEXT:
                tasks.add(asyncio.get_running_loop().create_task(broadcast(*_asked(frame.get_payload_as_utf8_text()))))

    async def broadcast(count: int, text: str) -> None:
        message = text.encode()
        for _ in range(count):
            for each in everybody:
                each.send(WSMsgType.TEXT, message)
            await asyncio.sleep(0)

    def accept(_: WSUpgradeRequest) -> WSListener:
        return Peer()

    tasks: set[asyncio.Task[None]] = set()
    server = await ws_create_server(accept, "127.0.0.1", 0)
    _say(server.sockets[0].getsockname()[1])
    await server.serve_forever()


async def _serve_websockets() -> None:
    server_module: Any = import_module("websockets.asyncio.server")  # installed for benchmarks only
    everybody: set[Any] = set()

    async def handle(connection: Any) -> None:
        everybody.add(connection)
        try:
            async for message in connection:
                count, text = _asked(str(message))
                for _ in range(count):
                    server_module.broadcast(everybody, text)
                    await asyncio.sleep(0)
        finally:
            everybody.discard(connection)

    options: dict[str, Any] = {"compression": None, "ping_interval": None, "max_queue": None}
    async with server_module.serve(handle, "127.0.0.1", 0, **options) as server:
        _say(next(iter(server.sockets)).getsockname()[1])
        await server.serve_forever()


_SERVERS: Final[dict[str, Callable[[], Coroutine[Any, Any, None]]]] = {
    "picows": _serve_picows,
    "websockets": _serve_websockets,
}

if __name__ == "__main__":
    uvloop.run(_SERVERS[sys.argv[1]]())
