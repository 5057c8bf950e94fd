"""
What the ledger answers when it cannot do what it was asked.

Every error has an ``error_class`` and a ``subclass``: what clients of the socket are told. Whether trying again helps follows from the
class.
"""

from __future__ import annotations

import enum
from typing import ClassVar

from tidings.core.errors import TidingsError


class ErrorClass(enum.StrEnum):
    """What kind of failure it is."""

    TRANSIENT = "transient"
    UNAVAILABLE = "unavailable"
    RESOURCE_EXHAUSTED = "resource_exhausted"
    CONTRACT_VIOLATION = "contract_violation"
    NOT_FOUND = "not_found"
    PERMISSION_DENIED = "permission_denied"
    MISCONFIGURATION = "misconfiguration"
    TRUST_VIOLATION = "trust_violation"
    TRUST_EXPIRED = "trust_expired"
    PROTOCOL_VIOLATION = "protocol_violation"
    INTERNAL = "internal"

    @property
    def is_retryable(self) -> bool:
        """Whether the same request may succeed later."""
        return self in (ErrorClass.TRANSIENT, ErrorClass.UNAVAILABLE, ErrorClass.RESOURCE_EXHAUSTED)


class LedgerError(TidingsError):
    """The root of what the ledger refuses."""

    code = "ledger.error"
    error_class: ClassVar[ErrorClass] = ErrorClass.CONTRACT_VIOLATION
    subclass: ClassVar[str] = ""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.retryable = cls.error_class.is_retryable


class UnknownSubject(LedgerError):
    """Nothing is known under this addressing or id."""

    code = "ledger.unknown_subject"
    error_class = ErrorClass.NOT_FOUND
    subclass = "unknown_subject"
    text = "no subject is known as {name!r}"
    name: str
    hint: str | None = None


class AliasChainForked(LedgerError):
    """A retired id leads to several subjects."""

    code = "ledger.alias_chain_forked"
    error_class = ErrorClass.NOT_FOUND
    subclass = "alias_chain_forked"
    text = "{canonical_id!r} was split, and leads to several subjects"
    canonical_id: str


class AliasChainUnresolved(LedgerError):
    """A retired id leads nowhere, or was not to be followed."""

    code = "ledger.alias_chain_unresolved"
    error_class = ErrorClass.NOT_FOUND
    subclass = "alias_chain_unresolved"
    text = "{canonical_id!r} is retired: {problem}"
    canonical_id: str
    problem: str


class NotClaimant(LedgerError):
    """A plugin wants to take back what another one claims."""

    code = "ledger.not_claimant"
    subclass = "not_claimant"
    text = "{plugin!r} does not claim {what}"
    plugin: str
    what: str


class InvalidCommand(LedgerError):
    """A value of a command cannot be used; ``field`` names it."""

    code = "ledger.invalid"
    subclass = "invalid"
    text = "{field}: {problem}"
    field: str
    problem: str


class UnknownRelation(LedgerError):
    """There is no such relation."""

    code = "ledger.unknown_relation"
    error_class = ErrorClass.NOT_FOUND
    subclass = "unknown_relation"
    text = "there is no relation {relation!r}"
    relation: str


class UnknownPredicate(LedgerError):
    """The catalogue declares no such predicate."""

    code = "ledger.unknown_predicate"
    subclass = "unknown_predicate"
    text = "the catalogue declares no predicate {predicate!r}"
    hint = "declare it under [[relation]]"
    predicate: str


class UnknownSubjectType(LedgerError):
    """The catalogue declares no such type of subjects."""

    code = "ledger.unknown_subject_type"
    subclass = "unknown_subject_type"
    text = "the catalogue declares no type {subject_type!r}"
    hint = "declare it under [[subjects]]"
    subject_type: str


class SubjectTypeMismatch(LedgerError):
    """A subject is announced as of another type than it is."""

    code = "ledger.subject_type_mismatch"
    subclass = "subject_type_mismatch"
    text = "the subject {canonical_id!r} is of type {subject_type!r}, not {announced_type!r}"
    canonical_id: str
    subject_type: str
    announced_type: str


