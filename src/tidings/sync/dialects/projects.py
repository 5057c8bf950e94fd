"""
Dialect B: the wire of the JavaScript client ``insieme`` 2.1.0, in camel case, one project a connection.

That client compares what comes back with what it sent, so partition, type, schema version, payload and the client's own time
are stored as submitted. It never sends again after an error to a submit, so whatever can be said about an item is said in
the item's result.
"""

from __future__ import annotations

import unicodedata
from typing import Any, Final

import msgspec
import orjson
from msgspec import Raw

from tidings.core.errors import InvalidName
from tidings.core.names import check_partitions
from tidings.log.record import Record
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

from .. import canonical
from ..requests import Answer, Committed, ConnectRequest, Item, ItemError, PageAnswer, Rejected, Request
from ..requests import SubmitRequest as Submit
from ..requests import SyncRequest as Sync
from .dialect import Hello, check_id, is_deep, millis_of, stored_partitions

__all__ = [
    "PROJECTS",
    "TOPIC",
    "ProjectDialect",
    "attribute_camel",
    "broken_item",
    "camel_result",
    "json_object",
    "project_key",
]

TOPIC: Final = "sync.projects"

_CONNECT: Final = msgspec.json.Decoder(CamelConnect)
_SUBMIT: Final = msgspec.json.Decoder(CamelSubmit)
_SYNC: Final = msgspec.json.Decoder(ProjectSync)
_ITEM: Final = msgspec.json.Decoder(ProjectItem)


class ProjectDialect:
    """See ``Dialect``."""

    name = "b"
    topic = TOPIC
    is_by_project = True
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
                return Submit(msg_id=msg_id, items=[_item(raw, depth_max) for raw in batch.events])
            case "sync":
                sync = decode_camel(envelope.payload, _SYNC, envelope.type)
                wanted = () if sync.project_id is None else (sync.project_id,)
                return Sync(msg_id=msg_id, partitions=wanted, since=sync.since_committed_id, limit=sync.limit)
            case "connect":
                connect = decode_camel(envelope.payload, _CONNECT, envelope.type)
                if connect.project_id is None:
                    raise MalformedFrame("Object missing required field `projectId`", "connect", "payload")
                return ConnectRequest(
                    msg_id=msg_id, token=connect.token, client_id=connect.client_id, project_id=connect.project_id
                )
            case other:
                raise UnknownMessageType(other)

    def connected(self, msg_id: str | None, hello: Hello, now_ms: int) -> bytes:
        payload = {
            "clientId": hello.client_id,
            "projectId": hello.project_id,
            "projectLastCommittedId": hello.watermark,
        }
        return encode_camel("connected", orjson.dumps(payload), msg_id, now_ms)

    def result(self, msg_id: str | None, answers: list[Answer], now_ms: int) -> bytes:
        return camel_result(msg_id, answers, now_ms, "serverTs")

    def page(self, msg_id: str | None, page: PageAnswer, now_ms: int) -> bytes:
        events = b",".join([event for record in page.records if (event := _event(record)) is not None])
        payload = b'{"projectId":%b,"events":[%b],"nextSinceCommittedId":%d,"hasMore":%b,"syncToCommittedId":%d}' % (
            orjson.dumps(page.partitions[0]),
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


PROJECTS: Final = ProjectDialect()


def project_key(project_id: str) -> str | None:
    """The log's name of a project: NFC, as partitions are; ``None`` if it cannot be one."""
    try:
        return check_partitions((project_id,))[0]
    except InvalidName:
        return None


def camel_result(msg_id: str | None, answers: list[Answer], now_ms: int, time_key: str) -> bytes:
    """``submit_events_result`` of B and C, which name the time of a commit differently."""
    results: list[dict[str, Any]] = []
    for answer in answers:
        if isinstance(answer, Committed):
            results.append({"id": answer.id, "status": "committed", "committedId": answer.seq, time_key: answer.at_ms})
        elif isinstance(answer, Rejected):
            errors = [{"field": error.field, "message": error.message} for error in answer.errors]
            results.append(
                {
                    "id": answer.id,
                    "status": "rejected",
                    "reason": answer.reason,
                    "errors": errors,
                    "created": answer.at_ms,
                }
            )
        else:
            results.append(
                {
                    "id": answer.id,
                    "status": "not_processed",
                    "reason": "prior_item_failed",
                    "blockedById": answer.blocked_by,
                    "created": answer.at_ms,
                }
            )
    return encode_camel("submit_events_result", orjson.dumps({"results": results}), msg_id, now_ms)


def broken_item(raw: Raw, problem: str) -> Item:
    """An item that cannot be read: rejected under the id it has, if it has one."""
    field, _, path = problem.partition(" - at `$")
    found = json_object(raw)
    id = found.get("id") if found is not None else None
    return Item(
        id=id if isinstance(id, str) else "",
        errors=(ItemError(field=path.rstrip("`").removeprefix("."), message=field[:200]),),
    )


def attribute_camel(item: Item, client_id: str) -> None:
    """Write the authenticated client into an item that names none; an item that names another is forbidden."""
    meta = item.stored.get("meta")
    if meta is None or item.errors:
        return
    if meta.get("clientId", client_id) != client_id:
        item.reason = "forbidden"
        item.errors = (ItemError(field="meta.clientId", message="is not the connection's"),)
        return
    item.stored = {**item.stored, "meta": {**meta, "clientId": client_id}}


def json_object(raw: Raw) -> dict[str, Any] | None:
    """The JSON object in ``raw``, by the strict parser; ``None`` if it is none."""
    try:
        found = canonical.parse(bytes(raw))
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _item(raw: Raw, depth_max: int) -> Item:
    try:
        item = _ITEM.decode(raw)
        body = canonical.parse(bytes(raw))  # stricter than the decoder about what it passes over
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        return broken_item(raw, str(error))
    errors = [] if (wrong := check_id(item.id)) is None else [wrong]
    if isinstance(problem := stored_partitions([item.partition]), str):
        errors.append(ItemError(field="partition", message=problem))
    if is_deep(raw, body, depth_max):
        errors.append(ItemError(field="payload", message=f"nests deeper than {depth_max} levels"))
    project = (unicodedata.normalize("NFC", item.project_id),)
    known = {name: body[name] for name in _FIELDS if name in body}
    return Item(
        id=item.id, partitions=project, type=item.type, body=known, content=known, stored=known, errors=tuple(errors)
    )


_FIELDS: Final = ("id", "partition", "projectId", "userId", "type", "schemaVersion", "payload", "meta")


def _event(record: Record) -> bytes | None:
    """A record as pages and broadcasts carry it: the stored fields behind ours, none of which they can repeat."""
    meta = record.meta
    payload = bytes(record.payload_json)
    if meta.sealed is not None or not payload.startswith(b'{"id":'):
        return None
    return b'{"committedId":%d,"serverTs":%d,%b' % (record.seq, millis_of(record), payload[1:])


def _content(stored: dict[str, Any]) -> dict[str, Any]:
    """What equality compares: all but the id and who sent it."""
    meta = stored.get("meta")
    compared = {name: value for name, value in stored.items() if name not in ("id", "meta")}
    compared["meta"] = {k: v for k, v in meta.items() if k != "clientId"} if isinstance(meta, dict) else {}
    return compared
