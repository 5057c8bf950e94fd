"""Authorisation is checked in the same step in which the log accepts an event."""

from __future__ import annotations

import pytest

from tests.conformance.support import event, numbered
from tidings.core.errors import TidingsError
from tidings.core.events import Event
from tidings.log import Appended, Log, Query, Refused


class NotAllowed(TidingsError):
    """The right is gone."""


def refuse_odd(given: Event) -> None:
    """Refuse every other event of ``numbered``."""
    if int(given.payload["n"]) % 2:
        raise NotAllowed


async def test_a_refused_event_is_not_stored(log: Log) -> None:
    """What ``authorise`` raises is the publisher's answer; nothing is stored, and the event stays as it was."""
    even, odd = numbered("a", 2)

    assert isinstance(await log.append(even, authorise=refuse_odd), Appended)
    with pytest.raises(NotAllowed):
        await log.append(odd, authorise=refuse_odd)

    assert odd.meta._event_id is None
    assert log.position.seq == 1


async def test_a_list_is_authorised_event_by_event(log: Log) -> None:
    """In a list, refused events have a verdict of their own and the others are stored in order."""
    verdicts = await log.append_many(numbered("a", 4), authorise=refuse_odd)

    assert [type(verdict) for verdict in verdicts] == [Appended, Refused, Appended, Refused]
    assert [verdict.seq for verdict in verdicts if isinstance(verdict, Appended)] == [1, 2]
    assert all(isinstance(verdict.error, NotAllowed) for verdict in verdicts if isinstance(verdict, Refused))
    page = await log.read(Query())
    assert [record.payload["n"] for record in page.records] == ["000000", "000002"]


@pytest.mark.parametrize("known_by", ["event_id", "idem_key"])
async def test_a_repeated_event_is_authorised_too(log: Log, known_by: str) -> None:
    """Whoever may not publish is not told that an event is known, nor where it is."""
    first = event("a", {"n": 1}, **{known_by: "k"})
    again = event("a", {"n": 1}, **{known_by: "k"})
    await log.append(first)

    with pytest.raises(NotAllowed):
        await log.append(again, authorise=refuse_odd)
    (verdict,) = await log.append_many([again], authorise=refuse_odd)

    assert isinstance(verdict, Refused)


async def test_an_event_from_the_reserve_is_authorised_too(log: Log) -> None:
    """An event that may use the reserve needs permission like any other."""
    with pytest.raises(NotAllowed):
        await log.append(event("a", {"n": 1}), authorise=refuse_odd, from_reserve=True)

    assert log.position.seq == 0
