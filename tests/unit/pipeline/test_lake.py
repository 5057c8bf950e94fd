"""A table takes a commit as a whole or not at all, and once."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa  # type: ignore[import-untyped]
import pytest
from deltalake import DeltaTable

from tests.s3_server import new_bucket, recorded
from tidings.core.clock import SYSTEM_CLOCK
from tidings.pipeline.bronze import bronze_state, check_reach
from tidings.pipeline.catalogue import describe, query
from tidings.pipeline.damage import Damage, check_held, find_damage, find_damaged_logs
from tidings.pipeline.errors import LakeBlocked, LakeConflict, LakeDamaged, QueryRefused, TableRefused, UnknownTable
from tidings.pipeline.housekeeping import Upkeep, checkpoint, compact, keep_house, vacuum
from tidings.pipeline.lake import Lake, LakeMeta
from tidings.pipeline.schemas import BRONZE_EVENTS, SILVER_EVENTS, TableSpec, arrow_schema
from tidings.pipeline.settings import PipelineSettings
from tidings.pipeline.state_files import save_archived
from tidings.pipeline.storage import Storage
from tidings.pipeline.table_files import FileWriter, write_file
from tidings.pipeline.table_log import properties

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TABLE = TableSpec("gold.days", "day int, name string, n bigint", "One day.", ("day",))


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    """An empty lake."""
    return Lake(tmp_path / "lake", SYSTEM_CLOCK)


def put(lake: Lake, rows: list[dict[str, Any]], version: int, run: str = "r") -> None:
    """Replace the table by rows that are at hand."""
    table = pa.Table.from_pylist(
        rows, schema=pa.schema([("day", pa.int32()), ("name", pa.string()), ("n", pa.int64())])
    )
    lake.write_rows(table, TABLE.name, TABLE.schema, app="test", version=version, note={"seq": version}, run=run)


def names(lake: Lake) -> list[Any]:
    """The table's names, in order."""
    return [row[0] for row in query(lake, "select name from gold.days order by name").rows]


def test_a_commit_carries_its_note_and_its_count(lake: Lake) -> None:
    """
    What must be true together with the data is read back from the commit.
    """
    assert (lake.exists(TABLE.name), lake.note(TABLE.name), lake.done(TABLE.name, "test")) == (False, {}, None)

    put(lake, [{"day": 1, "name": "a", "n": 5}], 7)

    assert (lake.note(TABLE.name), lake.done(TABLE.name, "test")) == ({"seq": 7}, 7)
    assert lake.tables() == ["gold.days"]
    (file,) = lake.files(TABLE.name)
    assert (file.rows, file.minimum["day"], file.maximum["name"]) == (1, 1, "a")
    assert not file.may_hold("day", 2, None)
    assert file.may_hold("day", None, 1)


def test_files_are_those_of_the_last_commit_whoever_made_it(tmp_path: Path, lake: Lake) -> None:
    """
    A table's files are asked for again and again; a commit of this process or of another one is seen at once, and what the
    table was before can still be asked for.
    """
    other = Lake(tmp_path / "lake", SYSTEM_CLOCK)
    put(lake, [{"day": 1, "name": "a", "n": 1}], 1)
    first = lake.files(TABLE.name)
    before = lake.open(TABLE.name).version()

    put(other, [{"day": 2, "name": "b", "n": 1}], 2)

    assert [file.maximum["day"] for file in lake.files(TABLE.name)] == [2]
    assert lake.files(TABLE.name, lambda file: file.may_hold("day", 3, None)) == []
    assert [file.maximum["day"] for file in lake.files(TABLE.name)] == [2]
    assert lake.files(TABLE.name, version=before) == first
    assert [file.maximum["day"] for file in lake.files(TABLE.name)] == [2]


def test_files_that_were_not_committed_are_not_seen(lake: Lake) -> None:
    """
    What a run that died left behind belongs to no table, and is swept one day.
    """
    put(lake, [{"day": 1, "name": "a", "n": 1}], 1)
    stray = lake.folder(TABLE.name).path / "test-000000000002-dead.parquet"
    stray.write_bytes(b"half a file")

    assert names(lake) == ["a"]
    assert vacuum(lake, TABLE.name, keep_hours=1) == 0
    assert vacuum(lake, TABLE.name, keep_hours=0) == 1
    assert not stray.exists()
    assert names(lake) == ["a"]


