"""What of the lake is gone or cannot be read comes back, from the log and from what else the lake has."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
import pytest
from deltalake import CommitProperties, DeltaTable

from tests.integration.cli.support import invoke
from tests.unit.pipeline.lake_support import archive, records_of
from tests.unit.pipeline.support import Workspace, event
from tidings.core.clock import SYSTEM_CLOCK
from tidings.pipeline.errors import LakeConflict
from tidings.pipeline.housekeeping import keep_house
from tidings.pipeline.jobs.registry import all_jobs
from tidings.pipeline.lake import Lake, LakeMeta
from tidings.pipeline.schemas import BRONZE_EVENTS, QUARANTINE, SILVER_EVENTS, arrow_schema
from tidings.pipeline.settings import PipelineSettings
from tidings.pipeline.state_files import save_archived
from tidings.pipeline.table_files import remove_action, write_file


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    """A log of forty records in two topics, and a bronze of two batches and four files that holds them all."""
    made = Workspace(tmp_path)
    made.append(event(number, f"t{number % 2}") for number in range(40))
    found = records_of(made)
    made.lake.begin(made.epoch)
    archive(made.lake, found[:30], epoch=made.epoch, batch=1, files=2)
    archive(made.lake, found[30:], epoch=made.epoch, batch=2, files=2)
    save_archived(made.lake, made.epoch, 40)
    return made


def fill_silver(workspace: Workspace, without: tuple[int, ...] = ()) -> None:
    """Have silver's events hold what bronze holds, file by file, without some seqs."""
    lake, schema = workspace.lake, arrow_schema(SILVER_EVENTS.schema)
    folder, entries = lake.folder(SILVER_EVENTS.name), []
    for number, file in enumerate(lake.files(BRONZE_EVENTS.name)):
        rows = lake.dataset(BRONZE_EVENTS.name, [file]).to_table(filter=~pc.field("seq").isin(without))
        entries.append(write_file(folder, f"silver-{number}.parquet", schema, [rows]))
    note = {"seq": 40, "batch": 1, "epoch": workspace.epoch}
    adds = lake.adds([entry for entry in entries if entry is not None])
    lake.commit(SILVER_EVENTS.name, schema, adds, app="silver", version=1, note=note)


def repaired(workspace: Workspace, *options: str, code: int = 0) -> dict[str, Any]:
    """What ``tidings pipeline repair`` says; nothing here needs Spark."""
    done = invoke("pipeline", "repair", *options, "-w", workspace.folder, "--json")
    assert done.exit_code == code, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def is_equal(workspace: Workspace) -> bool:
    """What ``tidings pipeline verify`` says."""
    return invoke("pipeline", "verify", "-w", workspace.folder).exit_code == 0


def bronze_files(lake: Lake) -> list[Path]:
    """The files of bronze."""
    return [Path(file.uri) for file in lake.files(BRONZE_EVENTS.name)]


def flip(path: Path, at: int) -> None:
    """Change one byte of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 0xFF
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("harm", "problem"),
    [
        (lambda path: path.unlink(), "is missing"),
        (lambda path: path.write_bytes(path.read_bytes()[:-10]), "bytes instead of"),
        (lambda path: flip(path, path.stat().st_size - 20), "cannot be read"),
    ],
    ids=["gone", "shorter", "changed"],
)
def test_a_damaged_file_is_made_anew_from_the_log(workspace: Workspace, harm: object, problem: str) -> None:
    """A file that is gone, cut short or changed is found; its records come back, and log and lake are equal."""
    path = bronze_files(workspace.lake)[1]
    harm(path)  # type: ignore[operator]

    done = repaired(workspace)

    assert [problem in each["problem"] for each in done["files"]] == [True]
    assert (done["recovered"], done["healed_lines"], done["lost"]) == (15, 0, [])
    assert is_equal(workspace)
    assert workspace.column(BRONZE_EVENTS.name, "seq") == list(range(1, 41))
    assert workspace.lake.note(BRONZE_EVENTS.name)["batch"] == 2  # the next run goes on where the last one ended
    again = repaired(workspace)
    assert (again["files"], again["missing_records"]) == ([], 0)


def test_what_only_the_lake_had_is_told(workspace: Workspace) -> None:
    """Records that the log has dropped come back from silver; those that are nowhere are named, by seq, here and in the quarantine."""
    lake = workspace.lake
    kept, lost = lake.files(BRONZE_EVENTS.name)[:2]
    entry = lake.copy_file(kept, SILVER_EVENTS.name, "copy.parquet")
    schema = arrow_schema(SILVER_EVENTS.schema)
    note = {"seq": 40, "batch": 1, "epoch": workspace.epoch}
    lake.commit(SILVER_EVENTS.name, schema, lake.adds([entry]), app="silver", version=1, note=note)
    for topic in ("t0", "t1"):
        assert workspace.retain(topic, 0, archived={"t0": 9, "t1": 9}) == 1
    Path(kept.uri).unlink()
    Path(lost.uri).unlink()

    done = repaired(workspace, code=1)

    assert done["missing_records"] == kept.rows + lost.rows
    held = set(workspace.column(BRONZE_EVENTS.name, "seq"))
    gone = {seq for first, last in done["lost"] for seq in range(first, last + 1)}
    assert gone
    assert gone | held == set(range(1, 41))
    assert not gone & held
    rows = workspace.rows(QUARANTINE.name, "reason", "first_seq", "last_seq")
    assert {row[1:] for row in rows if row[0].startswith("lost")} == set(map(tuple, done["lost"]))
    assert all(each.is_equal for each in workspace.verify().streams)


def log_files(workspace: Workspace, table: str = BRONZE_EVENTS.name) -> list[Path]:
    """The files of a table's own log, in order."""
    return sorted((workspace.lake.folder(table).path / "_delta_log").glob("*.json"))


