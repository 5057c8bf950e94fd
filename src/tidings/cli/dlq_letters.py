"""What the commands about dead letters share: which letters are meant, and a table of them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Final, Literal

import msgspec
import typer

from tidings.bus.dead_letters import OPEN, DeadLetter, DeadLetterStore, LetterState
from tidings.core.names import check_group
from tidings.log.embedded.disk import OsDisk

from .output import Output
from .session import Session
from .values import parse_time

__all__ = [
    "EVERY",
    "ErrorTypeOption",
    "Filters",
    "GroupOption",
    "ReasonOption",
    "SinceOption",
    "TopicArgument",
    "letters_of",
    "make_filters",
    "show_letters",
]

EVERY: Final[tuple[LetterState, ...]] = (*OPEN, "redriven", "dropped")

TopicArgument = Annotated[str, typer.Argument(metavar="TOPIC", help="The topic.")]
GroupOption = Annotated[str | None, typer.Option("--group", metavar="GROUP", help="Only letters of this group.")]
ErrorTypeOption = Annotated[
    str | None,
    typer.Option(
        "--error-type", metavar="NAME", help="Only failures of this kind: builtins.ValueError, or ValueError."
    ),
]
ReasonOption = Annotated[
    Literal["retries", "expired", "denied", "quarantined"] | None,
    typer.Option("--reason", metavar="REASON", help="Only these: retries, expired, denied or quarantined."),
]
SinceOption = Annotated[
    str | None,
    typer.Option("--since", metavar="TIME", help="Given up at this time or later: a time, a date, or 15m, 2h, 7d."),
]


class Filters(msgspec.Struct, frozen=True, kw_only=True):
    """What narrows letters down; conditions are joined by and."""

    group: str | None = None
    error_type: str | None = None
    reason: str | None = None
    since: datetime | None = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing was asked for."""
        return self == Filters()

    def let_through(self, letter: DeadLetter) -> bool:
        """Whether a letter fits."""
        return (
            self.group in (None, letter.group)
            and self.error_type in (None, letter.error_type, letter.error_type.rpartition(".")[2])
            and self.reason in (None, letter.reason)
            and (self.since is None or datetime.fromisoformat(letter.failed_at) >= self.since)
        )


def make_filters(
    session: Session, group: str | None, error_type: str | None, reason: str | None, since: str | None
) -> Filters:
    """The filters that a command line asks for."""
    return Filters(
        group=None if group is None else check_group(group),
        error_type=error_type,
        reason=reason,
        since=None if since is None else parse_time("--since", since, session.clock),
    )


def letters_of(session: Session) -> DeadLetterStore:
    """The workspace's dead letters."""
    session.settings()  # a workspace that is missing is said to be, not shown as one without letters
    return DeadLetterStore(OsDisk(), session.layout.dlq, session.clock)


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
