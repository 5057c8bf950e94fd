"""
Temporary folders that go with the process that made them, also if it is killed: the next one to make such a folder deletes those whose
owner is gone. An owner holds a lock of the kernel on a file in its folder, so no process number is taken for another process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_OWNER: Final = "owner"


@contextlib.contextmanager
def owned_folder(prefix: str, *, within: Path | None = None) -> Iterator[Path]:
    """
    Make a temporary folder, and delete it in the end; and those of the same prefix whose owners were killed.

    Args:
        prefix: How the folder's name begins.
        within: Where it is made; by default where temporary files are.
    """
    place = within or Path(tempfile.gettempdir())
    for left in sorted(place.glob(f"{prefix}*")):
        _delete_if_orphaned(left)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=place))
        fd = os.open(folder / _OWNER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if _is_locked(fd) and (folder / _OWNER).exists():
            break
        os.close(fd)  # another process took it for one that was left behind
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(fd)


def _delete_if_orphaned(folder: Path) -> None:
    try:
        fd = os.open(folder / _OWNER, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return  # another user's, or no folder of ours
    try:
        if _is_locked(fd):
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(fd)


def _is_locked(fd: int) -> bool:
    """Lock a file; ``False`` if another process has it locked."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
