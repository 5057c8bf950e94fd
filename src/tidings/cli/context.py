"""``tidings context``: nodes under names, so that a command line need not repeat their addresses and tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from .context_file import (
    Contexts,
    SavedNode,
    checked_name,
    checked_url,
    contexts_path,
    load_contexts,
    save_contexts,
)
from .output import UsageProblem
from .session import Session, command, read_text

app = typer.Typer(help="Keep the addresses of nodes, and the tokens to show them.", rich_markup_mode=None)

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="What the context is called.")]
_TOKEN_BYTES_MAX = 1 << 16


@command(
    app,
    "add",
    has_workspace=False,
    examples="""
        tidings context add shop http://127.0.0.1:8787 --token-file token.txt
        echo "$TOKEN" | tidings context add shop https://events.example.org --token-file - --use
    """,
)
def add(
    session: Session,
    name: NameArgument,
    url: Annotated[str, typer.Argument(metavar="URL", help="The node's address, as it prints it.")],
    *,
    token_file: Annotated[
        Path | None,
        typer.Option("--token-file", metavar="FILE", help="Holds the token to show; - is stdin."),
    ] = None,
    certificate: Annotated[
        Path | None,
        typer.Option("--certificate", metavar="FILE", help="The certificate that the node shows, if nobody vouches."),
    ] = None,
    is_used: Annotated[bool, typer.Option("--use", help="Use it from now on.")] = False,
) -> None:
    """
    Keep a node under a name, in the place of one of that name.

    `--node NAME` then means this node, with its token. The token is kept in a file that only you can read, and never shown. Without
    --token-file no token is kept, and TIDINGS_TOKEN counts each time.
    """
    checked_name(name)
    token = None if token_file is None else read_text(token_file, _TOKEN_BYTES_MAX).strip()
    if token is not None and (not token.isascii() or not token.isprintable() or " " in token or not token):
        raise UsageProblem(f"{token_file} holds no token", "give a file with the token alone")
    if certificate is not None:
        certificate.read_bytes()  # a wrong path is said now
    kept = load_contexts()
    context = SavedNode(checked_url(url), token, None if certificate is None else str(certificate.absolute()))
    current = name if is_used else kept.current
    save_contexts(Contexts({**kept.contexts, name: context}, current))
    done = _shown(name, context, is_current=current == name)
    session.out.result(done, f"context {name} is {context.url}{', and in use' if current == name else ''}")


@command(app, "use", has_workspace=False, examples="tidings context use shop\ntidings context use --none")
def use(
    session: Session,
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="The context.")] = None,
    *,
    is_none: Annotated[bool, typer.Option("--none", help="Use none: commands look for a workspace again.")] = False,
) -> None:
    """
    Ask this context's node from now on, in commands that have --node and are given neither that nor a workspace.
    """
    if (name is None) != is_none:
        raise UsageProblem("name a context, or give --none")
    kept = load_contexts()
    if name is not None:
        kept.named(name)
    save_contexts(msgspec.structs.replace(kept, current=name))
    session.out.result({"current": name}, "no context is in use" if name is None else f"context {name} is in use")


@command(app, "list", has_workspace=False, examples="tidings context list\ntidings context list --json")
def list_contexts(session: Session) -> None:
    """List the contexts; tokens are not shown."""
    kept = load_contexts()
    session.out.listing(
        f"Contexts in {contexts_path()}",
        ("context", "node", "token", "in use"),
        [_shown(name, each, is_current=name == kept.current) for name, each in sorted(kept.contexts.items())],
        lambda each: (
            each["context"],
            each["url"],
            "kept" if each["has_token"] else "-",
            "yes" if each["is_current"] else "",
        ),
        empty="there are no contexts; `tidings context add NAME URL` makes one",
    )


@command(app, "remove", has_workspace=False, examples="tidings context remove shop")
def remove(session: Session, name: NameArgument) -> None:
    """Forget a context and its token."""
    kept = load_contexts()
    kept.named(name)
    others = {each: context for each, context in kept.contexts.items() if each != name}
    save_contexts(Contexts(others, None if kept.current == name else kept.current))
    session.out.result({"removed": name}, f"context {name} is forgotten")


def _shown(name: str, context: SavedNode, *, is_current: bool) -> dict[str, object]:
    return {
        "context": name,
        "url": context.url,
        "has_token": context.token is not None,
        "certificate": context.certificate,
        "is_current": is_current,
    }
