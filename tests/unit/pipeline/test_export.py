"""An export has the same bytes every time, holds the pinned range, and leaves out what was erased."""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
import typer
from typer.testing import CliRunner

from tests.beyond import Beyond, crossed
from tests.unit.pipeline.lake_support import all_records, archive, empty_lake
from tidings.cli import pipeline_lake
from tidings.cli.output import UsageProblem
from tidings.core.events import Event, EventMeta
from tidings.log.embedded.opening import open_log
from tidings.log.errors import PositionTrimmed, WorkspaceMissing
from tidings.log.interface import Query
from tidings.log.memory import MemoryLog
from tidings.log.settings import LogSettings
from tidings.pipeline.errors import NotExportable, TooManyErasures
from tidings.pipeline.export import (
    ExportRange,
    export_file,
    export_table,
    exported_records,
    load_erasures,
    pinned,
)
from tidings.pipeline.schemas import arrow_schema
from tidings.pipeline.serving import ArchivedLog, LakeArchive
from tidings.pipeline.settings import ExportFormat
from tidings.pipeline.table_files import entry_of
from tidings.testing import VirtualClock

from .test_serving import drop_all


async def add(
    log: MemoryLog, kind: str, payload: dict[str, Any], *, space_id: str = "s1", topic: str = "t", **more: Any
) -> int:
    seq = log.position.seq + 1
    await log.append(Event(EventMeta(topic, kind, space_id, f"e{seq}", **more), payload))
    return seq


async def log_with(count: int = 10) -> MemoryLog:
    log = MemoryLog(LogSettings(segment_lines_max=2), clock=VirtualClock(), epoch="e1")
    for n in range(count):
        await add(log, "ACTION_EXECUTED" if n % 2 else "ACTION_DECISION", {"plan_id": f"p{n // 2}"})
    return log


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.req("F123")
@pytest.mark.parametrize("format_", list(ExportFormat))
async def test_a_pinned_range_has_the_same_bytes_every_time(tmp_path: Path, format_: ExportFormat) -> None:
    """Later events, and records that moved to the lake meanwhile, change nothing."""
    log = await log_with()
    fixed = pinned(log, ExportRange(since=2, until=8))
    first = await export_file(log, fixed, tmp_path / "one", format_)
    await add(log, "ACTION_DECISION", {"plan_id": "later"})
    everything = await all_records(log)
    lake = empty_lake(tmp_path, VirtualClock())
    archive(lake, everything, epoch="e1", batch=1)
    await drop_all(log)

    with pytest.raises(PositionTrimmed):
        await export_file(log, fixed, tmp_path / "none", format_)
    assert names(tmp_path) == ["lake", "one"]
    archived = ArchivedLog(log, LakeArchive(lake))
    second = await export_file(archived, fixed, tmp_path / "two", format_)

    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    assert first == second
    assert first.sha256 == digest(tmp_path / "one")
    assert (first.rows, first.since, first.until, first.bytes) == (6, 2, 8, (tmp_path / "one").stat().st_size)
    await archived.close()


@pytest.mark.req("F123")
async def test_what_comes_out_is_what_was_committed(tmp_path: Path) -> None:
    """JSON Lines and Parquet hold the records of the range, by topic, type and space if asked; the iterator gives the same."""
    log = await log_with()
    await add(log, "ACTION_DECISION", {"plan_id": "x"}, topic="other")
    await add(log, "ACTION_DECISION", {"plan_id": "y"}, space_id="s2")
    everything = await all_records(log)
    range_ = ExportRange(topic="t", types=("ACTION_DECISION",), spaces=("s1",))
    expected = [
        r for r in everything if r.topic == "t" and r.meta.type == "ACTION_DECISION" and r.meta.space_id == "s1"
    ]
    await export_file(log, range_, tmp_path / "a.jsonl")
    await export_file(log, range_, tmp_path / "a.parquet", ExportFormat.PARQUET)

    assert (tmp_path / "a.jsonl").read_bytes().splitlines() == [record.to_json() for record in expected]
    rows = pq.read_table(tmp_path / "a.parquet").to_pylist()
    assert [(row["seq"], json.loads(row["payload"])) for row in rows] == [(r.seq, r.payload) for r in expected]
    assert [record async for record in exported_records(log, range_)] == expected
    await log.close()


