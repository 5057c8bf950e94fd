"""
One Spark session for a whole pytest run.

A test package that needs it writes ``from tests.spark_session import spark`` in its ``conftest.py`` (with
``__all__ = ["spark"]``), marks its tests ``spark`` and takes the fixture ``spark``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tidings.pipeline.session import open_session, start_session
from tidings.pipeline.settings import PipelineSettings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["TEST_SETTINGS", "spark"]

TEST_SETTINGS = PipelineSettings(master="local[2]", shuffle_partitions=1, driver_memory_mb=1024)


_shared = contextlib.ExitStack()
_users: list[str] = []


@pytest.fixture(scope="session")
def spark(request: pytest.FixtureRequest) -> Iterator[SparkSession]:
    """Spark on two threads of this machine, in UTC."""
    # Each conftest that imports this has a fixture of its own. They share the session, and the last one out ends it.
    if not _users:
        _shared.enter_context(open_session(TEST_SETTINGS))
    _users.append(request.node.nodeid)
    try:
        yield start_session(TEST_SETTINGS)
    finally:
        _users.pop()
        if not _users:
            _shared.close()
