"""``tidings pipeline scrub``: take out of the lake what the jobs list as erased or past its life."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from tidings.log.errors import WorkspaceBusy

from .confirm import YesOption, ask, asker, check_dry_run
from .errors import UsageProblem
from .output import Output
from .pipeline_door import FrontDoor, PublishTokenOption
from .session import Session, command

# DuckDB and Arrow are imported where they are used: `tidings --help` must not wait for them.
if TYPE_CHECKING:
    from tidings.pipeline.lake import Lake
    from tidings.pipeline.scrub import Scrub
    from tidings.pipeline.scrub_plan import ScrubPlan

__all__ = ["register"]

LAKE_FOLDER: Final = "lake"
_KEEP_HOURS: Final = 24.0
_RUN_ID_BYTES: Final = 4


def register(app: typer.Typer) -> None:
    """Add the command to the noun ``pipeline``."""
    command(
        app,
        "scrub",
        examples="""
            tidings pipeline scrub --dry-run
            tidings pipeline scrub --yes
            tidings pipeline scrub --yes --keep-hours 0
        """,
    )(scrub)


def scrub(
    session: Session,
    *,
    is_dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would go only.")] = False,
    is_yes: YesOption = False,
    keep_hours: Annotated[
        float,
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
    from tidings.pipeline.scrub import Scrub
    from tidings.pipeline.scrub_plan import plan_scrub

    check_dry_run(is_dry_run=is_dry_run, is_yes=is_yes)
    session.settings()  # says so if there is no log
    lake = _lake(session)
    if is_dry_run:
        _show(session.out, plan_scrub(lake), None)
        return
    if not is_yes and not session.out.is_json:
        _show(session.out, plan_scrub(lake), None)
        session.out.flush()
    ask(session.out, "take these rows out for good?", is_yes=is_yes)
    door = FrontDoor(session, token)
    with lake.lock():
        plan = plan_scrub(lake)  # anew: a run may have come in between
        work = Scrub(lake, os.urandom(_RUN_ID_BYTES).hex(), session.clock.now_ns())
        if plan.files:
            _record(session, door, plan)
            work.carry_out(plan)
        waits_for = _tell(door, work)
        swept = work.sweep(age_hours_min=keep_hours)
        left = work.left_to_sweep()
    _show(session.out, plan, {"swept_files": swept, "old_files": left, "waits_for": waits_for})


def _record(session: Session, door: FrontDoor, plan: ScrubPlan) -> None:
    """
    Have the log hold what is about to be done.

    Raises:
        UsageProblem: It cannot be; nothing was changed.
    """
    from tidings.pipeline.scrub import begun_event

    begun = begun_event(plan)

    async def write() -> None:
        async with session.writing() as log:
            await asker().begun(log, "pipeline.scrub", begun.payload)

    try:
        asyncio.run(write())
    except WorkspaceBusy:
        # A node keeps the topic `audit` to itself; through its door the record goes where the jobs' own are.
        if (reason := door.try_publish([begun])) is not None:
            raise UsageProblem(f"no record of it could be left, so nothing was changed: {reason}") from None


def _tell(door: FrontDoor, work: Scrub) -> str | None:
    """Say what was done, also by a scrub that was interrupted; why not yet, if it cannot be said now."""
    while events := work.to_tell():
        if (reason := door.try_publish(events)) is not None:
            return reason
        work.told(len(events))
    return None


def _lake(session: Session) -> Lake:
    from tidings.pipeline.lake import Lake

    return Lake(session.workspace / LAKE_FOLDER, session.clock)


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
        }
        out.json(shown | (done or {}))
        return
    if plan.list_seq is None:
        out.note("nothing was ever listed: run the pipeline with all its jobs first")
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