class MergeSourceUnknown(LedgerError):
    """One of two subjects to be merged is not there, or not any more."""

    code = "ledger.merge_source_unknown"
    error_class = ErrorClass.NOT_FOUND
    subclass = "merge_source_unknown"
    text = "no subject to merge is known as {addressing!r}"
    addressing: str
    hint: str | None = None


class MergeSelfTarget(LedgerError):
    """A subject is to be merged with itself."""

    code = "ledger.merge_self_target"
    subclass = "merge_self_target"
    text = "both names are of the subject {canonical_id!r}"
    canonical_id: str


class MergeCrossType(LedgerError):
    """Subjects of different types are to be merged."""

    code = "ledger.merge_cross_type"
    subclass = "merge_cross_type"
    text = "a subject of type {a_type!r} cannot be merged with one of type {b_type!r}"
    a_type: str
    b_type: str


class SplitTargetIndexOutOfBounds(LedgerError):
    """A plan of a split sends a relation to a group that there is not."""

    code = "ledger.split_target_index_out_of_bounds"
    subclass = "split_target_index_out_of_bounds"
    text = "a relation is assigned to group {index} of {partition_count}; the first is 0"
    index: int
    partition_count: int


class TargetPluginUnknown(LedgerError):
    """An administrator names a plugin that is not there and claims nothing."""

    code = "ledger.target_plugin_unknown"
    error_class = ErrorClass.NOT_FOUND
    subclass = "target_plugin_unknown"
    text = "no plugin {plugin!r} is loaded, and none of that name claims anything"
    plugin: str


class CommandDeclaredTwice(LedgerError):
    """Two classes of commands have the same name: records of one would be read as the other."""

    code = "ledger.command_declared_twice"
    error_class = ErrorClass.MISCONFIGURATION
    subclass = "command_declared_twice"
    text = "the command {command!r} is declared already, by {by}"
    hint = "give the class another name"
    command: str
    by: str


class CommandTooLarge(LedgerError):
    """A command's JSON is longer than a record may be, or the command would emit more happenings than one command may."""

    code = "ledger.command_too_large"
    error_class = ErrorClass.CONTRACT_VIOLATION
    subclass = "command_too_large"
    text = "the command {command!r} comes to {size} {unit}; at most {size_max} are allowed"
    hint = "of bytes: store large content elsewhere and name it here, or raise record_bytes_max; of happenings: retract relations first"
    command: str
    size: int
    size_max: int
    unit: str


class UnknownCommand(LedgerError):
    """The log has a command that this version does not know, or not in this form."""

    code = "ledger.unknown_command"
    error_class = ErrorClass.MISCONFIGURATION
    subclass = "unknown_command"
    text = "the ledger's record at offset {offset} has the command {command!r}, which cannot be read: {problem}"
    hint = "open the ledger with the version of Tidings that wrote it, and with the parts it was written with"
    command: str
    offset: int
    problem: str


class MissingPart(LedgerError):
    """A command needs a part that the ledger was not opened with."""

    code = "ledger.missing_part"
    error_class = ErrorClass.MISCONFIGURATION
    subclass = "missing_part"
    text = "the ledger was not opened with the part {part!r}"
    hint = "open it with all the parts that it was written with"
    part: str


class InvalidRecord(LedgerError):
    """A record of the topic ``ledger`` is none of the ledger's."""

    code = "ledger.invalid_record"
    error_class = ErrorClass.INTERNAL
    subclass = "invalid_record"
    text = "the record at offset {offset} of the topic 'ledger' cannot be read: {problem}"
    hint = "nothing but the ledger may write this topic"
    offset: int
    problem: str


class LedgerDiverged(LedgerError):
    """A command that was done once comes out differently when it is done again: the state is not what it was."""

    code = "ledger.diverged"
    error_class = ErrorClass.INTERNAL
    subclass = "diverged"
    text = "doing the command {command!r} at offset {offset} again gives another result: {problem}"
    hint = "open the ledger with the version of Tidings that wrote it"
    command: str
    offset: int
    problem: str


class LedgerIncomplete(LedgerError):
    """Records are gone from the log, and no snapshot that can be read covers them."""

    code = "ledger.incomplete"
    error_class = ErrorClass.INTERNAL
    subclass = "incomplete"
    text = "the first {count} records of the ledger were dropped from the log, and no snapshot covers them"
    hint = "put the snapshots back that belong to this log (.bus/ledger), or open it once with accept_loss=True: with what is left"
    count: int


