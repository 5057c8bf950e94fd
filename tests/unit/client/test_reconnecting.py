"""When a node is asked again: after pauses that grow, within a patience, and not where it is of no use."""

from __future__ import annotations

import random

import pytest

from tidings.client.errors import ConnectFailed, LinkClosed, LinkError, RemoteStopped, RemoteUnavailable
from tidings.client.reconnecting import Reconnecting, full_jitter, retry_after_of
from tidings.testing import VirtualClock

DOWN = ConnectFailed("ws://node", "the network is down")


async def test_the_pauses_grow_at_random_and_begin_anew_after_an_answer() -> None:
    """Each pause is drawn from a range that doubles, up to 15 seconds; an answer makes the next failure the first again."""
    clock, rng = VirtualClock(), random.Random(7)
    reconnecting = Reconnecting("ws://node", clock=clock, rng=rng)
    expected = random.Random(7)
    for attempts in (12, 3):
        for attempt in range(attempts):
            before = clock.monotonic()
            await clock.run_until(reconnecting.pause(DOWN))
            assert clock.monotonic() - before == pytest.approx(full_jitter(attempt, 0.2, 15.0, expected))
        reconnecting.succeeded()


async def test_who_is_told_when_to_come_again_does_not_come_before() -> None:
    """``Retry-After`` of a refusal is waited out, up to a minute, and the pause comes on top of it."""
    clock = VirtualClock()
    await clock.run_until(
        Reconnecting("ws://node", clock=clock, rng=random.Random(1)).pause(ConnectFailed("ws://node", "full", 503, 30))
    )
    assert 30.0 < clock.monotonic() < 31.0
    said = ["30", "9999", "soon", "-1", ""]
    assert [retry_after_of({"retry-after": each}) for each in said] == [30, 60, None, None, None]


async def test_patience_is_counted_from_the_first_failure_and_ends_in_an_error() -> None:
    """The last attempt is made when the patience is over, and not after it; without patience the first failure is the end."""
    clock = VirtualClock()
    reconnecting = Reconnecting("ws://node", clock=clock, rng=random.Random(1), patience_s=20.0)

    async def keep_trying() -> None:
        while True:
            await reconnecting.pause(DOWN)

    with pytest.raises(RemoteUnavailable, match="the network is down"):
        await clock.run_until(keep_trying())
    assert clock.monotonic() == pytest.approx(20.0)
    with pytest.raises(RemoteUnavailable):
        await Reconnecting("ws://node", clock=clock, rng=random.Random(1), patience_s=0).pause(DOWN)


@pytest.mark.parametrize(
    ("problem", "may_differ", "attempts"),
    [
        (LinkClosed(4403), True, 1),
        (LinkClosed(4400), True, 1),
        (LinkClosed(1009), True, 1),
        (LinkClosed(4401), False, 1),
        (LinkClosed(4401), True, 5),
    ],
)
async def test_what_would_end_the_same_way_is_given_up(problem: LinkError, may_differ: bool, attempts: int) -> None:
    """A revoked token, a broken protocol and a message that is too big end it at once; a token is made afresh four times."""
    clock = VirtualClock()
    reconnecting = Reconnecting("ws://node", clock=clock, rng=random.Random(1), may_differ=may_differ)
    for _ in range(attempts - 1):
        await clock.run_until(reconnecting.pause(problem))
    with pytest.raises(RemoteStopped, match=r"ws://node"):
        await reconnecting.pause(problem)


def test_full_jitter_grows_up_to_its_bound_and_begins_at_nothing() -> None:
    """The range of the pause doubles from attempt to attempt, always starts at 0, and never passes the maximum."""
    rng = random.Random(1)
    by_attempt = [[full_jitter(attempt, 0.5, 8.0, rng) for _ in range(500)] for attempt in range(8)]

    for attempt, pauses in enumerate(by_attempt):
        bound = min(8.0, 0.5 * 2**attempt)
        assert max(pauses) <= bound
        assert max(pauses) > bound * 0.9
        assert min(pauses) < bound * 0.1
