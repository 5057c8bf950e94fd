"""The bus as a first program meets it: a decorator, publish by topic, run until a signal, drain in tests."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from tidings import Ack, Bus, Event, EventMeta, EventType, Nack, ReceivedEvent
from tidings.bus.errors import BusClosed, DrainTimeout, InvalidHandler, OtherEventLoop
from tidings.bus.filtering.base import InvalidFilter
from tidings.core.errors import InvalidEvent, InvalidPayload, InvalidTimestamp, SettingsError
from tidings.filters import SimpleFilter
from tidings.log.errors import WorkspaceBusy


@dataclass
class Order:
    number: str
    price: int = 0


async def test_a_decorated_handler_gets_what_is_published(tmp_path: Path) -> None:
    """A subscriber that was declared before the bus started gets events published by topic; plain functions work too."""
    bus, billed, shipped = Bus(tmp_path), [], []

    @bus.subscriber("orders", group="billing", max_retries=1)
    async def bill(order: Order, attempt: int) -> None:
        billed.append((order, attempt))

    @bus.subscriber("orders", group="shipping")
    def ship(event: ReceivedEvent) -> Ack:
        shipped.append((event.meta.type.name, event.meta.space_id, event.meta.idem_key))
        return Ack()

    await bus.publish("orders", {"number": "o-1"}, type="ORDER_PLACED", space="shared:shop", idem_key="k")
    await bus.publish("orders", Order("o-2", 5), type="ORDER_PLACED", space="shared:shop")
    await bus.publish(Event(EventMeta("orders", "ORDER_PLACED", "shared:shop"), Order("o-3")))  # type: ignore[arg-type]
    await bus.drain()
    await bus.close()

    assert billed == [(Order("o-1"), 1), (Order("o-2", 5), 1), (Order("o-3"), 1)]
    assert shipped[0] == ("ORDER_PLACED", "shared:shop", "k")
    await bill(Order("called"), 1)  # it stays a function
    assert [each.settings.backoff.retries_max for each in bus.get_subscriptions()] == [1, 5]


async def test_a_subscriber_of_a_bus_that_runs_starts_with_the_next_start(tmp_path: Path) -> None:
    """Declared late, it gets what was published before and after."""
    got: list[Any] = []
    async with Bus(tmp_path) as bus:
        await bus.publish(EventType.ACTION_EXECUTED, {"n": 0}, space="shared:shop")

        @bus.subscriber("ACTION_EXECUTED")
        async def note(payload: dict[str, Any]) -> None:
            got.append(payload["n"])

        await bus.start()
        await bus.publish(EventType.ACTION_EXECUTED, {"n": 1}, space="shared:shop")
        await bus.drain()

    assert got == [0, 1]


async def test_a_payload_that_does_not_fit_is_a_dead_letter_at_once(tmp_path: Path) -> None:
    """No retry: the dead letter says where the payload does not fit, and the next event is handled."""
    got: list[Order] = []
    async with Bus(tmp_path) as bus:

        @bus.subscriber("orders", group="billing")
        async def bill(order: Order) -> None:
            got.append(order)

        await bus.start()
        await bus.publish_many(
            [Event(EventMeta("orders", "ORDER_PLACED", "s"), {"number": "a", "price": price}) for price in ("3", 3)]
        )
        await bus.drain()
        (letter,) = await bus.dead_letters("orders")

    assert got == [Order("a", 3)]
    assert (letter.reason, letter.retries) == ("invalid", 0)
    assert letter.error == "the payload is no Order: $.price: expected int, got str"


async def test_drain_waits_for_retries_and_dead_letters(tmp_path: Path) -> None:
    """It returns when what failed was handled after all, or was given up; and not before."""
    tried: list[int] = []
    async with Bus(tmp_path) as bus:

        @bus.subscriber("orders", group="billing", max_retries=2, backoff_base=0.01)
        async def bill(event: Event, attempt: int) -> Nack | None:
            tried.append(attempt)
            if event.payload["n"] == 0 and attempt < 3:
                raise ValueError("not yet")
            return Nack("never") if event.payload["n"] == 1 else None

        for n in range(3):
            await bus.publish("orders", {"n": n}, type="ORDER_PLACED", space="s")
        await bus.drain(timeout_s=30)
        letters = await bus.dead_letters("orders")

        assert bus.lag("orders", "billing") == 0
        assert sorted(tried) == [1, 1, 1, 2, 2, 3, 3]
        assert [letter.offset for letter in letters] == [1]


async def test_drain_waits_for_letters_that_are_to_be_tried_again(tmp_path: Path) -> None:
    """What was requested while no bus ran is tried before it returns; if that takes longer than the time, it says for whom."""
    release = asyncio.Event()
    tried: list[int] = []

    async def bill(event: Event) -> None:
        tried.append(len(tried))
        if len(tried) == 1:
            raise ValueError("no")
        await release.wait()

    async with Bus(tmp_path) as bus:
        await bus.subscribe("orders", "billing", bill, max_retries=0)
        await bus.publish("orders", {}, type="ORDER_PLACED", space="s")
        await bus.drain()
    async with Bus(tmp_path) as bus:
        await bus.redrive("orders")
    async with Bus(tmp_path) as bus:
        await bus.subscribe("orders", "billing", bill, max_retries=0)
        with pytest.raises(DrainTimeout, match="orders/billing lacks 1"):
            await bus.drain(timeout_s=0.05)
        release.set()
        await bus.drain()

        assert tried == [0, 1]
        assert [letter.state for letter in await bus.dead_letters("orders")] == []


async def test_drain_says_who_is_behind(tmp_path: Path) -> None:
    """After the time there is an error that names the groups and how many events they lack."""
    release = asyncio.Event()
    async with Bus(tmp_path) as bus:

        @bus.subscriber("orders", group="slow", workers=1)
        async def wait(event: Event) -> None:
            await release.wait()

        @bus.subscriber("orders", group="quick")
        async def pass_by(event: Event) -> None: ...

        for n in range(3):
            await bus.publish("orders", {"n": n}, type="ORDER_PLACED", space="s")
        with pytest.raises(DrainTimeout, match="orders/slow lacks 3") as caught:
            await bus.drain(timeout_s=0.05)
        release.set()
        await bus.drain()

    assert caught.value.behind == {("orders", "slow"): 3}


async def test_every_failed_attempt_is_logged_with_its_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A retry is a warning and a dead letter an error, both with the traceback from the handler on, which the dead letter keeps too."""
    async with Bus(tmp_path) as bus:

        @bus.subscriber("orders", group="billing", max_retries=1, backoff_base=0.0)
        async def bill(event: Event) -> None:
            raise ValueError("no such customer")

        await bus.publish("orders", {}, type="ORDER_PLACED", space="s")
        await bus.drain()
        (letter,) = await bus.dead_letters("orders")

    logged = [each for each in caplog.records if each.name == "tidings.bus.failures"]
    assert [each.levelname for each in logged] == ["WARNING", "ERROR"]
    assert "attempt 1 failed, the next is in 0.00 s: ValueError: no such customer" in logged[0].getMessage()
    assert all(each.exc_info is not None for each in logged)
    assert letter.traceback.startswith("Traceback (most recent call last)")
    assert 'raise ValueError("no such customer")' in letter.traceback
    assert (letter.traceback.count("File "), str(Path(__file__)) in letter.traceback) == (1, True)
    assert all("eventbus" not in logging.Formatter().format(each) for each in logged)


