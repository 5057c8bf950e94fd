"""Filters say which events are wanted, and say so when they cannot."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonpath import JSONPathEnvironment

from tidings.bus.events import ReceivedEvent
from tidings.core.clock import SystemClock
from tidings.core.events import Actor, Event, EventMeta, EventType, QoS
from tidings.filters import (
    CompoundFilter,
    CustomFunctionFilter,
    Filter,
    FilterChain,
    FilterError,
    FilterManager,
    InvalidFilter,
    JSONPathFilter,
    SimpleFilter,
    is_error_event,
    is_high_priority,
)
from tidings.log.record import Record, RecordMeta

WRITTEN = "2026-01-01T00:00:00.000000Z"
ORDER: dict[str, Any] = {
    "status": "open",
    "amount": 12.5,
    "count": 3,
    "urgent": True,
    "note": None,
    "customer": {"name": "alice", "tags": ["vip", "new"]},
    "items": [{"sku": "a", "status": "ok"}, {"sku": "b", "status": "late"}],
}


def event(payload: Mapping[str, Any] = ORDER, **meta: Any) -> Event:
    return Event(EventMeta(topic="orders", type="ORDER", space_id="shared:home", **meta), payload)


def received(payload: Mapping[str, Any] = ORDER, **meta: Any) -> ReceivedEvent:
    stored = RecordMeta(
        written_at=WRITTEN, topic="orders", type="ORDER", space_id="shared:home", event_id="e1", ts=WRITTEN, **meta
    )
    return ReceivedEvent(Record.of(0, 1, stored, msgspec.Raw(orjson.dumps(payload))), "workers", 1)


class Stopwatch(SystemClock):
    """A clock that a filter under test can move."""

    __slots__ = ("seconds",)

    def __init__(self) -> None:
        self.seconds = 0.0

    def monotonic(self) -> float:
        return self.seconds


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The seqs of records whose payload was decoded, as it happens."""
    seqs: list[int] = []

    def payload(record: Record) -> Any:
        seqs.append(record.seq)
        return orjson.loads(bytes(record.payload_json))

    monkeypatch.setattr(Record, "payload", property(payload))
    return seqs


def raising(_: Event) -> bool:
    raise RuntimeError("broken")


YES = CustomFunctionFilter(lambda _: True, "yes")
NO = CustomFunctionFilter(lambda _: False, "no")
BROKEN = CustomFunctionFilter(raising, "broken")


@pytest.mark.req("F85")
@pytest.mark.parametrize(
    ("path", "expected", "match_type", "wanted"),
    [
        ("payload.status", "open", "exact", True),
        ("payload.status", "closed", "exact", False),
        ("payload.count", 3, "exact", True),
        ("payload.count", 3.0, "exact", True),
        ("payload.count", "3", "exact", False),
        ("payload.urgent", True, "exact", True),
        ("payload.urgent", 1, "exact", False),
        ("payload.count", True, "exact", False),
        ("payload.customer.name", "alice", "exact", True),
        ("payload.customer.tags.1", "new", "exact", True),
        ("payload.customer.tags.7", "new", "exact", False),
        ("payload.customer.tags", ["vip", "new"], "exact", True),
        ("payload.customer.tags", ["vip"], "exact", False),
        ("payload.items.0", {"sku": "a", "status": "ok"}, "exact", True),
        ("payload.status", "^op", "regex", True),
        ("payload.status", "pen$", "regex", True),
        ("payload.status", re.compile("OPEN", re.IGNORECASE), "regex", True),
        ("payload.status", "^pen", "regex", False),
        ("payload.count", "^3$", "regex", True),
        ("payload.missing", ".*", "regex", False),
        ("payload.note", ".*", "regex", False),
        ("payload.status", "pe", "contains", True),
        ("payload.customer.tags", "vip", "contains", True),
        ("payload.amount", "12", "contains", True),
        ("payload.status", "xx", "contains", False),
        ("payload.missing", "null", "contains", False),
        ("payload.amount", 12.5, "gt", False),
        ("payload.amount", 12.5, "gte", True),
        ("payload.amount", 12, "gt", True),
        ("payload.amount", 12.5, "lt", False),
        ("payload.amount", 12.5, "lte", True),
        ("payload.amount", 13, "lt", True),
        ("payload.status", 1, "gt", False),
        ("payload.status", 1, "lt", False),
        ("payload.urgent", 0, "gt", False),
        ("payload.missing", 0, "gte", False),
    ],
)
def test_a_simple_filter_compares_one_payload_field(path: str, expected: object, match_type: Any, wanted: bool) -> None:
    """
    Each operator answers by JSON's rules, the same for an event handed in and for one that was stored.
    """
    subject = SimpleFilter(path, expected, match_type)

    assert subject.matches(event()) is wanted
    assert subject.matches(received()) is wanted


