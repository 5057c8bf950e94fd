"""
The line codec: encodes a record's line, in Python and, where that could be built, compiled.

``encode_record_line``, ``holds_null`` and ``LogIdMaker`` are the compiled ones if they are there. What they give is the same: nothing but
speed depends on which they are.
"""

from __future__ import annotations

from typing import Final
from zlib import crc32

import orjson

from tidings.core import ids
from tidings.core.clock import format_utc

from .segment import HEX


def encode_before_id(written_at: bytes, head_json: bytes) -> bytes:
    """What stands between a line's seq and its event id; many lines of a commit share it."""
    return b',"meta":{"written_at":"%b",%b"event_id":' % (written_at, head_json)


def encode_record_line_py(
    offset: int, seq: int, before_id: bytes, event_id: str, ts_us: int, rest: bytes, payload: bytes
) -> bytes:
    """
    One line, newline included.

    Args:
        offset, seq: Its places.
        before_id: From ``encode_before_id``.
        event_id, ts_us: The record's id, and when it happened, in microseconds since 1970.
        rest: The optional part of the envelope: nothing, or ``,"key":value`` pairs.
        payload: JSON.
    """
    dumps = orjson.dumps
    # Joined from parts, with ready-made digits: formatting takes more instructions.
    body = b"".join(
        (
            b'"offset":',
            dumps(offset),
            b',"seq":',
            dumps(seq),
            before_id,
            dumps(event_id),
            b',"ts":"',
            format_utc(ts_us * 1000),
            b'"',
            rest,
            b'},"payload":',
            payload,
            b"}",
        )
    )
    crc = crc32(body)
    return b"".join((b'{"crc":"', HEX[crc >> 16], HEX[crc & 0xFFFF], b'",', body, b"\n"))  # ``segment.encode_line``


def find_null(json: bytes) -> bool:
    """Whether the word ``null`` is in it, as a value or in a text."""
    return json.find(b"null") >= 0


# Below what the compiled module imports from here.
try:
    from ._line_codec import LogIdMaker as LogIdMaker
    from ._line_codec import encode_record_line as encode_record_line
    from ._line_codec import holds_null as holds_null
except ImportError:
    LogIdMaker, holds_null, encode_record_line = ids.LogIdMaker, find_null, encode_record_line_py  # type: ignore[misc, assignment]
IS_COMPILED: Final = encode_record_line is not encode_record_line_py
