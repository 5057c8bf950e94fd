"""Flight mode: switched through a shelf, recorded, and learnt by whoever comes late."""

from __future__ import annotations

import pytest

from tidings.ledger import ErrorClass, Ledger, LedgerError, Manifest, PluginFailure, PluginRequest, open_ledger
from tidings.ledger.flight_mode import FlightModes
from tidings.log.memory import MemoryLog
from tidings.testing import VirtualClock

from .support import BLUETOOTH, PLAYBACK, FullLog, told


class Radio:
    """Answers requests; refuses while it is jammed."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, bytes]] = []
        self.is_jammed = False

    async def handle_request(self, request: PluginRequest) -> bytes:
        self.requests.append((request.request_type, request.payload))
        if self.is_jammed:
            raise PluginFailure(ErrorClass.UNAVAILABLE, "the switch is jammed")
        return b'{"on":true}'


@pytest.fixture
def radio(ledger: Ledger) -> Radio:
    made = Radio()
    ledger.plugin("org.example.bluetooth", made, Manifest(shelves=(BLUETOOTH,)))
    return made


async def modes(ledger: Ledger) -> dict[str, bool]:
    return await ledger.read(lambda state: state.part(FlightModes).freeze())


def changed(on: bool) -> dict[str, object]:
    return {"type": "flight_mode_changed", "rack_class": BLUETOOTH, "on": on}


@pytest.mark.req("H41")
async def test_a_set_that_succeeds_is_recorded_and_told(ledger: Ledger, radio: Radio) -> None:
    """
    After the plugin has answered ``flight_mode.set``, the mode is recorded under the whole name of the shelf and told to all who listen.
    What is so already, and a query, are no change.
    """
    listening = [ledger.happenings.subscribe() for _ in range(3)]

    assert await ledger.plugins.request(BLUETOOTH, "flight_mode.set", b'{"on":true}') == b'{"on":true}'
    await ledger.plugins.request(BLUETOOTH, "flight_mode.set", b'{"on":true}')
    await ledger.plugins.request(BLUETOOTH, "flight_mode.query")
    await ledger.plugins.request(BLUETOOTH, "flight_mode.set", b'{"on":false}')

    assert [await told(ledger, each) for each in listening] == [[changed(True), changed(False)]] * 3
    assert await modes(ledger) == {BLUETOOTH: False}
    assert len(radio.requests) == 4


@pytest.mark.req("H41")
async def test_who_comes_late_learns_the_mode(
    ledger: Ledger, radio: Radio, log: MemoryLog, clock: VirtualClock
) -> None:
    """
    After a restart the mode is in the state, replay has the happening that set it, and nothing is emitted again.
    """
    await ledger.plugins.request(BLUETOOTH, "flight_mode.set", b'{"on":true}')
    before = ledger.happenings.last_seq
    await ledger.close()

    async with await open_ledger(log, clock=clock) as again:
        late = again.happenings.subscribe(since=0)

        assert again.happenings.last_seq == before
        assert [(await late.recv()).happening.variant for _ in range(before - 1)] == ["plugin_admitted"] * (before - 1)
        assert (await late.recv()).to_json()["happening"].items() >= changed(True).items()
        assert await modes(again) == {BLUETOOTH: True}


async def test_a_set_that_fails_changes_nothing(ledger: Ledger, radio: Radio) -> None:
    """
    If the plugin refuses, the mode stays; a payload that does not say on or off does not reach it.
    """
    happenings = ledger.happenings.subscribe()
    for payload in (b"", b"{}", b'{"on":"yes"}', b'{"on":true,"for":5}', b"\xff"):
        with pytest.raises(LedgerError) as caught:
            await ledger.plugins.request(BLUETOOTH, "flight_mode.set", payload)
        assert (caught.value.error_class, caught.value.subclass) == (ErrorClass.CONTRACT_VIOLATION, "invalid")
    assert radio.requests == []

    radio.is_jammed = True
    with pytest.raises(PluginFailure, match="jammed"):
        await ledger.plugins.request(BLUETOOTH, "flight_mode.set", b'{"on":true}')

    assert await modes(ledger) == {}
    assert await told(ledger, happenings) == []


async def test_a_plugin_reports_what_it_switched_itself(ledger: Ledger) -> None:
    """
    A plugin may say that its radios were switched; another plugin's shelf, and one of another rack, it may not name.
    """
    plugin = ledger.plugin("org.example.bluetooth", None, Manifest(shelves=(BLUETOOTH,)))

    assert await plugin.set_flight_mode(BLUETOOTH, False)
    assert not await plugin.set_flight_mode(BLUETOOTH, False)
    for name, shelf in (("org.example.other", BLUETOOTH), ("org.example.bluetooth", PLAYBACK)):
        with pytest.raises(LedgerError):
            await ledger.plugin(name).set_flight_mode(shelf, True)

    assert await modes(ledger) == {BLUETOOTH: False}


async def test_the_radios_answer_although_nothing_can_be_stored(
    clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """
    If the mode cannot be recorded after the plugin has switched, its answer is passed on, and the log says what is missing.
    """
    log = FullLog(clock=clock)
    async with await open_ledger(log, clock=clock) as ledger:
        ledger.plugin("org.example.bluetooth", Radio(), Manifest(shelves=(BLUETOOTH,)))
        log.is_full = True
        answer = await ledger.plugins.request(BLUETOOTH, "flight_mode.set", b'{"on":true}')
        log.is_full = False

        assert answer == b'{"on":true}'
        assert f"the flight mode of '{BLUETOOTH}' could not be recorded" in caplog.text
        assert await modes(ledger) == {}
