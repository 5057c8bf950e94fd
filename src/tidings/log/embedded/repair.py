"""
Repair: make a damaged log open again without destroying a byte of it.

``plan_repair`` (repair_plan.py) reads and decides, ``carry_out`` does what the plan says, in an order that may be
interrupted anywhere: first what leaves the log is copied, synced, to ``aside/<time>/`` with a ``manifest.json``; then
comes a new epoch if acknowledged records leave it, then the checkpoint with the seq that must not be given out again,
and only then the segments. So a repair that is interrupted may be started again at any point, and the new epoch
shows that history was replaced. The manifest's ``lost`` and ``hidden`` tell ``verify`` which gaps are known; keep
it when the copies are removed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec

from tidings.core.clock import Clock, format_utc

from ..errors import LogError, WorkspaceBusy
from ..segment import encode_line
from ..settings import LogSettings
from .disk import Disk, replace_file, size_of
from .index import MemoryIndex
from .layout import Layout, WorkspaceMeta, encode_meta
from .recover import apply_recovery, plan_recovery
from .repair_plan import RepairPlan, digest_of
from .segment_writer import SegmentWriter

_BLOCK_BYTES: Final = 1 << 20
_FOLDERS_MAX: Final = 10_000


class RepairOutdated(LogError):
    """The files are not those that the plan was made for. Nothing was changed."""

    code = "log.repair_outdated"
    retryable = True
    hint = "plan again: somebody has written to the workspace since"
    text = "{path} has changed since the repair was planned"
    path: str


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


def carry_out(disk: Disk, layout: Layout, plan: RepairPlan, clock: Clock) -> RepairResult:
    """
    Do what the plan says; the log opens afterwards.

    Interrupted at any disk call, it has lost nothing: plan again and carry that out.

    Raises:
        WorkspaceBusy: The log is open.
        RepairOutdated: The files are not those the plan was made for; nothing was changed.
        OSError: The disk failed or is full; plan again when it works.
    """
    lock = disk.lock(layout.lock)
    if isinstance(lock, str):
        raise WorkspaceBusy(layout.workspace, lock)
    try:
        if not plan.is_needed:
            meta = layout.read_meta(disk)
            return RepairResult(folder=None, epoch=meta.epoch, is_new_epoch=False, last_seq=plan.last_seq)
        return _carry_out(disk, layout, plan, clock)
    finally:
        lock.release()


def _carry_out(disk: Disk, layout: Layout, plan: RepairPlan, clock: Clock) -> RepairResult:
    for each in plan.aside:
        path = layout.root / each.path
        size = size_of(disk, path)
        if size is None or size < each.byte_offset + each.size:
            raise RepairOutdated(str(path))
        if digest_of(disk, path, each.byte_offset, each.size) != each.sha256:
            raise RepairOutdated(str(path))
    folder = _copy_aside(disk, layout, plan, clock)
    if plan.loses_records:
        # First of all changes: once anything else has gone, nothing would show that history was replaced.
        meta = layout.new_meta(clock, plan.layout)
        replace_file(disk, layout.meta, encode_meta(meta))
    else:
        meta = layout.read_meta(disk)
    # The seq comes before the cuts too: it must not be given out again, whatever is cut off.
    replace_file(disk, layout.checkpoint, encode_line(msgspec.json.encode(plan.checkpoint)[1:]))
    for rewrite in plan.rewrites:
        replace_file(disk, layout.root / rewrite.path, rewrite.data)
    for cut in plan.cuts:
        _cut(disk, layout.root / cut.path, cut.size)
    for removal in plan.removals:
        disk.remove(layout.root / removal)
    for parent in sorted({(layout.root / removal).parent for removal in plan.removals}):
        disk.sync_folder(parent)
    for name in disk.names(layout.index):
        disk.remove(layout.index / name)
    _recover(disk, layout, plan.settings, meta)
    return RepairResult(
        folder=str(folder.relative_to(layout.workspace)),
        epoch=meta.epoch,
        is_new_epoch=plan.loses_records,
        last_seq=plan.last_seq,
    )


def _copy_aside(disk: Disk, layout: Layout, plan: RepairPlan, clock: Clock) -> Path:
    stamp = format_utc(clock.now_ns()).decode().translate({ord(mark): None for mark in "-:."})
    names = set(disk.names(layout.aside))
    tries = (f"{stamp}-{n}" if n else stamp for n in range(_FOLDERS_MAX))
    folder = layout.aside / next(name for name in tries if name not in names)
    disk.make_folder(folder)
    folders = {layout.root, layout.aside, folder}
    for each in plan.aside:
        target = folder / each.copy_name
        disk.make_folder(target.parent)
        while target.parent != folder.parent:
            target = target.parent
            folders.add(target)
        _copy(disk, layout.root / each.path, folder / each.copy_name, each.byte_offset, each.size)
    for each_folder in sorted(folders):
        disk.sync_folder(each_folder)
    manifest = plan.to_dict() | {
        "made_at": format_utc(clock.now_ns()).decode(),
        "aside": [msgspec.to_builtins(each) | {"copy": each.copy_name} for each in plan.aside],
    }
    replace_file(disk, folder / "manifest.json", msgspec.json.format(msgspec.json.encode(manifest), indent=1))
    return folder


def _copy(disk: Disk, source: Path, target: Path, byte_offset: int, size: int) -> None:
    original = disk.open(source)
    try:
        copy = disk.open(target, create=True)
        try:
            for at in range(0, size, _BLOCK_BYTES):
                copy.write(at, original.read(byte_offset + at, min(_BLOCK_BYTES, size - at)))
            copy.sync()
        finally:
            copy.close()
    finally:
        original.close()


def _cut(disk: Disk, path: Path, size: int) -> None:
    file = disk.open(path, write=True)
    try:
        if file.size() > size:
            file.truncate(size)
        file.sync()
    finally:
        file.close()


def _recover(disk: Disk, layout: Layout, settings: LogSettings, meta: WorkspaceMeta) -> None:
    """Recover, as opening would: a repair is done when that works."""
    plan = plan_recovery(disk, layout, settings)
    assert plan.meta == meta, "nobody else changes it under the lock"
    writer = SegmentWriter(disk, layout, MemoryIndex())
    try:
        apply_recovery(disk, layout, plan, writer)
    finally:
        writer.close()
