"""
The records of the topic ``ledger``, from which everything else in the ledger can be made again.

A record holds one command and what it told::

    {"at_ms": 1760000000000, "seq": 17, "rules": 2, "do": {"command": "set_flight_mode", ...}, "happenings": [{"type": ...}, ...]}

``seq`` is that of its first happening; of a record without happenings, the one that the next happening would have had. So seqs never go
back from record to record, and any is found by bisection. ``rules`` is the version of the rules that decided the command; without it, the
first. Executing it again goes by the same version, whatever later ones would make of it. A command whose happenings do not fit has ``count``, how many there are in all,
and is followed by records with the others; these have no ``do``, and ``of``, the seq of the command's first happening. Neither have happenings that somebody emitted: no state follows from them, and
those of one commit share a record.
"""

from __future__ import annotations

import functools
import logging
import operator
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec
import orjson

from tidings.core.events import Event, EventMeta
from tidings.happenings.errors import InvalidHappening
from tidings.happenings.happening import AnyHappening, Happening, from_json, to_json, variant_count, variants
from tidings.log.interface import Authorise
from tidings.log.record import Record

from .commands import COMMANDS, Command, CommandOutcome
from .errors import InvalidRecord, LedgerUnavailable, UnknownCommand
from .state import FIRST_RULES, RULES, LedgerState

logger = logging.getLogger(__name__)

LEDGER_TOPIC: Final = "ledger"
_SPACE: Final = "system"
_PREFIX: Final = "ledger."
_EMITTED: Final = "ledger.happenings"
_TOGETHER_MAX: Final = 100
"""Of more than that the log would have to look how deep they nest, which costs more than another record."""
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
    of: int = 0
    """Of a record that holds further happenings of a command: the seq of the command's first one."""
    rules: int = FIRST_RULES
    """The version of the rules by which the command was decided."""


_DECODER: Final = msgspec.json.Decoder(StoredCommand)
_LIST_DECODER: Final = msgspec.json.Decoder(list[msgspec.Raw])


def encode_command(command: Command) -> bytes:
    """A command as it stands in its record."""
    return _encode(command)


def encode_happenings(happenings: Sequence[AnyHappening]) -> bytes:
    """
    Happenings as they stand in a record.

    Raises:
        TypeError, ValueError, RecursionError: One is something else, or has a value that JSON does not have.
    """
    are_known = True
    for each in happenings:
        if not isinstance(each, Happening):
            are_known = False
            if not isinstance(each, AnyHappening):
                raise TypeError(f"{each!r:.80} is no happening")
    return _encode(happenings if are_known else [to_json(each) for each in happenings])


def count_of(happenings_json: msgspec.Raw) -> int:
    """How many happenings a record has."""
    return len(_LIST_DECODER.decode(happenings_json)) if happenings_json else 0


def events_of(
    do: Command,
    do_json: bytes,
    *,
    at_ms: int,
    seq: int,
    happenings: Sequence[AnyHappening],
    happenings_json: bytes,
    bytes_max: int,
) -> list[Event]:
    """
    The records of one command: one, unless its happenings take more.

    Args:
        do, do_json: What was done, and its JSON.
        at_ms: When.
        seq: Of the first happening.
        happenings, happenings_json: What it told, and the JSON of all that.
        bytes_max: The most JSON of happenings that one record may have; a single one may be longer.
    """
    payload: dict[str, Any] = {"at_ms": at_ms, "seq": seq, "rules": RULES, "do": orjson.Fragment(do_json)}
    kind = _type_of(do)
    if not happenings:
        return [_event(kind, payload)]
    if len(happenings_json) <= bytes_max:
        payload["happenings"] = orjson.Fragment(happenings_json)
        return [_event(kind, payload)]
    count, first = next(_chunks(happenings, bytes_max))
    payload |= {"count": len(happenings), "happenings": orjson.Fragment(first)}
    left = events_left(happenings[count:], at_ms=at_ms, seq=seq + count, of=seq, bytes_max=bytes_max)
    return [_event(kind, payload), *left]


