"""Opening a log on files: make or recover the workspace, bring the index up to date, start the engine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import datetime
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Final

import msgspec

from tidings.core.clock import SYSTEM_CLOCK, Clock, ns_of
from tidings.core.errors import SettingsError
from tidings.core.settings import checked

from ..encryption import Encryptor
from ..errors import StorageFull, WorkspaceBusy, WorkspaceUnusable
from ..settings import LogSettings
from .disk import Disk, FolderLock, OsDisk, is_full, read_file
from .engine import EmbeddedLog
from .index import Index, IndexDamaged, IndexFull, entries_of, entry_of
from .journal import Journal
from .layout import Layout
from .lmdb_index import LmdbIndex
from .reader import Bounds, SegmentReader, view_of
from .recover import RecoveryPlan, Unmoved, apply_recovery, plan_recovery
from .reserve import KEPT_FROM_INDEX, KEPT_FROM_SEGMENTS, Reserve, ReserveDisk, SegmentRoom
from .segment_writer import SegmentWriter
from .sizing import Sizing, refuse_impossible
from .state import LogState
from .tombstones import Tombstones

logger = logging.getLogger(__name__)

_REINDEX_RECORDS: Final = 50_000


async def open_log(
    workspace: Path | str,
    settings: LogSettings | None = None,
    *,
    clock: Clock = SYSTEM_CLOCK,
    disk: Disk | None = None,
    encryptor: Encryptor | None = None,
    index: Index | None = None,
) -> EmbeddedLog:
    """
    Open a workspace's log for writing; it is made if there is none.

    Args:
        workspace: The folder; the log is in ``.bus`` below it.
        settings: How the log behaves; the defaults if left out.
        clock, disk: Replaceable for tests; the machine's own if left out.
        encryptor: Seals the payloads of the spaces it protects.
        index: Instead of the index on disk.

    Raises:
        WorkspaceBusy: Another process has it open for writing.
        WorkspaceUnusable: It cannot be written.
        UnsupportedFormat: A newer version wrote it.
        CorruptLog: Acknowledged data is lost or altered.
        StorageFull: There is no room even to start, with all that was kept back for that. (A disk that is merely full is no reason
            not to open: everything but appending works.)
        SettingsError: A setting is out of its range, or the file system can never hold a log with these settings.
    """
    settings = checked(settings or LogSettings())
    disk = disk or OsDisk()
    layout = Layout(workspace)

    start = await disk.threads.run(lambda: _recover(layout, settings, clock, disk, encryptor, index))
    return start()


def _recover(
    layout: Layout, settings: LogSettings, clock: Clock, disk: Disk, encryptor: Encryptor | None, index: Index | None
) -> Callable[[], EmbeddedLog]:
    """Recover the workspace; what starts the engine, to be called in the loop's thread."""
    lock = _lock(layout, disk)
    made_index: Index | None = None
    reserve = Reserve(disk, layout.reserve)
    reserve_disk = ReserveDisk(disk, reserve)
    # What the journal holds is moved first; what stays of dropped segments must still fit then, and after that what is small.
    promised = Reserve(disk, layout.room)
    segment_disk = ReserveDisk(disk, Reserve(disk, layout.reserve, keeps=KEPT_FROM_SEGMENTS, first=promised))
    index_reserve = Reserve(disk, layout.reserve, keeps=KEPT_FROM_INDEX)
    tombstone_disk = ReserveDisk(disk, index_reserve)
    try:
        refuse_impossible(settings, disk.space(layout.root))
        if not disk.exists(layout.meta):
            _create(layout, settings, clock, disk)
        layout.make_folders(disk)
        plan = plan_recovery(disk, layout, settings)
        if plan.meta.layout != settings.layout:
            raise SettingsError("layout", f"the workspace was made with {plan.meta.layout!r}, not {settings.layout!r}")
        if index is None:
            index = made_index = LmdbIndex.open(
                layout.index, epoch=plan.meta.epoch, map_bytes_max=settings.index_bytes_max, reserve=index_reserve
            )
        if index.was_reset is not None:
            logger.warning("the index of %s is made anew: %s", layout.workspace, index.was_reset)
        segment_writer = SegmentWriter(segment_disk, layout, index, reserve_disk)
        _report(layout, plan)
        unmoved = apply_recovery(reserve_disk, layout, plan, segment_writer)
        state = LogState(plan.meta.epoch, plan.last_seq, settings.recent_bytes_max)
        for recovered in plan.streams.values():
            state.add_stream(recovered.stream)
        if unmoved is not None:
            _show_unmoved(state, index, unmoved)
        index_full = _bring_index_up(index, state, disk, layout, encryptor)
        unflushed = [] if unmoved is None else unmoved.unflushed
        log_bytes = sum(stream.size_bytes for stream in state.streams())
        sizing = Sizing(settings, disk.space(layout.root), log_bytes)
        room = None
        if settings.reserve_bytes != 0:
            room = SegmentRoom(disk, layout.room, reserve, owed=sum(each.room for each in unflushed))
        journal = Journal(
            disk,
            layout.journal,
            file_bytes=sizing.first_file_bytes,
            count_max=settings.journal_count_max,
            is_synced=settings.durability == "sync",
            reserve=reserve,
            sizing=sizing,
            room=room,
            log_bytes=log_bytes,
            inherited=[] if unmoved is None else unmoved.files,
        )
        journal.synced_seq = plan.last_seq
        journal.checkpointed_seq = state.flushed_seq
        full = journal.ensure_space(needs_spare=True) or index_full
        return partial(
            EmbeddedLog,
            layout=layout,
            settings=settings,
            state=state,
            disk=disk,
            clock=clock,
            encryptor=encryptor,
            index=index,
            segment_writer=segment_writer,
            journal=journal,
            reserve=reserve,
            room=room,
            reserve_disk=reserve_disk,
            tombstone_disk=tombstone_disk,
            unflushed=unflushed,
            full=full,
            lock=lock,
            last_written_ns=_last_written_ns(state),
        )
    except BaseException as error:
        if made_index is not None:
            made_index.close()
        lock.release()
        if isinstance(error, OSError):
            if is_full(error):
                raise StorageFull(error.filename or str(layout.root)) from error
            problem = error.strerror or str(error)
            raise WorkspaceUnusable(error.filename or layout.root, f"cannot be used: {problem}") from error
        raise


