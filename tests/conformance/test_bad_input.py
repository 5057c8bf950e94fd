"""What cannot be stored is refused by a typed error that names the field, and nothing is written."""

from __future__ import annotations

import enum
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from typing import Any, Final

import pytest

from tests.conformance.support import SMALL, OpenEngine, event, read_all
from tidings.core.errors import InvalidEvent, InvalidName, InvalidPayload, InvalidTimestamp
from tidings.core.events import Event, SecurityBand
from tidings.log import Log, LogSettings, Query, Refused


class _Weird(enum.Enum):
    NOT_A_NUMBER = float("nan")


def _nested(depth: int) -> dict[str, Any]:
    """An object that is ``depth`` levels deep."""
    inner: dict[str, Any] = {}
    for _ in range(depth - 1):
        inner = {"a": inner}
    return inner


async def refusal_of(log: Log, bad: Event) -> InvalidEvent:
    """The error that an event is refused with, alone and within a batch; the log is as before."""
    await log.append(event("before"))
    before = log.position, log.topics()
    with pytest.raises(InvalidEvent) as caught:
        await log.append(bad)
    (verdict,) = await log.append_many([bad])
    match verdict:
        case Refused(InvalidEvent() as error):
            assert (type(error), str(error)) == (type(caught.value), str(caught.value))
        case _:
            pytest.fail(f"{verdict}")
    assert (log.position, log.topics()) == before
    assert [record.topic for record in await read_all(log, Query())] == ["before"]
    assert not caught.value.retryable
    assert caught.value.code.startswith("event.invalid")
    assert len(str(caught.value)) < 300  # an error is a sentence, not a copy of the input
    return caught.value


BAD_NAMES: Final = {
    "empty": "",
    "slash": "a/b",
    "backslash": "a\\b",
    "absolute": "/etc/passwd",
    "parent": "..",
    "parent_path": "../a",
    "dot": ".",
    "leading_dot": ".a",
    "trailing_dot": "a.",
    "double_dot": "a..b",
    "nul": "a\x00b",
    "newline": "a\n",
    "escape": "\x1b[2J",
    "delete": "a\x7f",
    "line_separator": "a\u2028b",
    "space": "a b",
    "letter_beyond_ascii": "ä",
    "full_width": "ａ",  # noqa: RUF001 - meant
    "surrogate": "a\ud800",
    "joint": "topic__group",
    "trailing_joint": "topic_",
    "leading_joint": "_topic",
    "option": "-rf",
    "long": "x" * 300,
    "wildcard": "*",
    "number": 7,
    "bytes": b"a",
    "nothing": None,
}


@pytest.mark.req("F13", "F18")
@pytest.mark.parametrize("name", BAD_NAMES.values(), ids=list(BAD_NAMES))
async def test_a_topic_must_be_a_name(log: Log, name: Any) -> None:
    """A topic that could be a path, hide in a terminal or not fit a file name is refused."""
    error = await refusal_of(log, event(name))

    assert isinstance(error, InvalidName)
    assert error.field == "meta.topic"


@pytest.mark.req("F13")
@pytest.mark.parametrize("name", [name for name in BAD_NAMES.values() if name is not None], ids=ascii)
async def test_a_type_must_be_a_name(log: Log, name: Any) -> None:
    """A type has the grammar of a topic."""
    error = await refusal_of(log, event(type=name))

    assert isinstance(error, InvalidName)
    assert error.field == "meta.type"


BAD_TEXTS: Final = {
    "empty": "",
    "nul": "a\x00",
    "newline": "a\nb",
    "next_line": "a\x85b",
    "paragraph": "a\u2029b",
    "surrogate": "\udfff",
    "long": "x" * 300,
    "long_in_bytes": "ü" * 150,
    "number": 7,
    "bytes": b"a",
    "list": ["a"],
}


@pytest.mark.req("F7", "F13")
@pytest.mark.parametrize("space_id", BAD_TEXTS.values(), ids=list(BAD_TEXTS))
async def test_every_event_belongs_to_a_space(log: Log, space_id: Any) -> None:
    """An empty space id, or one that is not clean text, is refused."""
    error = await refusal_of(log, event(space_id=space_id))

    assert isinstance(error, InvalidName)
    assert error.field == "meta.space_id"


@pytest.mark.req("F13")
@pytest.mark.parametrize("field", ["event_id", "idem_key"])
@pytest.mark.parametrize("value", BAD_TEXTS.values(), ids=list(BAD_TEXTS))
async def test_ids_must_be_text(log: Log, field: str, value: Any) -> None:
    """An id or key that is not clean text of bounded length is refused."""
    if value == "ü" * 150:
        value *= 2
    error = await refusal_of(log, event(**{field: value}))

    assert isinstance(error, InvalidName)
    assert error.field == f"meta.{field}"


