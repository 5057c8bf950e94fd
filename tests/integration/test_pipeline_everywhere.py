"""
All sets of jobs on this machine's cores, on a standalone cluster and through Spark Connect, also where the JVM speaks Turkish and the
machine is in another time zone: every table is the same.
"""

from __future__ import annotations

import asyncio
import math
import shutil
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from tests.integration.pipeline_support import cluster, environment, tool
from tests.spark_session import TEST_SETTINGS, connect_address
from tests.unit.cognition.jobs.test_partitioned_jobs import Chance, append
from tests.unit.pipeline.jobs.support import START
from tests.unit.pipeline.jobs.test_ledger import CATALOGUE, steps
from tests.unit.pipeline.support import SMALL, Workspace
from tidings.bus.store import Attempt
from tidings.bus.store.dead_letter_files import DeadLetterFiles
from tidings.core.clock import SYSTEM_CLOCK, ns_of
from tidings.core.events import Event, EventMeta
from tidings.ledger import open_ledger
from tidings.log.embedded.cursors import StoredCursor, encode_cursor
from tidings.log.embedded.disk import OsDisk
from tidings.log.segment import decode
from tidings.pipeline.jobs.registry import all_jobs
from tidings.testing import VirtualClock

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(900)]

JOBS: Final = all_jobs()
RUN: Final = ("pipeline", "run", "--once", "--jobs", ",".join(job.name for job in JOBS))
QUICK: Final = tuple(
    part
    for name, value in TEST_SETTINGS.spark.items()
    if name.startswith("spark.sql.") and not name.endswith("Parallelism")
    for part in ("--set", f"{name}={value}")
)
SMALL_EXECUTORS: Final = tuple(
    part
    for setting in ("spark.executor.memory=768m", "small_rows_max=0", "undivided_rows_max=0", "shuffle_partitions=2")
    for part in ("--set", setting)
)
ELSEWHERE: Final = {
    "TZ": "America/St_Johns",
    "JAVA_TOOL_OPTIONS": "-XX:TieredStopAtLevel=1 -Duser.language=tr -Duser.country=TR",
}
EMPTY: Final = {
    *("gold.gate_proposals", "gold.gate_regret", "gold.learning_fits", "gold.reconsolidations", "gold.rollups_told"),
    "gold.refused_erasures",
}
"""The tables that have no row in this log: it is too short for a fit, nothing was told to it, and nothing is past its time."""


def _written() -> list[Event]:
    """What ``Chance`` does not say: texts whose lower case depends on the language, an erasure, and one recall."""

    def event(name: str, topic: str, kind: str, payload: dict[str, Any]) -> Event:
        meta = EventMeta(topic=topic, type=kind, space_id="s1", event_id=name, ts=START, actor="ada", trace_id=name)
        return Event(meta, payload)

    texts = ("İSTANBUL IŞIĞI ÜZERİNDE", "istanbul ışığı üzerinde", "TITLE IN ÇAPITALS", "title in çapitals")
    memories = [
        event(f"turkish-{number}", "hippo", "HIPPO_ENCODE", {"content": {"text": text}, "confidence": number})
        for number, text in enumerate(texts)
    ]
    return [
        *memories,
        event("gone", "hippo", "TOMBSTONE_PROPAGATE", {"object_id": "turkish-3", "object_type": "memory"}),
        event("recalled", "recall", "RECALL_RESULT", {"results": [{"event_id": "turkish-0"}]}),
    ]


def _asked(day: float) -> Event:
    """A question for the moments of the day before."""
    said = {"request_id": "r1", "phrase": "yesterday", "tz": "Europe/Berlin"}
    at = START + timedelta(days=day)
    return Event(EventMeta("temporal", "TEMPORAL_RANGE_REQUEST", "s1", "ask", at), said)


async def _act(folder: Path) -> None:
    """What the ledger does, at the time of the other events."""
    clock = VirtualClock(ns_of(START))
    async with await open_ledger(folder, catalogue=CATALOGUE, log_settings=SMALL, clock=clock) as ledger:
        for step in steps(ledger):
            await step


