"""A ledger with all that works on it: opened as one, by a node or by the tool, so that both have the same parts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final, Self

import msgspec

from tidings.core.clock import SYSTEM_CLOCK, Clock
from tidings.core.events import Event
from tidings.core.tasks import cancel_and_wait
from tidings.ledger.errors import LedgerUnavailable
from tidings.ledger.ledger import Ledger, open_ledger
from tidings.ledger.settings import LedgerSettings
from tidings.ledger.snapshot_files import FileSnapshots
from tidings.log.embedded.disk import Disk
from tidings.log.embedded.layout import Layout
from tidings.log.interface import Log
from tidings.schedule.actions import Actions, ScheduledAction
from tidings.schedule.appointment_runner import AppointmentRunner
from tidings.schedule.appointments import Appointments
from tidings.schedule.settings import ScheduleSettings
from tidings.schedule.time_trust import TimeTrustTracker, sync_source_of
from tidings.schedule.watch_runner import WatchRunner
from tidings.schedule.watches import Watches, WatchSettings

from .claimants import Names, Tokens
from .operations import Operations
from .settings import StewardSettings

logger = logging.getLogger(__name__)

_KEY_BYTES: Final = 32
_RETRY_S: Final = 1.0


class LedgerService:
    """
    A ledger and what works on it. Made by ``open_ledger_service``.

    Args:
        ledger: The ledger.
        settings: Of appointments and of watches.
        steward: How plugins are called, and bounds.
        names: How plugins are called.
        publish: Stores an event, for actions with a topic.
    """

    def __init__(
        self,
        ledger: Ledger,
        *,
        schedule: ScheduleSettings,
        watches: WatchSettings,
        steward: StewardSettings,
        names: Names,
        publish: Callable[[Event], Awaitable[object]] | None,
    ) -> None:
        self.ledger = ledger
        self.actions = Actions(request=self._request, publish=publish, clock=ledger.clock)
        """What appointments and watches do; handlers in this process register here."""
        self.trust = TimeTrustTracker(
            ledger.clock, sync_source_of(schedule), ledger.happenings.emit_durable, settings=schedule
        )
        self.appointments = AppointmentRunner(ledger, self.actions, trust=self.trust, settings=schedule)
        self.watches = WatchRunner(
            ledger, self.actions, is_time_trusted=lambda: self.trust.state.is_strict, settings=watches
        )
        self._problem: str | None = None
        """Why appointments are not kept, if they are not."""
        self._started: list[AppointmentRunner | WatchRunner] = []
        self._starting: asyncio.Task[None] | None = None
        self.operations = Operations(
            ledger, steward, names, appointments=self.appointments, watches=self.watches, trust=self.trust
        )

    async def start(self) -> None:
        """
        Begin to keep appointments and to watch.

        Where the log has no room at the moment, that begins as soon as it has: ``problem`` says so until then.
        """
        self.trust.start()
        try:
            await self._start_runners()
        except LedgerUnavailable as error:
            self._problem = f"appointments and watches wait: {error.describe()}"
            logger.error("%s", self._problem)
            self._starting = asyncio.get_running_loop().create_task(self._start_later(), name="ledger service")

    async def _start_runners(self) -> None:
        for runner in (self.watches, self.appointments):
            if runner not in self._started:
                await runner.start()
                self._started.append(runner)

    async def _start_later(self) -> None:
        while self._problem is not None:
            await self.ledger.clock.sleep(_RETRY_S)
            try:
                await self._start_runners()
            except LedgerUnavailable:
                continue
            self._problem = None

    async def stop(self) -> None:
        """Keep no more appointments, and watch no more; what is under way may end. Stopping twice is fine."""
        await cancel_and_wait(self._starting)
        await self.appointments.close()
        await self.watches.close()
        await self.trust.close()
        await self.actions.close()

    @property
    def problem(self) -> str | None:
        """What keeps the ledger or what works on it from working, if anything does."""
        return self._problem if self.ledger.is_available else "the ledger takes no commands at the moment"

    async def close(self) -> None:
        """Stop, then close the ledger. The log stays open. Closing twice is fine."""
        await self.stop()
        await self.ledger.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def _request(self, action: ScheduledAction, firing: str) -> object:
        assert action.target_shelf is not None
        assert action.request_type is not None
        payload = msgspec.json.encode(action.payload)
        return await self.ledger.plugins.request(action.target_shelf, action.request_type, payload)


async def open_ledger_service(
    log: Log,
    workspace: Path,
    *,
    settings: LedgerSettings | None = None,
    schedule: ScheduleSettings | None = None,
    watches: WatchSettings | None = None,
    catalogue: Path | None = None,
    steward: StewardSettings | None = None,
    publish: Callable[[Event], Awaitable[object]] | None = None,
    clock: Clock = SYSTEM_CLOCK,
    disk: Disk | None = None,
) -> LedgerService:
    """
    Open the ledger of a log that is open. Appointments and watches are not run before ``LedgerService.start``.

    Args:
        log: The log; it stays open.
        workspace: Its folder, where snapshots are kept.
        settings, schedule, watches: How the ledger, appointments and watches behave.
        catalogue: The file with the catalogue; as it was if left out.
        steward: How plugins are called, and bounds.
        publish: Stores an event, for actions with a topic: a bus's ``publish``.
        clock, disk: Replaceable for tests.

    Raises:
        SettingsError: A setting cannot be used here.
        LedgerError: See ``open_ledger``.
    """
    steward = steward or StewardSettings()
    ledger = await open_ledger(
        log,
        catalogue=catalogue,
        settings=settings,
        parts=(Appointments, Watches),
        clock=clock,
        snapshots=FileSnapshots(workspace, disk=disk),
    )
    try:
        return LedgerService(
            ledger,
            schedule=schedule or ScheduleSettings(),
            watches=watches or WatchSettings(),
            steward=steward,
            names=Names() if steward.claimants == "names" else Tokens(_claimants_key(workspace)),
            publish=publish,
        )
    except BaseException:
        await ledger.close()
        raise


def _claimants_key(workspace: Path) -> bytes:
    """The key of a workspace's tokens; made if there is none."""
    path = Layout(workspace).ledger / "claimants.key"
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(file, secrets.token_bytes(_KEY_BYTES))
            os.fsync(file)
        finally:
            os.close(file)
    return path.read_bytes()
