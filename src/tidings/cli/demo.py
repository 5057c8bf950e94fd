"""
``tidings demo``: a node with something going on, or with ``--once`` just a log that fills while you watch.

The node (``demo_node``) serves until it is told to stop. ``--once`` publishes some hundred events to two topics, follows them live,
retries one to show that it is stored once, and ends with the numbers and with commands to try. Running either again goes on where
it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from typing import Annotated, Any, Final

import typer
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tidings.core.events import Event, EventMeta
from tidings.log.interface import Appended, Log, Query
from tidings.log.reading import tail
from tidings.log.record import Record

from .demo_node import HOUSEHOLD, READINGS, serve_demo
from .output import Output, plain
from .session import Session, command
from .stats import gather_stats, show_stats

__all__ = ["register"]

_BATCH: Final = 20
_SHOWN_COUNT: Final = 12
_SHOWN_IN_PIPE: Final = 5
_PACE_S: Final = 0.12
_ROOMS: Final = ("kitchen", "hall", "study", "attic")
_ERRANDS: Final = ("buy milk", "water the plants", "call the dentist", "post the letter", "fix the lamp")
_PEOPLE: Final = ("alice", "bob", "carol")


def register(app: typer.Typer) -> None:
    """Add the command to the tool."""
    examples = "tidings demo --workspace ./demo-workspace\ntidings demo --pipeline\ntidings demo --once --count 1000"
    command(app, "demo", examples=examples, ends_on_interrupt=True)(demo)


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
    has_pass: Annotated[
        bool, typer.Option("--pipeline", help="Run the pipeline over it once, beside the node, and write its report.")
    ] = False,
) -> Coroutine[Any, Any, None] | None:
    """
    Run a node on this machine with demo events in the topics `demo` and `household`, two groups, and tokens ready.

    Serves until Ctrl-C or SIGTERM; running it again goes on where it was.
    """
    if is_once:
        return _once(session, count)
    serve_demo(session, count, port, _events, event_at, has_pass=has_pass)
    return None


async def _once(session: Session, count: int) -> None:
    async with session.writing(may_create=True) as log:
        before = log.position.seq
        seen = _Seen(session.out)
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


async def _publish_and_follow(session: Session, log: Log, count: int, seen: _Seen) -> None:
    """Publish in batches while a second reader follows, and wait until it has caught up."""
    start = log.position.seq
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(_follow(log, start, count, seen))
        for batch in _batches(_events(log, count)):
            await log.append_many(batch)
            if session.out.is_terminal:
                await session.clock.sleep(_PACE_S)


async def _follow(log: Log, since: int, count: int, seen: _Seen) -> None:
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
        yield event_at(topic, places[topic])
        places[topic] += 1


def event_at(topic: str, place: int) -> Event:
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


def _batches(events: Iterator[Event]) -> Iterator[list[Event]]:
    batch: list[Event] = []
    for event in events:
        batch.append(event)
        if len(batch) == _BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


async def _retry(log: Log) -> str:
    place = log.topics()[READINGS].next_offset - 1
    verdict = await log.append(event_at(READINGS, place))
    return "appended" if isinstance(verdict, Appended) else f"duplicate of seq {verdict.seq}"


class _Seen:
    """What was followed: the last few on a terminal, the first few in a pipe, counted either way."""

    def __init__(self, out: Output) -> None:
        self.count = 0
        self._out = out
        self._latest: deque[Record] = deque(maxlen=_SHOWN_COUNT)
        self._refresh: Callable[[], None] = lambda: None

    @contextlib.contextmanager
    def on_screen(self) -> Iterator[None]:
        """Show what is taken while it lasts."""
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
    where = f"-w {session.workspace}"
    session.out.text("")
    session.out.text("Try next:")
    for line in (
        f"tidings log tail {where}                      (then run the demo again in another window)",
        f"tidings log read demo --last 5 {where}",
        f"tidings log read --partition errands/alice {where} --json",
        f"tidings topic show demo {where}",
        f"tidings log verify {where}",
    ):
        session.out.text(f"  {line}")
