"""
An event's content: how a draft is made of it, checked, compared and shown.

Two events say the same if their normalised partitions and the canonical JSON (RFC 8785) of their ``event`` are equal.
The check here finds what no server would ever take; a server may ask for more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec
import rfc8785

from tidings.core.errors import InvalidName
from tidings.core.names import check_event_id, check_partitions
from tidings.sync.canonical import is_same_json
from tidings.wire.sync_frames import CommittedEvent, ItemError, SubmitItem

from .errors import InvalidDraft
from .values import LocalEvent

__all__ = ["Validator", "local_event", "make_item", "same_content"]

Validator = Callable[[LocalEvent], Sequence[ItemError] | None]
"""A user's own check of a draft: what is wrong with it, or nothing."""


class _Body(msgspec.Struct):
    type: str
    payload: dict[str, Any]


_BODY: Final = msgspec.json.Decoder(_Body)


def make_item(
    id: str, partitions: Iterable[str], type: str, payload: Mapping[str, Any], *, bytes_max: int
) -> SubmitItem:
    """
    A draft ready to be stored, with its partitions normalised.

    Raises:
        InvalidDraft: It could never be committed.
    """
    errors: list[ItemError] = []
    names: tuple[str, ...] = ()
    try:
        check_event_id(id)
    except InvalidName as error:
        errors.append(ItemError(field="id", message=error.problem))
    try:
        names = check_partitions(partitions)
        if not names:
            errors.append(ItemError(field="partitions", message="must name at least one partition"))
    except InvalidName as error:
        errors.append(ItemError(field="partitions", message=error.problem))
    if not isinstance(type, str) or not type:
        errors.append(ItemError(field="event.type", message="must be a non-empty string"))
    elif type == "init":
        errors.append(ItemError(field="event.type", message="init never crosses the wire"))
    if not isinstance(payload, Mapping):
        errors.append(ItemError(field="event.payload", message="must be a mapping"))
    encoded = b""
    if not errors:
        try:
            # What has no canonical form (NaN, integers beyond 2^53, lone surrogates) could not be compared on a retry.
            body: Any = {"type": type, "payload": dict(payload)}
            rfc8785.dumps(body)
            # Not the canonical form itself: it would turn a 1.0 into a 1.
            encoded = msgspec.json.encode(body)
        except (rfc8785.CanonicalizationError, RecursionError, TypeError, ValueError) as error:
            errors.append(ItemError(field="event.payload", message=str(error)[:200]))
    if len(encoded) > bytes_max:
        errors.append(
            ItemError(field="event.payload", message=f"is {len(encoded)} bytes long; at most {bytes_max} are sent")
        )
    if errors:
        raise InvalidDraft(errors)
    return SubmitItem(id=id, partitions=list(names), event=msgspec.Raw(encoded))


def local_event(event: CommittedEvent | SubmitItem, client_id: str) -> LocalEvent:
    """The event as users see it."""
    body = _body(event.event)
    committed_id, at_ms = None, None
    if isinstance(event, CommittedEvent):
        committed_id, at_ms = event.committed_id, event.status_updated_at
    return LocalEvent(
        id=event.id,
        type=body.type,
        payload=body.payload,
        partitions=tuple(event.partitions),
        client_id=client_id,
        committed_id=committed_id,
        committed_at_ms=at_ms,
    )


def _body(raw: msgspec.Raw) -> _Body:
    try:
        return _BODY.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        # A server newer than this client, or a careless one, may commit events of another shape. They are kept and shown as
        # text, not understood; refusing them would stop this client for good.
        return _Body("unknown", {"text": bytes(raw).decode(errors="replace")})


def same_content(one: SubmitItem | CommittedEvent, other: SubmitItem | CommittedEvent) -> bool:
    """Whether two events with one id say the same."""
    if check_partitions(one.partitions) != check_partitions(other.partitions):
        return False
    if bytes(one.event) == bytes(other.event):
        return True
    try:
        return is_same_json(msgspec.json.decode(one.event), msgspec.json.decode(other.event))
    except (msgspec.DecodeError, RecursionError):
        return False