@pytest.mark.parametrize(
    "harm",
    [
        lambda files: files[-1].unlink(),
        lambda files: files[-1].write_text("{ no json"),
        lambda files: shutil.rmtree(files[0].parent),
        lambda files: shutil.rmtree(files[0].parent.parent),
    ],
    ids=["last gone", "changed", "all gone", "table gone"],
)
def test_a_table_without_its_log_is_made_anew(workspace: Workspace, harm: Callable[[list[Path]], object]) -> None:
    """
    If bronze's own log lost or damaged a file, verify, a dry run and a run all say so and change nothing; repair makes another
    table of what its files hold and the log has, and the old folder stays for a day.
    """
    harm(log_files(workspace))
    before = sorted(workspace.lake.folder(BRONZE_EVENTS.name).path.rglob("*"))

    assert not is_equal(workspace)
    dry = repaired(workspace, "--dry-run")
    ran = invoke("pipeline", "run", "--jobs", "none", "-w", workspace.folder)
    done = repaired(workspace)

    assert (list(dry["logs"]), list(done["logs"])) == ([BRONZE_EVENTS.name], [BRONZE_EVENTS.name])
    assert ran.exit_code == 1
    assert "pipeline repair" in ran.stderr
    assert done["recovered"] == dry["missing_records"] == (0 if before else 40)
    assert done["lost"] == []
    (aside,) = done["set_aside"]
    assert sorted(Path(aside).rglob("*")) == before
    assert is_equal(workspace)
    assert workspace.column(BRONZE_EVENTS.name, "seq") == list(range(1, 41))
    assert workspace.lake.note(BRONZE_EVENTS.name)["seq"] == 40
    assert repaired(workspace)["logs"] == {}
    for hours, is_there in ((0, True), (23, True), (24, False)):
        now_ns = SYSTEM_CLOCK.now_ns() + hours * 3_600_000_000_000
        keep_house(Lake(workspace.lake.storage, SYSTEM_CLOCK), PipelineSettings(), now_ns=now_ns, tables=())
        assert Path(aside).exists() is (is_there and bool(before))
    assert is_equal(workspace)


