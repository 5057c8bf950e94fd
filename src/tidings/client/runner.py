"""
The shell around sessions: connects, carries out what a session decides, and connects again.

One task does it all, so effects are carried out in the order in which they were decided. Whatever breaks, drafts and
cursors are in the store, and the next session begins from there.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tidings.core.clock import Clock, within
from tidings.core.errors import TidingsError
from tidings.core.tasks import cancel_and_wait
from tidings.sync.client_effects import (
    AdoptSnapshot,
    CaughtUp,
    Delayed,
    Effect,
    End,
    Ended,
    GapFound,
    ModelNoted,
    PartitionRefused,
    PartitionRestored,
    ResetHistory,
    SendMessage,
    StoreEvents,
    StorePage,
    StoreVerdicts,
)
from tidings.sync.client_session import ClientSession
from tidings.sync.settings import ClientSettings
from tidings.wire.sync_frames import CommittedEvent, SubmitEvents, encode

from .drafts import State
from .errors import ClientStopped, LinkClosed, StoreError
from .link import Alarm, Connector, Link, TokenSource, fresh_token, open_link
from .reconnecting import full_jitter
from .replica import Replica

logger = logging.getLogger(__name__)


class Runner:
    """Keeps one client connected."""

    def __init__(
        self,
        replica: Replica[Any],
        connector: Connector,
        url: str,
        token: TokenSource,
        settings: ClientSettings,
        clock: Clock,
        rng: random.Random,
        supported_profiles: Sequence[str],
        required_profile: str | None,
    ) -> None:
        self.state = State.CLOSED
        self.stopped: ClientStopped | None = None
        self.problem: str | None = None
        self.attempts = 0
        self.caught_up_to: int | None = None
        self.refused_partitions: set[str] = set()
        self.accepted_event_types: frozenset[str] = frozenset()
        self.changed: Callable[[], None] = lambda: None
        """Called whenever one of the above may be another."""
        self._replica = replica
        self._connector = connector
        self._url = url
        self._token = token
        self._settings = settings
        self._clock = clock
        self._rng = rng
        self._profiles = supported_profiles
        self._required_profile = required_profile
        self._session: ClientSession | None = None
        self._link: Link | None = None
        self._wake = asyncio.Event()
        self._resume = asyncio.Event()
        self._is_leaving = False
        self._was_live = False
        self._auth_failures = 0
        self._messages_sent = 0
        # Held while effects are carried out, so that a change of partitions comes between two of them and not within.
        self._lock = asyncio.Lock()

    def wake(self) -> None:
        """There are drafts to send. Without a connection they wait for the next one."""
        self._wake.set()

    def hurry(self) -> None:
        """Try to connect now instead of when the pause is over; for when the network is known to be back."""
        if self.state is State.WAITING:
            self._resume.set()

    def leave(self) -> None:
        """Disconnect; ``run`` then returns."""
        self._is_leaving = True
        self._wake.set()
        self._resume.set()

    async def follow(self, partitions: Iterable[str]) -> None:
        """Follow exactly these partitions from now on."""
        async with self._lock:
            cursors = await self._replica.follow(partitions)
            self.refused_partitions.clear()
            if self._session is not None and self._link is not None:
                await self._carry_out(self._session.follow(cursors, self._clock.monotonic()), self._session, self._link)

    async def run(self) -> None:
        """Stay connected until ``leave``, or until there is no point in trying."""
        try:
            while not self._is_leaving:
                ended = await self._attempt()
                if ended.end is End.LEFT:
                    break
                delay_s = self._decide(ended)
                if self.stopped is not None:
                    return
                self.problem = f"{ended.end}: {ended.message or ended.code}"
                logger.info("offline (%s), next attempt in %.2f s", self.problem, delay_s)
                await self._pause(delay_s)
            self._set_state(State.CLOSED)
        except StoreError as error:
            self._stop("store", error.describe(), error.hint)
        except asyncio.CancelledError:
            self._set_state(State.CLOSED)
            raise
        finally:
            if self.state not in (State.CLOSED, State.STOPPED):
                self._stop("failed", "the client's own task ended unexpectedly; its log says why")

    # Between connections

    def _decide(self, ended: Ended) -> float:
        """How long to wait after a session that ended like this; or stop."""
        if ended.end is End.UNSUPPORTED:
            self._stop(ended.code, ended.message, "the server and this client have no version or profile in common")
            return 0.0
        if ended.end is End.REPLACED:
            self._stop(ended.end, ended.message, "give each running client a client id of its own")
            return 0.0
        if ended.end is End.AUTH_FAILED:
            self._auth_failures += 1
            if isinstance(self._token, str):
                self._stop(ended.code or "auth_failed", ended.message, "give a callable that returns a fresh token")
                return 0.0
            if self._auth_failures == 1:
                return 0.0  # the usual case: the token has expired, and a new one does
        is_mended = self._was_live and ended.end is not End.PROTOCOL
        self.attempts = 0 if is_mended else self.attempts + 1
        delay_s = full_jitter(self.attempts, self._settings.retry_s_min, self._settings.retry_s_max, self._rng)
        return delay_s + (ended.retry_after_s or 0.0)

    async def _pause(self, delay_s: float) -> None:
        self._set_state(State.WAITING)
        resuming = asyncio.ensure_future(self._resume.wait())
        await within(self._clock, delay_s, resuming)
        resuming.cancel()
        self._resume.clear()

    def _stop(self, reason: str, message: str, hint: str | None = None) -> None:
        self.stopped = ClientStopped(reason, message, hint)
        self.problem = str(self.stopped)
        logger.error("%s", self.stopped)
        self._set_state(State.STOPPED)

    def _set_state(self, state: State) -> None:
        self.state = state
        self.changed()

    # One connection

    async def _attempt(self) -> Ended:
        self._was_live = False
        self._set_state(State.CONNECTING)
        try:
            token = await fresh_token(self._token)
            link = await open_link(self._connector, self._url, self._clock, self._settings.connect_s_max)
        except (TidingsError, OSError) as error:
            return Ended(End.LOST, message=str(error))
        self._link = link
        try:
            return await self._converse(link, token)
        finally:
            self._session = self._link = None
            await link.close()
            async with self._lock:
                await self._replica.mend_view()

    async def _converse(self, link: Link, token: str) -> Ended:
        session = self._session = ClientSession(
            self._replica.client_id,
            self._replica.cursors,
            model_version=self._replica.model_version,
            settings=self._settings,
            supported_profiles=self._profiles,
            required_profile=self._required_profile,
            wants_snapshot=self._replica.takes_snapshots,
            rng=self._rng,
        )
        alarm = Alarm(self._clock, self._wake.set)
        receiving: asyncio.Task[list[bytes]] | None = None
        ended = await self._carry_out_locked(session.start(token, self._clock.monotonic()), session, link)
        try:
            while ended is None:
                if receiving is None:
                    receiving = asyncio.create_task(link.receive(), name="tidings-client-receive")
                    receiving.add_done_callback(lambda _: self._wake.set())
                alarm.set(session.next_due())
                await self._wake.wait()
                self._wake.clear()
                async with self._lock:
                    now = self._clock.monotonic()
                    effects: list[Effect] = []
                    if receiving.done():
                        effects = self._received(receiving, session, now)
                        receiving = None
                    effects += session.tick(now)
                    ended = await self._carry_out(effects, session, link)
                    if ended is None and self._is_leaving:
                        ended = await self._carry_out(session.leave("client closed", now), session, link)
                    if ended is None:
                        ended = await self._send_drafts(session, link)
        finally:
            alarm.cancel()
            await cancel_and_wait(receiving)
        return ended

    def _received(self, receiving: asyncio.Task[list[bytes]], session: ClientSession, now: float) -> list[Effect]:
        try:
            messages = receiving.result()
        except LinkClosed as closed:
            return session.closed(closed.close_code, str(closed))
        effects: list[Effect] = []
        for message in messages:
            effects += session.received(message, now)
        return effects

    async def _send_drafts(self, session: ClientSession, link: Link) -> Ended | None:
        while session.can_submit:
            items = await self._replica.next_drafts(self._settings.batch_events_max)
            if not items:
                return None
            ended = await self._carry_out(session.submit(items, self._clock.monotonic()), session, link)
            if ended is not None:
                return ended
        return None

    async def _carry_out_locked(self, effects: list[Effect], session: ClientSession, link: Link) -> Ended | None:
        async with self._lock:
            return await self._carry_out(effects, session, link)

    async def _carry_out(self, effects: Sequence[Effect], session: ClientSession, link: Link) -> Ended | None:
        is_consistent = True
        for effect in merged(effects):
            match effect:
                case SendMessage(payload):
                    if isinstance(payload, SubmitEvents):
                        self._replica.note_sent(item.id for item in payload.events)
                    self._messages_sent += 1
                    now_ms = self._clock.now_ns() // 1_000_000
                    link.send(encode(payload, msg_id=f"c{self._messages_sent}", timestamp=now_ms))
                case StorePage() | StoreEvents():
                    is_consistent = is_consistent and await self._replica.store_events(effect)
                case AdoptSnapshot():
                    await self._replica.adopt(effect)
                case StoreVerdicts(verdicts):
                    is_consistent = is_consistent and await self._replica.settle(verdicts)
                case ResetHistory():
                    await self._replica.reset(effect)
                case ModelNoted(model_version):
                    await self._replica.note_model(model_version)
                case GapFound():
                    self._replica.report_gap(effect)
                case PartitionRefused(partition):
                    self.refused_partitions.add(partition)
                case PartitionRestored(partition):
                    self.refused_partitions.discard(partition)
                case Delayed(delay_s):
                    self.problem = f"the server asked to wait for {delay_s:g} s"
                case CaughtUp(sync_to):
                    if not await self._caught_up(sync_to):
                        return await self._carry_out(
                            session.follow(self._replica.cursors, self._clock.monotonic()), session, link
                        )
                case Ended():
                    return effect
        self._note_phase(session)
        if not is_consistent:
            return await self._carry_out(session.history_replaced(self._clock.monotonic()), session, link)
        return None

    async def _caught_up(self, sync_to: int) -> bool:
        if not await self._replica.mend_view():
            return False
        self.caught_up_to = sync_to
        self.problem = None
        self.attempts = self._auth_failures = 0
        self._was_live = True
        return True

    def _note_phase(self, session: ClientSession) -> None:
        self.accepted_event_types = session.accepted_event_types
        # Called even if the state is the same: what was carried out may have changed the view or settled a draft.
        self._set_state(State(session.phase) if session.phase in ("connecting", "syncing", "live") else self.state)


def merged(effects: Sequence[Effect]) -> list[Effect]:
    """The same effects, with broadcasts that follow one another stored together: one wait for the disk."""
    result: list[Effect] = []
    together: list[CommittedEvent] = []
    for effect in effects:
        if isinstance(effect, StoreEvents):
            if not together:
                result.append(StoreEvents(together))
            together.extend(effect.events)
        else:
            together = []
            result.append(effect)
    return result
