"""
What the head of an HTTP request says: its framing, its target and its WebSocket handshake. Plain values in, plain values out.

A request that servers and proxies could understand in two ways is refused. llhttp refuses most of them; the rest is refused here.
"""

from __future__ import annotations

import base64
import binascii
import functools
import re
from collections.abc import Sequence
from typing import Final
from urllib.parse import unquote

import httptools

from .errors import BadHandshake, MalformedRequest, UnknownSocketVersion

Headers = Sequence[tuple[bytes, bytes]]

FRAMING: Final = frozenset((b"host", b"content-length", b"transfer-encoding", b"expect", b"upgrade"))
"""The headers that ``check_framing`` and ``handshake_key`` look at."""
_HOST: Final = re.compile(rb"[A-Za-z0-9._~!$&'()*+,;=:%\[\]-]*")
_SOCKET_VERSION: Final = b"13"
_SOCKET_KEY_BYTES: Final = 16


@functools.lru_cache(maxsize=1_024)
def _is_host(value: bytes) -> bool:
    return _HOST.fullmatch(value) is not None


def check_framing(framing: Headers, version: str) -> tuple[bool, bool]:
    """
    Return whether a request has a body, and whether its client waits to send it.

    Raises:
        MalformedRequest: Where it ends, or for which host it is, could be understood in two ways.
    """
    hosts = lengths = encodings = 0
    has_body = expects_continue = False
    for name, value in framing:
        if name == b"host":
            hosts += 1
            if not _is_host(value):
                raise MalformedRequest("its Host is not valid")
        elif name == b"content-length":
            lengths += 1
            has_body = value.strip(b"0") != b""
            if not value.isdigit():
                raise MalformedRequest("its Content-Length is not a number")
        elif name == b"transfer-encoding":
            encodings += 1
            has_body = True
            if value.lower() != b"chunked":
                raise MalformedRequest("its Transfer-Encoding is not chunked")
        elif name == b"expect":
            expects_continue = value.lower() == b"100-continue"
    if version not in ("1.1", "1.0"):
        raise MalformedRequest(f"HTTP/{version} is not supported here")
    if hosts > 1 or (not hosts and version == "1.1"):
        raise MalformedRequest("it needs exactly one Host")
    if lengths + encodings > 1 or (encodings and version == "1.0"):
        raise MalformedRequest("the length of its body is ambiguous")
    return has_body, expects_continue and version == "1.1"


def target_of(method: str, target: bytes, headers: Headers) -> tuple[str, bytes, bytes, Headers]:
    """
    Return the path of a request's target, decoded and as it came, its query, and the headers: an absolute target's authority is their Host.

    Raises:
        MalformedRequest: It is no path, and no address with one.
    """
    try:
        url = httptools.parse_url(target)
        path = url.path or b"/"
        text = path.decode("ascii")
    except (httptools.HttpParserError, ValueError):
        raise MalformedRequest("its target is not valid") from None
    if url.schema is not None:
        # RFC 9112, 3.2.2: the target's authority counts, whatever Host says.
        authority = re.split(rb"[/?]", target.partition(b"://")[2])[0]
        if b"@" in authority:
            raise MalformedRequest("its target has user information")
        headers = [(name, authority if name == b"host" else value) for name, value in headers]
    elif not path.startswith(b"/") and (method, path) != ("OPTIONS", b"*"):
        raise MalformedRequest("its target is not a path")
    if url.fragment is not None:
        raise MalformedRequest("its target has a fragment")
    return unquote(text) if "%" in text else text, path, url.query or b"", headers


def handshake_key(
    framing: Headers, headers: Headers, *, method: str, version: str, has_body: bool, is_behind: bool
) -> bytes | None:
    """
    Return the key of a WebSocket handshake; ``None`` for an upgrade to anything else, which is answered as if it were no upgrade.

    Args:
        framing, headers: Of the request; ``framing`` has those in ``FRAMING``.
        method, version, has_body: Of the request.
        is_behind: Whether a request before it is not answered yet.

    Raises:
        MalformedRequest, BadHandshake, UnknownSocketVersion: Something is wrong with it.
    """
    upgrades = [value.lower() for name, value in framing if name == b"upgrade"]
    if b"websocket" not in upgrades:
        if has_body:  # to the parser, a body behind the head of an upgrade would be the next request
            raise MalformedRequest("an upgrade has a body")
        return None
    for problem, is_bad in (
        ("it comes behind a request that is not answered", is_behind),
        ("its Upgrade names more than one protocol", len(upgrades) != 1),
        ("it has a body", has_body),
        ("it is of HTTP/1.0", version == "1.0"),
        (f"its method is {method}", method != "GET"),
    ):
        if is_bad:
            raise BadHandshake(problem)
    versions = [value for name, value in headers if name == b"sec-websocket-version"]
    if not versions:
        raise BadHandshake("it has no version")
    if versions != [_SOCKET_VERSION]:
        raise UnknownSocketVersion(b", ".join(versions).decode("latin-1")[:100])
    keys = [value for name, value in headers if name == b"sec-websocket-key"]
    try:
        is_valid = len(keys) == 1 and len(base64.b64decode(keys[0], validate=True)) == _SOCKET_KEY_BYTES
    except (binascii.Error, ValueError):
        is_valid = False
    if not is_valid:
        raise BadHandshake("it has no valid key")
    return keys[0]
