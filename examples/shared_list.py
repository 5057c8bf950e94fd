"""Two people edit one shopping list while nobody can be reached, and meet again: one list, nothing lost, nothing twice."""

import asyncio
import socket

from tidings.access.context import TokenClaims
from tidings.access.settings import AccessSettings, TokenSettings
from tidings.access.tokens import TokenIssuer
from tidings.client import Committed, LocalEvent, Rejected, SyncClient, ViewOf
from tidings.core.clock import SYSTEM_CLOCK
from tidings.server.node import Node
from tidings.server.settings import NodeSettings, ServerSettings
from tidings.sync.settings import SyncSettings

ITEM = {"type": "object", "properties": {"count": {"type": "integer", "minimum": 1}}, "required": ["name"]}
NAMED = {"type": "object", "required": ["name"]}
Shopping = dict[str, str]


def apply(items: Shopping, event: LocalEvent) -> Shopping:
    """The list after one more event."""
    name, data = event.payload["data"]["name"], event.payload["data"]
    match event.payload["schema"]:
        case "item.add":
            return {**items, name: f"{data['count']}, wanted by {event.client_id}"}
        case "item.bought" if name in items:
            return {each: text for each, text in items.items() if each != name}
    return items


def person(name: str, port: int, tokens: TokenIssuer) -> SyncClient[Shopping]:
    """A client with a store of its own."""
    return SyncClient(
        f"ws://127.0.0.1:{port}/sync",
        token=lambda: tokens.issue(name, client_id=name, claims=TokenClaims(partitions=frozenset({"list"}))),
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
        access=AccessSettings(tokens=TokenSettings(secret="only for this example, and therefore printed here")),
        sync=SyncSettings(schemas={"item.add": ITEM, "item.bought": NAMED}),
    )
    tokens = TokenIssuer(settings.access.tokens, SYSTEM_CLOCK)
    node = Node("workspace", settings)
    async with person("ana", port, tokens) as ana, person("ben", port, tokens) as ben:
        # There is no server yet. Everything below is on the disk of its own machine, and nowhere else.
        await ana.submit_fact(["list"], "item.add", {"name": "milk", "count": 2})
        bread = await ana.submit_fact(["list"], "item.add", {"name": "bread", "count": 1})
        await ben.submit_fact(["list"], "item.add", {"name": "eggs", "count": 6})
        wrong = await ben.submit_fact(["list"], "item.add", {"name": "salt", "count": 0})
        print("offline, ana sees", sorted(ana.view), "and ben sees", sorted(ben.view))

        await node.start()
        ana.connect_now()
        ben.connect_now()
        print("bread is committed:", isinstance(await bread.settled(), Committed))
        print(
            "no salt is rejected:",
            isinstance(await wrong.settled(), Rejected),
            "and kept:",
            len(await ben.quarantine()),
        )
        await asyncio.gather(*(each.view_when(lambda items: len(items) == 3) for each in (ana, ben)))
        print("together, both see", sorted(ben.view), "alike:", ana.view == ben.view)
    await node.stop()


asyncio.run(main())