@pytest.mark.req("F85")
def test_a_missing_field_matches_only_an_expected_none() -> None:
    """
    Missing and null are the same to a filter, and equal to nothing but None.
    """
    for path in ("payload.missing", "payload.note", "payload.customer.missing.deeper", "meta.priority", "meta.nothing"):
        assert SimpleFilter(path, None).matches(event())
        others: tuple[object, ...] = ("", 0, False, [])
        for other in others:
            assert not SimpleFilter(path, other).matches(event())
    assert not SimpleFilter("payload.status", None).matches(event())


@pytest.mark.req("F85")
def test_the_filters_of_the_document_work_as_written() -> None:
    """
    Priority and the actor's user id are found whether the actor is a mapping, a struct or came out of the log.
    """
    both = CompoundFilter(
        "AND",
        [SimpleFilter("meta.priority", "high", "exact"), SimpleFilter("meta.actor.user_id", "alice", "exact")],
    )

    assert both.matches(event(priority="high", actor={"user_id": "alice"}))
    assert both.matches(event(priority="high", actor=Actor(user_id="alice")))
    assert both.matches(received(priority="high", actor={"user_id": "alice"}))
    assert not both.matches(event(priority="low", actor={"user_id": "alice"}))
    assert not both.matches(received(priority="high", actor={"user_id": "bob"}))
    assert not both.matches(event(priority="high", actor="alice"))


@pytest.mark.req("F85")
def test_envelope_fields_are_read_by_value() -> None:
    """
    Enum members equal their text, times equal times, and keys of ``extra`` need no mention of it.
    """
    sent = Event(
        EventMeta(
            topic=EventType.HIPPO_ENCODE,
            space_id="s",
            ts=datetime(2026, 1, 1, tzinfo=UTC),
            extra={"tenant": "north"},
        ),
        {},
    )

    assert SimpleFilter("meta.type", "HIPPO_ENCODE").matches(sent)
    assert SimpleFilter("meta.type", "^HIPPO", "regex").matches(sent)
    assert SimpleFilter("meta.type", EventType.HIPPO_ENCODE).matches(sent)
    for subject in (sent, received(extra={"tenant": "north"})):
        assert SimpleFilter("meta.tenant", "north").matches(subject)
        assert SimpleFilter("meta.extra.tenant", "north").matches(subject)
        assert SimpleFilter("meta.ts", datetime(2026, 1, 1, tzinfo=UTC)).matches(subject)


def test_only_data_is_reachable_by_a_path() -> None:
    """
    Methods and private attributes of what an event holds are no fields.
    """
    sent = event(actor=Actor(user_id="alice"), trace_id="t")

    for path in ("meta.actor.__class__", "meta.trace_id.upper", "payload.status.upper", "meta.actor.__struct_fields__"):
        assert SimpleFilter(path, None).matches(sent)


def test_a_filter_sees_a_replaced_envelope_and_payload() -> None:
    """
    What a middleware put into a delivered event counts, not what the log holds.
    """
    delivered = received(priority="low")
    delivered.meta = EventMeta(topic="orders", type="ORDER", space_id="s", priority="high")
    delivered.payload = {"items": [{"status": "new"}]}

    assert SimpleFilter("meta.priority", "high").matches(delivered)
    assert SimpleFilter("payload.items.0.status", "new").matches(delivered)
    assert JSONPathFilter("$.payload.items[*].status", "new").matches(delivered)
    assert JSONPathFilter("$.meta.priority", "high").matches(delivered)


