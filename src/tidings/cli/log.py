"""
``tidings log`` (read, tail, export, stats) and ``tidings topic``: reading the log, also while another process writes it.

An export's range is fixed before the first record is read, so a writer that goes on does not make it longer. An exported file appears
complete or not at all: it is written beside its place, synced and renamed.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import orjson
import typer

from tidings.core.names import check_topic
from tidings.log.embedded.disk import OsDisk
from tidings.log.errors import SealedPayload
from tidings.log.interface import Query, ReadableLog, TopicInfo
from tidings.log.reading import last as last_records
from tidings.log.reading import records
from tidings.log.reading import tail as tail_records
from tidings.log.record import Record

from .append import app as append_app
from .maintenance import app as maintenance_app
from .output import Output, UsageProblem, human_bytes
from .session import AnyTopicArgument, KeyFileOption, Session, TopicArgument, command, known_topic, parse_time

app = typer.Typer(help="Append to, read and look after the log.", rich_markup_mode=None)
app.add_typer(append_app)
app.add_typer(maintenance_app)
topic_app = typer.Typer(help="Look at topics.", rich_markup_mode=None)


_LAST_COUNT_MAX = 100_000

PartitionOption = Annotated[
    list[str] | None,
    typer.Option("--partition", metavar="NAME", help="Only records that name this set; may be repeated."),
]
RawOption = Annotated[bool, typer.Option("--raw", help="Only the payloads, byte for byte as stored, one a line.")]


@command(
    app,
    "read",
    asks_node=True,
    examples="""
            tidings log read demo --last 10
            tidings log read --since 1000 --until 2000 --json
            tidings log read demo --from-time 15m --raw | jq .text
        """,
)
async def read(
    session: Session,
    topic: AnyTopicArgument = None,
    *,
    from_offset: Annotated[int | None, typer.Option(min=0, metavar="N", help="From this offset of the topic.")] = None,
    since: Annotated[int | None, typer.Option(min=0, metavar="SEQ", help="After this seq.")] = None,
    until: Annotated[int | None, typer.Option(min=0, metavar="SEQ", help="Up to and including this seq.")] = None,
    from_time: Annotated[
        str | None, typer.Option(metavar="TIME", help="Written at this time or later: a time, a date, or 15m, 2h, 7d.")
    ] = None,
    to_time: Annotated[str | None, typer.Option(metavar="TIME", help="Written before this time.")] = None,
    partition: PartitionOption = None,
    last: Annotated[
        int | None, typer.Option(min=0, max=_LAST_COUNT_MAX, metavar="N", help="The last N records.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=0, metavar="N", help="At most N records.")] = None,
    is_raw: RawOption = False,
    key_file: KeyFileOption = None,
) -> None:
    """
    Read records that are committed now, oldest first.

    Reading needs no pause of the writer. If records that a lower bound asks for were dropped, the command
    says so (exit code 1) and reads nothing.
    """
    bounds = (from_offset, since, until, from_time, to_time, limit)
    if last is not None and any(bound is not None for bound in bounds):
        raise UsageProblem("--last cannot be combined with bounds or --limit, which count from the oldest record")
    if from_offset is not None and topic is None:
        raise UsageProblem("--from-offset needs a topic: offsets count within one")
    query = Query(
        topic=None if topic is None else check_topic(topic),
        partitions=tuple(partition or ()),
        since=since,
        until=until,
        from_offset=from_offset,
        from_time=None if from_time is None else parse_time("--from-time", from_time, session.clock),
        to_time=None if to_time is None else parse_time("--to-time", to_time, session.clock),
    )
    async with session.reading(key_file) as log:
        if topic is not None:
            known_topic(log, topic)
        count = 0
        async for record in _last(log, last, query) if last is not None else records(log, query):
            if limit is not None and count >= limit:
                break
            _show_record(session.out, record, is_raw=is_raw)
            count += 1
    if not count:
        session.out.note("there are no such records")


@command(
    app,
    "tail",
    asks_node=True,
    ends_on_interrupt=True,
    examples="""
            tidings log tail
            tidings log tail demo --last 20
            tidings log tail demo --from-start --json | jq .payload
        """,
)
async def tail(
    session: Session,
    topic: AnyTopicArgument = None,
    *,
    is_from_start: Annotated[bool, typer.Option("--from-start", help="Begin with the oldest record kept.")] = False,
    last: Annotated[
        int | None, typer.Option(min=0, max=_LAST_COUNT_MAX, metavar="N", help="Begin with the last N records.")
    ] = None,
    partition: PartitionOption = None,
    is_raw: RawOption = False,
    key_file: KeyFileOption = None,
) -> None:
    """
    Show records as they are committed, until Ctrl-C (exit code 0).

    Each record is passed on at once. A topic need not exist yet.
    """
    if is_from_start and last is not None:
        raise UsageProblem("--from-start and --last are two places to begin; give one")
    query = Query(topic=None if topic is None else check_topic(topic), partitions=tuple(partition or ()))
    async with session.reading(key_file) as log:
        async for record in _follow(log, query, is_from_start, last or 0):
            _show_record(session.out, record, is_raw=is_raw)
            session.out.flush()


async def _follow(log: ReadableLog, query: Query, is_from_start: bool, last: int) -> AsyncIterator[Record]:
    """The records to begin with, then every later one: the border is a seq, so none is missed or shown twice."""
    if is_from_start:
        async for record in tail_records(log, query):
            yield record
        return
    border = log.position.seq
    async for record in _last(log, last, query):
        if record.seq <= border:
            yield record
    bounded = Query(topic=query.topic, partitions=query.partitions, since=border)
    async for record in tail_records(log, bounded):
        yield record


async def _last(log: ReadableLog, count: int, query: Query) -> AsyncIterator[Record]:
    for record in await last_records(log, count, query.topic, query.partitions):
        yield record


def _show_record(out: Output, record: Record, *, is_raw: bool) -> None:
    if is_raw:
        out.raw(bytes(record.payload_json))
    else:
        out.record(record)


class _LineFormat(enum.StrEnum):
    """What a line of the export is."""

    JSONL = "jsonl"
    EVENTS = "events"


@command(
    app,
    "export",
    asks_node=True,
    examples="""
            tidings log export -o everything.jsonl
            tidings log export --topic demo --since 1000 --until 2000
            tidings log export --format events -o events.jsonl --key-file keys.json
        """,
)
async def export(
    session: Session,
    *,
    format_: Annotated[
        _LineFormat,
        typer.Option(
            "--format", metavar="FORMAT", help="jsonl: records as committed; events: without their places, to append."
        ),
    ] = _LineFormat.JSONL,
    topic: Annotated[str | None, typer.Option("--topic", metavar="TOPIC", help="Only this topic.")] = None,
    since: Annotated[int, typer.Option(min=0, metavar="SEQ", help="After this seq; 0 is the oldest record kept.")] = 0,
    until: Annotated[
        int | None, typer.Option(min=0, metavar="SEQ", help="Up to and including this seq; now if left out.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write here instead of stdout.")
    ] = None,
    key_file: KeyFileOption = None,
) -> None:
    """
    Write a range of the log, the same bytes every time for the same range.

    Lines come in seq order. Without --key-file sealed payloads stay sealed; the events format refuses them,
    as nobody could append them. If records of the range were dropped already, nothing is written. Through a node the export holds what its
    token may read.
    """
    async with session.reading(key_file) as log:
        if topic is not None:
            known_topic(log, check_topic(topic))
        position = log.position
        pinned = position.seq if until is None else min(until, position.seq)
        # From the beginning means the oldest kept; a bound of 0 would ask for what retention dropped, too.
        query = Query(topic=topic, since=since or None, until=pinned)
        sums = _ExportSums()
        with _export_target(session.out, output) as write, session.out.progress("exporting", pinned - since) as advance:
            async for record in records(log, query):
                line = _exported_line(record, format_)
                write(line)
                sums.add(line)
                if sums.records % 500 == 0:
                    advance(record.seq - since)
    _show_export(session.out, output, {"epoch": position.epoch, "since": since, "until": pinned, **sums.shown()})


class _ExportSums:
    """What was written, so that two exports can be compared without their files."""

    def __init__(self) -> None:
        self.records = 0
        self.size = 0
        self._digest = hashlib.sha256()

    def add(self, line: bytes) -> None:
        self.records += 1
        self.size += len(line) + 1
        self._digest.update(line + b"\n")

    def shown(self) -> dict[str, Any]:
        return {"records": self.records, "bytes": self.size, "sha256": self._digest.hexdigest()}


def _exported_line(record: Record, format_: _LineFormat) -> bytes:
    if format_ is _LineFormat.JSONL:
        return record.to_json()
    meta: dict[str, Any] = msgspec.to_builtins(record.meta)
    meta.pop("written_at")
    if record.meta.sealed is not None:
        raise SealedPayload(record.meta.space_id, record.meta.sealed.key)
    return orjson.dumps({"meta": meta, "payload": orjson.Fragment(bytes(record.payload_json))})


@contextlib.contextmanager
def _export_target(out: Output, path: Path | None) -> Iterator[Callable[[bytes], object]]:
    if path is None:
        yield out.raw
        return
    fresh = path.with_name(path.name + ".part")
    try:
        with fresh.open("wb") as file:
            yield lambda line: file.write(line + b"\n")
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


def _show_export(out: Output, path: Path | None, summary: dict[str, Any]) -> None:
    if path is not None and out.is_json:
        out.json({"file": str(path), **summary})
        return
    size = human_bytes(summary["bytes"])
    out.note(
        f"{summary['records']} records ({size}) after seq {summary['since']} up to {summary['until']},"
        f" sha256 {summary['sha256']}"
    )


@command(app, "stats", asks_node=True, examples="tidings log stats\ntidings log stats --json | jq .last_seq")
async def stats(session: Session) -> None:
    """
    Show what the log holds: topics, records, sizes, seqs, times; of one in files also its writer, its index and its journal.

    Through a node it is what its token may read.
    """
    found = await gather_stats(session)
    if session.out.is_json:
        session.out.json(found)
    else:
        show_stats(session.out, found)


async def gather_stats(session: Session) -> dict[str, Any]:
    """The numbers, as plain values. For a log that this process does not have open."""
    of_files = {} if session.node is not None else _file_stats(session)
    async with session.reading(has_segments=True) as log:
        position, infos = log.position, log.topics().values()
    topics = [topic_facts(info) for info in infos]
    segments = [segment for info in infos for segment in info.segments if segment.lines]
    return {
        **({} if session.node is None else {"node": session.node.url}),
        "epoch": position.epoch,
        "records": sum(topic["records"] for topic in topics),
        "bytes": sum(topic["bytes"] for topic in topics),
        "segments": sum(topic["segments"] for topic in topics),
        "first_seq": min((topic["first_seq"] for topic in topics if topic["records"]), default=0),
        "last_seq": position.seq,
        "oldest": min((segment.first_written_at for segment in segments), default=None),
        "newest": max((segment.last_written_at for segment in segments), default=None),
        **of_files,
        "topics": topics,
    }


def _file_stats(session: Session) -> dict[str, Any]:
    """What the files tell beside the records. Before the log is opened: LMDB allows one handle of the index a process."""
    layout, settings = session.layout, session.settings()
    meta = layout.read_meta(OsDisk())
    with session.index() as index:
        found = None if index is None else index.stats()
    return {
        "workspace": str(session.workspace),
        "format": meta.format,
        "layout": settings.layout,
        "created_at": meta.created_at,
        "writer": session.writer(),
        "index": None
        if found is None
        else {
            "covers": found.covers,
            "entries": found.entries,
            "partitions": found.partitions,
            "bytes": found.size_bytes,
        },
        "journal_bytes": _bytes_below(layout.journal),
        "aside_bytes": _bytes_below(layout.aside),
    }


def topic_facts(info: TopicInfo) -> dict[str, Any]:
    """One topic's numbers, as plain values."""
    in_spaces = any(segment.space_id is not None for segment in info.segments)
    # Offsets are dense in a topic's one stream, and count what has not reached its segment yet.
    records = sum(segment.lines for segment in info.segments) if in_spaces else info.next_offset - info.first_offset
    return {
        "topic": info.topic,
        "records": records,
        "bytes": info.size_bytes,
        "segments": len(info.segments),
        "first_offset": info.first_offset,
        "next_offset": info.next_offset,
        "first_seq": info.first_seq,
        "last_seq": info.last_seq,
    }


