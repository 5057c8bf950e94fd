"""
The variants of happenings: what can change in the ledger, and what each tells. See ``happening.py`` for what follows from a declaration.

What a declaration takes can be had from here too.
"""

from __future__ import annotations

import enum
from typing import Any, Literal

import msgspec

from .happening import FreeForm as FreeForm
from .happening import Happening as Happening
from .happening import OptionalSubject
from .happening import Plugin as Plugin
from .happening import Shelf as Shelf
from .happening import Subject as Subject
from .happening import Subjects as Subjects
from .happening import static_labels as static_labels


class HealthStatus(enum.StrEnum):
    """How well what somebody has custody of is doing."""

    HEALTHY = "healthy"
    DEGRADED = "degraded"
    UNHEALTHY = "unhealthy"


class Cardinality(enum.StrEnum):
    """How many ends a predicate allows on one side."""

    EXACTLY_ONE = "exactly_one"
    AT_MOST_ONE = "at_most_one"
    AT_LEAST_ONE = "at_least_one"
    MANY = "many"

    def is_exceeded_by(self, count: int) -> bool:
        """Whether so many are too many. That there are too few is never a violation."""
        return count > 1 and self in (Cardinality.EXACTLY_ONE, Cardinality.AT_MOST_ONE)


class SplitStrategy(enum.StrEnum):
    """Where the relations of a subject go that is split."""

    TO_BOTH = "to_both"
    TO_FIRST = "to_first"
    EXPLICIT = "explicit"


Side = Literal["source", "target"]
"""``source``: one source has too many targets; ``target``: one target has too many sources."""


class ClaimsRetracted(msgspec.Struct, frozen=True, tag_field="kind", tag="claims_retracted"):
    """The last claim was retracted."""

    retracting_plugin: str


class SubjectCascade(msgspec.Struct, frozen=True, tag_field="kind", tag="subject_cascade"):
    """A subject at one end was forgotten."""

    forgotten_subject: str


class SuppressionRecord(msgspec.Struct, frozen=True):
    """Who hid a relation, when and why."""

    admin_plugin: str
    suppressed_at_ms: int
    reason: str | None


class AddressingForm(msgspec.Struct, frozen=True):
    """An external name of a subject, as JSON has it."""

    scheme: str
    value: str


# Custody


class CustodyTaken(Happening, frozen=True, kw_only=True):
    """A plugin took custody of something. The record exists, with shelf and type."""

    plugin: Plugin
    handle_id: str
    shelf: Shelf
    custody_type: str


class CustodyReleased(Happening, frozen=True, kw_only=True):
    """Custody ended. The record is gone."""

    plugin: Plugin
    handle_id: str


class CustodyStateReported(Happening, frozen=True, kw_only=True):
    """A plugin reported the state of what it has custody of. The record's last state is that report."""

    plugin: Plugin
    handle_id: str
    health: HealthStatus


class CustodyAborted(Happening, frozen=True, kw_only=True):
    """A correction failed and ended the work. The record says so."""

    plugin: Plugin
    handle_id: str
    shelf: Shelf
    reason: str


class CustodyDegraded(Happening, frozen=True, kw_only=True):
    """A correction failed, and the work goes on as well as it can. The record says so."""

    plugin: Plugin
    handle_id: str
    shelf: Shelf
    reason: str


# Relation graph


class RelationAsserted(Happening, frozen=True, kw_only=True):
    """A plugin claimed a relation that did not exist before. Comes before the violations that it causes."""

    plugin: Plugin
    source_id: Subject
    predicate: str
    target_id: Subject


class RelationClaimAdded(Happening, frozen=True, kw_only=True):
    """A further plugin claimed a relation."""

    plugin: Plugin
    source_id: Subject
    predicate: str
    target_id: Subject


class RelationClaimRetracted(Happening, frozen=True, kw_only=True):
    """A plugin retracted its claim on a relation, and other claims are left. The last one is ``relation_forgotten`` alone."""

    plugin: Plugin
    source_id: Subject
    predicate: str
    target_id: Subject


class RelationCardinalityViolation(Happening, frozen=True, kw_only=True):
    """A claim was stored and makes more ends than its predicate declares. Both relations are visible."""

    plugin: Plugin
    predicate: str
    source_id: Subject
    target_id: Subject
    side: Side
    declared: Cardinality
    observed_count: int


class RelationForgotten(Happening, frozen=True, kw_only=True):
    """A relation is gone: its last claim was retracted, or a subject at one end was forgotten."""

    plugin: Plugin
    source_id: Subject
    predicate: str
    target_id: Subject
    reason: ClaimsRetracted | SubjectCascade


class RelationSuppressed(Happening, frozen=True, kw_only=True):
    """An administrator hid a relation from neighbours and walks."""

    admin_plugin: Plugin
    source_id: Subject
    predicate: str
    target_id: Subject
    reason: str | None


