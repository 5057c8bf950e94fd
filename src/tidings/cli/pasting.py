"""What is printed to be pasted into a shell: this tool as it can be typed here, and requests to a node."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path


def tool() -> str:
    """
    How this tool is typed in the folder where it was started.

    ``tidings`` where the shell finds this very one by that name, else the path by which it was started, as ``.venv/bin/tidings``.
    """
    started_as = Path(sys.argv[0])
    if started_as.name != "tidings":  # python -m tidings.cli, or a program
        return f"{python()} -m tidings.cli"
    found = shutil.which("tidings")
    is_at_hand = found is not None and started_as.exists() and os.path.samefile(found, started_as)
    return "tidings" if is_at_hand else shlex.quote(str(started_as))


def python() -> str:
    """The interpreter that has this package, as it is typed in the folder where the tool was started."""
    beside = Path(sys.argv[0]).parent / "python"
    is_beside = Path(sys.argv[0]).name == "tidings" and beside.exists()
    return shlex.quote(str(beside if is_beside else sys.executable))


def shown(path: Path) -> str:
    """A path as it is typed in this folder."""
    whole, here = path.absolute(), Path.cwd()
    return shlex.quote(str(whole.relative_to(here) if whole.is_relative_to(here) else whole))


def requests(url: str, token_file: Path, *, topic: str, event_type: str, space: str, payload: str) -> list[str]:
    """Lines that show a node a token: one event published, and the last three read."""
    body = f'{{"meta":{{"topic":"{topic}","type":"{event_type}","space_id":"{space}"}},"payload":{payload}}}'
    bearer = '-H "Authorization: Bearer $TIDINGS_TOKEN"'
    return [
        f"export TIDINGS_TOKEN=$(cat {shown(token_file)})",
        f"curl -s {url}/v1/events {bearer} -H 'Content-Type: application/json' -d '{body}'",
        f"curl -s '{url}/v1/events?topic={topic}&limit=3&backwards=true' {bearer}",
    ]
