"""
``tidings dlq``: the events that groups have given up on; look at them, have them tried again, or give them up.

A letter that is to be tried again is marked so in its file. The group that failed takes it up when it next runs: this tool
calls no handlers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Annotated, Any, Final, Literal

import msgspec
import typer

from tidings.bus.dead_letters import OPEN, DeadLetter, DeadLetterStore, LetterState
from tidings.core.names import check_group, check_topic
from tidings.log.embedded.disk import OsDisk
from tidings.log.errors import WorkspaceBusy

from .confirm import audit, is_confirmed
from .errors import ExitCode, UsageProblem
from .output import Output
from .session import Session, command
from .values import parse_time

__all__ = ["app"]

app = typer.Typer(help="Look at dead letters, have them tried again, or drop them.", rich_markup_mode=None)

TopicArgument = Annotated[str, typer.Argument(metavar="TOPIC", help="The topic.")]
IdsArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="ID...", help="These letters; those that the filters leave, if none is named."),
]
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
AllOption = Annotated[bool, typer.Option("--all", help="All letters of the topic, where nothing narrows them down.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Show the letters only.")]
YesOption = Annotated[bool, typer.Option("--yes", help="Do not ask.")]

_EVERY: Final[tuple[LetterState, ...]] = (*OPEN, "redriven", "dropped")
_CHUNK: Final = 500
"""Letters between two steps of the progress bar."""
_AUDITED_COUNT_MAX: Final = 1000


class _Filters(msgspec.Struct, frozen=True, kw_only=True):
    group: str | None = None
    error_type: str | None = None
    reason: str | None = None
    since: datetime | None = None

    @property
    def is_empty(self) -> bool:
        return self == _Filters()

    def let_through(self, letter: DeadLetter) -> bool:
        return (
            self.group in (None, letter.group)
            and self.error_type in (None, letter.error_type, letter.error_type.rpartition(".")[2])
            and self.reason in (None, letter.reason)
            and (self.since is None or datetime.fromisoformat(letter.failed_at) >= self.since)
        )


def _filters(
    session: Session, group: str | None, error_type: str | None, reason: str | None, since: str | None
) -> _Filters:
    return _Filters(
        group=None if group is None else check_group(group),
        error_type=error_type,
        reason=reason,
        since=None if since is None else parse_time("--since", since, session.clock),
    )


def _store(session: Session) -> DeadLetterStore:
    session.settings()  # a workspace that is missing is said to be, not shown as one without letters
    return DeadLetterStore(OsDisk(), session.layout.dlq, session.clock)


def list_letters(
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
) -> None:
    """List the dead letters, oldest first in each topic."""
    store = _store(session)
    filters = _filters(session, group, error_type, reason, since)
    topics = store.topics() if topic is None else [check_topic(topic)]
    states = _EVERY if is_every else OPEN
    found = [letter for each in topics for letter in store.letters(each, states=states) if filters.let_through(letter)]
    if session.out.is_json:
        for letter in found:
            session.out.json(msgspec.to_builtins(letter))
    else:
        _show_letters(session.out, "Dead letters", found)


def show(
    session: Session, topic: TopicArgument, letter_id: Annotated[str, typer.Argument(metavar="ID", help="The letter.")]
) -> None:
    """Show one letter whole: the error, each attempt, and the event."""
    letter = _store(session).get(check_topic(topic), letter_id)
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
    if letter.attempts:
        session.out.table("Attempts", ("at", "error"), ((each.at, each.error) for each in letter.attempts))


def _payload(letter: DeadLetter) -> str:
    if "payload" not in letter.event:
        return f"in the log only, sealed: tidings log read {letter.topic} --from-offset {letter.offset} --limit 1"
    return msgspec.json.encode(letter.event["payload"]).decode()


async def redrive(
    session: Session,
    topic: TopicArgument,
    letter_ids: IdsArgument = None,
    *,
    group: GroupOption = None,
    error_type: ErrorTypeOption = None,
    reason: ReasonOption = None,
    since: SinceOption = None,
    is_all: AllOption = False,
    is_dry_run: DryRunOption = False,
    is_yes: YesOption = False,
) -> None:
    """
    Ask for letters to be tried again by the group that failed.

    They are marked as requested; the group's subscription takes them up when it next runs, beside its other work. No
    other group sees the event twice, and no cursor moves. Asking twice is asking once.
    """
    filters = _filters(session, group, error_type, reason, since)

    def request(store: DeadLetterStore, ids: list[str]) -> None:
        store.request(topic, ids)

    await _change(
        session,
        topic,
        _Wish("redrive", "requested", ("dead",), letter_ids or [], filters, is_all),
        request,
        is_dry_run=is_dry_run,
        is_yes=is_yes,
    )
    if not is_dry_run:
        session.out.text("each group's subscription tries its letters when it next runs")


async def drop(
    session: Session,
    topic: TopicArgument,
    letter_ids: IdsArgument = None,
    *,
    group: GroupOption = None,
    error_type: ErrorTypeOption = None,
    reason: ReasonOption = None,
    since: SinceOption = None,
    is_all: AllOption = False,
    is_dry_run: DryRunOption = False,
    is_yes: YesOption = False,
) -> None:
    """Give letters up for good. Their file keeps them, and that they were dropped; the event stays in the log."""
    filters = _filters(session, group, error_type, reason, since)

    def give_up(store: DeadLetterStore, ids: list[str]) -> None:
        store.drop(topic, ids)

    await _change(
        session,
        topic,
        _Wish("drop", "dropped", OPEN, letter_ids or [], filters, is_all),
        give_up,
        is_dry_run=is_dry_run,
        is_yes=is_yes,
    )


class _Wish(msgspec.Struct, frozen=True):
    verb: str
    becomes: str
    states: tuple[LetterState, ...]
    """The states that the verb does something to."""
    ids: list[str]
    filters: _Filters
    is_all: bool


async def _change(
    session: Session,
    topic: str,
    wish: _Wish,
    apply: Callable[[DeadLetterStore, list[str]], None],
    *,
    is_dry_run: bool,
    is_yes: bool,
) -> None:
    topic, out = check_topic(topic), session.out
    if is_dry_run and is_yes:
        raise UsageProblem("--dry-run and --yes exclude each other")
    if not wish.ids and wish.filters.is_empty and not wish.is_all:
        raise UsageProblem("nothing says which letters are meant", "name some, narrow them down, or give --all")
    store = _store(session)
    chosen = _choose(store, topic, wish)
    if is_dry_run or not chosen:
        _tell(out, wish, chosen, None)
        return
    if (writer := session.writer()) is not None:  # before anybody is asked about what cannot be done
        raise WorkspaceBusy(session.workspace, writer)
    if not is_yes and not out.is_json:
        _show_letters(out, f"To {wish.verb}", chosen)
        out.flush()
    if not is_confirmed(out, f"{wish.verb.capitalize()} {_count(chosen)}?", is_yes=is_yes):
        out.note("nothing was changed")
        raise typer.Exit(ExitCode.PROBLEM)
    async with session.writing() as log:
        # As the one writer now: what was chosen before may have been tried meanwhile.
        chosen = _choose(store, topic, wish)
        ids = [letter.id for letter in chosen]
        details = {"topic": topic, "count": len(ids), "ids": ids[:_AUDITED_COUNT_MAX]}
        seq = await audit(log, f"dlq.{wish.verb}", details)
        with out.progress(wish.verb, len(ids)) as advance:
            for at in range(0, len(ids), _CHUNK):
                apply(store, ids[at : at + _CHUNK])
                advance(min(at + _CHUNK, len(ids)))
    _tell(out, wish, chosen, seq)


def _choose(store: DeadLetterStore, topic: str, wish: _Wish) -> list[DeadLetter]:
    # Asked for by name, a letter that does not exist is an error; one that is beyond the verb is passed over.
    letters = (
        [store.get(topic, letter_id) for letter_id in dict.fromkeys(wish.ids)]
        if wish.ids
        else store.letters(topic, states=wish.states)
    )
    return [letter for letter in letters if letter.state in wish.states and wish.filters.let_through(letter)]


def _tell(out: Output, wish: _Wish, letters: Sequence[DeadLetter], audit_seq: int | None) -> None:
    is_done = audit_seq is not None
    if out.is_json:
        answer: dict[str, Any] = {
            "carried_out": is_done,
            "count": len(letters),
            "letters": [{"id": letter.id, "group": letter.group, "offset": letter.offset} for letter in letters],
        }
        out.json({**answer, "audit_seq": audit_seq} if is_done else answer)
        return
    if not is_done and letters:
        _show_letters(out, f"Would {wish.verb}", letters)
    out.text(f"{wish.becomes}: {_count(letters)}" if is_done else f"would {wish.verb}: {_count(letters)}")


def _count(letters: Sequence[DeadLetter]) -> str:
    return "1 letter" if len(letters) == 1 else f"{len(letters)} letters"


def _show_letters(out: Output, title: str, letters: Sequence[DeadLetter]) -> None:
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
command(
    app,
    "redrive",
    examples="""
        tidings dlq redrive actions --group learner --dry-run
        tidings dlq redrive actions learner-42 learner-57 --yes
        tidings dlq redrive actions --error-type TimeoutError --since 1d --yes --json
    """,
)(redrive)
command(
    app,
    "drop",
    examples="""
        tidings dlq drop actions --reason expired --dry-run
        tidings dlq drop actions learner-42 --yes
    """,
)(drop)
