"""Key files from the command line, and what can be read with and without them."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
from pathlib import Path

import pytest

from tests.integration.cli.support import SECONDS_MAX, TOOL, environment, invoke, lines
from tidings.access.settings import TokenSettings
from tidings.access.tokens import TokenIssuer
from tidings.testing import VirtualClock

SECRET = '{"text":"the hidden words"}'


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """A key file with a key of the space ``person:alice``."""
    path = tmp_path / "keys.json"
    assert invoke("key", "create", path).exit_code == 0
    assert invoke("key", "add", path, "person:alice").exit_code == 0
    return path


@pytest.fixture
def workspace(tmp_path: Path, keys: Path) -> Path:
    """A log with one sealed event."""
    sealed = ("--type", "T", "--space", "person:alice", "--payload", SECRET, "--key-file", keys)
    assert invoke("log", "append", "demo", *sealed, "-w", tmp_path / "w").exit_code == 0
    return tmp_path / "w"


def test_a_key_file_is_its_owners_alone(keys: Path) -> None:
    """The file is made with mode 0600, and never made over another."""
    assert keys.stat().st_mode & 0o777 == 0o600
    before = keys.read_bytes()
    assert invoke("key", "create", keys).exit_code == 3
    assert keys.read_bytes() == before


def test_an_added_key_is_named(keys: Path) -> None:
    """Adding a key answers with its id, never with the key."""
    added = json.loads(invoke("key", "add", keys, "person:bob", "--json").stdout)

    assert (added["space_id"], len(added["key_id"])) == ("person:bob", 16)
    assert added["key_id"] in keys.read_text()


def test_sealed_payloads_need_the_key(workspace: Path, keys: Path) -> None:
    """The words are on disk nowhere; with the key file they are read, without it the record is shown as sealed."""
    assert all(b"hidden" not in path.read_bytes() for path in (workspace / ".bus").rglob("*.jsonl"))
    (opened,) = lines(invoke("log", "read", "--json", "--key-file", keys, "-w", workspace).stdout)
    assert opened["payload"] == json.loads(SECRET)
    closed = invoke("log", "read", "-w", workspace).stdout
    assert "<sealed with key " in closed
    assert "hidden" not in closed


def test_sealed_payloads_are_not_exported_as_events(workspace: Path, keys: Path) -> None:
    """Events that nobody could append again are refused; with the key they are exported in plain."""
    refused = invoke("log", "export", "--format", "events", "-w", workspace)
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert "is sealed with key" in refused.stderr
    plain = invoke("log", "export", "--format", "events", "--key-file", keys, "-w", workspace)
    assert json.loads(plain.stdout)["payload"] == json.loads(SECRET)


def test_shredding_makes_a_space_unreadable(workspace: Path, keys: Path) -> None:
    """After a shred the payload stays sealed for good, and the log says who had it done."""
    done = invoke("key", "shred", keys, "person:alice", "--yes", "--audit", "-w", workspace)

    assert done.stdout == "shredded 1 keys of space person:alice\n"
    assert "<sealed with key " in invoke("log", "read", "demo", "--key-file", keys, "-w", workspace).stdout
    note, ended = lines(invoke("log", "read", "audit", "--json", "-w", workspace).stdout)
    assert ended["payload"] == {"outcome": "done", "audit_seq": note["seq"]}
    assert (note["meta"]["type"], note["payload"]["space_id"]) == ("cli.key_shred", "person:alice")


def test_a_dry_run_shreds_nothing(keys: Path) -> None:
    """``--dry-run`` leaves the file byte for byte."""
    before = keys.read_bytes()

    assert invoke("key", "shred", keys, "person:alice", "--dry-run").exit_code == 0
    assert keys.read_bytes() == before


def test_without_a_terminal_nothing_is_shredded_unasked(keys: Path) -> None:
    """Where nobody can be asked, ``--yes`` is required."""
    before = keys.read_bytes()

    done = invoke("key", "shred", keys, "person:alice")

    assert done.exit_code == 2
    assert "no terminal to ask on" in done.stderr
    assert keys.read_bytes() == before


@pytest.mark.parametrize(("answer", "exit_code"), [("y", 0), ("n", 1), ("", 1)])
def test_the_person_at_the_terminal_is_asked(keys: Path, answer: str, exit_code: int) -> None:
    """Only a yes shreds."""
    before = keys.read_bytes()
    controller, terminal = pty.openpty()
    try:
        os.write(controller, answer.encode() + b"\n")
        command = [*TOOL, "key", "shred", str(keys), "person:alice"]
        done = subprocess.run(
            command, stdin=terminal, capture_output=True, timeout=SECONDS_MAX, check=False, env=environment()
        )
    finally:
        os.close(controller)
        os.close(terminal)

    assert done.returncode == exit_code
    assert b"for good? [y/N]" in done.stderr
    assert (keys.read_bytes() == before) == (exit_code != 0)


def test_a_space_without_keys_is_told(keys: Path) -> None:
    """Shredding what is not there ends with 1."""
    done = invoke("key", "shred", keys, "person:nobody", "--yes")

    assert done.exit_code == 1
    assert "holds no key of space person:nobody" in done.stdout


def test_an_exposed_key_file_is_refused(workspace: Path, keys: Path) -> None:
    """A key file that others can read is not used; the hint says how to close it."""
    keys.chmod(0o644)

    done = invoke("log", "read", "--key-file", keys, "-w", workspace)

    assert done.exit_code == 3
    assert "hint: chmod 600" in done.stderr


def test_an_expired_token_is_shown_as_expired() -> None:
    """Also where it is not verified: ``exp`` says so beside the time."""
    secret = "a secret of at least thirty-two bytes!"
    token = TokenIssuer(TokenSettings(secret=secret), VirtualClock()).issue("ana", lifetime_s=60)

    shown = invoke("token", "show", token)
    assert shown.exit_code == 0
    assert re.search(r"exp +2026-01-01T00:01:00Z \(expired\)", shown.stdout)
