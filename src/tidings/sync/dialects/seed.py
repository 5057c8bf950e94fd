"""Dialect A: the protocol's own, in snake case, with partitions and subscriptions."""

from __future__ import annotations

from typing import Any, Final

import msgspec
import orjson
from msgspec import UNSET, Raw

from tidings.core.validation import RepeatedKey, parse_strict
from tidings.log.record import Record
from tidings.wire import sync_frames as frames
from tidings.wire.sync_frames import ItemError, MalformedFrame

from ..canonical import is_same_json
from ..requests import (
    Answer,
    CommittedAnswer,
    ConnectRequest,
    DisconnectRequest,
    HeartbeatRequest,
    NotProcessed,
    PageAnswer,
    Request,
    Scope,
    SubmitRequest,
    SubmittedItem,
    SyncRequest,
)
from ..settings import SyncSettings
from .dialect import (
    ConnectedAnswer,
    Dialect,
    as_one_line,
    check_id,
    is_deep,
    millis_of,
    names_json,
    stored_partitions,
    text_json,
)

TOPIC: Final = "sync"


class _Stored(msgspec.Struct, frozen=True, gc=False):
    """A record's payload."""

    event: Raw


_STORED: Final = msgspec.json.Decoder(_Stored)


class SeedDialect(Dialect):
    """See ``Dialect``."""

    name = "a"
    topic = TOPIC

    def decode(self, message: bytes, settings: SyncSettings) -> Request:
        envelope, payload = frames.decode_from_client(message)
        msg_id = envelope.msg_id
        match payload:
            case frames.SubmitEvents():
                if payload.partition is not UNSET:
                    raise _singular("submit_events", "payload.partition")
                count, depth_max = len(payload.events), settings.event_depth_max
                wanted = payload.events if count <= settings.batch_items_max else []
                items = [_item(item, depth_max, index) for index, item in enumerate(wanted)]
                return SubmitRequest(msg_id=msg_id, items=items, count=count, client_id=payload.client_id)
            case frames.Sync():
                if payload.partition is not UNSET:
                    raise _singular("sync", "payload.partition")
                subscriptions = payload.subscription_partitions
                return SyncRequest(
                    msg_id=msg_id,
                    partitions=tuple(payload.partitions),
                    subscriptions=None if subscriptions is UNSET else tuple(subscriptions),
                    since=payload.since_committed_id,
                    limit=None if payload.limit is UNSET else payload.limit,
                    wants_snapshot=payload.want_snapshot,
                    client_id=payload.client_id,
                )
            case frames.Connect():
                profiles = payload.supported_profiles
                return ConnectRequest(
                    msg_id=msg_id,
                    token=payload.token,
                    client_id=payload.client_id,
                    supported_profiles=("compatibility",) if profiles is None else tuple(profiles),
                    required_profile=payload.required_profile,
                    required_tree_policy=payload.required_tree_policy,
                )
            case frames.Heartbeat():
                return HeartbeatRequest(msg_id=msg_id, client_id=payload.client_id)
            case frames.Disconnect():
                return DisconnectRequest(msg_id=msg_id, client_id=payload.client_id)

    def connected(self, msg_id: str | None, hello: ConnectedAnswer, now_ms: int) -> bytes:
        is_tree = hello.profile == "compatibility"
        return _message(
            msg_id,
            now_ms,
            frames.Connected(
                client_id=hello.client_id,
                server_time=now_ms,
                server_last_committed_id=hello.watermark,
                capabilities=frames.Capabilities(
                    profile=hello.profile,
                    accepted_event_types=list(hello.accepted_types),
                    tree_policy="strict" if is_tree else None,
                ),
                model_version=UNSET if hello.model_version is None else hello.model_version,
                limits=frames.Limits(**hello.limits),
            ),
        )

    def result(self, msg_id: str | None, answers: list[Answer], now_ms: int) -> bytes:
        return _message(msg_id, now_ms, frames.SubmitResult(results=[_result(answer) for answer in answers]))

    def page(self, msg_id: str | None, page: PageAnswer, now_ms: int) -> bytes:
        events = b",".join([event for record in page.records if (event := committed_event(record)) is not None])
        # Everything but the events by the struct, whose empty list is then filled: the events are bytes already.
        snapshot: frames.StateSnapshot | msgspec.UnsetType = UNSET
        if page.snapshot is not None:
            seq, states = page.snapshot
            snapshot = frames.StateSnapshot(
                committed_id=seq, state={name: Raw(state) for name, state in states.items()}
            )
        head = frames.SyncResponse(
            partitions=list(page.partitions),
            effective_subscriptions=list(page.subscriptions),
            events=[],
            next_since_committed_id=page.next_since,
            sync_to_committed_id=page.sync_to,
            has_more=page.has_more,
            model_version=UNSET if page.model_version is None else page.model_version,
            pruned_through_committed_id=UNSET if page.pruned_through is None else page.pruned_through,
            snapshot=snapshot,
        )
        payload = msgspec.json.encode(head)
        place = payload.index(_NO_EVENTS) + len(_NO_EVENTS) - 1
        return _FRAME % (b"sync_response", _text(msg_id), now_ms, payload[:place] + events + payload[place:])

    def error(self, msg_id: str | None, code: str, message: str, details: dict[str, Any] | None, now_ms: int) -> bytes:
        frame = frames.ErrorFrame(code=code, message=message, details=UNSET if details is None else details)
        return _message(msg_id, now_ms, frame)

    def heartbeat_ack(self, msg_id: str | None, now_ms: int) -> bytes:
        return _message(msg_id, now_ms, frames.HeartbeatAck())

    def version_changed(self, msg_id: str | None, old: int, new: int, now_ms: int) -> bytes | None:
        return _message(msg_id, now_ms, frames.VersionChanged(old_model_version=old, new_model_version=new))

    def broadcast(self, record: Record, now_ms: int) -> bytes | None:
        event = committed_event(record)
        if event is None:
            return None
        return _FRAME % (b"event_broadcast", b'"e%d"' % record.seq, now_ms, event)

    def is_same(self, item: SubmittedItem, record: Record) -> bool:
        if record.meta.topic != TOPIC or record.meta.partitions != item.partitions:
            return False
        stored = event_of(record)
        return stored is not None and is_same_json(parse_strict(bytes(stored)), item.content)


