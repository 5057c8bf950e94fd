"""
A record: what the log committed, as it is read back.

The payload stays JSON bytes until somebody asks for it, so that passing records on (to a socket, a
file, another process) costs no decoding. No asyncio here: the Spark executors use this module too.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final

import msgspec
import orjson

from .errors import SealedPayload

__all__ = ["Record", "RecordMeta", "Sealed"]


class Sealed(msgspec.Struct, frozen=True, gc=False):
    """How an encrypted payload was sealed; the key itself is never in the log."""

    alg: str
    key: str
    nonce: str


class RecordMeta(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """
    The envelope of a record. Keys this version does not know are passed over when reading.

    Times are RFC 3339 in UTC with six decimals, so that their text order is their time order.
    """

    written_at: str
    topic: str
    type: str
    space_id: str
    event_id: str
    ts: str
    actor: Any = None
    trace_id: str | None = None
    idem_key: str | None = None
    ttl_sec: int | None = None
    device: Any = None
    partitions: tuple[str, ...] = ()
    band: str | None = None
    priority: int | str | None = None
    qos: dict[str, Any] | None = None
    extra: dict[str, Any] | None = None
    sealed: Sealed | None = None

    @property
    def time(self) -> datetime:
        """``ts`` as a datetime."""
        return datetime.fromisoformat(self.ts)

    @property
    def written_time(self) -> datetime:
        """``written_at`` as a datetime."""
        return datetime.fromisoformat(self.written_at)


class Record(msgspec.Struct, frozen=True, gc=False, rename={"payload_json": "payload"}):
    """One committed event: its places, its envelope, and its payload as JSON."""

    offset: int
    seq: int
    meta: RecordMeta
    payload_json: msgspec.Raw

    @property
    def topic(self) -> str:
        """The topic it is stored in."""
        return self.meta.topic

    @property
    def payload(self) -> dict[str, Any]:
        """
        The payload, decoded anew on every call: callers may change what they get.

        Raises:
            SealedPayload: It is encrypted and was read without a key.
        """
        sealed = self.meta.sealed
        if sealed is not None:
            raise SealedPayload(self.meta.space_id, sealed.key)
        decoded: dict[str, Any] = orjson.loads(memoryview(self.payload_json))
        return decoded


DECODER: Final = msgspec.json.Decoder(Record)
