"""Making a large log is a job for a process of its own too: what it leaves on the heap must not be measured."""

from __future__ import annotations

from pathlib import Path

import msgspec

from .filling import fill
from .measuring import Taken, Window

__all__ = ["Built", "Order", "build"]


class Order(msgspec.Struct, frozen=True):
    """A log to be made."""

    workspace: str
    records: int
    has_partitions: bool


class Built(msgspec.Struct, frozen=True):
    """What making it took, and how large it is."""

    taken: Taken
    segment_bytes: int
    index_bytes: int


def build(order: Order) -> Built:
    """Make the log."""
    window = Window()
    workspace = Path(order.workspace)
    fill(workspace, order.records, has_partitions=order.has_partitions)
    taken = window.take()
    sizes = [
        sum(path.stat().st_blocks * 512 for path in (workspace / ".bus" / name).rglob("*") if path.is_file())
        for name in ("wal", "index")
    ]
    return Built(taken, sizes[0], sizes[1])
