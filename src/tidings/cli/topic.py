"""``tidings topic``: the topics of a log, and the segments of one."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from tidings.core.names import check_topic

from .output import human_bytes
from .session import Session, command, known_topic
from .stats import show_topics, topic_facts

__all__ = ["app"]

app = typer.Typer(help="Look at topics.", rich_markup_mode=None)


async def list_topics(session: Session) -> None:
    """List the topics with their sizes and bounds."""
    async with session.reading() as log:
        topics = [topic_facts(info) for info in log.topics().values()]
    if session.out.is_json:
        for each in topics:
            session.out.json(each)
    else:
        show_topics(session.out, topics)


async def show(session: Session, topic: Annotated[str, typer.Argument(metavar="TOPIC", help="The topic.")]) -> None:
    """Show one topic's segments: what each holds, whether it is sealed, and its digest in the chain."""
    async with session.reading() as log:
        info = log.topics()[known_topic(log, check_topic(topic))]
    if session.out.is_json:
        session.out.json(msgspec.to_builtins(info))
        return
    session.out.table(
        f"Topic {info.topic}: offsets {info.first_offset} to {info.next_offset - 1}, {human_bytes(info.size_bytes)}",
        ("segment>", "state", "records>", "size>", "offsets>", "seqs>", "written", "digest"),
        (
            (
                each.number if each.space_id is None else f"{each.space_id}/{each.number}",
                "sealed" if each.is_sealed else "open",
                each.lines,
                human_bytes(each.size_bytes),
                f"{each.first_offset} to {each.last_offset}",
                f"{each.first_seq} to {each.last_seq}",
                f"{each.first_written_at} to {each.last_written_at}",
                (each.digest or "")[:12],
            )
            for each in info.segments
        ),
    )


command(app, "list", examples="tidings topic list\ntidings topic list --json | jq -r .topic")(list_topics)
command(app, "show", examples="tidings topic show demo")(show)
