"""
``tidings demo``: a node on this machine that receives demo events; with ``--once`` only a log, without a node.

The node serves until it is told to stop. A thermometer and a household publish, two groups handle their events, errands can be synced, and
tokens are ready to use (``dev_keys``).
``--pipeline`` runs the pipeline once, in a process of its own beside the node, with a lower priority, and ends with the node; first it
may have its packages installed (``--pipeline-setup``), which can take longer than anything else.

``--once`` publishes some hundred events to two topics, follows them live, retries one to show that it is stored once, and ends with the
numbers and with commands to try. Running either again continues the same log.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import logging
import os
import random
import shlex
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tidings.bus.errors import SubscriptionExists
from tidings.bus.events import Ack, ReceivedEvent
from tidings.core.errors import TidingsError
from tidings.core.events import Event, EventMeta
from tidings.core.installing import install_line
from tidings.log.interface import Appended, Log, Query
from tidings.log.reading import tail
from tidings.log.record import Record

from . import pasting
from .dev_keys import dev_secret, write_token
from .log import gather_stats, show_stats
from .output import Output, UsageProblem, plain
from .serve import run_node
from .session import Session, command

if TYPE_CHECKING:
    from tidings.server.node import Node
    from tidings.server.settings import NodeSettings

app = typer.Typer(rich_markup_mode=None)


_BATCH: Final = 20
_SHOWN_COUNT: Final = 12
_SHOWN_IN_PIPE: Final = 5
_BATCH_PAUSE_S: Final = 0.12
_ROOMS: Final = ("kitchen", "hall", "study", "attic")
_ERRANDS: Final = ("buy milk", "water the plants", "call the dentist", "post the letter", "fix the lamp")
_PEOPLE: Final = ("alice", "bob", "carol")


@command(
    app,
    "demo",
    examples="tidings demo --workspace ./demo-workspace\ntidings demo --pipeline\ntidings demo --once --count 1000",
    ends_on_interrupt=True,
)
def demo(
    session: Session,
    *,
    count: Annotated[int, typer.Option(min=1, max=100_000, metavar="N", help="How many events to publish.")] = 300,
    is_once: Annotated[
        bool, typer.Option("--once", help="Publish and follow without a node, show what the log holds, and end.")
    ] = False,
    port: Annotated[
        int | None,
        typer.Option(
            "--port", metavar="P", min=0, max=65535, help="Where the node listens; 8787 if left out, or a free one."
        ),
    ] = None,
    has_pipeline: Annotated[
        bool, typer.Option("--pipeline", help="Run the pipeline over it once, beside the node, and write its report.")
    ] = False,
    pipeline_setup: Annotated[
        str | None,
        typer.Option(
            "--pipeline-setup",
            metavar="COMMAND",
            help="With --pipeline: what installs its packages, run beside the node first.",
        ),
    ] = None,
) -> Coroutine[Any, Any, None] | None:
    """
    Run a node on this machine with demo events in the topics `demo` and `household`, two groups, and tokens ready.

    Serves until Ctrl-C or SIGTERM; running it again continues the same log.
    """
    if is_once:
        return _once(session, count)
    if pipeline_setup is not None and not has_pipeline:
        raise UsageProblem("--pipeline-setup is for --pipeline")
    _serve(session, count, port, has_pipeline=has_pipeline, pipeline_setup=pipeline_setup)
    return None


async def _once(session: Session, count: int) -> None:
    async with session.writing(may_create=True) as log:
        before = log.position.seq
        seen = _LiveView(session.out)
        with seen.on_screen():
            await _publish_and_follow(session, log, count, seen)
        retried = await _retry(log)
        last = log.position.seq
    if session.out.is_json:
        summary = {"published": count, "followed": seen.count, "retry": retried, "first_seq": before + 1}
        session.out.json({**summary, "last_seq": last, "workspace": str(session.workspace)})
        return
    session.out.text(f"published {count} events, followed {seen.count} of them live")
    session.out.text(f"published the last reading again: {retried}, so it is stored once")
    show_stats(session.out, await gather_stats(session))
    _suggest(session)


async def _publish_and_follow(session: Session, log: Log, count: int, seen: _LiveView) -> None:
    """Publish in batches while a second reader follows, and wait until it has caught up."""
    start = log.position.seq
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(_follow(log, start, count, seen))
        events = list(_events(log, count))
        for at in range(0, count, _BATCH):
            await log.append_many(events[at : at + _BATCH])
            if session.out.is_terminal:
                await session.clock.sleep(_BATCH_PAUSE_S)


async def _follow(log: Log, since: int, count: int, seen: _LiveView) -> None:
    async for record in tail(log, Query(since=since)):
        seen.take(record)
        if seen.count == count:
            return


def _events(log: Log, count: int) -> Iterator[Event]:
    """Events that continue the topics: the place of an event decides its content, so a retry says the same."""
    topics = log.topics()
    places = {name: topics[name].next_offset if name in topics else 0 for name in (READINGS, HOUSEHOLD)}
    for number in range(count):
        topic = HOUSEHOLD if number % 5 == 4 else READINGS
        yield _event_at(topic, places[topic])
        places[topic] += 1


def _event_at(topic: str, place: int) -> Event:
    """The demo event at a place of a topic."""
    draw = random.Random(f"{topic}/{place}")
    event_id = f"{topic}-{place}"
    if topic == READINGS:
        room = draw.choice(_ROOMS)
        payload: dict[str, Any] = {"room": room, "celsius": round(draw.gauss(20.5, 1.5), 1), "reading": place}
        meta = EventMeta(READINGS, "READING_TAKEN", "shared:home", event_id, actor=f"device:thermometer-{room}")
        return Event(meta, payload)
    who = draw.choice(_PEOPLE)
    payload = {"errand": draw.choice(_ERRANDS), "for": who, "is_done": draw.random() < 0.4}
    meta = EventMeta(HOUSEHOLD, "ERRAND_NOTED", f"person:{who}", event_id, actor=who, partitions=(f"errands/{who}",))
    return Event(meta, payload)


async def _retry(log: Log) -> str:
    place = log.topics()[READINGS].next_offset - 1
    verdict = await log.append(_event_at(READINGS, place))
    return "appended" if isinstance(verdict, Appended) else f"duplicate of seq {verdict.seq}"


class _LiveView:
    """What was followed: the last few on a terminal, the first few in a pipe, counted either way."""

    def __init__(self, out: Output) -> None:
        self.count = 0
        self._out = out
        self._latest: deque[Record] = deque(maxlen=_SHOWN_COUNT)
        self._refresh: Callable[[], None] = lambda: None

    @contextlib.contextmanager
    def on_screen(self) -> Iterator[None]:
        """Show the records on a terminal, within this."""
        if self._out.is_json or not self._out.is_terminal:
            yield
            return
        with Live(self._drawn(), console=self._out.console, refresh_per_second=12) as live:
            self._refresh = lambda: live.update(self._drawn())
            yield
            live.update(self._drawn(), refresh=True)

    def take(self, record: Record) -> None:
        """One more record has arrived."""
        self.count += 1
        self._latest.append(record)
        self._refresh()
        if not self._out.is_json and not self._out.is_terminal and self.count <= _SHOWN_IN_PIPE:
            self._out.record(record)

    def _drawn(self) -> Group:
        table = Table(title="Live tail", title_justify="left", title_style="bold", expand=True)
        for name, justify in (("seq", "right"), ("topic", "left"), ("type", "left"), ("space", "left")):
            table.add_column(name, justify="right" if justify == "right" else "left", no_wrap=True)
        table.add_column("payload", no_wrap=True, overflow="ellipsis", ratio=1)
        for record in self._latest:
            payload = Text(plain(bytes(record.payload_json).decode()), style="dim")
            meta = record.meta
            table.add_row(str(record.seq), f"{meta.topic}:{record.offset}", meta.type, meta.space_id, payload)
        return Group(table, Text(f"{self.count} events, each on disk before it is shown", style="dim"))


def _suggest(session: Session) -> None:
    tool, where = pasting.tool(), f"-w {pasting.shown(session.workspace)}"
    session.out.text("")
    session.out.text("Try next; the first one has more to show when the demo runs again in another window:")
    for line in (
        f"{tool} log tail {where}",
        f"{tool} log read demo --last 5 {where}",
        f"{tool} log read --partition errands/alice {where} --json",
        f"{tool} topic show demo {where}",
        f"{tool} log verify {where}",
    ):
        session.out.text(line)


logger = logging.getLogger(__name__)

PORT: Final = 8787
READINGS: Final = "demo"
HOUSEHOLD: Final = "household"
ERRANDS: Final = "errands/alice"
_PHONE: Final = "alice-phone"
_READING_PAUSE_S: Final = 2.0
_CATCH_UP_S: Final = 10.0
_TOO_HOT: Final = 24.0


def _serve(session: Session, count: int, port: int | None, *, has_pipeline: bool, pipeline_setup: str | None) -> None:
    """Run the demo's node until it is signalled."""
    importlib.import_module("tidings.server.node")  # where the extra `server` is missing, before anything is written
    settings = _settings(session, port)

    async def beside(node: Node) -> None:
        await _subscribe(node)
        await node.bus.publish_many(list(_events(node.log, count)))
        await _wait_for_groups(session, node)
        _show_start(session, node)
        async with asyncio.TaskGroup() as tasks:
            if has_pipeline:
                tasks.create_task(_run_pipeline(session, pipeline_setup))
            await publish_readings(node)

    async def publish_readings(node: Node) -> None:
        """A reading every now and then, so that whoever follows has something to see."""
        while True:
            await session.clock.sleep(_READING_PAUSE_S)
            topics = node.log.topics()
            try:
                await node.bus.publish(_event_at(READINGS, topics[READINGS].next_offset if READINGS in topics else 0))
            except TidingsError as error:
                # A user of the node has taken the id, or the disk is full.
                logger.warning("no reading: %s", error)

    run_node(session, settings, None, is_dev=True, beside=beside)


