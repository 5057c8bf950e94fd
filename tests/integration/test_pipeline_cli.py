"""The pipeline's commands, as a person or a script runs them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.pipeline_support import environment, tool
from tests.unit.pipeline.support import Workspace, event

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(900)]


def test_a_run_needs_no_java_of_the_machine(tmp_path: Path) -> None:
    """
    With no Java in sight a run fills the tables; status, verify and questions then agree with the log.
    """
    workspace = Workspace(tmp_path / "ws")
    workspace.append(event(number, f"t{number % 2}") for number in range(40))
    env = environment(tmp_path, has_java=False)
    options = ("-w", workspace.folder)

    ran = tool("pipeline", "run", "--once", "--jobs", "topic_minutes", "--master", "local[2]", *options, env=env)

    assert (ran["rows"], ran["until"], ran["silver"]["silver.events"]) == (40, 40, 40)
    assert [job["name"] for job in ran["jobs"]] == ["topic_minutes"]
    assert ran["jobs"][0]["error"] is None
    status = tool("pipeline", "status", *options, env=env)
    assert (status["seq"], status["pending"]) == (40, 0)
    verdict = tool("pipeline", "verify", *options, env=env)
    assert verdict["is_equal"]
    assert {stream["stream"]: stream["lake"]["count"] for stream in verdict["streams"]} == {"t0": 20, "t1": 20}
    names = [table["name"] for table in tool("table", "list", *options, env=env)]
    assert {"bronze.events", "silver.events", "gold.topic_minutes"} <= set(names)
    shown = tool("table", "show", "bronze.events", *options, env=env)
    assert (shown["rows"], shown["seq"], len(shown["sample"])) == (40, 40, 5)
    asked = tool(
        "table", "query", "select topic, count(*) as n from bronze.events group by 1 order by 1", *options, env=env
    )
    assert asked == [{"topic": "t0", "n": 20}, {"topic": "t1", "n": 20}]
    assert sum(row["events"] for row in tool("table", "query", "from gold.topic_minutes", *options, env=env)) == 40


def test_verify_says_what_is_wrong(tmp_path: Path) -> None:
    """
    A lake that lost a file, or has another record, is found to differ, with exit code 1.
    """
    workspace = Workspace(tmp_path / "ws")
    workspace.append(event(number) for number in range(12))
    env = environment(tmp_path)
    tool("pipeline", "run", "--jobs", "none", "--master", "local[2]", "-w", workspace.folder, env=env)
    path = workspace.segments()[0]
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:3], *lines[4:]]))

    verdict = tool("pipeline", "verify", "-w", workspace.folder, env=env, code=1)

    assert not verdict["is_equal"]


def test_mistakes_are_told_in_a_sentence(tmp_path: Path) -> None:
    """
    An unreachable master, a missing log, a setting that does not exist: each has its code and no traceback.
    """
    env = environment(tmp_path)
    workspace = Workspace(tmp_path / "ws")
    workspace.append([event(1)])
    run = ("pipeline", "run", "-w", workspace.folder)

    for args, code, error in (
        ((*run, "--master", "spark://127.0.0.1:9"), 1, "pipeline.master_unreachable"),
        ((*run, "--remote", "sc://127.0.0.1:9"), 1, "pipeline.master_unreachable"),
        ((*run, "--remote", "http://x"), 2, "cli.usage"),
        ((*run, "--set", "nonsense=1"), 2, "settings.invalid"),
        ((*run, "--set", "driver_memory_mb=1"), 2, "settings.invalid"),
        ((*run, "--every", "soon"), 2, "cli.usage"),
        ((*run, "--with", "nonsense"), 1, "pipeline.unknown_job_set"),
        ((*run, "--with", "cognition", "--jobs", "topic_minutes"), 2, "cli.usage"),
        (("pipeline", "status", "-w", tmp_path / "nowhere"), 3, "workspace.missing"),
        (("pipeline", "explain", "nonsense", "-w", workspace.folder), 1, "pipeline.unknown_job"),
        (("table", "show", "gold.nonsense", "-w", workspace.folder), 1, "lake.unknown_table"),
    ):
        assert tool(*args, env=env, code=code)["error"]["code"] == error


def test_the_tool_starts_without_spark() -> None:
    """
    Importing the commands imports neither PySpark nor anything else that takes long.
    """
    heavy = ["pyspark", "duckdb", "pyarrow", "deltalake", "pandas"]
    code = (
        f"import sys, tidings.cli.pipeline, tidings.cli.table; print([name for name in {heavy} if name in sys.modules])"
    )

    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
