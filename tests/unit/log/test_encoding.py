"""From an event to a line and back: nothing is lost, nothing is let through, nothing grows without bound."""

from __future__ import annotations

import json
import math
import tracemalloc
import types
from collections import OrderedDict
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import msgspec
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidings.core.errors import InvalidEvent, InvalidPayload, InvalidTimestamp
from tidings.core.events import Event, EventMeta
from tidings.log.encoding import EventDraft, EventEncoder, content_digest, same_content, same_draft, unsealed
from tidings.log.encryption import AesGcmEncryptor, Encryptor, SealBroken
from tidings.log.errors import SealedPayload
from tidings.log.keys import DerivedKeys
from tidings.log.record import Record
from tidings.log.segment import decode, decode_trusted, head_of
from tidings.log.settings import LogSettings

WRITTEN_AT = b"2026-01-01T00:00:00.000000Z"
MASTER = bytes(32)

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
)
JSON = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4))
PAYLOADS = st.dictionaries(st.text(), JSON, max_size=5)
TEXTS = st.text(st.characters(min_codepoint=32, exclude_categories=["Cs", "Cc", "Zl", "Zp"]), min_size=1, max_size=30)


def event(payload: Any = None, **changes: Any) -> Event:
    """An event that can be stored, changed as asked."""
    given: dict[str, Any] = {"topic": "demo", "type": "NOTED", "space_id": "s"}
    return Event(EventMeta(**given | changes), {} if payload is None else payload)


def encode(
    one: Event, *, settings: LogSettings | None = None, encryptor: Encryptor | None = None, event_id: str = "e1"
) -> bytes:
    """The event's line at offset 3, seq 7."""
    encoder = EventEncoder(settings or LogSettings(), encryptor)
    draft = encoder.check(one)
    draft.event_id = draft.event_id or event_id
    return encoder.encode(encoder.seal(draft), 3, 7, WRITTEN_AT)


def draft_of(one: Event) -> EventDraft:
    """The event, checked."""
    return EventEncoder(LogSettings()).check(one)


def record_of(one: Event) -> Record:
    """The event as it is read back."""
    found = decode(encode(one)[:-1])
    assert isinstance(found, Record)
    return found


@pytest.mark.req("F27")
def test_a_line_is_plain_json_with_its_place_in_front() -> None:
    """One line, newline at its end only, keys in their order, readable with any JSON tool."""
    line = encode(event({"text": "a\nb\u2028"}, ts=datetime(2025, 1, 1, tzinfo=UTC)))

    assert line.endswith(b"}\n")
    assert line.count(b"\n") == 1
    told = json.loads(line)
    assert list(told) == ["crc", "offset", "seq", "meta", "payload"]
    assert (told["offset"], told["seq"], told["payload"]) == (3, 7, {"text": "a\nb\u2028"})
    assert told["meta"] == {
        "written_at": "2026-01-01T00:00:00.000000Z",
        "topic": "demo",
        "type": "NOTED",
        "space_id": "s",
        "event_id": "e1",
        "ts": "2025-01-01T00:00:00.000000Z",
    }
    head = head_of(line)
    assert head is not None
    assert (head.offset, head.seq, head.written_at) == (3, 7, "2026-01-01T00:00:00.000000Z")


@pytest.mark.req("F14")
@given(PAYLOADS)
def test_any_json_payload_comes_back(payload: dict[str, Any]) -> None:
    """Whatever JSON can say is stored and read back the same, types included."""
    try:
        found = record_of(event(payload)).payload
    except InvalidPayload as error:
        # The strategy draws lone surrogates too, which are no text.
        assert "surrogates" in error.problem  # noqa: PT017 - most draws do not raise
        return
    assert found == payload
    assert repr(found) == repr(json.loads(json.dumps(payload)))


@pytest.mark.req("F14")
@given(
    event_id=TEXTS,
    idem_key=TEXTS,
    trace_id=st.text(st.characters(exclude_categories=["Cs"])),
    space_id=TEXTS,
    partitions=st.lists(TEXTS, max_size=5),
    ttl_sec=st.integers(0, 2**63 - 1),
    priority=st.integers(-10, 10) | TEXTS,
    actor=TEXTS | st.dictionaries(TEXTS, st.integers(-5, 5) | TEXTS, max_size=3),
)
def test_any_sound_envelope_comes_back(**parts: Any) -> None:
    """Every part of an envelope that passes the check is read back as it was given."""
    try:
        record = record_of(event(**parts))
    except InvalidEvent as error:
        assert "bytes long" in error.problem  # noqa: PT017 - most draws do not raise
        return
    meta = record.meta
    partitions = parts.pop("partitions")
    assert {name: getattr(meta, name) for name in parts} == parts
    assert len(meta.partitions) <= len(set(partitions))


