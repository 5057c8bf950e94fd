"""The examples that read tables say the same of the same orders, each with its own library."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from tests.docs.reading import run_program
from tests.docs.test_project import pins
from tests.spark_session import TEST_SETTINGS
from tests.unit.pipeline.support import Workspace

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(900)]

REPOSITORY: Final = Path(__file__).parents[2]
EXAMPLES: Final = REPOSITORY / "examples"
SAID: Final = "orders 2 2500\n"


@pytest.fixture
def shop(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which the quickstart was run twice, and the pipeline once."""
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        run_program((EXAMPLES / "quickstart.py").read_text(encoding="utf-8"), "quickstart.py")
    Workspace(tmp_path / "workspace").pipeline(TEST_SETTINGS).run(lambda: spark, ())
    return tmp_path


@pytest.mark.heavy
def test_duckdb_pandas_and_spark_see_the_same_orders(shop: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each program prints how many orders there are and what they cost; and again."""
    capsys.readouterr()
    for name in ("tables_duckdb.py", "tables_pandas.py", "tables_pyspark.py") * 2:
        run_program((EXAMPLES / name).read_text(encoding="utf-8"), name)
        assert (name, capsys.readouterr().out) == (name, SAID)


@pytest.mark.heavy
def test_polars_sees_them_too(shop: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """With the Polars that the benchmarks are measured against, fetched for this: it is too large for every set-up."""
    library = tmp_path_factory.mktemp("polars")
    wanted = pins(REPOSITORY / "requirements/bench.txt")
    packages = [f"{name}=={wanted[name]}" for name in ("polars", "polars-runtime-32")]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check"]
    subprocess.run([*pip, "--target", library, *packages], check=True, timeout=600)
    command = [sys.executable, str(EXAMPLES / "tables_polars.py")]
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, env={**os.environ, "PYTHONPATH": str(library)}, text=True)
        assert (done.returncode, done.stdout) == (0, SAID), done.stderr