@pytest.mark.req("F123")
async def test_erased_subjects_are_left_out(tmp_path: Path) -> None:
    """Records that name an erased object anywhere go; a person's go up to their request; other spaces and the erasures stay."""
    log = MemoryLog(clock=VirtualClock(), epoch="e1")
    memory = await add(log, "HIPPO_ENCODE", {"text": "a"}, idem_key="m1")
    deep = await add(log, "RECALL", {"found": [{"ids": ["x", "m1"]}]})
    elsewhere = await add(log, "RECALL", {"id": "m1"}, space_id="s2")
    alice = await add(log, "HIPPO_ENCODE", {"text": "b"}, actor={"user_id": "alice"})
    harmless = await add(log, "HIPPO_ENCODE", {"text": "m1 is mentioned in passing"})
    tombstone = await add(log, "TOMBSTONE_PROPAGATE", {"object_type": "memory", "object_id": "m1"})
    wish = await add(log, "DSAR_EXPORT", {"request": "erase", "subject_id": "alice"})
    plain_export = await add(log, "DSAR_EXPORT", {"request": "export", "subject_id": "bob"})
    later = await add(log, "HIPPO_ENCODE", {"text": "c"}, actor={"user_id": "alice"})
    late = await add(log, "RECALL", {"id": "m1"})
    bob = await add(log, "HIPPO_ENCODE", {"text": "d"}, actor="bob")

    report = await export_file(log, ExportRange(), tmp_path / "out")
    found = [json.loads(line)["seq"] for line in (tmp_path / "out").read_bytes().splitlines()]

    assert found == [elsewhere, harmless, tombstone, wish, plain_export, later, bob]
    assert report.left_out == 4
    assert {memory, deep, alice, late}.isdisjoint(found)
    before = await export_file(log, ExportRange(until=5, erased_until=5), tmp_path / "before")
    assert (before.rows, before.left_out) == (5, 0)
    with pytest.raises(TooManyErasures):
        await load_erasures(log, until=99, erasures_max=1)
    await log.close()


@pytest.mark.bound("pipeline.export.ERASURES_MAX")
@crossed
async def test_more_erasures_than_can_be_kept_are_refused(beyond: Beyond) -> None:
    """As many as allowed are known; with more nothing is exported, as an erased record could be among it."""
    log = MemoryLog(clock=VirtualClock(), epoch="e1")
    for number in range(beyond(3)):
        await add(log, "TOMBSTONE_PROPAGATE", {"object_type": "memory", "object_id": f"m{number}"})
    assert (await load_erasures(log, until=3, erasures_max=3)).count == 3
    with pytest.raises(TooManyErasures):
        await load_erasures(log, until=99, erasures_max=3)
    await log.close()


async def test_an_export_moves_no_group_and_writes_nothing(tmp_path: Path) -> None:
    """The log is the same before and after."""
    log = await log_with()
    before = (log.position, await all_records(log))
    await export_file(log, ExportRange(), tmp_path / "out")

    assert (log.position, await all_records(log)) == before
    await log.close()


SCHEMA = "row_id string, space_id string, y double, features map<string,double>, decision_seq bigint, at timestamp"


def training_lake(folder: Path) -> Any:
    lake = empty_lake(folder, VirtualClock())
    table = lake.folder("gold.rows").path
    table.mkdir(parents=True)
    schema = arrow_schema(SCHEMA)
    with duckdb.connect() as database:
        database.execute("set timezone='UTC'")
        for number in range(2):
            database.execute(
                f"""copy (select 'r' || n as row_id, 's' || (n % 2) as space_id, n / 10.0::double as y,
                    map([ 'b', 'a' ], [n::double, 1.0::double]) as features, n::bigint as decision_seq,
                    timestamptz '2026-03-02 00:00:00+00' + to_seconds(n) as at
                    from range({number}, 20, 2) t(n) order by hash(n)) to '{table}/f{number}.parquet' (format parquet)"""
            )
    entries = [entry_of(lake.folder("gold.rows"), f"f{number}.parquet") for number in range(2)]
    lake.commit("gold.rows", schema, lake.adds(entries), app="x", version=1, note={})
    return lake