class RelationSuppressionReasonUpdated(Happening, frozen=True, kw_only=True):
    """The reason of a hidden relation was changed; who hid it and when stay."""

    admin_plugin: Plugin
    source_id: Subject
    predicate: str
    target_id: Subject
    old_reason: str | None
    new_reason: str | None


class RelationUnsuppressed(Happening, frozen=True, kw_only=True):
    """A hidden relation is visible again."""

    admin_plugin: Plugin
    source_id: Subject
    predicate: str
    target_id: Subject


# Subject registry


class SubjectAnnounced(Happening, frozen=True, kw_only=True):
    """A plugin announced a subject that did not exist before, with these addressings."""

    plugin: Plugin
    canonical_id: Subject
    subject_type: str
    addressings: tuple[AddressingForm, ...]


class SubjectAddressingAdded(Happening, frozen=True, kw_only=True):
    """A plugin announced a further addressing of a subject. Comes before a change of its state by the same announcement."""

    plugin: Plugin
    canonical_id: Subject
    scheme: str
    value: str


class SubjectAddressingRemoved(Happening, frozen=True, kw_only=True):
    """A plugin retracted an addressing, and the subject has others. The last one is ``subject_forgotten`` alone."""

    plugin: Plugin
    canonical_id: Subject
    scheme: str
    value: str


class SubjectForgotten(Happening, frozen=True, kw_only=True):
    """The last addressing of a subject was retracted; its id resolves no more. Comes before what it takes along."""

    plugin: Plugin
    canonical_id: Subject
    subject_type: str


class SubjectStateChanged(Happening, frozen=True, kw_only=True):
    """A plugin changed the state of a subject."""

    plugin: Plugin
    canonical_id: Subject
    subject_type: str
    prev_state: Any
    new_state: Any


class SubjectConflictDetected(Happening, frozen=True, kw_only=True):
    """An announcement names addressings of several subjects. Nothing was attached."""

    plugin: Plugin
    addressings: tuple[AddressingForm, ...]
    canonical_ids: Subjects


# Factory instances


class FactoryInstanceAnnounced(Happening, frozen=True, kw_only=True):
    """A factory plugin announced an instance, which is a subject now."""

    plugin: Plugin
    instance_id: str
    canonical_id: Subject
    shelf: Shelf
    payload_bytes: int


class FactoryInstanceRetracted(Happening, frozen=True, kw_only=True):
    """An instance was retracted, by its plugin or because that was unloaded."""

    plugin: Plugin
    instance_id: str
    canonical_id: Subject
    shelf: Shelf


# Privileged operations


class SubjectAddressingForcedRetract(Happening, frozen=True, kw_only=True):
    """An administrator retracted another plugin's addressing. Comes before what it takes along."""

    admin_plugin: str
    target_plugin: Plugin
    canonical_id: Subject
    scheme: str
    value: str
    reason: str | None


class RelationClaimForcedRetract(Happening, frozen=True, kw_only=True):
    """An administrator retracted another plugin's claim on a relation. Comes before what it takes along."""

    admin_plugin: str
    target_plugin: Plugin
    source_id: Subject
    predicate: str
    target_id: Subject
    reason: str | None


class SubjectMerged(Happening, frozen=True, kw_only=True):
    """Two subjects became one with a new id; the old ids are aliases. Comes before the relations are rewritten."""

    admin_plugin: Plugin
    source_ids: Subjects
    new_id: Subject
    reason: str | None


class SubjectSplit(Happening, frozen=True, kw_only=True):
    """One subject became several with new ids; the old id is an alias of all. Comes before the relations are rewritten."""

    admin_plugin: Plugin
    source_id: Subject
    new_ids: Subjects
    strategy: SplitStrategy
    reason: str | None


class RelationSplitAmbiguous(Happening, frozen=True, kw_only=True):
    """An explicit split did not say where a relation goes: it went to all new subjects."""

    admin_plugin: Plugin
    source_subject: Subject
    predicate: str
    other_endpoint_id: Subject
    candidate_new_ids: Subjects


# What merging and splitting bring about


class RelationRewritten(Happening, frozen=True, kw_only=True):
    """A relation's subject has another id. ``target_id`` is the end that did not change."""

    admin_plugin: Plugin
    predicate: str
    old_subject_id: Subject
    new_subject_id: Subject
    target_id: Subject


class RelationCardinalityViolatedPostRewrite(Happening, frozen=True, kw_only=True):
    """After a merge or split a subject has more ends than a predicate declares."""

    admin_plugin: Plugin
    subject_id: Subject
    predicate: str
    side: Side
    declared: Cardinality
    observed_count: int


class ClaimReassigned(Happening, frozen=True, kw_only=True):
    """A plugin's claim is on a new subject. ``addressing`` claims have scheme and value, ``relation`` claims predicate and target."""

    admin_plugin: Plugin
    plugin: str
    kind: Literal["addressing", "relation"]
    old_subject_id: Subject
    new_subject_id: Subject
    scheme: str | msgspec.UnsetType = msgspec.UNSET
    value: str | msgspec.UnsetType = msgspec.UNSET
    predicate: str | msgspec.UnsetType = msgspec.UNSET
    target_id: OptionalSubject = msgspec.UNSET


