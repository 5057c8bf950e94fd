"""The same pipeline on a real standalone cluster and through a Spark Connect server, by one setting."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.pipeline_support import cluster, connect_server, environment, tool
from tests.unit.pipeline.support import Workspace, event

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(500)]


def filled(folder: Path) -> Workspace:
    """A log with some segments."""
    workspace = Workspace(folder)
    workspace.append(event(number, f"t{number % 3}") for number in range(90))
    return workspace


def test_one_master_and_two_workers(tmp_path: Path) -> None:
    """
    On a standalone cluster of three processes the tables say what the log says.
    """
    workspace = filled(tmp_path / "ws")
    with cluster(tmp_path / "spark") as (address, _):
        options = ("--master", address, "--set", "spark.executor.memory=512m", "-w", workspace.folder)
        ran = tool("pipeline", "run", "--jobs", "topic_minutes", *options, env=environment(tmp_path))

    assert (ran["rows"], ran["until"]) == (90, 90)
    assert ran["jobs"][0]["error"] is None
    assert workspace.verify().is_equal


def test_a_spark_connect_server(tmp_path: Path) -> None:
    """
    Through Spark Connect, with no JVM on this side, the tables say what the log says.
    """
    workspace = filled(tmp_path / "ws")
    with connect_server(tmp_path / "spark") as address:
        options = ("--remote", address, "-w", workspace.folder)
        ran = tool("pipeline", "run", "--jobs", "topic_minutes", *options, env=environment(tmp_path))

    assert (ran["rows"], ran["until"]) == (90, 90)
    assert ran["jobs"][0]["error"] is None
    assert workspace.verify().is_equal
