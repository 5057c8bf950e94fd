"""
The topic ``audit``: who changed what, when, and how that ended.

Every change that is made for others (moving a group, dropping dead letters, compaction) goes through ``Audit.of``, whether it comes by the
bus's own methods, by HTTP or by the command line. One record is durable before the change begins, a second one names the first and says
how the change ended. A first record without a second is a change that a crash has interrupted.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Final, Literal

from tidings.core.errors import TidingsError
from tidings.core.events import Event, EventMeta
from tidings.log.errors import StorageFull
from tidings.log.interface import Log
from tidings.log.retention import RetentionPlan

logger = logging.getLogger(__name__)

AUDIT_TOPIC: Final = "audit"
AUDITED_COUNT_MAX: Final = 500
"""How many things a record names one by one; beyond that it counts them."""


class Audit:
    """
    On whose behalf something is changed.

    Args:
        actor: Who: a token's subject, a user of the machine, a part of the node, the process that holds the bus.
        via: The way the request came; the first part of the records' type, as in ``api.group.seek``.
        request_id: The request that asked for it.
    """

    __slots__ = ("_request_id", "actor", "seq", "via")

    def __init__(self, actor: str = "process", via: str = "bus", request_id: str | None = None) -> None:
        self.actor = actor
        self.via = via
        self._request_id = request_id
        self.seq: int | None = None
        """Of the record that was last written before a change."""

    @contextlib.asynccontextmanager
    async def of(
        self, log: Log, verb: str, details: Mapping[str, Any], *, frees_space: bool = False
    ) -> AsyncIterator[int | None]:
        """
        Make a change within this: it is on record before, and how it ended after.

        Args:
            log: Where to.
            verb: What: ``group.seek``.
            details: What is changed, and what follows from it.
            frees_space: Where even the reserve has no room for the first record, go on: the change makes the room. It is then on
                record afterwards only.

        Yields:
            The first record's seq; ``None`` if there was no room for it.

        Raises:
            StorageFull: There is no room for the record; nothing was changed.
        """
        details = self._with_request(details)
        try:
            await self.begun(log, verb, details)
        except StorageFull:
            if not frees_space:
                raise
            logger.warning("%s.%s by %s goes on before it is on record: the disk is full", self.via, verb, self.actor)
        try:
            yield self.seq
        except BaseException as error:
            # In the words of its kind only: the text may quote what an event says.
            kind = error.code if isinstance(error, TidingsError) else type(error).__name__
            await self._write_end(log, verb, details, "failed", kind)
            raise
        await self._write_end(log, verb, details, "done")

    async def begun(self, log: Log, verb: str, details: Mapping[str, Any]) -> int:
        """Put a change on record whose end is recorded in another way; returns the record's seq."""
        self.seq = None
        self.seq = await self._write(log, verb, self._with_request(details))
        return self.seq

    def _with_request(self, details: Mapping[str, Any]) -> dict[str, Any]:
        return dict(details) if self._request_id is None else {**details, "request_id": self._request_id}

    async def _write_end(
        self,
        log: Log,
        verb: str,
        details: Mapping[str, Any],
        outcome: Literal["done", "failed"],
        error: str | None = None,
    ) -> None:
        end = {"outcome": outcome, "audit_seq": self.seq, **({} if error is None else {"error": error})}
        try:
            await self._write(log, f"{verb}.ended", end if self.seq is not None else {**details, **end})
        except TidingsError as problem:
            logger.error("%s.%s by %s: %s, and that is not on record: %s", self.via, verb, self.actor, outcome, problem)

    async def _write(self, log: Log, verb: str, details: Mapping[str, Any]) -> int:
        meta = EventMeta(topic=AUDIT_TOPIC, type=f"{self.via}.{verb}", space_id="system", actor=self.actor)
        # On a full disk too: else nothing could be changed there that has to be on record.
        return (await log.append(Event(meta, details), from_reserve=True)).seq


def audited_drops(plan: RetentionPlan) -> dict[str, object]:
    """What a record says of segments that are dropped."""
    return {
        "segments": len(plan.drops),
        "records": sum(decision.segment.lines for decision in plan.drops),
        "freed_bytes": plan.freed_bytes,
        "dropped": [
            {
                "topic": drop.segment.topic,
                "space_id": drop.segment.space_id,
                "segment": drop.segment.number,
                "reason": drop.reason,
            }
            for drop in plan.drops[:AUDITED_COUNT_MAX]
        ],
    }


def audited_dead_letters(topic: str, ids: Sequence[str]) -> dict[str, object]:
    """What a record says of dead letters that are changed."""
    return {"topic": topic, "count": len(ids), "ids": list(ids[:AUDITED_COUNT_MAX])}