def test_files_that_were_replaced_stay_for_a_while(lake: Lake) -> None:
    """
    However old a file is, its time to go counts from the commit that took it out: a reader may just have begun with it.
    """
    put(lake, [{"day": 1, "name": "a", "n": 1}], 1)
    (file,) = lake.files(TABLE.name)
    os.utime(file.uri, (0, 0))
    put(lake, [{"day": 1, "name": "b", "n": 1}], 2)

    assert vacuum(lake, TABLE.name, keep_hours=1) == 0
    assert Path(file.uri).exists()
    assert vacuum(lake, TABLE.name, keep_hours=0) == 1
    assert names(lake) == ["b"]


def test_of_two_that_commit_at_once_one_is_told(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Of two runs that do the same step, the second changes nothing and says so: also if the first came at the last moment.
    """
    put(lake, [{"day": 1, "name": "a", "n": 1}], 1)
    other = Lake(lake.storage, SYSTEM_CLOCK)
    put(other, [{"day": 1, "name": "b", "n": 1}], 2)

    with pytest.raises(LakeConflict):
        put(Lake(lake.storage, SYSTEM_CLOCK), [{"day": 1, "name": "c", "n": 1}], 2, run="other")
    between(monkeypatch, other, lambda: put(lake, [{"day": 1, "name": "d", "n": 1}], 3))
    with pytest.raises(LakeConflict):
        put(other, [{"day": 1, "name": "e", "n": 1}], 3, run="late")

    assert names(lake) == ["d"]


def between(monkeypatch: pytest.MonkeyPatch, lake: Lake, come: Callable[[], object]) -> None:
    """Have something happen once, between the last look of a commit at its table and the commit."""
    committer = lake._committer
    check, coming = committer._check_files, iter([come])

    def checked(*given: Any) -> None:
        check(*given)
        for step in coming:
            step()

    monkeypatch.setattr(committer, "_check_files", checked)


def test_a_commit_goes_on_behind_one_of_another_application(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    A step that nobody else has done is done, though others commit at the same moment; one that was planned by a version is not.
    """
    put(lake, [{"day": 1, "name": "a", "n": 1}], 1)
    other = Lake(lake.storage, SYSTEM_CLOCK)
    row = pa.Table.from_pylist([{"day": 2, "name": "b", "n": 1}], schema=arrow_schema(TABLE.schema))

    def add() -> None:
        lake.write_rows(row, TABLE.name, TABLE.schema, app="x", version=1, note={"seq": 9}, run="x", replaces="nothing")

    between(monkeypatch, other, add)
    put(other, [{"day": 3, "name": "c", "n": 1}], 2, run="other")
    assert names(lake) == ["c"]

    version = other.open(TABLE.name).version()
    between(monkeypatch, other, lambda: put(lake, [{"day": 1, "name": "d", "n": 1}], 3))
    with pytest.raises(LakeConflict):
        other.commit(
            TABLE.name,
            arrow_schema(TABLE.schema),
            [],
            app="repair",
            version=1,
            note={},
            replaces="all",
            read_version=version,
        )
    assert names(lake) == ["d"]


def grown(lake: Lake, versions: range) -> None:
    """Add a row to the table in each of these versions."""
    for version in versions:
        rows = pa.Table.from_pylist(
            [{"day": version, "name": f"n{version}", "n": 1}], schema=arrow_schema(TABLE.schema)
        )
        lake.write_rows(
            rows,
            TABLE.name,
            TABLE.schema,
            app="grow",
            version=version,
            note={"seq": version, "batch": version},
            run="r",
            replaces="nothing",
        )


def test_two_compactions_of_one_version_leave_each_row_once(
    lake: Lake, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """
    Two housekeepers that saw the same version put the same files together: the second commits nothing.
    """
    settings = PipelineSettings(compact_files_min=4)
    other = Lake(tmp_path / "lake", SYSTEM_CLOCK)
    grown(lake, range(1, 7))
    other.files(TABLE.name)
    between(monkeypatch, other, lambda: compact(lake, TABLE.name, settings))

    with pytest.raises(LakeConflict):
        compact(other, TABLE.name, settings)

    assert names(lake) == [f"n{version}" for version in range(1, 7)]
    assert len(lake.files(TABLE.name)) == 1


def test_delta_rs_lets_two_compactions_of_one_version_pass(lake: Lake) -> None:
    """
    Why compaction is not left to delta-rs: two of one version both commit, and every row is there twice, although each carries the
    next count of the same application and is not to be tried again. If a new version refuses the second one, ours can go.
    """
    grown(lake, range(1, 7))
    handles = [DeltaTable(lake.folder(TABLE.name).table_url) for _ in range(2)]
    for handle in handles:
        handle.optimize.compact(commit_properties=properties(TABLE.name, {}, "upkeep", 1))

    assert len(names(lake)) == 12


def test_housekeeping_takes_no_note_back(lake: Lake, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """
    A run that commits while another one puts files together, or changes settings, has the last word: its note stays, and the next
    step of both is possible.
    """
    settings = PipelineSettings(compact_files_min=4, keep_hours=7)
    other = Lake(tmp_path / "lake", SYSTEM_CLOCK)
    lake.begin("e")
    grown(lake, range(1, 7))

    between(monkeypatch, other, lambda: grown(lake, range(7, 8)))
    assert compact(other, TABLE.name, settings) == 6
    assert lake.note(TABLE.name) == {"seq": 7, "batch": 7}

    def noted(target: DeltaTable, table: str) -> dict[str, Any] | None:
        found = noting(target, table)
        for version in coming:
            grown(lake, range(version, version + 1))
        return found

    coming = iter([8])
    noting = other._committer._note_at
    monkeypatch.setattr(other._committer, "_note_at", noted)
    keep_house(other, settings, now_ns=1, tables=[TABLE.name])
    assert list(coming) == []
    assert (lake.note(TABLE.name), lake.done(TABLE.name, "grow")) == ({"seq": 8, "batch": 8}, 8)
    assert "7 hours" in lake.open(TABLE.name).metadata().configuration["delta.logRetentionDuration"]
    grown(other, range(9, 10))
    assert names(lake) == [f"n{version}" for version in range(1, 10)]


def test_one_thread_of_a_process_keeps_house(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    While a thread keeps house another one does not, and what that one would have done is done by the next.
    """
    settings = PipelineSettings(compact_files_min=2)
    lake.begin("e")
    grown(lake, range(1, 7))
    inside: list[Upkeep] = []

    def slow(*given: Any) -> int:
        if not inside:
            with ThreadPoolExecutor(1) as pool:
                inside.append(pool.submit(keep_house, lake, settings, now_ns=1, tables=[TABLE.name]).result())
            return 0
        return compact(*given)

    monkeypatch.setattr("tidings.pipeline.housekeeping.compact", slow)
    assert not keep_house(lake, settings, now_ns=1, tables=[TABLE.name]).compacted_files
    assert inside == [Upkeep()]
    assert keep_house(lake, settings, now_ns=1, tables=[]).compacted_files == 6


def test_days_stay_apart_when_files_are_put_together(lake: Lake) -> None:
    """
    A file of a table by days holds rows of one day, also after its files were put together, in parts of a size.
    """
    ddl = "n bigint, date date"
    schema = arrow_schema(ddl)
    for version in range(1, 9):
        day = date(2026, 3, 1 + version % 2)
        rows = pa.Table.from_pylist([{"n": version, "date": day}], schema=schema)
        writer = FileWriter(lake.folder("gold.by_day"), schema, f"v{version}", is_by_day=True)
        entries = writer.write(iter(rows.to_batches()), f"v{version}.parquet").to_pylist()
        lake.commit("gold.by_day", schema, lake.adds(entries), app="a", version=version, note={}, is_by_day=True)

    assert compact(lake, "gold.by_day", PipelineSettings(compact_files_min=8)) == 8

    assert sorted((file.day, file.rows) for file in lake.files("gold.by_day")) == [
        (date(2026, 3, 1), 4),
        (date(2026, 3, 2), 4),
    ]
    assert query(lake, "select date, sum(n) from gold.by_day group by 1 order by 1").rows == (
        (date(2026, 3, 1), 20),
        (date(2026, 3, 2), 16),
    )


@pytest.mark.parametrize("name", ["silver.events", "silver.segments", "bronze.events", "bronze.mine"])
def test_a_job_writes_no_table_of_the_pipelines_own(lake: Lake, name: str) -> None:
    """
    A job's commit to a table that the pipeline itself fills is refused, and nothing is made.
    """
    row = pa.Table.from_pylist([{"day": 1, "name": "a", "n": 1}], schema=arrow_schema(TABLE.schema))
    with pytest.raises(TableRefused, match="only read it"):
        lake.write_rows(row, name, TABLE.schema, app="job.mine", version=1, note={}, run="r")
    with pytest.raises(TableRefused, match="not like gold"):
        lake.write_rows(row, "gold.by-name", TABLE.schema, app="job.mine", version=1, note={}, run="r")
    assert lake.tables() == []


@pytest.mark.parametrize("note", [{"seq": "six"}, {"seq": 1, "inputs": 5}, {"days": "all"}, [], "text"])
def test_a_note_of_another_program_is_damage(lake: Lake, note: Any) -> None:
    """
    A commit that looks like one of ours, and says something else, is named as damage by whoever reads it.
    """
    grown(lake, range(1, 2))
    DeltaTable(lake.folder(TABLE.name).table_url).alter.set_table_properties(
        {"x": "1"}, raise_if_not_exists=False, commit_properties=properties(TABLE.name, note, "theirs", 1)
    )
    with pytest.raises(LakeDamaged, match="not the pipeline's"):
        lake.note(TABLE.name)


def test_a_bronze_of_another_program_is_damage(lake: Lake) -> None:
    """
    A table in bronze's place whose notes lack what bronze's say is named as damage.
    """
    row = pa.Table.from_pylist([{"seq": 1}], schema=arrow_schema(BRONZE_EVENTS.schema))
    lake.write_rows(row, BRONZE_EVENTS.name, BRONZE_EVENTS.schema, app="bronze", version=1, note={"seq": 1}, run="r")
    with pytest.raises(LakeDamaged, match="batch"):
        bronze_state(lake)


def test_files_swept_before_their_commit_are_not_committed(lake: Lake) -> None:
    """
    A file that somebody deleted before it was committed (``--keep-hours 0``) makes the commit fail, and not the readers after it.
    """
    schema = arrow_schema(TABLE.schema)
    rows = pa.Table.from_pylist([{"day": 1, "name": "a", "n": 1}], schema=schema)
    entry = write_file(lake.folder(TABLE.name), "gone.parquet", schema, [rows])
    assert entry is not None
    (lake.folder(TABLE.name).path / "gone.parquet").unlink()
    with pytest.raises(LakeConflict, match="deleted"):
        lake.commit(TABLE.name, schema, lake.adds([entry]), app="a", version=1, note={})
    assert lake.files(TABLE.name) == []


def test_a_table_whose_first_commit_comes_while_it_is_looked_at_is_no_damage(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    A table that was made and not yet committed to gets its first commit between two looks: its note is that commit's.
    """
    other = Lake(lake.storage, SYSTEM_CLOCK)
    other._committer._make(TABLE.name, arrow_schema(TABLE.schema), app="grow", is_by_day=False, is_replaced=False)
    assert lake.standing(TABLE.name) == (0, {})
    exists, coming = Lake.exists, iter([1])

    def there(self: Lake, table: str) -> bool:
        found = exists(self, table)
        if self is lake and looks.pop():
            for version in coming:
                grown(other, range(version, version + 1))
        return found

    looks = [False] * 20 + [True, False]  # the second look, after the commits were read
    monkeypatch.setattr(Lake, "exists", there)

    assert lake.note(TABLE.name) == {"seq": 1, "batch": 1}
    assert list(coming) == []


def test_two_that_begin_a_lake_at_once_mean_the_same(tmp_path: Path) -> None:
    """
    Two runs that both found no lake begin one: it has one place for its tables.
    """
    lakes = [Lake(tmp_path / "lake", SYSTEM_CLOCK) for _ in range(2)]
    assert [lake.meta() for lake in lakes] == [None, None]
    for lake in lakes:
        lake.begin("e1")
    assert [lake.meta() for lake in lakes] == [LakeMeta(1, "e1", "tables")] * 2


def test_a_lake_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    """
    A file where the lake should be is named, and not a traceback.
    """
    (tmp_path / "lake").write_text("in the way")
    lake = Lake(tmp_path / "lake", SYSTEM_CLOCK)

    with pytest.raises(LakeBlocked, match="lake: a file is where a folder has to be"):
        lake.begin("e")
    with pytest.raises(LakeBlocked, match="lake: a file is where a folder has to be"):
        put(lake, [{"day": 1, "name": "a", "n": 1}], 1)


def test_a_damaged_table_is_told(lake: Lake) -> None:
    """
    A table's log that cannot be read is named, and so is a table that was never there.
    """
    put(lake, [{"day": 1, "name": "a", "n": 1}], 1)
    for path in (lake.folder(TABLE.name).path / "_delta_log").glob("*.json"):
        path.write_text("{ not json")

    with pytest.raises(LakeDamaged):
        Lake(lake.storage, SYSTEM_CLOCK).files(TABLE.name)
    with pytest.raises(UnknownTable):
        lake.files("gold.never")


def test_another_tables_files_are_no_table(lake: Lake) -> None:
    """
    A folder that somebody copied to another table's place is damage, and not a table of other columns.
    """
    put(lake, [{"day": 1, "name": "a", "n": 5}], 1)
    layer = lake.folder(TABLE.name).path.parent
    shutil.copytree(layer / "days", layer / "weeks")

    with pytest.raises(LakeDamaged, match=r"what is there is gold\.days"):
        lake.note("gold.weeks")
    assert find_damaged_logs(lake)[1] == {"gold.weeks": "what is there is gold.days"}
    assert lake.note(TABLE.name) == {"seq": 1}


@pytest.mark.parametrize("content", [b"junk", b"{}", b"[1]", b'{"version": "x"}'])
def test_a_table_is_summed_up_again_where_nobody_can_read_when_it_was(lake: Lake, content: bytes) -> None:
    """
    What says where the last checkpoint is may be damaged: then another is made, and no run ends for it.
    """
    put(lake, [{"day": 1, "name": "a", "n": 5}], 1)
    last = lake.folder(TABLE.name).path / "_delta_log" / "_last_checkpoint"
    last.write_bytes(content)

    assert checkpoint(lake, TABLE.name, 1)

    assert json.loads(last.read_text())["version"] == lake.open(TABLE.name).version()
    assert names(lake) == ["a"]


def test_commits_are_those_of_the_table_however_far_somebody_looked(tmp_path: Path) -> None:
    """
    What is known of a table's commits is what its log says, in whatever order two lakes commit, and look how far back.
    """
    chance = random.Random(7)
    lakes = [Lake(tmp_path / "lake", SYSTEM_CLOCK, commits_kept_max=20) for _ in range(2)]
    assert list(lakes[0].commits(TABLE.name)) == []
    for version in range(1, 41):
        put(chance.choice(lakes), [], version)
        for lake in lakes:
            there = list(range(lake.open(TABLE.name).version(), -1, -1))
            wanted = chance.choice((1, 2, 3, 9, 40))
            looked = [entry["version"] for entry in itertools.islice(lake.commits(TABLE.name), wanted)]
            assert looked == there[:wanted]
        assert chance.choice(lakes).note(TABLE.name) == {"seq": version}


@pytest.mark.parametrize("look", [lambda lake: check_held(lake, "e", 1), find_damage])
def test_what_is_committed_while_files_are_looked_for_is_not_missed(
    lake: Lake, monkeypatch: pytest.MonkeyPatch, look: Callable[[Lake], Damage | None]
) -> None:
    """
    A run may commit at the very moment that the folder was listed: its file is no damage, and retention goes on.
    """
    lake.begin("e")
    ddl = BRONZE_EVENTS.schema

    def commit(version: int) -> None:
        row = pa.Table.from_pylist([{"seq": version}], schema=arrow_schema(ddl))
        Lake(lake.storage, SYSTEM_CLOCK).write_rows(
            row,
            BRONZE_EVENTS.name,
            ddl,
            app="bronze",
            version=version,
            note={"epoch": "e", "seq": version, "batch": version},
            run=f"r{version}",
            replaces="nothing",
        )

    commit(1)
    listed = Storage.sizes
    coming = iter([2])

    def sizes(storage: Storage, name: str = "") -> dict[str, int]:
        found = listed(storage, name)
        for version in coming:
            commit(version)
        return found

    monkeypatch.setattr(Storage, "sizes", sizes)

    damage = look(lake)

    assert list(coming) == []
    assert damage is None or damage.is_whole
    assert sum(file.rows for file in lake.files(BRONZE_EVENTS.name)) == 2


@pytest.mark.parametrize("look", [check_reach, find_damaged_logs])
def test_a_run_beside_the_look_is_no_loss(
    lake: Lake, monkeypatch: pytest.MonkeyPatch, look: Callable[[Lake], tuple[int, dict[str, str]] | None]
) -> None:
    """
    Another run takes bronze, silver and ``archived.json`` further between two looks: that is not taken for commits that were lost.
    """
    lake.begin("e")
    other = Lake(lake.storage, SYSTEM_CLOCK)

    def run(version: int) -> None:
        rows = pa.Table.from_pylist([{"seq": version, "topic": "t", "offset": version}])
        for spec in (BRONZE_EVENTS, SILVER_EVENTS):
            schema = arrow_schema(spec.schema)
            filled = pa.Table.from_pylist(rows.to_pylist(), schema=schema)
            note = {"epoch": "e", "seq": version, "batch": version}
            other.write_rows(
                filled, spec.name, spec.schema, app="core", version=version, note=note, run="r", replaces="nothing"
            )
        save_archived(other, "e", version)

    run(1)
    coming = iter([2, 3, 4])
    noted = Lake.note

    def note(self: Lake, table: str) -> dict[str, Any]:
        found = noted(self, table)
        if self is lake:
            for version in itertools.islice(coming, 1):
                run(version)
        return found

    monkeypatch.setattr(Lake, "note", note)

    found = look(lake)
    assert found is None or found[1] == {}
    assert lake.note(BRONZE_EVENTS.name)["seq"] >= 2


def test_commits_that_come_while_somebody_looks_are_left_out(tmp_path: Path) -> None:
    """
    Whoever goes through a table's commits sees those that there were when they began, each once, also if others look further meanwhile.
    """
    lake, other = Lake(tmp_path / "lake", SYSTEM_CLOCK), Lake(tmp_path / "lake", SYSTEM_CLOCK)
    for version in range(1, 13):
        put(lake, [], version)
    newest = lake.open(TABLE.name).version()
    found = []

    for entry in lake.commits(TABLE.name):
        found.append(entry["version"])
        if len(found) < 8:
            put(other, [], 12 + len(found))
            assert lake.note(TABLE.name) == {"seq": 12 + len(found)}
            assert next(iter(lake.commits(TABLE.name)))["version"] == newest + len(found)

    assert found == list(range(newest, -1, -1))


def test_an_object_store_is_asked_once_for_a_commit(s3_url: str) -> None:
    """
    The last note of a table takes its last commit and none of those before, and nothing is downloaded to say it again.
    """
    bucket = new_bucket(s3_url)
    for version in range(1, 13):
        put(Lake(bucket, SYSTEM_CLOCK), [], version)
    lake = Lake(bucket, SYSTEM_CLOCK)
    lake.open(TABLE.name)

    def downloads() -> list[str]:
        with recorded(s3_url) as asked:
            assert lake.note(TABLE.name) == {"seq": 12}
        return [path.rpartition("/")[2] for method, path in asked if method == "GET" and path.endswith(".json")]

    assert set(downloads()) == {f"{12:020}.json"}
    assert downloads() == []


def test_new_columns_join_a_table(lake: Lake) -> None:
    """
    A newer version's columns are added; rows from before are empty there.
    """
    put(lake, [{"day": 1, "name": "a", "n": 1}], 1)
    wider = TABLE.schema + ", more string"
    schema = arrow_schema(wider)
    rows = pa.Table.from_pylist([{"day": 2, "name": "b", "n": 2, "more": "x"}], schema=schema)
    entry = write_file(lake.folder(TABLE.name), "wider.parquet", schema, [rows])
    assert entry is not None

    lake.commit(TABLE.name, schema, lake.adds([entry]), app="t", version=1, note={})

    assert query(lake, "select name, more from gold.days order by 1").rows == (("a", None), ("b", "x"))


def test_questions_are_answered_and_nothing_else(lake: Lake) -> None:
    """
    One SELECT over the tables is answered; whatever would change or reach for anything else is refused.
    """
    put(lake, [{"day": day, "name": f"d{day}", "n": day} for day in range(5)], 1)

    answer = query(lake, "select count(*) as c, sum(n) from gold.days", rows_max=10)
    assert (answer.columns[0], answer.rows) == ("c", ((5, 10),))
    assert query(lake, "select * from gold.days", rows_max=2).is_cut
    for sql in (
        "drop view gold.days",
        "select 1; select 2",
        "copy gold.days to '/tmp/elsewhere.parquet'",
        "select * from read_csv('/etc/hostname')",
        "set memory_limit = '1TB'",
        "select nonsense from gold.days",
        "selec",
    ):
        with pytest.raises(QueryRefused):
            query(lake, sql)
    with pytest.raises(UnknownTable):
        query(lake, "select * from gold.never")


@pytest.mark.parametrize("content", [b"", b"PAR1", None])
def test_a_question_to_a_damaged_table_says_what_helps(lake: Lake, content: bytes | None) -> None:
    """If a file is missing, empty or cut, not the question is at fault, and the hint says how the table becomes whole."""
    put(lake, [{"day": 1, "name": "d", "n": 1}], 1)
    (file,) = lake.files(TABLE.name)
    path = file.folder.path / file.name
    path.unlink()
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(LakeDamaged, match="repair"):
        query(lake, "select n from gold.days")


def test_a_table_is_described(lake: Lake) -> None:
    """
    The catalogue knows columns, rows and how far a table reaches.
    """
    put(lake, [], 3)
    info = describe(lake, TABLE.name, {TABLE.name: "One day."})

    assert (info.rows, info.files, info.seq, info.about) == (0, 0, 3, "One day.")
    assert [name for name, _ in info.columns] == ["day", "name", "n"]
    assert query(lake, "select count(*) from gold.days").rows == ((0,),)


@pytest.mark.spark
def test_compaction_changes_files_and_no_rows(spark: SparkSession, lake: Lake) -> None:
    """
    Many small files become few, the rows and the note stay, and an older version can still be read.
    """
    settings = PipelineSettings(compact_files_min=4)
    for version in range(1, 6):
        frame = spark.createDataFrame([(version, f"n{version}", version)], TABLE.schema)
        lake.write(frame, TABLE.name, TABLE.schema, app="t", version=version, note={"seq": version}, run="r")
    with pytest.raises(LakeConflict):
        lake.write(frame, TABLE.name, TABLE.schema, app="t", version=5, note={}, run="again")
    before = lake.open(TABLE.name).version()

    assert compact(lake, TABLE.name, settings) == 5

    assert len(lake.files(TABLE.name)) == 1
    assert names(lake) == [f"n{version}" for version in range(1, 6)]
    assert (lake.note(TABLE.name), lake.done(TABLE.name, "t")) == ({"seq": 5}, 5)
    assert len(lake.files(TABLE.name, version=before)) == 5
    assert compact(lake, TABLE.name, settings) == 0