@pytest.mark.parametrize(
    ("build", "argument"),
    [
        (lambda: SimpleFilter("priority", 1), "path"),
        (lambda: SimpleFilter("payload", 1), "path"),
        (lambda: SimpleFilter("payload..a", 1), "path"),
        (lambda: SimpleFilter("meta._more", 1), "path"),
        (lambda: SimpleFilter("payload." + ".".join("a" * 65), 1), "path"),
        (lambda: SimpleFilter(7, 1), "path"),  # type: ignore[arg-type]
        (lambda: SimpleFilter("payload.a", 1, "like"), "match_type"),  # type: ignore[arg-type]
        (lambda: SimpleFilter("payload.a", "(", "regex"), "expected"),
        (lambda: SimpleFilter("payload.a", 1, "regex"), "expected"),
        (lambda: SimpleFilter("payload.a", re.compile(b"a"), "regex"), "expected"),
        (lambda: SimpleFilter("payload.a", "1", "gt"), "expected"),
        (lambda: SimpleFilter("payload.a", True, "gt"), "expected"),
        (lambda: SimpleFilter("payload.a", float("nan"), "lt"), "expected"),
        (lambda: SimpleFilter("payload.a", "", "contains"), "expected"),
        (lambda: SimpleFilter("payload.a", None, "contains"), "expected"),
        (lambda: SimpleFilter("payload.a", object(), "contains"), "expected"),
        (lambda: SimpleFilter("payload.a", object()), "expected"),
        (lambda: JSONPathFilter("payload.a", 1), "expression"),
        (lambda: JSONPathFilter("$.payload[", 1), "expression"),
        (lambda: JSONPathFilter("$.a | $.b", 1), "expression"),
        (lambda: JSONPathFilter("$.a[?nope(@)]", 1), "expression"),
        (lambda: JSONPathFilter("$" + ".a" * 3000, 1), "expression"),
        (lambda: JSONPathFilter(None, 1), "expression"),  # type: ignore[arg-type]
        (lambda: JSONPathFilter("$.a", 1, "gt"), "match_type"),  # type: ignore[arg-type]
        (lambda: CustomFunctionFilter("f"), "function"),  # type: ignore[arg-type]
        (lambda: CustomFunctionFilter(raising, ""), "name"),
        (lambda: CompoundFilter("XOR", [YES]), "operator"),  # type: ignore[arg-type]
        (lambda: CompoundFilter("AND", []), "filters"),
        (lambda: CompoundFilter("NOT", [YES, NO]), "filters"),
        (lambda: CompoundFilter("AND", "ab"), "filters"),  # type: ignore[arg-type]
        (lambda: CompoundFilter("AND", [YES, 3]), "filters[1]"),  # type: ignore[list-item]
        (lambda: CompoundFilter("OR", [YES] * 257), "filters"),
        (lambda: FilterChain([YES, "no"]), "filters[1]"),  # type: ignore[list-item]
    ],
)
@pytest.mark.req("F85", "F86", "F87", "F88")
def test_a_wrong_argument_is_refused_when_the_filter_is_built(build: Any, argument: str) -> None:
    """
    The error names the argument, so that a misspelt filter never gets as far as an event.
    """
    with pytest.raises(InvalidFilter) as refused:
        build()

    assert refused.value.argument == argument
    assert refused.value.code == "bus.invalid_filter"
    assert argument in str(refused.value)


def test_a_coroutine_function_is_no_filter() -> None:
    """
    An awaitable is always true, so neither a coroutine function nor one that hands out awaitables passes for an answer.
    """

    async def later(_: Event) -> bool:
        return False

    with pytest.raises(InvalidFilter):
        CustomFunctionFilter(later)  # type: ignore[arg-type]

    result = CustomFunctionFilter(lambda sent: later(sent), "hidden").evaluate(event())  # type: ignore[arg-type, return-value]

    assert not result.matches
    assert result.error is not None
    assert "awaitable" in result.error


