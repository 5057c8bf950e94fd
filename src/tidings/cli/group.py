"""
``tidings group``: where the durable groups stand, and setting their place while nobody runs them.

Looking works beside a living writer; what it shows of a running group is what the group last stored, a moment ago.
Changing needs the workspace to itself: a running group keeps its place in memory and would write over it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import typer

from tidings.core.names import check_topic, check_topic_and_group

from .group_changes import register as register_changes
from .group_facts import GroupFacts, OffsetsKeyOption, gather, known_group, offsets_of
from .output import Output
from .session import Session, command

__all__ = ["app"]

app = typer.Typer(help="Look at durable groups, and move, pause or forget them.", rich_markup_mode=None)

TopicOption = Annotated[str | None, typer.Option("--topic", metavar="TOPIC", help="Only groups of this topic.")]
_COLUMNS = (
    *("topic", "group", "state", "committed>", "next>", "lag>", "islands>", "attempts>", "oldest unacked>"),
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
    List the groups with their place, their lag and what holds them up.

    Lag counts the events that are not acknowledged; islands are those acknowledged beyond the first that is not;
    attempts are the deliveries that failed so far, of events that will be tried again.
    """
    wanted = None if topic is None else check_topic(topic)
    async with session.reading() as log:
        store = offsets_of(session, log, offsets_key)
        while True:
            found = await gather(session, log, store, wanted)
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
    """Show one group: its place, every island beyond it, and the events that failed so far."""
    topic, group = check_topic_and_group(topic, group)
    async with session.reading() as log:
        store = offsets_of(session, log, offsets_key)
        known_group(store, topic, group)
        (facts,) = await gather(session, log, store, topic, group)
    if session.out.is_json:
        session.out.json({**facts.to_dict(), **facts.details()})
        return
    session.out.facts(f"Group {group} of topic {topic}", _lines(facts))
    if attempts := facts.standing.attempts:
        session.out.table("Tried and not done", ("offset>", "attempts>"), sorted(attempts.items()))


def _show_table(out: Output, found: Iterable[GroupFacts]) -> None:
    out.table("Groups", _COLUMNS, (_row(facts) for facts in found))


def _row(facts: GroupFacts) -> tuple[object, ...]:
    standing = facts.standing
    return (
        standing.topic,
        standing.group,
        facts.state,
        _or_dash(standing.committed),
        standing.next_offset,
        _or_dash(standing.lag),
        standing.early_count,
        standing.failed_deliveries,
        _age(standing.oldest_unacked_age_s),
        facts.dead_letters,
    )


def _lines(facts: GroupFacts) -> list[tuple[str, Any]]:
    standing = facts.standing
    islands = ", ".join(f"{first} to {last}" for first, last in standing.islands) or "none"
    return [
        ("state", facts.state),
        *([("problem", standing.problem)] if standing.problem is not None else []),
        ("committed", _or_dash(standing.committed)),
        ("topic's next offset", standing.next_offset),
        ("lag", _or_dash(standing.lag)),
        ("islands", islands),
        ("oldest unacked", _age(standing.oldest_unacked_age_s)),
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
