"""
``tidings log verify``, ``repair`` and ``retention``: check a log, repair a damaged one, drop old segments.

``verify`` changes nothing. ``repair`` and ``retention`` show their plan first, and change the log only when told to.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import typer

from tidings.log.embedded.disk import OsDisk
from tidings.log.embedded.repair import RepairResult, carry_out
from tidings.log.embedded.repair_plan import RepairPlan, plan_repair
from tidings.log.embedded.verify import VerifyProgress, VerifyReport
from tidings.log.embedded.verify import verify as verify_log
from tidings.log.errors import WorkspaceBusy
from tidings.log.retention import RetentionPlan, SegmentDecision
from tidings.log.settings import TopicRetention

from .administration import changing, looking
from .output import ExitCode, Output, UsageProblem, as_typed, human_bytes
from .session import (
    OffsetsKeyOption,
    Session,
    YesOption,
    by_topic,
    check_dry_run,
    command,
    confirm,
    parse_days,
    parse_size,
    user_audit,
)

app = typer.Typer(rich_markup_mode=None)


@command(app, "verify", examples="tidings log verify\ntidings log verify --json | jq .findings")
def verify(
    session: Session,
    *,
    are_ids_checked: Annotated[
        bool, typer.Option("--ids/--no-ids", help="Look for event ids that come twice or that the index lacks.")
    ] = True,
) -> None:
    """
    Check the whole log, byte by byte, and change nothing.

    A log that is being written can be verified too. Exit code 1 if anything is wrong; what opening the log
    puts right by itself (severity info) is shown and is not wrong.
    """
    with session.index() as index, session.out.progress("verifying (bytes)", None) as advance:

        def progress(state: VerifyProgress) -> None:
            advance(state.bytes, state.bytes_total)

        report = verify_log(
            OsDisk(),
            session.layout,
            session.settings_if_damaged(),
            ids=are_ids_checked,
            index=index,
            progress=progress,
        )
    if session.out.is_json:
        session.out.json(report.to_dict())
    else:
        _show_findings(session.out, report)
    if any(finding.severity != "info" for finding in report.findings):
        raise typer.Exit(ExitCode.PROBLEM)


def _show_findings(out: Output, report: VerifyReport) -> None:
    if report.findings:
        out.table(
            "Findings",
            ("severity", "code", "file", "byte>", "seq>", "what"),
            (
                (
                    finding.severity,
                    finding.code,
                    finding.path,
                    finding.byte_offset,
                    "-" if finding.seq is None else finding.seq,
                    finding.message,
                )
                for finding in report.findings
            ),
        )
        for hint in sorted({finding.hint for finding in report.findings if finding.hint is not None}):
            out.text(f"hint: {hint}")
    if report.omitted:
        out.text(f"and {report.omitted} more findings")
    looked = f"{report.lines} records in {report.segments} segments ({human_bytes(report.bytes)})"
    pending = f", {report.journal_lines} more in the journal" if report.journal_lines else ""
    out.text(f"looked at {looked}{pending}, up to seq {report.last_seq}")
    if report.was_written:
        out.text("the log was written to meanwhile; what came after the start was not looked at")
    if report.is_sound:
        out.text("sound: nothing is lost or altered")
    else:
        out.text(as_typed("NOT sound: see what `tidings log repair --dry-run` would set aside"))


@command(app, "repair", examples="tidings log repair --dry-run\ntidings log repair\ntidings log repair --yes --json")
async def repair(
    session: Session,
    *,
    is_dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the plan only; exit code 1 if one is needed.")
    ] = False,
    is_yes: YesOption = False,
) -> None:
    """
    Make a damaged log open again, without destroying a byte of it.

    Whatever leaves the log is copied first, and the command says where to. If acknowledged records leave it,
    the log gets a new epoch, so that no reader takes it for the old one. The log must be closed. What was done
    is recorded in the topic `audit`.
    """
    check_dry_run(is_dry_run=is_dry_run, is_yes=is_yes)
    disk, layout, out = OsDisk(), session.layout, session.out
    plan = plan_repair(disk, layout, session.settings_if_damaged())
    if is_dry_run or not plan.is_needed:
        _show_plan(out, plan)
        if plan.is_needed:
            raise typer.Exit(ExitCode.PROBLEM)
        return
    if not out.is_json:
        _show_plan(out, plan)
        out.flush()
    if (writer := session.writer()) is not None:  # before anybody is asked about what cannot be done
        raise WorkspaceBusy(session.workspace, writer)
    confirm(out, "Carry this out?", is_yes=is_yes)
    result = carry_out(disk, layout, plan, session.clock)
    # A damaged log cannot be appended to, so this record comes after the repair; the manifest of the copies was written before it.
    async with session.writing() as log:
        await user_audit().begun(
            log, "repair", {**result.to_dict(), "lost_count": plan.lost_count, "lost": plan.lost[:1000]}
        )
    if result.folder is not None:  # the record has it relative to the workspace
        result = msgspec.structs.replace(result, folder=str(session.workspace / result.folder))
    _show_result(out, plan, result)


def _show_plan(out: Output, plan: RepairPlan) -> None:
    if out.is_json:
        out.json({"plan": plan.to_dict(), "carried_out": False})
        return
    if not plan.is_needed:
        out.text("no repair is needed")
        return
    out.table(
        "Problems",
        ("severity", "code", "file", "byte>", "what"),
        ((each.severity, each.code, each.path, each.byte_offset, each.message) for each in plan.problems),
    )
    if plan.streams:
        out.table(
            "Topics that change",
            ("topic", "records kept>", "set aside>", "offsets kept"),
            (
                (
                    each.topic if each.space_id is None else f"{each.space_id}/{each.topic}",
                    each.kept,
                    each.set_aside,
                    f"{each.first_offset} to {each.last_offset}" if each.kept else "-",
                )
                for each in plan.streams
            ),
        )
    if plan.aside:
        out.table(
            "Copied before it leaves the log",
            ("file", "from byte>", "size>", "because"),
            ((each.path, each.byte_offset, human_bytes(each.size), each.why) for each in plan.aside),
        )
    if plan.loses_records:
        out.text(f"{plan.lost_count} acknowledged records would not be in the log; it would get a new epoch")
    else:
        out.text("no acknowledged record would be lost")


def _show_result(out: Output, plan: RepairPlan, result: RepairResult) -> None:
    if out.is_json:
        out.json({"plan": plan.to_dict(), "carried_out": True, "result": result.to_dict()})
        return
    if result.folder is not None:
        out.text(f"set aside in {result.folder}")
    if result.is_new_epoch:
        out.text(f"the log has a new epoch: {result.epoch}")
    out.text(f"repaired; the log goes on after seq {result.last_seq}")


@command(
    app,
    "retention",
    has_lake=True,
    asks_node=True,
    examples="""
            tidings log retention --max-age-days 30
            tidings log retention --max-bytes demo=500MB --max-age-days 90 --yes
        """,
)
async def retention(
    session: Session,
    *,
    max_age_days: Annotated[
        list[str] | None,
        typer.Option("--max-age-days", metavar="[TOPIC=]DAYS", help="Drop what is older; may be repeated."),
    ] = None,
    max_bytes: Annotated[
        list[str] | None,
        typer.Option("--max-bytes", metavar="[TOPIC=]SIZE", help="Drop the oldest above this size; may be repeated."),
    ] = None,
    keeps_ids: Annotated[
        bool, typer.Option("--keep-ids", help="Go on recognising duplicates of what is dropped.")
    ] = False,
    offsets_key: OffsetsKeyOption = None,
    is_dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan only (as without --yes).")] = False,
    is_yes: Annotated[bool, typer.Option("--yes", help="Carry the plan out.")] = False,
) -> None:
    """
    Plan what old segments may go, by age and size for each topic, and drop them with --yes.

    Only whole, sealed segments go, oldest first. A segment stays while a group has not passed it, while a
    dead letter needs an event in it, while a partition it names is still needed, or while the lake does not
    hold it. Dropping is recorded in the topic `audit` first.
    """
    rules = _rules(max_age_days or [], max_bytes or [], keeps_ids=keeps_ids)
    if not rules:
        raise UsageProblem("no rule was given, so nothing could go", "give --max-age-days or --max-bytes")
    check_dry_run(is_dry_run=is_dry_run, is_yes=is_yes)
    async with (changing if is_yes else looking)(session, offsets_key=offsets_key) as admin:
        plan = await admin.retention(rules, dry_run=not is_yes)
    _show_retention(session.out, plan, is_done=is_yes)


def _rules(ages: list[str], sizes: list[str], *, keeps_ids: bool) -> dict[str, TopicRetention]:
    """One rule a topic. What is said of all topics also holds for a topic that has a word of its own."""
    age_of = by_topic("--max-age-days", ages, parse_days)
    size_of = by_topic("--max-bytes", sizes, parse_size)
    return {
        topic: TopicRetention(
            age_days_max=age_of.get(topic, age_of.get("*")),
            size_bytes_max=size_of.get(topic, size_of.get("*")),
            keep_ids=keeps_ids,
        )
        for topic in {*age_of, *size_of}
    }


def _decision_dict(decision: SegmentDecision) -> dict[str, Any]:
    segment = decision.segment
    return {
        "topic": segment.topic,
        "space_id": segment.space_id,
        "segment": segment.number,
        "records": segment.lines,
        "bytes": segment.size_bytes,
        "first_offset": segment.first_offset,
        "last_offset": segment.last_offset,
        "newest": segment.last_written_at,
        "drops": decision.drops,
        "reason": decision.reason,
        "keep_ids": decision.keep_ids,
    }


def _show_retention(out: Output, plan: RetentionPlan, *, is_done: bool) -> None:
    rows = [_decision_dict(decision) for decision in plan.decisions]
    if out.is_json:
        summary = {
            "carried_out": is_done,
            "segments": len(plan.drops),
            "records": sum(decision.segment.lines for decision in plan.drops),
            "freed_bytes": plan.freed_bytes,
        }
        out.json({**summary, "decisions": rows})
        return
    if rows:
        out.table(
            "Retention",
            ("topic", "segment>", "records>", "size>", "newest>", "fate", "because"),
            (
                (
                    row["topic"] if row["space_id"] is None else f"{row['space_id']}/{row['topic']}",
                    row["segment"],
                    row["records"],
                    human_bytes(row["bytes"]),
                    row["newest"][:19],
                    ("dropped" if is_done else "may go") if row["drops"] else "stays",
                    row["reason"],
                )
                for row in rows
            ),
        )
    freed = f"{len(plan.drops)} segments, {human_bytes(plan.freed_bytes)}"
    if is_done:
        out.text(f"dropped: {freed}")
    elif plan.drops:
        out.text(f"would drop: {freed}; --yes carries it out")
    else:
        out.text("nothing may go")
