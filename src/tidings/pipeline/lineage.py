"""
Whether a lake and a log belong together.

A lake names the epoch of the log it was made from. If the log has another one, either repair gave it a new epoch, and then
what repair set aside shows the old one; or the lake is another log's. The first may be accepted: the tables of the ended
epoch are moved aside as they are, because they may be the only place that still holds what the log dropped, and new ones
are begun. The second is always refused.
"""

from __future__ import annotations

import re
from typing import Final

from tidings.log.embedded.disk import Disk, read_file
from tidings.log.embedded.layout import Layout

from .errors import EpochChanged, LakeOfAnotherLog
from .lake import Lake

__all__ = ["check_epoch", "earlier_epochs"]

_EPOCH: Final = re.compile(rb'"epoch":\s*"([0-9a-f]{16})"')
_MANIFEST_BYTES_MAX: Final = 1 << 20


def earlier_epochs(layout: Layout, disk: Disk) -> set[str]:
    """The epochs that the log had before, from what repair set aside."""
    found: set[str] = set()
    for folder in disk.names(layout.aside):
        for name in disk.names(layout.aside / folder):
            if name in ("manifest.json", "meta.json"):
                data = read_file(disk, layout.aside / folder / name) or b""
                found |= {match.decode() for match in _EPOCH.findall(data[:_MANIFEST_BYTES_MAX])}
    return found


def check_epoch(lake: Lake, layout: Layout, disk: Disk, epoch: str, *, accepts_epoch: bool) -> None:
    """
    Make sure that the lake is this log's, in its present epoch; begin one if there is none.

    Raises:
        EpochChanged: The log has a new epoch, and that was not accepted.
        LakeOfAnotherLog: The lake was made from another log.
    """
    meta = lake.meta()
    if meta is None and not lake.tables():
        lake.begin(epoch)
        return
    lake_epoch = "" if meta is None else meta.epoch
    if lake_epoch == epoch:
        return
    if lake_epoch not in earlier_epochs(layout, disk):
        raise LakeOfAnotherLog(str(lake.root), f"its tables were made from epoch {lake_epoch or '?'} of another log")
    if not accepts_epoch:
        raise EpochChanged(lake_epoch, epoch)
    lake.set_aside(lake_epoch)
    lake.begin(epoch)
