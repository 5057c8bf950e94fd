"""``tidings pipeline status``: for each table how far it is, what it cost last, what failed and when, and when it is next due."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tidings.pipeline.units import short_duration, short_number

from .output import NO_TABLES, Output, as_typed, human_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidings.pipeline.runner import Pipeline
    from tidings.pipeline.status import JobState, TableStatus


def show_status(out: Output, pipeline: Pipeline) -> None:
    """Show it, for people or as JSON."""
    from tidings.pipeline.errors import LakeDamaged
    from tidings.pipeline.status import JobStates, table_statuses

    meta = pipeline.lake.known_meta()
    epoch = "" if meta is None else meta.epoch
    has_news: Callable[[int], bool] = pipeline.has_news
    try:
        reached, pending = pipeline.reached(), pipeline.pending()
    except LakeDamaged:  # said below, beside what is known of the others
        reached, pending, has_news = 0, None, lambda _: True
    states = JobStates(pipeline.lake.storage, epoch)
    tables = table_statuses(pipeline.lake, states, reached=reached, pending=pending, has_news=has_news)
    failed = states.failed()
    ahead_until = None if any(table.problem for table in tables) else pipeline.ahead_until()
    if out.is_json:
        out.json(
            {
                "lake": str(pipeline.lake.storage),
                "epoch": epoch or None,
                "seq": reached,
                "pending": pending,
                "written_ahead": None if ahead_until is None else ahead_until.isoformat(),
                "tables": [_as_json(table) for table in tables],
                "failed": [
                    {"job": name, "at": state.failed_at, "problem": state.problem} for name, state in failed.items()
                ],
            }
        )
        return
    if tables:
        out.table(
            "Tables",
            ("table", "rows>", "size>", "up to seq>", "behind>", "made by", "last run", "took>", "wrote>", "next due"),
            (_as_row(table) for table in tables),
        )
    else:
        out.text(as_typed(NO_TABLES))
    for table in tables:
        if table.problem:
            out.text(f"DAMAGED {table.name}: {table.problem}; `tidings pipeline repair` makes it whole")
    why_all = {table.job: table.last.why_all for table in tables if table.last is not None and table.last.why_all}
    for name, why in why_all.items():
        out.text(f"{name} last computed all of history, because {why}")
    for name, state in failed.items():
        out.text(f"FAILED {name} at {_moment(state.failed_at)}: {state.problem}")
    if ahead_until is not None:
        out.text(
            f"CLOCK: the log's last record was written at {_moment(ahead_until.isoformat())}, far ahead of this machine's"
            " clock: jobs take that clock's time for now"
        )
    ahead = "the log does not say how much it is ahead" if pending is None else f"{pending} records are yet to come"
    out.text(f"the lake holds the log up to seq {reached}; {ahead}")


def _as_row(table: TableStatus) -> tuple[Any, ...]:
    last = table.last
    return (
        table.name,
        table.rows,
        human_bytes(table.bytes),
        "-" if table.seq is None else table.seq,
        "-" if table.behind is None else table.behind,
        table.job,
        "" if last is None else f"{_moment(last.ran_at)}{', then failed' if last.problem else ''}",
        "" if last is None or not last.ran_at else short_duration(last.seconds * 1000),
        "" if last is None or not last.ran_at else _wrote(last),
        table.due if table.due in ("now", "with new records") else f"at {_moment(table.due)} of the log",
    )


def _wrote(last: JobState) -> str:
    days = "" if last.days is None else f" in {last.days} {'day' if last.days == 1 else 'days'}"
    return f"{short_number(last.rows)} rows{days}"


def _as_json(table: TableStatus) -> dict[str, Any]:
    last = table.last
    return {
        "name": table.name,
        "seq": table.seq,
        "rows": table.rows,
        "files": table.files,
        "bytes": table.bytes,
        "behind": table.behind,
        "job": table.job or None,
        "last": None
        if last is None or not last.ran_at
        else {
            "at": last.ran_at,
            "seconds": last.seconds,
            "rows": last.rows,
            "days": last.days,
            "bytes_read": last.bytes_read,
            "all_because": last.why_all or None,
        },
        "failed": None if last is None or not last.problem else {"at": last.failed_at, "problem": last.problem},
        "due": table.due,
        "problem": table.problem or None,
    }


def _moment(text: str) -> str:
    """A time as stored, to the second."""
    return text[:19].replace("T", " ")
