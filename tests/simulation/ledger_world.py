"""
A ledger through several lives, on a simulated disk and in simulated time, in which a seed decides everything.

Callers pass names on to each other, and only one of those who want the same may succeed; some emit without the log; clients follow with a cursor
that outlives them; an operator takes snapshots, trims history, drops records, closes and opens; and the process is killed, or the power
goes, at any step. ``LedgerBook`` holds what was promised.
"""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar, Final

import msgspec

from tests.crash.support import ROOMY
from tests.simulation.book import Broken
from tests.unit.ledger.test_history import drop_all
from tidings.happenings.bus import Envelope
from tidings.happenings.errors import CursorTooOld, HappeningsClosed, Lagged
from tidings.happenings.variants import CustodyReleased
from tidings.ledger import Command, CommandOutcome, Ledger, LedgerSettings, LedgerState, open_ledger
from tidings.ledger.errors import LedgerClosed, NotClaimant
from tidings.ledger.snapshot_files import FileSnapshots
from tidings.log.embedded import EmbeddedLog, open_log
from tidings.log.embedded.index import MemoryIndex
from tidings.log.errors import LogClosed
from tidings.testing import InterleavedDisk

from .lives import Lives
from .world import QUIET_S, WORKSPACE

OPERATIONS: Final = ("snapshot", "trim", "drop", "reopen")


class _Frozen(msgspec.Struct, frozen=True):
    owners: dict[str, str]
    applied: dict[str, int]


class Owners:
    """Who has which name, and which commands made it so; a part."""

    name: ClassVar[str] = "simulated_owners"
    frozen_type: ClassVar[Any] = _Frozen

    def __init__(self) -> None:
        self.owners: dict[str, str] = {}
        self.applied: dict[str, int] = {}

    def freeze(self) -> _Frozen:
        return _Frozen(dict(self.owners), dict(self.applied))

    def restore(self, frozen: _Frozen) -> None:
        self.owners.update(frozen.owners)
        self.applied.update(frozen.applied)


class PassOn(Command, frozen=True, kw_only=True, omit_defaults=True):
    """Give a name from one owner to another; refused if the first one does not have it."""

    serial: str
    passed: str
    old: str
    new: str
    times: int = 1

    def execute(self, state: LedgerState, at_ms: int) -> CommandOutcome:
        part = state.part(Owners)
        if part.owners.get(self.passed, "") != self.old:
            raise NotClaimant(self.old, self.passed)
        part.owners[self.passed] = self.new
        part.applied[self.serial] = len(part.applied)
        told = [
            CustodyReleased(at_ms=at_ms, plugin=self.new, handle_id=f"{self.serial}|{self.passed}|{self.old}|{n}")
            for n in range(self.times)
        ]
        return CommandOutcome(told, result=self.new)


class LedgerBook:
    """What was offered and promised."""

    def __init__(self) -> None:
        self.offered: dict[str, PassOn] = {}
        self.done: set[str] = set()
        self.refused: set[str] = set()
        self.seen: dict[int, CustodyReleased] = {}
        """Every happening that anybody got, by its seq."""

    def see(self, envelope: Envelope) -> CustodyReleased:
        """Somebody got this."""
        happening = envelope.happening
        assert isinstance(happening, CustodyReleased)
        if self.seen.setdefault(envelope.seq, happening) != happening:
            raise Broken(f"seq {envelope.seq} was {self.seen[envelope.seq]} and is {happening}")
        return happening


