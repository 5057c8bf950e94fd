"""A part and commands for tests of the ledger itself, and a log that can be held up and made to fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, ClassVar

from tidings.core.events import Event
from tidings.happenings.variants import CustodyReleased
from tidings.ledger import Command, CommandOutcome, Ledger, LedgerSettings, LedgerState, open_ledger
from tidings.ledger.errors import NotClaimant
from tidings.ledger.snapshots import MemorySnapshots, SnapshotStore
from tidings.log.errors import StorageFull
from tidings.log.interface import Authorise, Health, Log, Verdict
from tidings.log.memory import MemoryLog
from tidings.testing import VirtualClock


class Names:
    """Names that were taken, with who took them; a part."""

    name: ClassVar[str] = "test_names"
    frozen_type: ClassVar[Any] = dict[str, str]

    def __init__(self) -> None:
        self.owners: dict[str, str] = {}

    def freeze(self) -> dict[str, str]:
        return dict(self.owners)

    def restore(self, frozen: dict[str, str]) -> None:
        self.owners.update(frozen)


class TakeName(Command, frozen=True, kw_only=True, omit_defaults=True):
    """Take a name that nobody has, and tell it so many times."""

    taken: str
    by: str
    times: int = 1
    more: Any = None

    def execute(self, state: LedgerState, at_ms: int) -> CommandOutcome:
        owners = state.part(Names).owners
        if self.taken in owners:
            raise NotClaimant(self.by, self.taken)
        owners[self.taken] = self.by
        happenings = [
            CustodyReleased(at_ms=at_ms, plugin=self.by, handle_id=f"{self.taken}/{n}") for n in range(self.times)
        ]
        return CommandOutcome(happenings, result=len(owners))


class BreakHalfway(Command, frozen=True, kw_only=True, omit_defaults=True):
    """Change something, then fail in a way that no command may."""

    def execute(self, state: LedgerState, at_ms: int) -> CommandOutcome:
        state.part(Names).owners["half"] = "nobody"
        raise ZeroDivisionError


class TrickyLog(MemoryLog):
    """A log whose appends can be held up, cut off and refused."""

    def __init__(self, clock: VirtualClock | None = None, **options: Any) -> None:
        super().__init__(clock=clock or VirtualClock(), **options)
        self.gate: asyncio.Event | None = None
        self.stored_max: int | None = None
        """How many events of the next call are stored before the disk is full."""
        self.is_unreadable = False
        self.is_full = False
        self.calls: list[int] = []

    async def append_many(self, events: Sequence[Event], *, authorise: Authorise | None = None) -> list[Verdict]:
        self.calls.append(len(events))
        if self.gate is not None:
            await self.gate.wait()
        if self.stored_max is not None:
            count, self.stored_max = self.stored_max, None
            await super().append_many(events[:count], authorise=authorise)
            raise StorageFull("/disk")
        return await super().append_many(events, authorise=authorise)

    async def read(self, query: Any, **options: Any) -> Any:
        if self.is_unreadable:
            raise OSError("the disk does not answer")
        return await super().read(query, **options)

    def health(self) -> Health:
        return Health(
            is_writable=not self.is_full,
            is_durable=True,
            is_storage_full=self.is_full,
            problem="full" if self.is_full else None,
        )


@asynccontextmanager
async def a_ledger(
    log: Log | None = None,
    *,
    clock: VirtualClock | None = None,
    snapshots: SnapshotStore | None = None,
    **settings: Any,
) -> AsyncIterator[Ledger]:
    """A ledger with the part ``Names``; closed in the end."""
    clock = clock or VirtualClock()
    ledger = await open_ledger(
        log or MemoryLog(clock=clock),
        settings=LedgerSettings(**settings),
        parts=[Names],
        clock=clock,
        snapshots=snapshots or MemorySnapshots(),
    )
    try:
        yield ledger
    finally:
        await ledger.close()


async def killed(ledger: Ledger) -> None:
    """End a ledger as a killed process does: nothing more is written."""
    tasks = [task for task in (ledger._task, ledger._janitor, ledger._snapshots._saving) if task is not None]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    ledger._has_ended = True
    ledger._closing = asyncio.create_task(asyncio.sleep(0))


async def owners(ledger: Ledger) -> dict[str, str]:
    """Who has which name."""
    return await ledger.read(lambda state: state.part(Names).freeze())
