"""
Changes of access as records of the topic ``access``: what may be asked for, the events that say so, and the node that is asked.

One vocabulary for every way in. The command line makes a ``Change`` and either appends ``event_of`` it itself or, when a node
holds the workspace, sends ``request_of`` it there (``send``); the node reads that with ``change_from_request`` and appends the same
event. The book (``book.py``) reads it back with ``change_from_record``.

A payload with a key that this version does not know is refused: the key might narrow a grant, and ignoring it would widen it.

``send`` uses nothing but the standard library. A node's certificate is made out to the name that others know it by. Here the node
is reached by its address on this machine, so what is compared is the certificate itself, with the file that the workspace names;
the token is sent to no other.
"""

from __future__ import annotations

import http.client
import re
import ssl
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple
from urllib.parse import urlsplit

import msgspec

from tidings.core.errors import InvalidEvent, TidingsError
from tidings.core.events import Event, EventMeta
from tidings.core.names import check_group, check_topic
from tidings.core.validation import UNREADABLE, explain
from tidings.log.record import Record

from .errors import InvalidChange, NodeRefused, NodeUnreachable, TokenInvalid
from .resources import NODE_NAME, Action, ResourceKind, ResourcePattern, checked_text, pattern_from_text

ACCESS_TOPIC: Final = "access"
SYSTEM_SPACE: Final = "system"
REASON_BYTES_MAX: Final = 1_000

Text = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class _Change(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, tag_field="type"
):
    reason: str | None = None
    """Why, for whoever reads the log later."""


class Grant(_Change, frozen=True, tag="access.grant"):
    """From here on the subject may do this, whatever was revoked before."""

    subject: Text
    action: Action
    resource: ResourcePattern


class Revoke(_Change, frozen=True, tag="access.revoke"):
    """From here on the subject may not do this, whatever claims, roles and policies say, until it is granted again."""

    subject: Text
    action: Action
    resource: ResourcePattern


class PolicyPut(_Change, frozen=True, tag="access.policy_put"):
    """From here on this Cedar text is in force under its name, in the place of an earlier one."""

    policy_id: Text
    text: str


class PolicyRemoved(_Change, frozen=True, tag="access.policy_removed"):
    """From here on the policy is no longer in force."""

    policy_id: Text


class TokenRevocation(_Change, frozen=True, tag="access.token_revoked"):
    """From here on the token with this id (``jti``) is worth nothing."""

    token_id: Text


class SubjectRevoked(_Change, frozen=True, tag="access.subject_revoked"):
    """From here on the subject may do nothing at all, with any token."""

    subject: Text


class SubjectRestored(_Change, frozen=True, tag="access.subject_restored"):
    """From here on a revoked subject has again what tokens, grants and policies give it."""

    subject: Text


class Dismissed(_Change, frozen=True, tag="access.dismissed"):
    """Somebody has looked at the access record at ``seq``, which cannot be read, and it means nothing."""

    seq: Annotated[int, msgspec.Meta(ge=1)]


Change = Grant | Revoke | PolicyPut | PolicyRemoved | TokenRevocation | SubjectRevoked | SubjectRestored | Dismissed
Collection = Literal["grants", "revocations", "policies"]

_KINDS: Final[tuple[type[Change], ...]] = (
    *(Grant, Revoke, PolicyPut, PolicyRemoved),
    *(TokenRevocation, SubjectRevoked, SubjectRestored, Dismissed),
)
_DECODERS: Final[dict[str, msgspec.json.Decoder[Any]]] = {
    str(kind.__struct_config__.tag): msgspec.json.Decoder(kind) for kind in _KINDS
}
_ANY_CHANGE: Final[Any] = Change
# What a collection takes; the first kind is meant where a body does not say.
_COLLECTIONS: Final[dict[Collection, tuple[type[Change], ...]]] = {
    "grants": (Grant, SubjectRestored, Dismissed),
    "revocations": (Revoke, TokenRevocation, SubjectRevoked),
    "policies": (PolicyPut, PolicyRemoved),
}


class Request(NamedTuple):
    """What to send to a node."""

    method: str
    path: str
    body: bytes


def type_of(change: Change) -> str:
    """The type that the change has as an event."""
    return str(change.__struct_config__.tag)


def checked_change(change: Change) -> Change:
    """
    The change with its names in their normal form. Policies' texts are checked by ``policies.check_policy``.

    Raises:
        InvalidChange: A part of it makes no sense.
    """
    given: dict[str, Any] = {}
    for field in ("subject", "policy_id", "token_id"):
        value = getattr(change, field, None)
        if value is not None:
            given[field] = checked_text(field, value)
    if change.reason is not None:
        given["reason"] = checked_text("reason", change.reason, bytes_max=REASON_BYTES_MAX, may_be_empty=True)
    if isinstance(change, Grant | Revoke):
        given["resource"] = _checked_pattern(change.resource)
    return msgspec.structs.replace(change, **given)


def _checked_pattern(pattern: ResourcePattern) -> ResourcePattern:
    is_prefix = pattern.match == "prefix"
    name = checked_text("resource.name", pattern.name, may_be_empty=is_prefix)
    if pattern.kind == ResourceKind.NODE and (is_prefix or name != NODE_NAME):
        raise InvalidChange("resource.name", f"there is one node, named {NODE_NAME!r}")
    if pattern.kind == ResourceKind.GROUP and not is_prefix:
        topic_name, _, group = name.partition("/")
        try:
            check_topic(topic_name)
            check_group(group)
        except InvalidEvent as error:
            raise InvalidChange("resource.name", error.problem, "write a group as group:TOPIC/GROUP") from error
    if pattern.kind == ResourceKind.TOPIC and not is_prefix:
        try:
            check_topic(name)
        except InvalidEvent as error:
            raise InvalidChange("resource.name", error.problem, error.hint) from error
    return ResourcePattern(pattern.kind, name, pattern.match)