def test_a_table_without_its_log_keeps_what_only_it_has(workspace: Workspace) -> None:
    """
    Records that retention dropped are taken over from the files of a bronze without a log, each once, and what was erased in one
    file does not come back from an older one; what no file has any more is named.
    """
    lake = workspace.lake
    first, second = lake.files(BRONZE_EVENTS.name)[:2]
    rows = lake.dataset(BRONZE_EVENTS.name, [first]).to_table()
    erased = rows["seq"].to_pylist()[0]
    nothing = pc.if_else(pc.equal(rows["seq"], erased), None, rows["payload"])
    rows = rows.set_column(rows.column_names.index("payload"), "payload", nothing)
    entry = write_file(lake.folder(BRONZE_EVENTS.name), "scrubbed.parquet", rows.schema, [rows])
    assert entry is not None
    lake.commit(
        BRONZE_EVENTS.name,
        rows.schema,
        lake.adds([entry]),
        [remove_action(first, now_ms=1)],
        app="scrub",
        version=1,
        note=lake.note(BRONZE_EVENTS.name),
    )
    for topic in ("t0", "t1"):
        assert workspace.retain(topic, 0, archived={"t0": 9, "t1": 9}) == 1
    only = {seq for seq in workspace.column(BRONZE_EVENTS.name, "seq") if seq <= 20}
    gone = set(lake.dataset(BRONZE_EVENTS.name, [second]).to_table(["seq"])["seq"].to_pylist()) & only
    Path(second.uri).unlink()
    shutil.rmtree(log_files(workspace)[0].parent)

    done = repaired(workspace, code=1)

    assert {seq for low, high in done["lost"] for seq in range(low, high + 1)} == gone
    assert workspace.column(BRONZE_EVENTS.name, "seq") == sorted(set(range(1, 41)) - gone)
    said = dict(workspace.rows(BRONZE_EVENTS.name, "seq", "payload"))
    assert [seq for seq, payload in said.items() if payload is None] == [erased]
    assert repaired(workspace)["lost"] == []


def test_a_repair_is_seen_by_those_who_had_the_lake_open(workspace: Workspace) -> None:
    """Whoever goes on with a table that a repair moved is told, and commits nothing to the old one."""
    held = workspace.lake
    held.files(BRONZE_EVENTS.name)
    log_files(workspace)[-1].unlink()
    repaired(workspace)

    with pytest.raises(LakeConflict):
        archive(held, records_of(workspace)[30:], epoch=workspace.epoch, batch=3)
    assert is_equal(workspace)


@pytest.mark.parametrize("content", [None, b"{ no json"])
def test_lake_json_is_written_anew(workspace: Workspace, content: bytes | None) -> None:
    """
    A ``lake.json`` that is gone or damaged is made from what the tables say: the epoch, the folder of its tables, and those that
    were moved. Until then a run says what helps.
    """
    log_files(workspace)[-1].unlink()
    repaired(workspace)
    path = workspace.lake.storage.path / "lake.json"
    before = path.read_bytes()
    path.unlink()
    if content is not None:
        path.write_bytes(content)

    assert "pipeline repair" in invoke("pipeline", "run", "--jobs", "none", "-w", workspace.folder).stderr
    assert repaired(workspace, "--dry-run")["lake_json"]
    assert not path.exists() or path.read_bytes() == content
    assert repaired(workspace)["lake_json"]

    assert path.read_bytes() == before
    assert b"events-2" in before
    assert is_equal(workspace)
    assert not repaired(workspace)["lake_json"]


def test_of_two_epochs_the_logs_own_is_taken(workspace: Workspace) -> None:
    """With tables of an ended epoch beside them, ``lake.json`` is made to name those of the log's present one."""
    lake = workspace.lake
    old = lake.storage.child("tables-of-before")
    shutil.move(lake.tables_folder.path, old.path)
    lake.storage.replace("lake.json", b'{"format":1,"epoch":"0123456789abcdef"}')
    lake = workspace.lake
    lake.begin(workspace.epoch)
    archive(lake, records_of(workspace)[:10], epoch=workspace.epoch, batch=1)
    shutil.move(old.path, lake.storage.path / "tables")
    meta = lake.meta()
    other = Workspace(workspace.folder).lake.seen_as(LakeMeta(1, "0123456789abcdef"))
    other.commit(
        BRONZE_EVENTS.name,
        other.schema(BRONZE_EVENTS.name),
        (),
        app="bronze",
        version=3,
        note={"epoch": "0123456789abcdef", "seq": 40, "batch": 3},
    )
    for name in ("lake.json", "archived.json"):
        (lake.storage.path / name).unlink()

    repaired(workspace)

    assert workspace.lake.meta() == meta
    assert is_equal(workspace)


@pytest.mark.parametrize("harm", ["a file", "the log"])
def test_a_backfill_of_a_damaged_lake_says_what_helps(workspace: Workspace, harm: str) -> None:
    """Silver made anew from a bronze that is damaged stays as it was, and the hint is one that helps; after it the backfill works."""
    fill_silver(workspace)
    before = workspace.rows(SILVER_EVENTS.name)
    damaged = log_files(workspace)[-1] if harm == "the log" else bronze_files(workspace.lake)[0]
    damaged.unlink()
    backfill = ("pipeline", "backfill", "--silver", "--jobs", "none", "-w", workspace.folder)

    refused = invoke(*backfill)

    assert refused.exit_code == 1
    assert "pipeline repair" in refused.stderr
    assert workspace.rows(SILVER_EVENTS.name) == before
    repaired(workspace)
    assert invoke(*backfill).exit_code == 0
    assert workspace.rows(SILVER_EVENTS.name) == before
    assert is_equal(workspace)


