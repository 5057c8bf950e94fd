"""CloudEvents as values: whatever goes in comes out, and what cannot is refused."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidings.core.errors import InvalidEvent
from tidings.core.events import Event
from tidings.log.record import Record, RecordMeta, Sealed
from tidings.server.api.cloudevents import from_binary, from_structured, to_cloudevent
from tidings.wire.events import EventDefaults

JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
WORDS = st.text(
    min_size=1, max_size=20, alphabet=st.characters(codec="utf-8", exclude_categories=["Cc", "Cs", "Zl", "Zp"])
)
DEFAULTS = EventDefaults(topic="demo", space_id="home")


def stored(event: Event) -> Record:
    """The event as the log would give it back."""
    meta = event.meta
    envelope = RecordMeta(
        written_at="2026-01-01T00:00:00.000000Z",
        topic=meta.topic,
        type=meta.type,
        space_id=meta.space_id,
        event_id=meta.event_id,
        ts=meta.ts.isoformat(),
        trace_id=meta.trace_id,
        partitions=tuple(meta.partitions),
        extra=dict(meta.extra or {}),
    )
    return Record.of(0, 1, envelope, msgspec.Raw(msgspec.json.encode(event.payload)))


URIS = WORDS.map(
    lambda word: "".join(letter if letter.isprintable() and not letter.isspace() else "-" for letter in word)
)


@given(JSON, URIS, WORDS, st.dictionaries(st.from_regex(r"x[a-z0-9]{0,9}", fullmatch=True), WORDS | st.booleans()))
def test_every_attribute_and_all_data_come_back(data: Any, source: str, number: str, more: dict[str, Any]) -> None:
    """Whatever JSON the data is and whatever the extensions are, reading gives them back."""
    given = {"specversion": "1.0", "id": number, "source": source, "type": "t", **more, "data": data}
    back = to_cloudevent(stored(from_structured(given, DEFAULTS)))

    assert {name: back[name] for name in given} == given


@pytest.mark.parametrize("name", ["payload", "data1", "shape", "sealed", "traceid"])
@pytest.mark.parametrize("value", ["data", "data_base64", "none"])
def test_no_extension_can_change_what_the_data_is(name: str, value: str) -> None:
    """An extension may have any name that the standard allows, also one that sounds like ours."""
    given = {"specversion": "1.0", "id": "1", "source": "/s", "type": "t", name: value, "data": {"data": 1, "n": 2}}
    back = to_cloudevent(stored(from_structured(given, DEFAULTS)))

    assert {each: back[each] for each in given} == given


def test_an_event_without_data_comes_back_without() -> None:
    """No data is not the same as an empty object or null, whichever way it came."""
    attributes = {"specversion": "1.0", "id": "1", "source": "/s", "type": "t"}
    structured = to_cloudevent(stored(from_structured(attributes, DEFAULTS)))
    binary = to_cloudevent(
        stored(from_binary({f"ce-{name}": value for name, value in attributes.items()}, b"", DEFAULTS))
    )

    for back in (structured, binary):
        assert not {"data", "data_base64", "datacontenttype"} & back.keys()
    nothing: tuple[Any, ...] = ({}, None)
    for data in nothing:
        assert to_cloudevent(stored(from_structured(attributes | {"data": data}, DEFAULTS)))["data"] == data


@pytest.mark.parametrize(
    "forged", [{"specversion": "0.1"}, {"type": "other"}, {"time": "never"}, {"x": {"y": 1}}, {"X y": 1}, []]
)
def test_what_a_publisher_made_up_is_no_attribute(forged: Any) -> None:
    """Whoever writes into the place where attributes are kept cannot make an event that is no CloudEvent."""
    given = {"specversion": "1.0", "id": "1", "source": "/s", "type": "t", "data": {}}
    record = stored(from_structured(given, DEFAULTS))
    meta = msgspec.structs.replace(record.meta, extra={"cloudevents": forged})

    back = to_cloudevent(Record.of(0, 1, meta, msgspec.Raw(b"{}")))

    assert (back["specversion"], back["type"], back["time"]) == ("1.0", "t", meta.ts)
    assert not {"x", "X y"} & back.keys()


@given(st.binary(min_size=1, max_size=50))
def test_binary_data_comes_back(data: bytes) -> None:
    """A body that is no JSON is kept byte for byte."""
    headers = {"ce-specversion": "1.0", "ce-id": "1", "ce-source": "/s", "ce-type": "t", "content-type": "image/png"}
    back = to_cloudevent(stored(from_binary(headers, data, DEFAULTS)))

    assert msgspec.convert(back["data_base64"], bytes) == data
    assert back["datacontenttype"] == "image/png"


@given(JSON)
def test_no_json_breaks_the_reader(given: Any) -> None:
    """Anything that is JSON is an event or a refusal, never another error."""
    with contextlib.suppress(InvalidEvent):
        assert isinstance(from_structured(given, DEFAULTS), Event)


def test_a_sealed_event_is_shown_without_its_data() -> None:
    """An event that this node cannot open says so, and does not keep a page from being read."""
    given = {"specversion": "1.0", "id": "1", "source": "/s", "type": "t", "data": {"n": 1}}
    record = stored(from_structured(given, DEFAULTS))
    sealed = Sealed(alg="aes", key="k", nonce="n")
    meta = msgspec.structs.replace(record.meta, sealed=sealed)

    back = to_cloudevent(Record.of(0, 1, meta, msgspec.Raw(b'"c2VhbGVk"')))

    assert back["sealed"] is True
    assert "data" not in back


@pytest.mark.parametrize("attribute", ["specversion", "id", "source", "type"])
def test_what_every_cloudevent_has_is_required(attribute: str) -> None:
    """Each required attribute is missed by its name."""
    given = {"specversion": "1.0", "id": "1", "source": "/s", "type": "t"}
    del given[attribute]

    with pytest.raises(InvalidEvent) as refused:
        from_structured(given, DEFAULTS)
    assert refused.value.field == attribute
