"""
The format of the lines that journal and segments hold: JSON Lines that check themselves.

    {"crc":"9f1c2b7a","offset":7,"seq":42,"meta":{"written_at":"...",...},"payload":{...}}

``crc`` is the CRC-32 of every byte after its own comma up to the newline, so a line is checked before
it is parsed, and stays plain JSON for jq and for Spark. The keys stand in this order and ``written_at``
opens ``meta``: the head of a line then has a fixed shape, and a file can be searched by offset, seq or
write time without decoding more than heads.

Sans-I/O: nothing here opens a file. Recovery, replay and the Spark source hand in the bytes they have.
"""

from __future__ import annotations

import binascii
import enum
import re
import sys
import zlib
from array import array
from collections.abc import Sequence
from operator import itemgetter
from typing import Final, NamedTuple
from urllib.parse import quote

import msgspec

from tidings.core.errors import InvalidName

from .record import DECODER, Record

CRC_HEAD_BYTES: Final = len(b'{"crc":"00000000",')
HEX: Final = [b"%04x" % number for number in range(1 << 16)]
"""Ready-made digits, for putting a checksum into text."""
_CRC_HEAD: Final = itemgetter(slice(0, CRC_HEAD_BYTES))
_BODY: Final = itemgetter(slice(CRC_HEAD_BYTES, None))
_CRC_HEADS: Final = re.compile(rb'(?:\{"crc":"[0-9a-f]{8}",)*')
HEAD_BYTES_MAX: Final = 160
_HEAD: Final = re.compile(
    rb'\{"crc":"[0-9a-f]{8}","offset":([0-9]+),"seq":([0-9]+),"meta":\{"written_at":"([0-9T:.\-]+Z)"'
)
_FOLDER_CHARS_MAX: Final = 200
_FILE: Final = re.compile(r"(?P<topic>.+)\.(?P<number>[0-9]{8})\.jsonl")


class Flaw(enum.StrEnum):
    """Why there is no record where one should be."""

    UNFINISHED = "the data ends within a line"
    CHECKSUM = "a line's checksum does not match"
    FORMAT = "a line passes its checksum but is not a record"
    ORDER = "another record stands where the next one should be"


class Head(NamedTuple):
    """The part of a line that places it."""

    offset: int
    seq: int
    written_at: str


def encode_line(body: bytes) -> bytes:
    """Put the checksum in front of ``body``: everything from ``"offset"`` to the closing brace."""
    return b'{"crc":"%08x",%b\n' % (zlib.crc32(body), body)


def is_whole(line: bytes) -> bool:
    """Whether the line, given without its newline, matches its own checksum."""
    crc = zlib.crc32(line[CRC_HEAD_BYTES:])
    return line[:CRC_HEAD_BYTES] == b'{"crc":"%b%b",' % (HEX[crc >> 16], HEX[crc & 0xFFFF])


def whole_end(data: bytes) -> int:
    """Where the last line of ``data`` ends, or begins if a crash tore it: only the last one can be torn."""
    last = data.rfind(b"\n", 0, len(data) - 1) + 1
    return len(data) if data.endswith(b"\n") and is_whole(data[last:-1]) else last


def head_of(line: bytes) -> Head | None:
    """The head of a line, or of its first ``HEAD_BYTES_MAX`` bytes; ``None`` if this is not one."""
    found = _HEAD.match(line)
    if found is None:
        return None
    return Head(int(found[1]), int(found[2]), found[3].decode())


def decode(line: bytes) -> Record | Flaw:
    """Check a line, given without its newline, and decode it."""
    if not is_whole(line):
        return Flaw.CHECKSUM
    try:
        return DECODER.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return Flaw.FORMAT


def decode_all(lines: Sequence[bytes]) -> list[Record] | None:
    """
    Check and decode lines, given without their newlines, at the speed of C; ``None`` if any of them is not whole.

    Then ``decode``, one by one, tells which.
    """
    heads = b"".join(map(_CRC_HEAD, lines))
    if len(heads) != CRC_HEAD_BYTES * len(lines) or _CRC_HEADS.fullmatch(heads) is None:
        return None
    noted = array("I", binascii.unhexlify(heads.replace(b'{"crc":"', b"").replace(b'",', b"")))
    if sys.byteorder == "little":
        noted.byteswap()
    if noted != array("I", map(zlib.crc32, map(_BODY, lines))):
        return None
    try:
        return list(map(DECODER.decode, lines))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def decode_trusted(line: bytes) -> Record:
    """Decode a line that this process encoded itself and still holds in memory."""
    return DECODER.decode(line)


def space_folder(space_id: str) -> str:
    """
    The name of a space's folder, in the layout that gives each space one.

    Raises:
        InvalidName: The name would be longer than a file system takes.
    """
    name = quote(space_id, safe="").replace(".", "%2E")
    if len(name) > _FOLDER_CHARS_MAX:
        raise InvalidName(
            "meta.space_id",
            f"takes {len(name)} characters as a folder name; at most {_FOLDER_CHARS_MAX} are allowed",
            hint="use plain letters and digits, which need no escaping, or the flat layout",
        )
    return name


def segment_name(topic: str, number: int) -> str:
    """The file name of a topic's segment."""
    return f"{topic}.{number:08d}.jsonl"


def split_segment_name(name: str) -> tuple[str, int] | None:
    """The topic and number in a segment's file name; ``None`` for any other file."""
    found = _FILE.fullmatch(name)
    return None if found is None else (found["topic"], int(found["number"]))
