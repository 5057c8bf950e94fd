"""
``tidings log export``: a pinned range of the log as a file, the same bytes every time.

The range is fixed before the first record is read, so a writer that goes on does not make it longer. A file
appears whole or not at all: it is written beside its place, synced and renamed.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import orjson
import typer

from tidings.core.names import check_topic
from tidings.log.errors import SealedPayload
from tidings.log.interface import Query
from tidings.log.reading import records
from tidings.log.record import Record

from .output import Output, human_bytes
from .session import KeyFileOption, Session, command, known_topic

__all__ = ["register"]


class Format(enum.StrEnum):
    """What a line of the export is."""

    JSONL = "jsonl"
    EVENTS = "events"


def register(app: typer.Typer) -> None:
    """Add the command to its noun."""
    command(
        app,
        "export",
        examples="""
            tidings log export -o everything.jsonl
            tidings log export --topic demo --since 1000 --until 2000
            tidings log export --format events -o events.jsonl --key-file keys.json
        """,
    )(export)


async def export(
    session: Session,
    *,
    format_: Annotated[
        Format,
        typer.Option(
            "--format", metavar="FORMAT", help="jsonl: records as committed; events: without their places, to append."
        ),
    ] = Format.JSONL,
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
    as nobody could append them. If records of the range were dropped already, nothing is written.
    """
    async with session.reading(key_file) as log:
        if topic is not None:
            known_topic(log, check_topic(topic))
        position = log.position
        pinned = position.seq if until is None else min(until, position.seq)
        # From the beginning means the oldest kept; a bound of 0 would ask for what retention dropped, too.
        query = Query(topic=topic, since=since or None, until=pinned)
        sums = _Sums()
        with _sink(session.out, output) as write, session.out.progress("exporting", pinned - since) as advance:
            async for record in records(log, query):
                line = _encode(record, format_)
                write(line)
                sums.add(line)
                if sums.records % 500 == 0:
                    advance(record.seq - since)
    _tell(session.out, output, {"epoch": position.epoch, "since": since, "until": pinned, **sums.shown()})


class _Sums:
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


def _encode(record: Record, format_: Format) -> bytes:
    if format_ is Format.JSONL:
        return record.to_json()
    meta: dict[str, Any] = msgspec.to_builtins(record.meta)
    meta.pop("written_at")
    if record.meta.sealed is not None:
        raise SealedPayload(record.meta.space_id, record.meta.sealed.key)
    return orjson.dumps({"meta": meta, "payload": orjson.Fragment(bytes(record.payload_json))})


@contextlib.contextmanager
def _sink(out: Output, path: Path | None) -> Iterator[Callable[[bytes], object]]:
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


def _tell(out: Output, path: Path | None, summary: dict[str, Any]) -> None:
    if path is not None and out.is_json:
        out.json({"file": str(path), **summary})
        return
    size = human_bytes(summary["bytes"])
    out.note(
        f"{summary['records']} records ({size}) after seq {summary['since']} up to {summary['until']},"
        f" sha256 {summary['sha256']}"
    )
