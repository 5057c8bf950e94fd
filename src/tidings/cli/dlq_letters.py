"""What the commands about dead letters share: which letters are meant, and a table of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from tidings.bus.store.dead_letters import DeadLetter, DeadLetterFilter, DeadLetterState, Reason
from tidings.bus.store.files import FileGroupStore
from tidings.core.names import check_group

from .output import Output
from .session import Session, encryptor_of
from .values import parse_time

__all__ = [
    "ErrorTypeOption",
    "GroupOption",
    "ReasonOption",
    "SinceOption",
    "TopicArgument",
    "letters_of",
    "make_filter",
    "show_letters",
]

TopicArgument = Annotated[str, typer.Argument(metavar="TOPIC", help="The topic.")]
GroupOption = Annotated[str | None, typer.Option("--group", metavar="GROUP", help="Only letters of this group.")]
ErrorTypeOption = Annotated[
    str | None,
    typer.Option(
        "--error-type", metavar="NAME", help="Only failures of this kind: builtins.ValueError, or ValueError."
    ),
]
ReasonOption = Annotated[
    Reason | None,
    typer.Option("--reason", metavar="REASON", help="Only these: retries, expired, denied, quarantined or invalid."),
]
SinceOption = Annotated[
    str | None,
    typer.Option("--since", metavar="TIME", help="Given up at this time or later: a time, a date, or 15m, 2h, 7d."),
]


def make_filter(
    session: Session,
    states: tuple[DeadLetterState, ...],
    group: str | None,
    error_type: str | None,
    reason: Reason | None,
    since: str | None,
) -> DeadLetterFilter:
    """The letters that a command line asks for, among those in these states."""
    return DeadLetterFilter(
        states=states,
        group=None if group is None else check_group(group),
        error_type=error_type,
        reason=reason,
        since=None if since is None else parse_time("--since", since, session.clock),
    )


def letters_of(session: Session, key_file: Path | None = None) -> FileGroupStore:
    """The workspace's dead letters; with keys, what letters of encrypted spaces say can be read."""
    session.settings()  # a workspace that is missing is said to be, not shown as one without letters
    return FileGroupStore(session.workspace, clock=session.clock, encryptor=encryptor_of(key_file))


def show_letters(out: Output, title: str, letters: Sequence[DeadLetter]) -> None:
    """A line for each letter."""
    out.table(
        title,
        ("topic", "id", "state", "reason", "retries>", "given up", "error"),
        (
            (
                each.topic,
                each.id,
                each.state,
                each.reason,
                each.retries,
                each.failed_at,
                f"{each.error_type}: {each.error}",
            )
            for each in letters
        ),
    )
