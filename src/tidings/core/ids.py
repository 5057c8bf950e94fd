"""
Event ids: random ones for producers, and ones that carry their own seq for the log.

A random id is ``ev-`` and 32 hex digits. When the producer leaves the id to the log, the log makes
one of the same shape: 64 random bits, and the same bits with the seq folded in. Such an id leads back to
its record without an index, so publishing it again is recognised although it was never entered anywhere.
"""

from __future__ import annotations

import os
import re
from typing import Final

__all__ = ["IdMaker", "new_event_id", "seq_in_event_id"]

_POOL_BYTES: Final = 4096
_ID_BYTES: Final = 16
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


class IdMaker:
    """Makes ids for records whose seq is known, for one life of one log."""

    __slots__ = ("_head", "_nonce")

    def __init__(self, nonce: bytes) -> None:
        assert len(nonce) == 8
        self._nonce = int.from_bytes(nonce)
        self._head = f"ev-{nonce.hex()}"

    def make(self, seq: int) -> str:
        """The id of the record at ``seq``."""
        return self._head + (seq ^ self._nonce).to_bytes(8).hex()


def seq_in_event_id(event_id: str) -> int | None:
    """
    The seq that a log-made id would carry; ``None`` for an id of any other shape.

    A random id of the same shape gives some number too, so the record at that seq must be compared.
    """
    if len(event_id) != 35 or _SHAPE.fullmatch(event_id) is None:
        return None
    return int(event_id[3:19], 16) ^ int(event_id[19:], 16)
