"""
A process full of idle sync clients: ``python node_idle_clients.py URL FIRST COUNT``, a token for each on stdin.

Says ``up`` when all are connected and authorised, and ends when its stdin does.
"""

from __future__ import annotations

import asyncio
import sys

import orjson
import uvloop
from picows import WSFrame, WSListener, WSMsgType, WSTransport, ws_connect

_AT_ONCE = 50


class Idle(WSListener):
    """Says who it is, and then nothing any more."""

    connected_count = 0

    def on_ws_frame(self, transport: WSTransport, frame: WSFrame) -> None:
        assert orjson.loads(frame.get_payload_as_bytes())["type"] == "connected"
        Idle.connected_count += 1


async def main(url: str, first: int, count: int) -> None:
    loop = asyncio.get_running_loop()

    async def connect(number: int, token: str) -> None:
        transport, _ = await ws_connect(Idle, url)
        payload = {
            "token": token,
            "client_id": f"c{number}",
            "last_committed_id": 0,
            "supported_profiles": ["canonical"],
        }
        envelope = {"type": "connect", "msg_id": "m", "timestamp": 0, "protocol_version": "1.0", "payload": payload}
        transport.send(WSMsgType.TEXT, orjson.dumps(envelope))

    for start in range(first, first + count, _AT_ONCE):
        numbers = range(start, min(start + _AT_ONCE, first + count))
        await asyncio.gather(*(connect(number, sys.stdin.readline().strip()) for number in numbers))
    while Idle.connected_count < count:  # noqa: ASYNC110 - a condition of many
        await asyncio.sleep(0.01)
    print("up", flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
