"""Handlers get payloads as types of the program's own; one that does not fit is a dead letter, which says what was wrong."""

import asyncio
from dataclasses import dataclass

from tidings import Bus, EventMeta

bus = Bus("workspace")


@dataclass
class Item:
    name: str
    cents: int


@dataclass
class Order:
    number: int
    items: list[Item]


@bus.subscriber("orders", group="billing")
async def bill(order: Order, meta: EventMeta) -> None:
    print(f"{meta.type.name} {order.number}: {sum(item.cents for item in order.items) / 100:.2f}")


async def main() -> None:
    async with bus:
        await bus.publish("orders", Order(1, [Item("tea", 390)]), type="ORDER_PLACED", space="shared:shop")
        wrong = {"number": 2, "items": [{"name": "tea", "cents": "390"}]}
        stored = await bus.publish("orders", wrong, type="ORDER_PLACED", space="shared:shop")
        await bus.drain()
        letter = await bus.dead_letter("orders", f"billing-{stored.offset}")
        print(letter.error)


asyncio.run(main())