def event_of(change: Change, *, actor: str, event_id: str | None = None) -> Event:
    """
    The event that puts a change into force once it is committed.

    Args:
        change: What is to change.
        actor: Who has it done.
        event_id: For safe retries; made by the log if left out.

    Raises:
        InvalidChange: A part of it makes no sense.
    """
    change = checked_change(change)
    meta = EventMeta(ACCESS_TOPIC, type_of(change), SYSTEM_SPACE, event_id, actor=actor)
    payload: dict[str, Any] = msgspec.to_builtins(change)
    return Event(meta, payload)


def request_of(change: Change) -> Request:
    """What to send to a node to have it make this change."""
    change = checked_change(change)
    collection = next(name for name, kinds in _COLLECTIONS.items() if isinstance(change, kinds))
    return Request("POST", f"/v1/access/{collection}", msgspec.json.encode(change))


def change_from_request(collection: Collection, body: bytes) -> Change:
    """
    The change that a request to ``/v1/access/<collection>`` asks for.

    The body is a change as JSON. Its ``type`` may be left out for a grant, a revocation of one right, and a policy; a resource
    may be text (``partition:home-*``).

    Raises:
        InvalidChange: The body is not such a change.
    """
    kinds = _COLLECTIONS[collection]
    try:
        given = msgspec.json.decode(body)
    except UNREADABLE as error:
        raise InvalidChange("body", f"is not JSON ({error})") from error
    if not isinstance(given, dict):
        raise InvalidChange("body", "must be a JSON object")
    given.setdefault("type", kinds[0].__struct_config__.tag)
    if isinstance(given.get("resource"), str):
        pattern = pattern_from_text(given["resource"])
        given["resource"] = msgspec.to_builtins(pattern)
    try:
        change: Change = msgspec.convert(given, _ANY_CHANGE)
    except msgspec.ValidationError as error:
        raise _invalid(error) from error
    if not isinstance(change, kinds):
        raise InvalidChange("type", f"{type_of(change)} is not for {collection}")
    return checked_change(change)


def change_from_record(record: Record) -> Change:
    """
    The change that a record of the topic ``access`` states.

    Raises:
        InvalidChange: It states none that this version can read.
    """
    decoder = _DECODERS.get(record.meta.type)
    if decoder is None:
        raise InvalidChange("type", f"{record.meta.type!r} is not known")
    if record.meta.sealed is not None:
        raise InvalidChange("payload", "is encrypted")
    try:
        change: Change = decoder.decode(record.payload_json)
    except msgspec.ValidationError as error:
        raise _invalid(error) from error
    except (*UNREADABLE, TidingsError) as error:
        raise InvalidChange("payload", str(error)) from error
    return checked_change(change)


def _invalid(error: msgspec.ValidationError) -> InvalidChange:
    problem, path = explain(error, "body")
    return InvalidChange(path, problem[:200])


_TIMEOUT_S: Final = 30.0
_ANSWER_BYTES_MAX: Final = 64 << 20
_CERTIFICATE: Final = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)


def send(url: str, request: Request, token: str | None, certificate: str | None = None, kind: Any = dict) -> Any:
    """
    Ask a node for something; waits until it has answered.

    Args:
        url: Where the node is, as its ``node.json`` says.
        request: What to ask for, as ``request_of`` makes it of a change.
        token: Whose right it is; nobody's in particular if left out.
        certificate: The file with the certificate that the node shows; the system's authorities decide if left out.
        kind: What to read its answer as.

    Returns:
        The node's answer; to a change, with the ``seq`` from which on that counts.

    Raises:
        NodeUnreachable: There was no whole answer; whether a change was made is not known.
        NodeRefused: The node said no.
        TokenInvalid: The token cannot be sent.
    """
    parts = urlsplit(url)
    connection = _connection(parts.scheme, parts.hostname or "", parts.port, is_pinned=certificate is not None)
    headers = {"Content-Type": "application/json", "Accept": "application/json"}
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    try:
        if certificate is not None and isinstance(connection, http.client.HTTPSConnection):
            connection.connect()
            _check_certificate(connection, Path(certificate))
        connection.request(request.method, request.path, request.body, headers)
        response = connection.getresponse()
        data = response.read(_ANSWER_BYTES_MAX + 1)
        if len(data) > _ANSWER_BYTES_MAX:
            raise ConnectionError(f"its answer is longer than {_ANSWER_BYTES_MAX} bytes")
    except (OSError, http.client.HTTPException) as error:
        raise NodeUnreachable(url, str(error) or type(error).__name__) from error
    except ValueError as error:  # no header can hold it
        raise TokenInvalid("it holds characters that no token has") from error
    finally:
        connection.close()
    if not 200 <= response.status < 300:
        try:
            answer = msgspec.json.decode(data)
        except msgspec.DecodeError:
            answer = None
        found = answer if isinstance(answer, dict) else {}
        problem = str(found.get("detail") or found.get("title") or response.reason)
        hint, code = (str(found[name]) if found.get(name) else None for name in ("hint", "code"))
        raise NodeRefused(response.status, problem, hint, code, bool(found.get("retryable")))
    try:
        return msgspec.json.decode(data or b"{}", type=kind)
    except msgspec.DecodeError as error:
        raise NodeUnreachable(url, f"its answer cannot be read: {error}") from error


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
