"""
What users of the sync client hold: events, drafts with their verdicts, changes, status; and how a draft is made and compared.

Two events are equal if their normalised partitions and the canonical JSON (RFC 8785) of their ``event`` are equal.
The check of a new draft finds what no server would ever take; a server may ask for more.
"""

from __future__ import annotations

import asyncio
import enum
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec
import rfc8785

from tidings.core.clock import Clock, within
from tidings.core.errors import InvalidName
from tidings.core.names import check_event_id, check_partitions
from tidings.sync.canonical import is_same_json
from tidings.sync.client_effects import ResetReason
from tidings.wire.sync_frames import CommittedEvent, ItemError, SubmitItem

from .errors import InvalidDraft


class LocalEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One event of the local view: committed, or still a draft."""

    id: str
    type: str
    payload: Mapping[str, Any]
    partitions: tuple[str, ...]
    client_id: str
    committed_id: int | None = None
    """Its place in the server's order; ``None`` while it is a draft."""
    committed_at_ms: float | None = None

    @property
    def is_draft(self) -> bool:
        """Whether the server's verdict is still open."""
        return self.committed_id is None


class Committed(msgspec.Struct, frozen=True, tag="committed"):
    """The server has the event for good, at this place in its order."""

    committed_id: int
    was_duplicate: bool = False
    """An earlier submission of the same draft had got through, and only its answer was lost. The event exists once."""


class Rejected(msgspec.Struct, frozen=True, tag="rejected"):
    """The server will not take the event as it is. It is in quarantine."""

    code: str
    errors: tuple[ItemError, ...] = ()


class Pending(msgspec.Struct, frozen=True, tag="pending"):
    """There is no verdict yet: the event is stored here and is sent as soon as the server can be reached."""

    attempts: int = 0
    """How often it was sent since the client was opened."""


Verdict = Committed | Rejected | Pending


class QuarantinedDraft(msgspec.Struct, frozen=True):
    """A rejected draft, with all that is needed to mend and submit it again."""

    event: LocalEvent
    verdict: Rejected
    rejected_at_ms: int


class EventCommitted(msgspec.Struct, frozen=True, tag="event_committed"):
    """An event is committed and stored here."""

    event: LocalEvent
    is_own: bool
    """It was a draft of this client."""


class DraftRejected(msgspec.Struct, frozen=True, tag="draft_rejected"):
    """A draft was rejected, and left the view."""

    event: LocalEvent
    verdict: Rejected


class HistoryReset(msgspec.Struct, frozen=True, tag="history_reset"):
    """What was synced before counts no more; everything is fetched again."""

    reason: ResetReason


class GapReported(msgspec.Struct, frozen=True, tag="gap_reported"):
    """The server no longer has all events of these partitions after ``since`` and up to ``pruned_through``."""

    partitions: tuple[str, ...]
    since: int
    pruned_through: int


class ChangesMissed(msgspec.Struct, frozen=True, tag="changes_missed"):
    """The listener was too slow and this many changes were dropped; ``events`` and ``view`` have their outcome."""

    count: int


Change = EventCommitted | DraftRejected | HistoryReset | GapReported | ChangesMissed


class State(enum.StrEnum):
    """What the client is doing about its connection."""

    CLOSED = "closed"
    WAITING = "waiting"
    """Offline, until the next attempt."""
    CONNECTING = "connecting"
    SYNCING = "syncing"
    LIVE = "live"
    STOPPED = "stopped"
    """It will not try again; ``ClientStatus.problem`` says why."""


class ClientStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How the client is doing, at one moment."""

    state: State
    pending_count: int
    quarantined_count: int
    orphan_count: int
    """Events that were committed here before a reset, and that the server has not shown again."""
    caught_up_to: int | None
    """The committed id up to which everything followed was stored, when the last sync cycle ended."""
    refused_partitions: frozenset[str]
    """Partitions that the server does not let this client sync."""
    attempts: int
    """Attempts to connect since the last one that worked."""
    problem: str | None
    """The last thing that went wrong with the connection, if it has not been mended."""


Validator = Callable[[LocalEvent], Sequence[ItemError] | None]
"""A user's own check of a draft: what is wrong with it, or nothing."""


class _Body(msgspec.Struct):
    type: str
    payload: dict[str, Any]


_BODY: Final = msgspec.json.Decoder(_Body)


def make_item(
    id: str, partitions: Iterable[str], type: str, payload: Mapping[str, Any], *, bytes_max: int
) -> SubmitItem:
    """
    A draft ready to be stored, with its partitions normalised.

    Raises:
        InvalidDraft: It could never be committed.
    """
    errors: list[ItemError] = []
    names: tuple[str, ...] = ()
    try:
        check_event_id(id)
    except InvalidName as error:
        errors.append(ItemError(field="id", message=error.problem))
    try:
        names = check_partitions(partitions)
        if not names:
            errors.append(ItemError(field="partitions", message="must name at least one partition"))
    except InvalidName as error:
        errors.append(ItemError(field="partitions", message=error.problem))
    if not isinstance(type, str) or not type:
        errors.append(ItemError(field="event.type", message="must be a non-empty string"))
    elif type == "init":
        errors.append(ItemError(field="event.type", message="init never crosses the wire"))
    if not isinstance(payload, Mapping):
        errors.append(ItemError(field="event.payload", message="must be a mapping"))
    encoded = b""
    if not errors:
        try:
            # What has no canonical form (NaN, integers beyond 2^53, lone surrogates) could not be compared on a retry.
            body: Any = {"type": type, "payload": dict(payload)}
            rfc8785.dumps(body)
            # Not the canonical form itself: it would turn a 1.0 into a 1.
            encoded = msgspec.json.encode(body)
        except (rfc8785.CanonicalizationError, RecursionError, TypeError, ValueError) as error:
            errors.append(ItemError(field="event.payload", message=str(error)[:200]))
    if len(encoded) > bytes_max:
        errors.append(
            ItemError(field="event.payload", message=f"is {len(encoded)} bytes long; at most {bytes_max} are sent")
        )
    if errors:
        raise InvalidDraft(errors)
    return SubmitItem(id=id, partitions=list(names), event=msgspec.Raw(encoded))