def test_nesting_is_bounded() -> None:
    """
    Filters within filters go 32 deep, built by hand or from their written form.
    """
    nested: Filter = YES
    written: dict[str, Any] = {"type": "custom_function", "config": {"name": "is_error_event"}}
    for _ in range(32):
        nested = CompoundFilter("NOT", [nested])
        written = {"type": "compound", "config": {"operator": "NOT", "filters": [written]}}

    assert nested.matches(event())
    with pytest.raises(InvalidFilter):
        CompoundFilter("NOT", [nested])
    with pytest.raises(InvalidFilter):
        FilterManager().from_dict(written)


@pytest.mark.req("F86")
@pytest.mark.parametrize(
    ("expression", "expected", "match_type", "wanted"),
    [
        ("$.payload.items[*].status", "late", "exact", True),
        ("$.payload.items[*].status", "gone", "exact", False),
        ("$.payload.items[*].status", "late", "any", True),
        ("$.payload.items[*].status", "late", "all", False),
        ("$.payload.items[?@.sku == 'b'].status", "late", "all", True),
        ("$.payload.items[?@.sku == 'c'].status", "late", "all", False),
        ("$.payload.items[-1].sku", "b", "exact", True),
        ("$['payload']['items'][0]['sku']", "a", "exact", True),
        ("$..sku", "a", "exact", True),
        ("$.payload.items[0:1].sku", "b", "exact", False),
        ("$.payload.customer.*", "alice", "exact", True),
        ("$.payload.items[*].status", "at", "contains", True),
        ("$.payload.items[*].status", "^o", "regex", True),
        ("$.payload.items[*].status", "^x", "regex", False),
        ("$.payload.items[?@.status == $.payload.status].sku", None, "exact", True),
        ("$.payload.customer[?@ == $.meta.actor.user_id]", "alice", "exact", True),
        ("$.payload.nothing", None, "exact", True),
        ("$.payload.nothing", None, "all", True),
        ("$.payload.nothing", "x", "all", False),
        ("$.payload.note", None, "exact", True),
        ("$.payload.urgent", 1, "exact", False),
        ("$.payload.customer.tags", ["vip", "new"], "exact", True),
        ("$.meta.space_id", "shared:home", "exact", True),
        ("$.meta.actor.user_id", "alice", "exact", True),
        ("$.meta.trace_id", None, "exact", True),
        ("$[?@.user_id == 'alice'].user_id", "alice", "exact", False),
        ("$.*.user_id", "alice", "exact", False),
        ("$.*.space_id", "shared:home", "exact", True),
    ],
)
def test_a_jsonpath_filter_compares_what_the_path_finds(
    expression: str, expected: object, match_type: Any, wanted: bool
) -> None:
    """
    Names, indexes, slices, wildcards, descent and predicates work over envelope and payload, on events of either kind.
    """
    subject = JSONPathFilter(expression, expected, match_type)

    assert subject.evaluate(event(actor={"user_id": "alice"})).error is None
    assert subject.matches(event(actor={"user_id": "alice"})) is wanted
    assert subject.matches(event(actor=Actor(user_id="alice"))) is wanted
    assert subject.matches(received(actor={"user_id": "alice"})) is wanted


_NAMES = st.sampled_from(["a", "b", "c"])
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(0, 3) | _NAMES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_NAMES, inner, max_size=3),
    max_leaves=12,
)
_STEPS = st.lists(
    _NAMES.map(lambda name: f".{name}") | st.integers(-3, 3).map(lambda at: f"[{at}]") | st.just("[*]"), max_size=4
)


@pytest.mark.req("F86", "F90")
@given(st.dictionaries(_NAMES, _JSON, max_size=3), _STEPS, st.none() | st.booleans() | st.integers(0, 3) | _NAMES)
def test_the_quick_walk_finds_what_the_library_finds(payload: dict[str, Any], steps: list[str], expected: Any) -> None:
    """
    A path of names, indexes and wildcards matches exactly when the library's own search says it should.
    """
    expression = "$.payload" + "".join(steps)
    found = JSONPathEnvironment(strict=True).findall(expression, {"payload": payload})
    wanted = [value == expected and (type(value) is bool) == (type(expected) is bool) for value in found]

    assert JSONPathFilter(expression, expected, "any").matches(event(payload)) is (
        any(wanted) if found else expected is None
    )
    assert JSONPathFilter(expression, expected, "all").matches(event(payload)) is (
        all(wanted) if found else expected is None
    )