def _create(layout: Layout, settings: LogSettings, clock: Clock, disk: Disk) -> None:
    has_records = bool(layout.segments(disk) or layout.sealed_streams(disk))
    meta = layout.create(disk, clock, settings.layout)
    if has_records:
        logger.warning(
            "%s was missing beside a log with records: the log goes on under the new epoch %s. Followers and groups of the earlier "
            "epoch are refused; put the file back from a copy of the workspace, or set the groups with `tidings group seek`",
            layout.meta,
            meta.epoch,
        )


def _lock(layout: Layout, disk: Disk) -> FolderLock:
    try:
        disk.make_folder(layout.root)
        lock = disk.lock(layout.lock)
    except OSError as error:
        if is_full(error):
            raise StorageFull(str(layout.root)) from error
        raise WorkspaceUnusable(layout.workspace, f"cannot be written: {error.strerror or error}") from error
    if isinstance(lock, str):
        raise WorkspaceBusy(layout.workspace, lock, _node_url(disk, layout))
    return lock


class _Node(msgspec.Struct):
    url: str


def _node_url(disk: Disk, layout: Layout) -> str | None:
    """Where the node is that has the workspace open, if it is one and says so."""
    try:
        return msgspec.json.decode(read_file(disk, layout.node) or b"", type=_Node).url
    except (msgspec.DecodeError, OSError):
        return None


def _report(layout: Layout, plan: RecoveryPlan) -> None:
    missing = sum(len(recovered.missing) for recovered in plan.streams.values())
    if missing or plan.dropped_frames:
        logger.info(
            "recovered %s: %d records came from the journal, %d unacknowledged batches were dropped",
            layout.workspace,
            missing,
            plan.dropped_frames,
        )


def _show_unmoved(state: LogState, index: Index, unmoved: Unmoved) -> None:
    """Serve what is in the journal only from memory, as a running log does with what it has not flushed."""
    state.flushed_seq = unmoved.flushed_seq
    state.recent.first_seq = unmoved.flushed_seq + 1
    for line in unmoved.lines:
        info = line.info
        topic = state.topic(info.meta.topic)
        if not topic.recent:
            topic.recent_first = info.offset
        state.recent.extend([line.data], len(line.data), [(topic, [line.data])])
        topic.plain_from = info.offset + 1
        entry = entry_of(info)
        if entry is not None and info.seq > index.covers:
            state.unindexed.append(entry)
    logger.warning(
        "the disk is full: %d records stay in the journal, and are read from memory, until the segments have room",
        len(unmoved.lines),
    )


def _last_written_ns(state: LogState) -> int:
    times = [stream.segments[-1].last_written_at for stream in state.streams() if stream.segments]
    return ns_of(datetime.fromisoformat(max(times))) if times else 0  # as text they have the same order


def _bring_index_up(
    index: Index, state: LogState, disk: Disk, layout: Layout, encryptor: Encryptor | None
) -> IndexFull | None:
    """Enter what the index lacks. If it has no room for that, note what it lacks, and return why."""
    for is_last in (False, True):
        try:
            _catch_up(index, state, disk, layout, encryptor)
            return None
        except IndexDamaged as error:
            if is_last:
                raise
            logger.warning("%s; it is made anew", error)
        except IndexFull as error:
            if is_last or not state.dropped_through_seq:
                _note_unindexed(index, state, disk, layout)
                return error
            logger.warning("%s; it is made anew without what was dropped", error)
        index.reset()
    raise AssertionError("two tries")


def _note_unindexed(index: Index, state: LogState, disk: Disk, layout: Layout) -> None:
    """Keep what the index lacks in memory."""
    reader = SegmentReader(disk, layout)
    try:
        bounds = Bounds(seq_from=index.covers + 1)
        walks = (reader.walk([view_of(stream, bounds)], bounds) for stream in state.streams())
        entries = [entry for walk in walks for entry in entries_of(record for record, _ in walk)]
    finally:
        reader.close()
    held = {entry.seq for entry in state.unindexed}
    state.unindexed = sorted(
        [*state.unindexed, *(e for e in entries if e.seq not in held)], key=lambda entry: entry.seq
    )


def _catch_up(index: Index, state: LogState, disk: Disk, layout: Layout, encryptor: Encryptor | None) -> None:
    """Enter what the index does not know yet; all of it if the index is new or of another history."""
    if index.covers > state.committed_seq:
        index.reset()
    if index.covers >= state.flushed_seq:
        return
    if not index.covers:
        index.add(entries_of(Tombstones(disk, layout, encryptor).all(), are_tombstones=True), 0)
    reader = SegmentReader(disk, layout)
    try:
        bounds = Bounds(seq_from=index.covers + 1)
        walks = (reader.walk([view_of(stream, bounds)], bounds) for stream in state.streams())
        records = (record for walk in walks for record, _ in walk)
        # ``covers`` moves only at the end: streams are walked one after another, not in seq order.
        while batch := list(islice(records, _REINDEX_RECORDS)):
            index.add(entries_of(batch), index.covers)
        index.add([], state.flushed_seq)
    finally:
        reader.close()
