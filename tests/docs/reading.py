"""
A reader who does what a page says: saves its programs, pastes its commands into terminals, compares what comes out.

- A block of a file is saved if the line before it ends with the file's name and a colon (```shop.py``:); another Python block is run.
- A block in the language ``sh`` is pasted into a terminal: the one that the line before it names ("in a second terminal"), else the last one.
  What a terminal exports stays there. A command that goes on is left running until the reader has finished, or the page speaks of Ctrl-C.
- A block in the language ``text`` right after one of these, or after "the first terminal says:", has lines that it must have printed, in the
  first reading; ``...`` stands for anything.
- Ports 8787 and 8000 are others in the test. What installs the project is looked at and not done.
- A reader with a clone has every program and command run as a process, with what was installed from the clone, on a bare path.
"""

from __future__ import annotations

import functools
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.integration.cli.support import environment, invoke

REPOSITORY: Final = Path(__file__).parents[2]
FIRST_PAGE: Final = REPOSITORY / "docs/index.md"
SECONDS_MAX: Final = 900.0
_BLOCK: Final = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_NAMED: Final = re.compile(r"`([\w./-]+\.\w+)`[^`\n]*:\Z")
_LASTING: Final = re.compile(r"^(tidings (serve|work|log tail|events tail)\b|python (worker\.py|-m http\.server))")
_FILES: Final = ("python", "html", "toml", "json", "ini", "js")
_TERMINALS: Final = {"first": 0, "second": 1, "third": 2, "fourth": 3}
_SAYS: Final = re.compile(r"terminal says:\Z")
_NOT_DONE: Final = re.compile(r"^(make|pip install|git clone|\. \.venv)\b")
_DONE_BEFORE: Final = re.compile(r"^(make run|pip install ('?\.|-r))")
_SHELL: Final = re.compile(r"[|<>$&;*`\\]|^\w+=|^export ")


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


@dataclass(frozen=True)
class Clone:
    """A checkout, and an environment into which it was installed as the pages say."""

    checkout: Path
    bin: Path

    def environment(self) -> dict[str, str]:
        """What a new user has: nothing but the system's own programs on the path; certificates and pip's configuration stay."""
        steering = ("TIDINGS_", "PYTHON", "PYTEST_", "MAKE", "MFLAGS", "VIRTUAL_ENV")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(steering)}
        return {**kept, "PATH": f"{self.bin}{os.pathsep}/usr/bin{os.pathsep}/bin"}


@dataclass
class Terminal:
    """A shell in the reader's folder: what it has exported, and what still runs in it."""

    env: dict[str, str]
    running: subprocess.Popen[bytes] | None = None
    output: Path | None = None
    printed: str = ""

    def shown(self) -> str:
        """All that the last block printed so far."""
        return self.printed if self.output is None else self.output.read_text(encoding="utf-8")