async def test_a_flood_of_failures_does_not_flood_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Ten of a kind are logged, and how many were not is said."""
    async with Bus(tmp_path) as bus:

        @bus.subscriber("orders", group="billing", max_retries=0)
        async def bill(event: Event) -> None:
            raise ValueError("x" * 100_000)

        await bus.publish_many([Event(EventMeta("orders", "ORDER_PLACED", "s"), {}) for _ in range(200)])
        await bus.drain(30)
        letters = await bus.dead_letters("orders")

    logged = [each for each in caplog.records if each.name == "tidings.bus.failures"]
    assert len(logged) < 40
    counted = [int(found[1]) for each in logged if (found := re.search(r"(\d+) failed attempts", each.getMessage()))]
    assert sum(counted) + sum(each.levelname == "ERROR" for each in logged) == 200
    assert max(len(letter.traceback) for letter in letters) < 9000


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_run_handles_events_until_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    """The handler at work finishes, the bus is closed, run returns, and signals are what they were before."""
    bus, finished = Bus(tmp_path), []

    @bus.subscriber("orders", group="billing")
    async def bill(event: Event) -> None:
        os.kill(os.getpid(), number)
        await asyncio.sleep(0)
        finished.append(event.payload["n"])

    await bus.publish("orders", {"n": 1}, type="ORDER_PLACED", space="s")
    before = signal.getsignal(number)
    await asyncio.wait_for(bus.run(), 30)

    assert finished == [1]
    assert signal.getsignal(number) in (before, signal.SIG_DFL, signal.default_int_handler)
    with pytest.raises(BusClosed):
        await bus.publish("orders", {}, type="ORDER_PLACED", space="s")


async def test_run_ends_when_the_bus_is_closed_elsewhere(tmp_path: Path) -> None:
    """Whoever closes the bus ends run; and cancelling run closes the bus."""
    bus = Bus(tmp_path)
    running = asyncio.create_task(bus.run())
    await bus.start()
    await asyncio.sleep(0)
    await bus.close()
    await asyncio.wait_for(running, 30)

    running = asyncio.create_task(bus.run())
    await bus.start()
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert bus.state == "stopped"


async def test_one_signal_ends_every_run(tmp_path: Path) -> None:
    """Two calls of run on one bus end together."""
    bus = Bus(tmp_path)
    runs = [asyncio.create_task(bus.run()) for _ in range(2)]
    await bus.start()
    await asyncio.sleep(0)
    os.kill(os.getpid(), signal.SIGTERM)

    await asyncio.wait_for(asyncio.gather(*runs), 30)
    assert bus.state == "stopped"


async def test_a_closed_bus_is_not_drained(tmp_path: Path) -> None:
    """Drain does not open a closed bus again, which would then be left open."""
    bus = Bus(tmp_path)
    async with bus:
        await bus.drain()

    with pytest.raises(BusClosed, match=r"bus\.start"):
        await bus.drain()
    assert bus.state == "stopped"


async def test_a_bus_refuses_another_event_loop(tmp_path: Path) -> None:
    """A call from a thread's own loop is refused before anything is stored, and the bus goes on; closed, it may start there."""
    bus = Bus(tmp_path)

    def elsewhere(call: Callable[[], Coroutine[Any, Any, object]]) -> None:
        asyncio.run(call())

    async with bus:
        for call in (bus.start, bus.drain, bus.close, lambda: bus.publish("orders", {}, type="A", space="s")):
            with pytest.raises(OtherEventLoop, match="run_coroutine_threadsafe"):
                await asyncio.to_thread(elsewhere, call)
        assert [event async for event in bus.replay("orders")] == []
        await bus.publish("orders", {}, type="A", space="s")
        with pytest.raises(WorkspaceBusy, match="this process has it open already"):
            await Bus(tmp_path).start()

    async def use() -> None:
        async with bus:
            await bus.drain()

    await asyncio.to_thread(elsewhere, use)