SEED: Final = SeedDialect()

_FRAME: Final = b'{"type":"%b","msg_id":%b,"timestamp":%d,"payload":%b,"protocol_version":"1.0"}'
# Cannot be part of a name before it: a quotation mark inside a JSON string is escaped.
_NO_EVENTS: Final = b'"events":[]'


def event_of(record: Record) -> Raw | None:
    """The event's JSON in a record; ``None`` for a record that no sync client wrote, or that is sealed."""
    if record.meta.sealed is not None:
        return None
    try:
        return _STORED.decode(record.payload_json).event
    except msgspec.DecodeError:
        return None


def committed_event(record: Record) -> bytes | None:
    """A record as pages and broadcasts carry it."""
    event = event_of(record)
    if event is None:
        return None
    meta = record.meta
    return b'{"id":%b,"client_id":%b,"partitions":%b,"committed_id":%d,"event":%b,"status_updated_at":%d}' % (
        orjson.dumps(meta.event_id),
        text_json(meta.actor if isinstance(meta.actor, str) else ""),
        names_json(meta.partitions),
        record.seq,
        bytes(event),
        millis_of(record),
    )


def _item(item: frames.SubmitItem, depth_max: int, index: int) -> SubmittedItem:
    """Wrong structure fails the request; a broken constraint is the item's own."""
    if item.partition is not UNSET:
        raise _singular("submit_events", f"payload.events[{index}].partition")
    text = bytes(item.event)
    errors: list[ItemError] = []
    try:
        event = parse_strict(text)
    except RepeatedKey as error:
        errors.append(ItemError(field="event", message=error.problem))
        event = orjson.loads(text)
    except ValueError as error:
        raise MalformedFrame(str(error), "submit_events", f"payload.events[{index}].event") from error
    if type(event) is not dict:
        raise MalformedFrame("Expected `object`", "submit_events", f"payload.events[{index}].event")
    kind, body = event.get("type"), event.get("payload")
    if type(kind) is not str or not kind:
        raise MalformedFrame("Expected a non-empty `str`", "submit_events", f"payload.events[{index}].event.type")
    if type(body) is not dict:
        raise MalformedFrame("Expected `object`", "submit_events", f"payload.events[{index}].event.payload")
    if (wrong := check_id(item.id)) is not None:
        errors.append(wrong)
    partitions = stored_partitions(item.partitions)
    if isinstance(partitions, str):
        errors.append(ItemError(field="partitions", message=partitions))
        partitions = ()
    if is_deep(text, event, depth_max):
        errors.append(ItemError(field="event", message=f"nests deeper than {depth_max} levels"))
    return SubmittedItem(
        id=item.id,
        partitions=partitions,
        scope=Scope(None, partitions),
        type=kind,
        body=body,
        content=event,
        # As it came, byte for byte: the encoder copies it into the line.
        stored={"event": orjson.Fragment(as_one_line(text))},
        errors=tuple(errors),
        client_id=item.client_id,
    )


def _result(answer: Answer) -> frames.ItemResult:
    if isinstance(answer, CommittedAnswer):
        return frames.ItemResult(
            id=answer.id, status="committed", committed_id=answer.seq, status_updated_at=answer.at_ms
        )
    assert not isinstance(answer, NotProcessed), "dialect A goes on after a rejection"
    return frames.ItemResult(
        id=answer.id,
        status="rejected",
        reason=answer.reason,
        errors=list(answer.errors),
        status_updated_at=answer.at_ms,
    )


def _message(msg_id: str | None, now_ms: int, payload: frames.ServerPayload) -> bytes:
    return frames.encode(payload, msg_id=msg_id or "", timestamp=now_ms)


def _text(msg_id: str | None) -> bytes:
    return orjson.dumps(msg_id or "")


def _singular(type: str, field: str) -> MalformedFrame:
    return MalformedFrame("`partition` is not a field of this protocol; use `partitions`", type, field)