class SnapshotDamaged(LedgerError):
    """A snapshot cannot be read. The one before it is used."""

    code = "ledger.snapshot_damaged"
    error_class = ErrorClass.INTERNAL
    subclass = "snapshot_damaged"
    text = "the snapshot at offset {offset} cannot be read: {problem}"
    offset: int
    problem: str


class SnapshotUnsupported(LedgerError):
    """A snapshot was written by a newer version, or with parts that this ledger was not opened with."""

    code = "ledger.snapshot_unsupported"
    error_class = ErrorClass.MISCONFIGURATION
    subclass = "snapshot_unsupported"
    text = "the snapshot at offset {offset} cannot be used: {problem}"
    hint = "open the ledger with the version of Tidings that wrote it, and with the parts it was written with"
    offset: int
    problem: str


class LedgerUnavailable(LedgerError):
    """The ledger cannot be read or changed now; it tries again with the next request."""

    code = "ledger.unavailable"
    error_class = ErrorClass.UNAVAILABLE
    subclass = "ledger_unavailable"
    text = "the ledger is not available: {problem}"
    problem: str


class LedgerClosed(LedgerError):
    """The ledger was closed."""

    code = "ledger.closed"
    error_class = ErrorClass.UNAVAILABLE
    subclass = "ledger_closed"
    text = "the ledger is closed"


class UnknownOrphans(LedgerError):
    """No subjects are known whose type the catalogue does not declare under this name."""

    code = "ledger.unknown_orphans"
    error_class = ErrorClass.NOT_FOUND
    subclass = "not_found"
    text = "there are no orphans of the type {subject_type!r}"
    subject_type: str


class NotAnOrphan(LedgerError):
    """The catalogue declares this type: there is nothing to migrate or to accept."""

    code = "ledger.not_an_orphan"
    subclass = "not_an_orphan"
    text = "the catalogue declares the type {subject_type!r}"
    subject_type: str


class UndeclaredTargetType(LedgerError):
    """Subjects cannot be migrated to a type that the catalogue does not declare either."""

    code = "ledger.undeclared_target_type"
    subclass = "undeclared_target_type"
    text = "the catalogue does not declare the type {subject_type!r}"
    subject_type: str


class MigrationInFlight(LedgerError):
    """The orphans of this type are being migrated."""

    code = "ledger.migration_in_flight"
    subclass = "migration_in_flight"
    text = "the orphans of the type {subject_type!r} are being migrated"
    subject_type: str


class UnknownCustody(LedgerError):
    """A plugin has no custody under this handle."""

    code = "ledger.unknown_custody"
    error_class = ErrorClass.NOT_FOUND
    subclass = "unknown_custody"
    text = "{plugin!r} has no custody {handle_id!r}"
    plugin: str
    handle_id: str


class DuplicateCustody(LedgerError):
    """A plugin takes custody under a handle under which it has custody of something."""

    code = "ledger.duplicate_custody"
    subclass = "duplicate_custody"
    text = "{plugin!r} has custody of something under the handle {handle_id!r} already"
    hint = "release it first, or take custody under another handle"
    plugin: str
    handle_id: str


class DuplicateInstance(LedgerError):
    """A plugin announces an instance that it has announced already."""

    code = "ledger.duplicate_instance"
    subclass = "duplicate_instance"
    text = "{plugin!r} has announced the instance {instance_id!r} already"
    plugin: str
    instance_id: str


class UnknownInstance(LedgerError):
    """A plugin has announced no such instance."""

    code = "ledger.unknown_instance"
    error_class = ErrorClass.NOT_FOUND
    subclass = "unknown_instance"
    text = "{plugin!r} has no instance {instance_id!r}"
    plugin: str
    instance_id: str


class Misrouted(LedgerError):
    """The plugin's handler does not take this kind of call."""

    code = "ledger.misrouted"
    subclass = "dispatch_misroute"
    text = "{plugin!r} is no {wanted}"
    plugin: str
    wanted: str


class UndeclaredCorrection(LedgerError):
    """The plugin does not declare this type of correction. It was not asked."""

    code = "ledger.undeclared_correction"
    subclass = "undeclared_correction"
    text = "{plugin!r} takes no correction {correction_type!r}"
    plugin: str
    correction_type: str