def _settings(session: Session, port: int | None) -> NodeSettings:
    from tidings.server.settings import load_settings

    chosen = port if port is not None else PORT if _is_free(PORT) else 0
    if chosen != port and not chosen:
        session.out.note(f"port {PORT} is taken by another process, so the node takes a free one; --port N chooses")
    return load_settings(
        environment={},
        overrides={
            "server.port": chosen,
            "access.tokens.secret": dev_secret(session.workspace),
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
    # That it does is what is to be shown, by `dlq list`; a screen full of tracebacks would look like a demo that is broken.
    logging.getLogger("tidings.bus.failures").setLevel(logging.CRITICAL)

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


async def _wait_for_groups(session: Session, node: Node) -> None:
    """Wait until the groups have caught up; not for ever, as one may have been paused in an earlier run."""
    started = session.clock.monotonic()
    while session.clock.monotonic() - started < _CATCH_UP_S:
        if not any(node.bus.lag(each.topic, each.group) for each in node.bus.get_subscriptions()):
            return
        await session.clock.sleep(0.02)


# What the screen says


def _show_start(session: Session, node: Node) -> None:
    from tidings.access.context import TokenClaims

    admin = session.layout.dev_token
    may = TokenClaims(partitions=frozenset({ERRANDS}), topics=frozenset({HOUSEHOLD}))
    tokens = node.settings.access.tokens
    alice = write_token(session.workspace, tokens, session.clock, subject="alice", client_id=_PHONE, claims=may)
    out, url = session.out, node.url
    if out.is_json:
        out.json({"url": url, "token_file": str(admin), "alice_token_file": str(alice), "seq": node.log.position.seq})
        out.flush()
        return
    topics = [(info.topic, info.next_offset, info.last_seq) for info in node.log.topics().values()]
    out.table("Topics", ("topic", "records>", "last seq>"), topics)
    groups = [(each.topic, each.group, node.bus.lag(each.topic, each.group)) for each in node.bus.get_subscriptions()]
    out.table("Groups", ("topic", "group", "lag>"), groups)
    out.text(f"The node serves {url}, which is also its page. Ctrl-C stops it; another run continues the same log.")
    out.text(
        "Some readings cannot be true, and the group `thermostat` gives them up: they are dead letters (`dlq list`)."
    )
    out.text("")
    out.text("Try next, in another window, in this folder:")
    out.text("")
    for line in _suggestions(url, session.workspace, admin, alice):  # not indented: a program must not be
        out.text(line)
    out.flush()


def _suggestions(url: str, workspace: Path, admin: Path, alice: Path) -> list[str]:
    tool, python, where = pasting.tool(), pasting.python(), f"-w {pasting.shown(workspace)}"
    export, *curls = pasting.requests(
        url,
        admin,
        topic=HOUSEHOLD,
        event_type="ERRAND_NOTED",
        space="person:alice",
        payload='{"errand":"buy tea"}',
    )
    return [
        export,
        "",
        f"curl -s {url}/readyz",
        *curls,
        f"curl -s '{url}/v1/dead-letters?topic=demo' -H \"Authorization: Bearer $TIDINGS_TOKEN\"",
        f"{tool} log tail {where}",
        f"{tool} group list {where}",
        f"{tool} dlq list demo {where}",
        "",
        f"{python} - <<'END'",
        "import asyncio, os",
        "from tidings import Client",
        "from tidings.types import Ack",
        "",
        "async def main():",
        f"    async with Client({url!r}, os.environ['TIDINGS_TOKEN']) as bus:",
        "        async def show(event):",
        "            print(event.payload)",
        "            return Ack()",
        "        await bus.subscribe('demo', 'my-group', show, start='latest')",
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
        f"    token = Path({str(alice)!r}).read_text().strip()",
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


_REPORT: Final = "report.html"
_PIPELINE_PACKAGES: Final = ("pyspark", "duckdb", "deltalake", "pyarrow")
_NICENESS: Final = 10
_END_S_MAX: Final = 5.0


async def _run_pipeline(session: Session, setup: str | None) -> None:
    """Bring the tables up to the log, write the report, and say where it is; or say in a line why not."""
    out, workspace = session.out, session.workspace
    if setup is not None:
        if not out.is_json and not _has_pipeline():
            out.text(
                "Spark and the rest of the pipeline are being installed beside the node; that can take some minutes."
            )
            out.flush()
        code, said = await _run_beside(*shlex.split(setup), is_shown=not out.is_json)
        if code:
            out.note(f"the pipeline does not run: its set-up ended with exit code {code}{said}; the node keeps running")
            return
        importlib.invalidate_caches()
    if not _has_pipeline():
        out.note(f"the pipeline does not run: its packages are not installed; {install_line('pipeline')}")
        return
    if not out.is_json:
        out.text("The pipeline runs once over these events, beside the node; the address of its report follows.")
        out.flush()
    where = ("--workspace", str(workspace))
    page = workspace / _REPORT
    for words in (("run", "--once", *where), ("report", "--output", str(page), *where)):
        command = (sys.executable, "-m", "tidings.cli", "pipeline", *words)
        code, said = await _run_beside(*command, is_shown=not out.is_json)
        if code:
            out.note(f"the pipeline ended early (exit code {code}){said}; the node keeps running")
            return
    uri = page.resolve().as_uri()
    if out.is_json:
        out.json({"report": uri})
    else:
        out.text(f"The report of the pipeline is at {uri}. For a fresh one: {_again(workspace)}")
    out.flush()


def _again(workspace: Path) -> str:
    tool, where = pasting.tool(), f"-w {pasting.shown(workspace)}"
    return f"{tool} pipeline run {where} && {tool} pipeline report -o {pasting.shown(workspace / _REPORT)} {where}"


def _has_pipeline() -> bool:
    return all(importlib.util.find_spec(name) is not None for name in _PIPELINE_PACKAGES)


async def _run_beside(*command: str, is_shown: bool) -> tuple[int, str]:
    """Run a command to its end; its exit code, and what it said if nobody saw it."""
    nowhere = asyncio.subprocess.DEVNULL
    # A session of its own: Ctrl-C is for the node, which ends this in turn. Its bars reach the terminal all the same.
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=nowhere,
        stdout=None if is_shown else nowhere,
        stderr=None if is_shown else asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        with contextlib.suppress(ProcessLookupError):
            os.setpriority(os.PRIO_PGRP, process.pid, _NICENESS)
        _, errors = await process.communicate()
    finally:
        await _end_process(process)
    said = (errors or b"").decode(errors="replace").strip()
    return process.returncode or 0, f": {said[-400:]}" if said else ""


async def _end_process(process: Any) -> None:
    """See that the process and those it started are gone, whatever ended the wait for it."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), _END_S_MAX)
