"""A handler's parameters say what it gets, and a payload that does not fit is told by its place."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypedDict

import msgspec
import pydantic
import pytest

from tidings.bus.errors import InvalidHandler, PayloadMismatch
from tidings.bus.events import ReceivedEvent
from tidings.bus.payloads import as_payload, bind_handler
from tidings.core.errors import InvalidPayload
from tidings.core.events import Event, EventMeta
from tidings.log.record import Record, RecordMeta

if TYPE_CHECKING:
    from tidings.types import Event as HiddenEvent

AT = "2026-01-01T00:00:00.000000Z"


@dataclass
class Item:
    price: int


@dataclass
class Order:
    number: str
    items: list[Item]


class OrderStruct(msgspec.Struct):
    number: str
    items: list[Item]


class OrderDict(TypedDict):
    number: str
    items: list[Item]


class ItemModel(pydantic.BaseModel):
    price: int


class OrderModel(pydantic.BaseModel):
    number: str
    items: list[ItemModel]


class Cancelled(msgspec.Struct, tag="cancelled"):
    number: str


class Shipped(msgspec.Struct, tag="shipped"):
    number: str


GOOD = {"number": "o-1", "items": [{"price": 3}]}
BAD = {"number": "o-1", "items": [{"price": 3}, {"price": "three"}]}


def received(payload: Mapping[str, Any], attempt: int = 1) -> ReceivedEvent:
    meta = RecordMeta(topic="orders", type="ORDER_PLACED", space_id="shared:shop", event_id="e1", ts=AT, written_at=AT)
    return ReceivedEvent(Record.of(0, 1, meta, msgspec.Raw(msgspec.json.encode(payload))), "billing", attempt)


def by_dataclass(order: Order) -> object:
    return order


def by_struct(order: OrderStruct) -> object:
    return order


def by_typed_dict(order: OrderDict) -> object:
    return order


def by_model(order: OrderModel) -> object:
    return order


def by_mapping(order: Mapping[str, Any]) -> object:
    return order


TYPED: list[tuple[Callable[..., object], type]] = [
    (by_dataclass, Order),
    (by_struct, OrderStruct),
    (by_typed_dict, dict),
    (by_model, OrderModel),
    (by_mapping, dict),
]


@pytest.mark.parametrize(("handler", "wanted"), TYPED, ids=lambda each: getattr(each, "__name__", None))
def test_a_handler_gets_the_payload_as_the_type_it_names(handler: Callable[..., object], wanted: type) -> None:
    """A dataclass, Struct, TypedDict, pydantic model or mapping is what the handler is called with."""
    order = bind_handler(handler)(received(GOOD))

    assert isinstance(order, wanted)
    assert as_payload(order)["items"] in (GOOD["items"], [Item(3)])


@pytest.mark.parametrize("handler", [by_dataclass, by_struct, by_typed_dict])
def test_a_payload_that_does_not_fit_is_told_by_its_place(handler: Callable[..., object]) -> None:
    """The error names the path within the payload, what was expected there, and what was found."""
    with pytest.raises(PayloadMismatch) as caught:
        bind_handler(handler)(received(BAD))

    assert str(caught.value).endswith(": $.items[1].price: expected int, got str")


def test_pydantic_validates_its_own_models() -> None:
    """What pydantic converts is converted, and what it refuses is told by its place."""
    numbers: Any = bind_handler(by_model)(received({"number": "o-1", "items": [{"price": "3"}]}))
    assert numbers.items[0].price == 3

    with pytest.raises(PayloadMismatch, match=r"no OrderModel: \$\.items\[1\]\.price: Input should be a valid integer"):
        bind_handler(by_model)(received(BAD))


def test_several_parameters_are_told_apart_by_annotation_and_name() -> None:
    """Event, envelope, payload and attempt may be asked for in any order, also by keyword only."""

    def handle(order: Order, event: Event, attempt: int, *, meta: EventMeta, retried: bool = False) -> object:
        return order.number, event.payload["number"], attempt, meta.space_id, retried

    assert bind_handler(handle)(received(GOOD, 3)) == ("o-1", "o-1", 3, "shared:shop", False)


def test_tagged_structs_are_chosen_by_their_tag() -> None:
    """A union of tagged Structs gives the one that the payload's tag names."""

    def handle(change: Cancelled | Shipped) -> object:
        return change

    assert bind_handler(handle)(received({"type": "shipped", "number": "o-1"})) == Shipped("o-1")


class Keeper:
    """A handler with state."""

    async def __call__(self, order: Order) -> object:
        return order

    def handle(self, order: Order) -> object:
        return order


