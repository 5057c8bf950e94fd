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
    objects: tuple[str, ...] = ()
    app: str | None = None
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


class Record(msgspec.Struct, frozen=True, gc=False, eq=False, rename={"meta_json": "meta", "payload_json": "payload"}):
    """
    One committed event: its places, its envelope, and its payload.

    Envelope and payload stay JSON until somebody asks for them: whoever passes records on pays for no decoding.
    """

    offset: int
    seq: int
    meta_json: msgspec.Raw
    payload_json: msgspec.Raw
    decoded_meta: RecordMeta | None = None
    """Filled in when ``meta`` is first asked for; not part of the record (``to_json`` leaves it out)."""
    known_plain: bool | None = None
    """The same, for ``is_plain``."""

    @classmethod
    def of(cls, offset: int, seq: int, meta: RecordMeta, payload_json: msgspec.Raw) -> Record:
        """A record from its parts."""
        return cls(offset, seq, msgspec.Raw(msgspec.json.encode(meta)), payload_json, meta)

    @property
    def meta(self) -> RecordMeta:
        """The envelope."""
        meta = self.decoded_meta
        if meta is None:
            meta = _META_DECODER.decode(self.meta_json)
            msgspec.structs.force_setattr(self, "decoded_meta", meta)
        return meta

    @property
    def is_plain(self) -> bool:
        """Whether the envelope has nothing but what every event's has: no age limit, no partitions, no key. Costs no decoding."""
        plain = self.known_plain
        if plain is None:
            # What every envelope has is written first, and the event's time is the last of it.
            plain = bytes(self.meta_json)[-_TS_BYTES:-_TIME_BYTES] == b'"ts":"'
            msgspec.structs.force_setattr(self, "known_plain", plain)
        return plain

    def to_json(self) -> bytes:
        """The record as a JSON object, as it stands in a segment but for the checksum."""
        return b'{"offset":%d,"seq":%d,"meta":%b,"payload":%b}' % (
            self.offset,
            self.seq,
            bytes(self.meta_json),
            bytes(self.payload_json),
        )

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

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Record) and (self.offset, self.seq, self.meta, bytes(self.payload_json)) == (
            other.offset,
            other.seq,
            other.meta,
            bytes(other.payload_json),
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Record(offset={self.offset}, seq={self.seq}, meta={self.meta}, payload={bytes(self.payload_json)!r})"


class _PlainRecord(Record, frozen=True, gc=False, eq=False):
    """A record that is known to be plain before anybody looks."""

    known_plain: bool | None = True


_TIME_BYTES: Final = len('2026-01-01T00:00:00.000000Z"}')
_TS_BYTES: Final = _TIME_BYTES + len('"ts":"')
_META_DECODER: Final = msgspec.json.Decoder(RecordMeta)
DECODER: Final = msgspec.json.Decoder(Record)
PLAIN_DECODER: Final[msgspec.json.Decoder[Record]] = msgspec.json.Decoder(_PlainRecord)
"""For lines of records that are known to be plain."""
