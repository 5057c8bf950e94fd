"""Appending from the command line: what is stored, what is refused, and how that is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.cli.support import invoke, lines

NOTED = ("--type", "NOTED", "--space", "shared:home")


def payloads(workspace: Path, topic: str = "demo") -> list[object]:
    return lines(invoke("log", "read", topic, "--raw", "-w", workspace).stdout)


def test_one_payload_becomes_one_record(tmp_path: Path) -> None:
    """All options of the envelope reach the record."""
    options = ("--id", "e1", "--idem-key", "k1", "--ts", "2026-03-01T12:00:00+01:00", "--actor", "alice")
    sets = ("--partition", "b", "--partition", "a", "--object", "order:2", "--object", "order:1", "--app", "shop")

    done = invoke("log", "append", "demo", *NOTED, "--payload", '{"a":1}', *options, *sets, "--json", "-w", tmp_path)

    assert done.exit_code == 0
    assert json.loads(done.stdout) == {"verdict": "appended", "topic": "demo", "offset": 0, "seq": 1, "event_id": "e1"}
    (record,) = lines(invoke("log", "read", "demo", "--json", "-w", tmp_path).stdout)
    del record["meta"]["written_at"]
    assert record == {
        "offset": 0,
        "seq": 1,
        "meta": {
            "topic": "demo",
            "type": "NOTED",
            "space_id": "shared:home",
            "event_id": "e1",
            "ts": "2026-03-01T11:00:00.000000Z",
            "actor": "alice",
            "idem_key": "k1",
            "partitions": ["a", "b"],
            "objects": ["order:1", "order:2"],
            "app": "shop",
        },
        "payload": {"a": 1},
    }


def test_a_repeated_id_is_stored_once(tmp_path: Path) -> None:
    """The second time answers with the first commit's place, and succeeds."""
    command = ("log", "append", "demo", *NOTED, "--id", "e1", "--payload", '{"a":1}', "-w", tmp_path)
    invoke(*command)

    again = invoke(*command)

    assert again.exit_code == 0
    assert again.stdout == "duplicate of demo:0 at seq 1; nothing was written\n"
    assert payloads(tmp_path) == [{"a": 1}]


def test_an_id_with_other_content_is_an_error(tmp_path: Path) -> None:
    """An id that stands for another event is refused with exit code 1, a sentence and a hint."""
    invoke("log", "append", "demo", *NOTED, "--id", "e1", "--payload", '{"a":1}', "-w", tmp_path)

    done = invoke("log", "append", "demo", *NOTED, "--id", "e1", "--payload", '{"a":2}', "-w", tmp_path)

    assert done.exit_code == 1
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert "'e1' already stands for an event with other content" in done.stderr
    assert "\nhint: " in done.stderr


def test_lines_may_be_payloads_or_whole_events(tmp_path: Path) -> None:
    """A line's own meta wins over the options, and blank lines count but are nothing."""
    event = {"meta": {"topic": "other", "type": "SAID", "space_id": "person:bob", "event_id": "x"}, "payload": {"b": 2}}
    text = '{"a":1}\n\n' + json.dumps(event)

    done = invoke("log", "append", "demo", "-", *NOTED, "--json", "-w", tmp_path, stdin=text)

    assert done.exit_code == 0
    first, second, last = lines(done.stdout)
    assert (first["line"], first["topic"], first["verdict"]) == (1, "demo", "appended")
    assert (second["line"], second["topic"], second["event_id"]) == (3, "other", "x")
    assert last == {"summary": {"appended": 2, "duplicate": 0, "refused": 0}}
    (record,) = lines(invoke("log", "read", "other", "--json", "-w", tmp_path).stdout)
    assert (record["meta"]["type"], record["meta"]["space_id"], record["payload"]) == ("SAID", "person:bob", {"b": 2})


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("not json", "line: is not JSON"),
        ("[1]", "payload: must be a JSON object, not an array"),
        ('{"n":1,"m":{"k":1,"k":2}}', "line: has the key 'k' twice"),
        ('{"meta":1,"payload":{}}', "meta: must be a JSON object, not a number"),
        ('{"meta":{"colour":"red"},"payload":{}}', "meta.colour: is not a part of the envelope"),
        ('{"meta":{"ts":"yesterday"},"payload":{}}', "meta.ts: 'yesterday' is not a time"),
        ('{"meta":{"ts":"2026-03-01T12:00:00"},"payload":{}}', "has no time zone"),
        ('{"meta":{"topic":"a/b"},"payload":{}}', "is not a valid name"),
        ('{"meta":{},"payload":[]}', "payload: must be a JSON object"),
        ('{"n":123456789012345678901234567890}', "payload.n: cannot be stored as JSON"),
        ('{"meta":{"sealed":{"alg":"x","key":"y","nonce":"z"}},"payload":{}}', "payload: is sealed"),
    ],
)
def test_a_bad_line_is_named_and_stops_nothing(tmp_path: Path, line: str, problem: str) -> None:
    """The number of a refused line is told, the others are stored, and the exit code is 1."""
    done = invoke("log", "append", "demo", "-", *NOTED, "-w", tmp_path, stdin=f'{{"a":1}}\n{line}\n{{"a":3}}\n')

    assert done.exit_code == 1
    assert done.stdout == "2 appended, 0 duplicate, 1 refused\n"
    assert "line 2: " in done.stderr
    assert problem in done.stderr
    assert payloads(tmp_path) == [{"a": 1}, {"a": 3}]


