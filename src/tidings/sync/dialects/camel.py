"""
What the two camel-case dialects share: answers, frames around stored items, and items that one by one are good or bad.

Their clients never send again after an error to a submit, so whatever can be said about an item is said in its result, and an
item that cannot even be read is an item that is rejected.
"""

from __future__ import annotations

import abc
from typing import Any, Final

import msgspec
import orjson
from msgspec import Raw

from tidings.core.validation import UNREADABLE, explain
from tidings.log.record import Record
from tidings.wire.sync_project_frames import encode_camel

from .. import canonical
from ..requests import Answer, Committed, Item, ItemError, PageAnswer, Rejected
from .dialect import is_client, millis_of

__all__ = ["CamelDialect", "parsed_item"]


class _Named(msgspec.Struct, gc=False):
    msgId: Any = None


_NAMED: Final = msgspec.json.Decoder(_Named)


class CamelDialect(abc.ABC):
    """The common half of dialects B and C. See ``Dialect``."""

    topic: str
    time_key: str
    """What the time of a commit is called."""
    fields: tuple[str, ...]
    """What of an item is stored and comes back; the id is the first."""

    needs_heartbeats = False
    is_one_per_client = False
    stops_at_rejection = True
    holds_while_paging = True
    hangs_on_errors = True
    echoes_future_cursor = True
    has_page_min = False

    def result(self, msg_id: str | None, answers: list[Answer], now_ms: int) -> bytes:
        """The verdicts on a batch."""
        payload = {"results": [self._result(answer) for answer in answers]}
        return encode_camel("submit_events_result", orjson.dumps(payload), msg_id, now_ms)

    def _result(self, answer: Answer) -> dict[str, Any]:
        if isinstance(answer, Committed):
            return {"id": answer.id, "status": "committed", "committedId": answer.seq, self.time_key: answer.at_ms}
        if isinstance(answer, Rejected):
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

    def heartbeat_ack(self, msg_id: str | None, now_ms: int) -> bytes:
        """Never asked for."""
        raise AssertionError("these dialects have no heartbeat to answer")

    def version_changed(self, msg_id: str | None, old: int, new: int, now_ms: int) -> bytes | None:
        """These dialects have no such message."""
        return None

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

    def attribute(self, item: Item, client_id: str) -> None:
        """Write the authenticated client into an item that names none; an item that names another is forbidden."""
        meta = item.stored.get("meta")
        if meta is None or item.errors:
            return
        if not is_client(meta.get("clientId", client_id), client_id):
            item.reason = "forbidden"
            item.errors = (ItemError(field="meta.clientId", message="is not the connection's"),)
            return
        item.stored = {**item.stored, "meta": {**meta, "clientId": client_id}}

    def is_same(self, item: Item, record: Record) -> bool:
        """Whether an item says what a record says."""
        meta = record.meta
        if meta.topic != self.topic or meta.partitions != item.partitions or meta.sealed is not None:
            return False
        return canonical.is_same_json(self.content_of(item.stored), self.content_of(record.payload))

    @abc.abstractmethod
    def content_of(self, stored: dict[str, Any]) -> dict[str, Any]:
        """What of a stored item equality compares beside the partitions."""

    def known_fields(self, body: dict[str, Any]) -> dict[str, Any]:
        """An item without what the dialect does not know: it must not come back among our own fields."""
        return {name: body[name] for name in self.fields if name in body}


def parsed_item(raw: Raw, decoder: msgspec.json.Decoder[Any]) -> tuple[Any, dict[str, Any]] | Item:
    """An item by its decoder, and as plain JSON; or an ``Item`` to be rejected, under the id it has, if it has one."""
    try:
        # The strict parser too: the decoder does not look into what it passes over.
        return decoder.decode(raw), canonical.parse(bytes(raw))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        problem, path = explain(error)
        wrong = ItemError(field=path, message=problem[:200])
        return Item(id=_legible_id(raw), errors=(wrong,))


def _legible_id(raw: Raw) -> str:
    try:
        found = orjson.loads(bytes(raw))
    except ValueError:
        return ""
    id = found.get("id") if isinstance(found, dict) else None
    return id if isinstance(id, str) else ""
