"""``tidings pipeline``: bring the tables of the lake up to what the log holds, and look at how far they are."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import threading
from collections.abc import Callable, Container, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import typer

from tidings.core.errors import TidingsError
from tidings.core.settings import settings_from
from tidings.log.embedded.disk import OsDisk
from tidings.pipeline.settings import PipelineSettings

from .output import ExitCode, Output, UsageProblem
from .pipeline_lake import register as register_lake_commands
from .pipeline_progress import RunProgress
from .pipeline_publisher import PublishTokenOption, SummaryPublisher
from .pipeline_status import show_status
from .session import DryRunOption, Session, command

# Everything that brings PySpark, DuckDB or Arrow along is imported where it is used: `tidings --help` must not wait for it.
if TYPE_CHECKING:
    from tidings.pipeline.jobs.job import Job
    from tidings.pipeline.repair import LakeRepair
    from tidings.pipeline.runner import Pipeline, RunReport
    from tidings.pipeline.session import Progress, ProgressStep, SessionOnDemand

app = typer.Typer(help="The tables that Spark makes from the log.", no_args_is_help=True, rich_markup_mode=None)

_EVERY: Final = re.compile(r"([0-9]{1,6})(ms|s|m|h)")
_EVERY_SECONDS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_RUN_ID_BYTES: Final = 4

JobsOption = Annotated[
    str | None,
    typer.Option("--jobs", metavar="NAMES", help="These jobs, with commas between; `none` for bronze and silver only."),
]
WithOption = Annotated[
    list[str] | None,
    typer.Option("--with", metavar="SET", help="The jobs of this set too, such as cognition; may be repeated."),
]
MasterOption = Annotated[
    str | None,
    typer.Option("--master", metavar="URL", help="Where Spark runs: local[4], spark://host:7077, k8s://https://host."),
]
RemoteOption = Annotated[
    str | None, typer.Option("--remote", metavar="URL", help="A Spark Connect server: sc://host:15002.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="A setting of the pipeline; may be repeated."),
]
SparkLogOption = Annotated[bool, typer.Option("--spark-log", help="Show what Spark itself logs.")]
AcceptOption = Annotated[
    bool,
    typer.Option("--accept-epoch", help="Set the tables of an ended epoch aside, and begin new ones."),
]


def _register() -> None:
    command(
        app,
        "run",
        ends_on_interrupt=True,
        has_lake=True,
        examples="""
            tidings pipeline run --once
            tidings pipeline run --every 30s --jobs topic_minutes,group_health
            tidings pipeline run --follow
            tidings pipeline run --with cognition
            tidings pipeline run --master spark://10.0.0.5:7077
            tidings pipeline run --remote sc://10.0.0.5:15002
            tidings pipeline run --lake s3://bucket/lake
        """,
    )(run)
    command(
        app, "status", has_lake=True, examples="tidings pipeline status\ntidings pipeline status --json | jq .pending"
    )(status)
    command(app, "explain", examples="tidings pipeline explain\ntidings pipeline explain topic_minutes")(explain)
    command(
        app,
        "backfill",
        has_lake=True,
        examples="""
            tidings pipeline backfill --jobs topic_minutes
            tidings pipeline backfill --silver
        """,
    )(backfill)
    command(
        app,
        "verify",
        has_lake=True,
        examples="tidings pipeline verify\ntidings pipeline verify --json | jq .is_equal",
    )(verify)
    command(
        app,
        "prepare",
        examples="tidings pipeline prepare\ntidings pipeline prepare --set java_cache=/var/cache/tidings",
    )(prepare)
    command(
        app,
        "repair",
        has_lake=True,
        examples="""
            tidings pipeline repair --dry-run
            tidings pipeline repair
        """,
    )(repair)


def run(
    session: Session,
    *,
    is_once: Annotated[bool, typer.Option("--once", help="One run, and end (as without --every).")] = False,
    every: Annotated[
        str | None, typer.Option("--every", metavar="SPAN", help="Run again and again: 500ms, 30s, 5m, 1h.")
    ] = None,
    is_following: Annotated[
        bool,
        typer.Option(
            "--follow",
            help="Stay, and take in records as they are written; --every then says how often jobs are looked at.",
        ),
    ] = False,
    jobs: JobsOption = None,
    sets: WithOption = None,
    master: MasterOption = None,
    remote: RemoteOption = None,
    setting: SetOption = None,
    accepts_epoch: AcceptOption = False,
    token: PublishTokenOption = None,
    is_spark_loud: SparkLogOption = False,
) -> None:
    """
    Bring every table up to what the log holds now.

    The jobs are those of the set operations, of the sets switched on by --with, or those named by --jobs. Each record reaches the tables exactly once, whatever ends a run. A run with nothing new does nothing. Summaries of the
    jobs go to the log or, when a node holds the workspace, to that node with --token; otherwise the next run says them.
    With --follow a streaming query takes records into bronze and silver within seconds, and jobs run beside it.
    With --every, jobs that make their tables anew from all of history wait for the setting rebuild_interval_s, unless
    --jobs names them.
    """
    if is_once and (every is not None or is_following):
        raise UsageProblem("--once excludes --every and --follow")
    span_s = None if every is None else _span(every)
    settings = _settings(master, remote, setting)
    if is_following:
        _follow(session, settings, span_s, _jobs(jobs, sets), token, accepts_epoch=accepts_epoch, is_loud=is_spark_loud)
        return
    is_paced = span_s is not None and jobs is None
    request = msgspec.json.encode([jobs, sets, is_paced, settings], order="sorted").decode()
    with (
        _ended_by_ctrl_c(is_once=span_s is None),
        _session(
            settings,
            is_loud=is_spark_loud,
            out=session.out,
            is_brief=lambda: span_s is None and _is_short(session, settings),
        ) as spark,
    ):
        while True:
            publisher = SummaryPublisher(session, token)
            failed = True
            try:
                report = _run_once(
                    session,
                    settings,
                    spark,
                    lambda: _jobs(jobs, sets),
                    publisher,
                    accepts_epoch=accepts_epoch,
                    is_paced=is_paced,
                    request=request,
                )
                failed = bool(report is not None and report.failed)
            except TidingsError as error:
                if span_s is None or not error.retryable or _ending.is_set():
                    raise
                session.out.note(f"this run failed, and the next one tries again: {error}")
                spark.stop()  # it may be Spark itself that is in trouble
            session.out.flush()
            if span_s is None:
                break
            # Ctrl-C ends this wait and the command with it.
            threading.Event().wait(span_s)
    if failed:
        raise typer.Exit(ExitCode.PROBLEM)


def _follow(
    session: Session,
    settings: PipelineSettings,
    span_s: float | None,
    jobs: Sequence[Job],
    token: str | None,
    *,
    accepts_epoch: bool,
    is_loud: bool,
) -> None:
    from tidings.pipeline.session import is_remote

    from .pipeline_follow import JOBS_EVERY_S, follow

    if is_remote(settings.master):
        raise UsageProblem(
            "--follow commits in this process, which has no Spark with --remote", "use --every, or another --master"
        )
    session.settings()  # says so if there is no log
    publisher = SummaryPublisher(session, token)
    with _session(settings, is_loud=is_loud, out=session.out) as spark:
        follow(
            session,
            lambda: _pipeline(session, settings, publisher),
            spark,
            jobs,
            jobs_every_s=JOBS_EVERY_S if span_s is None else span_s,
            accepts_epoch=accepts_epoch,
            show=lambda report: _show_run(session.out, report, publisher),
        )


def backfill(
    session: Session,
    *,
    jobs: JobsOption = None,
    sets: WithOption = None,
    is_silver: Annotated[
        bool, typer.Option("--silver", help="Fill the silver tables from bronze again, from the beginning.")
    ] = False,
    master: MasterOption = None,
    remote: RemoteOption = None,
    setting: SetOption = None,
    token: PublishTokenOption = None,
    is_spark_loud: SparkLogOption = False,
) -> None:
    """
    Do jobs again over all of history, although they were done: after a job was changed, or a table was damaged.

    The tables are replaced as a whole when they are ready; until then readers see the old ones.
    """
    from tidings.pipeline.silver import FROM_THE_BEGINNING

    settings = _settings(master, remote, setting)
    with _session(
        settings, is_loud=is_spark_loud, out=session.out, is_brief=lambda: _is_short(session, settings)
    ) as spark:
        publisher = SummaryPublisher(session, token)
        report = _run_once(
            session,
            settings,
            spark,
            lambda: _jobs(jobs, sets),
            publisher,
            is_again=True,
            silver_anew=FROM_THE_BEGINNING if is_silver else (),
        )
    if report is not None and report.failed:
        raise typer.Exit(ExitCode.PROBLEM)


def status(session: Session) -> None:
    """
    Show of each table how far it is, what it cost last, what failed and when, and when it is next due; and how much the
    log is ahead. Needs no Spark.
    """
    session.settings()  # says so if there is no log
    show_status(session.out, _pipeline(session, PipelineSettings()))


def explain(
    session: Session,
    job: Annotated[str | None, typer.Argument(metavar="JOB", help="Only this one.")] = None,
) -> None:
    """Show the jobs in the order they run in: their set, what each reads, writes and is for."""
    from tidings.pipeline.jobs.registry import choose, in_order, job_sets

    set_of = {each: name for name, jobs in job_sets().items() for each in jobs}
    jobs = choose(in_order(list(set_of)), None if job is None else [job])
    if session.out.is_json:
        session.out.json(
            [
                {
                    "name": each.name,
                    "set": set_of[each],
                    "about": each.about,
                    "reads": each.reads,
                    "writes": [{"table": output.table, "about": output.about} for output in each.writes],
                    "publishes": each.summarise is not None,
                    "computes": "all"
                    if each.partitioning is None
                    else "new"
                    if each.partitioning.seq_column
                    else "days",
                }
                for each in jobs
            ]
        )
        return
    session.out.table(
        "Jobs",
        ("job", "set", "reads", "writes", "tells the log", "about"),
        (
            (
                each.name,
                set_of[each],
                ", ".join(each.reads),
                ", ".join(output.table for output in each.writes),
                "yes" if each.summarise is not None else "",
                each.about,
            )
            for each in jobs
        ),
    )


def verify(session: Session) -> None:
    """
    Compare the tables with the log: counts, checksums and the highest seq, from both sides. Exit code 1 if they differ.

    What retention has dropped from the log is not compared.
    """
    from tidings.pipeline.verify import compare_with_log

    session.settings()
    pipeline = _pipeline(session, PipelineSettings())
    with session.out.progress("verifying (records)", None) as advance:
        verdict = compare_with_log(pipeline.lake, pipeline.layout, OsDisk(), advance)
    if session.out.is_json:
        session.out.json(
            {
                "is_equal": verdict.is_equal,
                "until": verdict.until,
                "quarantined": verdict.quarantined,
                "repeated": verdict.repeated_offsets,
                "missing_in_silver": verdict.missing_in_silver,
                "erased": verdict.erased,
                "streams": [
                    {
                        "stream": each.stream,
                        "is_equal": each.is_equal,
                        "log": _side(each.log),
                        "lake": _side(each.lake),
                    }
                    for each in verdict.streams
                ],
            }
        )
    else:
        session.out.table(
            "Log and lake",
            ("stream", "in the log>", "in the lake>", "last seq>", "checksums"),
            (
                (
                    each.stream,
                    each.log.count,
                    each.lake.count,
                    each.log.last_seq,
                    "equal" if each.log.checksum == each.lake.checksum else "DIFFERENT",
                )
                for each in verdict.streams
            ),
        )
        if verdict.quarantined:
            session.out.text(
                f"{verdict.quarantined} lines are in the quarantine: see 'tidings table show bronze.quarantine'"
            )
        if verdict.erased:
            session.out.text(f"{verdict.erased} records were erased in the lake: their places were compared only")
        if verdict.repeated_offsets:
            session.out.text(f"{verdict.repeated_offsets} records are in bronze or in silver more than once")
        if verdict.missing_in_silver:
            session.out.text(f"bronze and silver disagree on {verdict.missing_in_silver} ids")
        session.out.text(
            f"equal up to seq {verdict.until}" if verdict.is_equal else f"NOT equal up to seq {verdict.until}"
        )
    if not verdict.is_equal:
        raise typer.Exit(ExitCode.PROBLEM)


def prepare(session: Session, *, setting: SetOption = None) -> None:
    """
    Have Spark start faster here from now on: once on a machine, and again after Java or Spark was renewed.

    Keeps the classes that Spark loads, as Java had them in memory, in a file of about 200 MB in the cache folder. A file that
    does not fit, or is damaged, is left aside by runs; delete it to take this back.
    """
    from tidings.pipeline.preparing import make_archive

    settings = _settings(None, None, setting)
    session.out.note("starting Spark once, to see what it loads")
    made = make_archive(settings, session.clock)
    size = made.stat().st_size
    if session.out.is_json:
        session.out.json({"file": str(made), "bytes": size})
        return
    session.out.text(f"{made}: {size >> 20} MB")


def repair(
    session: Session,
    *,
    is_dry_run: DryRunOption = False,
    master: MasterOption = None,
    remote: RemoteOption = None,
    setting: SetOption = None,
    is_spark_loud: SparkLogOption = False,
) -> None:
    """
    Find what of the lake is gone or cannot be read, and make it whole again. Exit code 1 if something is lost.

    Bronze gets what it lacks from the log or from silver, also lines that were quarantined and that the log now has whole; what
    neither has is named, here and in bronze.quarantine. The other tables are made anew from bronze. Readers see the old version
    of a table until the new one is whole. A table whose own log (_delta_log) is damaged is made in another folder, and keeps what
    only its files have; lake.json is written anew from what the tables say. Records that were erased from the lake alone may be
    back: run the pipeline with all its jobs and `tidings pipeline scrub` then.
    """
    from tidings.pipeline.jobs.registry import all_jobs
    from tidings.pipeline.log_place import LogPlace
    from tidings.pipeline.repair import LakeRepair
    from tidings.pipeline.storage import Storage

    session.settings()  # says so if there is no log
    settings = _settings(master, remote, setting)
    pipeline = _pipeline(session, settings)
    run = os.urandom(_RUN_ID_BYTES).hex()
    place = LogPlace(Storage.of(session.workspace))
    work = LakeRepair(pipeline.lake, place, settings, all_jobs(), run=run, now_ns=session.clock.now_ns())
    with session.out.progress("reading the tables (files)", None) as advance:
        work.look(advance)
    if not is_dry_run:
        work.mend()
        if work.needs_run:
            with (
                _session(settings, is_loud=is_spark_loud, out=session.out) as spark,
                RunProgress(session.out, session.clock) as progress,
            ):
                again = {job.name for job in work.jobs}
                report = pipeline.run(spark, work.jobs, again=again, silver_anew=work.silver_anew, progress=progress)
            for job in report.failed:
                session.out.note(f"FAILED {job.name}: {job.error.problem if job.error is not None else ''}")
    _show_repair(session.out, work, is_dry_run=is_dry_run)
    if work.done.lost:
        raise typer.Exit(ExitCode.PROBLEM)


def _show_repair(out: Output, work: LakeRepair, *, is_dry_run: bool) -> None:
    damage, done = work.damage, work.done
    files = [(table, each) for table, found in damage.files.items() for each in found]
    if out.is_json:
        out.json(
            {
                "carried_out": not is_dry_run,
                "files": [{"table": table, "file": each.file.name, "problem": each.problem} for table, each in files],
                "logs": dict(damage.logs),
                "lake_json": work.is_meta_made,
                "missing_records": damage.missing_count,
                "repeated": dict(damage.repeated),
                "notes_behind": {table: behind.describe() for table, behind in damage.behind.items()},
                "wrong_tables": dict(damage.wrong_jobs),
                "unfilled_records": damage.unfilled,
                "disagreements": damage.disagreements,
                "recovered": done.recovered,
                "healed_lines": done.healed,
                "lost": [list(each) for each in done.lost],
                "rebuilt_jobs": [job.name for job in work.jobs],
                "rebuilt_silver": sorted(work.silver_anew),
                "set_aside": work.set_aside,
            }
        )
        return
    if files:
        out.table(
            "Damaged files",
            ("table", "file", "problem"),
            ((table, each.file.name, each.problem) for table, each in files),
        )
    if work.is_meta_made:
        out.text("lake.json is missing or cannot be read")
    for table, problem in damage.logs.items():
        out.text(f"{table}: its own log is damaged: {problem}")
    for table, count in damage.repeated.items():
        out.text(f"{table}: {count} rows are there once too often")
    for table, behind in damage.behind.items():
        out.text(f"{table}: {behind.describe()}")
    for table, problem in damage.wrong_jobs.items():
        out.text(f"{table}: {problem}")
    if damage.unfilled:
        out.text(f"silver has not taken in {damage.unfilled} records of bronze")
    if damage.disagreements:
        out.text(f"bronze and silver disagree on {damage.disagreements} events")
    found = f"{len(files)} damaged files and {len(damage.logs)} damaged logs"
    if is_dry_run:
        out.text(f"{found}; bronze lacks {damage.missing_count} records; nothing was changed")
        return
    out.text(
        f"{found}; {done.recovered} of {damage.missing_count} missing records came back;"
        f" {done.healed} rows left the quarantine; {len(work.jobs)} jobs were done again"
    )
    for place in work.set_aside:
        out.text(f"set aside, to be deleted by a run after `keep_hours`: {place}")
    for first, last in done.lost:
        out.text(f"LOST: seq {first} to {last}: only the lake had them")


def _side(side: Any) -> dict[str, Any]:
    return {
        "count": side.count,
        "checksum": f"{side.checksum:016x}",
        "first_offset": side.first_offset,
        "last_offset": side.last_offset,
        "last_seq": side.last_seq,
    }


def _span(text: str) -> float:
    found = _EVERY.fullmatch(text)
    if found is None or int(found[1]) == 0:
        raise UsageProblem(f"--every: {text!r} is no span", "give one such as 500ms, 30s, 5m or 1h")
    return int(found[1]) * _EVERY_SECONDS[found[2]]


def _settings(master: str | None, remote: str | None, given: list[str] | None) -> PipelineSettings:
    if master is not None and remote is not None:
        raise UsageProblem("--master and --remote are two places to run at; give one")
    if remote is not None and not remote.startswith("sc://"):
        raise UsageProblem(f"--remote: {remote!r} is no Spark Connect address", "it begins with sc://")
    values: dict[str, Any] = {}
    for text in given or []:
        name, equals, value = text.partition("=")
        if not equals:
            raise UsageProblem(f"--set: {text!r} is not NAME=VALUE")
        if name.startswith("spark."):
            values.setdefault("spark", {})[name] = value
        else:
            values[name] = value
    if (address := remote or master) is not None:
        values["master"] = address
    return settings_from(PipelineSettings, values)


def _jobs(names: str | None, sets: list[str] | None) -> tuple[Job, ...]:
    if names is not None and sets:
        raise UsageProblem("--jobs names all that is to run; leave --with out")
    if names == "none":
        return ()
    from tidings.pipeline.jobs.registry import all_jobs, choose, jobs_in_sets

    if names is None:
        return jobs_in_sets(sets or ())
    return choose(all_jobs(), [name.strip() for name in names.split(",") if name.strip()])


@contextlib.contextmanager
def _session(
    settings: PipelineSettings, *, is_loud: bool, out: Output, is_brief: Callable[[], bool] = lambda: False
) -> Iterator[SessionOnDemand]:
    from tidings.pipeline.session import SessionOnDemand, connect_mode, heap_mb, is_remote

    heap = "" if is_remote(settings.master) else f", with a heap of {heap_mb(settings)} MB"
    spark = SessionOnDemand(
        settings,
        is_loud=is_loud,
        starting=lambda: out.note(f"starting Spark on {settings.master}{heap}"),
        is_brief=is_brief,
    )
    with _told_of_interrupts(), connect_mode(settings.master), spark:
        yield spark


_ending: Final = threading.Event()
"""Ctrl-C was pressed. What the process did just then, an import for one, may have swallowed the exception."""


def _unless_ending(progress: Progress) -> Progress:
    """The same, but no further stage is begun after Ctrl-C."""

    def told(step: ProgressStep, /) -> None:
        if _ending.is_set() and threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        progress(step)

    return told


@contextlib.contextmanager
def _told_of_interrupts() -> Iterator[None]:
    """Within this a first Ctrl-C says what is waited for, as jobs under way are finished, and a second one ends the process."""

    _ending.clear()
    screen = os.dup(2)  # while Spark starts, what goes to stderr itself is not shown

    def end(*_: object) -> None:
        signal.signal(signal.SIGINT, lambda *_: os._exit(ExitCode.INTERRUPTED))
        os.write(screen, b"ending, once what was begun is whole; Ctrl-C again ends at once\n")
        _ending.set()
        raise KeyboardInterrupt

    def is_news(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("KeyboardInterrupt")  # Py4J shows the root logger where it was met

    before = signal.signal(signal.SIGINT, end)
    logging.getLogger().addFilter(is_news)
    try:
        yield
    except Exception:
        if _ending.is_set():
            raise KeyboardInterrupt from None  # what it broke off, an import for one, may say anything
        raise
    finally:
        signal.signal(signal.SIGINT, before)
        logging.getLogger().removeFilter(is_news)
        os.close(screen)


@contextlib.contextmanager
def _ended_by_ctrl_c(*, is_once: bool) -> Iterator[None]:
    """One run that Ctrl-C ended did not do all that it was asked for, and says so by its exit code."""
    try:
        yield
    except KeyboardInterrupt:
        if is_once:
            raise typer.Exit(ExitCode.INTERRUPTED) from None
        raise


def _is_short(session: Session, settings: PipelineSettings) -> bool:
    """Whether the whole log is little work."""
    pipeline = _pipeline(session, settings)
    pending = pipeline.pending()
    return pending is not None and settings.is_small(pipeline.reached() + pending, 0)


def _pipeline(session: Session, settings: PipelineSettings, publisher: SummaryPublisher | None = None) -> Pipeline:
    from tidings.pipeline.runner import Pipeline

    return Pipeline(
        session.workspace,
        settings,
        clock=session.clock,
        lake=session.lake,
        run=os.urandom(_RUN_ID_BYTES).hex(),
        publish=None if publisher is None else publisher.publish,
    )


def _run_once(
    session: Session,
    settings: PipelineSettings,
    spark: SessionOnDemand,
    jobs: Callable[[], Sequence[Job]],
    publisher: SummaryPublisher,
    *,
    accepts_epoch: bool = False,
    is_again: bool = False,
    silver_anew: Container[str] = (),
    is_paced: bool = False,
    request: str = "",
) -> RunReport | None:
    """One run, told to whoever watches; ``None`` if there was nothing to do, which is found out without the jobs or Spark."""
    from tidings.log.embedded.layout import Layout
    from tidings.pipeline.state_files import load_vacuumed
    from tidings.pipeline.status import idle_at

    session.settings()  # says so if there is no log
    layout = Layout(session.workspace)
    if request and (until := idle_at(session.lake, layout, request)) is not None:
        epoch = layout.read_meta(OsDisk()).epoch
        _show_nothing_new(session.out, epoch, until)
        if load_vacuumed(session.lake, epoch).due(settings.vacuum_hours, session.clock.now_ns()):
            _keep_house(session, settings)
        return None
    chosen = jobs()
    with RunProgress(session.out, session.clock) as progress:
        report = _pipeline(session, settings, publisher).run(
            spark,
            chosen,
            accepts_epoch=accepts_epoch,
            again={job.name for job in chosen} if is_again else (),
            silver_anew=silver_anew,
            is_paced=is_paced,
            request=request,
            progress=_unless_ending(progress),
        )
    _show_run(session.out, report, publisher)
    return report


def _keep_house(session: Session, settings: PipelineSettings) -> None:
    """Delete old files for which it is time."""
    from tidings.pipeline.housekeeping import keep_house
    from tidings.pipeline.lake import Lake

    keep_house(Lake(session.lake, session.clock), settings, now_ns=session.clock.now_ns(), tables=())


def _show_nothing_new(out: Output, epoch: str, until: int) -> None:
    if out.is_json:
        counts = dict.fromkeys(("rows", "bytes", "quarantined", "commits"), 0)
        out.json({"epoch": epoch, "since": until, "until": until, **counts, "silver": {}, "jobs": [], "waits_for": []})
        return
    out.text(f"nothing new; the tables reach to seq {until}")


def _show_run(out: Output, report: RunReport, publisher: SummaryPublisher) -> None:
    bronze = report.bronze
    if out.is_json:
        out.json(
            {
                "epoch": report.epoch,
                "since": bronze.since,
                "until": report.until,
                "rows": bronze.rows,
                "bytes": bronze.bytes,
                "quarantined": bronze.quarantined,
                "commits": bronze.commits,
                "silver": dict(report.silver),
                "jobs": [
                    {
                        "name": job.name,
                        "rows": None if job.rows is None else dict(job.rows),
                        "published": job.published,
                        "error": None if job.error is None else job.error.problem,
                        "waits_for": job.waits_for or None,
                    }
                    for job in report.jobs
                ],
                "waits_for": publisher.waits_for,
            }
        )
        return
    new = f"{bronze.rows} new records" if bronze.rows else "nothing new"
    out.text(f"{new}; the tables reach to seq {report.until}")
    if bronze.quarantined:
        out.text(f"{bronze.quarantined} lines went to the quarantine: see 'tidings table show bronze.quarantine'")
    done = [job for job in report.jobs if job.rows is not None]
    if done:
        rows = sum(sum(job.rows.values()) for job in done if job.rows is not None)
        out.text(f"{len(done)} jobs wrote {rows} rows and told the log {sum(job.published for job in done)} events")
    for job in report.failed:
        out.text(f"FAILED {job.name}: {job.error.problem if job.error is not None else ''}")
    for job in report.jobs:
        if job.waits_for:
            out.text(f"WAITING {job.name}: for tables that {job.waits_for} has never made")


_register()
register_lake_commands(app)
