"""Run a node in a process of its own until stdin ends. Prints its address and an administrator's token."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

import uvloop

from tidings.testing.node import running_node


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with running_node(Path(folder), access_log=False) as node:
            print(node.url, node.token("root", roles=["admin"]), flush=True)
            await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    uvloop.run(main())
