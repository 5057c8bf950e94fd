"""Custody through the plugin API: what is recorded, what is told, and what becomes of work that goes wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import msgspec
import pytest

from tidings.happenings.variants import HealthStatus
from tidings.ledger import (
    Assignment,
    Correction,
    CorrectionFailure,
    ErrorClass,
    Ledger,
    LedgerError,
    Manifest,
    PluginFailure,
    PluginRequest,
    open_ledger,
)
from tidings.ledger.custody import Custodies, CustodyRecord
from tidings.ledger.errors import DuplicateCustody, UnknownCustody
from tidings.ledger.plugins import Plugin
from tidings.log.memory import MemoryLog
from tidings.testing import VirtualClock

from .support import OUTPUTS, PLAYBACK, FullLog, told

P = "org.example.player"


class Player:
    """A warden that does as it is told, reports when it begins, and goes wrong on demand."""

    plugin: Plugin

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.trouble: Exception | None = None
        self.hangs = False
        self.reports_at_start = False

    async def take_custody(self, assignment: Assignment) -> None:
        if self.reports_at_start:
            await self.plugin.report_custody_state(assignment.handle_id, HealthStatus.HEALTHY, b"starting")
        await self._do(f"take {assignment.custody_type} {assignment.payload!r}")

    async def correct_course(self, correction: Correction) -> None:
        await self._do(f"correct {correction.shelf} {correction.correction_type} {correction.payload!r}")

    async def release_custody(self, handle_id: str) -> None:
        await self._do("release")

    async def _do(self, what: str) -> None:
        self.calls.append(what)
        if self.hangs:
            await asyncio.Event().wait()
        if self.trouble is not None:
            raise self.trouble


def load(ledger: Ledger, manifest: Manifest | None = None) -> tuple[Plugin, Player]:
    player = Player()
    player.plugin = ledger.plugin(P, player, manifest or Manifest(shelves=(PLAYBACK,)))
    return player.plugin, player


async def records(ledger: Ledger) -> list[CustodyRecord]:
    return await ledger.read(lambda state: list(state.part(Custodies)))


@pytest.mark.req("H21", "H22", "H23")
async def test_each_notice_of_custody_finds_the_record_as_it_says(ledger: Ledger) -> None:
    """
    Whoever lists the custodies upon a notice finds: after the taking the record with shelf and type; after a report that very report;
    after the release no record.
    """
    plugin = ledger.plugin(P)
    await ledger.finish_waiting()
    subscription = ledger.happenings.subscribe()
    found: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()

    async def react() -> None:
        async for envelope in subscription:
            items = (await ledger.projections.list_custodies()).items
            await found.put((envelope.happening.variant, items))

    reacting = asyncio.create_task(react())
    handle = await plugin.take_custody(PLAYBACK, "playback")
    taken, [at_taking] = await found.get()
    await plugin.report_custody_state(handle, HealthStatus.DEGRADED, b"half way")
    reported, [at_report] = await found.get()
    await plugin.release_custody(handle)
    released, after = await found.get()
    reacting.cancel()

    assert (taken, reported, released) == ("custody_taken", "custody_state_reported", "custody_released")
    assert (at_taking.handle_id, at_taking.shelf, at_taking.custody_type) == (handle.id, PLAYBACK, "playback")
    assert (at_report.last_state.health, at_report.last_state.payload) == (HealthStatus.DEGRADED, b"half way")
    assert after == ()


async def test_a_warden_is_asked_first_and_then_recorded(ledger: Ledger) -> None:
    """
    Taking, correcting and releasing through a shelf ask the warden on it; the ledger has the custody in between.
    """
    _, player = load(ledger)
    happenings = ledger.happenings.subscribe()

    handle = await ledger.plugins.take_custody(PLAYBACK, "playback", b"track 1")
    [record] = await records(ledger)
    await ledger.plugins.correct_course(PLAYBACK, handle.id, "seek", b"1:00")
    released = await ledger.plugins.release_custody(PLAYBACK, handle.id)

    assert player.calls == ["take playback b'track 1'", "correct audio.playback seek b'1:00'", "release"]
    assert (record.plugin, record.handle_id, record.started_at_ms) == (P, *handle)
    assert (released, await records(ledger)) == (record, [])
    assert await told(ledger, happenings) == [
        {"type": "custody_taken", "plugin": P, "handle_id": handle.id, "shelf": PLAYBACK, "custody_type": "playback"},
        {"type": "custody_released", "plugin": P, "handle_id": handle.id},
    ]


async def test_a_warden_may_report_before_custody_is_taken(ledger: Ledger) -> None:
    """
    A report from within the taking is told first; the record has shelf and type from the taking on.
    """
    _, player = load(ledger)
    player.reports_at_start = True
    happenings = ledger.happenings.subscribe()

    await ledger.plugins.take_custody(PLAYBACK, "playback")

    assert [each["type"] for each in await told(ledger, happenings)] == ["custody_state_reported", "custody_taken"]
    [record] = await records(ledger)
    assert (record.shelf, record.last_state and record.last_state.payload) == (PLAYBACK, b"starting")


async def test_custody_that_a_warden_refuses_leaves_nothing(ledger: Ledger) -> None:
    """
    If the warden fails to take custody there is neither record nor happening of it, also if it had reported already.
    """
    _, player = load(ledger)
    player.reports_at_start = True
    player.trouble = PluginFailure(ErrorClass.RESOURCE_EXHAUSTED, "no free output", "outputs_busy")
    happenings = ledger.happenings.subscribe()

    with pytest.raises(PluginFailure, match="no free output") as caught:
        await ledger.plugins.take_custody(PLAYBACK, "playback")

    assert (caught.value.error_class, caught.value.subclass) == (ErrorClass.RESOURCE_EXHAUSTED, "outputs_busy")
    assert caught.value.retryable
    assert await records(ledger) == []
    assert [each["type"] for each in await told(ledger, happenings)] == ["custody_state_reported"]


async def test_work_that_cannot_be_recorded_is_ended_again(clock: VirtualClock) -> None:
    """
    If the ledger cannot store a custody that the warden has taken, the warden is asked to let go of it, and the caller told.
    """
    log = FullLog(clock=clock)
    async with await open_ledger(log, clock=clock) as ledger:
        _, player = load(ledger)
        log.is_full = True
        with pytest.raises(LedgerError) as caught:
            await ledger.plugins.take_custody(PLAYBACK, "playback")
        log.is_full = False

        assert caught.value.error_class is ErrorClass.UNAVAILABLE
        assert player.calls == ["take playback b''", "release"]
        assert await records(ledger) == []


async def test_custody_that_a_warden_will_not_release_goes_on(ledger: Ledger) -> None:
    """
    If the warden fails to release, the record stays and nothing is told.
    """
    _, player = load(ledger)
    handle = await ledger.plugins.take_custody(PLAYBACK, "playback")
    player.trouble = ValueError("jammed")
    happenings = ledger.happenings.subscribe()

    with pytest.raises(LedgerError, match="jammed") as caught:
        await ledger.plugins.release_custody(PLAYBACK, handle.id)

    assert (caught.value.error_class, caught.value.subclass) == (ErrorClass.CONTRACT_VIOLATION, "handler_failed")
    assert len(await records(ledger)) == 1
    assert await told(ledger, happenings) == []


@pytest.mark.parametrize(
    ("policy", "variant", "state"),
    [
        (None, "custody_aborted", "CustodyIsAborted"),
        (CorrectionFailure.ABORT, "custody_aborted", "CustodyIsAborted"),
        (CorrectionFailure.PARTIAL_OK, "custody_degraded", "CustodyIsDegraded"),
    ],
)
@pytest.mark.parametrize("fails_by", ["error", "time"])
async def test_a_failed_correction_is_marked_and_told(
    ledger: Ledger, clock: VirtualClock, policy: CorrectionFailure | None, variant: str, state: str, fails_by: str
) -> None:
    """
    A correction that fails or takes too long aborts the custody, or degrades it if the plugin says so; reason and error are the same text.
    """
    manifest = Manifest(shelves=(PLAYBACK,), correction_ms_max=200)
    if policy is not None:
        manifest = msgspec.structs.replace(manifest, on_failed_correction=policy)
    _, player = load(ledger, manifest)
    handle = await ledger.plugins.take_custody(PLAYBACK, "playback")
    player.hangs = fails_by == "time"
    player.trouble = ValueError("the needle broke")
    happenings = ledger.happenings.subscribe()

    with pytest.raises(LedgerError) as caught:
        await clock.run_until(ledger.plugins.correct_course(PLAYBACK, handle.id, "seek"))

    assert caught.value.subclass == {"error": "handler_failed", "time": "timed_out"}[fails_by]
    reason = str(caught.value)
    assert ("the needle broke" if fails_by == "error" else "within 200 ms") in reason
    assert await told(ledger, happenings) == [
        {"type": variant, "plugin": P, "handle_id": handle.id, "shelf": PLAYBACK, "reason": reason}
    ]
    [record] = await records(ledger)
    assert (type(record.state).__name__, getattr(record.state, "reason", None)) == (state, reason)
    player.hangs, player.trouble = False, None
    await ledger.plugins.release_custody(PLAYBACK, handle.id)


async def test_an_undeclared_correction_does_not_reach_the_warden(ledger: Ledger) -> None:
    """
    A plugin that declares its corrections is asked for no other; one that declares none is asked for any.
    """
    _, player = load(ledger, Manifest(shelves=(PLAYBACK,), corrections=("seek",)))
    handle = await ledger.plugins.take_custody(PLAYBACK, "playback")
    await ledger.plugins.correct_course(PLAYBACK, handle.id, "seek")
    happenings = ledger.happenings.subscribe()

    with pytest.raises(LedgerError) as caught:
        await ledger.plugins.correct_course(PLAYBACK, handle.id, "pitch")

    assert caught.value.subclass == "undeclared_correction"
    assert player.calls[1:] == ["correct audio.playback seek b''"]
    assert await told(ledger, happenings) == []


async def test_a_plugin_without_a_handler_drives_itself(ledger: Ledger) -> None:
    """
    Without a handler the verbs write down what the plugin does, failures included; there is nobody to be corrected.
    """
    plugin = ledger.plugin(P)
    happenings = ledger.happenings.subscribe()

    handle = await plugin.take_custody(PLAYBACK, "playback", handle_id="mine")
    await plugin.report_custody_state(handle, HealthStatus.DEGRADED, b"slow")
    await plugin.degrade_custody("mine", "buffer too small")
    await plugin.abort_custody(handle, "gave up")
    with pytest.raises(LedgerError) as caught:
        await plugin.correct_course(handle, "seek")
    await plugin.release_custody(handle)

    assert caught.value.subclass == "dispatch_misroute"
    assert [(each["type"], each.get("health") or each.get("reason")) for each in await told(ledger, happenings)] == [
        ("custody_taken", None),
        ("custody_state_reported", "degraded"),
        ("custody_degraded", "buffer too small"),
        ("custody_aborted", "gave up"),
        ("custody_released", None),
    ]


async def test_a_respondent_takes_no_custody(ledger: Ledger) -> None:
    """
    Custody is refused on the shelf of a plugin that only answers requests, and on another plugin's shelf.
    """

    class Answers:
        async def handle_request(self, request: PluginRequest) -> bytes:
            return b""

    ledger.plugin("org.example.outputs", Answers(), Manifest(shelves=(OUTPUTS,)))
    plugin, _ = load(ledger)

    with pytest.raises(LedgerError) as misrouted:
        await ledger.plugins.take_custody(OUTPUTS, "playback")
    with pytest.raises(LedgerError) as elsewhere:
        await plugin.take_custody(OUTPUTS, "playback")

    assert misrouted.value.subclass == "dispatch_misroute"
    assert elsewhere.value.subclass == "not_on_shelf"
    assert await records(ledger) == []


@pytest.mark.parametrize("verb", ["correct", "release"])
async def test_an_unknown_handle_does_not_reach_the_warden(ledger: Ledger, verb: str) -> None:
    """
    Nothing is asked of a warden about a custody that is not on record.
    """
    plugin, player = load(ledger)

    with pytest.raises(LedgerError) as caught:
        await (plugin.correct_course("none", "seek") if verb == "correct" else plugin.release_custody("none"))

    assert (caught.value.error_class, caught.value.subclass) == (ErrorClass.NOT_FOUND, "unknown_custody")
    assert player.calls == []


async def test_a_custody_is_asked_for_on_its_own_shelf(ledger: Ledger) -> None:
    """
    On another shelf of the same plugin a custody is not known; nothing is asked of the warden.
    """
    plugin, player = load(ledger, Manifest(shelves=(PLAYBACK, OUTPUTS)))
    handle = await plugin.take_custody(PLAYBACK, "playback")

    for doing in (
        ledger.plugins.release_custody(OUTPUTS, handle.id),
        ledger.plugins.correct_course(OUTPUTS, handle.id, "seek"),
    ):
        with pytest.raises(LedgerError) as caught:
            await doing
        assert caught.value.subclass == "unknown_custody"
    assert player.calls == ["take playback b''"]


async def test_what_is_being_taken_can_be_neither_corrected_nor_failed(ledger: Ledger) -> None:
    """
    While a warden takes custody, and has reported already, there is nothing yet to correct or to mark as failed.
    """
    plugin, player = load(ledger)
    player.reports_at_start = True
    player.hangs = True
    await ledger.finish_waiting()
    happenings = ledger.happenings.subscribe()
    taking = asyncio.create_task(plugin.take_custody(PLAYBACK, "playback", handle_id="soon"))
    await happenings.recv()

    for doing in (plugin.correct_course("soon", "seek"), plugin.abort_custody("soon", "why")):
        with pytest.raises(LedgerError, match="being taken"):
            await doing
    taking.cancel()
    await asyncio.gather(taking, return_exceptions=True)

    assert await records(ledger) == []


async def test_a_correction_under_way_ends_with_its_plugin(ledger: Ledger, clock: VirtualClock) -> None:
    """
    A correction that unloading does not wait for is no failure of the work: the custody is released like any other.
    """
    plugin, player = load(ledger)
    handle = await plugin.take_custody(PLAYBACK, "playback")
    happenings = ledger.happenings.subscribe()
    player.hangs = True
    correcting = asyncio.create_task(plugin.correct_course(handle, "seek"))
    await clock.advance(0.1)
    unloading = asyncio.create_task(plugin.unload(seconds=1.0))
    await clock.advance(0.1)
    player.hangs = False
    await clock.run_until(unloading)

    with pytest.raises(LedgerError) as caught:
        await correcting
    assert caught.value.subclass == "plugin_unloaded"
    assert [each["type"] for each in await told(ledger, happenings)] == ["custody_released", "plugin_unloaded"]
    assert await plugin.unload() == (0, 0, 0, 0)


async def test_a_late_report_brings_no_custody_back(ledger: Ledger) -> None:
    """
    What a warden reports about work that was released, or that it failed to take, is refused and leaves no record.
    """
    plugin, player = load(ledger)
    released = await plugin.take_custody(PLAYBACK, "playback", handle_id="released")
    await plugin.release_custody(released)
    player.trouble = ValueError("no output")
    with pytest.raises(LedgerError):
        await plugin.take_custody(PLAYBACK, "playback", handle_id="failed")
    happenings = ledger.happenings.subscribe()

    for handle_id in ("released", "failed", "never"):
        with pytest.raises(LedgerError) as caught:
            await plugin.report_custody_state(handle_id, HealthStatus.HEALTHY)
        assert caught.value.subclass == "unknown_custody"

    assert (await records(ledger), await told(ledger, happenings)) == ([], [])


async def test_a_plugin_without_a_handler_has_no_late_reports_either(ledger: Ledger) -> None:
    """
    A report about work that was released is refused, and leaves no record that would block the next one under the handle.
    """
    plugin = ledger.plugin(P)
    handle = await plugin.take_custody(PLAYBACK, "playback", handle_id="mine")
    await plugin.release_custody(handle)
    with pytest.raises(UnknownCustody):
        await plugin.report_custody_state(handle, HealthStatus.HEALTHY)

    assert await records(ledger) == []
    await plugin.take_custody(PLAYBACK, "playback", handle_id="mine")


@pytest.mark.parametrize("has_warden", [True, False])
async def test_a_handle_in_use_is_refused_before_the_warden_is_asked(ledger: Ledger, has_warden: bool) -> None:
    """
    Custody under a handle that is in use, or being taken, is refused; the first custody and its warden go on undisturbed.
    """
    if has_warden:
        plugin, player = load(ledger)
    else:
        plugin, player = ledger.plugin(P), None
    results = await asyncio.gather(
        *(plugin.take_custody(PLAYBACK, "playback", handle_id="mine") for _ in range(2)), return_exceptions=True
    )
    with pytest.raises(DuplicateCustody):
        await plugin.take_custody(PLAYBACK, "other", handle_id="mine")

    assert sorted(isinstance(each, DuplicateCustody) for each in results) == [False, True]
    assert [each.custody_type for each in await records(ledger)] == ["playback"]
    assert player is None or len(player.calls) == 1


@pytest.mark.parametrize("steps", range(8))
async def test_cancelling_a_caller_does_not_part_the_warden_from_the_record(ledger: Ledger, steps: int) -> None:
    """
    Whenever a caller is cancelled, what the warden has is what is on record afterwards: all of it was done, or nothing.
    """
    plugin, player = load(ledger)

    async def cancelled(call: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.create_task(call)
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        for _ in range(50):  # what goes on without the caller comes to its end
            await asyncio.sleep(0)

    def held_count() -> int:
        return sum(call.startswith("take") for call in player.calls) - player.calls.count("release")

    await cancelled(plugin.take_custody(PLAYBACK, "playback", handle_id="one"))
    assert len(await records(ledger)) == held_count()

    player.calls.clear()
    await plugin.take_custody(PLAYBACK, "playback", handle_id="two")
    before = len(await records(ledger)) - 1
    await cancelled(plugin.release_custody("two"))
    assert len(await records(ledger)) - before == held_count()


async def test_of_two_releases_at_once_one_wins(ledger: Ledger) -> None:
    """
    A custody that two release at the same time is released and told once; the other is told that it is gone.
    """
    plugin = ledger.plugin(P)
    handle = await plugin.take_custody(PLAYBACK, "playback")
    happenings = ledger.happenings.subscribe()

    done = await asyncio.gather(*(plugin.release_custody(handle) for _ in range(2)), return_exceptions=True)

    assert sorted(type(each).__name__ for each in done) == ["CustodyRecord", "UnknownCustody"]
    assert [each["type"] for each in await told(ledger, happenings)] == ["custody_released"]


async def test_custodies_survive_a_restart(ledger: Ledger, log: MemoryLog, clock: VirtualClock) -> None:
    """
    Custodies are there again, with report and state, when the ledger is opened again.
    """
    plugin = ledger.plugin(P)
    handle = await plugin.take_custody(PLAYBACK, "playback")
    await plugin.report_custody_state(handle, HealthStatus.HEALTHY, bytes(range(256)))
    await plugin.abort_custody(handle, "over")
    before = await records(ledger)
    await ledger.close()

    async with await open_ledger(log, clock=clock) as again:
        assert await records(again) == before
