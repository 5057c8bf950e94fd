"""What verify answers: findings, how far it is, and the report of all; and the book it keeps them in meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

__all__ = ["Finding", "FindingBook", "Severity", "VerifyProgress", "VerifyReport"]

Severity = Literal["error", "warning", "info"]


class Finding(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing that was found, and where."""

    severity: Severity
    code: str
    path: str
    message: str
    byte_offset: int = 0
    seq: int | None = None
    topic: str | None = None
    offset: int | None = None
    hint: str | None = None


class VerifyProgress(msgspec.Struct, frozen=True, kw_only=True):
    """How far verifying is; told after every segment."""

    path: str
    segments: int
    segments_total: int
    lines: int
    bytes: int
    bytes_total: int


class VerifyReport(msgspec.Struct, frozen=True, kw_only=True):
    """All that was found, by file and place in it, and how much was looked at."""

    findings: tuple[Finding, ...]
    epoch: str | None
    last_seq: int
    """Up to here the log was checked."""
    segments: int
    lines: int
    """In segments."""
    bytes: int
    """In segments."""
    journal_lines: int
    """Committed records that are not in their segments yet."""
    was_written: bool
    """Whether the log was written to meanwhile; then what came after the start was not checked."""
    chain_heads: dict[str, str]
    """Each stream's last digest. Kept elsewhere, it proves later that nothing before it was altered."""
    omitted: int = 0
    """Findings beyond the limit, counted only."""

    @property
    def is_sound(self) -> bool:
        """Whether nothing is lost or altered."""
        return not any(finding.severity == "error" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain | {"is_sound": self.is_sound}


class FindingBook:
    """Findings on their way to the report: so many are kept, the others counted."""

    def __init__(self, workspace: Path, findings_max: int) -> None:
        self._workspace = workspace
        self._findings_max = findings_max
        self._found: list[tuple[Finding, bool]] = []
        """With each: whether a writer at work would explain it."""
        self.omitted = 0

    def note(
        self,
        severity: Severity,
        code: str,
        path: Path,
        message: str,
        at: int = 0,
        *,
        seq: int | None = None,
        topic: str | None = None,
        offset: int | None = None,
        hint: str | None = None,
        if_written: bool = False,
    ) -> None:
        """
        Write down what was found.

        Args:
            if_written: It is damage only if nobody wrote to the log meanwhile.
        """
        if len(self._found) >= self._findings_max:
            self.omitted += 1
            return
        finding = Finding(
            severity=severity,
            code=code,
            path=str(path.relative_to(self._workspace)),
            message=message,
            byte_offset=at,
            seq=seq,
            topic=topic,
            offset=offset,
            hint=hint,
        )
        self._found.append((finding, if_written))

    def settled(self, *, was_written: bool) -> tuple[Finding, ...]:
        """The findings by file and byte, now that it is known whether the log was written to."""
        findings: list[Finding] = []
        for finding, if_written in self._found:
            if if_written and was_written:
                message = f"{finding.message} (the log was being written: verify again, or when it is closed)"
                findings.append(msgspec.structs.replace(finding, severity="info", message=message))
            else:
                findings.append(finding)
        return tuple(sorted(findings, key=lambda finding: (finding.path, finding.byte_offset)))
