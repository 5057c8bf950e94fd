"""Handle orders until Ctrl-C. Run it again: the group goes on where it was."""

import asyncio
import contextlib

from tidings import Node
from tidings.server.settings import load_settings


async def bill(order: dict[str, int]) -> None:
    if order["cents"] <= 0:
        raise ValueError("an order must cost something")
    print(f"billed order {order['number']}: {order['cents'] / 100:.2f}", flush=True)


async def main() -> None:
    async with Node("workspace", load_settings()) as node:
        await node.bus.subscribe("orders", "billing", bill, max_retries=1)
        print(f"waiting for orders at {node.url}", flush=True)
        await node.stopped()


with contextlib.suppress(KeyboardInterrupt):
    asyncio.run(main())
