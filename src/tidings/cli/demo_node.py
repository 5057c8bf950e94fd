"""
The demo's node: a thermometer and a household publish, two groups work, errands can be synced, tokens lie ready, and the screen says
what to try.

The secret is made once and kept in the workspace, readable by its owner alone; tokens are made anew at every start. A second run goes
on where the first one was: the log, the groups' places, the dead letters.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tidings.bus.errors import SubscriptionExists
from tidings.bus.events import Ack, ReceivedEvent
from tidings.core.errors import TidingsError
from tidings.core.events import Event
from tidings.log.interface import Log

from .demo_pipeline import pass_and_report
from .serve import need_server, run_node
from .session import Session

if TYPE_CHECKING:
    from tidings.server.node import Node
    from tidings.server.settings import NodeSettings

__all__ = ["serve_demo"]

logger = logging.getLogger(__name__)

PORT: Final = 8787
READINGS: Final = "demo"
HOUSEHOLD: Final = "household"
ERRANDS: Final = "errands/alice"
_PHONE: Final = "alice-phone"
_PACE_S: Final = 2.0
_TOKEN_LIFETIME_S: Final = 30 * 86_400
_CATCH_UP_S: Final = 10.0
_TOO_HOT: Final = 24.0


def serve_demo(
    session: Session,
    count: int,
    port: int | None,
    events: Callable[[Log, int], Any],
    event_at: Callable[[str, int], Event],
    *,
    has_pass: bool = False,
) -> None:
    """
    Run the demo's node until it is signalled.

    Args:
        session: Workspace and output.
        count: How many events to publish at the start.
        port: Where to listen; the usual one, or a free one if that is taken.
        events: Gives the next so many events of the demo.
        event_at: Gives the event at a place of a topic.
        has_pass: Whether the pipeline runs once over it, beside the node.
    """
    need_server()
    secret = _kept_secret(session.workspace)

    async def beside(node: Node) -> None:
        await _subscribe(node)
        await node.bus.publish_many(list(events(node.log, count)))
        await _until_handled(session, node)
        _tell(session, node)
        async with asyncio.TaskGroup() as tasks:
            if has_pass:
                tasks.create_task(pass_and_report(session))
            await _go_on(node)

    async def _go_on(node: Node) -> None:
        while True:
            # A reading every now and then, so that whoever follows has something to see.
            await session.clock.sleep(_PACE_S)
            topics = node.log.topics()
            try:
                await node.bus.publish(event_at(READINGS, topics[READINGS].next_offset if READINGS in topics else 0))
            except TidingsError as error:
                # Somebody plays with the node, and has taken the id or filled the disk: a reading less.
                logger.warning("no reading: %s", error)

    run_node(session, _settings(secret, port), None, beside=beside)


def _settings(secret: str, port: int | None) -> NodeSettings:
    from tidings.server.settings import load_settings

    chosen = port if port is not None else PORT if _is_free(PORT) else 0
    return load_settings(
        environment={},
        overrides={
            "server.port": chosen,
            "access.tokens.secret": secret,
            "log.journal_bytes": 4 << 20,
            "sync.schemas": {
                "errand": {"type": "object", "required": ["text"], "properties": {"text": {"type": "string"}}}
            },
        },
    )


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


async def _subscribe(node: Node) -> None:
    """Two groups: one notes errands, one checks readings and gives up on those that cannot be true."""

    async def note(event: ReceivedEvent) -> Ack:
        return Ack()

    async def check(event: ReceivedEvent) -> Ack:
        celsius = event.payload["celsius"]
        if celsius > _TOO_HOT:
            raise ValueError(f"{celsius} degrees in the {event.payload['room']} cannot be true")
        return Ack()

    try:
        await node.bus.subscribe(HOUSEHOLD, "errand-list", note)
        await node.bus.subscribe(READINGS, "thermostat", check, workers=4, max_retries=1, backoff_base=0.01)
    except SubscriptionExists:  # somebody has joined over the network already: then they do the work
        return


async def _until_handled(session: Session, node: Node) -> None:
    """Wait until the groups have caught up; not for ever, as one may have been paused in an earlier run."""
    started = session.clock.monotonic()
    while session.clock.monotonic() - started < _CATCH_UP_S:
        if not any(node.bus.lag(each.topic, each.group) for each in node.bus.get_subscriptions()):
            return
        await session.clock.sleep(0.02)


# What lies ready


def _kept_secret(workspace: Path) -> str:
    """The workspace's secret; made, for its owner alone, if there is none."""
    path = workspace / "token.secret"
    workspace.mkdir(parents=True, exist_ok=True)
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        secret = secrets.token_urlsafe(48)
        _write_private(path, secret)
        return secret


