"""Subscriptions as frames: what a connection sends, from the acknowledgement on."""

from __future__ import annotations

import abc
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, Final

from tidings.happenings.bus import Envelope
from tidings.happenings.errors import HappeningsClosed, Lagged
from tidings.happenings.filters import HappeningFilter
from tidings.happenings.subscription import Subscription
from tidings.happenings.variants import SubjectMerged, SubjectMigrated, SubjectSplit
from tidings.wire import steward as wire

_BATCH_COUNT_MAX: Final = 128
"""Happenings that are sent before it is asked again whether the peer has room."""
_CACHE_COUNT_MAX: Final = 4_096


class Stream(abc.ABC):
    """The frames of one subscription, in batches. ``close`` lets it end by itself, with what is left to say."""

    def __init__(self, subscription: Subscription) -> None:
        self._subscription = subscription

    @abc.abstractmethod
    def frames(self) -> AsyncGenerator[Sequence[bytes], None]:
        """What to send, the acknowledgement first."""

    def close(self) -> None:
        """Nothing more is heard; what was heard is still given."""
        self._subscription.close()


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
            shown = self._form(envelope.happening)
            return wire.encode(wire.HappeningFrame(seq=envelope.seq, happening=shown, resume_seq=envelope.resume_seq))
        found = self._frames.get(envelope.seq)
        if found is None:
            if len(self._frames) >= _CACHE_COUNT_MAX:
                self._frames.clear()
            found = wire.encode(wire.HappeningFrame(seq=envelope.seq, happening=self._form(envelope.happening)))
            self._frames[envelope.seq] = found
        return found


class HappeningsStream(Stream):
    """Happenings, from a cursor or from now on."""

    def __init__(self, subscription: Subscription, cache: FrameCache) -> None:
        super().__init__(subscription)
        self._cache = cache

    async def frames(self) -> AsyncGenerator[Sequence[bytes], None]:
        subscription = self._subscription
        yield [wire.encode(wire.Subscribed(current_seq=subscription.current_seq))]
        while True:
            try:
                heard = await subscription.recv_many(_BATCH_COUNT_MAX)
            except Lagged as lag:
                yield [_lagged(lag)]
            except HappeningsClosed:
                return
            else:
                yield [self._cache.frame(envelope) for envelope in heard]


Project = Callable[[str], Awaitable[Any]]
"""The projection of a subject as it is now, as JSON has it; ``None`` if there is no such subject."""


class SubjectStream(Stream):
    """
    A subject's projection, now and whenever something touches it.

    After a merge or a migration it goes on with the new subject; after a split it ends.

    Args:
        canonical_id: The subject, alive.
        seq: What the first frame has for its seq.
        subscribe: Registers for what touches a subject, from now on.
        project: See ``Project``.
    """

    def __init__(
        self, canonical_id: str, seq: int, subscribe: Callable[[HappeningFilter], Subscription], project: Project
    ) -> None:
        self._id = canonical_id
        self._seq = seq
        self._subscribe = subscribe
        self._project = project
        self._is_closed = False
        super().__init__(subscribe(_touching(canonical_id)))

    @property
    def current_seq(self) -> int:
        """The newest seq when it began."""
        return self._subscription.current_seq

    def close(self) -> None:
        self._is_closed = True
        super().close()

    async def frames(self) -> AsyncGenerator[Sequence[bytes], None]:
        ack = wire.SubscribedSubject(canonical_id=self._id, current_seq=self.current_seq)
        yield [wire.encode(ack), self._frame(self._seq, await self._project(self._id))]
        while not self._is_closed:
            try:
                heard = await self._subscription.recv_many(_BATCH_COUNT_MAX)
            except Lagged as lag:
                yield [_lagged(lag)]
                return
            except HappeningsClosed:
                return
            moved = next((envelope for envelope in heard if _successors(envelope, self._id)), None)
            if moved is None:
                projection = await self._project(self._id)
                yield [self._frame(envelope.seq, projection) for envelope in heard]
                continue
            new_ids = _successors(moved, self._id)
            if len(new_ids) > 1:
                frame = wire.ProjectionFrame(seq=moved.seq, canonical_id=self._id, projection=None, new_ids=new_ids)
                yield [wire.encode(frame)]
                return
            self._id = new_ids[0]
            self._subscription.close()
            self._subscription = self._subscribe(_touching(self._id))
            # Read after it was registered: what the new subscription does not give is in here.
            yield [self._frame(moved.seq, await self._project(self._id))]

    def _frame(self, seq: int, projection: Any) -> bytes:
        return wire.encode(wire.ProjectionFrame(seq=seq, canonical_id=self._id, projection=projection))


def _touching(canonical_id: str) -> HappeningFilter:
    return HappeningFilter(subjects=(canonical_id,))


def _successors(envelope: Envelope, canonical_id: str) -> list[str]:
    """What a subject became by this, if it did."""
    match envelope.happening:
        case SubjectMerged(source_ids=sources, new_id=new_id) if canonical_id in sources:
            return [new_id]
        case SubjectMigrated(old_id=old_id, new_id=new_id) if canonical_id == old_id:
            return [new_id]
        case SubjectSplit(source_id=source_id, new_ids=new_ids) if canonical_id == source_id:
            return list(new_ids)
    return []


def _lagged(lag: Lagged) -> bytes:
    return wire.encode(
        wire.Lagged(
            wire.LagNotice(
                missed_count=lag.missed_count,
                oldest_available_seq=lag.oldest_available_seq,
                current_seq=lag.current_seq,
            )
        )
    )
