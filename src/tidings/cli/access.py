"""
``tidings grant``, ``tidings revoke`` and ``tidings policy``: who may do what, from the next record on, and why.

A change is appended to the log or, when a node holds the workspace, sent to that node: ``carry_out``. Both ways make the same record of
the topic ``access``. In the log the tool is trusted, as whoever may write the files is, and it writes a record of the topic ``audit``
first; a node asks for the token of an administrator.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import typer

from tidings.access.administration import (
    Change,
    Dismissed,
    Grant,
    PolicyPut,
    PolicyRemoved,
    Revoke,
    SubjectRestored,
    SubjectRevoked,
    TokenRevocation,
    checked_change,
    event_of,
    request_of,
    type_of,
)
from tidings.access.context import OperationContext, TokenClaims
from tidings.access.errors import InvalidChange
from tidings.access.resources import Action, checked_text, pattern_from_text, resource_from_text
from tidings.access.settings import AccessSettings

from .administration import node_of
from .output import ExitCode, UsageProblem
from .session import (
    DryRunOption,
    Session,
    YesOption,
    check_dry_run,
    command,
    confirm,
    read_text,
    user_audit,
)

if TYPE_CHECKING:
    from tidings.access.book import Explanation

app = typer.Typer(rich_markup_mode=None)


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

ReasonOption = Annotated[
    str | None, typer.Option("--reason", metavar="TEXT", help="Why, for whoever reads the log later.")
]

_POLICY_BYTES_MAX: Final = AccessSettings().policy_bytes_max
_RULE_COLUMNS: Final = ("subject", "action", "resource", "state", "seq")


@command(
    app,
    "grant",
    asks_node=True,
    examples="""
            tidings grant alice sync,submit partition:home-1
            tidings grant worker publish 'topic:orders.*' --reason 'new service'
            tidings grant alice --restore
            tidings grant --list
        """,
)
async def grant(
    session: Session,
    subject: SubjectArgument = None,
    actions: ActionArgument = None,
    resource: ResourceArgument = None,
    *,
    is_restore: Annotated[bool, typer.Option("--restore", help="Give a revoked subject back what it had.")] = False,
    is_list: Annotated[bool, typer.Option("--list", help="Show the grants and revocations in force.")] = False,
    reason: ReasonOption = None,
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
        await _show_rules(session, subject)
        return
    if is_restore:
        if subject is None or actions is not None:
            raise UsageProblem("--restore takes a subject, and nothing else")
        changes: list[Change] = [_checked(SubjectRestored(subject=subject, reason=reason))]
    else:
        changes = _rights(Grant, subject, actions, resource, reason)
    await _each(session, changes, is_dry_run=is_dry_run, may_create=True)


@command(
    app,
    "revoke",
    asks_node=True,
    examples="""
            tidings revoke alice sync partition:home-1
            tidings revoke alice --all --reason 'left the team' --dry-run
            tidings revoke --token-id 5f2c0e6a9b7d4c31a8e0f4d2b6c79e15
        """,
)
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
    is_dry_run: DryRunOption = False,
) -> None:
    """
    Take a right away, from the next record on, on live connections too.

    It holds against the claims of tokens, against roles and against policies, until it is granted again.
    """
    if token_id is not None:
        if subject is not None or is_all:
            raise UsageProblem("--token-id takes no subject and no --all")
        changes: list[Change] = [_checked(TokenRevocation(token_id=token_id, reason=reason))]
    elif is_all:
        if subject is None or actions is not None:
            raise UsageProblem("--all takes a subject, and nothing else")
        changes = [_checked(SubjectRevoked(subject=subject, reason=reason))]
    else:
        changes = _rights(Revoke, subject, actions, resource, reason)
    await _each(session, changes, is_dry_run=is_dry_run, may_create=False)


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
        raise UsageProblem(f"{word!r} is not an action", f"there are: {there}") from None


def _checked(change: Change) -> Change:
    with as_usage():
        return checked_change(change)


async def _each(session: Session, changes: list[Change], *, is_dry_run: bool, may_create: bool) -> None:
    for change in changes:
        done = await carry_out(session, change, is_dry_run=is_dry_run, may_create=may_create)
        when = f", from seq {done['seq']} on" if done["carried_out"] else "; not carried out"
        waiting = done.get("delayed_waiting")
        refused = f"; delayed events that wait, and will be refused when due: {waiting}" if waiting else ""
        session.out.result(done, f"{_sentence(change)}{when}{refused}")


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


async def _show_rules(session: Session, subject: str | None) -> None:
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
            session.out.json(dict(zip(_RULE_COLUMNS, row, strict=True)))
        for token_id in tokens:
            session.out.json({"token_id": token_id, "state": "revoked"})
        return
    if rows:
        session.out.table(
            "Grants and revocations", (*_RULE_COLUMNS[:-1], "seq>"), ((*row[:-1], row[-1] or "") for row in rows)
        )
    if tokens:
        session.out.table("Revoked tokens", ("token id",), ((token_id,) for token_id in tokens))
    if not rows and not tokens:
        session.out.text("there are no grants and no revocations")
    for problem in book.closed_by():
        session.out.note(f"everything is denied: {problem}")


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
    is_dry_run: bool = False,
    may_create: bool = False,
) -> dict[str, Any]:
    """
    Make a change, or check whether it would be accepted.

    Returns:
        What was done, for ``--json``.

    Raises:
        InvalidChange, InvalidPolicy: It makes no sense.
        WorkspaceBusy: Another process that is no node holds the workspace.
        NodeUnreachable, NodeRefused: A node holds it, and did not do it.
    """
    from tidings.access.book import load_book

    shown = {"carried_out": not is_dry_run, "change": msgspec.to_builtins(change)}
    if is_dry_run:
        async with session.reading() as follower:
            (await load_book(follower)).check(change)
        return shown
    if (node := node_of(session)) is None:
        async with session.writing(may_create=may_create) as log:
            change = (await load_book(log)).check(change)
            async with user_audit().of(log, type_of(change), msgspec.to_builtins(change)) as audit_seq:
                done = await log.append(event_of(change, actor=user_audit().actor), from_reserve=True)
        return {**shown, "seq": done.seq, "audit_seq": audit_seq, "through": "log"}
    answer = await node.ask(*request_of(change))
    waiting = {name: answer[name] for name in ("delayed_waiting",) if answer.get(name) is not None}
    return {**shown, "seq": answer.get("seq"), "through": node.address.url, **waiting}


policy_app = typer.Typer(help="Check, change and explain who may do what.", rich_markup_mode=None)

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="What the policy is called.")]
FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="Cedar text; - is stdin.")]


@command(policy_app, "check", has_workspace=False, examples="tidings policy check editors.cedar")
async def check(session: Session, file: FileArgument) -> None:
    """Say whether a policy could be put into force: its syntax, its names, its types. Nothing is stored."""
    from tidings.access.policies import check_new_policy

    policy = check_new_policy(read_text(file, _POLICY_BYTES_MAX + 1), bytes_max=_POLICY_BYTES_MAX)
    done = {"is_valid": True, "statements": policy.statement_count}
    session.out.result(done, f"valid; {policy.statement_count} statements")


@command(
    policy_app,
    "put",
    asks_node=True,
    examples="tidings policy put editors editors.cedar\ntidings policy put editors editors.cedar --dry-run",
)
async def put(
    session: Session,
    name: NameArgument,
    file: FileArgument,
    *,
    reason: ReasonOption = None,
    is_dry_run: DryRunOption = False,
) -> None:
    """
    Put a policy into force, in the place of one of the same name.

    It is checked first, as `policy check` does. It counts from the next record on, on live connections too.
    """
    with as_usage():
        change = checked_change(PolicyPut(policy_id=name, text=read_text(file, _POLICY_BYTES_MAX + 1), reason=reason))
    done = await carry_out(session, change, is_dry_run=is_dry_run, may_create=True)
    _show_policy_change(session, done, f"policy {name} is in force")


@command(
    policy_app,
    "remove",
    asks_node=True,
    examples="tidings policy remove editors --dry-run\ntidings policy remove editors --yes",
)
async def remove(
    session: Session,
    name: NameArgument,
    *,
    reason: ReasonOption = None,
    is_dry_run: DryRunOption = False,
    is_yes: YesOption = False,
) -> None:
    """Take a policy out of force: what it permitted and what it forbade."""
    check_dry_run(is_dry_run=is_dry_run, is_yes=is_yes)
    with as_usage():
        change = checked_change(PolicyRemoved(policy_id=name, reason=reason))
    if not is_dry_run:
        confirm(session.out, f"Remove policy {name}?", is_yes=is_yes)
    done = await carry_out(session, change, is_dry_run=is_dry_run)
    _show_policy_change(session, done, f"policy {name} is removed")


@command(policy_app, "dismiss", examples="tidings policy dismiss 4711 --reason 'written by a test'")
async def dismiss(
    session: Session,
    seq: Annotated[int, typer.Argument(metavar="SEQ", min=1, help="The record's seq, as `policy list` shows it.")],
    *,
    reason: ReasonOption = None,
    is_dry_run: DryRunOption = False,
) -> None:
    """
    Say that an access record that cannot be read means nothing.

    Such a record might have been a revocation, so everything is denied because of it. Look at it first (`tidings log read access`),
    and revoke by hand what it was meant to. A node that runs denies this too: stop it first.
    """
    done = await carry_out(session, Dismissed(seq=seq, reason=reason), is_dry_run=is_dry_run)
    _show_policy_change(session, done, f"the record at seq {seq} means nothing")


@command(policy_app, "list", asks_node=True, examples="tidings policy list\ntidings policy list --json | jq .text")
async def list_policies(session: Session) -> None:
    """Show the policies in force, and what is wrong with access records. Exit code 1 if everything is denied because of that."""
    from tidings.access.book import load_book

    async with session.reading() as log:
        book = await load_book(log)
    closed = book.closed_by()
    if session.out.is_json:
        for each in book.policies.values():
            session.out.json({"name": each.policy_id, "seq": each.seq, "problem": each.problem, "text": each.text})
        for problem in book.problems:
            session.out.json({"record": msgspec.to_builtins(problem)})
    elif book.policies:
        rows = [(each.policy_id, each.seq, each.problem or "in force") for each in book.policies.values()]
        session.out.table("Policies", ("name", "seq>", "state"), rows)
    else:
        session.out.text("there are no policies but the built-in ones")
    for line in closed:
        session.out.note(f"everything is denied: {line}")
    if closed:
        raise typer.Exit(ExitCode.PROBLEM)


@command(
    policy_app,
    "explain",
    asks_node=True,
    examples="""
        tidings policy explain sync partition:home-1 --subject alice
        tidings policy explain publish topic:news --subject eve --role editor
        tidings policy explain administer node --bearer "$TOKEN" --json
    """,
)
async def explain(
    session: Session,
    action: Annotated[
        str,
        typer.Argument(
            metavar="ACTION", help="publish, subscribe, submit, sync, read, administer, or an action on a group."
        ),
    ],
    resource: Annotated[str, typer.Argument(metavar="RESOURCE", help="topic:NAME, partition:NAME, ... or node.")],
    *,
    subject: Annotated[str | None, typer.Option("--subject", metavar="SUBJECT", help="Who.")] = None,
    role: Annotated[
        list[str] | None, typer.Option("--role", metavar="ROLE", help="With this role; may be repeated.")
    ] = None,
    client_id: Annotated[str | None, typer.Option("--client-id", metavar="ID", help="With this client id.")] = None,
    bearer: Annotated[
        str | None,
        typer.Option(
            "--bearer", metavar="TOKEN", help="Whoever bears this token, instead. Its signature is not checked."
        ),
    ] = None,
) -> None:
    """Say whether somebody may do something now, and why. Exit code 1 if not."""
    if (subject is None) == (bearer is None):
        raise UsageProblem("give --subject or --bearer")
    with as_usage():
        target = resource_from_text(resource)
    wanted = _action(action)
    from tidings.access.book import load_book

    context = _context(subject, client_id, role or []) if bearer is None else _bearer(bearer)
    async with session.reading() as log:
        found = (await load_book(log)).capsule(context).explain(wanted, target)
    if session.out.is_json:
        session.out.json({"subject": context.subject, "action": action, "resource": str(target), **_facts(found)})
    else:
        may = "may" if found.is_allowed else "may not"
        facts = {**_facts(found), "reasons": ", ".join(found.reasons) or "no policy permits it"}
        session.out.facts(f"{context.subject} {may} {action} {target}", facts.items())
    if not found.is_allowed:
        raise typer.Exit(ExitCode.PROBLEM)


def _context(subject: str | None, client_id: str | None, roles: list[str]) -> OperationContext:
    with as_usage():
        name = checked_text("--subject", subject or "")
        claims = TokenClaims(roles=frozenset(checked_text("--role", role) for role in roles))
        return OperationContext(name, client_id and checked_text("--client-id", client_id), None, None, claims)


def _bearer(token: str) -> OperationContext:
    from tidings.access.tokens import context_from, payload_from, read_unverified

    return context_from(payload_from(msgspec.json.encode(read_unverified(token)[1])), leeway_s=0)


def _facts(found: Explanation) -> dict[str, Any]:
    return {
        "is_allowed": found.is_allowed,
        "reasons": list(found.reasons),
        "is_claimed": found.is_claimed,
        "granted_at": found.granted_at,
        "revoked_at": found.revoked_at,
        "is_revoked": found.is_revoked,
        "errors": list(found.errors),
        "as_of_seq": found.seq,
    }


def _show_policy_change(session: Session, done: dict[str, Any], words: str) -> None:
    is_done = done["carried_out"]
    session.out.result(
        done, f"{words}, from seq {done['seq']} on" if is_done else "it would be accepted; nothing was changed"
    )
