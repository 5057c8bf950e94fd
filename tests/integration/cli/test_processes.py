"""The tool as processes: the way from append to export, beside a living writer, interrupted and cut off."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil  # type: ignore[import-untyped]  # has no stubs
import pytest

from tests.integration.cli.support import (
    SECONDS_MAX,
    TOOL,
    environment,
    fill,
    invoke,
    invoke_until,
    lines,
    run,
    started,
)
from tidings.log import LogSettings

pytestmark = pytest.mark.slow

NOTED = ("--type", "NOTED", "--space", "shared:home")


def test_from_append_to_export(tmp_path: Path) -> None:
    """What goes in by stdin is read, counted, found sound, and exported to the same bytes twice."""
    text = "".join(json.dumps({"n": n}) + "\n" for n in range(100)).encode()

    appended = run("log", "append", "demo", "-", *NOTED, "-w", tmp_path, stdin=text)
    assert (appended.returncode, appended.stdout) == (0, b"100 appended, 0 duplicate, 0 refused\n")
    assert invoke("log", "read", "demo", "--raw", "-w", tmp_path).stdout_bytes == text.replace(b": ", b":")
    stats = json.loads(invoke("log", "stats", "--json", "-w", tmp_path).stdout)
    assert (stats["records"], stats["last_seq"], stats["writer"]) == (100, 100, None)
    assert invoke("log", "verify", "--ids", "-w", tmp_path).exit_code == 0
    first = run("log", "export", "-w", tmp_path)
    second = invoke("log", "export", "-w", tmp_path)
    assert first.returncode == second.exit_code == 0
    assert first.stdout == second.stdout_bytes
    assert len(first.stdout.splitlines()) == 100


def test_reading_beside_a_living_writer(tmp_path: Path) -> None:
    """While one process appends, others read what it was told is stored, see who writes, and may not write."""
    with started("log", "append", "demo", "-", *NOTED, "--json", "-w", tmp_path) as writer:
        for number in range(3):
            writer.write(json.dumps({"n": number}))
            assert writer.json()["verdict"] == "appended"

        read = invoke_until(lambda shown: len(lines(shown)) == 3, "log", "read", "demo", "--raw", "-w", tmp_path)
        assert lines(read) == [{"n": 0}, {"n": 1}, {"n": 2}]
        stats = json.loads(invoke("log", "stats", "--json", "-w", tmp_path).stdout)
        assert stats["writer"] == f"process {writer.process.pid}"
        assert stats["journal_bytes"] > 0
        assert invoke("log", "verify", "-w", tmp_path).exit_code == 0
        busy = invoke("log", "append", "demo", *NOTED, "--payload", "{}", "-w", tmp_path)
        assert (busy.exit_code, busy.stdout) == (4, "")
        assert f"is being written by process {writer.process.pid}" in busy.stderr

        writer.end_input()
        assert writer.json() == {"summary": {"appended": 3, "duplicate": 0, "refused": 0}}
        assert writer.exit_code() == 0


def test_tail_shows_what_comes_and_ends_on_interrupt(tmp_path: Path) -> None:
    """A tail shows the records it begins with, then each new one at once, none twice; Ctrl-C ends it with 0."""
    fill(tmp_path, ("demo", 2))
    with (
        started("log", "append", "demo", "-", *NOTED, "--json", "-w", tmp_path) as writer,
        started("log", "tail", "demo", "--last", "1", "--json", "-w", tmp_path) as last,
        started("log", "tail", "demo", "--from-start", "--json", "-w", tmp_path) as from_start,
    ):
        assert from_start.json()["seq"] == 1
        for tail in (last, from_start):
            assert tail.json()["seq"] == 2
        for seq in range(3, 8):
            writer.write("{}")
            assert writer.json()["seq"] == seq
            for tail in (last, from_start):
                assert tail.json()["seq"] == seq

        for tail in (last, from_start):
            tail.process.send_signal(signal.SIGINT)
            assert tail.exit_code() == 0
            assert tail.errors() == ""


def test_an_interrupted_append_keeps_what_it_acknowledged(tmp_path: Path) -> None:
    """Ctrl-C while waiting for input ends with 130, and every reported event is stored."""
    with started("log", "append", "demo", "-", *NOTED, "--json", "-w", tmp_path) as writer:
        writer.write('{"n":1}')
        assert writer.json()["verdict"] == "appended"
        writer.process.send_signal(signal.SIGINT)

        assert writer.exit_code() == 130
        assert "Traceback" not in writer.errors()
    assert invoke("log", "read", "--raw", "-w", tmp_path).stdout == '{"n":1}\n'


def test_a_killed_append_keeps_what_it_acknowledged(tmp_path: Path) -> None:
    """After a kill the log opens again with every reported event, for readers and for the next writer."""
    with started("log", "append", "demo", "-", *NOTED, "--json", "-w", tmp_path) as writer:
        for number in range(20):
            writer.write(json.dumps({"n": number}))
            assert writer.json()["seq"] == number + 1
        writer.process.kill()
        writer.exit_code()

    assert invoke("log", "verify", "-w", tmp_path).exit_code == 0
    assert len(invoke("log", "read", "-w", tmp_path).stdout.splitlines()) == 20
    again = json.loads(invoke("log", "append", "demo", *NOTED, "--payload", "{}", "--json", "-w", tmp_path).stdout)
    assert (again["seq"], again["offset"]) == (21, 20)


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path: Path) -> None:
    """A pipe that closes early ends the tool with 0 and without a word."""
    fill(tmp_path, ("demo", 5000), settings=LogSettings(journal_bytes=1 << 20))
    command = [*TOOL, "log", "read", "--json", "-w", str(tmp_path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, env=environment()) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith(b'{"offset":0,')
        process.stdout.close()

        assert process.stderr.read() == b""
        assert process.wait(SECONDS_MAX) == 0


def test_no_room_ends_with_its_own_code(tmp_path: Path) -> None:
    """Output onto a full device ends with 6 and says so."""
    fill(tmp_path, ("demo", 3))
    command = [*TOOL, "log", "export", "-w", str(tmp_path)]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, timeout=SECONDS_MAX, check=False, env=environment()
        )

    assert done.returncode == 6
    assert b"error: no space left" in done.stderr
    assert b"Traceback" not in done.stderr


def test_a_folder_that_cannot_be_made_ends_with_3(tmp_path: Path) -> None:
    """A workspace below a file cannot exist; the tool says so."""
    (tmp_path / "file").write_text("")

    done = invoke("log", "append", "demo", *NOTED, "--payload", "{}", "-w", tmp_path / "file" / "w")

    assert done.exit_code == 3
    assert done.stderr.count("error: ") == 1
    assert "Traceback" not in done.stderr


@pytest.mark.heavy
@pytest.mark.spark
@pytest.mark.timeout(300)
def test_ctrl_c_while_spark_starts_is_answered_and_leaves_nothing_running(tmp_path: Path) -> None:
    """It says what is waited for, ends well, and the Java that was being started has ended with it."""
    fill(tmp_path)
    with started("pipeline", "run", "--follow", "-w", tmp_path) as following:
        process, own = following.process, psutil.Process(following.process.pid)
        assert process.stderr is not None
        assert process.stderr.readline().startswith(b"starting Spark")
        while not (java := [each for each in own.children(recursive=True) if each.name() == "java"]):
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=120)

        assert process.returncode == 0
        # Small runs go on while Spark starts, and may have said that they caught up just before.
        assert said.endswith(b"ending, once what was begun is whole; Ctrl-C again ends at once\n")
        assert b"Traceback" not in said
        assert psutil.wait_procs(java, timeout=30)[1] == []


def test_ctrl_c_while_the_tool_is_loaded() -> None:
    """Ctrl-C before the tool could take any care of it ends with 130, and nothing is said of Python's imports."""
    program = """
import sys

class Interrupted:
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupted())
from tidings.cli import main
main()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=SECONDS_MAX, check=False)

    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")
