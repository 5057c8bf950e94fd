"""
Pages of a store's keys, in their order, and the cursors between them.

A cursor is the last key that was given out: the next page has the keys after it. So what is removed between two pages makes no
other key appear twice or not at all.
"""

from __future__ import annotations

import base64
import binascii
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, Final, Generic, TypeVar

import msgspec

from .errors import LedgerError

PAGE_SIZE: Final = 100
PAGE_SIZE_MAX: Final = 1000
_SINGLY_MAX: Final = 64
_CHANGED_MIN: Final = 1024

Key = TypeVar("Key", bound="str | tuple[str, ...]")
Item = TypeVar("Item")


class InvalidPageCursor(LedgerError):
    """A cursor was not made by the list it is used for."""

    code = "ledger.invalid_page_cursor"
    subclass = "invalid_page_cursor"
    text = "{cursor!r} is no cursor of this list"
    hint = "start without a cursor; then use the one that came with each page"
    cursor: str


class Page(msgspec.Struct, Generic[Item], frozen=True):
    """A part of a list."""

    items: tuple[Item, ...]
    next_cursor: str | None
    """Where the next page begins; none after the last."""
    current_seq: int
    """The seq of the last happening before this page was read: the page shows everything up to it, and nothing after it."""


class KeyOrder(Generic[Key]):
    """
    The keys of a mapping in their order.

    Costs next to nothing until the first page is asked for. The keys are sorted then, and from there on kept sorted with what ``changed``
    was told.

    Args:
        store: The mapping; this very object for as long as the order is used.
    """

    def __init__(self, store: Mapping[Key, Any]) -> None:
        self._store = store
        self._keys: list[Key] | None = None
        self._changed: set[Key] = set()

    def changed(self, key: Key) -> None:
        """To be called when a key was added or removed."""
        if self._keys is None:
            return
        self._changed.add(key)
        if len(self._changed) > _CHANGED_MIN + len(self._keys):  # nobody lists any more
            self._keys = None
            self._changed.clear()

    def after(self, last: Key | None, count: int) -> Sequence[Key]:
        """The next keys after ``last``, at most ``count``."""
        keys = self._sorted()
        begin = 0 if last is None else bisect_right(keys, last)
        return keys[begin : begin + count]

    def _sorted(self) -> list[Key]:
        keys, store, changed = self._keys, self._store, self._changed
        if keys is None:
            keys = self._keys = sorted(store)
        elif len(changed) > _SINGLY_MAX:  # two sorted runs, which sorting merges
            keys = [key for key in keys if key not in changed]
            keys += sorted(key for key in changed if key in store)
            keys.sort()
            self._keys = keys
        else:
            for key in changed:
                place = bisect_left(keys, key)
                is_listed = place < len(keys) and keys[place] == key
                if is_listed and key not in store:
                    del keys[place]
                elif not is_listed and key in store:
                    keys.insert(place, key)
        changed.clear()
        return keys


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
