"""
Changing access through the node that holds a workspace: one request, one answer, with nothing but the standard library.
"""

from __future__ import annotations

import http.client
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from .administration import Request
from .errors import NodeRefused, NodeUnreachable, TokenInvalid

__all__ = ["send"]

_TIMEOUT_S: Final = 30.0
_ANSWER_BYTES_MAX: Final = 1 << 20


def send(url: str, request: Request, token: str) -> dict[str, Any]:
    """
    Have a node make a change; waits until it has answered.

    Args:
        url: Where the node is, as its ``node.json`` says.
        request: What ``request_of`` made of the change.
        token: An administrator's.

    Returns:
        The node's answer, with the ``seq`` from which on the change counts.

    Raises:
        NodeUnreachable: There was no answer; whether the change was made is not known.
        NodeRefused: The node said no.
        TokenInvalid: The token cannot be sent.
    """
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=_TIMEOUT_S)
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json", "Accept": "application/json"}
    try:
        connection.request(request.method, request.path, request.body, headers)
        response = connection.getresponse()
        data = response.read(_ANSWER_BYTES_MAX)
    except (OSError, http.client.HTTPException) as error:
        raise NodeUnreachable(url, str(error) or type(error).__name__) from error
    except ValueError as error:  # no header can hold it
        raise TokenInvalid("it holds characters that no token has") from error
    finally:
        connection.close()
    try:
        answer = msgspec.json.decode(data)
    except msgspec.DecodeError:
        answer = None
    found = answer if isinstance(answer, dict) else {}
    if not 200 <= response.status < 300:
        problem = str(found.get("detail") or found.get("title") or response.reason)
        raise NodeRefused(response.status, problem, str(found["hint"]) if found.get("hint") else None)
    return found