def test_silver_gets_only_what_it_lacks(workspace: Workspace) -> None:
    """
    Of silver's events a damaged file is made again from bronze, and nothing else is touched; a record that silver leaves out,
    because it repeats another, stays out.
    """
    lake = workspace.lake
    rows = lake.dataset(BRONZE_EVENTS.name).to_table(filter=pc.field("seq") == 1).to_pylist()
    again = pa.Table.from_pylist([rows[0] | {"seq": 41, "offset": 20}], schema=arrow_schema(BRONZE_EVENTS.schema))
    entry = write_file(lake.folder(BRONZE_EVENTS.name), "repeat.parquet", again.schema, [again])
    assert entry is not None
    note = {"seq": 41, "batch": 3, "epoch": workspace.epoch}
    lake.commit(BRONZE_EVENTS.name, again.schema, lake.adds([entry]), app="bronze", version=3, note=note)
    fill_silver(workspace, without=(41,))
    note = workspace.lake.note(SILVER_EVENTS.name) | {"seq": 41}
    lake.commit(SILVER_EVENTS.name, again.schema, (), app="silver", version=2, note=note)
    before = workspace.rows(SILVER_EVENTS.name)
    bad, *good = workspace.lake.files(SILVER_EVENTS.name)
    Path(bad.uri).unlink()

    done = repaired(workspace)

    assert (done["rebuilt_silver"], done["recovered"]) == ([], 0)
    assert workspace.rows(SILVER_EVENTS.name) == before
    assert {file.name for file in good} < {file.name for file in workspace.lake.files(SILVER_EVENTS.name)}
    assert workspace.lake.note(SILVER_EVENTS.name) == note  # for the jobs nothing has changed


def test_a_line_that_is_whole_again_comes_back(workspace: Workspace, tmp_path: Path) -> None:
    """A record that was quarantined, because its segment was damaged, is taken up once the segment is restored."""
    segment = workspace.segments()[0]
    lines = segment.read_bytes().splitlines(keepends=True)
    seqs = [record.seq for record in records_of(workspace) if record.topic == "t0"]
    damaged = Workspace(tmp_path)
    known = [record for record in records_of(damaged) if record.seq != seqs[2]]
    lake = Lake(tmp_path / "other", SYSTEM_CLOCK)
    archive(lake, known, epoch=damaged.epoch, batch=1)
    lake.begin(damaged.epoch)
    row: dict[str, Any] = {
        "file": str(segment.relative_to(workspace.layout.wal)),
        "byte_offset": len(b"".join(lines[:2])),
        "topic": "t0",
        "reason": "a line's checksum does not match",
        "line": "",
        "line_bytes": len(lines[2]) - 1,
        "epoch": damaged.epoch,
    }
    stays = row | {"byte_offset": row["byte_offset"] + 3}
    rows = pa.Table.from_pylist([row, stays], schema=arrow_schema(QUARANTINE.schema))
    lake.write_rows(rows, QUARANTINE.name, QUARANTINE.schema, app="bronze", version=1, note={"seq": 40}, run="r")

    done = repaired(workspace, "--lake", str(tmp_path / "other"))

    assert (done["files"], done["recovered"], done["healed_lines"], done["lost"]) == ([], 1, 1, [])
    assert repaired(workspace, "--lake", str(tmp_path / "other"))["missing_records"] == 0
    assert sum(file.rows for file in lake.files(QUARANTINE.name)) == 1


def test_the_rows_of_a_lost_quarantine_are_found_again(workspace: Workspace) -> None:
    """Lines that are no records are looked for in the log if the table that names them has lost a file."""
    segment = workspace.segments()[0]
    before = segment.read_bytes()
    lines = before.splitlines(keepends=True)
    place = len(b"".join(lines[:2]))
    known = [record for record in records_of(workspace) if (record.topic, record.offset) != ("t0", 2)]
    segment.write_bytes(before[: place + 30] + b"?" + before[place + 31 :])
    lake = Lake(workspace.folder / "other", SYSTEM_CLOCK)
    archive(lake, known, epoch=workspace.epoch, batch=1)
    lake.begin(workspace.epoch)
    row = {"file": str(segment.relative_to(workspace.layout.wal)), "byte_offset": place, "epoch": workspace.epoch}
    rows = pa.Table.from_pylist([row], schema=arrow_schema(QUARANTINE.schema))
    lake.write_rows(rows, QUARANTINE.name, QUARANTINE.schema, app="bronze", version=1, note={"seq": 40}, run="r")
    Path(lake.files(QUARANTINE.name)[0].uri).unlink()

    done = repaired(workspace, "--lake", str(workspace.folder / "other"))

    assert (len(done["files"]), done["recovered"], done["lost"]) == (1, 0, [])
    (found,) = Lake(lake.storage, SYSTEM_CLOCK).dataset(QUARANTINE.name).to_table().to_pylist()
    assert (found["file"], found["byte_offset"], found["line_bytes"]) == (*list(row.values())[:2], len(lines[2]) - 1)


