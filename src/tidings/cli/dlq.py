"""
``tidings dlq``: dead letters, the events that a group failed on: list, redrive or drop them.

Changing is done in the files, or through the node that holds the workspace. A dead letter that is to be tried again is marked so; the group
that failed tries it, at once if it runs, else when it next does: this tool calls no handlers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec
import typer

from tidings.bus.admin import CHANGEABLE, DeadLetterVerb
from tidings.bus.store.dead_letters import EVERY, OPEN, DeadLetter, DeadLetterFilter, DeadLetterState, Reason
from tidings.core.names import check_group, check_topic

from .administration import changing, looking
from .output import Output, UsageProblem, as_typed, plain
from .session import (
    AnyTopicArgument,
    DryRunOption,
    KeyFileOption,
    Session,
    TopicArgument,
    YesOption,
    check_dry_run,
    command,
    parse_time,
)

app = typer.Typer(help="Look at dead letters, have them tried again, or drop them.", rich_markup_mode=None)

GroupOption = Annotated[str | None, typer.Option("--group", metavar="GROUP", help="Only those of this group.")]
ErrorTypeOption = Annotated[
    str | None,
    typer.Option(
        "--error-type", metavar="NAME", help="Only failures of this kind: builtins.ValueError, or ValueError."
    ),
]
ErrorContainsOption = Annotated[
    str | None, typer.Option("--error-contains", metavar="TEXT", help="Only failures whose text or kind contains this.")
]
ReasonOption = Annotated[
    Reason | None,
    typer.Option("--reason", metavar="REASON", help="Only these: retries, expired, denied, quarantined or invalid."),
]
SinceOption = Annotated[
    str | None,
    typer.Option("--since", metavar="TIME", help="Given up at this time or later: a time, a date, or 15m, 2h, 7d."),
]


IdsArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="ID...", help="These; those that the filters leave, if none is named."),
]
AllOption = Annotated[bool, typer.Option("--all", help="All of the topic, where nothing narrows them down.")]

_CHUNK: Final = 500
"""Dead letters between two steps of the progress bar, and named by one record of the audit."""


@command(
    app,
    "list",
    asks_node=True,
    examples="""
        tidings dlq list
        tidings dlq list actions --group learner --since 2h
        tidings dlq list --error-type ValueError --json
    """,
)
async def list_dead_letters(
    session: Session,
    topic: AnyTopicArgument = None,
    *,
    group: GroupOption = None,
    error_type: ErrorTypeOption = None,
    error_contains: ErrorContainsOption = None,
    reason: ReasonOption = None,
    since: SinceOption = None,
    is_every: Annotated[
        bool, typer.Option("--every-state", help="Also those that went through since, and the dropped.")
    ] = False,
    key_file: KeyFileOption = None,
) -> None:
    """List the dead letters, oldest first in each topic. What those of encrypted spaces say takes the space's key to read."""
    wanted = _filter(session, EVERY if is_every else OPEN, group, error_type, error_contains, reason, since)
    async with looking(session, key_file=key_file) as admin:
        found = await admin.dead_letters(None if topic is None else check_topic(topic), None, wanted)
    _show_letters(session.out, "Dead letters", found)


@command(app, "show", asks_node=True, examples="tidings dlq show actions learner-42")
async def show(
    session: Session,
    topic: TopicArgument,
    letter_id: Annotated[str, typer.Argument(metavar="ID", help="The dead letter.")],
    *,
    key_file: KeyFileOption = None,
) -> None:
    """Show one dead letter whole: the error, each attempt, and the event."""
    async with looking(session, key_file=key_file) as admin:
        letter = await admin.dead_letter(check_topic(topic), letter_id)
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
        return as_typed(
            f"in the log only, sealed: `tidings log read {letter.topic} --from-offset {letter.offset} --limit 1`"
        )
    return msgspec.json.encode(letter.event["payload"]).decode()


@command(
    app,
    "redrive",
    asks_node=True,
    examples="""
        tidings dlq redrive actions --group learner --dry-run
        tidings dlq redrive actions learner-42 learner-57 --yes
        tidings dlq redrive actions --error-type TimeoutError --since 1d --yes --json
    """,
)
async def redrive(
    session: Session,
    topic: TopicArgument,
    ids: IdsArgument = None,
    *,
    group: GroupOption = None,
    error_type: ErrorTypeOption = None,
    error_contains: ErrorContainsOption = None,
    reason: ReasonOption = None,
    since: SinceOption = None,
    is_all: AllOption = False,
    is_dry_run: DryRunOption = False,
    is_yes: YesOption = False,
) -> None:
    """
    Ask for dead letters to be tried again by the group that failed.

    They are marked as requested; the group's subscription tries them, beside its other work. No other group sees the event
    twice, and no cursor moves. Asking twice is asking once.
    """
    wanted = _filter(session, CHANGEABLE["redrive"], group, error_type, error_contains, reason, since)
    await _change(session, "redrive", topic, ids, wanted, is_all=is_all, is_dry_run=is_dry_run, is_yes=is_yes)


