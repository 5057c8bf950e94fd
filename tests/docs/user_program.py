"""A user's program, as ``mypy --strict`` sees it: checked with the tests, and run by one of them."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass

from tidings import Ack, Bus, Client, Event, EventMeta, Nack, Node, ReceivedEvent, SubscriptionSettings

bus = Bus(sys.argv[1] if len(sys.argv) > 1 else "workspace")
seen: list[str] = []


@dataclass
class Order:
    number: str


@bus.subscriber("orders", group="billing", max_retries=3, order="key", workers=2)
async def bill(order: Order, attempt: int) -> Ack | Nack:
    seen.append(f"{order.number} in attempt {attempt}")
    return Ack() if order.number else Nack("no number", delay_s=1.0)


@bus.subscriber("orders", settings=SubscriptionSettings(start="earliest"))
def note(event: ReceivedEvent) -> None:
    kind: str = event.meta.type
    seen.append(f"{event.meta.type.name} {kind.lower()} {event.offset}")


async def main() -> None:
    async with bus:
        await bus.publish("orders", Order("o-1"), type="ORDER_PLACED", space="shop", idem_key="o-1")
        await bus.publish(Event(EventMeta("orders", "ORDER_PLACED", "shop"), {"number": "o-2"}))
        await bus.drain(timeout_s=30)
    answer: Ack | Nack = await bill(Order("by hand"), 1)
    assert isinstance(answer, Ack)
    print(*sorted(seen), sep="\n")


def nodes(node: Node, client: Client) -> tuple[str, str]:
    """The other names have types too."""
    return node.url, client.url


if __name__ == "__main__":
    asyncio.run(main())