@pytest.mark.req("F86")
def test_a_jsonpath_descends_as_deep_as_a_payload_may_be() -> None:
    """
    Descent reaches the bottom of the deepest payload that the log takes.
    """
    payload: dict[str, Any] = {"bottom": True}
    for _ in range(240):
        payload = {"down": payload}

    result = JSONPathFilter("$..bottom", True).evaluate(event(payload))

    assert (result.matches, result.error) == (True, None)


@pytest.mark.req("F90")
def test_an_answer_is_remembered_by_content_until_the_event_may_have_changed(decoded: list[int]) -> None:
    """
    The same stored payload is not decoded for the same filter again; one that a handler has had in hand is looked at anew.
    """
    subject = JSONPathFilter("$.payload.items[*].status", "late")

    assert subject.matches(received())
    assert subject.matches(received())
    assert len(decoded) == 1

    changed = received()
    changed.payload["items"].clear()
    assert not subject.matches(changed)
    assert subject.matches(received())
    assert not subject.matches(received({"items": []}))


@pytest.mark.req("F90")
def test_what_is_remembered_is_bounded_and_stays_right() -> None:
    """
    After more payloads than are remembered, every answer is still the payload's own.
    """
    subject = JSONPathFilter("$.payload.n", 7)

    for n in [*range(600), *range(600)]:
        assert subject.matches(received({"n": n})) is (n == 7)
    big = {"n": 7, "text": "x" * 10_000}
    assert subject.matches(received(big))
    assert subject.matches(received(big))


@pytest.mark.req("F90")
def test_an_envelope_filter_decodes_no_payload_and_a_payload_is_decoded_once(decoded: list[int]) -> None:
    """
    Asking about the envelope leaves the payload alone; any number of payload filters share one decoding.
    """
    delivered = received(priority="high")

    assert SimpleFilter("meta.priority", "high").matches(delivered)
    assert decoded == []

    assert FilterChain(
        [
            SimpleFilter("payload.status", "open"),
            SimpleFilter("payload.count", 3),
            JSONPathFilter("$..sku", "a"),
            CustomFunctionFilter(lambda sent: sent.payload["urgent"], "urgent"),
        ]
    ).matches(delivered)
    assert decoded == [1]


@pytest.mark.req("F87")
def test_a_function_decides() -> None:
    """
    The function gets the event; what it answers counts by its truth.
    """
    large = CustomFunctionFilter(lambda sent: sent.payload.get("amount", 0) > 10, "large")

    assert large.matches(event())
    assert not large.matches(event({}))
    assert CustomFunctionFilter(lambda sent: sent.payload, "any").matches(event())  # type: ignore[arg-type, return-value]
    assert CustomFunctionFilter(is_high_priority).name == "is_high_priority"


@pytest.mark.req("F88")
@pytest.mark.parametrize(
    ("operator", "filters", "wanted"),
    [
        ("AND", [YES, YES], True),
        ("AND", [YES, NO], False),
        ("OR", [NO, YES], True),
        ("OR", [NO, NO], False),
        ("NOT", [NO], True),
        ("NOT", [YES], False),
        ("AND", [BROKEN, NO], False),
        ("AND", [NO, BROKEN], False),
        ("AND", [BROKEN, YES], None),
        ("AND", [YES, BROKEN], None),
        ("OR", [BROKEN, YES], True),
        ("OR", [YES, BROKEN], True),
        ("OR", [BROKEN, NO], None),
        ("NOT", [BROKEN], None),
        ("NOT", [CompoundFilter("OR", [BROKEN, NO])], None),
    ],
)
def test_a_compound_joins_answers_and_never_invents_one(
    operator: Any, filters: list[Filter], wanted: bool | None
) -> None:
    """
    A known answer settles what it can, in any order; otherwise a failure stands, under NOT too.
    """
    subject = CompoundFilter(operator, filters)

    result = subject.evaluate(event())

    assert result.matches is bool(wanted)
    assert (result.error is None) is (wanted is not None)
    if wanted is None:
        assert result.metadata["failed"] == "broken"
        with pytest.raises(FilterError):
            subject.check(event())


