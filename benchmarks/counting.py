"""
Instructions an event, counted by valgrind: a guard that no neighbour disturbs.

Two runs of different length are counted and subtracted, so starting the interpreter and opening the log fall out.
Instructions are not time, but more of them for the same work is a regression whatever the machine was doing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from tidings.access.settings import AccessSettings, TokenSettings
from tidings.server.node import Node
from tidings.server.settings import NodeSettings, ServerSettings

from .gateway_clients import Publisher
from .measuring import run_on, scratch
from .publish_many import Bare, Ours, measure_bare, measure_ours
from .report import Row
from .running import in_child, instructions_of
from .sync_serving import SECRET

__all__ = ["Requests", "Serving", "bench", "measure_requests", "measure_serving"]

_SHORT: Final = 2_000
_LONG: Final = 12_000
_IN_FLIGHT: Final = 256
_WARM_UP: Final = 512
_REQUESTS_SHORT: Final = 500
_REQUESTS_LONG: Final = 2_500
_REQUESTS_IN_FLIGHT: Final = 32

_CaseT = TypeVar("_CaseT", bound=msgspec.Struct)


class Serving(msgspec.Struct, frozen=True):
    """A node that answers so many requests, each of which publishes one event."""

    folder: str
    count: int


class Requests(msgspec.Struct, frozen=True):
    """The other side of it."""

    url: str
    count: int


class Answered(msgspec.Struct, frozen=True):
    """So many were."""

    count: int


def bench(folder: str) -> Iterator[Row]:
    """
    The log next to the bare group commit, on the plain event loop; and a whole node for a request.

    Raises:
        FileNotFoundError: There is no valgrind.
    """
    ours_each = _each(measure_ours, lambda n: _ours(folder, n), _SHORT, _LONG)
    bare_each = _each(measure_bare, lambda n: _bare(folder, n), _SHORT, _LONG)
    yield Row(
        bench="callgrind",
        case=f"append, {_IN_FLIGHT} in flight, asyncio",
        unit="instructions/event",
        ours=ours_each,
        baselines={"bare group commit": bare_each},
        ratio=ours_each / bare_each,
    )
    yield Row(
        bench="callgrind",
        case=f"an event published by a request, {_REQUESTS_IN_FLIGHT} in flight, the whole node",
        unit="instructions/event",
        ours=_each(measure_serving, lambda n: Serving(folder, n), _REQUESTS_SHORT, _REQUESTS_LONG),
    )


def _each(measure: Callable[[_CaseT], msgspec.Struct], case: Callable[[int], _CaseT], short: int, long: int) -> float:
    return (instructions_of(measure, case(long)) - instructions_of(measure, case(short))) / (long - short)


def _ours(folder: str, events: int) -> Ours:
    return Ours(folder=folder, events=events, warm_up=_WARM_UP, in_flight=_IN_FLIGHT, loop="asyncio")


def _bare(folder: str, events: int) -> Bare:
    return Bare(folder=folder, events=events, warm_up=_WARM_UP, in_flight=_IN_FLIGHT, loop="asyncio")


def measure_serving(case: Serving) -> Answered:
    """The node, in this process; whoever asks is another one, which is not counted."""
    settings = NodeSettings(
        access=AccessSettings(tokens=TokenSettings(secret=SECRET)), server=ServerSettings(port=0, access_log=False)
    )

    async def main(folder: Path) -> Answered:
        async with Node(folder, settings) as node:
            return await asyncio.to_thread(in_child, measure_requests, Requests(node.url, case.count))

    with scratch(case.folder) as folder:
        return run_on("uvloop", lambda: main(folder))


def measure_requests(case: Requests) -> Answered:
    """Publish, some requests at a time."""

    async def main() -> Answered:
        publisher = Publisher(case.url.replace("http", "ws", 1) + "/")
        requests = iter([publisher.request("counted", number) for number in range(case.count)])

        async def ask() -> None:
            for request in requests:
                await publisher.publish(request)

        await asyncio.gather(*(ask() for _ in range(_REQUESTS_IN_FLIGHT)))
        publisher.close()
        return Answered(case.count)

    return run_on("uvloop", main)
