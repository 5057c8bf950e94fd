"""
The camel-case dialects: B, of the JavaScript client ``insieme`` 2.1.0, and C, of its version 1.3.0.

Their clients never send again after an error to a submit, so whatever can be said about an item is said in its result, and an
item that cannot even be read is an item that is rejected. B has one project a connection; its client compares what comes back with
what it sent, so partition, type, schema version, payload and the client's own time are stored as submitted. C has partitions, and one
event a submit.
"""

from __future__ import annotations

import abc
import unicodedata
from typing import Any, Final

import msgspec
import orjson
from msgspec import Raw

from tidings.core.errors import InvalidName
from tidings.core.names import check_partitions
from tidings.core.validation import UNREADABLE, explain, parse_strict
from tidings.log.record import Record
from tidings.wire.sync_frames import (
    CamelConnect,
    CamelSubmit,
    ItemError,
    LegacyItem,
    LegacySync,
    MalformedFrame,
    ProjectItem,
    ProjectSync,
    UnknownMessageType,
    decode_camel,
    decode_camel_envelope,
    encode_camel,
)

from ..canonical import is_same_json
from ..requests import (
    Answer,
    CommittedAnswer,
    ConnectRequest,
    PageAnswer,
    RejectedAnswer,
    Request,
    Scope,
    SubmitRequest,
    SubmittedItem,
    SyncRequest,
)
from ..settings import SyncSettings
from .dialect import ConnectedAnswer, Dialect, check_id, is_client, is_deep, millis_of, stored_partitions


class _Named(msgspec.Struct, gc=False):
    msgId: Any = None


_NAMED: Final = msgspec.json.Decoder(_Named)


