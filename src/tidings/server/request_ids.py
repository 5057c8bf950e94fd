"""
Request ids, and the one line that each request leaves in the access log under its id.

Every answer has an id, also one that is made before any route or door is reached: whoever reports a refusal can name it, and the
log has it. An id that came with the request is taken over if nothing in it could break a log line or a header.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from typing import Final

from tidings.core.ids import new_event_id

__all__ = ["ACCESS_LOGGER", "REQUEST_ID_HEADER", "acceptable_id", "legible", "log_request", "request_id_of"]

ACCESS_LOGGER: Final = "tidings.server.requests"
REQUEST_ID_HEADER: Final = "x-request-id"

_access: Final = logging.getLogger(ACCESS_LOGGER)
_HEADER: Final = REQUEST_ID_HEADER.encode()
_ACCEPTABLE: Final = re.compile(rb"[A-Za-z0-9._:\-]{1,128}")
_SHOWN_CHARS_MAX: Final = 2_000
# What moves a terminal's cursor, begins a line, or turns the reading direction round.
_ILLEGIBLE: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def legible(text: str) -> str:
    """Text from outside as it may stand in a log line: control characters are written as escapes."""
    return _ILLEGIBLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def acceptable_id(given: bytes | None) -> str:
    """The id that was given, or a new one: one that could do harm is replaced, not repaired."""
    if given is not None and _ACCEPTABLE.fullmatch(given) is not None:
        return given.decode()
    return f"rq-{new_event_id()[3:]}"


def request_id_of(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The id of a request with these headers, whose names are in lower case; the last one given counts."""
    given: bytes | None = None
    for name, value in headers:
        if name == _HEADER:
            given = value
    return acceptable_id(given)


def log_request(
    method: str,
    path: str,
    status: int,
    seconds: float,
    *,
    peer: str,
    request_id: str,
    bytes_in: int = 0,
    bytes_out: int = 0,
) -> None:
    """Leave the line of one answered request."""
    if not _access.isEnabledFor(logging.INFO):
        return
    method, path = legible(method[:32]), legible(path[:_SHOWN_CHARS_MAX])
    _access.info(
        "%s %s %d %.1f ms",
        method,
        path,
        status,
        seconds * 1000,
        extra={
            "method": method,
            "path": path,
            "status": status,
            "duration_ms": round(seconds * 1000, 3),
            "bytes_in": bytes_in,
            "bytes_out": bytes_out,
            "peer": peer,
            "request_id": request_id,
        },
    )
