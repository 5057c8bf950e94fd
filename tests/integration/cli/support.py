"""What the tests of the command line tool share: running it in this process or as one of its own."""

from __future__ import annotations

import asyncio
import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final

from typer.testing import CliRunner, Result

from tidings.cli.json_answers import ANSWERS, forms
from tidings.cli.root import app
from tidings.core.events import Event, EventMeta
from tidings.log import LogSettings
from tidings.log.embedded import open_log

TOOL: Final = (sys.executable, "-m", "tidings.cli")
SECONDS_MAX: Final = 30.0
SMALL_SEGMENTS: Final = LogSettings(journal_bytes=1 << 20, segment_lines_max=10)
_NEUTRAL: Final = {
    **dict.fromkeys(("TIDINGS_WORKSPACE", "TIDINGS_KEY_FILE", "TIDINGS_TOKEN")),
    "XDG_CONFIG_HOME": os.devnull,  # no contexts
}


def invoke(*args: object, stdin: str | bytes = "", env: dict[str, str] | None = None) -> Result:
    """Run a command line in this process."""
    result = CliRunner().invoke(app, [str(arg) for arg in args], input=stdin, env={**_NEUTRAL, **(env or {})})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    if "--json" in args and "--raw" not in args and result.exit_code in (0, 1):
        _check_answer([str(arg) for arg in args], result.stdout)
    return result


def _check_answer(words: list[str], output: str) -> None:
    """Hold an answer against what the reference says of the command."""
    command = next((each for each in (" ".join(words[:2]), words[0]) if each in ANSWERS), None)
    known = [] if command is None else list(forms(command))
    for line in output.splitlines() if known else ():
        found = json.loads(line)
        for each in found if isinstance(found, list) else [found]:
            assert any(needed <= each.keys() <= allowed for needed, allowed in known), (command, sorted(each))


def invoke_until(is_there: Callable[[str], bool], *args: object) -> str:
    """Run a command line in this process until its output is as wanted: files follow their writer's answers a moment later."""
    end = time.monotonic() + SECONDS_MAX
    while not is_there(shown := invoke(*args).stdout):
        assert time.monotonic() < end, shown
    return shown


def run(*args: object, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Run a command line as a process of its own, to its end."""
    command = [*TOOL, *map(str, args)]
    return subprocess.run(
        command, input=stdin, capture_output=True, timeout=SECONDS_MAX, check=False, env=environment()
    )


def environment() -> dict[str, str]:
    """This process's environment, without what would steer the tool."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TIDINGS_")}
    return {**kept, "XDG_CONFIG_HOME": os.devnull}


class Process:
    """A command line that goes on running while the test talks to it."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self._rest = b""

    def write(self, line: str) -> None:
        """A line to its stdin."""
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")
        self.process.stdin.flush()

    def end_input(self) -> None:
        """Close its stdin."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def line(self) -> str:
        """The next line of its stdout, within the time that a test has."""
        assert self.process.stdout is not None
        while b"\n" not in self._rest:
            block = _read_within(self.process.stdout)
            assert block, f"stdout ended; stderr: {self.errors()}"
            self._rest += block
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode()

    def json(self) -> Any:
        """The next line of its stdout, decoded."""
        return json.loads(self.line())

    def errors(self) -> str:
        """All that it said on stderr; ends with it."""
        assert self.process.stderr is not None
        return self.process.stderr.read().decode()

    def exit_code(self) -> int:
        """How it ended."""
        return self.process.wait(SECONDS_MAX)


def _read_within(stream: IO[bytes]) -> bytes:
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        assert selector.select(SECONDS_MAX), "nothing came"
    return os.read(stream.fileno(), 65536)


@contextmanager
def started(*args: object, env: dict[str, str] | None = None, cwd: Path | None = None) -> Iterator[Process]:
    """Start a command line; it is killed at the end if it still runs."""
    command = [*TOOL, *map(str, args)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=env or environment(), cwd=cwd) as process:
        try:
            yield Process(process)
        finally:
            process.kill()


def lines(output: str) -> list[Any]:
    """JSON Lines, decoded."""
    return [json.loads(line) for line in output.splitlines()]


def fill(workspace: Path, *topics_and_counts: tuple[str, int], settings: LogSettings = SMALL_SEGMENTS) -> None:
    """Make a log with numbered events, topic after topic, in small segments."""

    async def work() -> None:
        log = await open_log(workspace, settings)
        for topic, count in topics_and_counts:
            events = [Event(EventMeta(topic, "NOTED", "shared:home", f"{topic}-{n}"), {"n": n}) for n in range(count)]
            await log.append_many(events)
        await log.close()

    asyncio.run(work())
