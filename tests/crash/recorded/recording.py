"""
How the workspaces of this folder were recorded, with the code of commit 2824fe7, and how a ledger is looked at.

    git archive 2824fe7 src | tar x -C /tmp/old
    PYTHONPATH=/tmp/old/src python tests/crash/recorded/recording.py tests/crash/recorded

Each workspace is an archive. ``contents.json`` is what that code saw when it opened them again, the same for all. Nothing here may use what came
later.
"""

from __future__ import annotations

import asyncio
import io
import os
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from tidings.core.events import Event
from tidings.happenings.happening import to_json
from tidings.happenings.variants import HealthStatus, PluginEvent, SplitStrategy
from tidings.ledger import Command, Ledger, LedgerSettings, open_ledger
from tidings.ledger.admin_ledger import AdminLedger, RecordAdminAction
from tidings.ledger.administration import (
    ForceRetractAddressing,
    ForceRetractRelation,
    SuppressRelation,
    UnsuppressRelation,
)
from tidings.ledger.catalogue import SetCatalogue, parse_catalogue
from tidings.ledger.claims import (
    AnnounceSubject,
    ClaimRelation,
    RetractAddressing,
    RetractRelation,
    UpdateSubjectState,
)
from tidings.ledger.conflicts import ClaimLog, Conflicts, Equivalent
from tidings.ledger.custody import (
    AbandonCustody,
    Custodies,
    FailCustody,
    RecordCustody,
    ReleaseCustody,
    ReportCustodyState,
)
from tidings.ledger.factories import AnnounceInstance, FactoryInstances, RetractInstance
from tidings.ledger.flight_mode import FlightModes, SetFlightMode
from tidings.ledger.grammar import (
    AcceptGrammarOrphans,
    BeginGrammarMigration,
    FinishGrammarMigration,
    GrammarOrphans,
    MigrateGrammarBatch,
    RenameStrategy,
    ScanGrammar,
)
from tidings.ledger.merging import MergeSubjects, SplitSubject
from tidings.ledger.plugins import ReportPluginEvent
from tidings.ledger.relations import Relations
from tidings.ledger.state import LedgerState
from tidings.ledger.subjects import Addressing, Subjects
from tidings.log.settings import LogSettings
from tidings.schedule.actions import ScheduledAction
from tidings.schedule.appointment_specs import AppointmentSpec
from tidings.schedule.appointments import (
    AppointmentKey,
    Appointments,
    BeginAppointmentFiring,
    CancelAppointment,
    CreateAppointments,
    FinishAppointmentFiring,
    MissAppointment,
    NewAppointment,
    ShiftIntervals,
    TellAppointmentApproach,
)
from tidings.schedule.conditions import HappeningMatch, Leaves
from tidings.schedule.recurrence import Periodic
from tidings.schedule.triggers import WatchMemory
from tidings.schedule.watches import (
    CancelWatch,
    CreateWatch,
    FinishWatchFiring,
    NoteWatches,
    Watches,
    WatchNote,
    WatchSpec,
)
from tidings.testing import VirtualClock

SETTINGS: Final = LedgerSettings(record_bytes_max=1024, history_age_s_max=None)
LOG_SETTINGS: Final = LogSettings(journal_bytes=1 << 16)
PARTS: Final = (Appointments, Watches)
CUT_AT: Final = 4
"""So many records of the last command are stored when the process is killed."""
CATALOGUE: Final = parse_catalogue(
    """
schema_version = 1
[[subjects]]
name = "track"
[[subjects]]
name = "album"
[[relation]]
predicate = "on"
source_type = "track"
target_type = "album"
source_cardinality = "at_most_one"
"""
)
SMALLER: Final = parse_catalogue(
    """
schema_version = 1
[[subjects]]
name = "track"
[[relation]]
predicate = "on"
source_type = "*"
target_type = "*"
"""
)
ACTION: Final = ScheduledAction(target_shelf="r.s", request_type="go")
WATCHED: Final = WatchMemory(leaves=Leaves(latched_at_ms=(None,)), entered_at_ms=1)


