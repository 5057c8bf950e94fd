"""
Event ids: random ones for producers, ones that carry their own seq for the log, and ones that follow from content.

A random id is ``ev-`` and 32 hex digits. When the producer leaves the id to the log, the log makes
one of the same shape: 64 random bits, and the same bits with the seq folded in. Such an id leads back to
its record without an index, so publishing it again is recognised although it was never entered anywhere.
The random bits are new for each id, so nobody can tell from the ids so far what the next one will be.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

_POOL_BYTES: Final = 4096
_ID_BYTES: Final = 16
_OWN: Final = struct.Struct(">Q")
_SHAPE: Final = re.compile(r"ev-[0-9a-f]{32}")

_pool = b""
_pool_at = 0


def new_event_id() -> str:
    """A new random id: ``ev-`` and 32 hex digits from the system's random source."""
    global _pool, _pool_at
    at = _pool_at
    if at >= len(_pool):  # one system call gives 256 ids
        _pool, at = os.urandom(_POOL_BYTES), 0
    _pool_at = at + _ID_BYTES
    return "ev-" + _pool[at : at + _ID_BYTES].hex()


def _drop_pool() -> None:
    global _pool, _pool_at
    _pool, _pool_at = b"", 0


# A forked child must not hand out its parent's ids.
os.register_at_fork(after_in_child=_drop_pool)


class LogIdMaker:
    """
    Makes ids for records whose seq is known.

    Args:
        random_bytes: Gives so many random bytes. Whoever can foresee them can take an id before its record has it.
    """

    __slots__ = ("_pool", "_random_bytes")

    def __init__(self, random_bytes: Callable[[int], bytes] = os.urandom) -> None:
        self._random_bytes = random_bytes
        self._pool: list[int] = []

    def make(self, seq: int) -> str:
        """A new id for the record at ``seq``; another one each time."""
        if not self._pool:  # one system call gives 512 ids
            drawn = _OWN.iter_unpack(self._random_bytes(_POOL_BYTES))
            self._pool = [own << 64 | own for (own,) in drawn][::-1]
        return "ev-" + (self._pool.pop() ^ seq).to_bytes(16).hex()


def seq_in_event_id(event_id: str) -> int | None:
    """
    The seq that a log-made id would carry; ``None`` for an id of any other shape.

    A random id of the same shape gives some number too, so the record at that seq must be compared.
    """
    if len(event_id) != 35 or _SHAPE.fullmatch(event_id) is None:
        return None
    return int(event_id[3:19], 16) ^ int(event_id[19:], 16)


def derived_id(prefix: str, *parts: str) -> str:
    """
    An id that says the same for the same parts.

    What is published again after a crash bears the id it had before, and the log's dedupe takes it for one event.
    """
    # Lengths keep ("ab", "c") and ("a", "bc") apart.
    text = "".join(f"{len(part)}:{part}" for part in parts)
    return f"{prefix}-{hashlib.sha256(text.encode()).hexdigest()[:32]}"


def content_id(prefix: str, payload: Mapping[str, Any], *parts: str) -> str:
    """
    An id that says the same for the same parts and the same payload.

    For what may be worked out anew, with another result, and published again: the log refuses an id it knows with other
    content, so another result needs another id.
    """
    return derived_id(prefix, *parts, msgspec.json.encode(payload, order="sorted").decode())
