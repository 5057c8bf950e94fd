"""
Repair: make a damaged log open again without destroying a byte of it.

``plan_repair`` reads and decides, ``carry_out`` does what the plan says. A topic's offsets have no gaps, so a record
that cannot be read parts its topic in two, and only one side can stay in the log. The rule: of each stream, keep the
longest run of whole records. It may begin at the start, or at the first segment behind a damaged one: then all before
it is marked as dropped, in the way retention does it, and offsets keep their meaning. What a journal still holds
fills holes first. Other streams are not touched. A group that is ahead of what is left is set back, in its file and in
the backup of it alike; whether a group of the ended epoch may go on is for the bus to say, so no epoch is changed.

A segment whose lines are whole but are not what was sealed was rewritten by somebody; nobody can say which line, so
none of it is kept.

Whatever leaves the log is copied, synced, to ``aside/<time>/`` with a ``manifest.json`` before the first change. If
acknowledged records leave it, the log gets a new epoch, also before the first change: a repair that is interrupted
may be started again at any point, and an interrupted one never passes for an untouched history. The manifest's
``lost`` and ``hidden`` tell ``verify`` which gaps are known; keep it when the copies are removed.
"""

from __future__ import annotations

from ..errors import CorruptLog
from ..settings import LogSettings
from .disk import Disk
from .layout import Layout
from .recovery import survey
from .repair_plan import Cut, RepairOutdated, RepairPlan, RepairResult, Rewrite, SetAside, StreamRepair
from .repair_planner import RepairPlanner
from .repair_work import carry_out
from .verify import verify
from .verify_report import Finding

__all__ = [
    "Cut",
    "RepairOutdated",
    "RepairPlan",
    "RepairResult",
    "Rewrite",
    "SetAside",
    "StreamRepair",
    "carry_out",
    "plan_repair",
]


def plan_repair(disk: Disk, layout: Layout, settings: LogSettings) -> RepairPlan:
    """
    Decide what a repair would do; reads only.

    The log should be closed: a plan made beside a writer is refused by ``carry_out``.

    Raises:
        WorkspaceMissing, WorkspaceUnusable, UnsupportedFormat
    """
    report = verify(disk, layout, settings, ids=False)  # an id that comes twice stops nothing, and repair leaves both
    problems = tuple(finding for finding in report.findings if finding.severity != "info")
    is_needed = not report.is_sound or any(finding.code == "checkpoint.damaged" for finding in problems)
    if report.is_sound:
        try:
            survey(disk, layout, settings)
        except CorruptLog as error:
            is_needed = True
            problem = Finding(severity="error", code=error.code, path=error.path, message=error.problem, seq=error.seq)
            problems += (problem,)
    return RepairPlanner(disk, layout, settings).plan(problems, is_needed, report.last_seq)
