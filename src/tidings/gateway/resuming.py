"""
Coming back: whether a resume token is good, and what was missed behind it.

A token is good for the identity that its event was sent to, on a connection that is open or has ended, as long as everything behind it is
still kept for every class that is asked for. What follows it is found in memory and nowhere else, under the rights of now. Every token that is
not good is answered alike, with where to read on over HTTP; why is for the record only.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from tidings.access.book import Capsule
from tidings.wire.gateway import CloseReason

from .contexts import RequestContext
from .filters import FilterRules, SubscriptionFilters, asks_for
from .names import EventClass, class_of
from .refusals import SubscriptionClosed
from .resume_index import ResumeIndex, Retained
from .resume_tokens import ResumeTokens, claimed_point
from .subscribers import Subscriber

_ENDED_MAX: Final = 10_000
"""Ended connections whose tokens may still be shown; the oldest are forgotten."""
_ENDED_OF_IDENTITY_MAX: Final = 64
"""Of one identity: each is looked at when it resumes."""
_SLICE: Final = 1_024
"""Kept envelopes that are looked at before others get their turn."""


class _Stay(NamedTuple):
    """What a connection was sent: everything that fits its filters, from one ordinal to another."""

    filters: SubscriptionFilters
    app_id: str
    first_ordinal: int
    sent_ordinal: int


class ResumePoints:
    """
    Finds the place that a token stands for, and what followed it.

    Args:
        index: The envelopes that are kept.
        tokens: Reads tokens.
        rules: Who is meant by an event.
        graph_seq: The seq of the last graph event that was taken in.
    """

    def __init__(
        self, index: ResumeIndex, tokens: ResumeTokens, rules: FilterRules, graph_seq: Callable[[], int]
    ) -> None:
        self._index = index
        self._tokens = tokens
        self._rules = rules
        self._graph_seq = graph_seq
        self._lost_seq = -1
        self._ended: OrderedDict[tuple[str | None, int], _Stay] = OrderedDict()
        self._ended_of: dict[str | None, deque[int]] = {}

    def find(
        self,
        token: str,
        context: RequestContext,
        rights: Capsule,
        filters: SubscriptionFilters,
        open_ones: Iterable[Subscriber],
    ) -> Retained:
        """
        The envelope that a token is of.

        Args:
            open_ones: The open connections of the same identity.

        Raises:
            SubscriptionClosed: It is not good for this subscriber.
        """
        point = self._tokens.read(token)
        if point is None:
            raise self.refusal(token, "the token is not one of this gateway's life")
        retained = self._index.find(point.event_id, point.anchor)
        if retained is None or retained.ordinal is None or retained.event_class is not point.event_class:
            raise self.refusal(token, "its event is no longer kept")
        if not self._was_sent(retained, context, open_ones):
            raise self.refusal(token, "its event was not sent to this identity")
        if not self._rules.includes(filters, context, rights, retained):
            raise self.refusal(token, "its event is not among what is asked for, or may not be seen now")
        if any(self._index.evicted_ordinal(each) > retained.ordinal for each in _classes(filters)):
            raise self.refusal(token, "events behind it are no longer kept")
        if EventClass.GRAPH in _classes(filters) and self.seq_at(retained) <= self._lost_seq:
            raise self.refusal(token, "a graph event behind it could not be taken in")
        return retained

    def _was_sent(self, retained: Retained, context: RequestContext, open_ones: Iterable[Subscriber]) -> bool:
        ordinal, identity = retained.ordinal or 0, context.requester_identity_id
        stays = [self._ended[identity, number] for number in self._ended_of.get(identity, ())]
        return any(
            each.app_id == context.app_id
            and each.first_ordinal <= ordinal <= each.sent_ordinal
            and asks_for(each.filters, retained)
            for each in (*stays, *map(_stay_of, open_ones))
        )

    async def missed(self, token: str, point: Retained, subscriber: Subscriber, count_max: int) -> list[Retained]:
        """
        What came behind a token, in order. Much of it is looked for in slices, so that nobody waits; who calls looks again whether the token is
        good, as others may have had their turn.

        Raises:
            SubscriptionClosed: It is more than ``count_max``.
        """
        found: list[Retained] = []
        looked_at, is_behind = _ordinal(point), True
        while is_behind:
            kept = [self._index.after(each, looked_at) for each in _classes(subscriber.filters)]
            is_behind = sum(map(len, kept)) > _SLICE
            in_order = heapq.merge(*kept, key=_ordinal)
            while slice_ := list(itertools.islice(in_order, _SLICE)):
                found += [each for each in slice_ if self._includes(subscriber, each)]
                looked_at = _ordinal(slice_[-1])
                if len(found) > count_max:
                    raise self.refusal(token, "more was missed than a buffer holds")
                if is_behind:
                    await asyncio.sleep(0)
        return [each for each in found if self._includes(subscriber, each)]

    def _includes(self, subscriber: Subscriber, retained: Retained) -> bool:
        return self._rules.includes(subscriber.filters, subscriber.context, subscriber.rights, retained)

    def seq_at(self, point: Retained) -> int:
        """The seq of the last graph event that was delivered up to a point."""
        if point.event_class is EventClass.GRAPH:
            return point.anchor
        before = self._index.last_before(EventClass.GRAPH, _ordinal(point))
        if before is not None:
            return before.anchor
        behind = self._index.after(EventClass.GRAPH, _ordinal(point))
        return behind[0].anchor - 1 if behind else self._graph_seq()

    def taken_over(self, point: Retained, subscriber: Subscriber, open_ones: Iterable[Subscriber]) -> Subscriber | None:
        """The open connection that a resumed one takes over from: of several, the one not heard of for longest."""
        ordinal = _ordinal(point)
        same = [
            each
            for each in open_ones
            if each.filters == subscriber.filters and each.first_ordinal <= ordinal <= each.sent_ordinal
        ]
        return min(same, key=lambda each: (each.heard_s, each.number), default=None)

    def refusal(self, token: str, cause: str) -> SubscriptionClosed:
        """The one answer to a token that is not good. What it says is what the token's own bytes claim, or what everybody may know."""
        claimed, last = claimed_point(token), self._graph_seq()
        is_plausible = claimed is not None and claimed.event_class is EventClass.GRAPH and claimed.anchor <= last
        since = claimed.anchor if claimed is not None and is_plausible else last
        data = {"action": "http_catch_up", "method": "GET", "path": "/v1/envelopes", "since": since}
        return SubscriptionClosed(CloseReason.RESUME_INVALID, cause, data)

    def graph_event_lost(self) -> None:
        """A graph event could not be taken in: nobody may resume across it."""
        self._lost_seq = self._graph_seq()

    @property
    def has_ended(self) -> bool:
        """Whether somebody could come back."""
        return bool(self._ended)

    def ended(self, subscriber: Subscriber) -> None:
        """Remember what a connection was sent, for who comes back with a token of it."""
        if subscriber.sent_ordinal < subscriber.first_ordinal:
            return
        identity, number = subscriber.context.requester_identity_id, subscriber.number
        self._ended[identity, number] = _stay_of(subscriber)
        numbers = self._ended_of.setdefault(identity, deque())
        numbers.append(number)
        if len(numbers) > _ENDED_OF_IDENTITY_MAX:
            del self._ended[identity, numbers.popleft()]
        if len(self._ended) > _ENDED_MAX:
            (oldest, _), _ = self._ended.popitem(last=False)
            self._ended_of[oldest].popleft()
            if not self._ended_of[oldest]:
                del self._ended_of[oldest]


def _stay_of(subscriber: Subscriber) -> _Stay:
    return _Stay(subscriber.filters, subscriber.context.app_id, subscriber.first_ordinal, subscriber.sent_ordinal)


def _ordinal(retained: Retained) -> int:
    return retained.ordinal or 0


def _classes(filters: SubscriptionFilters) -> set[EventClass]:
    return {found for channel in filters.channels if (found := class_of(channel)) is not None}