@pytest.mark.parametrize(
    "empty",
    [{"partitions": []}, {"partitions": iter(())}, {"extra": {}}, {"partitions": [], "extra": {}, "actor": None}],
    ids=["list", "iterator", "extra", "all"],
)
def test_optional_parts_that_are_empty_leave_a_whole_line(empty: dict[str, Any]) -> None:
    """Giving an optional part without content is the same as leaving it out."""
    ts = datetime(2025, 1, 1, tzinfo=UTC)

    assert encode(event({"n": 1}, ts=ts, **empty)) == encode(event({"n": 1}, ts=ts))


@pytest.mark.parametrize("name", ["actor", "trace_id", "idem_key", "ttl_sec", "device", "band", "priority", "qos"])
def test_optional_parts_that_were_taken_back_leave_a_whole_line(name: str) -> None:
    """Setting an optional part to None afterwards is the same as never having given it."""
    changed = event({"n": 1}, ts=datetime(2025, 1, 1, tzinfo=UTC))
    untouched = encode(changed)

    setattr(changed.meta, name, None)

    assert encode(changed) == untouched


@pytest.mark.req("F74")
def test_unknown_keys_in_an_envelope_are_passed_over() -> None:
    """A line of a newer version, with keys that this one does not know, still reads."""
    told = json.loads(encode(event({"n": 1}, trace_id="t")))
    told["meta"] |= {"from_the_future": {"deep": [1]}, "another": None}
    told["tail"] = "new"

    record = decode_trusted(orjson.dumps(told))

    assert record.payload == {"n": 1}
    assert record.meta == record_of(event({"n": 1}, trace_id="t", ts=record.meta.time)).meta


@pytest.mark.req("F74")
def test_a_line_of_the_first_version_still_reads() -> None:
    """The smallest envelope there is, spelled out, so that no later field can become required unnoticed."""
    record = decode_trusted(
        b'{"crc":"00000000","offset":0,"seq":1,"meta":{"written_at":"2026-01-01T00:00:00.000000Z","topic":"t",'
        b'"type":"T","space_id":"s","event_id":"e","ts":"2026-01-01T00:00:00.000000Z"},"payload":{"n":1}}'
    )

    assert (record.seq, record.offset, record.topic, record.payload) == (1, 0, "t", {"n": 1})
    assert record.meta.time == record.meta.written_time == datetime(2026, 1, 1, tzinfo=UTC)


def test_what_a_caller_does_to_a_payload_stays_with_the_caller() -> None:
    """Each look at a record's payload gives a fresh copy."""
    record = record_of(event({"items": [1]}))

    record.payload["items"].append(2)

    assert record.payload == {"items": [1]}


@pytest.mark.parametrize(
    "payload", [types.MappingProxyType({"n": 1}), OrderedDict(n=1), {"n": 1}], ids=lambda value: type(value).__name__
)
def test_any_mapping_is_a_payload(payload: Any) -> None:
    """The payload itself may be any mapping with text keys."""
    assert record_of(event(payload)).payload == {"n": 1}


def test_the_encoder_keeps_no_more_heads_than_it_must() -> None:
    """Envelopes of ever new spaces do not make the encoder grow without end, and are all encoded right."""
    encoder = EventEncoder(LogSettings())
    tracemalloc.start()
    sizes = []
    for n in range(30_000):
        assert encoder.check(event(space_id=f"s{n}")).head.space_id == f"s{n}"
        if n % 1000 == 999:
            sizes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()

    assert max(sizes[15:]) <= 1.1 * max(sizes[:15])


