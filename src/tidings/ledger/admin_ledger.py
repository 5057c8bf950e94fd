"""
The admin ledger: what administrators did, entered in the same command that did it.

It knows none of what administrators can do, so that every part of the ledger, and those above it, can make entries.
"""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from .commands import Command, CommandOutcome, check_name, check_reason
from .relations import Triple
from .state import LedgerState
from .subjects import Addressing


class AdminEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an administrator did."""

    kind: str
    admin_plugin: str
    at_ms: int
    target_plugin: str | None = None
    target_subject: str | None = None
    target_addressing: Addressing | None = None
    target_relation: Triple | None = None
    additional_subjects: tuple[str, ...] = ()
    reason: str | None = None
    prior_reason: str | None = None


class AdminLedger:
    """What administrators did, oldest first. Only grows."""

    name: ClassVar[str] = "admin_ledger"
    frozen_type: ClassVar[Any] = tuple[AdminEntry, ...]

    def __init__(self) -> None:
        self._entries: list[AdminEntry] = []

    def freeze(self) -> tuple[AdminEntry, ...]:
        """The entries."""
        return tuple(self._entries)

    def restore(self, frozen: tuple[AdminEntry, ...]) -> None:
        """Take them over."""
        self._entries.extend(frozen)

    def __len__(self) -> int:
        return len(self._entries)

    def record(self, entry: AdminEntry) -> None:
        """Add an entry. Every privileged command does this, with its change."""
        self._entries.append(entry)

    def entries(self, admin_plugin: str | None = None) -> tuple[AdminEntry, ...]:
        """All entries, or those of one administrator."""
        return tuple(entry for entry in self._entries if admin_plugin is None or entry.admin_plugin == admin_plugin)


def record_admin_action(
    state: LedgerState, at_ms: int, admin: str, kind: str, target: Addressing | None = None, reason: str | None = None
) -> None:
    """
    Enter what an administrator does, from within the command that does it.

    Raises:
        InvalidCommand: The name cannot be used.
    """
    check_name("admin", admin)
    entry = AdminEntry(kind=kind, admin_plugin=admin, at_ms=at_ms, target_addressing=target, reason=reason)
    state.part(AdminLedger).record(entry)


class RecordAdminAction(Command, frozen=True, kw_only=True, omit_defaults=True):
    """Enter what an administrator does to something that keeps no such entry itself, such as a name behind a token."""

    admin: str
    kind: str
    target_addressing: Addressing | None = None
    reason: str | None = None

    def execute(self, state: LedgerState, at_ms: int) -> CommandOutcome:
        """Raises ``InvalidCommand``."""
        check_name("kind", self.kind)
        check_reason(self.reason)
        record_admin_action(state, at_ms, self.admin, self.kind, self.target_addressing, self.reason)
        return CommandOutcome()