def test_a_refused_line_has_a_code_for_programs(tmp_path: Path) -> None:
    """With ``--json`` a refusal is a line of its own with code, message and hint, which name all that is missing."""
    done = invoke("log", "append", "-", "--json", "-w", tmp_path, stdin='{"a":1}\n')

    refusal, summary = lines(done.stdout)
    assert refusal == {
        "line": 1,
        "verdict": "refused",
        "error": {
            "code": "event.invalid",
            "message": "meta.topic, meta.type, meta.space_id: are missing",
            "hint": "say it in the line, or with TOPIC --type TYPE --space SPACE",
            "retryable": False,
        },
    }
    assert summary["summary"]["refused"] == 1
    assert done.exit_code == 1


def test_a_file_is_read_like_stdin(tmp_path: Path) -> None:
    """``--file`` takes JSON Lines, also when the last one has no newline."""
    source = tmp_path / "payloads.jsonl"
    source.write_text("".join(f'{{"n":{n}}}\n' for n in range(2500)) + '{"n":2500}')

    done = invoke("log", "append", "demo", "--file", source, *NOTED, "-w", tmp_path / "w")

    assert done.stdout == "2501 appended, 0 duplicate, 0 refused\n"
    assert payloads(tmp_path / "w") == [{"n": n} for n in range(2501)]


@pytest.mark.parametrize(
    "args",
    [
        (),
        ("-", "--payload", "{}"),
        ("elsewhere",),
        ("-", "--id", "e1"),
        ("--payload", "{}", "--ts", "2026-03-01T12:00:00"),
        ("--payload", "{}", "--ts", "soon"),
    ],
)
def test_contradictions_are_usage_errors(tmp_path: Path, args: tuple[str, ...]) -> None:
    """A command line that makes no sense ends with 2 and makes no workspace."""
    done = invoke("log", "append", "demo", *NOTED, *args, "-w", tmp_path / "w")

    assert done.exit_code == 2
    assert done.stderr.startswith("error: ")
    assert not (tmp_path / "w").exists()


def test_a_missing_file_makes_no_workspace(tmp_path: Path) -> None:
    """A wrong path of input ends with 3 before anything is made."""
    done = invoke("log", "append", "demo", "--file", tmp_path / "none", *NOTED, "-w", tmp_path / "w")

    assert done.exit_code == 3
    assert done.stderr == f"error: {tmp_path / 'none'}: No such file or directory\n"
    assert not (tmp_path / "w").exists()


def test_the_workspace_may_come_from_the_environment(tmp_path: Path) -> None:
    """``TIDINGS_WORKSPACE`` names the workspace where ``-w`` does not."""
    env = {"TIDINGS_WORKSPACE": str(tmp_path / "w")}

    invoke("log", "append", "demo", *NOTED, "--payload", "{}", env=env)

    assert (tmp_path / "w" / ".bus" / "meta.json").exists()