def name(value: str) -> Addressing:
    """A name of a subject."""
    return Addressing("s", value)


def announce(value: str, kind: str = "track", *more: str, plugin: str = "org.a", **fields: Any) -> AnnounceSubject:
    """Announce a subject by its names."""
    names = tuple(name(each) for each in (value, *more))
    return AnnounceSubject(plugin=plugin, subject_type=kind, addressings=names, new_id=f"id-{value}", **fields)


def claim(source: str, target: str, plugin: str = "org.a", **fields: Any) -> ClaimRelation:
    """Claim that a track is on an album."""
    return ClaimRelation(plugin=plugin, source=name(source), predicate="on", target=name(target), **fields)


def appointment(appointment_id: str) -> NewAppointment:
    """An appointment every minute."""
    spec = AppointmentSpec(appointment_id=appointment_id, recurrence=Periodic(interval_ms=60_000))
    return NewAppointment(spec=spec, action=ACTION, next_fire_ms=60_000)


def occurrence(appointment_id: str, issue: int, at_ms: int = 60_000) -> dict[str, Any]:
    """Names an occurrence."""
    return {"creator": "ops", "appointment_id": appointment_id, "issue": issue, "scheduled_for_ms": at_ms}


def note(issue: int, **fields: Any) -> WatchNote:
    """What evaluation found about a watch."""
    return WatchNote(creator="ops", watch_id="w", issue=issue, memory=WATCHED, seq=3, **fields)


RELATION: Final[dict[str, Any]] = {"source": name("t1"), "predicate": "on", "target": name("b1")}
ADMIN: Final[dict[str, Any]] = {"admin": "org.admin"}
LIMITS: Final[dict[str, Any]] = {"count_max": 10, "creator_count_max": 10}

