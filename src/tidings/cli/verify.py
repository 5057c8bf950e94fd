"""``tidings log verify``: read every byte, change nothing, name each place that is not as it was written."""

from __future__ import annotations

from typing import Annotated

import typer

from tidings.log.embedded.disk import OsDisk
from tidings.log.embedded.verify import VerifyProgress, VerifyReport
from tidings.log.embedded.verify import verify as verify_log

from .errors import ExitCode
from .output import Output, human_bytes
from .session import Session, command

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command to its noun."""
    command(app, "verify", examples="tidings log verify\ntidings log verify --json | jq .findings")(verify)


def verify(
    session: Session,
    *,
    are_ids_checked: Annotated[
        bool, typer.Option("--ids/--no-ids", help="Look for event ids that come twice or that the index lacks.")
    ] = True,
) -> None:
    """
    Check the whole log, byte by byte, and change nothing.

    A log that is being written can be verified too. Exit code 1 if anything is wrong; what opening the log
    puts right by itself (severity info) is shown and is not wrong.
    """
    with session.index() as index, session.out.progress("verifying (bytes)", None) as advance:

        def progress(state: VerifyProgress) -> None:
            advance(state.bytes, state.bytes_total)

        report = verify_log(
            OsDisk(),
            session.layout,
            session.settings_if_damaged(),
            ids=are_ids_checked,
            index=index,
            progress=progress,
        )
    if session.out.is_json:
        session.out.json(report.to_dict())
    else:
        _show(session.out, report)
    if any(finding.severity != "info" for finding in report.findings):
        raise typer.Exit(ExitCode.PROBLEM)


def _show(out: Output, report: VerifyReport) -> None:
    if report.findings:
        out.table(
            "Findings",
            ("severity", "code", "file", "byte>", "seq>", "what"),
            (
                (
                    finding.severity,
                    finding.code,
                    finding.path,
                    finding.byte_offset,
                    "-" if finding.seq is None else finding.seq,
                    finding.message,
                )
                for finding in report.findings
            ),
        )
        for hint in sorted({finding.hint for finding in report.findings if finding.hint is not None}):
            out.text(f"hint: {hint}")
    if report.omitted:
        out.text(f"and {report.omitted} more findings")
    looked = f"{report.lines} records in {report.segments} segments ({human_bytes(report.bytes)})"
    pending = f", {report.journal_lines} more in the journal" if report.journal_lines else ""
    out.text(f"looked at {looked}{pending}, up to seq {report.last_seq}")
    if report.was_written:
        out.text("the log was written to meanwhile; what came after the start was not looked at")
    if report.is_sound:
        out.text("sound: nothing is lost or altered")
    else:
        out.text("NOT sound: see what 'tidings log repair --dry-run' would set aside")
