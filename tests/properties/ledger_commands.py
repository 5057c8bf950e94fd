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
    MergeSubjects,
    SplitSubject,
    SuppressRelation,
    UnsuppressRelation,
)
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
from tidings.ledger.plugins import ReportPluginEvent
from tidings.ledger.subjects import Addressing

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
