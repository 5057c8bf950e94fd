"""
What stands between an event and its handler: its age, the filters, the middleware.

The order is the document's: middleware before the handler (tracing, metrics, access, then custom), filters, the handler. An
event that is filtered out is done with; one that a filter or a middleware fails on is a failed attempt like any other.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

from tidings.core.actors import Capability
from tidings.core.clock import Clock, ns_of
from tidings.core.errors import TidingsError

from .events import Ack, Nack, ReceivedEvent
from .filtering import FilterChain
from .handler_threads import Handler, HandlerThreads, as_async
from .middleware import Decision, DecisionKind, HandleContext, MiddlewareChain, Outcome, OutcomeKind
from .outcomes import is_failure, judged, outcome_of
from .texts import cut, text_of

__all__ = ["Denied", "Expired", "Handler", "Pipeline", "Quarantined"]

logger = logging.getLogger(__name__)

_PASSES: Final = object()
"""Nothing keeps the event from its handler."""


class Expired(TidingsError):
    """The event is older than its ``ttl_sec``."""

    code = "bus.expired"

    def __init__(self, age_s: float, ttl_sec: int, *, is_dead_letter: bool) -> None:
        super().__init__(age_s, ttl_sec)
        self.age_s = age_s
        self.ttl_sec = ttl_sec
        self.is_dead_letter = is_dead_letter

    def describe(self) -> str:
        return f"the event is {self.age_s:.1f} s old; it was worth handling for {self.ttl_sec} s"


class Denied(TidingsError):
    """A middleware says that the subscriber must not see the event."""

    code = "bus.denied"

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def describe(self) -> str:
        return f"denied: {self.reason}"


class Quarantined(TidingsError):
    """A middleware took the event out of circulation."""

    code = "bus.quarantined"

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def describe(self) -> str:
        return f"quarantined: {self.reason}"


class Pipeline:
    """Runs one subscription's events through to its handler."""

    def __init__(
        self,
        handler: Handler,
        *,
        clock: Clock,
        chain: MiddlewareChain,
        filters: FilterChain | None = None,
        capabilities: frozenset[Capability] = frozenset(),
        expired_is_dead_letter: bool = False,
        takes_lists: bool = False,
        retries_max: int = 5,
        name: str = "handler",
        threads_count_max: int = 1,
    ) -> None:
        self._threads = HandlerThreads(name, threads_count_max)
        self.handler = as_async(handler, self._threads)
        self._clock = clock
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

    @property
    def is_bare(self) -> bool:
        """Whether nothing stands between an event that cannot age and its handler, as the flags stand now."""
        return self._filters is None and not self._chain.handle_hooks

    async def answers(self, events: Sequence[ReceivedEvent], *, is_redrive: bool = False) -> list[object]:
        """What became of each event; errors are values. More than one only if the handler takes lists."""
        if self._takes_lists:
            return await self._run_list(events, is_redrive=is_redrive)
        (event,) = events
        return [await outcome_of(self.run(event, is_redrive=is_redrive))]

    async def run(self, event: ReceivedEvent, *, is_redrive: bool = False) -> object:
        """
        The handler's answer; raises what the handler, a filter or a middleware raised.

        A re-drive is somebody's wish to have the event handled after all, so its age does not count.
        """
        expired = None if is_redrive or event.record.is_plain else self._expired(event)
        if self.is_bare:
            if expired is not None:
                raise expired
            return await self.handler(event)
        context = HandleContext(event, self._capabilities, clock=self._clock)
        try:
            refused = await self._admit(context, expired)
            answer, outcome = refused or self._weigh(event, await self.handler(context.event))
        except BaseException as error:
            await self._leave_failed(context, error)
            raise
        return await self._leave(context, answer, outcome)

    def _expired(self, event: ReceivedEvent) -> Expired | None:
        """Why an event is no longer worth handling; ``None`` if it is."""
        meta = event.record.meta
        if meta.ttl_sec is None:
            return None
        age_s = (self._clock.now_ns() - ns_of(meta.time)) / 1e9
        if age_s <= meta.ttl_sec:
            return None
        return Expired(age_s, meta.ttl_sec, is_dead_letter=self._expired_is_dead_letter)

    async def _admit(self, context: HandleContext, expired: Expired | None) -> tuple[object, Outcome] | None:
        """``None`` if the event may go to the handler, else its answer and what that means."""
        deciding = self._chain.run_before_handle(context)
        decision = None if deciding is None else await deciding
        if expired is not None:  # only now, so that those who watch have begun to; what they decide is of no account
            raise expired
        if decision is not None:
            return _obey(decision)
        if self._filters is not None and not self._filters.check(context.event):
            self.filtered_count += 1
            return Ack(), Outcome(OutcomeKind.FILTERED)
        return None

    def _weigh(self, event: ReceivedEvent, answer: object) -> tuple[object, Outcome]:
        """A handler's answer, and what it means."""
        answer = judged(answer)
        if isinstance(answer, Ack):
            return answer, Outcome(OutcomeKind.ACKED)
        reason = cut(answer.reason) if isinstance(answer, Nack) else text_of(answer)
        return answer, Outcome(self._failure_kind(event), reason)

    def _failure_kind(self, event: ReceivedEvent) -> OutcomeKind:
        return OutcomeKind.DEAD if event.attempt > self._retries_max else OutcomeKind.RETRY

    async def _leave(self, context: HandleContext, answer: object, outcome: Outcome) -> object:
        """Tell the middleware how it ended."""
        if (rest := self._chain.run_after(context, outcome)) is not None:
            await rest
        if isinstance(answer, BaseException):
            raise answer
        return answer

    async def _leave_failed(self, context: HandleContext, error: BaseException) -> None:
        if isinstance(error, Expired):
            outcome = Outcome(OutcomeKind.EXPIRED, str(error))
        elif is_failure(error):
            outcome = Outcome(self._failure_kind(context.event), text_of(error), error)
        elif isinstance(error, asyncio.CancelledError):
            outcome = Outcome(OutcomeKind.RETRY, "cancelled")
        else:  # the process ends
            return
        if (rest := self._chain.run_after(context, outcome)) is not None:
            await rest

    async def _run_list(self, events: Sequence[ReceivedEvent], *, is_redrive: bool) -> list[object]:
        """
        Answers for a list of events, errors among them as values.

        Age, filters and middleware look at each event; those that pass go to the handler together. The handler answers
        with one Ack or Nack for all, or with a list of them. Only then does the middleware hear how each one ended, the
        last one first: what it opened for one event (a span, say) encloses those after it.
        """
        answers: dict[int, object] = {}
        entered: list[HandleContext] = []
        passing: list[HandleContext] = []
        try:
            for event in events:
                context = HandleContext(event, self._capabilities, clock=self._clock)
                entered.append(context)
                answer = await outcome_of(self._enter(context, is_redrive=is_redrive))
                if answer is _PASSES:
                    passing.append(context)
                    continue
                answers[event.offset] = answer  # belongs to that event alone
            if not passing:
                return [answers[event.offset] for event in events]
            given = await outcome_of(self.handler([context.event for context in passing]))
        except BaseException as error:  # the end of the one who called, and no failure
            for context in reversed(entered):
                await self._after_failure(context, error)
            raise
        each = given if isinstance(given, list) and len(given) == len(passing) else [given] * len(passing)
        for context, answer in zip(reversed(passing), reversed(each), strict=True):
            answers[context.offset] = await self._conclude(context, answer)
        return [answers[event.offset] for event in events]

    async def _enter(self, context: HandleContext, *, is_redrive: bool) -> object:
        """Take one event of a list as far as the handler; if it does not get there, what became of it."""
        expired = None if is_redrive or context.event.record.is_plain else self._expired(context.event)
        try:
            refused = await self._admit(context, expired)
        except BaseException as error:
            if not is_failure(error):
                raise
            return await self._after_failure(context, error)
        return _PASSES if refused is None else await self._leave(context, *refused)

    async def _conclude(self, context: HandleContext, answer: object) -> object:
        """What became of one event of a batch; errors are values."""
        if isinstance(answer, BaseException):
            return await self._after_failure(context, answer)
        return await outcome_of(self._leave(context, *self._weigh(context.event, answer)))

    async def _after_failure(self, context: HandleContext, error: BaseException) -> BaseException:
        """Tell the middleware; the first error stays the event's answer."""
        try:
            await self._leave_failed(context, error)
        except Exception:
            logger.exception("a middleware failed after the event at offset %d had failed", context.offset)
        return error

    def close(self) -> None:
        """The group is done with it."""
        self._threads.stop()


def _obey(decision: Decision) -> tuple[object, Outcome]:
    """What a middleware's decision comes to."""
    match decision.kind:
        case DecisionKind.DENY:
            return Denied(f"{decision.by}: {decision.reason}"), Outcome(OutcomeKind.DENIED, decision.reason)
        case DecisionKind.QUARANTINE:
            return Quarantined(f"{decision.by}: {decision.reason}"), Outcome(OutcomeKind.QUARANTINED, decision.reason)
        case _:
            return Ack(), Outcome(OutcomeKind.SKIPPED, decision.reason)
