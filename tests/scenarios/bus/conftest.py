"""A simulated world for each test, put away at its end."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from .support import World


@pytest.fixture
async def world() -> AsyncIterator[World]:
    """A world in which no bus runs yet."""
    made = World()
    yield made
    await made.close()