def events_left(happenings: Sequence[AnyHappening], *, at_ms: int, seq: int, of: int, bytes_max: int) -> list[Event]:
    """The records of the happenings that do not fit into the record of their command, whose first happening has the seq ``of``."""
    events: list[Event] = []
    for count, chunk in _chunks(happenings, bytes_max):
        events.append(_event(_EMITTED, {"at_ms": at_ms, "seq": seq, "of": of, "happenings": orjson.Fragment(chunk)}))
        seq += count
    return events


class EmittedTogether:
    """
    Happenings of one commit that follow from no command: those in a row share a record, as far as one holds them.

    Args:
        at_ms: When they are stored.
        bytes_max: The most JSON that one record may have of them.
    """

    __slots__ = ("_at_ms", "_bytes_max", "_held", "_seq", "_size")

    def __init__(self, at_ms: int, bytes_max: int) -> None:
        self._at_ms = at_ms
        self._bytes_max = bytes_max
        self._held: list[bytes] = []
        self._size = 0
        self._seq = 0

    def add(self, seq: int, happenings_json: bytes, events: list[Event]) -> None:
        """Add happenings, the first of which has this seq; if they do not fit, what is held before them goes to ``events``."""
        size = len(happenings_json)
        if self._held and (self._size + size > self._bytes_max or len(self._held) == _TOGETHER_MAX):
            self.flush(events)
        if not self._held:
            self._seq = seq
        self._held.append(happenings_json[1:-1])
        self._size += size

    def flush(self, events: list[Event]) -> None:
        """Make a record of what is held."""
        if self._held:
            events.append(_event_of(self._at_ms, self._seq, b"[%b]" % b",".join(self._held)))
            self._held = []
            self._size = 0


def _event_of(at_ms: int, seq: int, happenings_json: bytes) -> Event:
    return _event(_EMITTED, {"at_ms": at_ms, "seq": seq, "happenings": orjson.Fragment(happenings_json)})


def _event(kind: str, payload: dict[str, Any]) -> Event:
    return Event(EventMeta(LEDGER_TOPIC, kind, _SPACE), payload)


