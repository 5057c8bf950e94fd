"""An action is done by whoever answers for its shelf, or published; what came of it is a class."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

import msgspec
import pytest

from tidings.core.errors import TidingsError
from tidings.core.events import Event
from tidings.ledger.errors import ErrorClass, LedgerError
from tidings.log.memory import MemoryLog
from tidings.log.reading import last
from tidings.schedule.actions import ACTION_PAYLOAD_BYTES_MAX, Actions, ScheduledAction
from tidings.sync.dialects import DIALECTS
from tidings.testing import VirtualClock

PLAY = ScheduledAction(target_shelf="audio.player", request_type="play", payload={"station": "news"})
ALARM = ScheduledAction(topic="alarms", event_type="DOOR_OPEN", space="shared:house", payload={"door": "front"})


class Busy(LedgerError):
    """The player is busy."""

    code = "test.busy"
    error_class: ClassVar[ErrorClass] = ErrorClass.RESOURCE_EXHAUSTED
    subclass = "busy"


class Broken(LedgerError):
    """The player is broken."""

    code = "test.broken"
    error_class: ClassVar[ErrorClass] = ErrorClass.TRANSIENT


class Offline(TidingsError):
    """The player cannot be reached."""

    code = "test.offline"
    retryable = True


async def test_the_handler_of_a_shelf_gets_the_action_and_the_name_of_the_firing() -> None:
    """A registered handler is called before requests are routed to plugins, and with what was asked for."""
    calls: list[tuple[str, ScheduledAction, str]] = []

    async def handler(action: ScheduledAction, firing: str) -> None:
        calls.append(("handler", action, firing))

    async def request(action: ScheduledAction, firing: str) -> bytes:
        calls.append(("plugin", action, firing))
        return b""

    actions = Actions(request=request)
    actions.register("audio.player", handler)

    assert await actions.dispatch(PLAY, "f1") == "ok"
    actions.unregister("audio.player")
    assert await actions.dispatch(PLAY, "f2") == "ok"
    assert calls == [("handler", PLAY, "f1"), ("plugin", PLAY, "f2")]
    actions.register("audio.player", handler)
    with pytest.raises(ValueError, match="already"):
        actions.register("audio.player", handler)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (Busy(), "resource_exhausted/busy"),
        (Broken(), "transient"),
        (Offline(), "unavailable"),
        (TidingsError(), "contract_violation"),
        (ZeroDivisionError("secret text"), "internal"),
        (asyncio.CancelledError(), "unavailable/cancelled"),
    ],
)
async def test_an_error_is_told_as_its_class(error: BaseException, outcome: str) -> None:
    """Whatever a handler raises, dispatching answers with a class and, where there is one, a subclass: no text of the error."""

    async def handler(action: ScheduledAction, firing: str) -> None:
        raise error

    actions = Actions()
    actions.register("audio.player", handler)

    assert await actions.dispatch(PLAY, "f1") == outcome


async def test_nobody_there_is_an_outcome() -> None:
    """An action for which there is neither handler, plugin nor bus is not found."""
    actions = Actions()

    assert await actions.dispatch(PLAY, "f1") == "not_found/no_handler"
    assert await actions.dispatch(ALARM, "f1") == "not_found/no_handler"


@pytest.mark.parametrize("is_stubborn", [False, True])
async def test_a_handler_that_never_ends_is_left_after_its_time(is_stubborn: bool) -> None:
    """A dispatch takes no longer than its timeout, also if the handler takes no notice of being cancelled."""
    clock = VirtualClock()
    released = asyncio.Event()

    async def handler(action: ScheduledAction, firing: str) -> None:
        try:
            await released.wait()
        except asyncio.CancelledError:
            if not is_stubborn:
                raise
            await released.wait()

    actions = Actions(clock=clock, timeout_s=5)
    actions.register("audio.player", handler)

    assert await clock.run_until(actions.dispatch(PLAY, "f1")) == "unavailable/timeout"
    assert clock.monotonic() == 5
    released.set()
    await actions.close()


async def test_an_event_is_published_once_for_a_firing() -> None:
    """A firing that is dispatched again stores no second event; another firing does."""
    log = MemoryLog()
    actions = Actions(publish=log.append)

    assert [await actions.dispatch(ALARM, firing) for firing in ("f1", "f1", "f2")] == ["ok"] * 3

    stored = await last(log, 10, topic="alarms")
    assert [(record.meta.type, record.meta.space_id, record.payload) for record in stored] == [
        ("DOOR_OPEN", "shared:house", {"door": "front"})
    ] * 2


async def test_what_the_bus_refuses_is_an_outcome() -> None:
    """An event that cannot be stored makes the outcome, not an exception."""

    async def publish(event: Event) -> None:
        raise Offline

    assert await Actions(publish=publish).dispatch(ALARM, "f1") == "unavailable"


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"target_shelf": "a.b"},
        {"target_shelf": "", "request_type": "go"},
        {"target_shelf": "a.b", "request_type": "go", "topic": "t"},
        {"topic": "t", "event_type": "T", "payload": {}},
        {"topic": "../t", "event_type": "T", "space": "s", "payload": {}},
        {"topic": "t", "event_type": "T", "space": "s", "payload": [1]},
        {"topic": "access", "event_type": "T", "space": "s", "payload": {}},
        {"topic": "audit", "event_type": "T", "space": "s", "payload": {}},
        {"topic": "ledger", "event_type": "T", "space": "s", "payload": {}},
        *({"topic": each.topic, "event_type": "T", "space": "s", "payload": {}} for each in DIALECTS),
        {"topic": "schedule", "event_type": "T", "space": "s", "payload": {}},
        {"target_shelf": "a.b", "request_type": "x" * 257},
        {"target_shelf": "a.b", "request_type": "go", "payload": "x" * ACTION_PAYLOAD_BYTES_MAX},
        {"target_shelf": "a.b", "request_type": "go", "shelf": "other"},
    ],
)
def test_what_is_no_action_is_refused(fields: dict[str, Any]) -> None:
    """An action is one thing, has names that can be used and a payload of bounded size, and writes to no reserved topic."""
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(fields, ScheduledAction)


def test_an_action_is_stored_as_it_was_given() -> None:
    """The JSON of an action has the fields that were given, and gives the same action."""
    assert msgspec.to_builtins(PLAY) == {
        "target_shelf": "audio.player",
        "request_type": "play",
        "payload": {"station": "news"},
    }
    for action in (PLAY, ALARM):
        assert msgspec.json.decode(msgspec.json.encode(action), type=ScheduledAction) == action
