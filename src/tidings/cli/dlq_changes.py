"""
``tidings dlq redrive | drop``: what is to become of dead letters.

Both open the log as its one writer, so a running bus keeps them out (exit code 4), and leave a record in the topic ``audit``
before they change anything.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, Final

import msgspec
import typer

from tidings.bus.audit import audited_dead_letters
from tidings.bus.store.dead_letters import OPEN, DeadLetter, DeadLetterFilter
from tidings.bus.store.files import FileGroupStore
from tidings.core.names import check_topic

from .confirm import YesOption, audit, changing, check_dry_run
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
from .errors import UsageProblem
from .output import Output
from .session import Session, command

__all__ = ["register"]

IdsArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="ID...", help="These letters; those that the filters leave, if none is named."),
]
AllOption = Annotated[bool, typer.Option("--all", help="All letters of the topic, where nothing narrows them down.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Show the letters only.")]

_CHUNK: Final = 500
"""Letters between two steps of the progress bar."""


def register(app: typer.Typer) -> None:
    """Add the commands to their noun."""
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
    wanted = make_filter(session, ("dead",), group, error_type, reason, since)

    async def request(store: FileGroupStore, ids: list[str]) -> None:
        await store.request_redrive(topic, ids)

    is_done = await _change(
        session,
        topic,
        _Wish("redrive", "requested", letter_ids or None, wanted, is_all),
        request,
        is_dry_run=is_dry_run,
        is_yes=is_yes,
    )
    if is_done:
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
    wanted = make_filter(session, OPEN, group, error_type, reason, since)

    async def give_up(store: FileGroupStore, ids: list[str]) -> None:
        await store.drop_dead_letters(topic, ids)

    await _change(
        session,
        topic,
        _Wish("drop", "dropped", letter_ids or None, wanted, is_all),
        give_up,
        is_dry_run=is_dry_run,
        is_yes=is_yes,
    )


class _Wish(msgspec.Struct, frozen=True):
    verb: str
    becomes: str
    ids: list[str] | None
    wanted: DeadLetterFilter
    """Its states are those that the verb does something to."""
    is_all: bool


async def _change(
    session: Session,
    topic: str,
    wish: _Wish,
    apply: Callable[[FileGroupStore, list[str]], Awaitable[None]],
    *,
    is_dry_run: bool,
    is_yes: bool,
) -> bool:
    """Carry a wish out, or show what it comes to; whether letters were changed."""
    topic, out = check_topic(topic), session.out
    check_dry_run(is_dry_run=is_dry_run, is_yes=is_yes)
    if not (wish.ids or wish.wanted.has_conditions or wish.is_all):
        raise UsageProblem("nothing says which letters are meant", "name some, narrow them down, or give --all")
    store = letters_of(session)
    chosen = await store.dead_letters(topic, wish.ids, wish.wanted)
    if is_dry_run or not chosen:
        _tell(out, wish, chosen, None)
        return False
    planned = chosen

    def show() -> None:
        show_letters(out, f"To {wish.verb}", planned)

    question = f"{wish.verb.capitalize()} {_count(planned)}?"
    async with changing(session, question, show, is_yes=is_yes) as log:
        # As the one writer now: what was chosen before may have been tried meanwhile.
        chosen = await store.dead_letters(topic, wish.ids, wish.wanted)
        if not chosen:
            _tell(out, wish, chosen, None)
            return False
        ids = [letter.id for letter in chosen]
        details = audited_dead_letters(topic, ids)
        async with audit(log, f"dlq.{wish.verb}", details, frees_space=wish.verb == "drop") as seq:
            with out.progress(wish.verb, len(ids)) as advance:
                for at in range(0, len(ids), _CHUNK):
                    await apply(store, ids[at : at + _CHUNK])
                    advance(min(at + _CHUNK, len(ids)))
    _tell(out, wish, chosen, seq, is_done=True)
    return True


def _tell(
    out: Output, wish: _Wish, letters: Sequence[DeadLetter], audit_seq: int | None, *, is_done: bool = False
) -> None:
    if out.is_json:
        answer: dict[str, Any] = {
            "carried_out": is_done,
            "count": len(letters),
            "letters": [{"id": letter.id, "group": letter.group, "offset": letter.offset} for letter in letters],
        }
        out.json({**answer, "audit_seq": audit_seq} if is_done else answer)
        return
    if not is_done and letters:
        show_letters(out, f"Would {wish.verb}", letters)
    out.text(f"{wish.becomes}: {_count(letters)}" if is_done else f"would {wish.verb}: {_count(letters)}")


def _count(letters: Sequence[DeadLetter]) -> str:
    return "1 letter" if len(letters) == 1 else f"{len(letters)} letters"