@pytest.fixture(scope="module")
def stepped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace whose bronze and silver took in its log in seven steps, without Spark."""
    workspace = Workspace(tmp_path_factory.mktemp("stepped") / "ws")
    for number in range(7):
        workspace.append(event(number * 3 + each, partitions=("p1", "p2"), topic="sync") for each in range(3))
        assert invoke("pipeline", "run", "--jobs", "none", "-w", workspace.folder).exit_code == 0
    assert is_equal(workspace)
    return workspace.folder


@pytest.fixture
def filled(stepped: Path, tmp_path: Path) -> Workspace:
    """A copy of it."""
    shutil.copytree(stepped, tmp_path / "ws")
    return Workspace(tmp_path / "ws")


def compact_twice(lake: Lake, table: str) -> None:
    """Do what two housekeepers of an earlier version did at once: delta-rs lets the second pass, and each row is there twice."""
    handles = [DeltaTable(lake.folder(table).table_url) for _ in range(2)]
    note = lake.note(table)
    for handle in handles:
        handle.optimize.compact(commit_properties=CommitProperties(custom_metadata={"tidings": json.dumps(note)}))


def take_back(lake: Lake, table: str, note: dict[str, Any]) -> None:
    """Do what a housekeeper of an earlier version did: repeat a note that it read before another run's commit."""
    metadata = {"tidings": json.dumps(note), "tidings.table": table}
    DeltaTable(lake.folder(table).table_url).alter.set_table_properties(
        {"delta.logRetentionDuration": "interval 9 hours"}, commit_properties=CommitProperties(custom_metadata=metadata)
    )


def test_rows_that_are_there_twice_are_found_and_taken_out(filled: Workspace) -> None:
    """
    What ``verify`` calls not equal because rows are there twice, ``repair --dry-run`` names and ``repair`` mends, in every table of bronze
    and silver; then runs go on.
    """
    lake = filled.lake
    tables = [table for table in lake.tables() if len(lake.files(table)) > 1]
    rows = {table: filled.rows(table) for table in tables}
    assert {"bronze.events", "silver.events", "silver.sync_events"} <= set(tables)
    for table in tables:
        compact_twice(lake, table)
    assert not is_equal(filled)

    seen = invoke("pipeline", "repair", "--dry-run", "--json", "-w", filled.folder)
    repeated = json.loads(seen.stdout)["repeated"]
    assert repeated == {table: len(found) for table, found in rows.items()}
    assert "rows are there once too often" in invoke("pipeline", "repair", "--dry-run", "-w", filled.folder).stdout
    assert not is_equal(filled)
    repaired(filled)

    assert is_equal(filled)
    assert {table: filled.rows(table) for table in rows} == rows
    assert repaired(filled)["repeated"] == {}
    filled.append([event(90)])
    assert invoke("pipeline", "run", "--jobs", "none", "-w", filled.folder).exit_code == 0
    assert is_equal(filled)


@pytest.mark.parametrize("table", ["bronze.events", "silver.events", "silver.sync_events", "silver.segments"])
def test_a_note_that_was_taken_back_is_found_and_mended(filled: Workspace, table: str) -> None:
    """
    A table whose last note is older than its last step refuses every run; ``repair --dry-run`` names it, and after ``repair`` runs go on.
    """
    before = filled.lake.note(table)
    filled.append(event(number, partitions=("p1",), topic="sync") for number in (50, 51))
    assert invoke("pipeline", "run", "--jobs", "none", "-w", filled.folder).exit_code == 0
    take_back(filled.lake, table, before)
    filled.append([event(60, partitions=("p1",), topic="sync")])
    assert invoke("pipeline", "run", "--jobs", "none", "-w", filled.folder).exit_code != 0

    assert f"DAMAGED {table}: its note is of step" in invoke("pipeline", "status", "-w", filled.folder).stdout
    seen = json.loads(invoke("pipeline", "repair", "--dry-run", "--json", "-w", filled.folder).stdout)
    assert list(seen["notes_behind"]) == [table]
    done = repaired(filled)

    assert done["set_aside"] == []
    assert invoke("pipeline", "run", "--jobs", "none", "-w", filled.folder).exit_code == 0
    assert is_equal(filled)
    assert repaired(filled)["notes_behind"] == {}
    assert len(filled.rows("silver.sync_events")) == 2 * 21 + 3


