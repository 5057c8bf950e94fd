"""The last look before an event is stored: whoever lost the right while waiting is refused, alone or in a list."""

from __future__ import annotations

import pytest

from tidings.core.errors import InvalidEvent, TidingsError
from tidings.core.events import Event, EventMeta
from tidings.log.interface import Appended, Refused
from tidings.log.memory import MemoryLog
from tidings.server.last_look import LookingLog, asked_again


class NotAnyMore(TidingsError):
    """The right is gone."""


def event(n: int) -> Event:
    return Event(EventMeta("t", "NOTED", "s"), {"n": n})


def object_to_odd(one: Event) -> None:
    if one.payload["n"] % 2:
        raise NotAnyMore


async def test_a_list_is_asked_for_one_by_one() -> None:
    """Those that nobody objects to are stored in order, the others have their objection for an answer."""
    log = LookingLog(MemoryLog())
    with asked_again(object_to_odd):
        verdicts = await log.append_many([event(n) for n in range(4)])
        with pytest.raises(NotAnyMore):
            await log.append(event(1))

    assert [type(verdict) for verdict in verdicts] == [Appended, Refused, Appended, Refused]
    assert [verdict.seq for verdict in verdicts if isinstance(verdict, Appended)] == [1, 2]
    assert all(isinstance(verdict.error, NotAnyMore) for verdict in verdicts if isinstance(verdict, Refused))


async def test_where_nobody_asks_everything_is_stored() -> None:
    """Outside of the question the log is as it always is, refusals of its own included."""
    log = LookingLog(MemoryLog())
    verdicts = await log.append_many([event(1), Event(EventMeta("no/name", "NOTED", "s"), {})])

    assert isinstance(verdicts[0], Appended)
    assert isinstance(verdicts[1], Refused)
    assert isinstance(verdicts[1].error, InvalidEvent)
