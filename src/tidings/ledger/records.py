"""
The records of the topic ``ledger``, from which everything else in the ledger can be made again.

A record holds one command and what it told::

    {"at_ms": 1760000000000, "seq": 17, "do": {"command": "set_flight_mode", ...}, "happenings": [{"type": ...}, ...]}

``seq`` is that of its first happening; of a record without happenings, the one that the next happening would have had. So seqs never go
back from record to record, and any is found by bisection. A command whose happenings do not fit has ``count``, how many there are in all,
and is followed by records with the others; these have no ``do``. Neither have happenings that somebody emitted: no state follows from them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec
import orjson

from tidings.core.events import Event, EventMeta
from tidings.happenings.variants import AnyHappening, Happening, InvalidHappening, from_json, variants
from tidings.log.record import Record

from .commands import COMMANDS, Command
from .errors import InvalidRecord, UnknownCommand

LEDGER_TOPIC: Final = "ledger"
_SPACE: Final = "system"
_EMITTED: Final = "ledger.happenings"
_NOTHING: Final = msgspec.Raw(b"")
_encode: Final = msgspec.json.Encoder().encode


class StoredCommand(msgspec.Struct, frozen=True, gc=False):
    """A record, its command and happenings still JSON."""

    at_ms: int
    seq: int
    do: msgspec.Raw = _NOTHING
    happenings: msgspec.Raw = _NOTHING
    count: int = 0
    """How many happenings there are in all, if some are in the records that follow."""


class StoredHappenings(msgspec.Struct, frozen=True, gc=False):
    """What history needs of a record."""

    seq: int
    happenings: list[Any] = []


_DECODER: Final = msgspec.json.Decoder(StoredCommand)


def encode_command(command: Command) -> bytes:
    """A command as it stands in its record."""
    return _encode(command)


def encode_happenings(happenings: Sequence[Happening]) -> bytes:
    """Happenings as they stand in a record."""
    return _encode(happenings)


def events_of(
    command: type[Command] | None,
    command_json: bytes,
    *,
    at_ms: int,
    seq: int,
    happenings: Sequence[Happening],
    bytes_max: int,
) -> list[Event]:
    """
    The records of one command, or of happenings that were emitted (``command`` is ``None``): one, unless its happenings take more.

    Args:
        command, command_json: What was done, and its JSON.
        at_ms: When.
        seq: Of the first happening.
        happenings: What it told.
        bytes_max: The most JSON of happenings that one record may have; a single one may be longer.
    """
    payload: dict[str, Any] = {"at_ms": at_ms, "seq": seq}
    kind = _EMITTED
    if command is not None:
        kind = type_of(command)
        payload["do"] = orjson.Fragment(command_json)
    if not happenings:
        return [_event(kind, payload)]
    whole = _encode(happenings)
    if len(whole) <= bytes_max:
        payload["happenings"] = orjson.Fragment(whole)
        return [_event(kind, payload)]
    events: list[Event] = []
    for count, chunk in _chunks(happenings, bytes_max):
        payload["happenings"] = orjson.Fragment(chunk)
        if command is not None and not events:
            payload["count"] = len(happenings)
        events.append(_event(kind, payload))
        seq += count
        payload, kind = {"at_ms": at_ms, "seq": seq}, _EMITTED
    return events


def _event(kind: str, payload: dict[str, Any]) -> Event:
    return Event(EventMeta(LEDGER_TOPIC, kind, _SPACE), payload)


def _chunks(happenings: Sequence[Happening], bytes_max: int) -> Iterator[tuple[int, bytes]]:
    chunk: list[bytes] = []
    size = 0
    for happening in happenings:
        encoded = _encode(happening)
        if chunk and size + len(encoded) > bytes_max:
            yield len(chunk), b"[%b]" % b",".join(chunk)
            chunk, size = [], 0
        chunk.append(encoded)
        size += len(encoded) + 1
    yield len(chunk), b"[%b]" % b",".join(chunk)


def type_of(command: type[Command]) -> str:
    """The type that records of a command have in the log."""
    return f"ledger.{command.__struct_config__.tag}"


def read_record(record: Record) -> StoredCommand:
    """
    A record of the ledger.

    Raises:
        InvalidRecord: It is none.
    """
    try:
        return _DECODER.decode(record.payload_json)
    except msgspec.DecodeError as error:
        raise InvalidRecord(record.offset, str(error)) from None


class CommandReader:
    """Reads commands back, of every class that is known when it is first used."""

    def __init__(self) -> None:
        self._count = 0
        self._decoder: msgspec.json.Decoder[Command] | None = None

    def read(self, command_json: bytes | msgspec.Raw) -> Command:
        """
        The command in a piece of JSON.

        Raises:
            msgspec.ValidationError: It is none that is known.
        """
        if self._decoder is None or self._count != len(COMMANDS):
            self._count = len(COMMANDS)
            union: Any = None
            for each in COMMANDS.values():
                union = each if union is None else union | each
            self._decoder = msgspec.json.Decoder(union)
        return self._decoder.decode(command_json)

    def read_stored(self, record: Record, stored: StoredCommand) -> Command:
        """
        The command of a record.

        Raises:
            UnknownCommand: No class is known for it, or it has fields that the class does not have.
        """
        try:
            return self.read(stored.do)
        except msgspec.DecodeError as error:
            raise UnknownCommand(record.meta.type.removeprefix("ledger."), record.offset, str(error)) from None


class HappeningReader:
    """Reads happenings back, of every variant that is declared, and of others as they came."""

    def __init__(self) -> None:
        self._count = 0
        self._decoder: Any = None

    def read(self, record: Record) -> tuple[int, list[AnyHappening]]:
        """
        The seq of a record's first happening, and its happenings.

        Raises:
            InvalidRecord: It is no record of the ledger.
        """
        known = variants()
        if self._decoder is None or self._count != len(known):
            self._count = len(known)
            union: Any = None
            for each in known.values():
                union = each if union is None else union | each
            shape = msgspec.defstruct("_Known", [("seq", int), ("happenings", list[union], [])], gc=False)  # type: ignore[valid-type]
            self._decoder = msgspec.json.Decoder(shape)
        try:
            found = self._decoder.decode(record.payload_json)
        except msgspec.DecodeError:
            return self._read_one_by_one(record)
        return found.seq, found.happenings

    @staticmethod
    def _read_one_by_one(record: Record) -> tuple[int, list[AnyHappening]]:
        try:
            found = msgspec.json.decode(record.payload_json, type=StoredHappenings)
            return found.seq, [from_json(each) for each in found.happenings]
        except (msgspec.DecodeError, InvalidHappening) as error:
            raise InvalidRecord(record.offset, str(error)) from None
