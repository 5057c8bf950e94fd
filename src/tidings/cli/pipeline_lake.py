"""``tidings pipeline export``, ``report`` and ``scrub``: what is read from and removed from the lake without Spark."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import typer

from tidings.core.names import check_topic
from tidings.log.encryption import AesGcmEncryptor
from tidings.log.errors import WorkspaceBusy
from tidings.log.keys import KeyFile
from tidings.pipeline.settings import ExportFormat

from .output import Output, UsageProblem, human_bytes
from .pipeline_publisher import PublishTokenOption, SummaryPublisher
from .session import KeyFileOption, Session, YesOption, check_dry_run, command, confirm, user_audit

if TYPE_CHECKING:
    from tidings.log.interface import Log
    from tidings.pipeline.lake import Lake
    from tidings.pipeline.scrub import Scrub, ScrubPlan

# DuckDB and Arrow are imported where they are used: `tidings --help` must not wait for them.


def register(app: typer.Typer) -> None:
    """Add the commands to the noun ``pipeline``."""
    command(
        app,
        "export",
        has_lake=True,
        examples="""
            tidings pipeline export -o yesterday.jsonl --since 1000 --until 2000
            tidings pipeline export -o actions.parquet --format parquet --topic actions
            tidings pipeline export -o rows.jsonl --table gold.learning_actions --since 0 --until 90000
        """,
    )(export)
    command(app, "report", has_lake=True, examples="tidings pipeline report -o report.html")(report)
    command(
        app,
        "scrub",
        has_lake=True,
        examples="""
            tidings pipeline scrub --dry-run
            tidings pipeline scrub --yes
            tidings pipeline scrub --yes --keep-hours 0
        """,
    )(scrub)


async def export(
    session: Session,
    *,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Where to write.")],
    format_: Annotated[
        ExportFormat, typer.Option("--format", metavar="FORMAT", help="jsonl or parquet.")
    ] = ExportFormat.JSONL,
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
    from tidings.pipeline.export import ExportRange, export_file, export_table, load_erasures, pinned

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
        if table is not None:
            erasures = await load_erasures(log, until=fixed.erased_until or 0)
            made = export_table(
                _lake(session), table, output, format_, fixed, erasures, epoch=log.position.epoch, version=version
            )
        else:
            with session.out.progress("exporting", (fixed.until or 0) - fixed.since) as advance:
                made = await export_file(log, fixed, output, format_, advance=lambda seq: advance(seq - fixed.since))
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
    if made.refused_erasures:
        session.out.note(
            f"{made.refused_erasures} erasures name another space than their own, or nothing, and were not honoured"
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

    return Lake(session.lake, session.clock)


@contextlib.asynccontextmanager
async def _everything(session: Session, key_file: Path | None) -> AsyncIterator[Log]:
    """The log, and behind it the lake if there is one of this log."""
    from tidings.pipeline.serving import ArchivedLog, LakeArchive

    async with session.following(key_file) as log:
        encryptor = None if key_file is None else AesGcmEncryptor(KeyFile(key_file))
        archive = LakeArchive(_lake(session), encryptor=encryptor)
        archived = ArchivedLog(log, archive)
        try:
            yield archived
        finally:
            await archived.close()


# DuckDB and Arrow are imported where they are used: `tidings --help` must not wait for them.


_KEEP_HOURS: Final = 24
_RUN_ID_BYTES: Final = 4


def scrub(
    session: Session,
    *,
    is_dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would go only.")] = False,
    is_yes: YesOption = False,
    keep_hours: Annotated[
        int,
        typer.Option(
            "--keep-hours", min=0, metavar="HOURS", help="How long old files stay for those who are reading them."
        ),
    ] = _KEEP_HOURS,
    token: PublishTokenOption = None,
) -> None:
    """
    Take out of the tables what gold.scrub_list and gold.temporal_deletions list: rows that name what was erased.

    An erased record keeps its place in bronze.events and loses what it said; every other row is deleted. A record of that is
    in the log before anything is changed, and one for each erasure when all is done. Interrupted, it goes on where it was.
    The old files are deleted when they have been out of use for --keep-hours: run it again, or every day. Needs no Spark.
    """
    from tidings.pipeline.scrub import Scrub, plan_scrub

    check_dry_run(is_dry_run=is_dry_run, is_yes=is_yes)
    session.settings()  # says so if there is no log
    lake = _lake(session)
    if is_dry_run:
        _show(session.out, plan_scrub(lake), None)
        return
    if not is_yes and not session.out.is_json:
        _show(session.out, plan_scrub(lake), None)
        session.out.flush()
    confirm(session.out, "take these rows out for good?", is_yes=is_yes)
    publisher = SummaryPublisher(session, token)
    plan = plan_scrub(lake)  # anew: a run may have come in between
    work = Scrub(lake, os.urandom(_RUN_ID_BYTES).hex(), session.clock.now_ns())
    if plan.files:
        _record(session, publisher, plan)
        work.carry_out(plan)
    waits_for = _tell(publisher, work)
    swept = work.vacuum(keep_hours=keep_hours)
    left = work.left_to_vacuum()
    _show(session.out, plan, {"swept_files": swept, "old_files": left, "waits_for": waits_for})


def _record(session: Session, publisher: SummaryPublisher, plan: ScrubPlan) -> None:
    """
    Have the log hold what is about to be done.

    Raises:
        UsageProblem: It cannot be; nothing was changed.
    """
    from tidings.pipeline.scrub import begun_event

    begun = begun_event(plan)

    async def write() -> None:
        async with session.writing() as log:
            await user_audit().begun(log, "pipeline.scrub", begun.payload)

    try:
        asyncio.run(write())
    except WorkspaceBusy:
        # A node keeps the topic `audit` to itself; through its API the record goes where the jobs' own are.
        if (reason := publisher.try_publish([begun])) is not None:
            raise UsageProblem(f"no record of it could be left, so nothing was changed: {reason}") from None


def _tell(publisher: SummaryPublisher, work: Scrub) -> str | None:
    """Say what was done, also by a scrub that was interrupted; why not yet, if it cannot be said now."""
    while events := work.unpublished():
        if (reason := publisher.try_publish(events)) is not None:
            return reason
        work.mark_published(len(events))
    return None


def _show(out: Output, plan: ScrubPlan, done: dict[str, Any] | None) -> None:
    erasures = len({each.erased_by for each in plan.counts if each.erased_by})
    rows = sum(plan.rows.values())
    if out.is_json:
        shown = {
            "carried_out": done is not None,
            "list_seq": plan.list_seq,
            "tables": [{"table": table, "rows": count} for table, count in plan.rows.items()],
            "erasures": erasures,
            "is_all": plan.is_all,
            "refused_erasures": len(plan.refused),
        }
        out.json(shown | (done or {}))
        return
    if plan.list_seq is None:
        out.note("nothing was ever listed: run the pipeline with all its jobs first")
    if plan.refused:
        out.note(
            f"{len(plan.refused)} listed erasures have no right to the space of their rows, which stay: see gold.refused_erasures"
        )
    if plan.rows:
        out.table("Scrub", ("table", "rows>"), plan.rows.items())
    if done is None:
        about = f"for {erasures} erasures, as listed at seq {plan.list_seq}"
        out.text(f"would take out {rows} rows {about}; --yes carries it out" if rows else "nothing is to go")
        return
    out.text(f"took out {rows} rows; deleted {done['swept_files']} old files, {done['old_files']} are kept for now")
    if not plan.is_all:
        out.text("the list is longer than one scrub takes up: run the job consolidation_scrub, and this again")
    if done["waits_for"] is not None:
        out.note(f"what was done is told by the next scrub: {done['waits_for']}")
