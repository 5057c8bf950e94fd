"""
Values beyond a limit, for tests that carry ``@pytest.mark.bound``.

    @pytest.mark.bound("core.names.EVENT_ID_BYTES_MAX")
    @crossed
    async def test_a_longer_id_is_rejected(bus: Bus, beyond: Beyond) -> None:
        with pytest.raises(InvalidEvent):
            await bus.publish("orders", {}, event_id="x" * beyond(EVENT_ID_BYTES_MAX))

The test states what holds at the limit as well, where that is not shown elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

__all__ = ["Beyond", "crossed"]

Beyond = Callable[[int], int]
"""Return a value beyond a limit."""


def by_one(limit: int) -> int:
    """Return the first value beyond the limit."""
    return limit + 1


def tenfold(limit: int) -> int:
    """Return ten times the limit."""
    return limit * 10


crossed = pytest.mark.parametrize("beyond", [by_one, tenfold], ids=["by one", "tenfold"])
"""Run a test with the parameter ``beyond``: by one, and tenfold."""
