"""
Instructions an event, counted by valgrind: a guard that no neighbour disturbs.

Two runs of different length are counted and subtracted, so starting the interpreter and opening the log fall out.
Instructions are not time, but more of them for the same work is a regression whatever the machine was doing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from .publish_many import Bare, Ours, measure_bare, measure_ours
from .report import Row
from .running import instructions_of

__all__ = ["bench"]

_SHORT: Final = 2_000
_LONG: Final = 12_000
_IN_FLIGHT: Final = 256
_WARM_UP: Final = 512


def bench(folder: str) -> Iterator[Row]:
    """
    The log next to the bare group commit, on the plain event loop.

    Raises:
        FileNotFoundError: There is no valgrind.
    """
    ours, bare = (
        [
            Ours(folder=folder, events=events, warm_up=_WARM_UP, in_flight=_IN_FLIGHT, loop="asyncio")
            for events in (_SHORT, _LONG)
        ],
        [
            Bare(folder=folder, events=events, warm_up=_WARM_UP, in_flight=_IN_FLIGHT, loop="asyncio")
            for events in (_SHORT, _LONG)
        ],
    )
    ours_each = (instructions_of(measure_ours, ours[1]) - instructions_of(measure_ours, ours[0])) / (_LONG - _SHORT)
    bare_each = (instructions_of(measure_bare, bare[1]) - instructions_of(measure_bare, bare[0])) / (_LONG - _SHORT)
    yield Row(
        bench="callgrind",
        case=f"append, {_IN_FLIGHT} in flight, asyncio",
        unit="instructions/event",
        ours=ours_each,
        baselines={"bare group commit": bare_each},
        ratio=ours_each / bare_each,
    )
