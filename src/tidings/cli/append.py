"""``tidings log append``: events from the command line, a file or a pipe, with a verdict for each."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import typer

from tidings.core.errors import InvalidEvent, TidingsError
from tidings.core.events import Event
from tidings.log.interface import Appended, Duplicate, Log, Refused, Verdict

from .errors import ExitCode, UsageProblem, as_json
from .items import Defaults, Line, LineSplitter, blocks, event_of
from .output import Output
from .session import KeyFileOption, Session, command
from .values import parse_time

__all__ = ["register"]


class _Report:
    """Tells and counts verdicts, in the order of the input."""

    def __init__(self, out: Output) -> None:
        self._out = out
        self.counts = {"appended": 0, "duplicate": 0, "refused": 0}

    def tell(self, number: int, topic: str, verdict: Verdict) -> None:
        """One item's fate: always as JSON, and for people if it was refused."""
        shown: dict[str, Any] = {"line": number, **_shown(topic, verdict)}
        self.counts[shown["verdict"]] += 1
        if self._out.is_json:
            self._out.json(shown)
        elif isinstance(verdict, Refused):
            self._out.note(f"line {number}: {verdict.error}")

    def finish(self) -> None:
        """The sum, and the exit code that it asks for."""
        if self._out.is_json:
            self._out.json({"summary": self.counts})
        else:
            self._out.text(", ".join(f"{count} {name}" for name, count in self.counts.items()))
        if self.counts["refused"]:
            raise typer.Exit(ExitCode.PROBLEM)


def _shown(topic: str, verdict: Verdict) -> dict[str, Any]:
    match verdict:
        case Appended(seq, offset, event_id):
            return {"verdict": "appended", "topic": topic, "offset": offset, "seq": seq, "event_id": event_id}
        case Duplicate(seq, offset, event_id):
            return {"verdict": "duplicate", "topic": topic, "offset": offset, "seq": seq, "event_id": event_id}
        case Refused(error):
            return {"verdict": "refused", "error": as_json(error)}


def register(app: typer.Typer) -> None:
    """Add the command to its noun."""
    command(
        app,
        "append",
        examples="""
            tidings log append demo --type NOTED --space shared:home --payload '{"text": "hello"}'
            tidings log append demo --type NOTED --space shared:home --file payloads.jsonl
            tidings log export --format events | tidings log append demo - -w ./other
        """,
    )(append)


async def append(
    session: Session,
    topic: Annotated[
        str, typer.Argument(metavar="TOPIC", help="Where to store what does not name a topic of its own.")
    ],
    source: Annotated[str | None, typer.Argument(metavar="-", help="- reads JSON Lines from stdin.")] = None,
    *,
    type_: Annotated[str | None, typer.Option("--type", metavar="TYPE", help="What kind of event it is.")] = None,
    space: Annotated[str | None, typer.Option("--space", metavar="SPACE", help="Whose data it is.")] = None,
    payload: Annotated[str | None, typer.Option("--payload", metavar="JSON", help="One event's payload.")] = None,
    file: Annotated[Path | None, typer.Option("--file", metavar="FILE", help="JSON Lines; - is stdin.")] = None,
    event_id: Annotated[
        str | None, typer.Option("--id", metavar="ID", help="The event's id, for safe retries.")
    ] = None,
    idem_key: Annotated[str | None, typer.Option("--idem-key", metavar="KEY", help="A second dedupe key.")] = None,
    ts: Annotated[str | None, typer.Option("--ts", metavar="TIME", help="When it happened; now if left out.")] = None,
    actor: Annotated[str | None, typer.Option("--actor", metavar="ACTOR", help="Who acted.")] = None,
    partition: Annotated[
        list[str] | None, typer.Option("--partition", metavar="NAME", help="A set it belongs to; may be repeated.")
    ] = None,
    key_file: KeyFileOption = None,
) -> None:
    """
    Append events, each durable before it is reported.

    Lines are JSON objects: payloads, or whole events {"meta": {...}, "payload": {...}} whose own meta wins
    over the options. A line that is refused is reported with its number and does not stop the others; the
    exit code is then 1.
    """
    if source not in (None, "-"):
        raise UsageProblem(f"{source!r} is not understood; only - may follow the topic", "use --file for a file")
    if sum(given is not None for given in (payload, file, source)) != 1:
        raise UsageProblem("give one of --payload, --file and - (stdin)")
    if payload is None and (event_id is not None or idem_key is not None):
        raise UsageProblem("--id and --idem-key name one event, so they need --payload", "put ids into the lines' meta")
    defaults = Defaults(
        topic=topic,
        type=type_,
        space_id=space,
        event_id=event_id,
        idem_key=idem_key,
        ts=None if ts is None else parse_time("--ts", ts, session.clock),
        actor=actor,
        partitions=tuple(partition or ()),
    )
    if payload is not None:
        event = event_of(payload.encode(errors="surrogateescape"), defaults)
        async with session.writing(key_file, may_create=True) as log:
            _tell_one(session.out, topic, await log.append(event))
        return
    with _opened(None if source == "-" or str(file) == "-" else file) as (stream, size):
        async with session.writing(key_file, may_create=True) as log:
            report = _Report(session.out)
            await _append_lines(log, stream, size, defaults, report, session.out)
    report.finish()


def _tell_one(out: Output, topic: str, verdict: Appended | Duplicate) -> None:
    if out.is_json:
        out.json(_shown(topic, verdict))
    elif isinstance(verdict, Appended):
        out.text(f"appended {topic}:{verdict.offset} at seq {verdict.seq}, id {verdict.event_id}")
    else:
        out.text(f"duplicate of {topic}:{verdict.offset} at seq {verdict.seq}; nothing was written")


@contextlib.contextmanager
def _opened(path: Path | None) -> Iterator[tuple[BinaryIO, int | None]]:
    """The input, and its size if it has one. Opened before the log, so that a wrong path makes no workspace."""
    if path is None:
        yield typer.get_binary_stream("stdin"), None
        return
    with path.open("rb") as stream:
        yield stream, os.fstat(stream.fileno()).st_size or None


async def _append_lines(
    log: Log, stream: BinaryIO, size: int | None, defaults: Defaults, report: _Report, out: Output
) -> None:
    splitter = LineSplitter()
    done = 0
    with out.progress("appending (bytes)", size) as advance:
        async for block in blocks(stream):
            await _append_batch(log, splitter.feed(block), defaults, report, out)
            out.flush()
            done += len(block)
            advance(done)
        await _append_batch(log, splitter.finish(), defaults, report, out)


async def _append_batch(log: Log, lines: list[Line], defaults: Defaults, report: _Report, out: Output) -> None:
    drafts: list[tuple[int, Event | InvalidEvent]] = []
    for line in lines:
        try:
            drafts.append((line.number, event_of(line.data, defaults)))
        except InvalidEvent as error:
            drafts.append((line.number, error))
    events = [draft for _, draft in drafts if isinstance(draft, Event)]
    try:
        verdicts = iter(await log.append_many(events))
    except TidingsError:
        if events:
            out.note(f"lines {lines[0].number} to {lines[-1].number} got no verdict; send them again with the same ids")
        raise
    for number, draft in drafts:
        if isinstance(draft, Event):
            report.tell(number, str(draft.meta.topic), next(verdicts))
        else:
            report.tell(number, defaults.topic, Refused(draft))