@pytest.mark.req("F88")
def test_a_compound_asks_no_further_than_needed() -> None:
    """
    The first no ends AND, the first yes ends OR.
    """
    asked: list[str] = []

    def note(name: str, answer: bool) -> Filter:
        return CustomFunctionFilter(lambda _: asked.append(name) or answer, name)  # type: ignore[func-returns-value]

    CompoundFilter("AND", [note("a", False), note("b", True)]).matches(event())
    CompoundFilter("OR", [note("c", True), note("d", True)]).matches(event())

    assert asked == ["a", "c"]


@pytest.mark.req("F89")
def test_a_chain_wants_what_all_its_filters_want() -> None:
    """
    The filters of a subscription are joined by AND with a short circuit; an empty list wants everything.
    """
    never = CustomFunctionFilter(lambda _: True, "never")
    chain = FilterChain([SimpleFilter("payload.status", "open"), NO, never])

    assert not chain.is_empty
    assert not chain.matches(event())
    assert never.statistics.evaluations == 0
    assert FilterChain([YES, SimpleFilter("payload.status", "open")]).matches(event())
    assert FilterChain().is_empty
    assert FilterChain().matches(event())


@pytest.mark.req("F89")
def test_an_event_whose_filter_raised_is_told_from_one_that_is_not_wanted() -> None:
    """
    A chain reports the failure as a retryable error with its cause, unless another filter surely does not want the event.
    """
    chain = FilterChain([BROKEN, YES])

    assert not chain.matches(event())
    result = chain.evaluate(event())
    assert not result.matches
    assert result.error == "filter 'broken' raised RuntimeError: broken"
    assert result.metadata["failed"] == "broken"
    with pytest.raises(FilterError) as failed:
        chain.check(event())
    assert failed.value.retryable
    assert isinstance(failed.value.cause, RuntimeError)

    assert FilterChain([BROKEN, NO]).evaluate(event()).error is None


def test_statistics_count_evaluations_matches_errors_and_time() -> None:
    """
    Counts are exact, and the time is by the clock handed in.
    """
    clock = Stopwatch()

    def slow(sent: Event) -> bool:
        clock.seconds += 0.002
        if sent.payload["n"] == 0:
            raise ValueError("zero")
        return bool(sent.payload["n"] > 1)

    subject = CustomFunctionFilter(slow, clock=clock)

    result = subject.evaluate(event({"n": 2}))
    for n in (0, 1, 2, 3):
        subject.matches(event({"n": n}))

    assert result.execution_time_ms == pytest.approx(2.0)
    assert result.metadata == {"filter": "slow", "type": "custom_function"}
    stats = subject.statistics
    assert (stats.name, stats.evaluations, stats.matches, stats.errors) == ("slow", 5, 3, 1)
    assert stats.average_time_ms == pytest.approx(2.0)
    assert [one.name for one in FilterChain([subject, YES], clock=clock).statistics] == ["slow", "yes"]


def test_a_filter_is_rebuilt_from_its_written_form() -> None:
    """
    Written as JSON and read back, a filter of every kind answers as before.
    """
    manager = FilterManager({"mine": lambda sent: sent.payload.get("count") == 3})
    subject = CompoundFilter(
        "AND",
        [
            SimpleFilter("payload.customer.tags", ["vip", "new"]),
            SimpleFilter("payload.status", re.compile("OPEN", re.IGNORECASE), "regex"),
            JSONPathFilter("$.payload.items[*].status", "late", "any"),
            CompoundFilter("NOT", [CustomFunctionFilter(is_error_event, "is_error_event")], "fine"),
            CustomFunctionFilter(lambda _: False, "mine"),
        ],
    )

    rebuilt = manager.from_dict(orjson.loads(orjson.dumps(subject.to_dict())))

    assert not subject.matches(event())
    assert rebuilt.matches(event())
    assert not rebuilt.matches(event({**ORDER, "status": "closed"}))
    assert not rebuilt.matches(event({**ORDER, "error": "disk"}))
    assert rebuilt.to_dict() == manager.from_dict(rebuilt.to_dict()).to_dict()
    assert SimpleFilter("meta.priority", "high").to_dict() == {
        "type": "simple",
        "config": {"path": "meta.priority", "expected": "high", "match_type": "exact"},
    }


