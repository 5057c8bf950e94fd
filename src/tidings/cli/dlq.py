"""
``tidings dlq``: the events that groups have given up on; look at them, have them tried again, or give them up.

A letter that is to be tried again is marked so in its file. The group that failed takes it up when it next runs: this tool
calls no handlers.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from tidings.bus.store.dead_letters import EVERY, OPEN, DeadLetter
from tidings.core.names import check_topic

from .dlq_changes import register as register_changes
from .dlq_letters import (
    ErrorTypeOption,
    GroupOption,
    ReasonOption,
    SinceOption,
    TopicArgument,
    letters_of,
    make_filter,
    show_letters,
)
from .output import plain
from .session import KeyFileOption, Session, command

__all__ = ["app"]

app = typer.Typer(help="Look at dead letters, have them tried again, or drop them.", rich_markup_mode=None)


async def list_letters(
    session: Session,
    topic: Annotated[
        str | None, typer.Argument(metavar="TOPIC", help="Only this topic; all of them if left out.")
    ] = None,
    *,
    group: GroupOption = None,
    error_type: ErrorTypeOption = None,
    reason: ReasonOption = None,
    since: SinceOption = None,
    is_every: Annotated[
        bool, typer.Option("--every-state", help="Also those that went through since, and the dropped.")
    ] = False,
    key_file: KeyFileOption = None,
) -> None:
    """List the dead letters, oldest first in each topic. What those of encrypted spaces say takes the space's key to read."""
    store = letters_of(session, key_file)
    wanted = make_filter(session, EVERY if is_every else OPEN, group, error_type, reason, since)
    topics = await store.dead_letter_topics() if topic is None else [check_topic(topic)]
    found = [letter for each in topics for letter in await store.dead_letters(each, None, wanted)]
    if session.out.is_json:
        for letter in found:
            session.out.json(msgspec.to_builtins(letter))
    else:
        show_letters(session.out, "Dead letters", found)


async def show(
    session: Session,
    topic: TopicArgument,
    letter_id: Annotated[str, typer.Argument(metavar="ID", help="The letter.")],
    *,
    key_file: KeyFileOption = None,
) -> None:
    """Show one letter whole: the error, each attempt, and the event."""
    letter = await letters_of(session, key_file).dead_letter(check_topic(topic), letter_id)
    if session.out.is_json:
        session.out.json(msgspec.to_builtins(letter))
        return
    session.out.facts(
        f"Dead letter {letter.id} of topic {letter.topic}",
        [
            ("state", letter.state),
            ("group", letter.group),
            ("offset, seq", f"{letter.offset}, {letter.seq}"),
            ("event", letter.event_id),
            ("space", letter.space_id),
            ("reason", letter.reason),
            ("error", f"{letter.error_type}: {letter.error}"),
            ("same place", letter.traceback_digest),
            ("given up", letter.failed_at),
            ("payload", _payload(letter)),
        ],
    )
    if letter.traceback:
        for line in letter.traceback.splitlines():
            session.out.text(plain(line))
    if letter.attempts:
        session.out.table("Attempts", ("at", "error"), ((each.at, each.error) for each in letter.attempts))


def _payload(letter: DeadLetter) -> str:
    if "payload" not in letter.event:
        return f"in the log only, sealed: tidings log read {letter.topic} --from-offset {letter.offset} --limit 1"
    return msgspec.json.encode(letter.event["payload"]).decode()


command(
    app,
    "list",
    examples="""
        tidings dlq list
        tidings dlq list actions --group learner --since 2h
        tidings dlq list --error-type ValueError --json
    """,
)(list_letters)
command(app, "show", examples="tidings dlq show actions learner-42")(show)
register_changes(app)
