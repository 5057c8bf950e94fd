"""Commands of every kind that the ledger has, on few names, so that they meet: for tests that fold them again."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from hypothesis import strategies as st

from tests.scenarios.ledger.graph_support import CATALOGUE
from tidings.happenings.variants import HealthStatus, SplitStrategy
from tidings.ledger import Command, Ledger
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
from tidings.ledger.custody import AbandonCustody, FailCustody, RecordCustody, ReleaseCustody, ReportCustodyState
from tidings.ledger.factories import AnnounceInstance, RetractInstance
from tidings.ledger.flight_mode import SetFlightMode
from tidings.ledger.grammar import (
    AcceptGrammarOrphans,
    BeginGrammarMigration,
    FinishGrammarMigration,
    MigrateGrammarBatch,
    RenameStrategy,
    ScanGrammar,
)
from tidings.ledger.merging import MergeSubjects, SplitSubject
from tidings.ledger.plugins import ReportPluginEvent
from tidings.ledger.subjects import Addressing
from tidings.schedule.actions import ScheduledAction
from tidings.schedule.conditions import HappeningMatch, Leaves
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

_PLUGINS: Final = st.sampled_from(["org.a", "org.b"])
_ADDRESSINGS: Final = st.builds(Addressing, st.just("s"), st.sampled_from(list("uvwxyz")))
_TRACKS: Final = st.builds(Addressing, st.just("s"), st.sampled_from(list("uvw")))
_TYPES: Final = st.sampled_from([declared.name for declared in CATALOGUE.subject_types[:2]])
_PREDICATES: Final = st.sampled_from([declared.name for declared in CATALOGUE.predicates[:3]])
_HANDLES: Final = st.sampled_from(["h1", "h2"])
_REASONS: Final = st.sampled_from([None, "why", "therefore"])
_RELATION: Final[dict[str, st.SearchStrategy[Any]]] = {
    "source": _ADDRESSINGS,
    "predicate": _PREDICATES,
    "target": _ADDRESSINGS,
}
_ADMIN: Final = {"admin": st.just("org.admin"), "reason": _REASONS}
_IDS: Final = st.uuids().map(str)
_LOST, _KEPT = (declared.name for declared in CATALOGUE.subject_types[:2])
_SMALLER: Final = parse_catalogue(f'schema_version = 1\n[[subjects]]\nname = "{_KEPT}"\n')
"""A catalogue that lost a type."""
PARTS: Final = (Watches,)
"""What these commands need beside the parts that every ledger has."""


def _split(**values: Any) -> SplitSubject:
    name = values["source"].value
    return SplitSubject(**values, partition=((Addressing("s", name),), (Addressing("t", name),)))


COMMANDS: Final[st.SearchStrategy[Command]] = st.one_of(
    st.builds(
        AnnounceSubject,
        plugin=_PLUGINS,
        subject_type=_TYPES,
        addressings=st.lists(_ADDRESSINGS, min_size=1, max_size=3, unique=True).map(tuple),
        new_id=_IDS,
        state=st.sampled_from([None, {"on": True}, [1, 2.5, "x"]]),
    ),
    st.builds(RetractAddressing, plugin=_PLUGINS, addressing=_ADDRESSINGS),
    st.builds(UpdateSubjectState, plugin=_PLUGINS, subject=_ADDRESSINGS, state=st.sampled_from([None, 1, {"a": []}])),
    st.builds(ClaimRelation, plugin=_PLUGINS, reason=_REASONS, **_RELATION),
    st.builds(RetractRelation, plugin=_PLUGINS, **_RELATION),
    st.builds(SuppressRelation, **_ADMIN, **_RELATION),
    st.builds(UnsuppressRelation, admin=_ADMIN["admin"], **_RELATION),
    st.builds(ForceRetractAddressing, target_plugin=_PLUGINS, addressing=_ADDRESSINGS, **_ADMIN),
    st.builds(ForceRetractRelation, target_plugin=_PLUGINS, **_ADMIN, **_RELATION),
    st.builds(MergeSubjects, a=_TRACKS, b=_TRACKS, new_id=_IDS, **_ADMIN),
    st.builds(
        _split,
        source=_ADDRESSINGS,
        new_ids=st.tuples(_IDS, _IDS),
        strategy=st.sampled_from([SplitStrategy.TO_BOTH, SplitStrategy.TO_FIRST]),
        **_ADMIN,
    ),
    st.builds(
        RecordCustody, plugin=_PLUGINS, handle_id=_HANDLES, shelf=st.just("r.s"), custody_type=st.just("playback")
    ),
    st.builds(
        ReportCustodyState,
        plugin=_PLUGINS,
        handle_id=_HANDLES,
        health=st.sampled_from(HealthStatus),
        payload=st.binary(max_size=4),
    ),
    st.builds(
        FailCustody,
        plugin=_PLUGINS,
        handle_id=_HANDLES,
        mode=st.sampled_from(["aborted", "degraded"]),
        reason=st.just("it broke"),
    ),
    st.builds(ReleaseCustody, plugin=_PLUGINS, handle_id=_HANDLES),
    st.builds(AbandonCustody, plugin=_PLUGINS, handle_id=_HANDLES),
    st.builds(
        AnnounceInstance,
        plugin=_PLUGINS,
        instance_id=_HANDLES,
        shelf=st.just("r.s"),
        load_id=st.sampled_from(["first", "second"]),
        new_id=_IDS,
        payload=st.binary(max_size=4),
    ),
    st.builds(RetractInstance, plugin=_PLUGINS, instance_id=_HANDLES),
    st.builds(
        ReportPluginEvent, plugin=_PLUGINS, event_type=st.just("event"), payload=st.sampled_from([None, {"a": 1}])
    ),
    st.builds(
        SetFlightMode, rack_class=st.sampled_from(["flight_mode.wifi", "flight_mode.bluetooth"]), on=st.booleans()
    ),
    st.builds(
        CreateWatch,
        creator=_PLUGINS,
        spec=st.builds(WatchSpec, watch_id=_HANDLES, condition=st.just(HappeningMatch())),
        action=st.just(ScheduledAction(target_shelf="r.s", request_type="go")),
        count_max=st.integers(1, 3),
        creator_count_max=st.just(2),
    ),
    st.builds(CancelWatch, creator=_PLUGINS, watch_id=_HANDLES, cancelled_by=_PLUGINS),
    st.builds(
        NoteWatches,
        notes=st.lists(
            st.builds(
                WatchNote,
                creator=_PLUGINS,
                watch_id=_HANDLES,
                issue=st.integers(1, 3),
                memory=st.just(WatchMemory(leaves=Leaves(latched_at_ms=(None,)), entered_at_ms=1)),
                seq=st.integers(0, 9),
                firings=st.sampled_from([(), (1,), (2, 3)]),
                missed=st.sampled_from([(), ("in_cooldown",)]),
                dropped=st.integers(0, 1),
            ),
            max_size=3,
        ).map(tuple),
        seq=st.integers(0, 9),
    ),
    st.builds(
        FinishWatchFiring,
        creator=_PLUGINS,
        watch_id=_HANDLES,
        issue=st.integers(1, 3),
        firing=st.integers(1, 3),
        fired_at_ms=st.just(5),
        dispatch_outcome=st.just("ok"),
    ),
    st.just(SetCatalogue(catalogue=_SMALLER)),
    st.builds(ScanGrammar, last_seq=st.integers(0, 9), oldest_seq=st.integers(0, 9)),
    st.builds(AcceptGrammarOrphans, admin=st.just("org.admin"), subject_type=_TYPES, reason=st.just("why")),
    st.builds(
        BeginGrammarMigration,
        from_type=st.just(_LOST),
        strategy=st.just(RenameStrategy(to_type=_KEPT)),
        migration_id=_HANDLES,
        **_ADMIN,
    ),
    st.builds(
        MigrateGrammarBatch,
        admin=_ADMIN["admin"],
        from_type=st.just(_LOST),
        migration_id=_HANDLES,
        moves=st.lists(st.tuples(st.sampled_from(["id-u", "id-v", "id-w"]), _IDS), max_size=2).map(tuple),
        remaining=st.just(0),
    ),
    st.builds(FinishGrammarMigration, from_type=st.just(_LOST), migration_id=_HANDLES),
)


PRELUDE: Final[tuple[Command, ...]] = (
    *(
        AnnounceSubject(
            plugin=plugin,
            subject_type=CATALOGUE.subject_types[kind].name,
            addressings=(Addressing("s", name), Addressing("t", name)),
            new_id=f"id-{name}",
        )
        for names, kind, plugin in (("uvw", 0, "org.a"), ("xyz", 1, "org.b"))
        for name in names
    ),
    *(
        ClaimRelation(
            plugin="org.a", source=Addressing("s", source), predicate=declared.name, target=Addressing("s", target)
        )
        for declared in CATALOGUE.predicates[:3]
        for source, target in ("ux", "uy", "vx", "wz")
    ),
)
"""Subjects and relations for the commands to meet."""


async def state_of(ledger: Ledger) -> dict[str, bytes]:
    """Every part as a snapshot would have it, to the byte."""
    return await ledger.read(lambda state: {part.name: msgspec.msgpack.encode(part.freeze()) for part in state.parts})