def show_stats(out: Output, found: dict[str, Any]) -> None:
    """The numbers, for people."""
    facts = [
        ("records", f"{found['records']} in {len(found['topics'])} topics, {found['segments']} segments"),
        ("size", human_bytes(found["bytes"])),
        ("seq", f"{found['first_seq']} to {found['last_seq']}"),
        ("written", f"{found['oldest'] or '-'} to {found['newest'] or '-'}"),
        ("epoch", found["epoch"]),
    ]
    if "workspace" in found:
        index = found["index"]
        facts += [
            ("writer", found["writer"] or "none"),
            ("index", "none yet" if index is None else f"through seq {index['covers']}, {index['entries']} entries"),
            ("journal", human_bytes(found["journal_bytes"])),
            *([("set aside", human_bytes(found["aside_bytes"]))] if found["aside_bytes"] else []),
        ]
    out.facts(f"Log in {found['workspace']}" if "workspace" in found else f"Log at {found['node']}", facts)
    show_topics(out, found["topics"])


def show_topics(out: Output, topics: list[dict[str, Any]]) -> None:
    """A line for each topic."""
    out.listing(
        "Topics",
        ("topic", "records>", "size>", "segments>", "offsets>", "seqs>"),
        topics,
        lambda each: (
            each["topic"],
            each["records"],
            human_bytes(each["bytes"]),
            each["segments"],
            f"{each['first_offset']} to {each['next_offset'] - 1}" if each["records"] else "-",
            f"{each['first_seq']} to {each['last_seq']}" if each["records"] else "-",
        ),
        empty="there are no topics yet",
    )