@pytest.mark.req("F123", "F124")
@pytest.mark.parametrize("format_", list(ExportFormat))
async def test_training_rows_are_exported_by_range(tmp_path: Path, format_: ExportFormat) -> None:
    """Rows come in seq order from within the range, without what was erased, with the same bytes twice."""
    log = MemoryLog(clock=VirtualClock(), epoch="e1")
    await add(log, "TOMBSTONE_PROPAGATE", {"object_id": "r7", "space_id": "s1"})
    erasures = await load_erasures(log, until=1)
    lake = training_lake(tmp_path)
    range_ = ExportRange(since=4, until=9, erased_until=1)
    reports = [
        export_table(lake, "gold.rows", tmp_path / name, format_, range_, erasures, epoch="e1") for name in ("a", "b")
    ]

    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert reports[0] == reports[1]
    assert (reports[0].rows, reports[0].left_out) == (4, 1)
    if format_ is ExportFormat.PARQUET:
        rows = pq.read_table(tmp_path / "a").to_pylist(maps_as_pydicts="strict")
    else:
        rows = [json.loads(line) for line in (tmp_path / "a").read_bytes().splitlines()]
    assert [row["decision_seq"] for row in rows] == [5, 6, 8, 9]
    assert rows[0]["features"] == {"a": 1.0, "b": 5.0}
    only = ExportRange(since=0, until=99, erased_until=1, spaces=("s0",))
    assert export_table(lake, "gold.rows", tmp_path / "c", format_, only, erasures, epoch="e1").rows == 9
    await log.close()


async def test_a_table_without_places_is_refused(tmp_path: Path) -> None:
    """Rows that do not say where they are from cannot be exported by range."""
    log = await log_with(1)
    lake = empty_lake(tmp_path, VirtualClock())
    lake.commit("gold.sums", pa.schema([("n", pa.int64())]), [], app="x", version=1, note={})
    erasures = await load_erasures(log, until=1)

    with pytest.raises(NotExportable):
        export_table(
            lake,
            "gold.sums",
            tmp_path / "x",
            ExportFormat.JSONL,
            ExportRange(until=1, erased_until=1),
            erasures,
            epoch="e",
        )
    assert await log.read(Query(until=0)) is not None
    await log.close()


def invoke(*args: object) -> Any:
    app = typer.Typer()
    pipeline_lake.register(app)
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def workspace_with_lake(folder: Path) -> list[bytes]:
    """A workspace whose oldest segments are in the lake only, and everything it ever held."""

    async def fill() -> list[bytes]:
        log = await open_log(folder, LogSettings(segment_lines_max=2, journal_bytes=1 << 20))
        for n in range(9):
            await log.append(Event(EventMeta("t", "X", "s1", f"e{n}"), {"n": n}))
        await log.append(Event(EventMeta("t", "TOMBSTONE_PROPAGATE", "s1", "gone"), {"object_id": "e4"}))
        everything = await all_records(log)
        archive(empty_lake(folder, VirtualClock()), everything, epoch=log.position.epoch, batch=1)
        await drop_all(log)
        await log.close()
        return [record.to_json() for record in everything]

    return asyncio.run(fill())


@pytest.mark.req("F123")
def test_the_command_reads_log_and_lake(tmp_path: Path) -> None:
    """``export`` gives the whole range although the log dropped its beginning, and says how to get the same again."""
    everything = workspace_with_lake(tmp_path)
    first = invoke("export", "-w", tmp_path, "-o", tmp_path / "a.jsonl", "--json")
    said = json.loads(first.stdout)
    again = ("--since", said["since"], "--until", said["until"], "--erased-until", said["erased_until"])
    second = invoke("export", "-w", tmp_path, "-o", tmp_path / "b.jsonl", *again)

    assert (tmp_path / "a.jsonl").read_bytes().splitlines() == [*everything[:4], *everything[5:]]
    assert (said["rows"], said["left_out"], said["sha256"]) == (9, 1, digest(tmp_path / "a.jsonl"))
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    assert said["sha256"] in second.stderr
    rows = json.loads(
        invoke(
            "export", "-w", tmp_path, "-o", tmp_path / "c", "--table", "bronze.events", "--until", 3, "--json"
        ).stdout
    )
    assert (rows["rows"], rows["version"]) == (3, 1)
    with pytest.raises(UsageProblem):
        invoke("export", "-w", tmp_path, "-o", tmp_path / "d", "--version", 3)
    with pytest.raises(UsageProblem):
        invoke("export", "-w", tmp_path, "-o", tmp_path / "d", "--table", "gold.x", "--topic", "t")


def test_the_report_command_writes_the_page(tmp_path: Path) -> None:
    """``report`` names the page it wrote and how far it reaches; without a workspace it says so."""
    workspace_with_lake(tmp_path)
    said = invoke("report", "-w", tmp_path, "-o", tmp_path / "r.html", "--json")

    assert json.loads(said.stdout)["seq"] == 10
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")
    assert "up to seq 10" in invoke("report", "-w", tmp_path, "-o", tmp_path / "r.html").stdout
    with pytest.raises(WorkspaceMissing):
        invoke("report", "-w", tmp_path / "none", "-o", tmp_path / "r2.html")
