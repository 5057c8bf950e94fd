"""
Happenings: what can change in the ledger, as one declaration a variant.

A variant is a subclass of ``Happening``. Its JSON form, its labels, what filters compare, which subjects it touches and its line in
the documents all follow from the declaration:

    class DoorOpened(Happening, frozen=True, kw_only=True):
        \"\"\"Somebody opened a door.\"\"\"

        plugin: Plugin
        door_id: Subject
        badge: str | None

- ``type`` in JSON is the class's name in snake case; every variant has ``at_ms``, when it was emitted.
- ``Plugin``, ``Shelf`` and ``Subject`` mark what the filters of the same names compare; a variant without such a field is let through by no
  filter that asks for one.
- Labels, by which subscribers coalesce, are the fields that are text, numbers or truth values and always there. Lists, structures,
  enumerations, optional fields and ``at_ms`` are not. The top-level keys of a ``FreeForm`` object are labels too, but no static ones.

The set is open: a log or a peer may hold variants that this process has not declared. They are read as ``UnknownHappening`` and passed on
as they came.
"""

from __future__ import annotations

import enum
import inspect
import re
import typing
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec

from .errors import InvalidHappening, VariantDeclaredTwice

_CAPITAL: Final = re.compile(r"(?<!^)(?=[A-Z])")

Plugin = Annotated[str, msgspec.Meta(extra={"role": "plugin"})]
"""The plugin that a filter on plugins compares."""
Shelf = Annotated[str, msgspec.Meta(extra={"role": "shelf"})]
"""The fully qualified shelf that a filter on shelves compares."""
Subject = Annotated[str, msgspec.Meta(extra={"role": "subject"})]
"""The canonical id of a subject that the happening touches."""
Subjects = Annotated[tuple[str, ...], msgspec.Meta(extra={"role": "subject"})]
"""Canonical ids of subjects that the happening touches."""
OptionalSubject = Annotated[str | msgspec.UnsetType, msgspec.Meta(extra={"role": "subject"})]
FreeForm = Annotated[Any, msgspec.Meta(extra={"role": "free_form"})]
"""JSON of a plugin's own; the top-level keys of an object become labels."""


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


def _name_of(name: str) -> str:
    return _CAPITAL.sub("_", name).lower()


class Happening(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag=_name_of, gc=False):
    """One immutable notice of a change. ``at_ms`` is when it was emitted, in milliseconds since 1970."""

    at_ms: int

    def __init_subclass__(cls, **config: Any) -> None:
        super().__init_subclass__(**config)
        declare(cls)

    @property
    def variant(self) -> str:
        """The variant's name, as JSON's ``type``."""
        return facts_of(type(self)).name

    @property
    def filter_plugin(self) -> str | None:
        """What a filter on plugins compares."""
        name = facts_of(type(self)).plugin
        return None if name is None else getattr(self, name)

    @property
    def filter_shelf(self) -> str | None:
        """What a filter on shelves compares."""
        name = facts_of(type(self)).shelf
        return None if name is None else getattr(self, name)

    @property
    def subjects(self) -> tuple[str, ...]:
        """The canonical ids of the subjects that this touches."""
        found: list[str] = []
        for name in facts_of(type(self)).subjects:
            value = getattr(self, name)
            if isinstance(value, tuple):
                found.extend(value)
            elif isinstance(value, str):
                found.append(value)
        return tuple(found)

    def affects_subject(self, canonical_id: str) -> bool:
        """Whether it touches this subject."""
        return canonical_id in self.subjects

    def labels(self) -> dict[str, str]:
        """Labels and their values, as text."""
        facts = facts_of(type(self))
        labels = {name: _as_text(value) for name, value in self._free_form_items(facts)}
        labels.update((label, _as_text(getattr(self, name))) for label, name in facts.labels.items())
        labels["variant"] = facts.name
        return labels

    def _free_form_items(self, facts: VariantFacts) -> Iterator[tuple[str, Any]]:
        for name in facts.free_form:
            value = getattr(self, name)
            if isinstance(value, Mapping):
                yield from value.items()


class UnknownHappening(msgspec.Struct, frozen=True):
    """A variant that this process has not declared, as it came."""

    variant: str
    fields: dict[str, Any]
    """All of its JSON but ``type``."""
    subjects: ClassVar[tuple[str, ...]] = ()

    @property
    def at_ms(self) -> int:
        """When it was emitted; 0 if it does not say."""
        value = self.fields.get("at_ms")
        return value if type(value) is int else 0

    @property
    def filter_plugin(self) -> str | None:
        """Nothing is known of its fields."""
        return None

    filter_shelf = filter_plugin

    def affects_subject(self, canonical_id: str) -> bool:
        """Nothing is known of its fields."""
        return False

    def labels(self) -> dict[str, str]:
        """Only ``variant``."""
        return {"variant": self.variant}


AnyHappening = Happening | UnknownHappening


