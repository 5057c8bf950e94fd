"""
The tree states of partitions: folded from the log when first needed, and kept up to date.

They are derived: any of them can be dropped at any time and is folded again. A submission takes the states of its partitions out,
changes them as it validates, and hands them back when its events are committed; if anything goes wrong they are dropped instead.
What others commit comes in through ``committed``.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Final

import msgspec
import orjson

from tidings.log.record import Record

from . import tree
from .dialects import seed
from .errors import HistoryPruned
from .paging import Pages
from .profiles import TREE_TYPES


class KeyedLocks:
    """Locks by name, which exist while somebody wants them."""

    def __init__(self) -> None:
        self._locks: dict[str, asyncio.Lock] = {}
        self._wanted: dict[str, int] = {}

    @contextlib.asynccontextmanager
    async def of(self, names: Iterable[str]) -> AsyncIterator[None]:
        """Hold all these names. They are taken in one order by everybody, so that nobody waits for ever."""
        async with contextlib.AsyncExitStack() as held:
            for name in sorted(set(names)):
                lock = self._locks.setdefault(name, asyncio.Lock())
                self._wanted[name] = self._wanted.get(name, 0) + 1
                held.callback(self._leave, name)
                await held.enter_async_context(lock)
            yield

    def _leave(self, name: str) -> None:
        self._wanted[name] -= 1
        if not self._wanted[name]:
            del self._wanted[name], self._locks[name]

    def __len__(self) -> int:
        return len(self._locks)


_FOLD_PAGE: Final = 1000


class FoldedState:
    """One partition's state after all of its events up to ``seq``."""

    __slots__ = ("data", "folded_seq", "pending_ids", "seq")

    def __init__(self, data: tree.PartitionState, seq: int) -> None:
        self.data = data
        self.folded_seq = seq
        """Everything up to here is in it."""
        self.seq = seq
        """The highest seq in it."""
        self.pending_ids: set[str] = set()
        """Events that are in it already and will come in through ``committed``."""


class TreeStates:
    """
    The states of the partitions used last.

    Args:
        pages: Where to read.
        count_max: How many partitions to keep.
    """

    def __init__(self, pages: Pages, count_max: int) -> None:
        self._pages = pages
        self._count_max = count_max
        self._states: OrderedDict[str, FoldedState] = OrderedDict()
        self._out: dict[str, frozenset[str]] = {}
        self._tainted: set[str] = set()
        self._published_seq = 0

    async def fold(self, partition: str, until: int) -> FoldedState:
        """
        A partition's state after its events up to ``until``, from the log.

        Raises:
            HistoryPruned: Not all of them are to be had.
        """
        data = tree.PartitionState()
        since, has_more = 0, True
        while has_more:
            part = await self._pages.read(seed.TOPIC, (partition,), since, until, _FOLD_PAGE)
            if part.pruned_through is not None:
                raise HistoryPruned(part.pruned_through)
            for record in part.records:
                _apply(data, record)
            has_more = part.has_more
            if part.records:
                since = part.records[-1].seq
        return FoldedState(data, until)

    async def take_out(self, partition: str, event_ids: Iterable[str], until: int) -> FoldedState:
        """
        A partition's state, to be changed by one submission, whose events these are. One at a time of each partition.

        Raises:
            HistoryPruned: It cannot be known.
        """
        assert partition not in self._out, "submissions of a tree are serialised"
        self._out[partition] = frozenset(event_ids)
        self._tainted.discard(partition)
        state = self._states.pop(partition, None)
        if state is not None:
            return state
        try:
            return await self.fold(partition, until)
        except BaseException:
            self.drop(partition)
            raise

    def hand_back(self, partition: str, state: FoldedState, committed: dict[str, int]) -> None:
        """The submission's events are committed, at these seqs by id, and in the state."""
        self._out.pop(partition, None)
        if partition in self._tainted:
            self._tainted.discard(partition)
            return
        for event_id, seq in committed.items():
            state.seq = max(state.seq, seq)
            if seq > self._published_seq:
                state.pending_ids.add(event_id)
        self._states[partition] = state
        while len(self._states) > self._count_max:
            self._states.popitem(last=False)

    def drop(self, partition: str) -> None:
        """What was taken out is not to be believed any more."""
        self._out.pop(partition, None)
        self._tainted.discard(partition)

    def committed(self, records: Sequence[Record]) -> None:
        """Records were committed, by this endpoint or another."""
        for record in records:
            meta = record.meta
            if meta.topic != seed.TOPIC or meta.type not in TREE_TYPES:
                continue
            for partition in meta.partitions:
                if partition in self._out and meta.event_id not in self._out[partition]:
                    self._tainted.add(partition)
                state = self._states.get(partition)
                if state is not None and not _catch_up(state, record):
                    del self._states[partition]
        if records:
            self._published_seq = records[-1].seq

    async def snapshot(self, partitions: Sequence[str], seq: int) -> dict[str, bytes]:
        """
        The states of partitions after exactly their events up to ``seq``, which must have been published, as JSON.

        Raises:
            HistoryPruned: One cannot be known.
        """
        states: dict[str, bytes] = {}
        for partition in partitions:
            state = self._states.get(partition)
            if state is None or state.seq > seq or self._published_seq < seq:
                state = await self.fold(partition, seq)
            states[partition] = orjson.dumps(state.data.plain())
        return states


def _catch_up(state: FoldedState, record: Record) -> bool:
    """Take a published record into a state; false if the state has overtaken it without it."""
    if record.meta.event_id in state.pending_ids:
        state.pending_ids.discard(record.meta.event_id)
    elif record.seq > state.seq:
        _apply(state.data, record)
        state.seq = record.seq
    elif record.seq > state.folded_seq:
        return False
    return True


def _apply(data: tree.PartitionState, record: Record) -> None:
    if record.meta.type not in TREE_TYPES:
        return
    raw = seed.event_of(record)
    if raw is None:
        return
    try:
        event = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError):  # another producer's; clients cannot read it either
        return
    payload = event.get("payload") if isinstance(event, dict) else None
    if not isinstance(payload, dict):
        return
    change = tree.parse_change(record.meta.type, payload)
    if isinstance(change, tree.Change) and data.check(change) is None:
        data.apply(change)
