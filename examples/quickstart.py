"""Publish an order and handle it. Run it again: the group goes on where it was."""

import asyncio

from tidings import Bus

bus = Bus("workspace")


@bus.subscriber("orders", group="billing", max_retries=5)
async def bill(order: dict[str, int]) -> None:
    print(f"billed order {order['number']}: {order['cents'] / 100:.2f}")


async def main() -> None:
    async with bus:
        await bus.publish("orders", {"number": 1, "cents": 1250}, type="ORDER_PLACED", space="shared:shop")
        await bus.drain()


asyncio.run(main())