@dataclass
class Reader:
    """Reads a page in a folder, which must be the current one."""

    page: Path
    folder: Path
    ports: dict[str, str] = field(default_factory=lambda: {"8787": free_port(), "8000": free_port()})
    skipped: re.Pattern[str] | None = None
    """Blocks of commands that are left out."""
    clone: Clone | None = None
    """Whose programs are run, as processes; without one they are this repository's, run in this process where that is quicker."""
    is_first: bool = True
    """Whether the folder is new, so that the page's ``text`` is what comes out."""
    terminals: list[Terminal] = field(default_factory=list)

    def read(self) -> None:
        """Do what the page says, from its beginning to its end."""
        self.terminals = [self._terminal()]
        last = self.terminals[0]
        for language, block, prose in blocks_of(self.page):
            text = self._on_our_ports(block)
            before = prose.rpartition("\n\n")[2]
            named = _NAMED.search(before)
            match language:
                case _ if named and language in _FILES:
                    target = self.folder / named[1]
                    target.parent.mkdir(exist_ok=True)
                    target.write_text(text, encoding="utf-8")
                case "python" if self.clone is None:
                    run_program(text, f"{self.page.name}: {text[:60]}")
                case "python":
                    self._run_as_a_process(last, text)
                case "sh" if self.skipped is None or not self.skipped.search(text):
                    last = self._in_terminal(last, before)
                    if last.running is not None and "Ctrl-C" in prose:
                        self._interrupt(last)
                    assert last.running is None, f"{self.page.name}: something runs where this is pasted: {text}"
                    self.paste(last, block)
                case "text" if self.is_first and (not prose or _SAYS.search(before)):
                    self._compare(self._in_terminal(last, before), text)

    def close(self) -> None:
        """Ctrl-C in every terminal, the last one first; each program ends well."""
        for terminal in reversed(self.terminals):
            self._interrupt(terminal)

    def _interrupt(self, terminal: Terminal) -> None:
        if terminal.running is not None:
            terminal.running.send_signal(signal.SIGINT)
            code = terminal.running.wait(SECONDS_MAX)
            assert code in (0, 130, -signal.SIGINT), (code, terminal.running.args, self._errors(terminal))
            terminal.running = None

    def _terminal(self) -> Terminal:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        found = {**environment(), "PATH": path} if self.clone is None else self.clone.environment()
        more = {
            "XDG_CONFIG_HOME": str(self.folder / ".config"),
            "TIDINGS_SERVER__PORT": self.ports["8787"],
            "PYTHONUNBUFFERED": "1",
            "COLUMNS": "120",
        }
        return Terminal({**found, **more})

    def _in_terminal(self, last: Terminal, before: str) -> Terminal:
        said = re.findall(r"\b(first|second|third|fourth|another) terminal", before)
        if not said:
            return last
        number = len(self.terminals) if said[-1] == "another" else _TERMINALS[said[-1]]
        while len(self.terminals) <= number:
            self.terminals.append(self._terminal())
        return self.terminals[number]

    def _on_our_ports(self, text: str) -> str:
        for port, ours in self.ports.items():
            text = re.sub(rf"\b{port}\b", ours, text)
        return text

    def paste(self, terminal: Terminal, block: str) -> None:
        """Paste a block into a terminal; what it prints is the terminal's ``shown``."""
        block = self._on_our_ports(block)
        lines = block.replace("\\\n", " ").splitlines()
        if any(map(_NOT_DONE.match, lines)):
            self._install(terminal, lines)
            return
        terminal.output, terminal.printed = None, ""
        if lines and _LASTING.match(lines[-1]):
            self._leave_running(terminal, "\n".join([*lines[:-1], f"exec {lines[-1]}"]))
        elif not any(map(_SHELL.search, lines)):
            for line in lines:
                terminal.printed += self._command(terminal, line)
        else:
            kept = self.folder / ".env"
            terminal.printed = self._shell(terminal, f"{block}\nenv -0 > {shlex.quote(str(kept))}")
            terminal.env = dict(line.split("=", 1) for line in kept.read_text().split("\0") if line)
            kept.unlink()

    def _install(self, terminal: Terminal, lines: list[str]) -> None:
        """What installs something, or is for a checkout: in a clone it is done, unless the clone was made by it."""
        if self.clone is not None:
            script = "\n".join(line for line in lines if not _DONE_BEFORE.match(line))
            self._shell(terminal, f"cd {shlex.quote(str(self.clone.checkout))}\n{script}")
            return
        for line in filter(re.compile("make ").match, lines):
            command = ["make", "--dry-run", *shlex.split(line)[1:]]
            subprocess.run(command, cwd=REPOSITORY, capture_output=True, timeout=SECONDS_MAX, check=True)

    def _run_as_a_process(self, terminal: Terminal, program: str) -> None:
        """A program that goes on until Ctrl-C gets that once it has printed something."""
        file = self.folder / "program.py"
        file.write_text(program, encoding="utf-8")
        if "bus.run()" in program:
            self._leave_running(terminal, f"exec python {file.name}")
            self._interrupt(terminal)
        else:
            self._shell(terminal, f"python {file.name}")

    def _command(self, terminal: Terminal, line: str) -> str:
        """One command; our own as a process would, without starting one."""
        if self.clone is not None or not line.startswith("tidings "):
            return self._shell(terminal, line)
        done = invoke(*shlex.split(line)[1:], env=terminal.env)
        assert done.exit_code == 0, (self.page.name, line, done.exit_code, done.stderr)
        return done.stdout

    def _shell(self, terminal: Terminal, script: str) -> str:
        command, pipe = ["bash", "-euc", script], subprocess.PIPE
        with subprocess.Popen(command, stdout=pipe, stderr=pipe, env=terminal.env, start_new_session=True) as shell:
            try:
                printed, errors = shell.communicate(timeout=SECONDS_MAX)
            except subprocess.TimeoutExpired:
                os.killpg(shell.pid, signal.SIGKILL)
                raise
        assert shell.returncode == 0, (self.page.name, script, shell.returncode, printed.decode(), errors.decode())
        return printed.decode()

    def _leave_running(self, terminal: Terminal, block: str) -> None:
        number = self.terminals.index(terminal)
        terminal.output = self.folder.with_name(f"terminal-{number}-{'first' if self.is_first else 'second'}")
        with terminal.output.open("wb") as output, terminal.output.with_suffix(".stderr").open("wb") as errors:
            terminal.running = subprocess.Popen(
                ["bash", "-euc", block], stdout=output, stderr=errors, env=terminal.env, preexec_fn=_heed_ctrl_c
            )
        port = self.ports["8787"]
        self._until(terminal, functools.partial(is_ready, port) if "tidings serve" in block else terminal.shown)

    def _compare(self, terminal: Terminal, expected: str) -> None:
        for line in filter(None, expected.splitlines()):
            pattern = ".*".join(map(re.escape, line.split("...")))
            if terminal.running is not None:
                self._until(terminal, functools.partial(self._has_printed, terminal, pattern))
            assert self._has_printed(terminal, pattern), (self.page.name, line, terminal.shown())

    def _has_printed(self, terminal: Terminal, pattern: str) -> bool:
        return re.search(pattern, terminal.shown()) is not None

    def _until(self, terminal: Terminal, is_so: Callable[[], object]) -> None:
        end = time.monotonic() + SECONDS_MAX
        while not is_so():
            assert terminal.running is not None
            assert terminal.running.poll() is None, (self.page.name, terminal.running.args, self._errors(terminal))
            assert time.monotonic() < end, (
                self.page.name,
                terminal.running.args,
                terminal.shown(),
                self._errors(terminal),
            )
            time.sleep(0.02)

    def _errors(self, terminal: Terminal) -> str:
        assert terminal.output is not None
        return terminal.output.with_suffix(".stderr").read_text(encoding="utf-8")


def _heed_ctrl_c() -> None:
    """Ctrl-C counts, also where these tests are run in the background of a shell."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def blocks_of(page: Path) -> Iterator[tuple[str, str, str]]:
    """Language and text of each fenced block, and the prose since the one before."""
    text, end = page.read_text(encoding="utf-8"), 0
    for found in _BLOCK.finditer(text):
        yield found[1], found[2], text[end : found.start()].strip()
        end = found.end()


def free_port() -> str:
    """A port of this machine that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return str(free.getsockname()[1])


def is_ready(port: str) -> bool:
    """Whether a node answers there that it is ready."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=SECONDS_MAX) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@contextmanager
def reading(page: Path, folder: Path, **options: Any) -> Iterator[Reader]:
    """A reader of a page, whose terminals are closed at the end."""
    reader = Reader(page, folder, **options)
    try:
        yield reader
    finally:
        reader.close()


def read_twice(page: Path, folder: Path, **options: Any) -> None:
    """From an empty folder, block by block, and again in the same folder."""
    for is_first in (True, False):
        with reading(page, folder, is_first=is_first, **options) as reader:
            reader.read()