@pytest.mark.req("F13")
@pytest.mark.parametrize(
    "partitions",
    ["one", b"one", 7, [""], ["a", 7], ["a\x00"], ["x" * 300], ["ü" * 100], [f"p{n}" for n in range(65)], [["a"]]],
    ids=ascii,
)
async def test_partitions_must_be_a_list_of_names(log: Log, partitions: Any) -> None:
    """A string instead of a list, an unclean name or too many of them are refused."""
    error = await refusal_of(log, event(partitions=partitions))

    assert isinstance(error, InvalidName)
    assert error.field == "meta.partitions"


async def test_partitions_are_taken_up_to_their_bounds(log: Log) -> None:
    """64 partitions of 128 bytes each are stored, also when they come from an iterator."""
    names = [f"{n:02}" + "ü" * 63 for n in range(64)]

    await log.append(event(partitions=iter(names)))

    (record,) = await read_all(log, Query())
    assert record.meta.partitions == tuple(names)


NOT_JSON: Final[dict[str, Any]] = {
    "set": {1},
    "bytes": b"a",
    "object": object(),
    "complex": 1j,
    "datetime": datetime(2026, 1, 1, tzinfo=UTC),
    "function": len,
    "number_key": {1: 2},
    "nothing_key": {None: 2},
    "tuple_key": {("a",): 2},
    "surrogate": "\ud800",
    "int_above_64_bits": 2**64,
    "int_below_64_bits": -(2**63) - 1,
    "huge_int": 10**400,
    "nan": float("nan"),
    "infinity": float("inf"),
    "minus_infinity": float("-inf"),
    "nan_in_enum": _Weird.NOT_A_NUMBER,
}


@pytest.mark.req("F6", "F8", "F13")
@pytest.mark.parametrize("place", ["value", "in_list", "in_object", "beside_null"])
@pytest.mark.parametrize("value", NOT_JSON.values(), ids=list(NOT_JSON))
async def test_a_payload_must_be_json(log: Log, value: Any, place: str) -> None:
    """What JSON cannot say is refused wherever it hides, never rewritten as null or text."""
    payload: dict[str, Any] = {
        "value": {"a": value},
        "in_list": {"a": [0, [value]]},
        "in_object": {"a": {"b": {"c": value}}},
        "beside_null": {"n": None, "a": (None, value)},
    }[place]

    error = await refusal_of(log, event("a", payload))

    assert isinstance(error, InvalidPayload)
    assert error.field.startswith("payload")


async def test_the_error_says_where_a_nan_is(log: Log) -> None:
    """A number that JSON has no word for is named by its path."""
    error = await refusal_of(log, event("a", {"fine": None, "list": [1, {"deep": float("nan")}]}))

    assert error.field == "payload.list[1].deep"


@pytest.mark.req("F6", "F8")
@pytest.mark.parametrize("payload", [[], [["a", 1]], "text", 7, True, b"{}", 1.5], ids=repr)
async def test_a_payload_must_be_an_object(log: Log, payload: Any) -> None:
    """JSON that is not an object is no payload."""
    error = await refusal_of(log, event("a", payload))

    assert isinstance(error, InvalidPayload)
    assert error.field == "payload"


async def test_no_payload_is_no_object(log: Log) -> None:
    """None instead of a payload is refused; the empty object is fine."""
    nothing: Any = None
    bad = event("a")
    bad.payload = nothing

    assert (await refusal_of(log, bad)).field == "payload"


@pytest.mark.req("F8", "F66")
async def test_a_payload_of_64_mb_is_refused(log: Log) -> None:
    """A payload beyond the limit is refused with its size, the limit, and what to do."""
    error = await refusal_of(log, event("a", {"blob": "x" * 64_000_000}))

    assert isinstance(error, InvalidPayload)
    assert error.field == "payload"
    assert "64000011" in error.problem
    assert str(LogSettings().payload_bytes_max) in error.problem
    assert error.hint


async def test_the_payload_limit_is_exact(open_engine: OpenEngine) -> None:
    """A payload of exactly the allowed size is stored, one byte more is refused; characters count as bytes."""
    log = await open_engine(LogSettings(journal_bytes=SMALL.journal_bytes, payload_bytes_max=100))

    await log.append(event("a", {"a": "x" * 92}))
    await log.append(event("a", {"a": "ü" * 46}))

    for too_large in ("x" * 93, "ü" * 47):
        with pytest.raises(InvalidPayload):
            await log.append(event("a", {"a": too_large}))
    assert log.position.seq == 2


