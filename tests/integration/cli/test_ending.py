"""How the tool ends: exit codes, errors for people and for programs, help."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path

import pytest

import tidings
from tests.integration.cli.support import SMALL_SEGMENTS, fill, invoke
from tidings.cli.output import EXIT_MEANINGS, ExitCode, exit_code_of
from tidings.core.errors import InvalidEvent, TidingsError
from tidings.core.events import Event, EventMeta
from tidings.core.ids import LogIdMaker
from tidings.log.embedded import open_log, staging
from tidings.log.errors import CorruptLog, LogFenced, StorageFull, UnsupportedFormat, WorkspaceBusy, WorkspaceMissing
from tidings.log.line_codec import IS_COMPILED


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidEvent("payload", "is bad"), ExitCode.PROBLEM),
        (WorkspaceMissing("w", "holds no log"), ExitCode.WORKSPACE),
        (UnsupportedFormat("w", "is of format 9"), ExitCode.WORKSPACE),
        (LogFenced("sync failed"), ExitCode.WORKSPACE),
        (WorkspaceBusy("w", "process 1"), ExitCode.BUSY),
        (CorruptLog("w", 0, "is damaged"), ExitCode.CORRUPT),
        (StorageFull("w"), ExitCode.FULL),
    ],
)
def test_each_kind_of_error_has_its_exit_code(error: TidingsError, code: ExitCode) -> None:
    """A script can tell the kinds apart without reading text."""
    assert exit_code_of(error) == code


def test_a_missing_workspace_is_told_with_a_hint(tmp_path: Path) -> None:
    """One sentence and one hint on stderr, nothing on stdout, exit code 3, and nothing is made."""
    done = invoke("log", "read", "-w", tmp_path / "none")

    assert (done.exit_code, done.stdout) == (3, "")
    error, hint = done.stderr.splitlines()
    assert error == f"error: {tmp_path / 'none'}: holds no log"
    assert hint.startswith("hint: ")
    assert not (tmp_path / "none").exists()


def test_programs_get_the_error_as_json(tmp_path: Path) -> None:
    """With ``--json`` stderr is one object with code, message, hint and whether to try again."""
    done = invoke("log", "stats", "--json", "-w", tmp_path / "none")

    assert done.stdout == ""
    error = json.loads(done.stderr)["error"]
    assert (error["code"], error["retryable"]) == ("workspace.missing", False)
    assert set(error) == {"code", "message", "hint", "retryable"}


def test_a_traceback_needs_debug(tmp_path: Path) -> None:
    """Only ``--debug`` shows where in the code an error came from."""
    assert "Traceback" not in invoke("log", "read", "-w", tmp_path).stderr
    assert "Traceback" in invoke("log", "read", "--debug", "-w", tmp_path).stderr


def damage(workspace: Path) -> None:
    """Change one byte of a sealed segment's first line."""
    path = workspace / ".bus" / "wal" / "demo.00000001.jsonl"
    data = bytearray(path.read_bytes())
    data[30] ^= 1
    path.write_bytes(data)


def test_damage_is_found_and_named(tmp_path: Path) -> None:
    """Reading an altered record ends with 5 and names file and byte; verify lists it and ends with 1."""
    fill(tmp_path, ("demo", 25))
    assert invoke("log", "verify", "-w", tmp_path).exit_code == 0
    damage(tmp_path)

    read = invoke("log", "read", "demo", "-w", tmp_path)
    verified = invoke("log", "verify", "--json", "-w", tmp_path)

    assert read.exit_code == 5
    assert "demo.00000001.jsonl: at byte 0" in read.stderr
    assert " log verify'" in read.stderr
    assert verified.exit_code == 1
    report = json.loads(verified.stdout)
    assert not report["is_sound"]
    assert "line.checksum" in {finding["code"] for finding in report["findings"]}
    assert "NOT sound" in invoke("log", "verify", "-w", tmp_path).stdout


def test_verify_counts_what_it_looked_at(tmp_path: Path) -> None:
    """A sound log is said to be sound, up to its last seq, ids included."""
    fill(tmp_path, ("demo", 25), ("other", 5))

    report = json.loads(invoke("log", "verify", "--ids", "--json", "-w", tmp_path).stdout)

    assert (report["is_sound"], report["lines"], report["segments"], report["last_seq"]) == (True, 30, 4, 30)
    assert "sound: nothing is lost" in invoke("log", "verify", "-w", tmp_path).stdout


def test_verify_finds_one_id_for_two_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    If somebody has stored an event under the id that the log makes for a later one, both are there, and verify says that
    the log is not sound, which seqs they have, and that they say different things.
    """
    monkeypatch.setattr(staging, "LogIdMaker", lambda: LogIdMaker(bytes))  # no chance: the ids can be foreseen
    taken = Event(EventMeta("demo", "NOTED", "personal:mallory", event_id=f"ev-{2:032x}"), {})

    async def publish() -> None:
        log = await open_log(tmp_path, SMALL_SEGMENTS)
        await log.append(taken)
        assert (await log.append(Event(EventMeta("demo", "NOTED", "personal:alice"), {"n": 1}))).seq == 2
        await log.close()

    asyncio.run(publish())

    done = invoke("log", "verify", "--json", "-w", tmp_path)

    assert done.exit_code == 1
    (found,) = json.loads(done.stdout)["findings"]
    assert (found["code"], found["seq"]) == ("id.twice", 2)
    assert found["message"] == "the records at seq 1 and seq 2 have the same event id, and different contents"


def test_the_library_is_quiet_unless_asked(tmp_path: Path) -> None:
    """What the library logs appears with ``--verbose`` only, and logging is afterwards as it was."""
    fill(tmp_path, ("demo", 1))
    logger = logging.getLogger("tidings")
    before = (logger.level, logger.propagate, list(logger.handlers))

    assert invoke("log", "read", "-w", tmp_path).stderr == ""
    invoke("log", "read", "--verbose", "-w", tmp_path)

    assert (logger.level, logger.propagate, list(logger.handlers)) == before


def test_help_has_the_exit_codes() -> None:
    """The tool's own help lists every exit code with its meaning; without arguments help is what it shows."""
    shown = invoke("--help").stdout

    for code, meaning in EXIT_MEANINGS.items():
        assert f"{code:>3}  {meaning}" in shown
    assert invoke().stdout == shown


def test_a_misspelt_command_gets_a_suggestion() -> None:
    """The error names what was probably meant."""
    done = invoke("log", "verfiy")

    assert done.exit_code == 2
    assert "Did you mean 'verify'?" in done.stderr
    assert "hint: see " in done.stderr


def test_the_version_is_the_packages() -> None:
    """``--version`` says which Tidings this is, and whether it is compiled."""
    how = "compiled" if IS_COMPILED else "Python alone"
    assert invoke("--version").stdout == f"tidings {tidings.__version__} ({how})\n"