class CamelDialect(Dialect):
    """The common half of dialects B and C. See ``Dialect``."""

    time_key: str
    """What the time of a commit is called."""
    item_decoder: msgspec.json.Decoder[Any]
    fields: tuple[str, ...]
    """What of an item is stored and comes back; the id is the first."""

    needs_heartbeats = False
    is_one_per_client = False
    stops_at_rejection = True
    holds_while_paging = True
    hangs_on_errors = True
    echoes_future_cursor = True
    has_page_min = False

    def decode(self, message: bytes, settings: SyncSettings) -> Request:
        """A client's message."""
        envelope = decode_camel_envelope(message)
        msg_id, payload = envelope.msg_id, envelope.payload
        match envelope.type:
            case "submit_events":
                events = decode_camel(payload, _SUBMIT, envelope.type).events
                count_max, problem = self._items_max(settings)
                if len(events) > count_max:
                    raise MalformedFrame(problem, "submit_events", "payload.events")
                items = [self._item(raw, settings.event_depth_max) for raw in events]
                return SubmitRequest(msg_id=msg_id, items=items, count=len(items))
            case "sync":
                return self._sync(msg_id, payload)
            case "connect":
                return self._connect(msg_id, decode_camel(payload, _CONNECT, envelope.type))
            case other:
                raise UnknownMessageType(other)

    def _item(self, raw: Raw, depth_max: int) -> SubmittedItem:
        """A submitted event; one that cannot be read is an ``SubmittedItem`` to be rejected, under the id it has, if it has one."""
        try:
            # The strict parser too: the decoder does not look into what it ignores.
            item, body = self.item_decoder.decode(raw), parse_strict(raw)
        except (*UNREADABLE, ValueError) as error:
            problem, path = explain(error)
            return SubmittedItem(id=_legible_id(raw), errors=(ItemError(field=path, message=problem[:200]),))
        partitions, scope, misplaced = self._place(item)
        errors = [wrong for wrong in (check_id(item.id), misplaced) if wrong is not None]
        if is_deep(raw, body, depth_max):
            errors.append(ItemError(field="payload", message=f"nests deeper than {depth_max} levels"))
        known = self.known_fields(body, partitions)
        return SubmittedItem(
            id=item.id,
            partitions=partitions,
            scope=scope,
            type=item.type,
            body=known,
            content=known,
            stored=known,
            errors=tuple(errors),
            user_id=known.get("userId"),
        )

    @abc.abstractmethod
    def _items_max(self, settings: SyncSettings) -> tuple[int, str]:
        """How many events one submit may hold, and what to say to more."""

    @abc.abstractmethod
    def _connect(self, msg_id: str | None, connect: CamelConnect) -> ConnectRequest: ...

    @abc.abstractmethod
    def _sync(self, msg_id: str | None, payload: Raw) -> SyncRequest: ...

    @abc.abstractmethod
    def _place(self, item: Any) -> tuple[tuple[str, ...], Scope, ItemError | None]:
        """The partitions an item is stored under, where it belongs, and what is wrong with that."""

    def result(self, msg_id: str | None, answers: list[Answer], now_ms: int) -> bytes:
        """The verdicts on a batch."""
        payload = {"results": [self._result(answer) for answer in answers]}
        return encode_camel("submit_events_result", orjson.dumps(payload), msg_id, now_ms)

    def _result(self, answer: Answer) -> dict[str, Any]:
        if isinstance(answer, CommittedAnswer):
            return {"id": answer.id, "status": "committed", "committedId": answer.seq, self.time_key: answer.at_ms}
        if isinstance(answer, RejectedAnswer):
            errors = [{"field": error.field, "message": error.message} for error in answer.errors]
            rejected = {"id": answer.id, "status": "rejected", "reason": answer.reason, "errors": errors}
            return rejected | {"created": answer.at_ms}
        blocked = {"id": answer.id, "status": "not_processed", "reason": "prior_item_failed"}
        return blocked | {"blockedById": answer.blocked_by, "created": answer.at_ms}

    def page_of(self, scope: bytes, msg_id: str | None, page: PageAnswer, now_ms: int) -> bytes:
        """The answer to ``sync``; ``scope`` is what it was about, as a key and its value."""
        events = b",".join([event for record in page.records if (event := self._event(record)) is not None])
        payload = b'{%b,"events":[%b],"nextSinceCommittedId":%d,"hasMore":%b,"syncToCommittedId":%d}' % (
            scope,
            events,
            page.next_since,
            b"true" if page.has_more else b"false",
            page.sync_to,
        )
        return encode_camel("sync_response", payload, msg_id, now_ms)

    def error(self, msg_id: str | None, code: str, message: str, details: dict[str, Any] | None, now_ms: int) -> bytes:
        """A request failed as a whole."""
        if code == "protocol_version_unsupported":
            code = "protocolVersion_unsupported"
        payload = {"code": code, "message": message, "details": details or {}}
        return encode_camel("error", orjson.dumps(payload), msg_id, now_ms)

    def msg_id_of(self, message: bytes) -> str | None:
        """The message's ``msgId``."""
        try:
            found = _NAMED.decode(message).msgId
        except UNREADABLE:
            return None
        return found if isinstance(found, str) else None

    def broadcast(self, record: Record, now_ms: int) -> bytes | None:
        """The frame that tells of a record."""
        event = self._event(record)
        return None if event is None else encode_camel("event_broadcast", event, f"e{record.seq}", now_ms)

    def _event(self, record: Record) -> bytes | None:
        """A record as pages and broadcasts carry it: the stored fields behind ours, none of which they can repeat."""
        payload = bytes(record.payload_json)
        if record.meta.sealed is not None or not payload.startswith(b'{"id":'):
            return None
        return b'{"committedId":%d,"%b":%d,%b' % (record.seq, self.time_key.encode(), millis_of(record), payload[1:])

    def attribute(self, item: SubmittedItem, client_id: str) -> None:
        """Write the authenticated client into an item that names none; an item that names another is forbidden."""
        meta = item.stored.get("meta")
        if meta is None or item.errors:
            return
        if not is_client(meta.get("clientId", client_id), client_id):
            item.reason = "forbidden"
            item.errors = (ItemError(field="meta.clientId", message="is not the connection's"),)
            return
        item.stored = {**item.stored, "meta": {**meta, "clientId": client_id}}

    def is_same(self, item: SubmittedItem, record: Record) -> bool:
        """Whether an item says what a record says."""
        meta = record.meta
        if meta.topic != self.topic or meta.partitions != item.partitions or meta.sealed is not None:
            return False
        return is_same_json(self.content_of(item.stored), self.content_of(record.payload))

    @abc.abstractmethod
    def content_of(self, stored: dict[str, Any]) -> dict[str, Any]:
        """What of a stored item equality compares beside the partitions."""

    def known_fields(self, body: dict[str, Any], partitions: tuple[str, ...]) -> dict[str, Any]:
        """An item without what the dialect does not know: it must not come back among our own fields."""
        return {name: body[name] for name in self.fields if name in body}


def _legible_id(raw: Raw) -> str:
    try:
        found = orjson.loads(bytes(raw))
    except ValueError:
        return ""
    id = found.get("id") if isinstance(found, dict) else None
    return id if isinstance(id, str) else ""


_BATCHES_MAX: Final = 10

