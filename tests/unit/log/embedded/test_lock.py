"""One process writes a workspace, and readers that come and go keep nobody out."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tidings.core.events import Event, EventMeta
from tidings.log.embedded import open_log
from tidings.log.embedded.disk import OsDisk
from tidings.log.embedded.follower import open_follower
from tidings.log.embedded.layout import Layout
from tidings.log.errors import WorkspaceBusy
from tidings.log.reading import last


async def test_a_reader_that_is_opening_the_log_does_not_refuse_a_writer(tmp_path: Path) -> None:
    """
    A writer waits until the readers are done looking, instead of being told that somebody else writes.
    """
    await (await open_log(tmp_path)).close()
    reading = OsDisk().lock(Layout(tmp_path).lock, shared=True)
    assert not isinstance(reading, str)

    opening = asyncio.create_task(open_log(tmp_path))
    done, _ = await asyncio.wait({opening}, timeout=0.05)
    assert not done
    reading.release()
    log = await opening

    with pytest.raises(WorkspaceBusy, match=f"process {os.getpid()}"):
        await open_log(tmp_path)
    await log.close()


async def test_readers_that_open_together_see_the_same(tmp_path: Path) -> None:
    """
    A reader beside another one sees what only the journal has, as it would alone.
    """
    log = await open_log(tmp_path)
    await log.append(Event(EventMeta("demo", "NOTED", "shared:home"), {"n": 1}))
    shutil.copytree(tmp_path / ".bus", tmp_path / "killed" / ".bus")  # as a killed process leaves it
    await log.close()
    reading = OsDisk().lock(Layout(tmp_path / "killed").lock, shared=True)
    assert not isinstance(reading, str)

    follower = await open_follower(tmp_path / "killed")

    assert [record.payload for record in await last(follower, 1)] == [{"n": 1}]
    await follower.close()
    reading.release()


_FORKS = """
import os, sys
from pathlib import Path
from tidings.log.embedded.disk import OsDisk
lock = OsDisk().lock(Path(sys.argv[1]))
assert not isinstance(lock, str), lock
if os.fork() == 0:
    sys.stdin.read()
    os._exit(0)
if sys.argv[2] == "releases":
    lock.release()
    print("done", flush=True)
    sys.stdin.read()
print("done", flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("what", ["releases", "ends"])
def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path, what: str) -> None:
    """Neither when its parent releases the lock, nor when the parent is gone and the child lives on."""
    path = tmp_path / "lock"
    command = (sys.executable, "-c", _FORKS, str(path), what)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"done\n"
        if what == "ends":
            process.wait()

        lock = OsDisk().lock(path)

        assert not isinstance(lock, str), lock
        lock.release()
