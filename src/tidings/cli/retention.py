"""``tidings log retention``: show what may be dropped and why the rest stays; drop it when told to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from tidings.bus.audit import audited_drops
from tidings.bus.store import GroupStore
from tidings.core.clock import datetime_of
from tidings.log.embedded.disk import OsDisk
from tidings.log.interface import Log
from tidings.log.retention import RetentionPlan, SegmentDecision, plan_retention
from tidings.log.settings import TopicRetention
from tidings.pipeline.state_files import load_archived

from .administration import OffsetsKeyOption, store_of
from .confirm import audit, check_dry_run
from .errors import UsageProblem
from .output import Output, human_bytes
from .session import Session, command
from .values import by_topic, parse_days, parse_size

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command to its noun."""
    command(
        app,
        "retention",
        examples="""
            tidings log retention --max-age-days 30
            tidings log retention --max-bytes demo=500MB --max-age-days 90 --yes
        """,
    )(retention)


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
    if not is_yes:
        async with session.reading() as log:
            _show(
                session.out,
                await _plan(session, log, rules, store_of(session, log, offsets_key=offsets_key)),
                is_done=False,
            )
        return
    async with session.writing() as writer:
        store = store_of(session, writer, offsets_key=offsets_key)
        plan = await _plan(session, writer, rules, store)
        if plan.drops:
            async with audit(writer, "retention", audited_drops(plan), frees_space=True):
                plan = await writer.drop(plan, store)
    _show(session.out, plan, is_done=True)


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


async def _plan(session: Session, log: Log, rules: Mapping[str, TopicRetention], store: GroupStore) -> RetentionPlan:
    segments = [segment for info in log.topics().values() for segment in info.segments]
    # Where a lake is kept its bookkeeping says what it holds; if that cannot be read it holds nothing: a segment too
    # many is kept, none too few.
    lake = session.workspace / "lake"
    archived = load_archived(lake, session.layout.read_meta(OsDisk()).epoch) if lake.exists() else None
    return plan_retention(
        segments,
        rules,
        now=datetime_of(session.clock.now_ns()),
        needs=await store.needs(),
        archived_through=archived,
    )


def _shown(decision: SegmentDecision) -> dict[str, Any]:
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


def _summary(plan: RetentionPlan, *, is_done: bool) -> dict[str, Any]:
    return {
        "carried_out": is_done,
        "segments": len(plan.drops),
        "records": sum(decision.segment.lines for decision in plan.drops),
        "freed_bytes": plan.freed_bytes,
    }


def _show(out: Output, plan: RetentionPlan, *, is_done: bool) -> None:
    if out.is_json:
        summary = _summary(plan, is_done=is_done)
        out.json({**summary, "decisions": [_shown(decision) for decision in plan.decisions]})
        return
    rows = [_shown(decision) for decision in plan.decisions]
    out.table(
        "Retention",
        ("topic", "segment>", "records>", "size>", "newest", "fate", "because"),
        (
            (
                row["topic"] if row["space_id"] is None else f"{row['space_id']}/{row['topic']}",
                row["segment"],
                row["records"],
                human_bytes(row["bytes"]),
                row["newest"],
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
