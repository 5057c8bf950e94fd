"""
Pages of a store's keys, in their order, and the cursors between them.

A cursor is the last key that was given out: the next page has the keys after it. So what is removed between two pages makes no
other key appear twice or not at all.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import heapq
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterator
from itertools import groupby, islice
from typing import Any, Final, Generic, Protocol, TypeVar

import msgspec

from tidings.happenings.facade import Happenings

from .errors import InvalidPageCursor
from .state import LedgerState

PAGE_SIZE: Final = 100
PAGE_SIZE_MAX: Final = 1000
_RUN_KEYS: Final = 4096
_MERGED_KEYS_MAX: Final = 65_536
"""Runs are merged up to this length, which takes a few milliseconds: a page looks into one run for each so many keys."""

Key = TypeVar("Key", bound="str | tuple[str, ...]")
Item = TypeVar("Item")
_T = TypeVar("_T")


class ListPage(msgspec.Struct, Generic[Item], frozen=True):
    """A part of a list."""

    items: tuple[Item, ...]
    next_cursor: str | None
    """Where the next page begins; none after the last."""
    current_seq: int
    """The seq of the last happening before this page was read: the page shows everything up to it, and nothing after it."""


class KeyOrder(Generic[Key]):
    """
    The keys of a store in their order.

    Costs next to nothing until the first page is asked for. From there on the keys are kept as sorted runs, each short enough to be sorted in
    a moment, and merged in levels as they become more; a page merges what it needs of them. What was removed is passed over, and after as many changes as there are keys all is
    given up until the next page.

    Args:
        store: What has the keys; this very object for as long as the order is used. If it is no dictionary, it may change while somebody goes
            through it; keys that come and go meanwhile may be left out or not.
    """

    def __init__(self, store: Collection[Key]) -> None:
        self._store = store
        self._runs: list[list[Key]] | None = None
        self._fresh: list[Key] = []
        """The keys changed last, sorted: the run that grows."""
        self._changes_left = 0
        self._is_ready = False
        self._preparing = asyncio.Lock()

    def changed(self, key: Key) -> None:
        """To be called when a key was added or removed."""
        if self._runs is None:
            return
        insort(self._fresh, key)
        if len(self._fresh) == _RUN_KEYS:
            self._runs.append(self._fresh)
            self._fresh = []
            while _merge_last(self._runs):
                pass
        self._changes_left -= 1
        if self._changes_left < 0 and self._is_ready:
            self._runs, self._fresh, self._is_ready = None, [], False

    async def prepare(self) -> None:
        """Sort what is not sorted yet, letting others go on in between: a million keys take seconds."""
        async with self._preparing:
            if not self._is_ready:
                for _ in self._sort():
                    await asyncio.sleep(0)

    def after(self, last: Key | None, count: int) -> list[Key]:
        """The next keys after ``last``, at most ``count``."""
        if not self._is_ready:
            deque(self._sort(), maxlen=0)
        assert self._runs is not None
        runs = [*self._runs, self._fresh]
        begins = [0 if last is None else bisect_right(run, last) for run in runs]
        # By index: ``islice`` would go through all that comes before, which is half of all keys.
        rests = (map(run.__getitem__, range(begin, len(run))) for run, begin in zip(runs, begins, strict=True))
        ordered = heapq.merge(*rests)
        present = (key for key, _ in groupby(ordered) if key in self._store)
        return list(islice(present, count))

    def _sort(self) -> Iterator[None]:
        """Make the runs, one after another."""
        keys = iter(list(self._store) if isinstance(self._store, dict) else self._store)
        runs: list[list[Key]] = []
        self._runs, self._fresh = runs, []
        self._changes_left = len(self._store) + _RUN_KEYS
        while run := sorted(islice(keys, _RUN_KEYS)):
            runs.append(run)
            yield
            while _merge_last(runs):
                yield
        self._is_ready = self._is_ready or self._runs is runs  # unless somebody who would not wait was quicker


def _merge_last(runs: list[list[Key]]) -> bool:
    """Merge the last two runs if they are of one level. Return whether they were."""
    if len(runs) < 2 or len(runs[-1]) < len(runs[-2]) or len(runs[-1]) + len(runs[-2]) > _MERGED_KEYS_MAX:
        return False
    last = runs.pop()
    runs[-1] = sorted(runs[-1] + last)  # of two sorted lists: linear
    return True


class _Readable(Protocol):
    """What of a ``Ledger`` is asked here."""

    @property
    def happenings(self) -> Happenings: ...

    def read(self, view: Callable[[LedgerState], _T]) -> Awaitable[_T]: ...


async def read_page(
    ledger: _Readable,
    cursor: str | None,
    page_size: int | None,
    order: Callable[[LedgerState], KeyOrder[Key]],
    pick: Callable[[LedgerState, Key], Item],
    *,
    key_length: int,
    is_text: bool = False,
) -> ListPage[Item]:
    """
    A page of what a part of the ledger keeps, as it is at one moment.

    Args:
        ledger: Whose part it is.
        cursor: Where the page before ended; the first page unless given.
        page_size: See ``clamp_page_size``.
        order: The keys in their order.
        pick: What a key stands for.
        key_length: How many names a key is made of.
        is_text: Whether a key is one text, its names joined by a NUL, and no tuple.

    Raises:
        InvalidPageCursor: The cursor is not of this list.
    """
    count = clamp_page_size(page_size)
    last: Any = None
    if cursor is not None:
        names = decode_cursor(cursor, key_length)
        last = "\0".join(names) if is_text else names
    await (await ledger.read(order)).prepare()

    def look(state: LedgerState) -> ListPage[Item]:
        keys = order(state).after(last, count + 1)
        shown = keys[:count]
        next_cursor = None
        if len(keys) > count:
            end = shown[-1]
            next_cursor = encode_cursor(end) if isinstance(end, str) else encode_cursor(*end)
        return ListPage(tuple(pick(state, key) for key in shown), next_cursor, ledger.happenings.last_seq)

    return await ledger.read(look)


def clamp_page_size(page_size: int | None) -> int:
    """The size of a page: 100 unless said, never below 1 nor above 1,000."""
    return PAGE_SIZE if page_size is None else min(max(page_size, 1), PAGE_SIZE_MAX)


def encode_cursor(*key: str) -> str:
    """The cursor after this key."""
    return base64.b64encode("\0".join(key).encode()).decode()


def decode_cursor(cursor: str, length: int) -> tuple[str, ...]:
    """
    The key that a cursor stands for.

    Args:
        cursor: What came with the page before.
        length: How many parts the list's keys have.

    Raises:
        InvalidPageCursor: It is not from a list with such keys.
    """
    try:
        key = tuple(base64.b64decode(cursor, validate=True).decode().split("\0"))
    except (binascii.Error, ValueError):
        raise InvalidPageCursor(cursor) from None
    if len(key) != length:
        raise InvalidPageCursor(cursor)
    return key
