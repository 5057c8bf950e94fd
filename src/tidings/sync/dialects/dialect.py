"""What a dialect is to the session: a codec, and the rules in which the dialects differ."""

from __future__ import annotations

import abc
import functools
import unicodedata
from datetime import datetime
from typing import Any, Final

import msgspec
import orjson

from tidings.core.clock import ns_of
from tidings.core.errors import InvalidName
from tidings.core.names import (
    NAME_CHARS_MAX,
    PARTITION_BYTES_MAX,
    PARTITION_COUNT_MAX,
    check_event_id,
    check_partitions,
    check_type,
)
from tidings.log.record import Record
from tidings.wire.sync_frames import ItemError

from ..requests import Answer, PageAnswer, Request, Scope, SubmittedItem
from ..settings import SyncSettings

FALLBACK_TYPE: Final = "sync.event"
"""The record's type where the event's own is no name by the log's grammar; the event itself keeps its own."""


class ConnectedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What a client is answered when it has connected."""

    client_id: str
    project_id: str | None
    watermark: int
    profile: str
    accepted_types: tuple[str, ...]
    model_version: int | None
    limits: dict[str, int]


class Dialect(abc.ABC):
    """One spelling of the protocol, and the rules in which it differs from dialect A, whose values are the defaults."""

    name: str
    topic: str
    """Where its events are stored."""
    is_by_project = False
    """Whether a connection belongs to one project, and gets all of its events."""
    needs_heartbeats = True
    is_one_per_client = True
    """Whether a client's newer connection replaces its older one."""
    stops_at_rejection = False
    holds_while_paging = False
    """Whether broadcasts wait until a client has finished paging."""
    hangs_on_errors = False
    """Whether a client that gets an error for a submit never sends again: then throttle by not reading, and end what
    cannot be answered item by item with ``server_error``, which makes such a client start over."""
    echoes_future_cursor = False
    has_page_min = True
    """Whether pages have the advertised lower bound; 1 otherwise."""

    @abc.abstractmethod
    def decode(self, message: bytes, settings: SyncSettings) -> Request:
        """
        A client's message.

        Raises:
            SyncFrameError: It is not one.
        """

    @abc.abstractmethod
    def connected(self, msg_id: str | None, hello: ConnectedAnswer, now_ms: int) -> bytes:
        """The answer to ``connect``."""

    @abc.abstractmethod
    def result(self, msg_id: str | None, answers: list[Answer], now_ms: int) -> bytes:
        """The verdicts on a batch."""

    @abc.abstractmethod
    def page(self, msg_id: str | None, page: PageAnswer, now_ms: int) -> bytes:
        """The answer to ``sync``."""

    @abc.abstractmethod
    def error(self, msg_id: str | None, code: str, message: str, details: dict[str, Any] | None, now_ms: int) -> bytes:
        """A request failed as a whole."""

    def heartbeat_ack(self, msg_id: str | None, now_ms: int) -> bytes:
        """The answer to ``heartbeat``."""
        raise AssertionError("this dialect has no heartbeat to answer")

    def version_changed(self, msg_id: str | None, old: int, new: int, now_ms: int) -> bytes | None:
        """``None`` in a dialect that has no such message."""
        return None

    @abc.abstractmethod
    def broadcast(self, record: Record, now_ms: int) -> bytes | None:
        """The frame that announces a record; ``None`` for a record that is none of this dialect's events."""

    def scope_of(self, partitions: tuple[str, ...], payload_json: bytes) -> Scope:
        """Where a record of this dialect with these partitions belongs, and so what rights it takes to be shown it."""
        return Scope(None, partitions)

    def msg_id_of(self, message: bytes) -> str | None:
        """The id that a message has given itself, if answers repeat it, though the message cannot be read as a whole."""
        return None

    def attribute(self, item: SubmittedItem, client_id: str) -> None:  # noqa: B027 - nothing to do unless a dialect says so
        """Write into what is stored who submitted it, where the dialect's events say so, and refuse other names."""

    @abc.abstractmethod
    def is_same(self, item: SubmittedItem, record: Record) -> bool:
        """Whether an item has the same content as a record."""


