"""``tidings pipeline export`` and ``report``: a pinned range as a file, and the lake as one page."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import typer

from tidings.core.names import check_topic
from tidings.log.encryption import AesGcmEncryptor, KeyFile

from .errors import UsageProblem
from .output import human_bytes
from .session import KeyFileOption, Session, command

# DuckDB and Arrow are imported where they are used: `tidings --help` must not wait for them.
if TYPE_CHECKING:
    from tidings.log.interface import Log
    from tidings.pipeline.lake import Lake

__all__ = ["register"]

LAKE_FOLDER: Final = "lake"


class Format(enum.StrEnum):
    """What an export is written as."""

    JSONL = "jsonl"
    PARQUET = "parquet"


def register(app: typer.Typer) -> None:
    """Add both commands to the noun ``pipeline``."""
    command(
        app,
        "export",
        examples="""
            tidings pipeline export -o yesterday.jsonl --since 1000 --until 2000
            tidings pipeline export -o actions.parquet --format parquet --topic actions
            tidings pipeline export -o rows.jsonl --table gold.learning_actions --since 0 --until 90000
        """,
    )(export)
    command(app, "report", examples="tidings pipeline report -o report.html")(report)


async def export(
    session: Session,
    *,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Where to write.")],
    format_: Annotated[Format, typer.Option("--format", metavar="FORMAT", help="jsonl or parquet.")] = Format.JSONL,
    table: Annotated[
        str | None,
        typer.Option(
            "--table", metavar="TABLE", help="Rows of this table, such as gold.learning_actions, not records."
        ),
    ] = None,
    version: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="With --table: that version of it, not the latest.")
    ] = None,
    since: Annotated[int, typer.Option(min=0, metavar="SEQ", help="After this seq; 0 is the oldest there is.")] = 0,
    until: Annotated[
        int | None, typer.Option(min=0, metavar="SEQ", help="Up to and including this seq; now if left out.")
    ] = None,
    erased_until: Annotated[
        int | None,
        typer.Option(min=0, metavar="SEQ", help="Honour erasures up to this seq; all there are if left out."),
    ] = None,
    topic: Annotated[str | None, typer.Option("--topic", metavar="TOPIC", help="Only records of this topic.")] = None,
    kind: Annotated[
        list[str] | None, typer.Option("--type", metavar="TYPE", help="Only records of this type; may be repeated.")
    ] = None,
    space: Annotated[
        list[str] | None, typer.Option("--space", metavar="SPACE", help="Only this space; may be repeated.")
    ] = None,
    key_file: KeyFileOption = None,
) -> None:
    """
    Write a pinned range, to replay it or to train on it: the same bytes every time, and no group is moved.

    What the log has dropped is read from the lake. Records and rows that name what a tombstone or an erasure names are
    left out. The line at the end says what to give to get the same bytes again.
    """
    from tidings.pipeline.export import ExportRange, export_file, export_table, pinned
    from tidings.pipeline.export_erasures import load_erasures
    from tidings.pipeline.export_files import ExportFormat

    if table is None and version is not None:
        raise UsageProblem("--version is of a table", "give --table as well")
    if table is not None and (topic is not None or kind):
        raise UsageProblem("--topic and --type choose records; rows of a table are chosen by --space")
    range_ = ExportRange(
        since=since,
        until=until,
        erased_until=erased_until,
        topic=None if topic is None else check_topic(topic),
        types=tuple(kind or ()),
        spaces=tuple(space or ()),
    )
    async with _everything(session, key_file) as log:
        fixed = pinned(log, range_)
        chosen = ExportFormat(format_.value)
        if table is not None:
            erasures = await load_erasures(log, until=fixed.erased_until or 0)
            made = export_table(
                _lake(session), table, output, chosen, fixed, erasures, epoch=log.position.epoch, version=version
            )
        else:
            with session.out.progress("exporting", (fixed.until or 0) - fixed.since) as advance:
                made = await export_file(log, fixed, output, chosen, advance=lambda seq: advance(seq - fixed.since))
    facts: dict[str, Any] = msgspec.to_builtins(made)
    if session.out.is_json:
        session.out.json({"file": str(output), **facts})
        return
    again = f"--since {made.since} --until {made.until} --erased-until {made.erased_until}"
    again += "" if made.version is None else f" --version {made.version}"
    session.out.note(
        f"{made.rows} rows ({human_bytes(made.bytes)}), {made.left_out} left out as erased; the same again with {again};"
        f" sha256 {made.sha256}"
    )


def report(
    session: Session,
    *,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Where to write the page.")] = Path(
        "report.html"
    ),
) -> None:
    """
    Write one self-contained page with what the tables say: rates, latency, lag, times of day, quality, learning.

    Needs no Spark and no network; run the pipeline first. The same tables give the same page.
    """
    from tidings.pipeline.report import write_report

    session.settings()  # says so if there is no log
    facts = write_report(_lake(session), output)
    if session.out.is_json:
        session.out.json({"file": str(output), "seq": facts.seq, "events": facts.events, "tables": len(facts.tables)})
        return
    session.out.text(f"{output.resolve().as_uri()} shows {len(facts.tables)} tables, up to seq {facts.seq}")


def _lake(session: Session) -> Lake:
    from tidings.pipeline.lake import Lake

    return Lake(session.workspace / LAKE_FOLDER, session.clock)


@contextlib.asynccontextmanager
async def _everything(session: Session, key_file: Path | None) -> AsyncIterator[Log]:
    """The log, and behind it the lake if there is one of this log."""
    from tidings.pipeline.serving import ArchivedLog, LakeArchive

    async with session.reading(key_file) as log:
        encryptor = None if key_file is None else AesGcmEncryptor(KeyFile(key_file))
        archive = LakeArchive(_lake(session), encryptor=encryptor)
        archived = ArchivedLog(log, archive)
        try:
            yield archived
        finally:
            await archived.close()
