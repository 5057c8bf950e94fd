"""Two people edit one shopping list while nobody can be reached, and meet again: one list, nothing lost, nothing twice."""

import asyncio
import socket

from tidings.client import Committed, LocalEvent, Rejected, SyncClient, ViewOf
from tidings.server.settings import NodeSettings, ServerSettings
from tidings.sync.settings import SyncSettings
from tidings.testing.node import RunningNode, node_settings  # in real life: tidings serve

ITEM = {"type": "object", "properties": {"count": {"type": "integer", "minimum": 1}}, "required": ["name"]}
Shopping = dict[str, int]


def apply(items: Shopping, event: LocalEvent) -> Shopping:
    """The list after one more event."""
    return {**items, event.payload["data"]["name"]: event.payload["data"]["count"]}


def person(name: str, port: int, node: RunningNode) -> SyncClient[Shopping]:
    """A client with a store of its own."""
    return SyncClient(
        f"ws://127.0.0.1:{port}/sync",
        token=node.token(name, client_id=name, partitions=["list"]),
        client_id=name,
        store=f"{name}.db",
        partitions=["list"],
        view=ViewOf(apply, {}),
    )


async def main() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = NodeSettings(
        server=ServerSettings(port=port, access_log=False),
        access=node_settings().access,
        sync=SyncSettings(schemas={"item.add": ITEM}),
    )
    node = RunningNode("workspace", settings)
    async with person("ana", port, node) as ana, person("ben", port, node) as ben:
        # There is no server yet. Everything below is on the disk of its own machine, and nowhere else.
        bread = await ana.submit_fact(["list"], "item.add", {"name": "bread", "count": 1})
        await ben.submit_fact(["list"], "item.add", {"name": "eggs", "count": 6})
        wrong = await ben.submit_fact(["list"], "item.add", {"name": "salt", "count": 0})
        print("offline, ana sees", sorted(ana.view), "and ben sees", sorted(ben.view))
        await node.start()
        ana.connect_now()
        ben.connect_now()
        print("bread is committed:", isinstance(await bread.settled(), Committed))
        print("no salt is rejected:", isinstance(await wrong.settled(), Rejected), len(await ben.quarantine()))
        await asyncio.gather(*(each.view_when(lambda items: len(items) == 2) for each in (ana, ben)))
        print("together, both see", sorted(ben.view), "alike:", ana.view == ben.view)
    await node.stop()


asyncio.run(main())