def test_a_cached_head_is_not_mistaken() -> None:
    """Topic, type and space are told apart in whatever combination they come."""
    encoder = EventEncoder(LogSettings())
    for topic in ("a", "b"):
        for kind in ("a", "b"):
            for space in ("a", "b"):
                head = encoder.check(event(topic=topic, type=kind, space_id=space)).head
                assert (head.topic, head.type, head.space_id) == (topic, kind, space)
    with pytest.raises(InvalidEvent):
        encoder.check(event(topic="a", type="b", space_id=""))


@pytest.mark.req("F66")
@pytest.mark.parametrize("text", ["x" * 4_000_000, '"' * 2_000_000, "\\" * 2_000_000, "[" * 4_000_000])
def test_checking_the_depth_of_a_large_payload_takes_little_memory(text: str) -> None:
    """Beyond what encoding takes by itself, looking through a payload takes no more than one copy of it."""
    large = event({"text": text, "lists": [[] for _ in range(200)]})
    encoder = EventEncoder(LogSettings())

    encoding_bytes = _peak_bytes(lambda: orjson.dumps(large.payload))
    checking_bytes = _peak_bytes(lambda: encoder.check(large))

    assert checking_bytes - encoding_bytes < 5_000_000


def _peak_bytes(work: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("depth_max", [1, 2, 3, 100, 250])
@pytest.mark.parametrize("wrap", [lambda inner: {"a": inner}, lambda inner: [inner], lambda inner: [1, "[{", inner]])
def test_depth_is_measured_exactly(depth_max: int, wrap: Callable[[Any], Any]) -> None:
    """As deep as allowed passes, one level more does not, by objects and by lists."""
    encoder = EventEncoder(LogSettings(payload_depth_max=depth_max))
    inner: Any = 1
    for _ in range(depth_max - 1):
        inner = wrap(inner)

    encoder.check(event({"a": inner}))
    with pytest.raises(InvalidPayload, match="nests"):
        encoder.check(event({"a": wrap(inner)}))


@given(st.datetimes(timezones=st.sampled_from([UTC, timezone(timedelta(hours=5, minutes=30))])))
def test_a_time_is_stored_exactly_or_refused(ts: datetime) -> None:
    """Every time within the range reads back as the same moment; every other one is refused."""
    is_within = datetime(1970, 1, 1, tzinfo=UTC) <= ts < datetime(2262, 1, 1, tzinfo=UTC)
    if is_within:
        assert record_of(event(ts=ts)).meta.time == ts
    else:
        with pytest.raises(InvalidTimestamp):
            draft_of(event(ts=ts))


@given(JSON.filter(lambda value: value is not None), st.sampled_from([math.nan, math.inf, -math.inf]), st.data())
def test_a_number_json_cannot_say_is_found_anywhere(value: Any, bad: float, data: st.DataObject) -> None:
    """Wherever NaN or an infinity is put into a payload, the payload is refused."""
    payload: dict[str, Any] = {"root": value}
    holder: Any = payload
    while True:
        places = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        place = data.draw(st.sampled_from(places))
        inner = holder[place]
        if isinstance(inner, dict | list) and inner and data.draw(st.booleans()):
            holder = inner
            continue
        holder[place] = [None, bad]
        break

    with pytest.raises(InvalidPayload):
        draft_of(event(payload))


@given(PAYLOADS)
def test_a_retry_rebuilt_elsewhere_is_the_same(payload: dict[str, Any]) -> None:
    """Another order of keys, and whole numbers with or without a fraction, say the same."""
    try:
        first = record_of(event(payload, ts=datetime(2025, 1, 1, tzinfo=UTC)))
    except InvalidPayload:
        return

    again = draft_of(event(_rebuilt(payload), actor="someone", trace_id="t"))

    assert same_content(again, first)
    assert content_digest(again) == content_digest(first)


def _rebuilt(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rebuilt(value[key]) for key in reversed(value)}
    if isinstance(value, list):
        return [_rebuilt(inner) for inner in value]
    if isinstance(value, int) and not isinstance(value, bool) and 0 < abs(value) < 2**50:
        return float(value)
    return value


@given(PAYLOADS, PAYLOADS, st.sampled_from(["t", "u"]), st.lists(st.sampled_from("pq"), max_size=2))
def test_digest_and_comparison_agree(
    one: dict[str, Any], other: dict[str, Any], topic: str, partitions: list[str]
) -> None:
    """Two contents have one digest exactly if they compare as the same."""
    try:
        record, draft = record_of(event(one, topic="t")), draft_of(event(other, topic=topic, partitions=partitions))
    except InvalidPayload:
        return

    is_same = same_content(draft, record)
    assert (content_digest(draft) == content_digest(record)) == is_same
    assert same_draft(draft, draft_of(event(one, topic="t"))) == is_same


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"n": 1}, {"n": True}),
        ({"n": 0}, {"n": False}),
        ({"n": [1]}, {"n": [True]}),
        ({"n": 1}, {"n": "1"}),
        ({"n": None}, {}),
        ({"n": "1.0"}, {"n": "1"}),
        ({"1.0": 1}, {"1": 1}),
        ({"n": 1.01}, {"n": 1}),
        ({"n": 10.05}, {"n": 1005}),
        ({"n": []}, {"n": {}}),
        ({"n": 2**53}, {"n": 2**53 + 1}),
        ({"t": 'a\\"1.0'}, {"t": 'a\\"1'}),
    ],
    ids=str,
)
def test_what_only_python_calls_equal_is_not_the_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """True is no 1, text is no number, and what stands in a text is left alone."""
    draft, record = draft_of(event(other)), record_of(event(one))

    assert not same_content(draft, record)
    assert not same_draft(draft, draft_of(event(one)))
    assert content_digest(draft) != content_digest(record)


