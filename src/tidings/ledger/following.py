"""
Following one subject: its projection now, and again whenever something touches it.

The stream goes where the subject goes. After a merge or a migration to another type it is that of the new subject; after a split it ends, and says what the
subject became.

What touches a subject is subscribed to before the subject is looked at, also each time the stream moves on: so nothing falls in between, whatever
becomes of the subject meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from tidings.happenings.bus import Envelope, HappeningStream
from tidings.happenings.errors import HappeningsClosed, Lagged
from tidings.happenings.facade import Happenings
from tidings.happenings.filters import HappeningFilter
from tidings.happenings.subscription import HappeningSubscription
from tidings.happenings.variants import SubjectMerged, SubjectMigrated, SubjectSplit

from .errors import AliasChainForked, AliasChainUnresolved, UnknownSubject
from .subjects import Described

if TYPE_CHECKING:
    from .composing import SubjectProjection

Look = Callable[[str], "Awaitable[tuple[Described, SubjectProjection | None]]"]
"""What an id stands for, and the subject's projection if it is that of one, at one moment."""
_BATCH_COUNT_MAX: Final = 1024


class SubjectUpdate(NamedTuple):
    """How a subject is now, and why that is told."""

    seq: int
    """Of the happening that touched it, the last one where several came together. Of the first update: of the last one since the cursor, 0 without."""
    canonical_id: str
    projection: SubjectProjection | None
    """None if there is no such subject any more."""
    new_ids: tuple[str, ...] = ()
    """What it was split into; then this is the last update."""


class SubjectSubscription(HappeningStream[SubjectUpdate]):
    """One subject's stream of updates. Made by ``Projections.follow_subject``."""

    def __init__(self, happenings: Happenings, look: Look) -> None:
        self._happenings = happenings
        self._look = look
        self._subscription: HappeningSubscription
        self._heard: Sequence[Envelope] = ()
        self._ready: deque[SubjectUpdate] = deque()
        self._is_over = False
        self.canonical_id = ""
        """The subject that is followed now."""
        self.current_seq = 0
        """The newest seq when this began: the first update includes all up to it."""

    async def begin(self, canonical_id: str, *, follow_aliases: bool, since: int | None) -> None:
        """Find the subject, and look at it. Raises as ``Projections.follow_subject`` does."""
        while True:
            subscription = self._subscribe(canonical_id)
            found, projection = await self._look(canonical_id)
            if found.kind == "found":
                break
            if found.kind == "not_found":
                raise UnknownSubject(canonical_id)
            if not follow_aliases:
                raise AliasChainUnresolved(canonical_id, "ask for its aliases to be followed")
            if found.record is None:
                if len(found.chain[-1].new_ids) > 1:
                    raise AliasChainForked(canonical_id)
                raise AliasChainUnresolved(canonical_id, "its aliases lead to no subject")
            canonical_id = found.record.canonical_id
        seq = 0
        if since is not None:
            touching = HappeningFilter(subjects=(canonical_id,))
            async for envelope in self._happenings.history(since, subscription.current_seq, touching):
                seq = envelope.seq
        self._subscription = subscription
        self.canonical_id, self.current_seq = canonical_id, subscription.current_seq
        self._ready.append(SubjectUpdate(seq, canonical_id, projection))

    async def recv_many(self, limit: int = _BATCH_COUNT_MAX) -> list[SubjectUpdate]:
        """
        The updates that have come, at least one and at most ``limit``.

        Raises:
            Lagged: Some happenings were missed, and with them perhaps what became of the subject: the stream ends.
            HappeningsClosed: Nothing more will come.
        """
        while not self._ready:
            if self._is_over:
                raise HappeningsClosed
            if not self._heard:
                try:
                    self._heard = await self._subscription.recv_many(_BATCH_COUNT_MAX)
                except Lagged:
                    self._end()
                    raise
            self._ready.extend(await self._updates(self._heard))
            self._heard = ()
        return [self._ready.popleft() for _ in range(min(limit, len(self._ready)))]

    def close(self) -> None:
        """End it: nothing more is heard."""
        self._subscription.close()

    async def _updates(self, heard: Sequence[Envelope]) -> list[SubjectUpdate]:
        moved = next((each for each in heard if _successors(each, self.canonical_id)), None)
        if moved is not None:
            return [await self._move(moved.seq, self.canonical_id, _successors(moved, self.canonical_id))]
        found, projection = await self._look(self.canonical_id)
        if found.kind == "aliased" and found.chain[0].new_ids:
            return []  # the state is ahead: that the subject has moved is still to be heard
        return [SubjectUpdate(heard[-1].seq, self.canonical_id, projection)]

    async def _move(self, seq: int, old_id: str, new_ids: Sequence[str]) -> SubjectUpdate:
        """Go on with what a subject became, and what that became meanwhile."""
        while len(new_ids) == 1:
            [old_id] = new_ids
            subscription = self._subscribe(old_id)
            found, projection = await self._look(old_id)
            new_ids = found.chain[0].new_ids if found.kind == "aliased" else ()
            if not new_ids:
                self.close()
                self._subscription, self.canonical_id = subscription, old_id
                return SubjectUpdate(seq, old_id, projection)
        self._end()
        return SubjectUpdate(seq, old_id, None, tuple(new_ids))

    def _subscribe(self, canonical_id: str) -> HappeningSubscription:
        return self._happenings.subscribe(filter=HappeningFilter(subjects=(canonical_id,)))

    def _end(self) -> None:
        self._is_over = True
        self.close()


def _successors(envelope: Envelope, canonical_id: str) -> Sequence[str]:
    """What a subject became by this, if it did."""
    match envelope.happening:
        case SubjectMerged(source_ids=sources, new_id=new_id) if canonical_id in sources:
            return (new_id,)
        case SubjectMigrated(old_id=old_id, new_id=new_id) if canonical_id == old_id:
            return (new_id,)
        case SubjectSplit(source_id=source_id, new_ids=new_ids) if canonical_id == source_id:
            return new_ids
    return ()
