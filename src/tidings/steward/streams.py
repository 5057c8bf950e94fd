"""Subscriptions as frames: what a connection sends, from the acknowledgement on."""

from __future__ import annotations

import abc
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, Final

import msgspec

from tidings.happenings.bus import Envelope
from tidings.happenings.errors import HappeningsClosed, Lagged
from tidings.happenings.happening import to_json
from tidings.happenings.subscription import HappeningSubscription
from tidings.ledger.following import SubjectSubscription, SubjectUpdate
from tidings.wire.steward import answers, frames

_BATCH_COUNT_MAX: Final = 128
"""Happenings that are sent before it is asked again whether the peer has room."""
_CACHE_COUNT_MAX: Final = 4_096


class FrameStream(abc.ABC):
    """The frames of one subscription, in batches. ``close`` lets it end by itself, with what is left to say."""

    def __init__(self, subscription: HappeningSubscription | SubjectSubscription) -> None:
        self._to_close = subscription

    @abc.abstractmethod
    def frames(self) -> AsyncGenerator[Sequence[bytes], None]:
        """What to send, the acknowledgement first."""

    def close(self) -> None:
        """Nothing more is heard; what was heard is still given."""
        self._to_close.close()


class FrameCache:
    """
    Happenings as frames, made once for all subscribers.

    Args:
        form: How a happening's JSON is shown.
    """

    def __init__(self, form: Callable[[Any], Any]) -> None:
        self._form = form
        self._frames: dict[int, bytes] = {}

    def frame(self, envelope: Envelope) -> bytes:
        """An envelope as a frame."""
        if envelope.resume_seq is not None:
            shown = self._form(to_json(envelope.happening))
            return frames.encode(
                answers.HappeningFrame(seq=envelope.seq, happening=shown, resume_seq=envelope.resume_seq)
            )
        found = self._frames.get(envelope.seq)
        if found is None:
            if len(self._frames) >= _CACHE_COUNT_MAX:
                self._frames.clear()
            found = frames.encode(
                answers.HappeningFrame(seq=envelope.seq, happening=self._form(to_json(envelope.happening)))
            )
            self._frames[envelope.seq] = found
        return found


class HappeningsStream(FrameStream):
    """Happenings, from a cursor or from now on."""

    def __init__(self, subscription: HappeningSubscription, cache: FrameCache) -> None:
        super().__init__(subscription)
        self._subscription = subscription
        self._cache = cache

    async def frames(self) -> AsyncGenerator[Sequence[bytes], None]:
        subscription = self._subscription
        yield [frames.encode(answers.SubscribedAnswer(current_seq=subscription.current_seq))]
        while True:
            try:
                heard = await subscription.recv_many(_BATCH_COUNT_MAX)
            except Lagged as lag:
                yield [_lagged(lag)]
            except HappeningsClosed:
                return
            else:
                yield [self._cache.frame(envelope) for envelope in heard]


class SubjectStream(FrameStream):
    """
    A subject's projection, now and whenever something touches it.

    Args:
        subscription: The subject's updates.
        form: How a projection is shown.
    """

    def __init__(self, subscription: SubjectSubscription, form: Callable[[Any], Awaitable[Any]]) -> None:
        super().__init__(subscription)
        self._subscription = subscription
        self._form = form

    async def frames(self) -> AsyncGenerator[Sequence[bytes], None]:
        subscription = self._subscription
        yield [
            frames.encode(
                answers.SubscribedSubject(canonical_id=subscription.canonical_id, current_seq=subscription.current_seq)
            )
        ]
        while True:
            try:
                updates = await subscription.recv_many()
            except Lagged as lag:
                yield [_lagged(lag)]
                return
            except HappeningsClosed:
                return
            for update in updates:
                yield [await self._frame(update)]

    async def _frame(self, update: SubjectUpdate) -> bytes:
        frame = answers.ProjectionFrame(
            seq=update.seq,
            canonical_id=update.canonical_id,
            projection=None if update.projection is None else await self._form(update.projection),
            new_ids=list(update.new_ids) if update.new_ids else msgspec.UNSET,
        )
        return frames.encode(frame)


def _lagged(lag: Lagged) -> bytes:
    return frames.encode(
        answers.LaggedFrame(
            answers.LagNotice(
                missed_count=lag.missed_count,
                oldest_available_seq=lag.oldest_available_seq,
                current_seq=lag.current_seq,
            )
        )
    )