@pytest.mark.req("F8", "F66")
@pytest.mark.parametrize("depth", [129, 300, 10_000])
async def test_a_payload_nested_too_deep_is_refused(log: Log, depth: int) -> None:
    """Nesting beyond the limit is refused, be it by one level or by thousands."""
    error = await refusal_of(log, event("a", _nested(depth)))

    assert isinstance(error, InvalidPayload)
    assert error.field == "payload"


async def test_nesting_is_counted_not_guessed(log: Log) -> None:
    """The deepest nesting allowed is stored, and brackets in texts or side by side do not count as depth."""
    deepest = _nested(100)
    broad = {"text": '[{"' * 500, "lists": [[] for _ in range(500)]}

    await log.append(event("a", deepest))
    await log.append(event("a", broad))

    assert [record.payload for record in await read_all(log, Query())] == [deepest, broad]


@pytest.mark.req("F13")
@pytest.mark.parametrize(
    "ts",
    [
        datetime(2026, 1, 1),  # noqa: DTZ001 - meant
        datetime(9999, 1, 1, tzinfo=UTC),
        datetime.max.replace(tzinfo=timezone(timedelta(hours=-14))),
        datetime.min.replace(tzinfo=timezone(timedelta(hours=14))),
        datetime(1969, 12, 31, 23, 59, 59, tzinfo=UTC),
        datetime(2262, 1, 1, tzinfo=UTC),
        "2026-01-01T00:00:00Z",
        1_767_225_600,
    ],
    ids=str,
)
async def test_a_time_must_have_a_zone_and_a_sensible_year(log: Log, ts: Any) -> None:
    """A time without a zone, or one that the log could not order, is refused."""
    error = await refusal_of(log, event(ts=ts))

    assert isinstance(error, InvalidTimestamp)
    assert error.field == "meta.ts"


async def test_a_time_without_a_zone_comes_with_advice(log: Log) -> None:
    """The error for a naive time tells how to make one that is not."""
    error = await refusal_of(log, event(ts=datetime(2026, 1, 1)))  # noqa: DTZ001 - meant

    assert error.hint


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ttl_sec", -1),
        ("ttl_sec", 1.5),
        ("ttl_sec", "60"),
        ("ttl_sec", True),
        ("ttl_sec", 2**64),
        ("trace_id", 7),
        ("trace_id", "\ud800"),
        ("priority", 1.5),
        ("priority", [1]),
        ("priority", True),
        ("band", "PINK"),
        ("band", "green"),
        ("band", 7),
        ("band", ["GREEN"]),
        ("actor", {"user_id": {1}}),
        ("actor", object()),
        ("device", {"at": datetime(2026, 1, 1, tzinfo=UTC)}),
        ("qos", "fast"),
        ("qos", [1]),
        ("qos", {"priority": 2**70}),
        ("extra", "text"),
        ("extra", ["list"]),
        ("extra", {"event_id": "mine"}),
        ("extra", {"sealed": {}}),
        ("extra", {7: 1}),
        ("extra", _nested(10_000)),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isascii() else type(value).__name__,
)
@pytest.mark.req("F13")
async def test_the_rest_of_the_envelope_is_checked_too(log: Log, field: str, value: Any) -> None:
    """Every optional part that could not be read back as what it is gets refused by its name."""
    error = await refusal_of(log, event(**{field: value}))

    assert error.field == f"meta.{field}"


@pytest.mark.parametrize("field", ["actor", "device", "extra"])
async def test_a_nan_in_the_envelope_is_found(log: Log, field: str) -> None:
    """The envelope holds no number that JSON cannot say, and the error tells where it was."""
    error = await refusal_of(log, event(**{field: {"a": [float("inf")]}}))

    assert error.field == f"meta.{field}.a[0]"


@pytest.mark.req("F66")
@pytest.mark.parametrize("make", [lambda text: {"trace_id": text}, lambda text: {"extra": {"x": text}}])
async def test_an_envelope_has_bounds(log: Log, make: Callable[[str], dict[str, Any]]) -> None:
    """Content does not get in through the envelope: beyond its limit it is refused."""
    error = await refusal_of(log, event(**make("x" * 100_000)))

    assert error.field == "meta"
    assert error.hint


async def test_what_is_allowed_is_taken(log: Log) -> None:
    """The grammar lets through what it is meant to: every kind of name that producers use."""
    topics = ["a", "A.b-C_d", "cognitive.attention.request", "HIPPO_ENCODE@1.2", "x" * 128, "user:42"]
    for n, topic in enumerate(topics):
        done = await log.append(event(topic, type=topic, space_id="ü/ö: *", band=SecurityBand.GREEN, priority="high"))
        assert (done.seq, done.offset) == (n + 1, 0)

    assert set(log.topics()) == set(topics)
