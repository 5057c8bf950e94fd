"""
``tidings group``: the status of durable groups, and changes to them while nobody runs them.

Looking works beside a living writer; what it shows of a running group is what the group last stored, a moment ago.
Changing needs the workspace to itself: a running group keeps its position in memory and would write over it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import typer

from tidings.core.names import check_topic, check_topic_and_group

from .group_changes import register as register_changes
from .group_facts import GroupFacts, OffsetsKeyOption, admin_of, gather
from .output import Output
from .session import Session, command

__all__ = ["app"]

app = typer.Typer(help="Look at durable groups, and move, pause or forget them.", rich_markup_mode=None)

TopicOption = Annotated[str | None, typer.Option("--topic", metavar="TOPIC", help="Only groups of this topic.")]
_COLUMNS = (
    *("topic", "group", "state", "committed>", "next>", "lag>", "acked early>", "failed attempts>", "oldest unacked>"),
    "dead letters>",
)
_INTERVAL_S_MIN = 0.1


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

    Lag counts the events that are not acknowledged; acknowledged early are those beyond the first that is not;
    failed attempts are those of events that will be tried again.
    """
    wanted = None if topic is None else check_topic(topic)
    async with session.reading() as log:
        while True:
            found = await gather(session, log, offsets_key, wanted)
            if session.out.is_json:
                for facts in found:
                    session.out.json(facts.to_dict())
            else:
                if is_watched and session.out.is_terminal:
                    session.out.console.clear()
                _show_table(session.out, found)
            if not is_watched:
                return
            session.out.flush()
            await session.clock.sleep(interval_s)


async def show(
    session: Session,
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="The topic.")],
    group: Annotated[str, typer.Argument(metavar="GROUP", help="The group.")],
    *,
    offsets_key: OffsetsKeyOption = None,
) -> None:
    """Show one group: its position, what is acknowledged beyond it, and the events that failed so far."""
    topic, group = check_topic_and_group(topic, group)
    async with session.reading() as log:
        await admin_of(session, log, offsets_key).check_known(topic, group)
        (facts,) = await gather(session, log, offsets_key, topic, group)
    if session.out.is_json:
        session.out.json({**facts.to_dict(), **facts.details()})
        return
    session.out.facts(f"Group {group} of topic {topic}", _lines(facts))
    if attempts := facts.status.attempts:
        session.out.table("Tried and not done", ("offset>", "failed attempts>"), sorted(attempts.items()))


def _show_table(out: Output, found: Iterable[GroupFacts]) -> None:
    out.table("Groups", _COLUMNS, (_row(facts) for facts in found))


def _row(facts: GroupFacts) -> tuple[object, ...]:
    status = facts.status
    return (
        status.topic,
        status.group,
        facts.state,
        _or_dash(status.committed),
        status.next_offset,
        _or_dash(status.lag),
        status.acknowledged_early,
        status.failed_attempts,
        _age(status.oldest_unacked_age_s),
        facts.dead_letters,
    )


def _lines(facts: GroupFacts) -> list[tuple[str, Any]]:
    status = facts.status
    ranges = ", ".join(f"{first} to {last}" for first, last in status.acknowledged_ranges) or "none"
    return [
        ("state", facts.state),
        *([("problem", status.error.describe())] if status.error is not None else []),
        ("committed", _or_dash(status.committed)),
        ("topic's next offset", status.next_offset),
        ("lag", _or_dash(status.lag)),
        ("acknowledged early", ranges),
        ("oldest unacked", _age(status.oldest_unacked_age_s)),
        ("dead letters", facts.dead_letters),
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


command(
    app,
    "list",
    ends_on_interrupt=True,
    examples="""
        tidings group list
        tidings group list --topic actions --json
        tidings group list --watch --interval 5
    """,
)(list_groups)
command(app, "show", examples="tidings group show actions learner")(show)
register_changes(app)
