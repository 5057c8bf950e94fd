"""A space whose workspace is on a mount of its own: nothing that the bus keeps of it is anywhere else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

PROGRAM: Final = """
import asyncio, os, sys
from pathlib import Path

ours = Path(sys.argv[1])
outside = set()

def watch(event, arguments):
    if event == "open":
        path, mode, flags = arguments
        if not isinstance(path, (str, bytes)) or not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            return
        paths = [path]
    elif event in ("os.mkdir", "os.remove", "os.rename", "os.link", "os.symlink", "os.truncate", "shutil.copyfile"):
        paths = [each for each in arguments[:2] if isinstance(each, (str, bytes))]
    else:
        return
    for path in map(os.fsdecode, paths):
        if not Path(path).absolute().is_relative_to(ours):
            outside.add((event, path))

sys.addaudithook(watch)

from tidings.bus import EventBus
from tidings.log.settings import LogSettings
from tidings.types import Ack, Event, EventMeta, Nack

async def main(home, personal):
    settings = LogSettings(segment_lines_max=10, journal_bytes=1 << 20)
    both = [EventBus(workspace=ours / name, log_settings=settings) for name in (home, personal)]
    for bus, space in zip(both, (home, personal)):
        async def handler(event):
            return Nack("text of " + space) if event.payload["n"] == 3 else Ack()
        await bus.subscribe("actions", "learner", handler, max_retries=0)
        await bus.publish_many([Event(EventMeta("actions", "X", space), {"n": n, "of": space}) for n in range(40)])
        while bus.lag("actions", "learner"):
            await asyncio.sleep(0)
        await bus.redrive("actions")
        await bus.pause("actions", "learner")
        await bus.resume("actions", "learner")
        await bus.seek("actions", "learner", 40)
        await bus.compact()
    for bus in both:
        await bus.close()

asyncio.run(main("home", "personal"))
assert not outside, outside
"""


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Path]:
    """A folder on another file system than the rest, where there is one."""
    shared_memory = Path("/dev/shm")
    if not (shared_memory.is_dir() and os.access(shared_memory, os.W_OK)):
        yield tmp_path
        return
    folder = Path(tempfile.mkdtemp(dir=shared_memory))
    yield folder
    shutil.rmtree(folder)


@pytest.mark.req("F103")
def test_a_workspace_on_a_mount_of_its_own_holds_all_of_its_space(mount: Path, tmp_path: Path) -> None:
    """
    Each of two spaces has a workspace: log, journal, index, cursors, dead letters, claims and audit of a space are in its own,
    and the process writes no file outside of the two, in no step of its life.
    """
    done = subprocess.run(
        [sys.executable, "-B", "-W", "error", "-c", PROGRAM, str(mount)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if "is a dead letter" not in line] == []
    assert list(tmp_path.iterdir()) == []
    for space, other in (("home", "personal"), ("personal", "home")):
        files = {path: path.read_bytes() for path in (mount / space).rglob("*") if path.is_file()}
        assert any(space.encode() in data for data in files.values())
        assert [path for path, data in files.items() if other.encode() in data] == []
