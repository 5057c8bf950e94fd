"""Dialect C: the wire of the JavaScript client ``insieme`` 1.3.0, in camel case, with partitions and one event a submit."""

from __future__ import annotations

from typing import Any, Final

import msgspec
import orjson
from msgspec import Raw

from tidings.log.record import Record
from tidings.wire.sync_errors import MalformedFrame, UnknownMessageType
from tidings.wire.sync_project_frames import (
    CamelConnect,
    CamelSubmit,
    LegacyItem,
    LegacySync,
    decode_camel,
    decode_camel_envelope,
    encode_camel,
)

from .. import canonical
from ..requests import Answer, ConnectRequest, Item, ItemError, PageAnswer, Request
from ..requests import SubmitRequest as Submit
from ..requests import SyncRequest as Sync
from .dialect import Hello, check_id, is_deep, millis_of, stored_partitions
from .projects import attribute_camel, broken_item, camel_result

__all__ = ["LEGACY", "TOPIC", "LegacyDialect"]

TOPIC: Final = "sync.legacy"

_CONNECT: Final = msgspec.json.Decoder(CamelConnect)
_SUBMIT: Final = msgspec.json.Decoder(CamelSubmit)
_SYNC: Final = msgspec.json.Decoder(LegacySync)
_ITEM: Final = msgspec.json.Decoder(LegacyItem)
_FIELDS: Final = ("id", "partitions", "type", "payload", "meta")


class LegacyDialect:
    """See ``Dialect``."""

    name = "c"
    topic = TOPIC
    is_by_project = False
    needs_heartbeats = False
    is_one_per_client = False
    stops_at_rejection = True
    holds_while_paging = True
    hangs_on_errors = True
    echoes_future_cursor = True
    has_page_min = False

    def decode(self, message: bytes, depth_max: int) -> Request:
        envelope = decode_camel_envelope(message)
        msg_id = envelope.msg_id
        match envelope.type:
            case "submit_events":
                batch = decode_camel(envelope.payload, _SUBMIT, envelope.type)
                if len(batch.events) > 1:
                    raise MalformedFrame("Expected one event", "submit_events", "payload.events")
                return Submit(msg_id=msg_id, items=[_item(raw, depth_max) for raw in batch.events])
            case "sync":
                sync = decode_camel(envelope.payload, _SYNC, envelope.type)
                names = tuple(sync.partitions)
                return Sync(
                    msg_id=msg_id,
                    partitions=names,
                    subscriptions=names,
                    since=sync.since_committed_id,
                    limit=sync.limit,
                )
            case "connect":
                connect = decode_camel(envelope.payload, _CONNECT, envelope.type)
                return ConnectRequest(msg_id=msg_id, token=connect.token, client_id=connect.client_id)
            case other:
                raise UnknownMessageType(other)

    def connected(self, msg_id: str | None, hello: Hello, now_ms: int) -> bytes:
        payload = {"clientId": hello.client_id, "globalLastCommittedId": hello.watermark}
        return encode_camel("connected", orjson.dumps(payload), msg_id, now_ms)

    def result(self, msg_id: str | None, answers: list[Answer], now_ms: int) -> bytes:
        return camel_result(msg_id, answers, now_ms, "created")

    def page(self, msg_id: str | None, page: PageAnswer, now_ms: int) -> bytes:
        events = b",".join([event for record in page.records if (event := _event(record)) is not None])
        payload = b'{"partitions":%b,"events":[%b],"nextSinceCommittedId":%d,"hasMore":%b,"syncToCommittedId":%d}' % (
            orjson.dumps(page.partitions),
            events,
            page.next_since,
            b"true" if page.has_more else b"false",
            page.sync_to,
        )
        return encode_camel("sync_response", payload, msg_id, now_ms)

    def error(self, msg_id: str | None, code: str, message: str, details: dict[str, Any] | None, now_ms: int) -> bytes:
        if code == "protocol_version_unsupported":
            code = "protocolVersion_unsupported"
        payload = {"code": code, "message": message, "details": details or {}}
        return encode_camel("error", orjson.dumps(payload), msg_id, now_ms)

    def heartbeat_ack(self, msg_id: str | None, now_ms: int) -> bytes:
        raise AssertionError("this dialect has no heartbeat to answer")

    def version_changed(self, msg_id: str | None, old: int, new: int, now_ms: int) -> bytes | None:
        return None

    def broadcast(self, record: Record, now_ms: int) -> bytes | None:
        event = _event(record)
        return None if event is None else encode_camel("event_broadcast", event, f"e{record.seq}", now_ms)

    def is_same(self, item: Item, record: Record) -> bool:
        if record.meta.topic != TOPIC or record.meta.partitions != item.partitions or record.meta.sealed is not None:
            return False
        return canonical.is_same_json(_content(item.stored), _content(record.payload))

    def attribute(self, item: Item, client_id: str) -> None:
        attribute_camel(item, client_id)


LEGACY: Final = LegacyDialect()


def _item(raw: Raw, depth_max: int) -> Item:
    try:
        item = _ITEM.decode(raw)
        body = canonical.parse(bytes(raw))  # stricter than the decoder about what it passes over
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        return broken_item(raw, str(error))
    errors = [] if (wrong := check_id(item.id)) is None else [wrong]
    partitions = stored_partitions(item.partitions)
    if isinstance(partitions, str):
        errors.append(ItemError(field="partitions", message=partitions))
        partitions = ()
    elif len(partitions) != len(item.partitions):
        errors.append(ItemError(field="partitions", message="names a partition twice"))
    if is_deep(raw, body, depth_max):
        errors.append(ItemError(field="payload", message=f"nests deeper than {depth_max} levels"))
    known = {name: body[name] for name in _FIELDS if name in body}
    return Item(
        id=item.id, partitions=partitions, type=item.type, body=known, content=known, stored=known, errors=tuple(errors)
    )


def _event(record: Record) -> bytes | None:
    payload = bytes(record.payload_json)
    if record.meta.sealed is not None or not payload.startswith(b'{"id":'):
        return None
    return b'{"committedId":%d,"created":%d,%b' % (record.seq, millis_of(record), payload[1:])


def _content(stored: dict[str, Any]) -> dict[str, Any]:
    """What equality compares beside the partitions: the whole of ``meta`` too."""
    return {name: stored.get(name) for name in ("type", "payload", "meta")}
