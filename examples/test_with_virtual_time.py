"""
A test of a handler that fails, waits and is tried again, in no time; and of what is left after a power cut.

    pytest test_with_virtual_time.py
"""

from tidings import Bus
from tidings.testing import World

bus = Bus("workspace")
trouble: list[Exception] = []
bills: dict[int, int] = {}


@bus.subscriber("orders", group="billing", max_retries=5, backoff_base=60.0, backoff_max=600.0)
async def bill(order: dict[str, int]) -> None:
    if trouble:
        raise trouble.pop()
    bills[order["number"]] = order["cents"]


async def place(number: int, cents: int) -> None:
    await bus.publish("orders", {"number": number, "cents": cents}, type="ORDER_PLACED", space="shared:shop")


def test_a_bank_that_comes_back_is_asked_again(tidings_world: World) -> None:
    tidings_world.add(bus)
    trouble[:] = [ConnectionError("the bank does not answer")] * 3

    async def scenario() -> None:
        await place(1, 1250)
        await tidings_world.drain()

    tidings_world.play(scenario())
    assert bills.pop(1) == 1250
    assert tidings_world.clock.monotonic() > 60  # so long did it wait, and nobody else


def test_what_was_published_outlives_a_power_cut(tidings_world: World) -> None:
    tidings_world.add(bus)

    async def scenario() -> None:
        await place(1, 1250)
        await tidings_world.crash("lose_all")
        await bus.start()
        await tidings_world.drain()

    tidings_world.play(scenario())
    assert bills.pop(1) == 1250
