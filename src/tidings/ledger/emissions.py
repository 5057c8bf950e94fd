"""
Which happenings each command emits, in which order, and why some commands emit none.

Every command that writes emits its happening. The rows without one are bookkeeping of the ledger, or steps of an operation that has its
happening at another step; each gives that reason. ``tests/scenarios/ledger/test_every_command.py`` executes every command and compares.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec


class Emission(msgspec.Struct, frozen=True, kw_only=True):
    """What a command emits."""

    order: tuple[str, ...] = ()
    """The variants, in the order in which they come; one command emits some of them, each any number of times."""
    silent: str | None = None
    """Why the command, or a part of what it may do, writes something without a happening; ``None``: it never does."""


_CASCADE: Final = ("subject_forgotten", "relation_forgotten")
_MOVED: Final = ("relation_rewritten", "claim_reassigned")


def _always(*order: str) -> Emission:
    return Emission(order=order)


EMISSIONS: Final[Mapping[str, Emission]] = {
    # Subjects and relations
    "announce_subject": Emission(
        order=("subject_announced", "subject_addressing_added", "subject_state_changed", "subject_conflict_detected"),
        silent="An announcement that adds nothing but statements to the claim log changes no subject.",
    ),
    "retract_addressing": _always("subject_addressing_removed", *_CASCADE),
    "update_subject_state": _always("subject_state_changed"),
    "claim_relation": _always("relation_asserted", "relation_claim_added", "relation_cardinality_violation"),
    "retract_relation": _always("relation_claim_retracted", "relation_forgotten"),
    # Administrators
    "force_retract_addressing": _always("subject_addressing_forced_retract", *_CASCADE),
    "force_retract_relation": _always("relation_claim_forced_retract", "relation_forgotten"),
    "suppress_relation": _always("relation_suppressed", "relation_suppression_reason_updated"),
    "unsuppress_relation": _always("relation_unsuppressed", "relation_cardinality_violation"),
    "merge_subjects": _always(
        "subject_merged",
        "relation_rewritten",
        "relation_cardinality_violated_post_rewrite",
        "relation_claim_suppression_collapsed",
        "claim_reassigned",
    ),
    "split_subject": _always(
        "subject_split",
        "relation_rewritten",
        "relation_split_ambiguous",
        "relation_cardinality_violated_post_rewrite",
        "claim_reassigned",
    ),
    "record_admin_action": Emission(
        silent="The admin ledger is an audit trail; the action itself changes nothing here."
    ),
    # Custody, instances, radios, events
    "record_custody": _always("custody_taken"),
    "report_custody_state": _always("custody_state_reported"),
    "fail_custody": _always("custody_aborted", "custody_degraded"),
    "release_custody": _always("custody_released"),
    "abandon_custody": Emission(
        silent="What was reported while taking failed never became a custody: it has no shelf."
    ),
    "announce_instance": _always("factory_instance_announced"),
    "retract_instance": _always("factory_instance_retracted", *_CASCADE),
    "set_flight_mode": _always("flight_mode_changed"),
    "report_plugin_event": _always("plugin_event"),
    "emit_happenings": Emission(silent="It emits the happenings that it holds."),
    # Catalogue
    "set_catalogue": Emission(
        order=("catalogue_fallback", "catalogue_reloaded"),
        silent="The first catalogue of a ledger replaces none.",
    ),
    "scan_grammar": Emission(
        order=("subject_grammar_orphan",),
        silent="Orphans that are reported already are only counted again.",
    ),
    "accept_grammar_orphans": _always("grammar_orphans_accepted"),
    "begin_grammar_migration": Emission(silent="The migration is reported by its batches, grammar_migration_progress."),
    "migrate_grammar_batch": _always("subject_migrated", *_MOVED, "grammar_migration_progress"),
    "finish_grammar_migration": Emission(silent="The last batch has reported that nothing remains."),
    # Appointments and watches
    "create_appointments": _always("appointment_created"),
    "cancel_appointment": _always("appointment_cancelled"),
    "tell_appointment_approach": _always("appointment_approaching"),
    "begin_appointment_firing": Emission(silent="The firing is reported with its outcome, as appointment_fired."),
    "finish_appointment_firing": _always("appointment_fired", "appointment_missed"),
    "miss_appointment": Emission(
        order=("appointment_missed",),
        silent="An occurrence that was reported as missed for its clock is not reported again when it is passed over.",
    ),
    "shift_intervals": Emission(silent="The clock's step was reported as clock_adjusted."),
    "create_watch": _always("watch_created"),
    "cancel_watch": _always("watch_cancelled"),
    "note_watches": Emission(
        order=("watch_missed", "watch_evaluation_throttled"),
        silent="What a watch remembers between two happenings is no change that others see.",
    ),
    "finish_watch_firing": _always("watch_fired"),
    # The ledger's own
    "reserve_seqs": Emission(silent="Bookkeeping of seqs."),
    "trim_history": Emission(silent="Bookkeeping of history; cursors before it are refused with the oldest seq."),
    "begin_epoch": Emission(silent="Bookkeeping of the log's epoch."),
}
"""By the command's name in records."""
