"""
When to settle: how long committed lines wait before the settler writes them, and what else is due then.

A busy log settles by the megabyte, an idle one after a few milliseconds. A checkpoint is due when the journal runs out of
files, or has grown by most of one; the index is fed with each checkpoint, when much has gathered, or after a second.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from .duplicates import Duplicates
from .index import IndexEntry
from .journal import Journal
from .lanes import Lane
from .room import Room
from .settler import Settled, Settler
from .state import LogState
from .stream import Chunk

__all__ = ["SettleLoop"]

_DELAY_S: Final = 0.005
_BYTES: Final = 1 << 20
_INDEX_DELAY_S: Final = 1.0
_INDEX_ENTRIES: Final = 20_000


class SettleLoop:
    """
    Drives the settler, one job at a time.

    Args:
        delay_s: How long lines may wait for more; 0 to settle at once.
        room: What must be there before events are accepted.
        on_settled: Told after each job that went well, with whether it was a checkpoint, and what there is no room for.
        on_failed: Told what went wrong; nothing more is settled until ``schedule`` is called again.
    """

    def __init__(
        self,
        lane: Lane,
        settler: Settler,
        journal: Journal,
        state: LogState,
        duplicates: Duplicates,
        room: Room,
        *,
        checkpoint_bytes: int,
        delay_s: float | None = None,
        on_settled: Callable[[bool, str | None], None],
        on_failed: Callable[[BaseException], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._lane = lane
        self._settler = settler
        self._journal = journal
        self._state = state
        self._duplicates = duplicates
        self._room = room
        self._checkpoint_bytes = checkpoint_bytes
        self._delay_s = _DELAY_S if delay_s is None else delay_s
        self._on_settled = on_settled
        self._on_failed = on_failed
        self._chunks: list[Chunk] = []
        self._bytes = 0
        self._seq = state.committed_seq
        """The highest seq among what was added."""
        self._since_checkpoint_bytes = 0
        self._timer: asyncio.TimerHandle | asyncio.Handle | None = None
        self._index_timer: asyncio.TimerHandle | None = None
        self._waiting: list[asyncio.Future[None]] = []
        self._is_stopped = False
        self.is_busy = False
        self.is_checkpoint_due = False
        self.is_index_due = False
        self.needs_spare = False
        """Whether it was the journal that found no room: then there is room when a new file fits."""

    def add(self, chunks: list[Chunk], size: int, seq: int) -> None:
        """Committed (and synced) lines, up to ``seq``."""
        self._chunks += chunks
        self._bytes += size
        self._seq = seq

    @property
    def has_work(self) -> bool:
        """Whether lines wait, or a checkpoint is due."""
        return bool(self._chunks) or self.is_checkpoint_due

    @property
    def has_lines(self) -> bool:
        """Whether lines wait."""
        return bool(self._chunks)

    def schedule(self, *, now: bool = False) -> None:
        """Settle soon, or now."""
        if self.is_busy or self._is_stopped:
            return
        if now or not self._delay_s or self._bytes >= _BYTES:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_soon(self.settle)
        elif self._timer is None:
            self._timer = self._loop.call_later(self._delay_s, self.settle)

    def settle(self) -> None:
        """Start a job with all that waits, unless one is running."""
        self._timer = None
        if self.is_busy or self._is_stopped:
            return
        journal, settler, state = self._journal, self._settler, self._state
        chunks, self._chunks = self._chunks, []
        size, self._bytes = self._bytes, 0
        seq = self._seq
        self._since_checkpoint_bytes += size
        is_checkpoint = (
            self.is_checkpoint_due or journal.is_tight or self._since_checkpoint_bytes >= self._checkpoint_bytes
        )
        is_index = self.is_index_due or is_checkpoint or len(state.unindexed) >= _INDEX_ENTRIES
        entries: list[IndexEntry] = []
        if is_index:
            entries = [entry for entry in state.unindexed if entry.seq <= seq]
        elif state.unindexed and self._index_timer is None:
            self._index_timer = self._loop.call_later(_INDEX_DELAY_S, self._feed_index)
        is_spare_due = self.needs_spare or journal.wants_spare
        settled: list[Settled] = []
        lacks: str | None = None

        def job() -> None:
            nonlocal lacks
            settled.extend(settler.write(chunks))
            if is_checkpoint:
                settler.checkpoint(seq)
            if is_index:
                settler.feed_index(entries, seq)
            lacks = self._room.make(needs_spare=is_spare_due)

        def done(error: BaseException | None) -> None:
            self.is_busy = False
            # Also after an error: what was written before it is written, and will not be reported again.
            for segment, flushed_bytes, digest in settled:
                segment.flushed_bytes = flushed_bytes
                segment.digest = digest or segment.digest
            if error is None:
                self._take_in(seq, len(entries), is_checkpoint=is_checkpoint, is_index=is_index)
                self.needs_spare = is_spare_due and lacks is not None
                self._on_settled(is_checkpoint, lacks)
            else:
                self._chunks = chunks + self._chunks
                self._bytes += size
                self._on_failed(error)
            self._wake()

        self.is_busy = True
        self._lane.run(job, done)

    def _take_in(self, seq: int, entry_count: int, *, is_checkpoint: bool, is_index: bool) -> None:
        state = self._state
        state.flushed_seq = seq
        if is_checkpoint:
            self._since_checkpoint_bytes = 0
            self.is_checkpoint_due = False
            self._journal.settled_seq = seq
        if is_index:
            self.is_index_due = False
            self._duplicates.forget(state.unindexed[:entry_count])
            del state.unindexed[:entry_count]
        state.recent.evict(seq)

    def _feed_index(self) -> None:
        self._index_timer = None
        self.is_index_due = True
        self.schedule(now=True)

    async def idle(self) -> None:
        """Wait until no job is running."""
        while self.is_busy:
            turn: asyncio.Future[None] = self._loop.create_future()
            self._waiting.append(turn)
            await turn

    async def run_alone(self, job: Callable[[], None]) -> None:
        """
        Run another job on the settler's lane, with nothing beside it. There must be none running.

        Raises:
            Exception: What the job raised.
        """
        assert not self.is_busy
        finished: asyncio.Future[None] = self._loop.create_future()

        def done(error: BaseException | None) -> None:
            self.is_busy = False
            if not finished.done():
                if error is None:
                    finished.set_result(None)
                else:
                    finished.set_exception(error)
            self._wake()

        self.is_busy = True
        self._lane.run(job, done)
        await finished

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for turn in waiting:
            if not turn.done():
                turn.set_result(None)

    def stop(self) -> None:
        """Settle nothing more."""
        self._is_stopped = True
        for timer in (self._timer, self._index_timer):
            if timer is not None:
                timer.cancel()
