"""Publish three orders, of which one is wrong."""

import asyncio
from pathlib import Path

from tidings import Client

TOKEN = Path("token").read_text().strip()


async def main() -> None:
    async with Client("http://127.0.0.1:8787", TOKEN) as client:
        for number, cents in [(1, 1250), (2, 0), (3, 990)]:
            stored = await client.publish(
                "orders", {"number": number, "cents": cents}, type="ORDER_PLACED", space="shared:shop"
            )
            print(f"order {number} is on disk, at offset {stored.offset}")


asyncio.run(main())