def _letters_and_groups(workspace: Workspace) -> None:
    """A group with a cursor and a dead letter."""
    workspace.layout.offsets.mkdir(exist_ok=True)
    workspace.layout.dlq.mkdir(exist_ok=True)
    cursor = StoredCursor(committed=0, segment=1, ts="2026-03-02T10:00:00.000000Z", epoch=workspace.epoch)
    (workspace.layout.offsets / "hippo__workers.json").write_bytes(encode_cursor(cursor))
    segment = next(path for path in workspace.segments() if path.name.startswith("hippo"))
    record = decode(segment.read_bytes().splitlines()[0])
    DeadLetterFiles(OsDisk(), workspace.layout.dlq, SYSTEM_CLOCK).add(
        record,  # type: ignore[arg-type]
        "workers",
        ValueError("no item 17"),
        [Attempt("2026-03-02T10:00:00.000000Z", "no")] * 2,
        "retries",
    )


@pytest.fixture(scope="module")
def local(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """A log with something for every set, and the tables that this machine's own cores make of it."""
    folder = tmp_path_factory.mktemp("local")
    workspace = Workspace(folder / "ws", SMALL)
    asyncio.run(_act(workspace.folder))
    chance = Chance(3)
    append(workspace, _written(), 0.0)
    for day in (0.1, 1.1, 2.2):
        append(workspace, chance.slice_of(day, 60), day)
    append(workspace, [_asked(2.2)], 2.2)
    _letters_and_groups(workspace)
    shutil.copytree(workspace.folder, folder / "copy")
    report = workspace.pipeline(TEST_SETTINGS).run(lambda: spark, JOBS)
    assert [(job.name, str(job.error)) for job in report.failed] == []
    return workspace


def copy_of(local: Workspace, folder: Path) -> Workspace:
    """The same log without a lake."""
    shutil.copytree(local.folder.with_name("copy"), folder / "ws")
    return Workspace(folder / "ws", local.log_settings)


def tables_of(workspace: Workspace) -> dict[str, list[str]]:
    """Every table's rows in any order, without when the run looked; numbers to nine digits, as sums depend on the order of parts."""
    return {
        table: sorted(
            repr({name: _shown(value) for name, value in row.items() if name != "seen_at"})
            for file in workspace.lake.files(table)
            for row in workspace.lake.dataset(table, [file]).to_table().to_pylist()
        )
        for table in workspace.lake.tables()
    }


def _shown(value: Any) -> Any:
    if isinstance(value, float):
        return value if not math.isfinite(value) or not value else float(f"{value:.9g}")
    if isinstance(value, dict):
        return {name: _shown(each) for name, each in value.items()}
    return [_shown(each) for each in value] if isinstance(value, list | tuple) else value


def check(local: Workspace, folder: Path, options: Sequence[object], env: dict[str, str]) -> None:
    """Run all jobs of all sets by the command, and compare every table."""
    workspace = copy_of(local, folder)
    ran = tool(*RUN, *QUICK, *options, "-w", workspace.folder, env=env)
    assert [
        (job["name"], job["error"], job["waits_for"]) for job in ran["jobs"] if job["error"] or job["waits_for"]
    ] == []
    expected, tables = tables_of(local), tables_of(workspace)
    assert expected.keys() == tables.keys()
    assert [name for name in expected if expected[name] != tables[name]] == []
    assert {name for name, rows in tables.items() if not rows} <= EMPTY
    assert len(tables) > 40


@pytest.mark.heavy
def test_all_sets_where_the_jvm_speaks_turkish(local: Workspace, tmp_path: Path) -> None:
    """On this machine's cores, with a JVM in Turkish and in St. John's time zone."""
    check(local, tmp_path, (), environment(tmp_path, has_java=False) | ELSEWHERE)


@pytest.mark.heavy
@pytest.mark.parametrize("place", [{}, ELSEWHERE], ids=["here", "elsewhere"])
def test_all_sets_on_a_cluster(local: Workspace, tmp_path: Path, place: dict[str, str]) -> None:
    """On a standalone cluster of a master and two workers, here and in another language and time zone."""
    env = environment(tmp_path, has_java=False) | place
    with cluster(tmp_path / "spark", place) as (address, _):
        check(local, tmp_path, ("--master", address, *SMALL_EXECUTORS), env)


@pytest.mark.heavy
@pytest.mark.parametrize("place", [{}, {"TZ": ELSEWHERE["TZ"]}], ids=["here", "elsewhere"])
def test_all_sets_over_spark_connect(
    spark: SparkSession, local: Workspace, tmp_path: Path, place: dict[str, str]
) -> None:
    """Through a Spark Connect server, with no JVM on this side, here and in another time zone."""
    env = environment(tmp_path, has_java=False) | place
    check(local, tmp_path, ("--remote", connect_address(spark)), env)
