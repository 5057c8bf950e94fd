"""Plugins: loading, requests by shelf, and what unloading takes along."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tidings.core.errors import SettingsError
from tidings.happenings.bus import HappeningsBus
from tidings.happenings.facade import Happenings
from tidings.happenings.variants import HealthStatus
from tidings.ledger import (
    Assignment,
    Correction,
    ErrorClass,
    Ledger,
    LedgerError,
    Manifest,
    Plugin,
    PluginFailure,
    PluginRequest,
    open_ledger,
)
from tidings.ledger.custody import Custodies, CustodyIsAborted, ReportCustodyState
from tidings.ledger.errors import InvalidCommand
from tidings.ledger.subjects import Subjects
from tidings.log.memory import MemoryLog
from tidings.testing import VirtualClock

from .support import BLUETOOTH, OUTPUTS, PLAYBACK, settled, told

P = "org.example.player"
X, Y = ("x", "1"), ("y", "2")


class Answers:
    """A respondent that answers with a function."""

    def __init__(self, answer: Callable[[PluginRequest], Awaitable[bytes]]) -> None:
        self._answer = answer

    async def handle_request(self, request: PluginRequest) -> bytes:
        return await self._answer(request)


async def echo(request: PluginRequest) -> bytes:
    return f"{request.request_type} {request.instance_id} ".encode() + request.payload


class Stubborn:
    """A warden that will not let go of some of its work."""

    async def take_custody(self, assignment: Assignment) -> None: ...

    async def correct_course(self, correction: Correction) -> None: ...

    async def release_custody(self, handle_id: str) -> None:
        if handle_id == "broken":
            raise ValueError("cannot stop")
        if handle_id == "stuck":
            await asyncio.Event().wait()


def load(ledger: Ledger, shelf: str = PLAYBACK, answer: Callable[[PluginRequest], Awaitable[bytes]] = echo) -> Plugin:
    return ledger.plugin(P, Answers(answer), Manifest(shelves=(shelf,), version="1.2", request_ms_max=500))


# Loading


async def test_a_plugin_is_found_by_its_name(ledger: Ledger) -> None:
    """
    A plugin is loaded once and then found by its name; each time it is loaded is another life.
    """
    plugin = load(ledger)

    assert ledger.plugin(P) is plugin
    with pytest.raises(LedgerError) as caught:
        ledger.plugin(P, Answers(echo))
    await plugin.unload()

    assert caught.value.subclass == "plugin_already_loaded"
    assert load(ledger).load_id != plugin.load_id


async def test_a_shelf_has_room_for_one_plugin(ledger: Ledger) -> None:
    """
    A second plugin is refused on a shelf, and is not loaded at all; when the first is unloaded there is room.
    """
    first = load(ledger)
    both = Manifest(shelves=(OUTPUTS, PLAYBACK))

    with pytest.raises(LedgerError, match=P) as caught:
        ledger.plugin("org.example.other", None, both)
    assert caught.value.subclass == "shelf_occupied"
    assert [entry.name for entry in ledger.plugins.inventory()] == [P]
    await first.unload()
    ledger.plugin("org.example.other", None, both)

    assert [(each.name, each.shelf, each.interaction_kind) for each in ledger.plugins.inventory()] == [
        ("org.example.other", OUTPUTS, "warden"),
        ("org.example.other", PLAYBACK, "warden"),
    ]


async def test_plugins_are_listed_in_the_order_of_loading(ledger: Ledger) -> None:
    """
    The inventory has every plugin with its shelf, kind and version, the first loaded first.
    """
    load(ledger)
    ledger.plugin("org.example.a", Stubborn(), Manifest(shelves=(OUTPUTS,)))
    ledger.plugin("org.example.itself")

    assert [(each.name, each.shelf, each.interaction_kind, each.version) for each in ledger.plugins.inventory()] == [
        (P, PLAYBACK, "respondent", "1.2"),
        ("org.example.a", OUTPUTS, "warden", None),
        ("org.example.itself", None, "warden", None),
    ]


@pytest.mark.parametrize("name", ["", "a\nb", "x" * 5000, "\ud800"])
async def test_wrong_names_are_refused(ledger: Ledger, name: str) -> None:
    """
    A plugin's name is text, not too long, without control characters.
    """
    with pytest.raises(LedgerError) as caught:
        ledger.plugin(name)

    assert (caught.value.error_class, caught.value.subclass) == (ErrorClass.CONTRACT_VIOLATION, "invalid")
    assert ledger.plugins.inventory() == []


@pytest.mark.parametrize(
    "manifest",
    [
        *(Manifest(shelves=(shelf,)) for shelf in ("", "audio", ".x", "x.")),
        Manifest(shelves=(PLAYBACK, PLAYBACK)),
        Manifest(request_ms_max=0),
        Manifest(correction_ms_max=3_600_001),
        Manifest(instances="sometimes"),  # type: ignore[arg-type]
    ],
)
async def test_a_wrong_manifest_is_refused(ledger: Ledger, manifest: Manifest) -> None:
    """
    A shelf without its rack, one that is named twice, a time or a policy that cannot be are refused at loading, by name.
    """
    with pytest.raises(SettingsError, match=r"manifest\.(shelves|\w+_ms_max|instances)"):
        ledger.plugin(P, None, manifest)

    assert ledger.plugins.inventory() == []


async def test_a_handler_that_cannot_be_asked_is_refused(ledger: Ledger) -> None:
    """
    What has the methods of neither respondent nor warden is no handler.
    """
    with pytest.raises(TypeError, match="neither"):
        ledger.plugin(P, object())  # type: ignore[arg-type]

    assert ledger.plugins.inventory() == []


# Requests


async def test_a_request_reaches_the_plugin_on_the_shelf(ledger: Ledger) -> None:
    """
    A request and its answer are passed on as they are; an instance must be one that the plugin has.
    """
    plugin = load(ledger)
    await plugin.announce_instance("one")

    assert await ledger.plugins.request(PLAYBACK, "play", b"\x00\xff") == b"play None \x00\xff"
    assert await ledger.plugins.request(PLAYBACK, "play", instance_id="one") == b"play one "
    with pytest.raises(LedgerError) as caught:
        await ledger.plugins.request(PLAYBACK, "play", instance_id="two")

    assert caught.value.subclass == "unknown_instance"


async def refuse(request: PluginRequest) -> bytes:
    raise PluginFailure(ErrorClass.PERMISSION_DENIED, "not at night", "quiet_hours")


async def crash(request: PluginRequest) -> bytes:
    raise KeyError("volume")


async def hang(request: PluginRequest) -> bytes:
    return await asyncio.Event().wait() and b""


async def answer_text(request: PluginRequest) -> bytes:
    return "text"  # type: ignore[return-value]


async def give_up(request: PluginRequest) -> bytes:
    raise asyncio.CancelledError


def not_async(request: PluginRequest) -> Any:
    return b"not awaitable"


@pytest.mark.parametrize(
    ("answer", "outcome", "text"),
    [
        (refuse, "permission_denied/quiet_hours", "not at night"),
        (crash, "contract_violation/handler_failed", "volume"),
        (hang, "unavailable/timed_out", "within 500 ms"),
        (answer_text, "contract_violation/handler_failed", "no bytes"),
        (give_up, "contract_violation/handler_failed", "cancelled itself"),
        (not_async, "contract_violation/handler_failed", "await"),
    ],
)
async def test_what_goes_wrong_has_a_class(
    ledger: Ledger, clock: VirtualClock, answer: Callable[[PluginRequest], Awaitable[bytes]], outcome: str, text: str
) -> None:
    """
    A plugin's own failure keeps its class; one that crashes, hangs, gives up or answers wrongly has one too.
    """
    load(ledger, answer=answer)

    with pytest.raises(LedgerError, match=text) as caught:
        await clock.run_until(ledger.plugins.request(PLAYBACK, "play"))

    assert f"{caught.value.error_class}/{caught.value.subclass}" == outcome


async def test_a_call_that_nobody_waits_for_is_cancelled(ledger: Ledger, clock: VirtualClock) -> None:
    """
    A handler whose time is over, or whose caller has gone, is cancelled.
    """
    ended: list[str] = []

    async def hang_on(request: PluginRequest) -> bytes:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(request.request_type)
        return b""

    load(ledger, answer=hang_on)
    with pytest.raises(LedgerError):
        await clock.run_until(ledger.plugins.request(PLAYBACK, "too long"))
    asking = asyncio.create_task(ledger.plugins.request(PLAYBACK, "given up"))
    await clock.advance(0.1)
    asking.cancel()
    await clock.advance(0.1)

    assert ended == ["too long", "given up"]


async def test_an_empty_shelf_and_a_warden_answer_no_requests(ledger: Ledger) -> None:
    """
    A request to a shelf without a plugin is not found; a plugin that only takes custody is the wrong one to ask.
    """
    ledger.plugin(P, Stubborn(), Manifest(shelves=(PLAYBACK,)))

    with pytest.raises(LedgerError) as empty:
        await ledger.plugins.request(OUTPUTS, "play")
    with pytest.raises(LedgerError) as warden:
        await ledger.plugins.request(PLAYBACK, "play")

    assert (empty.value.error_class, empty.value.subclass) == (ErrorClass.NOT_FOUND, "shelf_empty")
    assert (warden.value.error_class, warden.value.subclass) == (ErrorClass.CONTRACT_VIOLATION, "dispatch_misroute")


async def test_a_plugin_tells_events_of_its_own(ledger: Ledger) -> None:
    """
    A plugin's event is told under its name and as what it was when it was reported; what is no JSON, too large or too deep is refused.
    """
    plugin = ledger.plugin(P)
    await ledger.finish_waiting()
    happenings = ledger.happenings.subscribe()
    payload = {"sensor": "s1", "values": [1, 2.5, None]}

    await plugin.report_event("reading", payload)
    payload["sensor"] = "changed"
    deep: Any = 0
    for _ in range(101):
        deep = [deep]
    for wrong in ({"at": object()}, float("nan"), "x" * 70_000, "\ud800", deep):
        with pytest.raises(LedgerError):
            await plugin.report_event("reading", wrong)

    told_payload = {"sensor": "s1", "values": [1, 2.5, None]}
    assert await told(ledger, happenings) == [
        {"type": "plugin_event", "plugin": P, "event_type": "reading", "payload": told_payload}
    ]
    [envelope] = [each async for each in ledger.happenings.history(happenings.current_seq)]
    assert envelope.happening.labels()["sensor"] == "s1"


@pytest.mark.req("H20")
async def test_a_plugin_cannot_emit(ledger: Ledger) -> None:
    """
    A plugin has verbs that report, announce and claim, and none that emits: what it calls an event is told as its own event, under its
    own name, whatever name and fields it gives.
    """
    plugin = ledger.plugin(P)
    happenings = ledger.happenings.subscribe()

    await plugin.report_event("custody_released", {"type": "custody_released", "plugin": "org.example.other"})

    [only] = await told(ledger, happenings)
    assert (only["type"], only["plugin"], only["event_type"]) == ("plugin_event", P, "custody_released")
    public = [getattr(plugin, name) for name in dir(plugin) if not name.startswith("_")]
    assert not [each for each in public if isinstance(each, Happenings | HappeningsBus | Ledger)]
    assert not [name for name in dir(plugin) if name.startswith(("emit", "publish", "execute"))]


async def test_an_administrator_sees_what_it_did(ledger: Ledger) -> None:
    """
    Each administrator has the entries of its own deeds, oldest first.
    """
    plugin = ledger.plugin(P)
    await plugin.announce_subject("track", [X, Y])
    await plugin.claim_relation(X, "like", X)
    first, second = ledger.admin("org.example.first"), ledger.admin("org.example.second")

    await first.suppress_relation(X, "like", X, reason="dispute")
    await second.unsuppress_relation(X, "like", X)
    await first.split_subject(X, [[X], [Y]])

    assert [each.kind for each in await first.entries()] == ["relation_suppress", "subject_split"]
    assert [each.kind for each in await second.entries()] == ["relation_unsuppress"]


# Unloading


async def test_unloading_lets_calls_finish_and_takes_no_more(ledger: Ledger, clock: VirtualClock) -> None:
    """
    While a plugin is unloaded its calls under way are answered, if they take no longer than they may; new ones are refused.
    """
    begun, may_finish = asyncio.Event(), asyncio.Event()

    async def slow(request: PluginRequest) -> bytes:
        begun.set()
        await may_finish.wait()
        return b"done"

    plugin = load(ledger, answer=slow)
    under_way = asyncio.create_task(ledger.plugins.request(PLAYBACK, "play"))
    await begun.wait()
    unloading = asyncio.create_task(plugin.unload())
    await clock.advance(0.1)
    with pytest.raises(LedgerError) as refused:
        await ledger.plugins.request(PLAYBACK, "play")
    may_finish.set()

    assert await under_way == b"done"
    await unloading
    assert (refused.value.error_class, refused.value.subclass) == (ErrorClass.UNAVAILABLE, "plugin_unloaded")
    with pytest.raises(LedgerError) as gone:
        await ledger.plugins.request(PLAYBACK, "play")
    assert gone.value.subclass == "shelf_empty"


async def test_a_call_that_does_not_finish_is_cut_off(ledger: Ledger, clock: VirtualClock) -> None:
    """
    A call that is still under way when unloading has waited long enough is cancelled, and its caller told that the plugin is gone.
    """
    plugin = ledger.plugin(P, Answers(hang), Manifest(shelves=(PLAYBACK,)))
    under_way = asyncio.create_task(ledger.plugins.request(PLAYBACK, "play"))
    await clock.advance(0.1)

    await clock.run_until(plugin.unload(seconds=1.0))

    with pytest.raises(LedgerError) as caught:
        await under_way
    assert caught.value.subclass == "plugin_unloaded"
    assert clock.monotonic() == pytest.approx(1.1)


async def test_unloading_releases_custodies_within_the_time(ledger: Ledger, clock: VirtualClock) -> None:
    """
    Unloading has the warden let go of everything at once; what it cannot let go of in time stays on record as aborted.
    """
    plugin = ledger.plugin(P, Stubborn(), Manifest(shelves=(PLAYBACK,)))
    for handle_id in ("fine", "broken", "stuck", "good"):
        await plugin.take_custody(PLAYBACK, "playback", handle_id=handle_id)
    await ledger.execute(ReportCustodyState(plugin=P, handle_id="never taken", health=HealthStatus.HEALTHY))

    unloaded = await clock.run_until(plugin.unload(seconds=2.0))

    left = await ledger.read(lambda state: {each.handle_id: each.state for each in state.part(Custodies)})
    assert unloaded[1:3] == (3, 2)
    assert left.keys() == {"broken", "stuck"}
    assert isinstance(left["broken"], CustodyIsAborted)
    assert "cannot stop" in left["broken"].reason
    assert isinstance(left["stuck"], CustodyIsAborted)
    assert "within 2000 ms" in left["stuck"].reason
    assert clock.monotonic() == pytest.approx(2.0)


async def test_unloading_retracts_addressings_but_no_relations(ledger: Ledger) -> None:
    """
    Subjects that only this plugin has a name of are forgotten with their relations; its claims between others' subjects stay.
    """
    plugin, other = ledger.plugin(P), ledger.plugin("org.example.other")
    for each, names in ((plugin, [X]), (other, [Y]), (other, [("z", "3")])):
        await each.announce_subject("track", names)
    await plugin.announce_subject("track", [Y, ("mine", "2")])
    await plugin.claim_relation(Y, "like", ("z", "3"))
    await plugin.claim_relation(X, "like", Y)
    happenings = ledger.happenings.subscribe()

    unloaded = await plugin.unload()

    assert unloaded.addressings == 2
    assert [each["type"] for each in await told(ledger, happenings)] == [
        "subject_addressing_removed",
        "subject_forgotten",
        "relation_forgotten",
        "plugin_unloaded",
    ]
    relations = (await ledger.projections.list_relations()).items
    subjects = (await ledger.projections.list_subjects()).items
    assert ([each.claimants for each in relations], len(subjects)) == ([(P,)], 2)
    with pytest.raises(LedgerError) as caught:
        await plugin.announce_subject("track", [X])
    assert caught.value.subclass == "plugin_unloaded"


@pytest.mark.parametrize("given", ["ab", ("a",), ("a", "b", "c"), None, 5])
async def test_a_name_is_a_scheme_and_a_value(ledger: Ledger, given: Any) -> None:
    """Anything else is refused as a value that cannot be used."""
    plugin, admin = ledger.plugin(P), ledger.admin("org.example.admin")
    for refused in (
        plugin.announce_subject("track", [given]),
        plugin.retract_addressing(given),
        admin.force_retract_addressing(P, given),
        admin.split_subject(X, [[given], [Y]]),
    ):
        with pytest.raises(InvalidCommand, match="a scheme and a value"):
            await refused


async def test_unloading_takes_along_what_the_plugin_has_just_begun(ledger: Ledger) -> None:
    """
    Announcements that are on their way when a plugin is unloaded are taken back with the rest, also those that their callers no longer wait for.
    """
    plugin = ledger.plugin(P, None, Manifest(shelves=(OUTPUTS,)))
    begun = [
        asyncio.create_task(plugin.announce_subject("track", [X])),
        asyncio.create_task(plugin.announce_subject("track", [Y])),
        asyncio.create_task(plugin.announce_instance("1")),
        asyncio.create_task(plugin.take_custody(OUTPUTS, "amplifying")),
    ]
    await asyncio.sleep(0)
    begun[1].cancel()

    unloaded = await plugin.unload()

    await asyncio.gather(*begun, return_exceptions=True)
    assert (unloaded.instances, unloaded.custodies_released, unloaded.addressings) == (1, 1, 2)
    assert (await ledger.projections.list_addressings()).items == ()
    assert (await ledger.projections.list_custodies()).items == ()


async def test_a_plugin_is_unloaded_at_the_end_of_its_block(ledger: Ledger) -> None:
    """
    As a context manager a plugin is unloaded when the block is left, also by an error.
    """

    async def fail() -> None:
        async with ledger.plugin(P) as plugin:
            await plugin.take_custody(PLAYBACK, "playback")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()

    assert ledger.plugins.loaded == ()
    assert await ledger.read(lambda state: len(state.part(Custodies))) == 0


async def test_drain_unloads_everything_in_order(ledger: Ledger, clock: VirtualClock) -> None:
    """
    Draining retracts all instances first, then releases all custodies within a quarter of its time, then unloads the plugins from the last
    to the first; meanwhile no plugin is loaded.
    """
    for number, shelf in enumerate((PLAYBACK, OUTPUTS)):
        handler = Stubborn() if number else None
        plugin = ledger.plugin(f"org.example.{number}", handler, Manifest(shelves=(shelf,)))
        await plugin.announce_subject("track", [("n", str(number))])
        await plugin.take_custody(shelf, "playback", handle_id="stuck" if number else "fine")
        await plugin.announce_instance("one")
    happenings = ledger.happenings.subscribe()

    draining = asyncio.create_task(ledger.plugins.drain(4.0))
    await clock.advance(0.5)
    with pytest.raises(LedgerError) as caught:
        ledger.plugin("org.example.late")
    await clock.run_until(draining)

    assert (caught.value.error_class, caught.value.subclass) == (ErrorClass.UNAVAILABLE, "shutting_down")
    steps = [(each.happening.variant, each.happening.filter_plugin) for each in await settled(ledger, happenings)]
    assert steps == [
        ("factory_instance_retracted", "org.example.1"),
        ("subject_forgotten", "org.example.1"),
        ("factory_instance_retracted", "org.example.0"),
        ("subject_forgotten", "org.example.0"),
        ("custody_released", "org.example.0"),
        ("custody_aborted", "org.example.1"),
        ("subject_forgotten", "org.example.1"),
        ("plugin_unloaded", "org.example.1"),
        ("subject_forgotten", "org.example.0"),
        ("plugin_unloaded", "org.example.0"),
    ]
    assert clock.monotonic() == pytest.approx(1.0)
    assert ledger.plugins.loaded == ()


async def test_closing_a_ledger_unloads_nothing(ledger: Ledger, log: MemoryLog, clock: VirtualClock) -> None:
    """
    What plugins did is there when the ledger is closed and opened again; the plugins are not, until they are loaded.
    """
    plugin = ledger.plugin(P, None, Manifest(shelves=(BLUETOOTH,)))
    await plugin.announce_subject("track", [X])
    await plugin.take_custody(PLAYBACK, "playback")
    await ledger.close()

    async with await open_ledger(log, clock=clock) as again:
        assert await again.read(lambda state: (len(state.part(Subjects)), len(state.part(Custodies)))) == (1, 1)
        assert again.plugins.inventory() == []
        await again.plugin(P).retract_addressing(X)
