"""
Dialect B: the wire of the JavaScript client ``insieme`` 2.1.0, one project a connection.

That client compares what comes back with what it sent, so partition, type, schema version, payload and the client's own time
are stored as submitted.
"""

from __future__ import annotations

import unicodedata
from typing import Any, Final

import msgspec
import orjson
from msgspec import Raw

from tidings.core.errors import InvalidName
from tidings.core.names import check_partitions
from tidings.wire.sync_errors import MalformedFrame, UnknownMessageType
from tidings.wire.sync_project_frames import (
    CamelConnect,
    CamelSubmit,
    ProjectItem,
    ProjectSync,
    decode_camel,
    decode_camel_envelope,
    encode_camel,
)

from ..requests import ConnectRequest, Item, ItemError, PageAnswer, Request, Scope, SubmitRequest, SyncRequest
from ..settings import SyncSettings
from .camel import CamelDialect, parsed_item
from .dialect import Hello, check_id, is_deep, stored_partitions

__all__ = ["PROJECTS", "TOPIC", "ProjectDialect", "project_key"]

TOPIC: Final = "sync.projects"
_BATCHES_MAX: Final = 10

_CONNECT: Final = msgspec.json.Decoder(CamelConnect)
_SUBMIT: Final = msgspec.json.Decoder(CamelSubmit)
_SYNC: Final = msgspec.json.Decoder(ProjectSync)
_ITEM: Final = msgspec.json.Decoder(ProjectItem)


class _Place(msgspec.Struct, frozen=True, gc=False):
    partition: str


_PLACE: Final = msgspec.json.Decoder(_Place)


class ProjectDialect(CamelDialect):
    """See ``Dialect``."""

    name = "b"
    topic = TOPIC
    time_key = "serverTs"
    fields = ("id", "partition", "projectId", "userId", "type", "schemaVersion", "payload", "meta")
    is_by_project = True

    def decode(self, message: bytes, settings: SyncSettings) -> Request:
        """A client's message."""
        envelope = decode_camel_envelope(message)
        msg_id = envelope.msg_id
        match envelope.type:
            case "submit_events":
                batch = decode_camel(envelope.payload, _SUBMIT, envelope.type)
                # The dialect advertises no limit, and its client can be told to send more than the usual 50.
                if len(batch.events) > _BATCHES_MAX * settings.batch_items_max:
                    raise MalformedFrame("The batch is too long", "submit_events", "payload.events")
                items = [self._item(raw, settings.event_depth_max) for raw in batch.events]
                return SubmitRequest(msg_id=msg_id, items=items, count=len(items))
            case "sync":
                sync = decode_camel(envelope.payload, _SYNC, envelope.type)
                wanted = () if sync.project_id is None else (sync.project_id,)
                return SyncRequest(msg_id=msg_id, partitions=wanted, since=sync.since_committed_id, limit=sync.limit)
            case "connect":
                connect = decode_camel(envelope.payload, _CONNECT, envelope.type)
                if connect.project_id is None:
                    raise MalformedFrame("Object missing required field `projectId`", "connect", "payload")
                return ConnectRequest(
                    msg_id=msg_id, token=connect.token, client_id=connect.client_id, project_id=connect.project_id
                )
            case other:
                raise UnknownMessageType(other)

    def _item(self, raw: Raw, depth_max: int) -> Item:
        found = parsed_item(raw, _ITEM)
        if isinstance(found, Item):
            return found
        item, body = found
        errors = [] if (wrong := check_id(item.id)) is None else [wrong]
        within = stored_partitions([item.partition])
        if isinstance(within, str):
            errors.append(ItemError(field="partition", message=within))
            within = ()
        if is_deep(raw, body, depth_max):
            errors.append(ItemError(field="payload", message=f"nests deeper than {depth_max} levels"))
        known = self.known_fields(body)
        project = unicodedata.normalize("NFC", item.project_id)
        return Item(
            id=item.id,
            partitions=(project,),
            scope=Scope(project, within),
            type=item.type,
            body=known,
            content=known,
            stored=known,
            errors=tuple(errors),
            user_id=known.get("userId"),
        )

    def connected(self, msg_id: str | None, hello: Hello, now_ms: int) -> bytes:
        """The answer to ``connect``."""
        payload = {"clientId": hello.client_id, "projectId": hello.project_id}
        return encode_camel(
            "connected", orjson.dumps(payload | {"projectLastCommittedId": hello.watermark}), msg_id, now_ms
        )

    def page(self, msg_id: str | None, page: PageAnswer, now_ms: int) -> bytes:
        """The answer to ``sync``."""
        return self.page_of(b'"projectId":' + orjson.dumps(page.partitions[0]), msg_id, page, now_ms)

    def scope_of(self, partitions: tuple[str, ...], payload_json: bytes) -> Scope:
        """Its project, and its partition within it."""
        try:
            within = stored_partitions([_PLACE.decode(payload_json).partition])
        except msgspec.DecodeError:
            within = ()
        return Scope(partitions[0], within if isinstance(within, tuple) else ())

    def content_of(self, stored: dict[str, Any]) -> dict[str, Any]:
        """All but the id and who sent it."""
        compared = {name: value for name, value in stored.items() if name not in ("id", "meta")}
        compared["meta"] = {name: value for name, value in stored.get("meta", {}).items() if name != "clientId"}
        return compared


PROJECTS: Final = ProjectDialect()


def project_key(project_id: str) -> str | None:
    """The log's name of a project: NFC, as partitions are; ``None`` if it cannot be one."""
    try:
        return check_partitions((project_id,))[0]
    except InvalidName:
        return None
