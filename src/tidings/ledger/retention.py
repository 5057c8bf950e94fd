"""What the log's retention has to leave of the ledger's records: those that snapshots do not cover, and the history that is kept."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import msgspec

from tidings.log.retention import Needs, RecordHolders

from .ledger import Ledger
from .records import LEDGER_TOPIC


class LedgerHolders:
    """
    A ledger and those beside it who need records of the same log; for whoever plans retention, and for ``Log.drop``.

    Args:
        ledger: The ledger.
        others: The others.
    """

    def __init__(self, ledger: Ledger, others: RecordHolders) -> None:
        self._ledger = ledger
        self._others = others

    async def needs(self) -> Needs:
        """Which records of all topics are needed now."""
        return await self._with_ledger(await self._others.needs())

    @contextlib.asynccontextmanager
    async def needs_of(self, topic: str) -> AsyncIterator[Needs]:
        """Which records of a topic are needed; while the context is open nobody begins to need more."""
        async with self._others.needs_of(topic) as needs:
            yield await self._with_ledger(needs)

    async def _with_ledger(self, needs: Needs) -> Needs:
        through = await self._ledger.released_through()
        return msgspec.structs.replace(needs, folds={**needs.folds, LEDGER_TOPIC: through})
