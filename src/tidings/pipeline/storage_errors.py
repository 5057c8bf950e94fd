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
_BLOCKED: Final = {
    errno.ENOTDIR: "a file is where a folder has to be",
    errno.EEXIST: "a file is where a folder has to be",
    errno.EISDIR: "a folder is where a file has to be",
}
_NO_FOLDER: Final = "Not a directory"
_DISK_PROBLEMS: Final = ("No space left", "Disk quota", "Read-only file system", "Permission denied")


def words_of(error: BaseException) -> str:
    """What a library says, in one line."""
    return " ".join(_NOISE.sub("", str(error)).split())[:300]


def disk_problem(text: str) -> str | None:
    """What a library says of the disk, if that is what is wrong."""
    return next((problem for problem in _DISK_PROBLEMS if problem in text), None)


def blocked(place: Storage, error: BaseException) -> LakeError | None:
    """
    The error, if something else is where a file or a folder of the lake has to be.

    Args:
        place: What was worked on.
        error: What was raised.
    """
    known = error if isinstance(error, OSError) else OSError()
    number = errno.ENOTDIR if known.errno is None and _NO_FOLDER in str(error) else known.errno
    if not place.is_local or number not in _BLOCKED:
        return None
    path = Path(known.filename2 or known.filename or place.path)
    found = next((each for each in (path, *path.parents) if each.is_file()), None)
    if found is None and number != errno.EISDIR:
        return LakeDamaged(str(place), words_of(error))  # it is further inside: a part of the table itself
    return LakeBlocked(str(found or path), _BLOCKED[number])


@contextlib.contextmanager
def translate_read_errors(folder: Storage) -> Iterator[None]:
    """
    While a table's files are read: what the readers raise, in our words.

    Raises:
        LakeDamaged: A file is missing, or is not what it was when it was committed.
        LakeBlocked: Something else is where it has to be.
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
        if (problem := disk_problem(str(error))) is not None:
            raise LakeUnwritable(str(place), problem) from error
        if (known := blocked(place, error)) is not None:
            raise known from error
        raise
