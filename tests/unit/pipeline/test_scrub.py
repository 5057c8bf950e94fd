"""What was erased leaves the lake: every table, every file, and whatever is read from them afterwards."""

from __future__ import annotations

import asyncio
import errno
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest

from tests.integration.cli.support import invoke, lines
from tests.spark_session import TEST_SETTINGS
from tests.unit.pipeline.support import Workspace, event
from tidings.cognition.jobs.temporal_index import TEMPORAL_INDEX_JOBS
from tidings.core.clock import SYSTEM_CLOCK
from tidings.log.embedded import open_log
from tidings.log.interface import Query
from tidings.log.reading import records
from tidings.pipeline.errors import LakeUnwritable
from tidings.pipeline.export import ExportRange, export_file
from tidings.pipeline.jobs.job import Job
from tidings.pipeline.jobs.registry import all_jobs
from tidings.pipeline.lake import Lake
from tidings.pipeline.schemas import BRONZE_EVENTS, arrow_schema
from tidings.pipeline.scrub import Scrub, plan_scrub
from tidings.pipeline.serving import ArchivedLog, LakeArchive
from tidings.pipeline.silver import FROM_THE_BEGINNING
from tidings.pipeline.state_files import load_archived

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]

SECRETS: Final = ("boiler", "umbrella", "adas-phone", "trombone")
ERASED: Final = ["adas", "adas2", "cleos", "gone", "synced"]
ALL_TIMES: Final = {"request_id": "r", "from": "2020-01-01T00:00:00Z", "to": "2120-01-01T00:00:00Z"}
LISTS: Final = frozenset({"gold.scrub_list", "gold.temporal_deletions"})
NAMING: Final = {
    *("gold.temporal_index", "gold.temporal_features", "gold.recency", "gold.temporal_patterns", "silver.events"),
    *("gold.temporal_candidates", "gold.temporal_days", "gold.near_duplicates", "gold.keep_scores", "gold.rollups"),
}
"""The tables whose rows name memories."""


def jobs_of(*beginnings: str) -> Sequence[Job]:
    """The jobs whose names begin so, in their order."""
    return [job for job in all_jobs() if job.name.startswith(beginnings)]


def memory(event_id: str, text: str, person_id: str, **meta: Any) -> Any:
    payload = {"content": {"text": text}, "person_id": person_id, "space_id": "shared:home"}
    fields = {"type": "HIPPO_ENCODE", "event_id": event_id, **meta}
    return event(0, "hippo", payload, **fields)


SOME: Final = ("erasures", "temporal_told", "temporal_index", "temporal_recency")
ALL: Final = ("erasures", "temporal", "consolidation")


