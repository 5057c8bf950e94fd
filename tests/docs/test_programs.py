"""Every program in README and docs runs as it is printed, twice in one folder; every command that they show exists."""

from __future__ import annotations

import functools
import itertools
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import tomllib
from pathlib import Path
from typing import Any, Final

import pytest

from tests.integration.cli.support import invoke

REPOSITORY: Final = Path(__file__).parents[2]
PAGES: Final = [
    REPOSITORY / "README.md",
    *sorted(path for path in (REPOSITORY / "docs").rglob("*.md") if path.parent.name != "adr"),
]
FIRST_STEPS: Final = REPOSITORY / "docs/first-steps.md"
HAVE_TESTS_OF_THEIR_OWN: Final = {FIRST_STEPS, REPOSITORY / "docs/howto/testing.md"}
FENCE: Final = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(page: Path, *languages: str) -> list[str]:
    """The fenced blocks of a page in these languages."""
    found = FENCE.findall(page.read_text(encoding="utf-8"))
    return [block for language, block in found if language in languages]


def id_of(page: Path) -> str:
    return str(page.relative_to(REPOSITORY))


def run_program(program: str, name: str) -> None:
    """Run a program in this process; one that runs until it gets a signal gets it once it listens."""
    code = compile(program, name, "exec", dont_inherit=True)
    if "bus.run()" in program:
        threading.Thread(target=terminate_when_listened_for, daemon=True).start()
    exec(code, {"__name__": "__main__"})


