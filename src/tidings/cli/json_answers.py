"""
What each command answers with ``--json``. The reference shows it, and the tests hold the answers that they get against it.

``one: a b?`` is one object with these keys, ``lines: a b?`` one a line, ``array: a b?`` an array of them; a key with ``?`` is there where it
applies, and alternatives stand on both sides of a ``|``. ``as: ...`` names the document that has the answer. Keys are added, not renamed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

_RECORD: Final = "lines: offset seq meta payload"
_LOG: Final = "epoch records bytes segments first_seq last_seq oldest newest topics"
_CHANGE: Final = "one: topic group carried_out changes committed acknowledged_early next_offset redelivered skipped problem audit_seq"
_GROUP: Final = (
    "topic group state committed next_offset lag acknowledged_early failed_attempts paused oldest_unacked_age_s"
    " dead_letters problem"
)
_LETTER: Final = (
    "id topic group state reason error error_type traceback traceback_digest offset seq event_id space_id event attempts"
    " retries tries redrives failed_at"
)
_LETTERS_CHANGED: Final = "one: carried_out count dead_letters audit_seq?"
_LEDGER: Final = (
    "as: the answer of the steward to this operation; a dry run has `would` and, if nothing changed, `outcome`"
)
_ACCESS: Final = "carried_out change seq? audit_seq? through? delayed_waiting?"
_APPS: Final = "as: the answer of `POST /v1/apps`"
_RUN: Final = "one: epoch since until rows bytes quarantined commits silver jobs waits_for"

ANSWERS: Final[dict[str, str]] = {
    "app declare": _APPS,
    "app disable": _APPS,
    "app enable": _APPS,
    "app list": "as: `apps` of `GET /v1/apps`, one a line",
    "app register": _APPS,
    "app remove": "as: the answer of `DELETE /v1/apps/{slug}`",
    "appointment cancel": _LEDGER,
    "appointment create": _LEDGER,
    "appointment list": "lines: creator spec action state next_fire_ms? fires_completed",
    "appointment show": "one: creator spec action state next_fire_ms? fires_completed",
    "bench": "one: folder payload_bytes sync publish_one publish_256_at_once handle",
    "config set": "as: the answer of `PATCH /v1/config`",
    "config show": "as: the answer of `GET /v1/config`",
    "context add": "one: context url has_token certificate is_current",
    "context list": "lines: context url has_token certificate is_current",
    "context remove": "one: removed",
    "context use": "one: current",
    "custody list": "as: the steward's custodies, one a line",
    "custody release": _LEDGER,
    "demo": "one: workspace published followed retry first_seq last_seq | url token_file alice_token_file seq",
    "dlq drop": _LETTERS_CHANGED,
    "dlq list": f"lines: {_LETTER}",
    "dlq redrive": _LETTERS_CHANGED,
    "dlq show": f"one: {_LETTER}",
    "doctor": "lines: check state found hint",
    "errors": "lines: code name module meaning retryable exit_code hint",
    "events tail": (
        "lines: event_type event_id sequence_anchor scope payload_summary source_manager emitted_at audience_contract"
        " resume_token"
    ),
    "gateway audit": _RECORD,
    "gateway connections": "as: `connections` of `GET /v1/gateway/connections`, one a line",
    "gateway stats": "as: the answer of `GET /v1/gateway/stats`",
    "grammar accept": _LEDGER,
    "grammar list": "as: the steward's orphaned types, one a line",
    "grammar migrate": _LEDGER,
    "grammar use": _LEDGER,
    "grant": f"lines: {_ACCESS} | subject action resource state seq | token_id state",
    "group delete": _CHANGE,
    "group list": f"lines: {_GROUP}",
    "group pause": _CHANGE,
    "group resume": _CHANGE,
    "group seek": _CHANGE,
    "group show": f"one: {_GROUP} acknowledged_ranges failed_attempts_by_offset",
    "guard allow": "as: the answer of `POST /v1/guard/directives`",
    "guard deny": "as: the answer of `POST /v1/guard/directives`",
    "guard list": "as: `directives` of `GET /v1/guard/directives`, one a line",
    "happenings tail": "lines: seq happening | current_seq | lagged",
    "key add": "one: file space_id key_id",
    "key create": "one: file",
    "key shred": "one: file space_id shredded",
    "log append": "lines: line? verdict topic offset seq event_id | line verdict error | summary",
    "log export": "one: file epoch since until records bytes sha256 | offset? seq? meta payload",
    "log read": _RECORD,
    "log repair": "one: plan carried_out result?",
    "log retention": "one: carried_out segments records freed_bytes decisions",
    "log stats": (
        f"one: workspace format layout created_at writer index journal_bytes aside_bytes {_LOG} | node {_LOG}"
    ),
    "log tail": _RECORD,
    "log verify": (
        "one: is_sound findings omitted lines segments bytes journal_lines last_seq epoch chain_heads was_written"
    ),
    "pipeline backfill": _RUN,
    "pipeline explain": "array: name set about reads writes publishes computes",
    "pipeline export": "one: file epoch since until erased_until rows left_out refused_erasures bytes sha256 version",
    "pipeline prepare": "one: file bytes",
    "pipeline repair": (
        "one: carried_out files logs lake_json missing_records repeated notes_behind wrong_tables unfilled_records disagreements recovered healed_lines lost rebuilt_jobs rebuilt_silver set_aside"
    ),
    "pipeline report": "one: file seq events tables",
    "pipeline run": _RUN,
    "pipeline scrub": "one: carried_out list_seq tables erasures is_all refused_erasures swept_files? old_files? waits_for?",
    "pipeline status": "one: lake epoch seq pending written_ahead tables failed",
    "pipeline verify": "one: is_equal until quarantined repeated missing_in_silver erased streams",
    "policy check": "one: is_valid statements",
    "policy dismiss": f"one: {_ACCESS}",
    "policy explain": (
        "one: subject action resource is_allowed reasons is_claimed granted_at revoked_at is_revoked errors as_of_seq"
    ),
    "policy list": "lines: name seq problem text | record",
    "policy put": f"one: {_ACCESS}",
    "policy remove": f"one: {_ACCESS}",
    "relation claim": _LEDGER,
    "relation force-retract": _LEDGER,
    "relation list": "lines: source_id predicate target_id claimants? claimant_tokens? suppressed",
    "relation retract": _LEDGER,
    "relation suppress": _LEDGER,
    "relation unsuppress": _LEDGER,
    "revoke": f"lines: {_ACCESS}",
    "serve": "as: one line when the node listens, with `url`, `unix`, `seq` and `token_file`; or its settings",
    "subject admin-log": "as: the steward's entries, one a line",
    "subject announce": _LEDGER,
    "subject conflicts": "as: the steward's open conflicts, one a line",
    "subject force-retract": _LEDGER,
    "subject list": "lines: canonical_id subject_type addressings",
    "subject merge": _LEDGER,
    "subject retract": _LEDGER,
    "subject show": "as: the subject's projection; of a retired id `subject` and `aliased_from`",
    "subject split": _LEDGER,
    "table list": "array: name rows files bytes about",
    "table query": "as: a row a line, with the columns that were asked for",
    "table show": "one: name about columns rows files bytes version seq sample",
    "token issue": "one: token token_id expires_at payload",
    "token show": "one: is_believed problem header payload",
    "topic list": "lines: topic records bytes segments first_offset next_offset first_seq last_seq",
    "topic show": "one: topic first_offset next_offset first_seq last_seq size_bytes segments",
    "watch cancel": _LEDGER,
    "watch create": _LEDGER,
    "watch list": "lines: creator spec action state fires_completed",
    "watch show": "one: creator spec action state fires_completed",
    "work": "lines: pid groups workspace through",
}
"""By the words of the command."""

_KINDS: Final = {"one": "one object: ", "lines": "an object a line: ", "array": "an array of objects: ", "as": ""}


def documented(words: str) -> str:
    """A command's answer as a sentence of the reference."""
    kind, _, rest = ANSWERS[words].partition(": ")
    if kind != "as":
        forms = [", ".join(f"`{name}`" for name in form.split()) for form in rest.split(" | ")]
        rest = "; or ".join(forms)
    return f"`--json`: {_KINDS[kind]}{rest}."


def forms(words: str) -> Iterator[tuple[set[str], set[str]]]:
    """The keys that must be there and those that may be, of each form that a command's objects have; none where another document says it."""
    kind, _, rest = ANSWERS[words].partition(": ")
    for form in rest.split(" | ") if kind != "as" else ():
        names = form.split()
        yield {name for name in names if not name.endswith("?")}, {name.rstrip("?") for name in names}