def test_a_decorator_that_is_used_wrongly_is_refused(tmp_path: Path) -> None:
    """Without its parentheses, or above something that is no function; an unknown option is told with those there are."""
    bus = Bus(tmp_path)

    with pytest.raises(InvalidHandler, match="the topic is missing"):
        bus.subscriber(test_a_closed_bus_is_not_drained)  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="not NoneType"):
        bus.subscriber("orders")(None)  # type: ignore[type-var]
    with pytest.raises(SettingsError, match=r"there are: .*max_retries"):
        bus.subscriber("orders", retries=5)(lambda event: None)  # type: ignore[call-arg]
    with pytest.raises(SettingsError, match="must be a list of filters"):
        bus.subscriber("orders", advanced_filters=SimpleFilter("payload.n", 1))(lambda event: None)  # type: ignore[arg-type]
    with pytest.raises(InvalidFilter, match="is no filter but function"):
        bus.subscriber("orders", advanced_filters=[lambda event: True])(lambda event: None)
    assert bus.get_subscriptions() == []


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"middlewares": 5}, "middlewares"),
        ({"workspace": None}, "workspace"),
        ({"settings": {"a": 1}}, "settings"),
        ({"log_settings": {"a": 1}}, "log_settings"),
    ],
)
def test_a_bus_names_the_argument_that_it_cannot_take(arguments: dict[str, Any], name: str) -> None:
    """Settings of the wrong type are refused where the bus is made."""
    with pytest.raises(SettingsError) as refused:
        Bus(**arguments)
    assert refused.value.path == name


async def test_a_value_that_json_has_not_is_named(tmp_path: Path) -> None:
    """The refusal says which field it is, and what to do."""
    async with Bus(tmp_path) as bus:
        with pytest.raises(InvalidPayload, match=r"payload\.at: .*datetime.*hint: publish str\(value\)"):
            await bus.publish(Event(EventMeta("orders", "A", "s"), {"n": 1, "at": datetime(2026, 1, 1)}))  # noqa: DTZ001
        with pytest.raises(InvalidPayload, match=r"payload\.at: .*complex.*hint: publish str\(value\)"):
            await bus.publish("orders", {"n": 1, "at": 1j}, type="A", space="s")


