"""Every command that writes emits its happening: all commands are executed, by one ledger and by a ledger's users, and compared with the table."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import pytest

from tests.crash.recorded.recording import (
    ADMIN,
    CATALOGUE,
    COMMANDS,
    LAST,
    LIMITS,
    PARTS,
    announce,
    appointment,
    claim,
    name,
    occurrence,
)
from tidings.happenings.happening import variants
from tidings.happenings.variants import PluginEvent
from tidings.ledger import Command, Ledger, open_ledger
from tidings.ledger.administration import ForceRetractAddressing, ForceRetractRelation, SuppressRelation
from tidings.ledger.catalogue import CatalogueSource, SetCatalogue
from tidings.ledger.claims import ClaimRelation, RetractRelation
from tidings.ledger.commands import COMMANDS as DECLARED
from tidings.ledger.custody import FailCustody, RecordCustody
from tidings.ledger.emissions import EMISSIONS
from tidings.ledger.errors import LedgerError
from tidings.ledger.factories import AnnounceInstance, RetractInstance
from tidings.ledger.grammar import ScanGrammar
from tidings.ledger.marks import ReserveSeqs, TrimHistory
from tidings.ledger.merging import MergeSubjects
from tidings.ledger.records import LEDGER_TOPIC
from tidings.log.interface import Log, Query
from tidings.log.memory import MemoryLog
from tidings.log.reading import pages
from tidings.schedule.appointments import BeginAppointmentFiring, CreateAppointments, FinishAppointmentFiring
from tidings.schedule.watches import NoteWatches
from tidings.testing import VirtualClock

Z: Final[dict[str, Any]] = {"source": name("z1"), "predicate": "on", "target": name("z2")}
FURTHER: Final = (
    announce("y1"),
    announce("y2"),
    announce("y3"),
    claim("y1", "y3"),
    claim("y2", "y3"),
    SuppressRelation(**ADMIN, source=name("y1"), predicate="on", target=name("y3")),
    MergeSubjects(**ADMIN, a=name("y1"), b=name("y2"), new_id="id-y"),
    announce("z1"),
    announce("z2"),
    claim("z1", "z2"),
    RetractRelation(plugin="org.a", **Z),
    claim("z1", "z2"),
    ForceRetractRelation(**ADMIN, target_plugin="org.a", **Z),
    claim("z1", "z2"),
    ForceRetractAddressing(**ADMIN, target_plugin="org.a", addressing=name("z1")),
    AnnounceInstance(plugin="org.a", instance_id="i3", shelf="r.s", load_id="l1", new_id="id-i3"),
    ClaimRelation(plugin="org.a", source="id-i3", predicate="on", target=name("z2")),
    RetractInstance(plugin="org.a", instance_id="i3"),
    RecordCustody(plugin="org.c", handle_id="h9", shelf="r.s", custody_type="play"),
    FailCustody(plugin="org.c", handle_id="h9", mode="aborted", reason="broken"),
    SetCatalogue(catalogue=CATALOGUE, source=CatalogueSource.LAST_KNOWN_GOOD, problem="unreadable"),
    CreateAppointments(creator="ops", appointments=(appointment("d"),), finished_max=9, **LIMITS),
    BeginAppointmentFiring(**occurrence("d", 4)),
    FinishAppointmentFiring(
        **occurrence("d", 4),
        fired_at_ms=60_000,
        dispatch_outcome="ok",
        next_fire_ms=180_000,
        overlapped_ms=(120_000,),
        finished_max=9,
    ),
    ScanGrammar(last_seq=100, oldest_seq=1),
    ScanGrammar(last_seq=101, oldest_seq=1),
    NoteWatches(seq=6),
    ReserveSeqs(through=10_000),
    TrimHistory(through=1),
)


REFUSED: Final[Sequence[Command]] = (
    RecordCustody(plugin="org.a", handle_id="h1", shelf="r.other", custody_type="play"),
)
"""Commands of the recording that later rules refuse."""


async def emitted(log: Log) -> defaultdict[str, list[list[str]]]:
    """By command, the happenings of each of its records in the log."""
    found: defaultdict[str, list[list[str]]] = defaultdict(list)
    async for page in pages(log, Query(topic=LEDGER_TOPIC, until=log.position.seq)):
        for record in page.records:
            stored: dict[str, Any] = msgspec.json.decode(record.payload_json)
            kinds = [each["type"] for each in stored.get("happenings", ())]
            assert "count" not in stored  # all are in one record here
            if "do" in stored:
                found[stored["do"]["command"]].append(kinds)
            else:
                found["emit_happenings"].append(kinds)
    return found


def in_order(kinds: list[str], order: tuple[str, ...]) -> bool:
    """Whether variants come in an order, a batch's subjects one after another."""
    places = [order.index(kind) for kind in kinds]
    return places == sorted(places)


@pytest.mark.req("H79")
async def test_every_command_that_writes_emits_its_happening() -> None:
    """
    Each record of a command has the happenings of its row, in the row's order; one without happenings has a reason there. All rows occur, and all variants of each.
    """
    clock = VirtualClock()
    log = MemoryLog(clock=clock)
    async with await open_ledger(log, catalogue=CATALOGUE, parts=PARTS, clock=clock) as ledger:
        await ledger.happenings.emit_durable(PluginEvent(at_ms=1, plugin="org.a", event_type="e", payload=None))
        for command in (*COMMANDS, LAST, *FURTHER):
            if command in REFUSED:
                with pytest.raises(LedgerError):
                    await ledger.execute(command)
            else:
                await ledger.execute(command)
    found = await emitted(log)

    assert found.keys() == EMISSIONS.keys()
    for kind, records in found.items():
        row = EMISSIONS[kind]
        for emissions in records:
            assert emissions or row.silent, f"{kind} wrote and emitted nothing"
            assert kind == "emit_happenings" or in_order(emissions, row.order), (kind, emissions)
        if kind != "emit_happenings":
            assert {each for emissions in records for each in emissions} == set(row.order), kind
        if row.silent and row.order:
            assert [] in records, f"{kind} is never silent"


@pytest.mark.req("H79")
def test_the_table_has_every_command_and_only_variants() -> None:
    """
    Each command that Tidings declares has a row, and a row has happenings or a reason.
    """
    ours = {
        command
        for command, declared in DECLARED.items()
        if declared.__module__.startswith("tidings.") and not inspect.isabstract(declared)
    }

    assert ours == EMISSIONS.keys()
    for row in EMISSIONS.values():
        assert row.order or row.silent
        assert set(row.order) <= variants().keys()


async def made(ledger: Ledger, since: int) -> list[str]:
    """The variants since a seq."""
    return [each.happening.variant async for each in ledger.happenings.history(since)]


@pytest.mark.req("H79")
async def test_a_plugin_that_comes_and_goes_is_reported() -> None:
    """
    Loading a plugin is reported before what it does, unloading after what that takes along, and one that is gone as failed.
    """
    async with await open_ledger(MemoryLog(), catalogue=CATALOGUE) as ledger:
        player = ledger.plugin("org.player")
        await player.announce_subject("track", [("s", "1")])
        await player.unload()
        unloaded = await made(ledger, 0)
        lost = ledger.plugin("org.lost")
        ledger.plugins.forget(lost, "its connection ended")
        await ledger.finish_waiting()

        assert unloaded == ["plugin_admitted", "subject_announced", "subject_forgotten", "plugin_unloaded"]
        assert await made(ledger, 4) == ["plugin_admitted", "plugin_failed"]
