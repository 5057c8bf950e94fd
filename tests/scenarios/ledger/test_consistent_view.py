"""
Who reads the ledger upon a happening sees what the happening promises: one case a variant.

Each case does something that leads to its variant. A subscriber reads the state at the moment it receives that happening, while the one
who caused it goes on, and looks up in the log that the happening is written down.

To add a case: a function that acts, under ``@case`` with the variant's name and what has to be true of state and happening.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from tidings.core.events import Event
from tidings.happenings.filters import HappeningFilter
from tidings.happenings.happening import variants
from tidings.happenings.variants import HealthStatus, SplitStrategy
from tidings.ledger import Admin, Ledger, Plugin
from tidings.ledger.admin_ledger import AdminLedger
from tidings.ledger.catalogue import CurrentCatalogue, SetCatalogue, catalogue_command, parse_catalogue
from tidings.ledger.conflicts import Conflicts
from tidings.ledger.custody import Custodies, CustodyIsAborted, CustodyIsDegraded
from tidings.ledger.factories import FactoryInstances
from tidings.ledger.flight_mode import FlightModes
from tidings.ledger.grammar import GrammarOrphans
from tidings.ledger.relations import Relations, Triple, WalkDirection
from tidings.ledger.state import LedgerState
from tidings.ledger.subjects import Addressing, AliasKind, Subjects
from tidings.log.interface import Authorise, Verdict
from tidings.log.memory import MemoryLog
from tidings.schedule.actions import Actions
from tidings.schedule.appointment_runner import AppointmentRunner
from tidings.schedule.appointments import AppointmentKey, Appointments
from tidings.schedule.time_trust import TimeTrustTracker
from tidings.schedule.watch_runner import WatchRunner
from tidings.schedule.watches import Watches, WatchKey, WatchSettings
from tidings.testing import VirtualClock

from .support import BLUETOOTH, OUTPUTS, PLAYBACK

PUMP: Final = {"target_shelf": "cellar.pump", "request_type": "on"}
X, Y, B1, B2 = ("x", "1"), ("y", "2"), ("album", "1"), ("album", "2")


class World:
    """A ledger with two plugins and an administrator, appointments and watches."""

    def __init__(
        self, ledger: Ledger, clock: VirtualClock, appointments: AppointmentRunner, watches: WatchRunner
    ) -> None:
        self.ledger = ledger
        self.clock = clock
        self.appointments = appointments
        self.watches = watches
        self.one: Plugin = ledger.plugin("org.example.one")
        self.two: Plugin = ledger.plugin("org.example.two")
        self.admin: Admin = ledger.admin("org.example.admin")

    async def subject(self, plugin: Plugin, *names: tuple[str, str]) -> str:
        """A subject with these names: an album, or a track."""
        kind = "album" if names[0][0] == "album" else "track"
        canonical_id = (await plugin.announce_subject(kind, names)).canonical_id
        assert canonical_id is not None
        return canonical_id

    async def track_on_album(self) -> None:
        """A track of plugin one, an album of plugin two, and the relation between them, claimed by both."""
        await self.subject(self.one, X)
        await self.subject(self.two, B1)
        await self.one.claim_relation(X, "album_of", B1)
        await self.two.claim_relation(X, "album_of", B1)

    async def two_tracks(self, *albums: tuple[str, str]) -> None:
        """A track of each plugin, each on one of the albums."""
        for plugin, track, album in zip((self.one, self.two), (X, Y), albums, strict=True):
            await self.subject(plugin, track)
            await self.subject(plugin, album)
            await plugin.claim_relation(track, "album_of", album)


Act = Callable[[World], Awaitable[None]]
Promise = Callable[[LedgerState, Any], bool]


class Case(NamedTuple):
    """How a variant comes about, and what has to be true when it is seen."""

    act: Act
    promise: Promise


CASES: Final[dict[str, Case]] = {}


def case(variant: str, promise: Promise) -> Callable[[Act], Act]:
    """Enter a case."""

    def enter(act: Act) -> Act:
        CASES[variant] = Case(act, promise)
        return act

    return enter


def custody(state: LedgerState, happening: Any) -> Any:
    return state.part(Custodies).get(happening.plugin, happening.handle_id)


def relation(state: LedgerState, happening: Any) -> Any:
    return state.part(Relations).get(Triple(happening.source_id, happening.predicate, happening.target_id))


def is_neighbour(state: LedgerState, happening: Any) -> bool:
    neighbours = state.part(Relations).neighbours(happening.source_id, happening.predicate)
    walked = state.part(Relations).walk(happening.source_id, [happening.predicate]).visits
    is_seen = happening.target_id in neighbours
    assert is_seen == (happening.target_id in [visit.subject_id for visit in walked])
    return is_seen


def is_in_admin_ledger(state: LedgerState, kind: str, **fields: Any) -> bool:
    last = state.part(AdminLedger).entries("org.example.admin")[-1]
    return last.kind == kind and all(getattr(last, name) == value for name, value in fields.items())


# Custody


@case(
    "custody_taken",
    lambda state, told: (custody(state, told).shelf, custody(state, told).custody_type) == (PLAYBACK, "playback"),
)
async def take_custody(world: World) -> None:
    await world.one.take_custody(PLAYBACK, "playback")


@case("custody_released", lambda state, told: custody(state, told) is None)
async def release_custody(world: World) -> None:
    await world.one.release_custody(await world.one.take_custody(PLAYBACK, "playback"))


@case(
    "custody_state_reported",
    lambda state, told: (
        (custody(state, told).last_state.health, custody(state, told).last_state.payload) == (told.health, b"second")
    ),
)
async def report_state(world: World) -> None:
    handle = await world.one.take_custody(PLAYBACK, "playback")
    await world.one.report_custody_state(handle, HealthStatus.UNHEALTHY, b"second")


@case("custody_aborted", lambda state, told: custody(state, told).state == CustodyIsAborted(told.reason))
async def abort_custody(world: World) -> None:
    await world.one.abort_custody(await world.one.take_custody(PLAYBACK, "playback"), "over")


@case("custody_degraded", lambda state, told: custody(state, told).state == CustodyIsDegraded(told.reason))
async def degrade_custody(world: World) -> None:
    await world.one.degrade_custody(await world.one.take_custody(PLAYBACK, "playback"), "slow")


# Relation graph


@case(
    "relation_cardinality_violation",
    lambda state, told: (
        len(state.part(Relations).neighbours(told.source_id, told.predicate)) == told.observed_count == 2
        and is_neighbour(state, told)
    ),
)
async def violate_cardinality(world: World) -> None:
    await world.track_on_album()
    await world.subject(world.two, B2)
    await world.one.claim_relation(X, "album_of", B2)


@case("relation_asserted", is_neighbour)
async def assert_relation(world: World) -> None:
    await world.track_on_album()


@case("relation_claim_added", lambda state, told: told.plugin in relation(state, told).claimants)
async def add_claim(world: World) -> None:
    await world.track_on_album()


@case("relation_claim_retracted", lambda state, told: relation(state, told).claimants == ("org.example.two",))
async def retract_claim(world: World) -> None:
    await world.track_on_album()
    await world.one.retract_relation(X, "album_of", B1)


@case("relation_forgotten", lambda state, told: relation(state, told) is None and not is_neighbour(state, told))
async def forget_relation(world: World) -> None:
    await world.track_on_album()
    await world.one.retract_relation(X, "album_of", B1)
    await world.two.retract_relation(X, "album_of", B1)


@case(
    "relation_suppressed",
    lambda state, told: (
        not is_neighbour(state, told)
        and relation(state, told).suppression.reason == told.reason
        and is_in_admin_ledger(state, "relation_suppress", reason=told.reason)
    ),
)
async def suppress(world: World) -> None:
    await world.track_on_album()
    await world.admin.suppress_relation(X, "album_of", B1, reason="dispute")


@case(
    "relation_suppression_reason_updated",
    lambda state, told: (
        not is_neighbour(state, told)
        and relation(state, told).suppression.reason == told.new_reason == "settled"
        and relation(state, told).suppression.admin_plugin == "org.example.first"
        and is_in_admin_ledger(state, "relation_suppression_reason_updated", prior_reason=told.old_reason)
    ),
)
async def update_suppression(world: World) -> None:
    await world.track_on_album()
    await world.ledger.admin("org.example.first").suppress_relation(X, "album_of", B1, reason="dispute")
    await world.admin.suppress_relation(X, "album_of", B1, reason="settled")


@case(
    "relation_unsuppressed",
    lambda state, told: is_neighbour(state, told) and is_in_admin_ledger(state, "relation_unsuppress"),
)
async def unsuppress(world: World) -> None:
    await suppress(world)
    await world.admin.unsuppress_relation(X, "album_of", B1)


# Subject registry


@case(
    "subject_forgotten",
    lambda state, told: (
        state.part(Subjects).get(told.canonical_id) is None and state.part(Subjects).find(Addressing(*X)) is None
    ),
)
async def forget_subject(world: World) -> None:
    await world.track_on_album()
    await world.one.retract_addressing(X)


def owner_of(state: LedgerState, told: Any) -> str | None:
    return state.part(Subjects).find(Addressing(told.scheme, told.value))


@case(
    "subject_announced",
    lambda state, told: (
        [each.addressing for each in state.part(Subjects).require(told.canonical_id).addressings]
        == [(each.scheme, each.value) for each in told.addressings]
        == [X]
    ),
)
async def announce(world: World) -> None:
    await world.subject(world.one, X)


@case("subject_addressing_added", lambda state, told: owner_of(state, told) == told.canonical_id)
async def add_name(world: World) -> None:
    await world.subject(world.one, X)
    await world.subject(world.two, X, Y)


@case(
    "subject_addressing_removed",
    lambda state, told: owner_of(state, told) is None and state.part(Subjects).is_live(told.canonical_id),
)
async def remove_name(world: World) -> None:
    await world.subject(world.one, X, Y)
    await world.one.retract_addressing(X)


@case(
    "subject_state_changed",
    lambda state, told: state.part(Subjects).require(told.canonical_id).state == told.new_state == {"playing": True},
)
async def change_state(world: World) -> None:
    await world.subject(world.one, X)
    await world.one.update_state(X, {"playing": True})


@case(
    "subject_conflict_detected",
    lambda state, told: (
        all(state.part(Conflicts).open_of(canonical_id) for canonical_id in told.canonical_ids)
        and all(state.part(Subjects).get(canonical_id) for canonical_id in told.canonical_ids)
    ),
)
async def conflict(world: World) -> None:
    await world.subject(world.one, X)
    await world.subject(world.two, Y)
    await world.one.announce_subject("track", [X, Y])


# Factory instances


@case(
    "factory_instance_announced",
    lambda state, told: (
        state.part(Subjects).require(told.canonical_id).subject_type == told.shelf
        and state.part(FactoryInstances).get(told.plugin, told.instance_id) is not None
    ),
)
async def announce_instance(world: World) -> None:
    await world.one.announce_instance("speaker", b"stereo", shelf=OUTPUTS)


@case(
    "factory_instance_retracted",
    lambda state, told: (
        state.part(Subjects).get(told.canonical_id) is None
        and state.part(FactoryInstances).get(told.plugin, told.instance_id) is None
    ),
)
async def retract_instance(world: World) -> None:
    await announce_instance(world)
    await world.one.retract_instance("speaker")


# Privileged operations, and what they bring about


@case(
    "subject_addressing_forced_retract",
    lambda state, told: (
        state.part(Subjects).find(Addressing(told.scheme, told.value)) is None
        and is_in_admin_ledger(state, told.variant, target_subject=told.canonical_id)
    ),
)
async def force_retract_addressing(world: World) -> None:
    await world.subject(world.one, X, Y)
    await world.admin.force_retract_addressing("org.example.one", X, reason="wrong")


@case(
    "relation_claim_forced_retract",
    lambda state, told: (
        relation(state, told).claimants == ("org.example.one",)
        and is_in_admin_ledger(state, told.variant, target_plugin="org.example.two")
    ),
)
async def force_retract_claim(world: World) -> None:
    await world.track_on_album()
    await world.admin.force_retract_relation("org.example.two", X, "album_of", B1)


def is_merged(state: LedgerState, told: Any) -> bool:
    subjects = state.part(Subjects)
    aliases = [subjects.alias(source) for source in told.source_ids]
    return (
        len(subjects.require(told.new_id).addressings) == 2
        and [(alias.kind, alias.new_ids) for alias in aliases if alias] == [(AliasKind.MERGED, (told.new_id,))] * 2
        and is_in_admin_ledger(state, "subject_merge", target_subject=told.new_id)
    )


@case("subject_merged", is_merged)
async def merge(world: World) -> None:
    await world.two_tracks(B1, B2)
    await world.admin.merge_subjects(X, Y)


def is_split(state: LedgerState, told: Any) -> bool:
    subjects = state.part(Subjects)
    alias = subjects.alias(told.source_id)
    return (
        all(subjects.get(new_id) is not None for new_id in told.new_ids)
        and alias is not None
        and (alias.kind, alias.new_ids) == (AliasKind.SPLIT, told.new_ids)
        and is_in_admin_ledger(state, "subject_split", target_subject=told.source_id)
    )


@case("subject_split", is_split)
async def split(world: World) -> None:
    await world.subject(world.one, X, Y)
    await world.subject(world.two, B1)
    await world.one.claim_relation(X, "album_of", B1)
    await world.admin.split_subject(X, [[X], [Y]], strategy=SplitStrategy.EXPLICIT)


@case(
    "relation_split_ambiguous",
    lambda state, told: all(
        Triple(new_id, told.predicate, told.other_endpoint_id) in state.part(Relations)
        for new_id in told.candidate_new_ids
    ),
)
async def split_ambiguously(world: World) -> None:
    await split(world)


@case(
    "relation_rewritten",
    lambda state, told: (
        Triple(told.new_subject_id, told.predicate, told.target_id) in state.part(Relations)
        and not state.part(Relations).touching(told.old_subject_id)
    ),
)
async def rewrite(world: World) -> None:
    await merge(world)


@case(
    "relation_cardinality_violated_post_rewrite",
    lambda state, told: (
        state.part(Relations).forward_count(told.subject_id, told.predicate) == told.observed_count == 2
    ),
)
async def violate_by_merge(world: World) -> None:
    await merge(world)


def is_reassigned(state: LedgerState, told: Any) -> bool:
    if told.kind == "addressing":
        record = state.part(Subjects).resolve(Addressing(told.scheme, told.value))
        return record is not None and record.canonical_id == told.new_subject_id and record.is_claimed_by(told.plugin)
    moved = state.part(Relations).get(Triple(told.new_subject_id, told.predicate, told.target_id))
    return moved is not None and told.plugin in moved.claimants


@case("claim_reassigned", is_reassigned)
async def reassign(world: World) -> None:
    await merge(world)


@case(
    "relation_claim_suppression_collapsed",
    lambda state, told: (
        (survivor := state.part(Relations).get(Triple(told.subject_id, told.predicate, told.target_id))) is not None
        and survivor.suppression == told.surviving_suppression_record
        and told.demoted_claimant in survivor.claimants
        and told.target_id
        not in state.part(Relations).neighbours(told.subject_id, told.predicate, WalkDirection.FORWARD)
    ),
)
async def collapse(world: World) -> None:
    await world.subject(world.one, B1)
    for plugin, track in ((world.one, X), (world.two, Y)):
        await world.subject(plugin, track)
        await plugin.claim_relation(track, "album_of", B1)
    await world.admin.suppress_relation(X, "album_of", B1)
    await world.admin.merge_subjects(X, Y)


# Flight mode, events of plugins


@case("flight_mode_changed", lambda state, told: state.part(FlightModes).get(told.rack_class) is told.on is True)
async def set_flight_mode(world: World) -> None:
    await world.one.set_flight_mode(BLUETOOTH, True)


@case("plugin_event", lambda state, told: told.payload == {"level": 3})
async def report_event(world: World) -> None:
    await world.one.report_event("water", {"level": 3})


@case("plugin_admitted", lambda state, told: (told.plugin, told.shelves) == ("org.example.new", ()))
async def admit_plugin(world: World) -> None:
    world.ledger.plugin("org.example.new")
    await world.ledger.finish_waiting()


@case("plugin_unloaded", lambda state, told: not state.part(Subjects).is_claimant(told.plugin))
async def unload_plugin(world: World) -> None:
    await world.subject(world.one, X)
    await world.one.unload()


@case("plugin_failed", lambda state, told: state.part(Subjects).is_claimant(told.plugin))
async def lose_plugin(world: World) -> None:
    await world.subject(world.one, X)
    world.ledger.plugins.forget(world.one, "its connection ended")
    await world.ledger.finish_waiting()


# Appointments


def appointment(state: LedgerState, told: Any) -> Any:
    return state.part(Appointments).get(AppointmentKey(told.creator, told.appointment_id))


async def make_appointment(world: World, in_ms: int, **spec: Any) -> None:
    """One that fires once, so many milliseconds from now."""
    fire_at_ms = world.clock.now_ns() // 1_000_000 + in_ms
    once = {"appointment_id": "alarm", "recurrence": {"kind": "one_shot", "fire_at_ms": fire_at_ms}}
    await world.appointments.create("ops", once | spec, PUMP)


@case(
    "appointment_created",
    lambda state, told: appointment(state, told).next_fire_ms == told.at_ms + 30_000,
)
async def create_appointment(world: World) -> None:
    await make_appointment(world, 30_000)


@case(
    "appointment_approaching",
    lambda state, told: (
        appointment(state, told).state == "approaching"
        and appointment(state, told).next_fire_ms == told.scheduled_for_ms
        and told.fires_in_ms == 10_000
    ),
)
async def approach(world: World) -> None:
    await make_appointment(world, 30_000, pre_fire_ms=10_000)
    await world.clock.advance(21)


@case(
    "appointment_fired",
    lambda state, told: (
        (appointment(state, told).state, appointment(state, told).fires_completed) == ("fired", 1)
        and appointment(state, told).last_fired_at_ms == told.fired_at_ms
        and told.dispatch_outcome == "not_found/no_handler"
    ),
)
async def fire_appointment(world: World) -> None:
    await make_appointment(world, 30_000)
    await world.clock.advance(31)


@case(
    "appointment_missed",
    lambda state, told: (
        (appointment(state, told).next_fire_ms, appointment(state, told).fires_completed) == (None, 0)
        and told.reason == "drop_policy"
    ),
)
async def miss_appointment(world: World) -> None:
    await make_appointment(world, -60_000, miss_policy={"kind": "drop"})
    await world.clock.advance(1)


@case("appointment_cancelled", lambda state, told: appointment(state, told).state == "cancelled")
async def cancel_appointment(world: World) -> None:
    await make_appointment(world, 30_000)
    await world.appointments.cancel("ops", "alarm", cancelled_by="operator")


# Watches


def watch(state: LedgerState, told: Any) -> Any:
    return state.part(Watches).get(WatchKey(told.creator, told.watch_id))


WATCH: Final[dict[str, Any]] = {
    "watch_id": "water",
    "condition": {"kind": "happening_match", "filter": {"variants": ["plugin_event"]}},
}


@case("watch_created", lambda state, told: watch(state, told).state == "pending")
async def create_watch(world: World) -> None:
    await world.watches.create("ops", WATCH, PUMP)


@case(
    "watch_fired",
    lambda state, told: (
        watch(state, told).fires_completed == 1
        and watch(state, told).last_fired_at_ms == told.fired_at_ms
        and told.dispatch_outcome == "not_found/no_handler"
    ),
)
async def fire_watch(world: World) -> None:
    await world.watches.create("ops", WATCH, PUMP)
    await world.one.report_event("water", {"level": 3})
    await world.clock.advance(0)


@case("watch_missed", lambda state, told: watch(state, told).memory.told == told.reason == "in_cooldown")
async def miss_watch(world: World) -> None:
    await world.watches.create("ops", WATCH | {"trigger": {"kind": "level", "cooldown_ms": 1000}}, PUMP)
    await world.one.report_event("water", {"level": 3})
    await world.one.report_event("water", {"level": 4})
    await world.clock.advance(0)


@case("watch_cancelled", lambda state, told: watch(state, told).state == "cancelled")
async def cancel_watch(world: World) -> None:
    await world.watches.create("ops", WATCH, PUMP)
    await world.watches.cancel("ops", "water", cancelled_by="operator")


@case(
    "watch_evaluation_throttled",
    lambda state, told: watch(state, told).state == "pending" and told.dropped == 2,
)
async def throttle_watch(world: World) -> None:
    await world.watches.create("ops", WATCH, PUMP)
    for level in range(5):
        await world.one.report_event("water", {"level": level})
    await world.clock.advance(1)


# Catalogue grammar


def orphans(state: LedgerState, subject_type: str) -> Any:
    return state.part(GrammarOrphans).get(subject_type)


@case(
    "subject_grammar_orphan",
    lambda state, told: (
        orphans(state, told.subject_type).count == told.count == 1
        and orphans(state, told.subject_type).first_observed_at_ms == told.first_observed_at_ms
    ),
)
async def lose_type(world: World) -> None:
    await world.track_on_album()
    await world.ledger.execute(SetCatalogue(catalogue=parse_catalogue('schema_version=1\n[[subjects]]\nname="song"\n')))
    await world.ledger.grammar.scan()


@case(
    "grammar_orphans_accepted",
    lambda state, told: (
        (orphans(state, told.subject_type).status, orphans(state, told.subject_type).accepted_reason)
        == ("accepted", told.reason)
        and is_in_admin_ledger(state, told.variant, target_subject=told.subject_type)
    ),
)
async def accept_orphans(world: World) -> None:
    await lose_type(world)
    await world.ledger.grammar.accept("album", admin=world.admin.name, reason="they stay")


def is_migrated(state: LedgerState, told: Any) -> bool:
    alias = state.part(Subjects).alias(told.old_id)
    return (
        alias is not None
        and (alias.kind, alias.new_ids) == (AliasKind.TYPE_MIGRATED, (told.new_id,))
        and state.part(Subjects).require(told.new_id).subject_type == told.to_type
        and is_in_admin_ledger(state, "grammar_migration", target_subject=told.from_type)
    )


@case("subject_migrated", is_migrated)
async def migrate(world: World) -> None:
    await lose_type(world)
    await world.ledger.grammar.migrate("track", {"kind": "rename", "to_type": "song"}, admin=world.admin.name)


@case(
    "grammar_migration_progress",
    lambda state, told: (
        orphans(state, told.from_type).migration_id == told.migration_id
        and orphans(state, told.from_type).completed >= told.completed == 1
    ),
)
async def progress(world: World) -> None:
    await migrate(world)


# Catalogue and clock


@case("catalogue_reloaded", lambda state, told: state.part(CurrentCatalogue).catalogue.racks == ())
async def reload_catalogue(world: World) -> None:
    await world.ledger.execute(SetCatalogue(catalogue=parse_catalogue("schema_version = 1")))


@case("catalogue_fallback", lambda state, told: state.part(CurrentCatalogue).source == told.source == "lkg")
async def fall_back(world: World) -> None:
    command = await world.ledger.read(lambda state: catalogue_command(state, Path("there is none")))
    assert command is not None
    await world.ledger.execute(command)


@case("clock_adjusted", lambda state, told: told.delta_seconds == 3600)
async def set_clock(world: World) -> None:
    tracker = TimeTrustTracker(world.clock, lambda: True, world.ledger.happenings.emit_durable)
    world.clock.jump(3600)
    await tracker.look()


@case("clock_trust_changed", lambda state, told: (told.from_, told.to) == ("trusted", "adjusting"))
async def lose_trust(world: World) -> None:
    await set_clock(world)


def _swapped(promise: Promise, told: Any, state: LedgerState) -> bool:
    return promise(state, told)


class SlowLog(MemoryLog):
    """A log that takes a while to store: others get on meanwhile."""

    async def append_many(self, events: Sequence[Event], *, authorise: Authorise | None = None) -> list[Verdict]:
        for _ in range(10):
            await asyncio.sleep(0)
        return await super().append_many(events, authorise=authorise)


@pytest.fixture
def log(clock: VirtualClock) -> MemoryLog:
    return SlowLog(clock=clock)


@pytest.fixture
async def world(ledger: Ledger, clock: VirtualClock) -> AsyncIterator[World]:
    watches = WatchRunner(ledger, Actions(clock=clock), settings=WatchSettings(evaluations_per_second_max=3))
    appointments = AppointmentRunner(ledger, Actions(clock=clock))
    await watches.start()
    await appointments.start()
    world = World(ledger, clock, appointments, watches)
    await ledger.finish_waiting()
    yield world
    await appointments.close()
    await watches.close()


@pytest.mark.req("H17", "H18")
@pytest.mark.parametrize("variant", CASES)
async def test_a_reader_that_reacts_sees_what_was_promised(world: World, variant: str) -> None:
    """
    At the moment a subscriber receives a happening, it is in the log, and the state is what the variant promises.
    """
    ledger = world.ledger
    only = HappeningFilter(variants=(variant,))
    subscription = ledger.happenings.subscribe(filter=only)
    act, promise = CASES[variant]
    seen: asyncio.Queue[bool] = asyncio.Queue()

    async def react() -> None:
        async for envelope in subscription:
            written = [each async for each in ledger.happenings.history(envelope.seq - 1, envelope.seq)]
            is_promised = await ledger.read(functools.partial(_swapped, promise, envelope.happening))
            await seen.put(is_promised and [each.happening for each in written] == [envelope.happening])

    reacting = asyncio.create_task(react())
    await act(world)
    count = len([each async for each in ledger.happenings.history(subscription.current_seq, filter=only)])
    results = [await seen.get() for _ in range(count)]
    reacting.cancel()

    assert results
    assert all(results)


@pytest.mark.req("H17", "H18")
def test_no_promise_is_left_out() -> None:
    """
    All 33 variants that promise something of the ledger's state have a case above.
    """
    promised = {
        *("custody_taken", "custody_released", "custody_state_reported"),
        *("relation_cardinality_violation", "relation_forgotten", "relation_suppressed"),
        *("relation_suppression_reason_updated", "relation_unsuppressed", "subject_forgotten"),
        *("factory_instance_announced", "factory_instance_retracted"),
        *("subject_addressing_forced_retract", "relation_claim_forced_retract"),
        *("subject_merged", "subject_split", "relation_split_ambiguous"),
        *("relation_rewritten", "relation_cardinality_violated_post_rewrite"),
        *("claim_reassigned", "relation_claim_suppression_collapsed", "flight_mode_changed"),
        *("appointment_approaching", "appointment_fired", "appointment_missed", "appointment_cancelled"),
        *("watch_fired", "watch_missed", "watch_cancelled", "watch_evaluation_throttled"),
        *("subject_grammar_orphan", "subject_migrated", "grammar_migration_progress", "grammar_orphans_accepted"),
    }

    assert len(promised) == 33
    assert promised <= CASES.keys() & variants().keys()