def _bytes_below(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:  # the writer recycles its journal meanwhile
            continue
    return total


@command(topic_app, "list", asks_node=True, examples="tidings topic list\ntidings topic list --json | jq -r .topic")
async def list_topics(session: Session) -> None:
    """List the topics with their sizes and bounds."""
    async with session.reading(has_segments=True) as log:
        topics = [topic_facts(info) for info in log.topics().values()]
    show_topics(session.out, topics)


@command(topic_app, "show", asks_node=True, examples="tidings topic show demo")
async def show_topic(session: Session, topic: TopicArgument) -> None:
    """Show one topic's segments: what each holds, whether it is sealed, and its digest in the chain."""
    async with session.reading(has_segments=True) as log:
        info = log.topics()[known_topic(log, check_topic(topic))]
    if session.out.is_json:
        session.out.json(msgspec.to_builtins(info))
        return
    session.out.table(
        f"Topic {info.topic}: offsets {info.first_offset} to {info.next_offset - 1}, {human_bytes(info.size_bytes)}",
        ("segment>", "state", "records>", "size>", "offsets>", "seqs>", "newest>", "digest"),
        (
            (
                each.number if each.space_id is None else f"{each.space_id}/{each.number}",
                "sealed" if each.is_sealed else "open",
                each.lines,
                human_bytes(each.size_bytes),
                f"{each.first_offset} to {each.last_offset}",
                f"{each.first_seq} to {each.last_seq}",
                each.last_written_at[:19],
                (each.digest or "")[:12],
            )
            for each in info.segments
        ),
    )
