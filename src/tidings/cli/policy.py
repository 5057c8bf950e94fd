"""``tidings policy``: Cedar policies, and why something is allowed or not."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from tidings.access.administration import Dismissed, PolicyPut, PolicyRemoved, checked_change
from tidings.access.context import OperationContext, TokenClaims
from tidings.access.resources import Action, checked_text, resource_from_text
from tidings.access.settings import AccessSettings

from .administration import TokenOption
from .confirm import YesOption, ask, check_dry_run
from .errors import ExitCode, UsageProblem
from .grant import DryRunOption, ReasonOption, as_usage, carry_out, needing_server_packages
from .session import Session, command

if TYPE_CHECKING:  # it needs a package of the extra `server`
    from tidings.access.book import Explanation

__all__ = ["app"]

app = typer.Typer(help="Check, change and explain who may do what.", rich_markup_mode=None)

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="What the policy is called.")]
FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="Cedar text; - is stdin.")]


async def check(session: Session, file: FileArgument) -> None:
    """Say whether a policy could be put into force: its syntax, its names, its types. Nothing is stored."""
    with needing_server_packages():
        from tidings.access.policies import check_policy
    policy = check_policy(_text_of(file), bytes_max=AccessSettings().policy_bytes_max)
    if session.out.is_json:
        session.out.json({"is_valid": True, "statements": policy.statement_count})
    else:
        session.out.text(f"valid; {policy.statement_count} statements")


async def put(
    session: Session,
    name: NameArgument,
    file: FileArgument,
    *,
    reason: ReasonOption = None,
    token: TokenOption = None,
    is_dry_run: DryRunOption = False,
) -> None:
    """
    Put a policy into force, in the place of one of the same name.

    It is checked first, as `policy check` does. It counts from the next record on, on live connections too.
    """
    with as_usage():
        change = checked_change(PolicyPut(policy_id=name, text=_text_of(file), reason=reason))
    done = await carry_out(session, change, token=token, is_dry_run=is_dry_run, may_create=True)
    _tell(session, done, f"policy {name} is in force")


async def remove(
    session: Session,
    name: NameArgument,
    *,
    reason: ReasonOption = None,
    token: TokenOption = None,
    is_dry_run: DryRunOption = False,
    is_yes: YesOption = False,
) -> None:
    """Take a policy out of force: what it permitted and what it forbade."""
    check_dry_run(is_dry_run=is_dry_run, is_yes=is_yes)
    with as_usage():
        change = checked_change(PolicyRemoved(policy_id=name, reason=reason))
    if not is_dry_run:
        ask(session.out, f"Remove policy {name}?", is_yes=is_yes)
    done = await carry_out(session, change, token=token, is_dry_run=is_dry_run)
    _tell(session, done, f"policy {name} is removed")


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
    done = await carry_out(session, Dismissed(seq=seq, reason=reason), token=None, is_dry_run=is_dry_run)
    _tell(session, done, f"the record at seq {seq} means nothing")


async def show(session: Session) -> None:
    """Show the policies in force, and what is wrong with access records. Exit code 1 if everything is denied because of that."""
    with needing_server_packages():
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
    try:
        wanted = Action(action)
    except ValueError:
        raise UsageProblem(f"{action!r} is no action", ", ".join(each.value for each in Action)) from None
    with needing_server_packages():
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
    with needing_server_packages():
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


def _tell(session: Session, done: dict[str, Any], words: str) -> None:
    if session.out.is_json:
        session.out.json(done)
    elif done["carried_out"]:
        session.out.text(f"{words}, from seq {done['seq']} on")
    else:
        session.out.text("it would be taken; nothing was changed")


def _text_of(file: Path) -> str:
    limit = AccessSettings().policy_bytes_max + 1
    if str(file) == "-":
        data = sys.stdin.buffer.read(limit)
    else:
        with file.open("rb") as stream:
            data = stream.read(limit)
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise UsageProblem(f"{file} is no UTF-8 text") from None


command(app, "check", examples="tidings policy check editors.cedar")(check)
command(
    app,
    "put",
    examples="tidings policy put editors editors.cedar\ntidings policy put editors editors.cedar --dry-run",
)(put)
command(
    app,
    "remove",
    examples="tidings policy remove editors --dry-run\ntidings policy remove editors --yes",
)(remove)
command(app, "dismiss", examples="tidings policy dismiss 4711 --reason 'written by a test'")(dismiss)
command(app, "list", examples="tidings policy list\ntidings policy list --json | jq .text")(show)
command(
    app,
    "explain",
    examples="""
        tidings policy explain sync partition:home-1 --subject alice
        tidings policy explain publish topic:news --subject eve --role editor
        tidings policy explain administer node --bearer "$TOKEN" --json
    """,
)(explain)