async def test_a_mapping_is_published_as_a_dataclass_is(tmp_path: Path) -> None:
    """Dates, decimals and ids become texts at any depth; what has no JSON form is refused with its place."""
    moment, number = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC), UUID(int=7)
    mapping = {"at": moment, "price": Decimal("12.50"), "lines": [{"id": number}], "day": moment.date()}

    @dataclass
    class Line:
        id: UUID

    @dataclass
    class Invoice:
        at: datetime
        price: Decimal
        lines: list[Line]
        day: date

    async with Bus(tmp_path) as bus:
        await bus.publish("t", mapping, type="T", space="s")
        await bus.publish("t", Invoice(moment, Decimal("12.50"), [Line(number)], moment.date()), type="T", space="s")
        one, other = [dict(event.payload) async for event in bus.replay("t")]
        with pytest.raises(InvalidPayload, match="payload"):
            await bus.publish("t", {"raw": b"bytes"}, type="T", space="s")
        with pytest.raises(InvalidPayload, match="payload"):
            await bus.publish("t", {"thing": object()}, type="T", space="s")

    assert one == other
    assert one["price"] == "12.50"
    assert isinstance(mapping["at"], datetime)


def test_a_handler_that_cannot_be_filled_in_is_refused_where_it_is_written(tmp_path: Path) -> None:
    """The decorator raises, before anything runs; unknown options too."""
    bus = Bus(tmp_path)

    def bill(price: int) -> None: ...

    with pytest.raises(InvalidHandler, match="price: nothing of an event is int"):
        bus.subscriber("orders")(bill)
    with pytest.raises(SettingsError, match="wokers: is no option"):
        bus.subscriber("orders", wokers=2)(print)  # type: ignore[call-arg]
    assert bus.get_subscriptions() == []


WRONG: list[tuple[Callable[[Any], Any], type[Exception], str]] = [
    (lambda bus: bus.publish(42), InvalidEvent, "must be an Event or a topic, not int"),
    (lambda bus: bus.publish("t", {}), InvalidEvent, "meta.type, meta.space_id: are missing"),
    (lambda bus: bus.publish("t", {}, type="T"), InvalidEvent, "space_id: is missing"),
    (
        lambda bus: bus.publish("t", {}, type="T", spaces="s"),
        InvalidEvent,
        r"spaces: is not a keyword .*did you mean space=\?",
    ),
    (lambda bus: bus.publish("t", {}, type="T", space="s", key="k"), InvalidEvent, r"did you mean idem_key=\?"),
    (
        lambda bus: bus.publish("t", {}, type="T", space="s", colour="red"),
        InvalidEvent,
        "colour: .*payload, or in extra",
    ),
    (lambda bus: bus.publish("t", {}, space="s"), InvalidEvent, "type: is missing"),
    (lambda bus: bus.publish("t", [1], type="T", space="s"), InvalidPayload, "must be a JSON object, not list"),
    (lambda bus: bus.publish("t", type="T", space="s"), InvalidPayload, "must be a JSON object, not NoneType"),
    (lambda bus: bus.publish(Event(EventMeta("t", "T", "s"), {}), space="s"), InvalidEvent, "has itself"),
    (lambda bus: bus.publish("t", {}, type="T", space="s", timeout_s="5"), SettingsError, "timeout_s"),
    (lambda bus: bus.publish_many({"n": 1}), InvalidEvent, "must be a list of events, not dict"),
    (lambda bus: bus.publish_many([{"n": 1}]), InvalidEvent, r"events\[0\]: must be an Event, not dict"),
    (lambda bus: bus.publish_many([], timeout_s=True), SettingsError, "timeout_s"),
    (lambda bus: bus.drain(timeout_s="1"), SettingsError, "timeout_s"),
    (lambda bus: bus.drain(timeout_s=None), SettingsError, "timeout_s"),
    (lambda bus: bus.close("soon"), SettingsError, "timeout_s"),
    (lambda bus: bus.redrive("t", "billing-0"), SettingsError, r"ids: must be a list of ids.*give \['billing-0'\]"),
    (lambda bus: bus.drop_dead_letters("t", "billing-0"), SettingsError, "ids: must be a list of ids"),
    (lambda bus: bus.drop_dead_letters("t", None), SettingsError, "ids: must be a list of ids, not None"),
    (lambda bus: anext(bus.replay("t", from_offset="0")), SettingsError, "from_offset"),
    (lambda bus: anext(bus.replay("t", from_time="yesterday")), InvalidTimestamp, "must be a datetime, not str"),
    (lambda bus: anext(bus.replay("t", happened_to=datetime(2026, 1, 1))), InvalidTimestamp, "time zone"),  # noqa: DTZ001
]


@pytest.mark.parametrize(("call", "kind", "problem"), WRONG, ids=[str(at) for at in range(len(WRONG))])
async def test_arguments_of_the_wrong_type_are_named(
    tmp_path: Path, call: Callable[[Any], Any], kind: type[Exception], problem: str
) -> None:
    """What is wrong is told by a typed error that names the argument, and nothing is stored."""
    async with Bus(tmp_path) as bus:
        with pytest.raises(kind, match=problem):
            await call(bus)
        assert bus.log.position.seq == 0
