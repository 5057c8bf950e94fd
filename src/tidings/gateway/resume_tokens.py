"""
Resume tokens: what a client shows to acknowledge an envelope, or to go on behind it on a new connection.

A token is base64url of version, class, event id, anchor, time of issue and their HMAC-SHA-256. The key is made for one life of the gateway and
exists in its memory only, so a token is of no use after a restart, and nobody else can make one. A token grants nothing: what follows it is
filtered by the rights of whoever shows it.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from base64 import urlsafe_b64encode
from binascii import Error as Base64Error
from binascii import a2b_base64
from typing import Final, NamedTuple

from .names import EventClass

_VERSION: Final = 1
_BODY: Final = struct.Struct(">BB16sQQ")
_MAC_BYTES: Final = 32
_CHARS: Final = (_BODY.size + _MAC_BYTES) * 4 // 3
_TO_STANDARD: Final = bytes.maketrans(b"-_", b"+/")
_CODES: Final = {each: code for code, each in enumerate(EventClass, start=1)}
_CLASSES: Final = {code: each for each, code in _CODES.items()}


class KeyedHash:
    """HMAC-SHA-256 under one key. The key's two blocks are hashed once for all messages, which halves the work for short ones."""

    __slots__ = ("_inner", "_outer")

    def __init__(self, key: bytes) -> None:
        block = key.ljust(64, b"\0")
        self._inner = hashlib.sha256(bytes(each ^ 0x36 for each in block))
        self._outer = hashlib.sha256(bytes(each ^ 0x5C for each in block))

    def digest(self, message: bytes) -> bytes:
        """The 32 bytes for a message."""
        inner, outer = self._inner.copy(), self._outer.copy()
        inner.update(message)
        outer.update(inner.digest())
        return outer.digest()


class ResumePoint(NamedTuple):
    """What a token stands for."""

    event_class: EventClass
    event_id: str
    anchor: int
    issued_at_ms: int


class ResumeTokens:
    """
    Issues tokens and reads them back.

    Args:
        key: 32 random bytes.
    """

    __slots__ = ("_mac",)

    def __init__(self, key: bytes) -> None:
        if len(key) != 32:
            raise ValueError("the key of resume tokens has 32 bytes")
        self._mac = KeyedHash(key)

    def issue(self, event_class: EventClass, event_id: bytes, anchor: int, issued_at_ms: int) -> str:
        """The token of an envelope: one for all its subscribers."""
        body = _BODY.pack(_VERSION, _CODES[event_class], event_id, anchor, issued_at_ms)
        return urlsafe_b64encode(body + self._mac.digest(body)).decode()

    def read(self, token: str) -> ResumePoint | None:
        """What a token stands for, if it was issued by us and nothing of it was changed."""
        raw = _decoded(token)
        # The hash is compared whatever the token is, so that the time says nothing.
        body, mac = (
            (raw[: _BODY.size], raw[_BODY.size :]) if raw is not None else (bytes(_BODY.size), bytes(_MAC_BYTES))
        )
        is_ours = hmac.compare_digest(self._mac.digest(body), mac)
        return _point(body) if is_ours and raw is not None else None


def claimed_point(token: str) -> ResumePoint | None:
    """What a token claims to stand for, whoever made it: nothing to rely on."""
    raw = _decoded(token)
    return None if raw is None else _point(raw)


def _decoded(token: str) -> bytes | None:
    if len(token) != _CHARS or not token.isascii():
        return None
    if "+" in token or "/" in token:
        return None
    try:
        raw = a2b_base64(token.encode().translate(_TO_STANDARD), strict_mode=True)
    except Base64Error:
        return None
    return raw if len(raw) == _BODY.size + _MAC_BYTES else None


def _point(raw: bytes) -> ResumePoint | None:
    version, code, event_id, anchor, issued_at_ms = _BODY.unpack_from(raw)
    event_class = _CLASSES.get(code)
    if version != _VERSION or event_class is None:
        return None
    return ResumePoint(event_class, event_id.hex(), anchor, issued_at_ms)
