"""
``tidings grant`` and ``tidings revoke``: who may do what, from the next record on.

Changes of access (policies too) go into the log itself or, when a node holds the workspace, through that node: ``carry_out``. Both
ways make the same record of the topic ``access``. In the log the tool is trusted, as whoever may write the files is, and leaves a
record in the topic ``audit`` first; a node asks for the token of an administrator.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator
from typing import Annotated, Any, Final

import msgspec
import typer

from tidings.access.administration import (
    Change,
    Grant,
    Revoke,
    SubjectRestored,
    SubjectRevoked,
    TokenRevocation,
    checked_change,
    event_of,
    request_of,
    send,
    type_of,
)
from tidings.access.errors import InvalidChange
from tidings.access.resources import Action, pattern_from_text

from .administration import TokenOption, node_of
from .confirm import audit
from .errors import UsageProblem
from .session import Session, command

__all__ = [
    "DryRunOption",
    "ReasonOption",
    "as_usage",
    "carry_out",
    "needing_server_packages",
    "register",
]

SubjectArgument = Annotated[
    str | None,
    typer.Argument(metavar="SUBJECT", help="Whom: the `sub` of tokens (or their client id, if they have none)."),
]
ActionArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="ACTION",
        help="publish, subscribe, submit, sync, read, administer, or of a group join, create, move, pause, redrive, drop, delete;"
        " several with commas between.",
    ),
]
ResourceArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="RESOURCE",
        help="topic:NAME, partition:NAME, project:NAME, space:NAME or node; a * at the end covers all that begin alike.",
    ),
]

DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Check it and show what would be done only.")]
ReasonOption = Annotated[
    str | None, typer.Option("--reason", metavar="TEXT", help="Why, for whoever reads the log later.")
]

_COLUMNS: Final = ("subject", "action", "resource", "state", "seq")


def register(app: typer.Typer) -> None:
    """Add the commands to the tool."""
    command(
        app,
        "grant",
        examples="""
            tidings grant alice sync,submit partition:home-1
            tidings grant worker publish 'topic:orders.*' --reason 'new service'
            tidings grant alice --restore
            tidings grant --list
        """,
    )(grant)
    command(
        app,
        "revoke",
        examples="""
            tidings revoke alice sync partition:home-1
            tidings revoke alice --all --reason 'left the team' --dry-run
            tidings revoke --token-id 5f2c0e6a9b7d4c31a8e0f4d2b6c79e15
        """,
    )(revoke)


async def grant(
    session: Session,
    subject: SubjectArgument = None,
    actions: ActionArgument = None,
    resource: ResourceArgument = None,
    *,
    is_restore: Annotated[bool, typer.Option("--restore", help="Give a revoked subject back what it had.")] = False,
    is_list: Annotated[bool, typer.Option("--list", help="Show the grants and revocations in force.")] = False,
    reason: ReasonOption = None,
    token: TokenOption = None,
    is_dry_run: DryRunOption = False,
) -> None:
    """
    Let somebody do something, from the next record on.

    Works on the log itself or, when a node holds the workspace, through the node. A grant lifts an earlier revocation of the same
    thing; a subject that was revoked as a whole comes back with --restore only.
    """
    if is_list:
        if actions is not None or is_restore:
            raise UsageProblem("--list takes at most a subject")
        await _list(session, subject)
        return
    if is_restore:
        if subject is None or actions is not None:
            raise UsageProblem("--restore takes a subject, and nothing else")
        changes: list[Change] = [_checked(SubjectRestored(subject=subject, reason=reason))]
    else:
        changes = _rights(Grant, subject, actions, resource, reason)
    await _each(session, changes, token=token, is_dry_run=is_dry_run, may_create=True)


async def revoke(
    session: Session,
    subject: SubjectArgument = None,
    actions: ActionArgument = None,
    resource: ResourceArgument = None,
    *,
    is_all: Annotated[bool, typer.Option("--all", help="Everything, with any token, until it is restored.")] = False,
    token_id: Annotated[
        str | None, typer.Option("--token-id", metavar="ID", help="One token, by its `jti`; takes no subject.")
    ] = None,
    reason: ReasonOption = None,
    token: TokenOption = None,
    is_dry_run: DryRunOption = False,
) -> None:
    """
    Take a right away, from the next record on, on live connections too.

    It holds against the claims of tokens, against roles and against policies, until it is granted again.
    """
    if token_id is not None:
        if subject is not None or is_all:
            raise UsageProblem("--token-id stands alone")
        changes: list[Change] = [_checked(TokenRevocation(token_id=token_id, reason=reason))]
    elif is_all:
        if subject is None or actions is not None:
            raise UsageProblem("--all takes a subject, and nothing else")
        changes = [_checked(SubjectRevoked(subject=subject, reason=reason))]
    else:
        changes = _rights(Revoke, subject, actions, resource, reason)
    await _each(session, changes, token=token, is_dry_run=is_dry_run, may_create=False)


def _rights(
    kind: type[Grant] | type[Revoke], subject: str | None, actions: str | None, resource: str | None, reason: str | None
) -> list[Change]:
    verb = "grant" if kind is Grant else "revoke"
    if subject is None or actions is None or resource is None:
        raise UsageProblem("name a subject, an action and a resource", f"tidings {verb} alice sync partition:home-1")
    with as_usage():
        pattern = pattern_from_text(resource)
    return [
        _checked(kind(subject=subject, action=_action(word), resource=pattern, reason=reason))
        for word in actions.split(",")
    ]


def _action(word: str) -> Action:
    try:
        return Action(word.strip())
    except ValueError:
        there = ", ".join(action.value for action in Action)
        raise UsageProblem(f"{word!r} is no action", f"there are: {there}") from None


def _checked(change: Change) -> Change:
    with as_usage():
        return checked_change(change)


async def _each(
    session: Session, changes: list[Change], *, token: str | None, is_dry_run: bool, may_create: bool
) -> None:
    for change in changes:
        done = await carry_out(session, change, token=token, is_dry_run=is_dry_run, may_create=may_create)
        if session.out.is_json:
            session.out.json(done)
        else:
            session.out.text(f"{_sentence(change)}{_when(done)}")


def _when(done: dict[str, Any]) -> str:
    return f", from seq {done['seq']} on" if done["carried_out"] else "; not carried out"


def _sentence(change: Change) -> str:
    match change:
        case Grant(subject=subject, action=action, resource=resource):
            return f"{subject} may {action} {resource}"
        case Revoke(subject=subject, action=action, resource=resource):
            return f"{subject} may not {action} {resource}"
        case SubjectRestored(subject=subject):
            return f"{subject} has back what it had"
        case SubjectRevoked(subject=subject):
            return f"{subject} may do nothing"
        case TokenRevocation(token_id=token_id):
            return f"token {token_id} is worth nothing"
    return str(msgspec.to_builtins(change))


async def _list(session: Session, subject: str | None) -> None:
    with needing_server_packages():
        from tidings.access.book import load_book
    async with session.reading() as log:
        book = await load_book(log)
    rows: list[tuple[str, str, str, str, int | None]] = sorted(
        (name, rule.action.value, str(rule.resource), "granted" if rule.is_grant else "revoked", rule.seq)
        for name, rule in book.rules(subject)
    )
    rows += [(name, "*", "*", "revoked", None) for name in book.revoked_subjects() if subject in (None, name)]
    tokens = book.revoked_tokens() if subject is None else []
    if session.out.is_json:
        for row in rows:
            session.out.json(dict(zip(_COLUMNS, row, strict=True)))
        for token_id in tokens:
            session.out.json({"token_id": token_id, "state": "revoked"})
        return
    if rows:
        session.out.table(
            "Grants and revocations", (*_COLUMNS[:-1], "seq>"), ((*row[:-1], row[-1] or "") for row in rows)
        )
    if tokens:
        session.out.table("Revoked tokens", ("token id",), ((token_id,) for token_id in tokens))
    if not rows and not tokens:
        session.out.text("there are no grants and no revocations")
    for problem in book.closed_by():
        session.out.note(f"everything is denied: {problem}")


@contextlib.contextmanager
def needing_server_packages() -> Iterator[None]:
    """Around imports of what a bare installation does not have."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise UsageProblem(
            f"this needs the package {error.name}, which is not installed", "pip install 'tidings[server]'"
        ) from error


