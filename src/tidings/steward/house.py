"""A ledger with all that works on it: opened as one, by a node or by the tool, so that both have the same parts."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from tidings.core.clock import SYSTEM_CLOCK, Clock
from tidings.ledger.ledger import Ledger, open_ledger
from tidings.ledger.settings import LedgerSettings
from tidings.ledger.snapshot_files import FileSnapshots
from tidings.log.embedded.disk import Disk
from tidings.log.embedded.layout import Layout
from tidings.log.interface import Log

from .claimants import Names, Tokens
from .operations import Operations
from .settings import StewardSettings

_KEY_BYTES: Final = 32


class House:
    """
    A ledger and what works on it. Made by ``open_house``.

    Attributes:
        ledger: The ledger.
        operations: What clients can ask for.
    """

    def __init__(self, ledger: Ledger, operations: Operations) -> None:
        self.ledger = ledger
        self.operations = operations

    async def close(self) -> None:
        """Stop what runs, then close the ledger. The log stays open. Closing twice is fine."""
        await self.ledger.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()


async def open_house(
    log: Log,
    workspace: Path,
    *,
    settings: LedgerSettings | None = None,
    catalogue: Path | None = None,
    steward: StewardSettings | None = None,
    clock: Clock = SYSTEM_CLOCK,
    disk: Disk | None = None,
) -> House:
    """
    Open the ledger of a log that is open.

    Args:
        log: The log; it stays open.
        workspace: Its folder, where snapshots are kept.
        settings: How the ledger behaves.
        catalogue: The file with the catalogue; as it was if left out.
        steward: How plugins are called, and bounds.
        clock, disk: Replaceable for tests.

    Raises:
        LedgerError: See ``open_ledger``.
    """
    steward = steward or StewardSettings()
    snapshots = FileSnapshots(workspace, disk=disk)
    ledger = await open_ledger(log, catalogue=catalogue, settings=settings, clock=clock, snapshots=snapshots)
    names = Names() if steward.claimants == "names" else Tokens(_claimants_key(workspace))
    operations = Operations(ledger, steward, names, clock_trust=lambda: "trusted")
    return House(ledger, operations)


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