def terminate_when_listened_for() -> None:
    while signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, None):
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page, "python") and page not in HAVE_TESTS_OF_THEIR_OWN], ids=id_of
)
def test_every_program_of_a_page_runs_twice(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after another, in an empty folder; and again in the same folder, as a reader would."""
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        for at, program in enumerate(blocks(page, "python")):
            run_program(program, f"{id_of(page)}[{at}]")


@pytest.mark.slow
def test_the_shell_lines_of_the_readme_run_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After its program, in the same folder; what sets up everything, never ends or starts Spark is looked at, not done."""
    monkeypatch.chdir(tmp_path)
    readme = REPOSITORY / "README.md"
    run_program(blocks(readme, "python")[0], "README.md")
    for line in [line for _ in range(2) for block in blocks(readme, "sh") for line in block.splitlines()]:
        match shlex.split(line):
            case ["tidings", "serve" | "pipeline" | "table", *_]:
                continue  # that they exist is tested below
            case ["export", *_]:
                subprocess.run(["bash", "-euc", line], timeout=60, check=True)
            case ["tidings", *words]:
                done = invoke(*words)
                assert done.exit_code == 0, done.stderr
            case ["make", target]:
                command = ["make", "--dry-run", target]
                subprocess.run(command, cwd=REPOSITORY, capture_output=True, timeout=60, check=True)
            case ["pip", "install", "."]:
                project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
                assert project["project"]["scripts"]["tidings"] == "tidings.cli:main"
            case _:
                raise AssertionError(f"nobody checks {line!r}")


@pytest.mark.slow
def test_the_first_steps_work_in_two_terminals_twice(tmp_path: Path) -> None:
    """The page's two programs and its commands do what it says, on another port, and again in the same folder."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    worker, producer = blocks(FIRST_STEPS, "python")
    (tmp_path / "worker.py").write_text(worker, encoding="utf-8")
    (tmp_path / "producer.py").write_text(producer.replace("8787", port), encoding="utf-8")
    first, second, after = blocks(FIRST_STEPS, "sh")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    shell: dict[str, Any] = {
        "cwd": tmp_path,
        "env": {**os.environ, "PATH": path, "TIDINGS_SERVER__PORT": port},
        "text": True,
    }
    for life in range(2):
        start = ["bash", "-euc", first.replace("python worker.py", "exec python worker.py")]
        with subprocess.Popen(start, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, **shell) as terminal:
            try:
                assert terminal.stdout is not None
                assert terminal.stdout.readline() == f"waiting for orders at http://127.0.0.1:{port}\n"
                said = subprocess.run(["bash", "-euc", second], capture_output=True, timeout=60, check=True, **shell)
                offsets = range(3 * life, 3 * life + 3)
                assert said.stdout.splitlines() == [
                    f"order {number} is on disk, at offset {offset}" for number, offset in enumerate(offsets, 1)
                ]
                billed = {terminal.stdout.readline() for _ in range(2)}
                assert billed == {"billed order 1: 12.50\n", "billed order 3: 9.90\n"}
                for line in after.splitlines():
                    done = invoke(*shlex.split(line)[1:], "--workspace", str(tmp_path / "workspace"))
                    assert done.exit_code == 0, done.stderr
            finally:
                terminal.send_signal(signal.SIGINT)
        assert terminal.returncode == 0


@pytest.mark.slow
def test_the_shell_lines_of_the_cheat_sheet_run_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After its program, in the same folder."""
    monkeypatch.chdir(tmp_path)
    page = REPOSITORY / "docs/cheat-sheet.md"
    run_program(blocks(page, "python")[0], "cheat-sheet.md")
    for line in blocks(page, "sh")[0].splitlines() * 2:
        done = invoke(*shlex.split(line)[1:])
        assert done.exit_code == 0, (line, done.stderr)


@pytest.mark.slow
def test_the_shell_lines_about_operations_run_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder with a workspace and a key file; what was restored and what was imported hold the same events."""
    monkeypatch.chdir(tmp_path)
    run_program((REPOSITORY / "examples/quickstart.py").read_text(encoding="utf-8"), "quickstart.py")
    assert invoke("key", "create", "keys.json").exit_code == 0
    for line in "".join(blocks(REPOSITORY / "docs/howto/operations.md", "sh")).splitlines() * 2:
        match shlex.split(line):
            case ["tidings", *words]:
                done = invoke(*words)
                assert done.exit_code == 0, (line, done.stderr)
            case words:
                subprocess.run(words, timeout=60, check=True)
    exported = [
        invoke("log", "export", "--topic", "orders", "--format", "events", "--workspace", place).stdout
        for place in ("workspace", "restored/workspace", "imported")
    ]
    assert exported == [exported[0]] * 3
    assert "ORDER_PLACED" in exported[0]


def commands_of(page: Path) -> list[str]:
    """The lines of a page's blocks that call the tool."""
    lines = "\n".join(blocks(page, "", "sh", "console")).replace("\\\n", " ").splitlines()
    calls = [re.sub(r"^(\$ |.*\| )", "", line) for line in lines]
    return [line for line in calls if line.startswith("tidings ")]


@pytest.mark.parametrize("page", [page for page in PAGES if commands_of(page)], ids=id_of)
def test_every_command_that_a_page_shows_exists(page: Path) -> None:
    """Nouns, verbs and options are those of the tool."""
    for line in commands_of(page):
        words = shlex.split(line.partition(" #")[0].partition(" | ")[0].partition(" > ")[0])[1:]
        named = list(itertools.takewhile(re.compile(r"[a-z][a-z-]*").fullmatch, words))[:2]
        shown = help_of(*named) or help_of(*named[:1])
        assert shown, line
        asked = {word.split("=")[0] for word in words if re.match(r"--?[a-z]", word)}
        assert sorted(word for word in asked if not re.search(rf"{re.escape(word)}\b", shown)) == [], line


@functools.cache
def help_of(*words: str) -> str | None:
    """What the tool says of a command; None if it has none of that name."""
    done = invoke(*words, "--help", env={"COLUMNS": "200"})
    return done.stdout if done.exit_code == 0 else None


def test_the_readme_shows_the_quickstart() -> None:
    """The program on the first page is the example, to the letter, and has a dozen lines of code at most."""
    shown = blocks(REPOSITORY / "README.md", "python")[0]

    assert shown == (REPOSITORY / "examples/quickstart.py").read_text(encoding="utf-8")
    assert len([line for line in shown.splitlines() if line.strip() and not line.startswith('"""')]) <= 12


def test_a_typed_program_runs_as_it_was_checked(tmp_path: Path) -> None:
    """The program that ``mypy --strict`` checks with the tests does what its types say."""
    command = [sys.executable, "-W", "error", str(Path(__file__).with_name("user_program.py")), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "ORDER_PLACED order_placed 0",
        "ORDER_PLACED order_placed 1",
        "by hand in attempt 1",
        "o-1 in attempt 1",
        "o-2 in attempt 1",
    ]