@pytest.mark.parametrize(
    ("written", "argument"),
    [
        ([], "filter"),
        ({"type": "magic", "config": {}}, "type"),
        ({"type": ["simple"], "config": {}}, "type"),
        ({"type": "simple"}, "config"),
        ({"type": "simple", "config": {"path": "payload.a"}}, "expected"),
        ({"type": "simple", "config": {"path": "payload.a", "expected": 1, "clock": 2}}, "clock"),
        ({"type": "custom_function", "config": {"name": "unknown"}}, "name"),
        ({"type": "custom_function", "config": {"name": ["x"]}}, "name"),
        ({"type": "compound", "config": {"operator": "AND", "filters": {}}}, "filters"),
        ({"type": "compound", "config": {"operator": "AND", "filters": [1]}}, "filter"),
    ],
)
def test_a_wrong_written_form_is_refused(written: Any, argument: str) -> None:
    """
    Unknown types, arguments and functions are named.
    """
    with pytest.raises(InvalidFilter) as refused:
        FilterManager().from_dict(written)

    assert refused.value.argument == argument


def test_a_filter_class_of_your_own() -> None:
    """
    Giving ``decide`` is enough to be a filter; without a ``config`` it has no written form.
    """

    class Even(Filter):
        def decide(self, event: Event) -> bool:
            return bool(event.payload["n"] % 2 == 0)

    subject = CompoundFilter("NOT", [Even("even")])

    assert subject.matches(event({"n": 3}))
    assert not subject.matches(event({"n": 4}))
    with pytest.raises(InvalidFilter):
        subject.to_dict()


@pytest.mark.req("F87")
@pytest.mark.parametrize(
    ("sent", "high", "failure"),
    [
        (event({}, priority="high"), True, False),
        (event({}, priority="URGENT"), True, False),
        (event({}, priority=8), True, False),
        (event({}, priority=7), False, False),
        (event({}, qos=QoS(priority=9)), True, False),
        (event({}, qos={"priority": 9}), True, False),
        (event({}), False, False),
        (event({"error": "disk"}), False, True),
        (event({"status": "FAILED"}), False, True),
        (event({"status": "OK", "error": None}), False, False),
        (Event(EventMeta("jobs", "JOB_FAILED", "s"), {}), False, True),
        (Event(EventMeta("jobs", "TERROR_FILM", "s"), {}), False, False),
    ],
)
def test_the_predefined_functions(sent: Event, high: bool, failure: bool) -> None:
    """
    High priority comes from the priority or the QoS; a failure from the type, the status or an error in the payload.
    """
    assert is_high_priority(sent) is high
    assert is_error_event(sent) is failure
    assert FilterManager().functions == ("is_error_event", "is_high_priority")


class Spoken(Filter):
    """A class of somebody's own that answers as ``re.search`` does."""

    def decide(self, event: Event) -> bool:
        return re.search("late", str(event.payload.get("status")))  # type: ignore[return-value]


@pytest.mark.parametrize(("status", "is_wanted"), [("late", True), ("open", False)])
def test_an_answer_that_is_no_bool_counts_as_what_it_is_taken_for(status: str, is_wanted: bool) -> None:
    """Alone, in a chain, and joined with others: something is a yes, nothing is a no."""
    one, asked = Spoken("spoken"), event({"status": status})
    for _ in range(3):
        assert one.check(asked) is is_wanted
    assert FilterChain([one]).check(asked) is is_wanted
    assert CompoundFilter("OR", [one, one]).check(asked) is is_wanted
    assert CompoundFilter("AND", [one, one]).check(asked) is is_wanted
    assert CompoundFilter("NOT", [one]).check(asked) is not is_wanted
