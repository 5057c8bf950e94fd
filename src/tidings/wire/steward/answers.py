"""What a server sends: answers, the frames of subscriptions, and the calls of a plugin."""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec
from msgspec import UNSET, UnsetType

from .requests import AddressingArgument, CustodyHandleArgument, ErrorBody

WIRE_VERSION: Final = 1
"""Changes only when a client written for an earlier one would no longer understand."""


class Granted(msgspec.Struct, frozen=True, kw_only=True):
    """What was granted of what ``negotiate`` asked for."""

    ok: Literal[True] = True
    granted: list[str]


class Authenticated(msgspec.Struct, frozen=True, kw_only=True):
    """The token is accepted."""

    authenticated: Literal[True] = True
    subject: str


class CapabilitiesAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What the server can do. Lists only grow."""

    capabilities: Literal[True] = True
    wire_version: int = WIRE_VERSION
    ops: list[str]
    features: list[str]
    catalogue_source: str
    clock_trust: str
    has_battery_rtc: bool
    coalesce_labels: dict[str, list[str]]
    epoch: str
    """The life of the log that seqs are counted in."""


class SubscribedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The subscription to happenings begins. What is read from now on is at least as new as ``current_seq``."""

    subscribed: Literal[True] = True
    current_seq: int


class HappeningFrame(msgspec.Struct, frozen=True, kw_only=True):
    """One happening."""

    seq: int
    happening: Any
    resume_seq: int | UnsetType = UNSET
    """With coalescing: the cursor to come back with, so that nothing is missed."""


class LagNotice(msgspec.Struct, frozen=True, kw_only=True):
    """Happenings that a slow subscriber did not get."""

    missed_count: int
    oldest_available_seq: int
    current_seq: int


class LaggedFrame(msgspec.Struct, frozen=True):
    """The subscriber was too slow."""

    lagged: LagNotice


class SubscribedSubject(msgspec.Struct, frozen=True, kw_only=True):
    """The subscription to a subject begins; ``canonical_id`` is the one that is followed."""

    subscribed_subject: Literal[True] = True
    canonical_id: str
    current_seq: int


class ProjectionFrame(msgspec.Struct, frozen=True, kw_only=True):
    """A subject as it is now; ``None`` if it is no more. After a split, ``new_ids`` has what it became, and the stream ends."""

    seq: int
    canonical_id: str
    projection: Any
    new_ids: list[str] | UnsetType = UNSET


class SubjectsPage(msgspec.Struct, frozen=True, kw_only=True):
    """Subjects, by id."""

    subjects: list[Any]
    next_cursor: str | None
    current_seq: int


class RelationsPage(msgspec.Struct, frozen=True, kw_only=True):
    """Relations, by source, predicate and target."""

    relations: list[Any]
    next_cursor: str | None
    current_seq: int


class AddressingsPage(msgspec.Struct, frozen=True, kw_only=True):
    """Addressings, by scheme and value."""

    addressings: list[Any]
    next_cursor: str | None
    current_seq: int


class ActiveCustodies(msgspec.Struct, frozen=True, kw_only=True):
    """Custodies, by plugin and handle. All of them have neither cursor nor seq; a page that was asked for has both."""

    active_custodies: list[Any]
    next_cursor: str | UnsetType | None = UNSET
    current_seq: int | UnsetType = UNSET


class AliasedProjection(msgspec.Struct, frozen=True, kw_only=True):
    """What a retired id leads to, and how. (A live id is answered with the projection alone.)"""

    subject: Any
    aliased_from: Any


class AliasDescription(msgspec.Struct, frozen=True, kw_only=True):
    """What an id stands for: ``found``, ``aliased`` or ``not_found``."""

    ok: Literal[True] = True
    subject_id: str
    result: dict[str, Any]


class ResolvedAddressing(msgspec.Struct, frozen=True, kw_only=True):
    """The subject that an addressing belongs to, if any."""

    resolved_addressing: AddressingArgument
    canonical_id: str | None
    current_seq: int


class FlightModesAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The classes of radios that were ever switched; true where they are off."""

    flight_modes: dict[str, bool]
    current_seq: int


class RackProjectionAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A rack, its shelves, and the plugins on them."""

    rack_projection: Literal[True] = True
    rack: str
    charter: str
    current_seq: int
    shelves: list[dict[str, Any]]


class PluginsInventory(msgspec.Struct, frozen=True, kw_only=True):
    """The plugins that are there, in the order they came."""

    plugins_inventory: Literal[True] = True
    current_seq: int
    plugins: list[dict[str, Any]]


class RequestAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What a plugin answered."""

    payload_b64: str


class CustodyTakenAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A plugin has custody."""

    custody: Literal[True] = True
    shelf: str
    handle: CustodyHandleArgument


class CourseCorrected(msgspec.Struct, frozen=True, kw_only=True):
    """A plugin has changed its course."""

    course_corrected: Literal[True] = True
    shelf: str
    handle_id: str


class CustodyReleasedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A plugin has let go."""

    released: Literal[True] = True
    shelf: str
    handle_id: str


class SubjectAnnounced(msgspec.Struct, frozen=True, kw_only=True):
    """What an announcement did; after a conflict there is no id, but those that it is about."""

    announced: Literal["created", "updated", "no_change", "conflict"]
    canonical_id: str | None
    conflicting_ids: list[str]


class AdminEntries(msgspec.Struct, frozen=True, kw_only=True):
    """What administrators did, oldest first; ``next_after`` is for the next page."""

    admin_entries: list[Any]
    next_after: int | None
    current_seq: int


class ClaimsPage(msgspec.Struct, frozen=True, kw_only=True):
    """The claim log, oldest first; ``next_after`` is for the next page."""

    claims: list[Any]
    next_after: int | None
    current_seq: int


class OpenConflicts(msgspec.Struct, frozen=True, kw_only=True):
    """Conflicts that are open, oldest first."""

    conflicts: list[Any]
    current_seq: int


class Resolutions(msgspec.Struct, frozen=True, kw_only=True):
    """The names behind tokens; those that are not known are left out."""

    resolutions: list[dict[str, Any]]


class AppointmentCreated(msgspec.Struct, frozen=True, kw_only=True):
    """An appointment is made; ``next_fire_ms`` is none if it never fires."""

    appointment_created: Literal[True] = True
    creator: str
    appointment_id: str
    next_fire_ms: int | None


class AppointmentCancelledAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Whether there was an appointment to cancel."""

    appointment_cancelled: Literal[True] = True
    creator: str
    appointment_id: str
    cancelled: bool


class AppointmentsList(msgspec.Struct, frozen=True, kw_only=True):
    """Appointments, by creator and id. All of them have neither cursor nor seq; a page that was asked for has both."""

    appointments: Literal[True] = True
    entries: list[Any]
    next_cursor: str | UnsetType | None = UNSET
    current_seq: int | UnsetType = UNSET


class AppointmentProjection(msgspec.Struct, frozen=True, kw_only=True):
    """One appointment, if there is one."""

    appointment_projection: Literal[True] = True
    creator: str
    appointment_id: str
    entry: Any


class WatchCreated(msgspec.Struct, frozen=True, kw_only=True):
    """A watch is set up."""

    watch_created: Literal[True] = True
    creator: str
    watch_id: str


class WatchCancelledAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Whether there was a watch to cancel."""

    watch_cancelled: Literal[True] = True
    creator: str
    watch_id: str
    cancelled: bool


class WatchesList(msgspec.Struct, frozen=True, kw_only=True):
    """Watches, by creator and id. All of them have neither cursor nor seq; a page that was asked for has both."""

    watches: Literal[True] = True
    entries: list[Any]
    next_cursor: str | UnsetType | None = UNSET
    current_seq: int | UnsetType = UNSET


class WatchProjection(msgspec.Struct, frozen=True, kw_only=True):
    """One watch, if there is one."""

    watch_projection: Literal[True] = True
    creator: str
    watch_id: str
    entry: Any


class GrammarOrphansList(msgspec.Struct, frozen=True, kw_only=True):
    """Types that are not declared, by name."""

    grammar_orphans: Literal[True] = True
    entries: list[Any]


class GrammarOrphansAcceptedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the type had not been accepted before."""

    grammar_orphans_accepted: Literal[True] = True
    from_type: str
    accepted: bool


class GrammarMigration(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a migration did or, of a dry run, would do. Empty samples are left out."""

    grammar_migration: bool
    """Always true."""
    migration_id: str
    from_type: str
    migrated_count: int
    unmigrated_count: int
    duration_ms: int
    dry_run: bool
    unmigrated_sample: list[str] = []
    target_type_breakdown: dict[str, int] = {}
    sample_first: list[str] = []
    sample_last: list[str] = []


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """A verb of a plugin or of an administrator is done, on disk and told; ``result`` is what it answers, if anything."""

    done: str
    result: Any = None


class RehearsalAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What a request with ``dry_run`` would do; ``outcome`` is what it would answer, if it would change nothing."""

    rehearsed: str
    would_change: bool
    outcome: Any = None


class PluginLoaded(msgspec.Struct, frozen=True, kw_only=True):
    """The plugin is there."""

    plugin_loaded: Literal[True] = True
    plugin: str
    shelves: list[str]


class CallFrame(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Something that a plugin is asked for; answered by ``answer`` with the same number."""

    call: int
    kind: Literal["request", "take_custody", "correct_course", "release_custody"]
    shelf: str | UnsetType = UNSET
    request_type: str | UnsetType = UNSET
    custody_type: str | UnsetType = UNSET
    correction_type: str | UnsetType = UNSET
    handle_id: str | UnsetType = UNSET
    instance_id: str | None = None
    payload_b64: str = ""


class CallWithdrawn(msgspec.Struct, frozen=True, kw_only=True):
    """Nobody waits for the answer to this call any more."""

    withdrawn: int


class RefusalFrame(msgspec.Struct, frozen=True):
    """The answer to a request that was refused."""

    error: ErrorBody


Answers = (
    Authenticated
    | Granted
    | CapabilitiesAnswer
    | SubscribedAnswer
    | HappeningFrame
    | LaggedFrame
    | SubscribedSubject
    | ProjectionFrame
    | SubjectsPage
    | RelationsPage
    | AddressingsPage
    | ActiveCustodies
    | AliasedProjection
    | AliasDescription
    | ResolvedAddressing
    | FlightModesAnswer
    | RackProjectionAnswer
    | PluginsInventory
    | RequestAnswer
    | CustodyTakenAnswer
    | CourseCorrected
    | CustodyReleasedAnswer
    | SubjectAnnounced
    | AdminEntries
    | ClaimsPage
    | OpenConflicts
    | Resolutions
    | AppointmentCreated
    | AppointmentCancelledAnswer
    | AppointmentsList
    | AppointmentProjection
    | WatchCreated
    | WatchCancelledAnswer
    | WatchesList
    | WatchProjection
    | GrammarOrphansList
    | GrammarOrphansAcceptedAnswer
    | GrammarMigration
    | Done
    | RehearsalAnswer
    | PluginLoaded
    | CallFrame
    | CallWithdrawn
    | RefusalFrame
)
"""What a server sends. A subject's projection, the answer to ``project_subject``, is the ledger's own form."""


def error_frame(error_class: str, message: str, subclass: str = "", /, **details: Any) -> RefusalFrame:
    """An answer that refuses; ``details`` is left out if there is nothing to say."""
    found = ({"subclass": subclass} if subclass else {}) | details
    return RefusalFrame(ErrorBody(error_class=error_class, message=message, details=found or UNSET))