@contextlib.contextmanager
def as_usage() -> Iterator[None]:
    """Around what was typed: what makes no sense there is a mistake of the command line."""
    try:
        yield
    except InvalidChange as error:
        raise UsageProblem(error.describe(), error.hint) from error


async def carry_out(
    session: Session,
    change: Change,
    *,
    token: str | None,
    is_dry_run: bool = False,
    may_create: bool = False,
) -> dict[str, Any]:
    """
    Make a change, or check whether it would be taken.

    Returns:
        What was done, for ``--json``.

    Raises:
        InvalidChange, InvalidPolicy: It makes no sense.
        WorkspaceBusy: Another process that is no node holds the workspace.
        NodeUnreachable, NodeRefused: A node holds it, and did not do it.
    """
    with needing_server_packages():
        from tidings.access.book import load_book
    shown = {"carried_out": not is_dry_run, "change": msgspec.to_builtins(change)}
    if is_dry_run:
        async with session.reading() as follower:
            (await load_book(follower)).check(change)
        return shown
    if (node := node_of(session, token)) is None:
        async with session.writing(may_create=may_create) as log:
            change = (await load_book(log)).check(change)
            async with audit(log, type_of(change), msgspec.to_builtins(change)) as audit_seq:
                done = await log.append(event_of(change, actor=f"cli:uid-{os.getuid()}"), from_reserve=True)
        return {**shown, "seq": done.seq, "audit_seq": audit_seq, "through": "log"}
    address, shown_token = node
    answer = await asyncio.to_thread(send, address.url, request_of(change), shown_token, address.certificate)
    return {**shown, "seq": answer.get("seq"), "through": address.url}