COMMANDS: Final[Sequence[Command]] = (
    announce("t1", state={"loud": 1}),
    announce("t1", "track", "t1b", state={"loud": 2}),
    announce("t1", claims=(Equivalent(a=name("t1"), b=name("t2")),)),
    announce("t2", plugin="org.b"),
    announce("b1", "album"),
    announce("b2", "album", plugin="org.b"),
    AnnounceSubject(
        plugin="org.a", subject_type="track", addressings=(name("t1"), name("t2")), new_id="id-never"
    ),  # a conflict
    UpdateSubjectState(plugin="org.a", subject=name("t1"), state={"loud": 3}),
    claim("t1", "b1"),
    claim("t1", "b1", "org.b", reason="heard"),
    claim("t1", "b2"),
    claim("t2", "b1", "org.b"),
    RetractRelation(plugin="org.b", **RELATION),
    claim("t1", "b1", "org.b"),
    ForceRetractRelation(**ADMIN, target_plugin="org.b", **RELATION),
    SuppressRelation(**ADMIN, **RELATION, reason="wrong"),
    SuppressRelation(**ADMIN, **RELATION, reason="quite wrong"),
    UnsuppressRelation(**ADMIN, **RELATION),
    announce("t3", "track", "t3b"),
    RetractAddressing(plugin="org.a", addressing=name("t3b")),
    claim("t3", "b1"),
    RetractAddressing(plugin="org.a", addressing=name("t3"), reason="gone"),
    announce("t4", "track", "t4b", plugin="org.b"),
    claim("t4", "b1", "org.b"),
    ForceRetractAddressing(**ADMIN, target_plugin="org.b", addressing=name("t4b")),
    ForceRetractAddressing(**ADMIN, target_plugin="org.b", addressing=name("t4")),
    RecordCustody(plugin="org.a", handle_id="h1", shelf="r.s", custody_type="play"),
    RecordCustody(plugin="org.a", handle_id="h1", shelf="r.other", custody_type="play"),
    ReportCustodyState(plugin="org.a", handle_id="h1", health=HealthStatus.HEALTHY, payload=b"1"),
    FailCustody(plugin="org.a", handle_id="h1", mode="degraded", reason="slow"),
    ReleaseCustody(plugin="org.a", handle_id="h1"),
    ReportCustodyState(plugin="org.a", handle_id="h1", health=HealthStatus.UNHEALTHY),
    ReportCustodyState(plugin="org.a", handle_id="h2", health=HealthStatus.UNHEALTHY),
    AbandonCustody(plugin="org.a", handle_id="h2"),
    AnnounceInstance(plugin="org.a", instance_id="i1", shelf="r.s", load_id="l1", new_id="id-i1"),
    AnnounceInstance(plugin="org.a", instance_id="i2", shelf="r.s", load_id="l1", new_id="id-i2"),
    RetractInstance(plugin="org.a", instance_id="i1"),
    ReportPluginEvent(plugin="org.a", event_type="e", payload={"a": 1}),
    SetFlightMode(rack_class="flight_mode.wifi", on=True),
    RecordAdminAction(**ADMIN, kind="looked"),
    CreateAppointments(
        creator="ops", appointments=(appointment("a"), appointment("b"), appointment("c")), finished_max=9, **LIMITS
    ),
    TellAppointmentApproach(**occurrence("a", 1)),
    BeginAppointmentFiring(**occurrence("a", 1)),
    FinishAppointmentFiring(
        **occurrence("a", 1), fired_at_ms=60_000, dispatch_outcome="ok", next_fire_ms=120_000, finished_max=9
    ),
    MissAppointment(**occurrence("b", 2), reason="drop_policy", next_fire_ms=120_000, finished_max=9),
    MissAppointment(**occurrence("c", 3), reason="untrusted_time", finished_max=9),
    MissAppointment(**occurrence("c", 3), reason="drop_policy", next_fire_ms=180_000, finished_max=9),
    ShiftIntervals(now_ms=60_000, by_ms=-1000),
    CancelAppointment(creator="ops", appointment_id="b", cancelled_by="ops", finished_max=9, admin="org.admin"),
    CreateWatch(creator="ops", spec=WatchSpec(watch_id="w", condition=HappeningMatch()), action=ACTION, **LIMITS),
    NoteWatches(notes=(note(1, firings=(1, 2), missed=("in_cooldown",), dropped=3),), seq=5),
    FinishWatchFiring(creator="ops", watch_id="w", issue=1, firing=1, fired_at_ms=5, dispatch_outcome="ok"),
    CreateWatch(creator="ops", spec=WatchSpec(watch_id="w", condition=HappeningMatch()), action=ACTION, **LIMITS),
    FinishWatchFiring(creator="ops", watch_id="w", issue=1, firing=2, fired_at_ms=5, dispatch_outcome="ok"),
    FinishWatchFiring(creator="ops", watch_id="w", issue=1, firing=2, fired_at_ms=5, dispatch_outcome="ok"),
    CancelWatch(creator="ops", watch_id="w", cancelled_by="ops"),
    MergeSubjects(**ADMIN, a=name("t1"), b=name("t2"), new_id="id-m1", reason="same"),
    announce("t5"),
    MergeSubjects(**ADMIN, a=name("t5"), b="id-m1", new_id="id-m2"),
    SplitSubject(
        **ADMIN,
        source="id-m2",
        partition=((name("t1"), name("t1b")), (name("t2"), name("t5"))),
        new_ids=("id-s1", "id-s2"),
        strategy=SplitStrategy.EXPLICIT,
    ),
    SetCatalogue(catalogue=SMALLER),
    ScanGrammar(last_seq=50, oldest_seq=1),
    AcceptGrammarOrphans(**ADMIN, subject_type="album", reason="later"),
    BeginGrammarMigration(**ADMIN, from_type="album", strategy=RenameStrategy(to_type="track"), migration_id="mig_1"),
    MigrateGrammarBatch(**ADMIN, from_type="album", migration_id="mig_1", moves=(("id-b1", "id-b1t"),), remaining=1),
    FinishGrammarMigration(from_type="album", migration_id="mig_1"),
    *(announce(f"x{number}") for number in range(6)),
    *(claim(f"x{number}", "t5") for number in range(6)),
)
LAST: Final = MergeSubjects(**ADMIN, a=name("t5"), b="id-b1t", new_id="id-last", reason="the one that is cut off")