@pytest.fixture(scope="module", params=[SOME, pytest.param(ALL, marks=pytest.mark.heavy)], ids=["some", "all"])
def made(request: pytest.FixtureRequest, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """A lake, tables of gold filled by some jobs or all, and erasures that came after it, listed and not carried out."""
    workspace = Workspace(tmp_path_factory.mktemp("scrub") / "ws")
    workspace.append(
        [
            memory("gone", "Somebody left an umbrella in the cellar.", "bob"),
            memory("stays", "The plumber comes on Friday at noon.", "bob"),
            memory("adas", "Ada was here and fixed the boiler.", "ada", actor="ada", device="adas-phone"),
            memory("adas2", "Ada was here and fixed the boiler..", "ada", actor="ada"),
            memory("cleos", "Cleo wants to learn the trombone.", "cleo", actor="cleo"),
            event(1, "sync", {"id": "synced", "text": "umbrella"}, event_id="synced", actor="ada", partitions=("p",)),
            event(5, "temporal", ALL_TIMES, type="TEMPORAL_RANGE_REQUEST"),
            event(2, "access", {"subject": "ada"}, event_id="permitted", actor="ada"),
            *(event(100 + number) for number in range(30)),
            *(event(200 + number, "hippo", type="HIPPO_NOTED") for number in range(12)),
        ]
    )
    assert workspace.pipeline(TEST_SETTINGS).run(lambda: spark, jobs_of(*request.param)).failed == ()
    empty = {output.table: output.schema for job in jobs_of(*ALL) for output in job.writes}
    for table in empty.keys() - {*workspace.lake.tables()} - LISTS:
        fill(workspace.lake, table, empty[table], [])
    workspace.append(
        [
            event(
                3, "system", {"object_type": "memory", "object_id": "gone"}, type="TOMBSTONE_PROPAGATE", event_id="t"
            ),
            event(4, "system", {"subject_id": "ada"}, type="DSAR_ERASE", event_id="wish"),
            event(6, "system", {"object_type": "profile", "object_id": "cleo"}, type="TOMBSTONE_APPLIED", event_id="p"),
            memory("later", "Ada came back.", "ada", actor="ada"),
        ]
    )
    assert workspace.pipeline(TEST_SETTINGS).run(lambda: spark, jobs_of("erasures", "consolidation_scrub")).failed == ()
    return workspace


def fill(lake: Lake, table: str, schema: str, rows: list[dict[str, Any]]) -> None:
    """Make a table by hand."""
    content = pa.Table.from_pylist(rows, schema=arrow_schema(schema))
    note = {"epoch": "e1", "seq": 9}
    lake.write_rows(content, table, schema, app="hand", version=1, note=note, run="hand")


@pytest.fixture
def workspace(made: Workspace, tmp_path: Path) -> Workspace:
    """A copy of it."""
    shutil.copytree(made.folder, tmp_path / "ws")
    return Workspace(tmp_path / "ws")


def scrub(workspace: Workspace, run: str = "r") -> Scrub:
    return Scrub(workspace.lake, run, SYSTEM_CLOCK.now_ns())


def holdings(paths: Iterator[Path]) -> str:
    """All that Parquet files hold, as text."""
    return "\n".join(str(pq.read_table(path).to_pylist()) for path in paths)


def live(workspace: Workspace) -> Iterator[Path]:
    for table in set(workspace.lake.tables()) - LISTS:
        yield from (file.folder.path / file.name for file in workspace.lake.files(table))


@pytest.mark.req("C6")
def test_every_listed_row_is_found(workspace: Workspace) -> None:
    """
    The plan names as many rows of each table as the list, and with each event its copy in bronze and what knows it by seq.
    """
    listed: dict[str, int] = {}
    for table, _ in workspace.rows("gold.scrub_list", "table", "row_key"):
        listed[table] = listed.get(table, 0) + 1

    plan = plan_scrub(workspace.lake)

    assert listed == {table: plan.rows[table] for table in listed}
    assert listed.keys() == {table for table in NAMING if workspace.rows(table)}
    assert {"silver.events", "gold.temporal_index", "gold.recency"} <= listed.keys()
    assert plan.rows["bronze.events"] == plan.rows["silver.events"] == len(ERASED)
    assert plan.rows["silver.sync_events"] == 1
    assert list(plan.files)[-1] == "silver.events"
    assert {erasure.erased_by for erasure in plan.counts} == {"t", "wish", "p"}


@pytest.mark.req("C6")
def test_what_was_erased_is_nowhere_in_the_lake(workspace: Workspace) -> None:
    """
    After a scrub no row of a table says anything of it, after a sweep no file does; others' rows, and places, are all there.
    """
    before = workspace.column("bronze.events", "seq")
    assert all(secret in holdings(live(workspace)) for secret in SECRETS)

    scrub(workspace).carry_out(plan_scrub(workspace.lake))

    assert not any(secret in holdings(live(workspace)) for secret in SECRETS)
    kept = workspace.column("silver.events", "event_id")
    assert {"stays", "later", "t", "wish", "permitted"} <= set(kept)
    assert not set(ERASED) & set(kept)
    assert workspace.column("bronze.events", "seq") == before
    assert not any("adas" in str(row) for row in workspace.rows("gold.temporal_index", "doc_id"))
    assert any("stays" in str(row) for row in workspace.rows("gold.temporal_index", "doc_id"))
    verdict = workspace.verify()
    assert verdict.is_equal
    assert verdict.erased == len(ERASED)

    assert scrub(workspace).vacuum(keep_hours=24) == 0  # somebody may be reading them
    assert scrub(workspace).left_to_vacuum() > 0
    scrub(workspace).vacuum(keep_hours=0)
    assert scrub(workspace).left_to_vacuum() == 0
    everything = (
        path for table in workspace.lake.tables() for path in workspace.lake.folder(table).path.rglob("*.parquet")
    )
    assert not any(secret in holdings(everything) for secret in SECRETS)


def test_a_second_scrub_finds_nothing(workspace: Workspace) -> None:
    """
    Carried out once, the same list takes nothing more; nothing is committed.
    """
    scrub(workspace).carry_out(plan_scrub(workspace.lake))
    versions = {table: workspace.lake.open(table).version() for table in workspace.lake.tables()}

    plan = plan_scrub(workspace.lake)
    scrub(workspace, "again").carry_out(plan)

    assert plan.files == {}
    assert {table: workspace.lake.open(table).version() for table in workspace.lake.tables()} == versions


@pytest.mark.heavy
@pytest.mark.parametrize("made", [ALL], indirect=True, ids=["all"])
def test_interrupted_anywhere_it_goes_on(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    A scrub that ends before or after any of its commits is finished by the next; what was done is told once, as it was meant.
    """
    count = len(plan_scrub(workspace.lake).files)
    whole = Workspace(workspace.folder.with_name("whole"))
    shutil.copytree(workspace.folder, whole.folder)
    scrub(whole).carry_out(plan_scrub(whole.lake))
    expected = [each.payload for each in scrub(whole).unpublished()]
    commit = Lake.commit

    for stop in range(2 * count):
        copy = Workspace(workspace.folder.with_name(f"stop{stop}"))
        shutil.copytree(workspace.folder, copy.folder)
        done = iter(range(count))

        def dies(self: Lake, *args: Any, _stop: int = stop, _done: Any = done, **options: Any) -> int:
            number = next(_done)
            if _stop == 2 * number:
                raise KeyboardInterrupt
            version = commit(self, *args, **options)
            if _stop == 2 * number + 1:
                raise KeyboardInterrupt
            return version

        with monkeypatch.context() as patched:
            patched.setattr(Lake, "commit", dies)
            with pytest.raises(KeyboardInterrupt):
                scrub(copy, "first").carry_out(plan_scrub(copy.lake))

        scrub(copy, "second").carry_out(plan_scrub(copy.lake))

        assert not any(secret in holdings(live(copy)) for secret in SECRETS)
        assert copy.verify().is_equal
        assert plan_scrub(copy.lake).files == {}
        assert [each.payload for each in scrub(copy).unpublished()] == expected
        shutil.rmtree(copy.folder)


async def test_readers_and_exports_honour_it(workspace: Workspace, tmp_path: Path) -> None:
    """
    Once the log has dropped them, erased records are served with their place and nothing else, also to a reader that looked
    before; an export has none of them, whatever erasures it was told to honour.
    """
    archived = load_archived(workspace.lake.storage, workspace.epoch)
    assert await asyncio.to_thread(workspace.retain, "hippo", 1, archived) == 1
    archive = LakeArchive(workspace.lake)
    looked = {record.meta.event_id: record for record in archive.read(Query(topic="hippo")).records}
    assert "boiler" in str(looked["adas"].payload)

    scrub(workspace).carry_out(plan_scrub(workspace.lake))

    log = ArchivedLog(await open_log(workspace.folder, workspace.log_settings), archive)
    try:
        found = {record.meta.event_id: record async for record in records(log, Query(topic="hippo"))}
        assert found.keys() == looked.keys()
        assert (found["adas"].payload, found["adas"].seq, found["adas"].meta.actor) == ({}, looked["adas"].seq, None)
        assert found["adas"].meta.extra == {"erased_by": "wish"}
        assert found["stays"] == looked["stays"]
        for range_, left_out in ((ExportRange(), 6), (ExportRange(topic="hippo", erased_until=1), 4)):
            report = await export_file(log, range_, tmp_path / "out.jsonl")
            text = (tmp_path / "out.jsonl").read_text()
            assert report.left_out == left_out
            assert "plumber" in text
            assert not any(secret in text for secret in SECRETS)
    finally:
        await log.close()


@pytest.mark.heavy
@pytest.mark.parametrize("made", [ALL], indirect=True, ids=["all"])
def test_the_next_runs_bring_nothing_back(spark: SparkSession, workspace: Workspace) -> None:
    """
    The jobs build on from what is left, silver filled anew from bronze too, and nothing is listed any more.
    """
    scrub(workspace).carry_out(plan_scrub(workspace.lake))
    workspace.append([memory("fresh", "The cat is in the garden.", "bob")])

    report = workspace.pipeline(TEST_SETTINGS).run(lambda: spark, jobs_of("temporal", "consolidation", "erasures"))

    assert report.failed == ()
    assert workspace.rows("gold.scrub_list", "row_key") == []
    assert not any(secret in holdings(live(workspace)) for secret in SECRETS)
    assert {"stays", "fresh", "later"} <= {row[0] for row in workspace.rows("gold.temporal_index", "doc_id")}
    rolled = str(workspace.rows("gold.rollups", "summary"))
    assert "plumber" in rolled
    workspace.pipeline(TEST_SETTINGS).run(lambda: spark, silver_anew=FROM_THE_BEGINNING)
    assert not set(ERASED) & set(workspace.column("silver.events", "event_id"))
    assert workspace.verify().is_equal


def test_from_the_command_line(workspace: Workspace) -> None:
    """
    A dry run changes nothing; without --yes and a terminal nothing is done; done, it is on record before and told after.
    """
    options = ("-w", workspace.folder, "--json")
    before = sorted(workspace.lake.storage.path.rglob("*"))
    dry = json.loads(invoke("pipeline", "scrub", "--dry-run", *options).stdout)
    assert invoke("pipeline", "scrub", *options).exit_code == 2
    assert sorted(workspace.lake.storage.path.rglob("*")) == before
    assert not dry["carried_out"]
    assert dry["erasures"] == 3

    done = json.loads(invoke("pipeline", "scrub", "--yes", "--keep-hours", "0", *options).stdout)

    assert done["carried_out"]
    assert done["tables"] == dry["tables"]
    assert (done["waits_for"], done["old_files"]) == (None, 0)
    assert done["swept_files"] > 0
    (audited,) = lines(invoke("log", "read", "audit", *options).stdout)
    assert audited["meta"]["type"] == "cli.pipeline.scrub"
    assert audited["payload"]["tables"] == sorted(dry["tables"], key=lambda each: each["table"])
    told = lines(invoke("log", "read", "consolidation", *options).stdout)
    assert [(each["meta"]["type"], each["payload"]["erased_by"]) for each in told] == [
        ("SCRUB_APPLIED", "p"),
        ("SCRUB_APPLIED", "t"),
        ("SCRUB_APPLIED", "wish"),
    ]
    assert all(each["seq"] > audited["seq"] for each in told)
    again = json.loads(invoke("pipeline", "scrub", "--yes", *options).stdout)
    assert again["tables"] == []
    assert len(lines(invoke("log", "read", "consolidation", *options).stdout)) == 3


def test_a_long_list_is_worked_off_in_several_plans(workspace: Workspace) -> None:
    """
    A plan takes up no more of the list than it is allowed to, and events after the rows that were found through them.
    """
    plan = plan_scrub(workspace.lake, rows_max=4)

    assert not plan.is_all
    assert plan_scrub(workspace.lake).is_all
    assert "silver.events" not in plan.files
    assert 0 < sum(plan.rows.values()) <= 5


def index_by_hand(folder: Path) -> Lake:
    """A lake with a time index of three rows, and what T6 says of them."""
    index, deletions = (job.writes[0] for job in TEMPORAL_INDEX_JOBS)
    lake = Lake(folder, SYSTEM_CLOCK)
    rows = [{"space_id": "s:a", "g": "day", "doc_id": name, "hash": f"h-{name}"} for name in ("old", "gone", "new")]
    listed = [
        {"space_id": "s:a", "hash": "h-old", "reason": "expired", "is_in_index": True},
        {"space_id": "s:a", "hash": "h-gone", "reason": "erased", "erased_by": "t", "is_in_index": True},
        {"space_id": "s:a", "hash": "h-new", "reason": "expired", "is_in_index": False},
    ]
    for output, content in ((index, rows), (deletions, listed)):
        fill(lake, output.table, output.schema, content)
    erasing = {
        "seq": 9,
        "event_id": "t",
        "space_id": "s:a",
        "type": "TOMBSTONE_PROPAGATE",
        "payload": '{"object_id":"gone"}',
    }
    fill(lake, BRONZE_EVENTS.name, BRONZE_EVENTS.schema, [erasing])
    lake.begin("e1")
    return lake


@pytest.mark.req("T6")
def test_rows_past_their_life_leave_the_time_index(tmp_path: Path) -> None:
    """
    What T6 finds still in the index goes, expired or erased; what it lists as gone already, and everything else, is left alone.
    """
    lake = index_by_hand(tmp_path)

    plan = plan_scrub(lake)
    Scrub(lake, "r", SYSTEM_CLOCK.now_ns()).carry_out(plan)

    assert (plan.list_seq, plan.rows) == (None, {"gold.temporal_index": 2})
    (file,) = lake.files("gold.temporal_index")
    assert pq.read_table(file.open())["doc_id"].to_pylist() == ["new"]
    assert [each.payload["erased_by"] for each in Scrub(lake, "r", 0).unpublished()] == ["t"]
    assert lake.note("gold.temporal_index")["seq"] == 9


def test_a_full_disk_stops_it_and_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Without room for the files that take the place of the old ones, the tables stay as they were, and it is said.
    """
    lake = index_by_hand(tmp_path)
    version = lake.open("gold.temporal_index").version()

    def is_full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(pq, "ParquetWriter", is_full)
        with pytest.raises(LakeUnwritable, match="No space left"):
            Scrub(lake, "r", SYSTEM_CLOCK.now_ns()).carry_out(plan_scrub(lake))

    assert lake.open("gold.temporal_index").version() == version
    Scrub(lake, "again", SYSTEM_CLOCK.now_ns()).carry_out(plan_scrub(lake))
    assert plan_scrub(lake).files == {}