def _chunks(happenings: Sequence[AnyHappening], bytes_max: int) -> Iterator[tuple[int, bytes]]:
    """As many as fit, again and again; how many that is follows from how long the last ones were."""
    begin, count = 0, len(happenings)
    while begin < len(happenings):
        part = happenings[begin : begin + count]
        encoded = encode_happenings(part)
        if len(encoded) > bytes_max and len(part) > 1:
            count = max(1, min(len(part) * bytes_max // len(encoded), len(part) - 1))
            continue
        yield len(part), encoded
        begin += len(part)


def _type_of(command: Command) -> str:
    return f"{_PREFIX}{command.__struct_config__.tag}"


def name_of(record: Record) -> str:
    """The name of a record's command."""
    return record.meta.type.removeprefix(_PREFIX)


def accepts_in_order() -> Authorise:
    """
    Lets the log accept each event of one call only if it accepted the one before.

    Commands were executed one on top of the other: if one of them cannot be stored, those after it must not be.
    """
    before: Event | None = None

    def authorise(event: Event) -> None:
        nonlocal before
        # A log that accepts an event gives it its id in the same step.
        if before is not None and before is not event and before.meta._event_id is None:
            raise LedgerUnavailable("the record before it was refused")
        before = event

    return authorise


def is_ours(record: Record) -> bool:
    """Whether the ledger wrote a record of its topic. A stranger's is passed over."""
    return record.meta.type.startswith(_PREFIX)


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
    """Reads commands back, of every class that is known when it is used."""

    def __init__(self) -> None:
        self._decoder: msgspec.json.Decoder[Command] | None = None
        self._count = 0

    def read(self, command_json: bytes | msgspec.Raw) -> Command:
        """
        The command in a piece of JSON.

        Raises:
            msgspec.DecodeError: It is none that is known.
        """
        if self._decoder is None or self._count != len(COMMANDS):
            self._count = len(COMMANDS)
            self._decoder = msgspec.json.Decoder(functools.reduce(operator.or_, COMMANDS.values()))
        return self._decoder.decode(command_json)

    def read_stored(self, record: Record, stored: StoredCommand) -> Command:
        """
        The command of a record.

        Raises:
            UnknownCommand: No class is known for it, it has fields that the class does not have, or a newer version of the rules decided it.
        """
        check_rules(stored, record.offset)
        try:
            return self.read(stored.do)
        except msgspec.DecodeError as error:
            raise UnknownCommand(name_of(record), record.offset, str(error)) from None


def check_rules(stored: StoredCommand, offset: int) -> None:
    """
    See that this program has the rules that decided a command.

    Raises:
        UnknownCommand: They are of a newer version.
    """
    if not FIRST_RULES <= stored.rules <= RULES:
        problem = f"version {stored.rules} of the rules decided it, and this program knows them up to version {RULES}"
        raise UnknownCommand(msgspec.json.decode(stored.do).get("command", "?"), offset, problem)


def execute_again(command: Command, state: LedgerState, stored: StoredCommand) -> CommandOutcome:
    """Execute a command of the log by the rules that decided it. Raises what it raises."""
    state.rules = stored.rules
    try:
        return command.execute(state, stored.at_ms)
    finally:
        state.rules = RULES


def _is_readable(variant: type[Happening]) -> bool:
    try:
        msgspec.json.Decoder(variant)
    except (TypeError, ValueError, NameError) as error:  # what msgspec says of types that it cannot read
        logger.error("happenings of the variant %s cannot be read: %s", variant.__qualname__, error)
        return False
    return True


class HappeningReader:
    """Reads happenings back, of every variant that is declared, and of others as they came."""

    def __init__(self) -> None:
        self._decoder: Any = None
        self._list_decoder: Any = None
        self._count = 0

    def begin(self) -> None:
        """Take note of the variants that are declared by now; to be called before a row of ``read``."""
        if self._count != variant_count():
            self._count = variant_count()
            union: Any = functools.reduce(operator.or_, filter(_is_readable, variants().values()))
            self._list_decoder = msgspec.json.Decoder(list[union])
            fields: Any = [("seq", int), ("happenings", list[union], msgspec.field(default_factory=list))]
            self._decoder = msgspec.json.Decoder(msgspec.defstruct("Told", fields, gc=False))

    def check(self, happenings: Sequence[AnyHappening], happenings_json: bytes) -> None:
        """
        Make sure that happenings about to be stored can be read back as what they are; one that is passed on as it came is.

        Raises:
            InvalidHappening: A field does not have the type that its variant declares.
        """
        self.begin()
        try:
            self._list_decoder.decode(happenings_json)
        except msgspec.DecodeError:
            for happening, form in zip(happenings, msgspec.json.decode(happenings_json), strict=True):
                from_json(form, is_strict=isinstance(happening, Happening))

    def read(self, record: Record) -> tuple[int, list[AnyHappening]]:
        """
        The seq of a record's first happening, and its happenings.

        Raises:
            InvalidRecord: It is no record of the ledger.
        """
        try:
            found = self._decoder.decode(record.payload_json)
            return found.seq, found.happenings
        except msgspec.DecodeError:
            return self._read_one_by_one(record)

    @staticmethod
    def _read_one_by_one(record: Record) -> tuple[int, list[AnyHappening]]:
        try:
            stored = read_record(record)
            found = msgspec.json.decode(stored.happenings) if stored.happenings else []
            return stored.seq, [from_json(each, is_strict=False) for each in found]
        except (msgspec.DecodeError, InvalidHappening) as error:
            raise InvalidRecord(record.offset, str(error)) from None
        except InvalidRecord:
            if is_ours(record):
                raise
            return 0, []
