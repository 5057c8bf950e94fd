"""
``tidings serve``: a node on a workspace, until it is told to stop.

With ``--dev`` it is one to try things with: this machine only, with a secret and a token of its own (``dev_keys``), and with lines to paste.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer

from tidings.log.encryption import AesGcmEncryptor
from tidings.log.errors import WorkspaceBusy, WorkspaceMissing
from tidings.log.keys import KeyFile

from . import pasting
from .dev_keys import dev_secret, write_token
from .output import UsageProblem
from .session import WORKSPACE_DEFAULT, KeyFileOption, Session, command

if TYPE_CHECKING:
    from tidings.server.node import Node
    from tidings.server.settings import NodeSettings

app = typer.Typer(rich_markup_mode=None)


ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", envvar="TIDINGS_CONFIG", help="Settings, as TOML."),
]
HostOption = Annotated[str | None, typer.Option("--host", metavar="H", help="Listen here; 127.0.0.1 if left out.")]
PortOption = Annotated[
    int | None, typer.Option("--port", metavar="P", min=0, max=65535, help="8787 if left out; 0 takes a free one.")
]
UnixOption = Annotated[
    Path | None, typer.Option("--unix", metavar="PATH", help="Listen on this Unix socket as well, for this user.")
]
StewardOption = Annotated[
    Path | None,
    typer.Option(
        "--steward-socket", metavar="PATH", help="Open the steward's Unix socket here, for clients of the ledger."
    ),
]


@command(
    app,
    "serve",
    examples="""
        tidings serve --dev
        tidings serve --workspace ./workspace
        tidings serve --port 9000 --config node.toml
        tidings serve --steward-socket /run/tidings/steward.sock
        tidings serve --config node.toml --print-settings
    """,
    ends_on_interrupt=True,
)
def serve(
    session: Session,
    *,
    is_dev: Annotated[
        bool,
        typer.Option(
            "--dev",
            help="To try things: this machine only, with a secret and a token made for you, and lines to paste.",
        ),
    ] = False,
    host: HostOption = None,
    port: PortOption = None,
    config: ConfigOption = None,
    unix: UnixOption = None,
    steward_socket: StewardOption = None,
    key_file: KeyFileOption = None,
    print_settings: Annotated[
        bool, typer.Option("--print-settings", help="Show the settings that would hold, without secrets, and end.")
    ] = False,
) -> None:
    """
    Run a node: HTTP and WebSocket on one port, over the workspace's log.

    Settings come from the file, then from TIDINGS_SECTION__KEY in the environment, then from these options.
    SIGTERM and Ctrl-C stop it in order, a second one at once; SIGHUP reads the settings again.
    """
    from tidings.server.monitoring import is_loopback
    from tidings.server.settings import load_settings, printable

    overrides = {
        "server.host": host,
        "server.port": port,
        "server.unix_path": None if unix is None else str(unix),
        "steward.socket_path": None if steward_socket is None else str(steward_socket),
    }
    defaults = _of_workspace(session)

    def load() -> NodeSettings:
        return load_settings(config, overrides=overrides, defaults=defaults)

    settings = load()
    if is_dev and not is_loopback(settings.server.host):
        raise UsageProblem(
            f"--dev is for this machine only, and {settings.server.host} can be reached from others",
            "leave out --host; for others: a secret of your own and TLS, and no --dev",
        )
    if print_settings:
        session.out.result(printable(settings), as_toml(printable(settings)))
        return
    if is_dev:
        defaults["access.tokens.secret"] = dev_secret(session.workspace)
        settings = load()
    try:
        run_node(session, settings, load, key_file=key_file, is_dev=is_dev)
    except WorkspaceBusy as error:
        if error.node_url is not None:
            error.hint = (
                f"a node serves it at {error.node_url}: use that, or stop it first; -w DIR serves another folder"
            )
        raise


def run_node(
    session: Session,
    settings: NodeSettings,
    load: Callable[[], NodeSettings] | None,
    *,
    key_file: Path | None = None,
    is_dev: bool = False,
    beside: Callable[[Node], Coroutine[Any, Any, None]] | None = None,
) -> None:
    """
    Run a node in this process until it is signalled.

    Args:
        session: Where its workspace is, and where to say that it is up.
        settings: Its settings.
        load: Reads them again, for SIGHUP.
        key_file: Keys of the spaces that are sealed.
        is_dev: Whether to leave a token for the tools of this user in the workspace.
        beside: What to do with it while it serves; without it a node to try things with says what can be done with it.
    """
    import uvloop

    from tidings.server.lifecycle import serve_until_signalled, tune_process
    from tidings.server.monitoring import node_logging
    from tidings.server.node import Node

    async def work() -> None:
        encryptor = None if key_file is None else AesGcmEncryptor(KeyFile(key_file))
        node = Node(session.workspace, settings, clock=session.clock, encryptor=encryptor, is_dev=is_dev)
        token_file = write_token(session.workspace, settings.access.tokens, session.clock) if is_dev else None

        async def started() -> None:
            tune_process()
            if session.out.is_json:
                facts = {"url": node.url, "unix": settings.server.unix_path, "seq": node.log.position.seq}
                session.out.json({**facts, "token_file": None if token_file is None else str(token_file)})
                session.out.flush()
            if beside is not None:
                await beside(node)
            elif token_file is not None and not session.out.is_json:
                _show_dev(session, node.url, token_file)

        await serve_until_signalled(node, load, beside=started)

    with node_logging(settings.server), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work())


def _show_dev(session: Session, url: str, token_file: Path) -> None:
    """What can be pasted, and what such a node is not for."""
    workspace = "" if session.workspace == WORKSPACE_DEFAULT else f" -w {pasting.shown(session.workspace)}"
    lines = pasting.requests(
        url,
        token_file,
        topic="orders",
        event_type="ORDER_PLACED",
        space="shared:shop",
        payload='{"number":1,"cents":1250}',
    )
    # What stands behind # goes to no server, and the page takes it out of the address; a file or a log does not get it.
    page = f"{url}/#token={token_file.read_text().strip()}" if session.out.is_terminal else url
    session.out.text(f"A node to try things with. Its page, with everything that it answers to: {page}")
    session.out.text(
        f"Not for other machines, nor for data that matters: whoever reads {pasting.shown(token_file.parent)} may do everything."
        " Ctrl-C stops it; the next start goes on with the same log and secret."
    )
    session.out.text("")
    session.out.text("Paste into another window, in this folder:")
    session.out.text("")
    for line in (*lines, f"{pasting.tool()} log tail{workspace}"):
        session.out.text(line)
    session.out.flush()


def _of_workspace(session: Session) -> dict[str, object]:
    """What an existing workspace has decided already."""
    try:
        return {"log.layout": session.settings().layout}
    except WorkspaceMissing:
        return {}


def as_toml(tree: dict[str, Any], path: tuple[str, ...] = ()) -> str:
    """Settings as TOML, for people; what is not set is a comment."""
    lines: list[str] = []
    tables: list[tuple[str, dict[str, Any]]] = []
    for name, value in tree.items():
        if isinstance(value, dict):
            tables.append((name, value))
        elif value is None:
            lines.append(f"# {_key(name)} is not set")
        else:
            lines.append(f"{_key(name)} = {orjson.dumps(value).decode()}")
    text = "\n".join(lines)
    for name, value in tables:
        inner = (*path, name)
        text += f"\n\n[{'.'.join(map(_key, inner))}]\n{as_toml(value, inner)}"
    return text.strip()


def _key(name: str) -> str:
    return name if name.replace("_", "").replace("-", "").isalnum() and name.isascii() else orjson.dumps(name).decode()
