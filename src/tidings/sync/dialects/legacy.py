"""Dialect C: the wire of the JavaScript client ``insieme`` 1.3.0, with partitions and one event a submit."""

from __future__ import annotations

from typing import Any, Final

import msgspec
import orjson
from msgspec import Raw

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

from ..requests import ConnectRequest, Item, ItemError, PageAnswer, Request, Scope, SubmitRequest, SyncRequest
from ..settings import SyncSettings
from .camel import CamelDialect, parsed_item
from .dialect import Hello, check_id, is_deep, stored_partitions

__all__ = ["LEGACY", "TOPIC", "LegacyDialect"]

TOPIC: Final = "sync.legacy"

_CONNECT: Final = msgspec.json.Decoder(CamelConnect)
_SUBMIT: Final = msgspec.json.Decoder(CamelSubmit)
_SYNC: Final = msgspec.json.Decoder(LegacySync)
_ITEM: Final = msgspec.json.Decoder(LegacyItem)


class LegacyDialect(CamelDialect):
    """See ``Dialect``."""

    name = "c"
    topic = TOPIC
    time_key = "created"
    fields = ("id", "partitions", "projectId", "userId", "type", "payload", "meta")
    is_by_project = False

    def decode(self, message: bytes, settings: SyncSettings) -> Request:
        """A client's message."""
        envelope = decode_camel_envelope(message)
        msg_id = envelope.msg_id
        match envelope.type:
            case "submit_events":
                batch = decode_camel(envelope.payload, _SUBMIT, envelope.type)
                if len(batch.events) > 1:
                    raise MalformedFrame("Expected one event", "submit_events", "payload.events")
                items = [self._item(raw, settings.event_depth_max) for raw in batch.events]
                return SubmitRequest(msg_id=msg_id, items=items, count=len(items))
            case "sync":
                sync = decode_camel(envelope.payload, _SYNC, envelope.type)
                names = tuple(sync.partitions)
                return SyncRequest(
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

    def _item(self, raw: Raw, depth_max: int) -> Item:
        found = parsed_item(raw, _ITEM)
        if isinstance(found, Item):
            return found
        item, body = found
        errors = [] if (wrong := check_id(item.id)) is None else [wrong]
        partitions = stored_partitions(item.partitions)
        if isinstance(partitions, str):
            errors.append(ItemError(field="partitions", message=partitions))
            partitions = ()
        elif len(partitions) != len(item.partitions):
            errors.append(ItemError(field="partitions", message="names a partition twice"))
        if is_deep(raw, body, depth_max):
            errors.append(ItemError(field="payload", message=f"nests deeper than {depth_max} levels"))
        known = self.known_fields(body) | {"partitions": list(partitions)}
        return Item(
            id=item.id,
            partitions=partitions,
            scope=Scope(None, partitions),
            type=item.type,
            body=known,
            content=known,
            stored=known,
            errors=tuple(errors),
            user_id=known.get("userId"),
        )

    def connected(self, msg_id: str | None, hello: Hello, now_ms: int) -> bytes:
        """The answer to ``connect``."""
        payload = {"clientId": hello.client_id, "globalLastCommittedId": hello.watermark}
        return encode_camel("connected", orjson.dumps(payload), msg_id, now_ms)

    def page(self, msg_id: str | None, page: PageAnswer, now_ms: int) -> bytes:
        """The answer to ``sync``."""
        return self.page_of(b'"partitions":' + orjson.dumps(page.partitions), msg_id, page, now_ms)

    def scope_of(self, partitions: tuple[str, ...], payload_json: bytes) -> Scope:
        """Its partitions."""
        return Scope(None, partitions)

    def content_of(self, stored: dict[str, Any]) -> dict[str, Any]:
        """The whole of ``meta`` too."""
        return {name: stored.get(name) for name in ("projectId", "userId", "type", "payload", "meta")}


LEGACY: Final = LegacyDialect()
