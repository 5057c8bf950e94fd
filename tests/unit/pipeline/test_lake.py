"""A table takes a commit as a whole or not at all, and once."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa  # type: ignore[import-untyped]
import pytest

from tests.s3_server import new_bucket, recorded
from tidings.core.clock import SYSTEM_CLOCK
from tidings.pipeline.catalogue import describe, query
from tidings.pipeline.damage import Damage, check_held, find_damage, find_damaged_logs
from tidings.pipeline.errors import LakeBlocked, LakeConflict, LakeDamaged, QueryRefused, UnknownTable
from tidings.pipeline.housekeeping import checkpoint, compact, vacuum
from tidings.pipeline.lake import Lake
from tidings.pipeline.schemas import BRONZE_EVENTS, TableSpec, arrow_schema
from tidings.pipeline.settings import PipelineSettings
from tidings.pipeline.storage import Storage
from tidings.pipeline.table_files import write_file

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
    opened = other.open(TABLE.name)
    put(lake, [{"day": 1, "name": "b", "n": 1}], 2)

    with pytest.raises(LakeConflict):
        put(Lake(lake.storage, SYSTEM_CLOCK), [{"day": 1, "name": "c", "n": 1}], 2, run="other")
    monkeypatch.setattr(other, "open", lambda _: opened)
    with pytest.raises(LakeConflict):
        put(other, [{"day": 1, "name": "d", "n": 1}], 3, run="late")

    assert names(lake) == ["b"]


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


def test_commits_are_those_of_the_table_however_far_somebody_looked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    What is known of a table's commits is what its log says, in whatever order two lakes commit, and look how far back.
    """
    monkeypatch.setattr("tidings.pipeline.lake._HISTORY_MAX", 20)
    chance = random.Random(7)
    lakes = [Lake(tmp_path / "lake", SYSTEM_CLOCK) for _ in range(2)]
    assert list(lakes[0].commits(TABLE.name)) == []
    for version in range(1, 41):
        put(chance.choice(lakes), [], version)
        for lake in lakes:
            there = list(range(lake.open(TABLE.name).version(), -1, -1))[:20]
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