def _stored(names: tuple[str, ...]) -> tuple[str, ...] | str:
    try:
        return check_partitions(names)
    except InvalidName as error:
        return error.problem


_stored_before = functools.lru_cache(maxsize=4096)(_stored)


def stored_partitions(names: list[str]) -> tuple[str, ...] | str:
    """Partition names as they are stored, or what is wrong with them."""
    if not names:
        return "must name at least one partition"
    if len(names) > PARTITION_COUNT_MAX:
        # Repeats do not count, but ten thousand names must not be kept in a cache to find that out.
        names = list(dict.fromkeys(names))
        if len(names) > PARTITION_COUNT_MAX:
            return f"names {len(names)} partitions; at most {PARTITION_COUNT_MAX} are allowed"
    # Clients choose these names: the cache must stay small.
    is_small = len(names) <= 4 and all(len(name) <= PARTITION_BYTES_MAX for name in names)
    return (_stored_before if is_small else _stored)(tuple(names))


def stored_names(names: tuple[str, ...], count_max: int) -> tuple[str, ...] | str:
    """The names of a sync as they are stored, or what is wrong with them. There may be more than one event can have."""
    if len(names) > count_max:
        return f"names {len(names)} partitions; at most {count_max} are allowed"
    stored: set[str] = set()
    for name in names:
        one = stored_partitions([name])
        if isinstance(one, str):
            return one
        stored.update(one)
    return tuple(sorted(stored, key=str.encode))


def log_type(type: str) -> str:
    """The record's type of an event of this type."""
    return _log_type(type) if len(type) <= NAME_CHARS_MAX else FALLBACK_TYPE


@functools.lru_cache(maxsize=1024)
def _log_type(type: str) -> str:
    try:
        return check_type(type)
    except InvalidName:
        return FALLBACK_TYPE


def is_client(given: object, client_id: str) -> bool:
    """Whether what a message calls its client is the authenticated one, whose id is in Unicode's form NFC."""
    return given == client_id or (isinstance(given, str) and unicodedata.normalize("NFC", given) == client_id)


def check_id(id: str) -> ItemError | None:
    """What is wrong with an id, if anything."""
    try:
        check_event_id(id)
    except InvalidName as error:
        return ItemError(field="id", message=error.problem)
    return None


def as_one_line(text: bytes) -> bytes:
    """JSON without line breaks between its tokens, and otherwise as it came: records are lines."""
    if b"\n" in text or b"\r" in text:
        return bytes(msgspec.json.format(text, indent=-1))
    return text


def is_deep(text: bytes | msgspec.Raw, value: Any, depth_max: int) -> bool:
    """Whether parsed JSON nests deeper than it may. Text with few brackets cannot, and most has few."""
    text = bytes(text)
    return text.count(b"{") + text.count(b"[") > depth_max and _depth(value) > depth_max


def _depth(value: Any) -> int:
    deepest, level = 0, [value]
    while level:
        deepest += 1
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
    return deepest


@functools.lru_cache(maxsize=4096)
def _second_ms(text: str) -> int:
    return ns_of(datetime.fromisoformat(f"{text}+00:00")) // 1_000_000


def millis_of(record: Record) -> int:
    """When the server accepted the event, in milliseconds since 1970: the time that every answer about it gives."""
    ts = record.meta.ts  # always 2026-01-01T00:00:00.000000Z
    return _second_ms(ts[:19]) + int(ts[20:23])


@functools.lru_cache(maxsize=4096)
def names_json(names: tuple[str, ...]) -> bytes:
    """Partition names as JSON; the same few come again and again."""
    return orjson.dumps(names)


@functools.lru_cache(maxsize=4096)
def text_json(text: str) -> bytes:
    """A client's id as JSON."""
    return orjson.dumps(text)
