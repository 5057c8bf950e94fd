"""
How large the journal's files and the reserve are: decided from what the log holds and what the disk has.

A log begins with a small journal file. Each file that fills up is followed by one of twice the size, up to ``journal_bytes``, a
hundredth of the disk, and what the log holds; the reserve follows with twice the size of a journal file. A large log begins with large files. Closing a log
leaves a smaller reserve: nothing waits in the journal then.
"""

from __future__ import annotations

from typing import Final

from tidings.core.errors import SettingsError

from ..settings import LogSettings
from .disk import DiskSpace

FIRST_FILE_BYTES: Final = 1 << 20
_DISK_SHARE: Final = 100
_CLOSED_RESERVE_BYTES: Final = 512 << 10
_LOG_PER_FILE: Final = 2
"""A journal file is at most one part in so many of what the log holds."""
_LOG_PER_CLOSED_RESERVE: Final = 8
_FREE_PER_FILE: Final = 8
"""Files and reserve grow while so many times the new file's size is free."""


def refuse_impossible(settings: LogSettings, space: DiskSpace) -> None:
    """
    Refuse a file system that can never hold a log.

    Raises:
        SettingsError: The reserve and the smallest journal file are larger than the file system.
    """
    first = min(settings.journal_bytes, FIRST_FILE_BYTES)
    needed = first + (2 * first if settings.reserve_bytes is None else settings.reserve_bytes)
    if needed > space.total_bytes:
        raise SettingsError(
            "journal_bytes" if settings.reserve_bytes is None else "reserve_bytes",
            f"the reserve and one journal file take {needed:,} bytes, and the file system has {space.total_bytes:,} in all",
            "set reserve_bytes or journal_bytes lower, or use a larger file system",
        )


class Sizing:
    """
    The sizes for one log.

    Args:
        settings: Their upper bounds.
        space: The log's file system.
        log_bytes: What the log's segments hold.
    """

    def __init__(self, settings: LogSettings, space: DiskSpace, log_bytes: int) -> None:
        self._reserve_bytes = settings.reserve_bytes
        self.file_bytes_max = min(settings.journal_bytes, max(FIRST_FILE_BYTES, space.total_bytes // _DISK_SHARE))
        first = min(self.file_bytes_max, FIRST_FILE_BYTES)
        self.first_file_bytes = first
        while first < self.file_bytes_max and first < log_bytes // _LOG_PER_FILE:
            grown = self.grown(first)
            if not self.may_grow(grown, space):
                break
            self.first_file_bytes = first = grown

    def reserve_for(self, file_bytes: int) -> int:
        """The size of a reserve beside journal files of that size."""
        return 2 * file_bytes if self._reserve_bytes is None else self._reserve_bytes

    def file_beside(self, reserve_bytes: int, file_bytes: int) -> int:
        """The size of journal files beside a reserve that could not grow."""
        return file_bytes if self._reserve_bytes is not None else min(file_bytes, reserve_bytes // 2)

    def grown(self, file_bytes: int) -> int:
        """The size of the file after one of that size."""
        return min(self.file_bytes_max, 2 * file_bytes)

    def may_grow(self, file_bytes: int, space: DiskSpace) -> bool:
        """Whether the disk has enough room for files of that size."""
        return space.free_bytes >= _FREE_PER_FILE * file_bytes

    def closed_reserve(self, reserve_bytes: int, log_bytes: int, space: DiskSpace) -> int:
        """The size of the reserve that a closed log leaves; it keeps what it has on a disk that is short of room."""
        if self._reserve_bytes is not None or space.free_bytes < _FREE_PER_FILE * reserve_bytes:
            return reserve_bytes
        return min(reserve_bytes, max(_CLOSED_RESERVE_BYTES, log_bytes // _LOG_PER_CLOSED_RESERVE))
