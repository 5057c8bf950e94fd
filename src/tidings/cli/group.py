"""
``tidings group``: the status of durable groups; pausing, resuming, moving and deleting them.

Looking works beside a living writer; what it shows of a running group is what the group last stored, a moment ago. Changing is done in
the files, or through the node that holds the workspace.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
import typer

from tidings.bus.admin import GroupChange, GroupDetails, GroupReport, SeekTarget
from tidings.core.names import check_topic, check_topic_and_group

from .administration import changing, looking
from .output import Output, UsageProblem
from .session import (
    DryRunOption,
    OffsetsKeyOption,
    Session,
    TopicArgument,
    YesOption,
    check_dry_run,
    command,
    parse_time,
)

app = typer.Typer(help="Look at durable groups, and move, pause or forget them.", rich_markup_mode=None)

TopicOption = Annotated[str | None, typer.Option("--topic", metavar="TOPIC", help="Only groups of this topic.")]
GroupArgument = Annotated[str, typer.Argument(metavar="GROUP", help="The group.")]
_COLUMNS: Final = (
    *("topic", "group", "state", "committed>", "next>", "lag>", "early>", "failed>", "oldest>", "dead>"),
)
_INTERVAL_S_MIN: Final = 0.1
_RUNNING_FIELDS: Final = ("members", "handling", "delivered", "acked", "retried", "dead_lettered")
"""What only the process that runs a group knows of it."""


@command(
    app,
    "list",
    ends_on_interrupt=True,
    asks_node=True,
    examples="""
        tidings group list
        tidings group list --topic actions --json
        tidings group list --watch --interval 5
    """,
)
async def list_groups(
    session: Session,
    *,
    topic: TopicOption = None,
    is_watched: Annotated[bool, typer.Option("--watch", help="Show it again and again, until Ctrl-C.")] = False,
    interval_s: Annotated[
        float, typer.Option("--interval", min=_INTERVAL_S_MIN, metavar="SECONDS", help="How often, with --watch.")
    ] = 2.0,
    offsets_key: OffsetsKeyOption = None,
) -> None:
    """
    List the groups with their position, their lag and what holds them up.

    Committed is the last offset up to which everything is acknowledged, next the offset of the topic's next event. Lag counts the events
    that are not acknowledged, oldest says how old the first of them is; early are those acknowledged beyond it; failed counts the attempts of
    events that will be tried again, dead the dead letters.
    """
    wanted = None if topic is None else check_topic(topic)
    async with looking(session, offsets_key=offsets_key) as admin:
        while True:
            found = await admin.groups(wanted)
            if is_watched and session.out.is_terminal and not session.out.is_json:
                session.out.console.clear()
            session.out.listing("Groups", _COLUMNS, found, _row, _stored, empty="there are no groups yet")
            if not is_watched:
                return
            session.out.flush()
            await session.clock.sleep(interval_s)


@command(app, "show", asks_node=True, examples="tidings group show actions learner")
async def show(
    session: Session, topic: TopicArgument, group: GroupArgument, *, offsets_key: OffsetsKeyOption = None
) -> None:
    """Show one group: its position, what is acknowledged beyond it, and the events that failed so far."""
    topic, group = check_topic_and_group(topic, group)
    async with looking(session, offsets_key=offsets_key) as admin:
        report = await admin.group(topic, group)
    if session.out.is_json:
        session.out.json(_stored(report))
        return
    session.out.facts(f"Group {group} of topic {topic}", _lines(report))
    if attempts := report.failed_attempts_by_offset:
        session.out.table("Tried and not done", ("offset>", "failed attempts>"), sorted(attempts.items()))


@command(
    app,
    "seek",
    asks_node=True,
    examples="""
        tidings group seek actions learner --earliest --dry-run
        tidings group seek actions learner --to-offset 1200 --yes
        tidings group seek actions learner --to-time 2h
    """,
)
async def seek(
    session: Session,
    topic: TopicArgument,
    group: GroupArgument,
    *,
    to_offset: Annotated[
        int | None, typer.Option("--to-offset", min=0, metavar="N", help="This event is the next it gets.")
    ] = None,
    to_time: Annotated[
        str | None, typer.Option("--to-time", metavar="TIME", help="The first event written at this time or later.")
    ] = None,
    is_earliest: Annotated[bool, typer.Option("--earliest", help="The oldest event kept.")] = False,
    is_latest: Annotated[bool, typer.Option("--latest", help="Only what comes from now on.")] = False,
    offsets_key: OffsetsKeyOption = None,
    is_dry_run: DryRunOption = False,
    is_yes: YesOption = False,
) -> None:
    """
    Set the group's position: back to have events delivered again, forward to skip some.

    What was acknowledged early and failed attempts are forgotten. This also repairs a group whose offset file is damaged, or
    that counts in another epoch. Dead letters stay as they are.
    """
    check_dry_run(is_dry_run=is_dry_run, is_yes=is_yes)
    if sum((to_offset is not None, to_time is not None, is_earliest, is_latest)) != 1:
        raise UsageProblem("give one position to seek to", "--to-offset, --to-time, --earliest or --latest")
    target: SeekTarget = "earliest" if is_earliest else "latest"
    if to_time is not None:
        target = parse_time("--to-time", to_time, session.clock)
    elif to_offset is not None:
        target = to_offset
    async with looking(session, offsets_key=offsets_key) as admin:
        planned = await admin.seek(topic, group, target, dry_run=True)
    if is_dry_run:
        _show_plan(session.out, "seek", planned)
        return
    async with changing(
        session,
        offsets_key=offsets_key,
        question="Carry this out?",
        show=lambda: _show_plan(session.out, "seek", planned),
        is_yes=is_yes,
    ) as admin:
        done = await admin.seek(topic, group, target)
    _show_done(session.out, f"the next event it gets is offset {done.next_offset}", done)


@command(app, "pause", asks_node=True, examples="tidings group pause actions learner")
async def pause(
    session: Session,
    topic: TopicArgument,
    group: GroupArgument,
    *,
    offsets_key: OffsetsKeyOption = None,
    is_dry_run: DryRunOption = False,
) -> None:
    """Deliver nothing to the group until it is resumed, also after a restart."""
    await _pause_or_resume(session, "pause", topic, group, offsets_key, is_dry_run=is_dry_run)


@command(app, "resume", asks_node=True, examples="tidings group resume actions learner")
async def resume(
    session: Session,
    topic: TopicArgument,
    group: GroupArgument,
    *,
    offsets_key: OffsetsKeyOption = None,
    is_dry_run: DryRunOption = False,
) -> None:
    """Deliver to a paused group again."""
    await _pause_or_resume(session, "resume", topic, group, offsets_key, is_dry_run=is_dry_run)


async def _pause_or_resume(
    session: Session,
    verb: Literal["pause", "resume"],
    topic: str,
    group: str,
    offsets_key: Path | None,
    *,
    is_dry_run: bool,
) -> None:
    async with (looking if is_dry_run else changing)(session, offsets_key=offsets_key) as admin:
        done = await (admin.pause if verb == "pause" else admin.resume)(topic, group, dry_run=is_dry_run)
    words = f"would {verb}" if is_dry_run else f"{verb.removesuffix('e')}ed"
    _show_done(session.out, words if done.changes else "is so already", done)


@command(
    app,
    "delete",
    asks_node=True,
    examples="tidings group delete actions learner --dry-run\ntidings group delete actions learner --yes",
)
async def delete(
    session: Session,
    topic: TopicArgument,
    group: GroupArgument,
    *,
    offsets_key: OffsetsKeyOption = None,
    is_dry_run: DryRunOption = False,
    is_yes: YesOption = False,
) -> None:
    """
    Forget the group's position. Its events stay in the log, its dead letters in their file.

    A group of that name that subscribes later is a new one. Retention no longer waits for it.
    """
    check_dry_run(is_dry_run=is_dry_run, is_yes=is_yes)
    async with looking(session, offsets_key=offsets_key) as admin:
        planned = await admin.delete(topic, group, dry_run=True)
    if is_dry_run:
        _show_plan(session.out, "delete", planned)
        return
    async with changing(
        session,
        offsets_key=offsets_key,
        question="Carry this out?",
        show=lambda: _show_plan(session.out, "delete", planned),
        is_yes=is_yes,
    ) as admin:
        done = await admin.delete(topic, group)
    _show_done(session.out, "is forgotten", done)


def _stored(report: GroupReport) -> dict[str, Any]:
    """What the files say of a group."""
    found: dict[str, Any] = msgspec.to_builtins(report, str_keys=True)
    return {name: value for name, value in found.items() if name not in _RUNNING_FIELDS}


def _show_plan(out: Output, verb: str, planned: GroupChange) -> None:
    if out.is_json:
        out.json(msgspec.to_builtins(planned))
        return
    fields = ("committed", "acknowledged_early", "next_offset", "redelivered", "skipped", "problem")
    known = [(name, value) for name in fields if (value := getattr(planned, name)) is not None]
    out.facts(f"Would {verb} {planned.topic}/{planned.group}", known)


def _show_done(out: Output, words: str, done: GroupChange) -> None:
    out.result(msgspec.to_builtins(done), f"group {done.group} of topic {done.topic}: {words}")


def _row(report: GroupReport) -> tuple[object, ...]:
    return (
        report.topic,
        report.group,
        report.state,
        _or_dash(report.committed),
        _or_dash(report.next_offset),
        _or_dash(report.lag),
        _or_dash(report.acknowledged_early),
        _or_dash(report.failed_attempts),
        _age(report.oldest_unacked_age_s),
        _or_dash(report.dead_letters),
    )


def _lines(report: GroupDetails) -> list[tuple[str, Any]]:
    ranges = ", ".join(f"{first} to {last}" for first, last in report.acknowledged_ranges) or "none"
    return [
        ("state", report.state),
        *([("problem", report.problem)] if report.problem is not None else []),
        ("committed", _or_dash(report.committed)),
        ("topic's next offset", _or_dash(report.next_offset)),
        ("lag", _or_dash(report.lag)),
        ("acknowledged early", ranges),
        ("oldest unacked", _age(report.oldest_unacked_age_s)),
        ("dead letters", _or_dash(report.dead_letters)),
    ]


def _or_dash(value: int | None) -> object:
    return "-" if value is None else value


def _age(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, _ = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h" if days else f"{hours} h {minutes} min" if hours else f"{minutes} min"
