"""What disks, object stores and the libraries that read and write tables raise, in our words."""

from __future__ import annotations

import contextlib
import errno
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from .errors import LakeBlocked, LakeDamaged, LakeError, LakeUnreachable, LakeUnwritable
from .storage import Storage

_NOISE: Final = re.compile(r"\x1b\[[0-9;]*m|\b0: <unknown>.*", re.DOTALL)
"""Colours, and where in a library that has no names for it an error arose."""
_NO_FILE: Final = "a file is where a folder has to be"
_NO_FOLDER: Final = "a folder is where a file has to be"
_NO_TARGET: Final = "a link that leads nowhere"
_BLOCKED: Final = (errno.ENOTDIR, errno.EEXIST, errno.ELOOP, errno.ENOENT)
_DISK_PROBLEMS: Final = ("No space left", "Disk quota", "Read-only file system", "Permission denied")


def words_of(error: BaseException) -> str:
    """What a library says, in one line."""
    return " ".join(_NOISE.sub("", str(error)).split())[:300]


def in_the_way(path: Path) -> LakeBlocked | None:
    """The error, if a file or a broken link is where a folder or one of those above it has to be."""
    for each in (path, *path.parents):
        if each.is_symlink() and not each.exists():
            error = LakeBlocked(str(each), _NO_TARGET)
            error.hint = "mount what it leads to, or move it away, and run again"
            return error
        if each.is_file():
            return LakeBlocked(str(each), _NO_FILE)
    return None


def blocked(place: Storage, error: BaseException) -> LakeError | None:
    """
    The error, if the disk refuses, or something else is where a file or a folder of the lake has to be.

    Args:
        place: What was worked on.
        error: What was raised.
    """
    if not place.is_local:
        return None
    known = error if isinstance(error, OSError) else OSError()
    text, path = str(error), Path(known.filename2 or known.filename or place.path)
    if (problem := next((each for each in _DISK_PROBLEMS if each in text), None)) is not None:
        return LakeUnwritable(str(path), problem)
    if known.errno == errno.EISDIR:
        return LakeBlocked(str(path), _NO_FOLDER)
    # A name that is not there to be given away says nothing of the one that was to be taken.
    at = path.parent if known.errno == errno.ENOENT and known.filename2 else path
    if known.errno in _BLOCKED and (found := in_the_way(at)) is not None:
        return found
    if known.errno == errno.ENOTDIR or "Not a directory" in text:
        # What is not on the way to the table is inside it.
        return in_the_way(place.path) or LakeDamaged(str(place), words_of(error))
    return None


@contextlib.contextmanager
def translate_read_errors(folder: Storage) -> Iterator[None]:
    """
    While a table's files are read: what the readers raise, in our words.

    Raises:
        LakeDamaged: A file is missing, or is not what it was when it was committed.
        LakeUnwritable, LakeBlocked: This user may not read it; or something else is where it has to be.
        LakeUnreachable: The object store does not answer, or refuses.
    """
    try:
        yield
    except Exception as error:
        import duckdb  # tasks that write have no need of it
        import pyarrow as pa  # type: ignore[import-untyped]

        if not isinstance(error, duckdb.Error | pa.ArrowException | OSError):
            raise
        if (known := blocked(folder, error)) is not None:
            raise known from error
        text = words_of(error)
        is_gone = folder.is_local or isinstance(error, FileNotFoundError) or "Generic " not in text
        raise (LakeDamaged if is_gone else LakeUnreachable)(str(folder), text) from error


@contextlib.contextmanager
def translate_write_errors(place: Storage) -> Iterator[None]:
    """
    While files of the lake are written: what the disk raises, in our words.

    Raises:
        LakeUnwritable: There is no room, or no permission.
        LakeBlocked: Something else is where they have to be.
        LakeUnreachable: The object store does not answer, or refuses.
    """
    try:
        yield
    except OSError as error:
        if not place.is_local:
            raise LakeUnreachable(str(place), words_of(error)) from error
        if (known := blocked(place, error)) is not None:
            raise known from error
        raise LakeUnwritable(str(error.filename or place), error.strerror or words_of(error)) from error
    except Exception as error:
        if type(error).__module__.split(".")[0] not in ("py4j", "pyspark"):
            raise
        if (known := blocked(place, error)) is not None:
            raise known from error
        raise