def local_event(event: CommittedEvent | SubmitItem, client_id: str) -> LocalEvent:
    """The event as users see it."""
    body = _body(event.event)
    committed_id, at_ms = None, None
    if isinstance(event, CommittedEvent):
        committed_id, at_ms = event.committed_id, event.status_updated_at
    return LocalEvent(
        id=event.id,
        type=body.type,
        payload=body.payload,
        partitions=tuple(event.partitions),
        client_id=client_id,
        committed_id=committed_id,
        committed_at_ms=at_ms,
    )


def _body(raw: msgspec.Raw) -> _Body:
    try:
        return _BODY.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        # A server newer than this client, or a careless one, may commit events of another shape. They are kept and shown as
        # text, not understood; refusing them would stop this client for good.
        return _Body("unknown", {"text": bytes(raw).decode(errors="replace")})


def same_content(one: SubmitItem | CommittedEvent, other: SubmitItem | CommittedEvent) -> bool:
    """Whether two events with one id say the same."""
    if check_partitions(one.partitions) != check_partitions(other.partitions):
        return False
    if bytes(one.event) == bytes(other.event):
        return True
    try:
        return is_same_json(msgspec.json.decode(one.event), msgspec.json.decode(other.event))
    except (msgspec.DecodeError, RecursionError):
        return False


class Draft:
    """
    An event that was handed to the client. It is stored locally by the time one holds this.

    Forgetting the draft changes nothing: it is sent all the same, and ``SyncClient.draft`` finds it again by its id.
    """

    def __init__(self, event: LocalEvent, verdict: Verdict, clock: Clock) -> None:
        self.event = event
        self._verdict = verdict
        self._clock = clock
        self._changed: list[asyncio.Future[None]] = []
        self._is_abandoned = False

    @property
    def id(self) -> str:
        """The event's id: made here, and the same on every submission."""
        return self.event.id

    @property
    def verdict(self) -> Verdict:
        """What is known now."""
        return self._verdict

    async def settled(self, timeout_s: float | None = None) -> Verdict:
        """
        The server's verdict, once there is one.

        Args:
            timeout_s: How long to wait for it at most, however often the event is sent in that time.

        Returns:
            ``Committed`` or ``Rejected``; ``Pending`` if the time was up or the client was closed before.
        """
        ends_at = None if timeout_s is None else self._clock.monotonic() + timeout_s
        while isinstance(self._verdict, Pending) and not self._is_abandoned:
            changed = asyncio.get_running_loop().create_future()
            self._changed.append(changed)
            if ends_at is None:
                await changed
            elif not await within(self._clock, max(0.0, ends_at - self._clock.monotonic()), changed):
                break
        return self._verdict

    def note(self, verdict: Verdict) -> None:
        """For the client: note a verdict and wake those who wait for it."""
        self._verdict = verdict
        self._wake()

    def abandon(self) -> None:
        """For the client: no verdict will come any more."""
        self._is_abandoned = True
        self._wake()

    def _wake(self) -> None:
        waiting, self._changed = self._changed, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    def __repr__(self) -> str:
        return f"Draft(id={self.id!r}, type={self.event.type!r}, verdict={self._verdict!r})"


class Changes:
    """
    One listener's changes, an async iterator. It listens from the moment it is made, and ends when the client closes.

    A listener that is too slow loses the oldest changes and gets a ``ChangesMissed`` in their place.
    """

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        self._waiting: deque[Change] = deque()
        self._missed_count = 0
        self._is_over = False
        self._arrived: asyncio.Future[None] | None = None

    def __aiter__(self) -> Changes:
        return self

    async def __anext__(self) -> Change:
        while True:
            if self._missed_count:
                missed, self._missed_count = self._missed_count, 0
                return ChangesMissed(missed)
            if self._waiting:
                return self._waiting.popleft()
            if self._is_over:
                raise StopAsyncIteration
            self._arrived = asyncio.get_running_loop().create_future()
            await self._arrived

    def put(self, change: Change) -> None:
        """Queue a change for the listener."""
        if len(self._waiting) == self._count_max:
            self._waiting.popleft()
            self._missed_count += 1
        self._waiting.append(change)
        self._wake()

    def end(self) -> None:
        """End the iteration."""
        self._is_over = True
        self._wake()

    def _wake(self) -> None:
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)


class ChangeFeed:
    """All listeners of one client. One that nobody holds any more is forgotten."""

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        self._listeners: weakref.WeakSet[Changes] = weakref.WeakSet()

    def listen(self) -> Changes:
        """A new listener."""
        changes = Changes(self._count_max)
        self._listeners.add(changes)
        return changes

    def tell(self, change: Change) -> None:
        """Queue a change for all of them."""
        for listener in self._listeners:
            listener.put(change)

    def end(self) -> None:
        """End all of them."""
        for listener in self._listeners:
            listener.end()
