"""
An HTTP application and its worker in one process: an order is on disk before it is answered, and billed also after a crash.

    uvicorn web_app:app
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from tidings import Bus
from tidings.log.errors import IdConflict

bus = Bus("workspace")


class Order(BaseModel):
    number: int
    cents: int


@bus.subscriber("orders", group="billing", max_retries=5)
async def bill(order: Order) -> None:
    print(f"billed order {order.number}: {order.cents / 100:.2f}")


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    async with bus:
        yield


app = FastAPI(lifespan=lifespan)


@app.exception_handler(IdConflict)
async def conflict(_: Request, error: IdConflict) -> JSONResponse:
    """Answer 409 to another order under a number that was placed already."""
    return JSONResponse({"code": error.code, "detail": error.describe()}, status_code=409)


@app.post("/orders", status_code=202)
async def place(order: Order) -> dict[str, str]:
    stored = await bus.publish(
        "orders", order, type="ORDER_PLACED", space="shared:shop", idem_key=f"order-{order.number}"
    )
    return {"event_id": stored.event_id}


@app.get("/orders")
async def orders() -> list[Order]:
    return [Order.model_validate(event.payload) async for event in bus.replay("orders")]