class InstancesFixed(LedgerError):
    """The plugin's policy does not allow this change of its instances now."""

    code = "ledger.instances_fixed"
    subclass = "instances_fixed"
    text = "the instances of {plugin!r} are {policy}: {problem}"
    plugin: str
    policy: str
    problem: str


class NotOnShelf(LedgerError):
    """Another plugin stands on the shelf, or the plugin stands on none or on several and did not say which."""

    code = "ledger.not_on_shelf"
    subclass = "not_on_shelf"
    text = "{plugin!r}: {problem}"
    plugin: str
    problem: str


class PluginAlreadyLoaded(LedgerError):
    """A plugin of this name is loaded, and another handler or manifest is given for it."""

    code = "ledger.plugin_already_loaded"
    subclass = "plugin_already_loaded"
    text = "{plugin!r} is loaded already"
    hint = "ask for it by its name alone, or unload it first"
    plugin: str


class ShelfOccupied(LedgerError):
    """Another plugin stands on the shelf."""

    code = "ledger.shelf_occupied"
    subclass = "shelf_occupied"
    text = "{shelf!r} is the shelf of {plugin!r}"
    shelf: str
    plugin: str


class ShelfEmpty(LedgerError):
    """No plugin stands on the shelf."""

    code = "ledger.shelf_empty"
    error_class = ErrorClass.NOT_FOUND
    subclass = "shelf_empty"
    text = "there is no plugin on the shelf {shelf!r}"
    shelf: str


class ShuttingDown(LedgerError):
    """The plugins are being unloaded; no more is loaded."""

    code = "ledger.shutting_down"
    error_class = ErrorClass.UNAVAILABLE
    subclass = "shutting_down"
    text = "plugins are being unloaded"


class PluginFailure(LedgerError):
    """What a handler raises to say that it cannot, and of which class the failure is."""

    code = "ledger.plugin_failure"
    text = "{problem}"
    problem: str

    def __init__(self, error_class: ErrorClass, problem: str, subclass: str = "") -> None:
        super().__init__(problem)
        vars(self).update(error_class=error_class, subclass=subclass, retryable=error_class.is_retryable)


class HandlerFailed(LedgerError):
    """A handler raised something that it should not."""

    code = "ledger.handler_failed"
    subclass = "handler_failed"
    text = "{plugin!r} failed in {call}: {problem}"
    plugin: str
    call: str
    problem: str


class HandlerTimedOut(LedgerError):
    """A handler did not answer in its time. It was cancelled."""

    code = "ledger.handler_timed_out"
    error_class = ErrorClass.UNAVAILABLE
    subclass = "timed_out"
    text = "{plugin!r} did not answer {call} within {ms_max} ms"
    plugin: str
    call: str
    ms_max: int


class PluginUnloaded(LedgerError):
    """The plugin was unloaded."""

    code = "ledger.plugin_unloaded"
    error_class = ErrorClass.UNAVAILABLE
    subclass = "plugin_unloaded"
    text = "{plugin!r} was unloaded"
    plugin: str


class UnknownRack(LedgerError):
    """The catalogue declares no such rack."""

    code = "ledger.unknown_rack"
    error_class = ErrorClass.NOT_FOUND
    subclass = "unknown_rack"
    text = "the catalogue declares no rack {rack!r}"
    rack: str


class InvalidPageCursor(LedgerError):
    """A cursor was not made by the list it is used for."""

    code = "ledger.invalid_page_cursor"
    subclass = "invalid_page_cursor"
    text = "{cursor!r} is no cursor of this list"
    hint = "start without a cursor; then use the one that came with each page"
    cursor: str


class ProjectionTooLarge(LedgerError):
    """A projection is larger than a remote caller may have."""

    code = "ledger.projection_too_large"
    error_class = ErrorClass.RESOURCE_EXHAUSTED
    subclass = "answer_too_large"
    text = "the projection of {canonical_id!r} is larger than {bytes_max} bytes"
    hint = "lower `max_depth` or `max_visits`, or raise the setting `steward.projection_bytes_max`"
    canonical_id: str
    bytes_max: int
