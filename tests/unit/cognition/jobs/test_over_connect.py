"""The jobs with code in Python run over Spark Connect too, wherever they were imported; all sets do in ``tests/integration``."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.spark_session import TEST_SETTINGS, connect_address
from tests.unit.cognition.jobs.test_partitioned_jobs import Chance, append, tables_of
from tests.unit.pipeline.jobs.support import START
from tests.unit.pipeline.support import Workspace
from tidings.core.events import Event, EventMeta
from tidings.pipeline.jobs.registry import all_jobs, choose
from tidings.pipeline.session import connect_mode

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(900)]

JOBS = choose(
    all_jobs(),
    ["consolidation_memories", "temporal_index", "temporal_features", "temporal_recency", "temporal_candidates"],
)


def _same(session: SparkSession) -> SparkSession:
    return session


@contextlib.contextmanager
def session_at(spark: SparkSession, address: str) -> Iterator[SparkSession]:
    """This session, or one of the server at that address."""
    if address == "local":
        yield spark
        return
    from pyspark.sql.connect.session import SparkSession as ConnectSession

    with connect_mode(address):
        remote: Any = ConnectSession.builder.remote(address).create()
        try:
            yield remote
        finally:
            remote.stop()


def test_python_in_jobs_runs_over_spark_connect(spark: SparkSession, tmp_path: Path) -> None:
    """
    Without a memory, with a few, and with a question, each table that a server makes by Spark Connect is the one that this session makes.
    """
    asked = {"request_id": "r1", "phrase": "yesterday"}
    address = connect_address(spark)
    chance = Chance(4)
    steps = (
        [Event(EventMeta("hippo", "OTHER", "s1", "none", START), {})],
        chance.slice_of(0.0, 40),
        [Event(EventMeta("temporal", "TEMPORAL_RANGE_REQUEST", "s1", "ask", START), asked)],
    )
    tables: list[dict[str, Any]] = []
    for place in ("local", "remote"):
        workspace = Workspace(tmp_path / place)
        for step in steps:
            append(workspace, step, 0.0)
            with session_at(spark, address if place == "remote" else "local") as session:
                report = workspace.pipeline(TEST_SETTINGS).run(functools.partial(_same, session), JOBS)
            assert [str(job.error) for job in report.failed] == []
        tables.append(tables_of(workspace, JOBS))

    assert tables[0] == tables[1]
    assert len(tables[0]["gold.memories"]) > 1
    assert tables[0]["gold.temporal_features"]
    assert tables[0]["gold.temporal_requests"]
