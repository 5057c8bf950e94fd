"""
The topic ``audit``: who changed what, when, and how that ended.

Every change that is made for others (moving a group, dropping dead letters, compaction) goes through ``Audit.of``, whether it comes by the
bus's own methods, by HTTP or by the command line. One record is durable before the change begins, a second one names the first and says
how the change ended. A first record without a second is a change that a crash has interrupted.

What the node's own parts find noteworthy, who connected, whom they refused and why, goes through ``AuditLog``: it takes records without
waiting, up to a bound, and writes them in batches. Its records have types as ``security.event.subscription_opened``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

from tidings.core.clock import Clock, within
from tidings.core.errors import TidingsError
from tidings.core.events import Event, EventMeta
from tidings.core.ids import new_event_id
from tidings.core.tasks import cancel_and_wait
from tidings.log.errors import LogClosed, StorageFull
from tidings.log.interface import Log, Refused
from tidings.log.record import Record
from tidings.log.retention import RetentionPlan

from .announcements import Announcer
from .errors import AuditUnavailable

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


Severity = Literal["debug", "info", "warn", "error", "critical"]


class AuditRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a part of the node has to put on record."""

    category: str
    """What happened, dotted: ``event.subscription_opened``; the first part names the component."""
    kind: Literal["security", "operational"] = "security"
    """Comes before the category in the record's type."""
    severity: Severity = "info"
    subject: str | None = None
    """Whom it is about, or who asked: a token's subject."""
    data: Mapping[str, Any] = {}
    """Names and numbers; never what an event says, a token or a key."""


_BATCH_COUNT_MAX: Final = 1_024
_RETRY_S: Final = 1.0
_ACTOR: Final = "node"
_GATEWAY: Final = "event."


class AuditLog:
    """
    Takes the records of the node's parts, and writes them in batches to the topic ``audit``.

    A record that was taken is written, in order, and once: after a failure the same records are tried again, as long as the log is open.
    As a listener of the dispatcher it tells administrators of what was written (``system.log_record_created``, and ``security.log_alert``
    for errors), but for the gateway's own records: telling of those would make more of them.

    Args:
        log: Where to.
        clock: For the time between two attempts.
        queue_count_max: Records that wait; with so many none is taken. All connections that a node may have can end at once.
        new_id: Gives each record its id.
    """

    def __init__(
        self, log: Log, clock: Clock, *, queue_count_max: int = 100_000, new_id: Callable[[], str] = new_event_id
    ) -> None:
        self.announcer = Announcer("log_manager")
        self.problem: str | None = None
        """Why nothing is written at present."""
        self.written_count = 0
        self.refused_count = 0
        """Records that were not taken."""
        self._log = log
        self._clock = clock
        self._count_max = queue_count_max
        self._new_id = new_id
        self._queue: deque[Event] = deque()
        self._writer: asyncio.Task[None] | None = None

    def submit(self, record: AuditRecord, *, is_required: bool = False) -> str:
        """
        Take a record; it is written soon.

        Args:
            record: What to write.
            is_required: Refuse it while nothing can be written, instead of keeping it for later: what it tells of must not happen
                without being on record.

        Returns:
            The id that the record will have.

        Raises:
            AuditUnavailable: It was not taken.
        """
        problem = self._trouble() if is_required else None
        if len(self._queue) >= self._count_max:
            problem = problem or f"{self._count_max} records wait already"
        if problem is not None:
            self.refused_count += 1
            raise AuditUnavailable(problem)
        record_id = self._new_id()
        payload = {"severity": record.severity, "subject": record.subject, **record.data}
        meta = EventMeta(AUDIT_TOPIC, f"{record.kind}.{record.category}", "system", record_id, actor=_ACTOR)
        self._queue.append(Event(meta, payload))
        if self._writer is None:
            self._writer = asyncio.get_running_loop().create_task(self._write(), name="tidings-audit")
        return record_id

    def _trouble(self) -> str | None:
        """Why nothing can be written; a log that has failed says so before the next attempt does."""
        health = self._log.health()
        return self.problem or (None if health.is_writable else health.problem or "the log takes no events")

    def note(self, record: AuditRecord) -> None:
        """Take a record if there is room; what it tells of has happened whether or not it is on record."""
        try:
            self.submit(record)
        except AuditUnavailable as error:
            logger.error("%s.%s is not on record: %s", record.kind, record.category, error)

    async def flush(self, deadline_s: float) -> bool:
        """Wait until all that was taken is written, at most this long; says whether it is."""
        if self._writer is not None:
            await within(self._clock, deadline_s, asyncio.ensure_future(asyncio.shield(self._writer)))
        return not self._queue

    async def close(self, deadline_s: float) -> None:
        """Write what was taken within the deadline, and take no more."""
        if not await self.flush(deadline_s):
            logger.error("%d audit records were not written", len(self._queue))
        self.problem, self._count_max = "the node is stopping", 0
        await cancel_and_wait(self._writer)

    async def _write(self) -> None:
        while self._queue:
            batch = [self._queue[number] for number in range(min(len(self._queue), _BATCH_COUNT_MAX))]
            failed = await self._append(batch)
            if failed is None:
                for _ in batch:
                    self._queue.popleft()
                self.written_count += len(batch)
                self.problem = None
                continue
            if self.problem is None:
                logger.error("audit records cannot be written: %s", failed)
            self.problem = str(failed)
            if isinstance(failed, LogClosed):
                break
            await self._clock.sleep(_RETRY_S)
        self._writer = None

    async def _append(self, batch: Sequence[Event]) -> Exception | None:
        """Write records; says what went wrong. Those that were written by an attempt that failed are found again by their ids."""
        try:
            verdicts = await self._log.append_many(batch)
            return next((each.error for each in verdicts if isinstance(each, Refused)), None)
        except StorageFull:  # on a full disk too, one by one
            pass
        except Exception as error:  # noqa: BLE001 - whatever it is, it is tried again
            return error
        try:
            for event in batch:
                await self._log.append(event, from_reserve=True)
        except Exception as error:  # noqa: BLE001
            return error
        return None

    def committed(self, records: Sequence[Record]) -> None:
        """Tell of what is on record; the dispatcher's way in."""
        for record in records:
            if record.topic == AUDIT_TOPIC:
                kind, _, category = record.meta.type.partition(".")
                if category.startswith(_GATEWAY) and kind in ("security", "operational"):
                    continue
                self.announcer.tell("system.log_record_created", {"record_id": record.meta.event_id})
                if _severity_of(record) in ("error", "critical"):
                    self.announcer.tell("security.log_alert", {"record_id": record.meta.event_id})


class _Severity(msgspec.Struct):
    severity: str = "info"


def _severity_of(record: Record) -> str:
    try:
        return msgspec.json.decode(record.payload_json, type=_Severity).severity
    except (msgspec.DecodeError, TidingsError):  # nobody but a later version writes such
        return "info"