class Client:
    """A subscriber that goes on where it was, life after life."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.cursor = 0
        self.got: list[int] = []
        self.has_gaps = False
        """It was told that it missed something."""


class LedgerSimulation(Lives):
    """
    One seed's course.

    Args:
        seed: Decides everything.
    """

    def __init__(self, seed: object) -> None:
        super().__init__("ledger", seed)
        rng = self.rng
        self.callers = rng.randint(1, 3)
        self.commands = rng.randint(3, 12)
        self.operations = [each for each in OPERATIONS if rng.random() < 0.5]
        self.turns = rng.randint(0, 8)
        self.settings = LedgerSettings(
            buffer_count_max=rng.choice((4, 1000)),
            history_count_max=rng.choice((5, None)),
            history_age_s_max=None,
            snapshot_records_max=rng.choice((2, 5, 1000)),
            batch_count_max=rng.choice((1, 3, 1000)),
            record_bytes_max=1024,
        )
        self.book = LedgerBook()
        self.clients = [Client(f"client {n}") for n in range(rng.randint(1, 2))]
        self.number = 0

    async def _main(self) -> None:
        self.is_open = asyncio.Event()
        await self._open()
        clients = [asyncio.create_task(self._follow(client), name=client.name) for client in self.clients]
        jobs = [self._call(n) for n in range(self.callers)] + [self._operate(), self._emit()]
        await asyncio.wait_for(asyncio.gather(*(asyncio.create_task(job) for job in jobs)), QUIET_S)
        await self._finish(clients)

    async def _open(self) -> None:
        disk = InterleavedDisk(self.disk, self.loop)
        self.log: EmbeddedLog = await open_log(WORKSPACE, ROOMY, disk=disk, index=MemoryIndex(), clock=self.clock)
        self.ledger: Ledger = await open_ledger(
            self.log,
            parts=[Owners],
            settings=self.settings,
            clock=self.clock,
            snapshots=FileSnapshots(WORKSPACE, disk=disk),
        )
        await self._check_state()
        self.is_open.set()

    async def _close(self) -> None:
        self.is_open.clear()
        await self.ledger.close()
        await self.log.close()

    async def _check_state(self) -> None:
        """All that was answered is there, nothing that was refused is, and each change follows from the one before."""
        found: _Frozen = await self.ledger.read(lambda state: state.part(Owners).freeze())
        lost = self.book.done - found.applied.keys()
        if lost:
            raise Broken(f"done and gone: {sorted(lost)}")
        if self.book.refused & found.applied.keys():
            raise Broken("refused and done all the same")
        owners: dict[str, str] = {}
        for serial in found.applied:
            command = self.book.offered[serial]
            if owners.get(command.passed, "") != command.old:
                raise Broken(f"{command} was done while {owners.get(command.passed)!r} had the name")
            owners[command.passed] = command.new
        if owners != found.owners:
            raise Broken(f"the owners are {found.owners}, not {owners}")

    # Who is there

    async def _call(self, caller: int) -> None:
        for _ in range(self.commands):
            await self.is_open.wait()
            passed = self.rng.choice("ab")
            try:
                old = await self.ledger.read(lambda state, name=passed: state.part(Owners).owners.get(name, ""))  # type: ignore[misc]
                if self.rng.random() < 0.5:
                    await self.clock.sleep(self.rng.uniform(0, 0.01))
                self.number += 1
                command = PassOn(
                    serial=f"{caller}.{self.number}",
                    passed=passed,
                    old=old,
                    new=f"{caller}.{self.number}",
                    times=self.rng.choice((0, 1, 1, 2, 15)),
                )
                self.book.offered[command.serial] = command
                await self.ledger.execute(command)
                self.book.done.add(command.serial)
            except NotClaimant:
                self.book.refused.add(command.serial)
            except LedgerClosed:
                continue

    async def _emit(self) -> None:
        for n in range(self.rng.randint(0, 6)):
            await self.clock.sleep(self.rng.uniform(0, 0.02))
            await self.is_open.wait()
            self.ledger.happenings.emit(CustodyReleased(at_ms=1, plugin="plain", handle_id=f"{self.lives}.{n}"))

    async def _follow(self, client: Client) -> None:
        while True:
            await self.is_open.wait()
            try:
                subscription = self.ledger.happenings.subscribe(since=client.cursor)
            except CursorTooOld as error:
                client.has_gaps = True
                client.cursor = error.oldest_available_seq - 1 if error.oldest_available_seq else error.current_seq
                await self.clock.sleep(0.001)
                continue
            await self._read(client, subscription)

    async def _read(self, client: Client, subscription: Any) -> None:
        while True:
            try:
                envelopes = await subscription.recv_many(3)
            except (Lagged, CursorTooOld) as error:
                client.has_gaps = True
                if isinstance(error, CursorTooOld):
                    return
                continue
            except (HappeningsClosed, LogClosed):
                await asyncio.sleep(0)
                return
            for envelope in envelopes:
                if envelope.seq <= client.cursor:
                    raise Broken(f"{client.name} was at {client.cursor} and got {envelope.seq}")
                client.cursor = envelope.seq
                client.got.append(envelope.seq)
                happening = self.book.see(envelope)
                if happening.plugin != "plain":
                    await self._look(happening)

    async def _look(self, happening: CustodyReleased) -> None:
        """Whoever is told reads the state, and finds the change in it."""
        serial = happening.handle_id.partition("|")[0]
        try:
            is_there = await self.ledger.read(lambda state: serial in state.part(Owners).applied)
        except LedgerClosed:
            return
        if not is_there:
            raise Broken(f"{serial} was told, and is not in the state")

    async def _operate(self) -> None:
        for _ in range(self.turns if self.operations else 0):
            await self.clock.sleep(self.rng.uniform(0, 0.02))
            match self.rng.choice(self.operations):
                case "snapshot":
                    await self.ledger.take_snapshot()
                case "trim":
                    await self.ledger.trim_history()
                case "drop":
                    await drop_all(self.log, self.ledger, self.clock)
                case "reopen":
                    await self._close()
                    await self._open()

    async def _finish(self, clients: list[asyncio.Task[None]]) -> None:
        """Everybody has been told everything that is written down; then the ledger is closed, and opened once more."""
        await self._check_state()
        happenings = self.ledger.happenings
        oldest_seq = self.ledger._history.trimmed_through + 1
        stored = {each.seq: each async for each in happenings.history(since=oldest_seq - 1)}
        for _ in range(1000):
            if all(client.cursor >= happenings.last_seq for client in self.clients):
                break
            await self.clock.sleep(0.01)
        for task in clients:
            if task.done():
                task.result()
            task.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
        for envelope in stored.values():
            self.book.see(envelope)
        for client in self.clients:
            missed = stored.keys() - set(client.got)
            if missed and not client.has_gaps:
                raise Broken(f"{client.name} never got {sorted(missed)}, and was not told so")
        last_seq = happenings.last_seq
        await self._close()
        await self._open()
        if self.ledger.happenings.last_seq < last_seq:
            raise Broken(f"the last seq was {last_seq}, and is {self.ledger.happenings.last_seq}")
        await self._close()
