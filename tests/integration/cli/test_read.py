"""Reading, exporting and looking from the command line."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from tests.integration.cli.support import fill, invoke, lines
from tidings.log import LogSettings


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """A log: 25 records of ``demo`` (seq 1 to 25), then 5 of ``other``."""
    fill(tmp_path / "w", ("demo", 25), ("other", 5))
    return tmp_path / "w"


def seqs(workspace: Path, *args: object) -> list[int]:
    done = invoke("log", "read", *args, "--json", "-w", workspace)
    assert done.exit_code == 0, done.stderr
    return [record["seq"] for record in lines(done.stdout)]


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ((), range(1, 31)),
        (("demo",), range(1, 26)),
        (("--since", 3, "--until", 6), (4, 5, 6)),
        (("demo", "--from-offset", 20), range(21, 26)),
        (("--last", 3), (28, 29, 30)),
        (("demo", "--last", 2), (24, 25)),
        (("--limit", 4), (1, 2, 3, 4)),
        (("--limit", 0), ()),
        (("--from-time", "1h"), range(1, 31)),
        (("--to-time", "1h"), ()),
        (("--from-time", "2100-01-01"), ()),
        (("--partition", "none"), ()),
    ],
)
def test_bounds_choose_records(workspace: Path, args: tuple[object, ...], expected: range | tuple[int, ...]) -> None:
    """Each bound leaves exactly the records it promises, in seq order."""
    assert seqs(workspace, *args) == list(expected)


def test_a_record_is_one_line_for_people(workspace: Path) -> None:
    """Place, time, type, space and payload stand on one line."""
    done = invoke("log", "read", "other", "--limit", 1, "-w", workspace)

    assert done.stdout.count("\n") == 1
    seq, place, _, kind, space, payload = done.stdout.split()
    assert (seq, place, kind, space, payload) == ("26", "other:0", "NOTED", "shared:home", '{"n":0}')


def test_people_see_no_steering_characters(tmp_path: Path) -> None:
    """A payload cannot steer the terminal; programs get it as it is."""
    evil = json.dumps({"text": "\x9b31m\u202e"}, ensure_ascii=False)
    invoke("log", "append", "demo", "--type", "T", "--space", "s", "--payload", evil, "-w", tmp_path)

    shown = invoke("log", "read", "-w", tmp_path).stdout
    raw = invoke("log", "read", "--raw", "-w", tmp_path).stdout

    assert "\\u009b31m\\u202e" in shown
    assert json.loads(raw) == json.loads(evil)


@pytest.mark.parametrize(
    "args",
    [
        ("--last", 1, "--since", 1),
        ("--from-offset", 1),
        ("--from-time", "2026-01-01T00:00:00"),
        ("--from-time", "whenever"),
        ("--since", -1),
        ("--frob",),
    ],
)
def test_bounds_that_make_no_sense_are_refused(workspace: Path, args: tuple[object, ...]) -> None:
    """The exit code is 2, and the reason is told in the form that was asked for."""
    done = invoke("log", "read", *args, "--json", "-w", workspace)

    assert done.exit_code == 2
    assert done.stdout == ""
    assert json.loads(done.stderr)["error"]["code"] == "cli.usage"


def test_an_unknown_topic_is_named_with_those_there_are(workspace: Path) -> None:
    """A misspelt topic is an error, not an empty answer."""
    done = invoke("log", "read", "dmeo", "-w", workspace)

    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr == "error: there is no topic 'dmeo'\nhint: there are: demo, other\n"


def test_dropped_records_are_told(workspace: Path) -> None:
    """Who asks for records that retention dropped is told where the log begins now."""
    invoke("log", "retention", "--max-bytes", "demo=0", "--yes", "-w", workspace)

    done = invoke("log", "read", "demo", "--from-offset", 0, "-w", workspace)

    assert (done.exit_code, done.stdout) == (1, "")
    assert "offset 0 was dropped; the first one kept is 20" in done.stderr


@pytest.mark.parametrize("format_", ["jsonl", "events"])
def test_an_export_is_the_same_every_time(workspace: Path, tmp_path: Path, format_: str) -> None:
    """A pinned range gives the same bytes to stdout and to a file, although the log has grown meanwhile."""
    pinned = ("--format", format_, "--until", 28, "-w", workspace)
    first = invoke("log", "export", *pinned).stdout_bytes
    invoke("log", "append", "demo", "--type", "T", "--space", "s", "--payload", "{}", "-w", workspace)

    done = invoke("log", "export", *pinned, "-o", tmp_path / "out.jsonl", "--json")

    assert (tmp_path / "out.jsonl").read_bytes() == first
    summary = json.loads(done.stdout)
    assert (summary["records"], summary["until"], summary["bytes"]) == (28, 28, len(first))
    assert summary["sha256"] == hashlib.sha256(first).hexdigest()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "w"]


def test_exported_events_can_be_appended_elsewhere(workspace: Path, tmp_path: Path) -> None:
    """An export in the ``events`` format fills another log with the same events; doing it again adds nothing."""
    exported = invoke("log", "export", "--format", "events", "-w", workspace).stdout
    invoke("log", "append", "unused", "-", "-w", tmp_path / "copy", stdin=exported)

    again = invoke("log", "append", "unused", "-", "-w", tmp_path / "copy", stdin=exported)

    assert again.stdout == "0 appended, 30 duplicate, 0 refused\n"
    assert invoke("log", "export", "--format", "events", "-w", tmp_path / "copy").stdout == exported


def test_what_was_read_can_be_appended_elsewhere(workspace: Path, tmp_path: Path) -> None:
    """Records as ``read --json`` prints them are whole events: their places and write times are given anew."""
    printed = invoke("log", "read", "other", "--json", "-w", workspace).stdout

    done = invoke("log", "append", "unused", "-", "-w", tmp_path / "copy", stdin=printed)

    assert done.stdout == "5 appended, 0 duplicate, 0 refused\n"
    (first, *_) = lines(invoke("log", "read", "other", "--json", "-w", tmp_path / "copy").stdout)
    (origin, *_) = lines(printed)
    assert (first["seq"], first["meta"]["event_id"]) == (1, "other-0")
    assert first["meta"]["ts"] == origin["meta"]["ts"]
    assert first["meta"]["written_at"] > origin["meta"]["written_at"]


def test_an_export_that_fails_leaves_the_old_file(workspace: Path, tmp_path: Path) -> None:
    """A file appears whole or stays what it was."""
    target = tmp_path / "out.jsonl"
    target.write_text("precious")
    invoke("log", "retention", "--max-bytes", "0", "--yes", "-w", workspace)

    done = invoke("log", "export", "--since", 2, "-o", target, "-w", workspace)

    assert done.exit_code == 1
    assert "were dropped" in done.stderr
    assert target.read_text() == "precious"
    assert not (tmp_path / "out.jsonl.part").exists()


def test_stats_count_what_is_there(workspace: Path) -> None:
    """The numbers are those of the log, in JSON and in the table."""
    found = json.loads(invoke("log", "stats", "--json", "-w", workspace).stdout)

    assert (found["records"], found["segments"], found["first_seq"], found["last_seq"]) == (30, 4, 1, 30)
    assert (found["writer"], found["index"]["covers"]) == (None, 30)
    assert found["bytes"] == sum(path.stat().st_size for path in (workspace / ".bus" / "wal").iterdir())
    assert [(each["topic"], each["records"], each["next_offset"]) for each in found["topics"]] == [
        ("demo", 25, 25),
        ("other", 5, 5),
    ]
    assert found["oldest"] < found["newest"]
    shown = invoke("log", "stats", "-w", workspace).stdout
    assert "30 in 2 topics, 4 segments" in shown
    assert found["epoch"] in shown


def test_topics_and_their_segments_are_listed(workspace: Path) -> None:
    """Each topic is a line, and each segment of one is a row."""
    assert [each["topic"] for each in lines(invoke("topic", "list", "--json", "-w", workspace).stdout)] == [
        "demo",
        "other",
    ]
    info = json.loads(invoke("topic", "show", "demo", "--json", "-w", workspace).stdout)
    assert [segment["lines"] for segment in info["segments"]] == [10, 10, 5]
    assert [segment["is_sealed"] for segment in info["segments"]] == [True, True, False]
    assert "20 to 24" in invoke("topic", "show", "demo", "-w", workspace).stdout
    assert "other" in invoke("topic", "list", "-w", workspace).stdout
    assert invoke("topic", "show", "none", "-w", workspace).exit_code == 1


def test_a_log_with_folders_by_space_is_handled_as_it_is(tmp_path: Path) -> None:
    """A workspace made in the ``space`` layout is appended to, counted and checked without being told its layout."""
    fill(tmp_path, ("demo", 12), settings=LogSettings(journal_bytes=1 << 20, layout="space"))

    more = invoke("log", "append", "demo", "--type", "T", "--space", "person:bob", "--payload", "{}", "-w", tmp_path)

    assert more.exit_code == 0, more.stderr
    found = json.loads(invoke("log", "stats", "--json", "-w", tmp_path).stdout)
    assert (found["layout"], found["records"], found["segments"]) == ("space", 13, 2)
    assert invoke("log", "verify", "-w", tmp_path).exit_code == 0
