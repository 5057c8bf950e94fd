"""What a repair is made of: the plan, its parts, and the result, all plain values."""

from __future__ import annotations

from typing import Any

import msgspec

from ..errors import LogError
from ..settings import LogSettings
from .checkpoint import Checkpoint
from .verify_report import Finding

__all__ = ["Cut", "RepairOutdated", "RepairPlan", "RepairResult", "Rewrite", "SetAside", "StreamRepair"]


class RepairOutdated(LogError):
    """The files are not those that the plan was made for. Nothing was changed."""

    code = "log.repair_outdated"
    retryable = True
    hint = "plan again: somebody has written to the workspace since"

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path

    def describe(self) -> str:
        return f"{self.path} has changed since the repair was planned"


class SetAside(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that are copied before they leave the log. Paths are relative to the log's folder."""

    path: str
    byte_offset: int
    size: int
    sha256: str
    why: str

    @property
    def copy_name(self) -> str:
        """The copy's path below the folder of this repair."""
        return self.path if not self.byte_offset else f"{self.path}.from-{self.byte_offset}"


class Rewrite(msgspec.Struct, frozen=True, kw_only=True):
    """A file that gets new content as a whole."""

    path: str
    data: bytes
    why: str


class Cut(msgspec.Struct, frozen=True, kw_only=True):
    """A segment that is cut to ``size`` bytes."""

    path: str
    size: int


class StreamRepair(msgspec.Struct, frozen=True, kw_only=True):
    """What becomes of one stream."""

    topic: str
    space_id: str | None
    kept: int
    """Records that stay, or come back from the journal."""
    set_aside: int
    """Whole records that leave the log: they stand on the far side of one that is lost."""
    first_offset: int
    """Of what is kept; one more than ``last_offset`` if nothing is."""
    last_offset: int
    dropped_segments: tuple[int, ...] = ()
    cut_segment: int | None = None
    removed_segments: tuple[int, ...] = ()


class RepairPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What a repair would do, and what the log holds afterwards."""

    is_needed: bool
    loses_records: bool
    """Whether acknowledged records leave the log; then it gets a new epoch."""
    lost_count: int
    """Acknowledged records that will not be in the log, damaged or set aside."""
    lost: tuple[tuple[int, int], ...]
    """The ranges of seqs that are in no line afterwards, but for those of dropped segments."""
    hidden: int
    """Lost records whose seqs lie among those of dropped segments."""
    last_seq: int
    """Where the log goes on from; no seq is given out twice."""
    epoch: str | None
    """The log's epoch now; ``None`` if it cannot be read."""
    problems: tuple[Finding, ...]
    aside: tuple[SetAside, ...] = ()
    rewrites: tuple[Rewrite, ...] = ()
    cuts: tuple[Cut, ...] = ()
    removals: tuple[str, ...] = ()
    streams: tuple[StreamRepair, ...] = ()
    """Those that change."""
    checkpoint: Checkpoint
    layout: str
    settings: LogSettings

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain values, without the bytes to be written."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        del plain["settings"], plain["checkpoint"]
        plain["rewrites"] = [{"path": each.path, "size": len(each.data), "why": each.why} for each in self.rewrites]
        return plain


class RepairResult(msgspec.Struct, frozen=True, kw_only=True):
    """What was done."""

    folder: str | None
    """Where the copies and their manifest are; ``None`` if there was nothing to do."""
    epoch: str
    is_new_epoch: bool
    last_seq: int

    def to_dict(self) -> dict[str, Any]:
        """The result as plain values."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain
