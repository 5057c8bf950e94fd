"""
From lines of text to events: JSON Lines of payloads, or of whole events.

A line is a whole event if it is an object with ``meta`` and ``payload`` and no other keys than a stored
record has; so what ``log export`` and ``log read --json`` print can be appended again. What a line says
itself wins over what the command line says.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import threading
from collections.abc import AsyncIterator, Callable
from datetime import datetime
from typing import Any, BinaryIO, Final, NamedTuple

import msgspec

from tidings.core.errors import InvalidEvent, InvalidPayload, InvalidTimestamp
from tidings.core.events import GIVEN_NAMES, Event, EventMeta
from tidings.core.validation import UNREADABLE, refuse_repeated_keys

__all__ = ["Defaults", "Line", "LineSplitter", "blocks", "event_of"]

LINE_BYTES_MAX: Final = 80 << 20
"""The largest payload that any settings allow, and room for its envelope."""
_BLOCK_BYTES: Final = 256 << 10
_BLOCKS_AHEAD_MAX: Final = 4
_RECORD_KEYS: Final = frozenset({"crc", "offset", "seq", "meta", "payload"})


class Line(NamedTuple):
    """One line of input: its number, from 1, and its bytes (``None`` if it was too long to keep)."""

    number: int
    data: bytes | None


class LineSplitter:
    """Cuts blocks of bytes into lines; blank lines are counted and left out. Memory is bounded by one line."""

    def __init__(self, line_bytes_max: int = LINE_BYTES_MAX) -> None:
        self._line_bytes_max = line_bytes_max
        self._rest = bytearray()
        self._is_skipping = False
        self._count = 0

    def feed(self, block: bytes) -> list[Line]:
        """The lines that this block completes."""
        found: list[Line] = []
        *ends, rest = block.split(b"\n")
        for end in ends:
            found += self._complete(end)
        self._keep(rest)
        return found

    def finish(self) -> list[Line]:
        """The last line, if the input does not end with a newline."""
        return self._complete(b"") if self._rest or self._is_skipping else []

    def _complete(self, end: bytes) -> list[Line]:
        self._keep(end)
        self._count += 1
        data = None if self._is_skipping else bytes(self._rest)
        self._rest.clear()
        self._is_skipping = False
        return [] if data is not None and not data.strip() else [Line(self._count, data)]

    def _keep(self, part: bytes) -> None:
        if self._is_skipping or len(self._rest) + len(part) > self._line_bytes_max:
            self._is_skipping = True
            self._rest.clear()
        else:
            self._rest += part


class Defaults(NamedTuple):
    """What the command line says about every event."""

    topic: str
    type: str | None = None
    space_id: str | None = None
    event_id: str | None = None
    idem_key: str | None = None
    ts: datetime | None = None
    actor: str | None = None
    partitions: tuple[str, ...] = ()


def event_of(data: bytes | None, defaults: Defaults) -> Event:
    """
    The event that a line stands for.

    Raises:
        InvalidEvent: It stands for none; the log would say more about one that can be built.
    """
    if data is None:
        raise InvalidPayload("line", f"is longer than {LINE_BYTES_MAX} bytes")
    refuse_repeated_keys(data, "line")
    try:
        # Keeps whole numbers whole however long they are; the log then refuses those it cannot store.
        value = msgspec.json.decode(data)
    except UNREADABLE as error:
        raise InvalidPayload("line", f"is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidPayload("payload", f"must be a JSON object, not {_kind(value)}")
    if not {"meta", "payload"} <= value.keys() <= _RECORD_KEYS:
        return Event(_meta_of({}, defaults), value)
    if not isinstance(value["meta"], dict):
        raise InvalidEvent("meta", f"must be a JSON object, not {_kind(value['meta'])}")
    return Event(_meta_of(value["meta"], defaults), value["payload"])


def _meta_of(given: dict[str, Any], defaults: Defaults) -> EventMeta:
    if given.get("sealed") is not None:
        raise InvalidPayload("payload", "is sealed", hint="export it with --key-file, so that it can be read")
    # When a record was written is the log's to say, each time anew.
    meta = {key: value for key, value in given.items() if key not in ("written_at", "sealed") and value is not None}
    if unknown := sorted(meta.keys() - set(GIVEN_NAMES)):
        raise InvalidEvent(
            f"meta.{unknown[0]}", "is not a part of the envelope", hint="further keys go into meta.extra"
        )
    if "ts" in meta:
        meta["ts"] = _time_of(meta["ts"])
    for name, value in defaults._asdict().items():
        if value is not None and name not in meta:
            meta[name] = value
    for name, option in (("type", "--type"), ("space_id", "--space")):
        if name not in meta:
            raise InvalidEvent(f"meta.{name}", "is missing", hint=f"give it in the line or with {option}")
    return EventMeta(**meta)


def _time_of(text: object) -> datetime:
    try:
        if isinstance(text, str):
            return datetime.fromisoformat(text)
    except ValueError:
        pass
    raise InvalidTimestamp("meta.ts", f"{text!r} is not a time such as 2026-03-01T12:00:00Z")


def _kind(value: object) -> str:
    names = {"list": "an array", "str": "a string", "NoneType": "null", "bool": "a boolean"}
    return names.get(type(value).__name__, "a number")


async def blocks(source: BinaryIO) -> AsyncIterator[bytes]:
    """
    The source's bytes as they arrive, at most a few blocks ahead of whoever takes them.

    The log goes on working while the source has nothing: a thread does the waiting. It is a daemon that holds
    no lock of Python's, so that Ctrl-C ends the tool although the thread never hears of it.
    """
    loop = asyncio.get_running_loop()
    arrived: asyncio.Queue[bytes | OSError] = asyncio.Queue()
    room = threading.Semaphore(_BLOCKS_AHEAD_MAX)
    read = _reader_of(source)

    def pump() -> None:
        block: bytes | OSError = b"."
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is waiting any more
            while block and not isinstance(block, OSError):
                room.acquire()
                try:
                    block = read()
                except OSError as error:
                    block = error
                loop.call_soon_threadsafe(arrived.put_nowait, block)

    threading.Thread(target=pump, name="tidings-cli-input", daemon=True).start()
    while block := await arrived.get():
        if isinstance(block, OSError):
            raise block
        yield block
        room.release()


def _reader_of(source: BinaryIO) -> Callable[[], bytes]:
    try:
        fd = source.fileno()
    except (io.UnsupportedOperation, OSError):
        return lambda: source.read(_BLOCK_BYTES)
    return lambda: os.read(fd, _BLOCK_BYTES)
