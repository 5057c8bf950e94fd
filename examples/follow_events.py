"""Follow what happens to an order: the node tells of it, and after a restart of the program nothing is missing and nothing comes twice."""

import asyncio

from tidings import Client, EventStream
from tidings.testing.node import running_node  # in real life: tidings serve


async def main() -> None:
    async with running_node("workspace") as node, Client(node.url, node.token(roles=["admin"])) as client:

        async def change(kind: str) -> None:
            await client.publish("orders", {}, type=kind, space="shared:shop", objects=["order:42"])

        def follow(since: int | None = None) -> EventStream:
            token = node.token("ana", topics=["orders"])
            return EventStream(node.url, token=token, domain="orders", objects=["order:42"], since=since)

        async with follow() as events:
            await change("PLACED")
            print((await anext(events)).payload_summary["op_kinds"])
            saved = events.position
        await change("PAID")
        async with follow(since=saved) as events:
            await change("SENT")
            print((await anext(events)).payload_summary["op_kinds"])
            print((await anext(events)).payload_summary["op_kinds"])


asyncio.run(main())
