"""The envelope's fields are declared once; whatever has to name them again agrees with the declaration."""

from __future__ import annotations

import inspect
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from tidings.bus.events import meta_of
from tidings.bus.filtering import JSONPathFilter
from tidings.cli.append import Defaults, event_of
from tidings.core.events import ENVELOPE, GIVEN_NAMES, OPTIONAL_NAMES, Event, EventMeta
from tidings.log.encoding import EventEncoder
from tidings.log.record import DECODER, Record, RecordMeta
from tidings.log.settings import LogSettings
from tidings.pipeline.lake_scan import record_of
from tidings.pipeline.line_conversion import row_of
from tidings.pipeline.schemas import BRONZE_EVENTS
from tidings.wire.events import EventMetaIn, event_from_json, event_to_wire

COLUMNS = {"text": "string", "time": "timestamp", "number": "bigint", "names": "array<string>"}
VALUES: dict[str, Any] = {
    "topic": "orders",
    "type": "ORDER_PLACED",
    "space_id": "shared:shop",
    "event_id": "o-1",
    "ts": datetime(2026, 3, 1, 12, tzinfo=UTC),
    "actor": {"user_id": "ada"},
    "trace_id": "a" * 32,
    "idem_key": "key-1",
    "ttl_sec": 60,
    "device": "device:till",
    "partitions": ("p/1", "p/2"),
    "objects": ("order:1", "order:2"),
    "app": "shop",
    "band": "RED",
    "priority": 7,
    "qos": {"priority": 3},
    "extra": {"note": [1, 2]},
}


@pytest.fixture
def event() -> Event:
    """An event that has every field."""
    return Event(EventMeta(**VALUES), {"n": 1})


@pytest.fixture
def line(event: Event) -> bytes:
    """Its line in a segment."""
    encoder = EventEncoder(LogSettings())
    return encoder.encode(encoder.check(event), 3, 4, b"2026-03-01T12:00:01.000000Z")


@pytest.fixture
def record(line: bytes) -> Record:
    """The line, read back."""
    return DECODER.decode(line)


def test_the_classes_of_envelopes_have_the_declared_fields() -> None:
    """Same names, same order, and required or not as declared."""
    declared = [(field.name, field.is_required) for field in ENVELOPE]

    assert [(field.name, field.required) for field in msgspec.structs.fields(RecordMeta)] == declared
    assert tuple(inspect.signature(EventMeta).parameters) == GIVEN_NAMES == tuple(VALUES)
    assert {field.name for field in msgspec.structs.fields(EventMetaIn)} == set(GIVEN_NAMES)
    assert tuple(EventMeta(**VALUES)._more or ()) == OPTIONAL_NAMES


def test_a_line_has_the_declared_fields_in_their_order(record: Record) -> None:
    """All but how it was sealed, which only an encrypted payload has."""
    written = msgspec.json.decode(record.meta_json)

    assert list(written) == [field.name for field in ENVELOPE if field.name != "sealed"]


def test_an_envelope_survives_every_way_it_travels(event: Event, record: Record, line: bytes) -> None:
    """Through a record, a message to a node and back, an exported line and its import, and a row of the lake."""
    row = row_of(line.strip())

    assert meta_of(record) == event.meta
    assert event_from_json(event_to_wire(event)).meta == event.meta
    assert event_of(record.to_json(), Defaults(topic="other")).meta == event.meta
    assert isinstance(row, dict)
    assert record_of(row) == record


@pytest.mark.parametrize("name", GIVEN_NAMES)
def test_a_filter_can_ask_for_every_field(event: Event, name: str) -> None:
    """Of an event that was not stored, too."""
    assert JSONPathFilter(f"$.meta.{name}", None).matches(event) is False


def test_the_lake_has_a_column_for_every_field() -> None:
    """Under its name, with the type of its kind."""
    columns = dict(column.strip().split(" ") for column in BRONZE_EVENTS.schema.split(","))

    assert {field.name: columns[field.name] for field in ENVELOPE} == {
        field.name: COLUMNS.get(field.kind, "string") for field in ENVELOPE
    }
