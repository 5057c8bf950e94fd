"""
Custody: which plugin looks after which long-running work, and how that is doing.

A record is kept by plugin and handle for as long as the custody lasts; releasing it drops the record. A plugin may report a state before it
has said that it took custody (it may do so while it takes it): such a record has neither shelf nor type yet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal

import msgspec

from tidings.happenings.happening import Happening
from tidings.happenings.variants import (
    CustodyAborted,
    CustodyDegraded,
    CustodyReleased,
    CustodyStateReported,
    CustodyTaken,
    HealthStatus,
)

from .commands import Command, CommandOutcome, check_name, check_payload, check_text
from .errors import DuplicateCustody, InvalidCommand, UnknownCustody
from .paging import KeyOrder
from .state import FIRST_RULES, LedgerState


class CustodyActive(msgspec.Struct, frozen=True, tag_field="kind", tag="active"):
    """The work goes on."""


class CustodyIsDegraded(msgspec.Struct, frozen=True, tag_field="kind", tag="degraded"):
    """A correction failed, and the work goes on as well as it can."""

    reason: str


class CustodyIsAborted(msgspec.Struct, frozen=True, tag_field="kind", tag="aborted"):
    """A correction failed and ended the work. The record stays until the custody is released."""

    reason: str


class CustodyReport(msgspec.Struct, frozen=True):
    """The last state that was reported."""

    payload: bytes
    health: HealthStatus
    reported_at_ms: int


class CustodyRecord(msgspec.Struct, frozen=True):
    """What is known of one custody."""

    plugin: str
    handle_id: str
    shelf: str | None
    custody_type: str | None
    last_state: CustodyReport | None
    state: CustodyActive | CustodyIsDegraded | CustodyIsAborted
    started_at_ms: int
    last_updated_ms: int


class Custodies:
    """Every custody there is, by plugin and handle."""

    name: ClassVar[str] = "custodies"
    frozen_type: ClassVar[Any] = list[CustodyRecord]

    def __init__(self) -> None:
        self._records: dict[tuple[str, str], CustodyRecord] = {}
        self.order = KeyOrder(self._records)

    def freeze(self) -> list[CustodyRecord]:
        return list(self._records.values())

    def restore(self, frozen: list[CustodyRecord]) -> None:
        self._records.update(((record.plugin, record.handle_id), record) for record in frozen)

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[CustodyRecord]:
        """All records, by plugin and handle."""
        return (self._records[key] for key in sorted(self._records))

    def get(self, plugin: str, handle_id: str) -> CustodyRecord | None:
        """The record, if there is one."""
        return self._records.get((plugin, handle_id))

    def of_plugin(self, plugin: str) -> Sequence[CustodyRecord]:
        """The plugin's records, in the order in which they began."""
        return [record for record in self._records.values() if record.plugin == plugin]

    def require(self, plugin: str, handle_id: str) -> CustodyRecord:
        """The record, or ``UnknownCustody``."""
        record = self.get(plugin, handle_id)
        if record is None:
            raise UnknownCustody(plugin, handle_id)
        return record

    def put(self, plugin: str, handle_id: str, at_ms: int, **changes: Any) -> None:
        """Change a record, or begin one."""
        known = self.get(plugin, handle_id)
        if known is None:
            self.order.changed((plugin, handle_id))
            known = CustodyRecord(plugin, handle_id, None, None, None, CustodyActive(), at_ms, at_ms)
        # The time of the last change never goes back, even if the clock does.
        changes["last_updated_ms"] = max(at_ms, known.last_updated_ms)
        self._records[plugin, handle_id] = msgspec.structs.replace(known, **changes)

    def drop(self, plugin: str, handle_id: str) -> CustodyRecord:
        """Remove a record that is there."""
        self.order.changed((plugin, handle_id))
        return self._records.pop((plugin, handle_id))