_CONNECT: Final = msgspec.json.Decoder(CamelConnect)
_SUBMIT: Final = msgspec.json.Decoder(CamelSubmit)
_PROJECT_SYNC: Final = msgspec.json.Decoder(ProjectSync)


class _Place(msgspec.Struct, frozen=True, gc=False):
    partition: str


_PLACE: Final = msgspec.json.Decoder(_Place)


class ProjectDialect(CamelDialect):
    """See ``Dialect``."""

    name = "b"
    topic = "sync.projects"
    time_key = "serverTs"
    item_decoder = msgspec.json.Decoder(ProjectItem)
    fields = ("id", "partition", "projectId", "userId", "type", "schemaVersion", "payload", "meta")
    is_by_project = True

    def _items_max(self, settings: SyncSettings) -> tuple[int, str]:
        # The dialect advertises no limit, and its client can be configured to send more than the usual 50.
        return _BATCHES_MAX * settings.batch_items_max, "The batch is too long"

    def _connect(self, msg_id: str | None, connect: CamelConnect) -> ConnectRequest:
        if connect.project_id is None:
            raise MalformedFrame("Object missing required field `projectId`", "connect", "payload")
        return ConnectRequest(
            msg_id=msg_id, token=connect.token, client_id=connect.client_id, project_id=connect.project_id
        )

    def _sync(self, msg_id: str | None, payload: Raw) -> SyncRequest:
        sync = decode_camel(payload, _PROJECT_SYNC, "sync")
        wanted = () if sync.project_id is None else (sync.project_id,)
        return SyncRequest(msg_id=msg_id, partitions=wanted, since=sync.since_committed_id, limit=sync.limit)

    def _place(self, item: ProjectItem) -> tuple[tuple[str, ...], Scope, ItemError | None]:
        project = unicodedata.normalize("NFC", item.project_id)
        within = stored_partitions([item.partition])
        if isinstance(within, str):
            return (project,), Scope(project), ItemError(field="partition", message=within)
        return (project,), Scope(project, within), None

    def connected(self, msg_id: str | None, hello: ConnectedAnswer, now_ms: int) -> bytes:
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


_LEGACY_SYNC: Final = msgspec.json.Decoder(LegacySync)


class LegacyDialect(CamelDialect):
    """See ``Dialect``."""

    name = "c"
    topic = "sync.legacy"
    time_key = "created"
    item_decoder = msgspec.json.Decoder(LegacyItem)
    fields = ("id", "partitions", "projectId", "userId", "type", "payload", "meta")

    def _items_max(self, settings: SyncSettings) -> tuple[int, str]:
        return 1, "Expected one event"

    def _connect(self, msg_id: str | None, connect: CamelConnect) -> ConnectRequest:
        return ConnectRequest(msg_id=msg_id, token=connect.token, client_id=connect.client_id)

    def _sync(self, msg_id: str | None, payload: Raw) -> SyncRequest:
        sync = decode_camel(payload, _LEGACY_SYNC, "sync")
        names = tuple(sync.partitions)
        return SyncRequest(
            msg_id=msg_id, partitions=names, subscriptions=names, since=sync.since_committed_id, limit=sync.limit
        )

    def _place(self, item: LegacyItem) -> tuple[tuple[str, ...], Scope, ItemError | None]:
        partitions = stored_partitions(item.partitions)
        if isinstance(partitions, str):
            return (), Scope(None), ItemError(field="partitions", message=partitions)
        is_repeated = len(partitions) != len(item.partitions)
        wrong = ItemError(field="partitions", message="names a partition twice") if is_repeated else None
        return partitions, Scope(None, partitions), wrong

    def known_fields(self, body: dict[str, Any], partitions: tuple[str, ...]) -> dict[str, Any]:
        """With the partitions as they are stored."""
        return super().known_fields(body, partitions) | {"partitions": list(partitions)}

    def connected(self, msg_id: str | None, hello: ConnectedAnswer, now_ms: int) -> bytes:
        """The answer to ``connect``."""
        payload = {"clientId": hello.client_id, "globalLastCommittedId": hello.watermark}
        return encode_camel("connected", orjson.dumps(payload), msg_id, now_ms)

    def page(self, msg_id: str | None, page: PageAnswer, now_ms: int) -> bytes:
        """The answer to ``sync``."""
        return self.page_of(b'"partitions":' + orjson.dumps(page.partitions), msg_id, page, now_ms)

    def content_of(self, stored: dict[str, Any]) -> dict[str, Any]:
        """The whole of ``meta`` too."""
        return {name: stored.get(name) for name in ("projectId", "userId", "type", "payload", "meta")}


LEGACY: Final = LegacyDialect()
