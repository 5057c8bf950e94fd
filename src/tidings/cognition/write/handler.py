"""
The write workflow, as a handler of the bus.

    initiated -> space_resolved -> redacted -> deduplicated -> committed -> consolidation, when due

Nothing of the content is published before it is redacted. The memory, its receipt and the events about them are one
transaction; then the outbox is emptied. The handler says ``Ack`` once that transaction is synced: an event that could not
be published yet is safe in the outbox. Any failure before that, of whatever kind and from the reading of the event on,
leaves nothing behind, is published as ``...failed`` and raised, so that the bus tries again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec

from tidings.bus.events import Ack, ReceivedEvent
from tidings.core.clock import Clock, datetime_of
from tidings.core.errors import TidingsError
from tidings.core.events import Event

from ..ports import MetricSink, Publish, no_metrics
from ..resilience import categorise
from ..taxonomy import CognitiveEventType
from .announcements import stage_event
from .outbox import Outbox
from .policy import (
    NOTHING_KEPT,
    Redacted,
    SpacePolicy,
    StaticSpacePolicy,
    kinds_to_redact,
    redact_content,
    redact_words,
    resolve_space,
)
from .requests import OutboxSettings, WriteIdentity, WriteRequest, write_identity_of, write_request_of
from .store import CommittedWrite, MemoryDraft, MemoryStore


class WriteHandler:
    """
    Writes memories. ``await handler(event)`` is what a subscription calls.

    Args:
        store: Where memories go.
        publish: Where events go.
        clock: Where the time comes from.
        policy: Who may write where, and what a space does not keep; by default everyone only in their own space.
        outbox: How the outbox is emptied.
        metrics: Gets ``memory_writes_total`` by operation.
    """

    def __init__(
        self,
        store: MemoryStore,
        publish: Publish,
        clock: Clock,
        policy: SpacePolicy | None = None,
        *,
        outbox: OutboxSettings | None = None,
        metrics: MetricSink = no_metrics,
    ) -> None:
        self._store = store
        self._publish = publish
        self._clock = clock
        self._policy: SpacePolicy = policy if policy is not None else StaticSpacePolicy()
        self._metrics = metrics
        self.outbox = Outbox(store.database, publish, clock, outbox)

    async def __call__(self, event: Event) -> Ack:
        """
        Write the memory an event asks for.

        Raises:
            InvalidRequest: The event asks for nothing that can be written; trying again will not help.
            MemoryStoreError: Nothing was stored; trying again may help.
            Exception: Whatever else went wrong, such as a bus that is down; nothing was stored.
        """
        await self.write(event)
        return Ack()

    async def write(self, event: Event) -> CommittedWrite:
        """The same, for callers who want the receipt."""
        settings, identity = self._store.settings, write_identity_of(event)
        space_id = identity.envelope_space
        try:
            request = write_request_of(event, tz_default=settings.tz, text_chars_max=settings.text_chars_max)
            await self._publish_stage(
                CognitiveEventType.WRITE_INITIATED, request, space_id, {"band": request.band.value}
            )
            draft = await self._prepare(request)
            space_id = draft.space_id
            committed = await asyncio.to_thread(self._store.commit, draft, self._clock.now_ns())
        except Exception as error:
            self._metrics("memory_writes_total", 1.0, {"operation": "failed"})
            attempt = event.attempt if isinstance(event, ReceivedEvent) else 1
            await self._publish_failure(error, identity, space_id, attempt)
            raise
        operation = "repeat" if committed.is_repeat else committed.receipt.operation
        self._metrics("memory_writes_total", 1.0, {"operation": operation})
        await self.outbox.drain()
        return committed

    async def run(self) -> None:
        """
        Try again what could not be published at once, and call for consolidation where a space has waited long enough,
        until cancelled; call it in a task of your own.
        """
        await self.outbox.run(before=self.call_for_consolidation)

    async def call_for_consolidation(self) -> int:
        """Call for the consolidation of every space that has waited long enough; returns how many there were."""
        return await asyncio.to_thread(self._store.call_for_consolidation, self._clock.now_ns())

    async def _publish_failure(self, error: Exception, identity: WriteIdentity, space_id: str, attempt: int) -> None:
        details: dict[str, Any]
        if isinstance(error, TidingsError):
            details = {"error": error.code, "problem": str(error), "retryable": error.retryable}
        else:
            # A stranger's error may quote the content, which was perhaps not redacted yet: only its kind is published.
            kind = type(error).__name__
            details = {"error": kind, "problem": kind, "retryable": categorise(error).is_retried}
        try:
            await self._publish_stage(CognitiveEventType.WRITE_FAILED, identity, space_id, details, attempt=attempt)
        except Exception as unpublished:  # noqa: BLE001 - why the write failed matters more, and is what gets raised
            error.add_note(f"nor could the failure be published: {type(unpublished).__name__}: {unpublished}")

    async def _prepare(self, request: WriteRequest) -> MemoryDraft:
        resolved = resolve_space(
            actor_id=request.actor_id,
            band=request.band,
            hint=request.space_hint,
            participants=request.participants,
            envelope_space=request.envelope_space,
            policy=self._policy,
        )
        details = {"resolved_space_id": resolved.space_id, "how": resolved.how, "notes": list(resolved.notes)}
        await self._publish_stage(CognitiveEventType.WRITE_SPACE_RESOLVED, request, resolved.space_id, details)

        redacted = self._redact(request, resolved.space_id)
        kept_words = msgspec.structs.replace(
            request,
            tags=redact_words(request.tags, redacted),
            mentions=redact_words(request.mentions, redacted),
        )
        flags = ("conservative_redaction",) if redacted.is_conservative else ()
        summary = {"redactions": redacted.counts, "is_conservative": redacted.is_conservative}
        await self._publish_stage(CognitiveEventType.WRITE_REDACTED, request, resolved.space_id, summary)
        return MemoryDraft(request=kept_words, space_id=resolved.space_id, redacted=redacted, flags=flags)

    def _redact(self, request: WriteRequest, space_id: str) -> Redacted:
        try:
            kinds = kinds_to_redact(request.band, request.obligations, self._policy.redactions(space_id))
        except Exception:  # noqa: BLE001 - a policy is a stranger's code, and whatever it raises is a failed policy
            return NOTHING_KEPT
        return redact_content(request.content, kinds)

    async def _publish_stage(
        self,
        kind: CognitiveEventType,
        request: WriteIdentity,
        space_id: str,
        payload: Mapping[str, Any],
        *,
        attempt: int = 1,
    ) -> None:
        now = datetime_of(self._clock.now_ns())
        await self._publish(stage_event(kind, request, space_id, payload, now=now, attempt=attempt))
