"""
What is between an event and its handler: its age, the filters, the middleware.

The order is the document's: middleware before the handler (tracing, metrics, access, then custom), filters, the handler. An
event that is filtered out is done with; one that a filter or a middleware fails on is a failed attempt like any other.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

from tidings.core.clock import Clock, ns_of
from tidings.core.errors import TidingsError
from tidings.core.events import Capability

from .errors import PayloadMismatch
from .events import Ack, Nack, ReceivedEvent
from .filtering import FilterChain
from .handlers import AsyncHandler, is_failure, judged
from .middleware import (
    Decision,
    DecisionKind,
    HandleContext,
    MiddlewareChain,
    Outcome,
    OutcomeKind,
)
from .texts import cut, text_of

logger = logging.getLogger(__name__)

_ACKED: Final = Outcome(OutcomeKind.ACKED)


class Expired(TidingsError):
    """The event is older than its ``ttl_sec``."""

    code = "bus.expired"
    text = "the event is {age_s:.1f} s old; it was worth handling for {ttl_sec} s"
    age_s: float
    ttl_sec: int
    is_dead_letter: bool


class Denied(TidingsError):
    """A middleware says that the subscriber must not see the event."""

    code = "bus.denied"
    text = "denied: {reason}"
    reason: str


class Quarantined(TidingsError):
    """A middleware took the event out of circulation."""

    code = "bus.quarantined"
    text = "quarantined: {reason}"
    reason: str


class DeliveryPipeline:
    """Takes one group's events to whoever handles them."""

    def __init__(
        self,
        *,
        clock: Clock,
        chain: MiddlewareChain,
        filters: FilterChain | None = None,
        capabilities: frozenset[Capability] = frozenset(),
        expired_is_dead_letter: bool = False,
        takes_lists: bool = False,
        retries_max: int = 5,
        topic: str | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._clock = clock
        self._topic = topic
        self._chain = chain
        self._filters = filters
        self._capabilities = capabilities
        self._expired_is_dead_letter = expired_is_dead_letter
        self._takes_lists = takes_lists
        self._retries_max = retries_max
        self.filtered_count = 0
        """Events that the filters kept from the handler."""
        self.is_bare_for_good = filters is None and not chain.middlewares
        """Whether there is nothing that flags could switch on."""

    async def run(
        self, events: Sequence[ReceivedEvent], handler: AsyncHandler, *, is_redrive: bool = False
    ) -> list[object]:
        """
        What became of each event; errors are values. There is more than one only if the handler takes lists.

        Age, filters and middleware look at each event; those that pass go to the handler together. A handler of lists answers
        with one Ack or Nack for all, or with a list of them. Only then is the middleware told how each one ended, the last
        one first: what it opened for one event (a span, say) encloses those after it.

        A re-drive is somebody's wish to have the event handled after all, so its age does not count.
        """
        if self.is_bare_for_good or (self._filters is None and not self._chain.handle_hooks):
            for event in events:
                if not (event.record.known_plain or event.record.is_plain or is_redrive):
                    break  # it may be too old
            else:
                try:
                    given = await handler(events if self._takes_lists else events[0])
                except BaseException as error:
                    if not is_failure(error):
                        raise
                    given = error
                return self._spread(given, len(events)) if self._takes_lists else [given]
        answers: list[object] = []
        """What became of each event; of one that passes, its context until that is known."""
        entered: list[HandleContext] = []
        passing: list[ReceivedEvent] = []
        chain, filters, task = self._chain, self._filters, asyncio.current_task(self._loop)
        try:
            for event in events:
                record = event.record
                expired = None if record.known_plain or record.is_plain or is_redrive else self._expired(event)
                context = HandleContext(event, self._capabilities, clock=self._clock, topic=self._topic)
                entered.append(context)
                refused = None
                try:
                    deciding = chain.run_before_handle(context)
                    decision = None if deciding is None else await deciding
                    if expired is not None:  # only now, so that metrics and traces have seen it; decisions do not count
                        raise expired
                    if decision is not None or filters is not None:
                        refused = self._refusal(context, decision)
                except BaseException as error:
                    if not is_failure(error) or asyncio.current_task() is not task:
                        raise
                    answers.append(await self._after_failure(context, error))
                    continue
                if refused is None:
                    answers.append(context)
                    passing.append(context.event)
                else:
                    answers.append(await self._leave(context, *refused))  # belongs to that event alone
            if not passing:
                return answers
            try:
                given = await handler(passing if self._takes_lists else passing[0])
            except BaseException as error:
                if not is_failure(error) or asyncio.current_task() is not task:
                    raise
                given = error
        except BaseException as error:  # the end of the one who called, and no failure
            for context in reversed(entered):
                await self._after_failure(context, error)
            raise
        each = list(self._spread(given, len(passing))) if self._takes_lists else [given]
        for at in range(len(answers) - 1, -1, -1):
            context = entered[at]
            if answers[at] is context:
                answer = each.pop()
                is_acked = answer is None or type(answer) is Ack
                leaving = self._leave(context, answer, _ACKED) if is_acked else self._conclude(context, answer)
                answers[at] = await leaving
        return answers

    def _spread(self, given: object, count: int) -> list[object]:
        """The answer of a handler of lists for each of its events."""
        if isinstance(given, list) and len(given) == count:
            return given
        return [given] * count

    def _expired(self, event: ReceivedEvent) -> Expired | None:
        """Why an event is no longer worth handling; ``None`` if it is."""
        meta = event.record.meta
        if meta.ttl_sec is None:
            return None
        age_s = (self._clock.now_ns() - ns_of(meta.time)) / 1e9
        if age_s <= meta.ttl_sec:
            return None
        return Expired(age_s, meta.ttl_sec, is_dead_letter=self._expired_is_dead_letter)

    def _refusal(self, context: HandleContext, decision: Decision | None) -> tuple[object, Outcome] | None:
        """If a middleware or a filter keeps the event from its handler: the answer, and what it means."""
        if decision is not None:
            return _obey(decision)
        if self._filters is None or self._filters.check(context.event):
            return None
        self.filtered_count += 1
        return Ack(), Outcome(OutcomeKind.FILTERED)

    async def _conclude(self, context: HandleContext, answer: object) -> object:
        """What became of an event that was handled, and not simply acknowledged."""
        if isinstance(answer, BaseException):
            return await self._after_failure(context, answer)
        answer = judged(answer)
        if isinstance(answer, Ack):
            return await self._leave(context, answer, _ACKED)
        reason = cut(answer.reason) if isinstance(answer, Nack) else text_of(answer)
        return await self._leave(context, answer, Outcome(self._failure_kind(context.event), reason))

    def _failure_kind(self, event: ReceivedEvent, error: object = None) -> OutcomeKind:
        is_last = event.attempt > self._retries_max or isinstance(error, PayloadMismatch)
        return OutcomeKind.DEAD if is_last else OutcomeKind.RETRY

    async def _leave(self, context: HandleContext, answer: object, outcome: Outcome) -> object:
        """Tell the middleware how it ended. The answer; if a hook fails, its error."""
        try:
            if (rest := self._chain.run_after(context, outcome)) is not None:
                await rest
        except BaseException as error:
            if not is_failure(error):
                raise
            return error
        return answer

    async def _leave_failed(self, context: HandleContext, error: BaseException) -> None:
        if isinstance(error, Expired):
            outcome = Outcome(OutcomeKind.EXPIRED, str(error))
        elif is_failure(error):
            outcome = Outcome(self._failure_kind(context.event, error), text_of(error), error)
        elif isinstance(error, asyncio.CancelledError):
            outcome = Outcome(OutcomeKind.RETRY, "cancelled")
        else:  # the process ends
            return
        if (rest := self._chain.run_after(context, outcome)) is not None:
            await rest

    async def _after_failure(self, context: HandleContext, error: BaseException) -> BaseException:
        """Tell the middleware; the first error stays the event's answer."""
        try:
            await self._leave_failed(context, error)
        except Exception:
            logger.exception("a middleware failed after the event at offset %d had failed", context.offset)
        return error


def _obey(decision: Decision) -> tuple[object, Outcome]:
    """The answer that a middleware's decision stands for, and what it means."""
    match decision.kind:
        case DecisionKind.DENY:
            return Denied(f"{decision.by}: {decision.reason}"), Outcome(OutcomeKind.DENIED, decision.reason)
        case DecisionKind.QUARANTINE:
            return Quarantined(f"{decision.by}: {decision.reason}"), Outcome(OutcomeKind.QUARANTINED, decision.reason)
        case _:
            return Ack(), Outcome(OutcomeKind.SKIPPED, decision.reason)