@command(
    app,
    "drop",
    asks_node=True,
    examples="""
        tidings dlq drop actions --reason expired --dry-run
        tidings dlq drop actions learner-42 --yes
    """,
)
async def drop(
    session: Session,
    topic: TopicArgument,
    ids: IdsArgument = None,
    *,
    group: GroupOption = None,
    error_type: ErrorTypeOption = None,
    error_contains: ErrorContainsOption = None,
    reason: ReasonOption = None,
    since: SinceOption = None,
    is_all: AllOption = False,
    is_dry_run: DryRunOption = False,
    is_yes: YesOption = False,
) -> None:
    """Give dead letters up for good. Their file keeps them, and that they were dropped; the event stays in the log."""
    wanted = _filter(session, CHANGEABLE["drop"], group, error_type, error_contains, reason, since)
    await _change(session, "drop", topic, ids, wanted, is_all=is_all, is_dry_run=is_dry_run, is_yes=is_yes)


async def _change(
    session: Session,
    verb: DeadLetterVerb,
    topic: str,
    ids: list[str] | None,
    wanted: DeadLetterFilter,
    *,
    is_all: bool,
    is_dry_run: bool,
    is_yes: bool,
) -> None:
    topic, out = check_topic(topic), session.out
    check_dry_run(is_dry_run=is_dry_run, is_yes=is_yes)
    if not (ids or wanted.has_conditions or is_all):
        raise UsageProblem("nothing says which dead letters are meant", "name some, narrow them down, or give --all")
    async with looking(session) as admin:
        chosen = await admin.dead_letters(topic, ids or None, wanted)
    if is_dry_run or not chosen:
        _show_change(out, verb, chosen)
        return
    async with changing(
        session,
        question=f"{verb.capitalize()} {_count(chosen)}?",
        show=lambda: _show_letters(out, f"To {verb}", chosen),
        is_yes=is_yes,
    ) as admin:
        names = [letter.id for letter in chosen]
        audit_seqs: list[int] = []
        with out.progress(verb, len(names)) as advance:
            for at in range(0, len(names), _CHUNK):
                # What was redriven or dropped by others meanwhile is passed over.
                seq = await admin.change_dead_letters(verb, topic, names[at : at + _CHUNK])
                audit_seqs += [] if seq is None else [seq]
                advance(min(at + _CHUNK, len(names)))
    _show_change(out, verb, chosen, audit_seqs)


def _show_change(
    out: Output, verb: DeadLetterVerb, letters: Sequence[DeadLetter], audit_seqs: Sequence[int] | None = None
) -> None:
    is_done = audit_seqs is not None
    if out.is_json:
        answer: dict[str, Any] = {
            "carried_out": is_done,
            "count": len(letters),
            "dead_letters": [
                {"id": each.id, "group": each.group, "offset": each.offset, "event_id": each.event_id}
                for each in letters
            ],
        }
        out.json({**answer, "audit_seq": audit_seqs[0] if audit_seqs else None} if is_done else answer)
    elif is_done:
        out.text(f"{'requested' if verb == 'redrive' else 'dropped'}: {_count(letters)}")
        if verb == "redrive":
            out.text("each group's subscription tries them, at once if it runs, else when it next does")
    elif letters:
        _show_letters(out, f"Would {verb}", letters)
        out.text(f"would {verb}: {_count(letters)}")
    else:
        out.text(f"there is nothing to {verb}: no dead letter matches")


def _count(letters: Sequence[DeadLetter]) -> str:
    return "1 dead letter" if len(letters) == 1 else f"{len(letters)} dead letters"


def _filter(
    session: Session,
    states: tuple[DeadLetterState, ...],
    group: str | None,
    error_type: str | None,
    error_contains: str | None,
    reason: Reason | None,
    since: str | None,
) -> DeadLetterFilter:
    """The dead letters that a command line asks for, among those in these states."""
    return DeadLetterFilter(
        states=states,
        group=None if group is None else check_group(group),
        error_type=error_type,
        error_contains=error_contains,
        reason=reason,
        since=None if since is None else parse_time("--since", since, session.clock),
    )


def _show_letters(out: Output, title: str, letters: Sequence[DeadLetter]) -> None:
    out.listing(
        title,
        ("topic", "id", "state", "reason", "retries>", "given up>", "error"),
        letters,
        lambda each: (
            each.topic,
            each.id,
            each.state,
            each.reason,
            each.retries,
            each.failed_at[:19],
            f"{each.error_type}: {each.error}",
        ),
        empty="there are no dead letters",
    )