class VariantFacts(msgspec.Struct, frozen=True):
    """What follows from a declaration."""

    name: str
    plugin: str | None
    shelf: str | None
    subjects: tuple[str, ...]
    free_form: tuple[str, ...]
    labels: dict[str, str]
    """The field of each label, in the order of declaration."""


_variants: dict[str, type[Happening]] = {}
_facts: dict[type[Happening], VariantFacts] = {}


def declare(variant: type[Happening]) -> None:
    """
    Enter a variant; called for every subclass of ``Happening``.

    Raises:
        VariantDeclaredTwice: Another class has that name.
        InvalidHappening: A field has the name of something that every happening has.
    """
    name = _name_of(variant.__name__)
    for field in inspect.get_annotations(variant):
        if field == "type" or (hasattr(Happening, field) and field != "at_ms"):
            raise InvalidHappening(name, f"no field can be called {field!r}: every happening has that already")
    known = _variants.get(name)
    if known is not None and (known.__module__, known.__qualname__) != (variant.__module__, variant.__qualname__):
        raise VariantDeclaredTwice(name, f"{known.__module__}.{known.__qualname__}")
    _variants[name] = variant


def facts_of(variant: type[Happening]) -> VariantFacts:
    """What follows from the declaration of a variant."""
    facts = _facts.get(variant)
    if facts is None:
        facts = _facts[variant] = _read_facts(variant)
    return facts


def _read_facts(variant: type[Happening]) -> VariantFacts:
    roles: dict[str, list[str]] = {"plugin": [], "shelf": [], "subject": [], "free_form": []}
    labels: dict[str, str] = {}
    for field in msgspec.structs.fields(variant):
        kind = field.type
        if typing.get_origin(kind) is Annotated:
            for meta in kind.__metadata__:
                if isinstance(meta, msgspec.Meta) and meta.extra and "role" in meta.extra:
                    roles[meta.extra["role"]].append(field.name)
            kind = kind.__origin__
        if field.name != "at_ms" and (kind in (str, int, bool) or typing.get_origin(kind) is Literal):
            labels[field.encode_name] = field.name
    return VariantFacts(
        name=_name_of(variant.__name__),
        plugin=next(iter(roles["plugin"]), None),
        shelf=next(iter(roles["shelf"]), None),
        subjects=tuple(roles["subject"]),
        free_form=tuple(roles["free_form"]),
        labels=labels,
    )


def _as_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, int) else msgspec.json.encode(value).decode()


def variants() -> dict[str, type[Happening]]:
    """Every declared variant by its name, in the order of declaration. A class whose declaration failed half way is none."""
    return {name: variant for name, variant in _variants.items() if hasattr(variant, "__struct_fields__")}


def variant_count() -> int:
    """A number that rises with every declaration."""
    return len(_variants)


def static_labels(name: str) -> tuple[str, ...]:
    """The labels that every happening of this variant has: ``variant``, then fields as declared. None for an unknown one."""
    variant = _variants.get(name)
    return () if variant is None else ("variant", *facts_of(variant).labels)


def to_json(happening: AnyHappening) -> dict[str, Any]:
    """A happening as JSON has it."""
    if isinstance(happening, UnknownHappening):
        return {"type": happening.variant, **happening.fields}
    form: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(happening))
    return form


def from_json(value: object, *, is_strict: bool = True) -> AnyHappening:
    """
    The happening in a JSON object.

    Args:
        is_strict: Whether a known variant must have the fields that are declared here. What a log holds was written by another version,
            perhaps; without ``is_strict`` such a one is passed on as it came, like an unknown one.

    Raises:
        InvalidHappening: It has no type, or (if strict) a field of a known variant does not fit.
    """
    name = value.get("type") if isinstance(value, Mapping) else None
    if not isinstance(value, Mapping) or not isinstance(name, str):
        raise InvalidHappening("?", "it is no object with a type")
    variant = _variants.get(name)
    if variant is not None:
        try:
            return msgspec.convert(value, variant)
        except (
            msgspec.ValidationError,
            TypeError,
            ValueError,
            NameError,
        ) as error:  # or the class cannot be used at all
            if is_strict:
                raise InvalidHappening(name, str(error)) from None
    return UnknownHappening(name, {key: each for key, each in value.items() if key != "type"})


def check(happening: AnyHappening) -> None:
    """
    Make sure that something is a happening, with fields of the types that are declared.

    Raises:
        InvalidHappening: It is not.
    """
    if isinstance(happening, Happening):
        try:
            from_json(to_json(happening))
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidHappening(happening.variant, str(error)) from None
    elif not isinstance(happening, UnknownHappening):
        raise InvalidHappening(type(happening).__name__, "it is none of the variants")


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


# Further


class PluginEvent(Happening, frozen=True, kw_only=True):
    """An event of a plugin's own. The ledger stamps the plugin's name."""

    plugin: Plugin
    event_type: str
    payload: FreeForm


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
