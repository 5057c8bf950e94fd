"""
The client's end of one sync connection, as a state machine without I/O.

    NEW -start-> CONNECTING -connected-> SYNCING <-> LIVE        any of them -> ENDED

Messages and times come in, effects come out (``client_effects``); nothing here waits, stores or sends. At most one request
is in flight, since an ``error`` does not say which request it answers.

Five rules govern broadcasts while a sync cycle runs:

1. the events of a page are stored as they come, and storing one again changes nothing;
2. a broadcast within the cycle's range is stored at once;
3. a broadcast beyond that range waits (so does any, until the first page has given the range);
4. after the last page those that waited are stored, lowest id first;
5. if they were lost, by a crash or because too many waited, a cycle from the stored cursor brings them back.

Only pages move a cursor: broadcasts may come in any order, so the highest one seen proves nothing about those below.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec
from msgspec import UNSET, UnsetType

from tidings.wire.sync_frames import (
    CloseCode,
    Connect,
    Connected,
    Disconnect,
    ErrorFrame,
    EventBroadcast,
    Heartbeat,
    HeartbeatAck,
    ItemError,
    ItemResult,
    Limits,
    MalformedFrame,
    ServerPayload,
    StateSnapshot,
    SubmitEvents,
    SubmitItem,
    SubmitResult,
    Sync,
    SyncResponse,
    UnknownMessageType,
    UnsupportedVersion,
    VersionChanged,
    decode_from_server,
)

from .client_effects import (
    AdoptSnapshot,
    CaughtUp,
    Delayed,
    Effect,
    End,
    Ended,
    GapFound,
    ItemCommitted,
    ItemRejected,
    ItemVerdict,
    ModelNoted,
    PartitionRefused,
    PartitionRestored,
    ResetHistory,
    ResetReason,
    SendMessage,
    StoreEvents,
    StorePage,
    StoreVerdicts,
)
from .client_planning import Batcher, BroadcastBuffer, Cycle, plan_cycles
from .settings import ClientSettings

_ID_MAX: Final = 2**63 - 1
_DELAY_S_MIN: Final = 0.01
_DELAY_S_MAX: Final = 30.0


def has_sane_ids(payload: ServerPayload) -> bool:
    """Whether committed ids lie where ids lie: from 1, and within what a database holds."""
    match payload:
        case EventBroadcast():
            return 0 < payload.committed_id <= _ID_MAX
        case SyncResponse():
            bounds = [payload.next_since_committed_id, payload.sync_to_committed_id]
            if isinstance(payload.snapshot, StateSnapshot):
                bounds.append(payload.snapshot.committed_id)
            return all(0 <= each <= _ID_MAX for each in bounds) and all(
                0 < event.committed_id <= _ID_MAX for event in payload.events
            )
        case SubmitResult():
            ids = [each.committed_id for each in payload.results if isinstance(each.committed_id, int)]
            return all(0 < each <= _ID_MAX for each in ids)
        case _:
            return True


def retry_after_s(frame: ErrorFrame) -> float | None:
    """How long the server asks to wait, within reason; ``None`` if it does not say."""
    delay_ms = None if isinstance(frame.details, UnsetType) else frame.details.get("retry_after_ms")
    if not isinstance(delay_ms, int | float):
        return None
    return min(max(delay_ms / 1000, _DELAY_S_MIN), _DELAY_S_MAX)


def forbidden_names(frame: ErrorFrame) -> frozenset[str]:
    """The partitions that the server names as not allowed; none if it names none."""
    names = None if isinstance(frame.details, UnsetType) else frame.details.get("partitions")
    return frozenset(name for name in names if isinstance(name, str)) if isinstance(names, list) else frozenset()


_SYNC_LIMIT_UNSAID: Final = (50, 1000)
_RATE_DELAY_S: Final = 0.25
_RATE_DELAY_S_MAX: Final = 30.0


class Phase(enum.StrEnum):
    """The phase of a session."""

    NEW = "new"
    CONNECTING = "connecting"
    SYNCING = "syncing"
    LIVE = "live"
    ENDED = "ended"


class _Request(msgspec.Struct):
    """The one request under way."""

    payload: Connect | Sync | SubmitEvents
    sent_at: float
    retry_at: float | None = None
    """Set while the server has asked to wait."""
    delays: int = 0
    known_id: int = 0
    """The highest committed id that was known when the request was sent."""


class ClientSession:
    """
    One connection's dialogue.

    Args:
        client_id: Who this is; the token must say the same.
        cursors: The partitions to follow, each with the id up to which its events are stored.
        model_version: The model version of what is stored, if one was noted.
        settings: Bounds and times.
        supported_profiles: The profiles that the drafts may be of.
        required_profile: The one profile that will do, if only one does.
        wants_snapshot: Whether a state of the server may replace history that was never fetched.
        rng: Randomness, for how long to wait when the server is overloaded.
    """

    def __init__(
        self,
        client_id: str,
        cursors: Mapping[str, int],
        *,
        model_version: int | None = None,
        settings: ClientSettings | None = None,
        supported_profiles: Sequence[str] = ("canonical", "compatibility"),
        required_profile: str | None = None,
        wants_snapshot: bool = False,
        rng: random.Random | None = None,
    ) -> None:
        self.phase = Phase.NEW
        self.accepted_event_types: frozenset[str] = frozenset()
        self.profile = ""
        self.model_version = model_version
        self.ignored_messages = 0
        self._client_id = client_id
        self._cursors = dict(cursors)
        self._settings = settings or ClientSettings()
        self._supported_profiles = list(supported_profiles)
        self._required_profile = required_profile
        self._wants_snapshot = wants_snapshot
        self._rng = rng or random.Random()
        self._refused: dict[str, int] = {}
        """Partitions that the server has refused, each with the id up to which its events are stored."""
        self._limits = Limits()
        self._request: _Request | None = None
        self._cycle: Cycle | None = None
        self._cycles: list[Cycle] = []
        self._buffer = BroadcastBuffer(self._settings.buffer_events_max)
        self._subscribed: frozenset[str] | None = None
        self._is_probing = False
        self._allowed: set[str] = set()
        self._wants_cycle = False
        self._was_replaced = False
        self._unpaged_events = 0
        self._known_id = 0
        self._batcher = Batcher(self._settings)
        self._heard_at = self._said_at = 0.0

    # What the shell calls

    def start(self, token: str, now: float) -> list[Effect]:
        """The connection is open: introduce this client."""
        assert self.phase is Phase.NEW
        self.phase = Phase.CONNECTING
        self._heard_at = now
        hello = Connect(
            token=token,
            client_id=self._client_id,
            last_committed_id=max(self._cursors.values(), default=0),
            supported_profiles=self._supported_profiles,
            required_profile=self._required_profile,
        )
        return [self._ask(hello, now)]

    def received(self, message: bytes, now: float) -> list[Effect]:
        """A message came in."""
        if self.phase is Phase.ENDED:
            return []
        self._heard_at = now
        try:
            _, payload = decode_from_server(message)
        except UnknownMessageType:
            self.ignored_messages += 1  # a newer server may say more than this client knows
            return []
        except (MalformedFrame, UnsupportedVersion) as error:
            return [self._end(End.PROTOCOL, message=str(error))]
        if not has_sane_ids(payload):
            return [self._end(End.PROTOCOL, message=f"{payload.TYPE} with an id that is none")]
        match payload:
            case EventBroadcast():
                return self._on_broadcast(payload, now)
            case SyncResponse():
                return self._on_page(payload, now)
            case SubmitResult():
                return self._on_result(payload, now)
            case Connected():
                return self._on_connected(payload, now)
            case ErrorFrame():
                return self._on_error(payload, now)
            case VersionChanged():
                return self._on_model(payload.new_model_version, now)
            case HeartbeatAck():
                return []

    @property
    def can_submit(self) -> bool:
        """Whether drafts would be sent now: all is caught up and nothing else is under way."""
        return self.phase is Phase.LIVE and self._request is None

    def submit(self, items: Iterable[SubmitItem], now: float) -> list[Effect]:
        """
        SendMessage drafts, as many from the front as the limits allow; the caller offers the others again later.

        A draft that no message could hold is rejected here, so that it does not block those behind it.
        """
        assert self.can_submit
        batch, too_large = self._batcher.choose(items)
        effects: list[Effect] = []
        if too_large:
            effects.append(StoreVerdicts([ItemRejected(item.id, "too_large", ()) for item in too_large]))
        if batch:
            effects.append(self._ask(SubmitEvents(events=batch), now))
        return effects

    def follow(self, cursors: Mapping[str, int], now: float) -> list[Effect]:
        """Follow exactly these partitions from now on."""
        self._cursors = dict(cursors)
        self._refused.clear()
        self._wants_cycle = True
        self._is_probing = False
        return self._go_on(now) if self.can_submit else []

    def history_replaced(self, now: float) -> list[Effect]:
        """The server has another event at a committed id that is stored here: nothing stored counts."""
        if self.phase is Phase.ENDED:
            return []
        if self._was_replaced:
            # A server that contradicts itself within one connection; starting over again and again would not end.
            return [self._end(End.PROTOCOL, message="two events with one committed id")]
        self._was_replaced = True
        reset = self._reset(ResetReason.HISTORY_REPLACED)
        return [reset, *(self._go_on(now) if self._request is None else [])]

    def tick(self, now: float) -> list[Effect]:
        """Do what is due at ``now``; ``next_due`` says when that is."""
        if self.phase in (Phase.NEW, Phase.ENDED):
            return []
        request, settings = self._request, self._settings
        if now >= self._heard_at + settings.silence_s_max:
            return [self._end(End.SILENT, message=f"no sign of life for {settings.silence_s_max:g} s")]
        if request is not None:
            if request.retry_at is not None and now >= request.retry_at:
                request.retry_at, request.sent_at, request.known_id = None, now, self._known_id
                return [self._say(request.payload, now)]
            if request.retry_at is None and now >= request.sent_at + settings.answer_s_max:
                return [
                    self._end(End.SILENT, message=f"no answer to {request.payload.TYPE} in {settings.answer_s_max:g} s")
                ]
        if now >= self._said_at + settings.heartbeat_s:
            return [self._say(Heartbeat(), now)]
        return []

    def next_due(self) -> float | None:
        """When ``tick`` has something to do, if nothing else happens; ``None`` once the session is over."""
        if self.phase in (Phase.NEW, Phase.ENDED):
            return None
        due = min(self._heard_at + self._settings.silence_s_max, self._said_at + self._settings.heartbeat_s)
        if self._request is not None:
            answer_due = self._request.sent_at + self._settings.answer_s_max
            due = min(due, answer_due if self._request.retry_at is None else self._request.retry_at)
        return due

    def leave(self, reason: str, now: float) -> list[Effect]:
        """Disconnect."""
        if self.phase in (Phase.NEW, Phase.ENDED):
            return []
        return [self._say(Disconnect(reason=reason), now), self._end(End.LEFT)]

    def closed(self, code: int | None = None, message: str = "") -> list[Effect]:
        """The connection is gone; ``code`` is the server's close code, if it gave one."""
        if self.phase is Phase.ENDED:
            return []
        match code:
            case CloseCode.REPLACED:
                return [self._end(End.REPLACED, message="another client connected with the same client id")]
            case CloseCode.AUTH_FAILED | CloseCode.TOKEN_EXPIRED:
                return [self._end(End.AUTH_FAILED, message=message)]
            case _:
                return [self._end(End.LOST, message=message)]

    # Messages

    def _on_connected(self, frame: Connected, now: float) -> list[Effect]:
        if self.phase is not Phase.CONNECTING:
            return [self._end(End.PROTOCOL, message="connected twice")]
        if frame.client_id != self._client_id:
            return [self._end(End.AUTH_FAILED, "client_id", f"the server took this client for {frame.client_id!r}")]
        self._request = None
        self.profile = frame.capabilities.profile
        self.accepted_event_types = frozenset(frame.capabilities.accepted_event_types)
        if isinstance(frame.limits, Limits):
            self._limits = frame.limits
            self._batcher.advertised(frame.limits)
        self._known_id = frame.server_last_committed_id
        self.phase = Phase.SYNCING
        self._wants_cycle = True
        effects = self._noted_model(frame.model_version)
        return effects + self._go_on(now)

    def _on_page(self, frame: SyncResponse, now: float) -> list[Effect]:
        request = self._request
        if (
            request is None
            or not isinstance(request.payload, Sync)
            or set(frame.partitions) != set(request.payload.partitions)
        ):
            # The answer to a request that was given up when a right was lost. Nothing in it is missed: what still counts
            # was asked for again.
            self.ignored_messages += 1
            return []
        self._request = None
        self._subscribed = frozenset(frame.effective_subscriptions)
        self._known_id = max(self._known_id, frame.sync_to_committed_id)
        effects = self._noted_model(frame.model_version)
        cycle = self._cycle
        if cycle is None:
            # History was reset after this page was asked for, or by it: it continues from a cursor that counts no more.
            return effects + self._go_on(now)
        self._allowed.update(cycle.partitions)
        is_first = cycle.sync_to is None
        if is_first and any(self._cursors.get(name, 0) > frame.sync_to_committed_id for name in cycle.partitions):
            return [*effects, self._reset(ResetReason.FUTURE_CURSOR), *self._go_on(now)]
        return effects + self._take_page(cycle, request.payload, frame, now)

    def _take_page(self, cycle: Cycle, request: Sync, frame: SyncResponse, now: float) -> list[Effect]:
        if frame.has_more and frame.next_since_committed_id <= request.since_committed_id:
            return [self._end(End.PROTOCOL, message="a page that says there is more and does not move on")]
        effects: list[Effect] = []
        if cycle.sync_to is None:
            cycle.sync_to = frame.sync_to_committed_id
            pruned = frame.pruned_through_committed_id
            if isinstance(pruned, int) and pruned > request.since_committed_id:
                effects.append(GapFound(cycle.partitions, request.since_committed_id, pruned))
            if request.want_snapshot and isinstance(frame.snapshot, StateSnapshot):
                effects.append(AdoptSnapshot(frame.snapshot.committed_id, frame.snapshot.state))
        reached = frame.next_since_committed_id
        if not frame.has_more:
            # Everything up to the cycle's end was given, and ids only rise: nothing can appear below it any more. Without
            # this, a partition at rest would be asked for from its last event for ever, and never together with a busy one.
            reached = max(reached, cycle.sync_to)
        cursors = {name: max(reached, self._cursors[name]) for name in cycle.partitions if name in self._cursors}
        self._cursors.update(cursors)
        effects.append(StorePage(frame.events, cursors))
        if within := self._buffer.take_through(cycle.sync_to):
            effects.append(StoreEvents(within))
        if frame.has_more:
            cycle.since = reached
            effects.append(self._ask_page(cycle, now))
            return effects
        self._cycle = None
        if waiting := self._buffer.take_all():
            self._unpaged_events += len(waiting)
            effects.append(StoreEvents(waiting))
        self._wants_cycle = self._wants_cycle or self._buffer.was_lost
        return effects + self._go_on(now)

    def _on_broadcast(self, frame: EventBroadcast, now: float) -> list[Effect]:
        self._known_id = max(self._known_id, frame.committed_id)
        if restored := self._restored(frame.partitions):
            self._buffer.add(frame)
            return [*restored, *(self._go_on(now) if self._request is None else [])]
        if self.phase is Phase.LIVE:
            self._unpaged_events += 1
            return [StoreEvents([frame]), *(self._go_on(now) if self._request is None else [])]
        sync_to = None if self._cycle is None else self._cycle.sync_to
        if sync_to is not None and frame.committed_id <= sync_to:
            return [StoreEvents([frame])]
        self._buffer.add(frame)
        return []

    def _restored(self, partitions: Iterable[str]) -> list[Effect]:
        """A broadcast of a refused partition says that it is allowed again; what was committed meanwhile is fetched first."""
        names = sorted(self._refused.keys() & set(partitions))
        self._cursors.update((name, self._refused.pop(name)) for name in names)
        self._wants_cycle = self._wants_cycle or bool(names)
        return [PartitionRestored(name) for name in names]

    def _on_result(self, frame: SubmitResult, now: float) -> list[Effect]:
        request = self._request
        if request is None or not isinstance(request.payload, SubmitEvents):
            return [self._end(End.PROTOCOL, message="a result that nobody asked for")]
        self._request = None
        asked = {item.id for item in request.payload.events}
        results = [result for result in frame.results if result.id in asked]
        if any(result.status == "committed" and not isinstance(result.committed_id, int) for result in results):
            # Neither verdict would be true: the draft keeps waiting, and asking again tells its place.
            return [self._end(End.PROTOCOL, message="a draft committed at no place")]
        verdicts = [self._verdict(result, request) for result in results]
        if not verdicts:
            # Without this, the same batch would go back and forth as fast as the network allows.
            return [self._end(End.PROTOCOL, message="a result that decides none of the drafts sent")]
        self._batcher.answered()
        self._unpaged_events += len(verdicts)
        return [StoreVerdicts(verdicts), *self._go_on(now)]

    def _verdict(self, result: ItemResult, request: _Request) -> ItemVerdict:
        if isinstance(result.committed_id, int) and result.status == "committed":
            self._known_id = max(self._known_id, result.committed_id)
            was_duplicate = result.committed_id <= request.known_id
            return ItemCommitted(result.id, result.committed_id, result.status_updated_at, was_duplicate)
        errors = () if isinstance(result.errors, UnsetType) else tuple(result.errors)
        return ItemRejected(result.id, "rejected" if isinstance(result.reason, UnsetType) else result.reason, errors)

    def _on_model(self, model_version: int, now: float) -> list[Effect]:
        effects = self._noted_model(model_version)
        # A request under way is answered first; its answer then starts the cycles.
        return effects + (self._go_on(now) if self._request is None and self.phase is not Phase.CONNECTING else [])

    def _on_error(self, frame: ErrorFrame, now: float) -> list[Effect]:
        match frame.code:
            case "auth_failed":
                return [self._end(End.AUTH_FAILED, frame.code, frame.message)]
            case "protocol_version_unsupported" | "profile_unsupported":
                return [self._end(End.UNSUPPORTED, frame.code, frame.message)]
            case "server_error":
                return [self._end(End.SERVER_ERROR, frame.code, frame.message)]
            case "rate_limited":
                return self._on_rate_limited(frame, now)
            case "forbidden" if names := forbidden_names(frame):
                return self._on_rights_lost(names, now)
        request = self._request
        if request is None:
            self.ignored_messages += 1
            return []
        if isinstance(request.payload, SubmitEvents):
            return self._on_batch_refused(request.payload, frame, now)
        if isinstance(request.payload, Sync) and frame.code == "forbidden":
            return self._on_sync_forbidden(now)
        return [self._end(End.PROTOCOL, frame.code, frame.message)]

    def _on_rights_lost(self, names: frozenset[str], now: float) -> list[Effect]:
        """The server says which partitions are not allowed: in answer to a sync, or because a right was taken away."""
        effects = self._refuse(sorted(names))
        request = self._request
        if request is None or not isinstance(request.payload, Sync):
            return effects
        wanted = request.payload.subscription_partitions
        if names.isdisjoint([*request.payload.partitions, *(() if isinstance(wanted, UnsetType) else wanted)]):
            return effects
        # Whether this is the answer or came on its own cannot be known; the answer may still follow, and is ignored.
        self._request = self._cycle = None
        self._cycles.clear()
        self._wants_cycle = True
        return effects + self._go_on(now)

    def _on_rate_limited(self, frame: ErrorFrame, now: float) -> list[Effect]:
        request = self._request
        delay_s = retry_after_s(frame)
        if request is None:
            return []
        if isinstance(request.payload, Connect):
            return [self._end(End.OVERLOADED, frame.code, frame.message, delay_s)]
        # Never before the server said; beyond that longer each time, and at random, so that clients that were refused
        # together do not come back together.
        longest_s = min(_RATE_DELAY_S * 2 ** min(request.delays, 16), _RATE_DELAY_S_MAX)
        request.delays += 1
        delay_s = (delay_s or 0.0) + self._rng.uniform(longest_s / 2, longest_s)
        request.retry_at = now + delay_s
        return [Delayed(delay_s)]

    def _on_batch_refused(self, batch: SubmitEvents, frame: ErrorFrame, now: float) -> list[Effect]:
        self._request = None
        if self._batcher.refused(len(batch.events)):
            return self._go_on(now)
        return [
            StoreVerdicts([ItemRejected(batch.events[0].id, frame.code, (ItemError(message=frame.message),))]),
            *self._go_on(now),
        ]

    def _on_sync_forbidden(self, now: float) -> list[Effect]:
        cycle = self._cycle
        self._request = self._cycle = None
        if cycle is None:
            return self._go_on(now)
        if len(self._cursors) > 1 and not self._is_probing:
            # One name is enough to refuse them all, and the answer need not say which: one by one then.
            self._is_probing = self._wants_cycle = True
            self._allowed.clear()
            self._cycles.clear()
            return self._go_on(now)
        return [*self._refuse(cycle.partitions), *self._go_on(now)]

    def _refuse(self, names: Iterable[str]) -> list[Effect]:
        refused = [name for name in names if name in self._cursors]
        self._refused.update((name, self._cursors.pop(name)) for name in refused)
        return [PartitionRefused(name) for name in refused]

    # Steps

    def _go_on(self, now: float) -> list[Effect]:
        """With no request under way: the next cycle if one is wanted, else drafts may be sent."""
        assert self._request is None
        # Only from LIVE: right after a cycle drafts are sent first, however many broadcasts came meanwhile.
        if self.phase is Phase.LIVE and self._unpaged_events >= self._settings.refresh_events:
            self._wants_cycle = True
        if self._wants_cycle and not self._cycles:
            self._wants_cycle = self._buffer.was_lost = False
            self._unpaged_events = 0
            self._cycles = plan_cycles(self._cursors, -1 if self._is_probing else self._settings.cursor_gap_max)
        if self._cycles:
            self._cycle = self._cycles.pop(0)
            self.phase = Phase.SYNCING
            return [self._ask_page(self._cycle, now)]
        if self.phase is Phase.LIVE:
            return []
        self.phase = Phase.LIVE
        self._is_probing = False
        # What waited while there was no cycle to wait for: a client that follows nothing gets nothing, but one whose only
        # partition was refused may have some left.
        left = self._buffer.take_all()
        return [*([StoreEvents(left)] if left else []), CaughtUp(min(self._cursors.values(), default=self._known_id))]

    def _ask_page(self, cycle: Cycle, now: float) -> SendMessage:
        wanted = frozenset(self._allowed | set(cycle.partitions)) if self._is_probing else frozenset(self._cursors)
        # A partition that was refused stays asked for: should the right come back, so do the broadcasts.
        is_subscribed = self._subscribed is not None and wanted == self._subscribed - self._refused.keys()
        low = self._limits.sync_limit_min or _SYNC_LIMIT_UNSAID[0]
        high = self._limits.sync_limit_max or _SYNC_LIMIT_UNSAID[1]
        page = Sync(
            partitions=list(cycle.partitions),
            since_committed_id=cycle.since,
            # Absent means unchanged.
            subscription_partitions=UNSET if is_subscribed else sorted(wanted, key=str.encode),
            limit=max(low, min(self._settings.page_events, high)),
            # A state of some partitions would not do: the view is one, and what it shows is complete up to one id.
            want_snapshot=self._wants_snapshot and cycle.since == 0 and set(cycle.partitions) == self._cursors.keys(),
        )
        return self._ask(page, now)

    def _noted_model(self, model_version: int | UnsetType) -> list[Effect]:
        if isinstance(model_version, UnsetType) or model_version == self.model_version:
            return []
        is_first = self.model_version is None
        self.model_version = model_version
        noted = ModelNoted(model_version)
        return [noted] if is_first else [self._reset(ResetReason.MODEL_CHANGED), noted]

    def _reset(self, reason: ResetReason) -> ResetHistory:
        self._cursors = dict.fromkeys(self._cursors, 0)
        self._refused = dict.fromkeys(self._refused, 0)
        self._cycle = None
        self._cycles.clear()
        self._wants_cycle = True
        return ResetHistory(reason)

    def _ask(self, payload: Connect | Sync | SubmitEvents, now: float) -> SendMessage:
        self._request = _Request(payload, now, known_id=self._known_id)
        return self._say(payload, now)

    def _say(self, payload: Connect | Sync | SubmitEvents | Heartbeat | Disconnect, now: float) -> SendMessage:
        self._said_at = now
        return SendMessage(payload)

    def _end(self, end: End, code: str = "", message: str = "", retry_after_s: float | None = None) -> Ended:
        self.phase = Phase.ENDED
        self._request = self._cycle = None
        return Ended(end, code, message, retry_after_s)
