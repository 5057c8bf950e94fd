"""
Changing access through the node that holds a workspace: one request, one answer, with nothing but the standard library.

A node's certificate is made out to the name that others know it by. Here it is reached by its address on this machine, so what is
compared is the certificate itself, with the file that the workspace says it shows; no other is sent the token.
"""

from __future__ import annotations

import http.client
import re
import ssl
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from .administration import Request
from .errors import NodeRefused, NodeUnreachable, TokenInvalid

_TIMEOUT_S: Final = 30.0
_ANSWER_BYTES_MAX: Final = 1 << 20
_CERTIFICATE: Final = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)


def send(url: str, request: Request, token: str, certificate: str | None = None) -> dict[str, Any]:
    """
    Have a node make a change; waits until it has answered.

    Args:
        url: Where the node is, as its ``node.json`` says.
        request: What ``request_of`` made of the change.
        token: An administrator's.
        certificate: The file with the certificate that the node shows; the system's authorities decide if left out.

    Returns:
        The node's answer, with the ``seq`` from which on the change counts.

    Raises:
        NodeUnreachable: There was no answer; whether the change was made is not known.
        NodeRefused: The node said no.
        TokenInvalid: The token cannot be sent.
    """
    parts = urlsplit(url)
    connection = _connection(parts.scheme, parts.hostname or "", parts.port, is_pinned=certificate is not None)
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json", "Accept": "application/json"}
    try:
        if certificate is not None and isinstance(connection, http.client.HTTPSConnection):
            connection.connect()
            _check_certificate(connection, Path(certificate))
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


def _connection(scheme: str, host: str, port: int | None, *, is_pinned: bool) -> http.client.HTTPConnection:
    if scheme != "https":
        return http.client.HTTPConnection(host, port, timeout=_TIMEOUT_S)
    context = ssl.create_default_context()
    if is_pinned:
        # Which certificate it is is looked at before anything is sent; who signed it for which name does not matter then.
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return http.client.HTTPSConnection(host, port, timeout=_TIMEOUT_S, context=context)


def _check_certificate(connection: http.client.HTTPSConnection, path: Path) -> None:
    """
    Make sure that the other end shows the first certificate of a file.

    Raises:
        OSError: It shows another one, or the file cannot be read.
    """
    found = _CERTIFICATE.search(path.read_text(encoding="ascii", errors="replace"))
    shown = connection.sock.getpeercert(binary_form=True) if isinstance(connection.sock, ssl.SSLSocket) else None
    if found is None or shown is None or ssl.PEM_cert_to_DER_cert(found[0]) != shown:
        raise ConnectionError(f"it shows another certificate than {path}; was that renewed without SIGHUP?")