async def test_methods_partials_and_objects_are_handlers_too() -> None:
    """Whatever can be called is looked at in the same way, and stays a coroutine function if it was one."""

    def prefixed(prefix: str, order: Order) -> object:
        return prefix + order.number

    calling: Any = bind_handler(Keeper())

    assert await calling(received(GOOD)) == Order("o-1", [Item(3)])
    assert bind_handler(Keeper().handle)(received(GOOD)) == Order("o-1", [Item(3)])
    assert bind_handler(functools.partial(prefixed, "no. "))(received(GOOD)) == "no. o-1"


def plain(event: Any) -> None: ...
def annotated(event: ReceivedEvent) -> None: ...
def unannotated(event) -> None: ...  # type: ignore[no-untyped-def]
def hidden(event: HiddenEvent | None) -> None: ...
def optional(event: Event | None) -> None: ...
def anything(*events: Any) -> None: ...


@pytest.mark.parametrize("handler", [plain, annotated, unannotated, optional, anything, print])
def test_a_plain_handler_is_called_as_it_is(handler: Callable[..., object]) -> None:
    """Nothing is put around a handler that takes the event."""
    assert bind_handler(handler) is handler


def nothing_of_an_event(price: int) -> None: ...
def two_events(event: Event, other: Event) -> None: ...
def two_unknown(event, other) -> None: ...  # type: ignore[no-untyped-def]
def only_keywords(**fields: object) -> None: ...


def yields(event: Event) -> Iterator[int]:
    yield 1


async def yields_async(event: Event) -> AsyncIterator[int]:
    yield 1


@pytest.mark.parametrize(
    ("handler", "problem"),
    [
        (nothing_of_an_event, "price: nothing of an event is int"),
        (two_events, "more than one parameter takes the event"),
        (two_unknown, "more than one parameter takes the event"),
        (hidden, "event: the annotation 'HiddenEvent | None' cannot be looked up"),
        ("billing", "must be a function or a coroutine function, not str"),
        (Order, "is a class"),
        (yields, "is a generator"),
        (yields_async, "is a generator"),
        (lambda: None, "has no parameter that an event could be given to"),
        (only_keywords, "has no parameter that an event could be given to"),
    ],
)
def test_a_handler_that_asks_for_what_there_is_not_is_refused(handler: Any, problem: str) -> None:
    """The refusal names the parameter, and its hint says what parameters may ask for."""
    with pytest.raises(InvalidHandler) as caught:
        bind_handler(handler)

    assert caught.value.problem == problem
    assert caught.value.hint is not None


def test_a_handler_of_lists_takes_the_list_of_events() -> None:
    """With lists there are no typed payloads: one event that does not fit must not fail the others."""

    def events(events: list[Event]) -> None: ...
    def orders(orders: list[Order]) -> None: ...
    def both(events: list[Event], attempt: int) -> None: ...

    assert bind_handler(events, takes_lists=True) is events
    with pytest.raises(InvalidHandler, match="takes a list of events"):
        bind_handler(orders, takes_lists=True)
    with pytest.raises(InvalidHandler, match="takes one parameter"):
        bind_handler(both, takes_lists=True)


@dataclass
class Visit:
    at: datetime


@pytest.mark.parametrize(
    ("value", "payload"),
    [
        (GOOD, GOOD),
        (Order("o-1", [Item(3)]), GOOD),
        (OrderStruct("o-1", [Item(3)]), GOOD),
        (OrderModel(number="o-1", items=[ItemModel(price=3)]), GOOD),
        (Visit(datetime(2026, 1, 1, tzinfo=UTC)), {"at": "2026-01-01T00:00:00Z"}),
    ],
)
def test_what_a_handler_can_ask_for_can_be_published(value: object, payload: Mapping[str, Any]) -> None:
    """Objects become the mapping that the same type reads back."""
    assert as_payload(value) == payload


class AliasedModel(pydantic.BaseModel):
    item_count: int = pydantic.Field(0, alias="itemCount")


@dataclass
class Shelf:
    by_row: dict[int, str]


def take_aliased(model: AliasedModel) -> object:
    return model


def take_shelf(shelf: Shelf) -> object:
    return shelf


@pytest.mark.parametrize(
    ("handler", "value"), [(take_aliased, AliasedModel(itemCount=4)), (take_shelf, Shelf({1: "tea"}))]
)
def test_aliases_and_keys_that_are_numbers_come_back(handler: Callable[..., object], value: object) -> None:
    """A field is stored under the alias that it is read by, and a mapping's whole numbers as text."""
    assert bind_handler(handler)(received(as_payload(value))) == value


@pytest.mark.parametrize("value", [None, 3, "text", [1], object(), Order])
def test_what_is_no_object_cannot_be_published(value: object) -> None:
    """The error says what it was."""
    with pytest.raises(InvalidPayload, match="must be a JSON object, not"):
        as_payload(value)
