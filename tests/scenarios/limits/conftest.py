"""A simulated world for tests that cross limits."""

from tests.scenarios.bus.conftest import world

__all__ = ["world"]