async def contents(ledger: Ledger) -> dict[str, Any]:
    """All that a ledger has and told, as JSON."""

    def look(state: LedgerState) -> dict[str, Any]:
        subjects, relations = state.part(Subjects), state.part(Relations)
        ids = subjects.ids.after(None, 10_000)
        retired = sorted(alias.old_id for alias in subjects.freeze().aliases)
        appointments, watches = state.part(Appointments), state.part(Watches)
        keys = [AppointmentKey("ops", each) for each in "abc"]
        return {
            "subjects": [subjects.get(each) for each in ids],
            "aliases": [subjects.describe(each).chain for each in retired],
            "relations": [relations.get(each) for each in relations.triples.after(None, 10_000)],
            "admin": state.part(AdminLedger).entries(),
            "claims": state.part(ClaimLog).entries(),
            "conflicts": state.part(Conflicts).all(),
            "custodies": list(state.part(Custodies)),
            "instances": list(state.part(FactoryInstances)),
            "modes": state.part(FlightModes).freeze(),
            "orphans": state.part(GrammarOrphans).all(),
            "appointments": [entry.to_json() for key in keys if (entry := appointments.get(key)) is not None],
            "watches": [entry.to_json() for entry in watches.all()],
            "watched": watches.seq,
        }

    found = {
        "state": await ledger.read(look),
        "last_seq": ledger.happenings.last_seq,
        "history": [[each.seq, to_json(each.happening)] async for each in ledger.happenings.history()],
    }
    return msgspec.json.decode(msgspec.json.encode(found))  # type: ignore[no-any-return]


async def opened(folder: Path, clock: VirtualClock) -> Ledger:
    """Open a workspace as it was recorded."""
    return await open_ledger(folder, parts=PARTS, settings=SETTINGS, log_settings=LOG_SETTINGS, clock=clock)


async def fill(folder: Path, is_killed: bool) -> None:
    """Do all commands; then close, or be killed when the last one's records are stored in part."""
    clock = VirtualClock()
    ledger = await open_ledger(
        folder, catalogue=CATALOGUE, parts=PARTS, settings=SETTINGS, log_settings=LOG_SETTINGS, clock=clock
    )
    for number, command in enumerate(COMMANDS):
        await ledger.execute(command)
        if number == 20:
            await ledger.happenings.emit_durable(
                PluginEvent(at_ms=7, plugin="org.b", event_type="emitted", payload=None)
            )
        await clock.advance(1)
    if not is_killed:
        await ledger.execute(LAST)
        await ledger.close()
        return
    append_many = ledger.log.append_many

    async def cut_off(events: Sequence[Event], **options: Any) -> Any:
        assert len(events) > CUT_AT + 1, len(events)
        await append_many(events[:CUT_AT], **options)
        os._exit(9)

    ledger.log.append_many = cut_off  # type: ignore[method-assign]
    await ledger.execute(LAST)


def record(folder: Path, case: str) -> dict[str, Any]:
    """Record one workspace. Return what it holds when it is opened again."""
    with tempfile.TemporaryDirectory() as place:
        workspace = Path(place, "workspace")
        if (child := os.fork()) == 0:
            asyncio.run(fill(workspace, is_killed=case == "killed"))
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status == (9 if case == "killed" else 0), status

        def without_owner(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            return member if member.isfile() or member.isdir() else None

        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:xz") as archive:
            archive.add(workspace, "workspace", filter=without_owner)
        shutil.copytree(workspace, Path(place, "again"))

        async def look() -> dict[str, Any]:
            clock = VirtualClock()
            ledger = await opened(Path(place, "again"), clock)
            try:
                return await contents(ledger)
            finally:
                await ledger.close()

        found = asyncio.run(look())
    (folder / f"{case}.tar.xz").write_bytes(packed.getvalue())
    return found


if __name__ == "__main__":
    target = Path(sys.argv[1])
    closed, killed = (record(target, case) for case in ("closed", "killed"))
    assert closed == killed
    (target / "contents.json").write_bytes(msgspec.json.encode(closed) + b"\n")
