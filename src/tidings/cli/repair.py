"""``tidings log repair``: make a damaged log open again; show the plan, ask, and say where things were set aside."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from tidings.log.embedded.disk import OsDisk
from tidings.log.embedded.repair import RepairPlan, RepairResult, carry_out, plan_repair

from .confirm import YesOption, ask, asker, check_dry_run, keep_to_oneself
from .errors import ExitCode
from .output import Output, human_bytes
from .session import Session, command

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command to its noun."""
    command(
        app, "repair", examples="tidings log repair --dry-run\ntidings log repair\ntidings log repair --yes --json"
    )(repair)


async def repair(
    session: Session,
    *,
    is_dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the plan only; exit code 1 if one is needed.")
    ] = False,
    is_yes: YesOption = False,
) -> None:
    """
    Make a damaged log open again, without destroying a byte of it.

    Whatever leaves the log is copied first, and the command says where to. If acknowledged records leave it,
    the log gets a new epoch, so that no reader takes it for the old one. The log must be closed. What was done
    is recorded in the topic `audit`.
    """
    check_dry_run(is_dry_run=is_dry_run, is_yes=is_yes)
    disk, layout, out = OsDisk(), session.layout, session.out
    plan = plan_repair(disk, layout, session.settings_if_damaged())
    if is_dry_run or not plan.is_needed:
        _show_plan(out, plan)
        if plan.is_needed:
            raise typer.Exit(ExitCode.PROBLEM)
        return
    if not out.is_json:
        _show_plan(out, plan)
        out.flush()
    keep_to_oneself(session)
    ask(out, "Carry this out?", is_yes=is_yes)
    result = carry_out(disk, layout, plan, session.clock)
    # The damaged log took no records, so this one comes after the deed; the copies' manifest stands before it.
    async with session.writing() as log:
        await asker().begun(
            log, "repair", {**result.to_dict(), "lost_count": plan.lost_count, "lost": plan.lost[:1000]}
        )
    if result.folder is not None:  # in the log it is told from the workspace, here from where the person stands
        result = msgspec.structs.replace(result, folder=str(session.workspace / result.folder))
    _show_result(out, plan, result)


def _show_plan(out: Output, plan: RepairPlan) -> None:
    if out.is_json:
        out.json({"plan": plan.to_dict(), "carried_out": False})
        return
    if not plan.is_needed:
        out.text("no repair is needed")
        return
    out.table(
        "Problems",
        ("severity", "code", "file", "byte>", "what"),
        ((each.severity, each.code, each.path, each.byte_offset, each.message) for each in plan.problems),
    )
    if plan.streams:
        out.table(
            "Topics that change",
            ("topic", "records kept>", "set aside>", "offsets kept"),
            (
                (
                    each.topic if each.space_id is None else f"{each.space_id}/{each.topic}",
                    each.kept,
                    each.set_aside,
                    f"{each.first_offset} to {each.last_offset}" if each.kept else "-",
                )
                for each in plan.streams
            ),
        )
    if plan.aside:
        out.table(
            "Copied before it leaves the log",
            ("file", "from byte>", "size>", "because"),
            ((each.path, each.byte_offset, human_bytes(each.size), each.why) for each in plan.aside),
        )
    if plan.loses_records:
        out.text(f"{plan.lost_count} acknowledged records would not be in the log; it would get a new epoch")
    else:
        out.text("no acknowledged record would be lost")


def _show_result(out: Output, plan: RepairPlan, result: RepairResult) -> None:
    if out.is_json:
        out.json({"plan": plan.to_dict(), "carried_out": True, "result": result.to_dict()})
        return
    if result.folder is not None:
        out.text(f"set aside in {result.folder}")
    if result.is_new_epoch:
        out.text(f"the log has a new epoch: {result.epoch}")
    out.text(f"repaired; the log goes on after seq {result.last_seq}")
