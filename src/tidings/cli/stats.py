"""``tidings log stats``: what a workspace holds and how it is, as facts and as numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from tidings.log.embedded.disk import OsDisk
from tidings.log.interface import Log, TopicInfo

from .output import Output, human_bytes
from .session import Session, command

__all__ = ["gather_stats", "register", "show_stats", "topic_facts"]


def register(app: typer.Typer) -> None:
    """Add the command to its noun."""
    command(app, "stats", examples="tidings log stats\ntidings log stats --json | jq .last_seq")(stats)


async def stats(session: Session) -> None:
    """Show what the log holds: topics, records, sizes, seqs, times, its writer, its index and its journal."""
    found = await gather_stats(session)
    if session.out.is_json:
        session.out.json(found)
    else:
        show_stats(session.out, found)


async def gather_stats(session: Session) -> dict[str, Any]:
    """The numbers, as plain values. For a log that this process does not have open."""
    index = _index_stats(session)
    async with session.reading() as log:
        return _stats_of(session, log, index)


def _stats_of(session: Session, log: Log, index: dict[str, int] | None) -> dict[str, Any]:
    layout = session.layout
    meta = layout.read_meta(OsDisk())
    topics = [topic_facts(info) for info in log.topics().values()]
    segments = [segment for info in log.topics().values() for segment in info.segments if segment.lines]
    return {
        "workspace": str(session.workspace),
        "format": meta.format,
        "layout": meta.layout,
        "epoch": log.position.epoch,
        "created_at": meta.created_at,
        "records": sum(topic["records"] for topic in topics),
        "bytes": sum(topic["bytes"] for topic in topics),
        "segments": sum(topic["segments"] for topic in topics),
        "first_seq": min((topic["first_seq"] for topic in topics if topic["records"]), default=0),
        "last_seq": log.position.seq,
        "oldest": min((segment.first_written_at for segment in segments), default=None),
        "newest": max((segment.last_written_at for segment in segments), default=None),
        "writer": session.writer(),
        "index": index,
        "journal_bytes": _bytes_below(layout.journal),
        "aside_bytes": _bytes_below(layout.aside),
        "topics": topics,
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
    index = found["index"]
    covers = "none yet" if index is None else f"through seq {index['covers']}, {index['entries']} entries"
    out.facts(
        f"Log in {found['workspace']}",
        [
            ("records", f"{found['records']} in {len(found['topics'])} topics, {found['segments']} segments"),
            ("size", human_bytes(found["bytes"])),
            ("seq", f"{found['first_seq']} to {found['last_seq']}"),
            ("written", f"{found['oldest'] or '-'} to {found['newest'] or '-'}"),
            ("epoch", found["epoch"]),
            ("writer", found["writer"] or "none"),
            ("index", covers),
            ("journal", human_bytes(found["journal_bytes"])),
            *([("set aside", human_bytes(found["aside_bytes"]))] if found["aside_bytes"] else []),
        ],
    )
    show_topics(out, found["topics"])


def show_topics(out: Output, topics: list[dict[str, Any]]) -> None:
    """A line for each topic."""
    columns = ("topic", "records>", "size>", "segments>", "offsets>", "seqs>")
    out.table(
        "Topics",
        columns,
        (
            (
                each["topic"],
                each["records"],
                human_bytes(each["bytes"]),
                each["segments"],
                f"{each['first_offset']} to {each['next_offset'] - 1}" if each["records"] else "-",
                f"{each['first_seq']} to {each['last_seq']}" if each["records"] else "-",
            )
            for each in topics
        ),
    )


def _index_stats(session: Session) -> dict[str, int] | None:
    # Before the log is opened: LMDB allows one handle a process.
    with session.index() as index:
        if index is None:
            return None
        found = index.stats()
    return {
        "covers": found.covers,
        "entries": found.entries,
        "partitions": found.partitions,
        "bytes": found.size_bytes,
    }


def _bytes_below(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:  # the writer recycles its journal meanwhile
            continue
    return total