class RecordCustody(Command, frozen=True, kw_only=True, omit_defaults=True):
    """A plugin took custody. A record that a report began gets shelf and type; one that has them is refused."""

    plugin: str
    handle_id: str
    shelf: str
    custody_type: str

    def execute(self, state: LedgerState, at_ms: int) -> CommandOutcome:
        for field in ("plugin", "handle_id", "shelf", "custody_type"):
            check_name(field, getattr(self, field))
        custodies = state.part(Custodies)
        known = custodies.get(self.plugin, self.handle_id)
        if known is not None and known.shelf is not None and state.rules > FIRST_RULES:
            raise DuplicateCustody(self.plugin, self.handle_id)
        custodies.put(self.plugin, self.handle_id, at_ms, shelf=self.shelf, custody_type=self.custody_type)
        taken = CustodyTaken(
            at_ms=at_ms,
            plugin=self.plugin,
            handle_id=self.handle_id,
            shelf=self.shelf,
            custody_type=self.custody_type,
        )
        return CommandOutcome([taken], custodies.require(self.plugin, self.handle_id))


class ReportCustodyState(Command, frozen=True, kw_only=True, omit_defaults=True):
    """
    A plugin reports how the work is doing. The last report is kept, and only that.

    Unless ``is_begun``, a report about a custody that is not known begins a record, for one that is about to be taken.
    """

    plugin: str
    handle_id: str
    health: HealthStatus
    payload: bytes = b""
    is_begun: bool = False

    def execute(self, state: LedgerState, at_ms: int) -> CommandOutcome:
        check_name("plugin", self.plugin)
        check_name("handle_id", self.handle_id)
        check_payload(self.payload)
        custodies = state.part(Custodies)
        if self.is_begun:
            custodies.require(self.plugin, self.handle_id)
        report = CustodyReport(self.payload, self.health, at_ms)
        custodies.put(self.plugin, self.handle_id, at_ms, last_state=report)
        reported = CustodyStateReported(at_ms=at_ms, plugin=self.plugin, handle_id=self.handle_id, health=self.health)
        return CommandOutcome([reported], custodies.require(self.plugin, self.handle_id))


class FailCustody(Command, frozen=True, kw_only=True, omit_defaults=True):
    """A correction failed: the work is over, or goes on degraded. The record stays and has the reason."""

    plugin: str
    handle_id: str
    mode: Literal["aborted", "degraded"]
    reason: str

    def execute(self, state: LedgerState, at_ms: int) -> CommandOutcome:
        check_text("reason", self.reason)
        custodies = state.part(Custodies)
        record = custodies.require(self.plugin, self.handle_id)
        if record.shelf is None:
            raise InvalidCommand("handle_id", f"{self.handle_id!r} is being taken; it is on no shelf yet")
        is_over = self.mode == "aborted"
        kind = CustodyIsAborted if is_over else CustodyIsDegraded
        custodies.put(self.plugin, self.handle_id, at_ms, state=kind(self.reason))
        variant = CustodyAborted if is_over else CustodyDegraded
        failed: Happening = variant(
            at_ms=at_ms, plugin=self.plugin, handle_id=self.handle_id, shelf=record.shelf, reason=self.reason
        )
        return CommandOutcome([failed], custodies.require(self.plugin, self.handle_id))


class ReleaseCustody(Command, frozen=True, kw_only=True, omit_defaults=True):
    """Custody ends; the answer is the record as it was last."""

    plugin: str
    handle_id: str

    def execute(self, state: LedgerState, at_ms: int) -> CommandOutcome:
        custodies = state.part(Custodies)
        custodies.require(self.plugin, self.handle_id)
        record = custodies.drop(self.plugin, self.handle_id)
        return CommandOutcome([CustodyReleased(at_ms=at_ms, plugin=self.plugin, handle_id=self.handle_id)], record)


class AbandonCustody(Command, frozen=True, kw_only=True, omit_defaults=True):
    """Forget what was reported about a custody that was then not taken. One that was taken stays; nothing is told either way."""

    plugin: str
    handle_id: str

    def execute(self, state: LedgerState, at_ms: int) -> CommandOutcome:
        custodies = state.part(Custodies)
        record = custodies.get(self.plugin, self.handle_id)
        if record is None or record.shelf is not None:
            return CommandOutcome(is_changed=False)
        custodies.drop(self.plugin, self.handle_id)
        return CommandOutcome()