def test_a_sealed_payload_is_not_in_the_line() -> None:
    """What is sealed is in the line as ciphertext only, and the envelope says with which key."""
    encryptor = AesGcmEncryptor(DerivedKeys(MASTER))
    line = encode(event({"pin": "4711-secret"}), encryptor=encryptor)
    record = decode_trusted(line)

    assert b"4711" not in line
    assert record.meta.sealed is not None
    assert unsealed(record, encryptor).payload == {"pin": "4711-secret"}
    assert unsealed(record, encryptor).meta.sealed is None
    with pytest.raises(SealedPayload):
        unsealed(record, None).payload  # noqa: B018 - reading it is what must fail


def test_a_key_that_is_not_at_hand_leaves_the_record_sealed() -> None:
    """Another key, or none, gives the record back as it stands, instead of failing a whole page."""
    record = decode_trusted(encode(event({"n": 1}), encryptor=AesGcmEncryptor(DerivedKeys(MASTER))))

    other = unsealed(record, AesGcmEncryptor(DerivedKeys(b"\x01" * 32)))

    assert other is record


def test_a_space_that_is_no_longer_protected_can_still_be_read() -> None:
    """What was sealed before a space was taken from the list opens as long as its key is there."""
    record = decode_trusted(encode(event({"n": 1}), encryptor=AesGcmEncryptor(DerivedKeys(MASTER))))

    assert unsealed(record, AesGcmEncryptor(DerivedKeys(MASTER, spaces=()))).payload == {"n": 1}


@pytest.mark.parametrize("field", ["topic", "space_id", "event_id"])
def test_a_sealed_payload_cannot_be_moved_to_another_record(field: str) -> None:
    """A payload put under another topic, space or id does not open."""
    encryptor = AesGcmEncryptor(DerivedKeys(MASTER))
    record = decode_trusted(encode(event({"n": 1}), encryptor=encryptor))
    meta = record.meta
    moved_meta = {
        "topic": msgspec.structs.replace(meta, topic="other"),
        "space_id": msgspec.structs.replace(meta, space_id="other"),
        "event_id": msgspec.structs.replace(meta, event_id="other"),
    }[field]
    moved = Record.of(record.offset, record.seq, moved_meta, record.payload_json)

    if field == "space_id":  # another space has other keys, so the seal names none that is at hand
        assert unsealed(moved, encryptor).meta.sealed is not None
    else:
        with pytest.raises(SealBroken):
            unsealed(moved, encryptor)


def test_sealed_content_is_not_compared_blindly() -> None:
    """Without the key it cannot be said whether a draft repeats a sealed record, and nobody pretends."""
    sealed = decode_trusted(encode(event({"n": 1}), encryptor=AesGcmEncryptor(DerivedKeys(MASTER))))

    with pytest.raises(SealedPayload):
        same_content(draft_of(event({"n": 1})), sealed)
    with pytest.raises(SealedPayload):
        content_digest(sealed)
    assert not same_content(draft_of(event({"n": 1}, topic="other")), sealed)