def test_silver_that_lost_commits_is_found_and_filled(filled: Workspace) -> None:
    """
    Where silver's own log ends early, ``verify`` says not equal, ``repair --dry-run`` says what silver lacks, and ``repair`` fills it.
    """
    for path in log_files(filled, SILVER_EVENTS.name)[-2:]:
        path.unlink()
    assert not is_equal(filled)

    seen = json.loads(invoke("pipeline", "repair", "--dry-run", "--json", "-w", filled.folder).stdout)
    assert (seen["unfilled_records"], seen["carried_out"]) == (6, False)
    repaired(filled)

    assert is_equal(filled)
    assert repaired(filled)["unfilled_records"] == 0


def test_a_query_names_a_bronze_that_lost_commits(filled: Workspace) -> None:
    """
    A question to a lake whose bronze lost its last commits is not answered from what is left.
    """
    log_files(filled)[-1].unlink()

    for question in ("select count(*) from bronze.events", "select count(*) from silver.events"):
        asked = invoke("table", "query", question, "-w", filled.folder)
        assert asked.exit_code != 0
        assert "its log ends at seq 18, and it held the records up to 21" in asked.stderr
    shown = invoke("table", "show", "bronze.events", "-w", filled.folder)
    assert "its log ends at seq 18" in shown.stderr


def test_an_erased_record_that_is_there_twice_stays_erased(workspace: Workspace) -> None:
    """
    Where one copy of a record still says something, and the other was erased, the erased one is kept.
    """
    lake, schema = workspace.lake, arrow_schema(BRONZE_EVENTS.schema)
    file = lake.files(BRONZE_EVENTS.name)[0]
    rows = lake.dataset(BRONZE_EVENTS.name, [file], schema).to_table()
    at = schema.get_field_index("payload")
    erased = rows.set_column(at, "payload", pa.nulls(rows.num_rows, pa.string()))
    entry = write_file(lake.folder(BRONZE_EVENTS.name), "erased.parquet", schema, [erased])
    assert entry is not None
    note = lake.note(BRONZE_EVENTS.name)
    lake.commit(BRONZE_EVENTS.name, schema, lake.adds([entry]), app="scrub", version=1, note=note)

    assert repaired(workspace)["repeated"] == {BRONZE_EVENTS.name: rows.num_rows}

    payloads = dict(workspace.rows(BRONZE_EVENTS.name, "seq", "payload"))
    assert sorted(payloads) == list(range(1, 41))
    assert {seq for seq, payload in payloads.items() if payload is None} == set(rows["seq"].to_pylist())


def test_tables_of_jobs_that_are_wrong_are_named(filled: Workspace) -> None:
    """
    A job's table whose files were put together twice at once, and one by seq with rows past its note, are named, and their jobs are
    those that a repair does again.
    """
    outputs = {output.table: (output, each.name) for each in all_jobs() for output in each.writes}
    for table, column in (("gold.topic_minutes", ""), ("gold.erasures", "erased_seq")):
        output, name = outputs[table]
        for version in (1, 2):
            row = {column: 5} if column else {}
            rows = pa.Table.from_pylist([row], schema=arrow_schema(output.schema))
            note = {"epoch": filled.epoch, "seq": 4, "job": name}
            filled.lake.write_rows(
                rows,
                table,
                output.schema,
                app=f"job.{name}",
                version=version,
                note=note,
                run=f"r{version}",
                replaces="nothing",
            )
    compact_twice(filled.lake, "gold.topic_minutes")

    seen = json.loads(invoke("pipeline", "repair", "--dry-run", "--json", "-w", filled.folder).stdout)

    assert seen["wrong_tables"] == {
        "gold.erasures": "it has rows past seq 4, which its note names as the last",
        "gold.topic_minutes": "its files were put together twice at once",
    }
    assert seen["rebuilt_jobs"] == ["erasures", "topic_minutes"]
