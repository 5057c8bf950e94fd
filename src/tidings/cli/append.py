"""
``tidings log append``: events from the command line, a file or a pipe, with a verdict for each; into the files, or through a node.

A line of input is a whole event if it is an object with ``meta`` and ``payload`` and no other keys than a stored record has; so what
``log export`` and ``log read --json`` print can be appended again. Any other object is a payload. What a line says itself wins over
the options.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final, NamedTuple

import msgspec
import typer

from tidings.core.errors import InvalidEvent, InvalidPayload, InvalidTimestamp, TidingsError
from tidings.core.events import GIVEN_NAMES, Event, EventMeta
from tidings.core.validation import UNREADABLE, refuse_repeated_keys
from tidings.log.interface import Appended, Duplicate, Refused, Verdict

from .administration import Administration, changing
from .output import ExitCode, Output, UsageProblem, as_json
from .session import KeyFileOption, Session, command, parse_time

app = typer.Typer(rich_markup_mode=None)


LINE_BYTES_MAX: Final = 80 << 20
"""The largest payload that any settings allow, and room for its envelope."""
_BLOCK_BYTES: Final = 256 << 10
_BLOCKS_AHEAD_MAX: Final = 4
_GIVEN_BY: Final = {"topic": "TOPIC", "type": "--type TYPE", "space_id": "--space SPACE"}
"""What every event has, and how the command line says it."""
_EXAMPLE: Final = """tidings log append demo --type NOTED --space shared:home --payload '{"text": "hello"}'"""
_RECORD_KEYS: Final = frozenset({"crc", "offset", "seq", "meta", "payload"})


class Line(NamedTuple):
    """One line of input: its number, from 1, and its bytes (``None`` if it was too long to keep)."""

    number: int
    data: bytes | None


class LineSplitter:
    """Cuts blocks of bytes into lines; blank lines are counted and left out. Memory is bounded by one line."""

    def __init__(self, line_bytes_max: int = LINE_BYTES_MAX) -> None:
        self._line_bytes_max = line_bytes_max
        self._rest = bytearray()
        self._is_skipping = False
        self._count = 0

    def feed(self, block: bytes) -> list[Line]:
        """The lines that this block completes."""
        found: list[Line] = []
        *ends, rest = block.split(b"\n")
        for end in ends:
            found += self._complete(end)
        self._keep(rest)
        return found

    def finish(self) -> list[Line]:
        """The last line, if the input does not end with a newline."""
        return self._complete(b"") if self._rest or self._is_skipping else []

    def _complete(self, end: bytes) -> list[Line]:
        self._keep(end)
        self._count += 1
        data = None if self._is_skipping else bytes(self._rest)
        self._rest.clear()
        self._is_skipping = False
        return [] if data is not None and not data.strip() else [Line(self._count, data)]

    def _keep(self, part: bytes) -> None:
        if self._is_skipping or len(self._rest) + len(part) > self._line_bytes_max:
            self._is_skipping = True
            self._rest.clear()
        else:
            self._rest += part


class Defaults(NamedTuple):
    """What the command line says about every event."""

    topic: str | None = None
    type: str | None = None
    space_id: str | None = None
    event_id: str | None = None
    idem_key: str | None = None
    ts: datetime | None = None
    actor: str | None = None
    partitions: tuple[str, ...] = ()
    objects: tuple[str, ...] = ()
    app: str | None = None


def event_of(data: bytes | None, defaults: Defaults, name: str = "line") -> Event:
    """
    The event that a line describes; ``name`` is what a refusal calls it.

    Raises:
        InvalidEvent: It describes none. Further checks are the log's.
    """
    if data is None:
        raise InvalidPayload(name, f"is longer than {LINE_BYTES_MAX} bytes")
    refuse_repeated_keys(data, name)
    try:
        # Keeps whole numbers whole however long they are; the log then refuses those it cannot store.
        value = msgspec.json.decode(data)
    except UNREADABLE as error:
        raise InvalidPayload(name, f"is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidPayload("payload", f"must be a JSON object, not {_kind(value)}")
    if not {"meta", "payload"} <= value.keys() <= _RECORD_KEYS:
        return Event(_meta_of({}, defaults), value)
    if not isinstance(value["meta"], dict):
        raise InvalidEvent("meta", f"must be a JSON object, not {_kind(value['meta'])}")
    return Event(_meta_of(value["meta"], defaults), value["payload"])


def _meta_of(given: dict[str, Any], defaults: Defaults) -> EventMeta:
    if given.get("sealed") is not None:
        raise InvalidPayload("payload", "is sealed", hint="export it with --key-file, so that it can be read")
    # The log sets the time of writing again.
    meta = {key: value for key, value in given.items() if key not in ("written_at", "sealed") and value is not None}
    if unknown := sorted(meta.keys() - set(GIVEN_NAMES)):
        raise InvalidEvent(
            f"meta.{unknown[0]}", "is not a part of the envelope", hint="further keys go into meta.extra"
        )
    if "ts" in meta:
        meta["ts"] = _time_of(meta["ts"])
    for name, value in defaults._asdict().items():
        if value is not None and name not in meta:
            meta[name] = value
    if missing := [name for name in _GIVEN_BY if name not in meta]:
        raise InvalidEvent.missing(
            missing, f"say it in the line, or with {' '.join(_GIVEN_BY[name] for name in missing)}"
        )
    return EventMeta(**meta)


def _time_of(text: object) -> datetime:
    try:
        if isinstance(text, str):
            return datetime.fromisoformat(text)
    except ValueError:
        pass
    raise InvalidTimestamp("meta.ts", f"{text!r} is not a time such as 2026-03-01T12:00:00Z")


def _kind(value: object) -> str:
    names = {"list": "an array", "str": "a string", "NoneType": "null", "bool": "a boolean"}
    return names.get(type(value).__name__, "a number")


async def blocks(source: BinaryIO) -> AsyncIterator[bytes]:
    """
    The source's bytes as they arrive, at most a few blocks ahead of whoever takes them.

    A thread waits for the source, so the event loop is not blocked. It is a daemon that holds no lock of
    Python's, so that Ctrl-C ends the tool while the thread still waits.
    """
    loop = asyncio.get_running_loop()
    arrived: asyncio.Queue[bytes | OSError] = asyncio.Queue()
    room = threading.Semaphore(_BLOCKS_AHEAD_MAX)
    read = _reader_of(source)

    def pump() -> None:
        block: bytes | OSError = b"."
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is waiting any more
            while block and not isinstance(block, OSError):
                room.acquire()
                try:
                    block = read()
                except OSError as error:
                    block = error
                loop.call_soon_threadsafe(arrived.put_nowait, block)

    threading.Thread(target=pump, name="tidings-cli-input", daemon=True).start()
    while block := await arrived.get():
        if isinstance(block, OSError):
            raise block
        yield block
        room.release()


def _reader_of(source: BinaryIO) -> Callable[[], bytes]:
    try:
        fd = source.fileno()
    except (io.UnsupportedOperation, OSError):
        return lambda: source.read(_BLOCK_BYTES)
    return lambda: os.read(fd, _BLOCK_BYTES)


class _Verdicts:
    """Shows and counts verdicts, in the order of the input."""

    def __init__(self, out: Output) -> None:
        self._out = out
        self.counts = {"appended": 0, "duplicate": 0, "refused": 0}

    def add(self, number: int, topic: str, verdict: Verdict) -> None:
        """Count one verdict; show it as JSON, or to people if it is a refusal."""
        shown: dict[str, Any] = {"line": number, **_verdict_dict(topic, verdict)}
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


def _verdict_dict(topic: str, verdict: Verdict) -> dict[str, Any]:
    match verdict:
        case Appended(seq, offset, event_id):
            return {"verdict": "appended", "topic": topic, "offset": offset, "seq": seq, "event_id": event_id}
        case Duplicate(seq, offset, event_id):
            return {"verdict": "duplicate", "topic": topic, "offset": offset, "seq": seq, "event_id": event_id}
        case Refused(error):
            return {"verdict": "refused", "error": as_json(error)}


@command(
    app,
    "append",
    asks_node=True,
    examples=f"""
            {_EXAMPLE}
            tidings log append demo --type NOTED --space shared:home --file payloads.jsonl
            tidings log export --format events | tidings log append demo - -w ./other
        """,
)
async def append(
    session: Session,
    topic: Annotated[
        str | None, typer.Argument(metavar="TOPIC", help="Where to store what does not name a topic of its own.")
    ] = None,
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
    object_: Annotated[
        list[str] | None,
        typer.Option("--object", metavar="TYPE:ID", help="What it is about; may be repeated."),
    ] = None,
    app_: Annotated[str | None, typer.Option("--app", metavar="APP", help="The app that it belongs to.")] = None,
    key_file: KeyFileOption = None,
) -> None:
    """
    Append events, each durable before it is reported.

    Lines are JSON objects: payloads, or whole events {"meta": {...}, "payload": {...}} whose own meta wins
    over the options. A line that is refused is reported with its number and does not stop the others; the
    exit code is then 1.
    """
    if topic == "-" and source is None:
        topic, source = None, "-"
    if source not in (None, "-"):
        raise UsageProblem(f"{source!r} is not understood; only - may follow the topic", "use --file for a file")
    if sum(given is not None for given in (payload, file, source)) != 1:
        raise UsageProblem("give one of --payload, --file and - (stdin)", f"for example `{_EXAMPLE}`")
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
        objects=tuple(object_ or ()),
        app=app_,
    )
    if payload is not None:
        event = event_of(payload.encode(errors="surrogateescape"), defaults, "--payload")
        async with changing(session, key_file=key_file, may_create=True) as admin:
            _show_verdict(session.out, str(event.meta.topic), await admin.append(event))
        return
    with _opened(None if source == "-" or str(file) == "-" else file) as (stream, size):
        async with changing(session, key_file=key_file, may_create=True) as admin:
            report = _Verdicts(session.out)
            await _append_lines(admin, stream, size, defaults, report, session.out)
    report.finish()


def _show_verdict(out: Output, topic: str, verdict: Appended | Duplicate) -> None:
    if out.is_json:
        out.json(_verdict_dict(topic, verdict))
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
    admin: Administration, stream: BinaryIO, size: int | None, defaults: Defaults, report: _Verdicts, out: Output
) -> None:
    splitter = LineSplitter()
    done = 0
    with out.progress("appending (bytes)", size) as advance:
        async for block in blocks(stream):
            await _append_batch(admin, splitter.feed(block), defaults, report, out)
            out.flush()
            done += len(block)
            advance(done)
        await _append_batch(admin, splitter.finish(), defaults, report, out)


async def _append_batch(
    admin: Administration, lines: list[Line], defaults: Defaults, report: _Verdicts, out: Output
) -> None:
    drafts: list[tuple[int, Event | InvalidEvent]] = []
    for line in lines:
        try:
            drafts.append((line.number, event_of(line.data, defaults)))
        except InvalidEvent as error:
            drafts.append((line.number, error))
    events = [draft for _, draft in drafts if isinstance(draft, Event)]
    try:
        verdicts = iter(await admin.append_many(events))
    except TidingsError:
        if events:
            out.note(f"lines {lines[0].number} to {lines[-1].number} got no verdict; send them again with the same ids")
        raise
    for number, draft in drafts:
        if isinstance(draft, Event):
            report.add(number, str(draft.meta.topic), next(verdicts))
        else:
            report.add(number, defaults.topic or "", Refused(draft))