def _write_private(path: Path, text: str) -> None:
    """A file that nobody else can read, at any moment; whole or not there."""
    fresh = path.with_name(path.name + ".new")
    fresh.unlink(missing_ok=True)
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text + "\n")
    fresh.replace(path)


def _make_tokens(session: Session, node: Node) -> Path:
    from tidings.access.context import TokenClaims
    from tidings.access.tokens import TokenIssuer

    folder = session.workspace / "tokens"
    folder.mkdir(exist_ok=True)
    issuer = TokenIssuer(node.settings.access.tokens, session.clock)
    admin = TokenClaims(roles=frozenset({"admin"}))
    alice = TokenClaims(partitions=frozenset({ERRANDS}), topics=frozenset({HOUSEHOLD}))
    for name, claims, client_id in (("admin", admin, None), ("alice", alice, _PHONE)):
        token = issuer.issue(name, client_id=client_id, claims=claims, lifetime_s=_TOKEN_LIFETIME_S)
        _write_private(folder / name, token)
    return folder


# What the screen says


def _tell(session: Session, node: Node) -> None:
    tokens = _make_tokens(session, node)
    out, url, workspace = session.out, node.url, session.workspace
    if out.is_json:
        out.json({"url": url, "tokens": str(tokens), "seq": node.log.position.seq})
        out.flush()
        return
    topics = [(info.topic, info.next_offset, info.last_seq) for info in node.log.topics().values()]
    out.table("Topics", ("topic", "records>", "last seq>"), topics)
    groups = [(each.topic, each.group, node.bus.lag(each.topic, each.group)) for each in node.bus.get_subscriptions()]
    out.table("Groups", ("topic", "group", "lag>"), groups)
    out.text(
        f"The node serves {url}. Tokens for `admin` and `alice` are in {tokens}. Ctrl-C stops it; another run goes on."
    )
    out.text("")
    out.text("Try next, in another window:")
    for line in _suggestions(url, workspace, tokens):
        out.text(f"  {line}".rstrip())
    out.flush()


def _suggestions(url: str, workspace: Path, tokens: Path) -> list[str]:
    body = (
        '{"meta":{"topic":"household","type":"ERRAND_NOTED","space_id":"person:alice"},"payload":{"errand":"buy tea"}}'
    )
    is_at_hand = shutil.which("tidings") is not None
    tool, python = ("tidings", "python") if is_at_hand else (sys.argv[0], sys.executable)
    return [
        f"export TIDINGS_TOKEN=$(cat {tokens}/admin)",
        "",
        f"curl -s {url}/readyz",
        f"curl -s {url}/v1/events -H \"Authorization: Bearer $TIDINGS_TOKEN\" -H 'Content-Type: application/json' -d '{body}'",
        f"curl -s '{url}/v1/events?topic=household&limit=3&backwards=true' -H \"Authorization: Bearer $TIDINGS_TOKEN\"",
        f'curl -s {url}/v1/dead-letters?topic=demo -H "Authorization: Bearer $TIDINGS_TOKEN"',
        f"{tool} log tail -w {workspace}",
        f"{tool} group list -w {workspace}",
        f"{tool} dlq list demo -w {workspace}",
        "",
        f"{python} - <<'END'",
        "import asyncio, os",
        "from tidings.client.groups import RemoteBus",
        "from tidings.types import Ack",
        "",
        "async def main():",
        f"    async with RemoteBus({url!r}, os.environ['TIDINGS_TOKEN']) as bus:",
        "        async def show(event):",
        "            print(event.payload)",
        "            return Ack()",
        "        await bus.subscribe('demo', 'my-group', show)",
        "        await asyncio.sleep(10)",
        "",
        "asyncio.run(main())",
        "END",
        "",
        f"{python} - <<'END'",
        "import asyncio",
        "from pathlib import Path",
        "from tidings.client import SyncClient",
        "",
        "async def main():",
        f"    token = Path({str(tokens / 'alice')!r}).read_text().strip()",
        "    async with SyncClient(",
        f"        {url.replace('http', 'ws', 1) + '/sync'!r}, token=token, client_id={_PHONE!r},",
        f"        store={str(workspace / 'alice-phone.db')!r}, partitions=[{ERRANDS!r}],",
        "    ) as phone:",
        f"        draft = await phone.submit_fact([{ERRANDS!r}], 'errand', {{'text': 'buy tea'}})",
        "        print(await draft.settled(timeout_s=10))",
        "        print(len(phone.view), 'errands')",
        "",
        "asyncio.run(main())",
        "END",
    ]