class RelationClaimSuppressionCollapsed(Happening, frozen=True, kw_only=True):
    """A visible claim is hidden because its relation became one with a suppressed relation."""

    admin_plugin: Plugin
    subject_id: Subject
    predicate: str
    target_id: Subject
    demoted_claimant: str
    surviving_suppression_record: SuppressionRecord


# Flight mode, appointments, watches


class FlightModeChanged(Happening, frozen=True, kw_only=True):
    """A class of radios was switched. ``on`` means that the radios are off."""

    rack_class: str
    on: bool


class AppointmentCreated(Happening, frozen=True, kw_only=True):
    """An appointment was issued, or issued again. ``next_fire_ms`` is its first occurrence, if it has one."""

    creator: str
    appointment_id: str
    next_fire_ms: int | None


class AppointmentApproaching(Happening, frozen=True, kw_only=True):
    """The lead time of an appointment has begun."""

    creator: str
    appointment_id: str
    scheduled_for_ms: int
    fires_in_ms: int


class AppointmentFired(Happening, frozen=True, kw_only=True):
    """An appointment's action was dispatched. The outcome is ``ok`` or the class of the error."""

    creator: str
    appointment_id: str
    fired_at_ms: int
    dispatch_outcome: str


class AppointmentMissed(Happening, frozen=True, kw_only=True):
    """An occurrence of an appointment was not dispatched."""

    creator: str
    appointment_id: str
    scheduled_for_ms: int
    reason: str


class AppointmentCancelled(Happening, frozen=True, kw_only=True):
    """An appointment was cancelled."""

    creator: str
    appointment_id: str
    cancelled_by: str


class WatchCreated(Happening, frozen=True, kw_only=True):
    """A watch was issued, or issued again."""

    creator: str
    watch_id: str


class WatchFired(Happening, frozen=True, kw_only=True):
    """A watch's action was dispatched. The outcome is ``ok`` or the class of the error."""

    creator: str
    watch_id: str
    fired_at_ms: int
    dispatch_outcome: str


class WatchMissed(Happening, frozen=True, kw_only=True):
    """A watch's condition matched, and nothing was dispatched."""

    creator: str
    watch_id: str
    suppressed_at_ms: int
    reason: str


class WatchCancelled(Happening, frozen=True, kw_only=True):
    """A watch was cancelled."""

    creator: str
    watch_id: str
    cancelled_by: str


class WatchEvaluationThrottled(Happening, frozen=True, kw_only=True):
    """A watch was evaluated more often than allowed; ``dropped`` counts what was left out."""

    creator: str
    watch_id: str
    dropped: int


# Catalogue grammar


class SubjectGrammarOrphan(Happening, frozen=True, kw_only=True):
    """There are subjects of a type that the catalogue does not declare."""

    subject_type: str
    count: int
    first_observed_at_ms: int


class SubjectMigrated(Happening, frozen=True, kw_only=True):
    """A subject has another type and id. Comes before its relations are rewritten."""

    old_id: Subject
    new_id: Subject
    from_type: str
    to_type: str
    migration_id: str


class GrammarMigrationProgress(Happening, frozen=True, kw_only=True):
    """A batch of a migration is done."""

    migration_id: str
    from_type: str
    completed: int
    remaining: int
    batch_index: int


class GrammarOrphansAccepted(Happening, frozen=True, kw_only=True):
    """An administrator accepted that a type is not declared."""

    subject_type: str
    reason: str


# Plugins


class PluginAdmitted(Happening, frozen=True, kw_only=True):
    """A plugin was loaded. Comes before anything that it does."""

    plugin: Plugin
    shelves: tuple[str, ...]
    version: str | None


class PluginUnloaded(Happening, frozen=True, kw_only=True):
    """A plugin was unloaded. Comes after what unloading took along."""

    plugin: Plugin


class PluginFailed(Happening, frozen=True, kw_only=True):
    """A plugin is gone and was not unloaded, for example because its connection was lost. Its claims stay."""

    plugin: Plugin
    reason: str


class PluginEvent(Happening, frozen=True, kw_only=True):
    """An event of a plugin's own. The ledger stamps the plugin's name."""

    plugin: Plugin
    event_type: str
    payload: FreeForm


# Further


class CatalogueFallback(Happening, frozen=True, kw_only=True):
    """The configured catalogue cannot be used; another one is. ``source`` is ``lkg``, the last that was good, or ``builtin``."""

    source: str
    reason: str


class CatalogueReloaded(Happening, frozen=True, kw_only=True):
    """Another catalogue is in use."""

    from_schema_version: int
    to_schema_version: int
    rack_count: int


class ClockTrustChanged(Happening, frozen=True, kw_only=True):
    """The clock is trusted more or less than before."""

    from_: str = msgspec.field(name="from")
    to: str


class ClockAdjusted(Happening, frozen=True, kw_only=True):
    """The clock was set by so many seconds."""

    delta_seconds: float
